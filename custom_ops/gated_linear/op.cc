// onnxfuse::GatedLinear on the CPU provider.
#include "../ort/cpu_product.h"
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cpu.h"

namespace onnxfuse::ort {
namespace {

class GatedLinearCpuKernel {
 public:
  GatedLinearCpuKernel(const OrtKernelInfo* info, Dtype dtype)
      : dtype_(dtype),
        node_(node_name(info)),
        attributes_(read_attributes(info, GatedLinear::kName, GatedLinear::kDefaultActivation)),
        product_(info, dtype, attributes_) {}

  void compute(OrtKernelContext* context) const {
    const std::vector<Input> inputs = read_inputs(context, GatedLinear::kInputs);
    const auto checked = checked_inputs<GatedLinear>(inputs, attributes_, dtype_, node_);
    const std::vector<int64_t>& dims = checked.output.dims;
    void* y = Ort::KernelContext(context).GetOutput(0, dims).GetTensorMutableRawData();
    const int64_t rows = product(dims, 0, dims.size() - 1);
    if (rows == 0 || checked.features == 0) return;

    const int64_t columns = checked.product.columns;
    const Scratch scratch(context, static_cast<size_t>(rows * columns) * sizeof(float));
    product_.run(context, inputs[gated_linear::kX].data, inputs[gated_linear::kWeight].data, scratch.floats(), rows,
                 checked.product.k, columns);

    const gated_linear::Epilogue epilogue = {
        dtype_, attributes_.activation, scratch.floats(),      inputs[gated_linear::kBias].data,
        y,      checked.features,       attributes_.interleave};
    parallel_for(context, rows * gated_linear::units_per_row(epilogue), rows * columns,
                 [&](int64_t begin, int64_t end) { gated_linear::finish_units(epilogue, begin, end); });
  }

 private:
  Dtype dtype_;
  std::string node_;
  Attributes attributes_;
  CpuProduct product_;
};

}  // namespace

void append_gated_linear_cpu(OpObjects* ops) {
  static const CustomOp<GatedLinear, GatedLinearCpuKernel> kOps[] = {
      {Dtype::kFloat32, nullptr}, {Dtype::kFloat16, nullptr}, {Dtype::kBFloat16, nullptr}};
  for (const auto& op : kOps) ops->push_back(&op);
}

}  // namespace onnxfuse::ort
