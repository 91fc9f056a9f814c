#include "execute.h"

#include "generic.h"
#include "row_stats.h"
#include "vendor.h"
#ifdef ONNXFUSE_HOPPER
#include "hopper_launch.h"
#endif

namespace onnxfuse::cuda {
namespace {

bool separate_stats(const LinearProblem& p, const Plan& plan) {
  if (p.norm == Norm::kNone || p.k == 0) return false;  // K = 0: nothing to normalise, the product is zero
  return plan.path == Path::kGeneric || (plan.path != Path::kVendor && plan.row_stats != 0);
}

}  // namespace

std::string refusal(const LinearProblem& problem, const Plan& plan) {
  switch (plan.path) {
    case Path::kGeneric:
      return {};
    case Path::kVendor:
      return vendor_refusal(problem);
#ifdef ONNXFUSE_HOPPER
    case Path::kStream:
      return stream_refusal(problem, plan);
    case Path::kTile:
      return tile_refusal(problem, plan);
#endif
    default:
      return "this build has no such path";
  }
}

int64_t scratch_bytes(const LinearProblem& problem, const Plan& plan) {
  if (plan.path == Path::kVendor) return vendor_scratch_bytes(problem);
  return separate_stats(problem, plan) ? row_stats_scratch(problem.m) : 0;
}

Status execute(const LinearProblem& problem, const Plan& plan, void* scratch, cudaStream_t stream) {
  if (problem.m == 0 || problem.n == 0) return {};
  if (std::string why = refusal(problem, plan); !why.empty()) return {why};
  StatsSource stats;
  if (separate_stats(problem, plan)) {
    const Overlap overlap = plan.path != Path::kTile || plan.overlap == 0 ? Overlap::kNone
                            : plan.row_stats == 2                         ? Overlap::kReady
                                                                          : Overlap::kFlags;
    bool beside = true;
#ifdef ONNXFUSE_HOPPER
    beside = plan.path != Path::kTile || tile_variants()[plan.variant].leaves_room;
#endif
    if (Status s = launch_row_stats(problem, scratch, overlap, beside, stream, &stats); !s.ok()) return s;
  }
  switch (plan.path) {
    case Path::kGeneric:
      return launch_generic(problem, stats.rows, stream);
    case Path::kVendor:
      return launch_vendor(problem, scratch, stream);
#ifdef ONNXFUSE_HOPPER
    case Path::kStream:
      return launch_stream(problem, plan, stats.rows, stream);
    case Path::kTile:
      return launch_tile(problem, plan, stats, stream);
#endif
    default:
      return {"this build has no such path"};
  }
}

}  // namespace onnxfuse::cuda
