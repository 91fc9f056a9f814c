#include "glue.h"

#include <atomic>
#include <memory>
#include <type_traits>

namespace onnxfuse::ort {
namespace {

using TypeInfo = std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)>;

TypeInfo own(OrtTensorTypeAndShapeInfo* info) {
  return {info, [](OrtTensorTypeAndShapeInfo* p) { Ort::GetApi().ReleaseTensorTypeAndShapeInfo(p); }};
}

void read_type(const OrtTensorTypeAndShapeInfo* info, Input* input) {
  const OrtApi& api = Ort::GetApi();
  size_t rank = 0;
  Ort::ThrowOnError(api.GetTensorElementType(info, &input->type));
  Ort::ThrowOnError(api.GetDimensionsCount(info, &rank));
  std::vector<int64_t> dims(rank);
  Ort::ThrowOnError(api.GetDimensions(info, dims.data(), rank));
  for (int64_t& dim : dims) dim = dim < 0 ? kUnknown : dim;
  input->shape = Shape::Of(std::move(dims));
}

// As read_type, for a type that comes from the model: its shape may be unknown, and it may be that of no tensor.
void read_declared_type(const OrtTensorTypeAndShapeInfo* info, Input* input) {
  read_type(info, input);
  if (input->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) {
    input->shape = Shape::Absent();
  } else if (input->shape.rank() == 0) {
    // An unknown shape looks like a scalar's here, and no input of our ops may be a scalar.
    input->shape = Shape::OfUnknownRank();
  }
}

// Consumes a status; true if it was a success.
bool succeeded(OrtStatusPtr status) {
  if (status == nullptr) return true;
  Ort::GetApi().ReleaseStatus(status);
  return false;
}

[[noreturn]] void refuse_type(const char* op, const char* attribute) {
  throw OpFailure(ORT_INVALID_ARGUMENT,
                  std::string("onnxfuse::") + op + ": attribute `" + attribute + "` has the wrong type or is too long");
}

// The two places that attributes are read from, with one interface: false if the attribute is absent.
class KernelAttributes {
 public:
  KernelAttributes(const OrtKernelInfo* info, const char* op) : info_(info), op_(op) {}

  bool text(const char* name, std::string* value) const {
    if (has_number<float>(name) || has_number<int64_t>(name)) refuse_type(op_, name);
    return get(name, value);
  }
  template <typename T>
  bool number(const char* name, T* value) const {
    if (get(name, value)) return true;
    using Other = std::conditional_t<std::is_same_v<T, float>, int64_t, float>;
    std::string text;
    if (has_number<Other>(name) || get(name, &text)) refuse_type(op_, name);
    return false;
  }

 private:
  bool get(const char* name, std::string* value) const {
    const OrtApi& api = Ort::GetApi();
    size_t size = 0;
    if (!succeeded(api.KernelInfoGetAttribute_string(info_, name, nullptr, &size)) || size == 0) return false;
    std::string buffer(size, '\0');
    if (!succeeded(api.KernelInfoGetAttribute_string(info_, name, buffer.data(), &size))) return false;
    buffer.resize(size - 1);  // without the terminating zero
    *value = std::move(buffer);
    return true;
  }
  bool get(const char* name, float* value) const {
    return succeeded(Ort::GetApi().KernelInfoGetAttribute_float(info_, name, value));
  }
  bool get(const char* name, int64_t* value) const {
    return succeeded(Ort::GetApi().KernelInfoGetAttribute_int64(info_, name, value));
  }
  template <typename T>
  bool has_number(const char* name) const {
    T ignored{};
    return get(name, &ignored);
  }

  const OrtKernelInfo* info_;
  const char* op_;
};

class InferenceAttributes {
 public:
  InferenceAttributes(const OrtShapeInferContext* context, const char* op) : context_(context), op_(op) {}

  bool text(const char* name, std::string* value) const {
    const OrtOpAttr* attribute = find(name);
    if (attribute == nullptr) return false;
    size_t size = 0;
    std::string buffer(64, '\0');
    read(attribute, name, ORT_OP_ATTR_STRING, buffer.data(), buffer.size(), &size);
    buffer.resize(size);
    while (!buffer.empty() && buffer.back() == '\0') buffer.pop_back();
    *value = std::move(buffer);
    return true;
  }
  bool number(const char* name, float* value) const { return scalar(name, ORT_OP_ATTR_FLOAT, value); }
  bool number(const char* name, int64_t* value) const { return scalar(name, ORT_OP_ATTR_INT, value); }

 private:
  const OrtOpAttr* find(const char* name) const {
    const OrtOpAttr* attribute = nullptr;
    return succeeded(Ort::GetApi().ShapeInferContext_GetAttribute(context_, name, &attribute)) ? attribute : nullptr;
  }
  template <typename T>
  bool scalar(const char* name, OrtOpAttrType type, T* value) const {
    const OrtOpAttr* attribute = find(name);
    if (attribute == nullptr) return false;
    size_t size = 0;
    read(attribute, name, type, value, sizeof *value, &size);
    return true;
  }
  void read(const OrtOpAttr* attribute, const char* name, OrtOpAttrType type, void* data, size_t bytes,
            size_t* size) const {
    if (!succeeded(Ort::GetApi().ReadOpAttr(attribute, type, data, bytes, size))) refuse_type(op_, name);
  }
  const OrtShapeInferContext* context_;
  const char* op_;
};

template <typename Parse, typename T>
void read_choice(const std::string& text, const char* op, const char* name, Parse parse, T* value) {
  const auto parsed = parse(text);
  if (!parsed) {
    throw OpFailure(ORT_INVALID_ARGUMENT,
                    std::string("onnxfuse::") + op + ": attribute `" + name + "` is `" + text + "`, which is not allowed");
  }
  *value = *parsed;
}

template <typename Source>
Attributes read_all(const Source& source, const char* op, Activation default_activation) {
  Attributes result;
  result.activation = default_activation;
  std::string text;
  if (source.text("layout", &text)) read_choice(text, op, "layout", parse_layout, &result.layout);
  if (source.text("norm", &text)) read_choice(text, op, "norm", parse_norm, &result.norm);
  if (source.text("activation", &text)) read_choice(text, op, "activation", parse_activation, &result.activation);
  source.number("epsilon", &result.epsilon);
  source.number("interleave", &result.interleave);
  if (!(result.epsilon >= 0.0f)) {
    throw OpFailure(ORT_INVALID_ARGUMENT, std::string("onnxfuse::") + op + ": attribute `epsilon` is negative or NaN");
  }
  if (result.interleave < 0) {
    throw OpFailure(ORT_INVALID_ARGUMENT, std::string("onnxfuse::") + op + ": attribute `interleave` is negative");
  }
  return result;
}

}  // namespace

const char* name_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return "float32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return "float16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: return "bfloat16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return "float64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return "int64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return "int32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return "int8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL: return "bool";
    default: return "another dtype";
  }
}

std::vector<Input> read_inputs(const OrtKernelContext* context, size_t count) {
  const OrtApi& api = Ort::GetApi();
  std::vector<Input> inputs(count);
  size_t given = 0;
  Ort::ThrowOnError(api.KernelContext_GetInputCount(context, &given));
  for (size_t i = 0; i < count && i < given; ++i) {
    const OrtValue* value = nullptr;
    Ort::ThrowOnError(api.KernelContext_GetInput(context, i, &value));
    if (value == nullptr) continue;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    Ort::ThrowOnError(api.GetTensorTypeAndShape(value, &info));
    const TypeInfo owned = own(info);
    read_type(info, &inputs[i]);
    inputs[i].value = value;
    // The API has no getter of const data; kernels only read through this pointer.
    void* data = nullptr;
    Ort::ThrowOnError(api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    inputs[i].data = data;
  }
  return inputs;
}

std::vector<Input> read_inputs(OrtShapeInferContext* context, size_t count) {
  const OrtApi& api = Ort::GetApi();
  std::vector<Input> inputs(count);
  size_t given = 0;
  Ort::ThrowOnError(api.ShapeInferContext_GetInputCount(context, &given));
  for (size_t i = 0; i < count && i < given; ++i) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // stays the context's own
    if (!succeeded(api.ShapeInferContext_GetInputTypeShape(context, i, &info)) || info == nullptr) continue;
    read_declared_type(info, &inputs[i]);
    std::vector<const char*> names(inputs[i].shape.rank(), nullptr);
    if (!names.empty()) Ort::ThrowOnError(api.GetSymbolicDimensions(info, names.data(), names.size()));
    for (const char* name : names) inputs[i].names.emplace_back(name == nullptr ? "" : name);
  }
  return inputs;
}

std::vector<Input> read_inputs(const OrtKernelInfo* info, size_t count) {
  const OrtApi& api = Ort::GetApi();
  std::vector<Input> inputs(count);
  size_t given = 0;
  Ort::ThrowOnError(api.KernelInfo_GetInputCount(info, &given));
  for (size_t i = 0; i < count && i < given; ++i) {
    OrtTypeInfo* type = nullptr;
    if (!succeeded(api.KernelInfo_GetInputTypeInfo(info, i, &type)) || type == nullptr) continue;
    const std::unique_ptr<OrtTypeInfo, void (*)(OrtTypeInfo*)> owned(
        type, [](OrtTypeInfo* p) { Ort::GetApi().ReleaseTypeInfo(p); });
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    if (succeeded(api.CastTypeInfoToTensorInfo(type, &tensor)) && tensor != nullptr) {
      read_declared_type(tensor, &inputs[i]);
    }
  }
  return inputs;
}

std::vector<Shape> shapes_of(const std::vector<Input>& inputs) {
  std::vector<Shape> shapes;
  for (const Input& input : inputs) shapes.push_back(input.shape);
  return shapes;
}

std::string describe(const char* op, const std::string& node, const std::string& why, const std::vector<Input>& inputs,
                     const char* const* input_names) {
  std::string text = std::string("onnxfuse::") + op;
  if (!node.empty()) text += " node `" + node + "`";
  text += ": " + why + " (";
  bool first = true;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].shape.present) continue;
    if (!first) text += ", ";
    first = false;
    text += std::string(input_names[i]) + " " + name_of(inputs[i].type) + to_string(inputs[i].shape);
  }
  return text + ")";
}

std::string node_name(const OrtKernelInfo* info) {
  size_t size = 0;
  if (!succeeded(Ort::GetApi().KernelInfo_GetNodeName(info, nullptr, &size)) || size == 0) return {};
  std::string name(size, '\0');
  if (!succeeded(Ort::GetApi().KernelInfo_GetNodeName(info, name.data(), &size))) return {};
  name.resize(size - 1);
  return name;
}

Attributes read_attributes(const OrtKernelInfo* info, const char* op, Activation default_activation) {
  const std::string node = node_name(info);
  const std::string label = node.empty() ? op : std::string(op) + " node `" + node + "`";
  return read_all(KernelAttributes(info, label.c_str()), label.c_str(), default_activation);
}

Attributes read_attributes(const OrtShapeInferContext* context, const char* op, Activation default_activation) {
  return read_all(InferenceAttributes(context, op), op, default_activation);
}

void set_output_shape(OrtShapeInferContext* context, const Shape& shape, const std::vector<std::string>& names,
                      ONNXTensorElementDataType type) {
  if (!shape.known) return;
  const OrtApi& api = Ort::GetApi();
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Ort::ThrowOnError(api.CreateTensorTypeAndShapeInfo(&info));
  const TypeInfo owned = own(info);
  Ort::ThrowOnError(api.SetTensorElementType(info, type));
  Ort::ThrowOnError(api.SetDimensions(info, shape.dims.data(), shape.rank()));
  // An unknown dim without a name would become the size -1, which a Reshape by this value's Shape takes for a wildcard.
  static std::atomic<uint64_t> unknown_dims{0};
  std::vector<std::string> named(names);
  named.resize(shape.rank());
  std::vector<const char*> symbols(shape.rank(), "");
  for (size_t i = 0; i < symbols.size(); ++i) {
    if (shape.dims[i] != kUnknown) continue;
    if (named[i].empty()) named[i] = "onnxfuse_unknown_" + std::to_string(unknown_dims.fetch_add(1));
    symbols[i] = named[i].c_str();
  }
  if (!symbols.empty()) Ort::ThrowOnError(api.SetSymbolicDimensions(info, symbols.data(), symbols.size()));
  Ort::ThrowOnError(api.ShapeInferContext_SetOutputTypeShape(context, 0, info));
}

Scratch::Scratch(const OrtKernelContext* context, size_t bytes) {
  if (bytes == 0) return;
  static const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::ThrowOnError(Ort::GetApi().KernelContext_GetAllocator(context, cpu, &allocator_));
  data_ = allocator_->Alloc(allocator_, bytes);
  if (data_ == nullptr) {
    Ort::GetApi().ReleaseAllocator(allocator_);
    throw OpFailure(ORT_FAIL, "onnxfuse: no memory for " + std::to_string(bytes) + " bytes of scratch");
  }
}

Scratch::~Scratch() {
  if (allocator_ == nullptr) return;
  allocator_->Free(allocator_, data_);
  Ort::GetApi().ReleaseAllocator(allocator_);
}

}  // namespace onnxfuse::ort
