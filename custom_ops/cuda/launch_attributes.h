// Launching with a cluster and with programmatic stream serialisation.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "problem.h"

namespace onnxfuse::cuda {

constexpr int kSharedMemoryLimit = 232448;  // of a block, sm_90

// More than 48 KB must be allowed once per kernel and device. Always for the most there is: threads that launch the
// same kernel with different amounts must not lower each other's limit. `allowed` has one bit per device.
template <typename Params>
Status allow_shared_memory(void (*kernel)(Params), std::atomic<uint64_t>* allowed) {
  int device = 0;
  if (Status status = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !status.ok()) return status;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (allowed->load(std::memory_order_acquire) & bit) return {};
  Status status = cuda_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemoryLimit),
      "raising the shared-memory limit");
  if (status.ok()) allowed->fetch_or(bit, std::memory_order_release);
  return status;
}

// `cluster` CTAs along x share a cluster; 0: a kernel without clusters.
template <typename Params>
Status launch_cluster(void (*kernel)(Params), std::atomic<uint64_t>* allowed, dim3 grid, int threads, int smem,
                      int cluster, bool overlap, cudaStream_t stream, const Params& params) {
  if (Status status = allow_shared_memory(kernel, allowed); !status.ok()) return status;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = overlap;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 0 ? 2 : 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

// A kernel without cluster; with `overlap` it may start before the preceding one has ended, and has to wait for it.
template <typename... Params, typename... Arguments>
Status launch_after(void (*kernel)(Params...), dim3 grid, int threads, bool overlap, cudaStream_t stream,
                    Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(arguments)...), "launch");
}

}  // namespace onnxfuse::cuda
