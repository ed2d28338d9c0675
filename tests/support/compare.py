"""The error policy: how far a result may be from float64 on the same rounded inputs, and how a failure reads.

A request's output may err at most twice as much as a plain torch computation in the input's own type does, in its
worst element and in relative RMSE. Where plain torch happens to be exact or luckier than rounding allows, what the
formats of the output and of P cost counts instead (`Rounding`): of an element by itself, so that a large one excuses no
small one. The policy holds for each request by itself: long requests have small outputs, and one norm over a ragged
batch would hide them behind the short ones.

The same holds for an FP8 cache, whose truth is computed on dequantized values; beside FP8 queries the plain
computation runs in bfloat16. Only where the kernel itself rounds to FP8 to multiply, the cosine alone decides. P in
e4m3 is a staircase of the score, and the score is a product with K, whose part is V: where tens of thousands of keys
weigh alike, so that their V nearly cancel, the stairs' error along the query is what remains, and its share grows with
the tokens. How much that is follows from the arithmetic, which the CPU's executor has, too: a request beyond the fixed
limit may have twice the executor's cosine difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from etap_backend import reference
from etap_backend.cpu import dense as cpu_dense
from support.cases import FP8, SOFTMAX_SCALE, Problem, Runner

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
# Hopper adds e4m3 products with 13 bits of the largest product that it adds at a time: of 246,000 rows of the law
# `outliers` on an H200 the sums of torch._scaled_mm moved 36 scores by more than 2e-3, at most by 2.9e-3.
FP8_MATH_LSE = 4e-3
# Deviations of a sum of independent roundings: one in 5 * 10^8 elements is beyond, and a case has up to 5 * 10^7.
SIGMAS = 6


@dataclass
class Truth:
    """Float64 result of a problem and the errors that are allowed, one value per request."""

    out: torch.Tensor  # float64 [batch, s_q, heads, 512]
    lse: torch.Tensor  # float64 [batch, s_q, heads]
    max_error: torch.Tensor  # float64 [batch, s_q, heads, 512], of each element
    rmse: torch.Tensor  # float64 [batch], relative
    of_rounded_queries: bool


def truth(problem: Problem, *, of_rounded_queries: bool = False) -> Truth:
    """Float64 on the problem's inputs; or on its queries as FP8 math rounds them, whose rounding is then no error."""
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
    errors = [(candidate.double() - out).flatten(1) for candidate in (plain, out.to(problem.case.out_dtype))]
    max_error = FACTOR * torch.maximum(*(error.abs().amax(1) for error in errors))[:, None, None, None]
    rmse = FACTOR * torch.maximum(*(relative_rmse(error, out) for error in errors))
    if problem.case.fp8_math:
        max_error = max_error.expand_as(out)
    else:
        rounding = rounding_of(problem, out)
        max_error = torch.maximum(max_error, rounding.element)
        rmse = torch.maximum(rmse, relative_rmse(rounding.lost, out))
    return Truth(out, lse, max_error, rmse, of_rounded_queries)


@dataclass
class Rounding:
    """Largest error of each element by the formats of P and of the output, float64 [batch, s_q, heads, 512]."""

    element: torch.Tensor  # all of it
    lost: torch.Tensor  # the part of weights so small that P's format has no digits, or nothing, for them


def rounding_of(problem: Problem, out: torch.Tensor) -> Rounding:
    """The rounding of P and of the output, from the true weights.

    A weight w whose P is off by w * d moves an element by w * d * (V - out), as the output is divided by the sum of the
    rounded P. Where P is a normal number |d| is at most u, half its epsilon; the d of several tokens are independent,
    at worst uniform between -u and u, and their sum is held to SIGMAS of its deviation. Below P's normal numbers the
    error is absolute, at most half of the least subnormal number (bfloat16's are all lost: `ex2.approx.ftz`) and at
    most the weight, and all tokens may err the same way. P of the row's largest score is at least 2^shift.
    """
    p_dtype = torch.float16 if problem.kv_cache.dtype == FP8 else problem.kv_cache.dtype
    shift = cpu_dense.P_RANGES[problem.kv_cache.dtype == FP8, p_dtype].shift
    kind = torch.finfo(p_dtype)
    least = kind.tiny if p_dtype == torch.bfloat16 else kind.tiny * kind.eps / 2
    q_factor, kv_factor = (1.0 if scale is None else scale.item() for scale in (problem.q_scale, problem.kv_scale))
    noise, lost = torch.zeros_like(out), torch.zeros_like(out)
    for request, t, scores, values in reference.scores_and_values(
        problem.q,
        problem.kv_cache,
        problem.block_table,
        problem.seq_lens,
        SOFTMAX_SCALE * q_factor * kv_factor,
        torch.float64,
    ):
        weight, result = torch.softmax(scores, dim=-1), out[request, t] / kv_factor
        largest = weight.amax(dim=-1, keepdim=True) / 2.0**shift  # the weight of P = 1
        small = weight < kind.tiny * largest
        off = torch.where(small, torch.minimum(weight, least * largest), 0)
        lost[request, t] = kv_factor * _all_one_way(off, values, result)
        rounded = torch.where(small, 0, weight * kind.eps / 2)
        at_random = SIGMAS / math.sqrt(3) * size_of_sum(rounded, values, result)
        noise[request, t] = kv_factor * torch.minimum(at_random, _all_one_way(rounded, values, result))
    # The output is rounded to float32 before it is rounded to its type.
    before = lost + noise + out.abs() * torch.finfo(torch.float32).eps
    return Rounding(before + half_ulp(out.abs() + before, problem.case.out_dtype), lost)


def _all_one_way(off: torch.Tensor, values: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The sum of off * (|V| + |result|) over the tokens, [heads, 512]."""
    return off @ values.abs() + off.sum(-1, keepdim=True) * result.abs()


def size_of_sum(off: torch.Tensor, values: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The root of the sum of (off * (V - result))^2 over the tokens, [heads, 512]."""
    square = off.square()
    spread = square @ values.square() - 2 * result * (square @ values) + square.sum(-1, keepdim=True) * result.square()
    return spread.clamp(min=0).sqrt()  # float64's own rounding may bring it below 0


def half_ulp(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance of the numbers of `dtype` around float64 `size`, which is at least 0."""
    kind = torch.finfo(dtype)
    _, exponent = torch.frexp(size.clamp(min=kind.tiny))
    return torch.ldexp(torch.full_like(size, kind.eps / 4), exponent)


def rounds_queries(problem: Problem) -> bool:
    return problem.case.fp8_math and problem.q.dtype != FP8


def rounded_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries [batch, s_q, heads, 576] of a wider type as FP8 math multiplies them, in float32."""
    values, factor = cpu_dense.product_queries(q.flatten(1, 2).cpu(), FP8)
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
    """One measure of a result, a value per request, and its limit; the result is wrong where got <= limit is false."""

    name: str
    got: torch.Tensor  # [batch]
    limit: torch.Tensor  # [batch]

    def worst(self) -> tuple[float, float]:
        """The largest share of its limit that a request has, and that request's value; 0 and 0 where all are 0."""
        if not len(self.got):
            return 0.0, 0.0
        share = torch.where(self.limit > 0, self.got / self.limit, 0).nan_to_num(torch.inf)
        request = int(share.argmax())
        return share[request].item(), self.got[request].item()


def measures(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> list[Measure]:
    """How far a result is from the truth, and how far it may be."""
    out, lse = out.double(), lse.double()
    error = out - wanted.out
    lse_error = ((lse - wanted.lse) / wanted.lse.abs().clamp(min=1)).flatten(1)
    lse_error = torch.where(torch.isfinite(wanted.lse.flatten(1)), lse_error.abs(), 0).amax(1)
    cosine_limit, lse_limit = (torch.full_like(lse_error, limit) for limit in _limits(problem, wanted))
    cosine = cosine_difference(out, wanted.out)
    if problem.case.fp8_math and bool((cosine > cosine_limit).any()):
        of_executor = cosine_difference(executed(problem).double(), wanted.out)
        cosine_limit = torch.maximum(cosine_limit, FACTOR * of_executor)
    found = [Measure("cosine difference", cosine, cosine_limit), Measure("log-sum-exp error", lse_error, lse_limit)]
    if not problem.case.fp8_math:
        found.append(largest_error(error.flatten(1).abs(), wanted.max_error.flatten(1), "largest error"))
        found.append(Measure("relative RMSE", relative_rmse(error, wanted.out), wanted.rmse))
    return found


def largest_error(error: torch.Tensor, limit: torch.Tensor, name: str) -> Measure:
    """Each request's element [batch, elements] that comes nearest to its limit, or is furthest beyond."""
    if error.shape[1] == 0:
        return Measure(name, *error.new_zeros(2, len(error)))
    share = torch.where(error > 0, error / limit, 0).nan_to_num(torch.inf, torch.inf)
    share = torch.where(error.isnan(), torch.inf, share)
    at = share.argmax(1, keepdim=True)
    return Measure(name, error.gather(1, at).squeeze(1), limit.gather(1, at).squeeze(1))


def executed(problem: Problem) -> torch.Tensor:
    """The CPU executor's output of a problem on any device, split for the case's number of SMs or an H200's."""
    tensors = {name: value.cpu() for name, value in vars(problem).items() if isinstance(value, torch.Tensor)}
    case = replace(problem.case, num_sms=problem.case.num_sms or 132)
    out, _ = Runner(replace(problem, case=case, **tensors)).run()
    return out.to(problem.q.device)


def _limits(problem: Problem, wanted: Truth) -> tuple[float, float]:
    """Limits of the cosine difference and of the log-sum-exp's error."""
    if not problem.case.fp8_math:
        return COSINE[plain_dtype(problem)], LSE
    if rounds_queries(problem) and not wanted.of_rounded_queries:
        return FP8_MATH_COSINE_ROUNDED_QUERIES, FP8_MATH_LSE_ROUNDED_QUERIES
    return FP8_MATH_COSINE_ALIKE if problem.case.law == "clamped" else FP8_MATH_COSINE, FP8_MATH_LSE


def problems_with(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> list[str]:
    """What is wrong with a result, one line a request and measure; empty when all is well."""
    found = elsewhere(out, lse, wanted.out, wanted.lse)
    lengths = problem.case.lengths
    return failures(
        [*found, *measures(out, lse, problem, wanted)],
        lambda request: f"request {request} of {lengths[request]} tokens",
    )


def elsewhere(
    out: torch.Tensor, lse: torch.Tensor, wanted_out: torch.Tensor, wanted_lse: torch.Tensor
) -> list[Measure]:
    """Infinities and NaN of outputs and log-sum-exps that the reference does not have: none is allowed."""
    found = []
    for name, got, want in (("out", out, wanted_out), ("lse", lse, wanted_lse)):
        special = ~torch.isfinite(want)
        wrong = (torch.isfinite(got) == special) | (special & (got != want))
        count = wrong.flatten(1).sum(1).double()
        found.append(Measure(f"{name}: inf/NaN elsewhere than in the reference", count, torch.zeros_like(count)))
    return found


def failures(found: list[Measure], name_of: Callable[[int], str], most: int = 4) -> list[str]:
    """A line for each measure and request that is beyond its limit; the first few of them, then their number."""
    lines = []
    for measure in found:
        requests = (~(measure.got <= measure.limit)).nonzero().flatten().tolist()
        for request in requests[:most]:
            values = f"{measure.got[request]:.3e}, at most {measure.limit[request]:.3e}"
            lines.append(f"{measure.name} {values} in {name_of(request)}")
        if len(requests) > most:
            lines.append(f"{measure.name}: {len(requests) - most} more")
    return lines


def check(out: torch.Tensor, lse: torch.Tensor, problem: Problem, wanted: Truth) -> None:
    found = problems_with(out, lse, problem, wanted)
    assert not found, "\n".join([*found, f"the case: {problem.case!r}"])
