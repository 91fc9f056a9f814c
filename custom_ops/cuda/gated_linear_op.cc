// onnxfuse::GatedLinear on the CUDA provider.
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cuda_call.h"

namespace onnxfuse::ort {
namespace {

class GatedLinearCudaKernel {
 public:
  GatedLinearCudaKernel(const OrtKernelInfo* info, Dtype dtype)
      : dtype_(dtype),
        node_(node_name(info)),
        attributes_(read_attributes(info, GatedLinear::kName, GatedLinear::kDefaultActivation)),
        call_(info, dtype, attributes_) {}

  void compute(OrtKernelContext* context) const {
    const std::vector<Input> inputs = read_inputs(context, GatedLinear::kInputs);
    const auto checked = checked_inputs<GatedLinear>(inputs, attributes_, dtype_, node_);
    const std::vector<int64_t>& dims = checked.output.dims;
    cuda::LinearProblem p = call_.problem();
    p.y = Ort::KernelContext(context).GetOutput(0, dims).GetTensorMutableRawData();
    p.x = inputs[gated_linear::kX].data;
    p.weight = inputs[gated_linear::kWeight].data;
    p.bias = inputs[gated_linear::kBias].data;
    p.colsum = static_cast<const float*>(inputs[gated_linear::kColsum].data);
    p.gated = 1;
    p.m = product(dims, 0, dims.size() - 1);
    p.n = checked.features;
    p.k = checked.product.k;
    if (p.m == 0 || p.n == 0) return;
    call_.run(context, p, [&](const std::string& why) {
      return describe(GatedLinear::kName, node_, why, inputs, GatedLinear::kInputNames);
    });
  }

 private:
  Dtype dtype_;
  std::string node_;
  Attributes attributes_;
  CudaCall call_;
};

}  // namespace

void append_gated_linear_cuda(OpObjects* ops) {
  static const CustomOp<GatedLinear, GatedLinearCudaKernel> kOps[] = {{Dtype::kFloat32, "CUDAExecutionProvider"},
                                                                      {Dtype::kFloat16, "CUDAExecutionProvider"},
                                                                      {Dtype::kBFloat16, "CUDAExecutionProvider"}};
  for (const auto& op : kOps) ops->push_back(&op);
}

}  // namespace onnxfuse::ort
