#include "decode/launch.cuh"
#include "decode/sparse/launch.h"

namespace etap::sparse {

KernelLaunch prepare_scaled_fp8(int row_tile, dim3 blocks, int cluster) {
  switch (row_tile) {
    case 8: return launch_of<sparse_fp8::Traits<8>>(blocks, cluster);
    case 16: return launch_of<sparse_fp8::Traits<16>>(blocks, cluster);
    case 32: return launch_of<sparse_fp8::Traits<32>>(blocks, cluster);
    default: return launch_of<sparse_fp8::SharedTilesTraits>(blocks, cluster);
  }
}

}  // namespace etap::sparse
