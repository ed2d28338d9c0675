"""The sparse kernels themselves, run instruction by instruction, against float64.

ETAP_EMULATOR_SEEDS=N tries N interleavings of every case that depends on them; 2 by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import kernels
import pytest
import torch

from etap_backend._library import library

pytestmark = kernels.NEEDS_COMPILER

LATENT, ROPE, GROUP = 512, 64, 128
HEAD_DIM = LATENT + ROPE
TILE = 64
SOFTMAX_SCALE = HEAD_DIM**-0.5
WILD = (-1, -7, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Case:
    """One sparse call. Its repr is a constructor."""

    heads: int
    top_k: int = 65
    tokens: int = 2
    partitions: int = 1
    fp8: bool = False
    page_size: int = 64
    pages: int = 5
    requests: int = 0  # of a block table through which indices are positions; 0: they are physical rows
    invalid: float = 0.2  # share of the entries that name no row
    counts: tuple[int, ...] | None = None
    sinks: bool = False
    scales: tuple[float, ...] = (0.01, 0.02, 0.005)  # of FP8 rows, drawn from these
    q_layout: str = "packed"  # packed, split (latent transposed, rope a window), shared (all tokens have the same rows)
    cache_layout: str = "dense"  # dense, gapped (pages and rows apart), headed (4-D)
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    case: Case
    tensors: dict[str, torch.Tensor | None]  # the call's arguments in order
    keys: list[torch.Tensor]  # float64 [rows that count, 576] of each token
    q: torch.Tensor  # float64 [tokens, heads, 576]


def queries(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    if case.q_layout == "packed":
        return normal(case.tokens, case.heads, HEAD_DIM), None
    if case.q_layout == "shared":
        return normal(1, case.heads, HEAD_DIM).expand(case.tokens, -1, -1), None
    latent = normal(case.heads, case.tokens, LATENT).transpose(0, 1)
    return latent, normal(case.tokens, case.heads, ROPE + 128)[..., 128:]


def cache_rows(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they are stored, [rows, 576] bfloat16 or [rows, 656] bytes, and what they stand for in float64."""
    rows = case.pages * case.page_size
    values = torch.randn(rows, HEAD_DIM, generator=generator)
    if not case.fp8:
        return values.bfloat16(), values.bfloat16().double()
    picked = torch.randint(len(case.scales), (rows, LATENT // GROUP), generator=generator)
    scales = torch.tensor(case.scales)[picked]
    latent = (values[:, :LATENT] * 100).to(torch.float8_e4m3fn)
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
    return dict(indices=indices, block_table=table, request_ids=ids, valid_counts=counts), named


@cache
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
    _, _, row_groups, piece_floats, _ = library().sparse_decode_shape(case.heads, case.fp8)
    tensors = dict(q=q, q_rope=q_rope, kv_cache=pages, **lists)
    tensors["sinks"] = torch.randn(case.heads, generator=generator) * 4 if case.sinks else None
    if case.sinks:
        tensors["sinks"][-2:] = torch.tensor([math.inf, -math.inf])[-case.heads :]
    tensors["workspace"] = torch.full((2 * case.partitions * row_groups * piece_floats,), math.nan)
    tensors["out"] = torch.empty(case.tokens, case.heads, LATENT, dtype=torch.bfloat16)
    tensors["lse"] = torch.empty(case.tokens, case.heads)
    whole = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
    return Problem(case, tensors, [meant[rows] for rows in named], whole.double())


@dataclass
class Truth:
    out: torch.Tensor  # float64 [tokens, heads, 512]
    lse: torch.Tensor  # float64 [tokens, heads]
    limit: torch.Tensor  # float64 like out: how far an element may be off


@cache
def truth(case: Case) -> Truth:
    """Float64, and what the formats of P and of the output may cost an element.

    P is rounded to bfloat16, relative to its size by at most u, at random: the sum of that is held to six times its
    deviation. FP8 rows: P times a scale is, and the output is divided by the sum of P before that. Scores are float32.
    """
    problem = build(case)
    out = torch.zeros(case.tokens, case.heads, LATENT, dtype=torch.float64)
    lse = torch.full((case.tokens, case.heads), -math.inf, dtype=torch.float64)
    limit = torch.zeros_like(out)
    u, tiny = torch.finfo(torch.bfloat16).eps / 2, 2.0**-126
    for token, keys in enumerate(problem.keys):
        if not len(keys):
            continue
        scores, values = problem.q[token] @ keys.T * SOFTMAX_SCALE, keys[:, :LATENT]
        lse[token] = torch.logsumexp(scores, dim=-1)
        left = torch.ones(case.heads, dtype=torch.float64)
        if case.sinks:
            left = 1 / (1 + torch.exp(problem.tensors["sinks"].double() - lse[token]))
        weights = torch.softmax(scores, dim=-1) * left[:, None]
        out[token] = weights @ values
        far = values.abs() if case.fp8 else values.abs() + out[token].abs().amax(0)
        at_random = 6 / math.sqrt(3) * u * (weights.square() @ far.square()).sqrt()
        exact = 1e-5 * (weights @ values.abs()) + tiny * values.abs().sum(0)
        before = torch.minimum(at_random, u * (weights @ far)) + exact
        limit[token] = before + (out[token].abs() + before) * u
    return Truth(out, lse, limit)


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
    close = torch.isclose(lse, wanted.lse, rtol=1e-5, atol=1e-5)
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
