// The k largest logits of a row, by a cluster of CTAs that holds the row in registers.
//
// 1. Each CTA counts its keys in 4096 bins (keys.cuh) in shared memory, and sends every CTA of the cluster the sums of 32 groups.
// 2. Each finds the group with the k-th key, sends its own bins of that group to all, and finds the bin. Where the bin holds more
//    keys than the list takes, they are counted again in parts of the bin: at most three times, until the parts are single keys.
// 3. The bin's keys, the candidates, are sent to a list in every CTA, and each finds the k-th key in it, how many equal ones are
//    taken, and how many of both the CTAs with lower positions have.
// 4. Each warp counts what it takes, and writes it behind what lower positions take: positions ascend, and of equal keys the
//    lowest positions are taken, whatever the number of CTAs.
//
// A warp has consecutive blocks of 128 keys. What lies behind the row's end counts as the lowest key: it is behind all others, and
// a row of more than k keys never takes it. The CTAs of a cluster wait for each other at its barrier once, when the mbarriers are
// ready, and after that for bytes: each knows how many come, and none ends before they have.
#include <algorithm>

#include "common/warp.cuh"
#include "top_k/cluster.cuh"
#include "top_k/keys.cuh"
#include "top_k/top_k.h"

namespace etap::top_k {
namespace {

constexpr int kLogWarps = 5;
constexpr int kWarps = 1 << kLogWarps;
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
  int4 group_bins[kMostCtas][kWarpSize];  // of the group with the k-th key
  int32_t groups[kMostCtas][kWarpSize];
  int32_t list[kListKeys];
  int32_t digits[kDigits];
  int32_t warp_sums[2][kWarps];
  Inbox sums_came;
  Inbox bins_came;
  Inbox list_came;
  Search search;
  Threshold threshold;
  int bin;
  int collected;
};

// The row of a CTA, and the blocks of a warp.
struct Row {
  const float* logits;
  int length;
  bool aligned;
  int first;  // block
  int end;

  // A lane's four logits of a block; NaN behind the end.
  CUTE_DEVICE int position(int block) const { return block * kBlockKeys + int(threadIdx.x) % kWarpSize * kVectorKeys; }
  CUTE_DEVICE bool whole(int block) const { return block < end && aligned && position(block) + kVectorKeys <= length; }
  CUTE_DEVICE float4 load_whole(int block) const {
    float4 x;
    ptx::load_if(whole(block), logits + position(block), x);
    return x;
  }
  CUTE_DEVICE float load_one(int at) const { return at < length ? logits[at] : __int_as_float(0x7fffffff); }
  CUTE_DEVICE float4 load_parts(int block) const {
    const int at = position(block);
    return {load_one(at), load_one(at + 1), load_one(at + 2), load_one(at + 3)};
  }
};

// A warp's keys, in registers where they are no more than these hold.
struct Keys {
  const Row& row;
  int4 held[kVectors];

  CUTE_DEVICE bool all_held() const { return row.end - row.first <= kVectors; }
  // All loads before the first use.
  CUTE_DEVICE void load(int first) {
    float4 logits[kVectors];
    CUTE_UNROLL
    for (int j = 0; j < kVectors; ++j) logits[j] = row.load_whole(first + j);
    CUTE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if (first + j >= row.end) continue;
      if (!row.whole(anew(first) + j)) logits[j] = row.load_parts(anew(first) + j);
      held[j] = {key_of(logits[j].x), key_of(logits[j].y), key_of(logits[j].z), key_of(logits[j].w)};
    }
  }
  // visit(four keys), by all lanes of a warp at a time, in the order of positions.
  template <class Visit>
  CUTE_DEVICE void each(Visit&& visit) {
#pragma unroll 1
    for (int first = row.first; first < row.end; first += kVectors) {
      if (!all_held()) load(first);
      CUTE_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        if (first + j < row.end) visit(held[j]);
      }
    }
  }
  template <class Visit>
  CUTE_DEVICE void each_key(Visit&& visit) {
    each([&](const int4& keys) {
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

// The counts of four neighbouring bins in all CTAs, and in those before.
struct FourBins {
  int sums[4] = {};
  int lowers[4] = {};

  CUTE_DEVICE void add(const int4& x, bool lower) {
    const int counts[4] = {x.x, x.y, x.z, x.w};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      sums[i] += counts[i];
      lowers[i] += lower ? counts[i] : 0;
    }
  }
};

// One warp: the bin with the wanted key, from all CTAs' bins. Writes it, and what it says of the search.
CUTE_DEVICE void find_bin(Shared& shared, const Search& search, int ctas, int rank, uint32_t parity) {
  const int lane = lane_id();
  int group_sum = 0, group_lower = 0;
  shared.sums_came.wait(parity);
#pragma unroll 1
  for (int cta = 0; cta < ctas; ++cta) {
    const int sum = cta < ctas ? shared.groups[cta][lane] : 0;
    group_sum += sum;
    group_lower += cta < rank ? sum : 0;
  }
  int above;
  const int group = lane_reaching(group_sum, search.wanted, above);
  const int first_bin = group * kGroupBins + lane * 4;
  const int4 own = reinterpret_cast<const int4&>(shared.bins[first_bin]);
#pragma unroll 1
  for (int cta = 0; cta < ctas; ++cta) send(&shared.group_bins[rank][lane], cta, own, shared.bins_came);
  int lower_above = search.lower_above + warp_sum(lane < group ? group_lower : 0);

  FourBins bins;
  shared.bins_came.wait(parity);
#pragma unroll 1
  for (int cta = 0; cta < ctas; ++cta) bins.add(shared.group_bins[cta][lane], cta < rank);
  int lane_above;
  const int holder = lane_reaching(bins.sums[0] + bins.sums[1] + bins.sums[2] + bins.sums[3], search.wanted - above, lane_above);
  lower_above += warp_sum(lane < holder ? bins.lowers[0] + bins.lowers[1] + bins.lowers[2] + bins.lowers[3] : 0);
  if (lane != holder) return;
  above += lane_above;
  int i = 0;
  CUTE_UNROLL
  for (int next = 1; next < 4; ++next) {
    if (i + 1 < next || above + bins.sums[next - 1] >= search.wanted) continue;
    above += bins.sums[next - 1];
    lower_above += bins.lowers[next - 1];
    i = next;
  }
  const int inside = i == 0 ? bins.sums[0] : i == 1 ? bins.sums[1] : i == 2 ? bins.sums[2] : bins.sums[3];
  const int lower_inside = i == 0 ? bins.lowers[0] : i == 1 ? bins.lowers[1] : i == 2 ? bins.lowers[2] : bins.lowers[3];
  shared.bin = first_bin + i;
  shared.search = {search.interval, search.wanted - above, inside, lower_above, lower_inside};
}

// Each warp sums a group of bins, and tells every CTA; then the wanted key's bin is found. Once a parity of the mbarriers: a CTA
// sends for the next search only when it has all of this one, so that all others are done with the sums of the one before.
CUTE_DEVICE void search_bins(Shared& shared, const Search& search, int ctas, int rank, uint32_t parity) {
  const int warp = threadIdx.x / kWarpSize;
  const int sum = warp_sum(sum_of(reinterpret_cast<const int4*>(shared.bins)[threadIdx.x]));
  if (lane_id() < ctas) send(&shared.groups[rank][warp], lane_id(), sum, shared.sums_came);
  if (threadIdx.x == 0) {
    shared.sums_came.expect(ctas * int(sizeof shared.groups[0]));
    shared.bins_came.expect(ctas * int(sizeof shared.group_bins[0]));
  }
  if (warp == 0) find_bin(shared, search, ctas, rank, parity);
  __syncthreads();
}

// The interval of the bin that the k-th key is in, or of a part of it that the list takes.
CUTE_DEVICE Search search_row(Shared& shared, Keys& keys, int k, int ctas, int rank) {
  keys.each_key([&](int32_t key) { atomicAdd(&shared.bins[bin_of(key)], 1); });
  __syncthreads();
  ptx::cluster_wait();  // all CTAs have their mbarriers
  search_bins(shared, {{}, k, 0, 0, 0}, ctas, rank, 0);
  Search search = shared.search;
  search.interval = interval_of(shared.bin);
#pragma unroll 1
  for (uint32_t parity = 1; search.inside > kListKeys && search.interval.last > 0; parity ^= 1) {
    const Interval within = search.interval;
    const int shift = max(within.bits() - kBinBits, 0);
    reinterpret_cast<int4*>(shared.bins)[threadIdx.x] = {};
    __syncthreads();
    keys.each_key([&](int32_t key) {
      const uint32_t digit = (uint32_t(key) - uint32_t(within.lo)) >> shift;
      if (within.holds(key)) atomicAdd(&shared.bins[kBins - 1 - digit], 1);
    });
    __syncthreads();
    search_bins(shared, search, ctas, rank, parity);
    search = shared.search;
    search.interval = within.part(kBins - 1 - shared.bin, shift);
  }
  return search;
}

// Bit i: whether the i-th key passes.
template <class Test>
CUTE_DEVICE uint32_t marks_of(const int4& keys, Test&& test) {
  return (test(keys.x) ? 1u : 0u) | (test(keys.y) ? 2u : 0u) | (test(keys.z) ? 4u : 0u) | (test(keys.w) ? 8u : 0u);
}

// Every key of the interval into the lists of all CTAs, those of the CTAs before first.
CUTE_DEVICE void collect(Shared& shared, Keys& keys, const Search& search, int ctas) {
  if (threadIdx.x == 0) shared.list_came.expect(search.inside * int(sizeof shared.list[0]));
  keys.each([&](const int4& four) {
    uint32_t marks = marks_of(four, [&](int32_t key) { return search.interval.holds(key); });
#pragma unroll 1
    for (; marks != 0; marks &= marks - 1) {
      const int i = __ffs(int(marks)) - 1;
      const int32_t key = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
      const int32_t* to = &shared.list[search.lower_inside + atomicAdd(&shared.collected, 1)];
#pragma unroll 1
      for (int cta = 0; cta < ctas; ++cta) send(to, cta, key, shared.list_came);
    }
  });
  shared.list_came.wait(0);
}

// The wanted key among few: each is compared with all, by eight lanes, those of the CTAs before in the upper half of a count.
CUTE_DEVICE void find_among_few(Shared& shared, const Search& search) {
  constexpr int kLanes = kThreads / kFew;
  const int i = threadIdx.x / kLanes;
  if (threadIdx.x / kWarpSize * (kWarpSize / kLanes) >= search.inside) return;
  const int32_t key = shared.list[min(i, search.inside - 1)];
  uint32_t above = 0, equal = 0;
#pragma unroll 4
  for (int at = threadIdx.x % kLanes; at < search.inside; at += kLanes) {
    const int32_t other = shared.list[at];
    const uint32_t one = at < search.lower_inside ? 0x10001 : 1;
    above += other > key ? one : 0;
    equal += other == key ? one : 0;
  }
  CUTE_UNROLL
  for (int step = 1; step < kLanes; step *= 2) {
    above += __shfl_xor_sync(kAllLanes, above, step);
    equal += __shfl_xor_sync(kAllLanes, equal, step);
  }
  const int all_above = above & 0xffff, all_equal = equal & 0xffff;
  if (all_above < search.wanted && search.wanted <= all_above + all_equal) {
    shared.threshold = {key, search.wanted - all_above, all_equal, int(above >> 16), int(equal >> 16)};
  }
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

// Keys of at least `least` are taken, and of those equal to `key` the `taken` lowest positions.
struct Selection {
  int32_t least;
  int32_t key;
  int taken;  // 0: `least` says all
};

// Which keys of a lane's vectors are set, four bits a vector, and how many are set of each block of the warp, a byte each: in
// lower lanes, and in all.
struct Marks {
  uint32_t bits;
  uint32_t lower;
  uint32_t all;

  CUTE_DEVICE static Marks of(uint32_t bits) {
    const uint32_t pairs = bits - (bits >> 1 & 0x5555), fours = (pairs & 0x3333) + (pairs >> 2 & 0x3333);
    const uint32_t counts = __byte_perm(fours, fours >> 4, 0x5140) & 0x0f0f0f0f;
    const uint32_t scanned = uint32_t(warp_scan(int(counts)));
    return {bits, scanned - counts, __shfl_sync(kAllLanes, scanned, kWarpSize - 1)};
  }
  CUTE_DEVICE int count() const { return int(__dp4a(all, 0x01010101u, 0u)); }
  // How many are set before a bit, in the order of positions.
  CUTE_DEVICE int before(int bit) const {
    const int shift = bit / kVectorKeys * 8;
    const uint32_t vector = 0xfu << (bit & ~3), earlier_bits = (1u << bit) - 1;
    return int(__dp4a(all & ((1u << shift) - 1), 0x01010101u, lower >> shift & 0xff)) + __popc(bits & vector & earlier_bits);
  }
};
static_assert(kVectors == 4 && kVectorKeys == 4 && kBlockKeys < 256);

struct Taken {
  Marks higher;
  Marks equal;

  CUTE_DEVICE static Taken of(const Keys& keys, int first, const Selection& selection) {
    uint32_t higher = 0, equal = 0;
    CUTE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if (first + j >= keys.row.end) continue;
      higher |= marks_of(keys.held[j], [&](int32_t key) { return key >= selection.least; }) << j * kVectorKeys;
    }
    if (selection.taken == 0) return {Marks::of(higher), {}};
    CUTE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if (first + j >= keys.row.end) continue;
      equal |= marks_of(keys.held[j], [&](int32_t key) { return key == selection.key; }) << j * kVectorKeys;
    }
    return {Marks::of(higher), Marks::of(equal)};
  }
};

CUTE_DEVICE void write_row(Shared& shared, Keys& keys, const Selection& selection, int lower_above, int lower_equal,
                           const Target& target) {
  const int warp = threadIdx.x / kWarpSize;
  int above = 0, equal = 0;
  Taken taken{};
#pragma unroll 1
  for (int first = keys.row.first; first < keys.row.end; first += kVectors) {
    if (!keys.all_held()) keys.load(first);
    taken = Taken::of(keys, first, selection);
    above += taken.higher.count();
    equal += taken.equal.count();
  }
  if (lane_id() == 0) {
    shared.warp_sums[0][warp] = above;
    shared.warp_sums[1][warp] = equal;
  }
  __syncthreads();
  const bool nothing = above + equal == 0;
  if (nothing) return;
  above = lower_above + warp_sum(lane_id() < warp ? shared.warp_sums[0][lane_id()] : 0);
  equal = lower_equal + warp_sum(lane_id() < warp ? shared.warp_sums[1][lane_id()] : 0);
#pragma unroll 1
  for (int first = keys.row.first; first < keys.row.end; first += kVectors) {
    if (!keys.all_held()) {
      keys.load(first);
      taken = Taken::of(keys, first, selection);
    }
#pragma unroll 1
    for (uint32_t bits = taken.higher.bits | taken.equal.bits; bits != 0; bits &= bits - 1) {
      const int bit = __ffs(int(bits)) - 1;
      const int before = equal + taken.equal.before(bit);
      if ((taken.higher.bits >> bit & 1) == 0 && before >= selection.taken) continue;
      target.write(above + taken.higher.before(bit) + min(before, selection.taken),
                   keys.row.position(first + bit / kVectorKeys) + bit % kVectorKeys);
    }
    above += taken.higher.count();
    equal += taken.equal.count();
  }
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
  const int log_ctas = __ffs(ctas) - 1, index = int(blockIdx.x) >> log_ctas, warp = threadIdx.x / kWarpSize;
  reinterpret_cast<int4*>(shared.bins)[threadIdx.x] = {};
  if (threadIdx.x == 0) {
    shared.collected = 0;
    shared.sums_came.init();
    shared.bins_came.init();
    shared.list_came.init();
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
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
  const int place = rank * kWarps + warp, log_places = log_ctas + kLogWarps;
  const Row row{params.logits + index * params.logits_stride, length, params.aligned, int(place * blocks >> log_places),
                int((place + 1) * blocks >> log_places)};
  Keys keys{row};
  if (keys.all_held()) keys.load(row.first);
  const Search search = search_row(shared, keys, params.k, ctas, rank);
  const bool listed = search.interval.last > 0;
  if (listed) collect(shared, keys, search, ctas);
  if (listed) {
    if (search.inside <= kFew) {
      find_among_few(shared, search);
    } else {
      find_in_list(shared, search);
      __syncthreads();
      count_lower(shared, search, shared.threshold.key);
    }
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
