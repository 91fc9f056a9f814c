#include "choose.h"

#include <algorithm>
#include <limits>

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

namespace {

// What the portable kernel does in a few microseconds is not: cuBLASLt's path has kernels before and after it.
bool worth_three_launches(const LinearProblem& p) {
  return static_cast<double>(p.m) * static_cast<double>(p.packed_columns() * p.k) > 1 << 24;
}

}  // namespace

#ifdef ONNXFUSE_HOPPER
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Microseconds on an H200 at moderate load, fitted to 2100 measured calls: of a tile's K block, and of its epilogue (with
// the exchange if K is split).
struct TileCost {
  int variant, split;
  double per_k_block, epilogue;
};
constexpr TileCost kTiles[] = {{0, 1, 0.60, 3.3}, {1, 1, 0.456, 2.25}, {2, 1, 0.316, 1.7}, {3, 1, 0.211, 1.3},
                               {4, 2, 0.357, 2.5}, {5, 4, 0.49, 3.1}, {6, 2, 0.251, 1.9}, {7, 4, 0.272, 2.5},
                               {8, 1, 0.607, 3.6}, {9, 1, 0.577, 3.2}, {10, 1, 0.49, 2.6}, {11, 1, 0.32, 1.7},
                               {12, 1, 0.22, 1.2}, {13, 1, 0.275, 1.8}, {14, 1, 0.168, 1.2}, {15, 1, 0.393, 2.2},
                               {16, 1, 0.434, 2.2}, {17, 1, 0.511, 2.6}, {18, 1, 0.528, 2.4}};
constexpr double kTileStart = 0.75, kStreamStart = 2.5, kVendorStart = 3.4;
constexpr double kSums = 0.085;           // of an RMSNorm in a K block of a tile
constexpr double kActivation = 0.6;       // of 128 x 128 results; of the erf twice as long
constexpr double kReadBytes = 4.0e6;      // a microsecond: weights from memory
constexpr int kResidentFours = 120;       // CTAs that are resident at once in clusters of four
// To be preferred to a measured plan: its part of that plan's modelled time, and the microseconds that are gained.
constexpr double kClearlyFaster = 0.93, kWorthWhile = 0.3;

double weight_time(const LinearProblem& p) { return static_cast<double>(p.packed_columns() * p.k * 2) / kReadBytes; }

// LayerNorm takes twice the instructions.
double sums_time(const LinearProblem& p) {
  return p.norm == Norm::kNone ? 0.0 : p.norm == Norm::kLayer ? 2.0 * kSums : kSums;
}

// Of the kernel that takes the sums before; where the tile leaves no room beside it, all of it passes before the product.
double separate_sums_time(const LinearProblem& p, const HopperVariant& v) {
  return (v.leaves_room ? 1.3 : 2.2) + 0.45e-6 * static_cast<double>(p.m * p.k);
}

// Whether the sums are better taken by a kernel before.
bool separate_sums(const LinearProblem& p, const TileCost& cost, const Device& device) {
  if (p.norm == Norm::kNone) return false;
  const HopperVariant& v = tile_variants()[cost.variant];
  const double k_blocks = static_cast<double>(ceil_div(ceil_div(p.k, 64), cost.split));
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.packed_columns(), v.columns) * cost.split;
  const int64_t waves = ceil_div(tiles, device.sm_count);
  return !v.takes_sums || static_cast<double>(waves) * k_blocks * sums_time(p) > separate_sums_time(p, v);
}

double tile_time(const LinearProblem& p, const TileCost& cost, bool separate, const Device& device) {
  const HopperVariant& v = tile_variants()[cost.variant];
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.n, v.gated ? v.columns / 2 : v.columns) * cost.split;
  const int64_t resident = cost.split == 4 ? std::min(device.sm_count, kResidentFours) : device.sm_count;
  const double waves = static_cast<double>(ceil_div(tiles, resident));
  const double k_blocks = static_cast<double>(ceil_div(ceil_div(p.k, 64), cost.split));
  double epilogue = cost.epilogue;
  if (!v.gated && p.activation != Activation::kNone && p.activation != Activation::kRelu)
    epilogue += (p.activation == Activation::kGelu ? 2.0 : 1.0) * kActivation * v.rows * v.columns / (128.0 * 128.0);
  const double compute = waves * (k_blocks * (cost.per_k_block + (separate ? 0.0 : sums_time(p))) + epilogue);
  return std::max(compute, weight_time(p)) + kTileStart +
         (separate && p.norm != Norm::kNone ? separate_sums_time(p, v) : 0.0);
}

// cuBLASLt, which has a tile for nearly every number of rows, with the kernels before and after it.
double vendor_time(const LinearProblem& p) {
  const double results = static_cast<double>(p.m * p.packed_columns());
  double time = kVendorStart + std::max(2.4e-9 * (results + 0.4e6) * static_cast<double>(p.k), weight_time(p));
  if (p.norm != Norm::kNone) time += 1.6 + 0.65e-6 * static_cast<double>(p.m * p.k);
  const bool in_product =
      p.activation == Activation::kNone || (p.activation == Activation::kGeluTanh && p.residual == nullptr);
  return p.gated || !in_product ? time + 1.6 + 1.5e-6 * results : time;
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
  plan.variant = rows == 8 ? 0 : rows == 16 ? 2 : 4;
  const HopperVariant& v = stream_variants()[plan.variant];
  const int64_t tiles = ceil_div(p.m, v.rows) * ceil_div(p.packed_columns(), v.columns);
  const int64_t k_blocks = ceil_div(p.k, 64);
  const int64_t wanted = device.sm_count * 7 / 10;
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
  const int64_t ctas = ceil_div(p.m, v.rows) * ceil_div(p.packed_columns(), v.columns) * plan.cluster_m;
  const double k_blocks = static_cast<double>(ceil_div(ceil_div(p.k, 64), plan.cluster_m));
  // Of a K block of one CTA to a multiprocessor; the sums are taken beside the product.
  double per_k_block = v.rows <= 16 ? 0.18 : v.rows <= 32 ? 0.27 : v.rows <= 64 ? 0.36 : 0.55;
  if (v.split == 1) per_k_block = 0.20;
  per_k_block *= static_cast<double>(v.columns) / 64.0;
  if (p.norm != Norm::kNone && plan.row_stats == 0) per_k_block += 0.001 * v.rows;
  const double load = std::max(1.0, static_cast<double>(ctas) / device.sm_count);
  return kStreamStart + std::max(k_blocks * per_k_block * load, 1.05 * weight_time(p));
}

Plan hopper_plan(const LinearProblem& p, const Device& device) {
  if (p.m <= 16) return stream_plan(p, p.m <= 8 ? 8 : 16, device);
  Plan best;  // the portable kernel, if nothing else can run
  double best_time = std::numeric_limits<double>::infinity();
  if (worth_three_launches(p)) {
    Plan vendor;
    vendor.path = Path::kVendor;
    if (refusal(p, vendor).empty()) best_time = vendor_time(p), best = vendor;
  }
  if (p.m <= 32) {
    const Plan stream = stream_plan(p, 32, device);
    const double time = stream_time(p, stream, device);
    if (time < best_time && stream_refusal(p, stream).empty()) best_time = time, best = stream;
  }
  for (const TileCost& cost : kTiles) {
    const HopperVariant& v = tile_variants()[cost.variant];
    if (v.gated != (p.gated != 0) || cost.split > ceil_div(p.k, 64)) continue;
    const bool separate = separate_sums(p, cost, device);
    const double time = tile_time(p, cost, separate, device);
    if (time >= best_time) continue;
    Plan plan;
    plan.path = Path::kTile;
    plan.variant = cost.variant;
    // Two CTAs share the loads of a weight tile, or of one of x, where that leaves none of them without a tile.
    const int64_t row_tiles = ceil_div(p.m, v.rows);
    const int64_t column_tiles = ceil_div(p.packed_columns(), v.columns);
    if (cost.split == 1 && row_tiles % 2 == 0)
      plan.cluster_m = 2;
    else if (cost.split == 1 && column_tiles % 2 == 0 && p.k >= 2048 && p.m >= v.rows)
      plan.cluster_n = 2;
    if (separate) plan.row_stats = v.leaves_room ? 1 : 2;
    plan.raster = p.m > 1024 ? 16 : 8;
    if (!tile_refusal(p, plan).empty()) plan.cluster_m = plan.cluster_n = 1;
    if (!tile_refusal(p, plan).empty()) continue;
    best_time = time;
    best = plan;
  }
  return best;
}

}  // namespace
#endif

double modelled_time([[maybe_unused]] const LinearProblem& p, [[maybe_unused]] const Plan& plan, const Device& device) {
  if (!device.hopper) return std::numeric_limits<double>::infinity();
#ifdef ONNXFUSE_HOPPER
  if (plan.path == Path::kStream) return stream_time(p, plan, device);
  if (plan.path == Path::kVendor) return vendor_time(p);
  if (plan.path == Path::kTile)
    for (const TileCost& cost : kTiles)
      if (cost.variant == plan.variant) return tile_time(p, cost, plan.row_stats != 0, device);
#endif
  return std::numeric_limits<double>::infinity();
}

namespace {

// The measured plan for just this many rows. Between two measured powers of two that of either which the model prefers,
// or the model's own choice where it is clearly faster: a tile may suit both neighbours and leave most of the last wave
// empty here.
bool tuned_plan(const LinearProblem& p, const Device& device, Plan* plan) {
  if (find_tuned(p, device, p.m, plan) && refusal(p, *plan).empty()) return true;
  const int64_t bucket = row_bucket(p.m);
  const bool above = find_tuned(p, device, bucket, plan) && refusal(p, *plan).empty();
  if (p.m >= bucket) return above;
  Plan below;
  const bool has_below = find_tuned(p, device, bucket / 2, &below) && refusal(p, below).empty();
  if (!above && !has_below) return false;
  if (!above) *plan = below;
#ifdef ONNXFUSE_HOPPER
  if (!device.hopper) return true;
  double best = modelled_time(p, *plan, device);
  if (above && has_below) {
    const double time = modelled_time(p, below, device);
    if (time < best) *plan = below, best = time;
  }
  const Plan modelled = hopper_plan(p, device);
  if (!refusal(p, modelled).empty()) return true;
  const double other = modelled_time(p, modelled, device);
  if (other < kClearlyFaster * best && other + kWorthWhile < best) *plan = modelled;
#endif
  return true;
}

}  // namespace

Plan choose_plan(const LinearProblem& p, const Device& device) {
  Plan plan;
  if (tuned_plan(p, device, &plan)) return plan;
#ifdef ONNXFUSE_HOPPER
  if (device.hopper) {
    plan = hopper_plan(p, device);
    if (plan.path != Path::kGeneric && refusal(p, plan).empty()) return plan;
  }
#endif
  plan = Plan();
  if (worth_three_launches(p)) plan.path = Path::kVendor;
  if (refusal(p, plan).empty()) return plan;
  return Plan();
}

}  // namespace onnxfuse::cuda
