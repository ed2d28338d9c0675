"""The parts of the serve check of vLLM that need no GPU: what it accepts as an answer, compares, and objects to."""

import math
import random

import pytest
import torch
import typer

from etap_backend.lab.checks import agreement as judged
from etap_backend.lab.checks import seeded_weights, speed, vllm_serve
from etap_backend.lab.checks.agreement import Agreement, Request, agreement, answer_in, objections
from etap_backend.lab.serving.client import FailedRequest
from etap_backend.lab.serving.engines import ENGINES, Answer

VLLM = ENGINES["vllm"]


def reply(tokens, logprobs, best=(-1.0, -2.0)):
    top = {"token_id:7": best[0], "token_id:8": best[1]}
    logprobs = {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": list(logprobs),
        "top_logprobs": [top | {f"token_id:{token}": value} for token, value in zip(tokens, logprobs, strict=True)],
    }
    return {"choices": [{"logprobs": logprobs}]}


def scattered(median, requests=40, steps=30, seed=0):
    rng = random.Random(seed)
    return Agreement([[abs(rng.gauss(0, median / 0.6745)) for _ in range(steps)] for _ in range(requests)])


NOISE, CONTROL = scattered(0.05), scattered(3.0)


def test_requests_repeat_and_cover_the_page_edges():
    requests = judged.make_requests(96)
    assert requests == judged.make_requests(96)
    assert {len(request.prompt) for request in requests} >= set(judged.EDGE_LENGTHS)
    assert all(10 <= len(request.prompt) <= 4000 and 16 <= request.new_tokens <= 64 for request in requests)
    assert sum(request.forced is None for request in requests) == 48


def test_another_beginning_keeps_the_end_and_the_forced_token():
    request = Request(list(range(2000, 2100)), 20, 5000)
    changed = judged.with_another_beginning(request)
    assert changed.prompt[75:] == request.prompt[75:]
    assert sum(a == b for a, b in zip(changed.prompt[:75], request.prompt[:75], strict=True)) < 5
    assert (changed.new_tokens, changed.forced) == (20, 5000)


def test_answer_carries_tokens_logprobs_and_gaps():
    answer = answer_in(VLLM, reply([7, 7], [-1.0, -1.0], (-1.0, -1.25)), 2)
    assert answer == Answer([7, 7], [-1.0, -1.0], [0.25, 0.25])


def test_gap_is_between_the_best_two_even_where_another_token_is_forced():
    answer = answer_in(VLLM, reply([9], [-20.0], (-1.0, -1.5)), 1, [9])
    assert answer == Answer([9], [-20.0], [0.5])


@pytest.mark.parametrize(
    "given, tokens, forced, complaint",
    [
        (reply([7], [-1.0]), 2, None, "wanted 2 tokens, got 1"),
        (reply([7], [math.nan]), 1, None, "finite"),
        (reply([7], [None]), 1, None, "finite"),
        (reply([7], [-9999.0]), 1, None, "finite"),
        (reply([7], [-1.0], (-1.0, math.nan)), 1, None, "finite"),
        (reply([7, 8], [-1.0, -2.0]), 2, [7, 7], r"wanted the tokens \[7, 7\], got \[7, 8\]"),
    ],
)
def test_answers_that_are_refused(given, tokens, forced, complaint):
    with pytest.raises(FailedRequest, match=complaint):
        answer_in(VLLM, given, tokens, forced)


def test_steps_are_compared_up_to_the_one_that_parts():
    ours = Answer([4, 5, 6], [-1.0, -2.0, -3.0], [0.1, 0.2, 0.3])
    theirs = Answer([4, 9, 6], [-1.5, -2.0, -9.0], [0.7, 0.8, 0.9])
    result = agreement([ours, theirs], [theirs, theirs])
    assert result.differences == [[0.5], [0.0, 0.0, 0.0]]
    assert result.parted == [0.8]


def test_summary_tells_requests_too_short_to_be_judged_from_the_others():
    summary = Agreement([[0.5] * 3, [0.25] * judged.REQUEST_STEPS, []]).summary()
    assert summary["largest_median_of_a_request"] == 0.5
    assert summary["largest_median_of_a_judged_request"] == 0.25


def test_rounding_is_accepted():
    assert objections(scattered(0.06, seed=1), NOISE, CONTROL) == []
    assert objections(scattered(0.06, seed=1), NOISE, CONTROL, eager=True) == []


@pytest.mark.parametrize("eager", [False, True])
def test_faults_are_objected_to(eager):
    every_request = scattered(0.6, seed=1)
    assert "median difference" in objections(every_request, NOISE, CONTROL, eager=eager)[0]
    one_request = scattered(0.05, seed=1)
    one_request.differences[3] = scattered(0.6, requests=1).differences[0]
    (found,) = objections(one_request, NOISE, CONTROL, eager=eager)
    assert found.startswith("1 requests with a median over") and ": 3: " in found
    another_token = Agreement(scattered(0.05, seed=1).differences, parted=[0.1, 2.0])
    (found,) = objections(another_token, NOISE, CONTROL, eager=eager)
    assert found.startswith("1 requests with another token") and found.endswith(": 2.0000")


@pytest.mark.parametrize(
    "noisiest, ours, allowed",
    [
        (0.05, 0.14, True),  # an eighth of the control is 0.0625, three times the noise's 0.15
        (0.05, 0.16, False),
        (0.01, 0.06, True),  # the eighth
        (0.01, 0.07, False),
        (0.30, 0.24, True),  # half of the control, whatever the noise does
        (0.30, 0.26, False),
    ],
)
def test_what_one_request_may_differ_where_the_context_matters_little(noisiest, ours, allowed):
    noise = Agreement([[0.01] * 30] * 39 + [[noisiest] * 30])
    found = objections(Agreement([[0.01] * 30] * 39 + [[ours] * 30]), noise, Agreement([[0.5]] * 40))
    assert found == [] if allowed else found[0].startswith("1 requests with a median over") and len(found) == 1


def test_a_check_in_which_the_context_does_not_matter_is_no_check():
    assert "blind" in objections(scattered(0.05, seed=1), NOISE, scattered(0.05, seed=2))[0]


def test_not_a_number_is_never_agreement():
    broken = Agreement([[math.nan] * 20, [0.0] * 5])
    assert objections(broken, NOISE, CONTROL)


@pytest.mark.parametrize("text", ["16", "x16", "0x16", "16x", "16x16,"])
def test_shapes_that_are_refused(text):
    with pytest.raises(typer.BadParameter, match="BATCHxCONTEXT"):
        speed.parse_shape(text)


@pytest.mark.parametrize("text", ["16x16", "16x16+", "16x16+0", "x16+2", "1x16+2,"])
def test_next_turns_that_are_refused(text):
    with pytest.raises(typer.BadParameter, match="BATCHxCONTEXT\\+TOKENS"):
        speed.parse_turns(text)


def test_next_turns_are_after_prefixes_of_whole_blocks_and_around_what_decode_takes():
    turns = vllm_serve.make_turns()
    assert turns == vllm_serve.make_turns() and vllm_serve.TURN_PREFIX % 64 == 0
    assert {len(turn.prompt) - vllm_serve.TURN_PREFIX for turn in turns} >= {2, 37, 64, 127, 128, 129}
    assert len({tuple(turn.prompt[: vllm_serve.TURN_PREFIX]) for turn in turns}) == 2
    assert {turn.forced is None for turn in turns} == {True, False}
    assert str(speed.parse_turns("8x16384+64")) == "8x16384+64"


def test_seeded_weights_depend_on_the_name_and_keep_the_variance():
    weight, again, other = (torch.empty(256, 1024, dtype=torch.bfloat16) for _ in range(3))
    seeded_weights.fill("model.layers.0.self_attn.kv_b_proj.weight", weight)
    seeded_weights.fill("model.layers.0.self_attn.kv_b_proj.weight", again)
    seeded_weights.fill("model.layers.1.self_attn.kv_b_proj.weight", other)
    assert torch.equal(weight, again) and not torch.equal(weight, other)
    assert weight.float().std().item() == pytest.approx(1 / 32, rel=0.02)
    seeded_weights.fill("model.layers.0.mlp.experts.w2_weight", weight)
    assert weight.float().std().item() == pytest.approx(0.25 / 32, rel=0.02)
    seeded_weights.fill("model.embed_tokens.weight", weight)
    assert weight.float().std().item() == pytest.approx(1, rel=0.02)


def test_seeded_weights_of_one_dimension():
    vector = torch.full((8,), torch.nan)
    seeded_weights.fill("model.layers.0.self_attn.kv_a_layernorm.weight", vector)
    assert vector.eq(1).all()
    seeded_weights.fill("model.layers.3.mlp.gate.e_score_correction_bias", vector)
    assert vector.eq(0).all()
    with pytest.raises(ValueError, match="k_scale.*shape"):
        seeded_weights.fill("model.layers.0.self_attn.k_scale", torch.ones(1))
    with pytest.raises(ValueError, match="got torch.float8_e4m3fn"):
        seeded_weights.fill("q_b_proj.weight", torch.empty(4, 4, dtype=torch.float8_e4m3fn))
