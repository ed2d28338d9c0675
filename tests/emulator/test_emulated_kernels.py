"""The compiled kernels themselves, run instruction by instruction where there is no GPU (see tests/emulator).

A case for each compiled kernel and for each parameter's values runs always. All others, interleavings and planted
faults are marked exhaustive: `make test-exhaustive` runs them where kernels, emulator or these tests changed (see
verified.py). ETAP_EMULATOR_SEEDS=N has N interleavings of every case that depends on them; 1 by default.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from functools import cache, lru_cache

import kernels
import pytest
import torch
from emulator import faults
from emulator.machine import TIMINGS
from emulator.ptx import Edit, EmulationError, Entry

from etap_backend import DecodeSchedule
from etap_backend._library import library
from etap_backend.limits import SHARED_FIELDS
from etap_backend.schedule import decode_shape, stack_shape
from support.cases import Case, Problem, Runner, build, stacked_from
from support.compare import Truth, problems_with, truth
from support.covering import covering
from support.shared import Tree, plan_of

pytestmark = kernels.NEEDS_COMPILER

SEEDS = range(int(os.environ.get("ETAP_EMULATOR_SEEDS", "1")))
LENGTHS = (0, 1, 63, 64, 65, 129, 321)
FEW_LENGTHS = (0, 65, 1, 128)
HEADS = (8, 16, 32, 64)  # a row tile each, with one query token
CACHES = {"bf16": {}, "fp8": {"kv_dtype": "fp8"}, "fp8_math": {"kv_dtype": "fp8", "fp8_math": True}}
KINDS = CACHES | {"fp16": {"dtype": "float16"}}


@lru_cache(4)  # a case holds some 40 MB
def problem_and_truth(case: Case) -> tuple[Problem, Truth]:
    problem = build(case, "cpu")
    return problem, truth(problem)


def emulate(case: Case, **how) -> tuple[list[str], set[int]]:
    """What is wrong with the emulated kernels' result on a case, and which segments of the decode kernel ran."""
    problem, wanted = problem_and_truth(case)
    runner = Runner(problem)
    ran = kernels.run_decode(problem, runner.build(), runner, **how)
    return problems_with(runner.out.tensor, runner.lse.tensor, problem, wanted), ran


def verify(case: Case, **how) -> None:
    found, _ = emulate(case, **how)
    assert not found, "\n".join([*found, f"the case: {case!r}, {how}"])


EVERY_DECODE = [
    (kind, rows, page_size) for kind in KINDS for rows in HEADS for page_size in ((64,) if kind == "fp16" else (64, 1))
]


# Kernels that copy whole tiles, and those that gather rows; one CTA for all, ranges that end inside of requests.
@covering(1, {
    "kind, rows, page_size": EVERY_DECODE,
    "s_q, num_sms": [(1, 1), (2, 2), (1, 5)],
    "timing": TIMINGS,
}, most=2)  # fmt: skip
def test_every_decode_kernel(kind, rows, page_size, s_q, num_sms, timing):
    verify(every_decode_kernel(kind, rows, page_size, s_q, num_sms), seed=num_sms, timing=timing)


def every_decode_kernel(kind: str, rows: int, page_size: int, s_q: int = 1, num_sms: int = 1) -> Case:
    return Case(FEW_LENGTHS, heads=rows // s_q, s_q=s_q, num_sms=num_sms, page_size=page_size, **KINDS[kind])


COMBINES = [  # a combine kernel each: requests of many splits, one, two and four at a time; few requests
    *[(1, 8, "fp8", 9), (3, 16, "bf16", 9), (8, 16, "bf16", 9)],
    *[(1, 64, "bf16", 9), (1, 64, "bf16", 8), (2, 64, "bf16", 9), (8, 64, "bf16", 9)],
    *[(1, 64, "fp8_math", 9), (1, 64, "fp8_math", 8), (2, 64, "fp8_math", 9), (8, 64, "fp8_math", 9)],
    *[(1, 8, "bf16", 132), (1, 64, "fp8", 132), (1, 64, "fp8_math", 132), (1, 64, "bf16", 132)],
]


@pytest.mark.parametrize("batch, heads, kind, num_sms", COMBINES)
def test_every_combine_kernel(batch, heads, kind, num_sms):
    case = every_combine_kernel(batch, heads, kind, num_sms)
    assert Runner(problem_and_truth(case)[0]).build().split_offsets[-1] > 1
    verify(case)


def every_combine_kernel(batch: int, heads: int, kind: str, num_sms: int) -> Case:
    return Case((130, *[70] * (batch - 1)), heads=heads, num_sms=num_sms, **KINDS[kind])


SHARED = [  # heads, CTAs, requests with prefixes of so many tokens: four of 16 rows, pairs of 8, eight of 8, two of 32
    (16, 1, 100, (4,)), (8, 1, 5, (2, 2)), (8, 1, 100, (8,)), (16, 2, 100, (2, 2)), (32, 1, 100, (2,)),
]  # fmt: skip


def sharing(kind: str, heads: int, s_q: int, num_sms: int, groups, page_size: int = 64, **more) -> Case:
    """Requests in groups with 8 or 9 tiles in common and some of their own, and one that shares nothing."""
    batch, common = sum(groups), 8 * 64 + 5 if page_size < 64 else 9 * 64
    lengths = (*(common + 1 + s_q + 37 * request for request in range(batch)), 70)
    prefixes = tuple((members, common) for members in groups)
    return Case(lengths, heads, s_q, num_sms=num_sms, page_size=page_size, prefixes=prefixes, **more, **KINDS[kind])


@covering(1, {
    "kind": list(KINDS), "heads, s_q, num_sms, groups": SHARED, "early_loads": [False, True], "timing": TIMINGS,
}, most=2)  # fmt: skip
def test_shared_prefixes(kind, heads, s_q, num_sms, groups, early_loads, timing):
    case = sharing(kind, heads, s_q, num_sms, groups)
    planned = (runner := Runner(problem_and_truth(case)[0])).build()
    assert [len(stack.members) for stack in plan_of(planned).stacks] == list(groups), runner
    verify(case, early_loads=early_loads, timing=timing)


# Rows that are gathered and parts that are copied, of a prefix that ends within a tile; strided and split queries.
@covering(1, {
    "kind": list(CACHES),
    "heads, num_sms, groups": [(16, 100, (4,)), (8, 5, (2, 2))],
    "page_size, q_layout": [(1, "strided"), (32, "split"), (64, "split"), (48, "packed"), (128, "strided")],
}, most=2)  # fmt: skip
def test_shared_prefixes_in_pages_of_any_size(kind, heads, num_sms, groups, page_size, q_layout):
    verify(sharing(kind, heads, 1, num_sms, groups, page_size, q_layout=q_layout))


@covering(1, {"kind": list(CACHES), "heads, s_q, num_sms, groups": SHARED[:2], "what": ["query", "own tile"]})
def test_nan_of_one_member_stays_its_own(kind, heads, s_q, num_sms, groups, what):
    problem, wanted = problem_and_truth(sharing(kind, heads, s_q, num_sms, groups))
    problem = replace(problem, call_q=problem.call_q.clone(), kv_cache=problem.kv_cache.clone())
    if what == "query":
        problem.call_q[1] = torch.nan
    else:
        length, page = problem.case.lengths[1], problem.case.page_size
        problem.kv_cache[problem.block_table[1, (length - 1) // page], (length - 1) % page] = torch.nan
    kernels.run_decode(problem, (runner := Runner(problem)).build(), runner)
    out, lse = runner.out.tensor, runner.lse.tensor
    assert out[1].isnan().all() and lse[1].isnan().all()
    out[1], lse[1] = wanted.out[1].to(out.dtype), wanted.lse[1].to(lse.dtype)
    assert not problems_with(out, lse, problem, wanted)


@covering(1, {"kind": list(CACHES), "heads, s_q, num_sms, groups": SHARED[:2], "early_loads": [False, True]})
def test_a_step_that_shares_nothing(kind, heads, s_q, num_sms, groups, early_loads):
    """The call of stacks ends at once, and the merge finds what is split."""
    case = replace(sharing(kind, heads, s_q, num_sms, groups), prefixes=((1, 0),))
    planned = (runner := Runner(problem_and_truth(case)[0])).build()
    assert planned.shared is not None and not plan_of(planned).stacks, runner
    verify(case, early_loads=early_loads)


@covering(
    1, {"kind": list(CACHES), "heads, s_q, num_sms, groups": SHARED[:2], "later": [(700, 700, 700), (3000, 3000)]}
)
def test_a_plan_of_another_step_writes_nothing_else(kind, heads, s_q, num_sms, groups, later):
    """The schedule was built again: results are wrong, but no kernel leaves its outputs and its workspace."""
    problem, _ = problem_and_truth(sharing(kind, heads, s_q, num_sms, groups))
    runner = Runner(problem)
    planned = runner.build()
    other = build(replace(problem.case, lengths=later, prefixes=((len(later), 576),)), "cpu")
    pages = dict(block_table=other.block_table, page_size=64)
    with stacked_from(0):
        runner.schedule.build(other.seq_lens, s_q, **pages)
    assert planned.shared[9, 0] > 0, "no stack would read its members"
    planned.shared[7:9] = 1 << 30  # members that no call has
    kernels.run_decode(problem, planned, runner)  # raises where anything lies outside


@covering(1, {"page_size": [1, 16, 48, 64, 256], "s_q": [1, 2], "batch": [0, 1, 2, 9, 40], "places": [2, 4, 8]})
def test_stacks_are_found_as_the_library_does_on_the_host(page_size, s_q, batch, places):
    tree = Tree.drawn(batch, page_size, seed=page_size + batch)
    heads = 64 // places // s_q
    numbers = (page_size, s_q, *stack_shape(heads * s_q, 132)[1:3], 0)
    emulated, wanted = torch.zeros(2, SHARED_FIELDS, max(batch, 1), dtype=torch.int32)
    kernels.run_find_stacks(emulated, tree.seq_lens, tree.block_table, *numbers)
    ranges, offsets = torch.zeros(264, 8, dtype=torch.int32), torch.zeros(batch + 1, dtype=torch.int32)
    buffers = (tree.seq_lens, tree.block_table, ranges, offsets, wanted)
    library().build_shared_schedule(*buffers, page_size, s_q, heads, 0, 132, 132, 16, 2, 4)
    host_offsets = wanted[6].clone()
    wanted[6] = 0
    assert torch.equal(emulated, wanted)
    # And both schedules, of stacks of which the device alone knows the number.
    own, stacks = torch.zeros(132, 8, dtype=torch.int32), torch.zeros(132, 8, dtype=torch.int32)
    own_offsets, most = torch.zeros_like(offsets), batch // numbers[3]
    if not most:
        return
    stack_offsets = torch.zeros(most + 1, dtype=torch.int32)
    kernels.run_schedule(wanted[2, :batch], own, own_offsets, 0, 16, 2, 4, merged=wanted[4])
    costs = decode_shape(64, 132)[3:]
    count, lengths = wanted[9, :1], wanted[5, :most].clone()
    kernels.run_schedule(lengths, stacks, stack_offsets, 0, *costs, batch_count=count, merged=lengths)
    assert torch.equal(own[:, :5], ranges[:132, :5]) and torch.equal(own_offsets, offsets)
    assert torch.equal(stacks[:, :5], ranges[132:, :5])
    assert torch.equal(stack_offsets[: count.item() + 1], host_offsets[: count.item() + 1])


def test_every_compiled_kernel_has_a_case():
    """A kernel that is compiled into the library and not listed here would never run without a GPU."""
    cases = [every_decode_kernel(*each) for each in EVERY_DECODE]
    found = set()
    cases += [every_combine_kernel(*each) for each in COMBINES]
    for case in [*cases, sharing("bf16", *SHARED[0])]:
        problem = build(case, "cpu")
        planned = (runner := Runner(problem)).build()
        launches = kernels.decode_launches(case, planned, kernels.decode_tensors(problem, planned, runner))
        found |= {kernels.find(launch[0], kernels.SHIPPED) for launch in launches}
    sources = [source for source in kernels.SHIPPED if not source.startswith("lists")]
    assert found == {(source, name) for source in sources for name in kernels.module(source).names.values()}


@pytest.mark.exhaustive
@covering(1, {
    "dtype, rows": [(dtype, rows) for dtype in ("bfloat16", "float16") for rows in HEADS],
    "s_q, num_sms": [(1, 1), (2, 2), (1, 5)],
})  # fmt: skip
def test_decode(dtype, rows, s_q, num_sms):
    verify(Case(LENGTHS, heads=rows // s_q, s_q=s_q, num_sms=num_sms, dtype=dtype), seed=num_sms)


@pytest.mark.parametrize("heads", HEADS)
def test_bits_do_not_depend_on_what_a_cta_decoded_before(heads):
    """Behind an odd number of tiles a split begins elsewhere in the ring, and with 64 rows with the other consumer."""
    problem = build(Case((64, 450), heads=heads, num_sms=1), "cpu")
    results = []
    for requests in ([1], [0, 1]):
        case = replace(problem.case, lengths=tuple(problem.case.lengths[r] for r in requests))
        rows = dict(q=problem.q[requests], call_q=problem.q[requests], seq_lens=problem.seq_lens[requests])
        part = replace(problem, case=case, block_table=problem.block_table[requests], **rows)
        runner = Runner(part)
        kernels.run_decode(part, runner.build(), runner)
        results.append([tensor[-1].view(torch.uint8) for tensor in (runner.out.tensor, runner.lse.tensor)])
    assert all(torch.equal(alone, behind) for alone, behind in zip(*results, strict=True))


@pytest.mark.parametrize(
    "lengths, heads, early_loads",
    [
        pytest.param((1100, 1, 5), 64, False, id="few"),
        pytest.param((2100, *range(1, 34)), 16, True, id="many", marks=pytest.mark.exhaustive),
    ],
)
def test_the_order_of_splits_does_not_depend_on_the_batch(lengths, heads, early_loads):
    """A request in splits alone and beside short ones, in batch-invariant schedules of few and of many CTAs."""
    problem = build(Case(lengths, heads=heads, num_sms=132), "cpu")
    results = []
    for batch in (1, len(lengths)):
        case = replace(problem.case, lengths=problem.case.lengths[:batch])
        rows = dict(q=problem.q[:batch], call_q=problem.q[:batch], seq_lens=problem.seq_lens[:batch])
        part = replace(problem, case=case, block_table=problem.block_table[:batch], **rows)
        schedule = DecodeSchedule(64, heads, device="cpu", num_sms=132, batch_invariant=True)
        planned = schedule.build(part.seq_lens)
        assert schedule.split_offsets[1] == lengths[0] // 1024 + 1
        runner = Runner(part)
        kernels.run_decode(part, planned, runner, early_loads=early_loads)
        results.append([tensor[0].view(torch.uint8) for tensor in (runner.out.tensor, runner.lse.tensor)])
    assert all(torch.equal(alone, among) for alone, among in zip(*results, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_requests_of_many_and_of_few_splits(dtype):
    """A block of the combine kernel takes two at a time, or one whose splits its warps divide."""
    verify(Case((2000, *(200,) * 15), heads=16, num_sms=46, dtype=dtype), seed=1)


@covering(1, {
    "fp8_math": [False, True],
    "heads": HEADS,
    "dtype, q_scale, s_q, num_sms": [
        ("bfloat16", None, 1, 1), ("float16", None, 2, 2), ("float8_e4m3fn", 0.02, 1, 5), ("float8_e4m3fn", None, 2, 1),
    ],
})  # fmt: skip
def test_decode_from_an_fp8_cache(dtype, q_scale, heads, s_q, num_sms, fp8_math):
    types = dict(dtype=dtype, kv_dtype="fp8", q_scale=q_scale, kv_scale=0.03, fp8_math=fp8_math)
    verify(Case(FEW_LENGTHS, heads=heads, s_q=s_q, num_sms=num_sms, **types), seed=num_sms)


@pytest.mark.parametrize(
    "planned_for, lengths",
    [((130,), (130,)), pytest.param((520, 130, 100), (520, 130, 0), marks=pytest.mark.exhaustive)],
)
def test_half_partials(planned_for, lengths):
    """64 rows of FP8 products: a request alone; one of more splits than a warp sums at once, fewer, and empty ones."""
    problem, wanted = problem_and_truth(Case(lengths, heads=64, num_sms=132, **CACHES["fp8_math"]))
    planned = (runner := Runner(problem)).schedule.build(torch.tensor(planned_for, dtype=torch.int32))
    assert planned.split_offsets.diff()[: len(lengths)].tolist() == [-(-tokens // 64) for tokens in planned_for]
    kernels.run_decode(problem, planned, runner)
    assert not problems_with(runner.out.tensor, runner.lse.tensor, problem, wanted)


# As on an H20, in tiles of 16 rows: one per token, or tokens that begin in one tile and end in another.
@covering(1, {
    "page_size": [1, 64],
    "heads, s_q, num_sms": [(16, 3, 7), (12, 3, 4), (40, 1, 3), (16, 5, 5), (16, 4, 9), (32, 1, 4), (10, 5, 8)],
    "kind": list(CACHES),
}, most=2)  # fmt: skip
def test_groups_of_16_rows(kind, heads, s_q, num_sms, page_size):
    rows = dict(heads=heads, s_q=s_q, num_sms=num_sms, groups=True)
    assert decode_shape(heads * s_q, num_sms, batch=4).row_tile == 16
    verify(Case((0, 1, 70, 2), page_size=page_size, **rows, **CACHES[kind]), seed=num_sms)


@covering(1, {
    "kind": ["bf16", "fp8"],
    "heads, page_size, cache_layout, q_layout": [
        (24, 128, "gapped", "strided"),
        (3, 256, "headed", "split"),
        (16, 128, "rows apart", "packed"),
        (64, 64, "rows apart", "packed"),
        (128, 64, "dense", "strided"),
        (16, 64, "dense", "split"),
    ],
})  # fmt: skip
def test_layouts(heads, page_size, cache_layout, q_layout, kind):
    layouts = dict(page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(Case((0, 65, 300), heads=heads, num_sms=4, **layouts, **CACHES[kind]), seed=3)


# Rows are gathered (1, 5, 24, 100), parts of 16 or 32 tokens copied; a page ends in a tile, or a tile in a page.
@covering(1, {"heads": HEADS, "page_size": [16, 1], "kind": list(CACHES)})
def test_small_pages(kind, page_size, heads):
    lengths = FEW_LENGTHS if page_size == 16 else LENGTHS
    verify(Case(lengths, heads=heads, page_size=page_size, num_sms=2, **CACHES[kind]), seed=page_size)


@pytest.mark.exhaustive
@covering(1, {
    "kind": ["bf16", "fp8"],
    "heads, cache_layout, q_layout": [(16, "gapped", "strided"), (24, "headed", "split")],
    "page_size": [5, 24, 32, 48, 80, 96, 100],
})  # fmt: skip
def test_pages_of_any_size(page_size, heads, cache_layout, q_layout, kind):
    layouts = dict(page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(Case((0, 65, 300), heads=heads, s_q=2, num_sms=4, **layouts, **CACHES[kind]), seed=6)


@covering(1, {"kind": ["bf16", "fp8"], "heads": [16, 64], "page_size": [1, 32, 64, 128]})
def test_latent_and_rope_in_two_tensors(page_size, heads, kind):
    verify(Case((65, 300), heads=heads, num_sms=2, page_size=page_size, cache_layout="apart", **CACHES[kind]), seed=7)


@covering(1, {
    "kind": list(CACHES), "heads": HEADS, "page_size": [64, 16, 1], "page": [-1, 2**31 - 1, "the first behind", "none"],
}, most=2)  # fmt: skip
def test_a_page_outside_the_cache_makes_its_request_nan(page, page_size, heads, kind):
    """An engine's mistake reads no other tensor or request, and gives no number that passes for a result."""
    problem, wanted = problem_and_truth(Case((70, 192), heads=heads, page_size=page_size, num_sms=1, **CACHES[kind]))
    table = problem.block_table.clone()
    if page == "none":  # the table ends before the length
        table = table[:, : -(-70 // page_size)]
    else:
        table[1, 130 // page_size] = len(problem.kv_cache) if page == "the first behind" else page
    runner = Runner(problem)
    kernels.run_decode(replace(problem, block_table=table), runner.build(), runner)
    out, lse = runner.out.tensor, runner.lse.tensor
    assert out[1].isnan().all() and lse[1].isnan().all()
    out[1], lse[1] = wanted.out[1].to(out.dtype), wanted.lse[1].to(lse.dtype)
    assert not problems_with(out, lse, problem, wanted)


@pytest.mark.exhaustive
@covering(2, {"kind": list(CACHES), "heads": [16, 64], "law": ["dominating", "rising", "falling"]})
def test_maxima_that_come_late_or_early(law, kind, heads):
    verify(Case((129, 500), law=law, heads=heads, num_sms=2, **CACHES[kind]), seed=4)


@covering(1, {"kind": list(CACHES), "heads": [16, 64]})
def test_a_schedule_of_other_lengths_gives_the_same_result(heads, kind):
    """Splits without tokens add nothing to the others, though the workspace is full of NaN."""
    planned_for = torch.tensor([700, 300, 64], dtype=torch.int32)
    problem, wanted = problem_and_truth(Case((130, 0, 300), heads=heads, num_sms=9, **CACHES[kind]))
    runner = Runner(problem)
    planned = runner.schedule.build(planned_for)
    assert planned.split_offsets[2] > planned.split_offsets[1] > 1
    kernels.run_decode(problem, planned, runner)
    assert not problems_with(runner.out.tensor, runner.lse.tensor, problem, wanted)


# A partition for all, and splits: of a request that has no tokens any more, too, which the combine kernel finds.
@covering(1, {"kind": list(CACHES), "heads": [4, 16, 32], "num_sms": [1, 9]}, most=2)
def test_rows_that_see_nothing_have_the_requested_log_sum_exp(num_sms, heads, kind):
    problem, wanted = problem_and_truth(Case((130, 0, 300, 1), heads=heads, s_q=2, num_sms=num_sms, **CACHES[kind]))
    runner = Runner(problem)
    planned = runner.schedule.build(torch.tensor([300, 700, 300, 1], dtype=torch.int32), 2)
    assert (planned.split_offsets[2] > planned.split_offsets[1]) == (num_sms > 1)
    out, lse = runner.out.tensor, runner.lse.tensor
    kernels.run_decode(problem, planned, runner)
    assert not problems_with(out, lse, problem, wanted)
    before_out, before_lse = out.clone(), lse.clone()
    assert before_lse.isneginf().sum() == 3 * heads  # two query tokens of nothing, one before the only token
    runner.poison()
    kernels.run_decode(problem, planned, runner, empty_lse=math.inf)
    assert torch.equal(out, before_out) and torch.equal(lse, before_lse.masked_fill(before_lse.isneginf(), math.inf))


@pytest.mark.parametrize("num_sms", [1, 3])
@pytest.mark.parametrize("heads", [16, 64])
def test_scores_far_below_zero_are_attended_to(heads, num_sms):
    """All of a row's scores are below -1e30, equal, and float32 numbers."""
    softmax_scale = math.log(2) / 32
    problem = build(Case((200,), heads=heads, num_sms=num_sms), "cpu")
    problem.q[:], problem.kv_cache[problem.block_table[0, :4].long()] = 2.0**55, -(2.0**55)
    planned = (runner := Runner(problem)).build()
    kernels.run_decode(problem, planned, runner, softmax_scale=softmax_scale)
    assert runner.out.tensor.eq(-(2.0**55)).all()
    score = -(2.0**110) * 576 * softmax_scale
    torch.testing.assert_close(runner.lse.tensor, torch.full_like(runner.lse.tensor, score), rtol=1e-6, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["sixteen_bit", "fp8", "fp8_math"])
def test_decode_waits_for_its_predecessor_before_it_lets_the_combine_kernel_begin(source):
    """The combine kernel reads the list of split requests as soon as it begins.

    A call of stacks that finds none comes behind a kernel that has waited: there one CTA triggers first and waits then.
    """
    module = kernels.module(source)
    for name in module.names.values():
        opcodes = [item.opcode for item in Entry(module, name).instructions() if "griddepcontrol" in item.parts]
        triggers = [i for i, opcode in enumerate(opcodes) if opcode == "griddepcontrol.launch_dependents"]
        first = [i for i in triggers if i == 0 or opcodes[i - 1] != "griddepcontrol.wait"]
        stacks = any(rows in name for rows in ("ELi16E", "query_major", "SharedTiles", "mixed_major"))
        assert triggers and len(first) <= stacks and all(opcodes[i + 1] == "griddepcontrol.wait" for i in first)


# Tiles with new tokens alone, behind others, and two of them; requests of one CTA, one of several, and nearly as many
# CTAs as an H100 has at least.
@covering(1, {
    "kind": list(CACHES),
    "heads": HEADS,
    "lengths, s_q, num_sms, page_size": [
        ((200, 0, 64, 1, 129), 1, 1, 64), ((130, 449), 3, 7, 128), ((64, 128), 1, 9, 64), ((200,), 1, 2, 32),
        ((130, 200), 1, 100, 64),
    ],
    "timing": TIMINGS,
}, most=2)  # fmt: skip
def test_early_loads_touch_nothing_that_the_predecessor_may_write(
    lengths, s_q, num_sms, page_size, heads, kind, timing
):
    """Cache rows of the last tokens, queries and results; kernels without tiles of whole pages wait first."""
    case = Case(lengths, heads=heads // s_q or 1, s_q=s_q, num_sms=num_sms, page_size=page_size, **CACHES[kind])
    verify(case, early_loads=True, seed=heads, timing=timing)


@covering(1, {
    "split_rows, split_cost, single_tiles": [(8, 1, 16), (16, 2, 4), (64, 8, 0), (0, 3, 0)],
    "lengths, partitions, fixed_splits": [
        *[((0, 1, 64, 700, 3000), 7, 0), (tuple(range(0, 4000, 7)), 132, 0), ((5000, 3, 900), 24, 8), ((0, 0), 3, 0)],
        *[((300,) * 16 + (299,) * 8, 12, 0), ((200, 129) * 5, 20, 0)],
        *[((500, 200, 1030), 32, 0), ((5000, 60), 64, 0)],  # single tiles of short requests; splits of two
    ],
})  # fmt: skip
def test_schedule_kernel_does_what_the_library_does_on_the_host(
    lengths, partitions, fixed_splits, split_rows, split_cost, single_tiles
):
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    results = []
    for emulated in (True, False):
        ranges = torch.full((partitions, 8), -77, dtype=torch.int32)
        offsets = torch.full((len(lengths) + 1,), -77, dtype=torch.int32)
        if emulated:
            kernels.run_schedule(seq_lens, ranges, offsets, fixed_splits, split_rows, split_cost, single_tiles)
        else:
            costs = (split_rows, split_cost, single_tiles)
            library().build_schedule(seq_lens, ranges, offsets, partitions, fixed_splits, *costs)
        ranges[ranges[:, 5] == -1, 6:] = 0  # these mean nothing there
        results.append((ranges, offsets))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


# ------------------------------------------------------------------------------------------------------- interleavings

# Tiles of one CTA such that a stage that the merge borrows held the other consumer's tile just before: these found a
# kernel that took such a stage too early.
BORROWED_STAGES = [
    *[("bf16", heads, lengths) for heads in (8, 16) for lengths in ((129,), (192,))],
    ("bf16", 32, (129, 192)),
    ("fp8", 32, (256,)),
    *[("fp8_math", heads, (320,)) for heads in (8, 16, 32)],
]
RAGGED = [(kind, 16, (192, 64, 0, 191, 1, 320)) for kind in CACHES]
# The producer is as many splits ahead as the ring has tiles: more than four barriers in turn tell apart.
RAGGED += [(kind, heads, (64, 5, 63, 17, 64, 1, 30, 64)) for kind in CACHES for heads in (16, 32)]
RAGGED += [(kind, 64, lengths) for kind in CACHES for lengths in ((129, 0, 64), (320, 1, 192, 64))]
RAGGED += [("fp8_math", 64, (577, 640))]  # two tiles together


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
@covering(1, {"kind, heads, lengths": BORROWED_STAGES + RAGGED, "page_size": [64, 32, 1], "timing": TIMINGS}, most=2)
def test_interleavings(kind, heads, lengths, page_size, timing, seed):
    verify(Case(lengths, heads=heads, page_size=page_size, num_sms=1, **CACHES[kind]), seed=seed, timing=timing)


# ------------------------------------------------------------------------------------------------------ planted faults

CASES = {
    "transposed": Case((200, 449), num_sms=1),
    "query_major": Case((200, 449), heads=64, num_sms=1),
    "transposed single tiles": Case((64, 40, 64, 1, 64, 64), num_sms=1),
    "transposed early": Case((200, 449), num_sms=1),
    "query_major stacks": sharing("bf16", *SHARED[0]),
    "query_major stacks early": sharing("bf16", *SHARED[0]),
    "transposed rows": Case((200, 449), num_sms=1, page_size=1),
    "transposed parts": Case((200, 449), num_sms=1, page_size=32),
    "query_major rows": Case((200, 449), heads=64, num_sms=1, page_size=1),
    "transposed_fp8 rows": Case((200, 449), num_sms=1, page_size=1, kv_dtype="fp8"),
    "transposed_fp8_math rows": Case((200, 449), num_sms=1, page_size=1, kv_dtype="fp8", fp8_math=True),
    "mixed_major": Case((200, 600), heads=64, num_sms=1, kv_dtype="fp8", fp8_math=True),
    "mixed_major rows": Case((200, 449), heads=64, num_sms=1, page_size=1, kv_dtype="fp8", fp8_math=True),
}
TRAITS = {  # of kernels whose name does not say them
    "transposed_fp8": "transposed_fp8::Traits<cutlass::half_t",
    "transposed_fp8_math": "transposed_fp8::Traits<cutlass::float_e4m3_t",
    "mixed_major": "mixed_major::Traits",
}
WHOLE_TILES = Case((192,), num_sms=1)  # where a fault shows that another one, of a tail, would hide or come before
FAULTS = {  # by kernel and mark (see csrc/common/mark.h): what the emulator says where it is left out
    ("transposed", "launch_sync"): "no mbarrier",
    ("transposed", "length_wait"): "never written|inf/NaN elsewhere|cosine",
    ("transposed", "length_commit"): "deadlock",
    ("transposed single tiles", "length_release"): "deadlock",
    ("transposed", "expected_bytes"): "deadlock",
    ("transposed", "scores_commit"): "in flight",
    ("transposed", "scores_wait"): "in flight",
    ("transposed", "probabilities_fence"): "inf/NaN elsewhere",
    ("transposed", "probabilities_sync"): "never written|inf/NaN elsewhere",
    ("transposed", "output_fence"): "wgmma.fence",
    ("transposed", "output_wait"): "in flight",
    ("transposed", "stage_release"): "deadlock",
    # What it overwrites is a tile still on its way, or one that the other consumer still multiplies.
    ("transposed", "merge_ready"): "in flight|inf/NaN elsewhere|cosine",
    ("transposed", "lent_room"): "deadlock|more arrivals|in flight|inf/NaN elsewhere|cosine",
    ("transposed", "launch_wait"): "without having waited",
    ("transposed single tiles", "shares_sync"): "never written|inf/NaN elsewhere|cosine",
    ("transposed single tiles", "outputs_sync"): "in flight|inf/NaN elsewhere|cosine|never written",
    ("transposed early", "new_tokens_wait"): "without having waited",
    ("transposed early", "queries_wait"): "without having waited",
    ("transposed early", "first_split_wait"): "without having waited",
    ("query_major stacks", "stacks_wait"): "without having waited",
    ("query_major stacks early", "queries_wait"): "without having waited",
    ("transposed rows", "rows_room"): "deadlock|in flight|inf/NaN elsewhere|cosine|more arrivals",
    ("transposed rows", "rows_wait"): "in flight",
    ("transposed rows", "rows_fence"): "inf/NaN elsewhere",
    ("transposed rows", "tile_ready"): "deadlock",
    ("transposed rows", "lent_commit"): "in flight|deadlock",
    ("transposed parts", "part_bytes"): "deadlock",
    ("transposed parts", "part_arrival"): "deadlock",
    ("transposed parts", "tile_ready"): "deadlock",
    ("query_major rows", "rows_wait"): "in flight",
    ("query_major rows", "rows_fence"): "inf/NaN elsewhere",
    ("transposed_fp8 rows", "rows_room"): "deadlock|in flight|inf/NaN elsewhere|cosine|more arrivals",
    ("transposed_fp8 rows", "rows_arrival"): "in flight|inf/NaN elsewhere",
    ("transposed_fp8 rows", "rows_commit"): "deadlock",
    ("transposed_fp8_math rows", "probabilities_fence"): "inf/NaN elsewhere|cosine",
    ("transposed_fp8_math rows", "rows_fence"): "inf/NaN elsewhere",
    ("transposed_fp8_math rows", "rows_arrival"): "in flight|inf/NaN elsewhere",
    ("transposed_fp8_math rows", "rows_commit"): "deadlock",
    ("transposed_fp8_math rows", "lent_commit"): "deadlock",
    ("query_major", "scores_wait"): "in flight",
    ("query_major", "stage_release"): "deadlock",
    ("query_major", "rope_wait"): "in flight",
    ("query_major", "published_sync"): ".",
    ("query_major", "tail_fence"): "without fence.proxy.async",
    ("query_major", "tail_sync"): "inf/NaN elsewhere",
    ("query_major", "output_fence"): "wgmma.fence",
    ("mixed_major", "scores_wait"): "in flight",
    ("mixed_major", "rope_sync"): "inf/NaN elsewhere|cosine|log-sum-exp",
    ("mixed_major", "tile_sync"): ".",
    ("mixed_major", "own_tile_sync"): "different WGMMAs|never written",
    ("mixed_major rows", "own_tile_sync"): "never written|inf/NaN elsewhere|cosine",
    ("mixed_major", "published_fence"): "without fence.proxy.async|inf/NaN elsewhere|cosine",
    ("mixed_major", "half_tail_sync"): "inf/NaN elsewhere",
    ("mixed_major rows", "rows_fence"): "inf/NaN elsewhere|cosine|without fence.proxy.async",
}


@cache
def marked(kernel: str) -> Entry:
    module = kernels.module("marked")
    form, _, what = kernel.partition(" ")
    first, last = TRAITS.get(form, f"{form}::Traits<"), f", {'false' if what in ('rows', 'parts') else 'true'}>("
    return Entry(module, next(name for full, name in module.names.items() if first in full and last in full))


def fault_of(case: Case, edit: Edit, **how) -> str:
    """What the emulator says of the marked kernel of a case, changed by an edit; empty when it finds nothing."""
    for seed in range(3):
        for timing in TIMINGS:
            try:
                found, _ = emulate(case, sources=kernels.MARKED, edit=edit, seed=seed, timing=timing, **how)
            except EmulationError as error:
                return str(error)
            if found:
                return found[0]
    return ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("kernel", CASES)
def test_the_kernel_without_a_planted_fault_has_none(kernel, timing):
    verify(CASES[kernel], sources=kernels.MARKED, timing=timing, early_loads="early" in kernel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel, mark", FAULTS)
def test_missing_synchronisation_is_found(kernel, mark):
    assert mark in marked(kernel).marks
    case = WHOLE_TILES if mark in ("probabilities_fence", "merge_ready") else CASES[kernel]
    if mark == "rope_wait":  # of each split's first tile alone
        case = replace(case, lengths=2 * (200, 449, 320, 64, 449, 130))
    if mark == "lent_room":  # a borrowed stage held an earlier loan, or the other consumer's tile
        case = replace(case, lengths=2 * (130, 192, 130, 100, 192, 130))
    found = fault_of(case, faults.without(mark), early_loads="early" in kernel)
    assert re.search(FAULTS[kernel, mark], found), found


@pytest.mark.exhaustive
def test_every_mark_is_left_out_by_a_test():
    assert {mark for _, mark in FAULTS} == set().union(*(marked(kernel).marks for kernel in CASES))


@pytest.mark.exhaustive
def test_waits_for_the_other_parity_are_found():
    case = Case((200, 449, 64), num_sms=1)  # splits of several tiles and of one
    waits = [item for item in marked("transposed").instructions() if "try_wait" in item.parts]
    _, ran = emulate(case, sources=kernels.MARKED)
    idle = kernels.kernel_of("marked", marked("transposed").name, None).missed(ran)
    waits = [wait for wait in waits if wait.text not in idle]
    assert len(waits) > 8
    for wait in waits[:: len(waits) // 4]:
        assert fault_of(case, faults.other_parity(wait)), f"not found: {wait}"


@pytest.mark.exhaustive
def test_an_access_behind_a_tensor_is_found():
    loads = [item for item in marked("transposed").instructions() if item.opcode == "ld.global.u32"]
    found = [fault_of(CASES["transposed"], faults.far_behind(load)) for load in loads[:3]]  # not all are of this case
    assert any(re.search(r"(?s)out of bounds.*ld\.global.*\.cuh:\d+", one) for one in found), found
