"""Servers as processes, requests over real HTTP, and what commands, logs and replies of the engines mean."""

from __future__ import annotations

import json
import sys
import time

import pytest

from bench.common.stopping import Stopped
from bench.servers import client, processes
from bench.servers.client import Failed, FailedRequest
from bench.servers.engines import ENGINES, Load, Serving, Variant, read_result
from bench.servers.generator import Generator, tail
from bench.servers.processes import Process, served
from bench.tests.fake_engine import alive, children, stand_in

VLLM, SGLANG = ENGINES["vllm"], ENGINES["sglang"]
SERVING = Serving("/m", "dummy", max_requests=16, max_context=4224, batches=(1, 16))
ETAP = Variant("ETAP")


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts SERVER with a fault."""

    def start(faults: str = "", variant: Variant = ETAP, seconds: float = 60):
        stand_in(monkeypatch, tmp_path, faults)
        return served(VLLM, SERVING, variant, [], log=tmp_path / "server.log", environment={}, seconds=seconds)

    return start


def test_a_server_runs_in_the_block_and_nothing_of_it_after(serve, tmp_path):
    with serve() as server:
        pid = server.process.pid
        assert client.is_healthy(server.url) and children(tmp_path) and server.process.host_mib() > 5
        assert server.metrics()["vllm:num_requests_running"] == 0 and server.about["seconds_to_ready"] >= 0
    assert not alive(pid) and not children(tmp_path) and not Process.alive


@pytest.mark.parametrize(
    "faults, variant, words",
    [
        ("ETAP at start", ETAP, r"(?s)ended with 1:.*ValueError: out of luck"),
        ("other backend", ETAP, "does not say that ETAP is in use"),
        ("", Variant("ETAP", "fp8"), "does not say 'KV cache FP8"),
    ],
)
def test_a_server_that_is_not_as_asked_is_refused_and_ended(serve, tmp_path, faults, variant, words):
    with pytest.raises(Failed, match=words), serve(faults, variant):
        pass
    assert not children(tmp_path)


def test_a_server_that_dies_in_use_is_reported(serve, tmp_path):
    with pytest.raises(Failed, match="ended with 3 while it was in use"), serve("dies") as server:
        with pytest.raises(FailedRequest):
            server.ask([VLLM.body([1], 1)], 1)
        while server.process.ended() is None:
            time.sleep(0.02)
    assert not children(tmp_path)


def test_a_server_that_is_late_and_a_run_that_stops_leave_nothing(serve, tmp_path):
    with pytest.raises(Failed, match="not ready in time"), serve(seconds=0):
        pass
    with pytest.raises(Stopped), serve():
        raise Stopped("by SIGINT")
    assert not children(tmp_path)


def test_a_process_that_ignores_sigterm_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    process = Process([sys.executable, "-c", stubborn + "time.sleep(600)"], tmp_path / "log", {})
    while "up" not in (tmp_path / "log").read_text().splitlines():
        time.sleep(0.02)
    processes.end_all()
    assert process.running() == []


def test_the_first_errors_of_a_log_are_shown_with_its_end(tmp_path):
    error = "(Worker pid=7) ValueError: Selected backend ETAP is not valid"
    (tmp_path / "log").write_text("\n".join([error, error, *map(str, range(100))]))
    shown = tail(tmp_path / "log", 2).splitlines()
    assert shown == ["error above: ValueError: Selected backend ETAP is not valid", "98", "99"]


def test_a_load_generator_stays_loaded_and_starts_anew_after_a_failure(tmp_path, monkeypatch):
    (tmp_path / "loads.py").write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'write': open(sys.argv[2], 'w').write(str(os.getpid()))\n"
        "if sys.argv[1] == 'fail': raise RuntimeError('no such prompt')\n"
        "if sys.argv[1] == 'exit': sys.exit(2)\n"
        "if sys.argv[1] == 'die': os._exit(9)\n"
        "if sys.argv[1] == 'sleep': time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = {
        "fail": "RuntimeError: no such prompt",
        "exit": "exit code 2",
        "die": "ended",
        "sleep": "took more than 1 s",
    }
    pids = []
    with Generator("loads", tmp_path / "load.log") as generator:
        for fault in ("write", *words):
            generator.run(["write", str(tmp_path / "pid")], 60)
            pids.append(int((tmp_path / "pid").read_text()))
            if fault in words:
                with pytest.raises(Failed, match=words[fault]):
                    generator.run([fault], 1 if fault == "sleep" else 60)
    assert pids[0] == pids[1] and len(set(pids)) == 4 and not any(map(alive, pids))


def test_requests_are_answered_in_order_and_failures_are_named(serve):
    with serve() as server:
        replies = server.ask([VLLM.body([n], 2, logprobs=2) for n in range(40)], 8)
        assert [VLLM.answer(reply).tokens for reply in replies] == [[n, n + 1] for n in range(40)]
        with client.new_client() as http:
            parts = list(client.stream(http, server.url + VLLM.path, VLLM.body([1], 5, logprobs=2), 60))
            assert sum(VLLM.tokens_in(part) for part in parts) == 5
            with pytest.raises(FailedRequest) as failed:
                client.ask(http, f"http://127.0.0.1:{processes.free_port()}", {}, 5)
    assert failed.value.kind == "HTTP error" and client.metrics("http://127.0.0.1:9") == {}


def test_a_stream_that_breaks_off_is_no_answer(serve):
    with serve("broken") as server, client.new_client() as http, pytest.raises(FailedRequest, match="broke off"):
        list(client.stream(http, server.url + VLLM.path, VLLM.body([1], 5, logprobs=2), 60))


def test_variants_have_names():
    assert Variant.parse("ETAP+fp8+math+eager@dcp2") == Variant("ETAP", "fp8", True, True, 2, 2)
    assert Variant.parse("FLASHMLA", 8) == Variant("FLASHMLA", tp=8)
    shared = Variant.parse("etap+shared+fp8")
    assert shared == Variant("etap", "fp8", shared=True) and shared.environment == {"ETAP_SHARED_PREFIX": "1"}
    assert Variant.parse("ETAP+fp8+engine_top_k").environment == {"ETAP_TOP_K": "0"}
    assert shared.proof({}) == "KV cache FP8 (e4m3), math float16, shared prefixes read once"
    assert "sparse attention" in Variant("etap").proof({"index_topk": 2048}) and Variant("FLASHMLA").proof({}) == ""
    for name in ("ETAP@", "ETAP@tp0", "ETAP@pp2", "ETAP+fp8+auto", "", "ETAP,"):
        with pytest.raises(ValueError, match="--backend"):
            Variant.parse(name)


def test_logs_are_understood():
    assert VLLM.cache_tokens("GPU KV cache size: 674,597 tokens") == 674597 and VLLM.cache_tokens("") is None
    assert SGLANG.cache_tokens("max_total_num_tokens=65536, x") == 65536
    assert VLLM.in_graphs("Capturing CUDA graphs (decode, FULL)") is True and VLLM.in_graphs("(PIECEWISE)") is False
    assert [SGLANG.in_graphs(f"Decode batch, x, cuda graph: {on}, y") for on in (True, False)] == [True, False]
    assert SGLANG.in_graphs("") is None and SGLANG.page_tokens("setting page_size to 256") == 256
    v4 = "Resolved architecture: DeepseekV4ForCausalLM\n"
    assert VLLM.in_use(Variant("FLASHMLA_SPARSE"), v4) and not VLLM.in_use(ETAP, v4)
    assert VLLM.in_use(ETAP, v4 + "ETAP decodes: DeepSeek-V4's")
    assert SGLANG.in_use(Variant("etap"), "{'attention_backend': 'etap'") and not SGLANG.in_use(Variant("etap"), "")
    v4 = "Use dsv4 attention backend\n attention_backend='etap'"
    assert not SGLANG.in_use(Variant("etap"), v4) and SGLANG.in_use(Variant("dsv4"), v4)


def test_results_of_both_load_generators_are_read(tmp_path):
    raw = {"completed": 4, "median_tpot_ms": 8.0, "median_ttft_ms": 7.0, "output_throughput": 5.0, "accept_length": 1.9}
    (path := tmp_path / "r.json").write_text("{}\n" + json.dumps(raw))
    found = read_result(path, 4)
    assert (found["tpot_ms"], found["acceptance_length"], found["itl_ms"]) == (8.0, 1.9, None)
    with pytest.raises(ValueError, match="wanted 5 requests answered, got 4"):
        read_result(path, 5)


def test_commands_ask_for_drafts_caches_and_prefixes():
    drafting = Serving("/m", batches=(1, 16), draft_tokens=1, acceptance=1.9)
    words = VLLM.server("py", drafting, Variant("ETAP", "fp8", True), 1, ["--last"])
    assert words[words.index("--cudagraph-capture-sizes") + 1 :][:2] == ["2", "32"] and words[-1] == "--last"
    assert "synthetic" in words[words.index("--speculative-config") + 1] and "--additional-config" in words
    words = SGLANG.server("py", drafting, Variant("etap", "fp8", True, tp=2, dcp=2), 1, [])
    assert {"etap_fp8_math", "fp8_e4m3", "EAGLE", "--dcp-size"} <= set(words)
    assert SGLANG.environment(drafting) == {"SGLANG_SIMULATE_ACC_LEN": "1.9"}
    for engine in ENGINES.values():
        assert "1000" in engine.load(drafting, Load(1024, 1000, 2, 1, 4), 1, processes.Path("r.json"))
