// The list of skinny variants (compiled once per dtype: element.h) and their launcher.
#include "element.h"
#include "hopper_launch.h"
#include "launch_attributes.h"
#include "skinny.cuh"

namespace onnxfuse::cuda {

namespace {

template <int kSlabs, int kRowTiles>
Status launch(const StreamParams& params, const Plan& plan, int64_t m, int64_t n, cudaStream_t stream) {
  using Tile = SkinnyTile<Element, kSlabs, kRowTiles>;
  const int tile_out = params.gated ? Tile::kColumns / 2 : Tile::kColumns;
  const dim3 grid(static_cast<unsigned>((n + tile_out - 1) / tile_out),
                  static_cast<unsigned>((m + Tile::kRows - 1) / Tile::kRows));
  static std::atomic<uint64_t> allowed{0};
  return launch_cluster(skinny_kernel<Element, kSlabs, kRowTiles>, &allowed, grid, Tile::kThreads,
                        Tile::smem_bytes(params.stages), 0, plan.overlap != 0, stream, params);
}

}  // namespace

// One line a variant, in skinny_variants.inc.
Status ONNXFUSE_LAUNCHER(skinny)(const StreamParams& params, const Plan& plan, int64_t m, int64_t n,
                                 cudaStream_t stream) {
  switch (plan.variant) {
#define VARIANT(index, slabs, row_tiles) \
  case index:                            \
    return launch<slabs, row_tiles>(params, plan, m, n, stream);
#include "skinny_variants.inc"
#undef VARIANT
  }
  return {"there is no skinny variant " + std::to_string(plan.variant)};
}

}  // namespace onnxfuse::cuda
