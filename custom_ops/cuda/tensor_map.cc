#include "tensor_map.h"

#include <algorithm>

namespace onnxfuse::cuda {
namespace {

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeFunction find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<EncodeFunction>(function);
}

Status encode(CUtensorMap* map, const void* pointer, DType dtype, int rank, const cuuint64_t* dims,
              const cuuint64_t* strides, const cuuint32_t* box) {
  static const EncodeFunction encoder = find_encoder();
  if (encoder == nullptr) return {"the driver has no cuTensorMapEncodeTiled (CUDA 12 or newer is needed)"};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult code = encoder(map, type, rank, const_cast<void*>(pointer), dims, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) return {"cuTensorMapEncodeTiled failed with code " + std::to_string(code)};
  return {};
}

}  // namespace

Status encode_matrix(CUtensorMap* map, const void* pointer, DType dtype, int64_t rows, int64_t columns, int box_rows) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  return encode(map, pointer, dtype, 2, dims, strides, box);
}

Status encode_weight(CUtensorMap* map, const LinearProblem& p, int box_rows) {
  const cuuint64_t k = p.k, block = gate_block(p), halves = p.gated ? 2 : 1, blocks = p.n / block;
  const cuuint64_t dims[4] = {k, block, halves, blocks};
  const cuuint64_t strides[3] = {k * 2, k * 2 * block, k * 2 * block * halves};
  const cuuint32_t rows = static_cast<cuuint32_t>(box_rows);
  const cuuint32_t in_block = p.gated && p.interleave > 0 ? std::min(rows, static_cast<cuuint32_t>(block)) : rows;
  const cuuint32_t box[4] = {64, in_block, 1, rows / in_block};
  return encode(map, p.weight, p.dtype, 4, dims, strides, box);
}

}  // namespace onnxfuse::cuda
