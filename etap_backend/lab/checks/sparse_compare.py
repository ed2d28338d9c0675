"""The error policy of sparse attention: what a token's result may differ by from float64 on the same rounded inputs.

All limits follow from the formats. An element may be off by what the rounding of P and that of the output, both in
bfloat16, and sums in float32 cost itself, so that a large element excuses no small one; the relative RMSE by twice what
the same roundings cost at random; the cosine difference by what is allowed the dense kernels, or by half the square of
that RMSE where the inputs make it larger; the log-sum-exp by 1e-5, of itself where it is above 1, or by what float32
scores of these inputs leave open. The policy holds for each token by itself.

P of an FP8 row is rounded after its scale has multiplied it, for 128 columns at a time, and the output is divided by
the sum of P as it was: so the rounding of a dominating key does not cancel there, as it does for bfloat16 rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from etap_backend import reference
from etap_backend.lab.checks.cases import LATENT, SOFTMAX_SCALE
from etap_backend.lab.checks.compare import (
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
from etap_backend.lab.checks.sparse_cases import SparseProblem
from etap_backend.support import SCALE_DIM, SPARSE_FP8_BYTES

BF16 = torch.finfo(torch.bfloat16)
# Of the sum of a score's products without their signs: float32 additions, of which a tensor core cuts off the rest.
SCORE = 2.0**-20
# Of the sum of an output element's products without their signs: up to 128 additions in float32, cut off.
SUM = 2.0**-17


@dataclass
class Truth:
    """Float64 result of a problem and the errors that are allowed."""

    out: torch.Tensor  # float64 [tokens, heads, 512]
    lse: torch.Tensor  # float64 [tokens, heads]
    max_error: torch.Tensor  # float64 [tokens, heads, 512]
    rms_error: torch.Tensor  # float64 [tokens, heads, 512], what is to be expected of an element
    lse_error: torch.Tensor  # float64 [tokens, heads]


def truth(problem: SparseProblem) -> Truth:
    lists = problem.lists()
    out, lse = reference.sparse_mla_decode_reference(
        problem.q, problem.kv_cache, softmax_scale=SOFTMAX_SCALE, sinks=problem.sinks, **lists
    )
    found = Truth(out, lse, *(torch.zeros_like(x) for x in (out, out, lse)))
    for token, rows in reference.named_rows(problem.kv_cache, **lists):
        # A row that is named several times has the same P each time, which is rounded the same way.
        ids = problem.meant[token][problem.meant[token] >= 0]
        _, place, times = ids.unique(return_inverse=True, return_counts=True)
        rows = rows[torch.empty_like(times).scatter_(0, place, torch.arange(len(ids), device=ids.device))]
        _allow(found, token, problem.q[token].double(), rows, times, problem.sinks)
    return found


def _allow(found: Truth, token: int, q: torch.Tensor, rows: torch.Tensor, times: torch.Tensor, sinks) -> None:
    """Fill in what one token's result may err by; q [heads, width], rows as stored, each named so many times."""
    keys = reference.what_rows_stand_for(rows, torch.float64)
    scores, lse = (q @ keys.T) * SOFTMAX_SCALE + times.log(), found.lse[token]
    off = SCORE * SOFTMAX_SCALE * (q.abs() @ keys.abs().T)
    above, below = torch.logsumexp(scores + off, 1), torch.logsumexp(scores - off, 1)
    found.lse_error[token] = torch.maximum(LSE * lse.abs().clamp(min=1), torch.maximum(above - lse, lse - below))

    weight = torch.softmax(scores, dim=1)
    moved = _moved(weight, torch.exp((scores + off - below[:, None]).clamp(max=0)), scores - off - above[:, None])
    values = keys[:, :LATENT]
    result = weight @ values
    deviation, lost = _rounding_of_p(rows, weight, times, values, result)
    deviation = (deviation.square() + size_of_sum(moved, values, result).square()).sqrt()
    lost = lost + SUM * (weight @ values.abs()) + BF16.tiny

    size = found.out[token].abs()
    if sinks is not None:
        lowest, share, highest = (torch.sigmoid(x - sinks.double())[:, None] for x in (below, lse, above))
        deviation, lost = deviation * share, lost * share + result.abs() * (highest - lowest)
    before = SIGMAS * deviation + lost + size * torch.finfo(torch.float32).eps + BF16.tiny
    found.max_error[token] = before + half_ulp(size + before, torch.bfloat16)
    found.rms_error[token] = (half_ulp(size, torch.bfloat16).square() / 3 + (deviation + lost).square()).sqrt()


def _moved(weight: torch.Tensor, highest: torch.Tensor, log_lowest: torch.Tensor) -> torch.Tensor:
    """By how much weights [heads, tokens] may change where scores err: what one gains, the others lose."""
    up, down = (highest - weight).clamp(min=0), (weight - torch.exp(log_lowest)).clamp(min=0)
    others_up, others_down = (x.sum(1, keepdim=True) - x for x in (up, down))
    return torch.maximum(torch.minimum(up, others_down), torch.minimum(down, others_up))


def _rounding_of_p(rows, weight, times, values, result) -> tuple[torch.Tensor, torch.Tensor]:
    """The deviation of what rounding P to bfloat16 costs [heads, 512], and what that type's range may cost.

    P is half an epsilon off at most, at worst uniformly, each row's by itself. P of a token's largest score is at least
    1, and what is below the normal numbers of float32, which are bfloat16's, may be lost: P, or P times a scale.
    """
    p = weight / times / (weight / times).amax(dim=1, keepdim=True)  # at most P
    off = BF16.eps / 2 / math.sqrt(3) * weight
    if rows.dtype != torch.uint8:
        small = torch.where(p < BF16.tiny, weight, 0)
        return size_of_sum(off, values, result), small @ values.abs() + small.sum(1, keepdim=True) * result.abs()
    scales = rows[:, LATENT:SPARSE_FP8_BYTES].contiguous().view(torch.float32).double().abs()
    deviations, lost = [], []
    for scale, columns in zip(scales.T, values.split(SCALE_DIM, dim=1), strict=True):
        deviations.append((off.square() @ columns.square()).sqrt())
        lost.append(torch.where(p * scale.clamp(max=1) < BF16.tiny, weight, 0) @ columns.abs())
    return torch.cat(deviations, dim=1), torch.cat(lost, dim=1)


def measures(out: torch.Tensor, lse: torch.Tensor, wanted: Truth) -> list[Measure]:
    """How far a result is from the truth, and how far it may be, a value a token."""
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
    """What is wrong with a result, one line a token and measure; empty when all is well."""
    found = elsewhere(out, lse, wanted.out, wanted.lse)
    return failures([*found, *measures(out, lse, wanted)], lambda token: f"token {token}")


def check(out: torch.Tensor, lse: torch.Tensor, problem: SparseProblem, wanted: Truth) -> None:
    found = problems_with(out, lse, wanted)
    assert not found, "\n".join([*found, f"the case: {problem.case!r}"])
