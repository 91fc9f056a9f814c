// Shape rules of Linear, for shape inference and for the kernels of every provider.
#pragma once

#include "../common/product_shape.h"

namespace onnxfuse::linear {

enum Input { kX, kWeight, kBias, kResidual, kColsum, kInputCount };
inline constexpr const char* kInputNames[] = {"x", "weight", "bias", "residual", "colsum"};

struct Checked {
  ProductShape product;
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
  if (product.leading.known) {
    result.output = product.leading;
    result.output.dims.push_back(product.columns);
  } else {
    result.output = Shape::OfUnknownRank();
  }
  const Shape& residual = inputs[kResidual];
  if (residual.present && residual.known) {
    if (!result.output.known) {
      result.output = residual;
      return result;
    }
    bool equal = residual.rank() == result.output.rank();
    for (size_t i = 0; equal && i < residual.rank(); ++i) {
      equal = unify(result.output.dims[i], residual.dims[i], &result.output.dims[i]);
    }
    if (!equal) product.error = "`residual` must have exactly the shape of the output, " + to_string(result.output);
  }
  return result;
}

}  // namespace onnxfuse::linear
