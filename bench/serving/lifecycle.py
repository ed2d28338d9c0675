"""Processes that end: a server and its load generator, each with all that they start, whatever ends the run."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import psutil

from bench.common import gpus
from bench.serving import client
from bench.serving.client import Failed
from bench.common.stopping import signals_go_to

MARK = "ETAP_LAB_PROCESS"
TAIL_LINES = 30
FIRST_ERRORS = 6
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception|Exit)\b: .+")
GRACE_SECONDS = 10
MEMORY_SECONDS, MEMORY_MIB = 30, 2048
RERUN = Path(__file__).with_name("rerun.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, after the errors further up: what ends a server is often said by a child, long before."""
    text = log.read_text(errors="replace").splitlines()
    end, above = text[-lines:], text[:-lines]
    errors = dict.fromkeys(found[0] for line in above if (found := ERROR.search(line)))
    return "\n".join([*(f"error above: {error}" for error in list(errors)[:FIRST_ERRORS]), *end])


class Process:
    """A process in a group of its own, known by a mark that everything it starts inherits."""

    alive: ClassVar[set[Process]] = set()
    """Those that have not been ended."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None, **options):
        self.command, self.log, self.mark = command, log, uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        self._output = log.open("a")
        print(f"$ {shlex.join(command)}", file=self._output, flush=True)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {}), MARK: self.mark},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        self.alive.add(self)
        self._about = psutil.Process(self._process.pid)
        self.pid, self.stdin = self._process.pid, self._process.stdin

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def running(self) -> list[int]:
        """What is left of it: its session, its descendants, and whatever carries its mark.

        One sign is not enough: a child may open a session of its own, an orphan has another parent, and a process that
        gives itself a title, as the engines' workers do, overwrites the place where its mark could be read.
        """
        family = {self.pid}
        with suppress(psutil.Error):
            family |= {child.pid for child in self._about.children(recursive=True)}
        return [process.pid for process in psutil.process_iter() if self._owns(process, family)]

    def _owns(self, process: psutil.Process, family: set[int]) -> bool:
        with suppress(psutil.Error, OSError):  # it may end while it is looked at, and others' are not ours to read
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if process.pid in family or os.getsid(process.pid) == self.pid:
                return True
            return process.environ().get(MARK) == self.mark
        return False

    def host_mib(self) -> float:
        """Resident memory of all of it, what its processes share counted for each."""
        total = 0
        for pid in self.running():
            with suppress(psutil.Error):
                total += psutil.Process(pid).memory_info().rss
        return total / 2**20

    def _signal_all(self, number: int) -> None:
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End it and all that carries its mark: politely, and after a while not."""
        with signals_go_to(signal.SIG_IGN):  # no second Ctrl-C cuts the cleaning up short
            self._signal_all(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while self.running() and time.monotonic() < deadline:
                self.ended()
                time.sleep(0.1)
            while self.running():
                self._signal_all(signal.SIGKILL)
                self.ended()
                time.sleep(0.05)
            self._process.wait()
            self._output.close()
            self.alive.discard(self)


def end_all() -> None:
    """End every process that other threads have started and still wait for."""
    for process in list(Process.alive):
        process.end()


@contextmanager
def server(command: list[str], url: str, log: Path, environment: dict[str, str], seconds: float) -> Iterator[Process]:
    """A server whose /health answers; it ends with the block. Raises Failed when it does not come up in `seconds`, or
    ends in the block."""
    process = Process(command, log, environment)
    try:
        until_healthy([process], url, seconds)
        yield process
        if (code := process.ended()) is not None:
            raise Failed(f"the server ended with {code} while it was in use:\n{tail(log)}")
    finally:
        process.end()


def until_healthy(processes: list[Process], url: str, seconds: float) -> None:
    """Wait for /health of a server that is one or several processes. Raises Failed when one ends or it takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in processes:
            if (code := process.ended()) is not None:
                raise Failed(f"the server ended with {code}:\n{tail(process.log)}")
        if client.is_healthy(url):
            return
        time.sleep(0.25)
    tails = "\n".join(tail(process.log) for process in processes)
    raise Failed(f"the server was not ready after {seconds:.0f} s:\n{tails}")


@contextmanager
def memory_given_back() -> Iterator[None]:
    """After the block, wait until the visible GPUs have the memory back; the driver takes a moment after a process."""
    before = gpus.used_mib()
    try:
        yield
    finally:
        end = time.monotonic() + MEMORY_SECONDS
        while before is not None and (gpus.used_mib() or 0) > before + MEMORY_MIB and time.monotonic() < end:
            time.sleep(0.5)


class Generator:
    """A load generator that stays loaded between its runs; it starts anew after one that failed."""

    def __init__(self, python: str, module: str, log: Path, environment: dict[str, str]):
        self.python, self.module, self.log, self.environment = python, module, log, environment
        self._process: Process | None = None
        self._answers: int | None = None

    def _start(self) -> Process:
        self._answers, reply = os.pipe()
        # By its path: the engine's Python may not have this package, whose folder on its path would hide the engine.
        program = f"import runpy; runpy.run_path({str(RERUN)!r}, run_name='__main__')"
        command = [self.python, "-c", program, self.module, str(reply)]
        options = {"stdin": subprocess.PIPE, "pass_fds": (reply,), "text": True}
        try:
            return Process(command, self.log, self.environment, **options)
        finally:
            os.close(reply)

    def run(self, arguments: list[str], seconds: float) -> None:
        """One run with these arguments. Raises Failed when it does not end well within `seconds`."""
        if self._process is None:
            self._process = self._start()
        try:
            print(json.dumps(arguments), file=self._process.stdin, flush=True)
            ready, _, _ = select.select([self._answers], [], [], seconds)
            answer = os.read(self._answers, 65536) if ready else None
        except BrokenPipeError:
            answer = b""
        if not answer:
            what = "ended" if answer == b"" else f"took more than {seconds:.0f} s"
            self.end()
            raise Failed(f"the load generator {what}:\n{tail(self.log)}")
        if problem := json.loads(answer):
            raise Failed(f"the load generator failed ({problem}):\n{tail(self.log, 15)}")

    def end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process.stdin.close()
            os.close(self._answers)
            self._process = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_) -> None:
        self.end()
