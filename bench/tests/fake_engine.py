"""A small HTTP server in vLLM's place: its command line, log, metrics and replies; FAULT says what it does wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.servers.engines import Vllm

ABOUT = {"date": "2026-01-01", "gpu": "none", "versions": {}, "commit": "c", "command": "x", "note": ""}
# Tokens follow from the prompt, log-probabilities too, with a little noise. Faults `late` are in the middle of a soak.
SERVER = r"""
import http.server, json, os, random, subprocess, sys, threading, time
def flag(name): return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else "1"
faults, backend = os.environ.get("FAULT", "").split(","), flag("--attention-backend")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, "ERROR before it was ready", flush=True)
if f"{backend} at start" in faults: sys.exit("ValueError: out of luck")
print(f"Using AttentionBackendEnum.{'OTHER' if 'other backend' in faults else backend} backend.")
print("GPU KV cache size: 100,000 tokens", flush=True)
print("" if "--enforce-eager" in sys.argv or "graphs" in faults else "Capturing CUDA graphs (FULL)", flush=True)
count, hits, queries, seen, hoard, lock = 0, 0, 0, set(), [], threading.Lock()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {"prefix_cache_hits": hits, "prefix_cache_queries": queries}
        found |= {"num_preemptions": count * ("not preempted" not in faults)}
        text = "".join(f'vllm:{name}_total{{e="0"}} {number}\n' for name, number in found.items())
        self.reply(text + f"vllm:num_requests_running {3 if 'left over' in faults else 0}\n", "text/plain")

    def reply(self, text, kind="application/json", code=200):
        self.send_response(code)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        global count, hits, queries
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, forced = asked["prompt"], asked.get("allowed_token_ids")
        with lock:
            count, queries, place = count + 1, queries + len(prompt), (asked.get("cache_salt"), *prompt)
            late, turn, again = count > 70, count % 10, place in seen
            hits += (len(prompt) - 1) // 64 * 64 * again * ("cache" not in faults)
            seen.add(place)
            if late and "server" in faults or "dies" in faults: os._exit(3)
            if late and "log" in faults: print("ValueError: Traceback (most recent call last):", flush=True)
            if late and "host memory" in faults: hoard.append(bytearray(b"x" * 2**19))
        if late and turn == 0 and "HTTP error" in faults: return self.reply("out of luck", code=500)
        if late and turn == 1 and "hung" in faults: time.sleep(600)
        wrong = late and "another token" in faults
        tokens = [(sum(prompt) + n + (n > 3 and wrong)) % 1000 for n in range(asked["max_tokens"])]
        tokens = forced * asked["max_tokens"] if forced else tokens
        moved = 2.0 * (backend in faults or again and ("again" in faults or f"{backend} again" in faults))
        moved += 3.0 * (late and "other logprobs" in faults)
        moved += sum(prompt) % 97 / 10 if "blind" not in faults else 0
        def part(tokens):
            values = [-1 - moved - 0.001 * random.random() for _ in tokens]
            if late and turn == 2 and "not finite" in faults: values[-1] = float("nan")
            names = [f"token_id:{token}" for token in tokens]
            best = [{name: value, "token_id:9999": value - 2} for name, value in zip(names, values)]
            logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": best}
            return json.dumps({"choices": [{"logprobs": logprobs}]}).replace("NaN", "null")
        if late and turn == 3 and "incomplete" in faults: tokens = tokens[1:]
        if not asked.get("stream"): return self.reply(part(tokens))
        parts = [*map(part, ([token] for token in tokens)), *([] if "broken" in faults else ["[DONE]"])]
        self.reply("".join(f"data: {text}\n\n" for text in parts))

    def log_message(self, *_): pass

class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    def handle_error(self, *_): pass
Server(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()
"""


def stand_in(monkeypatch, folder: Path, faults: str = "") -> None:
    """Start SERVER where vLLM's server would be."""
    program, command = folder / "server.py", Vllm.server
    program.write_text(SERVER)
    monkeypatch.setattr(Vllm, "server", lambda *of: [sys.executable, str(program), *command(*of)[1:]])
    monkeypatch.setenv("FAULT", faults)


def children(folder: Path) -> list[int]:
    """Processes that the servers of these logs started and that still run."""
    lines = [line for log in folder.rglob("*.log") for line in log.read_text().splitlines()]
    return [pid for pid in (int(line.split()[1]) for line in lines if line.startswith("child ")) if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
