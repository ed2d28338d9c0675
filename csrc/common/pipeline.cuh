// Rings of shared-memory stages between a producer and its consumers.
#pragma once

#include <cute/arch/util.hpp>
#include <cutlass/arch/barrier.h>

#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace etap {

// A place in a ring of kStages: which stage, and the parity of its current round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ RingPosition behind(int stages) const {
    RingPosition past = *this;
    past.stage -= stages;
    if (past.stage < 0) {
      past.stage += kStages;
      past.parity ^= 1;
    }
    return past;
  }
  __device__ __forceinline__ RingPosition ahead(int stages) const {
    RingPosition next = *this;
    next.advance(stages);
    return next;
  }
};

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// Waits for a phase of a barrier. Debug builds count tries and end a deadlock with a trap.
__device__ __forceinline__ void spin(Barrier& barrier, uint32_t parity) {
  const uint32_t address = cute::cast_smem_ptr_to_uint(&barrier);
#ifdef ETAP_SPIN_LIMIT
  for (uint32_t tries = 0; !ptx::mbarrier_try_wait(address, parity); ++tries) {
    if (tries > ETAP_SPIN_LIMIT) __trap();
  }
#else
  while (!ptx::mbarrier_try_wait(address, parity)) {
  }
#endif
}

// A wait looks at the clock after so many tries, and gives up when its upper half has gone up so often: after 9 to 11 seconds at
// 1.98 GHz.
constexpr uint32_t kTriesPerLook = 256;
constexpr uint32_t kPatience = 5;

// The same where there are registers for it: in the producers, and where consumers wait for a tile to be begun, one of which every
// deadlock meets. It ends in a trap, which the host sees as a failed launch, instead of holding the GPU for ever. Time counts from
// the predecessor's end, which may take as long as it likes.
__device__ __forceinline__ void spin_with_patience(Barrier& barrier, uint32_t parity) {
#ifdef ETAP_SPIN_LIMIT
  spin(barrier, parity);
#else
  const uint32_t address = cute::cast_smem_ptr_to_uint(&barrier);
  uint32_t begin = 0;
  bool followed = false;
  for (uint32_t tries = 1; !ptx::mbarrier_try_wait(address, parity); ++tries) {
    if (tries % kTriesPerLook != 0) continue;
    if (tries == kTriesPerLook) begin = ptx::clock_high();
    if (ptx::clock_high() - begin < kPatience) continue;
    if (followed) __trap();
    cudaGridDependencySynchronize();
    followed = true;
    begin = ptx::clock_high();
  }
#endif
}

// A hardware barrier of part of a CTA, by number. Each sync orders its threads' accesses to memory before and behind it.
struct NamedBarrier {
  int number;
  int threads;

  __device__ __forceinline__ void sync() const { ptx::barrier_sync(number, threads); }
  // Without waiting, for those who only hand over.
  __device__ __forceinline__ void arrive() const { ptx::barrier_arrive(number, threads); }
  // True for all when any passed true.
  __device__ __forceinline__ bool any(bool value) const { return ptx::barrier_any(value, number, threads); }
  // Where threads read what others have just written. Debug builds meet twice: racecheck takes some accesses right behind a
  // named barrier of part of the CTA for earlier ones.
  __device__ __forceinline__ void meet() const {
    sync();
#ifdef ETAP_SPIN_LIMIT
    sync();
#endif
  }
};

// Numbered events for one waiter, who may be up to kTurns behind: they take the barriers in turn. Each has happened when all
// of its signals were given.
template <int kTurns>
struct Turns {
  Barrier barriers[kTurns];

  __device__ __forceinline__ void init(int signals) {
    for (Barrier& barrier : barriers) barrier.init(signals);
  }
  __device__ __forceinline__ void signal(uint32_t turn) { barriers[turn % kTurns].arrive(); }
  __device__ __forceinline__ void wait(uint32_t turn) { spin_with_patience(barriers[turn % kTurns], turn / kTurns % 2); }
};

// One lane of a warp in step releases for all. In debug builds each does for itself: racecheck does not see that what the others
// have read comes before it.
#ifdef ETAP_SPIN_LIMIT
constexpr int kReleasingLanes = kWarpSize;
#else
constexpr int kReleasingLanes = 1;
#endif
__device__ __forceinline__ bool releases() { return threadIdx.x % kWarpSize < kReleasingLanes; }

// One full and one empty barrier a stage. The producer acquires, fills and commits; consumers wait and release. kPatient: the
// producer's patience ends; not where its every instruction is waited for.
template <int kStages, bool kPatient = true>
struct Ring {
  using Position = RingPosition<kStages>;

  Barrier full[kStages];
  Barrier empty[kStages];

  // Called by the threads 0 to kStages - 1 at least; each sets up one stage.
  __device__ __forceinline__ void init(int thread, int producer_arrivals, int consumer_warps) {
    if (thread >= kStages) return;
    full[thread].init(producer_arrivals);
    empty[thread].init(consumer_warps * kReleasingLanes);
  }
  __device__ __forceinline__ void acquire(Position at) {
    if constexpr (kPatient) {
      spin_with_patience(empty[at.stage], at.parity ^ 1);
    } else {
      spin(empty[at.stage], at.parity ^ 1);
    }
  }
  // Whether acquire would not wait now.
  __device__ __forceinline__ bool has_room(Position at) {
    return ptx::mbarrier_test_wait(cute::cast_smem_ptr_to_uint(&empty[at.stage]), at.parity ^ 1);
  }
  __device__ __forceinline__ void wait(Position at) { spin(full[at.stage], at.parity); }
  // Whether wait would not wait now.
  __device__ __forceinline__ bool filled(Position at) {
    return ptx::mbarrier_test_wait(cute::cast_smem_ptr_to_uint(&full[at.stage]), at.parity);
  }
  __device__ __forceinline__ void expect_bytes(Position at, uint32_t bytes) {
    full[at.stage].arrive_and_expect_tx(bytes);
  }
  __device__ __forceinline__ void commit(Position at) { full[at.stage].arrive(); }
  // By lanes that release.
  __device__ __forceinline__ void release(Position at) { empty[at.stage].arrive(); }
  __device__ __forceinline__ uint64_t* full_barrier(Position at) {
    return reinterpret_cast<uint64_t*>(&full[at.stage]);
  }
};

}  // namespace etap
