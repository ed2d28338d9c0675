"""Servers and load generators with real processes, requests over real HTTP, and what is known of the engines.

A small HTTP server stands where an engine's would, and a small program where its load generator would; tests/vllm and
tests/sglang hold flags, prompts and names against the engines themselves.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from bench.tests.fake_server import SERVER, alive, children_in
from test_shared import FakeDriver

from bench.common import configs
from bench.serving import client, dummy_model, lifecycle, rerun
from bench.serving.client import Failed, FailedRequest
from bench.serving.engines import ENGINES, Serving, Vllm, read_result
from bench.serving.servers import served as engine_served
from bench.common.stopping import Stopped

GUARD = 600  # seconds, after which something hangs; nothing here is fast enough or too slow
SERVING = Serving("/m", dummy=True, tp=8, max_context=4224, batches=(1, 16))


def wait_until(what) -> None:
    while not what():
        time.sleep(0.02)


@pytest.fixture
def served(tmp_path):
    """A context manager that serves SERVER, its log, and its URL."""
    program, log, port = tmp_path / "server.py", tmp_path / "server.log", lifecycle.free_port()
    program.write_text(SERVER)
    url = f"http://127.0.0.1:{port}"

    def start(*arguments: str, seconds: float = GUARD):
        return lifecycle.server([sys.executable, str(program), str(port), *arguments], url, log, {}, seconds)

    return start, log, url


def test_a_server_is_there_in_the_block_and_gone_after_it(served):
    start, log, url = served
    with start("0.3") as process:
        pid, (child,) = process.pid, children_in(log)
        assert client.metrics(url) == {} and alive(child)
    assert not alive(pid) and not alive(child)


def test_a_server_that_dies_at_start_is_reported_with_its_last_lines(served):
    start, log, _ = served
    with (
        pytest.raises(Failed, match=r"(?s)the server ended with 1:.*CUDA error: out of luck"),
        start("0.1", "at start"),
    ):
        pass
    assert not any(map(alive, children_in(log)))


def test_a_server_that_takes_no_notice_of_sigterm_is_ended_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.5)
    marker = tmp_path / "alive"
    stubborn = "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stubborn += f"while True: pathlib.Path({str(marker)!r}).touch(); time.sleep(0.05)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(60)"
    process = lifecycle.Process([sys.executable, "-c", parent], tmp_path / "log")
    wait_until(marker.exists)
    (child,) = set(process.running()) - {process.pid}
    assert process.host_mib() > 5
    process.end()
    assert process.running() == [] and not alive(child)


def test_other_threads_servers_can_be_ended(tmp_path):
    threads = []
    for number in range(2):
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = lifecycle.Process(command, tmp_path / f"{number}.log")
        threads.append(threading.Thread(target=process._process.wait))
        threads[-1].start()
    assert len(lifecycle.Process.alive) == 2
    lifecycle.end_all()
    for thread in threads:
        thread.join(GUARD)
    assert not lifecycle.Process.alive and not any(thread.is_alive() for thread in threads)


def test_a_server_that_does_not_run_the_backend_is_refused_and_ended(tmp_path, monkeypatch):
    program, about = tmp_path / "server.py", {}
    said = "print('Using AttentionBackendEnum.ETAP backend', flush=True)"
    program.write_text(SERVER.replace("time.sleep(delay)", said))

    def command(self, python, serving, backend, port, flags):
        return [sys.executable, str(program), str(port), "0"]

    monkeypatch.setattr(Vllm, "server", command)
    options = {"log": tmp_path / "log", "seconds": GUARD, "about": about}
    with engine_served(ENGINES["vllm"], SERVING, "ETAP", [], **options) as server:
        assert client.is_healthy(server.url) and server.process.ended() is None
        with pytest.raises(Failed, match="does not say 'FP8'"):
            server.must_say("FP8")
    assert about["seconds_to_ready"] >= 0 and about["command"].startswith("python ") and about["cache"] == []
    refused = pytest.raises(Failed, match="does not say that FLASHMLA is in use")
    with refused, engine_served(ENGINES["vllm"], SERVING, "FLASHMLA", [], **options):
        pass
    assert not any(map(alive, children_in(tmp_path / "log")))


def test_memory_of_others_gpus_is_not_waited_for(monkeypatch):
    """Two GPUs: one whose memory is given back at once, and another that fills up."""
    driver, slept = FakeDriver(monkeypatch), []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(lifecycle, "time", clock)

    def waited() -> float:
        driver.used, slept[:] = [1, 1], []
        with lifecycle.memory_given_back():
            driver.used = [1, 9000]
        return sum(slept)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert waited() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert waited() >= lifecycle.MEMORY_SECONDS


def test_errors_far_above_the_end_of_a_log_are_shown(tmp_path):
    log = tmp_path / "server.log"
    worker = "(Worker pid=7) ValueError: Selected backend ETAP is not valid"
    log.write_text("\n".join([worker, worker, *(f"line {number}" for number in range(100))]))
    shown = lifecycle.tail(log, 3).splitlines()
    assert shown == ["error above: ValueError: Selected backend ETAP is not valid", "line 97", "line 98", "line 99"]


def test_a_server_that_dies_in_use_is_reported(served):
    start, log, url = served
    with pytest.raises(Failed, match=r"(?s)ended with 3 while it was in use.*engine core died"), start("0") as process:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/die", timeout=GUARD, trust_env=False)
        wait_until(lambda: process.ended() is not None)
    assert not any(map(alive, children_in(log)))


def test_a_server_that_does_not_come_up_in_time_is_ended(served):
    start, log, _ = served
    with pytest.raises(Failed, match="not ready after 1 s"), start("60", seconds=1):
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
        generator.run(["write", str(tmp_path / "pid")], GUARD)
        return int((tmp_path / "pid").read_text())

    first = pid_of_a_run()
    assert pid_of_a_run() == first
    for arguments, words in ((["fail"], "RuntimeError: no such prompt"), (["exit"], "exit code 2")):
        with pytest.raises(Failed, match=words):
            generator.run(arguments, GUARD)
    assert pid_of_a_run() == first, "a module that raised has not harmed the process"
    with pytest.raises(Failed, match="the load generator ended"):
        generator.run(["die"], GUARD)
    second = pid_of_a_run()
    assert second != first
    with pytest.raises(Failed, match="took more than 0 s"):
        generator.run(["sleep"], 0.2)
    assert not alive(second) and pid_of_a_run() not in (first, second)


def test_a_module_is_the_main_program_with_these_arguments(capsys):
    assert rerun.run("this", []) is None
    assert rerun.run("no_such_module", []).startswith("ImportError")


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


def test_logs_are_understood():
    vllm, sglang = ENGINES["vllm"], ENGINES["sglang"]
    assert vllm.cache_tokens("INFO [kv_cache_utils.py] GPU KV cache size: 674,597 tokens\n") == 674597
    assert sglang.cache_tokens("max_total_num_tokens=65536, chunked_prefill_size=8192") == 65536
    assert vllm.cache_tokens("nothing") is None
    of_host = "GPU + host KV cache size: 9,216 tokens\n"  # as many as the GPU has; contexts may lie on the host
    of_host += "HiSparse steady-state maximum concurrency for 1,024 tokens per request: 9.50x (running requests)"
    assert vllm.cache_tokens(of_host) == 9728
    assert vllm.in_full_graphs("Capturing CUDA graphs (decode, FULL):  50%|") is True
    assert vllm.in_full_graphs("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)") is False
    assert sglang.in_full_graphs("") is None
    assert vllm.in_use("ETAP", "Using AttentionBackendEnum.ETAP backend.") and not vllm.in_use("FLASHMLA", "ETAP")
    v4, ours = "Resolved architecture: DeepseekV4ForCausalLM\n", "ETAP decodes: DeepSeek-V4's"
    assert vllm.in_use("FLASHMLA_SPARSE", v4) and not vllm.in_use("ETAP", v4)
    assert vllm.in_use("ETAP", v4 + ours) and not vllm.in_use("FLASHMLA_SPARSE", v4 + ours)
    assert sglang.in_use("etap", "server_args=ServerArgs(attention_backend='etap', ")
    assert sglang.in_use("etap", "server_args={'decode_attention_backend': None, 'attention_backend': 'etap', ")
    assert not sglang.in_use("etap", "attention_backend='fa3', decode_attention_backend='etap'")
    v4 = "Use dsv4 attention backend for DeepseekV4ForCausalLM, setting page_size to 256.\n attention_backend='dsv4'"
    ours = "Attention backend etap: DeepSeek-V4, decode and prefill, 8 heads unpadded, KV cache fp8_ds_mla"
    assert sglang.in_use("dsv4", v4) and not sglang.in_use("etap", v4)
    assert sglang.in_use("etap", v4 + ours) and not sglang.in_use("dsv4", v4 + ours)
    assert (sglang.page_tokens(""), sglang.page_tokens(v4)) == (64, 256)
    hybrid = "Setting attention block size to 640 tokens to ensure that attention page size is >= mamba page size."
    assert (ENGINES["vllm"].page_tokens(""), ENGINES["vllm"].page_tokens(hybrid)) == (64, 640)


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


class Handler(http.server.BaseHTTPRequestHandler):
    """What its path says: an echo, an error, silence, parts of a stream, metrics."""

    def do_GET(self):
        self.server.asked += 1
        text = f'running{{a="1"}} {self.server.asked % 7}\nrunning{{a="2"}} 1\nall_total 2e3\n'
        self.answer(text if self.path == "/metrics" else "", 200 if self.path in ("/metrics", "/health") else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        if self.path == "/silent":
            self.server.over.wait(GUARD)
        if self.path == "/first-error":  # the others wait
            wait_until(lambda: self.server.over.is_set() or (body["prompt"] == [0] and self.server.most == 3))
        if self.path in ("/error", "/first-error"):
            return self.answer("out of luck", 500)
        if not body.get("stream"):
            # A busy machine may send the last of them late.
            wait_until(lambda: self.server.most >= self.server.awaited)
            with self.server.lock:
                self.server.running -= 1
            return self.answer(json.dumps({"echo": body["prompt"]}))
        self.send_response(200)
        self.end_headers()
        for number in range(5):
            part = {"error": "in the middle"} if self.path == "/faulty" and number == 2 else {"part": number}
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        self.wfile.write(b"" if self.path == "/broken" else b"data: [DONE]\n\n")

    def answer(self, text, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64
    asked = running = most = 0
    awaited = 0  # requests in flight at once that there should be before any is answered
    lock = threading.Lock()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.over = threading.Event()

    def handle_error(self, *_):
        """Clients that went away are what is tested."""


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.over.set()
        made.shutdown()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("concurrency", [12, 3, 1])
def test_all_requests_are_answered_in_order_and_as_many_at_a_time_as_asked(server, url, concurrency):
    bodies = [{"prompt": [number]} for number in range(12 if concurrency > 1 else 3)]
    server.awaited = concurrency
    replies = client.ask_all(f"{url}/echo", bodies, concurrency, GUARD)
    assert replies == [{"echo": body["prompt"]} for body in bodies] and server.most == concurrency


@pytest.mark.parametrize(
    "path, seconds, kind, words",
    [
        ("error", GUARD, "HTTP error", "wanted status 200, got 500: out of luck"),
        ("silent", 0.5, "hung", "no answer in 0.5 s"),
    ],
)
def test_requests_that_fail_say_how(url, path, seconds, kind, words):
    with pytest.raises(FailedRequest, match=words) as failed:
        client.ask_all(f"{url}/{path}", [{"prompt": [1]}] * 3, 3, seconds)
    assert failed.value.kind == kind
    with closing(client.Wire(f"{url}/{path}", seconds)) as wire, pytest.raises(FailedRequest, match=words) as failed:
        wire.whole({"prompt": [1]})
    assert failed.value.kind == kind
    with pytest.raises(FailedRequest, match=words):
        client.post(f"{url}/{path}", {"prompt": [1]}, seconds)


def test_requests_that_wait_when_another_fails_end_with_the_server(server, url, monkeypatch):
    """Each reads its own answer. One whose connection were closed under it might wait for another's, and with it the
    program's end."""
    threads, seen, must_be_ok = threading.active_count(), [], client.must_be_ok
    monkeypatch.setattr(client, "must_be_ok", lambda *answer: seen.append(answer) or must_be_ok(*answer))
    with pytest.raises(FailedRequest, match="got 500"):
        client.ask_all(f"{url}/first-error", [{"prompt": [number]} for number in range(3)], 3, GUARD)
    server.over.set()
    wait_until(lambda: threading.active_count() <= threads)
    assert seen == [(500, "out of luck")] * 3


def test_streams_come_in_parts_and_must_end(url):
    def parts(path):
        with closing(client.Wire(f"{url}/{path}", GUARD)) as wire:
            return [part["part"] for part in wire.parts({"prompt": [1]})]

    assert parts("stream") == [0, 1, 2, 3, 4]
    with pytest.raises(FailedRequest, match=r"the stream broke off: 1 prompt tokens, .*streamed False"):
        parts("broken")
    with pytest.raises(FailedRequest, match="in a stream: in the middle"):
        parts("faulty")
    with pytest.raises(FailedRequest, match="got 500"):
        parts("error")


def test_a_proxy_of_the_environment_is_not_asked(url, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert client.is_healthy(url) and client.metrics(url) and client.ask_all(f"{url}/echo", [{"prompt": []}], 1, GUARD)


def test_metrics_are_summed_over_labels(url):
    assert client.metrics(url) == {"running": 2.0, "all_total": 2000.0}
    assert client.metrics(f"http://127.0.0.1:{lifecycle.free_port()}") == {}
    assert client.counted({"a": 1.0}, {"x": "a", "y": "b"}) == {"x": 1.0, "y": None}


def test_the_end_of_all_waiting(monkeypatch):
    monkeypatch.setattr(client.time, "monotonic", lambda: 100.0)
    deadline = client.Deadline(105.0)
    assert deadline.left(2, "a server") == 2 and deadline.left(60, "a server") == 5
    with pytest.raises(Failed, match="no time left for a server"):
        client.Deadline(100.0).left(60, "a server")
