"""The error policy: what a result may differ by from float64 on the same rounded inputs, and how a failure reads.

A request's output may err at most twice as much as a plain torch computation in the input's own type does, in its
worst element and in relative RMSE. Where plain torch happens to be exact or luckier than rounding allows, the
rounding of the true result to the output's type counts instead. The policy holds for each request by itself: long
requests have small outputs, and one norm over a ragged batch would hide them behind the short ones.

A cache in FP8 changes nothing of that, as the truth is that of what it stands for; beside FP8 queries bfloat16 is what
the plain computation runs in. Only where the kernel itself rounds to FP8 to multiply, the cosine alone decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from etap_backend import executor, reference
from etap_backend.lab.checks.cases import FP8, SOFTMAX_SCALE, Problem

FACTOR = 2.0
# FlashMLA's bound for bf16; the difference goes with the square of the error, and fp16 has 3 more bits.
COSINE = {torch.bfloat16: 5e-6, torch.float16: 5e-6 / 64}
# Absolute for small values; relative above 1, where the float32 scores that the sum is made of carry no more digits.
LSE = 1e-5
# P with 3 bits after the leading one: a fortieth of noise, up to a sixteenth where thousands of keys weigh alike and
# their P are rounded alike. Rounding queries so, too, moves a score by a fortieth of its usual size or more.
FP8_MATH_COSINE = 1e-3
FP8_MATH_COSINE_ALIKE = 1.5e-3
FP8_MATH_COSINE_ROUNDED_QUERIES = 2e-3
FP8_MATH_LSE_ROUNDED_QUERIES = 0.25
# Hopper adds e4m3 products with some 14 bits, of the largest among those that it adds at a time.
FP8_MATH_LSE = 2e-3


@dataclass
class Truth:
    """Float64 result of a problem and the errors that are allowed, one value a request."""

    out: torch.Tensor  # float64 [batch, s_q, heads, 512]
    lse: torch.Tensor  # float64 [batch, s_q, heads]
    max_error: torch.Tensor  # float64 [batch]
    rmse: torch.Tensor  # float64 [batch], relative
    of_rounded_queries: bool


def truth(problem: Problem, *, of_rounded_queries: bool = False) -> Truth:
    """Float64 on the problem's inputs; or on its queries as FP8 math rounds them, which is then no error of it."""
    arguments = (problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    scales = {"q_scale": problem.q_scale, "kv_scale": problem.kv_scale}
    q = rounded_queries(problem.q) if of_rounded_queries else problem.q
    out, lse = reference.mla_decode_reference(q, problem.kv_cache, *arguments, **scales)
    dtype = plain_dtype(problem)
    # Powers of two change no digit, but float16 could not hold the scores of an FP8 cache without its scale.
    power = 1.0 if problem.kv_scale is None else 2.0 ** math.floor(math.log2(problem.kv_scale))
    if problem.kv_scale is not None:
        scales["kv_scale"] = problem.kv_scale / power
    plain, _ = reference.mla_decode_reference(
        problem.q, problem.kv_cache.to(dtype) * power, *arguments, **scales, dtype=dtype
    )
    errors = [(candidate.double() - out).flatten(1) for candidate in (plain, out.to(dtype))]
    return Truth(
        out,
        lse,
        max_error=FACTOR * torch.maximum(*(error.abs().amax(1) for error in errors)),
        rmse=FACTOR * torch.maximum(*(relative_rmse(error, out) for error in errors)),
        of_rounded_queries=of_rounded_queries,
    )


def rounds_queries(problem: Problem) -> bool:
    return problem.case.fp8_math and problem.q.dtype != FP8


def rounded_queries(q: torch.Tensor) -> torch.Tensor:
    """What FP8 math multiplies for queries [batch, s_q, heads, 576] of a wider type, as float32."""
    values, factor = executor.product_queries(q.flatten(1, 2).cpu(), FP8)
    return (values * factor[..., None]).view(q.shape).to(q.device)


def plain_dtype(problem: Problem) -> torch.dtype:
    """The type of the plain torch computation whose error sets the measure."""
    return torch.float16 if problem.q.dtype == torch.float16 else torch.bfloat16


def relative_rmse(error: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[batch] of |error| / |out|, 0 where there is nothing to err about."""
    size = out.flatten(1).norm(dim=1)
    return torch.where(size > 0, error.flatten(1).norm(dim=1) / size.clamp(min=1e-300), 0)


def cosine_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[batch] of 1 - 2<a, b> / (|a|^2 + |b|^2), 0 where both are 0."""
    a, b = a.flatten(1), b.flatten(1)
    size = (a * a + b * b).sum(1)
    return torch.where(size > 0, 1 - 2 * (a * b).sum(1) / size.clamp(min=1e-300), 0)


@dataclass
class Measure:
    """One measure of a result, a value a request, and what it may be; wrong where it is not at most that."""

    name: str
    got: torch.Tensor  # [batch]
    limit: torch.Tensor  # [batch]

    def worst(self) -> tuple[float, float]:
        """The largest share of its limit that a request has, and that request's value; 0 and 0 where all are 0."""
        share = torch.where(self.limit > 0, self.got / self.limit, 0).nan_to_num(torch.inf)
        request = int(share.argmax())
        return share[request].item(), self.got[request].item()


def measures(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> list[Measure]:
    """How far a result is from the truth, and how far it may be."""
    out, lse = out.double(), lse.double()
    error = out - wanted.out
    lse_error = ((lse - wanted.lse) / wanted.lse.abs().clamp(min=1)).flatten(1)
    lse_error = torch.where(torch.isfinite(wanted.lse.flatten(1)), lse_error.abs(), 0).amax(1)
    cosine_limit, lse_limit = _limits(problem, wanted)
    found = [
        Measure("cosine difference", cosine_difference(out, wanted.out), torch.full_like(lse_error, cosine_limit)),
        Measure("log-sum-exp error", lse_error, torch.full_like(lse_error, lse_limit)),
    ]
    if not problem.case.fp8_math:
        found.append(Measure("largest error", error.flatten(1).abs().amax(1), wanted.max_error))
        found.append(Measure("relative RMSE", relative_rmse(error, wanted.out), wanted.rmse))
    return found


def _limits(problem: Problem, wanted: Truth) -> tuple[float, float]:
    """Of the cosine difference and of the log-sum-exp's error."""
    if not problem.case.fp8_math:
        return COSINE[plain_dtype(problem)], LSE
    if rounds_queries(problem) and not wanted.of_rounded_queries:
        return FP8_MATH_COSINE_ROUNDED_QUERIES, FP8_MATH_LSE_ROUNDED_QUERIES
    return FP8_MATH_COSINE_ALIKE if problem.case.law == "clamped" else FP8_MATH_COSINE, FP8_MATH_LSE


def problems_with(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> list[str]:
    """What is wrong with a result, one line a request and measure; empty when all is well."""
    found = []
    for name, got, want in (("out", out, wanted.out), ("lse", lse, wanted.lse)):
        special = ~torch.isfinite(want)
        wrong = (torch.isfinite(got) == special) | (special & (got != want))
        found += _lines(wrong.flatten(1).any(1), f"{name}: inf/NaN elsewhere than in the reference", problem)
    for measure in measures(out, lse, problem, wanted):
        wrong = ~(measure.got <= measure.limit)
        found += _lines(wrong, measure.name, problem, measure.got, measure.limit)
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
