// The compiled kernels of sparse attention as the host knows them.
#pragma once

#include "decode/kernel.cuh"
#include "decode/sparse/launch.h"

namespace etap::sparse {

template <class T>
KernelLaunch kernel_launch(const DecodeParams& params) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(decode_kernel<T>), __PRETTY_FUNCTION__, &handles,
          dim3(params.partitions * params.row_groups), kDecodeThreads, int(sizeof(typename T::SharedStorage)),
          T::kClustered ? cluster_pieces(params) : 1};
}

}  // namespace etap::sparse
