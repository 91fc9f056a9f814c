#include "hopper_launch.h"

#include <algorithm>

#include "device_attribute.h"
#include "hopper_checks.h"
#include "launch_attributes.h"
#include "skinny.cuh"
#include "tensor_map.h"
#include "wgmma_stream.cuh"
#include "wgmma_tile.cuh"

namespace onnxfuse::cuda {

Status launch_stream_float16(const StreamParams&, const Plan&, int64_t m, int64_t n, cudaStream_t);
Status launch_stream_bfloat16(const StreamParams&, const Plan&, int64_t m, int64_t n, cudaStream_t);
Status launch_skinny_float16(const StreamParams&, const Plan&, int64_t m, int64_t n, cudaStream_t);
Status launch_skinny_bfloat16(const StreamParams&, const Plan&, int64_t m, int64_t n, cudaStream_t);
Status launch_tile_float16(const TileParams&, const Plan&, int sm_count, cudaStream_t);
Status launch_tile_bfloat16(const TileParams&, const Plan&, int sm_count, cudaStream_t);

namespace {

// Most stages beside what the largest split of K needs.
template <typename Tile>
constexpr int stream_stages_that_fit() {
  int stages = Tile::kMaxStages;
  while (Tile::smem_bytes(stages, 8) > kSharedMemoryLimit) --stages;
  return stages;
}

template <typename Tile>
constexpr int stages_that_fit() {
  int stages = Tile::kMaxStages;
  constexpr int limit = kSharedMemoryLimit - 1024;  // a block of the statistics' kernel takes 1 KB
  while (Tile::smem_bytes(stages) > limit) --stages;
  static_assert(Tile::smem_bytes(2) <= limit);
  return stages;
}

// Rows of x that come to a tile: not those beyond a short x, whose zeros would take the copy engine longer than rows.
int loaded_rows(const LinearProblem& p, int tile_rows, int shared_by) {
  return shared_by > 1 ? tile_rows : static_cast<int>(std::min<int64_t>(p.m, tile_rows));
}

}  // namespace

const std::vector<HopperVariant>& stream_variants() {
  static const std::vector<HopperVariant> variants = {
#define VARIANT(index, mma, groups, tile_x) \
  {tile_x, 64 * mma * groups, false, stream_stages_that_fit<StreamTile<__half, mma, groups, tile_x>>(), 8, true, true},
#include "stream_variants.inc"
#undef VARIANT
#define VARIANT(index, slabs, row_tiles) \
  {8 * row_tiles, 16 * slabs, false, stages_that_fit<SkinnyTile<__half, slabs, row_tiles>>(), 1, true, true},
#include "skinny_variants.inc"
#undef VARIANT
  };
  return variants;
}

const std::vector<HopperVariant>& tile_variants() {
  static const std::vector<HopperVariant> variants = {
#define VARIANT(index, groups, tile_n, gated, split)                                                      \
  {64 * groups, tile_n, gated, stages_that_fit<TileShape<__half, groups, tile_n, gated, split>>(), split, \
   TileShape<__half, groups, tile_n, gated, split>::kOwnStats,                                            \
   TileShape<__half, groups, tile_n, gated, split>::kLeftRegisters >= kRowStatsRegisters},
#include "tile_variants.inc"
#undef VARIANT
  };
  return variants;
}

std::string stream_refusal(const LinearProblem& p, const Plan& plan) {
  if (plan.variant < 0 || plan.variant >= static_cast<int>(stream_variants().size())) return "no such variant";
  const HopperVariant& v = stream_variants()[plan.variant];
  if (std::string why = hopper_refusal(p, v.columns / 2); !why.empty()) return why;
  const int split = plan.cluster_m;
  if (split != 1 && split != 2 && split != 4 && split != 8) return "K is split by 1, 2, 4 or 8";
  if (split > v.split) return "the variant does not split K";
  // Its stages are given back when the next has arrived.
  if (v.split > 1 && plan.stages == 1) return "fewer than two stages";
  if (split > (p.k + 63) / 64) return "K has fewer blocks than the split";
  const int tile_out = p.gated ? v.columns / 2 : v.columns;
  if (tile_out / split % 4) return "the split leaves less than four columns";
  if ((p.m + v.rows - 1) / v.rows > 65535 || (p.n + tile_out - 1) / tile_out > 65535) return "the grid is too large";
  if (plan.stages > v.max_stages) return "the stages exceed the shared memory";
  return {};
}

Status launch_stream(const LinearProblem& p, const Plan& plan, const void* row_stats, cudaStream_t stream) {
  const HopperVariant& v = stream_variants()[plan.variant];
  StreamParams params = {};
  const bool skinny = v.split == 1;
  if (!skinny) {
    const int x_rows = loaded_rows(p, v.rows, 1);
    if (Status s = encode_matrix(&params.x, p.x, p.dtype, p.m, p.k, x_rows); !s.ok()) return s;
    params.stage_bytes = (x_rows + v.columns) * 128;
  }
  const int box_rows = p.gated ? v.columns / 2 : v.columns;  // columns are loaded at once if they are adjacent
  if (Status s = encode_weight(&params.weight, p, box_rows); !s.ok()) return s;
  params.x_pointer = p.x, params.bias = p.bias, params.residual = p.residual, params.colsum = p.colsum, params.y = p.y;
  params.m = static_cast<int>(p.m), params.n = static_cast<int>(p.n), params.k = static_cast<int>(p.k);
  params.stats = static_cast<const RowStats*>(row_stats);
  params.y_stride = p.n;
  params.block = static_cast<int>(gate_block(p));
  params.stages = plan.stages > 0 ? plan.stages : v.max_stages;
  params.gated = p.gated;
  params.prefetch_weight = p.weight_is_constant;
  params.ahead = plan.ahead;
  params.trigger = plan.lead < 0 ? INT_MAX / 2 : plan.lead;
  params.norm = p.norm, params.activation = p.activation, params.epsilon = p.epsilon;
  const bool bfloat16 = p.dtype == DType::kBFloat16;
  const auto launch = skinny ? bfloat16 ? launch_skinny_bfloat16 : launch_skinny_float16
                             : bfloat16 ? launch_stream_bfloat16 : launch_stream_float16;
  return launch(params, plan, p.m, p.n, stream);
}

std::string tile_refusal(const LinearProblem& p, const Plan& plan) {
  if (plan.variant < 0 || plan.variant >= static_cast<int>(tile_variants().size())) return "no such variant";
  const HopperVariant& v = tile_variants()[plan.variant];
  if (v.gated != (p.gated != 0)) return "the variant is for the other op";
  if (plan.cluster_m < 1 || plan.cluster_n < 1 || plan.cluster_m * plan.cluster_n > 2) return "no such cluster";
  const int half_rows = (v.gated ? v.columns / 2 : v.columns) / plan.cluster_m;
  if (half_rows % 8 || v.rows / plan.cluster_n % 8) return "the cluster is too large for the tile";
  if (std::string why = hopper_refusal(p, half_rows); !why.empty()) return why;
  if (plan.stages > v.max_stages) return "the stages exceed the shared memory";
  if (plan.stages != 0 && plan.stages < 2) return "fewer than two stages";
  if (v.split > 1 && plan.cluster_m * plan.cluster_n > 1) return "the cluster splits K already";
  if (v.split > (p.k + 63) / 64) return "K has fewer blocks than the split";
  if (p.norm != Norm::kNone && !v.takes_sums && plan.row_stats == 0)
    return "the tile leaves no registers for the statistics";
  if (plan.raster < 1) return "the raster is not positive";
  return {};
}

Status launch_tile(const LinearProblem& p, const Plan& plan, const StatsSource& row_stats, cudaStream_t stream) {
  const HopperVariant& v = tile_variants()[plan.variant];
  TileParams params = {};
  const int half_rows = (v.gated ? v.columns / 2 : v.columns) / plan.cluster_m;
  const int x_rows = loaded_rows(p, v.rows, plan.cluster_n);
  if (Status s = encode_matrix(&params.x, p.x, p.dtype, p.m, p.k, x_rows / plan.cluster_n); !s.ok()) return s;
  if (Status s = encode_weight(&params.weight, p, half_rows); !s.ok()) return s;
  if (p.residual != nullptr) {
    if (Status s = encode_matrix(&params.residual, p.residual, p.dtype, p.m, p.n, 64); !s.ok()) return s;
  }
  params.bias = p.bias, params.colsum = p.colsum, params.residual_pointer = p.residual, params.y = p.y;
  params.stats = static_cast<const RowStats*>(row_stats.rows);
  params.flags = row_stats.flags, params.nonce = row_stats.nonce, params.stats_blocks = row_stats.blocks;
  params.x_is_ready = row_stats.rows != nullptr && plan.row_stats == 2 && plan.overlap != 0;
  params.m = static_cast<int>(p.m), params.n = static_cast<int>(p.n), params.k = static_cast<int>(p.k);
  params.block = Divisor(static_cast<int>(gate_block(p)));
  params.stages = plan.stages > 0 ? plan.stages : v.max_stages;
  if (p.m < v.rows && p.residual != nullptr)  // every stage is one of x: see where rows are cleared
    params.stages = static_cast<int>(std::min<int64_t>(params.stages, std::max<int64_t>(2, (p.k + 63) / 64)));
  params.stage_bytes = (x_rows + v.columns) * 128;
  params.cluster_m = plan.cluster_m, params.cluster_n = plan.cluster_n, params.raster = plan.raster;
  params.has_residual = p.residual != nullptr;
  params.prefetch_weight = p.weight_is_constant;
  params.x_pointer = p.x;
  params.norm = p.norm, params.activation = p.activation, params.epsilon = p.epsilon;
  int sm_count = 0;
  if (Status s = device_attribute(cudaDevAttrMultiProcessorCount, &sm_count); !s.ok()) return s;
  return p.dtype == DType::kBFloat16 ? launch_tile_bfloat16(params, plan, sm_count, stream)
                                     : launch_tile_float16(params, plan, sm_count, stream);
}

}  // namespace onnxfuse::cuda
