#include "decode/launch.cuh"

template void etap::launch_fp8_decode<cutlass::float_e4m3_t>(const DecodeParams&, const CacheParams&, cudaStream_t);
