// The entry points of the library.
#include "ort/register.h"

#if defined(_WIN32)
#define ONNXFUSE_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The version of the contract between the library and the Python package: op names, inputs, attributes, layouts.
ONNXFUSE_EXPORT int onnxfuse_abi_version() { return ONNXFUSE_ABI_VERSION; }

// What this build can do, as JSON: `{"version": …, "providers": […], "isa": …, "ort_api": …}`.
ONNXFUSE_EXPORT const char* onnxfuse_build_info() {
  static const std::string info = std::string("{\"version\": \"" ONNXFUSE_VERSION "\", \"providers\": [\"cpu\"") +
#if defined(ONNXFUSE_CUDA)
                                  ", \"cuda\"" +
#endif
                                  "], \"isa\": \"" + onnxfuse::rowwise().name +
                                  "\", \"ort_api\": " + std::to_string(ORT_API_VERSION) + "}";
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
    // Op objects and domain live as long as the process: sessions keep pointers to them.
    static OrtCustomOpDomain* const domain = [] {
      Ort::CustomOpDomain owned("onnxfuse");
      onnxfuse::ort::add_linear_cpu(owned);
      onnxfuse::ort::add_gated_linear_cpu(owned);
#if defined(ONNXFUSE_CUDA)
      onnxfuse::ort::add_cuda_ops(owned);
#endif
      return owned.release();
    }();
    Ort::ThrowOnError(Ort::GetApi().AddCustomOpDomain(options, domain));
  });
}
