"""The sparse kernels themselves, run instruction by instruction, against float64.

Cases that are marked exhaustive run in `make test-engines`. ETAP_EMULATOR_SEEDS=N has N interleavings of every case
that depends on them, the first of which is not marked; 2 by default.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import kernels
import pytest
import torch
from emulator import faults
from emulator.formats import f64_to_bf16
from emulator.machine import TIMINGS
from emulator.ptx import Edit, EmulationError, Entry
from kernels import covering

from etap_backend._library import library
from etap_backend.schedule import DecodeShape

pytestmark = kernels.NEEDS_COMPILER

SEEDS = range(int(os.environ.get("ETAP_EMULATOR_SEEDS", "2")))
LATENT, ROPE, GROUP = 512, 64, 128
V4_NOPE, V4_GROUP, V4_DATA, V4_ROW = 448, 64, 576, 584
HEAD_DIM = LATENT + ROPE
TILE = 64
SOFTMAX_SCALE = HEAD_DIM**-0.5
PER_TOKEN = (
    "q",
    "q_rope",
    "indices",
    "request_ids",
    "valid_counts",
    "extra_indices",
    "extra_valid_counts",
    "out",
    "lse",
)
WILD = (-1, -7, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class List:
    """What each token names of one cache."""

    top_k: int = 65
    counts: tuple[int, ...] | None = None
    invalid: float = 0.2  # share of the entries that name no row
    positions: bool = False  # indices are positions, through a block table; else physical rows
    page_size: int = 64
    pages: int = 5
    layout: str = "dense"  # dense, gapped (pages and, but for V4, rows apart), headed (4-D)


@dataclass(frozen=True)
class Case:
    """One sparse call. Its repr is a constructor."""

    heads: int
    first: List = List()
    extra: List | None = None
    tokens: int = 2
    partitions: int = 1
    cache: str = "bf16"  # bf16, fp8 (V3.2's rows) or v4 (V4's, without rope behind the latent part)
    rope: bool = True
    requests: int = 2  # of the block tables
    sinks: bool = False
    scales: tuple[float, ...] = (0.01, 0.02, 0.005)  # of FP8 rows, drawn from these
    nope_scale: float = 1.0  # of the queries' columns that meet FP8 elements
    q_layout: str = "packed"  # packed, split (latent transposed, rope a window), shared (all tokens have the same rows)
    out_layout: str = "packed"  # packed, or strided (the heads of a wider tensor, transposed)
    seed: int = 0

    @property
    def width(self) -> int:
        """Columns of a row as keys."""
        return HEAD_DIM if self.rope else LATENT

    @property
    def nope(self) -> int:
        """Columns of e4m3 in FP8 rows."""
        return V4_NOPE if self.cache == "v4" else LATENT

    @property
    def lists(self) -> tuple[List, ...]:
        return (self.first,) if self.extra is None else (self.first, self.extra)


@dataclass(frozen=True)
class Problem:
    case: Case
    tensors: dict[str, torch.Tensor | None]  # the call's arguments in order
    keys: list[torch.Tensor]  # float64 [rows that count, width] of each token
    q: torch.Tensor  # float64 [tokens, heads, width]


def queries(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    if case.q_layout == "packed":
        q = normal(case.tokens, case.heads, case.width)
        q[..., : case.nope] *= case.nope_scale
        return q, None
    if case.q_layout == "shared":
        return normal(1, case.heads, case.width).expand(case.tokens, -1, -1), None
    latent = normal(case.heads, case.tokens, LATENT).transpose(0, 1)
    return latent, normal(case.tokens, case.heads, ROPE + 128)[..., 128:] if case.rope else None


def as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Float64, rounded once to what bfloat16 holds."""
    bits = torch.from_numpy(f64_to_bf16(x.contiguous().numpy()).view("int16"))
    return bits.view(torch.bfloat16).double()


def cache_rows(case: Case, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they are stored (of V4's, data and the 8 bytes of scales) and what they stand for, float64."""
    values = torch.randn(rows, case.width, generator=generator)
    if case.cache == "bf16":
        return values.bfloat16(), values.bfloat16().double()
    nope, group = case.nope, V4_GROUP if case.cache == "v4" else GROUP
    elements = (values[:, :nope] * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    rest = values[:, nope:].bfloat16()
    picked = torch.randint(len(case.scales), (rows, nope // group), generator=generator)
    scales = torch.tensor(case.scales)[picked]
    if case.cache == "v4":
        exponents = (scales.double().log2().round() + 127).clamp(0, 254)
        unread = torch.full((rows, 1), 0xFF, dtype=torch.uint8)
        parts = (elements, rest, exponents.to(torch.uint8), unread)
        scales = 2.0 ** (exponents - 127)
    else:
        parts = (elements, scales, rest)
    stored = torch.cat([x.contiguous().view(torch.uint8) for x in parts], dim=1)
    grouped, each = elements.double().view(rows, -1, group), scales[..., None]
    meant = as_bfloat16(grouped * each) if case.cache == "v4" else grouped * each.double()
    return stored, torch.cat([meant.view(rows, nope), rest.double()], dim=1)


def paged(case: Case, one: List, stored: torch.Tensor) -> torch.Tensor:
    """The cache that holds these rows."""
    if case.cache == "v4":
        return _v4_pages(one, stored)
    pages = stored.view(one.pages, one.page_size, -1)
    if one.layout == "gapped":
        step = 16 // pages.element_size()
        room = torch.full((one.pages, one.page_size + 3, pages.shape[2] + step), -1, dtype=torch.int8)
        room = room.repeat_interleave(pages.element_size(), 2).view(pages.dtype)
        room[:, : one.page_size, : pages.shape[2]] = pages
        pages = room[:, : one.page_size, : pages.shape[2]]
    return pages.unsqueeze(2) if one.layout == "headed" else pages


def _v4_pages(one: List, stored: torch.Tensor) -> torch.Tensor:
    """A page's data of all rows, and behind them the scales of all; pages begin at multiples of 16 bytes."""
    size = one.page_size * V4_ROW
    stride = -(-size // 16) * 16 + (48 if one.layout == "gapped" else 0)
    room = torch.full((one.pages, stride), 0xFF, dtype=torch.uint8)
    rows = stored.view(one.pages, one.page_size, V4_ROW)
    room[:, : one.page_size * V4_DATA] = rows[..., :V4_DATA].flatten(1)
    room[:, one.page_size * V4_DATA : size] = rows[..., V4_DATA:].flatten(1)
    pages = room.as_strided((one.pages, one.page_size, V4_ROW), (stride, V4_ROW, 1))
    return pages.unsqueeze(2) if one.layout == "headed" else pages


def listed(case: Case, one: List, ids: torch.Tensor, generator: torch.Generator):
    """Indices, the block table that they are read through, counts, and the rows that each token's entries name."""

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    rows = one.pages * one.page_size
    window = torch.full((case.tokens, one.top_k + 3), 2**31 - 1, dtype=torch.int32)
    indices = window[:, : one.top_k]
    table = None
    if one.positions:
        table = torch.randint(one.pages, (case.requests, one.pages + 2), generator=generator).int()
        table[:, 1], table[0, 2] = -1, one.pages  # pages that are none
    known = rows if table is None else table.shape[1] * one.page_size
    named = []
    for token in range(case.tokens):
        valid, count = [], one.top_k if one.counts is None else one.counts[token]
        for entry in range(one.top_k):
            if torch.rand((), generator=generator) < one.invalid:
                wild = (*WILD, known)
                indices[token, entry] = wild[number(len(wild))]
                continue
            at = row = number(known)
            indices[token, entry] = at
            if table is not None:
                request = int(ids[token])
                page = int(table[request, at // one.page_size]) if 0 <= request < case.requests else -1
                row = page * one.page_size + at % one.page_size if 0 <= page < one.pages else -1
            if row >= 0 and entry < count:
                valid.append(row)
        named.append(valid)
    return indices, table, None if one.counts is None else torch.tensor(one.counts, dtype=torch.int32), named


def shape_of(case: Case) -> DecodeShape:
    return DecodeShape(*library().sparse_decode_shape(case.heads))


def sinks_of(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if not case.sinks:
        return None
    sinks = torch.randn(case.heads, generator=generator) * 4
    sinks[-2:] = torch.tensor([math.inf, -math.inf])[-case.heads :]
    return sinks


@lru_cache(4)
def build(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    q, q_rope = queries(case, generator)
    ids = torch.randint(case.requests, (case.tokens,), generator=generator).int()
    if case.tokens > 2:
        ids[1], ids[2] = -1, case.requests
    tensors, keys = dict(q=q, q_rope=q_rope), [[] for _ in range(case.tokens)]
    for prefix, one in zip(("", "extra_"), (case.first, case.extra), strict=True):
        names = ("kv_cache", "indices", "block_table", "valid_counts")
        if one is None:
            tensors |= {f"extra_{name}": None for name in names}
            continue
        stored, meant = cache_rows(case, one.pages * one.page_size, generator)
        indices, table, counts, named = listed(case, one, ids, generator)
        unnamed = torch.ones(len(stored), dtype=torch.bool)
        unnamed[[row for rows in named for row in rows]] = False
        stored.view(torch.uint8)[unnamed] = 0xFF  # NaN in every type
        values = (paged(case, one, stored), indices, table, counts)
        tensors |= dict(zip((prefix + name for name in names), values, strict=True))
        for token, rows in enumerate(named):
            keys[token].append(meant[rows])
    order = ("q", "q_rope", "kv_cache", "indices", "block_table", "request_ids", "valid_counts", "extra_kv_cache")
    order += ("extra_indices", "extra_block_table", "extra_valid_counts")
    tensors["request_ids"] = ids if any(one.positions for one in case.lists) else None
    tensors = {name: tensors[name] for name in order}
    tensors["sinks"] = sinks_of(case, generator)
    tensors["workspace"] = torch.full((shape_of(case).workspace_floats(case.partitions),), math.nan)
    out = torch.empty(case.tokens, case.heads, LATENT, dtype=torch.bfloat16)
    if case.out_layout == "strided":
        out = torch.empty(case.heads + 1, case.tokens, LATENT + 8, dtype=torch.bfloat16)
        out = out[: case.heads, :, :LATENT].transpose(0, 1)
    tensors |= dict(out=out, lse=torch.empty(case.tokens, case.heads))
    whole = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
    return Problem(case, tensors, [torch.cat(parts) for parts in keys], whole.double())


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
    deviation. V3.2's rows: P times a scale is, and the output is divided by the sum of P before that. Scores are
    float32.
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
        far = values.abs() if case.cache == "fp8" else values.abs() + out[token].abs().amax(0)
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

HEADS = (8, 16, 32, 64)  # a row tile each
ROWS = {  # what producers bring, in tiles of nine chunks or of eight
    "bf16": {"cache": "bf16"},
    "fp8": {"cache": "fp8"},
    "v4": {"cache": "v4", "rope": False},
}
WITHOUT_ROPE = {"bf16": {"cache": "bf16", "rope": False}, "fp8": {"cache": "fp8", "rope": False}}
KERNELS = [(rows, heads) for rows in ROWS for heads in HEADS]
PLACES = (
    dict(page_size=1, pages=70),
    dict(page_size=16, layout="gapped", positions=True),
    dict(page_size=3, pages=40, layout="headed", positions=True),
)
FEW = (  # lists of few entries, and partitions
    (List(1, invalid=0.0), None, 2),
    (List(130, invalid=1.0), None, 9),
    (List(130, invalid=0.95, counts=(130, 64, 1)), None, 1),
    (List(193, invalid=0.3, counts=(0, 500, 65)), List(1, counts=(1, 1, 0)), 6),
    (List(193, invalid=0.0, counts=(64, -3, 128)), List(130, counts=(0, 0, 65)), 1),
)
WINDOW = List(128, counts=(100, 128), invalid=0.0, page_size=32)
COMPRESSED = List(70, counts=(70, 3), positions=True, page_size=16, pages=9)
PAIRS = (  # both lists: V4's; one of them empty, for all tokens or for some; both positions; whole tiles
    (WINDOW, COMPRESSED),
    (List(0), List(70)),
    (List(70, counts=(0, 70)), List(66, counts=(66, 0), page_size=2, pages=50)),
    (List(65, positions=True, page_size=8), List(64, positions=True, invalid=0.6)),
    (List(64, invalid=0.0), List(128, invalid=0.0)),
)
MIXED = (2.0**-126, 1e-30, 2.0**100, 0.01)
SCALES = [  # rows, scales, and what the queries are multiplied by so that scores are ordinary numbers
    *[("fp8", *each) for each in (((0.0,), 1), ((1e-30,), 1e29), ((1e30,), 1e-31), ((0.0, *MIXED), 2.0**-104))],
    *[("v4", *each) for each in (((2.0**-127,), 2.0**100), ((1e30,), 1e-31), (MIXED, 2.0**-104))],
    ("fp8", (3.0, -0.02), 0.01),
]


# Partitions of three tiles where tokens have five, of four where they have three, and of one.
@covering(
    1, {"rows, heads": KERNELS, "tokens, widths, partitions": [(3, (200, 64), 5), (5, (130, 0), 4), (2, (130, 0), 6)]}
)
def test_every_kernel(rows, heads, tokens, widths, partitions):
    first, extra = (List(width, counts=tuple(range(width, width - tokens, -1))) for width in widths)
    verify(Case(heads, first, extra if widths[1] else None, tokens, partitions, **ROWS[rows]), seed=heads)


@covering(1, {"rows": list(ROWS), "heads, tokens, partitions": [(3, 2, 1), (40, 1, 2), (100, 2, 1), (100, 1, 2)]})
def test_heads_that_fill_no_tile_or_more_than_one(heads, rows, tokens, partitions):
    layouts = dict(q_layout="split", out_layout="strided")
    verify(Case(heads, List(100), None, tokens, partitions, sinks=True, **layouts, **ROWS[rows]), seed=heads)


@covering(1, {"rows, heads": [("bf16", 16), ("bf16", 64), ("fp8", 16), ("v4", 8), ("v4", 64)], "place": PLACES})
def test_where_rows_lie(rows, heads, place):
    verify(Case(heads, List(100, **place), None, 3, 2, q_layout="shared", **ROWS[rows]), seed=4)


@covering(1, {"rows, heads": [("bf16", 16), ("bf16", 64), ("fp8", 8), ("fp8", 64)], "q_layout": ["packed", "split"]})
def test_rows_without_rope(rows, heads, q_layout):
    first = List(100, layout="gapped")
    verify(Case(heads, first, None, 1, 2, q_layout=q_layout, out_layout="strided", **WITHOUT_ROPE[rows]), seed=7)


@covering(1, {
    "rows, heads": [("bf16", 16), ("bf16", 64), ("fp8", 32), ("v4", 64)],
    "first, extra, partitions": FEW,
})  # fmt: skip
def test_lists_of_few_entries(rows, heads, first, extra, partitions):
    verify(Case(heads, first, extra, 3, partitions, sinks=True, **ROWS[rows]), seed=5)


@covering(1, {
    "rows, heads": [("v4", 8), ("v4", 16), ("v4", 64), ("bf16", 32), ("fp8", 16)],
    "first, extra": PAIRS,
    "partitions": [1, 3],
})  # fmt: skip
def test_one_softmax_is_over_both_lists(rows, heads, first, extra, partitions):
    verify(Case(heads, first, extra, 2, partitions, out_layout="strided", **ROWS[rows]), seed=partitions)


@covering(1, {"heads": [8, 32, 64], "rows, scales, nope_scale": SCALES})
def test_scales_of_any_size(heads, rows, scales, nope_scale):
    verify(Case(heads, List(100), None, 1, 2, scales=scales, nope_scale=nope_scale, **ROWS[rows]), seed=6)


# Whole lists, pieces that are combined, and what a cluster sums where it can.
@covering(1, {
    "rows, heads": [("bf16", 16), ("bf16", 64), ("fp8", 8), ("v4", 32)],
    "top_k, partitions, launches": [(130, 1, [1]), (130, 9, [1, 1]), (256, 12, [4])],
})  # fmt: skip
def test_rows_that_see_nothing_have_the_log_sum_exp_that_is_asked_for(top_k, partitions, launches, rows, heads):
    case = Case(heads, List(top_k, counts=(100, 0, top_k)), None, 3, partitions, sinks=True, **ROWS[rows])
    assert clusters(case) == ([1, 1] if launches == [4] and heads == 64 else launches)
    out, lse = verify(case)
    lse = lse.view(torch.float32)
    assert lse.isneginf().sum() == heads
    _, _, (other_out, other_lse) = emulate(case, empty_lse=math.inf)
    assert torch.equal(other_out, out)
    assert torch.equal(other_lse.view(torch.float32), lse.masked_fill(lse.isneginf(), math.inf))


def alone(problem: Problem, token: int) -> dict[str, torch.Tensor | None]:
    """The arguments of a call of one token."""
    rows = slice(token, token + 1)
    return {name: x[rows] if name in PER_TOKEN and x is not None else x for name, x in problem.tensors.items()}


@pytest.mark.parametrize("rows, heads", [("bf16", 16), ("bf16", 64), ("fp8", 64), ("v4", 32)])
def test_bits_do_not_depend_on_what_a_cta_decoded_before(rows, heads):
    """Behind an odd number of tiles a piece begins elsewhere in the ring, and with 64 rows with the other consumer."""
    case = Case(heads, List(130, invalid=0.0, counts=(1, 130)), **ROWS[rows])
    behind = verify(case)
    kernels.run_sparse(second := alone(build(case), 1), SOFTMAX_SCALE, 1)
    for bits, name in zip(behind, ("out", "lse"), strict=True):
        assert torch.equal(bits[1:], second[name].view(bits.dtype))


# ------------------------------------------------------------------------------------------------------------- clusters

IN_CLUSTERS = [(rows, heads) for rows, heads in KERNELS if heads < 64]


def clusters(case: Case) -> list[int]:
    """CTAs of a cluster in each of a case's launches."""
    arguments = (*build(case).tensors.values(), SOFTMAX_SCALE, case.partitions, -math.inf)
    return [launch[3] for launch in library().sparse_decode_launches(*arguments)]


# Pieces of a tile, and of two and three, behind which what the CTAs show each other lies over stages lent for merging.
@covering(1, {"rows, heads": IN_CLUSTERS, "pieces, tiles": [(2, 2), (2, 3), (4, 1), (8, 1), (8, 2)]})
def test_pieces_that_a_cluster_sums(rows, heads, pieces, tiles):
    tokens = 2 if pieces < 8 else 1
    entries = (pieces * tiles - 1) * TILE
    case = Case(heads, List(entries), List(TILE), tokens, tokens * pieces, sinks=True, **ROWS[rows])
    assert clusters(case) == [pieces]
    verify(case, seed=heads)


@covering(1, {"rows, heads": IN_CLUSTERS, "counts": [(100, 0, 256), (1, 65, -1)]})
def test_clusters_with_pieces_without_entries(rows, heads, counts):
    case = Case(heads, List(256, counts=counts), None, 3, 12, out_layout="strided", **ROWS[rows])
    assert clusters(case) == [4]
    verify(case, seed=heads)


@pytest.mark.parametrize("rows, heads", [("fp8", 8), ("v4", 16)])
def test_a_clusters_bits_do_not_depend_on_the_other_tokens(rows, heads):
    case = Case(heads, List(192, counts=(192, 100, 130)), List(64, counts=(0, 64, 1)), 3, 12, **ROWS[rows])
    wanted = verify(case, timing="early")
    kernels.run_sparse(second := alone(build(case), 1), SOFTMAX_SCALE, 4, seed=1, timing="late")
    for bits, name in zip(wanted, ("out", "lse"), strict=True):
        assert torch.equal(bits[1:2], second[name].view(bits.dtype))


def test_what_no_cluster_sums_is_combined():
    three, many = Case(16, List(192), None, 1, 3), Case(16, List(2048), None, 1, 32)  # no 2, 4 or 8 pieces
    wide = [Case(64, List(256), None, 1, 4, **rows) for rows in ROWS.values()]  # more than 32 heads
    across = Case(16, List(640), None, 3, 5)  # a partition of two tokens
    for case in (three, many, *wide, across):
        assert clusters(case) == [1, 1]


# -------------------------------------------------------------------------------------------------------- interleavings

# Pieces whose stages, of tiles and lent for merging, come to lie on one another in turn; a mask that the next tile's
# follows at once; the end of one list and the beginning of the other.
THREE_PIECES = dict(first=List(130, counts=(130, 64, 65)), tokens=3)
SINGLE_TILES = dict(first=List(64, invalid=0.5), tokens=4)
BOTH_LISTS = dict(first=List(128, counts=(100, 128, 1)), extra=List(70, counts=(70, 0, 66)), tokens=3)
INTERLEAVED = [
    *[Case(heads, **THREE_PIECES, **ROWS[rows]) for rows, heads in KERNELS if rows != "v4"],
    *[Case(heads, **SINGLE_TILES, **ROWS[rows]) for rows, heads in KERNELS],
    *[Case(heads, **BOTH_LISTS, **ROWS[rows]) for rows, heads in KERNELS if rows == "v4"],
    *[Case(heads, List(384), None, 1, 2, **ROWS[rows]) for rows, heads in IN_CLUSTERS],
    *[Case(heads, List(192, counts=(100,)), List(64), 1, 4, **ROWS[rows]) for rows, heads in IN_CLUSTERS],
]


@pytest.mark.parametrize("case, seed", [
    pytest.param(case, seed, marks=() if seed == 0 and case.heads == 16 else pytest.mark.exhaustive)
    for case in INTERLEAVED
    for seed in SEEDS
])  # fmt: skip
def test_interleavings(case, seed):
    """The bits are the same as with copies at once; those of the default selection come at random."""
    wanted = verify(case, timing="early")
    for got, want in zip(verify(case, seed=seed, timing=("random", "late")[seed % 2]), wanted, strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------------- planted faults

FAULTY = {  # by kernel and, where it matters to the faults, what its producers bring
    "transposed": Case(16, List(130, invalid=0.3)),
    "clustered": Case(16, List(384, invalid=0.3), None, 1, 2),
    "v4": Case(32, List(70, invalid=0.3), List(66), **ROWS["v4"]),
    "v4 clustered": Case(32, List(448, invalid=0.3), List(64), 1, 4, **ROWS["v4"]),
    "query_major": Case(64, List(200, invalid=0.3), None, 1),
    "query_major of v4": Case(64, List(130, invalid=0.3), List(70), 1, **ROWS["v4"]),
    "fp8": Case(32, List(130, invalid=0.3), **ROWS["fp8"]),
    "fp8_shared": Case(64, List(200, invalid=0.3), **ROWS["fp8"]),
}
# Where a stage that is lent held what was lent before, or a tile of the consumer that does not write there.
LENT_AGAIN = {"transposed": List(64)}
NONSENSE = "NaN or infinity|elements, the first"
FAULTS = {  # by mark (see csrc/common/mark.h): what the emulator says where it is left out, in each kernel that has it
    "launch_meeting": "no mbarrier",
    "lists_wait": "without having waited",
    "queries_wait": "without having waited",
    "rows_room": f"deadlock|more arrivals|never written|in flight|{NONSENSE}",
    "rows_arrival": f"in flight|{NONSENSE}",
    "rows_commit": "deadlock",
    "rows_grant": "deadlock",
    "rows_wait": "in flight|never written",
    "rows_fence": NONSENSE,
    "other_rows_fence": NONSENSE,
    "queries_fence": NONSENSE,
    "queries_meeting": f"never written|{NONSENSE}",
    "lent_room": f"deadlock|more arrivals|never written|in flight|{NONSENSE}",
    "lent_commit": "deadlock",
    "merge_grant": f"deadlock|in flight|{NONSENSE}",
    "stage_release": "deadlock",
    "scores_commit": "in flight",
    "scores_wait": "in flight",
    "rope_wait": f"in flight|{NONSENSE}",
    "probabilities_fence": NONSENSE,
    "probabilities_meeting": f"never written|{NONSENSE}",
    "products_meeting": NONSENSE,
    "shares_meeting": f"never written|{NONSENSE}",
    "hand_over_meeting": f"never written|{NONSENSE}",
    "output_fence": "wgmma.fence",
    "output_wait": "in flight",
    "output_meeting": f"in flight|{NONSENSE}",
    "halves_meeting": NONSENSE,
    "parts_meeting": f"never written|an mbarrier|{NONSENSE}",
    "cluster_end": "has ended",
}
PRODUCERS = "rows_fence rows_commit rows_room"  # where V4's rows come from, and again of others
TRANSPOSED = (
    "launch_meeting lent_commit lent_room lists_wait merge_grant output_fence output_wait probabilities_fence "
    "probabilities_meeting queries_meeting queries_wait rows_arrival rows_commit rows_fence rows_grant rows_room "
    "scores_commit scores_wait stage_release"
)
QUERY_MAJOR = (
    "hand_over_meeting launch_meeting lists_wait other_rows_fence output_fence queries_meeting queries_wait "
    "rope_wait rows_arrival rows_commit rows_fence rows_room scores_wait"
)
SCALED = (
    "launch_meeting lists_wait probabilities_fence probabilities_meeting products_meeting queries_fence "
    "queries_meeting queries_wait rows_arrival rows_commit rows_grant rows_room rows_wait stage_release"
)
FP8 = f"{SCALED} lent_commit lent_room merge_grant"
V4 = f"{SCALED} output_meeting"  # halves cross where P^T was
FP8_SHARED = (
    "launch_meeting lists_wait probabilities_fence probabilities_meeting queries_fence queries_meeting queries_wait "
    "rows_arrival rows_commit rows_room rows_wait shares_meeting stage_release"
)
SUMMED = "cluster_end parts_meeting"
IN_A_CLUSTER = f"{SUMMED} halves_meeting"
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
    if mark == "lent_room":
        case = replace(case, first=LENT_AGAIN.get(kernel, case.first), extra=None, tokens=4)
    if mark == "rope_wait":  # of each piece's first tile alone
        case = replace(case, first=List(130, invalid=0.3), tokens=5)
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
