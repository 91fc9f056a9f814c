#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

// sums[packed columns] = the sum over K of the weight as stored; for a LayerNorm whose node does not carry them.
Status launch_column_sums(const LinearProblem& problem, float* sums, cudaStream_t stream);

}  // namespace onnxfuse::cuda
