"""A small HTTP server where an engine's would be, and what is left of it."""

from __future__ import annotations

from pathlib import Path

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
