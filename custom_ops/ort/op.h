// The shape of a custom op object: one per (op, dtype, execution provider), and what one run of it begins with.
//
// `Definition` names the op and its inputs, checks shapes, and is shared by all providers:
//     static constexpr const char* kName;                     op type
//     static constexpr const char* const* kInputNames;
//     static constexpr size_t kInputs, kRequired;             the first kRequired inputs must be given
//     static constexpr size_t kX, kWeight, kBias, kColsum;    indices of inputs; kColsum is float32 whatever T is
//     static constexpr std::optional<size_t> kResidual;       likewise, where the op has one
//     static constexpr bool kGated;                           y has half as many columns as the product
//     static constexpr Activation kDefaultActivation;
//     static Checked check(const Shape*, const Attributes&);  with error() and output
// `Engine` computes it on one provider: it is constructed from (const OrtKernelInfo*, Dtype, const Attributes&) and has
// void run(const Call<Definition>&) const.
#pragma once

#include <optional>

#include "../common/product_shape.h"
#include "glue.h"

namespace onnxfuse::ort {

// Checks the inputs of a run; throws OpFailure naming op, node, shapes and dtypes.
template <typename Definition>
auto checked_inputs(const std::vector<Input>& inputs, const Attributes& attributes, Dtype dtype,
                    const std::string& node) {
  auto fail = [&](const std::string& why) {
    throw OpFailure(ORT_INVALID_ARGUMENT,
                    describe(Definition::kName, node, why, inputs, Definition::kInputNames));
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].shape.present) continue;
    const auto expected = i == Definition::kColsum ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : element_type(dtype);
    if (inputs[i].type != expected) {
      fail(std::string("`") + Definition::kInputNames[i] + "` must be " + name_of(expected));
    }
  }
  auto checked = Definition::check(shapes_of(inputs).data(), attributes);
  if (!checked.error().empty()) fail(checked.error());
  return checked;
}

// One run: inputs that fit the op and each other, and memory for the output.
template <typename Definition>
struct Call {
  OrtKernelContext* context;
  const std::string& node;
  const Attributes& attributes;
  Dtype dtype;
  std::vector<Input> inputs;
  ProductShape product;   // its sizes are all known
  int64_t rows, columns;  // of y
  void* y;

  const void* data(size_t input) const { return inputs[input].data; }
  const void* residual() const {
    if constexpr (Definition::kResidual) return data(*Definition::kResidual);
    return nullptr;
  }
  std::string describe(const std::string& why) const {
    return ort::describe(Definition::kName, node, why, inputs, Definition::kInputNames);
  }
};

template <typename Definition, typename Engine>
class Kernel {
 public:
  Kernel(const OrtKernelInfo* info, Dtype dtype)
      : dtype_(dtype),
        node_(node_name(info)),
        attributes_(read_attributes(info, Definition::kName, Definition::kDefaultActivation)),
        engine_(info, dtype, attributes_) {}

  void compute(OrtKernelContext* context) const {
    std::vector<Input> inputs = read_inputs(context, Definition::kInputs);
    const auto checked = checked_inputs<Definition>(inputs, attributes_, dtype_, node_);
    const std::vector<int64_t>& dims = checked.output.dims;
    void* y = Ort::KernelContext(context).GetOutput(0, dims).GetTensorMutableRawData();
    const int64_t rows = product(dims, 0, dims.size() - 1), columns = dims.back();
    if (rows == 0 || columns == 0) return;
    engine_.run(Call<Definition>{context, node_, attributes_, dtype_, std::move(inputs), checked.product, rows,
                                 columns, y});
  }

 private:
  Dtype dtype_;
  std::string node_;
  Attributes attributes_;
  Engine engine_;
};

template <typename Definition, typename Engine>
class CustomOp : public OrtCustomOp {
 public:
  // `provider` is null for the CPU provider.
  CustomOp(Dtype dtype, const char* provider) : OrtCustomOp{}, dtype_(dtype), provider_(provider) {
    version = ORT_API_VERSION;
    GetName = [](const OrtCustomOp*) { return Definition::kName; };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider_; };
    GetInputTypeCount = [](const OrtCustomOp*) { return Definition::kInputs; };
    GetInputType = [](const OrtCustomOp* op, size_t index) {
      return index == Definition::kColsum ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : element_type(self(op).dtype_);
    };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
      return index < Definition::kRequired ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
    GetOutputType = [](const OrtCustomOp* op, size_t) { return element_type(self(op).dtype_); };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
    GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
      return guarded([&] {
        check_declared(info);
        *kernel = new Kernel<Definition, Engine>(info, self(op).dtype_);
      });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded([&] { static_cast<Kernel<Definition, Engine>*>(kernel)->compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Definition, Engine>*>(kernel); };
    InferOutputShapeFn = [](const OrtCustomOp* op, OrtShapeInferContext* context) {
      return guarded([&] { self(op).infer(context); });
    };
  }

 private:
  static const CustomOp& self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

  // ONNX Runtime drops the status of shape inference (as of 1.31), so this is what refuses a bad model early.
  static void check_declared(const OrtKernelInfo* info) {
    const Attributes attributes = read_attributes(info, Definition::kName, Definition::kDefaultActivation);
    const std::vector<Input> inputs = read_inputs(info, Definition::kInputs);
    const auto checked = Definition::check(shapes_of(inputs).data(), attributes);
    if (!checked.error().empty()) {
      throw OpFailure(ORT_INVALID_ARGUMENT, describe(Definition::kName, node_name(info), checked.error(), inputs,
                                                     Definition::kInputNames));
    }
  }

  void infer(OrtShapeInferContext* context) const {
    const Attributes attributes = read_attributes(context, Definition::kName, Definition::kDefaultActivation);
    const std::vector<Input> inputs = read_inputs(context, Definition::kInputs);
    const auto checked = Definition::check(shapes_of(inputs).data(), attributes);
    if (!checked.error().empty()) {
      throw OpFailure(ORT_INVALID_ARGUMENT,
                      describe(Definition::kName, "", checked.error(), inputs, Definition::kInputNames));
    }
    // T may be that of another object of this op: ONNX Runtime asks whichever it registered first.
    const ONNXTensorElementDataType type = inputs[0].type;
    std::vector<std::string> leading = inputs[0].names;
    if (!leading.empty()) leading.pop_back();
    set_output_shape(context, checked.output, leading,
                     type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED ? type : element_type(dtype_));
  }

  Dtype dtype_;
  const char* provider_;
};

// Appends the objects of one op on one provider, one per dtype. They live as long as the process.
template <typename Definition, typename Engine>
void append_op(std::vector<const OrtCustomOp*>* ops, const char* provider) {
  static const CustomOp<Definition, Engine> kOps[] = {
      {Dtype::kFloat32, provider}, {Dtype::kFloat16, provider}, {Dtype::kBFloat16, provider}};
  for (const auto& op : kOps) ops->push_back(&op);
}

}  // namespace onnxfuse::ort
