"""The sparse kernels themselves, run instruction by instruction, against float64.

What runs always and what is marked exhaustive: see test_emulated_kernels. ETAP_EMULATOR_SEEDS=N has N interleavings of
every case that depends on them; 2 by default.
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

from support.covering import covering
from support.sparse_cases import SparseCase, SparseProblem, SparseRunner, build
from support.sparse_compare import Truth, problems_with, truth

pytestmark = kernels.NEEDS_COMPILER

SEEDS = range(int(os.environ.get("ETAP_EMULATOR_SEEDS", "2")))
TILE = 64
PER_TOKEN = (
    *("q", "call_q", "call_q_rope", "indices", "meant", "request_ids", "valid_counts"),
    *("extra_indices", "extra_meant", "extra_valid_counts"),
)
Bits = tuple[torch.Tensor, torch.Tensor]


@lru_cache(4)
def problem_and_truth(case: SparseCase) -> tuple[SparseProblem, Truth]:
    problem = build(case, "cpu")
    return problem, truth(problem)


def emulate(problem: SparseProblem, **how) -> tuple[SparseRunner, set[int], Bits]:
    """The buffers of an emulated call, the segments of the decode kernel that ran, and the result's bits."""
    runner = SparseRunner(problem)
    ran = kernels.run_sparse(problem, runner, **how)
    runner.check_guards()
    return runner, ran, (runner.out.tensor.view(torch.int16), runner.lse.tensor.view(torch.int32))


def problems_of(case: SparseCase, **how) -> tuple[list[str], Bits]:
    """What is wrong with the emulated kernels' result on a case, and the result's bits."""
    problem, wanted = problem_and_truth(case)
    runner, _, bits = emulate(problem, **how)
    return problems_with(runner.out.tensor, runner.lse.tensor, wanted), bits


def verify(case: SparseCase, **how) -> Bits:
    found, bits = problems_of(case, **how)
    assert not found, "\n".join([*found, f"the case: {case!r}, {how}"])
    return bits


# ---------------------------------------------------------------------------------------------------------------- calls

HEADS = (8, 16, 32, 64)  # a row tile each
CACHES = ("bf16", "fp8", "v4")
KERNELS = [(cache, heads) for cache in CACHES for heads in HEADS]
WITHOUT_ROPE = [("bf16", heads) for heads in HEADS] + [("fp8", 16), ("fp8", 64)]  # FP8 rows have no other kernels
PLACES = (
    dict(page_size=1),
    dict(page_size=16, cache_layout="gapped", requests=2),
    dict(page_size=3, cache_layout="headed", requests=2),
)
FEW = (  # lists of few entries, and of partitions
    dict(top_k=1, num_sms=2),
    dict(top_k=130, holes="all", num_sms=9),
    dict(top_k=130, holes="most", counts=(130, 64, 1), num_sms=1),
    dict(top_k=193, holes="wild", counts=(0, 500, 65), extra=1, extra_counts=(1, 1, 0), num_sms=6),
    dict(top_k=193, counts=(64, -3, 128), extra=130, extra_counts=(0, 0, 65), num_sms=1),
)
PAIRS = (  # both lists: V4's; one of them empty, for all tokens or for some; both positions; whole tiles
    dict(top_k=128, page_size=32, counts=(100, 128))
    | dict(extra=70, extra_counts=(70, 3), extra_page_size=16, extra_requests=2),
    dict(top_k=0, extra=70, holes="wild"),
    dict(top_k=70, counts=(0, 70), extra=66, extra_counts=(66, 0), extra_page_size=2, holes="wild"),
    dict(top_k=65, page_size=8, requests=2, extra=64, extra_requests=2, holes="wild"),
    dict(top_k=64, extra=128),
)


# Partitions of three tiles where tokens have four or two, and of one tile.
@covering(1, {
    "cache, heads, rope": [(*kernel, True) for kernel in KERNELS] + [(*kernel, False) for kernel in WITHOUT_ROPE],
    "tokens, top_k, extra, num_sms": [(2, 130, 64, 3), (3, 100, None, 2), (2, 130, None, 6)],
})  # fmt: skip
def test_every_kernel(cache, heads, rope, tokens, top_k, extra, num_sms):
    counts = [None if n is None else tuple(range(n, n - tokens, -1)) for n in (top_k, extra)]
    lists = dict(counts=counts[0], extra=extra, extra_counts=counts[1], holes="wild", num_sms=num_sms)
    verify(SparseCase(tokens, heads, top_k, cache, rope=rope, **lists), seed=heads)


def test_every_compiled_kernel_has_a_case():
    """See the dense kernels' test of this name."""
    found = set()
    for rows, heads, rope in [(*kernel, True) for kernel in KERNELS] + [(*kernel, False) for kernel in WITHOUT_ROPE]:
        case = SparseCase(1, heads, 64, rows, rope=rope, num_sms=1)
        problem = build(case, "cpu")
        tensors = kernels.sparse_tensors(problem, SparseRunner(problem))
        found |= {kernels.find(launch[0], kernels.SHIPPED) for launch in kernels.sparse_launches(case, tensors)}
    sources = ("lists_bf16", "lists_fp8")
    assert found == {(source, name) for source in sources for name in kernels.module(source).names.values()}


@covering(1, {"cache": CACHES, "heads, tokens, num_sms": [(3, 2, 1), (40, 1, 2), (100, 2, 2), (100, 1, 4)]})
def test_heads_that_fill_no_tile_or_more_than_one(heads, cache, tokens, num_sms):
    layouts = dict(q_layout="split", out_layout="transposed", sinks="infinite", holes="wild")
    verify(SparseCase(tokens, heads, 100, cache, num_sms=num_sms, **layouts), seed=heads)


@covering(1, {"cache, heads": [("bf16", 16), ("bf16", 64), ("fp8", 16), ("v4", 8), ("v4", 64)], "place": PLACES})
def test_where_rows_lie(cache, heads, place):
    verify(SparseCase(3, heads, 100, cache, q_layout="expanded", holes="wild", num_sms=2, **place), seed=4)


@covering(1, {
    "cache, heads": [("bf16", 16), ("bf16", 64), ("fp8", 8), ("fp8", 64)],
    "q_layout": ["packed", "split"],
})  # fmt: skip
def test_layouts_of_rows_without_rope(cache, heads, q_layout):
    layouts = dict(cache_layout="gapped", q_layout=q_layout, out_layout="transposed")
    verify(SparseCase(1, heads, 100, cache, rope=False, holes="wild", num_sms=2, **layouts), seed=7)


@covering(1, {"cache, heads": [("bf16", 16), ("bf16", 64), ("fp8", 32), ("v4", 64)], "lists": FEW})
def test_lists_of_few_entries(cache, heads, lists):
    verify(SparseCase(3, heads, cache=cache, sinks="infinite", **lists), seed=5)


@covering(1, {
    "cache, heads": [("v4", 8), ("v4", 16), ("v4", 64), ("bf16", 32), ("fp8", 16)],
    "lists": PAIRS,
    "num_sms": [1, 3],
})  # fmt: skip
def test_one_softmax_is_over_both_lists(cache, heads, lists, num_sms):
    case = SparseCase(2, heads, cache=cache, num_sms=num_sms, out_layout="transposed", **lists)
    verify(case, seed=num_sms)


@covering(1, {
    "heads": [8, 32, 64],
    "cache, scales": [(cache, scales) for cache in ("fp8", "v4") for scales in ("zeros", "tiny", "huge", "mixed")],
})  # fmt: skip
def test_scales_of_any_size(heads, cache, scales):
    verify(SparseCase(1, heads, 100, cache, scales=scales, num_sms=2), seed=6)


# Whole lists, splits that are combined, and splits that a cluster sums where it can.
@covering(1, {
    "cache, heads": [("bf16", 16), ("bf16", 64), ("fp8", 8), ("v4", 32)],
    "top_k, num_sms, launches": [(130, 1, [1]), (130, 9, [1, 1]), (256, 12, [4])],
})  # fmt: skip
def test_rows_that_see_nothing_have_the_requested_log_sum_exp(top_k, num_sms, launches, cache, heads):
    case = SparseCase(3, heads, top_k, cache, counts=(100, 0, top_k), sinks="infinite", num_sms=num_sms)
    assert clusters(case) == ([1, 1] if launches == [4] and heads == 64 else launches)
    out, lse = verify(case)
    lse = lse.view(torch.float32)
    assert lse.isneginf().sum() == heads
    _, _, (other_out, other_lse) = emulate(problem_and_truth(case)[0], empty_lse=math.inf)
    assert torch.equal(other_out, out)
    assert torch.equal(other_lse.view(torch.float32), lse.masked_fill(lse.isneginf(), math.inf))


def alone(problem: SparseProblem, token: int, num_sms: int) -> SparseProblem:
    """The problem of one token."""
    rows = slice(token, token + 1)
    own = {name: getattr(problem, name) for name in PER_TOKEN}
    case = replace(problem.case, tokens=1, num_sms=num_sms)
    return replace(problem, case=case, **{name: None if x is None else x[rows] for name, x in own.items()})


@pytest.mark.parametrize("cache, heads", [("bf16", 16), ("bf16", 64), ("fp8", 64), ("v4", 32)])
def test_bits_do_not_depend_on_what_a_cta_decoded_before(cache, heads):
    """Behind an odd number of tiles a split begins elsewhere in the ring, and with 64 rows with the other consumer."""
    case = SparseCase(2, heads, 130, cache, counts=(1, 130), num_sms=1)
    behind = verify(case)
    _, _, bits = emulate(alone(problem_and_truth(case)[0], 1, 1))
    assert all(torch.equal(a[1:], b) for a, b in zip(behind, bits, strict=True))


# ------------------------------------------------------------------------------------------------------------- clusters

IN_CLUSTERS = [(cache, heads) for cache, heads in KERNELS if heads < 64]


def clusters(case: SparseCase) -> list[int]:
    """CTAs of a cluster in each of a case's launches."""
    problem = build(case, "cpu")
    tensors = kernels.sparse_tensors(problem, SparseRunner(problem))
    return [launch[3] for launch in kernels.sparse_launches(case, tensors)]


# Splits of one, two and three tiles: the CTAs' exchange then lies over stages that the merge borrowed.
@covering(1, {
    "cache": CACHES,
    "heads": [8, 16, 32],
    "splits, tiles": [(2, 2), (2, 3), (4, 1), (8, 1), (8, 2)],
})  # fmt: skip
def test_splits_that_a_cluster_sums(cache, heads, splits, tiles):
    tokens = 2 if splits < 8 else 1
    lists = dict(top_k=(splits * tiles - 1) * TILE, extra=TILE, num_sms=tokens * splits)
    case = SparseCase(tokens, heads, cache=cache, sinks="infinite", holes="wild", **lists)
    assert clusters(case) == [splits]
    verify(case, seed=heads)


@covering(1, {"cache": CACHES, "heads": [8, 16, 32], "counts": [(100, 0, 256), (1, 65, -1)]})
def test_clusters_with_splits_without_entries(cache, heads, counts):
    case = SparseCase(3, heads, 256, cache, counts=counts, holes="wild", out_layout="transposed", num_sms=12)
    assert clusters(case) == [4]
    verify(case, seed=heads)


@pytest.mark.parametrize("cache, heads", [("fp8", 8), ("v4", 16)])
def test_a_clusters_bits_do_not_depend_on_the_other_tokens(cache, heads):
    lists = dict(counts=(192, 100, 130), extra=64, extra_counts=(0, 64, 1), holes="wild")
    case = SparseCase(3, heads, 192, cache, num_sms=12, **lists)
    wanted = verify(case, timing="early")
    _, _, bits = emulate(alone(problem_and_truth(case)[0], 1, 4), seed=1, timing="late")
    assert all(torch.equal(a[1:2], b) for a, b in zip(wanted, bits, strict=True))


def test_splits_that_no_cluster_sums_are_combined():
    three, many = SparseCase(1, 16, 192, num_sms=3), SparseCase(1, 16, 2048, num_sms=32)  # no 2, 4 or 8 splits
    wide = [SparseCase(1, 64, 256, cache, num_sms=4) for cache in CACHES]  # more than 32 heads
    across = SparseCase(3, 16, 640, num_sms=5)  # a partition of two tokens
    for case in (three, many, *wide, across):
        assert clusters(case) == [1, 1]


# -------------------------------------------------------------------------------------------------------- interleavings

# Splits whose stages hold tiles and the merge's data in turn; a mask that the next tile's follows at once; the end of
# one list and the beginning of the other.
THREE_SPLITS = dict(tokens=3, top_k=130, counts=(130, 64, 65), holes="wild", num_sms=1)
SINGLE_TILES = dict(tokens=4, top_k=64, holes="wild", num_sms=1)
BOTH_LISTS = dict(tokens=3, top_k=128, counts=(100, 128, 1), extra=70, extra_counts=(70, 0, 66), num_sms=1)
A_PAIR = dict(tokens=1, top_k=384, holes="wild", num_sms=2)
A_CLUSTER = dict(tokens=1, top_k=192, counts=(100,), extra=64, extra_counts=(64,), holes="wild", num_sms=4)
INTERLEAVED = [
    *[SparseCase(heads=heads, cache=rows, **THREE_SPLITS) for rows, heads in KERNELS if rows != "v4"],
    *[SparseCase(heads=heads, cache=rows, **SINGLE_TILES) for rows, heads in KERNELS],
    *[SparseCase(heads=heads, cache=rows, **BOTH_LISTS) for rows, heads in KERNELS if rows == "v4"],
    *[SparseCase(heads=heads, cache=rows, **lists) for lists in (A_PAIR, A_CLUSTER) for rows, heads in IN_CLUSTERS],
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", INTERLEAVED, ids=repr)
def test_interleavings(case, seed):
    """The bits are the same as with copies at once."""
    wanted = verify(case, timing="early")
    for got, want in zip(verify(case, seed=seed, timing=("random", "late")[seed % 2]), wanted, strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------------- planted faults

FAULTY = {  # by kernel and, where it matters to the faults, by rows
    "transposed": SparseCase(2, 16, 130, holes="anywhere", num_sms=1),
    "clustered": SparseCase(1, 16, 384, holes="anywhere", num_sms=2),
    "v4": SparseCase(2, 32, 70, "v4", extra=66, holes="anywhere", num_sms=1),
    "v4 clustered": SparseCase(1, 32, 448, "v4", extra=64, holes="anywhere", num_sms=4),
    "query_major": SparseCase(1, 64, 200, holes="anywhere", num_sms=1),
    "query_major of v4": SparseCase(1, 64, 130, "v4", extra=70, holes="anywhere", num_sms=1),
    "fp8": SparseCase(2, 32, 130, "fp8", holes="anywhere", num_sms=1),
    "fp8_shared": SparseCase(2, 64, 200, "fp8", holes="anywhere", num_sms=1),
}
NONSENSE = "inf/NaN elsewhere|cosine|log-sum-exp|largest error|RMSE"
FAULTS = {  # by mark (see csrc/common/mark.h): what the emulator says where it is left out, in each kernel that has it
    "launch_sync": "no mbarrier",
    "lists_wait": "without having waited",
    "queries_wait": "without having waited",
    "rows_room": f"deadlock|more arrivals|never written|in flight|{NONSENSE}",
    "rows_arrival": f"in flight|{NONSENSE}",
    "rows_commit": "deadlock",
    "tile_ready": "deadlock",
    "rows_wait": "in flight|never written",
    "rows_fence": NONSENSE,
    "other_rows_fence": NONSENSE,
    "queries_fence": NONSENSE,
    "queries_sync": f"never written|{NONSENSE}",
    "lent_room": f"deadlock|more arrivals|never written|in flight|{NONSENSE}",
    "lent_commit": "deadlock",
    "merge_ready": f"deadlock|in flight|{NONSENSE}",
    "stage_release": "deadlock",
    "scores_commit": "in flight",
    "scores_wait": "in flight",
    "rope_wait": f"in flight|{NONSENSE}",
    "probabilities_fence": NONSENSE,
    "probabilities_sync": f"never written|{NONSENSE}",
    "products_sync": NONSENSE,
    "shares_sync": f"never written|{NONSENSE}",
    "published_sync": f"never written|{NONSENSE}",
    "output_fence": "wgmma.fence",
    "output_wait": "in flight",
    "output_sync": f"in flight|{NONSENSE}",
    "halves_sync": NONSENSE,
    "parts_sync": f"never written|an mbarrier|{NONSENSE}",
    "cluster_end": "has ended",
}
PRODUCERS = "rows_fence rows_commit rows_room"  # where V4's rows come from, and again of others
TRANSPOSED = (
    "launch_sync lent_commit lent_room lists_wait merge_ready output_fence output_wait probabilities_fence "
    "probabilities_sync queries_sync queries_wait rows_arrival rows_commit rows_fence tile_ready rows_room "
    "scores_commit scores_wait stage_release"
)
QUERY_MAJOR = (
    "published_sync launch_sync lists_wait other_rows_fence output_fence queries_sync queries_wait "
    "rope_wait rows_arrival rows_commit rows_fence rows_room scores_wait stage_release"
)
SCALED = (
    "launch_sync lists_wait probabilities_fence probabilities_sync products_sync queries_fence "
    "queries_sync queries_wait rows_arrival rows_commit tile_ready rows_room rows_wait stage_release"
)
FP8 = f"{SCALED} lent_commit lent_room merge_ready"
V4 = f"{SCALED} output_sync"  # halves cross where P^T was
FP8_SHARED = (
    "launch_sync lists_wait probabilities_fence probabilities_sync queries_fence queries_sync queries_wait "
    "rows_arrival rows_commit rows_room rows_wait shares_sync stage_release"
)
SUMMED = "cluster_end parts_sync"
IN_A_CLUSTER = f"{SUMMED} halves_sync"
PLANTED = {
    "transposed": TRANSPOSED,
    "clustered": IN_A_CLUSTER,
    "v4": V4,
    "v4 clustered": SUMMED,
    "query_major": QUERY_MAJOR,
    "query_major of v4": PRODUCERS,
    "fp8": FP8,
    "fp8_shared": FP8_SHARED,
}


TRAITS = {  # of the marked kernels
    "transposed": "transposed::Traits<cutlass::bfloat16_t, 16, 9>",
    "clustered": "transposed::Traits<cutlass::bfloat16_t, 16, 9>",
    "v4": "sparse_fp8::Traits<32, etap::sparse_fp8::V4Row>",
    "v4 clustered": "sparse_fp8::Traits<32, etap::sparse_fp8::V4Row>",
    "query_major": "query_major::Traits<cutlass::bfloat16_t, 9>",
    "query_major of v4": "query_major::Traits<cutlass::bfloat16_t, 8>",
    "fp8": "sparse_fp8::Traits<32, etap::sparse_fp8::V32Row>",
    "fp8_shared": "sparse_fp8::SharedTilesTraits",
}


@cache
def marks(kernel: str) -> set[str]:
    module = kernels.module("marked_sparse")
    return Entry(module, next(name for full, name in module.names.items() if TRAITS[kernel] in full)).marks


def fault_of(case: SparseCase, edit: Edit) -> str:
    """What the emulator says of the marked kernel of a case, changed by an edit; empty when it finds nothing."""
    for seed in range(4):
        for timing in TIMINGS:
            try:
                found, _ = problems_of(case, sources=kernels.MARKED_SPARSE, edit=edit, seed=seed, timing=timing)
            except EmulationError as error:
                return str(error)
            if found:
                return found[0]
    return ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", FAULTY)
def test_the_kernel_without_a_planted_fault_has_none(kernel):
    verify(FAULTY[kernel], sources=kernels.MARKED_SPARSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kernel, mark", [(kernel, mark) for kernel, marks in PLANTED.items() for mark in marks.split()]
)
def test_missing_synchronisation_is_found(kernel, mark):
    assert mark in marks(kernel)
    case = FAULTY[kernel]
    if mark == "lent_room":  # a borrowed stage held an earlier loan, or the other consumer's tile
        case = replace(case, tokens=4, top_k=64 if kernel == "transposed" else case.top_k)
    if mark == "rope_wait":  # of each split's first tile alone
        case = replace(case, tokens=5, top_k=130)
    found = fault_of(case, faults.without(mark))
    assert re.search(FAULTS[mark], found), found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kernel, names",
    [
        ("transposed", f"{TRANSPOSED} {IN_A_CLUSTER}"),
        ("v4", f"{V4} {SUMMED}"),
        ("query_major", QUERY_MAJOR),
        ("fp8", f"{FP8} {IN_A_CLUSTER}"),
        ("fp8_shared", FP8_SHARED),
    ],
)
def test_every_mark_is_left_out_by_a_test(kernel, names):
    assert set(names.split()) == marks(kernel)
