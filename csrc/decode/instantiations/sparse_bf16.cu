#include "decode/sparse/launch.cuh"

namespace etap::sparse {

template <bool kClustered>
KernelLaunch launch_of(const DecodeParams& params) {
  switch (params.row_tile) {
    case 8: return kernel_launch<Traits<8, kClustered>>(params);
    case 16: return kernel_launch<Traits<16, kClustered>>(params);
    case 32: return kernel_launch<Traits<32, kClustered>>(params);
    default: return kernel_launch<WideTraits>(params);
  }
}

KernelLaunch prepare_bf16(const DecodeParams& params, bool clustered) {
  return clustered ? launch_of<true>(params) : launch_of<false>(params);
}

}  // namespace etap::sparse
