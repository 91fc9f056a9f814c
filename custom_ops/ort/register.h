// One function per op and provider; each adds its op objects (one per dtype) to the domain and throws on failure.
#pragma once

#include "glue.h"

namespace onnxfuse::ort {

void add_linear_cpu(OrtCustomOpDomain* domain);
void add_gated_linear_cpu(OrtCustomOpDomain* domain);

// Adds the objects of all ops for the CUDA provider; defined in cuda/, linked when ONNXFUSE_CUDA is on.
void add_cuda_ops(OrtCustomOpDomain* domain);

}  // namespace onnxfuse::ort
