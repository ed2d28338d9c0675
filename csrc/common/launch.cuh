// One way to launch a kernel that overlaps with its predecessor.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda_check.h"

namespace etap {

struct KernelLaunch {
  const void* function;
  const char* name;  // holds the template arguments, as the compiler writes them
  dim3 blocks;
  int threads;
  int shared_bytes;
};

// Programmatic dependent launch: the kernel may start before its predecessor on the stream has ended, and waits for it
// itself (cudaGridDependencySynchronize) before it reads or writes anything.
inline void launch_overlapping(const KernelLaunch& kernel, const void* const* arguments, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = kernel.blocks;
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  ETAP_CUDA_CHECK(cudaLaunchKernelExC(&config, kernel.function, const_cast<void**>(arguments)));
}

}  // namespace etap
