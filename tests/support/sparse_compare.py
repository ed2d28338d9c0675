"""The error policy of sparse attention: how far a token's result may be from float64 on the same rounded inputs.

All limits follow from the formats. An element may be off by what the rounding of P and that of the output, both in
bfloat16, and sums in float32 cost itself, so that a large element excuses no small one; the relative RMSE by twice what
the same roundings cost at random; the cosine difference by what is allowed the dense kernels, or by half the square of
that RMSE where the inputs make it larger; the log-sum-exp by 1e-5, of itself where it is above 1, or by what float32
scores of these inputs leave open. The policy holds for each token by itself.

P of V3.2's FP8 rows is rounded after its scale has multiplied it, for 128 columns at a time, to bfloat16 or, among
ordinary scales, float16; and the output is divided by the sum of P as it was. So the rounding of a dominating key does
not cancel there, as it does for bfloat16 rows and for V4's, whose P is rounded before a power of two multiplies it:
with up to 32 query rows in a CTA that is float16, too, whose subnormal numbers round it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from etap_backend import reference
from etap_backend.cpu import dense as cpu_dense
from etap_backend.cpu import sparse as cpu_sparse
from etap_backend.limits import SCALE_DIM, SPARSE_FP8_BYTES, V4_NOPE_DIM, V4_ROW_BYTES, V4_SCALE_DIM
from etap_backend.sparse import sparse_decode_shape
from support.cases import LATENT, SOFTMAX_SCALE
from support.compare import (
    COSINE,
    FACTOR,
    LSE,
    SIGMAS,
    Measure,
    cosine_difference,
    elsewhere,
    failures,
    half_ulp,
    largest_error,
    relative_rmse,
    size_of_sum,
)
from support.sparse_cases import SparseProblem

BF16, HALF, FLOAT = (torch.finfo(x) for x in (torch.bfloat16, torch.float16, torch.float32))
# Error of a score, relative to the sum of its products without their signs: a tensor core truncates float32 sums.
SCORE = 2.0**-20
# Error of an output element, relative likewise: up to 128 truncated additions in float32.
SUM = 2.0**-17
ROWS_AT_A_TIME = {"cpu": 1, "cuda": 2**15}  # of all tokens: a CPU takes one token at a time


@dataclass
class Truth:
    """Float64 result of a problem and the errors that are allowed."""

    out: torch.Tensor  # float64 [tokens, heads, 512]
    lse: torch.Tensor  # float64 [tokens, heads]
    max_error: torch.Tensor  # float64 [tokens, heads, 512]
    rms_error: torch.Tensor  # float64 [tokens, heads, 512], what is to be expected of an element
    lse_error: torch.Tensor  # float64 [tokens, heads]


def truth(problem: SparseProblem) -> Truth:
    """Attention of each token over the rows that `meant` names; on a GPU many tokens at a time."""
    tokens, heads, _ = problem.q.shape
    like = {"dtype": torch.float64, "device": problem.q.device}
    out, lse = torch.zeros(tokens, heads, LATENT, **like), torch.zeros(tokens, heads, **like)
    found = Truth(out, lse, *(torch.zeros_like(x) for x in (out, out, lse)))
    named = sum(meant.shape[1] for _, meant in problem.caches())
    if named == 0:
        found.lse.fill_(-torch.inf)
        return found
    step = max(1, ROWS_AT_A_TIME[problem.q.device.type] // named)
    for first in range(0, tokens, step):
        _fill(found, slice(first, first + step), problem)
    return found


def _named(cache: torch.Tensor, meant: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as stored [tokens, top_k, width] that some tokens name, each once, and how often [tokens, top_k].

    Rows that no token names are zeros, and named 0 times. A row that is named several times has the same P each time,
    rounded the same way.
    """
    ids, _ = meant.sort(dim=1)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = torch.searchsorted(ids, ids, right=True)
    times = torch.where(first & (ids >= 0), ends - torch.arange(ids.shape[1], device=ids.device), 0)
    ids = ids.clamp(min=0)
    rows = reference.stored_rows(cache, ids // cache.shape[1], ids % cache.shape[1])
    return torch.where(times[..., None] > 0, rows, 0), times


def _fill(found: Truth, part: slice, problem: SparseProblem) -> None:
    """The truth of some tokens, and the errors that are allowed."""
    q, sinks = problem.q[part].double(), problem.sinks
    rows, times = (
        torch.cat(parts, dim=1)
        for parts in zip(*(_named(cache, meant[part]) for cache, meant in problem.caches()), strict=True)
    )
    keys = reference.dequantized(rows.flatten(0, 1), torch.float64).unflatten(0, times.shape)
    values, any_row = keys[..., :LATENT], (times > 0).any(1)[:, None, None]
    scores = (q @ keys.mT) * SOFTMAX_SCALE + times.double().log()[:, None]
    off = SCORE * SOFTMAX_SCALE * (q.abs() @ keys.abs().mT)
    below, lse, above = (torch.logsumexp(x, 2, keepdim=True) for x in (scores - off, scores, scores + off))
    weight = torch.softmax(scores, dim=2)
    result = weight @ values

    moved = _moved(weight, torch.exp((scores + off - below).clamp(max=0)), scores - off - above)
    deviation, lost = _rounding_of_p(rows, weight, times[:, None].clamp(min=1), values, result)
    deviation = (deviation.square() + size_of_sum(moved, values, result).square()).sqrt()
    lost = lost + SUM * (weight @ values.abs()) + BF16.tiny
    out = result
    if sinks is not None:
        lowest, share, highest = (torch.sigmoid(x - sinks[: q.shape[1]].double()[:, None]) for x in (below, lse, above))
        out = result * share
        # A share below float32's normal numbers may be lost.
        deviation, lost = deviation * share, lost * share + result.abs() * (highest - lowest + FLOAT.tiny)
    size = out.abs()
    before = SIGMAS * deviation + lost + size * FLOAT.eps + BF16.tiny
    lse_error = torch.maximum(LSE * lse.abs().clamp(min=1), torch.maximum(above - lse, lse - below))

    found.out[part] = torch.where(any_row, out, 0)
    found.lse[part] = lse[..., 0]
    found.lse_error[part] = torch.where(any_row, lse_error, 0)[..., 0]
    found.max_error[part] = torch.where(any_row, before + half_ulp(size + before, torch.bfloat16), 0)
    rms = (half_ulp(size, torch.bfloat16).square() / 3 + (deviation + lost).square()).sqrt()
    found.rms_error[part] = torch.where(any_row, rms, 0)


def _moved(weight: torch.Tensor, highest: torch.Tensor, log_lowest: torch.Tensor) -> torch.Tensor:
    """By how much weights [tokens, heads, rows] may change where scores err: what one gains, the others lose."""
    up, down = (highest - weight).clamp(min=0), (weight - torch.exp(log_lowest)).clamp(min=0)
    others_up, others_down = (x.sum(2, keepdim=True) - x for x in (up, down))
    return torch.maximum(torch.minimum(up, others_down), torch.minimum(down, others_up))


def _rounding_of_p(rows, weight, times, values, result) -> tuple[torch.Tensor, torch.Tensor]:
    """The deviation of what rounding P to bfloat16 costs [tokens, heads, 512], and what that type's range may cost.

    P is half an epsilon off at most, at worst uniformly, each row's by itself. P of a token's largest score is at least
    1, and what is below the normal numbers of float32, which are bfloat16's, may be lost: P, or P times a scale, or
    what rows of an earlier reference are multiplied with when they meet a later one. As a reference may lie 8 binades
    below its rows' maximum, a row may be lost whose own share is 2^8 times as much. P times 2^7 and an ordinary scale
    may be in float16, whose subnormal numbers are off by half of the least.
    """
    share = weight / times
    p = share / share.amax(dim=2, keepdim=True)  # at most P
    least = share * 2.0 ** -cpu_dense.P_RANGES[False, torch.bfloat16].most
    off = BF16.eps / 2 / math.sqrt(3) * weight
    most = times * share.amax(dim=2, keepdim=True)  # what P = 1 would weigh
    is_v4 = rows.shape[2] == V4_ROW_BYTES
    if rows.dtype != torch.uint8 or is_v4:
        small = torch.where(least < BF16.tiny, weight, 0)
        lost = small @ values.abs() + small.sum(2, keepdim=True) * result.abs()
        if is_v4 and sparse_decode_shape(weight.shape[1]).row_tile <= cpu_sparse.MOST_ROWS_OF_V4:
            _, exponents, _ = cpu_sparse.v4_parts(rows.flatten(0, 1))
            scales = torch.exp2(exponents.double()).unflatten(0, rows.shape[:2])
            groups = zip(scales[:, None].unbind(3), values[..., :V4_NOPE_DIM].split(V4_SCALE_DIM, dim=2), strict=True)
            parts = [_scaled_away(scale, weight, p, least, most) @ columns.abs() for scale, columns in groups]
            lost[..., :V4_NOPE_DIM] += torch.cat(parts, dim=2)
        return size_of_sum(off, values, result), lost
    scales = rows[..., LATENT:SPARSE_FP8_BYTES].contiguous().view(torch.float32).double().abs()
    deviations, lost = [], []
    for scale, columns in zip(scales[:, None].unbind(3), values.split(SCALE_DIM, dim=2), strict=True):
        deviations.append((off.square() @ columns.square()).sqrt())
        lost.append(_scaled_away(scale, weight, p, least, most) @ columns.abs())
    return torch.cat(deviations, dim=2), torch.cat(lost, dim=2)


def _scaled_away(scale, weight, p, least, most) -> torch.Tensor:
    """What weights [tokens, heads, rows] may lose where P times a scale is below float32's normal numbers, or P times
    an ordinary scale below float16's."""
    small = torch.where(least * scale.clamp(max=1) < BF16.tiny, weight, 0)
    shift = 2.0 ** cpu_dense.P_RANGES[True, torch.float16].shift
    is_ordinary = (scale >= cpu_sparse.LEAST_SCALE) & (scale <= cpu_sparse.LARGEST_SCALE)
    rounded = torch.minimum(weight, most * (HALF.tiny * HALF.eps / 2 / shift) / scale)
    return small + torch.where(is_ordinary & (p * shift * scale < HALF.tiny), rounded, 0)


def measures(out: torch.Tensor, lse: torch.Tensor, wanted: Truth) -> list[Measure]:
    """How far a result is from the truth, and how far it may be, one value per token."""
    error = out.double() - wanted.out
    rmse = FACTOR * relative_rmse(wanted.rms_error, wanted.out)
    lse_error = torch.where(torch.isfinite(wanted.lse), (lse.double() - wanted.lse).abs(), 0)
    cosine = cosine_difference(out.double(), wanted.out)
    return [
        Measure("cosine difference", cosine, torch.clamp(rmse.square() / 2, min=COSINE[torch.bfloat16])),
        largest_error(lse_error, wanted.lse_error, "log-sum-exp error"),
        largest_error(error.flatten(1).abs(), wanted.max_error.flatten(1), "largest error"),
        Measure("relative RMSE", relative_rmse(error, wanted.out), rmse),
    ]


def problems_with(out: torch.Tensor, lse: torch.Tensor, wanted: Truth) -> list[str]:
    """What is wrong with a result, one line per token and measure; empty when all is well."""
    found = elsewhere(out, lse, wanted.out, wanted.lse)
    return failures([*found, *measures(out, lse, wanted)], lambda token: f"token {token}")


def check(out: torch.Tensor, lse: torch.Tensor, problem: SparseProblem, wanted: Truth) -> None:
    found = problems_with(out, lse, wanted)
    assert not found, "\n".join([*found, f"the case: {problem.case!r}"])
