#include "cuda_call.h"

#include "column_sums.h"
#include "execute.h"
#include "generic.h"

namespace onnxfuse::ort {
namespace {

// Device memory of the session's allocator, in the order of the run's stream: it may be given back as soon as the
// kernels that use it are enqueued.
class DeviceScratch {
 public:
  DeviceScratch(const OrtKernelContext* context, int device, int64_t bytes) {
    if (bytes <= 0) return;
    const Ort::MemoryInfo memory("Cuda", OrtArenaAllocator, device, OrtMemTypeDefault);
    Ort::ThrowOnError(Ort::GetApi().KernelContext_GetAllocator(context, memory, &allocator_));
    const OrtStatusPtr status =
        Ort::GetApi().KernelContext_GetScratchBuffer(context, memory, static_cast<size_t>(bytes), &data_);
    if (status != nullptr || data_ == nullptr) {
      Ort::GetApi().ReleaseAllocator(allocator_);
      allocator_ = nullptr;
      Ort::ThrowOnError(status);
      throw OpFailure(ORT_FAIL, "onnxfuse: no device memory for " + std::to_string(bytes) + " bytes of scratch");
    }
  }
  ~DeviceScratch() {
    if (allocator_ == nullptr) return;
    allocator_->Free(allocator_, data_);
    Ort::GetApi().ReleaseAllocator(allocator_);
  }
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;
  void* data() const { return data_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

cuda::DType cuda_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16: return cuda::DType::kFloat16;
    case Dtype::kBFloat16: return cuda::DType::kBFloat16;
    case Dtype::kFloat32: break;
  }
  return cuda::DType::kFloat32;
}

}  // namespace

CudaCall::CudaCall(const OrtKernelInfo* info, Dtype dtype, const Attributes& attributes)
    : dtype_(dtype), attributes_(attributes) {
  if (const cuda::Status status = cuda::check_device(); !status.ok()) throw OpFailure(ORT_EP_FAIL, status.error);
  device_ = cuda::current_device();
  cudaGetDevice(&device_id_);
  int constant = 0;
  const OrtValue* weight = nullptr;
  Ort::ThrowOnError(Ort::GetApi().KernelInfoGetConstantInput_tensor(info, 1, &constant, &weight));
  constant_weight_ = constant != 0 && weight != nullptr;
}

cuda::LinearProblem CudaCall::problem() const {
  cuda::LinearProblem p;
  p.dtype = cuda_dtype(dtype_);
  p.norm = static_cast<cuda::Norm>(attributes_.norm);
  p.activation = static_cast<cuda::Activation>(attributes_.activation);
  p.layout = static_cast<cuda::Layout>(attributes_.layout);
  p.epsilon = attributes_.epsilon;
  p.interleave = attributes_.interleave;
  p.weight_is_constant = constant_weight_;
  return p;
}

cuda::Plan CudaCall::plan_for(const cuda::LinearProblem& problem) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = plans_.find(problem.m);
  if (found != plans_.end() && cuda::refusal(problem, found->second).empty()) return found->second;
  const cuda::Plan plan = cuda::choose_plan(problem, device_);
  if (plans_.size() < 4096) plans_[problem.m] = plan;
  return plan;
}

std::string CudaCall::enqueue(OrtKernelContext* context, cuda::LinearProblem* problem) const {
  void* stream_pointer = nullptr;
  Ort::ThrowOnError(Ort::GetApi().KernelContext_GetGPUComputeStream(context, &stream_pointer));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);

  // LayerNorm without given column sums: kernels that need them get them made here, once per run.
  const bool make_sums = problem->norm == cuda::Norm::kLayer && problem->colsum == nullptr && device_.hopper &&
                         problem->dtype != cuda::DType::kFloat32 && problem->k > 0;
  const int64_t sum_bytes = make_sums ? (problem->packed_columns() * 4 + 255) / 256 * 256 : 0;
  const DeviceScratch sums(context, device_id_, sum_bytes);
  if (make_sums) {
    if (const cuda::Status s = cuda::launch_column_sums(*problem, static_cast<float*>(sums.data()), stream); !s.ok())
      return s.error;
    problem->colsum = static_cast<const float*>(sums.data());
  }
  const cuda::Plan plan = plan_for(*problem);
  const DeviceScratch scratch(context, device_id_, cuda::scratch_bytes(*problem, plan));
  return cuda::execute(*problem, plan, scratch.data(), stream).error;
}

}  // namespace onnxfuse::ort
