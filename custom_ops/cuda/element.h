// A family of kernels is compiled once per dtype: -DONNXFUSE_BFLOAT16 selects bfloat16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace onnxfuse::cuda {

#ifdef ONNXFUSE_BFLOAT16
using Element = __nv_bfloat16;
#define ONNXFUSE_LAUNCHER(family) launch_##family##_bfloat16
#else
using Element = __half;
#define ONNXFUSE_LAUNCHER(family) launch_##family##_float16
#endif

}  // namespace onnxfuse::cuda
