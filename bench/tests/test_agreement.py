"""Requests to any model: what is accepted as an answer, compared, and objected to."""

import json
import math
import random

import pytest
import typer
from bench.tests.fake_server import IN_VLLMS_PLACE, stand_in
from typer.testing import CliRunner

from bench.checks import agreement as judged
from bench.checks import answers
from bench.checks.agreement import Agreement, Request, agreement, answer_in, objections
from bench.checks.asked import Variant
from bench.serving.client import Failed, FailedRequest
from bench.serving.engines import ENGINES, PAGE_TOKENS, Answer

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


def test_answers_that_all_part_at_once_differ():
    apart = Agreement([[], []], parted=[9.0, 9.0])
    assert "median difference inf" in objections(apart, NOISE, CONTROL)[0]
    assert apart.summary()["steps"] == 0 and apart.summary()["median"] is None


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


def test_next_turns_are_after_prefixes_of_whole_pages_and_around_what_decode_takes():
    turns = judged.make_turns()
    assert turns == judged.make_turns() and judged.TURN_PREFIX % PAGE_TOKENS == 0
    assert {len(turn.prompt) - judged.TURN_PREFIX for turn in turns} >= {2, 37, 64, 127, 128, 129}
    assert len({tuple(turn.prompt[: judged.TURN_PREFIX]) for turn in turns}) == 2
    assert {turn.forced is None for turn in turns} == {True, False}


@pytest.mark.parametrize(
    "ours, reference, otherwise",
    [
        ("ETAP", "FLASHMLA", False),
        ("ETAP+eager", "FLASHMLA", True),
        ("ETAP+fp8", "FLASHMLA", True),
        ("ETAP+fp8", "FLASHMLA+fp8", True),
        ("ETAP+fp8", "TRITON_MLA+fp8", False),
        ("ETAP+fp8_e4m3+math", "TRITON_MLA+fp8_e4m3", True),
    ],
)
def test_backends_that_round_queries_are_not_held_to_noise(ours, reference, otherwise):
    assert judged.rounds_otherwise(Variant.parse(ours), Variant.parse(reference)) == otherwise


def of_sglang(logprobs=(-0.5, -1.0), tokens=(7, 8)):
    steps = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    top = [[[-0.5, 7, None], [-2.5, 9, None]] for _ in tokens]
    return {"meta_info": {"output_token_logprobs": steps, "output_top_logprobs": top}}


@pytest.mark.parametrize("values", [(float("nan"), -1.0), (-float("inf"), -1.0), (0.5, -1.0)], ids=str)
def test_an_answer_of_sglang_must_be_finite(values):
    with pytest.raises(FailedRequest, match="wanted finite log-probabilities"):
        answer_in(ENGINES["sglang"], of_sglang(values), 2)


def test_control_of_sglang_is_the_first_token_in_another_context():
    answer = answer_in(ENGINES["sglang"], of_sglang(), 2)
    moved = {"meta_info": {"output_token_ids_logprobs": [[[-4.0, 7, None]]]}}
    assert judged.first_token_moved(moved, answer) == Answer([7], [-4.0], [0.0])
    moved["meta_info"]["output_token_ids_logprobs"][0][0][1] = 9
    with pytest.raises(Failed, match="of token 7, got that of 9"):
        judged.first_token_moved(moved, answer)


def test_the_log_must_say_what_decode_ran_with():
    steps = "Decode batch, #running-req: 5, cuda graph: {}, x\n"
    sglang = ENGINES["sglang"]
    assert judged.ran_in_graphs(sglang, steps.format(True)) is True
    assert judged.ran_in_graphs(sglang, steps.format(False)) is False and judged.ran_in_graphs(sglang, "") is None
    assert judged.ran_in_graphs(VLLM, "Capturing CUDA graphs (decode, FULL)") is True
    assert judged.ran_in_graphs(VLLM, "nothing") is False


# Answers as vLLM does, with log-probabilities that follow from the prompt; FAULT is a backend whose own are others.
SERVER = (
    IN_VLLMS_PLACE
    + """
backend, seen, hits, lock = flag("--attention-backend"), set(), 0, threading.Lock()
print(f"Using AttentionBackendEnum.{backend} backend.")
print("" if "--enforce-eager" in sys.argv or fault == "graphs" else "Capturing CUDA graphs (FULL)", flush=True)

class Handler(Replying):
    def do_GET(self):
        self.count({"prefix_cache_hits": 0 if fault == "cache" else hits})

    def do_POST(self):
        global hits
        asked, forced = self.asked()
        prompt, place = asked["prompt"], (asked["cache_salt"], *asked["prompt"])
        with lock:
            again = place in seen
            hits += (len(prompt) - 1) // 64 * 64 * again
            seen.add(place)
        moved = 2.0 * (fault in (backend, again and "again", again and f"{backend} again"))
        moved += sum(prompt) % 97 / 10 if fault != "blind" else 0
        self.answer(forced or [(sum(prompt) + n) % 1000 for n in range(asked["max_tokens"])], -1 - moved, -20)
serve(Handler)
"""
)


@pytest.mark.parametrize(
    "fault, said",
    [
        ("", None),
        ("again", None),  # the engine's prefix cache changes answers, whoever attends
        ("ETAP", "ETAP plain, together: median difference 2.0000"),
        ("ETAP again", "ETAP plain, again: median difference 2.0000"),
        ("blind", "ETAP plain, together: the check is blind"),
        ("graphs", "FLASHMLA plain: CUDA graphs: wanted True, the log says False"),
        ("cache", "FLASHMLA plain: prefix cache: wanted"),
    ],
)
def test_any_model_is_compared_with_what_the_reference_shows_of_itself(tmp_path, monkeypatch, fault, said):
    output = tmp_path / "answers.json"
    stand_in(monkeypatch, tmp_path, SERVER)
    monkeypatch.setenv("FAULT", fault)
    app = typer.Typer()
    app.command()(answers.main)
    words = ["some/model", "--backends", "FLASHMLA,ETAP,ETAP+eager", "--requests", "32", "--output", str(output)]
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document = json.loads(output.read_text())
    assert result.exit_code == bool(said), (result.output, document["failures"])
    assert not said or any(failure.startswith(said) for failure in document["failures"]), document["failures"]
    if not said:
        stages = ("together", "again", "few", "turns")
        cases = {f"{name} plain, {stage}" for name in ("ETAP", "ETAP+eager") for stage in stages}
        assert set(document["agreement"]) == cases and document["yardsticks"]["plain"]["control"]["median"] > 1
        assert all(row["equal_answers"] == row["requests"] > 0 for row in document["agreement"].values())
        assert "some/model" in document["servers"]["ETAP plain"]["command"]
