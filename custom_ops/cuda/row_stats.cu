// Row statistics by a kernel of their own, for plans that do not take them inside the product.
#include <algorithm>
#include <atomic>
#include <random>

#include "device_attribute.h"
#include "launch_attributes.h"
#include "numeric.cuh"
#include "row_stats.h"

namespace onnxfuse::cuda {
namespace {

// A warp to a row, or to several short ones: a lane has kLoads 16-byte loads under way, kLoads / kRows of each row. One
// pass is enough: the sums are shifted by x[m, 0], so a large mean does not cancel.
constexpr int kLoads = 8;
constexpr int kAlone = 512;  // threads of a block that has a multiprocessor for itself

// What this thread, and with a barrier before its block, has written is seen by who sees the flag.
__device__ __forceinline__ void set_flag(uint64_t* flag, uint64_t value) {
#if __CUDA_ARCH__ >= 700
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#endif
}

template <typename T, int kRows, int kThreads>
__global__ __launch_bounds__(kThreads, 65536 / kRowStatsRegisters * kRowStatsThreads / kThreads) void row_stats_kernel(
    const T* x, RowStats* stats, int64_t m, int64_t k, Norm norm, float epsilon, bool ready, uint64_t* flags,
    uint64_t nonce) {
#if __CUDA_ARCH__ >= 900
  if (!ready) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (ready) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (flags != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    // What came before is there for all: nothing to release, and a fence would take half a microsecond.
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(flags), "l"(nonce) : "memory");
    flags[1] = 0;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const bool vectors = sizeof(T) == 2 && k % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  for (int64_t row0 = (static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + warp) * kRows; row0 < m;
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
  if (flags != nullptr) {
    __syncthreads();
    if (threadIdx.x == 0) set_flag(flags + kFlagsBefore + blockIdx.x, nonce);
  }
}

// Not the same twice, nor what happens to be in memory.
uint64_t new_nonce() {
  static std::atomic<uint64_t> next{(static_cast<uint64_t>(std::random_device{}()) << 32) | 1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

template <typename T>
Status launch(const LinearProblem& p, void* scratch, Overlap overlap, bool beside, cudaStream_t stream,
              StatsSource* out) {
  int sm_count = 0;
  if (Status s = device_attribute(cudaDevAttrMultiProcessorCount, &sm_count); !s.ok()) return s;
  auto start = [&](auto* kernel, int rows, int threads) {
    const int64_t at_once = rows * threads / 32;
    const int most = std::min(sm_count, kMostStatsBlocks);
    out->blocks = static_cast<int>(std::min<int64_t>((p.m + at_once - 1) / at_once, most));
    out->rows = scratch;
    if (overlap == Overlap::kFlags) {
      out->flags = reinterpret_cast<uint64_t*>(static_cast<char*>(scratch) + p.m * kRowStatsBytes);
      out->nonce = new_nonce();
    }
    return launch_after(kernel, dim3(static_cast<unsigned>(out->blocks)), threads, overlap != Overlap::kNone, stream,
                        static_cast<const T*>(p.x), static_cast<RowStats*>(scratch), p.m, p.k, p.norm, p.epsilon,
                        overlap == Overlap::kReady, out->flags, out->nonce);
  };
  // Where products leave no room, small blocks would crowd on the multiprocessors that are free first. Many short rows
  // are not over before the product's first tile is.
  if (!beside || (p.k < 2048 && p.m > 2048)) return start(row_stats_kernel<T, 1, kAlone>, 1, kAlone);
  // Several rows to a warp only where every multiprocessor has work without that.
  const bool many = p.m > sm_count * 4;
  if (many && p.k <= 1024) return start(row_stats_kernel<T, 2, kRowStatsThreads>, 2, kRowStatsThreads);
  return start(row_stats_kernel<T, 1, kRowStatsThreads>, 1, kRowStatsThreads);
}

}  // namespace

Status launch_row_stats(const LinearProblem& p, void* scratch, Overlap overlap, bool beside, cudaStream_t stream,
                        StatsSource* out) {
  switch (p.dtype) {
    case DType::kFloat16:
      return launch<__half>(p, scratch, overlap, beside, stream, out);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, scratch, overlap, beside, stream, out);
    case DType::kFloat32:
      return launch<float>(p, scratch, overlap, beside, stream, out);
  }
  return {"unknown dtype"};
}

}  // namespace onnxfuse::cuda
