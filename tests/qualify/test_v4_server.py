"""The program that serves DeepSeek-V4's layers: its model, what it reads from replies, and how it judges them."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from etap_backend.lab.checks.agreement import PROMPT_TOKENS
from etap_backend.lab.results import write
from etap_backend.lab.serving.client import Failed
from etap_backend.lab.serving.engines import Answer
from qualify import v4_server

STEPS = 12


def answers(shift: float = 0.0) -> list[dict]:
    return [asdict(Answer([7] * STEPS, [-2.0 - shift] * STEPS, [1.0] * STEPS)) for _ in range(4)]


def record(folder, backend: str, shift: float = 0.0) -> None:
    stages = {"together": answers(shift), "again": answers(shift), "few": answers(shift + 0.01)}
    stages |= {"control": answers(shift + 3), "before control": answers(shift)}
    stages["turns"] = answers(shift)
    write({"ready_seconds": 1.0, "found": stages}, folder / f"{backend}-answers.json")


def test_the_model_has_every_kind_of_layer_and_every_token_of_a_prompt(tmp_path):
    config = json.loads((v4_server.write_model(tmp_path / "model") / "config.json").read_text())
    assert len(config["compress_ratios"]) == config["num_hidden_layers"] and set(config["compress_ratios"]) == {
        0,
        4,
        128,
    }
    assert config["vocab_size"] > max(PROMPT_TOKENS) and config["num_attention_heads"] == 8
    assert config["num_attention_heads"] % config["o_groups"] == 0


def test_a_reply_is_its_tokens_their_log_probabilities_and_the_gaps_between_the_best_two():
    steps = [{5: SimpleNamespace(logprob=-3.0), 6: SimpleNamespace(logprob=-1.0), 7: SimpleNamespace(logprob=-1.5)}]
    assert v4_server._answer([5], steps) == Answer([5], [-3.0], [0.5])


@pytest.mark.parametrize("shift, said", [(0.0, "agree"), (0.02, "agree"), (1.0, "differ")])
def test_answers_are_judged_by_the_reference_s_own_noise(tmp_path, shift, said):
    for backend, by in zip(v4_server.BACKENDS, (0.0, shift), strict=True):
        record(tmp_path, backend, by)
    found, failures = v4_server.judged(tmp_path)
    together = found["agreement"]["ETAP plain, together"]
    assert together["median"] == pytest.approx(shift) and together["equal_answers"] == together["requests"] == 4
    assert found["outcome"].startswith(f"log-probabilities {said}; equal answers: ETAP plain, together: 4 of 4; ")
    assert bool(failures) == (said == "differ")
    assert not failures or failures[0].startswith("ETAP plain, together: median difference 1.0000")


def test_a_step_is_the_median_of_all_readings_of_its_point():
    turns = {
        name: [{"1 x 4096": {"ms": [ms, 9.0, ms]}}, {"1 x 4096": {"ms": [ms, ms, 9.0]}}]
        for name, ms in zip(v4_server.BACKENDS, (2.0, 1.5), strict=True)
    }
    assert v4_server.medians(turns) == "; a step of 1 x 4096: 1.50 ms, FLASHMLA_SPARSE 2.00"
    assert v4_server.medians({name: [] for name in v4_server.BACKENDS}) == ""


def test_an_engine_that_fails_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(v4_server.sys, "executable", "false")
    monkeypatch.setattr(v4_server, "__spec__", SimpleNamespace(name="qualify.v4_server"))
    (tmp_path / "v4").mkdir()
    with pytest.raises(Failed, match="an engine failed"):
        v4_server.run([("ETAP", "answers")], tmp_path / "v4.json", limit=60)
    record(tmp_path / "v4", "ETAP")
    v4_server.run([("ETAP", "answers")], tmp_path / "v4.json", limit=60)
