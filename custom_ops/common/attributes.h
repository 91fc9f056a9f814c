// What the fused ops do besides the product, as their attributes say. No ONNX Runtime header here.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace onnxfuse {

enum class Layout { kNK, kKN };
enum class Norm { kNone, kRms, kLayer };
enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kQuickGelu, kSilu, kTanh };

inline constexpr float kDefaultEpsilon = 1e-5f;

struct Attributes {
  Layout layout = Layout::kNK;
  Norm norm = Norm::kNone;
  float epsilon = kDefaultEpsilon;
  Activation activation = Activation::kNone;
  int64_t interleave = 0;  // GatedLinear only
};

inline std::optional<Layout> parse_layout(std::string_view text) {
  if (text == "NK") return Layout::kNK;
  if (text == "KN") return Layout::kKN;
  return std::nullopt;
}

inline std::optional<Norm> parse_norm(std::string_view text) {
  if (text == "none") return Norm::kNone;
  if (text == "rms") return Norm::kRms;
  if (text == "layer") return Norm::kLayer;
  return std::nullopt;
}

inline std::optional<Activation> parse_activation(std::string_view text) {
  if (text == "none") return Activation::kNone;
  if (text == "relu") return Activation::kRelu;
  if (text == "gelu") return Activation::kGelu;
  if (text == "gelu_tanh") return Activation::kGeluTanh;
  if (text == "quick_gelu") return Activation::kQuickGelu;
  if (text == "silu") return Activation::kSilu;
  if (text == "tanh") return Activation::kTanh;
  return std::nullopt;
}

}  // namespace onnxfuse
