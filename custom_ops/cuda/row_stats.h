#pragma once

#include "problem.h"

namespace onnxfuse::cuda {

constexpr int64_t kRowStatsBytes = 8;  // {scale, mean} of one row
// Of a block of the kernel. It has no shared memory, so it fits beside a block of the tile kernel.
constexpr int kRowStatsThreads = 128, kRowStatsRegisters = 128 * 64;

// Programmatic dependent launch: how the kernel overlaps with those before and after it.
enum class Overlap {
  kNone,
  kBoth,   // it may start before the preceding kernel has ended, and the next one before this has
  kReady,  // as kBoth, but the next one only when the preceding kernel has ended: it need not wait for x
};

// Writes RowStats[m] of p.x to `stats` (device memory). `beside`: the product leaves kRowStatsRegisters.
Status launch_row_stats(const LinearProblem& p, void* stats, Overlap overlap, bool beside, cudaStream_t stream);

}  // namespace onnxfuse::cuda
