// The entry points of the library.
#include "ort/register.h"

#if defined(_WIN32)
#define ONNXFUSE_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

using onnxfuse::ort::OpObjects;

const OpObjects& all_ops() {
  static const OpObjects ops = [] {
    OpObjects list;
    onnxfuse::ort::append_linear_cpu(&list);
    onnxfuse::ort::append_gated_linear_cpu(&list);
#if defined(ONNXFUSE_CUDA)
    onnxfuse::ort::append_cuda_ops(&list);
#endif
    return list;
  }();
  return ops;
}

const char* provider_of(const OrtCustomOp* op) {
  const char* provider = op->GetExecutionProviderType(op);
  return provider == nullptr ? "CPUExecutionProvider" : provider;
}

std::string describe_build() {
  std::string ops;
  for (const OrtCustomOp* op : all_ops()) {
    if (!ops.empty()) ops += ", ";
    ops += std::string("{\"name\": \"") + op->GetName(op) + "\", \"provider\": \"" + provider_of(op) +
           "\", \"dtype\": \"" + onnxfuse::ort::name_of(op->GetInputType(op, 0)) + "\"}";
  }
  return std::string("{\"version\": \"" ONNXFUSE_VERSION "\", \"isa\": \"") + onnxfuse::rowwise().name +
         "\", \"ort_api\": " + std::to_string(ORT_API_VERSION) + ", \"ops\": [" + ops + "]}";
}

}  // namespace

// The version of the contract between the library and the Python package: op names, inputs, attributes, layouts.
ONNXFUSE_EXPORT int onnxfuse_abi_version() { return ONNXFUSE_ABI_VERSION; }

// What this build can do, as JSON: version, isa, ort_api, and ops as a list of {name, provider, dtype}.
ONNXFUSE_EXPORT const char* onnxfuse_build_info() {
  static const std::string info = describe_build();
  return info.c_str();
}

ONNXFUSE_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    const std::string text = std::string("onnxfuse was built for ONNX Runtime API ") + std::to_string(ORT_API_VERSION) +
                             ", which ONNX Runtime " + base->GetVersionString() + " does not have; update ONNX Runtime";
    const OrtApi* oldest = base->GetApi(1);
    return oldest == nullptr ? nullptr : oldest->CreateStatus(ORT_FAIL, text.c_str());
  }
  Ort::InitApi(api);
  return onnxfuse::ort::guarded([&] {
    // The domain lives as long as the process: sessions keep pointers to it.
    static OrtCustomOpDomain* const domain = [] {
      Ort::CustomOpDomain owned("onnxfuse");
      for (const OrtCustomOp* op : all_ops()) owned.Add(op);
      return owned.release();
    }();
    Ort::ThrowOnError(Ort::GetApi().AddCustomOpDomain(options, domain));
  });
}
