#include "cublaslt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

namespace onnxfuse::cuda {
namespace {

using namespace cublaslt;

struct Library {
  int (*create)(void**) = nullptr;
  int (*desc_create)(void**, int, int) = nullptr;
  int (*desc_destroy)(void*) = nullptr;
  int (*desc_set)(void*, int, const void*, size_t) = nullptr;
  int (*layout_create)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*layout_destroy)(void*) = nullptr;
  int (*preference_create)(void**) = nullptr;
  int (*preference_destroy)(void*) = nullptr;
  int (*preference_set)(void*, int, const void*, size_t) = nullptr;
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, HeuristicResult*, int*) = nullptr;
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                void*, void*, const Algo*, void*, size_t, cudaStream_t) = nullptr;
  bool complete = false;
};

template <typename Function>
bool find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

Library open_library() {
  Library l;
  void* handle = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
    if (handle == nullptr) handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return l;
  l.complete = find(handle, "cublasLtCreate", &l.create) &&
               find(handle, "cublasLtMatmulDescCreate", &l.desc_create) &&
               find(handle, "cublasLtMatmulDescDestroy", &l.desc_destroy) &&
               find(handle, "cublasLtMatmulDescSetAttribute", &l.desc_set) &&
               find(handle, "cublasLtMatrixLayoutCreate", &l.layout_create) &&
               find(handle, "cublasLtMatrixLayoutDestroy", &l.layout_destroy) &&
               find(handle, "cublasLtMatmulPreferenceCreate", &l.preference_create) &&
               find(handle, "cublasLtMatmulPreferenceDestroy", &l.preference_destroy) &&
               find(handle, "cublasLtMatmulPreferenceSetAttribute", &l.preference_set) &&
               find(handle, "cublasLtMatmulAlgoGetHeuristic", &l.heuristic) &&
               find(handle, "cublasLtMatmul", &l.matmul);
  return l;
}

const Library& library() {
  static const Library l = open_library();
  return l;
}

// device, m, n, k, transposed, input, output, epilogue, with bias, with C, alignment of the pointers
using Key = std::tuple<int, int64_t, int64_t, int64_t, bool, int, int, int, bool, bool, int>;

std::mutex& cache_mutex() {
  static std::mutex mutex;
  return mutex;
}

// One handle per device may serve all threads; only descriptors and workspaces may not be shared.
void* handle_of(int device) {
  static std::map<int, void*> handles;
  void*& handle = handles[device];
  if (handle == nullptr && library().create(&handle) != 0) handle = nullptr;
  return handle;
}

int alignment(const CublasLtProduct& p) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(p.b) |
                         reinterpret_cast<uintptr_t>(p.c) | reinterpret_cast<uintptr_t>(p.d);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
}

bool tf32_requested() {
  static const bool requested = [] {
    const char* const value = std::getenv("ONNXFUSE_TF32");
    return value != nullptr && std::string(value) == "1";
  }();
  return requested;
}

// Descriptors of one call, freed with it.
class Descriptors {
 public:
  explicit Descriptors(const CublasLtProduct& p) {
    const Library& l = library();
    const bool rounded = p.input == CUDA_R_32F && tf32_requested();
    ok_ = l.desc_create(&desc, rounded ? kCompute32FFastTF32 : kCompute32F, CUDA_R_32F) == 0;
    const int transposed = 1, plain = 0;
    ok_ = ok_ && l.desc_set(desc, kTransposeA, p.transpose_a ? &transposed : &plain, sizeof(int)) == 0;
    ok_ = ok_ && l.desc_set(desc, kTransposeB, &plain, sizeof(int)) == 0;
    ok_ = ok_ && l.desc_set(desc, kEpilogue, &p.epilogue, sizeof(int)) == 0;
    if (p.bias != nullptr) ok_ = ok_ && l.desc_set(desc, kBiasPointer, &p.bias, sizeof(p.bias)) == 0;
    const auto m = static_cast<uint64_t>(p.m), n = static_cast<uint64_t>(p.n), k = static_cast<uint64_t>(p.k);
    ok_ = ok_ && l.layout_create(&a, p.input, p.transpose_a ? k : m, p.transpose_a ? m : k, p.transpose_a ? p.k : p.m) == 0;
    ok_ = ok_ && l.layout_create(&b, p.input, k, n, p.k) == 0;
    ok_ = ok_ && l.layout_create(&d, p.output, m, n, p.m) == 0;
  }
  ~Descriptors() {
    const Library& l = library();
    if (desc != nullptr) l.desc_destroy(desc);
    for (void* layout : {a, b, d})
      if (layout != nullptr) l.layout_destroy(layout);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  bool ok() const { return ok_; }

  void *desc = nullptr, *a = nullptr, *b = nullptr, *d = nullptr;

 private:
  bool ok_ = false;
};

bool choose_algo(void* handle, const Descriptors& descriptors, int aligned, Algo* algo) {
  const Library& l = library();
  void* preference = nullptr;
  if (l.preference_create(&preference) != 0) return false;
  const auto workspace = static_cast<uint64_t>(kCublasLtWorkspace);
  const auto bytes = static_cast<uint32_t>(aligned);
  bool ok = l.preference_set(preference, kPreferenceWorkspace, &workspace, sizeof(workspace)) == 0;
  for (int operand = 5; operand <= 8 && ok; ++operand)  // least alignment of A, B, C, D
    ok = l.preference_set(preference, operand, &bytes, sizeof(bytes)) == 0;
  HeuristicResult result = {};
  int found = 0;
  ok = ok && l.heuristic(handle, descriptors.desc, descriptors.a, descriptors.b, descriptors.d, descriptors.d,
                         preference, 1, &result, &found) == 0 &&
       found > 0;
  l.preference_destroy(preference);
  if (ok) *algo = result.algo;
  return ok;
}

}  // namespace

bool cublaslt_available() { return library().complete; }

std::string cublaslt_multiply(const CublasLtProduct& p, void* workspace, cudaStream_t stream) {
  if (!cublaslt_available()) return "libcublasLt was not found";
  int device = 0;
  cudaGetDevice(&device);
  const Descriptors descriptors(p);
  if (!descriptors.ok()) return "cuBLASLt refused the product's description";
  void* handle = nullptr;
  Algo algo;
  {
    static std::map<Key, Algo> algos;
    const std::lock_guard<std::mutex> lock(cache_mutex());
    handle = handle_of(device);
    if (handle == nullptr) return "cublasLtCreate failed";
    const Key key(device, p.m, p.n, p.k, p.transpose_a, p.input, p.output, p.epilogue, p.bias != nullptr,
                  p.beta != 0.0f, alignment(p));
    const auto found = algos.find(key);
    if (found != algos.end()) {
      algo = found->second;
    } else {
      if (!choose_algo(handle, descriptors, alignment(p), &algo)) return "cuBLASLt has no algorithm for the product";
      algos[key] = algo;
    }
  }
  const float alpha = 1.0f;
  const int status = library().matmul(handle, descriptors.desc, &alpha, p.a, descriptors.a, p.b, descriptors.b, &p.beta,
                                      p.c != nullptr ? p.c : p.d, descriptors.d, p.d, descriptors.d, &algo, workspace,
                                      static_cast<size_t>(kCublasLtWorkspace), stream);
  return status == 0 ? std::string() : "cublasLtMatmul failed with status " + std::to_string(status);
}

}  // namespace onnxfuse::cuda
