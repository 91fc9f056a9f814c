// What every op needs of ONNX Runtime: the API object, statuses, tensors, attributes, scratch memory, parallel loops.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <exception>
#include <string>
#include <vector>

#include "../common/attributes.h"
#include "../common/rowwise.h"
#include "../common/shape.h"

namespace onnxfuse::ort {

// A condition that the caller of the op can cause. Becomes an ORT status with this text at the C boundary.
class OpFailure : public std::exception {
 public:
  OpFailure(OrtErrorCode code, std::string text) : code_(code), text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }
  OrtErrorCode code() const { return code_; }

 private:
  OrtErrorCode code_;
  std::string text_;
};

// Runs f and turns any exception into a status, since none may cross the C boundary.
template <typename F>
OrtStatusPtr guarded(F&& f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const OpFailure& failure) {
    return Ort::GetApi().CreateStatus(failure.code(), failure.what());
  } catch (const Ort::Exception& error) {
    return Ort::GetApi().CreateStatus(error.GetOrtErrorCode(), error.what());
  } catch (const std::bad_alloc&) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, "onnxfuse: out of memory");
  } catch (const std::exception& error) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, error.what());
  } catch (...) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, "onnxfuse: unknown error");
  }
}

inline ONNXTensorElementDataType element_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case Dtype::kBFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case Dtype::kFloat32: break;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

const char* name_of(ONNXTensorElementDataType type);

// One input of a node as shape inference or a kernel sees it.
struct Input {
  Shape shape;
  std::vector<std::string> names;      // of the dims, during shape inference; "" for a dim without a name
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const void* data = nullptr;          // null during shape inference, and for an absent input
  const OrtValue* value = nullptr;     // likewise
};

std::vector<Input> read_inputs(const OrtKernelContext* context, size_t count);
std::vector<Input> read_inputs(OrtShapeInferContext* context, size_t count);
std::vector<Input> read_inputs(const OrtKernelInfo* info, size_t count);  // as declared in the model

std::vector<Shape> shapes_of(const std::vector<Input>& inputs);

// "onnxfuse::Linear node `name`: why (x float32[2,3], weight float32[4,5])". The node's name may be empty.
std::string describe(const char* op, const std::string& node, const std::string& why, const std::vector<Input>& inputs,
                     const char* const* input_names);

std::string node_name(const OrtKernelInfo* info);

// The attributes of a fused op. Throws OpFailure for a value that is not allowed.
Attributes read_attributes(const OrtKernelInfo* info, const char* op, Activation default_activation);
Attributes read_attributes(const OrtShapeInferContext* context, const char* op, Activation default_activation);

// `names` are those of the leading dims; they are used where the size is unknown.
void set_output_shape(OrtShapeInferContext* context, const Shape& shape, const std::vector<std::string>& names,
                      ONNXTensorElementDataType type);

// Memory of the session's own CPU allocator for the length of one run.
class Scratch {
 public:
  Scratch(const OrtKernelContext* context, size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* floats() const { return static_cast<float*>(data_); }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

// f(begin, end) over parts of [0, total) on the session's intra-op threads; in the calling thread if the whole
// `work` (in elements touched) is too small to be worth it.
template <typename F>
void parallel_for(OrtKernelContext* context, int64_t total, int64_t work, const F& f) {
  constexpr int64_t kWorthAThread = 16384;
  constexpr int64_t kMaxParts = 256;
  int64_t parts = work / kWorthAThread;
  parts = parts > total ? total : parts;
  parts = parts > kMaxParts ? kMaxParts : parts;
  if (parts <= 1) {
    if (total > 0) f(int64_t{0}, total);
    return;
  }
  struct Call {
    const F* f;
    int64_t total, parts;
  } call{&f, total, parts};
  Ort::ThrowOnError(Ort::GetApi().KernelContext_ParallelFor(
      context,
      [](void* data, size_t part) {
        const Call& c = *static_cast<Call*>(data);
        const int64_t i = static_cast<int64_t>(part);
        (*c.f)(c.total * i / c.parts, c.total * (i + 1) / c.parts);
      },
      static_cast<size_t>(parts), 0, &call));
}

}  // namespace onnxfuse::ort
