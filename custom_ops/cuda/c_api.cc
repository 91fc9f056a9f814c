// A plain C surface over the launchers, for the tuner and the benchmarks: no ORT needed to run or time a kernel.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "choose.h"
#include "execute.h"
#ifdef ONNXFUSE_HOPPER
#include "hopper_launch.h"
#endif
#include "measure.h"

namespace {

int report(const onnxfuse::cuda::Status& status, char* error, int64_t capacity) {
  if (status.ok()) return 0;
  if (error != nullptr && capacity > 0) {
    const size_t length = std::min<size_t>(status.error.size(), static_cast<size_t>(capacity - 1));
    std::memcpy(error, status.error.data(), length);
    error[length] = 0;
  }
  return 1;
}

// The ops always have column sums where a plan needs them.
onnxfuse::cuda::Plan choose(onnxfuse::cuda::LinearProblem problem, const onnxfuse::cuda::Device& device) {
  alignas(16) static const float kSums[4] = {};
  if (problem.colsum == nullptr) problem.colsum = kSums;
  return onnxfuse::cuda::choose_plan(problem, device);
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
  *plan = choose(*problem, onnxfuse::cuda::current_device());
}

// The plan that they would use on another one; needs none.
ONNXFUSE_C_API void onnxfuse_cuda_choose_for(const onnxfuse::cuda::LinearProblem* problem, int architecture,
                                             int multiprocessors, onnxfuse::cuda::Plan* plan) {
  onnxfuse::cuda::Device device;
  device.architecture = architecture, device.sm_count = multiprocessors;
#ifdef ONNXFUSE_HOPPER
  device.hopper = architecture == 90 && multiprocessors > 0;
#endif
  *plan = choose(*problem, device);
}

// Microseconds that the plan would take by the model which chooses where nothing was measured; negative if unknown.
ONNXFUSE_C_API double onnxfuse_cuda_modelled(const onnxfuse::cuda::LinearProblem* problem,
                                             const onnxfuse::cuda::Plan* plan) {
  const double time = onnxfuse::cuda::modelled_time(*problem, *plan, onnxfuse::cuda::current_device());
  return std::isfinite(time) ? time : -1.0;
}

ONNXFUSE_C_API int onnxfuse_cuda_variant(int path, int index, int* rows, int* columns, int* gated, int* max_stages,
                                         int* split) {
#ifdef ONNXFUSE_HOPPER
  using onnxfuse::cuda::Path;
  const auto& list = static_cast<Path>(path) == Path::kStream ? onnxfuse::cuda::stream_variants()
                                                              : onnxfuse::cuda::tile_variants();
  if (index < 0 || index >= static_cast<int>(list.size())) return 1;
  *rows = list[static_cast<size_t>(index)].rows, *columns = list[static_cast<size_t>(index)].columns;
  *gated = list[static_cast<size_t>(index)].gated, *max_stages = list[static_cast<size_t>(index)].max_stages;
  *split = list[static_cast<size_t>(index)].split;
  return 0;
#else
  (void)path, (void)index, (void)rows, (void)columns, (void)gated, (void)max_stages, (void)split;
  return 1;
#endif
}

// A bench of one problem (its pointers are ignored), or null with the reason in `error`.
ONNXFUSE_C_API void* onnxfuse_cuda_bench_open(const onnxfuse::cuda::LinearProblem* shape, int bias, int residual,
                                              char* error, int64_t capacity) {
  std::unique_ptr<onnxfuse::cuda::Bench> bench;
  if (report(onnxfuse::cuda::Bench::open(*shape, bias != 0, residual != 0, &bench), error, capacity)) return nullptr;
  return bench.release();
}

ONNXFUSE_C_API int onnxfuse_cuda_bench_measure(void* bench, const onnxfuse::cuda::Plan* plan, double seconds,
                                               double* microseconds, double* difference, char* error,
                                               int64_t capacity) {
  onnxfuse::cuda::Measurement result;
  const auto status = static_cast<onnxfuse::cuda::Bench*>(bench)->measure(*plan, seconds, &result);
  *microseconds = result.microseconds;
  *difference = result.error;
  return report(status, error, capacity);
}

ONNXFUSE_C_API void onnxfuse_cuda_bench_close(void* bench) { delete static_cast<onnxfuse::cuda::Bench*>(bench); }

// architecture and multiprocessors of the current device; the return value is 0 if there is one.
ONNXFUSE_C_API int onnxfuse_cuda_device(int* architecture, int* multiprocessors) {
  const onnxfuse::cuda::Device device = onnxfuse::cuda::current_device();
  *architecture = device.architecture;
  *multiprocessors = device.sm_count;
  return device.sm_count == 0;
}
}
