#include "decode/sparse/launch.cuh"

namespace etap::sparse {

// Rows with rope behind the value dims have nine chunks, all others eight.
template <int kTileChunks>
KernelLaunch launch_of(const DecodeParams& params, int cluster) {
  switch (params.row_tile) {
    case 8: return launch_of<Traits<8, kTileChunks>>(params, cluster);
    case 16: return launch_of<Traits<16, kTileChunks>>(params, cluster);
    case 32: return launch_of<Traits<32, kTileChunks>>(params, cluster);
    default: return launch_of<WideTraits<kTileChunks>>(params, cluster);
  }
}

KernelLaunch prepare_bf16(const DecodeParams& params, int cluster) {
  return params.q_rope != nullptr ? launch_of<kChunks>(params, cluster) : launch_of<kValueChunks>(params, cluster);
}

}  // namespace etap::sparse
