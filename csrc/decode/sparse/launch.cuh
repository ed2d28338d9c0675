// The compiled kernels of sparse attention as the host knows them.
#pragma once

#include "decode/kernel.cuh"
#include "decode/sparse/launch.h"

namespace etap::sparse {

template <class T>
KernelLaunch launch_of(const DecodeParams& params, int cluster) {
  static KernelHandles handles;
  constexpr int kSharedBytes = sizeof(typename T::SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  return {reinterpret_cast<const void*>(decode_kernel<T>), __PRETTY_FUNCTION__, &handles,
          dim3(params.partitions * params.row_groups), kDecodeThreads<T>, kSharedBytes, cluster};
}

}  // namespace etap::sparse
