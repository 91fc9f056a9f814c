// Shape rules of GatedLinear, for shape inference and for the kernels of every provider.
#pragma once

#include "../common/product_shape.h"

namespace onnxfuse::gated_linear {

enum Input { kX, kWeight, kBias, kColsum, kInputCount };
inline constexpr const char* kInputNames[] = {"x", "weight", "bias", "colsum"};

struct Checked {
  ProductShape product;
  int64_t features = kUnknown;
  Shape output;
  const std::string& error() const { return product.error; }
};

// `inputs` has kInputCount elements. With fully known shapes and no error, all sizes in the result are known.
inline Checked check(const Shape* inputs, const Attributes& attributes) {
  Checked result;
  result.product =
      check_product(inputs[kX], inputs[kWeight], inputs[kBias], inputs[kColsum], attributes.layout);
  ProductShape& product = result.product;
  if (!product.error.empty()) return result;
  if (product.columns != kUnknown) {
    if (product.columns % 2 != 0) {
      product.error = "`weight` must have an even number of columns, not " + std::to_string(product.columns);
      return result;
    }
    result.features = product.columns / 2;
    if (attributes.interleave > 0 && result.features % attributes.interleave != 0) {
      product.error = std::to_string(result.features) + " features are not divisible by interleave " +
                      std::to_string(attributes.interleave);
      return result;
    }
  }
  result.output = product.leading;
  if (result.output.known) result.output.dims.push_back(result.features);
  return result;
}

}  // namespace onnxfuse::gated_linear
