// Merge the partial results of split requests by their log-sum-exps.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace etap {

// Launched right behind decode on the same stream; starts while decode's last CTAs still run.
template <class Element>
void launch_combine(const DecodeParams& params, cudaStream_t stream);

}  // namespace etap
