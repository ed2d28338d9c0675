#include "decode/sparse/launch.cuh"

etap::KernelLaunch etap::sparse::prepare_bf16(const DecodeParams& params) {
  switch (params.row_tile) {
    case 8: return kernel_launch<Traits<8>>(params);
    case 16: return kernel_launch<Traits<16>>(params);
    case 32: return kernel_launch<Traits<32>>(params);
    default: return kernel_launch<WideTraits>(params);
  }
}
