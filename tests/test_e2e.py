"""`etap e2e` without an engine: scenarios, commands, what is kept and what is measured again, and processes that end.

The life of processes is tested with real ones: a small HTTP server stands where an engine's server would, and a small
program where its load generator would. Nothing of an engine is imitated beyond that; tests/vllm and tests/sglang hold
the flags, prompts and names against the engines themselves.
"""

from __future__ import annotations

import gzip
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from etap_backend import configs, dummy_model, e2e, e2e_profile, e2e_report, lifecycle, rerun
from etap_backend.bench import Stopped
from etap_backend.cli import app
from etap_backend.engines import ENGINES, Engine, Serving, read_result

SCENARIOS = configs.shipped("e2e")
SERVING = Serving("/m", True, tp=8, pp=1, dp=1, max_context=4224, batches=(1, 16))

# Writes a process of its own session, so that ending the group is not enough, and answers /health after a while.
SERVER = """
import http.server, os, subprocess, sys, time
port, delay, dies = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(delay)
if dies == "at start":
    sys.exit("CUDA error: out of luck")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("engine core died", flush=True)
            os._exit(3)
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children_in(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child ")]


@pytest.fixture
def served(tmp_path):
    """A context manager that serves SERVER, its log, and its URL."""
    program, log, port = tmp_path / "server.py", tmp_path / "server.log", lifecycle.free_port()
    program.write_text(SERVER)
    url = f"http://127.0.0.1:{port}"

    def start(*arguments: str, seconds: float = 20):
        return lifecycle.server([sys.executable, str(program), str(port), *arguments], url, log, {}, seconds)

    return start, log, url


def test_a_server_is_there_in_the_block_and_gone_after_it(served):
    start, log, url = served
    with start("0.3") as process:
        pid, (child,) = process.pid, children_in(log)
        assert e2e.metrics_of(url) == "" and alive(child)
    assert not alive(pid) and not alive(child)


def test_a_server_that_dies_at_start_is_reported_with_its_last_lines(served):
    start, log, _ = served
    with (
        pytest.raises(lifecycle.Failed, match=r"(?s)the server ended with 1:.*CUDA error: out of luck"),
        start("0.1", "at start"),
    ):
        pass
    assert not any(map(alive, children_in(log)))


def test_errors_far_above_the_end_of_a_log_are_shown(tmp_path):
    log = tmp_path / "server.log"
    worker = "(Worker pid=7) ValueError: Selected backend ETAP is not valid"
    log.write_text("\n".join([worker, worker, *(f"line {number}" for number in range(100))]))
    shown = lifecycle.tail(log, 3).splitlines()
    assert shown == ["error above: ValueError: Selected backend ETAP is not valid", "line 97", "line 98", "line 99"]


def test_a_server_that_dies_in_use_is_reported(served):
    start, log, url = served
    with pytest.raises(lifecycle.Failed, match=r"(?s)ended with 3 while it was in use.*engine core died"), start("0"):
        with pytest.raises(OSError):
            e2e.urllib.request.urlopen(f"{url}/die", timeout=5)
        time.sleep(0.3)
    assert not any(map(alive, children_in(log)))


def test_a_server_that_does_not_come_up_in_time_is_ended(served):
    start, log, _ = served
    with pytest.raises(lifecycle.Failed, match="not ready after 1 s"), start("60", seconds=1):
        pass
    assert not any(map(alive, children_in(log)))


def test_a_program_that_raises_in_the_block_leaves_nothing_running(served):
    start, log, _ = served
    with pytest.raises(Stopped), start("0"):
        raise Stopped("by SIGINT")
    assert not any(map(alive, children_in(log)))


@pytest.fixture
def generator(tmp_path, monkeypatch):
    """A Generator whose module does what its arguments say."""
    (tmp_path / "loads.py").write_text(
        "import os, sys, time\n"
        "assert __name__ == '__main__'\n"
        "if sys.argv[1] == 'write': open(sys.argv[2], 'w').write(str(os.getpid()))\n"
        "if sys.argv[1] == 'fail': raise RuntimeError('no such prompt')\n"
        "if sys.argv[1] == 'exit': sys.exit(2)\n"
        "if sys.argv[1] == 'die': os._exit(9)\n"
        "if sys.argv[1] == 'sleep': time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with lifecycle.Generator(sys.executable, "loads", tmp_path / "load.log", {}) as made:
        yield made


def test_a_load_generator_is_loaded_once_and_again_after_it_failed(generator, tmp_path):
    def pid_of_a_run() -> int:
        generator.run(["write", str(tmp_path / "pid")], 30)
        return int((tmp_path / "pid").read_text())

    first = pid_of_a_run()
    assert pid_of_a_run() == first
    for arguments, words in ((["fail"], "RuntimeError: no such prompt"), (["exit"], "exit code 2")):
        with pytest.raises(lifecycle.Failed, match=words):
            generator.run(arguments, 30)
    assert pid_of_a_run() == first, "a module that raised has not harmed the process"
    with pytest.raises(lifecycle.Failed, match="the load generator ended"):
        generator.run(["die"], 30)
    second = pid_of_a_run()
    assert second != first
    with pytest.raises(lifecycle.Failed, match="took more than 0 s"):
        generator.run(["sleep"], 0.2)
    assert not alive(second) and pid_of_a_run() not in (first, second)


def test_a_module_is_the_main_program_with_these_arguments(capsys):
    assert rerun.run("this", []) is None
    assert rerun.run("no_such_module", []).startswith("ImportError")


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
            "prompts, port, path = int(sys.argv[1]), sys.argv[3], sys.argv[4]\n"
            "keys = ('mean_ttft_ms', 'median_ttft_ms', 'mean_tpot_ms', 'median_tpot_ms', 'duration')\n"
            "numbers = dict.fromkeys(keys, 10.0) | {'completed': prompts, 'output_throughput': 800.0}\n"
            "numbers |= {'total_input_tokens': 1, 'total_output_tokens': 1}\n"
            "open(path, 'w').write(json.dumps(numbers))\n"
        )

    def server(self, python, serving, backend, port, flags):
        fate = ["at start"] if backend == "BROKEN" else []
        return [sys.executable, str(self.folder / "server.py"), str(port), "0", *fate]

    def load(self, serving, load, port, result):
        return [str(load.prompts), str(load.seed), str(port), str(result)]

    def in_use(self, backend, log):
        return True

    def cache_tokens(self, log):
        return 100_000


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Makes an e2e.Run over real processes; `loads()` lists what its load generator was asked."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ETAP_TEST_LOADS", str(tmp_path / "loads.txt"))
    monkeypatch.setattr(e2e, "HOST_LOOP_STEPS", 1000)  # the tests of time limits count in seconds
    engine = Pretended(tmp_path)
    points = [
        e2e.Point(input=1024, output=8, concurrency=[1, 4], repeats=2),
        e2e.Point(input=65536, output=8, concurrency=[2], prefill="cached"),
    ]
    specific = e2e.EngineScenario(backends=["ETAP", "FLASHMLA"])
    scenario = e2e.Scenario(title="t", model="m", gpus=2, points=points, vllm=specific, ready_seconds=20)
    document = {"engine": "vllm", "rows": [], "servers": {}}

    def make(backends=("ETAP", "FLASHMLA"), deadline=None, document=document, times=1):
        console = Console(file=(tmp_path / "screen.txt").open("a"), width=200)
        turns = e2e.turns_of(list(backends), times)
        arguments = (engine, scenario, specific, SERVING, e2e.cases_of(points), turns, sys.executable, [])
        return e2e.Run(*arguments, tmp_path / "out.json", document, deadline, console)

    make.loads = lambda: (tmp_path / "loads.txt").read_text().splitlines()
    make.output = tmp_path / "out.json"
    return make


def test_a_run_measures_every_backend_and_case_and_ends_its_servers(run, tmp_path):
    made = run()
    made.all()
    document = json.loads(run.output.read_text())
    assert [(row["backend"], row["concurrency"], row["input"]) for row in document["rows"]] == [
        (backend, *shape) for backend in ("ETAP", "FLASHMLA") for shape in ((1, 1024), (4, 1024), (2, 65536))
    ]
    first, last = document["rows"][0], document["rows"][2]
    assert first["complete"] and len(first["readings"]) == 2
    assert first["tpot_ms"] == {"median": 10.0, "min": 10.0, "max": 10.0}
    assert first["tokens_per_second_per_gpu"]["median"] == 400.0
    assert "needs a cache of 131,200 tokens, the server has 100,000" in last["skipped"]
    seeds = [line.split()[1] for line in run.loads()[:6]]
    assert len(set(seeds)) == 6, "prompts that are to be new must not be sent twice"
    for backend in ("etap", "flashmla"):
        assert not any(map(alive, children_in(made.logs / f"vllm-{backend}.log")))
    assert document["servers"]["ETAP"]["seconds_to_ready"] >= 0


def test_servers_in_turns_share_the_readings_of_a_point(run):
    """A B A B: each server has one of the two readings of a point, and a log of its own."""
    made = run(times=2)
    made.all()
    document = json.loads(run.output.read_text())
    assert [(row["backend"], row["concurrency"], len(row["readings"])) for row in document["rows"][:2]] == [
        ("ETAP", 1, 2),
        ("ETAP", 4, 2),
    ]
    assert len(document["rows"]) == 6 and all(row.get("complete") or "skipped" in row for row in document["rows"])
    ports = list(dict.fromkeys(line.split()[2] for line in run.loads()))
    assert len(ports) == 4 and {path.name for path in made.logs.glob("vllm-*")} == {
        "vllm-etap.log", "vllm-etap-2.log", "vllm-flashmla.log", "vllm-flashmla-2.log",
    }  # fmt: skip
    asked = [line.split()[2] for line in run.loads()]
    assert [asked.count(port) for port in ports] == [4] * 4, "a warm-up and a reading of two points on each"


def test_a_backend_named_twice_has_two_turns_and_every_server_takes_as_many_readings():
    turns = e2e.turns_of(["A", "B", "C", "A", "B"], 1)
    assert [(turn.backend, turn.number, turn.of) for turn in turns] == [
        ("A", 1, 2), ("B", 1, 2), ("C", 1, 2), ("A", 2, 2), ("B", 2, 2),
    ]  # fmt: skip
    case = e2e.Case(1024, 8, 1, "cached", 1, 3)
    assert [turn.readings(case) for turn in turns] == [2, 2, 2, 3, 3]


def test_a_server_that_is_thrown_away_comes_first_and_is_not_reported(run):
    made = run(backends=("ETAP",))
    made.throw_away = replace(SERVING, model="/small")
    made.all()
    document = json.loads(run.output.read_text())
    ports = [line.split()[2] for line in run.loads()]
    assert ports[0] == ports[1] != ports[2], "a warm-up and a reading of the first point, then another server"
    assert len(ports) == 2 + 6 and [len(row["readings"]) for row in document["rows"]] == [2, 2, 0]
    assert str(ports[0]) not in run.output.read_text()
    thrown_away = made.logs / "thrown-away" / "vllm-etap.log"
    assert children_in(thrown_away) and not any(map(alive, children_in(thrown_away)))


def test_the_host_is_timed_before_and_after_each_reading(run, monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(e2e, "host_ms", lambda: float(next(times)))
    made = run(backends=("ETAP",))
    made.all()
    first = made.document["rows"][0]
    assert first["warm_up"]["host_ms"] == [0.0, 1.0]
    assert [reading["host_ms"] for reading in first["readings"]] == [[2.0, 3.0], [4.0, 5.0]]


def test_the_hosts_loop_takes_longer_the_more_it_does(monkeypatch):
    fast = e2e.host_ms()
    monkeypatch.setattr(e2e, "HOST_LOOP_STEPS", 20 * e2e.HOST_LOOP_STEPS)
    monkeypatch.setattr(e2e, "HOST_LOOPS", 1)
    assert 0 < fast < e2e.host_ms() / 4


def test_a_backend_that_does_not_start_does_not_stop_the_others(run):
    made = run(backends=("BROKEN", "ETAP"))
    made.all()
    assert "CUDA error: out of luck" in made.document["servers"]["BROKEN"]["error"]
    assert {row["backend"] for row in made.document["rows"]} == {"ETAP"}
    assert e2e_report.problems(made.document) == ["BROKEN: the server ended with 1:"]


def test_the_time_limit_ends_a_run_and_resuming_measures_only_the_rest(run, monkeypatch):
    monkeypatch.setenv("ETAP_TEST_SECONDS", "2")
    with pytest.raises(Stopped, match="time limit"):
        run(deadline=time.monotonic() + 20).all()
    written = json.loads(run.output.read_text())
    measured = [row for row in written["rows"] if row.get("complete")]
    assert {row["backend"] for row in measured} == {"ETAP", "FLASHMLA"}, "each has its share of the time"
    assert len(measured) < 4
    monkeypatch.setenv("ETAP_TEST_SECONDS", "0")
    asked = len(run.loads())
    run(document=written).all()
    done = json.loads(run.output.read_text())["rows"]
    assert not e2e_report.problems(written), "the time limit is nobody's fault"
    assert len(done) == 6 and all(row.get("complete") or "skipped" in row for row in done)
    assert len(run.loads()) - asked == 3 * (4 - len(measured)), "a warm-up and two readings of each case that was left"
    assert [row for row in done if row in measured] == measured


def test_memory_of_others_gpus_is_not_waited_for(tmp_path, monkeypatch):
    """With an nvidia-smi that says 1 MiB for GPU 2 and ever more for all."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/calls\n"
        f'case "$*" in *"-i 2") echo 1;; *) expr 9000 "*" $(wc -l < {tmp_path}/calls);; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(e2e, "MEMORY_SECONDS", 1.5)

    def waited() -> bool:
        begin = time.monotonic()
        with e2e.memory_given_back():
            pass
        return time.monotonic() - begin > 1

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert not waited()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert waited()


def test_time_for_the_profile_is_left_even_where_points_are_not_measured(run, monkeypatch):
    """A server without a profiler, so the profile fails; that it was asked for is what counts."""
    monkeypatch.setenv("ETAP_TEST_SECONDS", "0.5")
    monkeypatch.setattr(e2e_profile, "SECONDS", 4.5)
    made = run(backends=("ETAP",), deadline=time.monotonic() + 6)
    made.profile = (1, 1024)
    made.serving = replace(SERVING, max_context=8192)
    with pytest.raises(Stopped, match="in the turn of ETAP"):
        made.all()
    first = made.document["rows"][0]
    assert first["readings"] and "501" in first["profile"]["error"]
    assert sum(len(row["readings"]) for row in made.document["rows"]) < 4
    assert not any(map(alive, children_in(made.logs / "vllm-etap.log")))


def test_prompts_that_an_earlier_point_left_in_the_cache_are_not_sent_to_fill_it(run, monkeypatch):
    def cases(prefill):
        return [e2e.Case(1024, 8, 4, prefill, 1, 3), e2e.Case(512, 8, 1, prefill, 1, 3)]

    made = run(backends=("ETAP",))
    made.cases = cases("cached")
    made.all()
    loads = [line.split() for line in run.loads()]
    assert [prompts for prompts, *_ in loads] == ["4", "4", "4", "1", "1", "4", "1"], (
        "one warm-up, two readings, the rest"
    )
    assert {seed for _, seed, _ in loads} == {"0"} and all(row["complete"] for row in made.document["rows"])
    # What has been evicted meanwhile is no reading.
    shares = iter([0.0, 1.0, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(e2e, "cached_share", lambda *_: next(shares))
    made = run(backends=("ETAP",), document={"engine": "vllm", "rows": [], "servers": {}})
    made.cases = cases("cached")
    made.all()
    last = made.document["rows"][1]
    assert last["discarded"]["cached_share"] == 0.3 and len(last["readings"]) == 3 and last["complete"]


def a_kernel(name: str, microseconds: float, begin: float, stream: int = 7, gpu: int = 0) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": microseconds, "pid": gpu, "tid": stream}


def a_mark(name: str, begin: float, number: int, stream: int = 7, gpu: int = 0) -> dict:
    """Of a step on the GPU's side, as torch's profiler writes one for each stream that the step has kernels on."""
    args = {"External id": number}
    place = {"ts": begin, "dur": 100.0, "pid": gpu, "tid": stream}
    return {"ph": "X", "cat": "gpu_user_annotation", "name": name, "args": args} | place


@pytest.mark.parametrize(
    "name",
    [
        "void etap::decode_kernel<etap::Traits<cutlass::bfloat16_t, 16> >(etap::DecodeParams, ...)",
        "etap::(anonymous namespace)::schedule_kernel(etap::ScheduleParams)",
        "void flash::flash_fwd_splitkv_mla_kernel<...>",
        "void smxx::flash_fwd_mla_combine_kernel<...>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<...>",
    ],
)
def test_attentions_share_is_that_of_its_kernels(name, tmp_path):
    """A trace as torch's profiler writes one, made here."""
    events = [
        *(a_kernel(name, 30.0, 0.0), a_kernel(name, 30.0, 30.0), a_kernel("fused_moe_kernel", 120.0, 100.0)),
        a_kernel("concat_and_cache_mla_kernel", 10.0, 240.0),
        a_kernel("void concat_mla_absorb_q_kernel<...>", 10.0, 250.0),
        {"ph": "X", "cat": "cpu_op", "name": "aten::etap::mla_decode", "ts": 0.0, "dur": 900.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    folder = tmp_path / "traces" / "1"
    folder.mkdir(parents=True)
    (folder / "broken.json.gz").write_bytes(b"\x1f\x8b half")
    with gzip.open(folder / "rank0.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = e2e_profile.read(tmp_path / "traces", 1)
    assert found["attention_share"] == pytest.approx(60 / 200)
    assert found["kernels"][1] == {"name": name, "ms": 0.06, "calls": 2, "attention": True}
    assert "30.0%" in e2e_profile.line(found)


def test_time_that_kernels_spend_beside_each_other_is_counted_once():
    """The merging kernel starts early and waits (programmatic dependent launch), the shared expert has a stream of its
    own, and another GPU's kernels are beside nothing of this one."""
    events = [
        a_kernel("etap::combine_kernel", 62.0, 12.0),
        a_kernel("etap::decode_kernel", 60.0, 10.0),
        a_kernel("gemm", 20.0, 70.0),
        a_kernel("shared_expert", 8.0, 75.0, stream=330),
        a_kernel("etap::decode_kernel", 10.0, 10.0, gpu=1),
        a_kernel("copy", 100.0, 0.0) | {"cat": "gpu_memcpy"},
    ]
    found = e2e_profile.share_of(events)
    assert (found["attention_ms"], found["kernels_ms"], found["steps"]) == (0.074, 0.09, None)
    assert found["attention_share"] == pytest.approx(74 / 90)
    times = {kernel["name"]: kernel["ms"] for kernel in found["kernels"]}
    assert times == {"etap::decode_kernel": 0.07, "etap::combine_kernel": 0.004, "gemm": 0.016, "shared_expert": 0.0}
    # What waits for attention without being it, or is hidden by it, is not attention's.
    early = [a_kernel("gemm", 50.0, 5.0), a_kernel("etap::decode_kernel", 30.0, 0.0)]
    assert e2e_profile.share_of(early)["attention_share"] == pytest.approx(30 / 55)


@pytest.mark.parametrize(
    "prompts, mixed, decode",
    [
        ("execute_context_7(448)_generation_0(0)", "execute_context_5(320)_generation_11(11)",
         "execute_context_0(0)_generation_16(16)"),
        ("execute_452_context_7(sq448sk9sqsq1sqsk1)_generation_0(sq0sk0sqsq0sqsk0)",
         "execute_9_context_10(sq8sk9sqsq1sqsk1)_generation_1(sq1sk9sqsq1sqsk9)",
         "execute_16_context_0(sq0sk0sqsq0sqsk0)_generation_16(sq16sk9sqsq16sqsk9)"),
        ("step[EXTEND bs=7 toks=448]", "step[MIXED bs=16]", "step[DECODE bs=16]"),
    ],
)  # fmt: skip
def test_a_profile_is_of_decode_steps_only(prompts, mixed, decode):
    """Two decode steps, with a side stream and sampling behind the mark's end; the engines' own marks."""
    events = [
        a_kernel("etap::decode_kernel", 500.0, -600.0),  # of a step that began before the profiler
        *(a_mark(prompts, 0.0, 1), a_kernel("prefill", 80.0, 0.0), a_kernel("sampling", 5.0, 190.0)),
        *(a_mark(mixed, 200.0, 2), a_kernel("etap::decode_kernel", 80.0, 200.0)),
        # In the file a kernel may come before the mark that begins with it.
        *(a_kernel("etap::decode_kernel", 10.0, 400.0), a_mark(decode, 400.0, 3), a_mark(decode, 410.0, 3, 330)),
        *(a_kernel("shared_expert", 10.0, 410.0, 330), a_kernel("sampling", 5.0, 590.0)),
        *(a_mark("nccl:all_reduce", 600.0, 4), a_kernel("gemm", 5.0, 601.0)),
        *(a_mark(decode, 700.0, 5), a_kernel("etap::decode_kernel", 20.0, 700.0)),
        *(a_mark(mixed, 800.0, 6, gpu=1), a_kernel("gemm", 30.0, 810.0)),
    ]
    found = e2e_profile.share_of(events)
    assert (found["steps"], found["attention_ms"], found["kernels_ms"]) == (2, 0.03, 0.08)
    names = {kernel["name"] for kernel in found["kernels"]}
    assert names == {"etap::decode_kernel", "shared_expert", "sampling", "gemm"}
    assert "37.5% of 0.04 ms of kernels a step, 2 steps profiled" in e2e_profile.line(found)


@pytest.mark.parametrize(
    "engine, asked", [("vllm", ["/start_profile", "/stop_profile"]), ("sglang", ["/start_profile"])]
)
def test_a_server_is_asked_for_a_profile_while_the_load_runs(engine, asked, tmp_path):
    """Over real HTTP; what answers is made here and writes a trace where it was told to."""
    (stale := tmp_path / "old.json.gz").write_bytes(b"")
    paths = []

    class Profiled(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            if self.path == asked[-1]:
                folder = Path(json.loads(body)["output_dir"]) / "1" if body else tmp_path
                folder.mkdir(exist_ok=True)
                with gzip.open(folder / "trace.json.gz", "wt") as file:
                    kernels = [a_kernel("etap::decode_kernel", 1.0, 0.0), a_kernel("other", 3.0, 5.0)]
                    json.dump({"traceEvents": kernels}, file)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Profiled) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with e2e_profile.started_later(engine, f"http://127.0.0.1:{server.server_port}", tmp_path, 0.1):
            assert not paths and not stale.exists()
            time.sleep(0.6)
            assert paths == ["/start_profile"]
        assert e2e_profile.read(tmp_path, 5)["attention_share"] == 0.25 and paths == asked
        server.shutdown()
    with (
        pytest.raises(OSError),
        e2e_profile.started_later(engine, f"http://127.0.0.1:{lifecycle.free_port()}", tmp_path, 0),
    ):
        pass


def test_a_trace_without_attention_or_none_at_all_is_said(tmp_path):
    found = e2e_profile.share_of([a_kernel("fused_moe_kernel", 5.0, 0.0)])
    assert found["attention_share"] is None and "no attention kernel" in e2e_profile.line(found)
    prompts = [a_mark("execute_context_1(5)_generation_0(0)", 0.0, 1), a_kernel("etap::decode_kernel", 5.0, 1.0)]
    assert "no decode step" in e2e_profile.line(e2e_profile.share_of(prompts))
    with pytest.raises(ValueError, match="no trace in"):
        e2e_profile.read(tmp_path, 0)


def test_ctrl_c_ends_a_run_and_leaves_its_file_and_nothing_running(run, tmp_path, monkeypatch):
    """The command in a process of its own, as a user has it."""
    program = tmp_path / "main.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(e2e.__file__).parent.parent)!r}]\n"
        "import test_e2e\nfrom etap_backend import e2e\nfrom etap_backend.bench import Stopped, stopping\n"
        "from rich.console import Console\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "specific = e2e.EngineScenario(backends=['ETAP'])\n"
        "points = [e2e.Point(input=1024, output=8, concurrency=[1, 2])]\n"
        "scenario = e2e.Scenario(title='t', model='m', gpus=1, points=points, vllm=specific)\n"
        "cases, document = e2e.cases_of(points), {'engine': 'vllm', 'rows': [], 'servers': {}}\n"
        "made = e2e.Run(test_e2e.Pretended(folder), scenario, specific, test_e2e.SERVING, cases,"
        " [e2e.Turn('ETAP')], sys.executable, [], folder / 'out.json', document, None, Console())\n"
        "with stopping(None):\n"
        "    try:\n        made.all()\n"
        "    except Stopped as reason:\n        print('stopped', reason, flush=True); sys.exit(7)\n"
    )
    monkeypatch.setenv("ETAP_TEST_SECONDS", "30")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "loads.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run.loads(), "the load generator was at work"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 7 and "stopped by SIGINT" in output
    assert not any(map(alive, children_in(tmp_path / "out" / "vllm-etap.log")))
    assert json.loads(run.output.read_text())["servers"]["ETAP"]["command"]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_shipped_scenarios_can_be_read(name, engine):
    scenario = e2e.read_scenario(name)
    cases = e2e.cases_of(scenario.points)
    assert len({tuple(case.describe().values()) for case in cases}) == len(cases) > 0
    specific = getattr(scenario, engine)
    assert specific.backends[0] == ENGINES[engine].ours and len(specific.backends) >= 2
    assert scenario.tensor_parallel == 8


def test_the_scenarios_have_what_was_published_and_what_is_asked():
    """R1's shapes (LMSYS: 4096 in, 1536 out; InferenceX: 1K/1K), 16K and 64K contexts, batch 1 to 128, MTP."""
    served, decode = (e2e.read_scenario(name) for name in ("serving", "decode"))
    assert {(point.input, point.output) for point in served.points} >= {(4096, 1536), (1024, 1024)}
    assert {point.input for point in decode.points} >= {16384, 65536}
    assert {case.concurrency for case in e2e.cases_of(decode.points)} >= {1, 16, 64, 128}
    assert e2e.read_scenario("mtp").draft_tokens == 1


def test_the_whole_depth_is_the_same_server_in_all_three_forms():
    """What differs is what is compared: the cache's type, draft tokens, points. Nothing multicasts."""
    full, fp8, mtp = (e2e.read_scenario(f"decode-full{end}") for end in ("", "-fp8", "-mtp"))
    assert fp8.kv_dtype == "fp8" and (mtp.draft_tokens, mtp.acceptance) == (1, 1.9)
    assert mtp.vllm == full.vllm and fp8.vllm.environment == full.vllm.environment
    assert fp8.vllm.flags[:-1] == full.vllm.flags[:-1] and fp8.vllm.flags[-2] == "--kv-transfer-config"
    plain = e2e.read_scenario("decode-plain").vllm.environment
    assert full.environment["NCCL_NVLS_ENABLE"] == "0" and plain.items() <= full.vllm.environment.items()
    assert (e2e.cases_of(full.points)[0].concurrency, e2e.cases_of(full.points)[0].input) == (16, 16384)


def test_variables_of_the_command_line_reach_the_server_and_the_file(run, tmp_path):
    """What changes a step must not be lost: experts drawn evenly, say."""
    even = e2e.parse_variables(["VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random", "A=b=c"])
    assert even == {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random", "A": "b=c"}
    made = run()
    made.specific = made.specific.model_copy(update={"environment": even})
    assert even.items() <= made.environment().items()
    prepared = e2e.Prepared("/m", None, True, "dummy weights")
    written = e2e.header(made.scenario, made.specific, made.engine, prepared, SERVING, sys.executable, "")
    assert written["environment"] == made.scenario.environment | even


def test_a_small_model_has_layers_of_each_kind(tmp_path):
    pytest.importorskip("tokenizers", reason="the dummy model's tokenizer is made with it")
    for changes, layers in (({}, 5), ({"num_hidden_layers": 4}, 4), ({"first_k_dense_replace": 1}, 3)):
        folder = e2e.small_model("deepseek-r1", changes, 8, 4, tmp_path)
        assert json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"] == layers


def test_a_scenario_like_another_has_its_points_and_its_own_environment():
    like, base = e2e.read_scenario("decode-plain"), e2e.read_scenario("decode")
    assert like.points == base.points and like.vllm.backends == base.vllm.backends
    assert base.environment == {} and like.environment["NCCL_NVLS_ENABLE"] == "0"
    assert like.sglang.flags == base.sglang.flags and "SGLANG_ENABLE_JIT_DEEPGEMM" in like.sglang.environment


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
        ('like = "nothing"', "e2e: wanted a file or one of decode"),
        ("not toml", "scenario.toml: "),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused(tmp_path, text, words):
    (tmp_path / "scenario.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        e2e.read_scenario(str(tmp_path / "scenario.toml"))


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_graphs_are_captured_for_the_rows_of_a_step_and_no_others():
    command = ENGINES["vllm"].server("py", replace(SERVING, draft_tokens=1, acceptance=1.9), "ETAP", 1, ["--last"])
    sizes = command[command.index("--cudagraph-capture-sizes") + 1 : command.index("--load-format")]
    assert sizes == ["2", "32"] and command[-1] == "--last"
    drafts = json.loads(option(command, "--speculative-config"))
    assert drafts["num_speculative_tokens"] == 1 and drafts["synthetic_acceptance_length"] == 1.9
    sglang = ENGINES["sglang"]
    command = sglang.server("py", replace(SERVING, draft_tokens=1, acceptance=1.9), "etap", 1, [])
    assert option(command, "--speculative-num-draft-tokens") == "2"
    assert sglang.environment(replace(SERVING, draft_tokens=1, acceptance=1.9)) == {"SGLANG_SIMULATE_ACC_LEN": "1.9"}


@pytest.mark.parametrize("engine, name", [("vllm", "fp8"), ("sglang", "fp8_e4m3")])
def test_an_fp8_cache_is_asked_for_in_the_engines_words(engine, name, tmp_path):
    scenario = e2e.read_scenario("decode-fp8")
    assert scenario.points == e2e.read_scenario("decode").points
    prepared = e2e.Prepared("/m", None, True, "dummy weights")
    serving = e2e.serving_of(scenario, prepared, e2e.cases_of(scenario.points))
    command = ENGINES[engine].server("py", serving, ENGINES[engine].ours, 1, ["--last"])
    assert option(command, "--kv-cache-dtype") == name and command[-1] == "--last"
    plain = e2e.serving_of(e2e.read_scenario("decode"), prepared, e2e.cases_of(scenario.points))
    assert "--kv-cache-dtype" not in ENGINES[engine].server("py", plain, ENGINES[engine].ours, 1, [])


def test_logs_are_understood():
    vllm, sglang = ENGINES["vllm"], ENGINES["sglang"]
    assert vllm.cache_tokens("INFO [kv_cache_utils.py] GPU KV cache size: 674,597 tokens\n") == 674597
    assert sglang.cache_tokens("max_total_num_tokens=65536, chunked_prefill_size=8192") == 65536
    assert vllm.cache_tokens("nothing") is None
    assert vllm.in_full_graphs("Capturing CUDA graphs (decode, FULL):  50%|") is True
    assert vllm.in_full_graphs("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)") is False
    assert sglang.in_full_graphs("") is None
    assert vllm.in_use("ETAP", "Using AttentionBackendEnum.ETAP backend.") and not vllm.in_use("FLASHMLA", "ETAP")
    assert sglang.in_use("etap", "server_args=ServerArgs(attention_backend='etap', ")
    assert sglang.in_use("etap", "server_args={'decode_attention_backend': None, 'attention_backend': 'etap', ")
    assert not sglang.in_use("etap", "attention_backend='fa3', decode_attention_backend='etap'")


def metrics(hits: float, asked: float) -> str:
    return (
        "# HELP vllm:prefix_cache_hits_total x\n"
        f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}\nvllm:prefix_cache_queries_total{{engine="0"}} {asked}\n'
    )


def test_the_share_of_cached_prompts_is_that_between_two_readings():
    share = e2e.cached_share(ENGINES["vllm"], metrics(100, 1000), metrics(1060, 2000))
    assert share == pytest.approx(0.96)
    assert e2e.cached_share(ENGINES["vllm"], "", metrics(1, 2)) is None


@given(st.integers(1, 131072))
def test_what_counts_as_cached_leaves_room_for_the_last_page_only(tokens):
    least = e2e.least_cached(e2e.Case(tokens, 8, 1, "cached", 1, 1))
    assert 0 <= least <= max(0, tokens - 64) / tokens


def test_results_of_both_load_generators_are_read(tmp_path):
    raw = {"completed": 4, "mean_tpot_ms": 9.0, "median_tpot_ms": 8.0, "median_ttft_ms": 7.0, "duration": 1.0}
    raw |= {"output_throughput": 5.0, "total_input_tokens": 3, "total_output_tokens": 2}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(raw | {"spec_decode_acceptance_length": 1.9}))
    assert read_result(path, 4)["acceptance_length"] == 1.9 and "median_itl_ms" not in read_result(path, 4)
    path.write_text(json.dumps(raw | {"total_output_tokens": 9, "itls": [[1.0, 1.0], [1.0], [], []]}))
    assert read_result(path, 4)["tokens_per_chunk"] == pytest.approx(9 / 7), (
        "one chunk more than intervals, of each request"
    )
    path.write_text(json.dumps(raw) + "\n" + json.dumps(raw | {"median_tpot_ms": 6.0}) + "\n")
    assert read_result(path, 4)["median_tpot_ms"] == 6.0 and "acceptance_length" not in read_result(path, 4)
    with pytest.raises(ValueError, match="wanted 5 requests answered, got 4"):
        read_result(path, 5)


def test_a_rank_has_the_widths_of_one_of_eight():
    config = json.loads(configs.find("models", "deepseek-r1", ".json").read_text())
    for tp in (1, 2, 4):
        changed = dummy_model.of_one_rank(config, 8, tp)
        assert changed["num_attention_heads"] / tp == 16 and changed["moe_intermediate_size"] / tp == 256
        assert {key for key in config if config[key] != changed[key]} == {
            "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
        }  # fmt: skip
    with pytest.raises(ValueError, match="rank_of: wanted a divisor of num_attention_heads 128 x 1, got 7"):
        dummy_model.of_one_rank(config, 7, 1)


def test_the_dummy_tokenizer_gives_back_the_ids_that_it_was_given(tmp_path):
    pytest.importorskip("tokenizers", reason="the dummy model's tokenizer is made with it")
    made = dummy_model.tokenizer(2000)
    ids = list(range(259, 2000))
    assert made.encode(made.decode(ids)).ids == ids
    text = "any text, até 中"
    assert made.decode(made.encode(text).ids) == text
    assert made.get_vocab_size() == 2000


def test_a_dummy_model_says_what_it_is(tmp_path):
    pytest.importorskip("tokenizers", reason="the dummy model's tokenizer is made with it")
    prepared = e2e.prepare_model("DeepSeek-R1", {"num_hidden_layers": 8, "n_routed_experts": 64}, 8, 2, tmp_path / "m")
    assert prepared.dummy and json.loads((tmp_path / "m/config.json").read_text())["num_attention_heads"] == 32
    assert prepared.what.startswith("dummy weights, FP8 in blocks, 8 of 61 layers, each GPU with the heads and widths")
    assert "n_routed_experts 64 (of 256)" in prepared.what
    plain = e2e.prepare_model("deepseek-r1", {"quantization_config": None}, None, 8, tmp_path / "p")
    assert plain.what == "dummy weights, bfloat16, 61 of 61 layers" and "quantization_config" not in plain.config
    with pytest.raises(ValueError, match="--set: wanted keys of deepseek-r1's config.json, got layers"):
        e2e.prepare_model("deepseek-r1", {"layers": 8}, None, 8, tmp_path / "m")
    with pytest.raises(ValueError, match="wanted a model of configs/models, got /data/r1"):
        e2e.prepare_model("/data/r1", {"num_hidden_layers": 8}, None, 8, tmp_path / "m")
    assert not e2e.prepare_model("/data/r1", {}, None, 8, tmp_path / "m").dummy


def a_row(backend: str, concurrency: int, tpot: float, **other) -> dict:
    reading = {"median_tpot_ms": tpot, "median_ttft_ms": 50.0, "output_throughput": concurrency / tpot * 1e3}
    slower = reading | {"median_tpot_ms": tpot * 1.1}
    case = e2e.Case(16384, 128, concurrency, "cached", 1, 3)
    readings = [reading, slower, reading]
    return {"backend": backend, **case.describe(), "readings": readings, **e2e_report.summary(readings, 8), **other}


@pytest.fixture
def document() -> dict:
    rows = [a_row("FLASHMLA", 1, 12.0), a_row("FLASHMLA", 16, 20.0), a_row("FA", 16, 21.0)]
    rows += [a_row("ETAP", 1, 10.0), a_row("ETAP", 16, 16.0)]
    rows.append({"backend": "ETAP", **e2e.Case(65536, 128, 16, "cached", 1, 1).describe(), "skipped": "needs a cache"})
    return {
        "file": "e2e-decode-vllm",
        "title": "DeepSeek-R1, decode",
        "engine": "vllm",
        "gpu": "NVIDIA H200",
        "gpus": 8,
        "layout": {"tp": 8, "pp": 1, "dp": 1},
        "driver": "580.1",
        "versions": {"vllm": "0.26.0"},
        "commit": "abc",
        "date": "2026-01-01",
        "command": "etap e2e decode",
        "model": "deepseek-r1",
        "model_shape": None,
        "weights": "dummy weights, FP8 in blocks, 61 of 61 layers",
        "dummy": True,
        "note": "",
        "draft_tokens": 0,
        "kv_dtype": "same",
        "acceptance": None,
        "method": e2e_report.METHOD,
        "complete": True,
        "stopped": None,
        "servers": {"ETAP": {"seconds_to_ready": 90.0, "cache_tokens": 674597, "full_cuda_graphs": False}},
        "rows": rows,
    }


def test_tables_compare_with_the_best_peer_and_say_that_weights_are_dummy(document, tmp_path):
    text = e2e_report.markdown(document)
    lines = [line for line in text.splitlines() if "16 x 16K/128, cached" in line]
    assert "| ETAP | 16.00 (16.00 to 17.60) | - |" in lines[0], "ours comes first"
    assert "| FLASHMLA | 20.00 (20.00 to 22.00) | 1.250 |" in lines[1] and lines[1].endswith("| 3 |")
    assert "| FA | 21.00 (21.00 to 23.10) | 1.312 |" in lines[2] and len(lines) == 3
    assert "cache too small" in text and "dummy weights" in text and "Dummy weights: times are" in text
    assert "FP8 KV cache" not in text and "Stopped" not in text
    cut = e2e_report.markdown({**document, "complete": False, "stopped": "by SIGINT"})
    assert cut.endswith("Stopped by SIGINT; what is missing was not measured.")
    in_fp8 = e2e_report.markdown({**document, "kv_dtype": "fp8", "draft_tokens": 1})
    assert "; FP8 KV cache; 1 draft tokens, driver" in in_fp8
    screen = tmp_path / "screen.txt"
    with screen.open("w") as file:
        e2e_report.print_document(
            {**document, "complete": False, "stopped": "by SIGINT"}, Console(width=220, file=file)
        )
    assert "1.250" in screen.read_text() and "stopped by SIGINT; --resume goes on" in screen.read_text()
    assert "dummy weights, FP8 in blocks" in screen.read_text()
    assert "KV cache of 674,597 tokens, decode not in full CUDA graphs" in screen.read_text()


def at_host(row: dict, *hosts: float) -> dict:
    """The row with these hosts' times; a reading's is the slower of the two around it."""
    readings = [reading | {"host_ms": [host - 1, host]} for reading, host in zip(row["readings"], hosts, strict=False)]
    return row | {"readings": readings}


def test_only_readings_of_equal_host_speed_are_compared(document):
    ours, theirs = a_row("ETAP", 16, 16.0), a_row("FLASHMLA", 16, 20.0)
    slow = a_row("FA", 16, 21.0)
    document["rows"] = [at_host(ours, 40, 65, 43), at_host(theirs, 41, 42, 44), at_host(slow, 60, 62, 64)]
    compared = e2e_report.at_equal_host_speed(document)
    readings, ours = [len(row["readings"]) for row in compared["rows"]], compared["rows"][0]
    assert readings == [2, 3, 3] and ours["left_out"] == 1 and "left_out" not in compared["rows"][1]
    assert ours["tpot_ms"] == {"median": 16.0, "min": 16.0, "max": 16.0}, "without the reading of the slow host"
    lines = [line for line in e2e_report.markdown(compared).splitlines() if "16 x 16K" in line]
    assert lines[0].endswith("| 40.0 to 43.0 | 2, 1 left out |") and "| 1.250 |" in lines[1]
    assert "| FA | 21.00 (21.00 to 23.10) | - |" in lines[2] and lines[2].endswith("| 3, at another host speed |")
    assert document["rows"][0]["tpot_ms"]["max"] == pytest.approx(17.6), "what was measured stays as it is"


@given(st.lists(st.lists(st.floats(10, 100), min_size=1, max_size=4), min_size=1, max_size=4))
def test_readings_that_are_compared_have_hosts_within_the_tolerance(hosts):
    rows = [
        {"backend": name, **e2e.Case(1024, 8, 1, "cached", 1, 1).describe(), "readings": []} for name in "abcd"
    ]  # fmt: skip
    reading = {"median_tpot_ms": 1.0, "median_ttft_ms": 1.0, "output_throughput": 1.0}
    for row, of_row in zip(rows, hosts, strict=False):
        row["readings"] = [reading | {"host_ms": [host, host]} for host in of_row]
    compared = e2e_report.at_equal_host_speed({"rows": rows, "gpus": 1})["rows"]
    kept = [max(reading["host_ms"]) for row in compared if "at_other_host" not in row for reading in row["readings"]]
    assert kept and max(kept) <= min(kept) * (1 + e2e_report.HOST_TOLERANCE) * (1 + 1e-9)
    assert all(
        len(row["readings"]) + row.get("left_out", 0) == len(of) for row, of in zip(compared, hosts, strict=False)
    )


def test_readings_from_before_hosts_were_timed_stay(document):
    assert e2e_report.at_equal_host_speed(document)["rows"] == sorted(
        document["rows"], key=lambda row: (row["input"], row["concurrency"])
    )
    assert "host ms" not in e2e_report.columns_of(document)


def test_the_share_that_a_profile_found_is_in_the_table(document):
    document["rows"][3]["profile"] = {"attention_share": 0.234}
    document["rows"][0]["profile"] = {"error": "no trace"}
    for place, time_of_step in ((3, 9.876), (0, 8.888)):
        document["rows"][place]["itl_ms"] = {"median": time_of_step, "min": 9.0, "max": 10.0}
    document["rows"].append({"backend": "FA", **e2e.Case(65536, 128, 16, "cached", 1, 1).describe(), "readings": []})
    head, _, *lines = e2e_report.markdown(document).splitlines()
    titles = head.split(" | ")
    cells = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert [line[1] for line in cells] == ["ETAP", "FLASHMLA", "ETAP", "FLASHMLA", "FA", "ETAP"], (
        "no row without a time"
    )
    shares = [line[titles.index("attention's share, profiled")] for line in cells]
    assert shares == ["23.4%", "-", "-", "-", "-", "-"]
    steps = [line[titles.index("ITL ms")] for line in cells]
    assert steps[:3] == ["9.88 (9.00 to 10.00)", "8.89 (9.00 to 10.00)", "-"]
    assert [line[titles.index("ITL / ETAP's")] for line in cells][:3] == ["-", "0.900", "-"]


def test_the_readme_gets_the_table_and_the_plot_is_drawn(document, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- e2e e2e-decode-vllm -->\nold\n<!-- /e2e -->\nb\n")
    e2e_report.update_readme(readme, [document])
    text = readme.read_text()
    assert (
        text.startswith("a\n<!-- e2e e2e-decode-vllm -->\n| requests x") and "old" not in text and text.endswith("b\n")
    )
    with pytest.raises(ValueError, match="<!-- e2e e2e-decode-vllm -->"):
        readme.write_text("nothing")
        e2e_report.update_readme(readme, [document])
    pytest.importorskip("matplotlib", reason="the plots need matplotlib, of the extra 'bench'")
    e2e_report.plot(document, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_resuming_another_run_is_refused(document, tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps(document))
    assert e2e.resumed(path, document)["rows"] == document["rows"]
    with pytest.raises(ValueError, match="differs in weights, gpus"):
        e2e.resumed(path, {**document, "weights": "its own weights", "gpus": 4})
    with pytest.raises(ValueError, match="differs in environment"):
        e2e.resumed(path, {**document, "environment": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}})
    with pytest.raises(ValueError, match="differs in kv_dtype"):
        e2e.resumed(path, {**document, "kv_dtype": "fp8"})
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "kv_dtype"}))
    assert e2e.resumed(path, document)["rows"] == document["rows"]


def a_run(document: dict, commit: str, rows: list[dict], **other) -> dict:
    about = {"commit": commit, "command": f"etap e2e {commit}", "rows": rows, "library_sha256": commit}
    return {**document, "servers": {"ETAP": {"log": commit}}, **about, **other}


def test_a_row_of_a_resumed_run_has_that_runs_commit(run, document, tmp_path):
    path, cases = tmp_path / "before.json", run().cases
    readings = [{"median_tpot_ms": 9.0, "median_ttft_ms": 1.0, "output_throughput": 1.0}]
    rows = [{"backend": "ETAP", **case.describe(), "readings": readings * 2, "complete": False} for case in cases[:2]]
    rows[1]["readings"] = readings
    path.write_text(json.dumps(a_run(document, "old", rows)))
    made = run(backends=["ETAP"], document=e2e.resumed(path, a_run(document, "new", [])))
    assert made.missing(e2e.Turn("ETAP")) == cases[1:], "two readings are wanted, whatever was wanted before"
    made.all()
    runs = e2e_report.runs_of(made.document)
    found = {row["concurrency"]: runs[row.get("run", 0)]["commit"] for row in made.document["rows"][:2]}
    assert found == {1: "old", 4: "new"} and made.document["commit"] == "new"


def test_several_runs_become_one_file_that_says_which_row_is_of_which(document, tmp_path):
    again, begun = a_row("ETAP", 16, 15.0), {**a_row("FA", 16, 1.0)}
    del begun["tpot_ms"]
    old = a_run(document, "old", document["rows"], note="old machine.", complete=False, stopped="by SIGINT")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, each in zip(
        paths, (old, a_run(document, "new", [a_row("FLASHMLA", 1, 11.0), again, begun])), strict=True
    ):
        path.write_text(json.dumps(each))
    output = tmp_path / "e2e-decode-vllm.json"
    main = typer.Typer()
    main.command()(e2e_report.main)
    asked = CliRunner().invoke(main, [*map(str, paths), "--join", str(output)])
    assert asked.exit_code == 0, asked.output
    made = json.loads(output.read_text())
    assert len(made["rows"]) == len(document["rows"]) and made["stopped"] == "by SIGINT" and not made["complete"]
    lines = [line for line in e2e_report.markdown(made).splitlines() if "/128, cached" in line]
    ends = {tuple(line.strip("| ").split(" | ")[index] for index in (0, 1, 2, -1)) for line in lines}
    assert {row[1:] for row in ends if row[0].startswith("16 x 16K")} == {
        ("ETAP", "15.00 (15.00 to 16.50)", "2"),
        ("FLASHMLA", "20.00 (20.00 to 22.00)", "1"),
        ("FA", "21.00 (21.00 to 23.10)", "1"),
    }, "a row that was only begun replaces none"
    text = e2e_report.markdown(made)
    assert "run 1: commit old; 2026-01-01; `etap e2e old`; run 2: commit new; " in text and " old machine." in text
    assert e2e_report.joined([made, made, old])["runs"] == made["runs"], "no run twice"
    with pytest.raises(ValueError, match="differs in versions"):
        e2e_report.joined([old, {**old, "versions": {}}])
    paths[1].write_text(json.dumps({**old, "gpus": 4}))
    refused = CliRunner().invoke(main, [*map(str, paths), "--join", str(output)], env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and "differs in gpus" in refused.output


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["e2e", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nothing"], "e2e: wanted a file or one of decode"),
        (["decode", "--context", "3K"], "no point of the scenario has these"),
        (["decode", "--profile", "16x3K"], "--profile: wanted a point of this run"),
        (["decode", "--set", "layers"], "--set: wanted KEY=VALUE"),
        (["decode", "--env", "HOME"], "--env: wanted NAME=VALUE, got 'HOME'"),
        (["decode", "--rank-of", "7"], "rank_of: wanted a divisor"),
        (["decode", "--model", "/data/r1", "--throw-away"], "--throw-away: wanted a model of configs/models"),
        (["decode", "--model", "/data/r1"], "--engine: wanted vllm installed"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(arguments, words, tmp_path):
    result = invoke(*arguments, "--output", str(tmp_path / "o.json"))
    assert result.exit_code == 2 and words in result.stderr, result.output
    assert not (tmp_path / "o.json").exists()
