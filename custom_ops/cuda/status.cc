#include "problem.h"

namespace onnxfuse::cuda {

Status cuda_status(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  return {std::string(what) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")"};
}

}  // namespace onnxfuse::cuda
