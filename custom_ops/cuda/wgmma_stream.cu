// The list of streaming variants (compiled once per dtype: element.h) and their launcher.
#include <algorithm>

#include "element.h"
#include "hopper_checks.h"
#include "hopper_launch.h"
#include "launch_attributes.h"
#include "wgmma_stream.cuh"

namespace onnxfuse::cuda {

namespace {

template <int kMma, int kGroups, int kTileX>
Status launch(const StreamParams& params, const Plan& plan, int64_t m, int64_t n, cudaStream_t stream) {
  using Tile = StreamTile<Element, kMma, kGroups, kTileX>;
  const int smem = Tile::smem_bytes(params.stages, plan.cluster_m);
  const int tile_out = params.gated ? Tile::kTileW / 2 : Tile::kTileW;
  const dim3 grid(plan.cluster_m, static_cast<unsigned>((m + kTileX - 1) / kTileX),
                  static_cast<unsigned>((n + tile_out - 1) / tile_out));
  static std::atomic<uint64_t> allowed{0};
  return launch_cluster(stream_kernel<Element, kMma, kGroups, kTileX>, &allowed, grid, Tile::kThreads, smem,
                        plan.cluster_m, plan.overlap != 0, stream, params);
}

}  // namespace

// One line a variant, in stream_variants.inc.
Status ONNXFUSE_LAUNCHER(stream)(const StreamParams& params, const Plan& plan, int64_t m, int64_t n,
                                 cudaStream_t stream) {
  switch (plan.variant) {
#define VARIANT(index, mma, groups, tile_x) \
  case index:                               \
    return launch<mma, groups, tile_x>(params, plan, m, n, stream);
#include "stream_variants.inc"
#undef VARIANT
  }
  return {"there is no streaming variant " + std::to_string(plan.variant)};
}

}  // namespace onnxfuse::cuda
