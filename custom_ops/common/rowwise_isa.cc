// Compiled once per instruction set, each time into the namespace ONNXFUSE_ISA. The loops are plain C++ that compilers
// vectorise. Nothing of the standard library is called here: an inline function of it, compiled for AVX-512, could be
// the copy that the linker keeps for everyone.
#include "rowwise.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace onnxfuse::ONNXFUSE_ISA {
namespace {

#if defined(_MSC_VER)
#define ONNXFUSE_INLINE __forceinline
#else
#define ONNXFUSE_INLINE inline __attribute__((always_inline))
#endif

constexpr int64_t kLanes = 16;    // accumulators of a sum: enough for one AVX-512 or two AVX registers
constexpr int64_t kBlock = 256;   // elements converted to float32 at a time; stays in the first-level cache

ONNXFUSE_INLINE float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

ONNXFUSE_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// float16 -> float32: exponent and mantissa are shifted into place and rescaled by 2^112, which also is right for
// subnormals; infinity and NaN get the full exponent.
ONNXFUSE_INLINE float widen_f16(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const uint32_t scaled = bits_of(float_of_bits(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t bits = magnitude >= 0x0f800000u ? special : scaled;
  return float_of_bits(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// float32 -> float16, to nearest even: adding 2^k with a fixed k per exponent makes the adder round.
ONNXFUSE_INLINE uint16_t narrow_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to 65536 or more
  half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
  return static_cast<uint16_t>(sign | half);
}

ONNXFUSE_INLINE float widen_bf16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

ONNXFUSE_INLINE uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

ONNXFUSE_INLINE void widen_block(Dtype dtype, const void* x, float* __restrict out, int64_t n) {
  if (dtype == Dtype::kFloat32) {
    const float* in = static_cast<const float*>(x);
    for (int64_t i = 0; i < n; ++i) out[i] = in[i];
    return;
  }
  const uint16_t* in = static_cast<const uint16_t*>(x);
  if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = widen_bf16(in[i]);
    return;
  }
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
  for (; i < n; ++i) out[i] = widen_f16(in[i]);
}

ONNXFUSE_INLINE void narrow_block(Dtype dtype, const float* __restrict x, void* y, int64_t n) {
  uint16_t* out = static_cast<uint16_t*>(y);
  if (dtype == Dtype::kFloat32) {
    float* wide = static_cast<float*>(y);
    for (int64_t i = 0; i < n; ++i) wide[i] = x[i];
  } else if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_f16(x[i]);
  }
}

ONNXFUSE_INLINE const void* advance(Dtype dtype, const void* p, int64_t n) {
  return p == nullptr ? nullptr : static_cast<const char*>(p) + n * size_of(dtype);
}

// exp(x) with a relative error of about 1e-7; overflows to infinity, underflows to 0, keeps NaN.
ONNXFUSE_INLINE float exp_of(float x) {
  float clamped = x < -104.0f ? -104.0f : x;
  clamped = clamped > 89.0f ? 89.0f : clamped;
  // Adding 1.5 * 2^23 rounds to an integer, and leaves that integer in the low bits.
  const float shifted = clamped * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n in two factors, so that n = 128 overflows and n < -126 goes through the subnormals.
  const int32_t exponent = static_cast<int32_t>(bits_of(shifted)) - 0x4b400000;
  const int32_t half = exponent >> 1;
  const float low = float_of_bits(static_cast<uint32_t>(half + 127) << 23);
  const float high = float_of_bits(static_cast<uint32_t>(exponent - half + 127) << 23);
  return p * low * high;
}

ONNXFUSE_INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// erf(x) as x * P(x²) / Q(x²), fitted for the least relative error on |x| <= 3.925, beyond which it rounds to ±1.
ONNXFUSE_INLINE float erf_of(float x) {
  float c = x < -3.925f ? -3.925f : x;
  c = c > 3.925f ? 3.925f : c;
  const float t = c * c;
  float p = 2.0459942788875196e-06f;
  p = p * t + 0.00028482559719122946f;
  p = p * t + 0.003772106021642685f;
  p = p * t + 0.05276789516210556f;
  p = p * t + 0.19058454036712646f;
  p = p * t + 1.1283791065216064f;
  float q = 3.804649168159813e-05f;
  q = q * t + 0.0011637354036793113f;
  q = q * t + 0.014982311986386776f;
  q = q * t + 0.11417874693870544f;
  q = q * t + 0.5022338628768921f;
  q = q * t + 1.0f;
  float y = c * p / q;
  y = y > 1.0f ? 1.0f : y;
  return y < -1.0f ? -1.0f : y;
}

ONNXFUSE_INLINE float tanh_of(float x) {
  // Near 0 the exponential form cancels, so the Taylor series (to x^9, error below 1e-8) is taken there.
  const float t = x * x;
  float p = 62.0f / 2835.0f;
  p = p * t - 17.0f / 315.0f;
  p = p * t + 2.0f / 15.0f;
  p = p * t - 1.0f / 3.0f;
  const float near = x + x * t * p;
  const float far = 1.0f - 2.0f / (1.0f + exp_of(2.0f * x));
  return t < 0.04f ? near : far;
}

template <Activation kActivation>
ONNXFUSE_INLINE float activate(float x) {
  if constexpr (kActivation == Activation::kRelu) return x < 0.0f ? 0.0f : x;  // keeps NaN
  if constexpr (kActivation == Activation::kGelu) return x * (0.5f * (1.0f + erf_of(x * 0.70710678118654752f)));
  if constexpr (kActivation == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(u)) is sigmoid(2u).
    return x * sigmoid_of(1.5957691216057308f * (x + 0.044715f * x * x * x));
  }
  if constexpr (kActivation == Activation::kQuickGelu) return x * sigmoid_of(1.702f * x);
  if constexpr (kActivation == Activation::kSilu) return x * sigmoid_of(x);
  if constexpr (kActivation == Activation::kTanh) return tanh_of(x);
  return x;
}

template <Activation kActivation>
struct Tag {
  static constexpr Activation value = kActivation;
};

// Calls f(Tag<A>) for the A that `activation` names, so that the loop inside is compiled once per activation.
template <typename F>
ONNXFUSE_INLINE void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone: return f(Tag<Activation::kNone>{});
    case Activation::kRelu: return f(Tag<Activation::kRelu>{});
    case Activation::kGelu: return f(Tag<Activation::kGelu>{});
    case Activation::kGeluTanh: return f(Tag<Activation::kGeluTanh>{});
    case Activation::kQuickGelu: return f(Tag<Activation::kQuickGelu>{});
    case Activation::kSilu: return f(Tag<Activation::kSilu>{});
    case Activation::kTanh: return f(Tag<Activation::kTanh>{});
  }
}

ONNXFUSE_INLINE float sum_lanes(const float* lanes) {
  float total = 0.0f;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

float sum(const float* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane];
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += x[i];
  return sum_lanes(lanes);
}

float dot(const float* __restrict a, const float* __restrict b, int64_t n) {
  float lanes[2][kLanes] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[0][lane] += a[i + lane] * b[i + lane];
      lanes[1][lane] += a[i + kLanes + lane] * b[i + kLanes + lane];
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[0][lane] += a[i + lane] * b[i + lane];
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[1][lane] += a[i] * b[i];
  return sum_lanes(lanes[0]) + sum_lanes(lanes[1]);
}

void widen(Dtype dtype, const void* x, float* out, int64_t n) { widen_block(dtype, x, out, n); }

void normalize(Dtype dtype, const void* x, float* out, int64_t k, Norm norm, float epsilon) {
  widen_block(dtype, x, out, k);
  if (norm == Norm::kNone || k == 0) return;
  if (norm == Norm::kLayer) {
    const float mean = sum(out, k) / static_cast<float>(k);
    for (int64_t i = 0; i < k; ++i) out[i] -= mean;
  }
  const float mean_square = dot(out, out, k) / static_cast<float>(k);
  const float scale = 1.0f / __builtin_sqrtf(mean_square + epsilon);
  for (int64_t i = 0; i < k; ++i) out[i] *= scale;
}

void finish(Dtype dtype, const float* product, const void* bias, const void* residual, void* y, int64_t n,
            Activation activation) {
  float value[kBlock], operand[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const float* p = product + begin;
    if (bias != nullptr) {
      widen_block(dtype, advance(dtype, bias, begin), operand, count);
      for (int64_t i = 0; i < count; ++i) value[i] = p[i] + operand[i];
    } else {
      for (int64_t i = 0; i < count; ++i) value[i] = p[i];
    }
    with_activation(activation, [&](auto tag) {
      for (int64_t i = 0; i < count; ++i) value[i] = activate<decltype(tag)::value>(value[i]);
    });
    if (residual != nullptr) {
      widen_block(dtype, advance(dtype, residual, begin), operand, count);
      for (int64_t i = 0; i < count; ++i) value[i] += operand[i];
    }
    narrow_block(dtype, value, const_cast<void*>(advance(dtype, y, begin)), count);
  }
}

void finish_gated(Dtype dtype, const float* gate, const float* up, const void* gate_bias, const void* up_bias, void* y,
                  int64_t n, Activation activation) {
  float g[kBlock], u[kBlock], operand[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    for (int64_t i = 0; i < count; ++i) g[i] = gate[begin + i];
    for (int64_t i = 0; i < count; ++i) u[i] = up[begin + i];
    if (gate_bias != nullptr) {
      widen_block(dtype, advance(dtype, gate_bias, begin), operand, count);
      for (int64_t i = 0; i < count; ++i) g[i] += operand[i];
      widen_block(dtype, advance(dtype, up_bias, begin), operand, count);
      for (int64_t i = 0; i < count; ++i) u[i] += operand[i];
    }
    with_activation(activation, [&](auto tag) {
      for (int64_t i = 0; i < count; ++i) g[i] = activate<decltype(tag)::value>(g[i]) * u[i];
    });
    narrow_block(dtype, g, const_cast<void*>(advance(dtype, y, begin)), count);
  }
}

// A vector register of the instruction set, as GCC and Clang know it.
#if defined(__GNUC__)
#if defined(__AVX512F__)
constexpr int64_t kWidth = 16, kTileRows = 4, kTileColumns = 4;
#elif defined(__AVX2__)
constexpr int64_t kWidth = 8, kTileRows = 4, kTileColumns = 2;
#else
constexpr int64_t kWidth = 4, kTileRows = 4, kTileColumns = 1;
#endif
typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
typedef uint32_t VectorBits __attribute__((vector_size(kWidth * sizeof(uint32_t))));
typedef uint16_t HalfVector __attribute__((vector_size(kWidth * sizeof(uint16_t))));
#else
struct Vector {
  float v[1];
  float operator[](int64_t i) const { return v[i]; }
};
constexpr int64_t kWidth = 1, kTileRows = 4, kTileColumns = 2;
#endif

ONNXFUSE_INLINE Vector load(const float* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// By halves, so that the additions do not wait for each other.
ONNXFUSE_INLINE float sum_of(const Vector& vector) {
  float lanes[kWidth];
  __builtin_memcpy(lanes, &vector, sizeof lanes);
  for (int64_t half = kWidth / 2; half >= 1; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

#if defined(__GNUC__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ONNXFUSE_SUM_TOGETHER
template <int64_t... kLane>
struct Lanes {};
template <int64_t kCount, int64_t... kLane>
struct LanesUpTo : LanesUpTo<kCount - 1, kCount - 1, kLane...> {};
template <int64_t... kLane>
struct LanesUpTo<0, kLane...> {
  using type = Lanes<kLane...>;
};

// In each group of 2 * kHalf lanes: the halves of a summed, then the halves of b summed.
template <int64_t kHalf, int64_t... kLane>
ONNXFUSE_INLINE Vector fold(const Vector& a, const Vector& b, Lanes<kLane...>) {
  constexpr auto source = [](int64_t lane, int64_t second) {
    const int64_t group = lane / (2 * kHalf) * (2 * kHalf), within = lane % (2 * kHalf);
    return (within < kHalf ? 0 : kWidth) + group + second * kHalf + within % kHalf;
  };
  return __builtin_shufflevector(a, b, source(kLane, 0)...) + __builtin_shufflevector(a, b, source(kLane, 1)...);
}

template <int64_t kHalf>
ONNXFUSE_INLINE Vector fold_all(Vector* vectors) {
  for (int64_t i = 0; i < kHalf; ++i) {
    vectors[i] = fold<kHalf>(vectors[i], vectors[i + kHalf], typename LanesUpTo<kWidth>::type{});
  }
  if constexpr (kHalf > 1) return fold_all<kHalf / 2>(vectors);
  return vectors[0];
}
#endif
#endif

template <Dtype kDtype>
ONNXFUSE_INLINE float widen_one(const void* p, int64_t i) {
  if constexpr (kDtype == Dtype::kFloat32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return kDtype == Dtype::kFloat16 ? widen_f16(bits) : widen_bf16(bits);
}

template <Dtype kDtype>
ONNXFUSE_INLINE Vector load_wide(const void* p, int64_t i) {
  if constexpr (kDtype == Dtype::kFloat32) return load(static_cast<const float*>(p) + i);
#if defined(__GNUC__)
  const uint16_t* halves = static_cast<const uint16_t*>(p) + i;
  if constexpr (kDtype == Dtype::kBFloat16) {
    HalfVector bits;
    __builtin_memcpy(&bits, halves, sizeof bits);
    return reinterpret_cast<Vector>(__builtin_convertvector(bits, VectorBits) << 16);
  }
#if defined(__AVX512F__)
  // The unmasked form trips -Wmaybe-uninitialized in GCC's own header.
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#endif
#endif
  float wide[kWidth];
  for (int64_t lane = 0; lane < kWidth; ++lane) wide[lane] = widen_one<kDtype>(p, i + lane);
  return load(wide);
}

ONNXFUSE_INLINE void prefetch(const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#else
  (void)p;
#endif
}

// A tile of kRows x kColumns dot products: each vector that is loaded takes part in several of them. The first tile of
// a group of weight rows (kFetch) asks for the next group, since rows are too short for the hardware to run ahead.
template <Dtype kDtype, int64_t kRows, int64_t kColumns, bool kFetch>
ONNXFUSE_INLINE void multiply_tile(const float* x, const void* weight, float* out, int64_t stride, int64_t k) {
  Vector sums[kRows][kColumns] = {};
  int64_t i = 0;
  for (; i + kWidth <= k; i += kWidth) {
    Vector w[kColumns];
    for (int64_t j = 0; j < kColumns; ++j) {
      w[j] = load_wide<kDtype>(weight, j * k + i);
      if constexpr (kFetch) prefetch(advance(kDtype, weight, (kColumns + j) * k + i));
    }
    for (int64_t r = 0; r < kRows; ++r) {
      const Vector row = load(x + r * k + i);
      for (int64_t j = 0; j < kColumns; ++j) sums[r][j] += row * w[j];
    }
  }
  float totals[kRows * kColumns];
#if defined(ONNXFUSE_SUM_TOGETHER)
  if constexpr (kRows * kColumns == kWidth) {
    const Vector folded = fold_all<kWidth / 2>(&sums[0][0]);
    __builtin_memcpy(totals, &folded, sizeof totals);
  } else
#endif
  {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < kColumns; ++j) totals[r * kColumns + j] = sum_of(sums[r][j]);
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kColumns; ++j) {
      float total = totals[r * kColumns + j];
      for (int64_t t = i; t < k; ++t) total += x[r * k + t] * widen_one<kDtype>(weight, j * k + t);
      out[r * stride + j] = total;
    }
  }
}

template <Dtype kDtype, int64_t kColumns>
ONNXFUSE_INLINE void multiply_columns(const float* x, int64_t rows, const void* weight, float* out, int64_t stride,
                                      int64_t k) {
  int64_t r = 0;
  if (rows >= kTileRows) {
    multiply_tile<kDtype, kTileRows, kColumns, true>(x, weight, out, stride, k);
    r = kTileRows;
  } else if (rows > 0) {
    multiply_tile<kDtype, 1, kColumns, true>(x, weight, out, stride, k);
    r = 1;
  }
  for (; r + kTileRows <= rows; r += kTileRows) {
    multiply_tile<kDtype, kTileRows, kColumns, false>(x + r * k, weight, out + r * stride, stride, k);
  }
  for (; r < rows; ++r) multiply_tile<kDtype, 1, kColumns, false>(x + r * k, weight, out + r * stride, stride, k);
}

template <Dtype kDtype>
void multiply_as(const float* x, int64_t rows, const void* weight, int64_t columns, float* out, int64_t stride,
                 int64_t k) {
  // Rows are taken in groups that stay in the second-level cache while the weights stream past them.
  constexpr int64_t kCachedElements = 64 * 1024;
  int64_t group = kCachedElements / k / kTileRows * kTileRows;
  group = group < kTileRows ? kTileRows : group;
  for (int64_t begin = 0; begin < rows; begin += group) {
    const int64_t count = rows - begin < group ? rows - begin : group;
    const float* first = x + begin * k;
    float* y = out + begin * stride;
    int64_t j = 0;
    for (; j + kTileColumns <= columns; j += kTileColumns) {
      multiply_columns<kDtype, kTileColumns>(first, count, advance(kDtype, weight, j * k), y + j, stride, k);
    }
    for (; j < columns; ++j) {
      multiply_columns<kDtype, 1>(first, count, advance(kDtype, weight, j * k), y + j, stride, k);
    }
  }
}

void multiply(Dtype dtype, const float* x, int64_t rows, const void* weight, int64_t columns, float* out,
              int64_t stride, int64_t k) {
  switch (dtype) {
    case Dtype::kFloat32: return multiply_as<Dtype::kFloat32>(x, rows, weight, columns, out, stride, k);
    case Dtype::kFloat16: return multiply_as<Dtype::kFloat16>(x, rows, weight, columns, out, stride, k);
    case Dtype::kBFloat16: return multiply_as<Dtype::kBFloat16>(x, rows, weight, columns, out, stride, k);
  }
}

}  // namespace

extern const Rowwise kRowwise;
const Rowwise kRowwise = {normalize, widen, finish, finish_gated, multiply, ONNXFUSE_ISA_NAME};

}  // namespace onnxfuse::ONNXFUSE_ISA
