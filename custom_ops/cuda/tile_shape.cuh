// What the host tells the tile kernel, and how a variant divides its threads, registers and shared memory.
#pragma once

#include <cuda.h>

#include "divisor.h"
#include "numeric.cuh"
#include "row_stats.h"

namespace onnxfuse::cuda {

struct TileParams {
  CUtensorMap x;         // [M, K], box 64 x (kTileM / cluster_n), or all of M if that is less and not shared
  CUtensorMap weight;    // as StreamParams; box rows (kTileN or kTileN / 2) / cluster_m
  CUtensorMap residual;  // [M, n], box 64 x 64; unused if K is split
  const void* x_pointer;
  const void* bias;
  const void* residual_pointer;
  const float* colsum;
  const RowStats* stats;  // [m], or null: taken here if there is a norm
  int x_is_ready;         // when this kernel starts: Overlap::kReady
  uint64_t* flags;        // of the kernel that writes `stats`, or null: see StatsSource
  uint64_t nonce;
  int stats_blocks;
  void* y;                // [m, n]
  int m, n, k, k_blocks;
  int stages, stage_bytes, cluster_m, cluster_n;
  // Tiles are counted in units of the cluster's. They are walked in bands of `raster` rows of tiles, for L2.
  int tiles, tile_rows, raster, clusters;
  Divisor band, full_height, last_height;  // tiles of a band, its rows, the rows of the last band
  Divisor block;                           // columns of a gate block (n if not interleaved)
  uint64_t weight_hint;                    // for L2: read once if there is one band
  int has_residual;
  int prefetch_weight;
  Norm norm;
  float epsilon;
  Activation activation;
};

template <typename T, int kGroups, int kTileN, bool kGated, int kSplit>
struct TileShape {
  static_assert(kSplit == 1 || !kGated);
  static constexpr int kTileM = 64 * kGroups;
  static constexpr int kOutN = kGated ? kTileN / 2 : kTileN;
  static constexpr int kThreads = 128 * (kGroups + 1);  // producer and gatherers, consumers
  // Of a thread at launch. Of the small tiles two blocks fit, so that with few stages the next kernel's is there and has
  // its weights when one ends. Beside the middle ones a block fits of the kernel that takes the next norm's statistics.
  static constexpr int kLeftRegisters = kGroups == 1 ? 32768 : kTileN > 192 ? 0 : kRowStatsRegisters;
  static constexpr int kRegisters = (65536 - kLeftRegisters) / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters =
      (kRegisters * kThreads - 128 * kProducerRegisters) / (128 * kGroups) / 8 * 8;
  static constexpr int kXBytes = kTileM * 128;
  static constexpr int kWeightBytes = kTileN * 128;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kBoxes = kTileM / 64 * ((kOutN + 63) / 64);  // of the residual, 64 x 64 each
  static constexpr int kBoxesPerStage = kStageBytes / 8192;
  static constexpr int kResidualStages = (kBoxes + kBoxesPerStage - 1) / kBoxesPerStage;

  static constexpr int kSliceN = kOutN / kSplit;              // columns that a CTA finishes
  static constexpr bool kWide = (kSliceN % 64 == 0 || kSliceN > 128) && !(kGated && kTileN > 192);  // as registers allow
  static constexpr int kChunk = kWide ? 64 : !kGated || kSliceN % 32 == 0 ? 32 : 16;  // of which at a time, or fewer
  static constexpr int kValues = kChunk / 2;                  // accumulators of a thread in a chunk
  static constexpr int kSums = kSliceN / 2;                   // accumulators of a thread in a slice
  static constexpr int kWarps = 4 * kGroups;                  // that consume
  static constexpr int kPartBytes = kSums * 128 + 128;        // partial sums of a warp for one slice, sums of its rows
  static constexpr int kPartsBytes = kSplit > 1 ? kWarps * (kSplit - 1) * kPartBytes : 0;  // sent or received
  static constexpr int kStoreBytes = 2048;                    // 16 x 64 results of a warp
  static constexpr int kStoresBytes = kSplit > 1 ? 0 : kWarps * kStoreBytes;  // where parts are received otherwise
  static_assert(kSplit == 1 || (kSplit - 1) * kPartBytes >= kStoreBytes);
  static constexpr bool kOwnStats = kTileN <= 128;            // the registers allow them
  static constexpr int kGathered = kTileM * 8 + kTileN * 8;   // RowStats[kTileM], bias[kTileN], colsum[kTileN]
  static constexpr int kMaxStages = 12;
  static constexpr int smem_bytes(int stages) {
    return 1024 + stages * kStageBytes + kStoresBytes + 2 * kPartsBytes + 2 * kGathered + stages * 16 + 32 + kWarps * 8;
  }
};

}  // namespace onnxfuse::cuda
