"""The parts of sglang/serve_check.py that need no GPU: what it accepts as an answer, a log and a control."""

import pytest

from etap_backend.lab.checks import sglang_serve as check

REQUEST = check.Request(prompt=[1000, 1001], new_tokens=2)


def result(logprobs=(-0.5, -1.0), tokens=(7, 8)):
    steps = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    top = [[[-0.5, 7, None], [-2.5, 9, None]] for _ in tokens]
    return {"meta_info": {"output_token_logprobs": steps, "output_top_logprobs": top}}


def test_answer_has_tokens_logprobs_and_gaps():
    answer = check.parse_answer(result(), REQUEST)
    assert (answer.tokens, answer.logprobs, answer.gaps) == ([7, 8], [-0.5, -1.0], [2.0, 2.0])


@pytest.mark.parametrize("values", [(float("nan"), -1.0), (-float("inf"), -1.0), (0.5, -1.0)], ids=str)
def test_answer_must_be_finite(values):
    with pytest.raises(check.CheckError, match="wanted finite log-probabilities"):
        check.parse_answer(result(values), REQUEST)


def test_answer_must_be_complete():
    with pytest.raises(check.CheckError, match="wanted 2 tokens, got 1"):
        check.parse_answer(result((-0.5,), (7,)), REQUEST)


def test_control_is_how_far_the_first_token_moved():
    answer = check.parse_answer(result(), REQUEST)
    moved = {"meta_info": {"output_token_ids_logprobs": [[[-4.0, 7, None]]]}}
    assert check.first_token_moved(moved, answer) == 3.5
    moved["meta_info"]["output_token_ids_logprobs"][0][0][1] = 9
    with pytest.raises(check.CheckError, match="of token 7, got that of 9"):
        check.first_token_moved(moved, answer)


LOG = "server_args=ServerArgs(attention_backend='{}', page_size=64)\nDecode batch, #running-req: 5, cuda graph: {}, x\n"


def test_log_must_name_the_backend_and_its_graphs():
    check.check_log(LOG.format("etap", True), "etap", eager=False)
    check.check_log(LOG.format("etap", False), "etap", eager=True)
    check.check_log("{'attention_backend': 'etap'}\n" + LOG.splitlines()[1].format(True), "etap", eager=False)
    for text, eager in ((LOG.format("fa3", True), False), (LOG.format("etap", False), False), ("", False)):
        with pytest.raises(check.CheckError):
            check.check_log(text, "etap", eager)
    assert check.most_running(LOG) == 5
