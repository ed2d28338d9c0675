// What top-k needs of PTX: copies to shared memory, and stores to that of other CTAs of a cluster.
#pragma once

#include "common/ptx.cuh"

namespace etap::top_k {

constexpr int kMostCtas = 8;  // the largest cluster that every Hopper GPU places

CUTE_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

CUTE_DEVICE void store_at_rank(const void* shared, uint32_t rank, int32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(ptx::map_to_rank(shared_address(shared), rank)), "r"(value) : "memory");
}

CUTE_DEVICE void store_at_rank(const void* shared, uint32_t rank, const int4& x) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(ptx::map_to_rank(shared_address(shared), rank)), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

CUTE_DEVICE void copy_async_4(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(__cvta_generic_to_global(source)));
}
CUTE_DEVICE void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the latest groups of copies.
template <int kGroups>
CUTE_DEVICE void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

CUTE_DEVICE float square_root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace etap::top_k
