"""The launches of a call, as the library reports them: kernel, grid, and the tensor maps of cache and queries."""

import math
from dataclasses import replace

import pytest
import torch

from etap_backend import DecodeSchedule, sparse_workspace_floats
from etap_backend._library import library
from etap_backend.schedule import decode_shape
from etap_backend.sparse import sparse_decode_shape
from support.cases import SOFTMAX_SCALE, Case, build
from support.sparse_cases import CACHES, SparseCase
from support.sparse_cases import build as build_sparse


def launches(case: Case, q: torch.Tensor | None = None, caches: tuple | None = None, early_loads: bool = False) -> list:
    problem = build(case, "cpu")
    q = problem.call_q if q is None else q
    batch, s_q, heads, _ = q.shape
    schedule = DecodeSchedule(max(batch, 1), heads, device="cpu", **case.planned | {"max_s_q": s_q})
    pages = {"block_table": problem.block_table[:batch], "page_size": case.page_size}
    planned = schedule.build(problem.seq_lens[:batch], s_q, **pages)
    out, lse = torch.empty(batch, s_q, heads, 512, dtype=case.out_dtype), torch.empty(batch, s_q, heads)
    return library().decode_launches(
        *(q, problem.call_q_rope, *(caches or (problem.call_kv_cache, problem.rope_cache))),
        *(problem.q_scale, problem.kv_scale, problem.block_table[:batch], problem.seq_lens[:batch]),
        *(planned.work_ranges, planned.split_offsets, planned.shared, planned.workspace, out, lse),
        *(
            SOFTMAX_SCALE,
            batch,
            s_q,
            heads,
            planned.partitions,
            planned.row_tile,
            planned.num_sms,
            case.fp8_math,
            -math.inf,
            early_loads,
        ),
    )


def dims(numbers) -> dict:
    """A tensor map by the names of its parts."""
    address, type_, fills_nan, swizzle, rank, *rest = numbers
    parts = {"extents": rest[:rank], "strides": rest[rank : 2 * rank - 1], "box": rest[2 * rank - 1 :]}
    return {"address": address, "type": type_, "fills_nan": fills_nan, "swizzle": swizzle, **parts}


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 200])
@pytest.mark.parametrize(
    "kind, element",
    [
        ({}, "bfloat16_t"),
        ({"dtype": "float16"}, "half_t"),
        ({"kv_dtype": "fp8"}, "half_t"),
        ({"kv_dtype": "fp8", "fp8_math": True}, "float_e4m3_t"),
    ],
)
def test_the_shape_names_kernel_and_grid(kind, element, heads, groups):
    shape = decode_shape(heads, 9, 2 * groups, "kv_dtype" in kind, kind.get("fp8_math", False))
    decode, *combining = launches(Case((300, 70), heads, num_sms=9, groups=groups, **kind))
    fp8 = "kv_dtype" in kind
    traits = f"Traits<cutlass::{element}, {shape.row_tile}"
    if shape.row_tile == 64:  # of a form with no other row tile
        traits = "SharedTilesTraits;" if fp8 else f"Traits<cutlass::{element}"
    name = f"{'transposed_fp8' if fp8 else 'transposed' if shape.row_tile < 64 else 'query_major'}::{traits}"
    if shape.row_tile == 64 and "fp8_math" in kind:
        name = "mixed_major::Traits;"
    assert name in decode[0] and decode[1] == 9 // shape.row_groups * shape.row_groups and len(combining) == 1


@pytest.mark.parametrize("heads, form", [(16, "OfColumns<float4>"), (64, "Rows")])
def test_one_request_is_combined_by_blocks_of_few_tasks(heads, form):
    _, combine = launches(Case((8192,), heads, num_sms=132))
    assert "few_launch" in combine[0] and f"{form};" in combine[0]


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize(
    "kind, room",
    [
        ({}, True),
        ({"kv_dtype": "fp8", "fp8_math": True}, True),
        ({"kv_dtype": "fp8"}, False),
        ({"page_size": 16}, False),
    ],
)
def test_a_block_a_multiprocessor_combines_where_decode_leaves_it_room(kind, room, heads):
    _, combine = launches(Case((70,) * 64, heads, num_sms=132, **kind))
    form = "many_launch" if room or heads > 8 else "kTasks = 8"  # of 8 rows all blocks fit at once
    assert form in combine[0] and (combine[1] * combine[2] <= 132) == (room and heads <= 16)


def test_a_batch_invariant_step_of_few_requests_has_the_gpus_tensor_cores():
    """Its partitions are few, the GPU's multiprocessors are not."""
    case = Case((70,) * 8, 16, num_sms=132)
    problem = build(case, "cpu")
    schedule = DecodeSchedule(200, 16, device="cpu", num_sms=132, batch_invariant=True)
    planned = schedule.build(problem.seq_lens)
    assert planned.partitions < 100
    out, lse = torch.empty(8, 1, 16, 512, dtype=torch.bfloat16), torch.empty(8, 1, 16)
    inputs = (problem.call_q, None, problem.call_kv_cache, None, None, None, problem.block_table, problem.seq_lens)
    buffers = (planned.work_ranges, planned.split_offsets, None, planned.workspace, out, lse)
    grids = []
    for num_sms in (132, 78):
        numbers = planned._replace(num_sms=num_sms)[:6]
        call = (*inputs, *buffers, SOFTMAX_SCALE, *numbers, False, -math.inf, True)
        grids.append(tuple(library().decode_launches(*call)[1][1:3]))
    assert grids[0][0] * grids[0][1] < grids[1][0] * grids[1][1]


@pytest.mark.parametrize(
    "batch, form", [(1, "kTasks = 2"), (4, "kTasks = 8"), (16, "kEntries = 1"), (64, "kEntries = 4")]
)
def test_half_partials_are_of_64_rows_of_fp8_products(batch, form):
    case = Case((70,) * batch, 64, num_sms=132, kv_dtype="fp8")
    half, whole = (launches(replace(case, fp8_math=fp8_math))[1][0] for fp8_math in (True, False))
    assert "OfColumns<uint2>" in half and form in half and "uint2" not in whole


def test_one_partition_needs_no_combine_kernel_and_no_request_no_decode_kernel():
    assert len(launches(Case((300,), 16, num_sms=1))) == 1
    assert len(launches(Case((300,), 16, num_sms=1), q=torch.empty(0, 1, 16, 576, dtype=torch.bfloat16))) == 0


@pytest.mark.parametrize(
    "batch, heads, kv_dtype, late, early",
    [
        (1, 16, "fp8", ((64, 1), 1, 1), ((64, 1), 1, 1)),
        (4, 16, "fp8", ((64, 4), 1, 1), ((32, 4), 2, 1)),
        (16, 16, "fp8", ((8, 16), 8, 0), ((8, 16), 8, 0)),
        (32, 16, "fp8", ((8, 32), 8, 0), ((8, 32), 8, 0)),
        (64, 16, "fp8", ((8, 33), 8, 2), ((8, 16), 8, 4)),
        (128, 16, "fp8", ((8, 33), 8, 4), ((8, 16), 8, 4)),
        (16, 64, "same", ((32, 8), 8, 1), ((32, 8), 8, 1)),
        (64, 64, "same", ((32, 8), 8, 4), ((32, 8), 8, 4)),
        (1, 16, "same", ((64, 1), 1, 1), ((64, 1), 1, 1)),
        (4, 16, "same", ((64, 4), 1, 1), ((32, 4), 2, 1)),
        (16, 16, "same", ((8, 16), 8, 1), ((8, 16), 8, 1)),
        (32, 16, "same", ((8, 16), 8, 2), ((8, 16), 8, 2)),
        (64, 16, "same", ((8, 16), 8, 4), ((8, 16), 8, 4)),
        (128, 16, "same", ((8, 16), 8, 4), ((8, 16), 8, 4)),
    ],
)
def test_early_loads_give_the_combine_kernel_few_blocks(batch, heads, kv_dtype, late, early):
    """Grid, a block's tasks of 8 rows x 16 value dims, and how many requests it takes at a time; 0: one, divided."""
    for early_loads, (grid, tasks, requests) in ((False, late), (True, early)):
        _, combine = launches(Case((70,) * batch, heads, kv_dtype=kv_dtype, num_sms=132), early_loads=early_loads)
        assert tuple(combine[1:3]) == grid
        form = "many_launch" if tasks == 8 and requests else "few_launch"
        assert form in combine[0]
        assert (f"kTasks = {tasks}" if form == "few_launch" else f"kEntries = {requests}") in combine[0]


@pytest.mark.parametrize("batch, heads", [(1, 16), (2, 16), (16, 16), (32, 16), (64, 16), (16, 64)])
def test_early_loads_change_no_grid_where_tensor_cores_are_few(batch, heads):
    late, early = (launches(Case((70,) * batch, heads, num_sms=78), early_loads=early) for early in (False, True))
    assert early[1][:5] == late[1][:5]


def test_a_cache_of_one_page_may_have_any_stride():
    pool = torch.zeros(64 * 576, dtype=torch.bfloat16)
    for stride in (0, 3, 2**50):
        decode = launches(Case((64,), 16, num_sms=1), caches=(pool.as_strided((1, 64, 576), (stride, 576, 1)), None))[0]
        (cache,) = decode[6]
        assert dims(cache)["strides"] == [1152, 128, 1152]


@pytest.mark.parametrize(
    "page_size, layout, kind, whole, tokens",
    [
        *[(size, "dense", {}, True, 64) for size in (64, 128, 576)],
        *[(size, "dense", {}, False, tokens) for size, tokens in ((32, 32), (96, 32), (16, 16), (80, 16))],
        *[(size, "headed", {}, False, 0) for size in (1, 8, 40, 63, 100)],
        *[(size, "apart", {}, False, tokens) for size, tokens in ((64, 64), (32, 32), (1, 0))],
        *[(size, "apart", {"kv_dtype": "fp8"}, size == 64, tokens) for size, tokens in ((64, 64), (16, 16), (8, 0))],
    ],
)
def test_tiles_are_copied_whole_in_parts_or_row_by_row(page_size, layout, kind, whole, tokens):
    case = Case((300,), 16, page_size=page_size, cache_layout=layout, num_sms=1, **kind)
    decode = launches(case)[0]
    assert f"kWholeTiles = {str(whole).lower()}" in decode[0]
    maps = [dims(numbers) for numbers in decode[6]]
    assert [numbers["box"][1] for numbers in maps] == [tokens] * (0 if tokens == 0 else 1 if whole and not kind else 2)
    problem = build(case, "cpu")
    rope = problem.rope_cache if layout == "apart" else problem.kv_cache_3d[..., 512:]
    for numbers, part in zip(maps, (problem.call_kv_cache, rope), strict=False):
        assert numbers["address"] % 16 == 0 and numbers["extents"][1] == page_size
        assert numbers["strides"][-1] == part.stride(0) * part.element_size()


@pytest.mark.parametrize("options", [{"page_size": 32}, {"page_size": 1}, {"cache_layout": "apart"}])
def test_parts_of_tiles_have_no_kernel_of_float16(options):
    wanted = r"^kv_cache: wanted a kernel of bfloat16 x 8, .*, got float16 x 16 in parts of tiles"
    with pytest.raises(ValueError, match=wanted):
        launches(Case((300,), 16, num_sms=1, dtype="float16", **options))


def test_neighbouring_latent_and_rope_are_copied_as_one():
    cache = build(Case((64,), 16, num_sms=1), "cpu").kv_cache
    parts = (cache[..., :512], cache[..., 512:])
    assert launches(Case((64,), 16, num_sms=1), caches=parts)[0][0] == launches(Case((64,), 16, num_sms=1))[0][0]


@pytest.mark.parametrize(
    "q, mapped",
    [
        (torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), True),
        (torch.zeros(1, 2, 8, 576, dtype=torch.bfloat16), True),
        (torch.zeros(1, 3, 8, 576, dtype=torch.bfloat16), True),
        (torch.zeros(1, 1, 128, 576, dtype=torch.bfloat16), True),
        (torch.zeros(1, 1, 24, 576, dtype=torch.bfloat16), False),  # heads do not fill a row tile
        (torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16).expand(-1, -1, 16, -1), False),  # TMA knows no stride of 0
    ],
)
def test_queries_are_copied_by_tma_where_it_can(q, mapped):
    decode = launches(Case((64,), 16, num_sms=1), q=q)[0]
    assert len(decode[7]) == (2 if mapped else 0)


def test_a_call_that_may_share_prefixes_decodes_own_tiles_first():
    """A kernel of stacks that came first would hold back the next call's loads in every step that shares nothing."""
    own, stacks, combine, merge = launches(Case((300,) * 4, 16, num_sms=132, prefixes=((4, 128),)))
    assert ", 16>" in own[0] and "query_major" in stacks[0]
    assert "few_launch" in combine[0] and "prepare_merge" in merge[0]


def sparse_launches(case: SparseCase) -> list:
    problem = build_sparse(case, "cpu")
    partitions = case.num_sms // sparse_decode_shape(max(1, case.heads)).row_groups
    workspace = torch.empty(sparse_workspace_floats(max(1, case.heads), case.num_sms))
    out, lse = torch.empty(case.tokens, case.heads, 512, dtype=torch.bfloat16), torch.empty(case.tokens, case.heads)
    lists = problem.lists()
    names = ("indices", "block_table", "request_ids", "valid_counts")
    extra = ("extra_kv_cache", "extra_indices", "extra_block_table", "extra_valid_counts")
    return library().sparse_decode_launches(
        *(problem.call_q, problem.call_q_rope, problem.kv_cache),
        *(lists[name] for name in (*names, *extra)),
        problem.sinks,
        *(workspace, out, lse, SOFTMAX_SCALE, partitions, case.num_sms, -math.inf),
    )


@pytest.mark.parametrize(
    "heads, row_tile", [(1, 8), (8, 8), (12, 16), (16, 16), (24, 32), (32, 32), (64, 64), (128, 64)]
)
def test_the_heads_name_the_sparse_kernel(heads, row_tile):
    """FP8 rows have their own kernels; for 64 heads V4's rows are multiplied as bfloat16, like rows without rope."""
    wide = row_tile == 64
    shape = sparse_decode_shape(heads)
    assert shape.row_tile == row_tile and shape.row_groups == -(-heads // shape.row_tile)
    names = {}
    for cache in CACHES:
        num_sms = 6 * shape.row_groups  # partitions of six tiles, which are no whole fraction of a token
        decode, combine = sparse_launches(SparseCase(1, heads, 2048, cache, num_sms=num_sms))
        assert decode[1] * decode[2] == 6 * shape.row_groups
        of_its_own = cache.startswith("fp8") or (cache.startswith("v4") and not wide)
        dense = "query_major::Traits<" if wide else "transposed::Traits<"
        kernel = "sparse_fp8::" if of_its_own else dense
        assert kernel in decode[0] and "combine" in combine[0]
        names[cache] = decode[0]
    assert names["fp8"] == names["fp8 as e4m3"] and names["v4"] == names["v4 as e4m3"]
    assert len(set(names.values())) == 3
    assert wide or ("V32Row" in names["fp8"] and "V4Row" in names["v4"])
    without_rope = {}
    for cache in ("bf16", "fp8"):
        decode, *_ = sparse_launches(SparseCase(1, heads, 2048, cache, rope=False, num_sms=num_sms))
        without_rope[cache] = decode[0]
    assert without_rope["fp8"] == names["fp8"] and dense in without_rope["bf16"]
    assert (without_rope["bf16"] == names["v4"]) == wide and without_rope["bf16"] != names["bf16"]


@pytest.mark.parametrize("tokens, cluster", [(1, 1), (4, 1), (8, 1), (16, 8), (24, 1), (32, 4), (64, 2), (128, 1)])
@pytest.mark.parametrize("cache, heads", [("bf16", 16), ("bf16", 32), ("fp8", 8), ("v4", 16)])
@pytest.mark.parametrize("extra", [None, 1920])
def test_a_cluster_of_a_tokens_splits_needs_no_combine_kernel(extra, cache, heads, tokens, cluster):
    """2, 4 or 8 splits on an H200's multiprocessors, of one list or of two with as many tiles."""
    top_k = 2048 if extra is None else 128
    decode, *combine = sparse_launches(SparseCase(tokens, heads, top_k, cache, extra=extra, num_sms=132))
    assert decode[3] == cluster and decode[1] % cluster == 0
    assert len(combine) == (cluster == 1 and tokens != 128)


@pytest.mark.parametrize("cache", ["bf16", "fp8", "v4"])
def test_splits_of_64_rows_are_combined(cache):
    for tokens, heads in ((16, 64), (32, 33), (16, 128)):
        decode, combine = sparse_launches(SparseCase(tokens, heads, 2048, cache, num_sms=132))
        assert decode[3] == 1 and "combine" in combine[0]


def test_whole_lists_need_no_combine_kernel_and_no_token_no_decode_kernel():
    assert len(sparse_launches(SparseCase(1, 16, 2048, num_sms=1))) == 1
    assert len(sparse_launches(SparseCase(0, 16, 64, num_sms=1))) == 0
