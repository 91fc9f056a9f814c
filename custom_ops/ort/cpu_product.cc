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
  if (dtype_ == Dtype::kFloat32) {
    gemm_ = create_gemm(info, attributes_.layout);
    return;
  }
  if (attributes_.layout == Layout::kNK) return;  // our product, for any number of rows
  int is_constant = 0;
  const OrtValue* weight = nullptr;
  Ort::ThrowOnError(Ort::GetApi().KernelInfoGetConstantInput_tensor(info, 1, &is_constant, &weight));
  if (!is_constant || weight == nullptr) {
    gemm_ = create_gemm(info, Layout::kKN);
    return;
  }
  const Ort::ConstValue tensor(weight);
  const std::vector<int64_t> dims = tensor.GetTensorTypeAndShapeInfo().GetShape();
  if (dims.size() != 2) return;  // refused by the shape check of each run
  const int64_t k = dims[0], columns = dims[1];
  const uint16_t* source = static_cast<const uint16_t*>(tensor.GetTensorRawData());
  transposed_weight_.resize(static_cast<size_t>(k * columns));
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      transposed_weight_[static_cast<size_t>(j * k + i)] = source[i * columns + j];
    }
  }
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
  const bool half = dtype_ != Dtype::kFloat32;
  const void* transposed = transposed_weight_.empty() ? nullptr : transposed_weight_.data();
  const void* k_major = attributes_.layout == Layout::kNK ? weight : transposed;
  if (half ? k_major != nullptr : attributes_.layout == Layout::kNK && rows <= kFewRows) {
    const int64_t units = (columns + kColumnsAtATime - 1) / kColumnsAtATime;
    parallel_for(context, units, rows * columns * k / 4, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumnsAtATime;
      const int64_t last = end * kColumnsAtATime < columns ? end * kColumnsAtATime : columns;
      kernels.multiply(dtype_, normed, rows, static_cast<const char*>(k_major) + first * k * size_of(dtype_),
                       last - first, out + first, columns, k);
    });
  } else if (half) {
    const Scratch weight_scratch(context, static_cast<size_t>(k * columns) * sizeof(float));
    parallel_for(context, k * columns, k * columns, [&](int64_t begin, int64_t end) {
      kernels.widen(dtype_, static_cast<const uint16_t*>(weight) + begin, weight_scratch.floats() + begin, end - begin);
    });
    multiply(context, normed, weight_scratch.floats(), out, rows, k, columns);
  } else {
    multiply(context, normed, static_cast<const float*>(weight), out, rows, k, columns);
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
