// Division of non-negative integers by a divisor that the host knows: a multiplication and a shift.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ONNXFUSE_BOTH_SIDES __host__ __device__ __forceinline__
#else
#define ONNXFUSE_BOTH_SIDES inline
#endif

namespace onnxfuse::cuda {

// Exact for 0 <= n < 2^31 and 1 <= divisor < 2^31 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994).
struct Divisor {
  int divisor = 1;
  uint32_t multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(int d) : divisor(d) {
    while ((uint64_t{1} << shift) < static_cast<uint64_t>(d)) ++shift;
    const uint64_t above = (uint64_t{1} << shift) - static_cast<uint64_t>(d);
    multiplier = static_cast<uint32_t>((above << 32) / static_cast<uint64_t>(d) + 1);
  }

  ONNXFUSE_BOTH_SIDES int divide(int n) const {
    const uint32_t value = static_cast<uint32_t>(n);
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(value, multiplier);
#else
    const uint32_t high = static_cast<uint32_t>((uint64_t{value} * multiplier) >> 32);
#endif
    return static_cast<int>((high + value) >> shift);
  }
};

}  // namespace onnxfuse::cuda

#undef ONNXFUSE_BOTH_SIDES
