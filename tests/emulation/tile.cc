// The tile kernel on random problems, each twice, with other garbage and another order of events: right, and the same
// bits.
#include "problem_test.h"
#include "wgmma_tile.cuh"

using namespace emulation;
using onnxfuse::cuda::Divisor;
using onnxfuse::cuda::TileParams;
using onnxfuse::cuda::TileShape;

namespace {

constexpr int kSharedMemory = 232448 - 1024;
enum class Statistics { kPlain, kFlags, kReady };

template <typename T, int kGroups, int kTileN, bool kGated, int kSplit>
void test() {
  using Tile = TileShape<T, kGroups, kTileN, kGated, kSplit>;
  constexpr int kRows = Tile::kTileM, kColumns = Tile::kOutN;
  int cluster_m = 1, cluster_n = 1;
  if (kSplit == 1 && coin()) (coin() ? cluster_m : cluster_n) = 2;
  const int half = kColumns / cluster_m;
  if (half % 8) return;

  const int m = one_of({1, 5, 17, kRows / 2 + 3, kRows - 1, kRows, kRows + 1, kRows + 37, 2 * kRows - 3, 2 * kRows});
  int k = one_of({8, 56, 64, 72, 128, 200, 264, 448, 520, 712});
  if (kSplit > (k + 63) / 64) k = 64 * kSplit + 8;
  Problem p = random_problem(m, 2 * kColumns + 40, k, kGated, {8, 16, half, 2 * half});
  if (p.interleave > 0 && half % p.interleave && p.interleave % half) p.interleave = 0;
  if (!Tile::kOwnStats) p.separate_statistics = true;
  const bool separate = p.separate_statistics && p.norm != Norm::kNone;
  const Statistics way = static_cast<Statistics>(random_number() % 3);

  int stages = one_of({2, 3, 4, 12});
  while (Tile::smem_bytes(stages) > kSharedMemory) --stages;
  const int k_blocks = (k + 63) / 64;
  if (m < kRows && p.residual) stages = std::min(stages, std::max(2, k_blocks));  // as launch_tile

  Data<T> data(p);
  weight_is_constant = coin();
  x_is_ready = separate && way == Statistics::kReady;
  operands_are_written = true;
  const int x_rows = cluster_n > 1 ? kRows : std::min(m, kRows);
  const int in_block = kGated && p.interleave > 0 ? std::min(half, p.interleave) : half;
  const int64_t row = 2 * k, halves = kGated ? 2 : 1;
  auto bytes = [](const void* at) { return static_cast<const uint8_t*>(at); };
  const Map x = {bytes(data.x), 2, cluster_n == 1, {k, m, 1, 1}, {2, row, 0, 0}, {64, x_rows / cluster_n, 1, 1}};
  const Map weight = {bytes(data.weight),
                      4,
                      false,
                      {k, p.block(), halves, p.n / p.block()},
                      {2, row, row * p.block(), row * p.block() * halves},
                      {64, in_block, 1, half / in_block}};
  const Map residual = {bytes(data.residual), 2, false, {p.n, m, 1, 1}, {2, 2 * p.n, 0, 0}, {64, 64, 1, 1}};

  TileParams t = {};
  std::memcpy(&t.x, &x, sizeof x), std::memcpy(&t.weight, &weight, sizeof x);
  std::memcpy(&t.residual, &residual, sizeof x);
  t.x_pointer = data.x, t.residual_pointer = data.residual, t.y = data.y;
  t.bias = p.bias ? data.bias : nullptr, t.colsum = p.norm == Norm::kLayer ? data.sums : nullptr;
  t.stats = separate ? data.statistics : nullptr, t.x_is_ready = x_is_ready;
  t.m = m, t.n = p.n, t.k = k, t.k_blocks = k_blocks, t.stages = stages;
  t.stage_bytes = (x_rows + kTileN) * 128, t.cluster_m = cluster_m, t.cluster_n = cluster_n;
  t.block = Divisor(static_cast<int>(p.block())), t.has_residual = p.residual;
  t.prefetch_weight = weight_is_constant, t.norm = p.norm, t.activation = p.activation, t.epsilon = 1e-5f;
  const int down = (m + kRows * cluster_m - 1) / (kRows * cluster_m);
  const int across = (p.n + kColumns * cluster_n - 1) / (kColumns * cluster_n);
  t.tiles = down * across, t.tile_rows = down, t.raster = std::min(one_of({1, 2, 8}), down);
  t.band = Divisor(t.raster * across), t.full_height = Divisor(t.raster);
  t.last_height = Divisor(down % t.raster ? down % t.raster : t.raster);
  t.clusters = kSplit > 1 ? t.tiles : std::min(t.tiles, one_of({1, 2, 100}));
  const int ctas = kSplit > 1 ? kSplit : cluster_m * cluster_n;
  grid = {t.clusters * ctas, 1, 1};

  static std::vector<uint64_t> memory(300);
  flags = separate && way == Statistics::kFlags ? memory.data() : nullptr;
  if (flags != nullptr) {
    nonce = (uint64_t{random_number()} << 32) | random_number() | 1;
    t.flags = flags, t.nonce = nonce, t.stats_blocks = 1 + static_cast<int>(random_number() % 140);
    flag_count = t.stats_blocks + onnxfuse::cuda::kFlagsBefore;
  }
  kernel = [&] { onnxfuse::cuda::tile_kernel<T, kGroups, kTileN, kGated, kSplit>(t); };

  std::vector<T> first;
  for (int run = 0; run < 2; ++run) {
    const unsigned seed = random_number();
    std::snprintf(config, sizeof config,
                  "tile %d,%d,%d,%d m %d n %d k %d interleave %d norm %d separate %d way %d activation %d residual %d "
                  "stages %d cluster %dx%d clusters %d constant %d run %d seed %u",
                  kGroups, kTileN, kGated, kSplit, m, p.n, k, p.interleave, static_cast<int>(p.norm), separate,
                  static_cast<int>(way), static_cast<int>(p.activation), p.residual, stages, cluster_m, cluster_n,
                  t.clusters, weight_is_constant, run, seed);
    random_number.seed(seed);
    allow(true);
    std::memset(data.y, 0xff, sizeof(T) * m * p.n);
    for (uint64_t& flag : memory) flag = random_number();
    memory[1] = 0;
    for (int cluster = 0; cluster < t.clusters; ++cluster) {
      std::snprintf(place, sizeof place, "cluster %d", cluster);
      run_cluster(ctas, Tile::kThreads, Tile::smem_bytes(stages), {cluster * ctas, 0, 0}, cluster > 0 && flags, run);
    }
    for (int i = 0; flags != nullptr && i < flag_count; ++i)
      if (i != 1 && flags[i] != 0) fail("a flag is left", i);
    if (run == 0)
      first.assign(data.y, data.y + m * p.n);
    else if (std::memcmp(first.data(), data.y, sizeof(T) * m * p.n) != 0)
      fail("other bits");
  }
  data.check(p);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<void (*)()> all = {
#define VARIANT(index, groups, columns, gated, split) \
  test<__half, groups, columns, gated, split>, test<__nv_bfloat16, groups, columns, gated, split>,
#include "tile_variants.inc"
#undef VARIANT
  };
  return run_tests(all, argc, argv);
}
