"""The parts of the serve check of SGLang that need no GPU: what it accepts as an answer, a log and a control."""

import pytest

from etap_backend.lab.checks import sglang_serve as check
from etap_backend.lab.checks.agreement import answer_in
from etap_backend.lab.serving.client import Failed, FailedRequest


def result(logprobs=(-0.5, -1.0), tokens=(7, 8)):
    steps = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    top = [[[-0.5, 7, None], [-2.5, 9, None]] for _ in tokens]
    return {"meta_info": {"output_token_logprobs": steps, "output_top_logprobs": top}}


def test_answer_has_tokens_logprobs_and_gaps():
    answer = answer_in(check.SGLANG, result(), 2)
    assert (answer.tokens, answer.logprobs, answer.gaps) == ([7, 8], [-0.5, -1.0], [2.0, 2.0])


@pytest.mark.parametrize("values", [(float("nan"), -1.0), (-float("inf"), -1.0), (0.5, -1.0)], ids=str)
def test_answer_must_be_finite(values):
    with pytest.raises(FailedRequest, match="wanted finite log-probabilities"):
        answer_in(check.SGLANG, result(values), 2)


def test_answer_must_be_complete():
    with pytest.raises(FailedRequest, match="wanted 2 tokens, got 1"):
        answer_in(check.SGLANG, result((-0.5,), (7,)), 2)


def test_control_is_how_far_the_first_token_moved():
    answer = answer_in(check.SGLANG, result(), 2)
    moved = {"meta_info": {"output_token_ids_logprobs": [[[-4.0, 7, None]]]}}
    assert check.first_token_moved(moved, answer) == 3.5
    moved["meta_info"]["output_token_ids_logprobs"][0][0][1] = 9
    with pytest.raises(Failed, match="of token 7, got that of 9"):
        check.first_token_moved(moved, answer)


LOG = "server_args=ServerArgs(attention_backend='{}', page_size=64)\nDecode batch, #running-req: 5, cuda graph: {}, x\n"


def test_the_log_must_say_what_decode_ran_with():
    assert check.SGLANG.in_use("etap", LOG.format("etap", True)) and not check.SGLANG.in_use(
        "etap", LOG.format("fa3", 1)
    )
    check.must_have_graphs(LOG.format("etap", True), eager=False)
    check.must_have_graphs(LOG.format("etap", False), eager=True)
    for text, eager in ((LOG.format("etap", False), False), (LOG.format("etap", True), True), ("", False)):
        with pytest.raises(Failed, match="CUDA graphs: wanted"):
            check.must_have_graphs(text, eager)
    assert check.most_running(LOG) == 5
