// Sparse kernels of each form, with rope and without, with the marks of common/mark.h.
#define ETAP_MARKS
#include "decode/launch.cuh"

using etap::DecodeKernel, etap::describe;

DecodeKernel transposed() { return describe<etap::sparse::Traits<16, etap::kChunks>, true>(); }
DecodeKernel transposed_latent() { return describe<etap::sparse::Traits<32, etap::kValueChunks>, true>(); }
DecodeKernel query_major() { return describe<etap::sparse::WideTraits<etap::kChunks>, true>(); }
DecodeKernel query_major_latent() { return describe<etap::sparse::WideTraits<etap::kValueChunks>, true>(); }
