// Row statistics by a kernel of their own, for plans that do not take them inside the product.
#include <algorithm>

#include "numeric.cuh"
#include "row_stats.h"

namespace onnxfuse::cuda {
namespace {

constexpr int kThreads = 128;

// One block a row. One pass is enough: the sums are shifted by x[m, 0], so a large mean does not cancel.
// Lets a kernel that waits for it start early (programmatic dependent launch).
template <typename T>
__global__ __launch_bounds__(kThreads) void row_stats_kernel(const T* x, RowStats* stats, int64_t m, int64_t k,
                                                             Norm norm, float epsilon) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  __shared__ float2 warps[kThreads / 32];
  for (int64_t m0 = blockIdx.x; m0 < m; m0 += gridDim.x) {
    const T* row = x + m0 * k;
    const float shift = norm == Norm::kLayer ? Numeric<T>::to_float(row[0]) : 0.0f;
    RowSums sums;
    const bool vectors = sizeof(T) == 2 && k % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    if constexpr (sizeof(T) == 2) {
#pragma unroll 4
      for (int64_t i = threadIdx.x; vectors && i < k / 8; i += kThreads)
        accumulate_stats<T, true>(reinterpret_cast<const uint4*>(row)[i], shift, sums);
    }
    for (int64_t i = threadIdx.x; !vectors && i < k; i += kThreads) {
      const float v = Numeric<T>::to_float(row[i]) - shift;
      sums.sum[0] += v;
      sums.squares[0] = fmaf(v, v, sums.squares[0]);
    }
    float sum = sums.total(), squares = sums.total_squares();
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(sum, squares);
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = squares = 0.0f;
      for (int w = 0; w < kThreads / 32; ++w) sum += warps[w].x, squares += warps[w].y;
      stats[m0] = finish_row_stats(norm, sum, squares, shift, 1.0f / k, epsilon);
    }
    __syncthreads();
  }
}

template <typename T>
Status launch(const LinearProblem& p, void* stats, cudaStream_t stream) {
  row_stats_kernel<T><<<static_cast<unsigned>(std::min<int64_t>(p.m, 0x7fffffff)), kThreads, 0, stream>>>(
      static_cast<const T*>(p.x), static_cast<RowStats*>(stats), p.m, p.k, p.norm, p.epsilon);
  return cuda_status(cudaGetLastError(), "row statistics");
}

}  // namespace

Status launch_row_stats(const LinearProblem& p, void* stats, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat16:
      return launch<__half>(p, stats, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, stats, stream);
    case DType::kFloat32:
      return launch<float>(p, stats, stream);
  }
  return {"unknown dtype"};
}

}  // namespace onnxfuse::cuda
