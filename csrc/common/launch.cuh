// One way to launch a kernel that overlaps with its predecessor.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda_check.h"

namespace etap {

// Programmatic dependent launch: the kernel may start before its predecessor on the stream has ended, and waits for it
// itself (cudaGridDependencySynchronize) before it reads or writes anything.
template <class... Params>
void launch_overlapping(void (*kernel)(Params...), dim3 blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                        const Params&... params) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  ETAP_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace etap
