// Row statistics by a kernel of their own, for plans that do not take them inside the product.
#include <algorithm>

#include "device_attribute.h"
#include "numeric.cuh"
#include "row_stats.h"

namespace onnxfuse::cuda {
namespace {

// A warp to a row, or to several short ones: a lane has kLoads 16-byte loads under way, kLoads / kRows of each row. One
// pass is enough: the sums are shifted by x[m, 0], so a large mean does not cancel.
constexpr int kLoads = 8;

template <typename T, int kRows>
__global__ __launch_bounds__(kRowStatsThreads, 65536 / kRowStatsRegisters) void row_stats_kernel(
    const T* x, RowStats* stats, int64_t m, int64_t k, Norm norm, float epsilon, bool ready) {
#if __CUDA_ARCH__ >= 900
  if (!ready) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (ready) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kRowStatsThreads / 32);
  const bool vectors = sizeof(T) == 2 && k % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  for (int64_t row0 = (static_cast<int64_t>(blockIdx.x) * (kRowStatsThreads / 32) + warp) * kRows; row0 < m;
       row0 += warps * kRows) {
    float sum[kRows] = {}, squares[kRows] = {}, shift[kRows] = {};
    const int rows = static_cast<int>(m - row0 < kRows ? m - row0 : kRows);
    if (norm == Norm::kLayer) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (r < rows) shift[r] = Numeric<T>::to_float(x[(row0 + r) * k]);
    }
    if constexpr (sizeof(T) == 2) {
      constexpr int kOfRow = kLoads / kRows;
      const uint4* next = reinterpret_cast<const uint4*>(x + row0 * k) + lane;
      for (int64_t left = vectors ? k / 8 - lane : 0; left > 0; left -= 32 * kOfRow, next += 32 * kOfRow) {
        // Loads before the end of the row and of the matrix.
        const int loads = static_cast<int>(left < 32 * kOfRow ? (left + 31) / 32 : kOfRow);
        uint4 values[kRows][kOfRow];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < kOfRow; ++i)
            if (r < rows && i < loads) values[r][i] = next[r * (k / 8) + 32 * i];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < kOfRow; ++i)
            if (r < rows && i < loads) accumulate_row<T, true>(values[r][i], shift[r], sum[r], squares[r]);
      }
    }
    if (!vectors) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        for (int64_t i = lane; r < rows && i < k; i += 32) {
          const float v = Numeric<T>::to_float(x[(row0 + r) * k + i]) - shift[r];
          sum[r] += v;
          squares[r] = fmaf(v, v, squares[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], offset);
        squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], offset);
      }
      if (lane == 0 && r < rows)
        stats[row0 + r] = finish_row_stats(norm, sum[r], squares[r], shift[r], 1.0f / k, epsilon);
    }
  }
}

template <typename T>
Status launch(const LinearProblem& p, void* stats, Overlap overlap, cudaStream_t stream) {
  int sm_count = 0;
  if (Status s = device_attribute(cudaDevAttrMultiProcessorCount, &sm_count); !s.ok()) return s;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kRowStatsThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap == Overlap::kNone ? 0 : 1;
  auto start = [&](void (*kernel)(const T*, RowStats*, int64_t, int64_t, Norm, float, bool), int rows) {
    const int64_t blocks = (p.m + rows * 4 - 1) / (rows * 4);
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, sm_count)));
    return cuda_status(cudaLaunchKernelEx(&config, kernel, static_cast<const T*>(p.x), static_cast<RowStats*>(stats),
                                          p.m, p.k, p.norm, p.epsilon, overlap == Overlap::kReady),
                       "row statistics");
  };
  // Several rows to a warp only where every multiprocessor has work without that.
  const bool many = p.m > sm_count * 4;
  if (many && p.k <= 1024) return start(row_stats_kernel<T, 2>, 2);
  return start(row_stats_kernel<T, 1>, 1);
}

}  // namespace

Status launch_row_stats(const LinearProblem& p, void* stats, Overlap overlap, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat16:
      return launch<__half>(p, stats, overlap, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, stats, overlap, stream);
    case DType::kFloat32:
      return launch<float>(p, stats, overlap, stream);
  }
  return {"unknown dtype"};
}

}  // namespace onnxfuse::cuda
