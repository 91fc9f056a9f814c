// Checks and times plans of one problem on the current device, with data of its own: what `onnxfuse tune` is made of.
#pragma once

#include <memory>
#include <vector>

#include "problem.h"

namespace onnxfuse::cuda {

struct Measurement {
  double microseconds = 0.0;  // of one call, chained in a CUDA graph over rotated weights
  double error = 0.0;         // |y - r| / |r| against the portable kernel in the same dtype
};

class Bench {
 public:
  ~Bench();
  // `shape`: extents, dtype, norm, activation, gated; the pointers are ignored. `bias` and `residual` say which exist.
  static Status open(const LinearProblem& shape, bool bias, bool residual, std::unique_ptr<Bench>* bench);
  // Checks, then times for about `seconds`; with 0 it only checks.
  Status measure(const Plan& plan, double seconds, Measurement* result);

 private:
  Bench() = default;
  Status allocate(void** pointer, int64_t bytes);
  Status time(const Plan& plan, void* scratch, double seconds, double* microseconds);
  Status compare(double* error);

  LinearProblem problem_;
  std::vector<void*> memory_;
  std::vector<void*> weights_;
  std::vector<float*> colsums_;
  std::vector<uint16_t> reference_, actual_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

}  // namespace onnxfuse::cuda
