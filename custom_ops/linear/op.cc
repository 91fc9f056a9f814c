// onnxfuse::Linear on the CPU provider.
#include "../ort/cpu_product.h"
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cpu.h"

namespace onnxfuse::ort {
namespace {

class LinearCpu : CpuProduct {
 public:
  using CpuProduct::CpuProduct;

  void run(const Call<Linear>& call) const {
    const bool in_place = call.dtype == Dtype::kFloat32;
    const Scratch scratch(call.context, in_place ? 0 : static_cast<size_t>(call.rows * call.columns) * sizeof(float));
    float* product = in_place ? static_cast<float*>(call.y) : scratch.floats();
    CpuProduct::run(call.context, call.data(Linear::kX), call.data(Linear::kWeight), product, call.rows,
                    call.product.k, call.columns);

    const linear::Epilogue epilogue = {call.dtype,
                                       call.attributes.activation,
                                       product,
                                       call.data(Linear::kBias),
                                       call.residual(),
                                       call.y,
                                       call.columns};
    const bool nothing_left =
        in_place && epilogue.activation == Activation::kNone && !epilogue.bias && !epilogue.residual;
    if (nothing_left) return;
    parallel_for(call.context, call.rows * linear::units_per_row(call.columns), call.rows * call.columns,
                 [&](int64_t begin, int64_t end) { linear::finish_units(epilogue, begin, end); });
  }
};

}  // namespace

void append_linear_cpu(OpObjects* ops) { append_op<Linear, LinearCpu>(ops, nullptr); }

}  // namespace onnxfuse::ort
