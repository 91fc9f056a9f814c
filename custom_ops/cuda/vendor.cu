#include "vendor.h"

#include <algorithm>

#include "cublaslt.h"
#include "numeric.cuh"
#include "tensor_map.h"

namespace onnxfuse::cuda {
namespace {

constexpr int kThreads = 256;

// One block a row: the row is read twice, the second time from the cache.
template <typename T>
__global__ __launch_bounds__(kThreads) void normalise_kernel(const T* x, T* out, int64_t m, int64_t k, Norm norm,
                                                             float epsilon) {
  __shared__ float2 warps[kThreads / 32];
  for (int64_t row = blockIdx.x; row < m; row += gridDim.x) {
    const T* in = x + row * k;
    const float shift = norm == Norm::kLayer ? Numeric<T>::to_float(in[0]) : 0.0f;
    float sum = 0.0f, squares = 0.0f;
    const bool vectors = sizeof(T) == 2 && k % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    if constexpr (sizeof(T) == 2) {
      for (int64_t i = threadIdx.x; vectors && i < k / 8; i += kThreads)
        accumulate_row<T, true>(reinterpret_cast<const uint4*>(in)[i], shift, sum, squares);
    }
    for (int64_t i = threadIdx.x; !vectors && i < k; i += kThreads) {
      const float v = Numeric<T>::to_float(in[i]) - shift;
      sum += v;
      squares = fmaf(v, v, squares);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(sum, squares);
    __syncthreads();
    sum = squares = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) sum += warps[w].x, squares += warps[w].y;
    const RowStats stats = finish_row_stats(norm, sum, squares, shift, 1.0f / k, epsilon);
    if constexpr (sizeof(T) == 2) {
      for (int64_t i = threadIdx.x; vectors && i < k / 8; i += kThreads) {
        uint4 chunk = reinterpret_cast<const uint4*>(in)[i];
        uint32_t* const words = reinterpret_cast<uint32_t*>(&chunk);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 v = Numeric<T>::unpack(words[w]);
          words[w] = Numeric<T>::pack((v.x - stats.mean) * stats.scale, (v.y - stats.mean) * stats.scale);
        }
        reinterpret_cast<uint4*>(out + row * k)[i] = chunk;
      }
    }
    for (int64_t i = threadIdx.x; !vectors && i < k; i += kThreads)
      out[row * k + i] = Numeric<T>::from_float((Numeric<T>::to_float(in[i]) - stats.mean) * stats.scale);
    __syncthreads();
  }
}

// y = activation(product + bias) [* (up + bias)] [+ residual] from the float32 product.
template <typename T>
__global__ __launch_bounds__(kThreads) void tail_kernel(const float* product, const T* bias, const T* residual, T* y,
                                                        int64_t m, int64_t n, int64_t block, int gated,
                                                        Activation activation) {
  const int64_t packed_columns = gated ? 2 * n : n;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    const float* in = product + row * packed_columns;
    for (int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; j < n;
         j += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t packed = gated ? j / block * 2 * block + j % block : j;
      auto biased = [&](int64_t c) { return in[c] + (bias != nullptr ? Numeric<T>::to_float(bias[c]) : 0.0f); };
      float v[1] = {biased(packed)};
      activate<Numeric<T>::kFast>(v, activation);
      if (gated) v[0] *= biased(packed + block);
      if (residual != nullptr) v[0] += Numeric<T>::to_float(residual[row * n + j]);
      y[row * n + j] = Numeric<T>::from_float(v[0]);
    }
  }
}

int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Whether cuBLASLt's own epilogue says everything: bias, tanh-GELU, or a residual without activation. (Its ReLU turns
// NaN into 0.)
bool direct(const LinearProblem& p) {
  if (p.gated) return false;
  if (p.activation == Activation::kNone) return true;
  return p.activation == Activation::kGeluTanh && p.dtype != DType::kFloat32 && p.residual == nullptr;
}

int64_t normalised_bytes(const LinearProblem& p) {
  return p.norm == Norm::kNone ? 0 : padded(p.m * p.k * size_of(p.dtype));
}

int64_t product_bytes(const LinearProblem& p) { return direct(p) ? 0 : padded(p.m * p.packed_columns() * 4); }

cudaDataType_t data_type(DType dtype) {
  return dtype == DType::kFloat16 ? CUDA_R_16F : dtype == DType::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F;
}

template <typename T>
Status run(const LinearProblem& p, void* scratch, cudaStream_t stream) {
  char* const memory = static_cast<char*>(scratch);
  const void* x = p.x;
  if (p.norm != Norm::kNone) {
    T* const normalised = reinterpret_cast<T*>(memory);
    normalise_kernel<T><<<static_cast<unsigned>(std::min<int64_t>(p.m, 0x7fffffff)), kThreads, 0, stream>>>(
        static_cast<const T*>(p.x), normalised, p.m, p.k, p.norm, p.epsilon);
    if (Status s = cuda_status(cudaGetLastError(), "normalise"); !s.ok()) return s;
    x = normalised;
  }
  float* const product = reinterpret_cast<float*>(memory + normalised_bytes(p));
  void* const workspace = memory + normalised_bytes(p) + product_bytes(p);

  // Row-major y[m, n] is column-major [n, m]: D = W x^T, and the bias runs along the rows of D.
  CublasLtProduct call = {};
  call.a = p.weight, call.b = x;
  call.transpose_a = p.layout == Layout::kNK;
  call.m = p.packed_columns(), call.n = p.m, call.k = p.k;
  call.input = data_type(p.dtype);
  call.epilogue = cublaslt::kEpilogueDefault;
  if (direct(p)) {
    call.d = p.y;
    call.output = call.input;
    call.bias = p.bias;
    if (p.activation == Activation::kGeluTanh)
      call.epilogue = p.bias != nullptr ? cublaslt::kEpilogueGeluBias : cublaslt::kEpilogueGelu;
    else if (p.bias != nullptr)
      call.epilogue = cublaslt::kEpilogueBias;
    call.c = p.residual;
    call.beta = p.residual != nullptr ? 1.0f : 0.0f;
    return {cublaslt_multiply(call, workspace, stream)};
  }
  call.d = product;
  call.output = CUDA_R_32F;
  if (Status s = {cublaslt_multiply(call, workspace, stream)}; !s.ok()) return s;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((p.n + kThreads - 1) / kThreads, 65535)),
                  static_cast<unsigned>(std::min<int64_t>(p.m, 65535)));
  tail_kernel<T><<<grid, kThreads, 0, stream>>>(product, static_cast<const T*>(p.bias),
                                                static_cast<const T*>(p.residual), static_cast<T*>(p.y), p.m, p.n,
                                                gate_block(p), p.gated, p.activation);
  return cuda_status(cudaGetLastError(), "tail");
}

}  // namespace

std::string vendor_refusal(const LinearProblem& p) {
  if (p.m <= 0 || p.n <= 0 || p.k <= 0) return "an extent is zero";
  if (!cublaslt_available()) return "libcublasLt was not found";
  return {};
}

int64_t vendor_scratch_bytes(const LinearProblem& p) {
  return normalised_bytes(p) + product_bytes(p) + kCublasLtWorkspace;
}

Status launch_vendor(const LinearProblem& p, void* scratch, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat16:
      return run<__half>(p, scratch, stream);
    case DType::kBFloat16:
      return run<__nv_bfloat16>(p, scratch, stream);
    case DType::kFloat32:
      return run<float>(p, scratch, stream);
  }
  return {"unknown dtype"};
}

}  // namespace onnxfuse::cuda
