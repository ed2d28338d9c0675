"""Attention's share of a decode step, from the trace of torch's profiler that both engines can write."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.e2e.results_file import Profile
from bench.serving import client

STEPS = 10
OUTPUT_TOKENS = 1024
LOAD_SECONDS = 8  # of decoding while the profiler starts and records, within OUTPUT_TOKENS
EXPORT_SECONDS = 30
LISTED = 25
ATTENTION = re.compile(
    r"\betap::"
    r"|flash_fwd|get_mla_metadata|mla_combine|splitkv"  # FlashMLA
    r"|FlashAttnFwd|prepare_varlen_num_blocks"  # FlashAttention 3
    r"|BatchMLAPage|PersistentVariableLengthMergeStates"  # FlashInfer
    r"|sparse_attn_fwd|convert_req_index"  # FlashMLA's for sparse prefill; rows of positions
)
"""Kernels of decode attention: schedule, the kernel, the merging of split requests; of sparse attention also what makes
rows of the cache of positions, as ours does within. Not the projections around it, not the writing of the cache, not a
concatenation of queries, not the indexer."""
STEP = re.compile(r"execute_(\d+_)?context_\d|step\[")
PREFILL = re.compile(r"execute_(\d+_)?context_[1-9]|step\[(EXTEND|MIXED|SPLIT_PREFILL)\b")
"""Marks of steps, and of those that compute prompts: `execute_context_0(0)_generation_16(16)` in vLLM, `step[DECODE
bs=16]` in SGLang."""


def flags(engine: str, folder: Path) -> list[str]:
    """What a server must be started with so that it can be profiled."""
    if engine != "vllm":
        return []
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "max_iterations": STEPS, "ignore_frontend": True}
    quiet = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}
    return ["--profiler-config", json.dumps(config | quiet)]


@contextmanager
def started_later(engine: str, url: str, folder: Path, seconds: float) -> Iterator[None]:
    """Start the server's profiler so many seconds after the block begins, for STEPS steps, and end it with the block.
    Raises Failed when the server does not take it."""
    steps = {"output_dir": str(folder), "num_steps": STEPS, "activities": ["CPU", "GPU"]}
    steps |= {"with_stack": False, "record_shapes": False}
    body = None if engine == "vllm" else steps
    problems: list[client.Failed] = []
    for old in folder.rglob("*.json.gz"):
        old.unlink()

    def start() -> None:
        try:
            client.post(f"{url}/start_profile", body)
        except client.Failed as error:
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
        client.post(f"{url}/stop_profile")


def read(folder: Path, seconds: float) -> Profile:
    """The share of the trace that appears in `folder`. Raises ValueError when none does in time, or none with decode
    attention."""
    deadline = time.monotonic() + seconds
    while True:
        for path in sorted(folder.rglob("*.json.gz")):
            with suppress(OSError, EOFError, ValueError), gzip.open(path) as file:  # it may not be whole yet
                return share_of(json.load(file)["traceEvents"]).model_copy(update={"trace": path.name})
        if time.monotonic() > deadline:
            raise ValueError(f"no trace in {folder} after {seconds:.0f} s")
        time.sleep(0.5)


def share_of(events: list[dict]) -> Profile:
    """GPU time of all kernels and of attention's, in milliseconds, and the longest kernels by name.

    Of decode steps only, where the engine marks its steps; `steps` is their number, or None where it does not. Kernels
    run beside each other, on several streams or started early to wait for the one before (programmatic dependent
    launch), so times are those of united intervals: what `kernels` has of one is what none that began before it covers.
    """
    kernels, steps = _in_decode_steps(events)
    of_attention = [kernel for kernel in kernels if ATTENTION.search(kernel["name"])]
    times: Counter[str] = Counter()
    for kernel, time_alone in zip(kernels, _times_alone(kernels), strict=True):
        times[kernel["name"]] += time_alone
    calls = Counter(kernel["name"] for kernel in kernels)
    longest = [
        {"name": name[:160], "ms": _ms(time_of_it), "calls": calls[name], "attention": bool(ATTENTION.search(name))}
        for name, time_of_it in times.most_common(LISTED)
    ]
    total, attention = sum(times.values()), sum(_times_alone(of_attention))
    return Profile(
        attention_share=attention / total if attention else None,
        attention_ms=_ms(attention),
        kernels_ms=_ms(total),
        steps=steps,
        kernels=longest,
    )


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 4)


def _in_decode_steps(events: list[dict]) -> tuple[list[dict], int | None]:
    """Kernels of decode steps by their begin, and how many steps; all kernels and None where no step is marked.

    A kernel is of the step that was marked last before it on its GPU: what samples the tokens lies behind the mark.
    """
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    marks = [event for event in events if event.get("cat") == "gpu_user_annotation" and STEP.match(event["name"])]
    if not marks:
        return kernels, None
    latest: dict[int, dict] = {}
    kept, steps = [], set()
    for event in sorted(marks + kernels, key=lambda event: event["ts"]):  # at one time a mark comes before its kernel
        if event["cat"] != "kernel":
            latest[event["pid"]] = event
        elif (mark := latest.get(event["pid"])) and not PREFILL.match(mark["name"]):
            kept.append(event)
            steps.add(mark["args"]["External id"])
    return kept, len(steps)


def _times_alone(kernels: list[dict]) -> list[float]:
    """Of each of these kernels, by their begin, the microseconds that none before it on its GPU covers."""
    ends: Counter[int] = Counter()
    times = []
    for kernel in kernels:
        end = kernel["ts"] + kernel["dur"]
        times.append(max(0.0, end - max(kernel["ts"], ends[kernel["pid"]])))
        ends[kernel["pid"]] = max(ends[kernel["pid"]], end)
    return times


def line(found: Profile) -> str:
    if found.error:
        return f"profile: {found.error.splitlines()[0]}"
    if found.steps == 0:
        return "profile: no decode step in the trace"
    if found.attention_share is None:
        return "profile: no attention kernel that is known by name"
    of_what = f"{found.kernels_ms:.1f} ms of kernels in the profile"
    if found.steps:
        of_what = f"{found.kernels_ms / found.steps:.2f} ms of kernels a step, {found.steps} steps profiled"
    return f"attention {found.attention_share:.1%} of {of_what}"
