#include "tuning_table.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>

namespace onnxfuse::cuda {
namespace {

// architecture, dtype, gated, norm, epilogue, packed columns, K, rows
using Key = std::tuple<int, int, int, int, int, int64_t, int64_t, int64_t>;

struct Shipped {
  int architecture, gated, norm, epilogue;
  int64_t columns, k, rows;
  int path, variant, stages, cluster_m, cluster_n, raster, row_stats, lead, ahead;
};

// Both 16-bit dtypes behave alike, so a shipped line holds for both.
constexpr Shipped kShipped[] = {
#include "tuning_sm90.inc"
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 8, 0, 0, 0},
};

// Nothing but bias or residual, the activation that cuBLASLt has too (its ReLU loses NaN), or another.
int epilogue_class(Activation activation) {
  if (activation == Activation::kNone) return 0;
  return activation == Activation::kGeluTanh ? 1 : 2;
}

// The number after "name": in one object of the file; false if it is not there.
bool read_field(const std::string& object, const char* name, int64_t* value) {
  const std::string quoted = std::string("\"") + name + "\"";
  size_t at = object.find(quoted);
  if (at == std::string::npos) return false;
  at = object.find(':', at + quoted.size());
  if (at == std::string::npos) return false;
  char* end = nullptr;
  *value = std::strtoll(object.c_str() + at + 1, &end, 10);
  return end != object.c_str() + at + 1;
}

// A JSON file with a list "entries" of flat objects of integers, as `onnxfuse tune` writes it. An entry that lacks a
// field is passed over; plans that cannot run are found out by the refusal check before they are used.
void read_tuning_file(const char* path, std::map<Key, Plan>* table) {
  std::ifstream file(path);
  if (!file) return;
  std::stringstream buffer;
  buffer << file.rdbuf();
  const std::string text = buffer.str();
  size_t at = text.find("\"entries\"");
  while (at != std::string::npos && (at = text.find('{', at)) != std::string::npos) {
    const size_t end = text.find('}', at);
    if (end == std::string::npos) return;
    const std::string object = text.substr(at, end - at);
    at = end;
    int64_t f[17];
    const char* names[17] = {"architecture", "dtype",   "gated",  "norm",      "epilogue",  "columns", "k",         "rows",
                             "path",         "variant", "stages", "cluster_m", "cluster_n", "raster",  "row_stats", "lead",
                             "ahead"};
    bool complete = true;
    for (int i = 0; i < 17 && complete; ++i) complete = read_field(object, names[i], &f[i]);
    if (!complete) continue;
    Plan plan;
    plan.path = static_cast<Path>(f[8]);
    plan.variant = static_cast<int32_t>(f[9]), plan.stages = static_cast<int32_t>(f[10]);
    plan.cluster_m = static_cast<int32_t>(f[11]), plan.cluster_n = static_cast<int32_t>(f[12]);
    plan.raster = static_cast<int32_t>(f[13]), plan.row_stats = static_cast<int32_t>(f[14]);
    plan.lead = static_cast<int32_t>(f[15]), plan.ahead = static_cast<int32_t>(f[16]);
    (*table)[Key(static_cast<int>(f[0]), static_cast<int>(f[1]), static_cast<int>(f[2]), static_cast<int>(f[3]),
                 static_cast<int>(f[4]), f[5], f[6], f[7])] = plan;
  }
}

std::map<Key, Plan> read_all() {
  std::map<Key, Plan> table;
  for (const Shipped& s : kShipped) {
    if (s.architecture == 0) continue;
    Plan plan;
    plan.path = static_cast<Path>(s.path);
    plan.variant = s.variant, plan.stages = s.stages, plan.cluster_m = s.cluster_m, plan.cluster_n = s.cluster_n;
    plan.raster = s.raster, plan.row_stats = s.row_stats, plan.lead = s.lead, plan.ahead = s.ahead;
    for (DType dtype : {DType::kFloat16, DType::kBFloat16})
      table[Key(s.architecture, static_cast<int>(dtype), s.gated, s.norm, s.epilogue, s.columns, s.k, s.rows)] = plan;
  }
  if (const char* path = std::getenv("ONNXFUSE_TUNING")) read_tuning_file(path, &table);
  return table;
}

}  // namespace

int64_t row_bucket(int64_t m) {
  int64_t bucket = 1;
  while (bucket < m && bucket < 8192) bucket *= 2;
  return bucket;
}

bool find_tuned(const LinearProblem& p, const Device& device, int64_t rows, Plan* plan) {
  static const std::map<Key, Plan> table = read_all();
  // A plan of another epilogue will do, but for the vendor's path, whose kernels depend on it.
  const int epilogue = epilogue_class(p.activation);
  const int order[3][3] = {{0, 2, 1}, {1, 2, 0}, {2, 1, 0}};
  for (int other : order[epilogue]) {
    const auto found = table.find(Key(device.architecture, static_cast<int>(p.dtype), p.gated != 0,
                                      static_cast<int>(p.norm), other, p.packed_columns(), p.k, rows));
    if (found == table.end()) continue;
    const bool apart = other != epilogue || (epilogue == 1 && p.residual != nullptr);
    if (apart && found->second.path == Path::kVendor) continue;
    *plan = found->second;
    return true;
  }
  return false;
}

}  // namespace onnxfuse::cuda
