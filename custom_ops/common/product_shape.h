// Shape rules of norm(x) · W + bias, shared by all ops that begin with it. No ONNX Runtime header.
#pragma once

#include <string>

#include "attributes.h"
#include "shape.h"

namespace onnxfuse {

struct ProductShape {
  Shape leading;              // the dims of x but the last
  int64_t k = kUnknown;       // the last dim of x
  int64_t columns = kUnknown; // of the weight
  std::string error;          // empty if the shapes may be valid
};

inline void check_column_vector(const Shape& vector, const char* name, ProductShape* shape) {
  if (!shape->error.empty() || !vector.present || !vector.known) return;
  if (vector.rank() != 1) {
    shape->error = std::string("`") + name + "` must have rank 1";
  } else if (!unify(shape->columns, vector.dims[0], &shape->columns)) {
    shape->error = std::string("`") + name + "` must have one element per column of `weight`";
  }
}

inline ProductShape check_product(const Shape& x, const Shape& weight, const Shape& bias, const Shape& colsum,
                                  Layout layout) {
  ProductShape shape;
  if (!x.present || !weight.present) {
    shape.error = "the inputs `x` and `weight` are required";
    return shape;
  }
  if (weight.known && weight.rank() != 2) {
    shape.error = "`weight` must have rank 2";
    return shape;
  }
  if (x.known && x.rank() < 1) {
    shape.error = "`x` must have rank 1 or more";
    return shape;
  }
  if (weight.known) {
    shape.columns = weight.dims[layout == Layout::kNK ? 0 : 1];
    shape.k = weight.dims[layout == Layout::kNK ? 1 : 0];
  }
  shape.leading = Shape::OfUnknownRank();
  if (x.known) {
    shape.leading = Shape::Of({x.dims.begin(), x.dims.end() - 1});
    if (!unify(x.dims.back(), shape.k, &shape.k)) {
      shape.error = std::string("the last dim of `x` is not the K of `weight` (layout ") +
                    (layout == Layout::kNK ? "NK" : "KN") + ")";
      return shape;
    }
  }
  check_column_vector(bias, "bias", &shape);
  check_column_vector(colsum, "colsum", &shape);
  return shape;
}

}  // namespace onnxfuse
