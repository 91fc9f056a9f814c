// Division of non-negative integers by a divisor that the host knows: a multiplication and a shift.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace onnxfuse::cuda {

// Exact for 0 <= n < 2^31 and 1 <= divisor < 2^31 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994).
struct Divisor {
  int divisor = 1;
  uint32_t multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int d) : divisor(d) {
    while ((uint64_t{1} << shift) < static_cast<uint64_t>(d)) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - static_cast<uint64_t>(d))) /
                                           static_cast<uint64_t>(d) + 1);
  }

#ifdef __CUDACC__
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>((__umulhi(static_cast<uint32_t>(n), multiplier) + static_cast<uint32_t>(n)) >> shift);
  }
#endif
};

}  // namespace onnxfuse::cuda
