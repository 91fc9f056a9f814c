// A plain C surface over the launchers, for the tuner and the benchmarks: no ORT needed to run or time a kernel.
#include <algorithm>
#include <cstring>

#include "choose.h"
#include "execute.h"
#include "hopper_launch.h"

namespace {

int report(const onnxfuse::cuda::Status& status, char* error, int64_t capacity) {
  if (status.ok()) return 0;
  if (error != nullptr && capacity > 0) {
    const size_t length = std::min<size_t>(status.error.size(), capacity - 1);
    std::memcpy(error, status.error.data(), length);
    error[length] = 0;
  }
  return 1;
}

}  // namespace

#define ONNXFUSE_C_API __attribute__((visibility("default")))

extern "C" {

// Bytes of scratch that the plan needs; -1 if the plan cannot run the problem (the reason is in `error`).
ONNXFUSE_C_API int64_t onnxfuse_cuda_scratch(const onnxfuse::cuda::LinearProblem* problem, const onnxfuse::cuda::Plan* plan,
                              char* error, int64_t capacity) {
  const std::string why = onnxfuse::cuda::refusal(*problem, *plan);
  if (!why.empty()) {
    report({why}, error, capacity);
    return -1;
  }
  return onnxfuse::cuda::scratch_bytes(*problem, *plan);
}

ONNXFUSE_C_API int onnxfuse_cuda_run(const onnxfuse::cuda::LinearProblem* problem, const onnxfuse::cuda::Plan* plan, void* scratch,
                      void* stream, char* error, int64_t capacity) {
  return report(onnxfuse::cuda::execute(*problem, *plan, scratch, static_cast<cudaStream_t>(stream)), error, capacity);
}

// The plan that the ops would use on the current device.
ONNXFUSE_C_API void onnxfuse_cuda_choose(const onnxfuse::cuda::LinearProblem* problem, onnxfuse::cuda::Plan* plan) {
  *plan = onnxfuse::cuda::choose_plan(*problem, onnxfuse::cuda::current_device());
}

ONNXFUSE_C_API int onnxfuse_cuda_variant(int path, int index, int* rows, int* columns, int* gated, int* max_stages) {
  using onnxfuse::cuda::Path;
  const auto& list = static_cast<Path>(path) == Path::kStream ? onnxfuse::cuda::stream_variants()
                                                              : onnxfuse::cuda::tile_variants();
  if (index < 0 || index >= static_cast<int>(list.size())) return 1;
  *rows = list[index].rows, *columns = list[index].columns;
  *gated = list[index].gated, *max_stages = list[index].max_stages;
  return 0;
}
}
