// This file says who does what in a CTA, and where its threads sync.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <type_traits>

#include "common/mark.h"
#include "common/pipeline.cuh"
#include "common/warp.cuh"

namespace etap {

// What a CTA of the kernel with traits T has in shared memory, and a place in its ring of keys.
template <class T>
using Shared = typename T::SharedStorage;
template <class T>
using KeyPosition = RingPosition<T::kStages>;

constexpr int kWarpsPerGroup = 4;
constexpr int kGroupThreads = kWarpSize * kWarpsPerGroup;
constexpr int kConsumerGroups = 2;
constexpr int kConsumerThreads = kConsumerGroups * kGroupThreads;
constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
constexpr int kDecodeThreads = kConsumerThreads + kGroupThreads;
constexpr int kQueryProducerThreads = kGroupThreads - kWarpSize;

// Warpgroups 0 and 1 are the consumers: they compute scores, softmax and output, merge, and write. The warps of warpgroup 2 are:
enum class WarpRole {
  kKeyProducer,    // the first warp, which brings the cache by TMA
  kQueryProducer,  // the second, which brings the query rows by TMA or, with its helpers, cp.async; see kernel.cuh for FP8 caches
  kQueryHelper,    // the third and fourth
};

CUTE_DEVICE WarpRole producer_role() {
  const int warp = cutlass::canonical_warp_idx_sync() % kWarpsPerGroup;
  return warp == 0 ? WarpRole::kKeyProducer : warp == 1 ? WarpRole::kQueryProducer : WarpRole::kQueryHelper;
}

// Calls `of` with a constant, the warpgroup: which registers of a fragment stay and which go must be known when compiling.
template <class Of>
CUTE_DEVICE void of_group(int group, Of&& of) {
  if (group == 0) {
    of(std::integral_constant<int, 0>{});
  } else {
    of(std::integral_constant<int, 1>{});
  }
}

// The first of the two rows that a thread holds of WGMMA's 64; the other is 8 behind it.
CUTE_DEVICE int fragment_row(int thread = threadIdx.x % kGroupThreads) {
  return thread / kWarpSize * 16 + thread % kWarpSize / 4;
}

// Registers of a thread: those of the launch, and what the warpgroups' roles change them to.
struct Registers {
  int launch;
  int producer;
  int consumer;
};

// These registers leave a block of combine room, so that all of it waits beside the decode kernel, and the next call's CTAs begin
// as soon as this one's end: see combine.cu. A block takes at most so much of shared memory, and CUDA takes so much for each block.
constexpr Registers kBesideCombination = {112, 32, 152};
constexpr int kCombinationBytes = 4608;
constexpr int kBlockBytes = 1024;

// Debug builds keep the registers of the launch, which are then as many as there are: sanitizers instrument code that setmaxnreg
// then leaves too few for. Kernels that would spill with them take theirs all the same (what memcheck does at a spill changes
// registers that a product may still read).
template <class T, bool kWholeTiles>
constexpr Registers registers() {
  constexpr Registers wanted = T::registers(kWholeTiles);
  static_assert(wanted.producer * kGroupThreads + wanted.consumer * kConsumerThreads <= wanted.launch * kDecodeThreads);
#ifdef ETAP_SPIN_LIMIT
  if constexpr (T::kFitsLaunchRegisters) return {168, 0, 0};
#endif
  return wanted;
}

template <class T, bool kWholeTiles, bool kConsumer>
CUTE_DEVICE void adjust_registers() {
  constexpr Registers wanted = registers<T, kWholeTiles>();
  constexpr int kOwn = kConsumer ? wanted.consumer : wanted.producer;
  if constexpr (kOwn > wanted.launch) {
    cutlass::arch::warpgroup_reg_alloc<kOwn>();
  } else if constexpr (kOwn > 0) {
    cutlass::arch::warpgroup_reg_dealloc<kOwn>();
  }
}

// A thread calls this before it reads what the predecessor may have written, and before it writes. Only then may the successor
// begin: combine reads the schedule as soon as it does.
CUTE_DEVICE void pdl_wait_then_trigger() {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

// A named barrier is named after the event that its threads wait for. Several events share a number where none of their threads can
// be one event ahead; 0 is __syncthreads'.
namespace event {

// Events of one consumer have numbers 2 and 3.
CUTE_DEVICE NamedBarrier of_consumer(int group) { return {2 + group, kGroupThreads}; }
CUTE_DEVICE NamedBarrier maxima_written(int group) { return of_consumer(group); }
CUTE_DEVICE NamedBarrier tail_zeroed(int group) { return of_consumer(group); }
CUTE_DEVICE NamedBarrier output_done(int group) { return of_consumer(group); }

// Events of both consumers have number 1.
CUTE_DEVICE NamedBarrier of_consumers() { return {1, kConsumerThreads}; }
CUTE_DEVICE NamedBarrier queries_written() { return of_consumers(); }
CUTE_DEVICE NamedBarrier sums_written() { return of_consumers(); }
CUTE_DEVICE NamedBarrier sums_read() { return of_consumers(); }
CUTE_DEVICE NamedBarrier halves_taken() { return of_consumers(); }
CUTE_DEVICE NamedBarrier factors_written() { return of_consumers(); }
CUTE_DEVICE NamedBarrier shares_written() { return of_consumers(); }

// Events of a tile are those of one consumer where tiles alternate, and of both where they share them.
template <class T>
CUTE_DEVICE NamedBarrier of_tile(int group) { return T::kAlternatingTiles ? of_consumer(group) : of_consumers(); }
template <class T>
CUTE_DEVICE NamedBarrier scores_read(int group) { return of_tile<T>(group); }
template <class T>
CUTE_DEVICE NamedBarrier probabilities_written(int group) { return of_tile<T>(group); }

// Both consumers sync over a tile of one of them at 4 and 5.
CUTE_DEVICE NamedBarrier tile_written(int owner) { return {4 + owner, kConsumerThreads}; }

// A warp and the same one of the other consumer sync at 4 to 11.
CUTE_DEVICE NamedBarrier row_probabilities_written(int owner) {
  return {4 + owner * kWarpsPerGroup + int(threadIdx.x % kGroupThreads / kWarpSize), 2 * kWarpSize};
}

}  // namespace event

}  // namespace etap
