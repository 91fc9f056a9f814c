// Few rows: the weights are streamed once, as fast as memory gives them.
//
// The 64-row operand of wgmma is the weight tile, the narrow one is x, so one tile of x is as narrow as 8 rows.
// A cluster splits K; each CTA of it accumulates its range, the partial sums meet in distributed shared memory and
// every CTA finishes a slice of the columns, always adding in the same order. Warps of their own take the norm's sums
// from the tile of x that is in shared memory anyway.
// A constant weight is read before the preceding kernel of the stream has ended (programmatic dependent launch). A
// kernel lets its successor start when its own last loads are on their way: the successor's first stages then fill
// while this one finishes, and the memory is never idle.
#pragma once

#include "hopper_ptx.cuh"
#include "numeric.cuh"
#include "stream_params.cuh"
#include "wgmma_shapes.cuh"

namespace onnxfuse::cuda {

template <typename T, int kMma, int kGroups, int kTileX>
struct StreamTile {
  static constexpr int kTileW = 64 * kMma * kGroups;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kStatWarps = kTileX > 32 ? kTileX / 32 : 1;
  static constexpr int kProducers = 2;  // warps: a load takes one thread longer than memory needs for it
  static constexpr int kThreads = kConsumers + 32 * (kProducers + kStatWarps);
  static constexpr int kWeightBytes = kTileW * 128;
  static constexpr int kStageBytes = kWeightBytes + kTileX * 128;
  static constexpr int kMaxStages = 24;
  // One rank's partial sums for one other: kTileX rows; the padding keeps the fragment stores free of bank conflicts.
  static constexpr __host__ __device__ int row_floats(int ranks) { return kTileW / ranks + 4; }
  static constexpr __host__ __device__ int block_bytes(int ranks) { return kTileX * row_floats(ranks) * 4; }
  static constexpr __host__ __device__ int pipeline_bytes(int stages, int ranks) {
    const int ring = stages * kStageBytes, partials = ranks * block_bytes(ranks);  // the partials reuse the ring
    return ring > partials ? ring : partials;
  }
  static constexpr __host__ __device__ int received_bytes(int ranks) {
    return ranks > 1 ? ranks * block_bytes(ranks) : 0;
  }
  static constexpr int smem_bytes(int stages, int ranks) {
    return 1024 + pipeline_bytes(stages, ranks) + received_bytes(ranks) + (ranks + 1) * kTileX * 8 + stages * 16 + 16;
  }
};

template <typename T, int kMma, int kGroups, int kTileX>
__global__ __launch_bounds__(StreamTile<T, kMma, kGroups, kTileX>::kThreads) void stream_kernel(
    const __grid_constant__ StreamParams p) {
  using Tile = StreamTile<T, kMma, kGroups, kTileX>;
  extern __shared__ uint8_t shared_raw[];
  const uint32_t base = (shared_address(shared_raw) + 1023u) & ~1023u;
  uint8_t* const base_pointer = shared_raw + (base - shared_address(shared_raw));
  const int ranks = gridDim.x, rank = blockIdx.x;  // the cluster spans x
  const uint32_t received = base + Tile::pipeline_bytes(p.stages, ranks);           // blocks of partial sums
  const uint32_t received_stats = received + Tile::received_bytes(ranks);           // float2[ranks][kTileX]
  const uint32_t final_stats = received_stats + ranks * kTileX * 8;                 // RowStats[kTileX]
  const uint32_t full = final_stats + kTileX * 8;
  const uint32_t empty = full + p.stages * 8;
  const uint32_t arrived = empty + p.stages * 8;  // what the cluster sends this CTA
  const uint32_t summed = arrived + 8;            // the norm's sums are taken: the ring may be overwritten

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The last tile of x begins earlier where it would end beyond x (see wgmma_tile.cuh), and leaves those rows alone.
  const int own_row = blockIdx.y * kTileX, row0 = max(min(own_row, p.m - kTileX), 0), foreign_rows = own_row - row0;
  const int tile_out = p.gated ? Tile::kTileW / 2 : Tile::kTileW;
  const int column0 = blockIdx.z * tile_out;

  const bool own_stats = p.norm != Norm::kNone && p.stats == nullptr;
  const int k_blocks = (p.k + 63) / 64;
  const int k_begin = static_cast<int>(static_cast<int64_t>(k_blocks) * rank / ranks);
  const int k_count = static_cast<int>(static_cast<int64_t>(k_blocks) * (rank + 1) / ranks) - k_begin;

  if (threadIdx.x == Tile::kConsumers) {
    prefetch_map(p.weight);
    prefetch_map(p.x);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 4 * kGroups + (own_stats ? Tile::kStatWarps : 0));
    }
    barrier_init(arrived, own_stats ? 2 : 1);  // its own sums are among what a CTA waits for
    barrier_init(summed, Tile::kStatWarps);
    fence_barrier_init();
    barrier_expect_bytes(arrived, (ranks - 1) * (Tile::block_bytes(ranks) + (own_stats ? kTileX * 8 : 0)));
  }
  __syncthreads();
  cluster_arrive_relaxed();  // waited for before anything is sent to another CTA

  const int producer = warp - 4 * kGroups;
  if (producer >= 0 && producer < Tile::kProducers) {
    if (lane == 0) {
      // Coordinates of the weight's columns: [block, half, column of the block].
      const int c3 = p.gated ? column0 / p.block : 0, c1 = column0 - c3 * p.block;
      const int half_rows = Tile::kTileW / 2;
      const int first = min(p.stages, k_count);  // loads that wait for no stage
      // Read once if there is one tile of x; else the other tiles find it in L2.
      const uint64_t hint = gridDim.y == 1 ? kEvictFirst : kEvictNormal;
      auto load_weight = [&](int stage, int kb) {
        const uint32_t dst = base + stage * Tile::kStageBytes;
        const int k = (k_begin + kb) * 64;
        load_4d(dst, p.weight, full + stage * 8, k, c1, 0, c3, hint);
        if (p.gated) load_4d(dst + half_rows * 128, p.weight, full + stage * 8, k, c1, 1, c3, hint);
      };
      auto load_x = [&](int stage, int kb) {
        load_2d(base + stage * Tile::kStageBytes + Tile::kWeightBytes, p.x, full + stage * 8, (k_begin + kb) * 64,
                row0, kEvictLast);
      };
      const int trigger = max(k_count - 1 - p.trigger, 0);
      for (int s = producer; s < first; s += Tile::kProducers) {
        barrier_expect_bytes(full + s * 8, p.stage_bytes);
        if (p.prefetch_weight) load_weight(s, s);
        if (s == trigger) allow_dependents();
      }
      wait_for_prerequisites();
      for (int s = producer; s < first; s += Tile::kProducers) {
        if (!p.prefetch_weight) load_weight(s, s);
        load_x(s, s);
      }
      uint32_t phase = 0;
      for (int round = p.stages; round < k_count; round += p.stages, phase ^= 1) {
        for (int stage = producer; stage < p.stages && round + stage < k_count; stage += Tile::kProducers) {
          barrier_wait(empty + stage * 8, phase);
          barrier_expect_bytes(full + stage * 8, p.stage_bytes);
          load_weight(stage, round + stage);
          load_x(stage, round + stage);
          if (round + stage == trigger) allow_dependents();
        }
      }
    }
    __syncwarp();
    cluster_wait();
    cluster_arrive_relaxed();
    cluster_wait();
    return;
  }
  wait_for_prerequisites();

  if (producer >= Tile::kProducers) {  // the norm's sums: kParts threads share a row, or a thread takes kRows rows
    constexpr int kThreads = 32 * Tile::kStatWarps;
    constexpr int kParts = kTileX < kThreads ? kThreads / kTileX : 1;
    constexpr int kRows = kTileX > kThreads ? kTileX / kThreads : 1;
    const int thread = threadIdx.x - Tile::kConsumers - 32 * Tile::kProducers;
    const int first_row = thread % kTileX, part = thread / kTileX;
    float shift[kRows];
    RowSums sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      shift[i] = 0.0f;
      const int row = row0 + first_row + i * kThreads;
      if (p.norm == Norm::kLayer && row < p.m)
        shift[i] = Numeric<T>::to_float(static_cast<const T*>(p.x_pointer)[static_cast<int64_t>(row) * p.k]);
    }
    auto add_stage = [&](uint32_t x, int chunks, auto shifted) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first_row + i * kThreads;
        uint4 values[8 / kParts];
#pragma unroll
        for (int c = 0; c < 8 / kParts; ++c)
          values[c] = load_shared_16(x + row * 128 + (((part + c * kParts) ^ (row & 7)) << 4));
#pragma unroll
        for (int c = 0; c < 8 / kParts; ++c)
          // Past the end of K the tile holds zeros: nothing for RMS, wrong once shifted.
          if (!decltype(shifted)::value || part + c * kParts < chunks)
            accumulate_stats<T, decltype(shifted)::value>(values[c], shift[i], sums[i]);
      }
    };
    cluster_wait();
    if (own_stats) {
      int stage = 0;
      uint32_t phase = 0;
      for (int kb = 0; kb < k_count; ++kb) {
        const uint32_t x = base + stage * Tile::kStageBytes + Tile::kWeightBytes;
        barrier_wait(full + stage * 8, phase);
        if (p.norm == Norm::kRms)
          add_stage(x, 8, BoolConstant<false>{});
        else
          add_stage(x, min(8, (p.k - (k_begin + kb) * 64) / 8), BoolConstant<true>{});
        fence_async_proxy();  // the tile of x has been read
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage * 8);
        if (++stage == p.stages) stage = 0, phase ^= 1;
      }
      RowStats* const stats = reinterpret_cast<RowStats*>(base_pointer + (final_stats - base));
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (part == 0) stats[first_row + i * kThreads].mean = shift[i];
      __syncwarp();
      if (lane == 0) barrier_arrive(summed);  // the shifts are there, too
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float sum = sums[i].total(), squares = sums[i].total_squares();
#pragma unroll
        for (int offset = kTileX; offset < 32; offset *= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, offset);
          squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        }
        if (part == 0)
          reinterpret_cast<float2*>(base_pointer + (received_stats - base))[rank * kTileX + first_row + i * kThreads] =
              make_float2(sum, squares);
      }
      fence_async_proxy();
      named_barrier_sync(2, kThreads);
      const uint32_t own = received_stats + rank * kTileX * 8;
      if (thread < ranks && thread != rank) push_to_cta(own, own, kTileX * 8, arrived, thread);
      if (thread == rank) barrier_arrive(arrived);
    }
    cluster_arrive_relaxed();
    cluster_wait();
    return;
  }

  const int group = warp / 4;
  float acc[kMma][kTileX / 2];
#pragma unroll
  for (int i = 0; i < kMma; ++i)
#pragma unroll
    for (int j = 0; j < kTileX / 2; ++j) acc[i][j] = 0.0f;

  // The four columns that this thread will finish; their constants arrive while the product runs.
  const int slice = tile_out / ranks, quads = slice / 4;
  const int position = threadIdx.x % quads * 4, column = column0 + rank * slice + position;
  QuadColumns<T> gate, up;
  if (column < p.n) {
    const int64_t packed = gate_column(column, p.block, p.gated);
    gate.load(p.bias, p.norm == Norm::kLayer ? p.colsum : nullptr, packed);
    if (p.gated) up.load(p.bias, p.norm == Norm::kLayer ? p.colsum : nullptr, packed + p.block);
  }

  int stage = 0, previous = 0;
  uint32_t phase = 0;
  for (int kb = 0; kb < k_count; ++kb) {
    const uint32_t weight = base + stage * Tile::kStageBytes + group * kMma * 64 * 128;
    const uint32_t x = base + stage * Tile::kStageBytes + Tile::kWeightBytes;
    barrier_wait(full + stage * 8, phase);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kMma; ++i)
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
        Wgmma<T, kTileX>::issue(acc[i], wgmma_descriptor(weight + i * 64 * 128) + kk * kDescriptorStepK16,
                                wgmma_descriptor(x) + kk * kDescriptorStepK16, 1);
    wgmma_commit();
    wgmma_wait<1>();  // the previous stage has been read; this one may still run
    if (kb > 0) {
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + previous * 8);
    }
    previous = stage;
    if (++stage == p.stages) stage = 0, phase ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kMma; ++i)
#pragma unroll
    for (int j = 0; j < kTileX / 2; ++j) asm volatile("" : "+f"(acc[i][j])::"memory");
  // All stages are free: the partial sums take their place.
  named_barrier_sync(3, Tile::kConsumers);
  if (own_stats) barrier_wait(summed, 0);

  // Partial sums, ordered by the rank that will finish them: [rank][row][its gate columns, its up columns].
  float* const partial = reinterpret_cast<float*>(base_pointer);
  const int row_floats = Tile::row_floats(ranks);
#pragma unroll
  for (int i = 0; i < kMma; ++i) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int column = (group * kMma + i) * 64 + (warp % 4) * 16 + lane / 4 + upper * 8;
      const int half = column / tile_out, inside = column % tile_out;
      float* const out = partial + inside / slice * kTileX * row_floats + half * slice + inside % slice;
#pragma unroll
      for (int j = 0; j < kTileX / 8; ++j) {
        const int row = j * 8 + 2 * (lane % 4);
        out[row * row_floats] = acc[i][4 * j + 2 * upper];
        out[(row + 1) * row_floats] = acc[i][4 * j + 2 * upper + 1];
      }
    }
  }
  cluster_wait();  // the barriers of every CTA are ready
  if (ranks > 1) {
    fence_async_proxy();
    named_barrier_sync(1, Tile::kConsumers);
    const int bytes = Tile::block_bytes(ranks);
    if (threadIdx.x < ranks && threadIdx.x != rank)
      push_to_cta(received + rank * bytes, base + threadIdx.x * bytes, bytes, arrived, threadIdx.x);
  }
  barrier_wait(arrived, 0);

  RowStats* const stats = reinterpret_cast<RowStats*>(base_pointer + (final_stats - base));
  const int rows = min(kTileX, p.m - row0);
  for (int row = threadIdx.x; row < rows; row += Tile::kConsumers) {
    if (own_stats) {
      const float2* sums = reinterpret_cast<const float2*>(base_pointer + (received_stats - base)) + row;
      float total = 0.0f, total_squares = 0.0f;
      for (int r = 0; r < ranks; ++r) {
        total += sums[r * kTileX].x;
        total_squares += sums[r * kTileX].y;
      }
      stats[row] = finish_row_stats(p.norm, total, total_squares, stats[row].mean, 1.0f / p.k, p.epsilon);
    } else {
      stats[row] = p.stats != nullptr ? p.stats[row0 + row] : RowStats{1.0f, 0.0f};
    }
  }
  named_barrier_sync(1, Tile::kConsumers);

  // This CTA's slice of the columns, four at a time.
  const float* const blocks = reinterpret_cast<const float*>(base_pointer + (received - base));
  auto gather = [&](int row, int position, float(&v)[4]) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    for (int r = 0; r < ranks; ++r) {  // its own block has stayed where it was
      const float* const block = (r == rank ? partial : blocks) + r * kTileX * row_floats;
      const float4 add = *reinterpret_cast<const float4*>(block + row * row_floats + position);
      v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
    }
  };
  if (column < p.n) {
#pragma unroll 2
    for (int row = foreign_rows + threadIdx.x / quads; row < rows; row += Tile::kConsumers / quads) {
      const int64_t offset = static_cast<int64_t>(row0 + row) * p.y_stride + column;
      uint2 residual = make_uint2(0, 0);
      if (p.residual) residual = *reinterpret_cast<const uint2*>(static_cast<const T*>(p.residual) + offset);
      const RowStats row_stats = stats[row];
      float v[4];
      gather(row, position, v);
      gate.apply(v, row_stats);
      activate<true>(v, p.activation);
      if (p.gated) {
        float u[4];
        gather(row, position + slice, u);
        up.apply(u, row_stats);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] *= u[i];
      } else if (p.residual) {
        const float2 lo = Numeric<T>::unpack(residual.x), hi = Numeric<T>::unpack(residual.y);
        v[0] += lo.x, v[1] += lo.y, v[2] += hi.x, v[3] += hi.y;
      }
      *reinterpret_cast<uint2*>(static_cast<T*>(p.y) + offset) =
          make_uint2(Numeric<T>::pack(v[0], v[1]), Numeric<T>::pack(v[2], v[3]));
    }
  }
  cluster_arrive_relaxed();  // nobody leaves while its partial sums are still on their way
  cluster_wait();
}

}  // namespace onnxfuse::cuda
