#include "../ort/register.h"

namespace onnxfuse::ort {

void append_linear_cuda(OpObjects* ops);
void append_gated_linear_cuda(OpObjects* ops);

void append_cuda_ops(OpObjects* ops) {
  append_linear_cuda(ops);
  append_gated_linear_cuda(ops);
}

}  // namespace onnxfuse::ort
