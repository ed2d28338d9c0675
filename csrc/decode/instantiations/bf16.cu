#include "decode/launch.cuh"

template void etap::launch_decode<cutlass::bfloat16_t>(const DecodeParams&, const CacheParams&, cudaStream_t);
