// A cluster whose CTAs share a row: what one stores into another's shared memory, counted in bytes by an mbarrier there.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/ptx.cuh"

namespace etap::top_k {

constexpr int kMostCtas = 8;  // the largest cluster that every Hopper GPU places

CUTE_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// An mbarrier of this CTA; a phase ends when as many bytes have come as were expected.
struct Inbox {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  uint64_t barrier;

  CUTE_DEVICE void init() { reinterpret_cast<Barrier*>(this)->init(1); }
  // Once a phase, by one thread; some of the bytes may have come.
  CUTE_DEVICE void expect(int bytes) { reinterpret_cast<Barrier*>(this)->arrive_and_expect_tx(bytes); }
  CUTE_DEVICE void wait(uint32_t parity) const {
    while (!ptx::mbarrier_try_wait(shared_address(this), parity)) {}
  }
};

// To the same place of another CTA, or of this one; its inbox counts the bytes.
CUTE_DEVICE void send(const void* to, uint32_t rank, int32_t value, const Inbox& inbox) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   ptx::map_to_rank(shared_address(to), rank)),
               "r"(value), "r"(ptx::map_to_rank(shared_address(&inbox), rank))
               : "memory");
}

CUTE_DEVICE void send(const void* to, uint32_t rank, const int4& x, const Inbox& inbox) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   ptx::map_to_rank(shared_address(to), rank)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(ptx::map_to_rank(shared_address(&inbox), rank))
               : "memory");
}

}  // namespace etap::top_k
