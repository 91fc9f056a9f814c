#include "generic.h"

#include <algorithm>

#include "generic.cuh"
#include "tensor_map.h"

namespace onnxfuse::cuda {
namespace {

template <typename T>
Status launch(const LinearProblem& p, const void* row_stats, cudaStream_t stream) {
  GenericParams params = {};
  params.x = p.x, params.weight = p.weight, params.bias = p.bias, params.residual = p.residual, params.y = p.y;
  params.stats = static_cast<const RowStats*>(row_stats);
  params.m = p.m, params.n = p.n, params.k = p.k;
  params.column_stride = p.layout == Layout::kNK ? p.k : 1;
  params.k_stride = p.layout == Layout::kNK ? 1 : p.packed_columns();
  params.block = gate_block(p);
  params.gated = p.gated;
  params.activation = p.activation;
  const int64_t tile_out = p.gated ? kGenericColumns / 2 : kGenericColumns;
  const int64_t columns = (p.n + tile_out - 1) / tile_out, rows = (p.m + kGenericRows - 1) / kGenericRows;
  if (columns > 0x7fffffff) return {"the output has too many columns"};
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(std::min<int64_t>(rows, 65535)));
  const auto aligned = [](const void* q) { return reinterpret_cast<uintptr_t>(q) % 16 == 0; };
  if (sizeof(T) == 2 && p.layout == Layout::kNK && p.k % 8 == 0 && aligned(p.x) && aligned(p.weight)) {
    if constexpr (sizeof(T) == 2) generic_kernel<T, true><<<grid, kGenericThreads, 0, stream>>>(params);
  } else {
    generic_kernel<T, false><<<grid, kGenericThreads, 0, stream>>>(params);
  }
  return cuda_status(cudaGetLastError(), "launch");
}

}  // namespace

Status launch_generic(const LinearProblem& p, const void* row_stats, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return {};
  switch (p.dtype) {
    case DType::kFloat16:
      return launch<__half>(p, row_stats, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, row_stats, stream);
    case DType::kFloat32:
      return launch<float>(p, row_stats, stream);
  }
  return {"unknown dtype"};
}

Status check_device() {
  int device = 0, major = 0, minor = 0;
  if (Status s = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  if (Status s = cuda_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                             "cudaDeviceGetAttribute");
      !s.ok())
    return s;
  if (Status s = cuda_status(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                             "cudaDeviceGetAttribute");
      !s.ok())
    return s;
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, generic_kernel<__half, true>);
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  const std::string arch = std::to_string(major * 10 + minor);
  return {"this build of onnxfuse has no kernels for GPU " + std::to_string(device) + " (sm_" + arch + ", " +
          cudaGetErrorString(code) + "); rebuild it with -DCMAKE_CUDA_ARCHITECTURES=" + arch};
}

}  // namespace onnxfuse::cuda
