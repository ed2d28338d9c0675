"""The soak against a small HTTP server in the engine's place: a good run passes, and each fault fails it."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bench.checks import soak
from bench.checks import traffic as load
from bench.checks.agreement import Agreement
from bench.serving import client
from bench.serving.engines import ENGINES

# Answers in vLLM's format: which tokens depends on the prompt alone, log-probabilities have a little noise. FAULTS
# says what it does wrong once it has had enough requests to be in the middle of the traffic.
SERVER = """
import http.server, json, os, random, subprocess, sys, threading, time
port, faults = int(sys.argv[sys.argv.index("--port") + 1]), os.environ["FAULTS"].split(",")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
print("Using AttentionBackendEnum.ETAP backend.", flush=True)
print("ERROR before it was ready", flush=True)
count, hoard, lock = 0, [], threading.Lock()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        n = 0 if "not preempted" in faults else count
        self.reply(f'vllm:num_preemptions_total{{e="0"}} {n}\\nvllm:prefix_cache_hits_total {count}\\n'
                   f'vllm:num_requests_running {3 if "left over" in faults else 0}\\n')

    def reply(self, text, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        global count
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            count += 1
            late, turn = count > 70, count % 10
            if late and "server" in faults: os._exit(3)
            if late and "log" in faults: print("ValueError: Traceback (most recent call last):", flush=True)
            if late and "host memory" in faults: hoard.append(bytearray(b"x" * 2**19))
        if late and turn == 0 and "HTTP error" in faults: return self.reply("out of luck", 500)
        if late and turn == 1 and "hung" in faults: time.sleep(600)
        forced = asked.get("vllm_xargs", {}).get("forced_tokens")
        first = sum(asked["prompt"]) % 1000
        wrong = late and ("another token" in faults and forced is None or "wrong when forced" in faults and forced)
        tokens = forced or [(first + step + (step > 3 and bool(wrong))) % 1000 for step in range(asked["max_tokens"])]
        def part(tokens):
            values = [-0.1 - 0.001 * random.random() - 3 * bool(wrong and forced) for _ in tokens]
            if late and turn == 2 and "not finite" in faults: values[-1] = float("nan")
            names = [f"token_id:{token}" for token in tokens]
            best = [{name: value, "token_id:9999": value - 2} for name, value in zip(names, values)]
            logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": best}
            return json.dumps({"choices": [{"logprobs": logprobs}]}).replace("NaN", "null")
        if late and turn == 3 and "incomplete" in faults: tokens = tokens[1:]
        if not asked.get("stream"): return self.reply(part(tokens))
        self.send_response(200)
        self.end_headers()
        for token in tokens:
            self.wfile.write(b"data: " + part([token]).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_): pass

class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    def handle_error(self, *_): pass
Server(("127.0.0.1", port), Handler).serve_forever()
"""
TOKENS = 8


@pytest.fixture
def model(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()

    def entry(number):
        prompt = [1000 + number, *range(2000, 2040)]
        return {"prompt": prompt, "answer": [(sum(prompt) + step) % 1000 for step in range(TOKENS)]}

    prompts = {kind: [entry(100 * k + number) for number in range(10)] for k, kind in enumerate(("recite", "recall"))}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "config.json").write_text('{"max_position_embeddings": 256}')
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    def command(self, python, serving, backend, port, flags):
        return [sys.executable, str(program), "--host", "127.0.0.1", "--port", str(port)]

    monkeypatch.setattr(type(ENGINES["vllm"]), "server", command)
    return folder


def run(model, faults, monkeypatch, **changes):
    """Exit status and the file that was written."""
    monkeypatch.setenv("FAULTS", faults)
    output = model.parent / "soak.json"
    options = {"seconds": 1.5, "concurrency": 8, "timeout": 20.0, "probe_every": 0.2, "sample_every": 0.05}
    options |= {"wave_every": 0.3, "write_every": 0.5, "host_growth": 24, "ready": 120, "output": output}
    with pytest.raises(typer.Exit) as ended:
        soak.main(model, [], **(DEFAULTS | options | changes))
    document = json.loads(output.read_text())
    assert not left_of(model.parent / "server.py")
    return ended.value.exit_code, document


DEFAULTS = {"engine": "vllm", "backend": "", "mode": "plain", "kv_cache_dtype": "auto", "cache_tokens": 64}
DEFAULTS |= {"memory_share": 0.25, "abort_share": 0.2, "stream_share": 0.3, "gpu_growth": 1, "stop_file": None}
DEFAULTS |= {"seed": 0, "note": ""}


def left_of(program):
    """Command lines of the server and of its child, which sleeps in a session of its own."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_text().split("\0"))
    return [line for line in lines if str(program) in line]


def test_a_good_run_passes_and_says_what_it_saw(model, monkeypatch):
    metrics, alive = client.metrics, []

    def watched(url):
        alive.append(len(left_of(model.parent / "server.py")))
        return metrics(url)

    monkeypatch.setattr(client, "metrics", watched)
    code, document = run(model, "", monkeypatch)
    assert (code, document["failures"], document["complete"], document["faults"]) == (0, [], True, {})
    assert max(alive) == 2  # or what `run` asserts of the end would say nothing
    requests = document["requests"]
    assert min(requests["served"], requests["aborted"], requests["output_tokens"]) > 0
    assert requests["served"] + requests["aborted"] == requests["sent"]
    assert document["counters"]["preempted"] > 0 and document["counters"]["prefix tokens found"] > 0
    rounds = document["probes"]["rounds"]
    assert len(rounds) > document["rounds_in_traffic"] > 0 and rounds[-1]["steps"] == 16 * TOKENS
    assert document["memory"]["gpu"]["growth_mib"] is None and document["memory"]["host"]["growth_mib"] < 24
    assert {"gpu", "driver", "versions", "commit", "command", "date"} <= set(document)
    assert "server.py --host" in document["server"]["command"]


def test_a_sparse_models_indexer_has_room_to_grow_into_and_its_server_must_say_that_it_is_one(model, monkeypatch):
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"index_topk": 512}))
    code, document = run(model, "", monkeypatch)
    assert document["settings"]["gpu_growth"] == 1 + 512
    assert code == 1 and "sparse attention" in document["failures"][0]


def test_a_server_of_deepseek_v4_that_knows_nothing_by_heart_is_held_against_its_own_noise(model, monkeypatch):
    """Without drafts as with them; only ETAP's line says what its layers attend with. Of V4.1, whose images have a
    configuration beside the text's."""
    config, prompts = (model / f"{name}.json" for name in ("config", "prompts"))
    text = json.loads(config.read_text()) | {"index_topk": 512, "compress_ratios": [0, 2]}
    config.write_text(json.dumps({"text_config": text}))
    prompts.write_text(json.dumps(json.loads(prompts.read_text()) | {"recite": []}))
    code, document = run(model, "", monkeypatch)
    assert (code, document["failures"]) == (0, []) and document["probes"]["recite_right"] is None
    code, document = run(model, "wrong when forced", monkeypatch)
    assert code == 1 and any("wrong answer" in failure for failure in document["failures"])


def test_what_a_model_that_knows_nothing_by_heart_may_differ_by_follows_its_noise(tmp_path):
    entry = {"prompt": [1], "answer": [2]}
    allowed = {}
    for recite in ([], [entry]):
        (tmp_path / "prompts.json").write_text(json.dumps({"recite": recite, "recall": [entry]}))
        probes = soak.Probes(ENGINES["vllm"], None, tmp_path, True)
        probes.noise = 0.1
        found = Agreement([[0.7] * 9], [0.9])
        allowed[bool(recite)] = probes.objections(found)
    assert not [said for said in allowed[False] if "probe" in said or "best two" in said]
    assert len([said for said in allowed[True] if "probe" in said or "best two" in said]) == 2


def test_a_model_without_prompts_of_its_own_is_probed_with_random_ones_that_fit(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    probes = soak.Probes(ENGINES["vllm"], None, tmp_path, True)
    assert [(kind, len(entry["prompt"])) for kind, entry in probes.kinds] == [("recall", n) for n in (40, 200, 700)]
    assert all(len(entry["answer"]) == soak.DRAWN_ANSWER for _, entry in probes.kinds)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "faults, said",
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
        ("another token", [r"wrong answer \(.*another token, the best two 2\.\d+ nats apart"]),
        ("wrong when forced", [r"wrong answer \(.*probe 1 \(recite\): median (2\.999|3\.00[01])"]),
        ("server", [r"server \(.*ended with 3"]),
    ],
)
def test_each_fault_is_found(model, monkeypatch, faults, said):
    code, document = run(model, faults, monkeypatch, **({"timeout": 1.0} if faults == "hung" else {}))
    assert code == 1
    for text in said:
        assert any(re.search(text, line) for line in document["failures"]), (text, document["failures"])


def test_a_model_that_does_not_know_its_prompts_proves_nothing(model, monkeypatch):
    prompts = json.loads((model / "prompts.json").read_text())
    prompts["recite"][0]["answer"] = [5] * TOKENS
    (model / "prompts.json").write_text(json.dumps(prompts))
    code, document = run(model, "", monkeypatch)
    assert code == 1 and "got 88%" in document["failures"][0] and not document["complete"]


def test_a_stop_file_ends_it_early_and_keeps_what_it_has(model, monkeypatch, tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    code, document = run(model, "", monkeypatch, seconds=60, stop_file=stop)
    assert (code, document["complete"], document["stopped"]) == (1, False, "by stop")
    assert document["failures"] == [] and document["probes"]["rounds"] == []


def test_sigterm_ends_it_early_and_keeps_what_it_has(model, monkeypatch):
    # The output of the first half second is there when the signal comes.
    output = model.parent / "soak.json"
    waits = f"import os, pathlib, signal, time\npath = pathlib.Path({str(output)!r})\nwhile not path.exists():"
    killer = subprocess.Popen(
        [sys.executable, "-c", f"{waits} time.sleep(0.05)\ntime.sleep(0.7)\nos.kill({os.getpid()}, {signal.SIGTERM})"]
    )
    code, document = run(model, "", monkeypatch, seconds=60)
    killer.wait(10)
    assert (code, document["complete"], document["stopped"]) == (1, False, "by SIGTERM")
    assert document["failures"] == [] and document["requests"]["sent"] > 0


def pages(tokens: int) -> int:
    return -(-tokens // 64)


@pytest.fixture
def traffic():
    settings = load.Settings(600, 256, 240, 8192, 0.15, 0.25, {}, 512, 256, 0)
    return load.Traffic(ENGINES["vllm"], client.Wire("http://nowhere", 1), settings, load.Tally())


def test_the_first_wave_is_the_largest_batch_and_fits_the_cache(traffic):
    rng = random.Random(0)
    lengths = [len(prompt) + tokens + load.MARGIN for prompt, tokens in (traffic.request(rng) for _ in range(2000))]
    assert traffic.wanted == 256 and 256 * pages(max(lengths)) <= 1280


def test_the_second_wave_is_the_largest_prefill(traffic):
    traffic.new_wave()
    requests = [traffic.request(random.Random(seed)) for seed in range(256)]
    (shared,) = {tuple(prompt[:4096]) for prompt, _ in requests}
    # What a step of 8192 tokens prefills of them has the 65,536 cached tokens before it that vLLM takes at a time; more
    # than one step's requests find room in the cache, and fewer than all, so that others wait for them.
    (new_tokens,) = {len(prompt) - len(shared) for prompt, _ in requests}
    (added,) = {tokens for _, tokens in requests}
    assert 8192 // new_tokens * len(shared) == 65536
    room = (1280 - pages(len(shared))) // pages(new_tokens + added + load.MARGIN)
    assert 8192 // new_tokens < room < traffic.wanted == 256
    traffic.new_wave()
    assert max(len(prompt) for prompt, _ in (traffic.request(random.Random(seed)) for seed in range(500))) > 2048


def test_growth_is_between_the_second_and_the_last_quarter():
    warming_up = [1000.0 if second >= 20 else 10.0 * second for second in range(101)]
    assert soak.growth(warming_up) == 0
    leaking = [1000 + 2.0 * second for second in range(101)]
    assert soak.growth(leaking) == pytest.approx(100, abs=3)
    assert soak.growth([None, *leaking, None]) == soak.growth(leaking)
    assert soak.growth([None] * 101) is None
    assert soak.growth(leaking[:15]) is None and soak.growth(leaking[:16]) == pytest.approx(16)


def test_numbers_of_sglang_are_read_too():
    about = {"output_token_logprobs": [[-0.5, 7, None]], "completion_tokens": 12}
    about["output_top_logprobs"] = [[[-0.5, 7, None], [None, 8, None]]]
    assert ENGINES["sglang"].tokens_in({"meta_info": about}, 5) == 12
    with pytest.raises(client.FailedRequest, match="got None"):
        load.must_be_finite(ENGINES["sglang"], {"meta_info": about})


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
def test_lines_of_a_log(tmp_path, line, bad):
    path = tmp_path / "log"
    path.write_text(f"ERROR before\n{line}\nERROR half of a li")
    log = soak.Log(path, len("ERROR before\n"))
    assert log.read() == ([line] if bad else []) and log.read() == []
