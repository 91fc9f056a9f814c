#include "cpu_product.h"

#include <array>

namespace onnxfuse::ort {
namespace {

// Up to this many rows our product with K-major weights is faster than ONNX Runtime's Gemm, which first transposes
// the weights into its own packed order; ours reads them as they are, once.
constexpr int64_t kFewRows = 64;
constexpr int64_t kColumnsAtATime = 16;

Ort::Value wrap(const Ort::MemoryInfo& memory, const float* data, int64_t rows, int64_t columns) {
  const std::array<int64_t, 2> dims = {rows, columns};
  const size_t count = static_cast<size_t>(rows * columns);
  return Ort::Value::CreateTensor<float>(memory, const_cast<float*>(data), count, dims.data(), dims.size());
}

// ONNX Runtime's own GEMM, called from inside of this op: its kernels and its threads.
Ort::Op create_gemm(const OrtKernelInfo* info, Layout layout) {
  const char* constraint = "T";
  const ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  if (layout == Layout::kKN) return Ort::Op::Create(info, "MatMul", "", 13, &constraint, &type, 1, nullptr, 0, 2, 1);
  const int64_t one = 1, zero = 0;
  const float unit = 1.0f;
  std::array<Ort::OpAttr, 4> attributes = {
      Ort::OpAttr("transB", &one, 1, ORT_OP_ATTR_INT), Ort::OpAttr("transA", &zero, 1, ORT_OP_ATTR_INT),
      Ort::OpAttr("alpha", &unit, 1, ORT_OP_ATTR_FLOAT), Ort::OpAttr("beta", &unit, 1, ORT_OP_ATTR_FLOAT)};
  return Ort::Op::Create(info, "Gemm", "", 13, &constraint, &type, 1, attributes.data(), attributes.size(), 2, 1);
}

}  // namespace

CpuProduct::CpuProduct(const OrtKernelInfo* info, Dtype dtype, const Attributes& attributes)
    : dtype_(dtype), attributes_(attributes) {
  const bool k_major = attributes_.layout == Layout::kNK;
  if (k_major && dtype_ != Dtype::kFloat32) return;  // our product, for any number of rows
  gemm_ = create_gemm(info, attributes_.layout);
  if (dtype_ == Dtype::kFloat32) return;
  int is_constant = 0;
  const OrtValue* weight = nullptr;
  Ort::ThrowOnError(Ort::GetApi().KernelInfoGetConstantInput_tensor(info, 1, &is_constant, &weight));
  if (!is_constant || weight == nullptr) return;
  const Ort::ConstValue tensor(weight);
  constant_weight_.resize(tensor.GetTensorTypeAndShapeInfo().GetElementCount());
  rowwise().widen(dtype_, tensor.GetTensorRawData(), constant_weight_.data(),
                  static_cast<int64_t>(constant_weight_.size()));
}

void CpuProduct::run(OrtKernelContext* context, const void* x, const void* weight, float* out, int64_t rows, int64_t k,
                     int64_t columns) const {
  if (rows == 0 || columns == 0) return;
  if (k == 0) {
    for (int64_t i = 0; i < rows * columns; ++i) out[i] = 0.0f;
    return;
  }
  const Rowwise& kernels = rowwise();
  const bool as_is = dtype_ == Dtype::kFloat32 && attributes_.norm == Norm::kNone;
  const Scratch rows_scratch(context, as_is ? 0 : static_cast<size_t>(rows * k) * sizeof(float));
  const float* normed = static_cast<const float*>(x);
  if (!as_is) {
    const int64_t row_bytes = k * size_of(dtype_);
    parallel_for(context, rows, rows * k, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        kernels.normalize(dtype_, static_cast<const char*>(x) + row * row_bytes, rows_scratch.floats() + row * k, k,
                          attributes_.norm, attributes_.epsilon);
      }
    });
    normed = rows_scratch.floats();
  }
  if (attributes_.layout == Layout::kNK && (dtype_ != Dtype::kFloat32 || rows <= kFewRows)) {
    const int64_t units = (columns + kColumnsAtATime - 1) / kColumnsAtATime;
    parallel_for(context, units, rows * columns * k / 4, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumnsAtATime;
      const int64_t last = end * kColumnsAtATime < columns ? end * kColumnsAtATime : columns;
      kernels.multiply(dtype_, normed, rows, static_cast<const char*>(weight) + first * k * size_of(dtype_),
                       last - first, out + first, columns, k);
    });
  } else if (dtype_ == Dtype::kFloat32) {
    multiply(context, normed, static_cast<const float*>(weight), out, rows, k, columns);
  } else if (!constant_weight_.empty()) {
    multiply(context, normed, constant_weight_.data(), out, rows, k, columns);
  } else {
    const Scratch weight_scratch(context, static_cast<size_t>(k * columns) * sizeof(float));
    parallel_for(context, k * columns, k * columns, [&](int64_t begin, int64_t end) {
      kernels.widen(dtype_, static_cast<const uint16_t*>(weight) + begin, weight_scratch.floats() + begin, end - begin);
    });
    multiply(context, normed, weight_scratch.floats(), out, rows, k, columns);
  }
}

void CpuProduct::multiply(OrtKernelContext* context, const float* x, const float* weight, float* out, int64_t rows,
                          int64_t k, int64_t columns) const {
  static const Ort::MemoryInfo memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  const bool transposed = attributes_.layout == Layout::kNK;
  const Ort::Value a = wrap(memory, x, rows, k);
  const Ort::Value b = transposed ? wrap(memory, weight, columns, k) : wrap(memory, weight, k, columns);
  const Ort::Value y = wrap(memory, out, rows, columns);
  const OrtValue* operands[] = {a, b};
  OrtValue* results[] = {const_cast<OrtValue*>(static_cast<const OrtValue*>(y))};
  Ort::ThrowOnError(Ort::GetApi().InvokeOp(context, gemm_, operands, 2, results, 1));
}

}  // namespace onnxfuse::ort
