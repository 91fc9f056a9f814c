// Many rows: warp-specialised tiles at the rate of the tensor cores.
//
// Two producer warps, one for the weights and one for x, keep a ring of stages full by TMA, shared inside a cluster by
// multicast. Each consumer warpgroup has 64 rows of the tile. Two more warps bring bias, column sums and row
// statistics to shared memory. The residual travels through the same ring as extra stages. Results leave by stmatrix
// and 16-byte stores, each warp on its own.
//
// The norm's statistics come from a kernel beside this one, which says by flags when x and when they are there, or from
// one before, which lets this one start when x is there and is waited for in the epilogue. Or, for small tiles, x goes
// to wgmma through registers (ldmatrix) and its sums are taken on the way, which costs less than another kernel if K is
// short.
//
// kSplit > 1: the CTAs of a cluster split K. Each sends its partial sums to the one that finishes those columns, which
// adds them to its own, always in the same order.
#pragma once

#include "hopper_ptx.cuh"
#include "numeric.cuh"
#include "tile_shape.cuh"
#include "wgmma_shapes.cuh"

namespace onnxfuse::cuda {

template <typename T, int kGroups, int kTileN, bool kGated, int kSplit>
__global__ __maxnreg__((TileShape<T, kGroups, kTileN, kGated, kSplit>::kRegisters)) void tile_kernel(
    const __grid_constant__ TileParams p) {
  using Tile = TileShape<T, kGroups, kTileN, kGated, kSplit>;
  extern __shared__ uint8_t shared_raw[];
  const uint32_t base = (shared_address(shared_raw) + 1023u) & ~1023u;
  uint8_t* const base_pointer = shared_raw + (base - shared_address(shared_raw));
  const uint32_t stores = base + p.stages * Tile::kStageBytes;
  const uint32_t sent = stores + Tile::kStoresBytes, received = sent + Tile::kPartsBytes;
  const uint32_t gathered = received + Tile::kPartsBytes;  // two, for alternate tiles
  const uint32_t full = gathered + 2 * Tile::kGathered;
  const uint32_t empty = full + p.stages * 8;
  const uint32_t gathered_full = empty + p.stages * 8, gathered_empty = gathered_full + 16;
  const uint32_t arrived = gathered_empty + 16;  // for each warp: what the other ranks send

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // A cluster of two shares the loads of the weights (cluster_m) or of x (cluster_n).
  const bool multicast = kSplit == 1 && p.cluster_m + p.cluster_n > 2;
  const int rank = kSplit > 1 || multicast ? cluster_rank() : 0;
  const int rank_m = p.cluster_m > 1 ? rank : 0, rank_n = p.cluster_n > 1 ? rank : 0;
  const int k_begin = static_cast<int>(static_cast<int64_t>(p.k_blocks) * (kSplit > 1 ? rank : 0) / kSplit);
  const int k_end = static_cast<int>(static_cast<int64_t>(p.k_blocks) * (kSplit > 1 ? rank + 1 : 1) / kSplit);
  const int first_tile = blockIdx.x / (kSplit > 1 ? kSplit : 1 << multicast), tile_step = p.clusters;
  // A tile that would end beyond x begins earlier, as the copy engine takes seven cycles for a row that it fills with
  // zeros, and one and a half for one that it reads. Returns how many rows are left to the tile before.
  auto locate = [&](int tile, int& row0, int& column0) {
    const int band = p.band.divide(tile), first_m = band * p.raster;
    const int inside = tile - band * p.band.divisor;
    const Divisor& height = first_m + p.raster <= p.tile_rows ? p.full_height : p.last_height;
    const int across = height.divide(inside), down = inside - across * height.divisor;
    const int own_row = ((first_m + down) * p.cluster_m + rank_m) * Tile::kTileM;
    row0 = max(min(own_row, p.m - Tile::kTileM), 0);
    column0 = (across * p.cluster_n + rank_n) * Tile::kOutN;
    return own_row - row0;
  };

  auto load_x = [&](int stage, int k, int row0) {
    const uint32_t dst = base + stage * Tile::kStageBytes;
    if (p.cluster_n > 1)
      load_2d_multicast(dst + rank_n * (Tile::kXBytes / 2), p.x, full + stage * 8, k,
                        row0 + rank_n * (Tile::kTileM / 2), 3, kEvictNormal);
    else
      load_2d(dst, p.x, full + stage * 8, k, row0, kEvictNormal);
  };
  struct WeightColumns {
    int c1, c3;
  };
  auto weight_columns = [&](int column0) {
    const int column = column0 + rank_m * (Tile::kOutN / 2);
    const int block = kGated ? p.block.divide(column) : 0;
    return WeightColumns{column - block * p.block.divisor, block};
  };
  auto load_weight = [&](int stage, int k, const WeightColumns& at) {
    const uint32_t dst = base + stage * Tile::kStageBytes + Tile::kXBytes;
#pragma unroll
    for (int half = 0; half < (kGated ? 2 : 1); ++half) {
      const uint32_t half_dst = dst + half * (Tile::kWeightBytes / 2);
      if (p.cluster_m > 1)
        load_4d_multicast(half_dst + rank_m * (Tile::kOutN / 2) * 128, p.weight, full + stage * 8, k, at.c1, half, at.c3,
                          3, p.weight_hint);
      else
        load_4d(half_dst, p.weight, full + stage * 8, k, at.c1, half, at.c3, p.weight_hint);
    }
  };

  // The way to the first loads is short, in instructions too: they come from L2. Each warp initialises what it uses.
  constexpr int kReady = 1, kEmptyReady = 2, kFlagsSeen = 3, kFlagsUsed = 4, kRowsCleared = 5;  // named barriers
  if (warp == 0) {
    if (lane == 0) {
#pragma unroll 4
      for (int s = 0; s < p.stages; ++s) barrier_init(full + s * 8, 1);
      fence_barrier_init();
    }
    __syncwarp();
    if (!multicast) named_barrier_arrive(kReady, Tile::kThreads);
  } else if (warp == 2) {
    if (lane < p.stages)
      barrier_init(empty + lane * 8, 4 * kGroups * (multicast ? 2 : 1));
    else if (lane < p.stages + 2)
      barrier_init(gathered_full + (lane - p.stages) * 8, 64);
    else if (lane < p.stages + 4)
      barrier_init(gathered_empty + (lane - p.stages - 2) * 8, 128 * kGroups);
    else if (kSplit > 1 && lane >= 32 - Tile::kWarps)
      barrier_init(arrived + (31 - lane) * 8, 1);
    fence_barrier_init();
    __syncwarp();
    if (kSplit > 1 && lane >= 32 - Tile::kWarps)
      barrier_expect_bytes(arrived + (31 - lane) * 8, (kSplit - 1) * Tile::kPartBytes);
    __syncwarp();
    if (!multicast) {
      named_barrier_arrive(kReady, Tile::kThreads);
      named_barrier_arrive(kEmptyReady, 64);
    }
  } else {
    if (threadIdx.x == 96) {
      prefetch_map(p.weight);
      prefetch_map(p.x);
      if (kSplit == 1 && p.has_residual) prefetch_map(p.residual);
    }
    if (!multicast) named_barrier_sync(kReady, Tile::kThreads);
  }
  if (multicast) {  // nothing is sent before the other CTA's barriers are ready
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
  }
  allow_dependents();
  // The weights of the ring's first round, without waiting for the consumers or, if they are constant, another kernel.
  int first_weights = 0;
  if (warp == 0) {
    if (lane == 0 && first_tile < p.tiles) {
      int row0, column0;
      locate(first_tile, row0, column0);
      const WeightColumns at = weight_columns(column0);
      first_weights = min(p.stages, k_end - k_begin);
      if (!p.prefetch_weight) wait_for_prerequisites();
#pragma unroll 1
      for (int s = 0; s < first_weights; ++s) {
        barrier_expect_bytes(full + s * 8, p.stage_bytes);
        load_weight(s, (k_begin + s) * 64, at);
      }
    }
    __syncwarp();
    if (!multicast) named_barrier_sync(kEmptyReady, 64);
  }
  if constexpr (kSplit > 1) cluster_arrive_relaxed();  // waited for before anything is sent

  if (warp < 4) {  // the producer warpgroup
    lower_registers<Tile::kProducerRegisters>();
    const auto advance = [&](int& stage, uint32_t& phase) {
      if (++stage == p.stages) stage = 0, phase ^= 1;
    };
    int stage = 0;
    uint32_t phase = 0;
    if (threadIdx.x == 0) {  // the weights
      for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
        int row0, column0;
        locate(tile, row0, column0);
        const WeightColumns at = weight_columns(column0);
#pragma unroll 1
        for (int kb = k_begin; kb < k_end; ++kb) {
          if (first_weights > 0) {
            --first_weights;
          } else {
            barrier_wait(empty + stage * 8, phase ^ 1);
            barrier_expect_bytes(full + stage * 8, p.stage_bytes);
            load_weight(stage, kb * 64, at);
          }
          advance(stage, phase);
        }
        if (kSplit == 1 && p.has_residual)
          for (int box = 0; box < Tile::kBoxes; box += Tile::kBoxesPerStage) {
            // Expected here, not where it is loaded: nobody gets ahead of this thread by two uses of a stage, which a
            // barrier does not tell apart.
            barrier_wait(empty + stage * 8, phase ^ 1);
            barrier_expect_bytes(full + stage * 8, min(Tile::kBoxesPerStage, Tile::kBoxes - box) * 8192);
            advance(stage, phase);
          }
      }
      if (multicast) {
        // The other CTA still signals this one's barriers: wait until every stage has been released.
        for (int s = 0; s < p.stages; ++s) {
          barrier_wait(empty + stage * 8, phase ^ 1);
          advance(stage, phase);
        }
      }
    }
    if (warp == 1 && p.flags != nullptr) {
      if (lane == 0) wait_for_flag<true>(p.flags, p.nonce);
      __syncwarp();
      named_barrier_arrive(kFlagsSeen, 96);
    }
    if (threadIdx.x == 32) {  // x and the residual
      if (!p.x_is_ready && p.flags == nullptr) wait_for_prerequisites();
      for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
        int row0, column0;
        locate(tile, row0, column0);
#pragma unroll 1
        for (int kb = k_begin; kb < k_end; ++kb) {
          barrier_wait(empty + stage * 8, phase ^ 1);
          load_x(stage, kb * 64, row0);
          advance(stage, phase);
        }
        if (kSplit == 1 && p.has_residual) {
#pragma unroll 1
          for (int box = 0; box < Tile::kBoxes; box += Tile::kBoxesPerStage) {
            const int count = min(Tile::kBoxesPerStage, Tile::kBoxes - box);
            barrier_wait(empty + stage * 8, phase ^ 1);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
              const int slab = (box + i) % kGroups, chunk = (box + i) / kGroups;
              load_2d(base + stage * Tile::kStageBytes + i * 8192, p.residual, full + stage * 8, column0 + chunk * 64,
                      row0 + slab * 64, kEvictFirst);
            }
            advance(stage, phase);
          }
        }
      }
    }
    if (warp >= 2) {
      const int thread = threadIdx.x - 64;
      if (p.flags == nullptr) {
        wait_for_prerequisites();
      } else {
        named_barrier_sync(kFlagsSeen, 96);
        for (int i = thread; i < p.stats_blocks; i += 64) wait_for_flag<false>(p.flags + kFlagsBefore + i, p.nonce);
        named_barrier_sync(kFlagsUsed, 64);
      }
      int count = 0;
      for (int tile = first_tile; tile < p.tiles; tile += tile_step, ++count) {
        int row0, column0;
        locate(tile, row0, column0);
        const int buffer = count % 2;
        RowStats* const stats = reinterpret_cast<RowStats*>(base_pointer + (gathered - base) + buffer * Tile::kGathered);
        float* const bias = reinterpret_cast<float*>(stats + Tile::kTileM);
        float* const sums = bias + kTileN;
        barrier_wait(gathered_empty + buffer * 8, (count / 2 & 1) ^ 1);
        if (p.stats != nullptr)
          for (int i = thread; i < Tile::kTileM; i += 64)
            stats[i] = row0 + i < p.m ? p.stats[row0 + i] : RowStats{1.0f, 0.0f};
        for (int i = thread; i < kTileN; i += 64) {
          const int half = kGated ? i / (kTileN / 2) : 0, column = column0 + (kGated ? i % (kTileN / 2) : i);
          int64_t packed = column;
          if constexpr (kGated)  // the blocks before, gate and up, and the gates of this block if it is in the ups
            packed = column + static_cast<int64_t>(p.block.divide(column) + half) * p.block.divisor;
          const bool inside = column < p.n;
          bias[i] = p.bias != nullptr && inside ? Numeric<T>::to_float(static_cast<const T*>(p.bias)[packed]) : 0.0f;
          sums[i] = p.norm == Norm::kLayer && inside ? p.colsum[packed] : 0.0f;
        }
        barrier_arrive(gathered_full + buffer * 8);
        if (count == 0 && p.flags != nullptr && thread == 0 &&
            atomicAdd(reinterpret_cast<unsigned long long*>(p.flags + 1), 1ull) == gridDim.x - 1)
          for (int i = 0; i < p.stats_blocks + kFlagsBefore; ++i) p.flags[i] = 0;  // all have seen them
      }
    }
    if constexpr (kSplit > 1) {  // this CTA's memory is read and written by others until they have arrived too
      __syncwarp();
      cluster_wait();
      cluster_arrive_relaxed();
      cluster_wait();
    }
    return;
  }

  raise_registers<Tile::kConsumerRegisters>();
  const int group = warp / 4 - 1;
  auto release = [&](int stage) {
    __syncwarp();
    if (multicast) {
      if (lane < 2) barrier_arrive_remote(empty + stage * 8, lane);
    } else if (lane == 0) {
      barrier_arrive(empty + stage * 8);
    }
  };
  // 16-byte unit j of this lane's row in a 128-byte-swizzled box of this warp's 16 rows.
  const int matrix_row = lane & 15;
  auto unit = [&](uint32_t box, int j) {
    return box + matrix_row * 128 + (((j + (lane >> 4)) ^ (matrix_row & 7)) << 4);
  };
  const int warp_row = group * 64 + (warp % 4) * 16;  // in the tile
  if (p.m < Tile::kTileM && p.cluster_n == 1) {
    // Nothing is loaded to the rows beyond x. What they hold is not stored, but values beside share a reciprocal with it.
    const int first = min(max(p.m - group * 64, 0), 64);
    // To a stage that x does not use the residual may be on its way already; there are none if a CTA has several tiles.
    const int used = kSplit == 1 && p.has_residual ? min(p.stages, k_end - k_begin) : p.stages;
    for (int s = 0; s < used; ++s)
      for (int i = first * 8 + threadIdx.x % 128; i < 64 * 8; i += 128)
        store_shared_16(base + s * Tile::kStageBytes + group * 64 * 128 + i * 16, make_uint4(0, 0, 0, 0));
    fence_async_proxy();
    named_barrier_sync(kRowsCleared, 128 * kGroups);  // of both groups: the residual of either may come to these rows
  }

  int stage = 0;
  uint32_t phase = 0;
  float acc[kTileN / 2];

  int count = 0;
  for (int tile = first_tile; tile < p.tiles; tile += tile_step, ++count) {
    int row0, column0;
    const int foreign_rows = locate(tile, row0, column0);

    // This lane sees two rows of x, eight apart, a quarter of the columns each.
    const int row_low = row0 + warp_row + lane / 4;
    float shift[2] = {0.0f, 0.0f};
    const bool own_stats = Tile::kOwnStats && p.norm != Norm::kNone && p.stats == nullptr;
    if (own_stats && p.norm == Norm::kLayer) {
      wait_for_prerequisites();
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (row_low + 8 * i < p.m)
          shift[i] =
              Numeric<T>::to_float(static_cast<const T*>(p.x_pointer)[static_cast<int64_t>(row_low + 8 * i) * p.k]);
    }
    // From zero, for all norms: ptxas gives up the overlap of wgmma where paths with other registers meet.
#pragma unroll
    for (int r = 0; r < kTileN / 2; ++r) acc[r] = 0.0f;
    int previous = 0;
    auto pass = [&](int kb) {  // to the next stage; the one before has been read
      wgmma_wait<1>();
      if (kb > k_begin) release(previous);
      previous = stage;
      if (++stage == p.stages) stage = 0, phase ^= 1;
    };
    auto multiply = [&] {  // without a norm, wgmma reads x itself
      for (int kb = k_begin; kb < k_end; ++kb) {
        const uint32_t rows = base + stage * Tile::kStageBytes + group * 64 * 128;
        const uint32_t weight = base + stage * Tile::kStageBytes + Tile::kXBytes;
        barrier_wait(full + stage * 8, phase);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)
          Wgmma<T, kTileN>::issue(acc, wgmma_descriptor(rows) + kk * kDescriptorStepK16,
                                  wgmma_descriptor(weight) + kk * kDescriptorStepK16, 1);
        wgmma_commit();
        pass(kb);
      }
      wgmma_wait<0>();
    };
    float sum[2] = {0.0f, 0.0f}, squares[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    // Sums of 16 columns of x, from the operand of a wgmma that has been issued.
    auto add_sums = [&](auto norm, const uint32_t(&x)[4], int chunks) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if constexpr (decltype(norm)::value == Norm::kLayer)
          if (q / 2 >= chunks) continue;  // past the end of K the tile holds zeros, wrong once shifted
        float2 v = Numeric<T>::unpack(x[q]);
        if constexpr (decltype(norm)::value == Norm::kLayer) {
          v.x -= shift[q % 2], v.y -= shift[q % 2];
          sum[q % 2] += v.x + v.y;
        }
        float& total = squares[q % 2][q / 2];
        total = fmaf(v.x, v.x, total);
        total = fmaf(v.y, v.y, total);
        asm volatile("" : "+f"(total));  // stays between the instructions
      }
    };
    // The fragments of x alternate between two sets of registers, since wgmma reads them until it has ended. The sums of
    // the stage before are taken while the next fragments are on their way.
    auto multiply_and_sum = [&](auto norm) {
      auto add_stage = [&](const uint32_t(&x)[4][4], int kb) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) add_sums(norm, x[kk], p.k / 8 - kb * 8 - kk * 2);
      };
      auto step = [&](uint32_t(&x)[4][4], const uint32_t(&before)[4][4], int kb) {
        const uint32_t rows = unit(base + stage * Tile::kStageBytes + warp_row * 128, 0);
        const uint32_t weight = base + stage * Tile::kStageBytes + Tile::kXBytes;
        barrier_wait(full + stage * 8, phase);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) load_matrices(rows ^ (kk << 5), x[kk][0], x[kk][1], x[kk][2], x[kk][3]);
        if (kb > k_begin) add_stage(before, kb - 1);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)
          Wgmma<T, kTileN>::issue(acc, x[kk], wgmma_descriptor(weight) + kk * kDescriptorStepK16, 1);
        wgmma_commit();
        pass(kb);
      };
      uint32_t even[4][4], odd[4][4];
      for (int kb = k_begin; kb < k_end; kb += 2) {
        step(even, odd, kb);
        if (kb + 1 < k_end) step(odd, even, kb + 1);
      }
      if ((k_end - k_begin) % 2)
        add_stage(even, k_end - 1);
      else
        add_stage(odd, k_end - 1);
      wgmma_wait<0>();
    };
    if constexpr (Tile::kOwnStats) {
      if (!own_stats)
        multiply();
      else if (p.norm == Norm::kRms)
        multiply_and_sum(NormConstant<Norm::kRms>{});
      else
        multiply_and_sum(NormConstant<Norm::kLayer>{});
    } else {
      multiply();
    }
    release(previous);

    // What follows is used once a tile: kept out of the registers that live through the loop above.
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));
    float row_sum[2] = {sum[0], sum[1]}, row_squares[2] = {squares[0][0] + squares[0][1], squares[1][0] + squares[1][1]};
    if (own_stats) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
          row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], offset);
          row_squares[i] += __shfl_xor_sync(0xffffffffu, row_squares[i], offset);
        }
      }
    }

    const int slice0 = kSplit > 1 ? rank * Tile::kSliceN : 0;  // columns of the tile that are finished here
    const int own_warp = warp - 4;
    if constexpr (kSplit > 1) {
      constexpr int kRowSums = Tile::kSums * 32;                          // where they start in a part, in floats
      constexpr int kPart = Tile::kPartBytes, kWarpParts = (kSplit - 1) * kPart;
      auto slot = [](int of, int without) { return of < without ? of : of - 1; };  // there is no part for oneself
      const uint32_t own_sent = sent + own_warp * kWarpParts;
#pragma unroll
      for (int s = 0; s < kSplit; ++s) {
        if (s == rank) continue;
        float* const part = reinterpret_cast<float*>(base_pointer + (own_sent - base) + slot(s, rank) * kPart);
#pragma unroll
        for (int r = 0; r < Tile::kSums; r += 4) {
          const int a = s * Tile::kSums + r;
          reinterpret_cast<float4*>(part)[r * 8 + lane] = make_float4(acc[a], acc[a + 1], acc[a + 2], acc[a + 3]);
        }
        if (lane % 4 < 2) {
          const int i = lane % 4;
          reinterpret_cast<float2*>(part + kRowSums)[lane / 4 + 8 * i] =
              make_float2(i == 0 ? row_sum[0] : row_sum[1], i == 0 ? row_squares[0] : row_squares[1]);
        }
      }
      fence_async_proxy();
      __syncwarp();
      cluster_wait();  // the barriers of every CTA are ready
      if (lane < kSplit && lane != rank)
        push_to_cta(received + own_warp * kWarpParts + slot(rank, lane) * kPart, own_sent + slot(lane, rank) * kPart,
                    kPart, arrived + own_warp * 8, lane);
#pragma unroll
      for (int s = 1; s < kSplit; ++s) {
        if (s != rank) continue;
#pragma unroll
        for (int r = 0; r < Tile::kSums; ++r) acc[r] = acc[s * Tile::kSums + r];
      }
      barrier_wait(arrived + own_warp * 8, 0);
      __syncwarp();
      cluster_arrive_relaxed();
      const float* part = reinterpret_cast<const float*>(base_pointer + (received - base) + own_warp * kWarpParts);
#pragma unroll 1
      for (int s = 1; s < kSplit; ++s, part += kPart / 4) {
#pragma unroll
        for (int r = 0; r < Tile::kSums; r += 4) {
          const float4 add = reinterpret_cast<const float4*>(part)[r * 8 + lane];
          acc[r] += add.x, acc[r + 1] += add.y, acc[r + 2] += add.z, acc[r + 3] += add.w;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 add = reinterpret_cast<const float2*>(part + kRowSums)[lane / 4 + 8 * i];
          row_sum[i] += add.x, row_squares[i] += add.y;
        }
      }
      __syncwarp();  // results are staged where the parts were
    }
    const int buffer = count % 2;
    const RowStats* const stats =
        reinterpret_cast<const RowStats*>(base_pointer + (gathered - base) + buffer * Tile::kGathered);
    const float* const bias = reinterpret_cast<const float*>(stats + Tile::kTileM);
    barrier_wait(gathered_full + buffer * 8, count / 2 & 1);
    RowStats low = {1.0f, 0.0f}, high = {1.0f, 0.0f};
    if (own_stats) {
      const float inv_k = 1.0f / static_cast<float>(p.k);
      low = finish_row_stats(p.norm, row_sum[0], row_squares[0], shift[0], inv_k, p.epsilon);
      high = finish_row_stats(p.norm, row_sum[1], row_squares[1], shift[1], inv_k, p.epsilon);
    } else if (p.stats != nullptr) {
      low = stats[warp_row + lane / 4], high = stats[warp_row + lane / 4 + 8];
    }

    // A chunk of columns at a time: unrolled, the epilogue would be several times larger than the instruction cache.
    constexpr int kChunk = Tile::kChunk, kValues = Tile::kValues;
    constexpr int kRowUnits = kChunk / 8, kRows = 32 / kRowUnits, kUnits = 16 / kRows;  // a warp stores kRows at once
    const uint32_t out = kSplit > 1 ? received + own_warp * (kSplit - 1) * Tile::kPartBytes
                                    : stores + own_warp * Tile::kStoreBytes;
    // 16-byte unit j (even) of this lane's row of a swizzled box is at `unit ^ j * 16` from the box.
    const uint32_t unit0 = (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    // Results are read back with the lanes in the order of the units, kRows rows at once.
    const int unit_row = lane / kRowUnits, unit_column = lane % kRowUnits;
    const uint32_t unit_even = out + unit_row * 128 + ((unit_column ^ (unit_row & 7)) << 4);
    auto stored = [&](int i) {  // rows kRows apart differ in the swizzle only if there are fewer than eight between
      return (kRows % 8 ? unit_even ^ (kRows * i % 8 << 4) : unit_even) + i * kRows * 128;
    };
    int columns_left = p.n - (column0 + slice0);
    if constexpr (Tile::kSliceN % kChunk != 0) columns_left = min(columns_left, Tile::kSliceN);
    columns_left -= unit_column * 8;
    const int tile_row = warp_row + unit_row, row = row0 + tile_row;
    const int row_begin = max(foreign_rows - tile_row, 0), rows_left = max(p.m - row - row_begin, 0);
    // Whether row `tile_row` + i * kRows is this tile's, and there are columns to store.
    auto stores_row = [&](int i) {
      return static_cast<unsigned>(i * kRows - row_begin) < static_cast<unsigned>(columns_left > 0 ? rows_left : 0);
    };
    int64_t step = static_cast<int64_t>(kRows) * p.n * static_cast<int64_t>(sizeof(T));
    asm volatile("" : "+l"(step));  // stays in registers: a parameter would be read again for every store
    const int64_t offset = static_cast<int64_t>(row) * p.n + column0 + slice0 + unit_column * 8;
    uint8_t* y = reinterpret_cast<uint8_t*>(static_cast<T*>(p.y) + offset);
    int residual_box = 0;  // residual stages already passed
    // The results of a chunk are read back and leave while those of the next are computed.
    constexpr int kChunks = (Tile::kSliceN + kChunk - 1) / kChunk;
    static_assert(kSplit == 1 || kChunks == 1);  // else the residual is staged where results wait
#pragma unroll 1
    for (int chunk = 0;; ++chunk) {
      auto store_results = [&] {
        uint4 results[kUnits];
#pragma unroll
        for (int i = 0; i < kUnits; ++i) results[i] = load_shared_16(stored(i));
        uint8_t* at = y;
#pragma unroll
        for (int i = 0; i < kUnits; ++i, at += step)
          if (stores_row(i)) store_global_16(at, results[i]);
        y += kChunk * sizeof(T), columns_left -= kChunk;
      };
      if (chunk == kChunks) {
        store_results();
        break;
      }
      const int tile_column = slice0 + chunk * kChunk;
      const float* const column_bias = bias + tile_column + 2 * (lane % 4);
      // The accumulators from `first` to `end`, normalised, with bias.
      auto affine = [&](auto layer_norm, auto first, auto end, const float* at, float(&v)[Tile::kValues]) {
#pragma unroll
        for (int j = 0; j < Tile::kChunk / 8; ++j) {
          const int a = decltype(first)::value + j * 4;
          if (a >= decltype(end)::value) {
            v[4 * j] = v[4 * j + 1] = v[4 * j + 2] = v[4 * j + 3] = 0.0f;  // never stored
            continue;
          }
          const float2 b = *reinterpret_cast<const float2*>(at + j * 8);
          float4 value = make_float4(acc[a], acc[a + 1], acc[a + 2], acc[a + 3]);
          if constexpr (decltype(layer_norm)::value) {
            const float2 c = *reinterpret_cast<const float2*>(at + kTileN + j * 8);
            value.x = fmaf(-low.mean, c.x, value.x), value.y = fmaf(-low.mean, c.y, value.y);
            value.z = fmaf(-high.mean, c.x, value.z), value.w = fmaf(-high.mean, c.y, value.w);
          }
          v[4 * j] = fmaf(value.x, low.scale, b.x), v[4 * j + 1] = fmaf(value.y, low.scale, b.y);
          v[4 * j + 2] = fmaf(value.z, high.scale, b.x), v[4 * j + 3] = fmaf(value.w, high.scale, b.y);
        }
      };
      auto of_chunk = [&](auto half, float(&v)[Tile::kValues]) {
        constexpr int kHalf = decltype(half)::value;
        for_each_index<kChunks>([&](auto c) {
          constexpr int kFirst = kHalf * (kTileN / 4) + decltype(c)::value * Tile::kValues;
          constexpr int kEnd = kHalf * (kTileN / 4) + Tile::kSums;
          if (chunk != decltype(c)::value) return;
          const float* const at = column_bias + kHalf * (kTileN / 2);
          if (p.norm == Norm::kLayer)
            affine(BoolConstant<true>{}, IntConstant<kFirst>{}, IntConstant<kEnd>{}, at, v);
          else
            affine(BoolConstant<false>{}, IntConstant<kFirst>{}, IntConstant<kEnd>{}, at, v);
        });
      };
      float v[kValues];
      of_chunk(IntConstant<0>{}, v);
      activate<true>(v, p.activation);
      if constexpr (kGated) {
        float up[kValues];
        of_chunk(IntConstant<1>{}, up);
#pragma unroll
        for (int j = 0; j < kValues; ++j) v[j] *= up[j];
      }

      if (!kGated && p.has_residual) {
        uint32_t box_rows;
        int box_unit = 0;
        if constexpr (kSplit > 1) {
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            uint4 r = make_uint4(0, 0, 0, 0);
            if (stores_row(i))
              r = load_global_16(reinterpret_cast<const uint8_t*>(static_cast<const T*>(p.residual_pointer) + offset) +
                                 i * step);
            store_shared_16(stored(i), r);
          }
          __syncwarp();
          box_rows = out;
        } else {
          const int box = tile_column / 64 * kGroups + group;
          // Stages are passed in order; one without a box of this group is released unread.
          while (residual_box < box / Tile::kBoxesPerStage) {
            release(stage);
            if (++stage == p.stages) stage = 0, phase ^= 1;
            ++residual_box;
          }
          barrier_wait(full + stage * 8, phase);
          box_rows = base + stage * Tile::kStageBytes + box % Tile::kBoxesPerStage * 8192 + (warp % 4) * 2048;
          box_unit = tile_column % 64 / 8;
        }
        const uint32_t box_unit0 = box_rows + unit0;
#pragma unroll
        for (int j = 0; j < kChunk / 8; j += 2) {
          uint32_t r[4];
          load_matrices(box_unit0 ^ ((box_unit + j) << 4), r[0], r[1], r[2], r[3]);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const float2 value = Numeric<T>::unpack(r[q]);
            v[4 * (j + q / 2) + 2 * (q % 2)] += value.x;
            v[4 * (j + q / 2) + 2 * (q % 2) + 1] += value.y;
          }
        }
        if constexpr (kSplit > 1) __syncwarp();
      }

      if (chunk > 0) store_results();
      __syncwarp();  // the results before have been read
#pragma unroll
      for (int j = 0; j < kChunk / 8; j += 2)
        store_matrices((out + unit0) ^ (j << 4), Numeric<T>::pack(v[4 * j], v[4 * j + 1]),
                       Numeric<T>::pack(v[4 * j + 2], v[4 * j + 3]), Numeric<T>::pack(v[4 * j + 4], v[4 * j + 5]),
                       Numeric<T>::pack(v[4 * j + 6], v[4 * j + 7]));
      __syncwarp();
    }
    barrier_arrive(gathered_empty + buffer * 8);
    if (kSplit == 1 && p.has_residual) {
      while (residual_box < Tile::kResidualStages) {
        barrier_wait(full + stage * 8, phase);
        release(stage);
        if (++stage == p.stages) stage = 0, phase ^= 1;
        ++residual_box;
      }
    }
  }
  if constexpr (kSplit > 1) cluster_wait();
}

}  // namespace onnxfuse::cuda
