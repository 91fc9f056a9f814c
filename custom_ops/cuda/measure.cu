#include "measure.h"

#include <algorithm>
#include <cmath>

#include "column_sums.h"
#include "execute.h"
#include "numeric.cuh"

namespace onnxfuse::cuda {
namespace {

constexpr int64_t kRotation = int64_t{300} << 20;  // bytes of weights between two uses of one, several times the L2
constexpr int64_t kCompared = int64_t{1} << 19;    // elements of y that are compared

// A hash of the index, roughly normal; the same for a seed on every device.
template <typename T>
__global__ void fill_kernel(T* out, int64_t count, float scale, uint32_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed + static_cast<uint32_t>(i >> 32) * 40503u;
    float sum = 0.0f;
#pragma unroll
    for (int round = 0; round < 4; ++round) {
      h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
      sum += static_cast<float>(h) * (1.0f / 4294967296.0f) - 0.5f;
    }
    out[i] = Numeric<T>::from_float(sum * 1.7320508f * scale);
  }
}

Status fill(DType dtype, void* out, int64_t count, float scale, uint32_t seed, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat16:
      fill_kernel<<<1024, 256, 0, stream>>>(static_cast<__half*>(out), count, scale, seed);
      break;
    case DType::kBFloat16:
      fill_kernel<<<1024, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(out), count, scale, seed);
      break;
    case DType::kFloat32:
      return {"float32 products are not tuned"};
  }
  return cuda_status(cudaGetLastError(), "fill");
}

float widen(DType dtype, uint16_t bits) {
  if (dtype == DType::kBFloat16) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &word, 4);
    return value;
  }
  return __half2float(__ushort_as_half(bits));
}

#define ONNXFUSE_TRY(expression) \
  if (Status s_ = (expression); !s_.ok()) return s_

}  // namespace

Bench::~Bench() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (void* p : memory_) cudaFree(p);
  if (start_ != nullptr) cudaEventDestroy(start_);
  if (stop_ != nullptr) cudaEventDestroy(stop_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Status Bench::allocate(void** pointer, int64_t bytes) {
  ONNXFUSE_TRY(cuda_status(cudaMalloc(pointer, static_cast<size_t>(std::max<int64_t>(bytes, 16))), "cudaMalloc"));
  memory_.push_back(*pointer);
  return {};
}

Status Bench::open(const LinearProblem& shape, bool bias, bool residual, std::unique_ptr<Bench>* out) {
  std::unique_ptr<Bench> bench(new Bench());
  LinearProblem& p = bench->problem_;
  p = shape;
  p.weight_is_constant = 1;
  p.bias = p.residual = nullptr;
  p.colsum = nullptr;
  if (p.m <= 0 || p.n <= 0 || p.k <= 0) return {"an extent is zero"};
  ONNXFUSE_TRY(cuda_status(cudaStreamCreateWithFlags(&bench->stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
  ONNXFUSE_TRY(cuda_status(cudaEventCreate(&bench->start_), "cudaEventCreate"));
  ONNXFUSE_TRY(cuda_status(cudaEventCreate(&bench->stop_), "cudaEventCreate"));
  const int64_t element = size_of(p.dtype), weight = p.packed_columns() * p.k;
  void *x = nullptr, *y = nullptr, *extra = nullptr;
  ONNXFUSE_TRY(bench->allocate(&x, p.m * p.k * element));
  ONNXFUSE_TRY(fill(p.dtype, x, p.m * p.k, 1.0f, 1, bench->stream_));
  ONNXFUSE_TRY(bench->allocate(&y, p.m * p.n * element));
  p.x = x, p.y = y;
  if (bias) {
    ONNXFUSE_TRY(bench->allocate(&extra, p.packed_columns() * element));
    ONNXFUSE_TRY(fill(p.dtype, extra, p.packed_columns(), 1.0f, 2, bench->stream_));
    p.bias = extra;
  }
  if (residual) {
    ONNXFUSE_TRY(bench->allocate(&extra, p.m * p.n * element));
    ONNXFUSE_TRY(fill(p.dtype, extra, p.m * p.n, 1.0f, 3, bench->stream_));
    p.residual = extra;
  }
  const int64_t copies = std::min<int64_t>(64, std::max<int64_t>(2, kRotation / (weight * element) + 1));
  for (int64_t i = 0; i < copies; ++i) {
    void *copy = nullptr, *sums = nullptr;
    ONNXFUSE_TRY(bench->allocate(&copy, weight * element));
    ONNXFUSE_TRY(fill(p.dtype, copy, weight, 1.0f / std::sqrt(static_cast<float>(p.k)), 10 + static_cast<uint32_t>(i),
                      bench->stream_));
    p.weight = copy;
    if (p.norm == Norm::kLayer) {
      ONNXFUSE_TRY(bench->allocate(&sums, p.packed_columns() * 4));
      ONNXFUSE_TRY(launch_column_sums(p, static_cast<float*>(sums), bench->stream_));
    }
    bench->weights_.push_back(copy);
    bench->colsums_.push_back(static_cast<float*>(sums));
  }
  // The portable kernel's result for the first weight is the reference.
  const Plan portable;
  void* scratch = nullptr;
  ONNXFUSE_TRY(bench->allocate(&scratch, scratch_bytes(p, portable)));
  p.weight = bench->weights_[0], p.colsum = bench->colsums_[0];
  ONNXFUSE_TRY(execute(p, portable, scratch, bench->stream_));
  const int64_t compared = std::min(p.m * p.n, kCompared);
  bench->reference_.resize(static_cast<size_t>(compared));
  bench->actual_.resize(static_cast<size_t>(compared));
  // The end of y: the last rows and columns are where a kernel goes wrong first.
  const char* tail = static_cast<const char*>(p.y) + (p.m * p.n - compared) * element;
  ONNXFUSE_TRY(cuda_status(cudaMemcpyAsync(bench->reference_.data(), tail, static_cast<size_t>(compared) * 2,
                                           cudaMemcpyDeviceToHost, bench->stream_),
                           "cudaMemcpy"));
  ONNXFUSE_TRY(cuda_status(cudaStreamSynchronize(bench->stream_), "the portable kernel"));
  *out = std::move(bench);
  return {};
}

Status Bench::compare(double* error) {
  const int64_t compared = static_cast<int64_t>(actual_.size());
  const char* tail = static_cast<const char*>(problem_.y) + (problem_.m * problem_.n - compared) * 2;
  ONNXFUSE_TRY(cuda_status(
      cudaMemcpyAsync(actual_.data(), tail, static_cast<size_t>(compared) * 2, cudaMemcpyDeviceToHost, stream_),
      "cudaMemcpy"));
  ONNXFUSE_TRY(cuda_status(cudaStreamSynchronize(stream_), "the kernel"));
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < actual_.size(); ++i) {
    const double r = widen(problem_.dtype, reference_[i]), v = widen(problem_.dtype, actual_[i]);
    difference += (v - r) * (v - r);
    norm += r * r;
  }
  *error = std::sqrt(difference / std::max(norm, 1e-30));
  return {};
}

Status Bench::time(const Plan& plan, void* scratch, double seconds, double* microseconds) {
  const int count = static_cast<int>(std::max<size_t>(weights_.size(), 16));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ONNXFUSE_TRY(cuda_status(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture"));
  Status enqueued;
  for (int i = 0; i < count && enqueued.ok(); ++i) {
    LinearProblem p = problem_;
    p.weight = weights_[static_cast<size_t>(i) % weights_.size()];
    p.colsum = colsums_[static_cast<size_t>(i) % weights_.size()];
    enqueued = execute(p, plan, scratch, stream_);
  }
  const Status captured = cuda_status(cudaStreamEndCapture(stream_, &graph), "capture");
  if (!enqueued.ok() || !captured.ok()) {
    if (graph != nullptr) cudaGraphDestroy(graph);
    return enqueued.ok() ? captured : enqueued;
  }
  Status status = cuda_status(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  std::vector<double> times;
  float elapsed = 0.0f;
  for (int warm = 0; warm < 2 && status.ok(); ++warm) {
    cudaEventRecord(start_, stream_);
    status = cuda_status(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch");
    cudaEventRecord(stop_, stream_);
    if (status.ok()) status = cuda_status(cudaEventSynchronize(stop_), "the kernel");
    cudaEventElapsedTime(&elapsed, start_, stop_);
  }
  const int replays = std::max(1, std::min(200, static_cast<int>(seconds * 1e3 / std::max(elapsed, 1e-3f) / 3)));
  for (int repeat = 0; repeat < 3 && status.ok(); ++repeat) {
    cudaEventRecord(start_, stream_);
    for (int i = 0; i < replays && status.ok(); ++i)
      status = cuda_status(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch");
    cudaEventRecord(stop_, stream_);
    if (status.ok()) status = cuda_status(cudaEventSynchronize(stop_), "the kernel");
    cudaEventElapsedTime(&elapsed, start_, stop_);
    times.push_back(static_cast<double>(elapsed) * 1e3 / replays / count);
  }
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  if (!status.ok()) return status;
  std::sort(times.begin(), times.end());
  *microseconds = times[1];
  return {};
}

Status Bench::measure(const Plan& plan, double seconds, Measurement* result) {
  if (std::string why = refusal(problem_, plan); !why.empty()) return {why};
  void* scratch = nullptr;
  const int64_t bytes = scratch_bytes(problem_, plan);
  ONNXFUSE_TRY(cuda_status(cudaMalloc(&scratch, static_cast<size_t>(std::max<int64_t>(bytes, 16))), "cudaMalloc"));
  LinearProblem p = problem_;
  p.weight = weights_[0], p.colsum = colsums_[0];
  // 0xff: NaN wherever the kernel does not write.
  Status status = cuda_status(
      cudaMemsetAsync(p.y, 0xff, static_cast<size_t>(p.m * p.n * size_of(p.dtype)), stream_), "cudaMemset");
  if (status.ok()) status = execute(p, plan, scratch, stream_);
  if (status.ok()) status = compare(&result->error);
  if (status.ok() && seconds > 0.0) status = time(plan, scratch, seconds, &result->microseconds);
  cudaStreamSynchronize(stream_);
  cudaFree(scratch);
  return status;
}

}  // namespace onnxfuse::cuda
