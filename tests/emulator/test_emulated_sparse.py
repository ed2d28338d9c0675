"""The sparse kernels themselves, run instruction by instruction, against float64.

Cases that are marked exhaustive run in `make test-engines`. ETAP_EMULATOR_SEEDS=N has N interleavings of every case
that depends on them, the first of which is not marked; 2 by default.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from functools import cache, lru_cache

import kernels
import pytest
import torch
from emulator import faults
from emulator.machine import TIMINGS
from emulator.ptx import Edit, EmulationError, Entry
from kernels import covering

from etap_backend._library import library
from etap_backend.sparse import sparse_decode_shape

pytestmark = kernels.NEEDS_COMPILER

SEEDS = range(int(os.environ.get("ETAP_EMULATOR_SEEDS", "2")))
LATENT, ROPE, GROUP = 512, 64, 128
HEAD_DIM = LATENT + ROPE
TILE = 64
SOFTMAX_SCALE = HEAD_DIM**-0.5
PER_TOKEN = ("q", "q_rope", "indices", "valid_counts", "out", "lse")  # arguments that have a row for each token
WILD = (-1, -7, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Case:
    """One sparse call. Its repr is a constructor."""

    heads: int
    top_k: int = 65
    tokens: int = 2
    partitions: int = 1
    fp8: bool = False
    rope: bool = True
    page_size: int = 64
    pages: int = 5
    requests: int = 0  # of a block table through which indices are positions; 0: they are physical rows
    invalid: float = 0.2  # share of the entries that name no row
    counts: tuple[int, ...] | None = None
    sinks: bool = False
    scales: tuple[float, ...] = (0.01, 0.02, 0.005)  # of FP8 rows, drawn from these
    alike: bool = False  # FP8 rows and queries of one number each, the largest of e4m3 and 1
    latent: float = 1.0  # times the queries' latent part
    q_layout: str = "packed"  # packed, split (latent transposed, rope a window), shared (all tokens have the same rows)
    cache_layout: str = "dense"  # dense, gapped (pages and rows apart), headed (4-D)
    seed: int = 0

    @property
    def width(self) -> int:
        """Columns of a row."""
        return HEAD_DIM if self.rope else LATENT


@dataclass(frozen=True)
class Problem:
    case: Case
    tensors: dict[str, torch.Tensor | None]  # the call's arguments in order
    keys: list[torch.Tensor]  # float64 [rows that count, width] of each token
    q: torch.Tensor  # float64 [tokens, heads, width]


def queries(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    def normal(*shape):
        return torch.ones(shape).bfloat16() if case.alike else torch.randn(shape, generator=generator).bfloat16()

    if case.q_layout == "packed":
        q = normal(case.tokens, case.heads, case.width)
        q[..., :LATENT] *= case.latent
        return q, None
    if case.q_layout == "shared":
        return normal(1, case.heads, case.width).expand(case.tokens, -1, -1), None
    latent = normal(case.heads, case.tokens, LATENT).transpose(0, 1)
    return latent, normal(case.tokens, case.heads, ROPE + 128)[..., 128:] if case.rope else None


def cache_rows(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they are stored, bfloat16 or bytes of FP8 rows, and what they stand for in float64."""
    rows = case.pages * case.page_size
    values = torch.randn(rows, case.width, generator=generator)
    if not case.fp8:
        return values.bfloat16(), values.bfloat16().double()
    picked = torch.randint(len(case.scales), (rows, LATENT // GROUP), generator=generator)
    scales = torch.tensor(case.scales)[picked]
    latent = torch.full((rows, LATENT), 448.0) if case.alike else (values[:, :LATENT] * 100).clamp(-448, 448)
    latent = latent.to(torch.float8_e4m3fn)
    rope = values[:, LATENT:].bfloat16()
    stored = torch.cat([x.contiguous().view(torch.uint8) for x in (latent, scales, rope)], dim=1)
    meant = latent.double().view(rows, -1, GROUP) * scales.double()[..., None]
    return stored, torch.cat([meant.view(rows, LATENT), rope.double()], dim=1)


def listed(case: Case, generator: torch.Generator) -> tuple[dict[str, torch.Tensor | None], list[list[int]]]:
    """Indices and what they are read with, and the physical rows that each token's entries name."""

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    rows = case.pages * case.page_size
    window = torch.full((case.tokens, case.top_k + 3), 2**31 - 1, dtype=torch.int32)
    indices = window[:, : case.top_k]
    table = ids = None
    if case.requests:
        max_pages = case.pages + 2
        table = torch.randint(case.pages, (case.requests, max_pages), generator=generator).int()
        table[:, 1], table[0, 2] = -1, case.pages  # pages that are none
        ids = torch.randint(case.requests, (case.tokens,), generator=generator).int()
        if case.tokens > 2:
            ids[1], ids[2] = -1, case.requests
    named = []
    for token in range(case.tokens):
        valid, count = [], case.top_k if case.counts is None else case.counts[token]
        for entry in range(case.top_k):
            if torch.rand((), generator=generator) < case.invalid:
                wild = (*WILD, rows if table is None else table.shape[1] * case.page_size)
                indices[token, entry] = wild[number(len(wild))]
                continue
            at = number(rows if table is None else table.shape[1] * case.page_size)
            indices[token, entry] = at
            row = at
            if table is not None:
                request = int(ids[token])
                page = int(table[request, at // case.page_size]) if 0 <= request < case.requests else -1
                row = page * case.page_size + at % case.page_size if 0 <= page < case.pages else -1
            if row >= 0 and entry < count:
                valid.append(row)
        named.append(valid)
    counts = None if case.counts is None else torch.tensor(case.counts, dtype=torch.int32)
    names = ("extra_kv_cache", "extra_indices", "extra_block_table", "extra_valid_counts")
    lists = dict(indices=indices, block_table=table, request_ids=ids, valid_counts=counts)
    return lists | dict.fromkeys(names), named


@lru_cache(4)
def build(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    q, q_rope = queries(case, generator)
    stored, meant = cache_rows(case, generator)
    lists, named = listed(case, generator)
    unnamed = torch.ones(len(stored), dtype=torch.bool)
    unnamed[[row for rows in named for row in rows]] = False
    stored.view(torch.uint8)[unnamed] = 0xFF  # NaN in every type
    pages = stored.view(case.pages, case.page_size, -1)
    if case.cache_layout == "gapped":
        step = 16 // pages.element_size()
        room = torch.full((case.pages, case.page_size + 3, pages.shape[2] + step), -1, dtype=torch.int8)
        room = room.repeat_interleave(pages.element_size(), 2).view(pages.dtype)
        room[:, : case.page_size, : pages.shape[2]] = pages
        pages = room[:, : case.page_size, : pages.shape[2]]
    elif case.cache_layout == "headed":
        pages = pages.unsqueeze(2)
    shape = sparse_decode_shape(case.heads)
    tensors = dict(q=q, q_rope=q_rope, kv_cache=pages, **lists)
    tensors["sinks"] = torch.randn(case.heads, generator=generator) * 4 if case.sinks else None
    if case.sinks:
        tensors["sinks"][-2:] = torch.tensor([math.inf, -math.inf])[-case.heads :]
    tensors["workspace"] = torch.full((shape.workspace_floats(case.partitions),), math.nan)
    tensors["out"] = torch.empty(case.tokens, case.heads, LATENT, dtype=torch.bfloat16)
    tensors["lse"] = torch.empty(case.tokens, case.heads)
    whole = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
    return Problem(case, tensors, [meant[rows] for rows in named], whole.double())


@dataclass
class Truth:
    out: torch.Tensor  # float64 [tokens, heads, 512]
    lse: torch.Tensor  # float64 [tokens, heads]
    limit: torch.Tensor  # float64 like out: how far an element may be off
    lse_limit: torch.Tensor  # float64 like lse


@lru_cache(4)
def truth(case: Case) -> Truth:
    """Float64, and what the formats of P and of the output may cost an element.

    P is rounded to bfloat16, relative to its size by at most u, at random: the sum of that is held to six times its
    deviation. FP8 rows: P times a scale is, and the output is divided by the sum of P before that. Scores are float32.
    """
    problem = build(case)
    out = torch.zeros(case.tokens, case.heads, LATENT, dtype=torch.float64)
    lse = torch.full((case.tokens, case.heads), -math.inf, dtype=torch.float64)
    limit, lse_limit = torch.zeros_like(out), torch.zeros_like(lse)
    u, tiny = torch.finfo(torch.bfloat16).eps / 2, 2.0**-126
    for token, keys in enumerate(problem.keys):
        if not len(keys):
            continue
        scores, values = problem.q[token] @ keys.T * SOFTMAX_SCALE, keys[:, :LATENT]
        lse[token] = torch.logsumexp(scores, dim=-1)
        lse_limit[token] = 1e-5 + 2.0**-22 * (problem.q[token].abs() @ keys.abs().T * SOFTMAX_SCALE).amax(-1)
        left = torch.ones(case.heads, dtype=torch.float64)
        if case.sinks:
            left = 1 / (1 + torch.exp(problem.tensors["sinks"].double() - lse[token]))
        weights = torch.softmax(scores, dim=-1) * left[:, None]
        out[token] = weights @ values
        far = values.abs() if case.fp8 else values.abs() + out[token].abs().amax(0)
        # P of the entries that name one row are rounded alike.
        _, alike = torch.unique(keys, dim=0, return_inverse=True)
        together = weights @ (alike[:, None] == alike).double()
        at_random = 6 / math.sqrt(3) * u * ((weights * together) @ far.square()).sqrt()
        exact = 1e-5 * (weights @ values.abs()) + tiny * values.abs().sum(0)
        before = torch.minimum(at_random, u * (weights @ far)) + exact
        limit[token] = before + (out[token].abs() + before) * u
    return Truth(out, lse, limit, lse_limit)


def problems_with(problem: Problem) -> list[str]:
    wanted = truth(problem.case)
    out, lse = (problem.tensors[name].double() for name in ("out", "lse"))
    found = []
    if not torch.isfinite(out).all():
        found.append(f"out: NaN or infinity in tokens {(~torch.isfinite(out)).flatten(1).any(1).nonzero().flatten()}")
    if (over := (out - wanted.out).abs() > wanted.limit).any():
        token, head, dim = over.nonzero()[0].tolist()
        got, want = out[token, head, dim], wanted.out[token, head, dim]
        found.append(f"out: {int(over.sum())} elements, the first {(token, head, dim)}: {got}, wanted {want}")
    close = (lse == wanted.lse) | ((lse - wanted.lse).abs() <= wanted.lse_limit)
    if not close.all():
        token, head = (~close).nonzero()[0].tolist()
        found.append(f"lse: {(token, head)}: {lse[token, head]}, wanted {wanted.lse[token, head]}")
    return found


def emulate(case: Case, **how) -> tuple[list[str], set[int], tuple[torch.Tensor, torch.Tensor]]:
    """What is wrong with the result, the segments of the decode kernel that ran, and the result's bits."""
    problem = build(case)
    problem.tensors["out"].fill_(math.nan)
    problem.tensors["lse"].fill_(math.nan)
    ran = kernels.run_sparse(problem.tensors, SOFTMAX_SCALE, case.partitions, **how)
    bits = problem.tensors["out"].view(torch.int16).clone(), problem.tensors["lse"].view(torch.int32).clone()
    return problems_with(problem), ran, bits


def verify(case: Case, **how) -> tuple[torch.Tensor, torch.Tensor]:
    found, _, bits = emulate(case, **how)
    assert not found, "\n".join([*found, f"the case: {case!r}, {how}"])
    return bits


# ---------------------------------------------------------------------------------------------------------------- calls

KERNELS = [(fp8, heads) for fp8 in (False, True) for heads in (8, 16, 32, 64)]
PLACES = (
    {"page_size": 1, "pages": 70},
    {"page_size": 16, "cache_layout": "gapped", "requests": 2},
    {"cache_layout": "headed", "requests": 3},
)
LISTS = (  # top_k, share of invalid entries, valid counts, partitions
    (1, 0.0, None, 2),
    (130, 1.0, None, 9),
    (130, 0.95, (130, 64, 1), 1),
    (193, 0.3, (0, 500, 65), 6),
    (193, 0.0, (64, -3, 128), 1),
)
MIXED = (0.0, 1e-30, 1e30, 0.01)
SCALES = (((0.0,), False), ((1e-30,), False), ((1e30,), False), ((1e30,), True), (MIXED, False), ((3.0, -0.02), False))


# Partitions of three tiles where tokens have five, of four where they have three, and of one.
@covering(1, {"fp8, heads": KERNELS, "tokens, top_k, partitions": [(2, 300, 4), (5, 130, 4), (2, 65, 5)]})
def test_every_kernel(fp8, heads, tokens, top_k, partitions):
    counts = tuple(range(top_k, top_k - tokens, -1))
    verify(Case(heads, top_k, tokens, partitions, fp8, counts=counts), seed=heads)


@covering(1, {"fp8": [False, True], "heads, tokens, partitions": [(3, 2, 1), (40, 1, 2), (100, 2, 1), (100, 1, 2)]})
def test_heads_that_fill_no_tile_or_more_than_one(heads, fp8, tokens, partitions):
    verify(Case(heads, 100, tokens, partitions, fp8, sinks=True, q_layout="split"), seed=heads)


@covering(1, {"fp8, heads": [(False, 16), (False, 64), (True, 16), (True, 64)], "place": PLACES})
def test_where_rows_lie(fp8, heads, place):
    verify(Case(heads, 100, 3, 2, fp8, q_layout="shared", **place), seed=4)


@covering(1, {"fp8, heads": [(False, 16), (False, 64), (True, 8), (True, 64)], "q_layout": ["packed", "split"]})
def test_rows_without_rope(fp8, heads, q_layout):
    verify(Case(heads, 100, 1, 2, fp8, rope=False, q_layout=q_layout, cache_layout="gapped"), seed=7)


@covering(1, {
    "fp8, heads": [(False, 16), (False, 64), (True, 32), (True, 64)],
    "top_k, invalid, counts, partitions": LISTS,
})  # fmt: skip
def test_lists_of_few_entries(fp8, heads, top_k, invalid, counts, partitions):
    verify(Case(heads, top_k, 3, partitions, fp8, pages=1, invalid=invalid, counts=counts, sinks=True), seed=5)


@covering(1, {"heads": [8, 32, 64], "scales, alike": SCALES})
def test_scales_of_any_size(heads, scales, alike):
    verify(Case(heads, 100, 1, 2, fp8=True, scales=scales, alike=alike), seed=6)


# The latent part's scores are as large as the rope part's, queries and scales far from 1; scales of 0 beside them.
@covering(2, {"heads": [8, 32, 64], "latent, scale": [(1e30, 1e-32), (1e-30, 1e28)], "zeros": [False, True]})
def test_scales_that_queries_make_up_for(heads, latent, scale, zeros):
    scales = (scale, 0.3 * scale, *((0.0,) if zeros else ()))
    verify(Case(heads, 100, 1, 2, fp8=True, scales=scales, latent=latent), seed=8)


# Whole lists, pieces that are combined, and what a cluster sums where it can.
@covering(1, {"fp8, heads": KERNELS, "top_k, partitions, launches": [(130, 1, [1]), (130, 9, [1, 1]), (256, 12, [4])]})
def test_rows_that_see_nothing_have_the_log_sum_exp_that_is_asked_for(top_k, partitions, launches, fp8, heads):
    case = Case(heads, top_k, 3, partitions, fp8, counts=(100, 0, top_k), sinks=True)
    assert clusters(case) == ([1, 1] if launches == [4] and heads == 64 else launches)
    out, lse = verify(case)
    lse = lse.view(torch.float32)
    assert lse.isneginf().sum() == heads
    _, _, (other_out, other_lse) = emulate(case, empty_lse=math.inf)
    assert torch.equal(other_out, out)
    assert torch.equal(other_lse.view(torch.float32), lse.masked_fill(lse.isneginf(), math.inf))


@pytest.mark.parametrize("fp8, heads", [(False, 16), (False, 64), (True, 16), (True, 64)])
def test_bits_do_not_depend_on_what_a_cta_decoded_before(fp8, heads):
    """Behind an odd number of tiles a piece begins elsewhere in the ring, and with 64 rows with the other consumer."""
    behind = verify(Case(heads, 130, 2, fp8=fp8, invalid=0.0, counts=(1, 130)))
    problem = build(Case(heads, 130, 2, fp8=fp8, invalid=0.0, counts=(1, 130)))
    alone = {name: x[1:] if name in PER_TOKEN and x is not None else x for name, x in problem.tensors.items()}
    kernels.run_sparse(alone, SOFTMAX_SCALE, 1)
    for bits, name in zip(behind, ("out", "lse"), strict=True):
        assert torch.equal(bits[1:], alone[name].view(bits.dtype))


# ------------------------------------------------------------------------------------------------------------- clusters

IN_CLUSTERS = [k for k in KERNELS if k[1] < 64]


def clusters(case: Case) -> list[int]:
    """CTAs of a cluster in each of a case's launches."""
    arguments = (*build(case).tensors.values(), SOFTMAX_SCALE, case.partitions, -math.inf)
    return [launch[3] for launch in library().sparse_decode_launches(*arguments)]


# Pieces of a tile, and of three, behind which what the CTAs show each other lies over stages lent for merging.
@covering(1, {"fp8, heads": IN_CLUSTERS, "pieces, tiles": [(2, 1), (2, 3), (4, 1), (8, 1), (16, 1)]})
def test_pieces_that_a_cluster_sums(fp8, heads, pieces, tiles):
    tokens = 2 if pieces < 8 else 1
    case = Case(heads, pieces * tiles * TILE, tokens, tokens * pieces, fp8, sinks=True)
    assert clusters(case) == [pieces]
    verify(case, seed=heads)


@covering(1, {"fp8, heads": IN_CLUSTERS, "counts": [(100, 0, 256), (1, 65, -1)]})
def test_clusters_with_pieces_without_entries(fp8, heads, counts):
    case = Case(heads, 256, 3, 12, fp8, counts=counts)
    assert clusters(case) == [4]
    verify(case, seed=heads)
    verify(Case(heads, 256, 3, 12, fp8, invalid=1.0, sinks=True), seed=heads)


@pytest.mark.parametrize("fp8, heads", [(False, 8), (True, 16)])
def test_a_clusters_bits_do_not_depend_on_the_other_tokens(fp8, heads):
    case = Case(heads, 256, 3, 12, fp8, counts=(256, 100, 130))
    wanted = verify(case, timing="early")
    problem = build(case)
    alone = {name: x[1:2] if name in PER_TOKEN and x is not None else x for name, x in problem.tensors.items()}
    kernels.run_sparse(alone, SOFTMAX_SCALE, 4, seed=1, timing="late")
    for bits, name in zip(wanted, ("out", "lse"), strict=True):
        assert torch.equal(bits[1:2], alone[name].view(bits.dtype))


def test_what_no_cluster_sums_is_combined():
    three, many = Case(16, 192, 1, 3), Case(16, 2048, 1, 32)  # pieces that are no power of two, or more than 16
    wide, wide_fp8 = Case(64, 256, 1, 4), Case(64, 256, 1, 4, fp8=True)  # more than 32 heads
    across = Case(16, 320, 2, 4)  # a partition of two tokens
    for case in (three, many, wide, wide_fp8, across):
        assert clusters(case) == [1, 1]


# -------------------------------------------------------------------------------------------------------- interleavings

# Pieces whose stages, of tiles and lent for merging, come to lie on one another in turn; a mask that the next tile's
# follows at once.
INTERLEAVED = [
    *[Case(heads, 130, 3, fp8=fp8, counts=(130, 64, 65)) for fp8, heads in KERNELS],
    *[Case(heads, 64, 4, fp8=fp8, invalid=0.5) for fp8, heads in KERNELS],
    *[Case(heads, 384, 1, 2, fp8=fp8) for fp8, heads in IN_CLUSTERS],
    *[Case(heads, 256, 1, 4, fp8=fp8, counts=(100,)) for fp8, heads in IN_CLUSTERS],
]


@pytest.mark.parametrize("case", INTERLEAVED, ids=lambda case: f"{case.fp8}-{case.heads}-{case.top_k}")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in SEEDS[1:])])
def test_interleavings(case, seed):
    """The bits are the same as with copies at once; the one that is not marked has them at random."""
    wanted = verify(case, timing="early")
    for got, want in zip(verify(case, seed=seed, timing=("random", "late")[seed % 2]), wanted, strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------------- planted faults

FAULTY = {
    "transposed": Case(16, 130, 2, invalid=0.3),
    "clustered": Case(16, 384, 1, 2, invalid=0.3),
    "query_major": Case(64, 200, 1, invalid=0.3),
    "fp8": Case(32, 130, 2, fp8=True, invalid=0.3),
    "fp8_shared": Case(64, 200, 2, fp8=True, invalid=0.3),
}
LENT_AGAIN = Case(16, 64, 4)  # where what is lent held what was lent before
NONSENSE = "NaN or infinity|elements, the first"
FAULTS = {  # by mark (see csrc/common/mark.h): what the emulator says where it is left out, in each kernel that has it
    "launch_meeting": "no mbarrier",
    "launch_wait": "without having waited",
    "rows_room": f"deadlock|never written|{NONSENSE}",
    "rows_arrival": f"in flight|{NONSENSE}",
    "rows_commit": "deadlock",
    "rows_grant": "deadlock",
    "rows_wait": "in flight|never written",
    "rows_fence": NONSENSE,
    "other_rows_fence": NONSENSE,
    "queries_fence": NONSENSE,
    "queries_meeting": NONSENSE,
    "lent_room": f"deadlock|more arrivals|never written|in flight|{NONSENSE}",
    "lent_commit": "deadlock",
    "merge_grant": f"deadlock|in flight|{NONSENSE}",
    "stage_release": "deadlock",
    "scores_commit": "in flight",
    "scores_wait": "in flight",
    "probabilities_fence": NONSENSE,
    "probabilities_meeting": f"never written|{NONSENSE}",
    "products_meeting": NONSENSE,
    "shares_meeting": f"never written|{NONSENSE}",
    "hand_over_meeting": f"never written|{NONSENSE}",
    "output_fence": "wgmma.fence",
    "output_wait": "in flight",
    "halves_meeting": NONSENSE,
    "parts_meeting": f"never written|an mbarrier|{NONSENSE}",
    "cluster_end": "has ended",
}
PLANTED = {
    "transposed": "launch_meeting launch_wait lent_commit lent_room merge_grant output_fence output_wait "
    "probabilities_fence probabilities_meeting queries_meeting rows_arrival rows_commit rows_fence rows_grant "
    "rows_room scores_commit scores_wait stage_release",
    "clustered": "cluster_end halves_meeting parts_meeting",  # and those of transposed
    "query_major": "hand_over_meeting launch_meeting launch_wait other_rows_fence output_fence queries_meeting "
    "rows_arrival rows_commit rows_fence rows_room scores_wait",
    "fp8": "launch_meeting launch_wait lent_commit lent_room merge_grant probabilities_fence probabilities_meeting "
    "products_meeting queries_fence queries_meeting rows_arrival rows_commit rows_grant rows_room rows_wait "
    "stage_release",
    "fp8_shared": "launch_meeting launch_wait probabilities_fence probabilities_meeting queries_fence queries_meeting "
    "rows_arrival rows_commit rows_room rows_wait shares_meeting stage_release",
}


@cache
def marks(kernel: str) -> set[str]:
    module = kernels.module("marked_sparse")
    wanted = {"transposed": "transposed::Traits<.*false", "clustered": "transposed::Traits<.*SharedMemory, true"}
    wanted |= {"query_major": "query_major::Traits<", "fp8": "sparse_fp8::Traits<", "fp8_shared": "sparse_fp8::Shared"}
    return Entry(module, next(name for full, name in module.names.items() if re.search(wanted[kernel], full))).marks


def fault_of(case: Case, edit: Edit) -> str:
    """What the emulator says of the marked kernel of a case, changed by an edit; empty when it finds nothing."""
    for seed in range(4):
        for timing in TIMINGS:
            try:
                found, _, _ = emulate(case, sources=kernels.MARKED_SPARSE, edit=edit, seed=seed, timing=timing)
            except EmulationError as error:
                return str(error)
            if found:
                return found[0]
    return ""


@pytest.mark.parametrize("kernel", FAULTY)
def test_the_kernel_without_a_planted_fault_has_none(kernel):
    verify(FAULTY[kernel], sources=kernels.MARKED_SPARSE)


@pytest.mark.parametrize("kernel, mark", [(kernel, mark) for kernel in PLANTED for mark in PLANTED[kernel].split()])
def test_missing_synchronisation_is_found(kernel, mark):
    assert mark in marks(kernel)
    case = LENT_AGAIN if (kernel, mark) == ("transposed", "lent_room") else FAULTY[kernel]
    assert re.search(FAULTS[mark], fault_of(case, faults.without(mark)))


@pytest.mark.parametrize("kernel", PLANTED)
def test_every_mark_is_left_out_by_a_test(kernel):
    shared = marks("transposed") if kernel == "clustered" else set()
    assert set(PLANTED[kernel].split()) == marks(kernel) - shared
