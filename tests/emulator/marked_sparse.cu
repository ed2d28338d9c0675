// Sparse kernels of each form and of each row format, with the marks of common/mark.h.
#define ETAP_MARKS
#include "decode/kernels.cuh"

using etap::KernelLaunch, etap::launch_of, etap::sparse::Traits, etap::sparse::WideTraits;

KernelLaunch transposed() { return launch_of<Traits<16, etap::kChunks>>(); }
KernelLaunch v4() { return launch_of<etap::sparse_fp8::Traits<32, etap::sparse_fp8::V4Row>>(); }
KernelLaunch query_major() { return launch_of<WideTraits<etap::kChunks>>(); }
KernelLaunch wide_latent() { return launch_of<WideTraits<etap::kValueChunks>>(); }
KernelLaunch fp8() { return launch_of<etap::sparse_fp8::Traits<32, etap::sparse_fp8::V32Row>>(); }
KernelLaunch fp8_shared() { return launch_of<etap::sparse_fp8::SharedTilesTraits>(); }
