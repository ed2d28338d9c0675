// One sparse kernel of each form, with the marks of common/mark.h.
#define ETAP_MARKS
#include "decode/sparse/launch.cuh"

using etap::DecodeParams, etap::KernelLaunch, etap::sparse::kernel_launch;

KernelLaunch transposed(const DecodeParams& params) { return kernel_launch<etap::sparse::Traits<16, false>>(params); }
KernelLaunch clustered(const DecodeParams& params) { return kernel_launch<etap::sparse::Traits<16, true>>(params); }
KernelLaunch query_major(const DecodeParams& params) { return kernel_launch<etap::sparse::WideTraits>(params); }
KernelLaunch fp8(const DecodeParams& params) { return kernel_launch<etap::sparse_fp8::Traits<32, false>>(params); }
KernelLaunch fp8_shared(const DecodeParams& params) { return kernel_launch<etap::sparse_fp8::SharedTilesTraits>(params); }
