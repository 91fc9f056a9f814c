// The list of tiled variants (compiled once per dtype: -DONNXFUSE_BFLOAT16 selects bfloat16) and their launcher.
#include <algorithm>

#include "hopper_checks.h"
#include "hopper_launch.h"
#include "launch_attributes.h"
#include "wgmma_tile.cuh"

namespace onnxfuse::cuda {

#ifdef ONNXFUSE_BFLOAT16
using Element = __nv_bfloat16;
#define TILE_LAUNCHER launch_tile_bfloat16
#else
using Element = __half;
#define TILE_LAUNCHER launch_tile_float16
#endif

namespace {

template <int kMma, int kGroups, int kTileN, bool kGated, bool kPingpong>
Status launch(const TileParams& params, const Plan& plan, int sm_count, cudaStream_t stream) {
  using Tile = TileShape<Element, kMma, kGroups, kTileN, kGated, kPingpong>;
  const int ctas = params.cluster_m * params.cluster_n;
  const int64_t tiles_m = (params.m + Tile::kTileM * params.cluster_m - 1) / (Tile::kTileM * params.cluster_m);
  const int64_t tiles_n = (params.n + Tile::kOutN * params.cluster_n - 1) / (Tile::kOutN * params.cluster_n);
  const int64_t resident = sm_count / ctas;  // a cluster has one CTA or two, the multiprocessors come in pairs
  const unsigned clusters = static_cast<unsigned>(std::min(tiles_m * tiles_n, resident));
  static std::atomic<uint64_t> allowed{0};
  return launch_cluster(tile_kernel<Element, kMma, kGroups, kTileN, kGated, kPingpong>, &allowed, dim3(clusters * ctas),
                        Tile::kThreads, Tile::smem_bytes(params.stages), ctas, plan.overlap != 0, stream, params);
}

}  // namespace

Status TILE_LAUNCHER(const TileParams& params, const Plan& plan, int sm_count, cudaStream_t stream) {
  switch (plan.variant) {
#define VARIANT(index, mma, groups, tile_n, gated, pingpong) \
  case index:                                                \
    return launch<mma, groups, tile_n, gated, pingpong>(params, plan, sm_count, stream);
#include "tile_variants.inc"
#undef VARIANT
  }
  return {"there is no tiled variant " + std::to_string(plan.variant)};
}

}  // namespace onnxfuse::cuda
