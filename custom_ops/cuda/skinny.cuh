// The fewest rows, without clusters: a CTA owns few columns and all of K, so that nothing is exchanged between CTAs.
//
// As many CTAs as multiprocessors stream one band of weight rows each. A K block of 64 is a stage of the ring and goes
// to one warp, whole: the warps share K, each accumulates all columns of the CTA by mma.sync (16 weight columns by 8
// rows of x at a time), and their partial sums meet in shared memory at the end, always added in the same order. From
// the arrival of the last weights to the stores there is one K block of a warp and one barrier.
// The norm's sums are taken from the fragments of x in registers. Bias, column sums, residual and statistics are
// copied to shared memory meanwhile. How the kernel overlaps with its neighbours: see wgmma_stream.cuh.
#pragma once

#include "hopper_ptx.cuh"
#include "mma.cuh"
#include "numeric.cuh"
#include "stream_params.cuh"

namespace onnxfuse::cuda {

template <typename T, int kSlabs, int kRowTiles>
struct SkinnyTile {
  static constexpr int kColumns = 16 * kSlabs;  // of the packed weight; gated: the second half are the up columns
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kWarps = 8;  // that consume
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kProducers = 2;  // warps
  static constexpr int kThreads = kConsumers + 32 * kProducers;
  static constexpr int kWeightBytes = kColumns * 128;
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kMaxStages = 40;

  // A K block's 4 x kSlabs fragments of the weight are loaded in portions, as the registers allow.
  static constexpr int kSteps = kSlabs <= 2 ? 4 : 2;  // of 16 in K

  // A warp's partial sums take the place of a stage that is its own. Padded: the stores meet no bank conflicts.
  static constexpr int kRowFloats = kColumns + 4;
  static_assert(kRows * kRowFloats * 4 <= kStageBytes);

  // After the ring.
  static constexpr int kStats = 0;                                   // RowStats[kRows]; their mean: the shift at first
  static constexpr int kSums = kStats + kRows * 8;                   // float2[kWarps][kRows]
  static constexpr int kBias = kSums + kWarps * kRows * 8;           // T[kColumns]
  static constexpr int kColumnSums = kBias + kColumns * 2;           // float[kColumns]
  static constexpr int kResidual = kColumnSums + kColumns * 4;       // T[kRows][kColumns]
  static constexpr int kBarriers = kResidual + kRows * kColumns * 2;
  static constexpr __host__ __device__ int smem_bytes(int stages) {
    return 1024 + stages * kStageBytes + kBarriers + stages * 16;
  }
};

template <typename T, int kSlabs, int kRowTiles>
__global__ __launch_bounds__(SkinnyTile<T, kSlabs, kRowTiles>::kThreads, 2) void skinny_kernel(
    const __grid_constant__ StreamParams p) {
  using Tile = SkinnyTile<T, kSlabs, kRowTiles>;
  extern __shared__ uint8_t shared_raw[];
  const uint32_t base = (shared_address(shared_raw) + 1023u) & ~1023u;
  uint8_t* const base_pointer = shared_raw + (base - shared_address(shared_raw));
  uint8_t* const extra_pointer = base_pointer + p.stages * Tile::kStageBytes;
  const uint32_t extra = base + p.stages * Tile::kStageBytes;
  const uint32_t full = extra + Tile::kBarriers;
  const uint32_t empty = full + p.stages * 8;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = blockIdx.y * Tile::kRows;
  const int tile_out = p.gated ? Tile::kColumns / 2 : Tile::kColumns;
  const int column0 = blockIdx.x * tile_out;
  const int k_blocks = (p.k + 63) / 64;
  const int first = min(p.stages, k_blocks);  // loads that wait for no stage

  // Coordinates of the weight's columns: [block, half, column of the block].
  const int c3 = p.gated ? column0 / p.block : 0, c1 = column0 - c3 * p.block;
  // Read once if there is one tile of x; else the other tiles find it in L2.
  const uint64_t hint = gridDim.y == 1 ? kEvictFirst : kEvictNormal;
  const int trigger = max(k_blocks - 1 - p.trigger, 0);
  auto load_weight = [&](int stage, int kb) {
    const uint32_t dst = base + stage * Tile::kStageBytes;
    load_4d(dst, p.weight, full + stage * 8, kb * 64, c1, 0, c3, hint);
    if (p.gated) load_4d(dst + Tile::kWeightBytes / 2, p.weight, full + stage * 8, kb * 64, c1, 1, c3, hint);
  };

  // A stage also belongs to one producer, of several: a load takes one thread longer than memory needs for it.
  const int producer = warp - Tile::kWarps;
  const bool produces = producer >= 0 && lane == 0;
  if (produces) {
    if (producer == 0) prefetch_map(p.weight);
    for (int s = producer; s < p.stages; s += Tile::kProducers) {
      barrier_init(full + s * 8, 1 + 32);  // the weights, and the lanes that copy x
      barrier_init(empty + s * 8, 1);
    }
    fence_barrier_init();
#pragma unroll 1
    for (int s = producer; s < first; s += Tile::kProducers) {
      barrier_expect_bytes(full + s * 8, Tile::kWeightBytes);
      if (p.prefetch_weight) load_weight(s, s);
      if (s == trigger) allow_dependents();
    }
  }
  __syncthreads();

  if (producer >= 0) {
    if (lane == 0) {
      if (p.prefetch_weight) {
        // Memory must have something to do until x is there: what comes after the ring goes to L2.
        const int last = first + min(p.ahead, k_blocks - first);
#pragma unroll 1
        for (int kb = first + producer; kb < last; kb += Tile::kProducers) {
          prefetch_4d(p.weight, kb * 64, c1, 0, c3);
          if (p.gated) prefetch_4d(p.weight, kb * 64, c1, 1, c3);
        }
      } else {
        wait_for_prerequisites();
#pragma unroll 1
        for (int s = producer; s < first; s += Tile::kProducers) load_weight(s, s);
      }
      uint32_t phase = 0;
#pragma unroll 1
      for (int round = p.stages; round < k_blocks; round += p.stages, phase ^= 1) {
#pragma unroll 1
        for (int stage = producer; stage < p.stages && round + stage < k_blocks; stage += Tile::kProducers) {
          barrier_wait(empty + stage * 8, phase);
          barrier_expect_bytes(full + stage * 8, Tile::kWeightBytes);
          load_weight(stage, round + stage);
          if (round + stage == trigger) allow_dependents();
        }
      }
    }
    return;
  }
  wait_for_prerequisites();

  // x, by the warp that will multiply it: it does not queue behind the weights. A lane copies unit lane % 8 of some rows.
  const int rows = min(Tile::kRows, p.m - row0);
  const T* const x_rows = static_cast<const T*>(p.x_pointer) + static_cast<int64_t>(row0) * p.k;
  auto copy_x = [&](int stage, int kb) {
    const uint32_t dst = base + stage * Tile::kStageBytes + Tile::kWeightBytes;
    const int unit = lane % 8, k = kb * 64 + unit * 8;
#pragma unroll
    for (int row = lane / 8; row < Tile::kRows; row += 4) {
      const bool present = row < rows && k < p.k;
      copy_16_or_zeros(dst + row * 128 + ((unit ^ (row & 7)) << 4),
                       x_rows + (present ? static_cast<int64_t>(row) * p.k + k : 0), present);
    }
    barrier_arrive_after_copies(full + stage * 8);
  };
#pragma unroll 1
  for (int s = warp; s < first; s += Tile::kWarps) copy_x(s, s);

  // What the epilogue needs.
  const bool own_stats = p.norm != Norm::kNone && p.stats == nullptr;
  {
    // Packed column of the tile's column i, or -1. Eight adjacent ones are adjacent in the weight too.
    auto packed_column = [&](int i) -> int64_t {
      const int upper = p.gated && i >= Tile::kColumns / 2, j = column0 + i - upper * (Tile::kColumns / 2);
      return j < p.n ? gate_column(j, p.block, p.gated) + upper * static_cast<int64_t>(p.block) : -1;
    };
    const int i = threadIdx.x;
    if (p.bias != nullptr && i < Tile::kColumns / 8) {
      if (const int64_t packed = packed_column(i * 8); packed >= 0)
        copy_16(extra + Tile::kBias + i * 16, static_cast<const T*>(p.bias) + packed);
    }
    if (p.norm == Norm::kLayer && i < Tile::kColumns / 4) {
      if (const int64_t packed = packed_column(i * 4); packed >= 0)
        copy_16(extra + Tile::kColumnSums + i * 16, p.colsum + packed);
    }
    if (p.stats != nullptr && i < rows) copy_8(extra + Tile::kStats + i * 8, p.stats + row0 + i);
    if (p.residual != nullptr && !p.gated) {
      constexpr int kChunks = Tile::kColumns / 8;  // of a row
      static_assert(Tile::kRows * kChunks <= Tile::kConsumers);
      const int row = i / kChunks, column = column0 + i % kChunks * 8;
      if (row < rows && column < p.n)
        copy_16(extra + Tile::kResidual + i * 16,
                static_cast<const T*>(p.residual) + static_cast<int64_t>(row0 + row) * p.y_stride + column);
    }
  }

  // Lane 4 g + t has of a row tile's fragment row g.
  float shift[kRowTiles], sum[kRowTiles], squares[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    shift[j] = sum[j] = squares[j] = 0.0f;
    const int row = row0 + j * 8 + lane / 4;
    if (own_stats && p.norm == Norm::kLayer && row < p.m)
      shift[j] = Numeric<T>::to_float(static_cast<const T*>(p.x_pointer)[static_cast<int64_t>(row) * p.k]);
  }
  // `valid`: of the four words, those before the end of K. Past it are zeros: nothing for RMS, wrong once shifted.
  auto add_sums = [&](int j, const uint32_t(&w)[4], int valid) {
    if (p.norm == Norm::kRms) {
      accumulate_row<T, false>(make_uint4(w[0], w[1], w[2], w[3]), 0.0f, sum[j], squares[j]);
    } else {
      const uint32_t fill = Numeric<T>::pack(shift[j], shift[j]);
      accumulate_row<T, true>(make_uint4(valid > 0 ? w[0] : fill, valid > 1 ? w[1] : fill, valid > 2 ? w[2] : fill,
                                         valid > 3 ? w[3] : fill),
                              shift[j], sum[j], squares[j]);
    }
  };

  float acc[kSlabs][kRowTiles][4];
#pragma unroll
  for (int i = 0; i < kSlabs; ++i)
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.0f;

  // 16-byte unit u of row r is at r * 128 + ((u ^ (r & 7)) << 4). A lane's address of further units is an XOR of this.
  // Weights: 16 rows and 2 units at a time, rows first; x: 8 rows and 4 units.
  const uint32_t weight_offset = (lane % 16) * 128 + (((lane / 16) ^ (lane % 8)) << 4);
  const uint32_t x_offset = (lane % 8) * 128 + (((lane / 8) ^ (lane % 8)) << 4);
  uint32_t phase = 0;
  for (int round = 0; round < k_blocks; round += p.stages, phase ^= 1) {
    // A stage belongs to one warp for good: only who has seen each phase of a barrier can wait for the next.
    for (int stage = warp; stage < p.stages && round + stage < k_blocks; stage += Tile::kWarps) {
      const uint32_t weight = base + stage * Tile::kStageBytes + weight_offset;
      const uint32_t x = base + stage * Tile::kStageBytes + Tile::kWeightBytes + x_offset;
      const int units = (p.k - (round + stage) * 64) / 8;
      barrier_wait(full + stage * 8, phase);
      __syncwarp();
      constexpr int kHalves = Tile::kSteps > 2 ? 2 : 1;  // of the K block, whose x is in registers at once
      uint32_t b[kHalves][kRowTiles][4], any = 0;
#pragma unroll
      for (int step = 0; step < 4; step += Tile::kSteps) {
        if (step % (2 * kHalves) == 0) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j)
              load_matrices((x + j * 1024) ^ ((step / 2 + h) << 6), b[h][j][0], b[h][j][1], b[h][j][2], b[h][j][3]);
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) any |= b[h][j][0];
        }
        uint32_t a[Tile::kSteps][kSlabs][4];
#pragma unroll
        for (int s = 0; s < Tile::kSteps; ++s)
#pragma unroll
          for (int i = 0; i < kSlabs; ++i)
            load_matrices((weight + i * 2048) ^ ((step + s) << 5), a[s][i][0], a[s][i][1], a[s][i][2], a[s][i][3]);
#pragma unroll
        for (int s = 0; s < Tile::kSteps; ++s)
#pragma unroll
          for (int i = 0; i < kSlabs; ++i) any |= a[s][i][0];
        if (step + Tile::kSteps == 4) {
          // All must be in registers: the barrier may be signalled, and new weights come, before loads have read.
          wait_for_value(any);
          __syncwarp();
          if (lane == 0) barrier_arrive(empty + stage * 8);
          if (round + stage + p.stages < k_blocks) copy_x(stage, round + stage + p.stages);
        }
#pragma unroll
        for (int s = 0; s < Tile::kSteps; ++s)
#pragma unroll
          for (int i = 0; i < kSlabs; ++i)
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) {
              const uint32_t(&words)[4] = b[(step + s) / 2 % kHalves][j];
              multiply_m16n8k16<T>(acc[i][j], a[s][i], words[(step + s) % 2 * 2], words[(step + s) % 2 * 2 + 1]);
            }
        if (own_stats && (step + Tile::kSteps) % (2 * kHalves) == 0) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j)
              add_sums(j, b[h][j], units - ((step + Tile::kSteps) / 2 - kHalves + h) * 4);
        }
      }
    }
  }

  // [row][column], in the place of the warp's first stage: nothing is loaded there any more.
  const int active = min(Tile::kWarps, first);  // warps that had a K block
  __syncwarp();
  if (warp < active) {
    float* const out = reinterpret_cast<float*>(base_pointer + warp * Tile::kStageBytes) +
                       lane % 4 * 2 * Tile::kRowFloats + lane / 4;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          out[(j * 8 + c % 2) * Tile::kRowFloats + i * 16 + c / 2 * 8] = acc[i][j][c];
  }
  RowStats* const stats = reinterpret_cast<RowStats*>(extra_pointer + Tile::kStats);
  float2* const sums = reinterpret_cast<float2*>(extra_pointer + Tile::kSums);
  if (own_stats) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
        squares[j] += __shfl_xor_sync(0xffffffffu, squares[j], offset);
      }
      if (lane % 4 == 0) {
        const int row = j * 8 + lane / 4;
        sums[warp * Tile::kRows + row] = make_float2(sum[j], squares[j]);
        if (warp == 0) stats[row].mean = shift[j];
      }
    }
  }
  // Four adjacent columns of a row to a thread. Most warps wait for the last one here: what can be known before is.
  const int position = 4 * (p.gated ? threadIdx.x % (2 * kSlabs) : threadIdx.x % (4 * kSlabs));
  const int thread_row = p.gated ? threadIdx.x / (2 * kSlabs) : threadIdx.x / (4 * kSlabs);
  const int row_step = p.gated ? Tile::kConsumers / (2 * kSlabs) : Tile::kConsumers / (4 * kSlabs);
  const int column = column0 + position;
  float inv_k = 1.0f / p.k;
  asm volatile("" : "+f"(inv_k));
  wait_for_copies();
  named_barrier_sync(1, Tile::kConsumers);
  if (column >= p.n || thread_row >= row_step) return;

  QuadColumns<T> gate, up;
  if (p.bias != nullptr) {
    const T* const bias = reinterpret_cast<const T*>(extra_pointer + Tile::kBias) + position;
    gate.load_bias(bias);
    if (p.gated) up.load_bias(bias + Tile::kColumns / 2);
  }
  if (p.norm == Norm::kLayer) {
    const float* const column_sums = reinterpret_cast<const float*>(extra_pointer + Tile::kColumnSums) + position;
    gate.load_sums(column_sums);
    if (p.gated) up.load_sums(column_sums + Tile::kColumns / 2);
  }
  auto gather = [&](int row, int from, float(&v)[4]) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    const uint8_t* const first_part = base_pointer + (row * Tile::kRowFloats + from) * 4;
    auto add_part = [&](int w) {
      const float4 add = *reinterpret_cast<const float4*>(first_part + w * Tile::kStageBytes);
      v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
    };
    if (active == Tile::kWarps) {
#pragma unroll
      for (int w = 0; w < Tile::kWarps; ++w) add_part(w);
    } else {
#pragma unroll 1
      for (int w = 0; w < active; ++w) add_part(w);
    }
  };
#pragma unroll 1
  for (int row = thread_row; row < rows; row += row_step) {
    float v[4];
    gather(row, position, v);
    RowStats row_stats = {1.0f, 0.0f};
    if (p.norm != Norm::kNone) row_stats = stats[row];
    if (own_stats) {
      float total = 0.0f, total_squares = 0.0f;
#pragma unroll
      for (int w = 0; w < Tile::kWarps; ++w) {
        const float2 add = sums[w * Tile::kRows + row];
        total += add.x, total_squares += add.y;
      }
      row_stats = finish_row_stats(p.norm, total, total_squares, row_stats.mean, inv_k, p.epsilon);
    }
    gate.apply(v, row_stats);
    activate<true>(v, p.activation);
    if (p.gated) {
      float u[4];
      gather(row, position + Tile::kColumns / 2, u);
      up.apply(u, row_stats);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] *= u[i];
    } else if (p.residual != nullptr) {
      const uint2 residual = *reinterpret_cast<const uint2*>(extra_pointer + Tile::kResidual +
                                                             (row * Tile::kColumns + position) * 2);
      const float2 lo = Numeric<T>::unpack(residual.x), hi = Numeric<T>::unpack(residual.y);
      v[0] += lo.x, v[1] += lo.y, v[2] += hi.x, v[3] += hi.y;
    }
    *reinterpret_cast<uint2*>(static_cast<T*>(p.y) + static_cast<int64_t>(row0 + row) * p.y_stride + column) =
        make_uint2(Numeric<T>::pack(v[0], v[1]), Numeric<T>::pack(v[2], v[3]));
  }
}

}  // namespace onnxfuse::cuda
