"""`serve` with real processes: a small server and load generator in the engine's place, scenarios, host speed."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
import typer
from typer.testing import CliRunner

from bench.common import configs, results
from bench.servers import scenario as scenarios
from bench.servers import serve, table
from bench.servers.engines import ENGINES, Vllm
from bench.servers.scenario import Point, cases_of, read_scenario
from bench.tests.fake_engine import ABOUT, children, stand_in

SCENARIO = """
like = "decode-short"
model = "deepseek-v4-flash"
rank_of = 0
changes = {vocab_size = 2000}
points = [
  {input = 1024, output = 8, concurrency = [2, 1], prefill = "cached"},
  {input = 1024, output = 8, concurrency = [1]},
  {input = 65536, output = 8, concurrency = [2], prefill = "cached"},
]
[vllm]
backends = ["ETAP", "FLASHMLA"]
"""
# Sends its prompts to the server, and writes what vLLM's load generator writes.
LOADS = """
import json, os, pathlib, sys, time, urllib.request
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
if "load" in os.environ["FAULT"] and flag("--num-prompts") == "2": raise RuntimeError("out of luck")
while "slow" in os.environ["FAULT"]: time.sleep(1)
prompts = int(flag("--num-prompts"))
for n in range(prompts):
    body = {"prompt": [int(flag("--seed")), n, *range(int(flag("--random-input-len")) - 2)], "max_tokens": 1}
    request = urllib.request.Request(f"http://127.0.0.1:{flag('--port')}/v1/completions", json.dumps(body).encode())
    urllib.request.urlopen(request).read()
numbers = dict.fromkeys(["median_ttft_ms", "median_tpot_ms", "median_itl_ms"], 10.0)
numbers |= {"output_throughput": 800.0, "completed": prompts}
pathlib.Path(flag("--result-dir"), flag("--result-filename")).write_text(json.dumps(numbers))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; gives its exit code, screen and results file."""
    (tmp_path / "loads.py").write_text(LOADS)
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Vllm, "load_module", "loads")
    monkeypatch.setattr(serve.driver, "gpus", lambda: [None])
    monkeypatch.setattr(serve, "HOST_STEPS", 1000)
    monkeypatch.setattr(table, "HOST_TOLERANCE", 10)
    monkeypatch.setattr(serve, "provenance", lambda *_: ABOUT)
    app, output = app_of(serve.main), tmp_path / "out.json"

    def call(*words: str, faults: str = ""):
        stand_in(monkeypatch, tmp_path, faults)
        result = CliRunner().invoke(app, [str(tmp_path / "scenario.toml"), "--output", str(output), *words])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert not children(tmp_path)
        return result.exit_code, result.output, json.loads(output.read_text()) if output.exists() else None

    return call


def test_backends_take_turns_and_share_no_prompt(run, tmp_path):
    code, screen, document = run()
    rows = document["rows"]
    assert (code, document["failures"], len(rows)) == (0, [], 2 * 2 * 3), screen
    assert list(dict.fromkeys((row["backend"], row["turn"]) for row in rows)) == [
        ("ETAP", 1), ("FLASHMLA", 1), ("ETAP", 2), ("FLASHMLA", 2),
    ]  # fmt: skip
    assert {row["point"]: round(row["cached_share"], 2) for row in rows} == {
        "2 x 1K/8, cached": 0.94, "1 x 1K/8, cached": 0.94, "1 x 1K/8, served": 0.0,
    }  # fmt: skip
    assert all(row["host_ms"] > 0 for row in rows) and "needs a cache of 131,200 tokens" in document["skipped"][0]
    assert len(list((tmp_path / "out").glob("*-[12].log"))) == 4
    assert " 2 x 1K/8, cached | ETAP " in screen and "ITL ms" in screen


def test_servers_that_run_together_are_read_point_by_point(run, tmp_path):
    code, screen, document = run("--together", faults="FLASHMLA at start")
    assert code == 1 and "FLASHMLA: the server ended" in document["failures"][0] and len(document["rows"]) == 2 * 3
    (tmp_path / "out.json").unlink()
    code, screen, document = run("--together")
    assert (code, document["failures"]) == (0, []), screen
    assert [(row["turn"], row["point"][:8], row["backend"]) for row in document["rows"]][:4] == [
        (1, "2 x 1K/8", "ETAP"), (1, "2 x 1K/8", "FLASHMLA"), (1, "1 x 1K/8", "ETAP"), (1, "1 x 1K/8", "FLASHMLA"),
    ]  # fmt: skip
    assert len(document["rows"]) == 2 * 2 * 3 and len(list((tmp_path / "out").glob("*-1.log"))) == 2


def app_of(function) -> typer.Typer:
    app = typer.Typer()
    app.command()(function)
    return app


@pytest.mark.parametrize(
    "faults, words, rows",
    [
        ("ETAP at start", "out of luck", 3),
        ("load", "RuntimeError: out of luck", 4),
        ("cache", "0% of the prompts' tokens were in the prefix cache", 2),
        ("dies", "ended with 3 while it was in use", 0),
    ],
)
def test_what_fails_is_told_and_the_rest_is_measured(run, faults, words, rows):
    code, screen, document = run("--turns", "1", faults=faults)
    assert code == (1 if rows else 2) and any(words in text for text in document["failures"]), screen
    assert len(document["rows"]) == rows


def test_a_signal_ends_a_run_which_the_same_command_completes(run, tmp_path):
    threading.Timer(4, os.kill, (os.getpid(), signal.SIGTERM)).start()
    code, _, document = run("--turns", "1", faults="slow")
    assert code == 2 and document["stopped"] == "by SIGTERM" and document["rows"] == []
    document["rows"] = [reading("ETAP", 10.0) | {"point": f"{n} x 1K/8, {how}"} for n, how in LEFT]
    results.write(document, tmp_path / "out.json")
    code, _, document = run("--turns", "1")
    assert code == 0 and document["complete"] and not document["stopped"], document["failures"]
    assert [row["backend"] for row in document["rows"]] == ["ETAP"] * 3 + ["FLASHMLA"] * 3
    assert document["rows"][1]["host_ms"] == 10.0 and document["rows"][2]["turn"] == 1


LEFT = ((2, "cached"), (1, "cached"))


def reading(backend: str, host: float, tpot: float = 10.0) -> dict:
    row = {"backend": backend, "turn": 1, "point": "1 x 1K/8, cached", "tpot_ms": tpot, "itl_ms": tpot, "ttft_ms": 1.0}
    return row | {"tokens_per_second": 100.0, "host_ms": host}


def test_readings_at_another_host_speed_are_void():
    rows = [reading("ETAP", 10.0), reading("ETAP", 14.0, 99.0), reading("FLASHMLA", 10.9, 11.0)]
    assert table.at_equal_host_speed(rows) == [rows[0], rows[2]]
    rows += [reading("FLASH_ATTN_MLA", 20.0)]
    lines = [line[2:] for line in table.cells({"kind": "serve", "rows": rows, "gpus": 1})[1:]]
    assert lines[0] == ["10.00 (10.00 to 10.00)", "1.000", "100.0", "10.0 to 14.0", "1, 1 void"]
    assert lines[1] == ["11.00 (11.00 to 11.00)", "1.100", "100.0", "10.9 to 10.9", "1"]
    assert lines[2] == ["void", "-", "-", "20.0 to 20.0", "0, 1 void"]


def test_what_etap_does_besides_is_compared_with_etap():
    rows = [reading("ETAP+fp8", 10.0), reading("ETAP+fp8+engine_top_k", 10.0, 12.0), reading("ETAP", 10.0, 20.0)]
    lines = table.cells({"kind": "serve", "rows": rows, "gpus": 1})
    assert [line[3] for line in lines[1:]] == ["1.000", "1.200", "1.000"]


@pytest.mark.parametrize("name", list(configs.read_toml_table(scenarios.SCENARIOS)))
def test_shipped_scenarios_name_backends_models_and_plugins(name, tmp_path):
    scenario = read_scenario(name)
    _, config, _ = serve.prepared(scenario, tmp_path)
    assert config["num_hidden_layers"] == scenario.layers and scenario.environment["NCCL_NVLS_ENABLE"] == "0"
    assert scenario.vllm.backends[0].startswith("ETAP") and len(scenario.vllm.backends) > 1
    with serve.plugins(scenario.plugins) as environment:
        assert ("PYTHONPATH" in environment) == bool(scenario.plugins)
    assert scenario.serving("m", cases_of(scenario.points, [])).max_requests > 0


@pytest.mark.parametrize("share, right", [(0.3, False), (0.74, True)])
def test_the_prefix_cache_must_have_the_common_prefix(share, right):
    (case,) = cases_of([Point(input=1024, prefix=1000, output=2, concurrency=[1], waves=4)], [])
    assert case.text == "1 x 1000+24/2, served" and case.cached_as_wanted(share) == right
    (case,) = cases_of([Point(input=1024, prefix=1000, output=2, concurrency=[4], prefill="cached")], [])
    assert case.tokens == (15 + 4 * 2) * 64  # whole pages of the prefix once


REFUSED = [
    ("nothing", [], "scenario: wanted a TOML file or one of decode-short"),
    ("decode-short", ["--only", "3K"], "--only: wanted a part of one of 16 x 16K/256, cached; "),
    ("changes = {n_layers = 3}", [], "changes: wanted keys of deepseek-r1"),
    ("rank_of = 7", [], "rank_of: wanted a divisor"),
    ("gpus = 3\nrank_of = 0", [], "gpus: wanted a divisor of 128 heads, got 3"),
    ("model = 'kimi-k3'", [], "model: wanted a text model"),
    ("decode-short", ["--backend", "ETAP@x"], "--backend: wanted BACKEND"),
    ("decode-short", [], "gpus: wanted 1, this machine shows 0"),
]


@pytest.mark.parametrize("scenario, words, reason", REFUSED)
def test_nothing_starts_or_is_written_when_arguments_are_wrong(scenario, words, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(serve.driver, "gpus", list)
    if "=" in scenario:
        (tmp_path / "s.toml").write_text(f"like = 'decode-short'\n{scenario}\n")
        scenario = str(tmp_path / "s.toml")
    result = CliRunner().invoke(app_of(serve.main), [scenario, *words, "--output", str(tmp_path / "o" / "o.json")])
    assert result.exit_code == 2 and reason in result.output and not (tmp_path / "o").exists(), result.output


@pytest.mark.parametrize("engine", ENGINES)
def test_show_prints_commands_and_writes_nothing(engine, tmp_path):
    words = ["mtp", "--engine", engine, "--show", "--only", " 4K", "--output", str(tmp_path / "o.json")]
    result = CliRunner().invoke(app_of(serve.main), words)
    lines = [line for line in result.output.splitlines() if line.startswith("python -m ")]
    assert result.exit_code == 0 and len(lines) == 3 + 4 and not list(tmp_path.iterdir()), result.output
