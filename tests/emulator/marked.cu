// One decode kernel of each form for a 16-bit cache, with the marks of common/mark.h.
#define ETAP_MARKS
#include "decode/launch.cuh"

etap::DecodeKernel transposed() { return etap::describe<etap::transposed::Traits<cutlass::bfloat16_t, 16>>(); }
etap::DecodeKernel query_major() { return etap::describe<etap::query_major::Traits<cutlass::bfloat16_t>>(); }
