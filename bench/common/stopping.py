"""Ends a long run early: a signal or a time limit becomes one exception, and what was measured stays."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopped(KeyboardInterrupt):
    """The run ends early; the text names the cause: "by SIGTERM", "by the time limit of 60 s"."""


@contextmanager
def stopping(time_limit: float | None) -> Iterator[Callable[[], None]]:
    """Turn SIGTERM, Ctrl-C and the time limit in seconds into `Stopped`; call the yielded function between readings."""
    deadline = None if time_limit is None else time.monotonic() + time_limit

    def stop(number, frame):
        raise Stopped(f"by {signal.Signals(number).name}")

    def check():
        if deadline is not None and time.monotonic() > deadline:
            raise Stopped(f"by the time limit of {time_limit:g} s")

    with signals_go_to(stop):
        yield check


@contextmanager
def signals_go_to(handler: Callable | int) -> Iterator[None]:
    """Handle SIGTERM and Ctrl-C so in the block; outside the main thread, which alone gets signals, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
