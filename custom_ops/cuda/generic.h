#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

// `row_stats`: RowStats[m] on the device if the problem has a norm.
Status launch_generic(const LinearProblem& problem, const void* row_stats, cudaStream_t stream);

// Whether this device can run the kernels of this build: an error names its architecture and the remedy.
Status check_device();

}  // namespace onnxfuse::cuda
