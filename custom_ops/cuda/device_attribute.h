// An attribute of the current device.
#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

inline Status device_attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  if (Status s = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  return cuda_status(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
}

}  // namespace onnxfuse::cuda
