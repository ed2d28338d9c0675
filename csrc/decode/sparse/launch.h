// The launch of sparse attention's kernels. They gather the cache's rows and queries by address, so that nothing is encoded.
#pragma once

#include "common/launch.h"
#include "decode/sparse/cache.h"
#include "params.h"

namespace etap::sparse {

KernelLaunch prepare_bf16(const DecodeParams& params);
KernelLaunch prepare_fp8(const DecodeParams& params);

inline KernelLaunch prepare(const DecodeParams& params, bool fp8_cache) {
  return fp8_cache ? prepare_fp8(params) : prepare_bf16(params);
}

}  // namespace etap::sparse
