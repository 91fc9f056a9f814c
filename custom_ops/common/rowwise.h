// The work on rows of float32 around the product: norm, conversion, bias, activation, residual, store.
// No ONNX Runtime header. Each function handles one row (or a part of one), so that callers choose how to parallelise.
#pragma once

#include <cstdint>

#include "attributes.h"

namespace onnxfuse {

enum class Dtype { kFloat32, kFloat16, kBFloat16 };

inline constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

struct Rowwise {
  // out[0..k) = norm(x[0..k)) as float32; `x` has elements of `dtype`.
  void (*normalize)(Dtype dtype, const void* x, float* out, int64_t k, Norm norm, float epsilon);

  // out[0..n) = float32 of x[0..n).
  void (*widen)(Dtype dtype, const void* x, float* out, int64_t n);

  // y[0..n) = activation(product + bias) + residual, rounded once to `dtype`. `bias` and `residual` have elements of
  // `dtype` and may be null. y may be the same memory as product when dtype is float32.
  void (*finish)(Dtype dtype, const float* product, const void* bias, const void* residual, void* y, int64_t n,
                 Activation activation);

  // y[0..n) = activation(gate + gate_bias) * (up + up_bias), rounded once. The biases may be null.
  void (*finish_gated)(Dtype dtype, const float* gate, const float* up, const void* gate_bias, const void* up_bias,
                       void* y, int64_t n, Activation activation);

  // out[r * stride + j] = dot(x + r * k, weight + j * k) for r in [0, rows), j in [0, columns): a product with K-major
  // weights of `dtype`, which are read as they are, without a packed or widened copy.
  void (*multiply)(Dtype dtype, const float* x, int64_t rows, const void* weight, int64_t columns, float* out,
                   int64_t stride, int64_t k);

  const char* name;
};

// The fastest version for the CPU that this runs on.
const Rowwise& rowwise();

}  // namespace onnxfuse
