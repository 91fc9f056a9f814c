// norm(x) · W in float32 on the CPU: the part that Linear and GatedLinear have in common.
#pragma once

#include "glue.h"

namespace onnxfuse::ort {

class CpuProduct {
 public:
  // Reads input 1 (the weight) if it is constant, half precision and of layout KN: it is transposed once and for all.
  CpuProduct(const OrtKernelInfo* info, Dtype dtype, const Attributes& attributes);

  // out[rows, columns] = norm(x[rows, k]) · W. The shapes have been checked.
  void run(OrtKernelContext* context, const void* x, const void* weight, float* out, int64_t rows, int64_t k,
           int64_t columns) const;

 private:
  // By ONNX Runtime's GEMM.
  void multiply(OrtKernelContext* context, const float* x, const float* weight, float* out, int64_t rows, int64_t k,
                int64_t columns) const;

  Dtype dtype_;
  Attributes attributes_;
  std::vector<uint16_t> transposed_weight_;  // see the constructor; else empty
  Ort::Op gemm_{nullptr};
};

}  // namespace onnxfuse::ort
