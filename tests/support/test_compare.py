"""The limits of `compare`: they allow the formats' errors and find wrong results of the CPU's executor."""

from dataclasses import replace

import pytest
import torch

from etap_backend import reference
from support.cases import SOFTMAX_SCALE, Case, Runner, build
from support.compare import (
    FP8_MATH_COSINE_ALIKE,
    cosine_difference,
    executed,
    half_ulp,
    measures,
    problems_with,
    rounding_of,
    truth,
)

FP8_CACHE = {"kv_dtype": "fp8", "kv_scale": 0.0137}
KINDS = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "bfloat16", **FP8_CACHE},
    {"dtype": "float8_e4m3fn", "output": "float16", **FP8_CACHE},
]


def result_of(problem, change):
    """The result of an otherwise exact kernel after `change` to the scores [heads, tokens] of each row."""
    out = torch.zeros(*problem.q.shape[:3], 512, dtype=torch.float64)
    lse = torch.full(problem.q.shape[:3], -torch.inf, dtype=torch.float64)
    q_factor, kv_factor = (1.0 if scale is None else scale.item() for scale in (problem.q_scale, problem.kv_scale))
    arguments = (problem.q, problem.kv_cache, problem.block_table, problem.seq_lens)
    factor = SOFTMAX_SCALE * q_factor * kv_factor
    for request, t, scores, values in reference.scores_and_values(*arguments, factor, torch.float64):
        change(scores)
        lse[request, t] = scores.logsumexp(-1)
        out[request, t] = scores.softmax(-1) @ values * kv_factor
    return out.to(problem.case.out_dtype), lse.float()


def wrong_measures(problem, change) -> set[str]:
    out, lse = result_of(problem, change)
    return {one.name for one in measures(out, lse, problem, truth(problem)) if not bool((one.got <= one.limit).all())}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law, length", [("normal", 127), ("outliers", 127), ("clamped", 2000)])
def test_one_dropped_token_is_found(kind, law, length):
    problem = build(Case((length,), 16, law=law, seed=4, **kind), "cpu")
    assert not wrong_measures(problem, lambda scores: None)
    found = wrong_measures(problem, lambda scores: scores[:, -1].fill_(-torch.inf))
    assert found >= {"cosine difference", "log-sum-exp error", "relative RMSE"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_off_by_one_percent_is_found(kind):
    """In the output already, of a key that weighs much: without the log-sum-exp, which finds it by far."""
    problem = build(Case((127,), 16, law="normal", seed=4, **kind), "cpu")
    found = wrong_measures(
        problem, lambda scores: scores.scatter_add_(1, scores.argmax(1, True), scores[:, :1] * 0 + 0.01)
    )
    assert found >= {"cosine difference", "log-sum-exp error"}
    assert kind["dtype"] != "float16" or found >= {"largest error", "relative RMSE"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", ["normal", "outliers", "clamped"])
def test_a_wrong_page_is_found(kind, law):
    case = Case((1000,), 8, law=law, seed=5, **kind)
    right = build(case, "cpu")
    wanted = truth(right)
    assert not problems_with(*Runner(right).run(), right, wanted)
    wrong = replace(right, block_table=right.block_table.clone())
    wrong.block_table[0, 7] = wrong.block_table[0, 8]
    lines = problems_with(*Runner(wrong).run(), right, wanted)
    assert all(any(name in line for line in lines) for name in ("cosine", "log-sum-exp", "relative RMSE")), lines


@pytest.mark.parametrize("kind", [{}, {"dtype": "float8_e4m3fn", "q_scale": 0.021, "output": "float16"}])
def test_weights_below_what_p_holds_may_vanish_and_nothing_more(kind):
    """Three tokens: the last weighs 1, the others 1e-18 at most. Where the last one's value is 0, the others decide."""
    problem = build(Case((3,) * 24, 16, law="rising", seed=0, kv_dtype="fp8", **kind), "cpu")
    wanted = truth(problem)
    tiny = (wanted.out != 0) & (wanted.out.abs() < 1e-15)
    assert tiny.any()
    out, lse = Runner(problem).run()
    assert not problems_with(out, lse, problem, wanted)
    assert ((out == 0) & tiny).any(), "nothing vanished"
    # As much as a key that weighs 2^-20 would bring, where the formats hold 2^-32.
    off = out.double()
    off[tiny] += 2.0**-20
    assert any("largest error" in line for line in problems_with(off, lse, problem, wanted))


def test_what_an_elements_formats_cost_is_allowed_to_it_alone():
    problem = build(Case((127,) * 24, 64, law="outliers", seed=105), "cpu")
    wanted = truth(problem)
    rounding = rounding_of(problem, wanted.out)
    out, lse = Runner(problem).run()
    assert not problems_with(out, lse, problem, wanted)
    # The bound of the formats is none that results stay far below: float16's or a tighter one would fail.
    share = ((out.double() - wanted.out).abs() / rounding.element).amax()
    assert 0.5 < share <= 1
    limits = wanted.max_error.flatten(1)
    request = int((limits.amax(1) / limits.amin(1)).argmax())
    limit = limits[request]
    most, least = limit.argmax(), limit.argmin()
    assert limit[most] > 1.2 * limit[least], "no element whose formats cost more than twice plain torch's error"
    for place, amount, found in ((most, 0.99, False), (most, 1.01, True), (least, 0.99, True)):
        off = wanted.out.clone()
        off[request].view(-1)[place] += amount * limit[most]
        assert any("largest error" in line for line in problems_with(off, lse, problem, wanted)) == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_an_ulp_is_what_rounding_costs_at_most(dtype):
    sizes = 2.0 ** (torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 40 - 25)
    sizes = torch.cat([sizes[sizes < 60_000], torch.zeros(1, dtype=torch.float64)])
    sizes = sizes.float().double()  # torch rounds float64 to float32 first
    error, limit = (sizes.to(dtype).double() - sizes).abs(), half_ulp(sizes, dtype)
    assert (error <= limit).all() and (error > 0.99 * limit).any()
    between = torch.tensor([2.0**-126 if dtype == torch.bfloat16 else 2.0**-14, 1.0, 1.5], dtype=torch.float64)
    above = torch.nextafter(between.to(dtype), torch.tensor(torch.inf, dtype=dtype)).double()
    assert torch.equal(half_ulp(between, dtype), (above - between) / 2)


def test_fp8_math_of_many_keys_alike_may_err_as_the_executor_does_and_not_more():
    """P's stairs are a function of the score: the error lies along the query and grows with the tokens."""
    problem = build(Case((40_000,), 4, law="clamped", seed=2, fp8_math=True, **FP8_CACHE), "cpu")
    wanted = truth(problem, of_rounded_queries=True)
    out, lse = Runner(problem).run()
    error = out.double() - wanted.out
    query = problem.q[..., :512].double()
    along = (error * query).sum(-1) / query.norm(dim=-1)
    assert along.square().sum() > 0.7 * error.square().sum()
    assert cosine_difference(out.double(), wanted.out) > FP8_MATH_COSINE_ALIKE
    assert not problems_with(out, lse, problem, wanted)
    # One of 32 splits lost.
    without, _ = result_of(problem, lambda scores: scores[:, 1250:2500].fill_(-torch.inf))
    assert any("cosine" in line for line in problems_with(without, lse, problem, wanted))


def test_the_executor_plans_as_the_call_did():
    """A call that shared prefixes rounds otherwise than one that did not."""
    case = Case((600, 700), heads=8, num_sms=8, prefixes=((2, 512),), fp8_math=True, **FP8_CACHE)
    problem = build(case, "cpu")
    out, _ = Runner(problem).run()
    assert torch.equal(executed(problem), out)
    assert not torch.equal(executed(replace(problem, case=replace(case, prefixes=()))), out)
