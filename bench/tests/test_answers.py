"""Agreement of answers: what is accepted as an answer, how it is judged, and `answers` against a server with faults."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
import typer
from typer.testing import CliRunner

from bench.servers import agreement as judging
from bench.servers import answers
from bench.servers.agreement import Agreement, agreement, answer_in, objections, rounds_elsewhere
from bench.servers.client import Failed, FailedRequest
from bench.servers.engines import ENGINES, PAGE_TOKENS, Answer, Variant
from bench.tests.fake_engine import ABOUT, children, stand_in

VLLM, SGLANG = ENGINES["vllm"], ENGINES["sglang"]


def of_vllm(tokens, logprobs, best=(-1.0, -2.0)):
    top = {"token_id:7": best[0], "token_id:8": best[1]}
    steps = [top | {f"token_id:{token}": value} for token, value in zip(tokens, logprobs, strict=True)]
    names = [f"token_id:{token}" for token in tokens]
    return {"choices": [{"logprobs": {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": steps}}]}


def of_sglang(tokens, logprobs, best=(-1.0, -2.0)):
    chosen = [[logprob, token, None] for token, logprob in zip(tokens, logprobs, strict=True)]
    steps = [[[best[0], 7, None], [best[1], 8, None]] for _ in tokens]
    return {"meta_info": {"output_token_logprobs": chosen, "output_top_logprobs": steps, "completion_tokens": 9}}


@pytest.mark.parametrize("engine, reply", [(VLLM, of_vllm), (SGLANG, of_sglang)], ids=["vllm", "sglang"])
def test_an_answer_has_tokens_logprobs_and_gaps_and_must_be_complete_and_finite(engine, reply):
    assert answer_in(engine, reply([7, 7], [-1.0, -1.0]), 2, 7) == Answer([7, 7], [-1.0, -1.0], [1.0, 1.0])
    assert engine.tokens_in(reply([7, 7], [-1.0, -1.0]), 5) == (7 if engine is VLLM else 9)
    for value in (math.nan, None, -9999.0, 0.5):
        with pytest.raises(FailedRequest, match="finite"):
            answer_in(engine, reply([7], [value]), 1)
    with pytest.raises(FailedRequest, match="finite"):
        answer_in(engine, reply([7], [-1.0], (-1.0, math.nan)), 1)
    with pytest.raises(FailedRequest, match="wanted 2 tokens, got 1"):
        answer_in(engine, reply([7], [-1.0]), 2)
    with pytest.raises(FailedRequest, match="wanted the token 7"):
        answer_in(engine, reply([7, 8], [-1.0, -2.0]), 2, 7)


def test_the_control_of_sglang_is_the_first_token_in_another_context():
    moved = {"meta_info": {"output_token_ids_logprobs": [[[-4.0, 7, None]]]}}
    assert answers.first_token_moved(moved, Answer([7, 8], [-1.0] * 2, [0.5] * 2)) == Answer([7], [-4.0], [0.0])
    with pytest.raises(Failed, match="of token 9, got that of 7"):
        answers.first_token_moved(moved, Answer([9], [-1.0], [0.5]))


def test_requests_cover_page_edges_and_turns_follow_whole_pages():
    requests, turns = judging.make_requests(96, True), judging.make_turns(True)
    assert requests == judging.make_requests(96, True) and sum(r.forced is None for r in requests) == 48
    assert {len(request.prompt) for request in requests} >= set(judging.EDGE_LENGTHS)
    assert judging.TURN_PREFIX % PAGE_TOKENS == 0 and len({tuple(t.prompt[: judging.TURN_PREFIX]) for t in turns}) == 2
    assert all(request.forced is None for request in judging.make_requests(96, False) + judging.make_turns(False))
    common = [request.prompt for request in judging.make_common(True)]
    assert {tuple(prompt[: judging.COMMON_PREFIX]) for prompt in common} == {tuple(common[0][: judging.COMMON_PREFIX])}
    assert judging.COMMON_PREFIX % PAGE_TOKENS == 0 and len(set(map(tuple, common))) == judging.COMMON_REQUESTS
    changed, prompt = judging.with_another_beginning(requests[7]), requests[7].prompt
    assert changed[3000:] == prompt[3000:] and changed[:3000] != prompt[:3000] and len(changed) == 4000


def test_steps_compare_up_to_the_first_that_parts():
    one, other = (
        Answer([4, 5, 6], [-1.0, -2.0, -3.0], [0.1] * 3),
        Answer([4, 9, 6], [-1.5, -2.0, -9.0], [0.7, 0.8, 0.9]),
    )
    result = agreement([one, other], [other, other])
    assert result.differences == [[0.5], [0.0, 0.0, 0.0]] and result.parted == [0.8]
    assert (result.summary()["equal_answers"], Agreement([[], []]).median()) == (1, math.inf)


def scattered(median, seed=0):
    rng = random.Random(seed)
    return Agreement([[abs(rng.gauss(0, median / 0.6745)) for _ in range(30)] for _ in range(40)])


NOISE, CONTROL = scattered(0.05), scattered(3.0)


@pytest.mark.parametrize("loose", [False, True])
def test_rounding_is_accepted_and_faults_are_not(loose):
    good = scattered(0.06, 1)
    assert objections(good, NOISE, CONTROL, loose=loose) == []
    assert "median difference" in objections(scattered(0.6, 1), NOISE, CONTROL, loose=loose)[0]
    one = Agreement([*good.differences[:-1], [0.6] * 30])
    assert objections(one, NOISE, CONTROL, loose=loose)[0].startswith("1 requests with a median over")
    assert "another token" in objections(Agreement(good.differences, [0.1, 2.0]), NOISE, CONTROL, loose=loose)[0]
    assert "inf" in objections(Agreement([[], []], [9.0]), NOISE, CONTROL, loose=loose)[0]
    assert objections(Agreement([[math.nan] * 20]), NOISE, CONTROL, loose=loose)
    assert "blind" in objections(good, NOISE, scattered(0.05, 2), loose=loose)[0]


@pytest.mark.parametrize(
    "noisiest, found, allowed",
    [(0.05, 0.14, True), (0.05, 0.16, False), (0.01, 0.06, True), (0.01, 0.07, False), (0.3, 0.24, True),
     (0.3, 0.26, False)],
)  # fmt: skip
def test_a_request_may_scatter_as_the_reference_does_where_context_matters_little(noisiest, found, allowed):
    """Up to an eighth of the control, three times the noisiest request, and never half of the control."""
    noise, control = Agreement([[0.01] * 30] * 39 + [[noisiest] * 30]), Agreement([[0.5]] * 40)
    assert (not objections(Agreement([[0.01] * 30] * 39 + [[found] * 30]), noise, control)) == allowed


@pytest.mark.parametrize(
    "one, reference, elsewhere",
    [("ETAP", "FLASHMLA", False), ("ETAP+eager", "FLASHMLA", True), ("ETAP+fp8", "FLASHMLA+fp8", True),
     ("ETAP+fp8", "TRITON_MLA+fp8", False), ("ETAP+fp8+math", "TRITON_MLA+fp8", True), ("ETAP+fp8", "FLASHMLA", True)],
)  # fmt: skip
def test_backends_that_round_elsewhere_are_not_held_to_noise(one, reference, elsewhere):
    assert rounds_elsewhere(Variant.parse(one), Variant.parse(reference)) == elsewhere


@pytest.mark.parametrize(
    "faults, words",
    [
        ("", None),
        ("again", None),  # the engine's prefix cache changes answers whatever attends
        ("ETAP", r"ETAP plain, together: median difference (2\.000|1\.999)"),
        ("ETAP again", r"ETAP plain, again: median difference (2\.000|1\.999)"),
        ("blind", "ETAP plain, together: the check is blind"),
        ("graphs", "FLASHMLA plain: CUDA graphs: wanted True, the log says False"),
        ("cache", "FLASHMLA plain: prefix cache: wanted"),
        ("ETAP at start", "ETAP plain: the server ended with 1"),
    ],
)
def test_a_model_is_compared_with_what_the_reference_shows_of_itself(tmp_path, monkeypatch, faults, words):
    stand_in(monkeypatch, tmp_path, faults)
    monkeypatch.setattr(answers, "provenance", lambda *_: ABOUT)
    app, output = typer.Typer(), tmp_path / "out.json"
    app.command()(answers.main)
    names = "FLASHMLA,ETAP" if faults else "FLASHMLA,ETAP,ETAP+eager"
    options = ["--backends", names, "--requests", "32", "--output", str(output), "--parallel", "2"]
    result = CliRunner().invoke(app, [str(tmp_path), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document = json.loads(output.read_text())
    assert result.exit_code == bool(words) and not children(tmp_path), document["failures"]
    assert not words or any(re.match(words, text) for text in document["failures"]), document["failures"]
    if not faults:
        names = ("ETAP", "ETAP+eager")
        assert set(document["agreement"]) == {f"{n} plain, {stage}" for n in names for stage in answers.STAGES}
        assert document["yardsticks"]["plain, control"]["median"] > 1 and "--attention-backend ETAP" in str(document)
