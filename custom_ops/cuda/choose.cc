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

// Microseconds on an H200 at sustained clocks: of a tile's K block, of its epilogue (with the exchange if K is split), and
// of taking a norm's sums in a K block; negative: the tile has no registers for them.
struct TileCost {
  int variant, split;
  double per_k_block, epilogue, sums;
};
constexpr TileCost kTiles[] = {{0, 1, 0.68, 3.0, -1.0}, {1, 1, 0.53, 2.2, -1.0}, {2, 1, 0.34, 1.3, 0.09},
                               {3, 1, 0.20, 1.0, 0.11}, {4, 2, 0.36, 1.8, 0.05}, {5, 4, 0.40, 2.2, 0.06},
                               {6, 2, 0.20, 1.3, 0.07}, {7, 4, 0.21, 1.7, 0.07}, {8, 1, 0.68, 3.6, -1.0},
                               {9, 1, 0.60, 3.2, -1.0}, {10, 1, 0.53, 2.6, -1.0}, {11, 1, 0.34, 1.7, 0.09},
                               {12, 1, 0.20, 1.2, 0.11}, {13, 1, 0.27, 1.1, 0.09}, {14, 1, 0.13, 0.8, 0.11}};
constexpr double kStart = 1.8, kSeparateSums = 1.8;
// To be preferred to a measured plan: its part of that plan's modelled time, and the microseconds that are gained.
constexpr double kClearlyFaster = 0.9, kWorthWhile = 1.0;

// Whether the sums are better taken by a kernel before.
bool separate_sums(const LinearProblem& p, const TileCost& cost) {
  if (p.norm == Norm::kNone) return false;
  const double k_blocks = static_cast<double>(ceil_div(ceil_div(p.k, 64), cost.split));
  const double work = p.norm == Norm::kLayer ? 2.0 : 1.0;  // LayerNorm takes twice the instructions
  return cost.sums < 0.0 || k_blocks * cost.sums * work > kSeparateSums;
}

double tile_time(const LinearProblem& p, const TileCost& cost, bool separate, const Device& device) {
  const HopperVariant& v = tile_variants()[cost.variant];
  const int64_t out_columns = v.gated ? v.columns / 2 : v.columns;
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.n, out_columns) * cost.split;
  const double waves = static_cast<double>(ceil_div(tiles, device.sm_count));
  const double sums = p.norm == Norm::kNone || separate ? 0.0 : p.norm == Norm::kLayer ? 2.0 * cost.sums : cost.sums;
  const double k_blocks = static_cast<double>(ceil_div(ceil_div(p.k, 64), cost.split));
  const double compute = waves * (k_blocks * (cost.per_k_block + sums) + cost.epilogue);
  const double memory = static_cast<double>(p.packed_columns() * p.k * 2) / 4.0e6;
  return std::max(compute, memory) + kStart + (separate ? kSeparateSums : 0.0);
}

// The skinny variant that gives a CTA to nearly every multiprocessor; false if there is none or it cannot run.
bool skinny_plan(const LinearProblem& p, int rows, const Device& device, Plan* plan) {
  int64_t slabs = ceil_div(p.packed_columns(), int64_t{16} * device.sm_count);
  if (p.gated && slabs % 2) ++slabs;  // halves of 8 or 24 columns seldom fit interleaved blocks
  const std::vector<HopperVariant>& variants = stream_variants();
  for (size_t i = 0; i < variants.size(); ++i) {
    const HopperVariant& v = variants[i];
    if (v.split != 1 || v.rows != rows || v.columns != 16 * slabs) continue;
    *plan = Plan();
    plan->path = Path::kStream;
    plan->variant = static_cast<int32_t>(i);
    const int64_t fitting = 110 * 1024 / ((v.rows + v.columns) * 128), k_blocks = ceil_div(p.k, 64);
    plan->stages = static_cast<int32_t>(
        std::max<int64_t>(2, std::min<int64_t>({fitting, v.max_stages, k_blocks})));
    plan->lead = 16, plan->ahead = 8;
    return stream_refusal(p, *plan).empty();
  }
  return false;
}

// Narrow tiles of x: enough CTAs to ask for the whole memory bandwidth, and of each about as much shared memory as
// lets the next kernel's first loads run beside this one's end.
Plan stream_plan(const LinearProblem& p, int rows, const Device& device) {
  Plan plan;
  if (rows <= 16 && skinny_plan(p, rows, device, &plan)) return plan;
  plan = Plan();
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
  // Of one CTA, several to a multiprocessor. The sums of many rows take longer than the product.
  const bool sums = p.norm != Norm::kNone && plan.row_stats == 0;
  const double per_k_block = v.split == 1 ? 0.10 * v.columns / 64 : v.rows <= 32 ? 0.10 : sums ? 0.4 : 0.2;
  const int64_t waves = ceil_div(tiles, device.sm_count), k_blocks = ceil_div(ceil_div(p.k, 64), plan.cluster_m);
  const double compute = static_cast<double>(waves * k_blocks) * per_k_block;
  const double memory = static_cast<double>(p.packed_columns() * p.k * 2) / 4.0e6;
  return std::max(compute, memory) + 3.0;
}

Plan hopper_plan(const LinearProblem& p, const Device& device) {
  if (p.m <= 32) return stream_plan(p, p.m <= 8 ? 8 : p.m <= 16 ? 16 : 32, device);
  Plan best = stream_plan(p, p.m <= 64 && p.k <= 2048 ? 32 : 64, device);
  double best_time = stream_time(p, best, device);
  for (const TileCost& cost : kTiles) {
    const HopperVariant& v = tile_variants()[cost.variant];
    if (v.gated != (p.gated != 0) || cost.split > ceil_div(p.k, 64)) continue;
    const double time = tile_time(p, cost, separate_sums(p, cost), device);
    if (time >= best_time) continue;
    Plan plan;
    plan.path = Path::kTile;
    plan.variant = cost.variant;
    // Two CTAs share a weight tile where the loads of all would be too many for L2, unless that makes row tiles empty.
    const int64_t row_tiles = ceil_div(p.m, v.rows);
    const bool busy = row_tiles * ceil_div(p.packed_columns(), v.columns) * 4 >= int64_t{3} * device.sm_count;
    plan.cluster_m = cost.split == 1 && busy && p.k >= 2048 && (row_tiles % 2 == 0 || row_tiles >= 9) ? 2 : 1;
    if (separate_sums(p, cost)) plan.row_stats = p.k <= 1024 ? 1 : 2;
    plan.raster = p.m > 1024 ? 16 : 8;
    if (!tile_refusal(p, plan).empty()) continue;
    best_time = time;
    best = plan;
  }
  return best;
}

// Microseconds by the model; negative for a path that it does not cover.
double modelled_time(const LinearProblem& p, const Plan& plan, const Device& device) {
  if (plan.path == Path::kStream) return stream_time(p, plan, device);
  if (plan.path != Path::kTile) return -1.0;
  for (const TileCost& cost : kTiles)
    if (cost.variant == plan.variant) return tile_time(p, cost, p.norm != Norm::kNone && plan.row_stats != 0, device);
  return -1.0;
}

}  // namespace
#endif

namespace {

// The measured plan for just this many rows; between two measured numbers the one of either that the model prefers.
bool tuned_plan(const LinearProblem& p, const Device& device, Plan* plan) {
  const int64_t bucket = row_bucket(p.m);
  const bool above = find_tuned(p, device, bucket, plan) && refusal(p, *plan).empty();
  if (p.m >= bucket) return above;
#ifdef ONNXFUSE_HOPPER
  Plan below;
  if (!find_tuned(p, device, bucket / 2, &below) || !refusal(p, below).empty()) return above;
  double best = above ? modelled_time(p, *plan, device) : -1.0;
  const double time = modelled_time(p, below, device);
  if (!above || (time >= 0.0 && best >= 0.0 && time < best)) *plan = below, best = time;
  // A tile may suit both neighbours and leave most of the last wave empty here. The model can tell tiles from one another,
  // not tiles from streams: it errs by more than they differ.
  if (p.m <= 64 || plan->path != Path::kTile) return true;
  const Plan modelled = hopper_plan(p, device);
  if (modelled.path != Path::kTile || !refusal(p, modelled).empty()) return true;
  const double other = modelled_time(p, modelled, device);
  if (other < kClearlyFaster * best && other + kWorthWhile < best) *plan = modelled;
  return true;
#else
  return above;
#endif
}

}  // namespace

Plan choose_plan(const LinearProblem& p, const Device& device) {
  Plan plan;
  if (tuned_plan(p, device, &plan)) return plan;
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
