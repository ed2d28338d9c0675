"""An engine's load generator in a process that stays. This module imports little, because that process imports it."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from bench.servers.client import Failed

TAIL_LINES, FIRST_ERRORS = 30, 6
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception|Exit)\b: .+")


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, after the first errors above it: a child often logs the cause long before the end."""
    text = log.read_text(errors="replace").splitlines()
    errors = dict.fromkeys(found[0] for line in text[:-lines] if (found := ERROR.search(line)))
    return "\n".join([*(f"error above: {error}" for error in list(errors)[:FIRST_ERRORS]), *text[-lines:]])


class Generator:
    """Runs a module as the main program again and again: its imports take longer than a reading."""

    def __init__(self, module: str, log: Path):
        self.module, self.log = module, log
        self._process: Any = None

    def run(self, arguments: list[str], seconds: float) -> None:
        """One run with these arguments. Raises Failed unless it ends well within `seconds`."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, end = context.Pipe()
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._process = context.Process(target=_generate, args=(self.module, self.log, end))
            self._process.start()
            end.close()
        problem = f"took more than {seconds:.0f} s"
        try:
            self._pipe.send(arguments)
            if self._pipe.poll(seconds) and (problem := self._pipe.recv()) is None:
                return
        except (EOFError, OSError):
            problem = "ended"
        self.end()
        raise Failed(f"the load generator failed ({problem}):\n{tail(self.log, 15)}")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _generate(module: str, log: Path, pipe) -> None:
    """Run a module as the main program with each list of arguments; reply None, or what went wrong."""
    os.setpgrp()  # Ctrl-C is for the parent, which ends this process
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    while True:
        sys.argv, problem = [module, *pipe.recv()], None
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            problem = f"exit code {end.code}" if end.code else None
        except Exception as error:  # whatever it raises is the reply
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        pipe.send(problem)
