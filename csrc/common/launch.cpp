#include "common/launch.h"

#include <cudaTypedefs.h>

namespace etap {
namespace {

void check_driver(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  static const auto get_text = reinterpret_cast<PFN_cuGetErrorString_v6000>(driver_function("cuGetErrorString", 6000));
  get_text(status, &text);
  throw std::runtime_error(std::string(call) + " failed: " + (text != nullptr ? text : std::to_string(int(status))));
}

}  // namespace

void* driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  ETAP_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the driver has no ") + name);
  return entry;
}

CUfunction KernelHandles::of(const void* function, int shared_bytes, int device) {
  std::atomic<CUfunction>& known = of_device_[device % kDevices];
  CUfunction handle = known.load(std::memory_order_relaxed);
  if (handle != nullptr) return handle;
  ETAP_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  ETAP_CUDA_CHECK(cudaGetFuncBySymbol(&handle, function));
  known.store(handle, std::memory_order_relaxed);
  return handle;
}

void launch_overlapping(const KernelLaunch& kernel, const void* const* arguments, int device, cudaStream_t stream) {
  static const auto launch = reinterpret_cast<PFN_cuLaunchKernelEx_v11060>(driver_function("cuLaunchKernelEx", 11060));
  CUlaunchAttribute overlap{};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = kernel.blocks.x;
  config.gridDimY = kernel.blocks.y;
  config.gridDimZ = kernel.blocks.z;
  config.blockDimX = kernel.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_bytes;
  config.hStream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  const CUfunction function = kernel.handles->of(kernel.function, kernel.shared_bytes, device);
  check_driver(launch(&config, function, const_cast<void**>(arguments), nullptr), "cuLaunchKernelEx");
}

}  // namespace etap
