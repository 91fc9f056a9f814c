#include "cpu.h"

namespace onnxfuse::gated_linear {
namespace {

constexpr int64_t kUnit = 1024;  // features

// Whole blocks of `interleave` features, about kUnit of them.
int64_t unit_size(const Epilogue& e) {
  if (e.interleave == 0) return kUnit;
  return e.interleave >= kUnit ? e.interleave : kUnit / e.interleave * e.interleave;
}

const void* offset(const void* data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + bytes;
}

}  // namespace

int64_t units_per_row(const Epilogue& e) { return (e.features + unit_size(e) - 1) / unit_size(e); }

void finish_units(const Epilogue& e, int64_t begin, int64_t end) {
  const Rowwise& kernels = rowwise();
  const int64_t units = units_per_row(e), size = unit_size(e), bytes = size_of(e.dtype);
  const int64_t block = e.interleave == 0 ? e.features : e.interleave;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / units;
    const float* product = e.product + row * 2 * e.features;
    char* y = static_cast<char*>(e.y) + row * e.features * bytes;
    const int64_t last = unit % units * size + size < e.features ? unit % units * size + size : e.features;
    for (int64_t first = unit % units * size; first < last;) {
      // Within one block, `count` gates lie together, and their ups one block further on.
      const int64_t in_block = first % block;
      const int64_t until = first - in_block + block < last ? first - in_block + block : last;
      const int64_t count = until - first;
      const int64_t gate = first / block * 2 * block + in_block;
      kernels.finish_gated(e.dtype, product + gate, product + gate + block, offset(e.bias, gate * bytes),
                           offset(e.bias, (gate + block) * bytes), y + first * bytes, count, e.activation);
      first = until;
    }
  }
}

}  // namespace onnxfuse::gated_linear
