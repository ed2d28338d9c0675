// Sparse kernels of each form, with rope and without, with the marks of common/mark.h.
#define ETAP_MARKS
#include "decode/sparse/launch.cuh"

using etap::DecodeParams, etap::KernelLaunch, etap::sparse::launch_of, etap::sparse::Traits, etap::sparse::WideTraits;

KernelLaunch transposed(const DecodeParams& params) { return launch_of<Traits<16, etap::kChunks>>(params, 1); }
KernelLaunch latent(const DecodeParams& params) { return launch_of<Traits<32, etap::kValueChunks>>(params, 1); }
KernelLaunch query_major(const DecodeParams& params) { return launch_of<WideTraits<etap::kChunks>>(params, 1); }
KernelLaunch wide_latent(const DecodeParams& params) { return launch_of<WideTraits<etap::kValueChunks>>(params, 1); }
KernelLaunch fp8(const DecodeParams& params) { return launch_of<etap::sparse_fp8::Traits<32>>(params, 1); }
KernelLaunch fp8_shared(const DecodeParams& params) { return launch_of<etap::sparse_fp8::SharedTilesTraits>(params, 1); }
