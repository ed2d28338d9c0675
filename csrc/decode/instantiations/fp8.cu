#include "decode/launch.cuh"

template etap::DecodeKernel etap::fp8_kernel<cutlass::half_t>(int, bool);
