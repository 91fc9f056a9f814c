// A random problem, its data where the emulator guards it, and its result in float64.
#pragma once

#include "emulator.h"
#include "numeric.cuh"
#include "problem.h"
#include "row_stats.h"

namespace emulation {

using onnxfuse::cuda::Activation;
using onnxfuse::cuda::Norm;
using onnxfuse::cuda::RowStats;

inline int tests;

inline int one_of(std::initializer_list<int> list) { return *(list.begin() + random_number() % list.size()); }
inline bool coin(unsigned of = 2) { return random_number() % of == 0; }

struct Problem {
  int m, n, k, interleave;
  bool gated, bias, residual, separate_statistics;
  Norm norm;
  Activation activation;

  int64_t packed() const { return gated ? 2 * n : n; }
  int64_t block() const { return gated && interleave > 0 ? interleave : n; }
};

// Everything but the extents, and n as a multiple of what the interleaved blocks ask for.
inline Problem random_problem(int m, int most_columns, int k, bool gated, std::initializer_list<int> interleaves) {
  Problem p = {};
  p.m = m, p.k = k, p.gated = gated;
  p.interleave = gated && coin() ? one_of(interleaves) : 0;
  const int unit = p.interleave > 0 ? p.interleave : 8;
  p.n = std::max(1, static_cast<int>(1 + random_number() % most_columns) / unit) * unit;
  p.norm = static_cast<Norm>(random_number() % 3);
  p.bias = coin(), p.residual = !gated && coin(), p.separate_statistics = coin();
  p.activation = static_cast<Activation>(one_of({0, 1, 2, 5, 5}));
  return p;
}

template <typename T>
T narrowed(float value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
  const uint16_t bits = _cvtss_sh(value, 0);
  T result;
  std::memcpy(&result, &bits, 2);
  return result;
}
template <typename T>
float wide(T value) {
  uint16_t bits;
  std::memcpy(&bits, &value, 2);
  return std::is_same_v<T, __half> ? _cvtsh_ss(bits) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

template <typename T>
struct Data {
  T *x, *weight, *bias, *residual, *y;
  float* sums;
  RowStats* statistics;
  std::vector<double> scale, mean;

  explicit Data(const Problem& p) : scale(p.m, 1.0), mean(p.m, 0.0) {
    auto fill = [](const char* name, int64_t count, float factor, float offset) {
      T* const values = static_cast<T*>(allocate(name, 2 * count));
      for (int64_t i = 0; i < count; ++i) {
        const int random = static_cast<int>(random_number() & 0xffff) - 32768;
        values[i] = narrowed<T>(random / 19000.0f * factor + offset);
      }
      return values;
    };
    const int64_t packed = p.packed();
    x = fill("x", int64_t{p.m} * p.k, 1.0f, p.norm == Norm::kLayer ? 1.5f : 0.2f);
    weight = fill("weight", packed * p.k, 1.0f / std::sqrt(static_cast<float>(p.k)), 0.0f);
    bias = fill("bias", packed, 1.0f, 0.0f);
    residual = fill("residual", int64_t{p.m} * p.n, 1.0f, 0.0f);
    y = static_cast<T*>(allocate("y", 2 * int64_t{p.m} * p.n));
    sums = static_cast<float*>(allocate("sums", 4 * packed));
    statistics = static_cast<RowStats*>(allocate("statistics", 8 * p.m));
    for (int64_t c = 0; c < packed; ++c) {
      double sum = 0.0;
      for (int k = 0; k < p.k; ++k) sum += wide(weight[c * p.k + k]);
      sums[c] = static_cast<float>(sum);
    }
    for (int row = 0; row < p.m; ++row) {
      double sum = 0.0, squares = 0.0;
      for (int k = 0; k < p.k; ++k) {
        const double v = wide(x[int64_t{row} * p.k + k]);
        sum += v, squares += v * v;
      }
      if (p.norm == Norm::kLayer) mean[row] = sum / p.k;
      if (p.norm != Norm::kNone) scale[row] = 1.0 / std::sqrt(squares / p.k - mean[row] * mean[row] + 1e-5);
      statistics[row] = {static_cast<float>(scale[row]), static_cast<float>(mean[row])};
    }
  }

  // Fails if a result is wrong.
  void check(const Problem& p) const {
    auto activate = [&](double v) {
      if (p.activation == Activation::kSilu) return v / (1.0 + std::exp(-v));
      if (p.activation == Activation::kRelu) return std::max(v, 0.0);
      return p.activation == Activation::kGelu ? 0.5 * v * (1.0 + std::erf(v * std::sqrt(0.5))) : v;
    };
    const double limit = std::is_same_v<T, __half> ? 2e-3 : 1e-2;
    for (int row = 0; row < p.m; ++row)
      for (int j = 0; j < p.n; ++j) {
        double halves[2];
        for (int half = 0; half < (p.gated ? 2 : 1); ++half) {
          const int64_t c = p.gated ? j / p.block() * 2 * p.block() + half * p.block() + j % p.block() : j;
          double sum = 0.0;
          for (int k = 0; k < p.k; ++k)
            sum += static_cast<double>(wide(x[int64_t{row} * p.k + k])) * wide(weight[c * p.k + k]);
          halves[half] = (sum - mean[row] * sums[c]) * scale[row] + (p.bias ? wide(bias[c]) : 0.0f);
        }
        double expected = activate(halves[0]);
        if (p.gated) expected *= halves[1];
        if (p.residual) expected += wide(residual[int64_t{row} * p.n + j]);
        const double error = std::fabs(wide(y[int64_t{row} * p.n + j]) - expected) / (1.0 + std::fabs(expected));
        if (!(error < limit)) fail("wrong result", row, j);
      }
    ++tests;
  }
};

// Until `seconds` have passed, one test after the other; returns what main returns.
inline int run_tests(const std::vector<void (*)()>& all, int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: %s SECONDS SEED\n", argv[0]), 2;
  static char fault_stack[64 * 1024];
  stack_t stack = {};
  stack.ss_sp = fault_stack, stack.ss_size = sizeof fault_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  random_number.seed(static_cast<unsigned>(std::atoi(argv[2])));
  const time_t end = time(nullptr) + std::atoi(argv[1]);
  for (size_t i = 0; time(nullptr) < end || i < all.size(); ++i) all[i % all.size()]();
  std::printf("%d problems\n", tests);
  return 0;
}

}  // namespace emulation
