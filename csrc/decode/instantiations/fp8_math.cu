#include "decode/launch.cuh"

template etap::DecodeKernel etap::fp8_kernel<cutlass::float_e4m3_t>(int, bool);
