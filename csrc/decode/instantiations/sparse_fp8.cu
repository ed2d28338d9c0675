#include "decode/launch.cuh"
#include "decode/sparse/launch.h"

namespace etap::sparse {

template <class Row>
KernelLaunch prepare(int row_tile, dim3 blocks, int cluster) {
  switch (row_tile) {
    case 8: return launch_of<sparse_fp8::Traits<8, Row>>(blocks, cluster);
    case 16: return launch_of<sparse_fp8::Traits<16, Row>>(blocks, cluster);
    default: return launch_of<sparse_fp8::Traits<32, Row>>(blocks, cluster);
  }
}

KernelLaunch prepare_scaled_fp8(int row_tile, dim3 blocks, int cluster) {
  if (row_tile == kMaxRowTile) return launch_of<sparse_fp8::SharedTilesTraits>(blocks, cluster);
  return prepare<sparse_fp8::V32Row>(row_tile, blocks, cluster);
}

KernelLaunch prepare_page_scaled_fp8(int row_tile, dim3 blocks, int cluster) {
  return prepare<sparse_fp8::V4Row>(row_tile, blocks, cluster);
}

}  // namespace etap::sparse
