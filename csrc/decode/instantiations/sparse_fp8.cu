#include "decode/sparse/launch.cuh"

namespace etap::sparse {

KernelLaunch prepare_scaled_fp8(const DecodeParams& params, int cluster) {
  switch (params.row_tile) {
    case 8: return launch_of<sparse_fp8::Traits<8>>(params, cluster);
    case 16: return launch_of<sparse_fp8::Traits<16>>(params, cluster);
    case 32: return launch_of<sparse_fp8::Traits<32>>(params, cluster);
    default: return launch_of<sparse_fp8::SharedTilesTraits>(params, cluster);
  }
}

}  // namespace etap::sparse
