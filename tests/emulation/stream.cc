// The streaming kernel that splits K, on random problems.
#include "problem_test.h"
#include "wgmma_stream.cuh"

using namespace emulation;
using onnxfuse::cuda::StreamParams;
using onnxfuse::cuda::StreamTile;

namespace {

template <typename T, int kMma, int kGroups, int kRows>
void test() {
  using Tile = StreamTile<T, kMma, kGroups, kRows>;
  constexpr int kColumns = 64 * kMma * kGroups;
  const int k = one_of({200, 264, 448, 520, 712, 1032}), k_blocks = (k + 63) / 64;
  Problem p = random_problem(one_of({1, kRows - 1, kRows, kRows + 1, 2 * kRows - 3}), 80 * kMma * kGroups, k,
                             kRows <= 64 && coin(3), {8, kColumns / 2, kColumns});
  const int out = p.gated ? kColumns / 2 : kColumns;
  int split = one_of({1, 2, 4, 8});
  if (split > k_blocks || out / split % 4) split = 1;
  int stages = one_of({2, 3, 7, 12});
  while (stages > Tile::kMaxStages || Tile::smem_bytes(stages, 8) > 232448) --stages;

  Data<T> data(p);
  weight_is_constant = coin(), x_is_ready = false, flags = nullptr;
  const bool separate = p.separate_statistics && p.norm != Norm::kNone;
  const int x_rows = std::min(p.m, kRows);
  const int in_block = p.gated && p.interleave > 0 ? std::min(out, p.interleave) : out;
  const int64_t row = 2 * k, halves = p.gated ? 2 : 1;
  auto bytes = [](const void* at) { return static_cast<const uint8_t*>(at); };
  const Map x = {bytes(data.x), 2, true, {k, p.m, 1, 1}, {2, row, 0, 0}, {64, x_rows, 1, 1}};
  const Map weight = {bytes(data.weight),
                      4,
                      false,
                      {k, p.block(), halves, p.n / p.block()},
                      {2, row, row * p.block(), row * p.block() * halves},
                      {64, in_block, 1, out / in_block}};

  StreamParams s = {};
  std::memcpy(&s.x, &x, sizeof x), std::memcpy(&s.weight, &weight, sizeof x);
  s.x_pointer = data.x, s.y = data.y, s.residual = p.residual ? data.residual : nullptr;
  s.bias = p.bias ? data.bias : nullptr, s.colsum = p.norm == Norm::kLayer ? data.sums : nullptr;
  s.stats = separate ? data.statistics : nullptr;
  s.m = p.m, s.n = p.n, s.k = k, s.y_stride = p.n, s.block = static_cast<int>(p.block()), s.stages = stages;
  s.stage_bytes = (x_rows + kColumns) * 128, s.gated = p.gated, s.prefetch_weight = weight_is_constant;
  s.trigger = one_of({0, 3, 8, INT_MAX / 2}), s.norm = p.norm, s.activation = p.activation, s.epsilon = 1e-5f;
  grid = {split, (p.m + kRows - 1) / kRows, (p.n + out - 1) / out};
  kernel = [&] { onnxfuse::cuda::stream_kernel<T, kMma, kGroups, kRows>(s); };
  std::snprintf(
      config, sizeof config,
      "stream %d,%d,%d m %d n %d k %d gated %d interleave %d norm %d separate %d split %d stages %d constant %d", kMma,
      kGroups, kRows, p.m, p.n, k, p.gated, p.interleave, static_cast<int>(p.norm), separate, split, stages,
      weight_is_constant);
  for (int y = 0; y < grid.y; ++y)
    for (int z = 0; z < grid.z; ++z) {
      std::snprintf(place, sizeof place, "cluster %d, %d", y, z);
      run_cluster(split, Tile::kThreads, Tile::smem_bytes(stages, split), {0, y, z}, false, coin());
    }
  data.check(p);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<void (*)()> all = {
#define VARIANT(index, mma, groups, rows) test<__half, mma, groups, rows>, test<__nv_bfloat16, mma, groups, rows>,
#include "stream_variants.inc"
#undef VARIANT
  };
  return run_tests(all, argc, argv);
}
