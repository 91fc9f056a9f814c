#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

constexpr int64_t kRowStatsBytes = 8;  // {scale, mean} of one row
// Of a block of the kernel. It has no shared memory, so it fits beside a block of the tile kernel.
constexpr int kRowStatsThreads = 128, kRowStatsRegisters = 128 * 64;

// Programmatic dependent launch: how the kernel overlaps with those before and after it.
enum class Overlap {
  kNone,
  kReady,  // it may start before the preceding kernel has ended, the next one when that has: it need not wait for x
  kFlags,  // both may start before that, and this one says by flags when x is there and when the statistics are
};

// Statistics on the device. Flags, if used, hold another value than `nonce` before: [x is there, how many CTAs have seen
// all others, one for each block of the kernel that writes the statistics]. The last CTA that has seen them clears them,
// as a CUDA graph brings the same nonce again.
struct StatsSource {
  const void* rows = nullptr;  // RowStats[m]
  uint64_t* flags = nullptr;
  uint64_t nonce = 0;
  int blocks = 0;
};
constexpr int kMostStatsBlocks = 256, kFlagsBefore = 2;

inline int64_t row_stats_scratch(int64_t m) { return m * kRowStatsBytes + (kFlagsBefore + kMostStatsBlocks) * 8; }

// Writes RowStats[m] of p.x to `scratch` (row_stats_scratch bytes). `beside`: the product leaves kRowStatsRegisters.
Status launch_row_stats(const LinearProblem& p, void* scratch, Overlap overlap, bool beside, cudaStream_t stream,
                        StatsSource* out);

}  // namespace onnxfuse::cuda
