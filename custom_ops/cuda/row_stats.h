#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

constexpr int64_t kRowStatsBytes = 8;  // {scale, mean} of one row

// Writes RowStats[m] of p.x to `stats` (device memory).
Status launch_row_stats(const LinearProblem& p, void* stats, cudaStream_t stream);

}  // namespace onnxfuse::cuda
