"""The error policy: what a result may differ by from float64 on the same rounded inputs, and how a failure reads.

A request's output may err at most twice as much as a plain torch computation in the input's own type does, in its
worst element and in relative RMSE. Where plain torch happens to be exact or luckier than rounding allows, the
rounding of the true result to the output's type counts instead. The policy holds for each request by itself: long
requests have small outputs, and one norm over a ragged batch would hide them behind the short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import SOFTMAX_SCALE, Problem

from etap_backend import reference

FACTOR = 2.0
# FlashMLA's bound for bf16; the difference goes with the square of the error, and fp16 has 3 more bits.
COSINE = {torch.bfloat16: 5e-6, torch.float16: 5e-6 / 64}
# Absolute for small values; relative above 1, where the float32 scores that the sum is made of carry no more digits.
LSE = 1e-5


@dataclass
class Truth:
    """Float64 result of a problem and the errors that are allowed, one value a request."""

    out: torch.Tensor  # float64 [batch, s_q, heads, 512]
    lse: torch.Tensor  # float64 [batch, s_q, heads]
    max_error: torch.Tensor  # float64 [batch]
    rmse: torch.Tensor  # float64 [batch], relative


def truth(problem: Problem) -> Truth:
    arguments = (problem.q, problem.kv_cache, problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    out, lse = reference.mla_decode_reference(*arguments)
    plain, _ = reference.mla_decode_reference(*arguments, dtype=problem.q.dtype)
    errors = [(candidate.double() - out).flatten(1) for candidate in (plain, out.to(problem.q.dtype))]
    return Truth(
        out,
        lse,
        max_error=FACTOR * torch.maximum(*(error.abs().amax(1) for error in errors)),
        rmse=FACTOR * torch.maximum(*(relative_rmse(error, out) for error in errors)),
    )


def relative_rmse(error: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[batch] of |error| / |out|, 0 where there is nothing to err about."""
    size = out.flatten(1).norm(dim=1)
    return torch.where(size > 0, error.flatten(1).norm(dim=1) / size.clamp(min=1e-300), 0)


def cosine_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[batch] of 1 - 2<a, b> / (|a|^2 + |b|^2), 0 where both are 0."""
    a, b = a.flatten(1), b.flatten(1)
    size = (a * a + b * b).sum(1)
    return torch.where(size > 0, 1 - 2 * (a * b).sum(1) / size.clamp(min=1e-300), 0)


def problems_with(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> list[str]:
    """What is wrong with a result, one line a request and measure; empty when all is well."""
    out, lse = out.double(), lse.double()
    found = []
    for name, got, want in (("out", out, wanted.out), ("lse", lse, wanted.lse)):
        special = ~torch.isfinite(want)
        wrong = (torch.isfinite(got) == special) | (special & (got != want))
        found += _lines(wrong.flatten(1).any(1), f"{name}: inf/NaN elsewhere than in the reference", problem)
    error = out - wanted.out
    cosine = cosine_difference(out, wanted.out)
    lse_error = ((lse - wanted.lse) / wanted.lse.abs().clamp(min=1)).flatten(1)
    lse_error = torch.where(torch.isfinite(wanted.lse.flatten(1)), lse_error.abs(), 0).amax(1)
    for measure, got, limit in (
        ("largest error", error.flatten(1).abs().amax(1), wanted.max_error),
        ("relative RMSE", relative_rmse(error, wanted.out), wanted.rmse),
        ("cosine difference", cosine, torch.full_like(cosine, COSINE[problem.q.dtype])),
        ("log-sum-exp error", lse_error, torch.full_like(lse_error, LSE)),
    ):
        found += _lines(~(got <= limit), measure, problem, got, limit)
    return found


def _lines(wrong, what, problem, got=None, limit=None, most=4) -> list[str]:
    requests = wrong.nonzero().flatten().tolist()
    lines = []
    for request in requests[:most]:
        values = "" if got is None else f" {got[request]:.3e}, at most {limit[request]:.3e}"
        lines.append(f"{what}{values} in request {request} of {problem.case.lengths[request]} tokens")
    if len(requests) > most:
        lines.append(f"{what}: {len(requests) - most} more requests")
    return lines


def check(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> None:
    found = problems_with(out, lse, problem, wanted)
    assert not found, "\n".join([*found, f"the case: {problem.case!r}"])
