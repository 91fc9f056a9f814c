// The product of a warp, for emulator.h: what it needs of ldmatrix is read before its operands are looked at.
#pragma once

#include "hopper_ptx.cuh"

namespace onnxfuse::cuda {

struct WarpProduct {
  template <typename T>
  void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Operands {
      uint32_t a[4], b[2];
      float* d;
    } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, d};
    Fiber* const fiber = current();
    emulation::meet(fiber->cta->products[fiber->warp], 32, emulation::lane(), &mine, [](Meeting& meeting) {
      constexpr bool kBFloat16 = !std::is_same_v<T, __half>;
      float left[16][16], right[16][8];
      auto of = [&](int lane) { return static_cast<const Operands*>(meeting.arguments[lane]); };
      for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) {
          auto value = [&](uint32_t word) { return widened(static_cast<uint16_t>(word >> (16 * half)), kBFloat16); };
          const int group = lane / 4, pair = lane % 4 * 2 + half;
          for (int i = 0; i < 4; ++i) left[group + i % 2 * 8][pair + i / 2 * 8] = value(of(lane)->a[i]);
          for (int i = 0; i < 2; ++i) right[pair + i * 8][group] = value(of(lane)->b[i]);
        }
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
          float sum = 0.0f;
          for (int k = 0; k < 16; ++k) sum += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
          of(lane)->d[i] += sum;
        }
    });
    asm volatile("" ::: "memory");
  }
};

inline WarpProduct with_matrices_read() {
  read_matrices();
  return {};
}
#define multiply_m16n8k16 with_matrices_read().template multiply

}  // namespace onnxfuse::cuda
