// A cluster whose CTAs share a row: reads and writes of another's shared memory.
#pragma once

#include "common/ptx.cuh"

namespace etap::top_k {

constexpr int kMostCtas = 8;  // the largest cluster that every Hopper GPU places

CUTE_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

CUTE_DEVICE void store_at_rank(const void* shared, uint32_t rank, int32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(ptx::map_to_rank(shared_address(shared), rank)), "r"(value) : "memory");
}

CUTE_DEVICE int4 load_at_rank(const void* shared, uint32_t rank) {
  int4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(ptx::map_to_rank(shared_address(shared), rank))
               : "memory");
  return x;
}

}  // namespace etap::top_k
