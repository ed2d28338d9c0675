"""The program that serves DeepSeek-V4's layers: its model, what it reads from replies, and how it judges them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from bench.checks.agreement import CONTEXT, PROMPT_TOKENS
from bench.checks.asked import configuration, is_v4
from etap_backend.plan.inputs import read_model
from bench.common.results import write
from bench.serving.client import Failed
from bench.serving.engines import Answer
from bench.qualify import v4_server

STEPS = 12


def answers(shift: float = 0.0) -> list[dict]:
    return [asdict(Answer([7] * STEPS, [-2.0 - shift] * STEPS, [1.0] * STEPS)) for _ in range(4)]


def record(folder, backend: str, shift: float = 0.0, part: str = "answers") -> None:
    stages = {"together": answers(shift), "again": answers(shift), "few": answers(shift + 0.01)}
    stages["turns"] = answers(shift)
    about = {"ready_seconds": 1.0, "drafts": {"proposed": 90, "accepted": 2}}
    if part == "answers":
        stages |= {"control": answers(shift + 3), "before control": answers(shift)}
        del about["drafts"]
    write(about | {"found": stages}, folder / f"{backend}-{part}.json")


@pytest.mark.parametrize("layers, drafts", [(8, 0), (24, 0), (8, 3)])
def test_the_model_has_every_kind_of_layer_and_every_token_of_a_prompt(tmp_path, layers, drafts):
    config = json.loads((v4_server.write_model(tmp_path / "model", layers, drafts) / "config.json").read_text())
    mtp = int(drafts > 0)
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (layers, mtp)
    assert config["compress_ratios"] == [0, 0, *[4, 128] * (layers // 2 - 1), *[0] * mtp]
    assert config["vocab_size"] > max(PROMPT_TOKENS) and config["num_attention_heads"] == 8
    assert config["num_attention_heads"] % config["o_groups"] == 0


@pytest.mark.parametrize("layers", [4, 8, 23])
def test_a_model_of_v41_has_every_kind_of_layer_and_the_first_of_a_kind_keeps_its_entries(tmp_path, layers):
    model = read_model(str(v4_server.write_model(tmp_path / "model", layers, v41=True)))
    kinds = {ratio: model.layers_of(ratio) for ratio in (0, 2, 1)}
    assert sum(map(len, kinds.values())) == layers == model.num_hidden_layers and len(kinds[0]) == 2
    assert [model.compressing(ratio) for ratio in (2, 1)] == [kinds[ratio][:1] for ratio in (2, 1)]
    assert model.indexer_layers == (kinds[2][0], kinds[1][0]) and not model.engram_num_embeddings
    assert model.vocab_size > max(PROMPT_TOKENS) and model.num_attention_heads == 8 and model.expert_bytes > 1


@pytest.mark.parametrize("beside", [["--drafts", "1"], ["--write-model", "model"]])
def test_v41_has_no_drafts_and_no_folder_for_the_checks(beside):
    app = typer.Typer()
    app.command()(v4_server.main)
    result = CliRunner().invoke(app, ["--v41", *beside])
    assert result.exit_code == 2 and "--v41: wanted neither" in result.stderr


def test_a_model_for_the_checks_has_a_tokenizer(tmp_path):
    pytest.importorskip("tokenizers", reason="the dummy model's tokenizer is made with it")
    v4_server.main(model=tmp_path, layers=8, drafts=1, output=tmp_path / "none.json")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["max_position_embeddings"] == CONTEXT
    assert (tmp_path / "tokenizer.json").exists() and is_v4(configuration(tmp_path))


def test_a_reply_is_its_tokens_their_log_probabilities_and_the_gaps_between_the_best_two():
    steps = [{5: SimpleNamespace(logprob=-3.0), 6: SimpleNamespace(logprob=-1.0), 7: SimpleNamespace(logprob=-1.5)}]
    assert v4_server._answer([5], steps) == Answer([5], [-3.0], [0.5])


@pytest.mark.parametrize("shift, said", [(0.0, "agree"), (0.02, "agree"), (1.0, "differ")])
def test_answers_are_judged_by_the_reference_s_own_noise(tmp_path, shift, said):
    for backend, by in zip(v4_server.BACKENDS, (0.0, shift), strict=True):
        record(tmp_path, backend, by)
    found, failures = v4_server.judged(tmp_path, ["answers"])
    together = found["agreement"]["ETAP plain, together"]
    assert together["median"] == pytest.approx(shift) and together["equal_answers"] == together["requests"] == 4
    assert found["outcome"].startswith(f"log-probabilities {said}; equal answers: ETAP plain, together: 4 of 4; ")
    assert bool(failures) == (said == "differ")
    assert not failures or failures[0].startswith("ETAP plain, together: median difference 1.0000")


@pytest.mark.parametrize("shift, said", [(0.0, "agree"), (1.0, "differ")])
def test_answers_with_drafts_are_judged_beside_those_without(tmp_path, shift, said):
    for part, by in (("answers", 0.0), ("drafts", shift)):
        record(tmp_path, "FLASHMLA_SPARSE", 0.0, part)
        record(tmp_path, "ETAP", by, part)
    found, failures = v4_server.judged(tmp_path, ["answers", "drafts"])
    assert found["agreement"]["ETAP plain, together"]["median"] == 0
    assert found["agreement"]["ETAP mtp, together"]["median"] == pytest.approx(shift)
    assert found["outcome"].startswith(f"log-probabilities {said}; ") and bool(failures) == (said == "differ")
    accepted = "FLASHMLA_SPARSE mtp: 2 of 90 drafts accepted; ETAP mtp: 2 of 90 drafts accepted"
    assert found["outcome"].endswith(accepted)


class Engine:
    """Answers two requests, as vLLM does: the second one's prompt takes steps in which the first decodes."""

    def __init__(self, steps: int):
        self.outputs = [[1], [1], *[[1, 2]] * steps, [2], [2]]

    def add_request(self, *_):
        """All that is asked is in `outputs`."""

    def has_unfinished_requests(self):
        return bool(self.outputs)

    def step(self):
        return self.outputs.pop(0)


def served(monkeypatch, engine: Engine, drafts: int = 0) -> v4_server.Served:
    """vLLM's part of a server, without vLLM."""
    for name, attribute in (("vllm", "SamplingParams"), ("vllm.inputs", "TokensPrompt")):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{attribute: dict}))
    made = object.__new__(v4_server.Served)
    made.llm, made.drafts = SimpleNamespace(llm_engine=engine), drafts
    return made


def test_a_step_is_one_in_which_all_requests_decode(monkeypatch):
    readings = iter(range(1000))  # of a clock of the program's own, which goes on by a second a reading
    monkeypatch.setattr(v4_server, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    two = [v4_server.Request([7], 4), v4_server.Request([7], 4)]
    assert served(monkeypatch, Engine(v4_server.STEPS)).step_ms(two) == 1000
    with pytest.raises(Failed, match="wanted 128 steps in which 2 requests decode, got 127"):
        served(monkeypatch, Engine(v4_server.STEPS - 1)).step_ms(two)


def test_drafts_are_counted_and_there_must_be_some(monkeypatch):
    def metrics(proposed):
        counts = {"num_drafts": 30, "num_draft_tokens": proposed, "num_accepted_tokens": 2}
        return [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in counts.items()]

    made = served(monkeypatch, Engine(0), drafts=3)
    made.llm.get_metrics = lambda: metrics(90)
    assert made.about_drafts() == {"proposed": 90, "accepted": 2}
    made.llm.get_metrics = lambda: metrics(0)
    with pytest.raises(Failed, match="no token was drafted"):
        made.about_drafts()


@pytest.mark.parametrize("processors, by", [
    (True, {"extra_args": {"forced_tokens": [5, 5]}}),
    (False, {"allowed_token_ids": [5]}),
])  # fmt: skip
def test_tokens_are_forced_as_the_version_does(monkeypatch, processors, by):
    monkeypatch.setattr(v4_server, "takes_processors", lambda: processors)
    assert v4_server.forcing(v4_server.Request([7], 2, 5)) == by
    assert v4_server.forcing(v4_server.Request([7], 2)) == {}


def test_with_drafts_all_answers_are_greedy_and_there_is_no_control(monkeypatch):
    asked = {}

    def ask(requests, at_once, salt):
        asked.setdefault(salt, []).extend(one.forced for one in requests)
        return [Answer([7], [-1.0], [0.5])] * len(requests)

    stages = {}
    for drafts in (0, 1):
        made = served(monkeypatch, Engine(0), drafts)
        made.ask = ask
        asked.clear()
        stages[drafts] = v4_server.answers(made)
        assert any(asked["together"]) == any(asked["turns"]) == (not drafts)
    assert stages[0].keys() - stages[1].keys() == {"control", "before control"}


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
