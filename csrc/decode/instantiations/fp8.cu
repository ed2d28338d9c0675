#include "decode/launch.cuh"

template void etap::launch_fp8_decode<cutlass::half_t>(const DecodeParams&, const CacheParams&, cudaStream_t);
