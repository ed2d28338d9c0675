"""`etap e2e` without an engine: scenarios, models, what is measured and measured again, and what is refused.

Runs are tested with real processes: a small HTTP server stands where an engine's server would, and a small program
where its load generator would. tests/vllm and tests/sglang hold the flags, prompts and names against the engines.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from bench.tests.fake_server import SERVER, alive, children_in
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_shared import FakeDriver
from typer.testing import CliRunner

import etap_backend
from bench.common import configs
from bench.e2e import command, model, report
from bench.e2e import results_file as rows
from bench.e2e import turns as running
from bench.e2e.results_file import Document, Measured, Reading, Skipped
from bench.e2e.scenario import Case, EngineScenario, Point, Scenario, Turn, cases_of, read_scenario, turns_of
from bench.e2e.turns import Run
from bench.serving.engines import ENGINES, Engine, Serving
from bench.common.stopping import Stopped

SCENARIOS = configs.shipped("e2e")
SERVING = Serving("/m", dummy=True, tp=8, max_context=4224, batches=(1, 16))
POINTS = [
    Point(input=1024, output=8, concurrency=[1, 4], repeats=2),
    Point(input=65536, output=8, concurrency=[2], prefill="cached"),
]


class Pretended(Engine):
    """Commands of SERVER and of a program that writes a result as a load generator does."""

    name, package, ours, load_module = "vllm", "rich", "ETAP", "loads"
    kv_tokens = r"cache of (\d+)"
    cached = ("hits", "asked")

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "server.py").write_text(SERVER)
        (folder / "loads.py").write_text(
            "import json, os, sys, time\n"
            "with open(os.environ['ETAP_TEST_LOADS'], 'a') as file: print(*sys.argv[1:4], file=file)\n"
            "time.sleep(float(os.environ.get('ETAP_TEST_SECONDS', '0')))\n"
            "if sys.argv[1] == os.environ.get('ETAP_TEST_FAILS'): raise RuntimeError('out of luck')\n"
            "prompts, port, path = int(sys.argv[1]), sys.argv[3], sys.argv[4]\n"
            "keys = ('mean_ttft_ms', 'median_ttft_ms', 'mean_tpot_ms', 'median_tpot_ms', 'duration')\n"
            "numbers = dict.fromkeys(keys, 10.0) | {'completed': prompts, 'output_throughput': 800.0}\n"
            "numbers |= {'total_input_tokens': 1, 'total_output_tokens': 1}\n"
            "open(path, 'w').write(json.dumps(numbers))\n"
        )

    def server(self, python, serving, backend, port, flags):
        fate = ["at start"] if backend == "BROKEN" else []
        return [sys.executable, str(self.folder / "server.py"), str(port), "600" if backend == "SLOW" else "0", *fate]

    def load(self, serving, load, port, result):
        return [str(load.prompts), str(load.seed), str(port), str(result)]

    def in_use(self, backend, log):
        return True

    def cache_tokens(self, log):
        return 100_000


def a_document(**changes) -> Document:
    about = {"date": "2026-01-01", "command": "etap e2e", "title": "t", "engine": "vllm", "model": "m", "weights": "w"}
    about |= {"dummy": True, "model_shape": None, "gpus": 2, "layout": {"tp": 2, "pp": 1, "dp": 1}, "draft_tokens": 0}
    return Document(**{**about, "acceptance": None, "method": report.METHOD, **changes})


def a_run(folder: Path, engine: Engine, document: Document, turns: list[Turn], deadline=None, points=None) -> Run:
    specific = EngineScenario(backends=["ETAP", "FLASHMLA"])
    points = points or POINTS
    scenario = Scenario(title="t", model="m", gpus=2, points=points, vllm=specific, ready_seconds=600)
    console = Console(file=(folder / "screen.txt").open("a"), width=200)
    about = (engine, scenario, specific, SERVING, cases_of(points), turns, sys.executable, [])
    return Run(*about, folder / "out.json", document, deadline, console)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Makes a Run over real processes; `loads()` lists what its load generator was asked."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ETAP_TEST_LOADS", str(tmp_path / "loads.txt"))
    engine, whole = Pretended(tmp_path), a_document()

    def make(backends=("ETAP", "FLASHMLA"), deadline=None, document=whole, times=1, together=False):
        made = a_run(tmp_path, engine, document, turns_of(list(backends), times), deadline)
        made.together = together
        return made

    make.loads = lambda: (tmp_path / "loads.txt").read_text().splitlines()
    make.output = tmp_path / "out.json"
    return make


def done(row) -> bool:
    return isinstance(row, Skipped) or (isinstance(row, Measured) and row.complete)


def test_a_run_measures_every_backend_and_case_and_ends_its_servers(run, tmp_path):
    made = run()
    made.all()
    document = rows.read(run.output)
    assert [(row.backend, row.concurrency, row.input) for row in document.rows] == [
        (backend, *shape) for backend in ("ETAP", "FLASHMLA") for shape in ((1, 1024), (4, 1024), (2, 65536))
    ]
    first, last = document.rows[0], document.rows[2]
    assert first.complete and len(first.readings) == 2 and first.tpot_ms == rows.spread([10.0])
    assert "400.0 tokens/s a GPU" in report.line(first, 2)
    assert "needs a cache of 131,200 tokens, the server has 100,000" in last.reason
    seeds = [line.split()[1] for line in run.loads()[:6]]
    assert len(set(seeds)) == 6, "prompts that are to be new must not be sent twice"
    for backend in ("etap", "flashmla"):
        assert not any(map(alive, children_in(made.logs / f"vllm-{backend}.log")))
    assert document.servers["ETAP"].seconds_to_ready >= 0 and document.servers["ETAP"].cache_tokens == 100_000


def test_servers_in_turns_share_the_readings_of_a_point(run):
    """A B A B: each server has one of the two readings of a point, and a log of its own."""
    made = run(times=2)
    made.all()
    found = rows.read(run.output).rows
    assert [(row.backend, row.concurrency, len(row.readings)) for row in found[:2]] == [("ETAP", 1, 2), ("ETAP", 4, 2)]
    assert len(found) == 6 and all(map(done, found))
    ports = list(dict.fromkeys(line.split()[2] for line in run.loads()))
    assert len(ports) == 4 and {path.name for path in made.logs.glob("vllm-*")} == {
        "vllm-etap.log", "vllm-etap-2.log", "vllm-flashmla.log", "vllm-flashmla-2.log",
    }  # fmt: skip
    asked = [line.split()[2] for line in run.loads()]
    assert [asked.count(port) for port in ports] == [4] * 4, "a warm-up and a reading of two points on each"


def test_servers_together_are_read_one_after_the_other_and_all_end(run):
    """A B A B within seconds, whatever becomes of a third; each with the cache that its name says."""
    caches = {}

    def server(python, serving, backend, port, flags, command=Pretended.server):
        caches[str(port)] = backend, serving.fp8_cache
        return command(made.engine, python, serving, backend, port, flags)

    made = run(backends=("ETAP", "BROKEN", "FLASHMLA+fp8"), together=True)
    made.engine.server = server
    made.all()
    document = rows.read(run.output)
    assert len(document.rows) == 6 and all(map(done, document.rows))
    assert "CUDA error: out of luck" in document.servers["BROKEN"].error
    a, b = ("ETAP", False), ("FLASHMLA", True)
    asked = [caches[line.split()[2]] for line in run.loads()]
    assert asked == 2 * [a, a, b, b, a, b], (
        "of each point a warm-up and a reading on each server, then the other reading"
    )
    for backend in ("etap", "flashmla+fp8"):
        assert not any(map(alive, children_in(made.logs / f"vllm-{backend}.log")))


def test_the_time_limit_ends_servers_that_are_together(run, clock):
    made = run(deadline=500, together=True)
    with pytest.raises(Stopped, match="by the time limit"):
        made.all()
    found = rows.read(run.output).rows
    assert [(row.backend, len(row.readings)) for row in found] == [("ETAP", 2), ("FLASHMLA", 1)]
    for backend in ("etap", "flashmla"):
        assert not any(map(alive, children_in(made.logs / f"vllm-{backend}.log")))


def test_a_prefix_leaves_tokens_of_a_prompts_own():
    with pytest.raises(ValueError, match="prefix: wanted fewer tokens than the input's 64, got 64"):
        Point(input=64, prefix=64, output=2, concurrency=[1])


def test_a_backend_named_twice_has_two_turns_and_every_server_takes_as_many_readings():
    turns = turns_of(["A", "B", "C", "A", "B"], 1)
    assert [(turn.backend, turn.number, turn.of) for turn in turns] == [
        ("A", 1, 2), ("B", 1, 2), ("C", 1, 2), ("A", 2, 2), ("B", 2, 2),
    ]  # fmt: skip
    case = Case(1024, 8, 1, "cached", 1, 3)
    assert [turn.readings(case) for turn in turns] == [2, 2, 2, 3, 3]


def test_the_host_is_timed_before_and_after_each_reading(run, monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(running, "host_ms", lambda: float(next(times)))
    made = run(backends=("ETAP",))
    made.all()
    first = made.document.rows[0]
    assert first.warm_up.host_ms == (0.0, 1.0)
    assert [reading.host_ms for reading in first.readings] == [(2.0, 3.0), (4.0, 5.0)]


def test_the_hosts_time_is_that_of_its_fastest_loop(monkeypatch):
    readings = iter([0.0, 0.005, 1.0, 1.003, 2.0, 2.004, 3.0, 3.008, 4.0, 4.009])
    monkeypatch.setattr(running, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    assert running.host_ms() == 3.0


def test_a_backend_that_does_not_start_does_not_stop_the_others(run):
    made = run(backends=("BROKEN", "ETAP"))
    made.all()
    assert "CUDA error: out of luck" in made.document.servers["BROKEN"].error
    assert {row.backend for row in made.document.rows} == {"ETAP"}
    assert report.problems(made.document) == ["BROKEN: the server ended with 1:"]


def test_a_run_without_a_reading_leaves_an_older_file_as_it_is(run, monkeypatch):
    run.output.write_text("older")
    run(backends=("BROKEN",)).all()
    monkeypatch.setenv("ETAP_TEST_FAILS", "1")
    made = run(backends=("ETAP",), document=a_document())
    made.cases = made.cases[:1]
    made.all()
    assert made.document.rows[0].state == "failed" and run.output.read_text() == "older"
    run.output.unlink()
    again = run(backends=("ETAP",), document=a_document())
    again.cases = made.cases
    again.all()
    assert rows.read(run.output).rows[0].state == "failed", "a file of this run is kept up to date"


def test_a_load_that_fails_is_a_row_that_failed_and_is_tried_again(run, monkeypatch):
    monkeypatch.setenv("ETAP_TEST_FAILS", "4")
    made = run(backends=("ETAP",))
    made.all()
    states = [row.state for row in rows.read(run.output).rows]
    assert states == ["measured", "failed", "skipped"]
    assert "RuntimeError: out of luck" in made.document.rows[1].error
    assert [case.concurrency for case in made.missing(Turn("ETAP"))] == [4]
    monkeypatch.delenv("ETAP_TEST_FAILS")
    again = run(backends=("ETAP",), document=made.document)
    again.all()
    assert sorted((row.concurrency, row.state) for row in again.document.rows) == [
        (1, "measured"), (2, "skipped"), (4, "measured"),
    ]  # fmt: skip
    assert not report.problems(again.document)


@pytest.mark.parametrize("share, right", [(0.3, False), (0.74, True)])
def test_the_prefix_cache_must_have_what_a_readings_prompts_have_in_common(run, monkeypatch, share, right):
    """Of four prompts of 1,024 tokens three find 1,000 of them: 73%; nine tenths of that do."""
    monkeypatch.setattr(running, "cached_share", lambda *_: share)
    made = run(backends=("ETAP",))
    made.cases = cases_of([Point(input=1024, prefix=1000, output=2, concurrency=[1], waves=4)])
    made.all()
    row = made.document.rows[0]
    assert row.load_text == "1 x 1000+24/2, served" and isinstance(row, Measured) == right
    assert right or "30% of the prompts' tokens were in the prefix cache" in row.error
    assert not right or list(report.columns_of(made.document))[2:4] == ["TTFT ms", "TTFT / ETAP's"]


@pytest.fixture
def clock(run, tmp_path, monkeypatch):
    """A clock by which each run of the load generator takes 100 s and nothing else takes any, on any machine."""

    def now() -> float:
        return 100.0 * len(run.loads()) if (tmp_path / "loads.txt").exists() else 0.0

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=now, perf_counter=time.perf_counter))


def test_the_time_limit_ends_a_run_and_resuming_measures_only_the_rest(run, clock):
    with pytest.raises(Stopped, match="by the time limit"):
        run(deadline=800).all()
    written = rows.read(run.output)
    measured = [row for row in written.rows if isinstance(row, Measured) and row.complete]
    assert [(row.backend, row.concurrency) for row in measured] == [("ETAP", 1), ("ETAP", 4)]
    assert [len(row.readings) for row in written.rows if row.backend == "FLASHMLA"] == [1], "what there was is kept"
    asked = len(run.loads())
    run(document=written).all()
    found = rows.read(run.output).rows
    assert not report.problems(written), "the time limit is nobody's fault"
    assert len(found) == 6 and all(map(done, found))
    assert len(run.loads()) - asked == 2 * 3, "a warm-up and two readings of each case that was left"
    assert [row for row in found if row in measured] == measured


def test_prompts_that_an_earlier_point_left_in_the_cache_are_not_sent_to_fill_it(run, monkeypatch):
    cases = [Case(1024, 8, 4, "cached", 1, 3), Case(512, 8, 1, "cached", 1, 3)]
    made = run(backends=("ETAP",))
    made.cases = cases
    made.all()
    loads = [line.split() for line in run.loads()]
    asked = [prompts for prompts, *_ in loads]
    assert asked == ["4", "4", "4", "1", "1", "4", "1"], "one warm-up, two readings, the rest"
    assert {seed for _, seed, _ in loads} == {"0"} and all(map(done, made.document.rows))
    # What has been evicted meanwhile is no reading.
    shares = iter([0.0, 1.0, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(running, "cached_share", lambda *_: next(shares))
    made = run(backends=("ETAP",), document=a_document())
    made.cases = cases
    made.all()
    last = made.document.rows[1]
    assert last.discarded.cached_share == 0.3 and len(last.readings) == 3 and last.complete


@pytest.mark.parametrize(
    "backends", [("ETAP",), ("ETAP", "SLOW")], ids=["in a reading", "while servers start together"]
)
def test_ctrl_c_ends_a_run_and_leaves_its_file_and_nothing_running(run, tmp_path, monkeypatch, backends):
    """The run in a process of its own, as a user has it."""
    program = tmp_path / "main.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(etap_backend.__file__).parents[1])!r}]\n"
        "import test_e2e\n"
        "from bench.e2e.command import finish\n"
        "from bench.common.stopping import Stopped, stopping\n"
        f"folder, document = Path({str(tmp_path)!r}), test_e2e.a_document()\n"
        "points = [test_e2e.Point(input=1024, output=8, concurrency=[1, 2])]\n"
        f"turns = test_e2e.turns_of({list(backends)}, 1)\n"
        "made = test_e2e.a_run(folder, test_e2e.Pretended(folder), document, turns, points=points)\n"
        "made.together = len(turns) > 1\n"
        "with stopping(None):\n"
        "    try:\n        made.all()\n"
        "    except Stopped as reason:\n        document.stopped = str(reason)\n"
        "try:\n    finish(document, folder / 'out.json', made.console, True)\n"
        "except test_e2e.typer.Exit as end:\n    sys.exit(end.exit_code)\n"
    )
    monkeypatch.setenv("ETAP_TEST_SECONDS", "3600")
    logs = [tmp_path / "out" / f"vllm-{backend.lower()}.log" for backend in backends]
    process = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.PIPE, text=True)

    def busy() -> bool:
        """The load generator at work, or the slow server on its way."""
        return (
            logs[-1].exists() and bool(children_in(logs[-1])) and (len(logs) > 1 or (tmp_path / "loads.txt").exists())
        )

    try:
        while not busy() and process.poll() is None:
            time.sleep(0.1)
        assert busy()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 2 and "stopped by SIGINT, before the first reading" in said and "Traceback" not in said
    assert not any(alive(child) for log in logs for child in children_in(log))
    assert rows.read(run.output).servers["ETAP"].command


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_shipped_scenarios_can_be_read(name, engine):
    scenario = read_scenario(name)
    cases = cases_of(scenario.points)
    assert len({tuple(case.describe().values()) for case in cases}) == len(cases) > 0
    specific = getattr(scenario, engine)
    assert specific.backends[0] == ENGINES[engine].ours and len(specific.backends) >= 2
    assert scenario.tensor_parallel == 8


def test_the_scenarios_have_what_was_published_and_what_is_asked():
    """R1's shapes (LMSYS: 4096 in, 1536 out; InferenceX: 1K/1K), 16K and 64K contexts, batch 1 to 128, MTP."""
    served, decode = (read_scenario(name) for name in ("serving", "decode"))
    assert {(point.input, point.output) for point in served.points} >= {(4096, 1536), (1024, 1024)}
    assert {point.input for point in decode.points} >= {16384, 65536}
    assert {case.concurrency for case in cases_of(decode.points)} >= {1, 16, 64, 128}
    assert read_scenario("mtp").draft_tokens == 1


def test_the_whole_depth_is_the_same_server_in_all_three_forms():
    """What differs is what is compared: the cache's type, draft tokens, points. Nothing multicasts."""
    full, fp8, mtp = (read_scenario(f"decode-full{end}") for end in ("", "-fp8", "-mtp"))
    assert fp8.kv_dtype == "fp8" and (mtp.draft_tokens, mtp.acceptance) == (1, 1.9)
    assert mtp.vllm == full.vllm and fp8.vllm.environment == full.vllm.environment
    assert fp8.vllm.flags[:-1] == full.vllm.flags[:-1] and fp8.vllm.flags[-2] == "--kv-transfer-config"
    plain = read_scenario("decode-plain").vllm.environment
    assert full.environment["NCCL_NVLS_ENABLE"] == "0" and plain.items() <= full.vllm.environment.items()
    assert full.vllm.environment[rows.EVEN_ROUTING] and rows.EVEN_ROUTING not in plain
    assert (cases_of(full.points)[0].concurrency, cases_of(full.points)[0].input) == (16, 16384)


def test_a_scenario_like_another_has_its_points_and_its_own_environment():
    like, base = read_scenario("decode-plain"), read_scenario("decode")
    assert like.points == base.points and like.vllm.backends == base.vllm.backends
    no_multicast = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert base.environment == {} and like.environment == no_multicast
    plain = (name for name in SCENARIOS if name.endswith("-plain") or name.startswith("decode-full"))
    assert all(read_scenario(name).environment == no_multicast for name in plain)
    assert like.sglang.flags[:4] == base.sglang.flags and "SGLANG_ENABLE_JIT_DEEPGEMM" in like.sglang.environment
    assert "--disable-custom-all-reduce" in like.sglang.flags and like.sglang.backends == base.sglang.backends


@pytest.mark.parametrize(
    "text, words",
    [
        ('title = "t"', r"model: Field required.*points: Field required"),
        (
            'title = "t"\nmodel = "m"\ngpus = 1\npoint = 3\n[[points]]\ninput = 1\noutput = 8\nconcurrency = [1]',
            "point: ",
        ),
        (
            'title = "t"\nmodel = "m"\ngpus = 1\n[[points]]\ninput = 1\noutput = 1\nconcurrency = [1]',
            r"points\.0\.output",
        ),
        ('like = "nothing"', "scenario: wanted a file or one of decode"),
        ("not toml", "scenario.toml: "),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused(tmp_path, text, words):
    (tmp_path / "scenario.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_scenario(str(tmp_path / "scenario.toml"))


@pytest.mark.parametrize("engine, name", [("vllm", "fp8"), ("sglang", "fp8_e4m3")])
def test_an_fp8_cache_is_asked_for_in_the_engines_words(engine, name, tmp_path):
    scenario = read_scenario("decode-fp8")
    assert scenario.points == read_scenario("decode").points
    prepared = model.Prepared("/m", None, True, "dummy weights")
    serving = model.serving_of(scenario, prepared, cases_of(scenario.points))
    words = ENGINES[engine].server("py", serving, ENGINES[engine].ours, 1, ["--last"])
    assert words[words.index("--kv-cache-dtype") + 1] == name and words[-1] == "--last"
    plain = model.serving_of(read_scenario("decode"), prepared, cases_of(scenario.points))
    assert "--kv-cache-dtype" not in ENGINES[engine].server("py", plain, ENGINES[engine].ours, 1, [])


def test_the_share_of_cached_prompts_is_that_between_two_readings():
    def metrics(hits, asked):
        return {"vllm:prefix_cache_hits_total": hits, "vllm:prefix_cache_queries_total": asked}

    share = running.cached_share(ENGINES["vllm"], metrics(100, 1000), metrics(1060, 2000))
    assert share == pytest.approx(0.96)
    assert running.cached_share(ENGINES["vllm"], {}, metrics(1, 2)) is None


@given(st.integers(1, 131072))
def test_what_counts_as_cached_leaves_room_for_the_last_page_only(tokens):
    least = running.least_cached(Case(tokens, 8, 1, "cached", 1, 1))
    assert 0 <= least <= max(0, tokens - 64) / tokens


def test_a_dummy_model_says_what_it_is(tmp_path):
    pytest.importorskip("tokenizers", reason="the dummy model's tokenizer is made with it")
    prepared = model.prepare_model(
        "DeepSeek-R1", {"num_hidden_layers": 8, "n_routed_experts": 64}, 8, 2, tmp_path / "m"
    )
    assert prepared.dummy and not (tmp_path / "m").exists()
    prepared.write()
    assert prepared.dummy and json.loads((tmp_path / "m/config.json").read_text())["num_attention_heads"] == 32
    assert prepared.what.startswith("dummy weights, FP8 in blocks, 8 of 61 layers, each GPU with the heads and widths")
    assert "n_routed_experts 64 (of 256)" in prepared.what
    plain = model.prepare_model("deepseek-r1", {"quantization_config": None}, None, 8, tmp_path / "p")
    assert plain.what == "dummy weights, bfloat16, 61 of 61 layers" and "quantization_config" not in plain.config
    with pytest.raises(ValueError, match="--set: wanted keys of deepseek-r1's config.json, got layers"):
        model.prepare_model("deepseek-r1", {"layers": 8}, None, 8, tmp_path / "m")
    with pytest.raises(ValueError, match="wanted a model of configs/models, got /data/r1"):
        model.prepare_model("/data/r1", {"num_hidden_layers": 8}, None, 8, tmp_path / "m")
    assert not model.prepare_model("/data/r1", {}, None, 8, tmp_path / "m").dummy


def test_resuming_another_run_is_refused(tmp_path):
    path, before = tmp_path / "before.json", a_document(rows=[Skipped(**CASE, reason="r")])
    path.write_text(before.model_dump_json())
    assert command.resumed(path, a_document()).rows == before.rows
    for changes, words in (
        ({"weights": "its own weights", "gpus": 4}, "differs in weights, gpus"),
        ({"kv_dtype": "fp8"}, "differs in kv_dtype"),
        ({"environment": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}}, "differs in environment"),
    ):
        with pytest.raises(ValueError, match=rf"--resume: .*before\.json: {words}"):
            command.resumed(path, a_document(**changes))
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"--resume: .*before\.json: file: Input should be a valid dictionary"):
        command.resumed(path, a_document())


CASE = {"backend": "ETAP", "input": 1024, "output": 8, "concurrency": 1, "prefill": "served"}


def test_a_row_of_a_resumed_run_has_that_runs_commit(run, tmp_path):
    path, cases = tmp_path / "before.json", run().cases
    reading = Reading(median_tpot_ms=9.0, median_ttft_ms=1.0, output_throughput=1.0)
    before = [
        Measured(backend="ETAP", **case.describe(), readings=[reading] * readings)
        for case, readings in zip(cases, (2, 1), strict=False)
    ]
    path.write_text(a_document(commit="old", rows=before).model_dump_json())
    made = run(backends=["ETAP"], document=command.resumed(path, a_document(commit="new")))
    assert made.missing(Turn("ETAP")) == cases[1:], "two readings are wanted, whatever was wanted before"
    made.all()
    runs = made.document.all_runs
    found = {row.concurrency: runs[row.run].commit for row in made.document.rows[:2]}
    assert found == {1: "old", 4: "new"} and made.document.commit == "new"


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(command.e2e)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


REFUSED = [
    (["nothing"], "etap e2e: scenario: wanted a file or one of decode"),
    (["decode", "--context", "3K"], "no point of the scenario has these"),
    (["decode", "--context", "0"], "wanted a number of tokens such as 4096"),
    (["decode", "--concurrency", "0"], "--concurrency"),
    (["decode", "--gpus", "0"], "--gpus"),
    (["decode", "--time-limit", "0"], "--time-limit"),
    (["decode", "--profile", "16x3K"], "--profile: wanted a point of this run"),
    (["decode", "--set", "layers"], "--set: wanted KEY=VALUE"),
    (["decode", "--set", "n_layers=3"], "--set: wanted keys of deepseek-r1's config.json"),
    (["decode", "--set", 'num_attention_heads="x"', "--rank-of", "8"], "rank_of: wanted a whole number as"),
    (["decode", "--env", "HOME"], "--env: wanted NAME=VALUE, got 'HOME'"),
    (["decode", "--rank-of", "7"], "rank_of: wanted a divisor"),
    (["decode", "--gpus", "3"], "--gpus: wanted tensor parallel ranks that divide the model's 128 heads, got 3"),
    (["decode", "--gpus", "3", "--show"], "--gpus: wanted tensor parallel ranks that divide"),
    (["decode", "--backend", "ETAP+fp4"], "--backend: wanted NAME or NAME+fp8, got ETAP+fp4"),
    (["decode", "--together", "--turns", "2"], "--together: wanted one server of each backend, got --turns"),
    (["decode", "--dcp", "3"], "decode_context_parallel: wanted a divisor of tensor parallel 8, got 3"),
    (["decode", "--model", "kimi-k3"], "--model: wanted a model of text alone for dummy weights, got kimi-k3"),
]


def nothing_in(folder: Path) -> bool:
    return not list(folder.iterdir())


@pytest.mark.parametrize(
    "arguments, words", REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_the_command_refuses_before_it_starts_or_writes_anything(arguments, words, tmp_path):
    result = invoke(*arguments, "--output", str(tmp_path / "o" / "o.json"))
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.output, result.output
    assert nothing_in(tmp_path)


def test_without_a_gpu_it_says_so_first_and_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "engine_versions", lambda *_: pytest.fail("the engine was asked first"))
    monkeypatch.setattr(command.driver, "gpus", list)
    result = invoke("decode", "--output", str(tmp_path / "o.json"))
    assert result.exit_code == 2 and result.stderr.startswith("etap e2e: no GPU: the driver sees none")
    assert nothing_in(tmp_path)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeDriver(monkeypatch)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--gpus: wanted 8 GPUs, this machine shows 2"),
        (["--gpus", "2", "--python", "/nonexistent"], "--python: wanted the engine's interpreter, got /nonexistent: "),
        (["--gpus", "2", "--python", "/bin/false"], "--python: wanted the engine's interpreter, got /bin/false"),
        (["--gpus", "2", "--model", "/data/r1"], "--engine: wanted vllm installed for"),
    ],
)
def test_a_machine_that_cannot_serve_it_is_told_before_anything_is_written(arguments, words, tmp_path, two_gpus):
    result = invoke("decode", *arguments, "--output", str(tmp_path / "o.json"))
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.output, result.output
    assert nothing_in(tmp_path)


def test_a_file_that_exists_is_replaced_only_by_its_name(tmp_path, monkeypatch, two_gpus):
    """Runs of other GPUs, layers or points have the same name."""
    monkeypatch.chdir(tmp_path)
    (older := Path("results") / "e2e-decode-vllm.json").parent.mkdir()
    older.write_text("[]")
    result = invoke("decode", "--gpus", "2")
    assert result.exit_code == 2 and older.read_text() == "[]"
    assert "--output: wanted a file's name, got none, and results/e2e-decode-vllm.json exists" in result.stderr
    assert "or --resume to go on with it" in result.stderr
    for more in (["--resume"], ["--output", str(older)], ["--engine", "sglang"]):
        later = invoke("decode", "--gpus", "2", "--python", "/nonexistent", *more)
        assert "--python: wanted the engine's interpreter" in later.stderr


def test_an_output_that_cannot_be_written_or_resumed_is_refused(tmp_path, monkeypatch, two_gpus):
    monkeypatch.setattr(command, "engine_versions", lambda *_: ("3.12", {"vllm": "0.26.0"}))
    (tmp_path / "file").touch()
    result = invoke("decode", "--gpus", "2", "--output", str(tmp_path / "file" / "o.json"))
    assert result.exit_code == 2 and "--output: wanted a file that can be written" in result.stderr
    (path := tmp_path / "o.json").write_text("[]")
    result = invoke("decode", "--gpus", "2", "--output", str(path), "--resume")
    assert result.exit_code == 2 and "o.json: file: Input should be a valid dictionary" in result.stderr
    assert path.read_text() == "[]" and sorted(path.name for path in tmp_path.iterdir()) == ["file", "o.json"]


def test_variables_of_the_command_line_reach_the_server_and_the_file(tmp_path, monkeypatch, two_gpus):
    """What changes a step must not be lost: experts drawn evenly, say."""
    pytest.importorskip("tokenizers", reason="the dummy model's tokenizer is made with it")
    monkeypatch.setattr(command, "engine_versions", lambda *_: ("3.12", {"vllm": "0.26.0"}))
    seen = []
    monkeypatch.setattr(Run, "all", lambda made: seen.append(made.environment()))
    arguments = ["--gpus", "2", "--env", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random", "--env", "A=b=c"]
    assert invoke("decode", *arguments, "--output", str(tmp_path / "o.json")).exit_code == 0
    even = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random", "A": "b=c"}
    assert even.items() <= seen[0].items() and even.items() <= rows.read(tmp_path / "o.json").environment.items()
    assert (tmp_path / "o" / "model" / "config.json").is_file() and (tmp_path / "o.json").is_file()


@pytest.mark.parametrize("engine", ENGINES)
def test_show_needs_neither_gpu_nor_engine_and_writes_nothing(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "engine_versions", lambda *_: pytest.fail("the engine was asked"))
    result = invoke("decode", "--engine", engine, "--show", "--output", str(tmp_path / "o.json"), "--python", "py")
    assert result.exit_code == 0 and nothing_in(tmp_path), result.output
    commands = [shlex.split(line) for line in result.stdout.splitlines() if line.startswith("py ")]
    scenario = read_scenario("decode")
    servers = len(getattr(scenario, engine).backends)
    assert len(commands) == servers + len(cases_of(scenario.points))
    assert all(words[:2] == ["py", "-m"] for words in commands)
    module = ENGINES[engine].load_module
    assert all(words[2] == module for words in commands[servers:])
    assert "model" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("engine, flag", [("vllm", "--decode-context-parallel-size"), ("sglang", "--dcp-size")])
def test_two_gpus_as_ranks_of_eight_with_and_without_context_parallelism(engine, flag, tmp_path):
    arguments = ("decode-short", "--engine", engine, "--gpus", "2", "--rank-of", "8", "--show", "--python", "py")
    for more, shares in (((), None), (("--dcp", "2"), "2")):
        result = invoke(*arguments, *more, "--output", str(tmp_path / "o.json"))
        assert result.exit_code == 0, result.output
        lines = [shlex.split(line) for line in result.stdout.splitlines() if line.startswith("py ")]
        servers = [words for words in lines if "--attention-backend" in words]
        assert len(servers) == len(getattr(read_scenario("decode-short"), engine).backends)
        for words in servers:
            assert words[words.index("--tensor-parallel-size" if engine == "vllm" else "--tp-size") + 1] == "2"
            assert (words[words.index(flag) + 1] if flag in words else None) == shares


def test_heads_of_weights_of_their_own_are_divided_too(tmp_path):
    """As far as their configuration can be read, and of a multimodal model its text's; as ranks of eight any do."""
    for config, fits in (({"num_attention_heads": 96}, True), ({"text_config": {"num_attention_heads": 64}}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        result = invoke("decode", "--gpus", "3", "--model", str(tmp_path), "--show")
        assert (result.exit_code == 0) == fits == ("64 heads, got 3" not in result.stderr)
    for more in (["--rank-of", "8"], ["--model", "/data/r1"]):
        assert invoke("decode", "--gpus", "3", *more, "--show").exit_code == 0


def test_a_document_tells_context_parallelism_where_there_is_some():
    assert "tp 2, pp 1, dp 1, driver" in report.provenance(a_document())
    with_shares = a_document(layout={"tp": 2, "pp": 1, "dp": 1, "dcp": 2})
    assert "tp 2, pp 1, dp 1, dcp 2, driver" in report.provenance(with_shares)
    with pytest.raises(ValueError, match="layout"):
        rows.must_be_comparable(a_document(), with_shares)
