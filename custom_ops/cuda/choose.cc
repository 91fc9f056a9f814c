#include "choose.h"

#include <algorithm>

#include "execute.h"
#include "tuning_table.h"
#ifdef ONNXFUSE_HOPPER
#include "hopper_launch.h"
#endif

namespace onnxfuse::cuda {

Device current_device() {
  Device result;
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return result;
  cudaDeviceGetAttribute(&result.sm_count, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  result.architecture = major * 10 + minor;
#ifdef ONNXFUSE_HOPPER
  result.hopper = result.architecture == 90;
#endif
  return result;
}

#ifdef ONNXFUSE_HOPPER
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Microseconds of a tile's K block, of its epilogue, measured on an H200 at sustained clocks.
struct TileCost {
  int variant;
  double per_k_block, epilogue;
};
constexpr TileCost kPlainTiles[] = {{0, 0.68, 2.5}, {1, 0.55, 2.0}, {2, 0.34, 1.0}, {3, 0.21, 0.8}};
constexpr TileCost kGatedTiles[] = {{8, 0.68, 2.5}, {9, 0.60, 2.5}, {10, 0.53, 2.0}, {11, 0.36, 1.2}, {12, 0.22, 0.8}};

double tile_time(const LinearProblem& p, const TileCost& cost, const Device& device) {
  const HopperVariant& v = tile_variants()[cost.variant];
  const int64_t out_columns = v.gated ? v.columns / 2 : v.columns;
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.n, out_columns);
  const int64_t waves = ceil_div(tiles, device.sm_count);
  const double tile = static_cast<double>(ceil_div(p.k, 64)) * cost.per_k_block + cost.epilogue;
  return static_cast<double>(waves) * tile + (p.norm == Norm::kNone ? 3.0 : 5.0);
}

// Narrow tiles of x: enough CTAs to ask for the whole memory bandwidth, and of each about as much shared memory as
// lets the next kernel's first loads run beside this one's end.
Plan stream_plan(const LinearProblem& p, int rows, const Device& device) {
  Plan plan;
  plan.path = Path::kStream;
  plan.variant = rows == 8 ? 0 : rows == 16 ? 2 : rows == 32 ? 4 : 6;
  const HopperVariant& v = stream_variants()[plan.variant];
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.packed_columns(), v.columns);
  const int64_t k_blocks = ceil_div(p.k, 64);
  const int64_t wanted = rows <= 16 ? device.sm_count * 3 / 4 : device.sm_count * 3 / 2;
  int split = 1;
  while (split < 8 && tiles * split < wanted && k_blocks >= split * 4) split *= 2;
  if (split == 1 && k_blocks >= 32) split = 2;
  plan.cluster_m = split;
  const int stage_bytes = (v.rows + v.columns) * 128;
  const int budget = (tiles * split <= device.sm_count ? 110 : rows <= 16 ? 52 : 75) * 1024;
  plan.stages = static_cast<int>(std::max<int64_t>(
      2, std::min<int64_t>({budget / stage_bytes, v.max_stages, std::max<int64_t>(2, ceil_div(k_blocks, split))})));
  plan.lead = rows <= 16 ? 8 : 3;
  return plan;
}

double stream_time(const LinearProblem& p, const Plan& plan, const Device& device) {
  const HopperVariant& v = stream_variants()[plan.variant];
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.packed_columns(), v.columns) * plan.cluster_m;
  const double per_k_block = v.rows <= 32 ? 0.10 : 0.14;  // of one CTA, several to a multiprocessor
  const int64_t waves = ceil_div(tiles, device.sm_count), k_blocks = ceil_div(ceil_div(p.k, 64), plan.cluster_m);
  const double compute = static_cast<double>(waves * k_blocks) * per_k_block;
  const double memory = static_cast<double>(p.packed_columns() * p.k * 2) / 4.0e6;
  return std::max(compute, memory) + 3.0;
}

Plan hopper_plan(const LinearProblem& p, const Device& device) {
  if (p.m <= 32) return stream_plan(p, p.m <= 8 ? 8 : p.m <= 16 ? 16 : 32, device);
  Plan best = stream_plan(p, p.m <= 64 && p.k <= 2048 ? 32 : 64, device);
  double best_time = stream_time(p, best, device);
  for (const TileCost& cost : p.gated ? std::vector<TileCost>(std::begin(kGatedTiles), std::end(kGatedTiles))
                                      : std::vector<TileCost>(std::begin(kPlainTiles), std::end(kPlainTiles))) {
    const double time = tile_time(p, cost, device);
    if (time >= best_time) continue;
    best_time = time;
    best = Plan();
    best.path = Path::kTile;
    best.variant = cost.variant;
    const HopperVariant& v = tile_variants()[cost.variant];
    // Two CTAs share a weight tile, unless that makes many of the row tiles empty.
    const int64_t row_tiles = ceil_div(p.m, v.rows);
    // A tile of 256 columns leaves no registers for the sums; with long K a kernel before costs less than they do.
    best.row_stats = p.norm != Norm::kNone && (v.columns > 128 || p.k > 1024);
    best.cluster_m = row_tiles % 2 == 0 || row_tiles >= 9 ? 2 : 1;
    best.raster = p.m > 1024 ? 16 : 8;
  }
  return best;
}

}  // namespace
#endif

Plan choose_plan(const LinearProblem& p, const Device& device) {
  Plan plan;
  if (find_tuned(p, device, &plan) && refusal(p, plan).empty()) return plan;
#ifdef ONNXFUSE_HOPPER
  if (device.hopper) {
    plan = hopper_plan(p, device);
    if (refusal(p, plan).empty()) return plan;
  }
#endif
  plan = Plan();
  // What the portable kernel does in a few microseconds is not worth three launches.
  plan.path = p.m * p.packed_columns() * p.k > (int64_t{1} << 24) ? Path::kVendor : Path::kGeneric;
  if (refusal(p, plan).empty()) return plan;
  return Plan();
}

}  // namespace onnxfuse::cuda
