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

  CUTE_DEVICE void advance(int stages) {
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
  CUTE_DEVICE RingPosition behind(int stages) const {
    RingPosition past = *this;
    past.stage -= stages;
    if (past.stage < 0) {
      past.stage += kStages;
      past.parity ^= 1;
    }
    return past;
  }
  CUTE_DEVICE RingPosition ahead(int stages) const {
    RingPosition next = *this;
    next.advance(stages);
    return next;
  }
};

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// One thread of each warp of a CTA sets up some of its barriers. The lanes of a single warp would do it one after the other, and
// all that a CTA does waits for it.
constexpr int kSetupWarps = 12;

// Calls of(i) for those of kCount barriers that this warp sets up.
template <int kCount, class Of>
CUTE_DEVICE void each_of_warp(int warp, Of&& of) {
  CUTE_UNROLL
  for (int first = 0; first < kCount; first += kSetupWarps) {
    if (first + warp < kCount) of(first + warp);
  }
}

// A wait that traps looks at the clock after this many tries, and traps when the clock's upper half has gone up this often: after 9 to
// 11 seconds at 1.98 GHz.
constexpr int kFirstTries = 256;
constexpr uint32_t kTrapTicks = 5;

// Waits for a phase of a barrier. A deadlock ends in a trap, which the host sees as a failed launch, instead of holding the GPU for
// ever. A wait that traps takes a register and instructions, so kTraps names the waits that do: one that every deadlock reaches
// suffices. Time counts from the predecessor's end, which may take as long as it likes: what such a wait waits for comes after it.
// In debug builds every wait counts its tries.
template <bool kTraps = false>
CUTE_DEVICE void spin(Barrier& barrier, uint32_t parity) {
  const uint32_t address = cute::cast_smem_ptr_to_uint(&barrier);
#ifdef ETAP_SPIN_LIMIT
  for (uint32_t tries = 1; !ptx::mbarrier_try_wait(address, parity); ++tries) {
    if (tries > ETAP_SPIN_LIMIT) __trap();
  }
#else
  if constexpr (kTraps) {
    // One register at a time: first the tries, then the clock.
#pragma unroll 1
    for (int tries = kFirstTries; tries > 0; --tries) {
      if (ptx::mbarrier_try_wait(address, parity)) return;
    }
    cudaGridDependencySynchronize();
    const uint32_t begin = ptx::clock_high();
    while (!ptx::mbarrier_try_wait(address, parity)) {
      if (ptx::clock_high() - begin >= kTrapTicks) __trap();
    }
  } else {
    while (!ptx::mbarrier_try_wait(address, parity)) {
    }
  }
#endif
}

// A hardware barrier of part of a CTA, by number. It orders its threads' accesses to memory before and behind it. Debug builds sync
// where release builds arrive, and twice where those sync: racecheck takes no arrival without a wait, and takes some accesses right
// behind a named barrier of part of the CTA for earlier ones.
struct NamedBarrier {
  int number;
  int threads;

#ifdef ETAP_SPIN_LIMIT
  CUTE_DEVICE void sync() const {
    ptx::barrier_sync(number, threads);
    ptx::barrier_sync(number, threads);
  }
  CUTE_DEVICE void arrive() const { sync(); }
#else
  CUTE_DEVICE void sync() const { ptx::barrier_sync(number, threads); }
  CUTE_DEVICE void arrive() const { ptx::barrier_arrive(number, threads); }
#endif
  // Syncs, and returns true in all threads when any of them passed true.
  CUTE_DEVICE bool any(bool value) const { return ptx::barrier_any(value, number, threads); }
};

// Numbered events for one waiter, who may be up to kTurns behind: they take the barriers in turn. Each has happened when all
// of its signals were given.
template <int kTurns, bool kTraps>
struct Turns {
  Barrier barriers[kTurns];

  CUTE_DEVICE void init(uint32_t turn, int signals) { barriers[turn].init(signals); }
  CUTE_DEVICE void signal(uint32_t turn) { barriers[turn % kTurns].arrive(); }
  CUTE_DEVICE void wait(uint32_t turn) { spin<kTraps>(barriers[turn % kTurns], turn / kTurns % 2); }
};

// One lane of a warp in step releases for all. In debug builds each does for itself: racecheck does not see that what the others
// have read or written comes before it.
#ifdef ETAP_SPIN_LIMIT
constexpr int kReleasingLanes = kWarpSize;
#else
constexpr int kReleasingLanes = 1;
#endif
CUTE_DEVICE bool releases() { return threadIdx.x % kWarpSize < kReleasingLanes; }

// One full and one empty barrier a stage. The producer acquires, fills and commits; consumers wait and release. kTraps: the
// producer's waits trap, see spin.
template <int kStages, bool kTraps = true>
struct Ring {
  using Position = RingPosition<kStages>;

  Barrier full[kStages];
  Barrier empty[kStages];

  // Sets up those stages that are this warp's.
  CUTE_DEVICE void init(int warp, int producer_arrivals, int consumer_warps) {
    each_of_warp<kStages>(warp, [&](int stage) {
      full[stage].init(producer_arrivals);
      empty[stage].init(consumer_warps * kReleasingLanes);
    });
  }
  // traps, a constant: also where kTraps says no. A wait that does not wait takes no more instructions then.
  CUTE_DEVICE void acquire(Position at, bool traps = kTraps) {
    if (kTraps || !traps) {
      spin<kTraps>(empty[at.stage], at.parity ^ 1);
    } else if (!has_room(at)) {
      spin<true>(empty[at.stage], at.parity ^ 1);
    }
  }
  // Whether acquire would not wait now.
  CUTE_DEVICE bool has_room(Position at) {
    return ptx::mbarrier_test_wait(cute::cast_smem_ptr_to_uint(&empty[at.stage]), at.parity ^ 1);
  }
  CUTE_DEVICE void wait(Position at) { spin(full[at.stage], at.parity); }
  // Whether wait would not wait now.
  CUTE_DEVICE bool filled(Position at) {
    return ptx::mbarrier_test_wait(cute::cast_smem_ptr_to_uint(&full[at.stage]), at.parity);
  }
  CUTE_DEVICE void expect_bytes(Position at, uint32_t bytes) {
    full[at.stage].arrive_and_expect_tx(bytes);
  }
  CUTE_DEVICE void commit(Position at) { full[at.stage].arrive(); }
  // By lanes that release.
  CUTE_DEVICE void release(Position at) { empty[at.stage].arrive(); }
  CUTE_DEVICE uint64_t* full_barrier(Position at) {
    return reinterpret_cast<uint64_t*>(&full[at.stage]);
  }
};

}  // namespace etap
