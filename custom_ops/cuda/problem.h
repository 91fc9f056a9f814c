// What the CUDA launchers compute, in plain types: no ORT header, no device code.
//
//   Linear:       y[M,N] = activation(norm(x)[M,K] . W + bias[N]) + residual[M,N]
//   GatedLinear:  [g, u] = norm(x) . W + bias,  y[M,F] = activation(g) * u
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace onnxfuse::cuda {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class Norm : int32_t { kNone = 0, kRms = 1, kLayer = 2 };
enum class Activation : int32_t { kNone = 0, kRelu, kGelu, kGeluTanh, kQuickGelu, kSilu, kTanh };
enum class Layout : int32_t { kNK = 0, kKN = 1 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// One call. Every pointer is device memory; absent inputs are null.
struct LinearProblem {
  const void* x = nullptr;         // [m, k]
  const void* weight = nullptr;    // [n_packed, k] (NK) or [k, n_packed] (KN); n_packed = gated ? 2 n : n
  const void* bias = nullptr;      // [n_packed]
  const void* residual = nullptr;  // [m, n], plain Linear only
  const float* colsum = nullptr;   // [n_packed], needed for Norm::kLayer
  void* y = nullptr;               // [m, n]
  int64_t m = 0, n = 0, k = 0;     // n: columns of y
  int64_t interleave = 0;          // gated: 0 = all gate columns, then all up columns; b = blocks of b alternate
  DType dtype = DType::kFloat16;
  Norm norm = Norm::kNone;
  Activation activation = Activation::kNone;
  Layout layout = Layout::kNK;
  float epsilon = 1e-5f;
  int32_t gated = 0;
  int32_t weight_is_constant = 0;  // may be read before the preceding kernel of the stream has finished

  int64_t packed_columns() const { return gated ? 2 * n : n; }
};

// The kernel families; a Plan names one variant of one family and its run-time knobs.
enum class Path : int32_t {
  kGeneric = 0,  // mma.sync or FFMA tiles with predicated loads: any shape, any architecture
  kStream = 1,   // sm_90a, few rows: weights as the 64-row wgmma operand, K split inside a cluster; or skinny, no cluster
  kTile = 2,     // sm_90a, persistent warp-specialised tiles with TMA multicast: many rows
  kVendor = 3,   // cuBLASLt, then one kernel for what it cannot fuse
};

struct Plan {
  Path path = Path::kGeneric;
  int32_t variant = 0;    // index into the family's list
  int32_t stages = 0;     // 0: as many as fit
  int32_t cluster_m = 1;  // kTile: CTAs that share a weight tile; kStream: CTAs that split K
  int32_t cluster_n = 1;  // kTile: CTAs that share a tile of x
  int32_t raster = 8;     // kTile: tile rows walked together, for L2 reuse
  // The norm's statistics: 0, from the product's own kernel; else from one before it, which (kTile) runs beside it and
  // says by flags when x and when they are there (1), or lets it start when x is there, and is waited for (2).
  int32_t row_stats = 0;
  int32_t lead = 0;       // kStream: K blocks before the last at which the next kernel may start; negative: at once
  int32_t ahead = 0;      // kStream, skinny: K blocks beyond the ring whose weights are fetched into L2 before x is there
  int32_t overlap = 1;    // 0: an ordinary launch, which waits for the preceding kernel
};

struct Status {
  std::string error;  // empty: success
  bool ok() const { return error.empty(); }
};

Status cuda_status(cudaError_t code, const char* what);

}  // namespace onnxfuse::cuda
