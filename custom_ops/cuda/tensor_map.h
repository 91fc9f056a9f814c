// TMA descriptors, encoded through the driver entry point so that nothing links libcuda.
#pragma once

#include <cuda.h>

#include "problem.h"

namespace onnxfuse::cuda {

// A row-major matrix [rows, columns] of 16-bit values in boxes of box_rows x 64 columns (128-byte swizzle).
Status encode_matrix(CUtensorMap* map, const void* pointer, DType dtype, int64_t rows, int64_t columns, int box_rows);

// The weight [packed, k]: dimensions (k, block, halves, blocks); a box holds box_rows rows of one half.
Status encode_weight(CUtensorMap* map, const LinearProblem& problem, int box_rows);

// Columns of one gate block: n unless the packing is interleaved.
inline int64_t gate_block(const LinearProblem& p) { return p.gated && p.interleave > 0 ? p.interleave : p.n; }

}  // namespace onnxfuse::cuda
