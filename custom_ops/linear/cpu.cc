#include "cpu.h"

namespace onnxfuse::linear {
namespace {

constexpr int64_t kUnit = 1024;  // columns

const void* offset(const void* data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + bytes;
}

}  // namespace

int64_t units_per_row(int64_t columns) { return (columns + kUnit - 1) / kUnit; }

void finish_units(const Epilogue& e, int64_t begin, int64_t end) {
  const Rowwise& kernels = rowwise();
  const int64_t units = units_per_row(e.columns);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / units;
    const int64_t first = unit % units * kUnit;
    const int64_t count = e.columns - first < kUnit ? e.columns - first : kUnit;
    const int64_t element = row * e.columns + first;
    const int64_t bytes = size_of(e.dtype);
    kernels.finish(e.dtype, e.product + element, offset(e.bias, first * bytes), offset(e.residual, element * bytes),
                   static_cast<char*>(e.y) + element * bytes, count, e.activation);
  }
}

}  // namespace onnxfuse::linear
