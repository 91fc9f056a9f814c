// The list of tiled variants (compiled once per dtype: element.h) and their launcher.
#include <algorithm>
#include <climits>

#include "element.h"
#include "hopper_checks.h"
#include "hopper_launch.h"
#include "launch_attributes.h"
#include "wgmma_tile.cuh"

namespace onnxfuse::cuda {

namespace {

template <int kGroups, int kTileN, bool kGated, int kSplit>
Status launch(TileParams params, const Plan& plan, int sm_count, cudaStream_t stream) {
  using Tile = TileShape<Element, kGroups, kTileN, kGated, kSplit>;
  const int ctas = kSplit > 1 ? kSplit : params.cluster_m * params.cluster_n;
  const auto groups = [](int64_t extent, int64_t size) { return (extent + size - 1) / size; };
  const int64_t rows = groups(params.m, Tile::kTileM * params.cluster_m);
  const int64_t columns = groups(params.n, Tile::kOutN * params.cluster_n);
  if (rows * columns * ctas > INT_MAX) return {"there are too many tiles"};
  params.tiles = static_cast<int>(rows * columns), params.tile_rows = static_cast<int>(rows);
  params.raster = static_cast<int>(std::min<int64_t>(params.raster, rows));
  const int last = static_cast<int>(rows % params.raster);
  params.band = Divisor(static_cast<int>(params.raster * columns));
  params.weight_hint = rows <= params.raster ? kEvictFirst : kEvictNormal;
  params.full_height = Divisor(params.raster), params.last_height = Divisor(last > 0 ? last : params.raster);
  // A cluster that shares loads has two CTAs, the multiprocessors come in pairs. One that splits K has one tile.
  const int clusters = kSplit > 1 ? params.tiles : std::min(params.tiles, sm_count / ctas);
  params.clusters = clusters, params.k_blocks = (params.k + 63) / 64;
  static std::atomic<uint64_t> allowed{0};
  return launch_cluster(tile_kernel<Element, kGroups, kTileN, kGated, kSplit>, &allowed,
                        dim3(static_cast<unsigned>(clusters * ctas)), Tile::kThreads, Tile::smem_bytes(params.stages),
                        ctas, plan.overlap != 0, stream, params);
}

}  // namespace

Status ONNXFUSE_LAUNCHER(tile)(const TileParams& params, const Plan& plan, int sm_count, cudaStream_t stream) {
  switch (plan.variant) {
#define VARIANT(index, groups, tile_n, gated, split) \
  case index:                                        \
    return launch<groups, tile_n, gated, split>(params, plan, sm_count, stream);
#include "tile_variants.inc"
#undef VARIANT
  }
  return {"there is no tiled variant " + std::to_string(plan.variant)};
}

}  // namespace onnxfuse::cuda
