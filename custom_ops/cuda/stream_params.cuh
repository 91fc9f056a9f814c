// What the host tells the kernels for few rows (wgmma_stream.cuh, skinny.cuh), and what their epilogues share.
#pragma once

#include <cuda.h>

#include "numeric.cuh"

namespace onnxfuse::cuda {

struct StreamParams {
  CUtensorMap x;       // [M, K], box 64 x the rows of a tile, or all of M if that is less
  CUtensorMap weight;  // [blocks, 2 or 1, block, K]: gate and up halves are an own dimension
  const void* x_pointer;
  const void* bias;
  const void* residual;
  const float* colsum;
  const RowStats* stats;  // [m], or null: computed by the kernel
  void* y;
  int m, n, k;  // n: columns of y
  int64_t y_stride;
  int block;           // columns of a gate block (n if not interleaved)
  int stages, stage_bytes;
  int gated;
  int prefetch_weight;
  int ahead;    // K blocks beyond the ring whose weights are fetched into L2 meanwhile
  int trigger;  // K blocks before the last load at which the next kernel may start
  Norm norm;
  Activation activation;
  float epsilon;
};

// Columns of the packed weight that hold gate column j and up column j.
__device__ __forceinline__ int64_t gate_column(int j, int block, int gated) {
  return gated ? static_cast<int64_t>(j / block) * 2 * block + j % block : j;
}

// Bias and column sums of four adjacent columns.
template <typename T>
struct QuadColumns {
  float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ void load_bias(const T* four) {
    const uint2 raw = *reinterpret_cast<const uint2*>(four);
    const float2 lo = Numeric<T>::unpack(raw.x), hi = Numeric<T>::unpack(raw.y);
    bias[0] = lo.x, bias[1] = lo.y, bias[2] = hi.x, bias[3] = hi.y;
  }
  __device__ void load_sums(const float* four) {
    const float4 raw = *reinterpret_cast<const float4*>(four);
    sums[0] = raw.x, sums[1] = raw.y, sums[2] = raw.z, sums[3] = raw.w;
  }
  __device__ void load(const void* bias_pointer, const float* colsum, int64_t packed) {
    if (bias_pointer != nullptr) load_bias(static_cast<const T*>(bias_pointer) + packed);
    if (colsum != nullptr) load_sums(colsum + packed);
  }
  __device__ void apply(float (&v)[4], const RowStats& row) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(fmaf(-row.mean, sums[i], v[i]), row.scale, bias[i]);
  }
};

}  // namespace onnxfuse::cuda
