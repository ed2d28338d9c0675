// Launches of the decode kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "params.h"

namespace etap {

// A cache of the queries' type: bfloat16_t or half_t.
template <class Element>
void launch_decode(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream);

// A cache of e4m3, multiplied as half_t or as float_e4m3_t.
template <class Math>
void launch_fp8_decode(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream);

}  // namespace etap
