// The definitions (see op.h) of all ops, for the op objects of every provider.
#pragma once

#include "../gated_linear/shape.h"
#include "../linear/shape.h"
#include "op.h"

namespace onnxfuse::ort {

struct Linear {
  static constexpr const char* kName = "Linear";
  static constexpr const char* const* kInputNames = linear::kInputNames;
  static constexpr size_t kInputs = linear::kInputCount;
  static constexpr size_t kRequired = 2;
  static constexpr size_t kX = linear::kX, kWeight = linear::kWeight, kBias = linear::kBias, kColsum = linear::kColsum;
  static constexpr std::optional<size_t> kResidual = linear::kResidual;
  static constexpr bool kGated = false;
  static constexpr Activation kDefaultActivation = Activation::kNone;
  static linear::Checked check(const Shape* inputs, const Attributes& a) { return linear::check(inputs, a); }
};

struct GatedLinear {
  static constexpr const char* kName = "GatedLinear";
  static constexpr const char* const* kInputNames = gated_linear::kInputNames;
  static constexpr size_t kInputs = gated_linear::kInputCount;
  static constexpr size_t kRequired = 2;
  static constexpr size_t kX = gated_linear::kX, kWeight = gated_linear::kWeight, kBias = gated_linear::kBias,
                          kColsum = gated_linear::kColsum;
  static constexpr std::optional<size_t> kResidual = std::nullopt;
  static constexpr bool kGated = true;
  static constexpr Activation kDefaultActivation = Activation::kSilu;
  static gated_linear::Checked check(const Shape* inputs, const Attributes& a) {
    return gated_linear::check(inputs, a);
  }
};

}  // namespace onnxfuse::ort
