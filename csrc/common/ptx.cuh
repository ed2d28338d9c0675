// One PTX instruction a function, for those that CUTLASS does not wrap.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace etap::ptx {

// 2^x with the special-function unit; flushes denormals, 2^-inf is 0.
CUTE_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two products of bfloat16; subnormal numbers count.
CUTE_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Wait for `threads` threads at a named barrier.
CUTE_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive there without waiting.
CUTE_DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As barrier_sync; true for all when any of them passed true. Orders memory as a barrier.
CUTE_DEVICE bool barrier_any(bool value, int barrier, int threads) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %1, 0;\n"
      "barrier.cta.red.or.pred.aligned out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(uint32_t(value)), "r"(barrier), "r"(threads)
      : "memory");
  return any != 0;
}

// Transpose an 8 x 8 matrix of 16-bit elements held by a warp, two elements a lane.
CUTE_DEVICE uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Copy 16 bytes of global memory to an address of shared memory, zeros where they do not exist, which are then not read.
CUTE_DEVICE void copy_async_16(uint32_t target, uint64_t source, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0));
}

CUTE_DEVICE void copy_async_8(uint32_t target, uint64_t source, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(exists ? 8 : 0));
}

// Store 16 bytes at an address of shared memory.
CUTE_DEVICE void store_shared(uint32_t target, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

CUTE_DEVICE void copy_async_4(uint32_t target, uint64_t source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source));
}

// What was copied since the last of these is a group.
CUTE_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the latest groups.
template <int kGroups>
CUTE_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Whether the barrier's phase of this parity has completed.
CUTE_DEVICE bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns whether the barrier's phase of this parity has completed, and may suspend the thread for a while before it does.
CUTE_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The upper half of the multiprocessor's clock counter: it goes up by one in 2^32 clocks, some two seconds.
CUTE_DEVICE uint32_t clock_high() {
  uint32_t high;
  asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(high));
  return high;
}

// This CTA's place in its cluster, and how many there are; both along x.
CUTE_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
CUTE_DEVICE uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The barrier of a cluster's threads, in two halves: what was read and written before the first comes before what anyone does
// behind the second. Threads that have ended are not waited for.
CUTE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// For those who have only read, and used what they read: spares them a wait for their own writes to memory.
CUTE_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where another CTA of the cluster has what lies at this address here. Worked out at this place.
CUTE_DEVICE uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// Read shared memory of a CTA of the cluster, kOffset bytes behind an address.
template <int kOffset>
CUTE_DEVICE float2 load_cluster_float2(uint32_t mapped) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2 + %3];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(mapped), "n"(kOffset)
               : "memory");
  return x;
}
template <int kOffset>
CUTE_DEVICE float4 load_cluster_float4(uint32_t mapped) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(mapped), "n"(kOffset)
               : "memory");
  return x;
}

// What lies at an address of global memory, or zeros without reading: one load under a condition, where a branch would make
// each of several loads wait for the one before.
CUTE_DEVICE void load_if(bool wanted, const void* from, uint4& value) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(from), "r"(int(wanted))
      : "memory");
}
CUTE_DEVICE void load_if(bool wanted, const void* from, float4& value) {
  uint4 bits;
  load_if(wanted, from, bits);
  value = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
}
CUTE_DEVICE void load_if(bool wanted, const void* from, uint2& value) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@wanted ld.global.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(value.x), "=&r"(value.y)
      : "l"(from), "r"(int(wanted))
      : "memory");
}

// Loads of a word that leave in the order in which they are written.
CUTE_DEVICE int32_t load_in_order(const int32_t* from) {
  int32_t value;
  asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// load_if for what is read once: it leaves L1 alone.
CUTE_DEVICE void load_once_if(bool wanted, uint64_t from, uint4& value) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(from), "r"(int(wanted))
      : "memory");
}
CUTE_DEVICE void load_once_if(bool wanted, uint64_t from, uint2& value) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@wanted ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(value.x), "=&r"(value.y)
      : "l"(from), "r"(int(wanted))
      : "memory");
}

CUTE_DEVICE float load_float(uint64_t global) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(global));
  return x;
}

// Store four bytes in shared memory of a CTA of the cluster, as map_to_rank names it; its barrier there counts them when they have
// arrived. The barrier of a cluster would wait for everything that its threads have written, as long as a trip to memory takes.
CUTE_DEVICE void store_async(uint32_t mapped, int32_t value, uint32_t mapped_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(mapped), "r"(value),
               "r"(mapped_barrier)
               : "memory");
}

CUTE_DEVICE void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

}  // namespace etap::ptx
