// The k largest logits of a row, by one CTA or by a cluster's CTAs that share the row.
//
// 1. A warp has consecutive blocks of 128 logits, which it copies to shared memory. Meanwhile every CTA of the row looks at the
//    same 256 logits, and takes two of them as bounds that the k-th is likely to be between.
// 2. Each warp lists its logits from the lower bound on, in the order of their positions. What follows reads the lists, or, where
//    a warp's list is too short for them, all of the warp's logits again.
// 3. Each CTA counts keys in 128 bins, and gives the counts to all others. Behind a barrier each finds the bin with the k-th key.
//    Should it lie below the lower bound, all logits are counted again; where the bin has many keys, its parts are.
// 4. The bin's keys, the candidates, go to a list in every CTA. Behind a second barrier each finds the k-th key among them.
// 5. Each warp counts what it takes, and writes it behind what lower positions take: positions ascend, and of equal keys the
//    lowest positions are taken, whatever the number of CTAs.
//
// The bounds only decide how much is read again. There are no waits but barriers and those for a warp's own copies.
// A phase has few instructions: they come from memory in every launch, and this takes longer than what they do.
#include <algorithm>

#include "top_k/cluster.cuh"
#include "top_k/keys.cuh"
#include "top_k/top_k.h"

namespace etap::top_k {
namespace {

constexpr int kWarps = 16;  // fewer would wait longer for each other's instructions, more would have more of them
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockKeys = 128;
constexpr int kBlockSteps = kBlockKeys / kWarpSize;
constexpr int kStages = 8;            // blocks of a warp on their way
constexpr int kListed = 1024;         // logits in a warp's list: all that it has in flight
constexpr int kCandidates = 512;
constexpr int kAloneKeys = 8192;      // up to here a row has one CTA: to exchange counts would take longer
constexpr int kCtaKeys = 4096;        // of a longer row
constexpr int kSamples = 256, kGroup = 4, kPivots = kSamples / kGroup;
constexpr int kTeam = 8;              // lanes that compare one key with many
constexpr uint32_t kAllLanes = 0xffffffff;
static_assert(kBins == kWarpSize * 4 && kThreads == kPivots * kTeam && kWarps >= kMostCtas && kListed == kStages * kBlockKeys);

// The k-th key is in the interval, as the `wanted`-th from above of `inside`. The row's CTAs before this one have `lower_above` keys
// above the interval and `lower_inside` in it.
struct Search {
  Interval keys;
  int wanted;
  int inside;
  int lower_above;
  int lower_inside;
};

struct Shared {
  float stages[kWarps][kStages * kBlockKeys];  // a position's place does not depend on its row
  int2 lists[kWarps][kListed];  // logit and position
  int32_t counts[2][kMostCtas][kBins];  // of two rounds: a CTA may be one ahead
  int32_t bins[kBins];
  int32_t candidates[kCandidates];
  int32_t pivots[kPivots];
  int2 taken[kWarps];
  Barrier counts_there[2];
  Barrier candidates_there;
  int collected;
  Interval window;  // the k-th key is likely in it
  int32_t least;    // that is listed
  Search bin;  // that a round has found
  Search key;
};

CUTE_DEVICE int lane_id() { return threadIdx.x % kWarpSize; }
CUTE_DEVICE int warp_id() { return threadIdx.x / kWarpSize; }
CUTE_DEVICE uint32_t ballot(bool x) { return __ballot_sync(kAllLanes, x); }
CUTE_DEVICE int lower_lanes(uint32_t lanes) { return __popc(lanes & ((1u << lane_id()) - 1)); }
CUTE_DEVICE int warp_sum(int x) { return int(__reduce_add_sync(kAllLanes, uint32_t(x))); }

// Where results go.
struct Target {
  int32_t* out;
  const int32_t* table;  // null: positions
  int page_size;
  int table_width;

  CUTE_DEVICE Target(const TopKParams& params, int row)
      : out(params.out + row * params.out_stride), table(params.block_table), page_size(params.page_size),
        table_width(params.table_width) {
    if (table != nullptr) table += row / params.rows_per_table * params.table_stride;
  }
  CUTE_DEVICE void write(int index, int position) const {
    int entry = position;
    if (table != nullptr) {
      const uint32_t page = uint32_t(position) / uint32_t(page_size);
      entry = page < table_width ? table[page] * page_size + int(position - page * page_size) : -1;
    }
    out[index] = entry;
  }
};

// A row, and the positions that a warp has of it: blocks of 128, the row's last one may be shorter.
struct Row {
  uint64_t logits;
  int first;
  int end;

  CUTE_DEVICE Row(const TopKParams& params, int row, int length, int ctas, int rank)
      : logits(kept(params.logits + row * params.logits_stride)) {
    const int blocks = (length + kBlockKeys - 1) / kBlockKeys, share = (blocks + kWarps - 1) / kWarps;
    const int each = int(__fdividef(share - 0.5f, ctas)) + 1;  // share / ctas, rounded up: exact, as share < 2^22
    first = min((rank * kWarps + warp_id()) * each, blocks);
    end = min(min(first + each, blocks) * kBlockKeys, length);
    first *= kBlockKeys;
  }
  CUTE_DEVICE float load(int position) const { return load_float(logits + int64_t(position) * sizeof(float)); }
  // Each lane copies what it reads itself.
  CUTE_DEVICE void copy(Shared& shared, int block) const {
    const uint32_t at = block + lane_id();
    const int left = end - int(at);
    const uint64_t from = logits + at * uint64_t(sizeof(float));
    const uint32_t to = shared_address(&shared.stages[warp_id()][at % kListed]);
    CUTE_UNROLL
    for (int i = 0; i < kBlockKeys; i += kWarpSize) {
      if (i < left) copy_async_4(to + i * sizeof(float), from + i * sizeof(float));
    }
    end_of_group();
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
  const float rest = 1 - __fdividef(k, length), p = 1 - rest * rest * rest * rest, mean = kPivots * p;
  const float margin = 5 + 46 * p * (1 - p);
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

// A warp's logits in the order of their positions: those of its list, or all.
struct Keys {
  const Row& row;
  bool all = false;
  int count = 0;

  // Lists what is not below a bound, if there is room.
  CUTE_DEVICE Keys(Shared& shared, const Row& row, float bound) : row(row) {
    const float* const stages = shared.stages[warp_id()];
    int2* const list = shared.lists[warp_id()];
    int block = row.first;
#pragma unroll 1
    for (; block < row.end && count <= kListed - kBlockKeys; block += kBlockKeys) {
      wait_for_groups<kStages - 1>();
      const uint32_t at = block + lane_id();
      const int left = row.end - int(at);
      float logits[kBlockSteps] = {};
      CUTE_UNROLL
      for (int i = 0; i < kBlockSteps; ++i) {
        if (i * kWarpSize < left) logits[i] = stages[at % kListed + i * kWarpSize];
      }
      CUTE_UNROLL
      for (int i = 0; i < kBlockSteps; ++i) {
        const bool listed = i * kWarpSize < left && !(logits[i] < bound);
        const uint32_t lanes = ballot(listed);
        if (listed) list[count + lower_lanes(lanes)] = {__float_as_int(logits[i]), int(at) + i * kWarpSize};
        count += __popc(lanes);
      }
      row.copy(shared, block + kStages * kBlockKeys);
    }
    wait_for_groups<0>();
    __syncwarp();
    if (block < row.end) use_all();
  }
  CUTE_DEVICE void use_all() {
    all = true;
    count = row.end - row.first;
  }
  // visit(key, position), by all lanes of a warp at a time.
  template <class Visit>
  CUTE_DEVICE void each(const Shared& shared, Visit&& visit) const {
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const int i = begin + lane_id();
      int2 one{0, row.first + i};
      if (i < count) {
        if (all) {
          one.x = __float_as_int(row.load(one.y));
        } else {
          one = shared.lists[warp_id()][i];
        }
      }
      visit(i < count ? key_of(__int_as_float(one.x)) : kNoKey, one.y);
    }
  }
};

// The sum over the lanes up to this one.
CUTE_DEVICE int warp_scan(int x) {
  CUTE_UNROLL
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}

// One warp: the bin with the wanted key, from all CTAs' counts; none inside where they are too few. A lane has four bins.
CUTE_DEVICE void find_bin(Shared& shared, Search search, const Bins& bins, const int32_t* counts, int ctas, int rank) {
  const int4* const fours = reinterpret_cast<const int4*>(counts);
  int4 sum{};
  int lower = 0;
#pragma unroll 2
  for (int cta = 0; cta < ctas; ++cta) {
    const int4 x = fours[cta * kWarpSize + lane_id()];
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    if (cta < rank) lower += x.x + x.y + x.z + x.w;
  }
  const int two = sum.x + sum.y, three = two + sum.z, all = three + sum.w, scanned = warp_scan(all);
  const int wanted = search.wanted - (scanned - all), mine = (wanted > sum.x) + (wanted > two) + (wanted > three);
  const uint32_t reached = ballot(scanned >= search.wanted);
  const int holder = __ffs(int(reached)) - 1;
  search.inside = 0;
  if (reached != 0) {
    const int which = __shfl_sync(kAllLanes, mine, holder);
    const int4 x = lane_id() < ctas ? fours[lane_id() * kWarpSize + holder] : int4{};  // of another CTA a lane
    const int above = (which > 0 ? x.x : 0) + (which > 1 ? x.y : 0) + (which > 2 ? x.z : 0);
    const int inside = which == 0 ? x.x : which == 1 ? x.y : which == 2 ? x.z : x.w;
    search.keys = bins.part(holder * 4 + which, search.keys);
    search.wanted = __shfl_sync(kAllLanes, wanted, holder) - warp_sum(above);
    search.inside = warp_sum(inside);
    search.lower_above += warp_sum((lane_id() < holder ? lower : 0) + (lane_id() < rank ? above : 0));
    search.lower_inside = warp_sum(lane_id() < rank ? inside : 0);
  }
  if (lane_id() == 0) shared.bin = search;
}

// A bin with the k-th key, of which all keys are taken, or which has one key only, or few enough for the list.
CUTE_DEVICE Search search_row(Shared& shared, Keys& keys, int k, int ctas, int rank) {
  Search search{{shared.least, INT32_MAX}, k, 0, 0, 0};
  Bins bins = Bins::from(shared.window);
  ptx::cluster_wait();  // all CTAs have begun
#pragma unroll 1
  for (int round = 0;; ++round) {
    keys.each(shared, [&](int32_t key, int) {
      if (search.keys.holds(key)) atomicAdd(&shared.bins[bins.bin_of(key)], 1);
    });
    __syncthreads();
    Barrier& there = shared.counts_there[round % 2];
    if (ctas > 1) {
      if (threadIdx.x == 0) there.arrive_and_expect_tx(ctas * sizeof(shared.bins));
      if (warp_id() < ctas) {
        CUTE_UNROLL
        for (int i = lane_id(); i < kBins; i += kWarpSize) send(&shared.counts[round % 2][rank][i], there, warp_id(), shared.bins[i]);
      }
    }
    if (warp_id() == kWarps - 1) {
      if (ctas > 1) spin<true>(there, round / 2 % 2);
      find_bin(shared, search, bins, ctas > 1 ? shared.counts[round % 2][0] : shared.bins, ctas, rank);
    }
    __syncthreads();
    if (shared.bin.inside == 0) {
      search.keys.lo = kLowest;
      keys.use_all();
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
CUTE_DEVICE void search_candidates(Shared& shared, const Keys& keys, const Search& search, int ctas) {
  keys.each(shared, [&](int32_t key, int) {
    if (!search.keys.holds(key)) return;
    int32_t* const to = &shared.candidates[search.lower_inside + atomicAdd(&shared.collected, 1)];
    if (ctas == 1) {
      *to = key;
      return;
    }
#pragma unroll 1
    for (int cta = 0; cta < ctas; ++cta) send(to, shared.candidates_there, cta, key);
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
}

// All above the interval, and of what is in it the `wanted` lowest positions. `listed` candidates are of the CTAs before.
CUTE_DEVICE void write_row(Shared& shared, const Keys& keys, const Search& search, int listed, const Target& target) {
  int above = 0, inside = 0;
  keys.each(shared, [&](int32_t key, int) {
    above += key > search.keys.hi;
    inside += search.keys.holds(key);
  });
  above = warp_sum(above);
  inside = warp_sum(inside);
  if (lane_id() == 0) shared.taken[warp_id()] = {above, inside};
  __syncthreads();
  const int2 before = lane_id() < warp_id() ? shared.taken[lane_id()] : int2{0, 0};
  above = before.x;
  inside = before.y;
#pragma unroll 1
  for (int i = lane_id(); i < listed; i += kWarpSize) {
    above += shared.candidates[i] > search.keys.hi;
    inside += search.keys.holds(shared.candidates[i]);
  }
  inside = search.lower_inside + warp_sum(inside);
  int index = search.lower_above + warp_sum(above) + min(inside, search.wanted);
  keys.each(shared, [&](int32_t key, int position) {
    bool takes = key > search.keys.hi;
    const bool holds = search.keys.holds(key);
    if (const uint32_t lanes = ballot(holds); lanes != 0) {
      takes |= holds && inside + lower_lanes(lanes) < search.wanted;
      inside += __popc(lanes);
    }
    const uint32_t lanes = ballot(takes);
    if (takes) target.write(index + lower_lanes(lanes), position);
    index += __popc(lanes);
  });
}

// A row of at most k keys: all of them, and -1 behind.
CUTE_DEVICE void write_whole_row(const Target& target, int length, int k, int ctas, int rank) {
#pragma unroll 1
  for (int i = rank * kThreads + int(threadIdx.x); i < k; i += ctas * kThreads) {
    if (i < length) {
      target.write(i, i);
    } else {
      target.out[i] = -1;
    }
  }
}

CUTE_DEVICE int length_of(const TopKParams& params, int row) {
  const int n = params.rows_per_length;
  const int length = n == 1 ? params.lengths[row] : params.lengths[row / n] - n + 1 + row % n;
  return max(min(length, params.width), 0);
}

__global__ void __launch_bounds__(kThreads, 1) top_k_kernel(const __grid_constant__ TopKParams params) {
  extern __shared__ __align__(16) char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int cluster = int(ptx::cluster_size()), rank = int(ptx::cluster_rank());  // a power of two
  const int index = int(blockIdx.x) >> (__ffs(cluster) - 1);
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
  const int ctas = length <= kAloneKeys ? 1 : min((length + kCtaKeys - 1) / kCtaKeys, cluster);
  if (length <= params.k || rank >= ctas) {
    ptx::cluster_wait();
    if (length <= params.k) write_whole_row(Target(params, index), length, params.k, cluster, rank);
    return;
  }

  const Row row(params, index, length, ctas, rank);
  float sample = 0;
  if (threadIdx.x < kSamples) {  // one in each of as many parts of the row, at no fixed distance
    sample = row.load(__umulhi(threadIdx.x << 24 | (threadIdx.x * 0x9e3779 & 0xffffff), length));
  }
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) row.copy(shared, row.first + i * kBlockKeys);
  find_window(shared, sample, params.k, length);
  Keys keys(shared, row, bound_of(shared.least));
  Search search = search_row(shared, keys, params.k, ctas, rank);
  int listed = 0;
  if (search.inside > search.wanted && search.keys.lo < search.keys.hi) {
    search_candidates(shared, keys, search, ctas);
    listed = search.lower_inside;
    search = shared.key;
  }
  write_row(shared, keys, search, listed, Target(params, index));
}

KernelHandles handles;

}  // namespace
}  // namespace etap::top_k

namespace etap {

// As many CTAs a row as find an SM each, and no more than a row as wide as the logits has work for.
KernelLaunch prepare_top_k(const TopKParams& params, int num_sms) {
  using namespace top_k;
  int ctas = 1;
  while (ctas < kMostCtas && params.rows * ctas * 2 <= num_sms && params.width > std::max(kAloneKeys, ctas * kCtaKeys)) ctas *= 2;
  return {reinterpret_cast<const void*>(top_k_kernel), "top_k_kernel", &handles, dim3(params.rows * ctas), kThreads, sizeof(Shared), ctas};
}

}  // namespace etap
