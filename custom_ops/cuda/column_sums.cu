#include "column_sums.h"

#include <algorithm>

#include "numeric.cuh"

namespace onnxfuse::cuda {
namespace {

constexpr int kThreads = 128;

// One block a column.
template <typename T>
__global__ __launch_bounds__(kThreads) void column_sums_kernel(const T* weight, float* sums, int64_t columns, int64_t k,
                                                               int64_t column_stride, int64_t k_stride) {
  __shared__ float warps[kThreads / 32];
  for (int64_t column = blockIdx.x; column < columns; column += gridDim.x) {
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < k; i += kThreads)
      sum += Numeric<T>::to_float(weight[column * column_stride + i * k_stride]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) sums[column] = (warps[0] + warps[1]) + (warps[2] + warps[3]);
    __syncthreads();
  }
}

template <typename T>
Status launch(const LinearProblem& p, float* sums, cudaStream_t stream) {
  const int64_t columns = p.packed_columns();
  const bool k_major = p.layout == Layout::kNK;
  column_sums_kernel<T><<<static_cast<unsigned>(std::min<int64_t>(columns, 0x7fffffff)), kThreads, 0, stream>>>(
      static_cast<const T*>(p.weight), sums, columns, p.k, k_major ? p.k : 1, k_major ? 1 : columns);
  return cuda_status(cudaGetLastError(), "column sums");
}

}  // namespace

Status launch_column_sums(const LinearProblem& p, float* sums, cudaStream_t stream) {
  if (p.n == 0) return {};
  switch (p.dtype) {
    case DType::kFloat16:
      return launch<__half>(p, sums, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, sums, stream);
    case DType::kFloat32:
      return launch<float>(p, sums, stream);
  }
  return {"unknown dtype"};
}

}  // namespace onnxfuse::cuda
