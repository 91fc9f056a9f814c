// From an ORT kernel call to a LinearProblem and back: what Linear and GatedLinear share on the CUDA provider.
#pragma once

#include <mutex>
#include <unordered_map>

#include "../ort/glue.h"
#include "choose.h"

namespace onnxfuse::ort {

class CudaCall {
 public:
  // Fails if this build has no kernels for the current device.
  CudaCall(const OrtKernelInfo* info, Dtype dtype, const Attributes& attributes);

  // Chooses a plan and enqueues it on the run's stream. `describe` makes the text of an error.
  template <typename Describe>
  void run(OrtKernelContext* context, cuda::LinearProblem problem, const Describe& describe) const {
    const std::string error = enqueue(context, &problem);
    if (!error.empty()) throw OpFailure(ORT_FAIL, describe("on sm_" + std::to_string(device_.architecture) + ": " + error));
  }

  // The fields that do not depend on the op: dtype, norm, activation, layout, epsilon.
  cuda::LinearProblem problem() const;

 private:
  std::string enqueue(OrtKernelContext* context, cuda::LinearProblem* problem) const;
  cuda::Plan plan_for(const cuda::LinearProblem& problem) const;

  Dtype dtype_;
  Attributes attributes_;
  bool constant_weight_ = false;
  cuda::Device device_;
  int device_id_ = 0;
  mutable std::mutex mutex_;  // of plans_: Run may be called from several threads
  mutable std::unordered_map<int64_t, cuda::Plan> plans_;  // by M
};

}  // namespace onnxfuse::ort
