// The k largest logits of a row, by one CTA or by a cluster's CTAs that share the row.
//
// 1. A warp has consecutive blocks of 128 logits, which it copies to shared memory. Meanwhile every CTA of the row looks at the
//    same 256 logits, and takes two of them as bounds that the k-th is likely to be between.
// 2. Each warp lists its logits from the lower bound on, in the order of their positions. What follows reads the lists, or, where
//    a warp's list has no room for them, all of the warp's logits again.
// 3. Each CTA counts keys in 128 bins, and sends the counts to all others; each finds the bin with the k-th key. Should it lie
//    below the lower bound, all logits are counted again; where the bin has many keys, its parts are.
// 4. The bin's keys, the candidates, go to a list in every CTA, which finds the k-th key among them.
// 5. Each warp counts what it takes, and writes it behind what lower positions take: positions ascend, and of equal keys the
//    lowest positions are taken, whatever the number of CTAs.
//
// The bounds only decide how much is read again. A phase has few instructions: they come from memory in every launch, which takes
// longer than what most of them do.

#include "common/pipeline.cuh"
#include "top_k/keys.cuh"
#include "top_k/top_k.h"

namespace etap::top_k {
namespace {

constexpr int kMostCtas = 8;  // the largest cluster that every Hopper GPU places
constexpr int kWarps = 16;    // all of them run most instructions: with more these take longer, with fewer the loads do
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockKeys = 128;
constexpr int kBlockSteps = kBlockKeys / kWarpSize;
constexpr int kStages = 4;       // blocks of a warp on their way
constexpr int kStagedKeys = kStages * kBlockKeys;
constexpr int kCandidates = 128;  // each is compared with all: another round takes less time than with more
constexpr int kCtaKeys = 2048;    // of a row that is shared
constexpr int kSamples = 256, kGroup = 4, kPivots = kSamples / kGroup;
constexpr int kTeam = kThreads / kPivots;  // lanes that compare one key with many
constexpr uint32_t kAllLanes = 0xffffffff;
static_assert(kBins == kWarpSize * 4 && kThreads >= kSamples && kWarps >= kMostCtas);

// Logits that a warp can list. Where many CTAs share a row each has few, and an SM with room for two finds place for a cluster sooner.
CUTE_HOST_DEVICE constexpr int list_length(int cluster) { return cluster >= 4 ? 512 : 1280; }

// The k-th key is in the interval, as the `wanted`-th from above of `inside`. The row's CTAs before this one have `lower_above` keys
// above the interval and `lower_inside` in it.
struct Search {
  Interval keys;
  int wanted, inside, lower_above, lower_inside;
};

struct Shared {
  float stages[kWarps][kStagedKeys];  // by position, modulo their number
  int32_t counts[2][kMostCtas][kBins];  // of two rounds: a CTA may be one ahead
  int32_t bins[kBins];
  int32_t candidates[kCandidates];
  int32_t pivots[kPivots];
  int2 taken[kWarps];  // above the interval, inside
  Barrier counts_there[2], candidates_there;
  int collected;
  Interval window;  // the k-th key is likely in it
  int32_t least;    // that is listed
  Search bin, key;  // found by a round, and among candidates
};
// Behind it the warps' lists lie, of logits and positions.
constexpr int shared_bytes(int cluster) { return int(sizeof(Shared) + kWarps * list_length(cluster) * sizeof(int2)); }
static_assert(sizeof(Shared) % sizeof(int2) == 0);

CUTE_DEVICE int lane_id() { return threadIdx.x % kWarpSize; }
CUTE_DEVICE int warp_id() { return threadIdx.x / kWarpSize; }
CUTE_DEVICE uint32_t ballot(bool x) { return __ballot_sync(kAllLanes, x); }
CUTE_DEVICE int lower_lanes(uint32_t lanes) { return __popc(lanes & ((1u << lane_id()) - 1)); }
CUTE_DEVICE int warp_sum(int x) { return int(__reduce_add_sync(kAllLanes, uint32_t(x))); }
CUTE_DEVICE int warp_scan(int x) {
  CUTE_UNROLL
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}
CUTE_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }
CUTE_DEVICE void send(int32_t* to, int32_t value, Barrier& there, int rank) {
  ptx::store_async(ptx::map_to_rank(shared_address(to), rank), value, ptx::map_to_rank(shared_address(&there), rank));
}

// A warp's part of a row, whole blocks but for the row's last one: its logits in the order of their positions, from its list or all.
struct Part {
  uint64_t logits;  // of the row
  int first, end;   // positions
  int2* const listed;
  const int room;
  int count = 0;
  bool all = false;

  CUTE_DEVICE Part(Shared& shared, const TopKParams& params, int row, int length, int ctas, int rank, int cluster)
      : logits(kept(uint64_t(__cvta_generic_to_global(params.logits + row * params.logits_stride)))),
        listed(reinterpret_cast<int2*>(&shared + 1) + warp_id() * list_length(cluster)),
        room(list_length(cluster)) {
    const int blocks = (length + kBlockKeys - 1) / kBlockKeys, share = (blocks + kWarps - 1) / kWarps;
    const int each = int(__fdividef(share - 0.5f, ctas)) + 1;  // share / ctas, rounded up: exact, as share <= 2^20, and 2 ulp are less than 0.5 / ctas
    const int block = min((rank * kWarps + warp_id()) * each, blocks);
    first = block * kBlockKeys;
    end = min(min(block + each, blocks) * kBlockKeys, length);
  }
  CUTE_DEVICE float load(int position) const { return ptx::load_float(logits + int64_t(position) * sizeof(float)); }
  // Each lane copies what it reads itself.
  CUTE_DEVICE void copy(Shared& shared, int block) const {
    if (block < end) {
      const uint32_t at = block + lane_id(), to = shared_address(&shared.stages[warp_id()][at % kStagedKeys]);
      const uint64_t from = logits + at * uint64_t(sizeof(float));
      CUTE_UNROLL
      for (int i = 0; i < kBlockKeys; i += kWarpSize) {
        if (int(at) + i < end) ptx::copy_async_4(to + i * sizeof(float), from + i * sizeof(float));
      }
    }
    ptx::commit_copies();
  }
  CUTE_DEVICE void use_all() {
    all = true;
    count = end - first;
  }
  // Lists what is not below a bound, if there is room.
  CUTE_DEVICE void list(Shared& shared, float bound) {
    int block = first;
#pragma unroll 1
    for (; block < end && count <= room - kBlockKeys; block += kBlockKeys) {
      ptx::wait_copies<kStages - 1>();
      const uint32_t at = block + lane_id();
      float stage[kBlockSteps] = {};
      CUTE_UNROLL
      for (int i = 0; i < kBlockSteps; ++i) {
        if (int(at) + i * kWarpSize < end) stage[i] = shared.stages[warp_id()][at % kStagedKeys + i * kWarpSize];
      }
      CUTE_UNROLL
      for (int i = 0; i < kBlockSteps; ++i) {
        const int position = int(at) + i * kWarpSize;
        const bool taken = position < end && !(stage[i] < bound);
        const uint32_t lanes = ballot(taken);
        if (taken) listed[count + lower_lanes(lanes)] = {__float_as_int(stage[i]), position};
        count += __popc(lanes);
      }
      copy(shared, block + kStagedKeys);
    }
    ptx::wait_copies<0>();
    __syncwarp();
    if (block < end) use_all();
  }
  // visit(key, position), by all lanes of a warp at a time.
  template <class Visit>
  CUTE_DEVICE void each(Visit&& visit) const {
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const int i = begin + lane_id(), there = min(i, count - 1);
      const int2 one = all ? int2{__float_as_int(load(first + there)), first + there} : listed[there];
      visit(i < count ? key_of(__int_as_float(one.x)) : kNoKey, one.y);
    }
  }
};

// How many of a list are above a key, and 2^16 times how many are equal to it; a team's lanes take turns.
template <bool kEqual, int kUnroll>
CUTE_DEVICE int compare(const int32_t* list, int count, int32_t key) {
  int sum = 0;
#pragma unroll kUnroll
  for (int i = threadIdx.x % kTeam; i < count; i += kTeam) {
    if (list[i] > key) ++sum;
    if (kEqual && list[i] == key) sum += 1 << 16;
  }
  CUTE_UNROLL
  for (int step = 1; step < kTeam; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// The bounds of the k-th key, by what ranks it may have among the highest of each four samples: a part q of all keys is taken, of
// which four have one with probability p. About four standard deviations on both sides.
CUTE_DEVICE void find_window(Shared& shared, float sample, int k, int length) {
  if (threadIdx.x < kSamples) {
    int32_t key = key_of(sample);
    for (int step = 1; step < kGroup; step *= 2) key = max(key, __shfl_xor_sync(kAllLanes, key, step));
    const int pivot = threadIdx.x / kGroup;
    if (threadIdx.x % kGroup == 0) shared.pivots[pivot] = (key & -kPivots) | pivot;  // no two are equal
  }
  const float rest = 1 - __fdividef(k, length), p = 1 - rest * rest * rest * rest;
  const float mean = kPivots * p, margin = 5 + 46 * p * (1 - p);
  const int low = int(mean + margin) + 1, high = min(max(int(mean - margin), 0), kPivots - 2);
  __syncthreads();
  const int32_t mine = shared.pivots[threadIdx.x / kTeam];
  const int rank = compare<false, kPivots / kTeam>(shared.pivots, kPivots, mine);
  if (rank == high) shared.window.hi = mine | (kPivots - 1);
  if (rank == min(low, kPivots - 1)) {
    shared.window.lo = max(mine & -kPivots, kLowest);
    shared.least = low < kPivots ? shared.window.lo : kLowest;
  }
  __syncthreads();
}

// One warp: the bin with the wanted key, from all CTAs' counts; none inside where they are too few. A lane has four bins.
CUTE_DEVICE Search find_bin(Search search, const Bins& bins, const int32_t* counts, int ctas, int rank) {
  const int4* const fours = reinterpret_cast<const int4*>(counts);
  int4 sum{};
  int lower = 0;
#pragma unroll 2
  for (int cta = 0; cta < ctas; ++cta) {
    const int4 x = fours[cta * kWarpSize + lane_id()];
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    if (cta < rank) lower += x.x + x.y + x.z + x.w;
  }
  const int two = sum.x + sum.y, three = two + sum.z, four = three + sum.w, scanned = warp_scan(four);
  const int wanted = search.wanted - (scanned - four), mine = (wanted > sum.x) + (wanted > two) + (wanted > three);
  const int holder = __ffs(int(ballot(scanned >= search.wanted))) - 1, which = __shfl_sync(kAllLanes, mine, holder);
  const int4 x = lane_id() < ctas && holder >= 0 ? fours[lane_id() * kWarpSize + holder] : int4{};  // of another CTA a lane
  const int above = (which > 0 ? x.x : 0) + (which > 1 ? x.y : 0) + (which > 2 ? x.z : 0);
  const int inside = which == 0 ? x.x : which == 1 ? x.y : which == 2 ? x.z : x.w;
  search.keys = bins.part(holder * 4 + which, search.keys);
  search.wanted = __shfl_sync(kAllLanes, wanted, holder) - warp_sum(above);
  search.inside = warp_sum(inside);
  search.lower_above += warp_sum((lane_id() < holder ? lower : 0) + (lane_id() < rank ? above : 0));
  search.lower_inside = warp_sum(lane_id() < rank ? inside : 0);
  return search;
}

// A bin with the k-th key, of which all keys are taken, or which has one key only, or few enough for the list.
CUTE_DEVICE Search search_row(Shared& shared, Part& part, int k, int ctas, int rank) {
  Search search{{shared.least, INT32_MAX}, k, 0, 0, 0};
  Bins bins = Bins::from(shared.window);
  ptx::cluster_wait();  // all CTAs have begun
#pragma unroll 1
  for (int round = 0;; ++round) {
    part.each([&](int32_t key, int) {
      if (search.keys.holds(key)) atomicAdd(&shared.bins[bins.bin_of(key)], 1);
    });
    __syncthreads();
    Barrier& there = shared.counts_there[round % 2];
    if (ctas > 1 && threadIdx.x == 0) there.arrive_and_expect_tx(ctas * sizeof(shared.bins));
    if (ctas > 1 && warp_id() < ctas) {
      CUTE_UNROLL
      for (int i = lane_id(); i < kBins; i += kWarpSize) send(&shared.counts[round % 2][rank][i], shared.bins[i], there, warp_id());
    }
    if (warp_id() == kWarps - 1) {
      if (ctas > 1) spin<true>(there, round / 2 % 2);
      const Search found = find_bin(search, bins, ctas > 1 ? shared.counts[round % 2][0] : shared.bins, ctas, rank);
      if (lane_id() == 0) shared.bin = found;
    }
    __syncthreads();
    if (shared.bin.inside == 0) {
      search.keys.lo = kLowest;
      part.use_all();
    } else {
      search = shared.bin;
      if (search.inside <= max(search.wanted, kCandidates) || search.keys.lo == search.keys.hi) return search;
      bins = Bins::from(search.keys);
    }
    if (threadIdx.x < kBins) shared.bins[threadIdx.x] = 0;
    __syncthreads();
  }
}

// The k-th key itself, from the candidates of all CTAs, those of the CTAs before first.
CUTE_DEVICE Search search_candidates(Shared& shared, const Part& part, const Search& search, int ctas) {
  part.each([&](int32_t key, int) {
    if (!search.keys.holds(key)) return;
    int32_t* const to = &shared.candidates[search.lower_inside + atomicAdd(&shared.collected, 1)];
    if (ctas == 1) *to = key;
#pragma unroll 1
    for (int cta = 0; cta < ctas && ctas > 1; ++cta) send(to, key, shared.candidates_there, cta);
  });
  if (ctas == 1) {
    __syncthreads();
  } else {
    if (threadIdx.x == 0) shared.candidates_there.arrive_and_expect_tx(search.inside * sizeof(int32_t));
    spin<true>(shared.candidates_there, 0);
  }
#pragma unroll 1
  for (int first = warp_id() * (kWarpSize / kTeam); first < search.inside; first += kThreads / kTeam) {
    const int32_t key = shared.candidates[min(first + lane_id() / kTeam, search.inside - 1)];
    const int sum = compare<true, 1>(shared.candidates, search.inside, key), above = sum & 0xffff, equal = sum >> 16;
    if (above < search.wanted && search.wanted <= above + equal) {
      shared.key = {{key, key}, search.wanted - above, equal, search.lower_above, 0};
    }
  }
  __syncthreads();
  return shared.key;
}

// A position, or its cache row; -1 for none, and past the block table.
CUTE_DEVICE void write(const TopKParams& params, int row, int index, int position) {
  if (params.block_table != nullptr && position >= 0) {
    const int32_t* const table = params.block_table + row / params.rows_per_table * params.table_stride;
    const uint32_t page = uint32_t(position) / uint32_t(params.page_size);
    position = page < params.table_width ? table[page] * params.page_size + int(position - page * params.page_size) : -1;
  }
  params.out[row * params.out_stride + index] = position;
}

// All above the interval, and of what is in it the `wanted` lowest positions. `listed` candidates are of the CTAs before.
CUTE_DEVICE void write_row(Shared& shared, const Part& part, const Search& search, int listed, const TopKParams& params, int row) {
  int above = 0, inside = 0;
  const auto count = [&](int32_t key, int) {
    above += key > search.keys.hi;
    inside += search.keys.holds(key);
  };
  part.each(count);
  above = warp_sum(above);
  inside = warp_sum(inside);
  if (lane_id() == 0) shared.taken[warp_id()] = {above, inside};
  __syncthreads();
  const int2 before = lane_id() < warp_id() ? shared.taken[lane_id()] : int2{};
  above = before.x;
  inside = before.y;
#pragma unroll 1
  for (int i = lane_id(); i < listed; i += kWarpSize) count(shared.candidates[i], 0);
  inside = search.lower_inside + warp_sum(inside);
  int index = search.lower_above + warp_sum(above) + min(inside, search.wanted);
  part.each([&](int32_t key, int position) {
    const bool holds = search.keys.holds(key);
    const uint32_t holding = ballot(holds);
    const bool takes = key > search.keys.hi || (holds && inside + lower_lanes(holding) < search.wanted);
    const uint32_t taking = ballot(takes);
    if (takes) write(params, row, index + lower_lanes(taking), position);
    inside += __popc(holding);
    index += __popc(taking);
  });
}

CUTE_DEVICE int length_of(const TopKParams& params, int row) {
  const int n = params.rows_per_length;
  const int length = n == 1 ? params.lengths[row] : params.lengths[row / n] - n + 1 + row % n;
  return max(min(length, params.width), 0);
}

__global__ void __launch_bounds__(kThreads, 1) top_k_kernel(const __grid_constant__ TopKParams params) {
  extern __shared__ __align__(16) char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const int cluster = int(ptx::cluster_size()), rank = int(ptx::cluster_rank());
  const int index = int(blockIdx.x) >> (__ffs(cluster) - 1), k = params.k;  // a cluster's size is a power of two
  if (threadIdx.x < kBins) shared.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.collected = 0;
    for (Barrier* barrier : {&shared.counts_there[0], &shared.counts_there[1], &shared.candidates_there}) barrier->init(1);
    cutlass::arch::fence_barrier_init();
  }
  ptx::cluster_arrive_relaxed();
  cudaTriggerProgrammaticLaunchCompletion();
  if (!params.early_lengths) cudaGridDependencySynchronize();
  const int length = length_of(params, index);
  cudaGridDependencySynchronize();
  const int ctas = min((length + kCtaKeys - 1) / kCtaKeys, cluster);
  if (length <= k || rank >= ctas) {
    ptx::cluster_wait();
#pragma unroll 1
    for (int i = rank * kThreads + threadIdx.x; length <= k && i < k; i += cluster * kThreads) write(params, index, i, i < length ? i : -1);
    return;
  }

  Part part(shared, params, index, length, ctas, rank, cluster);
  float sample = 0;  // one in each of as many parts of the row, at no fixed distance
  if (threadIdx.x < kSamples) sample = part.load(__umulhi(threadIdx.x << 24 | (threadIdx.x * 0x9e3779 & 0xffffff), length));
#pragma unroll 1
  for (int block = 0; block < kStagedKeys; block += kBlockKeys) part.copy(shared, part.first + block);
  find_window(shared, sample, k, length);
  part.list(shared, __int_as_float(ordered(shared.least)));  // NaN for the lowest keys, which nothing is below
  Search search = search_row(shared, part, k, ctas, rank);
  int listed = 0;
  if (search.inside > search.wanted && search.keys.lo < search.keys.hi) {
    listed = search.lower_inside;
    search = search_candidates(shared, part, search, ctas);
  }
  write_row(shared, part, search, listed, params, index);
}

KernelHandles handles;

}  // namespace
}  // namespace etap::top_k

namespace etap {

// As many CTAs a row as find an SM each, and no more than a row as wide as the logits has work for.
KernelLaunch prepare_top_k(const TopKParams& params, int num_sms) {
  using namespace top_k;
  int ctas = 1;
  while (ctas < kMostCtas && params.rows * ctas * 2 <= num_sms && params.width > ctas * kCtaKeys) ctas *= 2;
  const void* const function = reinterpret_cast<const void*>(top_k_kernel);
  return {function, "top_k_kernel", &handles, dim3(params.rows * ctas), kThreads, shared_bytes(ctas), ctas, shared_bytes(1)};
}

}  // namespace etap
