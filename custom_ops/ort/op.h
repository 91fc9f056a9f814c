// The shape of a custom op object: one per (op, dtype, execution provider).
//
// `Definition` names the op and its inputs, checks shapes, and is shared by all providers:
//     static constexpr const char* kName;                     op type
//     static constexpr const char* const* kInputNames;
//     static constexpr size_t kInputs, kRequired;             the first kRequired inputs must be given
//     static constexpr size_t kFloat32Input;                  the input that is float32 whatever T is
//     static constexpr Activation kDefaultActivation;
//     static Checked check(const Shape*, const Attributes&);  with error() and output
// `Kernel` is constructed from (const OrtKernelInfo*, Dtype) and has void compute(OrtKernelContext*).
#pragma once

#include "glue.h"

namespace onnxfuse::ort {

template <typename Definition, typename Kernel>
class CustomOp : public OrtCustomOp {
 public:
  // `provider` is null for the CPU provider.
  CustomOp(Dtype dtype, const char* provider) : OrtCustomOp{}, dtype_(dtype), provider_(provider) {
    version = ORT_API_VERSION;
    GetName = [](const OrtCustomOp*) { return Definition::kName; };
    GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider_; };
    GetInputTypeCount = [](const OrtCustomOp*) { return Definition::kInputs; };
    GetInputType = [](const OrtCustomOp* op, size_t index) {
      return index == Definition::kFloat32Input ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : element_type(self(op).dtype_);
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
        *kernel = new Kernel(info, self(op).dtype_);
      });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded([&] { static_cast<Kernel*>(kernel)->compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
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

// Checks the inputs of a run; throws OpFailure naming op, node, shapes and dtypes. To be used by all kernels.
template <typename Definition>
auto checked_inputs(const std::vector<Input>& inputs, const Attributes& attributes, Dtype dtype,
                    const std::string& node) {
  auto fail = [&](const std::string& why) {
    throw OpFailure(ORT_INVALID_ARGUMENT,
                    describe(Definition::kName, node, why, inputs, Definition::kInputNames));
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].shape.present) continue;
    const auto expected = i == Definition::kFloat32Input ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : element_type(dtype);
    if (inputs[i].type != expected) {
      fail(std::string("`") + Definition::kInputNames[i] + "` must be " + name_of(expected));
    }
  }
  auto checked = Definition::check(shapes_of(inputs).data(), attributes);
  if (!checked.error().empty()) fail(checked.error());
  return checked;
}

}  // namespace onnxfuse::ort
