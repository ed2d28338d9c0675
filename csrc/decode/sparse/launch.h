// The launch of sparse attention's kernels. They gather the cache's rows and queries by address, so that nothing is encoded.
#pragma once

#include "common/launch.h"
#include "decode/even_split.h"
#include "decode/sparse/cache.h"
#include "params.h"

namespace etap::sparse {

// clustered: a token's pieces are a cluster, which sums them; only where cluster_pieces() says how many. Else a token in
// several pieces wants the combination.
KernelLaunch prepare_bf16(const DecodeParams& params, bool clustered);
KernelLaunch prepare_fp8(const DecodeParams& params, bool clustered);

inline KernelLaunch prepare(const DecodeParams& params, bool fp8_cache, bool clustered) {
  return fp8_cache ? prepare_fp8(params, clustered) : prepare_bf16(params, clustered);
}

}  // namespace etap::sparse
