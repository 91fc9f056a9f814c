// Conversions and activations in float32. Fast transcendental instructions only where their error is far below
// the rounding of the 16-bit store that follows; float32 outputs use the exact functions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "problem.h"

namespace onnxfuse::cuda {

template <typename T>
struct Numeric;

template <>
struct Numeric<__half> {
  static constexpr bool kFast = true;
  __device__ static float to_float(__half v) { return __half2float(v); }
  __device__ static __half from_float(float v) { return __float2half_rn(v); }
  __device__ static float2 unpack(uint32_t v) { return __half22float2(*reinterpret_cast<const __half2*>(&v)); }
  __device__ static uint32_t pack(float lo, float hi) {
    __half2 v = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&v);
  }
};

template <>
struct Numeric<__nv_bfloat16> {
  static constexpr bool kFast = true;
  __device__ static float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
  __device__ static __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
  __device__ static float2 unpack(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
  __device__ static uint32_t pack(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&v);
  }
};

template <>
struct Numeric<float> {
  static constexpr bool kFast = false;
  __device__ static float to_float(float v) { return v; }
  __device__ static float from_float(float v) { return v; }
};

__device__ __forceinline__ float fast_exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float fast_reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// v[i] / (1 + 2^exponent(v[i])) = v[i] sigmoid(-ln 2 exponent); -inf gives NaN as x * sigmoid(x) does. The unit for
// reciprocals takes eight cycles a warp, so four values share one: 1 / a = b c d / (a b c d). Where a product overflows,
// each of a group takes its own.
template <int kCount, typename F>
__device__ __forceinline__ void times_sigmoid(float (&v)[kCount], F exponent) {
  if constexpr (kCount % 4 != 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= fast_reciprocal(1.0f + fast_exp2(exponent(v[i])));
  } else {
    constexpr int kGroup = kCount % 16 == 0 ? 16 : 4, kQuads = kGroup / 4;
    constexpr float kLargest = 8.5e37f;  // whose reciprocal is not flushed to zero
#pragma unroll
    for (int first = 0; first < kCount; first += kGroup) {
      float* const x = v + first;
      float d[kGroup], low[kQuads], high[kQuads], all[kQuads];
      bool shared = true;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) d[i] = 1.0f + fast_exp2(exponent(x[i]));
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        low[q] = d[4 * q] * d[4 * q + 1], high[q] = d[4 * q + 2] * d[4 * q + 3];
        all[q] = low[q] * high[q];
        shared = shared && all[q] < kLargest;
      }
      if (shared) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const float r = fast_reciprocal(all[q]), of_low = r * high[q], of_high = r * low[q];
          x[4 * q] *= of_low * d[4 * q + 1], x[4 * q + 1] *= of_low * d[4 * q];
          x[4 * q + 2] *= of_high * d[4 * q + 3], x[4 * q + 3] *= of_high * d[4 * q + 2];
        }
      } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) x[i] *= fast_reciprocal(d[i]);
      }
    }
  }
}

// x * sigmoid(scale * x).
template <bool kFast, int kCount>
__device__ __forceinline__ void scaled_silu(float (&v)[kCount], float scale) {
  if constexpr (kFast) {
    times_sigmoid(v, [scale](float x) { return -1.4426950408889634f * scale * x; });
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = v[i] / (1.0f + expf(-scale * v[i]));
  }
}

template <bool kFast, int kCount>
__device__ __forceinline__ void gelu_tanh(float (&v)[kCount]) {
  // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
  if constexpr (kFast) {
    times_sigmoid(v, [](float x) { return x * fmaf(-0.10294324f, x * x, -2.3022082f); });  // -2 u log2(e)
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = v[i];
      v[i] = 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    }
  }
}

template <bool kFast>
__device__ __forceinline__ float gelu_erf(float x) {
  if constexpr (kFast) {
    // q = 0.5 erfc(|x| / sqrt 2) = 2^P(|x|). P, of degree 5, is fitted so that x Phi(x) is right to 8e-5 of itself for
    // x > -4.2, a sixth of float16's rounding, and to 1e-8 below; it falls to -inf. One instruction of the slow unit.
    const float a = fabsf(x);
    float e = fmaf(a, -3.21066531e-4f, 5.83280902e-3f);
    e = fmaf(a, e, -4.82563078e-2f);
    e = fmaf(a, e, -4.64094222e-1f);
    e = fmaf(a, e, -1.14918911f);
    const float q = fast_exp2(fmaf(a, e, -1.00011957f));
    return x * (x < 0.0f ? q : 1.0f - q);  // NaN stays NaN through the product
  }
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

template <bool kFast>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (kFast) {
    const float s = x * x;
    const float near_zero = x * fmaf(s, fmaf(s, 0.13333333f, -0.33333333f), 1.0f);  // 1 - 2/(1+e^2x) cancels there
    const float elsewhere = fmaf(-2.0f, fast_reciprocal(1.0f + fast_exp2(2.8853900817779268f * x)), 1.0f);
    return s < 0.02f ? near_zero : elsewhere;
  }
  return tanhf(x);
}

// Activates an array: the switch is outside the loop, so that the loop body is straight-line code.
template <bool kFast, int kCount>
__device__ __forceinline__ void activate(float (&v)[kCount], Activation activation) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = v[i] < 0.0f ? 0.0f : v[i];
      break;
    case Activation::kGelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = gelu_erf<kFast>(v[i]);
      break;
    case Activation::kGeluTanh:
      gelu_tanh<kFast>(v);
      break;
    case Activation::kQuickGelu:
    case Activation::kSilu:
      scaled_silu<kFast>(v, activation == Activation::kSilu ? 1.0f : 1.702f);
      break;
    case Activation::kTanh:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = tanh_of<kFast>(v[i]);
      break;
  }
}

// Row statistics as the epilogue applies them: y = (acc - mean * colsum) * scale + bias.
struct RowStats {
  float scale;
  float mean;
};

// From sums over a row of (x - shift) and (x - shift)^2; shift = 0 for RMS, x[m, 0] for LayerNorm.
__device__ __forceinline__ RowStats finish_row_stats(Norm norm, float sum, float squares, float shift, float inv_k,
                                                     float epsilon) {
  if (norm == Norm::kNone) return {1.0f, 0.0f};
  if (norm == Norm::kRms) return {rsqrtf(fmaf(squares, inv_k, epsilon)), 0.0f};
  const float offset = sum * inv_k;
  const float variance = fmaf(-offset, offset, squares * inv_k);
  // fmaxf would turn NaN into 0.
  return {rsqrtf((variance < 0.0f ? 0.0f : variance) + epsilon), shift + offset};
}

template <Norm kValue>
struct NormConstant {
  static constexpr Norm value = kValue;
};

template <int kValue>
struct IntConstant {
  static constexpr int value = kValue;
};

// f(IntConstant<0>{}), …, f(IntConstant<kCount - 1>{}).
template <int kCount, int kFirst = 0, typename F>
__device__ __forceinline__ void for_each_index(F&& f) {
  if constexpr (kFirst < kCount) {
    f(IntConstant<kFirst>{});
    for_each_index<kCount, kFirst + 1>(f);
  }
}

template <bool kValue>
struct BoolConstant {
  static constexpr bool value = kValue;
};

// Running sums of a row, in several independent chains: one chain would be bound by the latency of the FMA.
struct RowSums {
  float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float sum[2] = {0.0f, 0.0f};
  __device__ float total() const { return sum[0] + sum[1]; }
  __device__ float total_squares() const { return (squares[0] + squares[1]) + (squares[2] + squares[3]); }
};

// Adds eight 16-bit values; RMS (kShifted false) needs no sum and no shift.
template <typename T, bool kShifted>
__device__ __forceinline__ void accumulate_stats(const uint4& chunk, float shift, RowSums& sums) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 v = Numeric<T>::unpack(words[i]);
    if constexpr (kShifted) {
      v.x -= shift;
      v.y -= shift;
      sums.sum[i % 2] += v.x + v.y;
    }
    sums.squares[i] = fmaf(v.x, v.x, sums.squares[i]);
    sums.squares[i] = fmaf(v.y, v.y, sums.squares[i]);
  }
}

// As above for one of many rows of a thread, where the rows are the independent chains.
template <typename T, bool kShifted>
__device__ __forceinline__ void accumulate_row(const uint4& chunk, float shift, float& sum, float& squares) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 v = Numeric<T>::unpack(words[i]);
    if constexpr (kShifted) {
      v.x -= shift;
      v.y -= shift;
      sum += v.x + v.y;
    }
    squares = fmaf(v.x, v.x, squares);
    squares = fmaf(v.y, v.y, squares);
  }
}

}  // namespace onnxfuse::cuda
