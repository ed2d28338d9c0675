#include "decode/launch.cuh"

template etap::DecodeKernel etap::sixteen_bit_kernel<cutlass::bfloat16_t>(int, bool);
