// Shapes that may be partly known, and the checks that shape inference and every kernel share. No ONNX Runtime header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onnxfuse {

inline constexpr int64_t kUnknown = -1;

// One input or output. A rank may be unknown (known = false), and so may a dim (kUnknown).
struct Shape {
  bool present = false;
  bool known = false;
  std::vector<int64_t> dims;

  static Shape Absent() { return {}; }
  static Shape Of(std::vector<int64_t> dims) { return {true, true, std::move(dims)}; }
  static Shape OfUnknownRank() { return {true, false, {}}; }
  size_t rank() const { return dims.size(); }
};

// Whether two dims may be equal; if so *merged is the better known of the two.
inline bool unify(int64_t a, int64_t b, int64_t* merged) {
  *merged = a == kUnknown ? b : a;
  return a == kUnknown || b == kUnknown || a == b;
}

inline std::string to_string(const Shape& shape) {
  if (!shape.known) return "[?]";
  std::string text = "[";
  for (size_t i = 0; i < shape.dims.size(); ++i) {
    if (i != 0) text += ",";
    text += shape.dims[i] == kUnknown ? std::string("?") : std::to_string(shape.dims[i]);
  }
  return text + "]";
}

inline int64_t product(const std::vector<int64_t>& dims, size_t first, size_t last) {
  int64_t result = 1;
  for (size_t i = first; i < last; ++i) result *= dims[i];
  return result;
}

}  // namespace onnxfuse
