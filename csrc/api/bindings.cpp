// The only file that knows the FFI's functions: checks the arguments, fills the plain structs, launches.
#include <cuda_runtime.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "api/on_device.h"
#include "api/sparse_call.h"
#include "api/top_k_call.h"
#include "combine/combine.h"
#include "schedule/policies.h"
#include "schedule/schedule.h"

namespace etap {
namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Map;
using tvm::ffi::String;
using tvm::ffi::Tuple;

constexpr int64_t kAbiVersion = 15;

// fixed_splits: the most of a request where its length alone decides, and then the next three mean nothing; 0: the batch does.
#define ETAP_SCHEDULE_ARGUMENTS(ARGUMENT) \
  ARGUMENT(TensorView, seq_lens)          \
  ARGUMENT(TensorView, work_ranges)       \
  ARGUMENT(TensorView, split_offsets)     \
  ARGUMENT(int64_t, partitions)           \
  ARGUMENT(int64_t, fixed_splits)         \
  ARGUMENT(int64_t, split_rows)           \
  ARGUMENT(int64_t, split_cost)           \
  ARGUMENT(int64_t, single_tiles)

struct ScheduleCall {
  ETAP_SCHEDULE_ARGUMENTS(ETAP_MEMBER)
};

ScheduleParams schedule_params(const ScheduleCall& call) {
  const TensorView &seq_lens = call.seq_lens, &work_ranges = call.work_ranges, &split_offsets = call.split_offsets;
  const DLDevice device = work_ranges.device();
  check_tensor("work_ranges", work_ranges, kInt32, {{kAny, "num_sms"}, {kWorkRangeFields}}, Layout::kContiguous, device);
  check_tensor("split_offsets", split_offsets, kInt32, {{kAny, "max_batch + 1"}}, Layout::kContiguous, device);
  check_dtype("seq_lens", seq_lens, kInt32);
  if (seq_lens.ndim() != 1 || seq_lens.size(0) >= split_offsets.size(0)) {
    TVM_FFI_THROW(ValueError) << "seq_lens: wanted shape [batch <= " << split_offsets.size(0) - 1 << "], got "
                              << text(seq_lens.shape());
  }
  check_contiguous("seq_lens", seq_lens);
  check_device("seq_lens", seq_lens, device);
  const int64_t batch = seq_lens.size(0);
  check_at_least("partitions", call.partitions, 1);
  check_at_least("work_ranges' size", work_ranges.size(0), call.partitions);
  check_at_least("fixed_splits", call.fixed_splits, 0);
  if (call.fixed_splits > 1) check_at_least("partitions", call.partitions, batch * call.fixed_splits);
  const bool fixed = call.fixed_splits > 0;
  if (!fixed) {
    check_at_least("split_rows", call.split_rows, kCheapSplits);
    check_at_least("split_cost", call.split_cost, 1);
    check_at_least("single_tiles", call.single_tiles, 0);
  }
  return {
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .work_ranges = static_cast<WorkRange*>(work_ranges.data_ptr()),
      .split_offsets = static_cast<int32_t*>(split_offsets.data_ptr()),
      .batch = int32_t(batch),
      .partitions = int32_t(call.partitions),
      .fixed_splits = int32_t(call.fixed_splits),
      .split_rows = int32_t(fixed ? kCheapSplits : call.split_rows),
      .split_cost = int32_t(fixed ? 1 : call.split_cost),
      .single_tiles = int32_t(fixed ? 0 : call.single_tiles),
  };
}

void build_schedule(const ScheduleCall& call) {
  const ScheduleParams params = schedule_params(call);
  const DLDevice device = call.work_ranges.device();
  if (device.device_type == kDLCPU) return build_schedule_on_host(params);
  on_device("seq_lens", device, [&](cudaStream_t stream) { build_schedule_on_device(params, stream); });
}

// The two schedules of a step whose requests share prefixes: the stacks' ranges lie behind the requests'.
#define ETAP_SHARED_SCHEDULE_ARGUMENTS(ARGUMENT) \
  ARGUMENT(TensorView, seq_lens)                 \
  ARGUMENT(TensorView, block_table)              \
  ARGUMENT(TensorView, work_ranges)              \
  ARGUMENT(TensorView, split_offsets)            \
  ARGUMENT(TensorView, shared)                   \
  ARGUMENT(int64_t, page_size)                   \
  ARGUMENT(int64_t, s_q)                         \
  ARGUMENT(int64_t, heads)                       \
  ARGUMENT(int64_t, least_tiles)                 \
  ARGUMENT(int64_t, partitions)                  \
  ARGUMENT(int64_t, num_sms)                     \
  ARGUMENT(int64_t, split_rows)                  \
  ARGUMENT(int64_t, split_cost)                  \
  ARGUMENT(int64_t, single_tiles)

struct SharedScheduleCall {
  ETAP_SHARED_SCHEDULE_ARGUMENTS(ETAP_MEMBER)
};

void build_shared_schedule(const SharedScheduleCall& call) {
  ScheduleParams own = schedule_params({call.seq_lens, call.work_ranges, call.split_offsets, call.partitions, 0, call.split_rows,
                                        call.split_cost, call.single_tiles});
  check_at_least("page_size", call.page_size, 1);
  check_at_least("s_q", call.s_q, 1);
  check_at_least("heads", call.heads, 1);
  check_at_least("num_sms", call.num_sms, 1);
  if (own.batch > kMostShared) {
    TVM_FFI_THROW(ValueError) << "seq_lens: wanted at most " << kMostShared << " requests that share prefixes, got " << own.batch;
  }
  const DLDevice device = call.work_ranges.device();
  const StackShape stack = stack_shape(call.s_q * call.heads, call.num_sms);
  check_shared(call.shared, call.work_ranges, device, stack, own.batch, own.partitions, call.num_sms);
  check_tensor("block_table", call.block_table, kInt32, {{own.batch}, {kAny, "max_pages"}}, Layout::kLastStride, device);
  const SharedPlan plan = shared_plan(call.shared);
  const SharedParams params{
      .plan = plan,
      .seq_lens = own.seq_lens,
      .block_table = integers(call.block_table),
      .block_table_stride = call.block_table.stride(0),
      .max_pages = int32_t(std::min<int64_t>(call.block_table.size(1), INT32_MAX)),
      .page_size = int32_t(call.page_size),
      .batch = own.batch,
      .s_q = int32_t(call.s_q),
      .stack_places = stack.places,
      .least_members = stack.least,
      .least_tiles = call.least_tiles,
  };
  own.seq_lens = plan.own_lens();
  own.merged = plan.places();
  const DecodeShape shape = decode_shape(stack.row_tile, {call.num_sms, kAnyBatch, false, false});
  const ScheduleParams stacks{
      .seq_lens = plan.stack_lens(),
      .work_ranges = own.work_ranges + own.partitions,
      .split_offsets = plan.stack_offsets(),
      .batch = int32_t(stack.most_stacks(own.batch)),
      .partitions = int32_t(call.num_sms),
      .fixed_splits = 0,
      .split_rows = int32_t(shape.split_rows),
      .split_cost = int32_t(shape.split_cost),
      .single_tiles = int32_t(shape.single_tiles),
      .batch_count = plan.stack_count(),
      .merged = plan.stack_lens(),
  };
  if (device.device_type == kDLCPU) {
    find_stacks_on_host(params);
    build_schedule_on_host(stacks);
    return build_schedule_on_host(own);
  }
  on_device("seq_lens", device, [&](cudaStream_t stream) {
    find_stacks_on_device(params, stream);
    build_schedule_on_device(stacks, stream);
    build_schedule_on_device(own, stream);
  });
}

// The launches of a call, in order: decode(params), and sum(launch, params) of what reads partial results. Requests' own tiles come before
// the stacks. So in a step without stacks the CTAs that find none pass while the last ones of own tiles still compute, and the next call
// begins to load hardly later than if there had been none.
template <class Decode, class Sum>
void for_each_launch(const DecodeCall& call, Decode&& decode, Sum&& sum) {
  const auto combine = [&](const DecodeParams& params) {
    if (params.partitions == 1) return;  // no request is split
    sum(prepare_combine(params, kernel_of(call).leaves_room, call.num_sms), static_cast<const ResultParams&>(params));
  };
  if (!call.shared.has_value()) {
    const DecodeParams params = decode_params(call);
    decode(params);
    return combine(params);
  }
  const SharedDecode shared = shared_decode(call);
  decode(shared.own);
  decode(shared.stacks);
  combine(shared.own);
  sum(prepare_merge(shared.merge, call.num_sms), shared.merge);
}

DecodeLaunch prepared(const DecodeCall& call, const DecodeParams& params) {
  return prepare_decode(params, kernel_of(call, params.row_tile), call.fp8_cache());
}

void decode(const DecodeCall& call) {
  check(call);
  const DLDevice device = call.q.device();
  on_device("q", device, [&](cudaStream_t stream) {
    if (call.is_empty()) return;
    for_each_launch(
        call, [&](const DecodeParams& params) { launch(prepared(call, params), params, device.device_id, stream); },
        [&](const KernelLaunch& kernel, const auto& params) {
          const void* const arguments[] = {&params};
          launch_overlapping(kernel, arguments, device.device_id, stream);
        });
  });
}

void check_decode(const DecodeCall& call) { check(call); }

// Of a tensor map: address, type, whether it fills with NaN, swizzle, rank, extents, strides in bytes, box.
Array<int64_t> numbers(const MapShape& map) {
  Array<int64_t> all{reinterpret_cast<int64_t>(map.data), int64_t(map.type), int64_t(map.fills_nan),
                     int64_t(map.swizzle), int64_t(map.rank)};
  for (int i = 0; i < map.rank; ++i) all.push_back(int64_t(map.extents[i]));
  for (int i = 0; i + 1 < map.rank; ++i) all.push_back(int64_t(map.strides[i]));
  for (int i = 0; i < map.rank; ++i) all.push_back(int64_t(map.box[i]));
  return all;
}

// A kernel's name, blocks in x and y, threads, shared bytes, parameters, and its tensor maps: the cache's, the queries'.
using Launch = Tuple<String, int64_t, int64_t, int64_t, int64_t, Bytes, Array<Array<int64_t>>, Array<Array<int64_t>>>;

template <class Params>
Bytes bytes_of(const Params& params) {
  return Bytes(reinterpret_cast<const char*>(&params), sizeof(params));
}

template <class Params>
Launch launch_of(const KernelLaunch& kernel, const Params& params, const DecodeLaunch& maps) {
  Array<Array<int64_t>> cache, queries;
  for (int i = 0; i < maps.cache_map_count; ++i) cache.push_back(numbers(maps.cache_maps[i]));
  for (int i = 0; maps.query_maps_usable && i < 2; ++i) queries.push_back(numbers(maps.query_maps[i]));
  return Launch(String(kernel.name), int64_t(kernel.blocks.x), int64_t(kernel.blocks.y), int64_t(kernel.threads),
                int64_t(kernel.shared_bytes), bytes_of(params), cache, queries);
}

// What `decode` launches, for those who run it elsewhere: on tensors of the CPU too.
Array<Launch> decode_launches(const DecodeCall& call) {
  check(call);
  Array<Launch> all;
  if (call.is_empty()) return all;
  for_each_launch(
      call,
      [&](const DecodeParams& params) {
        const DecodeLaunch decode = prepared(call, params);
        all.push_back(launch_of(decode.kernel, params, decode));
      },
      [&](const KernelLaunch& kernel, const auto& params) { all.push_back(launch_of(kernel, params, {})); });
  return all;
}

// Whether a token is in several splits, which the decode kernel does not sum itself.
bool combines(const DecodeParams& params, const KernelLaunch& decode) {
  return decode.cluster == 1 && sparse::split_candidates(params.division) > 0;
}

void sparse_decode(const SparseCall& call) {
  check(call);
  const DLDevice device = call.q.device();
  on_device("q", device, [&](cudaStream_t stream) {
    if (call.is_empty()) return;
    const DecodeParams params = decode_params(call);
    const QueryMaps no_maps{};
    const void* const arguments[] = {&params, &no_maps, &no_maps};
    KernelLaunch kernel = sparse::prepare(params, call.kernel(), sparse::cluster_splits(params));
    if (kernel.cluster > 1 && !kernel.handles->clusters_fit(kernel, device.device_id, stream)) kernel.cluster = 1;
    launch_overlapping(kernel, arguments, device.device_id, stream);
    if (!combines(params, kernel)) return;
    launch_overlapping(prepare_combine(params, false, call.num_sms), arguments, device.device_id, stream);
  });
}

void check_sparse_decode(const SparseCall& call) { check(call); }

// A kernel's name, blocks in x and y, CTAs of a cluster, threads, shared bytes, parameters.
using SparseLaunch = Tuple<String, int64_t, int64_t, int64_t, int64_t, int64_t, Bytes>;

// What `sparse_decode` launches where clusters fit, for those who run it elsewhere: on tensors of the CPU too.
Array<SparseLaunch> sparse_decode_launches(const SparseCall& call) {
  check(call);
  Array<SparseLaunch> all;
  if (call.is_empty()) return all;
  const DecodeParams params = decode_params(call);
  const auto add = [&](const KernelLaunch& kernel, Bytes given) {
    all.push_back(SparseLaunch(String(kernel.name), int64_t(kernel.blocks.x), int64_t(kernel.blocks.y), int64_t(kernel.cluster),
                               int64_t(kernel.threads), int64_t(kernel.shared_bytes), given));
  };
  const KernelLaunch kernel = sparse::prepare(params, call.kernel(), sparse::cluster_splits(params));
  add(kernel, bytes_of(params));
  if (combines(params, kernel)) add(prepare_combine(params, false, call.num_sms), bytes_of<ResultParams>(params));
  return all;
}

void top_k(const TopKCall& call) {
  check(call);
  const DLDevice device = call.logits.device();
  on_device("logits", device, [&](cudaStream_t stream) {
    if (call.rows() == 0) return;
    const TopKParams params = top_k_params(call);
    const void* const arguments[] = {&params};
    launch_overlapping(prepare_top_k(params, int(call.num_sms)), arguments, device.device_id, stream);
  });
}

void check_top_k(const TopKCall& call) { check(call); }

// CTAs, CTAs of a cluster, threads, shared bytes, parameters.
using TopKLaunch = Tuple<int64_t, int64_t, int64_t, int64_t, Bytes>;

// What `top_k` launches for at least one row, for those who run it elsewhere: on tensors of the CPU too.
TopKLaunch top_k_launch(const TopKCall& call) {
  check(call);
  check_at_least("logits' rows", call.rows(), 1);
  const TopKParams params = top_k_params(call);
  const KernelLaunch kernel = prepare_top_k(params, int(call.num_sms));
  return TopKLaunch(int64_t(kernel.blocks.x), int64_t(kernel.cluster), int64_t(kernel.threads), int64_t(kernel.shared_bytes),
                    bytes_of(params));
}

// Row tile, row groups, floats of a split's partial result, rows that a split is weighed by, tiles that a split is taken
// for beside its own, tiles of the longest request that may be cut into single ones.
using Shape = Tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Shape numbers(const DecodeShape& of) {
  return Shape(int64_t(of.row_tile), int64_t(of.row_groups), of.split_floats, of.split_rows, of.split_cost, of.single_tiles);
}

// batch: 0 for any.
Shape shape(int64_t rows, int64_t num_sms, int64_t batch, bool fp8_cache, bool fp8_math) {
  check_at_least("rows", rows, 1);
  check_at_least("num_sms", num_sms, 1);
  check_at_least("batch", batch, kAnyBatch);
  return numbers(decode_shape(rows, {num_sms, batch, fp8_cache, fp8_math}));
}

// Of stacks of requests with so many rows: row tile, places, members that one needs, tiles of all members that a batch needs.
Tuple<int64_t, int64_t, int64_t, int64_t> stack_numbers(int64_t rows, int64_t num_sms) {
  check_at_least("rows", rows, 1);
  check_at_least("num_sms", num_sms, 1);
  const StackShape of = stack_shape(rows, num_sms);
  return Tuple<int64_t, int64_t, int64_t, int64_t>(int64_t(of.row_tile), int64_t(of.places), int64_t(of.least), of.least_tiles);
}

Shape sparse_decode_shape(int64_t heads) {
  check_at_least("heads", heads, 1);
  return numbers(sparse_shape(heads));
}

// Of a split: token, partition, first tile, the one behind its last, slot of its partial result or -1.
using SparseSplit = Tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

// The splits of tokens with so many tiles each, int32 [tokens] on the CPU, in the order of the partitions.
Array<SparseSplit> sparse_splits(TensorView tiles, int64_t most_tiles, int64_t heads, int64_t partitions) {
  check_int32("tiles", tiles, {kDLCPU, 0}, {{kAny, "tokens"}});
  check_at_least("most_tiles", most_tiles, 0);
  check_at_least("heads", heads, 1);
  check_at_least("partitions", partitions, 1);
  const auto* of_token = static_cast<const int32_t*>(tiles.data_ptr());
  const TokenDivision division = sparse::divide(tiles.size(0), most_tiles, partitions, sparse_shape(heads).row_tile < kMaxRowTile);
  Array<SparseSplit> all;
  for (int p = 0; p < division.partitions; ++p) {
    for (int t = sparse::first_token(division, p); t < sparse::end_token(division, p); ++t) {
      const sparse::TileRange range = sparse::tile_range(division, t, p, of_token[t]);
      const int slot = sparse::splits(division, t) > 1 ? sparse::slot(division, t, p) : -1;
      all.push_back(SparseSplit(t, p, range.begin, range.end, slot));
    }
  }
  return all;
}

// Numbers that Python and the tests share with the kernels.
Map<String, int64_t> constants() {
  return {{"tile_tokens", kTileTokens},
          {"latent_dim", kLatentDim},
          {"rope_dim", kRopeDim},
          {"work_range_fields", kWorkRangeFields},
          {"own_tolerance", kOwnTolerance},
          {"split_rows", kSplitRows},
          {"memory_rows", kMemoryRows},
          {"many_split_rows", kManySplitRows},
          {"short_tiles", kShortTiles},
          {"shared_fields", SharedPlan::kFields},
          {"most_shared", kMostShared},
          {"fixed_tiles", kFixedTiles}};
}

int64_t abi_version() { return kAbiVersion; }

// Kind and name of each argument of the functions that take a call.
Map<String, Array<String>> arguments() {
  return {{"build_schedule", {ETAP_SCHEDULE_ARGUMENTS(ETAP_TOLD)}},
          {"build_shared_schedule", {ETAP_SHARED_SCHEDULE_ARGUMENTS(ETAP_TOLD)}},
          {"decode", {ETAP_DECODE_ARGUMENTS(ETAP_TOLD)}},
          {"sparse_decode", {ETAP_SPARSE_ARGUMENTS(ETAP_TOLD)}},
          {"top_k", {ETAP_TOP_K_ARGUMENTS(ETAP_TOLD)}}};
}

using OfDecode = Bound<DecodeCall ETAP_DECODE_ARGUMENTS(ETAP_TYPE)>;
using OfSparse = Bound<SparseArguments ETAP_SPARSE_ARGUMENTS(ETAP_TYPE)>;
using OfShared = Bound<SharedScheduleCall ETAP_SHARED_SCHEDULE_ARGUMENTS(ETAP_TYPE)>;
using OfSchedule = Bound<ScheduleCall ETAP_SCHEDULE_ARGUMENTS(ETAP_TYPE)>;
using OfTopK = Bound<TopKCall ETAP_TOP_K_ARGUMENTS(ETAP_TYPE)>;

}  // namespace
}  // namespace etap

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_version, etap::abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(arguments, etap::arguments);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_schedule, etap::OfSchedule::run<etap::build_schedule>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_shared_schedule, etap::OfShared::run<etap::build_shared_schedule>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_decode, etap::OfDecode::run<etap::check_decode>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_sparse_decode, etap::OfSparse::run<etap::check_sparse_decode>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_top_k, etap::OfTopK::run<etap::check_top_k>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(constants, etap::constants);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, etap::OfDecode::run<etap::decode>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_launches, etap::OfDecode::run<etap::decode_launches>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_shape, etap::shape);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode, etap::OfSparse::run<etap::sparse_decode>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode_launches, etap::OfSparse::run<etap::sparse_decode_launches>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_decode_shape, etap::sparse_decode_shape);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_splits, etap::sparse_splits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stack_shape, etap::stack_numbers);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(top_k, etap::OfTopK::run<etap::top_k>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(top_k_launch, etap::OfTopK::run<etap::top_k_launch>);
