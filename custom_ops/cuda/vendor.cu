#include "vendor.h"

#include <algorithm>

#include "cublaslt.h"
#include "device_attribute.h"
#include "launch_attributes.h"
#include "numeric.cuh"
#include "tensor_map.h"

namespace onnxfuse::cuda {
namespace {

constexpr int kThreads = 256, kVectorThreads = 128;

// What comes after may start, what came before has ended.
__device__ __forceinline__ void wait_for_preceding() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

// One block a row. Vectors of a row that the block's registers hold are read once, the others and single values twice,
// the second time from the cache.
template <typename T, int kBlock>
__global__ __launch_bounds__(kBlock) void normalise_kernel(const T* x, T* out, int64_t m, int64_t k, Norm norm,
                                                           float epsilon) {
  constexpr int kHeld = 4;
  __shared__ float2 warps[kBlock / 32];
  wait_for_preceding();
  for (int64_t row = blockIdx.x; row < m; row += gridDim.x) {
    const T* in = x + row * k;
    const float shift = norm == Norm::kLayer ? Numeric<T>::to_float(in[0]) : 0.0f;
    float sum = 0.0f, squares = 0.0f;
    const bool vectors = sizeof(T) == 2 && k % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const int64_t count = vectors ? k / 8 : 0;
    uint4 held[kHeld];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int h = 0; h < kHeld; ++h)
        if (threadIdx.x + h * kBlock < count) held[h] = reinterpret_cast<const uint4*>(in)[threadIdx.x + h * kBlock];
#pragma unroll
      for (int h = 0; h < kHeld; ++h)
        if (threadIdx.x + h * kBlock < count) accumulate_row<T, true>(held[h], shift, sum, squares);
      for (int64_t i = threadIdx.x + kHeld * kBlock; i < count; i += kBlock)
        accumulate_row<T, true>(reinterpret_cast<const uint4*>(in)[i], shift, sum, squares);
    }
    for (int64_t i = threadIdx.x; !vectors && i < k; i += kBlock) {
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
    for (int w = 0; w < kBlock / 32; ++w) sum += warps[w].x, squares += warps[w].y;
    const RowStats stats = finish_row_stats(norm, sum, squares, shift, 1.0f / k, epsilon);
    if constexpr (sizeof(T) == 2) {
      auto normalised = [&](uint4 chunk) {
        uint32_t* const words = reinterpret_cast<uint32_t*>(&chunk);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 v = Numeric<T>::unpack(words[w]);
          words[w] = Numeric<T>::pack((v.x - stats.mean) * stats.scale, (v.y - stats.mean) * stats.scale);
        }
        return chunk;
      };
      uint4* const to = reinterpret_cast<uint4*>(out + row * k);
#pragma unroll
      for (int h = 0; h < kHeld; ++h)
        if (threadIdx.x + h * kBlock < count) to[threadIdx.x + h * kBlock] = normalised(held[h]);
      for (int64_t i = threadIdx.x + kHeld * kBlock; i < count; i += kBlock)
        to[i] = normalised(reinterpret_cast<const uint4*>(in)[i]);
    }
    for (int64_t i = threadIdx.x; !vectors && i < k; i += kBlock)
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
  wait_for_preceding();
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

// The same, eight columns a thread: 16-bit types, all columns and gate blocks a multiple of eight.
template <typename T>
__global__ __launch_bounds__(kVectorThreads) void tail_vectors_kernel(const float* product, const T* bias,
                                                                      const T* residual, T* y, int64_t m, int64_t n,
                                                                      int64_t block, int gated, Activation activation) {
  const int64_t j = (static_cast<int64_t>(blockIdx.x) * kVectorThreads + threadIdx.x) * 8;
  wait_for_preceding();
  if (j >= n) return;
  const int64_t packed_columns = gated ? 2 * n : n, packed = gated ? j / block * 2 * block + j % block : j;
  auto unpack = [](const T* eight, float(&v)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(eight);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = Numeric<T>::unpack(words[w]);
      v[2 * w] = pair.x, v[2 * w + 1] = pair.y;
    }
  };
  float of_gate[8] = {}, of_up[8] = {};
  if (bias != nullptr) unpack(bias + packed, of_gate);
  if (bias != nullptr && gated) unpack(bias + packed + block, of_up);
  auto biased = [&](const float* in, const float(&add)[8], float(&v)[8]) {
    const float4 low = reinterpret_cast<const float4*>(in)[0], high = reinterpret_cast<const float4*>(in)[1];
    v[0] = low.x + add[0], v[1] = low.y + add[1], v[2] = low.z + add[2], v[3] = low.w + add[3];
    v[4] = high.x + add[4], v[5] = high.y + add[5], v[6] = high.z + add[6], v[7] = high.w + add[7];
  };
#pragma unroll 2
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    const float* in = product + row * packed_columns + packed;
    float v[8];
    biased(in, of_gate, v);
    activate<true>(v, activation);
    if (gated) {
      float up[8];
      biased(in + block, of_up, up);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] *= up[i];
    }
    if (residual != nullptr) {
      float add[8];
      unpack(residual + row * n + j, add);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] += add[i];
    }
    *reinterpret_cast<uint4*>(y + row * n + j) =
        make_uint4(Numeric<T>::pack(v[0], v[1]), Numeric<T>::pack(v[2], v[3]), Numeric<T>::pack(v[4], v[5]),
                   Numeric<T>::pack(v[6], v[7]));
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

// Whether this GPU has programmatic dependent launch.
Status may_overlap(bool* result) {
  int major = 0;
  Status status = device_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  *result = major >= 9;
  return status;
}

template <typename T>
Status normalise(const LinearProblem& p, T* out, cudaStream_t stream) {
  bool overlap = false;
  if (Status s = may_overlap(&overlap); !s.ok()) return s;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(p.m, 0x7fffffff)));
  const T* x = static_cast<const T*>(p.x);
  if (p.k <= 4096)
    return launch_after(normalise_kernel<T, 128>, grid, 128, overlap, stream, x, out, p.m, p.k, p.norm, p.epsilon);
  return launch_after(normalise_kernel<T, kThreads>, grid, kThreads, overlap, stream, x, out, p.m, p.k, p.norm,
                      p.epsilon);
}

template <typename T>
Status finish(const LinearProblem& p, const float* product, cudaStream_t stream) {
  bool overlap = false;
  int sm_count = 0;
  if (Status s = may_overlap(&overlap); !s.ok()) return s;
  if (Status s = device_attribute(cudaDevAttrMultiProcessorCount, &sm_count); !s.ok()) return s;
  const T *bias = static_cast<const T*>(p.bias), *residual = static_cast<const T*>(p.residual);
  T* const y = static_cast<T*>(p.y);
  const int64_t block = gate_block(p);
  if constexpr (sizeof(T) == 2) {
    const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
    if (p.n % 8 == 0 && block % 8 == 0 && aligned(bias) && aligned(residual) && aligned(y)) {
      const int64_t across = (p.n / 8 + kVectorThreads - 1) / kVectorThreads;
      const int64_t wanted = std::max<int64_t>(1, int64_t{16} * sm_count / across);  // sixteen blocks each
      const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(std::min({p.m, wanted, int64_t{65535}})));
      return launch_after(tail_vectors_kernel<T>, grid, kVectorThreads, overlap, stream, product, bias, residual, y,
                          p.m, p.n, block, p.gated, p.activation);
    }
  }
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((p.n + kThreads - 1) / kThreads, 65535)),
                  static_cast<unsigned>(std::min<int64_t>(p.m, 65535)));
  return launch_after(tail_kernel<T>, grid, kThreads, overlap, stream, product, bias, residual, y, p.m, p.n, block,
                      p.gated, p.activation);
}

template <typename T>
Status run(const LinearProblem& p, void* scratch, cudaStream_t stream) {
  char* const memory = static_cast<char*>(scratch);
  const void* x = p.x;
  if (p.norm != Norm::kNone) {
    T* const normalised = reinterpret_cast<T*>(memory);
    if (Status s = normalise(p, normalised, stream); !s.ok()) return s;
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
  return finish<T>(p, product, stream);
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
