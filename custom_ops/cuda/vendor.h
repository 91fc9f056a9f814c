// cuBLASLt for the product, with what it cannot fuse in one kernel before (norm) and one after (the rest).
#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

std::string vendor_refusal(const LinearProblem& problem);
int64_t vendor_scratch_bytes(const LinearProblem& problem);
Status launch_vendor(const LinearProblem& problem, void* scratch, cudaStream_t stream);

}  // namespace onnxfuse::cuda
