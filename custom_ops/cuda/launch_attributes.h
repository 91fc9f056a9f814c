// Launching with a cluster and with programmatic stream serialisation.
#pragma once

#include <cuda_runtime.h>

#include "problem.h"

namespace onnxfuse::cuda {

// The limit of a kernel must be raised once per device before it is used with more than 48 KB.
template <typename... Args>
Status allow_shared_memory(void (*kernel)(Args...), int bytes) {
  return cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                     "raising the shared-memory limit");
}

template <typename Params>
Status launch_cluster(void (*kernel)(Params), dim3 grid, int threads, int smem, int cluster, bool overlap,
                      cudaStream_t stream, const Params& params) {
  if (Status status = allow_shared_memory(kernel, smem); !status.ok()) return status;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = overlap;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

}  // namespace onnxfuse::cuda
