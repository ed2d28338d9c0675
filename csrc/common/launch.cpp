#include "common/launch.h"

#include <cudaTypedefs.h>

#include <algorithm>

namespace etap {
namespace {

void check_driver(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  static const auto get_text = reinterpret_cast<PFN_cuGetErrorString_v6000>(driver_function("cuGetErrorString", 6000));
  get_text(status, &text);
  throw std::runtime_error(std::string(call) + " failed: " + (text != nullptr ? text : std::to_string(int(status))));
}

constexpr int kMostAttributes = 2;

// `attributes`: room for those that the configuration points to, its cluster before all others.
CUlaunchConfig launch_config(const KernelLaunch& kernel, CUlaunchAttribute (&attributes)[kMostAttributes], CUstream stream) {
  CUlaunchConfig config{};
  config.gridDimX = kernel.blocks.x;
  config.gridDimY = kernel.blocks.y;
  config.gridDimZ = kernel.blocks.z;
  config.blockDimX = kernel.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_bytes;
  config.hStream = stream;
  config.attrs = attributes;
  if (kernel.cluster > 1) {
    CUlaunchAttribute& cluster = attributes[config.numAttrs++] = {};
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim = {unsigned(kernel.cluster), 1, 1};
  }
  CUlaunchAttribute& overlap = attributes[config.numAttrs++] = {};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  return config;
}

// A number for the context whose SMs a stream's kernels run on, with many bits that differ in its upper half.
uint64_t context_of(CUstream stream) {
  static const auto ask = reinterpret_cast<PFN_cuStreamGetCtx_v12050>(driver_function("cuStreamGetCtx", 12050));
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;
  check_driver(ask(stream, &context, &green), "cuStreamGetCtx");
  const auto address = green != nullptr ? reinterpret_cast<uintptr_t>(green) : reinterpret_cast<uintptr_t>(context);
  return uint64_t(address) * 0x9e3779b97f4a7c15;
}

}  // namespace

void* driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  ETAP_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the driver has no ") + name);
  return entry;
}

CUfunction KernelHandles::of(const KernelLaunch& kernel, int device) {
  std::atomic<CUfunction>& known = of_device_[device % kDevices];
  CUfunction handle = known.load(std::memory_order_relaxed);
  if (handle != nullptr) return handle;
  const void* const function = kernel.function;
  const int shared_bytes = std::max(kernel.shared_bytes, kernel.most_shared_bytes);
  ETAP_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  ETAP_CUDA_CHECK(cudaGetFuncBySymbol(&handle, function));
  known.store(handle, std::memory_order_relaxed);
  return handle;
}

bool KernelHandles::clusters_fit(const KernelLaunch& kernel, int device, cudaStream_t stream) {
  constexpr uint64_t kMostClusters = (1 << 12) - 1;
  int size = 0;
  while (1 << size < kernel.cluster) ++size;
  std::atomic<uint64_t>& known = clusters_[device % kDevices][size];
  const uint64_t context = context_of(stream) & ~kMostClusters, last = known.load(std::memory_order_relaxed);
  uint64_t clusters = last & kMostClusters;
  if (last == 0 || (last & ~kMostClusters) != context) {
    static const auto ask =
        reinterpret_cast<PFN_cuOccupancyMaxActiveClusters_v11070>(driver_function("cuOccupancyMaxActiveClusters", 11070));
    CUlaunchAttribute attributes[kMostAttributes];
    CUlaunchConfig config = launch_config(kernel, attributes, stream);
    config.numAttrs = 1;  // how launches overlap says nothing of room
    int found = 0;
    check_driver(ask(&found, of(kernel, device), &config), "cuOccupancyMaxActiveClusters");
    clusters = uint64_t(found);
    known.store(context | clusters, std::memory_order_relaxed);
  }
  return clusters * kernel.cluster >= kernel.blocks.x;
}

void launch_overlapping(const KernelLaunch& kernel, const void* const* arguments, int device, cudaStream_t stream) {
  static const auto launch = reinterpret_cast<PFN_cuLaunchKernelEx_v11060>(driver_function("cuLaunchKernelEx", 11060));
  CUlaunchAttribute attributes[kMostAttributes];
  const CUlaunchConfig config = launch_config(kernel, attributes, stream);
  const CUfunction function = kernel.handles->of(kernel, device);
  check_driver(launch(&config, function, const_cast<void**>(arguments), nullptr), "cuLaunchKernelEx");
}

}  // namespace etap
