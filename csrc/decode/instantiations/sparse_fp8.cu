#include "decode/sparse/launch.cuh"

namespace etap::sparse {

template <bool kClustered>
KernelLaunch launch_of(const DecodeParams& params) {
  switch (params.row_tile) {
    case 8: return kernel_launch<sparse_fp8::Traits<8, kClustered>>(params);
    case 16: return kernel_launch<sparse_fp8::Traits<16, kClustered>>(params);
    default: return kernel_launch<sparse_fp8::Traits<32, kClustered>>(params);
  }
}

KernelLaunch prepare_fp8(const DecodeParams& params, bool clustered) {
  if (params.row_tile == sparse_fp8::SharedTilesTraits::kRowTile) return kernel_launch<sparse_fp8::SharedTilesTraits>(params);
  return clustered ? launch_of<true>(params) : launch_of<false>(params);
}

}  // namespace etap::sparse
