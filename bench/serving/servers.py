"""An engine's server that is ready, runs the attention backend that it should, and is gone after the block."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common.provenance import as_from_here
from bench.serving import client
from bench.serving.client import Failed
from bench.serving.engines import Engine, Serving, cache_lines
from bench.serving.lifecycle import Process, free_port, memory_given_back, server, tail


@dataclass(frozen=True)
class Served:
    """A running server; `about` is what a results file says of it."""

    engine: Engine
    url: str
    log: Path
    process: Process
    about: dict

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def ask(self, bodies: list[dict], concurrency: int, seconds: float) -> list[dict]:
        """Replies to all completions, `concurrency` at a time; see `client.ask_all`."""
        return client.ask_all(self.url + self.engine.path, bodies, concurrency, seconds)

    def metrics(self) -> dict[str, float]:
        return client.metrics(self.url)

    def must_say(self, words: str) -> None:
        """Raise Failed unless the log has these words."""
        if words not in self.text():
            raise Failed(f"the server's log does not say {words!r}:\n{tail(self.log)}")


@contextmanager
def served(
    engine: Engine,
    serving: Serving,
    backend: str,
    flags: list[str],
    *,
    log: Path,
    seconds: float,
    about: dict,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Served]:
    """A server for the block, ready within `seconds`. Its command, log, cache and time to be ready go into `about`.

    Raises Failed when it does not come up, does not say that it runs this attention backend, or ends in the block.
    """
    port = free_port()
    url, command = f"http://127.0.0.1:{port}", engine.server(python, serving, backend, port, flags)
    log.unlink(missing_ok=True)
    about |= {"command": as_from_here(shlex.join(["python", *command[1:]])), "log": str(log)}
    begin = time.monotonic()
    with memory_given_back(), server(command, url, log, environment or {}, seconds) as process:
        about["seconds_to_ready"] = round(time.monotonic() - begin, 1)
        found = Served(engine, url, log, process, about)
        about["cache"] = cache_lines(found.text())
        if not engine.in_use(backend, found.text()):
            raise Failed(f"the server's log does not say that {backend} is in use:\n{tail(log)}")
        yield found
