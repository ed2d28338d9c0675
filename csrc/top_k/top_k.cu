// The k largest logits of a row, by a cluster of CTAs that holds the row in registers.
//
// 1. Each CTA counts its keys in 4096 bins (keys.cuh) in shared memory, and gives every CTA of the cluster the sums of 32 groups.
// 2. Behind a barrier of the cluster each finds the group with the k-th key, reads that group's bins from all CTAs, and finds
//    the bin. Where it holds more keys than the list takes, they are counted again in parts of the bin: at most three times,
//    until the parts are single keys.
// 3. The bin's keys, the candidates, go to a list in every CTA. Behind the second barrier each finds the k-th key in it, how
//    many equal ones are taken, and how many of both the CTAs with lower positions have.
// 4. Each warp counts what it takes, and writes it behind what lower positions take: positions ascend, and of equal keys the
//    lowest positions are taken, whatever the number of CTAs.
//
// A warp has consecutive blocks of 128 keys. What lies behind the row's end counts as the lowest key: it is behind all others, and
// a row of more than k keys never takes it. There are no waits but barriers.
#include <algorithm>

#include "common/warp.cuh"
#include "top_k/cluster.cuh"
#include "top_k/keys.cuh"
#include "top_k/top_k.h"

namespace etap::top_k {
namespace {

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kVectorKeys = 4;
constexpr int kBlockKeys = kWarpSize * kVectorKeys;
constexpr int kVectors = 4;  // of a lane, in registers
constexpr int kGroupBins = kBins / kWarpSize;  // as many as a warp has lanes, four bins a lane
constexpr int kBinBits = 12;
constexpr int kListKeys = 2048;
constexpr int kDigitBits = 10;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kFew = 128;  // candidates that are compared with each other
constexpr uint32_t kAllLanes = 0xffffffff;
static_assert(kBins == 1 << kBinBits && kBins == kThreads * 4 && kGroupBins == kWarpSize * 4 && kDigits == kThreads);

// Where the k-th key is: in `interval`, as the `wanted`-th from above of `inside`. The row's CTAs before this one have `lower_above`
// keys above the interval and `lower_inside` in it.
struct Search {
  Interval interval;
  int wanted;
  int inside;
  int lower_above;
  int lower_inside;
};

// The k-th key, how many equal ones are taken and are there, and what the CTAs before have above it and equal.
struct Threshold {
  int32_t key;
  int taken;
  int equal;
  int lower_above;
  int lower_equal;
};

struct Shared {
  int32_t bins[kBins];
  int32_t groups[kMostCtas][kWarpSize];
  int32_t list[kListKeys];
  int32_t digits[kDigits];
  int32_t warp_sums[2][kWarps];
  int collected;
  int bin;
  Search search;
  Threshold threshold;
};

// The row of a CTA, and the blocks of a warp.
struct Row {
  const float* logits;
  int length;
  bool aligned;
  int first;  // block
  int end;

  CUTE_DEVICE int4 load(int block) const {
    const int at = block * kBlockKeys + int(threadIdx.x) % kWarpSize * kVectorKeys;
    float4 x;
    ptx::load_if(aligned && at + kVectorKeys <= length, logits + at, x);
    if (!aligned || (at < length && at + kVectorKeys > length)) {
      x.x = at < length ? logits[at] : 0;
      x.y = at + 1 < length ? logits[at + 1] : 0;
      x.z = at + 2 < length ? logits[at + 2] : 0;
      x.w = at + 3 < length ? logits[at + 3] : 0;
    }
    return {at < length ? key_of(x.x) : kLowest, at + 1 < length ? key_of(x.y) : kLowest,
            at + 2 < length ? key_of(x.z) : kLowest, at + 3 < length ? key_of(x.w) : kLowest};
  }
};

// A warp's keys, in registers where they are no more than these hold.
struct Keys {
  const Row& row;
  int4 held[kVectors];

  CUTE_DEVICE void load(int first) {
    CUTE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if (first + j < row.end) held[j] = row.load(first + j);
    }
  }
  // visit(four keys, position of the first), by all lanes of a warp at a time, in the order of positions.
  template <class Visit>
  CUTE_DEVICE void each(Visit&& visit) {
    const bool all_held = row.end - row.first <= kVectors;
#pragma unroll 1
    for (int first = row.first; first < row.end; first += kVectors) {
      if (!all_held) load(first);
      CUTE_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        if (first + j < row.end) {
          visit(held[j], (first + j) * kBlockKeys + int(threadIdx.x) % kWarpSize * kVectorKeys);
        }
      }
    }
  }
  template <class Visit>
  CUTE_DEVICE void each_key(Visit&& visit) {
    each([&](const int4& keys, int) {
      visit(keys.x);
      visit(keys.y);
      visit(keys.z);
      visit(keys.w);
    });
  }
};

CUTE_DEVICE int lane_id() { return threadIdx.x % kWarpSize; }
CUTE_DEVICE int sum_of(const int4& x) { return x.x + x.y + x.z + x.w; }
CUTE_DEVICE int warp_sum(int x) { return int(__reduce_add_sync(kAllLanes, uint32_t(x))); }

// The sum over the lanes up to this one.
CUTE_DEVICE int warp_scan(int x) {
  CUTE_UNROLL
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}

// The first lane with which the sum of x reaches `wanted`; `above` becomes the sum before it.
CUTE_DEVICE int lane_reaching(int x, int wanted, int& above) {
  const int scanned = warp_scan(x);
  const int lane = __ffs(int(__ballot_sync(kAllLanes, scanned >= wanted))) - 1;
  above = __shfl_sync(kAllLanes, scanned - x, lane);
  return lane;
}

// One warp: the bin with the wanted key, from all CTAs' bins. Writes it, and what it says of the search.
CUTE_DEVICE void find_bin(Shared& shared, const Search& search, int ctas, int rank) {
  const int lane = lane_id();
  int group_sum = 0, group_lower = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    const int sum = shared.groups[cta][lane];
    group_sum += sum;
    group_lower += cta < rank ? sum : 0;
  }
  int above;
  const int group = lane_reaching(group_sum, search.wanted, above);
  const int lower = warp_sum(lane < group ? group_lower : 0);

  const int first_bin = group * kGroupBins + lane * 4;
  int sums[4] = {}, lowers[4] = {};
  CUTE_UNROLL
  for (int cta = 0; cta < kMostCtas; ++cta) {
    if (cta < ctas) {
      const int4 x = load_at_rank(&shared.bins[first_bin], cta);
      const int counts[4] = {x.x, x.y, x.z, x.w};
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[i] += counts[i];
        lowers[i] += cta < rank ? counts[i] : 0;
      }
    }
  }
  int lane_above;
  const int sum = sums[0] + sums[1] + sums[2] + sums[3];
  const int holder = lane_reaching(sum, search.wanted - above, lane_above);
  int lower_above = lower + warp_sum(lane < holder ? lowers[0] + lowers[1] + lowers[2] + lowers[3] : 0);
  if (lane != holder) return;
  above += lane_above;
  bool found = false;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (found) continue;
    found = above + sums[i] >= search.wanted;
    if (found) {
      shared.bin = first_bin + i;
      shared.search = {search.interval, search.wanted - above, sums[i], search.lower_above + lower_above, lowers[i]};
    } else {
      above += sums[i];
      lower_above += lowers[i];
    }
  }
}

// Each warp sums a group of bins, and tells every CTA; then the wanted key's bin is found.
CUTE_DEVICE void search_bins(Shared& shared, const Search& search, int ctas, int rank) {
  const int warp = threadIdx.x / kWarpSize;
  const int sum = warp_sum(sum_of(reinterpret_cast<const int4*>(shared.bins)[threadIdx.x]));
  if (lane_id() < ctas) store_at_rank(&shared.groups[rank][warp], lane_id(), sum);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (warp == 0) find_bin(shared, search, ctas, rank);
  __syncthreads();
}

// The interval of the bin that the k-th key is in, or of a part of it that the list takes.
CUTE_DEVICE Search search_row(Shared& shared, Keys& keys, int k, int ctas, int rank) {
  keys.each_key([&](int32_t key) { atomicAdd(&shared.bins[bin_of(key)], 1); });
  __syncthreads();
  ptx::cluster_wait();  // all CTAs have begun
  search_bins(shared, {{}, k, 0, 0, 0}, ctas, rank);
  Search search = shared.search;
  search.interval = interval_of(shared.bin);
#pragma unroll 1
  while (search.inside > kListKeys && search.interval.last > 0) {
    const Interval within = search.interval;
    const int shift = max(within.bits() - kBinBits, 0);
    ptx::cluster_arrive();  // the others have read this CTA's bins
    ptx::cluster_wait();
    reinterpret_cast<int4*>(shared.bins)[threadIdx.x] = {};
    __syncthreads();
    keys.each_key([&](int32_t key) {
      const uint32_t digit = (uint32_t(key) - uint32_t(within.lo)) >> shift;
      if (within.holds(key)) atomicAdd(&shared.bins[kBins - 1 - digit], 1);
    });
    __syncthreads();
    search_bins(shared, search, ctas, rank);
    search = shared.search;
    search.interval = within.part(kBins - 1 - shared.bin, shift);
  }
  return search;
}

// Every key of the interval into the lists of all CTAs, those of the CTAs before first.
CUTE_DEVICE void collect(Shared& shared, Keys& keys, const Search& search, int ctas) {
  keys.each_key([&](int32_t key) {
    if (!search.interval.holds(key)) return;
    const int32_t* to = &shared.list[search.lower_inside + atomicAdd(&shared.collected, 1)];
    for (int cta = 0; cta < ctas; ++cta) store_at_rank(to, cta, key);
  });
}

// The wanted key among few: each is compared with all, by eight lanes.
CUTE_DEVICE void find_among_few(Shared& shared, const Search& search) {
  constexpr int kLanes = kThreads / kFew;
  const int i = threadIdx.x / kLanes;
  if (threadIdx.x / kWarpSize * (kWarpSize / kLanes) >= search.inside) return;
  const int32_t key = shared.list[min(i, search.inside - 1)];
  int above = 0, equal = 0;
#pragma unroll 4
  for (int other = threadIdx.x % kLanes; other < search.inside; other += kLanes) {
    above += shared.list[other] > key;
    equal += shared.list[other] == key;
  }
  CUTE_UNROLL
  for (int step = 1; step < kLanes; step *= 2) {
    above += __shfl_xor_sync(kAllLanes, above, step);
    equal += __shfl_xor_sync(kAllLanes, equal, step);
  }
  if (above < search.wanted && search.wanted <= above + equal) shared.threshold = {key, search.wanted - above, equal, 0, 0};
}

// The wanted key in the list, digit by digit.
CUTE_DEVICE void find_in_list(Shared& shared, const Search& search) {
  const int warp = threadIdx.x / kWarpSize;
  Interval within = search.interval;
  int wanted = search.wanted, equal = search.inside;
#pragma unroll 1
  while (within.last > 0) {
    const int shift = max(within.bits() - kDigitBits, 0);
    shared.digits[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < search.inside; i += kThreads) {
      const int32_t key = shared.list[i];
      if (within.holds(key)) {
        atomicAdd(&shared.digits[kDigits - 1 - ((uint32_t(key) - uint32_t(within.lo)) >> shift)], 1);
      }
    }
    __syncthreads();
    const int count = shared.digits[threadIdx.x], sum = warp_sum(count);
    if (lane_id() == 0) shared.warp_sums[0][warp] = sum;
    __syncthreads();
    int above, lane_above;
    const int holder = lane_reaching(shared.warp_sums[0][lane_id()], wanted, above);
    const int lane = lane_reaching(shared.digits[holder * kWarpSize + lane_id()], wanted - above, lane_above);
    equal = shared.digits[holder * kWarpSize + lane];
    wanted -= above + lane_above;
    within = within.part(kDigits - 1 - (holder * kWarpSize + lane), shift);
    __syncthreads();
  }
  if (threadIdx.x == 0) shared.threshold = {within.lo, wanted, equal, 0, 0};
}

// What the CTAs before have in the list above the threshold and equal to it, added up in shared memory.
CUTE_DEVICE void count_lower(Shared& shared, const Search& search, int32_t key) {
  int above = 0, equal = 0;
  for (int i = threadIdx.x; i < search.lower_inside; i += kThreads) {
    above += shared.list[i] > key;
    equal += shared.list[i] == key;
  }
  if (threadIdx.x / kWarpSize * kWarpSize >= search.lower_inside) return;
  above = warp_sum(above);
  equal = warp_sum(equal);
  if (lane_id() == 0) {
    atomicAdd(&shared.threshold.lower_above, above);
    atomicAdd(&shared.threshold.lower_equal, equal);
  }
}

// Where results go.
struct Target {
  int32_t* out;
  const int32_t* table;  // null: positions
  int page_size;
  int table_width;

  CUTE_DEVICE void write(int index, int position) const {
    int entry = position;
    if (table != nullptr) {
      const int page = position / page_size;
      entry = page < table_width ? table[page] * page_size + position % page_size : -1;
    }
    out[index] = entry;
  }
};

// A lane's share of four neighbouring keys: which are set, and how many of lower positions in the warp.
struct Flags {
  bool set[4];
  int lower;
  int all;

  CUTE_DEVICE static Flags of(bool a, bool b, bool c, bool d) {
    const int count = int(a) + int(b) + int(c) + int(d);
    Flags flags{{a, b, c, d}, 0, 0};
    const uint32_t lower_lanes = (1u << lane_id()) - 1;
    CUTE_UNROLL
    for (int bit = 0; bit < 3; ++bit) {
      const uint32_t lanes = __ballot_sync(kAllLanes, (count >> bit & 1) != 0);
      flags.lower += __popc(lanes & lower_lanes) << bit;
      flags.all += __popc(lanes) << bit;
    }
    return flags;
  }
};

// Keys of at least `least` are taken, and of those equal to `key` the `taken` lowest positions.
struct Selection {
  int32_t least;
  int32_t key;
  int taken;  // 0: `least` says all
};

CUTE_DEVICE void write_row(Shared& shared, Keys& keys, const Selection& selection, int lower_above, int lower_equal,
                           const Target& target) {
  const int warp = threadIdx.x / kWarpSize;
  int above = 0, equal = 0;
  keys.each_key([&](int32_t key) {
    above += key >= selection.least;
    equal += selection.taken > 0 && key == selection.key;
  });
  above = warp_sum(above);
  equal = warp_sum(equal);
  if (lane_id() == 0) {
    shared.warp_sums[0][warp] = above;
    shared.warp_sums[1][warp] = equal;
  }
  __syncthreads();
  const bool nothing = above + equal == 0;
  if (nothing) return;
  above = lower_above + warp_sum(lane_id() < warp ? shared.warp_sums[0][lane_id()] : 0);
  equal = lower_equal + warp_sum(lane_id() < warp ? shared.warp_sums[1][lane_id()] : 0);
  keys.each([&](const int4& four, int position) {
    const int32_t of[4] = {four.x, four.y, four.z, four.w};
    const Flags higher = Flags::of(of[0] >= selection.least, of[1] >= selection.least, of[2] >= selection.least,
                                   of[3] >= selection.least);
    if (selection.taken == 0) {
      int index = above + higher.lower;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (higher.set[i]) target.write(index++, position + i);
      }
      above += higher.all;
      return;
    }
    const Flags same = Flags::of(of[0] == selection.key, of[1] == selection.key, of[2] == selection.key, of[3] == selection.key);
    int index_above = above + higher.lower, index_equal = equal + same.lower;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const bool takes = higher.set[i] || (same.set[i] && index_equal < selection.taken);
      if (takes) target.write(index_above + min(index_equal, selection.taken), position + i);
      index_above += higher.set[i];
      index_equal += same.set[i];
    }
    above += higher.all;
    equal += same.all;
  });
}

// A row of at most k keys: all of them, and -1 behind.
CUTE_DEVICE void write_whole_row(const Target& target, int length, int k, int ctas, int rank) {
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
  __shared__ __align__(16) Shared shared;
  const int ctas = int(ptx::cluster_size()), rank = int(ptx::cluster_rank());
  const int index = int(blockIdx.x) / ctas, warp = threadIdx.x / kWarpSize;
  reinterpret_cast<int4*>(shared.bins)[threadIdx.x] = {};
  if (threadIdx.x == 0) shared.collected = 0;
  ptx::cluster_arrive();
  cudaTriggerProgrammaticLaunchCompletion();
  if (!params.early_lengths) cudaGridDependencySynchronize();
  const int length = length_of(params, index);
  cudaGridDependencySynchronize();
  const Target target{params.out + index * params.out_stride,
                      params.block_table == nullptr
                          ? nullptr
                          : params.block_table + index / params.rows_per_table * params.table_stride,
                      params.page_size, params.table_width};
  if (length <= params.k) {
    ptx::cluster_wait();
    return write_whole_row(target, length, params.k, ctas, rank);
  }

  const int64_t blocks = (length + kBlockKeys - 1) / kBlockKeys;
  const int place = rank * kWarps + warp, places = ctas * kWarps;
  const Row row{params.logits + index * params.logits_stride, length, params.aligned, int(place * blocks / places),
                int((place + 1) * blocks / places)};
  Keys keys{row};
  if (row.end - row.first <= kVectors) keys.load(row.first);
  __syncthreads();  // the bins are empty
  const Search search = search_row(shared, keys, params.k, ctas, rank);
  const bool listed = search.interval.last > 0;
  if (listed) collect(shared, keys, search, ctas);
  ptx::cluster_arrive();  // no CTA ends while another reads its bins, and the lists are whole
  ptx::cluster_wait();
  if (listed) {
    if (search.inside <= kFew) {
      find_among_few(shared, search);
    } else {
      find_in_list(shared, search);
    }
    __syncthreads();
    count_lower(shared, search, shared.threshold.key);
  } else if (threadIdx.x == 0) {
    shared.threshold = {search.interval.lo, search.wanted, search.inside, 0, search.lower_inside};
  }
  __syncthreads();
  const Threshold threshold = shared.threshold;
  const bool every_equal = threshold.taken == threshold.equal;
  const int lower_above = search.lower_above + threshold.lower_above;
  const Selection selection{threshold.key + !every_equal, threshold.key, every_equal ? 0 : threshold.taken};
  write_row(shared, keys, selection, lower_above + (every_equal ? threshold.lower_equal : 0), threshold.lower_equal, target);
}

KernelHandles handles;

}  // namespace
}  // namespace etap::top_k

namespace etap {

// As many CTAs a row as find an SM each, and no more than have a block for each of their warps.
KernelLaunch prepare_top_k(const TopKParams& params, int num_sms) {
  using namespace top_k;
  int ctas = 1;
  while (ctas < kMostCtas && params.rows * ctas * 2 <= num_sms && ctas * kWarps * kBlockKeys < params.width) ctas *= 2;
  return {reinterpret_cast<const void*>(top_k_kernel), "top_k_kernel", &handles, dim3(params.rows * ctas), kThreads, 0, ctas};
}

}  // namespace etap
