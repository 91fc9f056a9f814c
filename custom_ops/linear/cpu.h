// The CPU epilogue of Linear. No ONNX Runtime header.
#pragma once

#include <cstdint>

#include "../common/rowwise.h"

namespace onnxfuse::linear {

struct Epilogue {
  Dtype dtype;
  Activation activation;
  const float* product;   // [rows, columns]
  const void* bias;       // [columns] or null
  const void* residual;   // [rows, columns] or null
  void* y;                // [rows, columns]; may be `product` itself in float32
  int64_t columns;
};

// How many units of work one row is cut into: wide rows are, so that a single row can use several threads.
int64_t units_per_row(int64_t columns);

// Finishes the units [begin, end) of all rows' units.
void finish_units(const Epilogue& epilogue, int64_t begin, int64_t end);

}  // namespace onnxfuse::linear
