"""The soak against a small server: a good run passes, and each fault fails it."""

from __future__ import annotations

import os
import random
import re
import signal
import threading

import pytest

from bench.servers import soak, traffic
from bench.servers.agreement import Agreement
from bench.servers.engines import ENGINES, Serving, Variant
from bench.servers.traffic import Settings, Tally, Traffic
from bench.tests.fake_engine import children, stand_in

VLLM = ENGINES["vllm"]
FAST = {"context": 256, "seconds": 1.5, "concurrency": 8, "timeout": 20.0, "probe_every": 0.2, "sample_every": 0.05}
FAST |= {"wave_every": 0.3, "host_growth": 24, "gpu_growth": 1, "abort_share": 0.2, "stream_share": 0.3}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a soak with faults; gives what was measured."""

    def call(faults: str, **settings: float) -> dict:
        stand_in(monkeypatch, tmp_path, faults)
        (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
        serving, made = Serving(str(tmp_path), max_requests=8), Settings(**FAST | settings)
        document = soak.soak("vllm", serving, Variant("ETAP"), made, [], tmp_path / "soak.json")
        assert not children(tmp_path)
        return document

    return call


def test_a_good_run_passes_and_tells_what_it_saw(run):
    document = run("")
    assert (document["failures"], document["complete"], document["faults"]) == ([], True, {})
    requests, rounds = document["requests"], document["probes"]["rounds"]
    assert min(requests["served"], requests["aborted"], requests["output_tokens"]) > 0
    assert document["counters"]["preempted"] > 0 and document["counters"]["prefix tokens found"] > 0
    assert len(rounds) > document["rounds_in_traffic"] > 0 and rounds[-1]["steps"] == 2 * soak.ANSWER
    assert document["memory"]["gpu"]["growth_mib"] is None and document["memory"]["host"]["growth_mib"] < 24


@pytest.mark.parametrize(
    "faults, words",
    [
        (
            "HTTP error,not finite,incomplete,log,not preempted,left over",
            [
                r"HTTP error \(.*wanted status 200, got 500: out of luck",
                r"not finite \(.*got None",
                r"incomplete \(.*wanted \d+ tokens, got",
                r"log \(.*Traceback",
                r"preempted: wanted some, got 0\.0",
                "the idle server says that 3 requests are running",
            ],
        ),
        ("hung", [r"hung \(.*no answer in 1 s"]),
        ("host memory", ["host memory grew by .* allowed 24"]),
        ("another token", [r"wrong answer \(.*another token, the best two 2\.000 nats apart"]),
        ("other logprobs", [r"wrong answer \(.*probe 0: median (2\.999|3\.00[01])"]),
        ("server", [r"server \(.*ended with 3"]),
    ],
)
def test_each_fault_is_found(run, faults, words):
    failures = run(faults, **({"timeout": 1.0} if faults == "hung" else {}))["failures"]
    for text in words:
        assert any(re.search(text, line) for line in failures), (text, failures)


def test_a_signal_ends_a_run_which_is_then_no_pass(run):
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    document = run("", seconds=60)
    assert (document["complete"], document["stopped"]) == (False, "by SIGTERM") and document["requests"]["sent"] > 0


def test_limits_follow_the_noise(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    probes = soak.Probes(None, soak.prompts_of(tmp_path), 1.0)
    assert [len(prompt) for prompt in probes.prompts] == [40, 200, 700]
    found = []
    for probes.noise in (0.1, 0.01):
        found.append([text for text in probes.objections(Agreement([[0.7] * 9], [0.9])) if "all" not in text])
    assert list(map(len, found)) == [0, 2]


def pages(tokens: int) -> int:
    return -(-tokens // 64)


def test_the_first_wave_is_the_largest_batch_and_the_second_the_largest_prefill():
    """Of a cache of 1280 pages, and steps that prefill 8192 tokens."""
    made = Traffic(VLLM, "http://nowhere", Settings(8192), Tally())
    requests = [made.request(random.Random(seed)) for seed in range(500)]
    assert 256 * max(pages(len(prompt) + tokens + traffic.MARGIN) for prompt, tokens in requests) <= 1280
    made.new_wave()
    requests = [made.request(random.Random(seed)) for seed in range(256)]
    (shared,) = {tuple(prompt[:4096]) for prompt, _ in requests}
    ((new, added),) = {(len(prompt) - len(shared), tokens) for prompt, tokens in requests}
    room = (1280 - pages(len(shared))) // pages(new + added + traffic.MARGIN)
    assert 8192 // new * len(shared) == 65536 and 8192 // new < room < made.wanted == 256
    made.new_wave()
    assert max(len(made.request(random.Random(seed))[0]) for seed in range(500)) > 2048


def test_growth_is_between_the_second_and_the_last_quarter():
    assert soak.growth([1000.0 if second >= 20 else 10.0 * second for second in range(101)]) == 0
    leaking = [1000 + 2.0 * second for second in range(101)]
    assert soak.growth([None, *leaking, None]) == soak.growth(leaking) == pytest.approx(100, abs=3)
    assert soak.growth([None] * 101) is None and soak.growth(leaking[:15]) is None


@pytest.mark.parametrize(
    "line, bad",
    [
        ("(EngineCore pid=5) ERROR 11-21 07:52:04 [core.py:1] EngineCore failed", True),
        ("logits: nan", True),
        ("INFO request for banana in finance", False),
        ("INFO SpecDecoding metrics: Mean acceptance length: nan", False),
        ("[2026-11-21] ERROR: Request is disconnected from the client side (type 3). Abort request", False),
    ],
)
def test_bad_lines_of_a_log(tmp_path, line, bad):
    (path := tmp_path / "log").write_text(f"ERROR before\n{line}\nERROR half of a li")
    log = soak.Log(path, len("ERROR before\n"))
    assert log.bad_lines() == ([line] if bad else []) and log.bad_lines() == []
