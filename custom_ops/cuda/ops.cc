// The ops on the CUDA provider.
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cuda_call.h"

namespace onnxfuse::ort {
namespace {

template <typename Definition>
class CudaEngine : CudaCall {
 public:
  using CudaCall::CudaCall;

  void run(const Call<Definition>& call) const {
    cuda::LinearProblem p = problem();
    p.y = call.y;
    p.x = call.data(Definition::kX);
    p.weight = call.data(Definition::kWeight);
    p.bias = call.data(Definition::kBias);
    p.residual = call.residual();
    p.colsum = static_cast<const float*>(call.data(Definition::kColsum));
    p.gated = Definition::kGated;
    p.m = call.rows;
    p.n = call.columns;
    p.k = call.product.k;
    CudaCall::run(call.context, p, [&](const std::string& why) { return call.describe(why); });
  }
};

}  // namespace

void append_cuda_ops(OpObjects* ops) {
  append_op<Linear, CudaEngine<Linear>>(ops, "CUDAExecutionProvider");
  append_op<GatedLinear, CudaEngine<GatedLinear>>(ops, "CUDAExecutionProvider");
}

}  // namespace onnxfuse::ort
