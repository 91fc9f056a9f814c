// Measured plans, by shape.
#pragma once

#include "choose.h"

namespace onnxfuse::cuda {

// Looks (architecture, dtype, op, norm, epilogue, packed columns, K, rows) up in the table shipped with the library and in
// the file that ONNXFUSE_TUNING names (see read_tuning_file), which wins: the plan that was measured with that many rows.
bool find_tuned(const LinearProblem& problem, const Device& device, int64_t rows, Plan* plan);

// M rounded up to 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, or 8192 for all larger ones.
int64_t row_bucket(int64_t m);

}  // namespace onnxfuse::cuda
