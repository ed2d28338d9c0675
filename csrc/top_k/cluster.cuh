// What top-k needs of PTX: copies to shared memory, and messages to other CTAs of a cluster.
#pragma once

#include "common/pipeline.cuh"

namespace etap::top_k {

constexpr int kMostCtas = 8;  // the largest cluster that every Hopper GPU places

CUTE_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Store at another CTA, whose barrier expects so many bytes. Unlike the barrier of a cluster this waits for nothing else that was
// written: a release of all threads, which takes as long as a trip to memory.
CUTE_DEVICE void send(const void* shared, const Barrier& barrier, uint32_t rank, int32_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   ptx::map_to_rank(shared_address(shared), rank)),
               "r"(value), "r"(ptx::map_to_rank(shared_address(&barrier), rank))
               : "memory");
}

// An address of global memory that is kept in registers, and not worked out again at each use.
CUTE_DEVICE uint64_t kept(const void* pointer) {
  uint64_t address = __cvta_generic_to_global(pointer);
  asm volatile("" : "+l"(address));
  return address;
}
CUTE_DEVICE float load_float(uint64_t address) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(address));
  return x;
}

CUTE_DEVICE void copy_async_4(uint32_t target, uint64_t source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source));
}
CUTE_DEVICE void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the latest groups of copies.
template <int kGroups>
CUTE_DEVICE void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace etap::top_k
