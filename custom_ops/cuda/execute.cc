#include "execute.h"

#include "hopper_launch.h"
#include "row_stats.h"

namespace onnxfuse::cuda {
namespace {

bool separate_stats(const LinearProblem& p, const Plan& plan) {
  if (p.norm == Norm::kNone) return false;
  return plan.path == Path::kTile || (plan.path == Path::kStream && plan.row_stats != 0);
}

}  // namespace

std::string refusal(const LinearProblem& problem, const Plan& plan) {
  switch (plan.path) {
    case Path::kStream:
      return stream_refusal(problem, plan);
    case Path::kTile:
      return tile_refusal(problem, plan);
    default:
      return "no such path";
  }
}

int64_t scratch_bytes(const LinearProblem& problem, const Plan& plan) {
  return separate_stats(problem, plan) ? problem.m * kRowStatsBytes : 0;
}

Status execute(const LinearProblem& problem, const Plan& plan, void* scratch, cudaStream_t stream) {
  const void* stats = nullptr;
  if (separate_stats(problem, plan)) {
    if (Status s = launch_row_stats(problem, scratch, stream); !s.ok()) return s;
    stats = scratch;
  }
  switch (plan.path) {
    case Path::kStream:
      return launch_stream(problem, plan, stats, stream);
    case Path::kTile:
      return launch_tile(problem, plan, stats, stream);
    default:
      return {"no such path"};
  }
}

}  // namespace onnxfuse::cuda
