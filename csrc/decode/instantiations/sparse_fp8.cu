#include "decode/sparse/launch.cuh"

etap::KernelLaunch etap::sparse::prepare_fp8(const DecodeParams& params) {
  switch (params.row_tile) {
    case 8: return kernel_launch<sparse_fp8::Traits<8>>(params);
    case 16: return kernel_launch<sparse_fp8::Traits<16>>(params);
    default: return kernel_launch<sparse_fp8::Traits<32>>(params);
  }
}
