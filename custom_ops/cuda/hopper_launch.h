// Host side of the sm_90a kernels: the variants that exist and how one is launched.
#pragma once

#include <vector>

#include "problem.h"
#include "row_stats.h"

namespace onnxfuse::cuda {

struct HopperVariant {
  int rows;     // rows of x in a tile
  int columns;  // packed weight columns in a tile
  bool gated;   // kTile only: the epilogue is compiled for one of the two ops
  int max_stages;
  int split;         // CTAs of the cluster that share K; kStream: the most that can
  bool takes_sums;   // kTile: of a norm's rows, itself
  bool leaves_room;  // kTile: for a block of the kernel that takes them before
};

const std::vector<HopperVariant>& stream_variants();
const std::vector<HopperVariant>& tile_variants();

// Why this plan cannot run this problem, or an empty string.
std::string stream_refusal(const LinearProblem& problem, const Plan& plan);
std::string tile_refusal(const LinearProblem& problem, const Plan& plan);

// For a plan that is not refused. `row_stats`: RowStats[m] on the device. launch_stream takes the statistics in the
// kernel if it is null.
Status launch_stream(const LinearProblem& problem, const Plan& plan, const void* row_stats, cudaStream_t stream);
Status launch_tile(const LinearProblem& problem, const Plan& plan, const StatsSource& row_stats, cudaStream_t stream);

}  // namespace onnxfuse::cuda
