// Any shape, layout, alignment and architecture from sm_80 on: 64 x 64 tiles, mma.sync for 16-bit types and FFMA in
// exact float32. Rows are normalised as they are loaded, so LayerNorm needs no column sums here.
#pragma once

#include "mma.cuh"
#include "numeric.cuh"

namespace onnxfuse::cuda {

struct GenericParams {
  const void* x;
  const void* weight;
  const void* bias;
  const void* residual;
  const RowStats* stats;  // [m], null without norm
  void* y;
  int64_t m, n, k;  // n: columns of y
  int64_t column_stride, k_stride;  // of the weight, in elements
  int64_t block;                    // columns of a gate block (n if not interleaved)
  int gated;
  Activation activation;
};

constexpr int kGenericRows = 64, kGenericColumns = 64, kGenericK = 32, kGenericThreads = 128;

// kVectors: 16-bit values, K-major weight, K a multiple of 8, 16-byte pointers.
template <typename T, bool kVectors>
__global__ __launch_bounds__(kGenericThreads) void generic_kernel(const GenericParams p) {
  constexpr bool kHalf = sizeof(T) == 2;
  constexpr int kStride = kHalf ? kGenericK + 8 : kGenericK + 1;  // free of bank conflicts
  constexpr int kOutStride = kGenericColumns + 1;
  __shared__ __align__(16) T x_tile[kGenericRows * kStride];
  __shared__ __align__(16) T w_tile[kGenericColumns * kStride];
  __shared__ float out_tile[kGenericRows * kOutStride];

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tile_out = p.gated ? kGenericColumns / 2 : kGenericColumns;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * tile_out;
  const T* const x = static_cast<const T*>(p.x);
  const T* const weight = static_cast<const T*>(p.weight);

  // Packed weight column of a tile column, or -1 past the end.
  auto packed_column = [&](int c) -> int64_t {
    const int64_t j = column0 + (p.gated ? c % tile_out : c);
    if (j >= p.n) return -1;
    return p.gated ? j / p.block * 2 * p.block + j % p.block + (c / tile_out) * p.block : j;
  };

  for (int64_t row0 = static_cast<int64_t>(blockIdx.y) * kGenericRows; row0 < p.m;
       row0 += static_cast<int64_t>(gridDim.y) * kGenericRows) {
    auto normalised = [&](int64_t row, T value) {
      if (p.stats == nullptr) return value;
      const RowStats s = p.stats[row];
      return Numeric<T>::from_float((Numeric<T>::to_float(value) - s.mean) * s.scale);
    };
    float acc[8][4] = {};  // 16-bit: 8 column groups of mma; float32: 8 rows x 4 columns

    for (int64_t k0 = 0; k0 < p.k; k0 += kGenericK) {
      if constexpr (kVectors) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int line = thread / 4 + i * 32, offset = thread % 4 * 8;
          const int64_t row = row0 + line, column = packed_column(line), k = k0 + offset;
          uint4 xv = make_uint4(0, 0, 0, 0), wv = xv;
          if (row < p.m && k < p.k) xv = *reinterpret_cast<const uint4*>(x + row * p.k + k);
          if (column >= 0 && k < p.k) wv = *reinterpret_cast<const uint4*>(weight + column * p.k + k);
          if (p.stats != nullptr && row < p.m && k < p.k) {
            T values[8];
            *reinterpret_cast<uint4*>(values) = xv;
#pragma unroll
            for (int e = 0; e < 8; ++e) values[e] = normalised(row, values[e]);
            xv = *reinterpret_cast<uint4*>(values);
          }
          *reinterpret_cast<uint4*>(x_tile + line * kStride + offset) = xv;
          *reinterpret_cast<uint4*>(w_tile + line * kStride + offset) = wv;
        }
      } else {
        for (int i = thread; i < kGenericRows * kGenericK; i += kGenericThreads) {
          const int line = i / kGenericK, offset = i % kGenericK;
          const int64_t row = row0 + line, k = k0 + offset;
          x_tile[line * kStride + offset] =
              row < p.m && k < p.k ? normalised(row, x[row * p.k + k]) : Numeric<T>::from_float(0.0f);
        }
        const bool k_major = p.k_stride == 1;
        for (int i = thread; i < kGenericColumns * kGenericK; i += kGenericThreads) {
          const int line = k_major ? i / kGenericK : i % kGenericColumns;
          const int offset = k_major ? i % kGenericK : i / kGenericColumns;
          const int64_t column = packed_column(line), k = k0 + offset;
          w_tile[line * kStride + offset] = column >= 0 && k < p.k ? weight[column * p.column_stride + k * p.k_stride]
                                                                  : Numeric<T>::from_float(0.0f);
        }
      }
      __syncthreads();
      if constexpr (kHalf) {
        const int group = lane / 4, pair = lane % 4 * 2;
        auto word = [&](const T* tile, int line, int k) {
          return *reinterpret_cast<const uint32_t*>(tile + line * kStride + k);
        };
#pragma unroll
        for (int kk = 0; kk < kGenericK; kk += 16) {
          const int line = warp * 16 + group;
          const uint32_t a[4] = {word(x_tile, line, kk + pair), word(x_tile, line + 8, kk + pair),
                                 word(x_tile, line, kk + pair + 8), word(x_tile, line + 8, kk + pair + 8)};
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const uint32_t b[2] = {word(w_tile, j * 8 + group, kk + pair), word(w_tile, j * 8 + group, kk + pair + 8)};
            multiply_m16n8k16<T>(acc[j], a, b[0], b[1]);
          }
        }
      } else {
        const int row = thread / 16 * 8, column = thread % 16;
#pragma unroll 4
        for (int k = 0; k < kGenericK; ++k) {
          float w[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) w[j] = w_tile[(column + j * 16) * kStride + k];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float v = x_tile[(row + i) * kStride + k];
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(v, w[j], acc[i][j]);
          }
        }
      }
      __syncthreads();
    }

    if constexpr (kHalf) {
      const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        out_tile[row * kOutStride + j * 8 + column] = acc[j][0];
        out_tile[row * kOutStride + j * 8 + column + 1] = acc[j][1];
        out_tile[(row + 8) * kOutStride + j * 8 + column] = acc[j][2];
        out_tile[(row + 8) * kOutStride + j * 8 + column + 1] = acc[j][3];
      }
    } else {
      const int row = thread / 16 * 8, column = thread % 16;
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) out_tile[(row + i) * kOutStride + column + j * 16] = acc[i][j];
    }
    __syncthreads();

    auto biased = [&](int line, int c, int64_t packed) {
      const float v = out_tile[line * kOutStride + c];
      return p.bias == nullptr ? v : v + Numeric<T>::to_float(static_cast<const T*>(p.bias)[packed]);
    };
    for (int i = thread; i < kGenericRows * tile_out; i += kGenericThreads) {
      const int line = i / tile_out, c = i % tile_out;
      const int64_t row = row0 + line, column = column0 + c;
      if (row >= p.m || column >= p.n) continue;
      float v[1] = {biased(line, c, packed_column(c))};
      activate<Numeric<T>::kFast>(v, p.activation);
      const int64_t offset = row * p.n + column;
      if (p.gated)
        v[0] *= biased(line, c + tile_out, packed_column(c + tile_out));
      else if (p.residual != nullptr)
        v[0] += Numeric<T>::to_float(static_cast<const T*>(p.residual)[offset]);
      static_cast<T*>(p.y)[offset] = Numeric<T>::from_float(v[0]);
    }
    __syncthreads();
  }
}

}  // namespace onnxfuse::cuda
