// onnxfuse::Linear on the CPU provider.
#include "../ort/cpu_product.h"
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cpu.h"

namespace onnxfuse::ort {
namespace {

class LinearCpuKernel {
 public:
  LinearCpuKernel(const OrtKernelInfo* info, Dtype dtype)
      : dtype_(dtype),
        node_(node_name(info)),
        attributes_(read_attributes(info, Linear::kName, Linear::kDefaultActivation)),
        product_(info, dtype, attributes_) {}

  void compute(OrtKernelContext* context) const {
    const std::vector<Input> inputs = read_inputs(context, Linear::kInputs);
    const auto checked = checked_inputs<Linear>(inputs, attributes_, dtype_, node_);
    const std::vector<int64_t>& dims = checked.output.dims;
    void* y = Ort::KernelContext(context).GetOutput(0, dims).GetTensorMutableRawData();
    const int64_t columns = checked.product.columns;
    const int64_t rows = product(dims, 0, dims.size() - 1);
    if (rows == 0 || columns == 0) return;

    const bool in_place = dtype_ == Dtype::kFloat32;
    const Scratch scratch(context, in_place ? 0 : static_cast<size_t>(rows * columns) * sizeof(float));
    float* product = in_place ? static_cast<float*>(y) : scratch.floats();
    product_.run(context, inputs[linear::kX].data, inputs[linear::kWeight].data, product, rows, checked.product.k,
                 columns);

    const linear::Epilogue epilogue = {dtype_,
                                       attributes_.activation,
                                       product,
                                       inputs[linear::kBias].data,
                                       inputs[linear::kResidual].data,
                                       y,
                                       columns};
    const bool nothing_left = in_place && attributes_.activation == Activation::kNone && !epilogue.bias && !epilogue.residual;
    if (nothing_left) return;
    parallel_for(context, rows * linear::units_per_row(columns), rows * columns,
                 [&](int64_t begin, int64_t end) { linear::finish_units(epilogue, begin, end); });
  }

 private:
  Dtype dtype_;
  std::string node_;
  Attributes attributes_;
  CpuProduct product_;
};

}  // namespace

void append_linear_cpu(OpObjects* ops) {
  static const CustomOp<Linear, LinearCpuKernel> kOps[] = {
      {Dtype::kFloat32, nullptr}, {Dtype::kFloat16, nullptr}, {Dtype::kBFloat16, nullptr}};
  for (const auto& op : kOps) ops->push_back(&op);
}

}  // namespace onnxfuse::ort
