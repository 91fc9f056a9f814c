// onnxfuse::GatedLinear on the CPU provider.
#include "../ort/cpu_product.h"
#include "../ort/definitions.h"
#include "../ort/register.h"
#include "cpu.h"

namespace onnxfuse::ort {
namespace {

class GatedLinearCpu : CpuProduct {
 public:
  using CpuProduct::CpuProduct;

  void run(const Call<GatedLinear>& call) const {
    const int64_t elements = call.rows * call.product.columns;
    const Scratch scratch(call.context, static_cast<size_t>(elements) * sizeof(float));
    CpuProduct::run(call.context, call.data(GatedLinear::kX), call.data(GatedLinear::kWeight), scratch.floats(),
                    call.rows, call.product.k, call.product.columns);

    const gated_linear::Epilogue epilogue = {call.dtype,
                                             call.attributes.activation,
                                             scratch.floats(),
                                             call.data(GatedLinear::kBias),
                                             call.y,
                                             call.columns,
                                             call.attributes.interleave};
    parallel_for(call.context, call.rows * gated_linear::units_per_row(epilogue), elements,
                 [&](int64_t begin, int64_t end) { gated_linear::finish_units(epilogue, begin, end); });
  }
};

}  // namespace

void append_gated_linear_cpu(OpObjects* ops) { append_op<GatedLinear, GatedLinearCpu>(ops, nullptr); }

}  // namespace onnxfuse::ort
