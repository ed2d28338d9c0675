// Launch of the decode kernel for one element type.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "params.h"

namespace etap {

template <class Element>
void launch_decode(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream);

}  // namespace etap
