#include "decode/launch.cuh"
#include "decode/sparse/launch.h"

namespace etap::sparse {

// Rows with rope behind the value dims have nine chunks, all others eight.
template <int kTileChunks>
KernelLaunch prepare(int row_tile, dim3 blocks, int cluster) {
  switch (row_tile) {
    case 8: return launch_of<Traits<8, kTileChunks>>(blocks, cluster);
    case 16: return launch_of<Traits<16, kTileChunks>>(blocks, cluster);
    case 32: return launch_of<Traits<32, kTileChunks>>(blocks, cluster);
    default: return launch_of<WideTraits<kTileChunks>>(blocks, cluster);
  }
}

KernelLaunch prepare_bf16(int row_tile, bool rope, dim3 blocks, int cluster) {
  return rope ? prepare<kChunks>(row_tile, blocks, cluster) : prepare<kValueChunks>(row_tile, blocks, cluster);
}

}  // namespace etap::sparse
