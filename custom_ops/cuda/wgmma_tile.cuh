// Many rows: persistent, warp-specialised tiles at the rate of the tensor cores.
//
// One producer warp keeps a ring of stages full by TMA, shared inside a cluster by multicast. Either the consumer
// warpgroups share a tile, each with 64 x kMma of its rows (the largest tiles, the best rate), or they take turns
// (kPingpong): each has tiles of its own, and the epilogue of one is hidden behind the product of the other.
// The norm's sums are taken by the consumers from the tile of x in shared memory while their wgmma runs, or come from
// a kernel before. Two warps of the producer's group gather what else the epilogue needs (bias, column sums) in shared
// memory. The residual travels through the same ring as extra stages. Results leave by
// stmatrix and bulk stores.
#pragma once

#include "hopper_ptx.cuh"
#include "numeric.cuh"
#include "wgmma_shapes.cuh"

namespace onnxfuse::cuda {

struct TileParams {
  CUtensorMap x;         // [M, K], box 64 x (kTileM / cluster_n)
  CUtensorMap weight;    // as StreamParams; box rows (kTileN or kTileN / 2) / cluster_m
  CUtensorMap y;         // [M, n], box 64 x 64
  CUtensorMap residual;  // [M, n], box 64 x 64
  const void* x_pointer;
  const void* bias;
  const float* colsum;
  const RowStats* stats;  // [m], or null: taken here if there is a norm
  int m, n, k;
  int block;  // columns of a gate block (n if not interleaved)
  int stages, cluster_m, cluster_n, raster;
  int has_residual;
  int prefetch_weight;
  Norm norm;
  float epsilon;
  Activation activation;
};

template <typename T, int kMma, int kGroups, int kTileN, bool kGated, bool kPingpong>
struct TileShape {
  static constexpr int kSharing = kPingpong ? 1 : kGroups;  // warpgroups of one tile
  static constexpr int kTileM = 64 * kMma * kSharing;
  static constexpr int kOutN = kGated ? kTileN / 2 : kTileN;
  static constexpr int kThreads = 128 * (kGroups + 1);  // producer and gatherers, consumers
  static constexpr int kXBytes = kTileM * 128;
  static constexpr int kWeightBytes = kTileN * 128;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kChunks = kOutN / 64;
  static constexpr int kBoxes = kTileM / 64 * kChunks;            // residual, 64 x 64 each
  static constexpr int kBoxesPerStage = kStageBytes / 8192;
  static constexpr int kResidualStages = (kBoxes + kBoxesPerStage - 1) / kBoxesPerStage;
  static constexpr int kStoreBytes = kGroups * 8192;
  static constexpr int kGathered = kTileM * 8 + kTileN * 8;  // RowStats[kTileM], bias[kTileN], colsum[kTileN]
  static constexpr int kMaxStages = 12;
  static constexpr int smem_bytes(int stages) {
    return 1024 + stages * kStageBytes + kStoreBytes + 2 * kGathered + stages * 16 + 32;
  }
};

template <typename T, int kMma, int kGroups, int kTileN, bool kGated, bool kPingpong>
__global__ __launch_bounds__(TileShape<T, kMma, kGroups, kTileN, kGated, kPingpong>::kThreads,
                             1) void tile_kernel(const __grid_constant__ TileParams p) {
  using Tile = TileShape<T, kMma, kGroups, kTileN, kGated, kPingpong>;
  extern __shared__ uint8_t shared_raw[];
  const uint32_t base = (shared_address(shared_raw) + 1023u) & ~1023u;
  uint8_t* const base_pointer = shared_raw + (base - shared_address(shared_raw));
  const uint32_t store_buffers = base + p.stages * Tile::kStageBytes;
  const uint32_t gathered = store_buffers + Tile::kStoreBytes;  // two buffers, for alternate tiles
  const uint32_t full = gathered + 2 * Tile::kGathered;
  const uint32_t empty = full + p.stages * 8;
  const uint32_t gathered_full = empty + p.stages * 8, gathered_empty = gathered_full + 16;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ctas = p.cluster_m * p.cluster_n;
  const int rank = ctas > 1 ? cluster_rank() : 0;
  const int rank_m = rank % p.cluster_m, rank_n = rank / p.cluster_m;
  const int sharers = p.cluster_m + p.cluster_n - 1;  // CTAs whose loads land here, and the other way round

  if (threadIdx.x == 0) {
    prefetch_map(p.x);
    prefetch_map(p.weight);
    prefetch_map(p.y);
    if (p.has_residual) prefetch_map(p.residual);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 4 * Tile::kSharing * sharers);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(gathered_full + i * 8, 2);
      barrier_init(gathered_empty + i * 8, 4 * Tile::kSharing);
    }
    fence_barrier_init();
  }
  allow_dependents();
  __syncthreads();
  if (ctas > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }

  const bool own_stats = p.norm != Norm::kNone && p.stats == nullptr;
  const int k_blocks = (p.k + 63) / 64;
  const int cluster_tiles_m = (p.m + Tile::kTileM * p.cluster_m - 1) / (Tile::kTileM * p.cluster_m);
  const int cluster_tiles_n = (p.n + Tile::kOutN * p.cluster_n - 1) / (Tile::kOutN * p.cluster_n);
  const int tiles = cluster_tiles_m * cluster_tiles_n;
  const int first_tile = blockIdx.x / ctas, tile_step = gridDim.x / ctas;
  auto locate = [&](int tile, int& row0, int& column0) {
    const int band = p.raster * cluster_tiles_n;
    const int first_m = tile / band * p.raster;
    const int height = min(p.raster, cluster_tiles_m - first_m);
    const int inside = tile % band;
    row0 = ((first_m + inside % height) * p.cluster_m + rank_m) * Tile::kTileM;
    column0 = (inside / height * p.cluster_n + rank_n) * Tile::kOutN;
  };

  if (warp < 4) {  // the producer warpgroup
    if constexpr (kGroups == 2) lower_registers<40>();
    if (threadIdx.x == 0) {
      uint16_t row_mask = 0, column_mask = 0;  // CTAs with the same rows of x, with the same columns
      for (int i = 0; i < p.cluster_n; ++i) row_mask |= 1u << (rank_m + p.cluster_m * i);
      for (int i = 0; i < p.cluster_m; ++i) column_mask |= 1u << (i + p.cluster_m * rank_n);
      const int x_rows = Tile::kTileM / p.cluster_n;
      const int half_rows = (kGated ? kTileN / 2 : kTileN) / p.cluster_m;
      auto load_x = [&](int stage, int k, int row0) {
        const uint32_t dst = base + stage * Tile::kStageBytes + rank_n * x_rows * 128;
        if (p.cluster_n > 1)
          load_2d_multicast(dst, p.x, full + stage * 8, k, row0 + rank_n * x_rows, row_mask, kEvictNormal);
        else
          load_2d(dst, p.x, full + stage * 8, k, row0, kEvictNormal);
      };
      auto load_weight = [&](int stage, int k, int column0) {
        const int column = column0 + rank_m * half_rows;
        const int c1 = kGated ? column % p.block : column, c3 = kGated ? column / p.block : 0;
        const uint32_t dst = base + stage * Tile::kStageBytes + Tile::kXBytes + rank_m * half_rows * 128;
#pragma unroll
        for (int half = 0; half < (kGated ? 2 : 1); ++half) {
          const uint32_t half_dst = dst + half * (kTileN / 2) * 128;
          if (p.cluster_m > 1)
            load_4d_multicast(half_dst, p.weight, full + stage * 8, k, c1, half, c3, column_mask, kEvictNormal);
          else
            load_4d(half_dst, p.weight, full + stage * 8, k, c1, half, c3, kEvictNormal);
        }
      };

      int stage = 0;
      uint32_t phase = 0;
      int prefetched = 0;
      if (p.prefetch_weight && first_tile < tiles) {
        int row0, column0;
        locate(first_tile, row0, column0);
        prefetched = min(p.stages, k_blocks);
        for (int s = 0; s < prefetched; ++s) {
          barrier_expect_bytes(full + s * 8, Tile::kStageBytes);
          load_weight(s, s * 64, column0);
        }
      }
      wait_for_prerequisites();
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        int row0, column0;
        locate(tile, row0, column0);
        for (int kb = 0; kb < k_blocks; ++kb) {
          if (prefetched > 0) {
            --prefetched;
          } else {
            barrier_wait(empty + stage * 8, phase ^ 1);
            barrier_expect_bytes(full + stage * 8, Tile::kStageBytes);
            load_weight(stage, kb * 64, column0);
          }
          load_x(stage, kb * 64, row0);
          if (++stage == p.stages) stage = 0, phase ^= 1;
        }
        if (p.has_residual) {
          for (int box = 0; box < Tile::kBoxes; box += Tile::kBoxesPerStage) {
            const int count = min(Tile::kBoxesPerStage, Tile::kBoxes - box);
            barrier_wait(empty + stage * 8, phase ^ 1);
            barrier_expect_bytes(full + stage * 8, count * 8192);
            for (int i = 0; i < count; ++i) {
              const int slab = (box + i) % (Tile::kTileM / 64), chunk = (box + i) / (Tile::kTileM / 64);
              load_2d(base + stage * Tile::kStageBytes + i * 8192, p.residual, full + stage * 8, column0 + chunk * 64,
                      row0 + slab * 64, kEvictFirst);
            }
            if (++stage == p.stages) stage = 0, phase ^= 1;
          }
        }
      }
      if (ctas > 1) {
        // Peers still signal this CTA's barriers: wait until every stage has been released.
        for (int s = 0; s < p.stages; ++s) {
          barrier_wait(empty + stage * 8, phase ^ 1);
          if (++stage == p.stages) stage = 0, phase ^= 1;
        }
      }
    }
    if (warp >= 2) {
      wait_for_prerequisites();
      const int thread = threadIdx.x - 64;
      int count = 0;
      for (int tile = first_tile; tile < tiles; tile += tile_step, ++count) {
        int row0, column0;
        locate(tile, row0, column0);
        const int buffer = count % 2;
        RowStats* const stats = reinterpret_cast<RowStats*>(base_pointer + (gathered - base) + buffer * Tile::kGathered);
        float* const bias = reinterpret_cast<float*>(stats + Tile::kTileM);
        float* const sums = bias + kTileN;
        barrier_wait(gathered_empty + buffer * 8, (count / 2 & 1) ^ 1);
        if (!own_stats)
          for (int i = thread; i < Tile::kTileM; i += 64)
            stats[i] = p.stats != nullptr && row0 + i < p.m ? p.stats[row0 + i] : RowStats{1.0f, 0.0f};
        for (int i = thread; i < kTileN; i += 64) {
          const int half = kGated ? i / (kTileN / 2) : 0, column = column0 + (kGated ? i % (kTileN / 2) : i);
          int64_t packed = column;
          if constexpr (kGated)
            packed = static_cast<int64_t>(column / p.block) * 2 * p.block + column % p.block + half * p.block;
          const bool inside = column < p.n;
          bias[i] = p.bias != nullptr && inside ? Numeric<T>::to_float(static_cast<const T*>(p.bias)[packed]) : 0.0f;
          sums[i] = p.norm == Norm::kLayer && inside ? p.colsum[packed] : 0.0f;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(gathered_full + buffer * 8);
      }
    }
    return;
  }

  if constexpr (kGroups == 2) raise_registers<232>();
  const int group = warp / 4 - 1;
  const int group_thread = threadIdx.x % 128;
  const int group_barrier = 1 + group;
  // CTA that this lane tells about a free stage: those of the same rows, then those of the same columns.
  int told = -1;
  if (lane < p.cluster_n) told = rank_m + p.cluster_m * lane;
  else if (lane < sharers) {
    const int i = lane - p.cluster_n;
    told = (i < rank_m ? i : i + 1) + p.cluster_m * rank_n;
  }
  auto release = [&](int stage) {
    __syncwarp();
    if (ctas > 1) {
      if (told >= 0) barrier_arrive_remote(empty + stage * 8, told);
    } else if (lane == 0) {
      barrier_arrive(empty + stage * 8);
    }
  };
  const uint32_t out = store_buffers + group * 8192;

  wait_for_prerequisites();
  int stage = 0;
  uint32_t phase = 0;
  const int slab0 = kPingpong ? 0 : group * kMma;  // of this warpgroup in its tile
  const int turns = kPingpong ? kGroups : 1, turn = kPingpong ? group : 0;
  // Passes over the stages of the tiles that the other warpgroups have.
  auto pass_tiles = [&](int tiles_passed) {
    stage += tiles_passed * (k_blocks + (p.has_residual ? Tile::kResidualStages : 0));
    phase ^= (stage / p.stages) & 1;
    stage %= p.stages;
  };
  pass_tiles(turn);
  // Taking turns: a warpgroup starts its product when the other has finished its own, since a barrier of the ring
  // tells apart only two successive uses of its stage. Barrier 3 + g lets warpgroup g go.
  constexpr int kTurnThreads = 256;
  if (kPingpong && group == 1 && first_tile < tiles) named_barrier_arrive(3, kTurnThreads);
  float acc[kMma][kTileN / 2];

  for (int count = turn, tile = first_tile + turn * tile_step; tile < tiles;
       tile += turns * tile_step, count += turns, pass_tiles(turns - 1)) {
    int row0, column0;
    locate(tile, row0, column0);
    const int group_row0 = row0 + slab0 * 64;

    // Eight threads share a row, 16 bytes each; a thread has every 16th row of its warpgroup.
    constexpr int kStatRows = 4 * kMma;
    const int stat_chunk = group_thread % 8, stat_row = group_thread / 8;
    float sum[kStatRows], squares[kStatRows], shift[kStatRows];
#pragma unroll
    for (int i = 0; i < kStatRows; ++i) {
      sum[i] = squares[i] = shift[i] = 0.0f;
      const int row = group_row0 + stat_row + i * 16;
      if (own_stats && p.norm == Norm::kLayer && row < p.m)
        shift[i] = Numeric<T>::to_float(static_cast<const T*>(p.x_pointer)[static_cast<int64_t>(row) * p.k]);
    }
    auto add_stage = [&](uint32_t x, bool inside, auto shifted) {
      uint4 values[kStatRows];
#pragma unroll
      for (int i = 0; i < kStatRows; ++i) {
        const int row = stat_row + i * 16;
        values[i] = load_shared_16(x + row * 128 + ((stat_chunk ^ (row & 7)) << 4));
      }
      // Past the end of K the tile holds zeros: nothing for RMS, wrong once shifted.
      if (decltype(shifted)::value && !inside) return;
#pragma unroll
      for (int i = 0; i < kStatRows; ++i)
        accumulate_row<T, decltype(shifted)::value>(values[i], shift[i], sum[i], squares[i]);
    };

    if (kPingpong) named_barrier_sync(3 + group, kTurnThreads);
    int previous = 0;
    for (int kb = 0; kb < k_blocks; ++kb) {
      const uint32_t x = base + stage * Tile::kStageBytes + slab0 * 64 * 128;
      const uint32_t weight = base + stage * Tile::kStageBytes + Tile::kXBytes;
      barrier_wait(full + stage * 8, phase);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
#pragma unroll
        for (int i = 0; i < kMma; ++i)
          Wgmma<T, kTileN>::issue(acc[i], wgmma_descriptor(x + i * 64 * 128) + kk * kDescriptorStepK16,
                                  wgmma_descriptor(weight) + kk * kDescriptorStepK16, kk > 0 || kb > 0);
      wgmma_commit();
      if (own_stats) {
        if (p.norm == Norm::kRms)
          add_stage(x, true, BoolConstant<false>{});
        else
          add_stage(x, kb * 64 + stat_chunk * 8 < p.k, BoolConstant<true>{});
      }
      wgmma_wait<1>();
      if (kb > 0) release(previous);
      previous = stage;
      if (++stage == p.stages) stage = 0, phase ^= 1;
    }
    if (kPingpong && tile + tile_step < tiles) {
      // The next tile's stages follow this one's residual in the ring.
      for (int i = 0, s = stage, ph = phase; p.has_residual && i < Tile::kResidualStages; ++i) {
        barrier_wait(full + s * 8, ph);
        if (++s == p.stages) s = 0, ph ^= 1;
      }
      named_barrier_arrive(3 + (group ^ 1), kTurnThreads);
    }
    wgmma_wait<0>();
    release(previous);

    const int buffer = count % 2;
    RowStats* const stats = reinterpret_cast<RowStats*>(base_pointer + (gathered - base) + buffer * Tile::kGathered);
    if (own_stats) {
#pragma unroll
      for (int i = 0; i < kStatRows; ++i) {
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) {
          sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
          squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], offset);
        }
        if (stat_chunk == 0)
          stats[slab0 * 64 + stat_row + i * 16] =
              finish_row_stats(p.norm, sum[i], squares[i], shift[i], 1.0f / p.k, p.epsilon);
      }
      named_barrier_sync(group_barrier, 128);
    }
    const float* const bias = reinterpret_cast<const float*>(stats + Tile::kTileM);
    barrier_wait(gathered_full + buffer * 8, count / 2 & 1);
    RowStats low[kMma], high[kMma];
#pragma unroll
    for (int i = 0; i < kMma; ++i) {
      const int row = (slab0 + i) * 64 + (warp % 4) * 16 + lane / 4;
      low[i] = stats[row], high[i] = stats[row + 8];
    }

    // 64 columns at a time, always from the front of the accumulators, which move up afterwards: unrolled, the
    // epilogue would be several times larger than the instruction cache.
    int residual_box = 0;  // residual stages already passed
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kMma; ++i) {
        // Eight groups of eight columns; the accumulators' group `first` holds tile column `column`.
        auto affine = [&](auto layer_norm, int first, int column, float(&v)[32]) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const int a = (first + j) * 4;
            const float2 b = *reinterpret_cast<const float2*>(bias + column + j * 8 + 2 * (lane % 4));
            float4 value = make_float4(acc[i][a], acc[i][a + 1], acc[i][a + 2], acc[i][a + 3]);
            if constexpr (decltype(layer_norm)::value) {
              const float2 c = *reinterpret_cast<const float2*>(bias + kTileN + column + j * 8 + 2 * (lane % 4));
              value.x = fmaf(-low[i].mean, c.x, value.x), value.y = fmaf(-low[i].mean, c.y, value.y);
              value.z = fmaf(-high[i].mean, c.x, value.z), value.w = fmaf(-high[i].mean, c.y, value.w);
            }
            v[4 * j] = fmaf(value.x, low[i].scale, b.x), v[4 * j + 1] = fmaf(value.y, low[i].scale, b.y);
            v[4 * j + 2] = fmaf(value.z, high[i].scale, b.x), v[4 * j + 3] = fmaf(value.w, high[i].scale, b.y);
          }
        };
        auto normalised = [&](int first, int column, float(&v)[32]) {
          if (p.norm == Norm::kLayer)
            affine(BoolConstant<true>{}, first, column, v);
          else
            affine(BoolConstant<false>{}, first, column, v);
        };
        float v[32];
        normalised(0, chunk * 64, v);
        activate<true>(v, p.activation);
        if constexpr (kGated) {
          float up[32];
          normalised(kTileN / 16, kTileN / 2 + chunk * 64, up);
#pragma unroll
          for (int j = 0; j < 32; ++j) v[j] *= up[j];
        }

        // 16-byte unit of row r, group j of the 128-byte-swizzled 64 x 64 box.
        const int matrix_row = (warp % 4) * 16 + (lane & 15);
        auto unit = [&](uint32_t box, int j) {
          return box + matrix_row * 128 + (((j + (lane >> 4)) ^ (matrix_row & 7)) << 4);
        };
        if (!kGated && p.has_residual) {
          const int box = chunk * (Tile::kTileM / 64) + slab0 + i;
          const int slot = box % Tile::kBoxesPerStage;
          // Stages are passed in order; one without a box of this group is released unread.
          while (residual_box < box / Tile::kBoxesPerStage) {
            release(stage);
            if (++stage == p.stages) stage = 0, phase ^= 1;
            ++residual_box;
          }
          barrier_wait(full + stage * 8, phase);
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            uint32_t r[4];
            load_matrices(unit(base + stage * Tile::kStageBytes + slot * 8192, j), r[0], r[1], r[2], r[3]);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const float2 value = Numeric<T>::unpack(r[q]);
              v[4 * (j + q / 2) + 2 * (q % 2)] += value.x;
              v[4 * (j + q / 2) + 2 * (q % 2) + 1] += value.y;
            }
          }
        }

        if (group_thread == 0) wait_stores_read<0>();  // long done: a chunk's arithmetic takes longer
        named_barrier_sync(group_barrier, 128);
#pragma unroll
        for (int j = 0; j < 8; j += 2)
          store_matrices(unit(out, j), Numeric<T>::pack(v[4 * j], v[4 * j + 1]),
                         Numeric<T>::pack(v[4 * j + 2], v[4 * j + 3]), Numeric<T>::pack(v[4 * j + 4], v[4 * j + 5]),
                         Numeric<T>::pack(v[4 * j + 6], v[4 * j + 7]));
        fence_async_proxy();
        named_barrier_sync(group_barrier, 128);
        if (group_thread == 0) {
          if (group_row0 + i * 64 < p.m && column0 + chunk * 64 < p.n)
            store_2d(p.y, out, column0 + chunk * 64, group_row0 + i * 64);
          commit_stores();
        }
        constexpr int kHalf = kGated ? kTileN / 4 : kTileN / 2;  // accumulators of a half
#pragma unroll
        for (int j = 0; j + 32 < kHalf; ++j) {
          acc[i][j] = acc[i][j + 32];
          if constexpr (kGated) acc[i][kHalf + j] = acc[i][kHalf + j + 32];
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(gathered_empty + buffer * 8);
    if (p.has_residual) {
      while (residual_box < Tile::kResidualStages) {
        barrier_wait(full + stage * 8, phase);
        release(stage);
        if (++stage == p.stages) stage = 0, phase ^= 1;
        ++residual_box;
      }
    }
  }
  if (group_thread == 0) wait_stores_read<0>();
}

}  // namespace onnxfuse::cuda
