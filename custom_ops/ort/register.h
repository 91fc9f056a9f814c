// One function per op and provider; each appends its op objects, one per dtype. The objects live as long as the process.
#pragma once

#include <vector>

#include "glue.h"

namespace onnxfuse::ort {

using OpObjects = std::vector<const OrtCustomOp*>;

void append_linear_cpu(OpObjects* ops);
void append_gated_linear_cpu(OpObjects* ops);

// The objects of all ops for the CUDA provider; defined in cuda/, linked when ONNXFUSE_CUDA is on.
void append_cuda_ops(OpObjects* ops);

}  // namespace onnxfuse::ort
