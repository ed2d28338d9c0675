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

// One thread of each warp of a CTA sets up some of its barriers. The lanes of a single warp would do it one after the other, and all
// that a CTA does waits for it.
constexpr int kSetupWarps = 12;

// Calls of(i) for those of kCount barriers that this warp sets up.
template <int kCount, class Of>
CUTE_DEVICE void each_of_warp(int warp, Of&& of) {
  CUTE_UNROLL
  for (int first = 0; first < kCount; first += kSetupWarps) {
    if (first + warp < kCount) of(first + warp);
  }
}

// A wait with patience looks at the clock behind so many tries, and gives up when its upper half has gone up so often: after 9 to 11
// seconds at 1.98 GHz.
constexpr int kFirstTries = 256;
constexpr uint32_t kPatience = 5;

// Waits for a phase of a barrier. A deadlock ends in a trap, which the host sees as a failed launch, instead of holding the GPU for
// ever. kPatient says where that is looked for: there must be registers for it, time for its instructions, and one such wait
// suffices that every deadlock meets. Time counts from the predecessor's end, which may take as long as it likes: what such a wait waits
// for comes behind that. Debug builds count tries at every wait.
template <bool kPatient = false>
CUTE_DEVICE void spin(Barrier& barrier, uint32_t parity) {
  const uint32_t address = cute::cast_smem_ptr_to_uint(&barrier);
#ifdef ETAP_SPIN_LIMIT
  for (uint32_t tries = 1; !ptx::mbarrier_try_wait(address, parity); ++tries) {
    if (tries > ETAP_SPIN_LIMIT) __trap();
  }
#else
  if constexpr (kPatient) {
    // One register at a time: first the tries, then the clock.
#pragma unroll 1
    for (int tries = kFirstTries; tries > 0; --tries) {
      if (ptx::mbarrier_try_wait(address, parity)) return;
    }
    cudaGridDependencySynchronize();
    const uint32_t begin = ptx::clock_high();
    while (!ptx::mbarrier_try_wait(address, parity)) {
      if (ptx::clock_high() - begin >= kPatience) __trap();
    }
  } else {
    while (!ptx::mbarrier_try_wait(address, parity)) {
    }
  }
#endif
}

// A hardware barrier of part of a CTA, by number. Each sync orders its threads' accesses to memory before and behind it.
struct NamedBarrier {
  int number;
  int threads;

  CUTE_DEVICE void sync() const { ptx::barrier_sync(number, threads); }
  // Without waiting, for those who only hand over to others that meet. Debug builds meet, too: racecheck takes no arrival without a
  // wait.
  CUTE_DEVICE void hand_over() const {
#ifdef ETAP_SPIN_LIMIT
    meet();
#else
    ptx::barrier_arrive(number, threads);
#endif
  }
  // True for all when any passed true.
  CUTE_DEVICE bool any(bool value) const { return ptx::barrier_any(value, number, threads); }
  // Where threads read what others have just written. Debug builds meet twice: racecheck takes some accesses right behind a
  // named barrier of part of the CTA for earlier ones.
  CUTE_DEVICE void meet() const {
    sync();
#ifdef ETAP_SPIN_LIMIT
    sync();
#endif
  }
};

// Numbered events for one waiter, who may be up to kTurns behind: they take the barriers in turn. Each has happened when all
// of its signals were given.
template <int kTurns, bool kPatient>
struct Turns {
  Barrier barriers[kTurns];

  CUTE_DEVICE void init(uint32_t turn, int signals) { barriers[turn].init(signals); }
  CUTE_DEVICE void signal(uint32_t turn) { barriers[turn % kTurns].arrive(); }
  CUTE_DEVICE void wait(uint32_t turn) { spin<kPatient>(barriers[turn % kTurns], turn / kTurns % 2); }
};

// One lane of a warp in step releases for all. In debug builds each does for itself: racecheck does not see that what the others
// have read or written comes before it.
#ifdef ETAP_SPIN_LIMIT
constexpr int kReleasingLanes = kWarpSize;
#else
constexpr int kReleasingLanes = 1;
#endif
CUTE_DEVICE bool releases() { return threadIdx.x % kWarpSize < kReleasingLanes; }

// One full and one empty barrier a stage. The producer acquires, fills and commits; consumers wait and release. kPatient: of the
// producer, see spin.
template <int kStages, bool kPatient = true>
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
  CUTE_DEVICE void acquire(Position at) { spin<kPatient>(empty[at.stage], at.parity ^ 1); }
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
