// The CPU epilogue of GatedLinear. No ONNX Runtime header.
#pragma once

#include <cstdint>

#include "../common/rowwise.h"

namespace onnxfuse::gated_linear {

struct Epilogue {
  Dtype dtype;
  Activation activation;
  const float* product;  // [rows, 2 * features], packed as `interleave` says
  const void* bias;      // [2 * features], packed likewise, or null
  void* y;               // [rows, features]
  int64_t features;
  int64_t interleave;    // 0: all gates, then all ups
};

// How many units of work one row is cut into.
int64_t units_per_row(const Epilogue& epilogue);

// Finishes the units [begin, end) of all rows' units.
void finish_units(const Epilogue& epilogue, int64_t begin, int64_t end);

}  // namespace onnxfuse::gated_linear
