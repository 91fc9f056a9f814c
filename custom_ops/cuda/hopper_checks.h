// Conditions that both sm_90a families put on a problem.
#pragma once

#include <climits>

#include "tensor_map.h"

namespace onnxfuse::cuda {

inline bool aligned_16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline std::string hopper_refusal(const LinearProblem& p, int half_rows) {
  if (p.dtype == DType::kFloat32) return "float32 has no sm_90a kernel";
  if (p.layout != Layout::kNK) return "the weight is not K-major";
  if (p.m <= 0 || p.n <= 0 || p.k <= 0) return "an extent is zero";
  if (p.k % 8 || p.n % 8) return "K and N are not multiples of 8";
  if (p.m > INT_MAX / 2 || p.packed_columns() > INT_MAX / 2 || p.k > INT_MAX / 2) return "an extent exceeds 2^30";
  if (!aligned_16(p.x) || !aligned_16(p.weight) || !aligned_16(p.y) || !aligned_16(p.bias) ||
      !aligned_16(p.residual) || !aligned_16(p.colsum))
    return "a pointer is not 16-byte aligned";
  if (p.norm == Norm::kLayer && p.colsum == nullptr) return "LayerNorm needs the column sums";
  if (p.gated && p.interleave > 0 && (p.interleave % 8 || (half_rows % p.interleave && p.interleave % half_rows)))
    return "the interleaved blocks do not fit the tile";
  return {};
}

}  // namespace onnxfuse::cuda
