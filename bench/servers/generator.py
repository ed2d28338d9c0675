"""An engine's load generator in a process that stays. This module imports little, because that process imports it."""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

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
        self._pool: ProcessPoolExecutor | None = None

    def run(self, arguments: list[str], seconds: float) -> None:
        """One run with these arguments. Raises Failed unless it ends well within `seconds`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self._pool is None:
            options = {"mp_context": get_context("spawn"), "initializer": _into, "initargs": (self.log,)}
            self._pool = ProcessPoolExecutor(1, **options)
        try:
            problem = self._pool.submit(_run, self.module, arguments).result(seconds)
        except TimeoutError:
            problem = f"took more than {seconds:.0f} s"
        except BrokenProcessPool:
            problem = "ended"
        if problem:
            self.end()
            raise Failed(f"the load generator failed ({problem}):\n{tail(self.log, 15)}")

    def end(self) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _into(log: Path) -> None:
    os.setpgrp()  # Ctrl-C is for the parent, which ends this process
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _run(module: str, arguments: list[str]) -> str | None:
    """Run a module as the main program; what went wrong."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return f"exit code {end.code}" if end.code else None
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        sys.stdout.flush()
    return None
