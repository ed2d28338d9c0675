#include "decode/launch.cuh"

template etap::DecodeKernel etap::sixteen_bit_kernel<cutlass::half_t>(int, bool);
