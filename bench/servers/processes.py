"""Processes that end whatever ends the run: servers with all that they start, and a load generator."""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil

from bench.common import gpus
from bench.common.provenance import as_from_here
from bench.common.stopping import signals_go_to
from bench.servers import client
from bench.servers.client import Failed
from bench.servers.engines import Serving, Sglang, Variant, Vllm, cache_lines, configuration
from bench.servers.generator import tail

MARK = "ETAP_BENCH_PROCESS"
GRACE_SECONDS = 10
MEMORY_SECONDS, MEMORY_MIB = 30, 2048
READY_SECONDS = 600
SERVER_PORTS = (20_000, 32_000)
_given_ports: set[int] = set()


def free_port() -> int:
    """A port on which nothing listens, and which no earlier call gave.

    It lies below the ports that Linux gives to clients: one of those may be taken before a server listens on it.
    """
    while True:
        port = random.randrange(*SERVER_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


class Process:
    """A process in its own session, and a mark in the environment that all its descendants inherit."""

    alive: ClassVar[set[Process]] = set()

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]):
        self.log, self.mark = log, uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        self._output = log.open("a")
        print(f"$ {shlex.join(command)}", file=self._output, flush=True)
        environment = {**os.environ, **environment, MARK: self.mark}
        options = {"stdout": self._output, "stderr": subprocess.STDOUT, "start_new_session": True}
        self._process = subprocess.Popen(command, env=environment, **options)
        self._about, self.pid = psutil.Process(self._process.pid), self._process.pid
        self.alive.add(self)

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def running(self) -> list[int]:
        """Ids of what is left of it: its session, its descendants, and processes with its mark.

        One sign is not enough: children open sessions, orphans change parents, and a process that sets its title, as
        the engines' workers do, overwrites its environment.
        """
        family = {self.pid}
        with suppress(psutil.Error):
            family |= {child.pid for child in self._about.children(recursive=True)}
        return [process.pid for process in psutil.process_iter() if self._owns(process, family)]

    def _owns(self, process: psutil.Process, family: set[int]) -> bool:
        with suppress(psutil.Error, OSError):  # it may end meanwhile, or belong to another user
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if process.pid in family or os.getsid(process.pid) == self.pid:
                return True
            return process.environ().get(MARK) == self.mark
        return False

    def host_mib(self) -> float:
        """Resident memory; shared pages count for each process."""
        total = 0
        for pid in self.running():
            with suppress(psutil.Error):
                total += psutil.Process(pid).memory_info().rss
        return total / 2**20

    def end(self) -> None:
        """End it and everything of it: with SIGTERM, after GRACE_SECONDS with SIGKILL."""
        with signals_go_to(signal.SIG_IGN):  # a second Ctrl-C does not interrupt this
            deadline = time.monotonic() + GRACE_SECONDS
            self._signal(signal.SIGTERM)
            while self.running():
                self.ended()
                if time.monotonic() > deadline:
                    self._signal(signal.SIGKILL)
                time.sleep(0.1)
            self._process.wait()
            self._output.close()
            self.alive.discard(self)

    def _signal(self, number: int) -> None:
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def end_all() -> None:
    """End every process, those of other threads too."""
    for process in list(Process.alive):
        process.end()


@dataclass(frozen=True)
class Server:
    """A running server; `about` goes into the results file."""

    engine: Vllm | Sglang
    url: str
    process: Process
    about: dict = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        return self.process.log.read_text(errors="replace")

    def ask(self, bodies: list[dict], concurrency: int, seconds: float = 300) -> list[dict]:
        """Replies to completions, see `client.ask_all`."""
        return client.ask_all(self.url + self.engine.path, bodies, concurrency, seconds)

    def metrics(self) -> dict[str, float]:
        return client.metrics(self.url)

    def counters(self) -> dict[str, float | None]:
        found = self.metrics()
        return {name: found.get(sample) for name, sample in self.engine.counters.items()}


@contextmanager
def served(
    engine: Vllm | Sglang,
    serving: Serving,
    variant: Variant,
    flags: list[str],
    *,
    log: Path,
    environment: dict[str, str],
    seconds: float = READY_SECONDS,
) -> Iterator[Server]:
    """A server for the block.

    Raises Failed when it is not ready within `seconds`, does not log that it runs this backend with this cache, or ends
    in the block.
    """
    port, before, begin = free_port(), gpus.used_mib(), time.monotonic()
    command = engine.server(sys.executable, serving, variant, port, flags)
    log.unlink(missing_ok=True)
    process = Process(command, log, {**engine.environment(serving), **variant.environment, **environment})
    server = Server(engine, f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server, begin + seconds)
        server.about["command"] = as_from_here(shlex.join(["python", *command[1:]]))
        server.about["seconds_to_ready"] = round(time.monotonic() - begin, 1)
        server.about["cache"] = cache_lines(server.log())
        _must_run(server, variant, configuration(serving.model))
        yield server
        if (code := process.ended()) is not None:
            raise Failed(f"{variant.backend}: the server ended with {code} while it was in use:\n{tail(log)}")
    finally:
        process.end()
        if not Process.alive:
            _wait_for_memory(before)


def _wait_until_ready(server: Server, end: float) -> None:
    while not client.is_healthy(server.url):
        if (code := server.process.ended()) is not None:
            raise Failed(f"the server ended with {code}:\n{tail(server.process.log)}")
        if time.monotonic() > end:
            raise Failed(f"the server was not ready in time:\n{tail(server.process.log)}")
        time.sleep(0.25)


def _must_run(server: Server, variant: Variant, config: dict) -> None:
    if not server.engine.in_use(variant, server.log()):
        raise Failed(f"the log does not say that {variant.backend} is in use:\n{tail(server.process.log)}")
    if (proof := variant.proof(config)) not in server.log():
        raise Failed(f"the log does not say {proof!r}:\n{tail(server.process.log)}")


def _wait_for_memory(before: float | None) -> None:
    """The driver frees memory a moment after the last process has ended."""
    end = time.monotonic() + MEMORY_SECONDS
    while before is not None and (gpus.used_mib() or 0) > before + MEMORY_MIB and time.monotonic() < end:
        time.sleep(0.5)
