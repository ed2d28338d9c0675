"""Ends a long run early: a signal becomes an exception, and what was measured stays."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class Stopped(KeyboardInterrupt):
    """The run ends early; the text names the cause: "by SIGTERM"."""


def stopping() -> AbstractContextManager[None]:
    """Turn SIGTERM and Ctrl-C in the block into `Stopped`."""

    def stop(number, frame):
        raise Stopped(f"by {signal.Signals(number).name}")

    return signals_go_to(stop)


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
