// Where the CTAs of a cluster decode the splits of a request, one each, they sum them among themselves, through their shared
// memory. So no partial result goes to memory, and no combination is launched.
#pragma once

#include "common/sums.cuh"
#include "decode/epilogue/columns.cuh"

namespace etap::transposed {

// Whether this CTA's split is summed in a cluster.
template <class T>
constexpr bool kSumsInClusters = T::kSparse && T::kAlternatingTiles;
template <class T>
CUTE_DEVICE bool clustered() {
  return kSumsInClusters<T> && ptx::cluster_size() > 1;
}

constexpr int kTaskDims = 16;  // a task: 8 rows x 16 value dims, what a warp holds of a slice and column block

// A CTA shows the others this of its split, where its key ring was. Each has one split and no tile behind it.
template <class T>
struct ClusterPart {
  float4 values[kLatentDim / 64][T::kRowTile / 8][kGroupThreads];  // as in partial_out
  float lse[T::kRowTile];                                          // log2

  CUTE_DEVICE static ClusterPart& of(Shared<T>& shared) {
    static_assert(sizeof(ClusterPart) <= sizeof(shared.ring));
    return *reinterpret_cast<ClusterPart*>(shared.ring);
  }
};

// Shows the half that a warpgroup has merged, in its registers' order.
template <class T, int kGroup>
CUTE_DEVICE void show_half(Shared<T>& shared, const WarpFactors<T>& factors, const OutputFragment<T>& ot) {
  auto& part = ClusterPart<T>::of(shared);
  const int thread = anew(threadIdx.x % kGroupThreads);
  write_partial<T, T::kMergeSlices>(&part.values[kGroup * T::kMergeSlices][0][thread], kGroup * T::kMergeSlices, ot);
  if (kGroup == 0) factors.write_lse(T::kRowTile, [&](int row, float lse) { part.lse[row] = lse; });
}

// Shows a split without tokens, which weighs nothing, but is multiplied.
template <class T>
CUTE_DEVICE void show_nothing(Shared<T>& shared) {
  auto& part = ClusterPart<T>::of(shared);
  auto* values = &part.values[0][0][0];
#pragma unroll 1
  for (int i = threadIdx.x; i < int(sizeof(part.values) / sizeof(float4)); i += kConsumerThreads) {
    values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (threadIdx.x < T::kRowTile) part.lse[threadIdx.x] = -INFINITY;
}

// Sums the parts of kParts CTAs, of which each writes its share of the value dims. A warp has tasks of the same eight rows. It is
// called between the halves of the cluster's barrier, so that addresses are ready when it opens.
template <class T, int kParts>
CUTE_DEVICE void sum_parts(Shared<T>& shared, const DecodeParams& params, int request, int row_group) {
  using Part = ClusterPart<T>;
  constexpr int kBlocks = T::kRowTile / 8;
  constexpr int kWarpsOfBlock = kConsumerWarps / kBlocks;
  constexpr int kShare = kLatentDim / kTaskDims / kParts;  // tasks of eight rows
  constexpr int kTasks = (kShare + kWarpsOfBlock - 1) / kWarpsOfBlock;
  static_assert(kShare % kWarpsOfBlock == 0 || kTasks == 1);
  const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned block = warp % kBlocks, rank = ptx::cluster_rank();
  const bool has_task = warp / kBlocks < kShare;
  const unsigned task = rank * kShare + warp / kBlocks;  // the warp's first; each next one kWarpsOfBlock behind

  // Each CTA begins with its own part, so that they do not all ask the same one. The order follows from the value dim.
  const auto& slice = Part::of(shared).values[task / kWarpsPerGroup][block];
  const uint32_t value = cute::cast_smem_ptr_to_uint(&slice[task % kWarpsPerGroup * kWarpSize + lane]);
  const uint32_t lse = cute::cast_smem_ptr_to_uint(&Part::of(shared).lse[block * 8 + lane % 4 * 2]);
  uint32_t values[kParts], lses[kParts];
  CUTE_UNROLL
  for (unsigned p = 0; p < kParts; ++p) {
    values[p] = ptx::map_to_rank(value, (rank + p) % kParts);
    lses[p] = ptx::map_to_rank(lse, (rank + p) % kParts);
  }
  ETAP_MARKED(parts_sync, ptx::cluster_wait());
  if (has_task) {
    Flight<Columns, kParts, kTasks> flight;
    cute::for_each(cute::make_seq<kParts>{}, [&](auto p) {
      flight.lse[p] = ptx::load_cluster_float2<0>(lses[p]);
      cute::for_each(cute::make_seq<kTasks>{}, [&](auto t) {
        constexpr int kBehind = t * kWarpsOfBlock;
        constexpr int kOffset = kBehind / kWarpsPerGroup * int(sizeof(Part::values[0])) +
                                kBehind % kWarpsPerGroup * kWarpSize * int(sizeof(float4));
        flight.value[p][t] = ptx::load_cluster_float4<kOffset>(values[p]);
      });
    });
    Totals totals;
    Sum sums[kTasks];
    flight.add_to(totals, sums);
    const int first_row = row_group * T::kRowTile + block * 8;
    CUTE_UNROLL
    for (int t = 0; t < kTasks; ++t) {
      const int dim = (task + t * kWarpsOfBlock) * kTaskDims;
      write_rows<Columns>(params, sums[t], totals, request, first_row, dim, T::kPairedDims);
    }
    if (task == 0) etap::write_lse<Columns>(params, totals, request, first_row);
  }
  // A CTA that has ended has no shared memory for others to read.
  ptx::cluster_arrive_relaxed();
  ETAP_MARKED(cluster_end, ptx::cluster_wait());
}

// Both consumers call it when their CTA has left its part.
template <class T>
CUTE_DEVICE void sum_cluster(Shared<T>& shared, const DecodeParams& params, int partition, int row_group) {
  ETAP_MARKED(parts_sync, ptx::cluster_arrive());
  const int request = partition / ptx::cluster_size();
  switch (ptx::cluster_size()) {
    case 2: return sum_parts<T, 2>(shared, params, request, row_group);
    case 4: return sum_parts<T, 4>(shared, params, request, row_group);
    default: return sum_parts<T, 8>(shared, params, request, row_group);
  }
}

}  // namespace etap::transposed
