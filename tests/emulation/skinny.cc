// The streaming kernel for up to 16 rows, on random problems; ldmatrix reads as late as its results allow.
#include "skinny.cuh"

#include "problem_test.h"

using namespace emulation;
using onnxfuse::cuda::SkinnyTile;
using onnxfuse::cuda::StreamParams;

namespace {

template <typename T, int kSlabs, int kRowTiles>
void test() {
  using Tile = SkinnyTile<T, kSlabs, kRowTiles>;
  const int k = one_of({8, 56, 64, 72, 200, 448, 520, 712, 840, 1096, 1352});
  Problem p = random_problem(one_of({1, 2, Tile::kRows - 1, Tile::kRows, Tile::kRows + 1, 2 * Tile::kRows + 3}),
                             50 * kSlabs, k, coin(3), {8, 8 * kSlabs, 16 * kSlabs, 24 * kSlabs});
  const int out = p.gated ? Tile::kColumns / 2 : Tile::kColumns;
  if (p.interleave > 0 && out % p.interleave && p.interleave % out) p.interleave = 0;
  int stages = one_of({1, 2, 3, 7, 12, Tile::kMaxStages});
  while (Tile::smem_bytes(stages) > 232448 - 1024) --stages;

  Data<T> data(p);
  weight_is_constant = coin(), x_is_ready = false, flags = nullptr, matrices_come_late = true;
  const bool separate = p.separate_statistics && p.norm != Norm::kNone;
  const int in_block = p.gated && p.interleave > 0 ? std::min(out, p.interleave) : out;
  const int64_t row = 2 * k, halves = p.gated ? 2 : 1;
  const Map weight = {reinterpret_cast<const uint8_t*>(data.weight),
                      4,
                      false,
                      {k, p.block(), halves, p.n / p.block()},
                      {2, row, row * p.block(), row * p.block() * halves},
                      {64, in_block, 1, out / in_block}};

  StreamParams s = {};
  std::memcpy(&s.weight, &weight, sizeof weight);
  s.x_pointer = data.x, s.y = data.y, s.residual = p.residual ? data.residual : nullptr;
  s.bias = p.bias ? data.bias : nullptr, s.colsum = p.norm == Norm::kLayer ? data.sums : nullptr;
  s.stats = separate ? data.statistics : nullptr;
  s.m = p.m, s.n = p.n, s.k = k, s.y_stride = p.n, s.block = static_cast<int>(p.block()), s.stages = stages;
  s.gated = p.gated, s.prefetch_weight = weight_is_constant, s.ahead = one_of({0, 8, 100});
  s.trigger = one_of({0, 8, 64, INT_MAX / 2}), s.norm = p.norm, s.activation = p.activation, s.epsilon = 1e-5f;
  grid = {(p.n + out - 1) / out, (p.m + Tile::kRows - 1) / Tile::kRows, 1};
  kernel = [&] { onnxfuse::cuda::skinny_kernel<T, kSlabs, kRowTiles>(s); };
  std::snprintf(config, sizeof config,
                "skinny %d,%d m %d n %d k %d gated %d interleave %d norm %d separate %d stages %d ahead %d constant %d",
                kSlabs, kRowTiles, p.m, p.n, k, p.gated, p.interleave, static_cast<int>(p.norm), separate, stages,
                s.ahead, weight_is_constant);
  for (int y = 0; y < grid.y; ++y)
    for (int x = 0; x < grid.x; ++x) {
      std::snprintf(place, sizeof place, "CTA %d, %d", x, y);
      run_cluster(1, Tile::kThreads, Tile::smem_bytes(stages), {x, y, 0}, false, coin());
    }
  data.check(p);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<void (*)()> all = {
#define VARIANT(index, slabs, row_tiles) test<__half, slabs, row_tiles>, test<__nv_bfloat16, slabs, row_tiles>,
#include "skinny_variants.inc"
#undef VARIANT
  };
  return run_tests(all, argc, argv);
}
