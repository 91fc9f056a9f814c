// Chooses between the versions of rowwise_isa.cc once, by what the CPU can do. The environment variable ONNXFUSE_ISA
// (baseline, avx2, avx512) asks for a lesser one, for tests and for finding out about differences between machines.
#include "rowwise.h"

#include <cstdlib>
#include <cstring>

namespace onnxfuse {

namespace baseline {
extern const Rowwise kRowwise;
}
#if defined(ONNXFUSE_X86_ISAS)
namespace avx2 {
extern const Rowwise kRowwise;
}
namespace avx512 {
extern const Rowwise kRowwise;
}
#endif

namespace {

[[maybe_unused]] bool allowed(const char* isa) {
  const char* wanted = std::getenv("ONNXFUSE_ISA");
  return wanted == nullptr || std::strcmp(wanted, isa) == 0;
}

const Rowwise& choose() {
#if defined(ONNXFUSE_X86_ISAS)
  __builtin_cpu_init();
  if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return avx512::kRowwise;
  }
  if (allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return avx2::kRowwise;
  }
#endif
  return baseline::kRowwise;
}

}  // namespace

const Rowwise& rowwise() {
  static const Rowwise& chosen = choose();
  return chosen;
}

}  // namespace onnxfuse
