// Decode kernels for a 16-bit cache, one of each form that copies whole tiles, and those that copy parts or gather rows, with
// those for an FP8 cache, with the marks of common/mark.h.
#define ETAP_MARKS
#include "decode/kernels.cuh"

using etap::DecodeKernel, etap::describe;

DecodeKernel transposed() { return describe<etap::transposed::Traits<cutlass::bfloat16_t, 16>, true>(); }
DecodeKernel query_major() { return describe<etap::query_major::Traits<cutlass::bfloat16_t>, true>(); }
DecodeKernel transposed_rows() { return describe<etap::transposed::Traits<cutlass::bfloat16_t, 16>, false>(); }
DecodeKernel query_major_rows() { return describe<etap::query_major::Traits<cutlass::bfloat16_t>, false>(); }
DecodeKernel fp8_rows() { return describe<etap::transposed_fp8::Traits<cutlass::half_t, 16>, false>(); }
DecodeKernel mixed_major() { return describe<etap::mixed_major::Traits, true>(); }
DecodeKernel mixed_major_rows() { return describe<etap::mixed_major::Traits, false>(); }
DecodeKernel fp8_math_rows() { return describe<etap::transposed_fp8::Traits<cutlass::float_e4m3_t, 16>, false>(); }
