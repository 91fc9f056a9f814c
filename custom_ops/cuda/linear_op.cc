// onnxfuse::Linear on the CUDA provider.
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cuda_call.h"

namespace onnxfuse::ort {
namespace {

class LinearCudaKernel {
 public:
  LinearCudaKernel(const OrtKernelInfo* info, Dtype dtype)
      : dtype_(dtype),
        node_(node_name(info)),
        attributes_(read_attributes(info, Linear::kName, Linear::kDefaultActivation)),
        call_(info, dtype, attributes_) {}

  void compute(OrtKernelContext* context) const {
    const std::vector<Input> inputs = read_inputs(context, Linear::kInputs);
    const auto checked = checked_inputs<Linear>(inputs, attributes_, dtype_, node_);
    const std::vector<int64_t>& dims = checked.output.dims;
    cuda::LinearProblem p = call_.problem();
    p.y = Ort::KernelContext(context).GetOutput(0, dims).GetTensorMutableRawData();
    p.x = inputs[linear::kX].data;
    p.weight = inputs[linear::kWeight].data;
    p.bias = inputs[linear::kBias].data;
    p.residual = inputs[linear::kResidual].data;
    p.colsum = static_cast<const float*>(inputs[linear::kColsum].data);
    p.m = product(dims, 0, dims.size() - 1);
    p.n = checked.product.columns;
    p.k = checked.product.k;
    if (p.m == 0 || p.n == 0) return;
    call_.run(context, p, [&](const std::string& why) {
      return describe(Linear::kName, node_, why, inputs, Linear::kInputNames);
    });
  }

 private:
  Dtype dtype_;
  std::string node_;
  Attributes attributes_;
  CudaCall call_;
};

}  // namespace

void append_linear_cuda(OpObjects* ops) {
  static const CustomOp<Linear, LinearCudaKernel> kOps[] = {{Dtype::kFloat32, "CUDAExecutionProvider"},
                                                            {Dtype::kFloat16, "CUDAExecutionProvider"},
                                                            {Dtype::kBFloat16, "CUDAExecutionProvider"}};
  for (const auto& op : kOps) ops->push_back(&op);
}

}  // namespace onnxfuse::ort
