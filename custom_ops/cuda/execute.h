// One entry for every kernel family.
#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

// Why the plan cannot run the problem on a device that has its kernels, or an empty string.
std::string refusal(const LinearProblem& problem, const Plan& plan);

// Device scratch the plan needs, 256-byte aligned by the caller.
int64_t scratch_bytes(const LinearProblem& problem, const Plan& plan);

// Enqueues the work; never synchronises. Errors say what failed; the caller adds op, shapes and dtype.
Status execute(const LinearProblem& problem, const Plan& plan, void* scratch, cudaStream_t stream);

}  // namespace onnxfuse::cuda
