"""The parts of the comparison of answers that need no engine: what it takes as an answer, counts, and objects to."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import typer
from bench.tests.fake_server import ANSWERING, stand_in
from typer.testing import CliRunner

from bench.common import configs
from bench.checks import answers, asked
from bench.checks.agreement import answer_in
from bench.checks.asked import ASKED, Variant, configuration, is_sparse, is_v4
from bench.common.provenance import Provenance
from bench.serving import client
from bench.serving.client import FailedRequest
from bench.serving.engines import ENGINES, Answer, cache_lines
from bench.qualify import known_answers as known


def answer(tokens, logprob=-0.1, gap=3.0):
    return Answer(list(tokens), [logprob] * len(tokens), [gap] * len(tokens))


def test_replies_of_both_engines_become_the_same_answer():
    expected = Answer([7, 9], [-0.25, -0.5], [1.75, 2.0])
    openai = {
        "tokens": ["token_id:7", "token_id:9"],
        "token_logprobs": [-0.25, -0.5],
        "top_logprobs": [{"token_id:7": -0.25, "token_id:8": -2.0}, {"token_id:9": -0.5, "token_id:1": -2.5}],
    }
    assert ENGINES["vllm"].answer({"choices": [{"logprobs": openai}]}) == expected
    about = {
        "output_token_logprobs": [[-0.25, 7, None], [-0.5, 9, None]],
        "output_top_logprobs": [[[-0.25, 7, None], [-2.0, 8, None]], [[-0.5, 9, None], [-2.5, 1, None]]],
    }
    assert ENGINES["sglang"].answer({"meta_info": about}) == expected


@pytest.mark.parametrize("values, forced, reason", [([[-0.1, 1, None]], None, "wanted 3 tokens, got 1"),
    ([[-0.1, 1, None], [-0.1, 2, None], [float("nan"), 3, None]], None, "wanted finite"),
    ([[-0.1, 1, None], [-0.1, 2, None], [-9999.0, 3, None]], None, "wanted finite"),
    ([[-0.1, 1, None], [-0.1, 2, None], [-0.1, 3, None]], [1, 2, 4], "wanted the tokens")],
    ids=["short", "nan", "impossible", "not as forced"])  # fmt: skip
def test_incomplete_answers_are_refused(values, forced, reason):
    best = [[[-0.1, 1, None], [-2.0, 2, None]] for _ in values]
    reply = {"meta_info": {"output_token_logprobs": values, "output_top_logprobs": best}}
    with pytest.raises(FailedRequest, match=reason):
        answer_in(ENGINES["sglang"], reply, 3, forced)


def test_comparison_counts_equal_answers_and_shows_where_others_part():
    ours = [answer([1, 2, 3, 4]), answer([1, 2, 9, 4])]
    result = known.compared(ours, [answer([1, 2, 3, 4]), answer([1, 2, 3, 4], gap=0.5)])
    assert (result["equal"], result["prompts"], result["gaps_where_parted"]) == (1, 2, [0.5])
    assert result["tokens_before_parting"] == 6 / 8


def test_perplexity_is_of_tokens_not_of_answers():
    answers = [answer([1], logprob=-2.0), answer([1, 2, 3], logprob=-1.0)]
    assert known.perplexity(answers) == pytest.approx(math.exp(5 / 4))


def test_counters_are_summed_over_their_labels():
    text = '# HELP a_total x\na_total{engine="0"} 3.0\na_total{engine="1"} 4.0\nab_total 9.0\nb_total 2e3\n'
    names = {"a": "a_total", "b": "b_total", "c": "c_total"}
    assert client.counted(client.samples(text), names) == {"a": 7.0, "b": 2000.0, "c": None}


def records(wrong=0, logprob=-0.1, counters=None, second="ETAP"):
    """Two backends; the second answers `wrong` of 256 prompts to recite differently."""
    right = [[index % 100, 1, 2] for index in range(256)]

    def server(changed, logprob):
        def stage():
            recited = [answer([*tokens[:2], 3] if i < changed else tokens, logprob) for i, tokens in enumerate(right)]
            return {"recite": recited, "continuation": [answer([5, 6, 7], logprob)]}

        stages = {name: stage() for name in ("together", "again", "forced")}
        found = {"preempted": 3.0, "prefix tokens found": 64.0, "drafts": None, "drafts accepted": None}
        return {"counters": found | (counters or {}), "stages": stages}

    return right, {("FLASHMLA", "plain"): server(0, -0.1), (second, "plain"): server(wrong, logprob)}


def failures(right, found):
    of_kind = {"recite": right}
    servers = {" ".join(key): known.server_summary(record, of_kind) for key, record in found.items()}
    return known.judge(servers, known.pair_summaries(found, [backend for backend, _ in found]))


def test_equal_answers_pass_and_up_to_one_in_a_hundred_may_differ():
    assert failures(*records()) == []
    assert failures(*records(wrong=2)) == []


def test_more_than_one_in_a_hundred_different_fails():
    found = failures(*records(wrong=3))
    assert [line.split(":")[1] for line in found] == [" 253 of 256 answers equal, wanted 99%"] * 2


@pytest.mark.parametrize("logprob, passes", [(-0.10099, True), (-0.1011, False), (-0.0989, False)])
def test_perplexity_may_differ_by_a_thousandth(logprob, passes):
    found = failures(*records(logprob=logprob))
    assert (found == []) == passes and all("forced" in line and "perplexity" in line for line in found)


@pytest.mark.parametrize("second", ["ETAP+fp8", "etap+fp8_e4m3+math"])
@pytest.mark.parametrize("logprob, passes", [(-0.1049, True), (-0.1051, False), (-0.0949, False)])
def test_perplexity_with_an_fp8_cache_may_differ_by_half_a_hundredth(second, logprob, passes):
    found = failures(*records(logprob=logprob, second=second))
    assert (found == []) == passes and all("forced" in line and "perplexity" in line for line in found)


def test_answers_with_an_fp8_cache_must_equal_the_references():
    assert failures(*records(wrong=2, second="ETAP+fp8")) == []
    assert failures(*records(wrong=3, second="ETAP+fp8")) != []


def test_another_backends_fp8_cache_is_reported_and_not_judged():
    assert failures(*records(wrong=9, logprob=-0.2, second="FLASHMLA+fp8")) == []
    right, found = records()
    found["FLASHMLA+fp8", "plain"] = records(wrong=9, logprob=-0.2)[1]["ETAP", "plain"]
    assert failures(right, found) == []


def test_variants_have_their_names_flags_and_proof():
    names = known.KnownAnswers.backends(ASKED["vllm"], ["FLASHMLA", "ETAP", "TRITON_MLA"], "fp8", named=False)
    assert names == ["FLASHMLA", "ETAP+fp8", "ETAP+fp8+math", "FLASHMLA+fp8"]
    plain, etap, math, other = map(Variant.parse, names)
    assert plain == Variant("FLASHMLA") and etap == Variant("ETAP", "fp8") and math == Variant("ETAP", "fp8", True)
    vllm, sglang = (ASKED[name].engine for name in ("vllm", "sglang"))
    assert plain.asked_of(vllm) == plain.asked_of(sglang) == ("FLASHMLA", ["--kv-cache-dtype", "auto"])
    fp8 = ["--kv-cache-dtype", "fp8"]
    assert etap.asked_of(vllm) == ("ETAP", fp8) and plain.proof() == other.proof() == ""
    assert math.asked_of(vllm) == ("ETAP", [*fp8, "--additional-config", '{"etap_fp8_math": true}'])
    assert math.asked_of(sglang) == ("etap_fp8_math", fp8)
    assert etap.proof() in "x ETAP decodes: KV cache FP8 (e4m3), math float16" and etap.proof() != math.proof()
    assert plain.proof(sparse=True) in "ETAP decodes: sparse attention, KV cache bfloat16" and not other.proof(
        sparse=True
    )
    assert etap.proof(sparse=True) in "ETAP decodes: sparse attention, KV cache fp8_ds_mla"


def test_layouts_are_etaps_and_their_ranks_share_a_cache_of_as_many_tokens():
    names = asked.on_gpus(["FLASHMLA", "ETAP", "ETAP+fp8+math"], ["tp2", "dcp4"])
    assert names[3:] == ["ETAP@tp2", "ETAP+fp8+math@tp2", "ETAP@dcp4", "ETAP+fp8+math@dcp4"]
    assert Variant.parse(names[3]) == Variant("ETAP", tp=2)
    assert Variant.parse(names[-1]) == Variant("ETAP", "fp8", True, tp=4, dcp=4)
    for engine, sizes in (("vllm", ("100", "50")), ("sglang", ("6400", "3200"))):
        for variant, size in zip((Variant("etap", tp=2), Variant("etap", tp=2, dcp=2)), sizes, strict=True):
            assert size in ASKED[engine].flags("plain", 6400, variant)


@pytest.mark.parametrize("text", ["", "tp", "tp0", "dp2", "tp2,", "TP2"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ValueError, match="--layouts: wanted some of tp2, dcp2 and the like, got"):
        Variant.parse(f"ETAP@{text}")


@pytest.mark.parametrize(
    "one, other, judged",
    [("ETAP@tp2", "FLASHMLA", True), ("ETAP@tp2", "ETAP", True), ("ETAP", "ETAP@tp2", False),
     ("ETAP@dcp2", "ETAP@tp2", False), ("ETAP@tp2", "FLASHMLA@tp2", False), ("FLASHMLA@tp2", "FLASHMLA", False),
     ("ETAP+fp8@tp2", "ETAP+fp8", True), ("ETAP+fp8@tp2", "ETAP", False), ("ETAP+fp8@tp2", "ETAP+fp8+math", False),
     ("ETAP+fp8@tp2", "FLASHMLA", True), ("ETAP+fp8@tp2", "FLASHMLA+fp8", False)],
)  # fmt: skip
def test_who_is_judged_by_whom(one, other, judged):
    assert known.judged_by(Variant.parse(one), Variant.parse(other)) == judged


@pytest.mark.parametrize("second", ["ETAP@tp2", "ETAP@dcp2"])
def test_answers_of_several_gpus_must_equal_those_of_one(second):
    assert failures(*records(wrong=2, second=second)) == []
    assert len(failures(*records(wrong=3, second=second))) == 2
    right, found = records()
    found[second, "plain"] = records(wrong=3, logprob=-0.102)[1]["ETAP", "plain"]
    texts = failures(right, found)
    assert len(texts) == 8, "with the reference and with ETAP on one GPU: two stages, two kinds' perplexities"
    assert sum("perplexity" in text for text in texts) == 4 and all(second in text for text in texts)


@pytest.fixture
def served_model(tmp_path, monkeypatch):
    """A model's folder, and in vLLM's place a small HTTP server that gets vLLM's command line, on a machine of two."""

    def entry(number):
        prompt = [1000 + number, *range(2000, 2040)]
        return {"prompt": prompt, "answer": [(sum(prompt) + step) % 1000 for step in range(4)]}

    prompts = {kind: [entry(100 * k + number) for number in range(20)] for k, kind in enumerate(("recite", "recall"))}
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    for name in ("training.json", "config.json"):
        (tmp_path / name).write_text("{}")
    stand_in(monkeypatch, tmp_path, ANSWERING)
    monkeypatch.setattr(answers.gpus, "gpus", lambda: [None, None])
    monkeypatch.setattr(answers, "provenance", lambda *_, **__: Provenance.model_construct())
    return tmp_path


@pytest.mark.parametrize(
    "name, v4", [("deepseek-v4-flash", True), ("deepseek-v4.1-flash", True), ("glm-5.3-flash", False)]
)
def test_a_configuration_of_text_and_images_says_how_its_text_attends(tmp_path, name, v4):
    shutil.copy(configs.find("models", name, ".json"), tmp_path / "config.json")
    config = configuration(tmp_path)
    assert is_sparse(config) and is_v4(config) == v4


@pytest.mark.parametrize("fault", ["", "tp2", "dcp2"])
def test_one_run_compares_one_gpu_and_both_layouts(served_model, monkeypatch, fault):
    monkeypatch.setenv("FAULT", fault)
    output = served_model / "answers.json"
    arguments = [str(served_model), "--layouts", "tp2,dcp2", "--modes", "plain,mtp", "--output", str(output)]
    app = typer.Typer()
    app.command()(known.main)
    result = CliRunner().invoke(app, [*arguments, "--backends", "FLASHMLA,ETAP"])
    document = json.loads(output.read_text())
    servers = ["FLASHMLA", "ETAP", "ETAP@tp2", "ETAP@dcp2"]
    drafting = [f"{name} mtp" for name in servers[:3]]
    assert document["outcome"].startswith("equal answers: FLASHMLA plain and ETAP plain ")
    assert list(document["servers"]) == [*(f"{name} plain" for name in servers), *drafting]
    said = {name: Path(server["log"]).read_text() for name, server in document["servers"].items()}
    for name, layout in (("ETAP plain", "tp1"), ("ETAP@tp2 mtp", "tp2"), ("ETAP@dcp2 plain", "dcp2")):
        assert f"{layout} {'None' if layout == 'tp1' else '0'}" in said[name]
    assert all(f"ETAP@{fault}" in text and "answers equal" in text for text in document["failures"])
    assert bool(document["failures"]) == bool(fault) == bool(result.exit_code), result.output


def test_layouts_want_as_many_gpus(served_model, monkeypatch):
    monkeypatch.setattr(answers.gpus, "gpus", lambda: [None])
    app = typer.Typer()
    app.command()(known.main)
    arguments = [str(served_model), "--layouts", "tp2", "--output", str(served_model / "out/answers.json")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "--layouts: wanted 2 GPUs, this machine shows 1" in result.output
    assert not (served_model / "out").exists()


LOGS = """
(Worker pid=7) INFO 11-21 07:52:04 [impl.py:107] ETAP decodes: KV cache FP8 (e4m3), math float16
(EngineCore pid=5) INFO 11-21 07:53:04 [kv_cache_utils.py:2177] GPU KV cache size: 184,960 tokens
(EngineCore pid=5) INFO 11-21 07:53:04 [kv_cache_utils.py:1147] GPU KV cache size: 92,480 tokens, Maximum concurrency 2x
[2026-11-21 07:52:04 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 198336, KV size: 6.49 GB
[2026-11-21 07:52:05 TP0] Attention backend etap: KV cache FP8 (e4m3), math FP8 (e4m3)
[2026-11-21 07:52:05 TP1] Attention backend etap: KV cache FP8 (e4m3), math FP8 (e4m3)
"""


def test_logs_say_what_the_cache_is_and_holds():
    assert cache_lines(LOGS) == [
        "ETAP decodes: KV cache FP8 (e4m3), math float16",
        "GPU KV cache size: 184,960 tokens",
        "GPU KV cache size: 92,480 tokens",
        "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 198336, KV size: 6.49 GB",
        "Attention backend etap: KV cache FP8 (e4m3), math FP8 (e4m3)",
    ]


def test_a_run_that_proves_nothing_fails():
    assert any("preempted: wanted some" in line for line in failures(*records(counters={"preempted": 0.0})))
    assert any("prefix" in line for line in failures(*records(counters={"prefix tokens found": None})))
    right, found = records(counters={"preempted": None, "drafts": 5.0, "drafts accepted": 2.0})
    drafting = {(backend, "mtp"): record for (backend, _), record in found.items()}
    assert any("mtp: preempted: wanted some" in line for line in failures(right, drafting))
    right, found = records()
    assert any("train longer" in line for line in failures([[0, 0, 0]] * 256, copy.deepcopy(found)))


SIZES = {("vllm", True): "100", ("vllm", False): "100", ("sglang", True): "6400", ("sglang", False): "51200"}


@pytest.mark.parametrize("engine, mode", [(name, mode) for name, of in ASKED.items() for mode in of.modes])
def test_commands_name_backend_and_small_cache(engine, mode):
    of, variant = ASKED[engine], Variant(ASKED[engine].backends[1])
    serving, flags = of.serving("model", mode, variant, 256), of.flags(mode, 6400, variant)
    command = of.engine.server("python", serving, variant.backend, 8000, flags)
    assert variant.backend in command and SIZES[engine, mode == "plain"] in command and "256" in command
    assert any("speculative" in part for part in command) == (mode != "plain")
    assert ("--logits-processors" in command) == (of.forces and mode == "plain")
    assert any("ngram" in part for part in command) == (mode == "ngram")
