// The few functions of cuBLASLt that are used, found with dlopen: nothing links it, and it need not be there.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>
#include <string>

namespace onnxfuse::cuda {

// The library's ABI, as its documentation gives it.
namespace cublaslt {
struct Algo {
  uint64_t data[8];
};
struct HeuristicResult {
  Algo algo;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
constexpr int kCompute32F = 68, kCompute32FFastTF32 = 77;
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8;  // descriptor attributes
constexpr int kPreferenceWorkspace = 1;
constexpr int kEpilogueDefault = 1, kEpilogueBias = 4, kEpilogueGelu = 32, kEpilogueGeluBias = 36;
}  // namespace cublaslt

// One column-major product D = op(A) B + beta C, with an epilogue along the rows of D.
struct CublasLtProduct {
  const void *a, *b, *c;
  void* d;
  const void* bias;  // null: none
  int64_t m, n, k;   // D is m x n
  bool transpose_a;
  cudaDataType_t input, output;
  int epilogue;
  float beta;
};

constexpr int64_t kCublasLtWorkspace = int64_t{32} << 20;

bool cublaslt_available();

// Enqueues the product; an empty string is success. `workspace` has kCublasLtWorkspace bytes.
// Float32 products are exact unless ONNXFUSE_TF32=1 lets the tensor cores round their operands to 10 bits of mantissa.
std::string cublaslt_multiply(const CublasLtProduct& product, void* workspace, cudaStream_t stream);

}  // namespace onnxfuse::cuda
