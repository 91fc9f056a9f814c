// Chooses between the versions of rowwise_isa.cc once, by what the CPU can do.
#include "rowwise.h"

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

const Rowwise& choose() {
#if defined(ONNXFUSE_X86_ISAS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512::kRowwise;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kRowwise;
#endif
  return baseline::kRowwise;
}

}  // namespace

const Rowwise& rowwise() {
  static const Rowwise& chosen = choose();
  return chosen;
}

}  // namespace onnxfuse
