"""A small HTTP server where an engine's would be, and what is left of it."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.serving.engines import ENGINES

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

# What programs in vLLM's place begin with: flags of its command line, replies in its format. They end with
# serve(Handler).
IN_VLLMS_PLACE = """
import http.server, json, os, sys, threading, time
def flag(name): return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else "1"
fault = os.environ.get("FAULT", "")

class Replying(http.server.BaseHTTPRequestHandler):
    def reply(self, text, kind):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def count(self, counts):
        self.reply("".join(f"vllm:{name}_total {count}\\n" for name, count in counts.items()), "text/plain")

    def asked(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body, body.get("vllm_xargs", {}).get("forced_tokens")

    def answer(self, tokens, value, second):
        names = [f"token_id:{token}" for token in tokens]
        logprobs = {"tokens": names, "token_logprobs": [value] * len(names)}
        logprobs["top_logprobs"] = [{name: value, "token_id:9999": second} for name in names]
        self.reply(json.dumps({"choices": [{"logprobs": logprobs}]}), "application/json")

    def log_message(self, *_): pass

class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
def serve(handler): Server(("127.0.0.1", int(flag("--port"))), handler).serve_forever()
"""

# Answers in vLLM's format to vLLM's command line, and says with which layout and variables it was started. FAULT names
# a layout, tp2 or dcp2, that answers one prompt in ten wrongly, or is "silent": the second node names no backend then.
ANSWERING = (
    IN_VLLMS_PLACE
    + """
node = "--headless" in sys.argv
layout = "dcp2" if flag("--decode-context-parallel-size") == "2" else f"tp{flag('--tensor-parallel-size')}"
if not (node and fault == "silent"):
    print(f"Using AttentionBackendEnum.{flag('--attention-backend')} backend.")
print("GPU KV cache size: 64 tokens", layout, os.environ.get("NCCL_NVLS_ENABLE"), flush=True)
if node: time.sleep(600)
COUNTED = "num_preemptions", "prefix_cache_hits", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
count = 0

class Handler(Replying):
    def do_GET(self):
        self.count(dict.fromkeys(COUNTED, count))

    def do_POST(self):
        global count
        count += 1
        asked, forced = self.asked()
        first = sum(asked["prompt"]) % 1000
        wrong = fault == layout and first % 10 == 0
        tokens = forced or [(first + n + wrong) % 1000 for n in range(asked["max_tokens"])]
        self.answer(tokens, -0.1, -2.1)
serve(Handler)
"""
)


class Written:
    """A model's folder, which needs no tokenizer here."""

    def __init__(self, model: Path | str):
        self.model = str(model)

    def write(self) -> None:
        Path(self.model).mkdir(parents=True)
        (Path(self.model) / "config.json").write_text("{}")


def stand_in(monkeypatch, folder: Path, program: str) -> None:
    """Let this program be started where vLLM's server would be."""
    file, vllm = folder / "server.py", type(ENGINES["vllm"])
    file.write_text(program)
    command = vllm.server
    monkeypatch.setattr(vllm, "server", lambda *of: [sys.executable, str(file), *command(*of)[1:]])


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children_in(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child ")]
