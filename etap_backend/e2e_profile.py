"""Attention's share of a decode step, from the trace of torch's profiler that both engines can write."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STEPS = 10
OUTPUT_TOKENS = 1024
EXPORT_SECONDS = 30
SECONDS = 20  # that it takes in all, about
LISTED = 25
ATTENTION = re.compile(
    r"\betap::"
    r"|flash_fwd|get_mla_metadata|mla_combine|splitkv"  # FlashMLA
    r"|FlashAttnFwd|prepare_varlen_num_blocks"  # FlashAttention 3
    r"|BatchMLAPage|PersistentVariableLengthMergeStates"  # FlashInfer
)
"""Kernels of decode attention: schedule, the kernel, the merging of split requests. Not the projections around it, not
the writing of the cache, not a concatenation of queries."""


def flags(engine: str, folder: Path) -> list[str]:
    """What a server must be started with so that it can be profiled."""
    if engine != "vllm":
        return []
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "max_iterations": STEPS, "ignore_frontend": True}
    quiet = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}
    return ["--profiler-config", json.dumps(config | quiet)]


def _post(url: str, body: dict | None = None) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=60).close()


@contextmanager
def started_later(engine: str, url: str, folder: Path, seconds: float) -> Iterator[None]:
    """Start the server's profiler so many seconds after the block begins, for STEPS steps, and end it with the block.
    Raises OSError when the server does not take it."""
    steps = {"output_dir": str(folder), "num_steps": STEPS, "activities": ["CPU", "GPU"]}
    steps |= {"with_stack": False, "record_shapes": False}
    body = None if engine == "vllm" else steps
    problems: list[OSError] = []
    for old in folder.rglob("*.json.gz"):
        old.unlink()

    def start() -> None:
        try:
            _post(f"{url}/start_profile", body)
        except OSError as error:
            problems.append(error)

    timer = threading.Timer(max(0.0, seconds), start)
    timer.start()
    try:
        yield
        timer.join()
    finally:
        timer.cancel()
    if problems:
        raise problems[0]
    if engine == "vllm":  # SGLang's ends itself after its steps
        _post(f"{url}/stop_profile")


def read(folder: Path, seconds: float) -> dict:
    """The share of the trace that appears in `folder`. Raises ValueError when none does in time, or none with decode
    attention."""
    deadline = time.monotonic() + seconds
    while True:
        for path in sorted(folder.rglob("*.json.gz")):
            with suppress(OSError, EOFError, ValueError), gzip.open(path) as file:  # it may not be whole yet
                return share_of(json.load(file)["traceEvents"]) | {"trace": path.name}
        if time.monotonic() > deadline:
            raise ValueError(f"no trace in {folder} after {seconds:.0f} s")
        time.sleep(0.5)


def share_of(events: list[dict]) -> dict:
    """GPU time of all kernels and of attention's, in milliseconds, and the longest kernels by name."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            times[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    of_attention = {name: time for name, time in times.items() if ATTENTION.search(name)}
    kernels = [
        {"name": name[:160], "ms": round(time / 1e3, 4), "calls": calls[name], "attention": name in of_attention}
        for name, time in times.most_common(LISTED)
    ]
    total, attention = sum(times.values()), sum(of_attention.values())
    return {
        "attention_share": attention / total if attention else None,
        "attention_ms": round(attention / 1e3, 4),
        "kernels_ms": round(total / 1e3, 4),
        "kernels": kernels,
    }


def line(found: dict) -> str:
    if "error" in found:
        return f"profile: {found['error'].splitlines()[0]}"
    if found["attention_share"] is None:
        return "profile: no attention kernel that is known by name"
    return f"attention {found['attention_share']:.1%} of {found['kernels_ms']:.1f} ms of kernels in the profile"
