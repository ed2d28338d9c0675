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
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "ETAP_E2E_PROCESS"
TAIL_LINES = 30
FIRST_ERRORS = 6
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception|Exit)\b: .+")
GRACE_SECONDS = 10
RERUN = Path(__file__).with_name("rerun.py")


class Failed(RuntimeError):
    """A process ended, or did not do in time, what it was started for; the text has the end of its log."""


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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no second Ctrl-C cut the cleaning up short."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Found:
    """A line of the table of processes."""

    parent: int
    session: int


def _processes() -> dict[int, Found]:
    """Every process that runs, zombies left out."""
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it may end while it is looked at
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    table[int(folder.name)] = Found(int(parent), int(session))
    return table


def _has(pid: int, variable: bytes) -> bool:
    with suppress(OSError):  # others' processes are not ours to read
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


class Process:
    """A process in a group of its own, known by a mark that everything it starts inherits."""

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
        self.stdin = self._process.stdin

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def running(self) -> list[int]:
        """What is left of it: its session, its descendants, and whatever carries its mark.

        One sign is not enough: a child may open a session of its own, an orphan has another parent, and a process that
        gives itself a title, as the engines' workers do, overwrites the place where its mark could be read.
        """
        table = _processes()
        family, before = {self.pid}, 0
        while len(family) > before:
            before = len(family)
            family |= {pid for pid, found in table.items() if found.parent in family}
        wanted = f"{MARK}={self.mark}".encode()
        return [pid for pid, found in table.items() if pid in family or found.session == self.pid or _has(pid, wanted)]

    def _signal_all(self, number: int) -> None:
        for pid in self.running():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End it and all that carries its mark: politely, and after a while not."""
        with uninterrupted():
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


@contextmanager
def server(command: list[str], url: str, log: Path, environment: dict[str, str], seconds: float) -> Iterator[Process]:
    """A server whose /health answers; it ends with the block. Raises Failed when it does not come up in `seconds`."""
    process = Process(command, log, environment)
    try:
        _wait_for_health(process, url, seconds)
        yield process
        if (code := process.ended()) is not None:
            raise Failed(f"the server ended with {code} while it was in use:\n{tail(log)}")
    finally:
        process.end()


def _wait_for_health(process: Process, url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (code := process.ended()) is not None:
            raise Failed(f"the server ended with {code}:\n{tail(process.log)}")
        # Any answer with an error status comes as an HTTPError, which is a URLError.
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.25)
    raise Failed(f"the server was not ready after {seconds:.0f} s:\n{tail(process.log)}")


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
