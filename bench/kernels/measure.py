"""Measures rows: the time of one decode call on the GPU, beside its error against float64.

A CUDA graph of many calls is replayed, and its time is divided by the calls. The calls take copies of the cache in
turns that together exceed L2 by far. Graphs of all kernels take turns, replay by replay, so that drifting clocks affect
all alike. Outputs are NaN before the timed replays, and what these leave is compared with float64: a wrong call has no
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.floors import floor_for
from bench.kernels.grids import Workload
from bench.kernels.inputs import Pool, copies_of, inputs_of, truth, with_cache
from bench.kernels.providers import MATH_SUFFIX, OWN, Provider
from etap_backend.reference import relative_rmse
from support.held_sms import sms_held

H20_SMS = 78
MIN_CALLS = 4
# Calls per graph: 16, unless they would read more than this; the graph's start weighs little then, as in an engine.
USUAL_CALLS, USUAL_BYTES = 16, 10e9
# Relative RMSE, twice that of plain torch in bfloat16; ETAP's is between 1.6e-3 and 2.5e-3.
MAX_RMSE = 5e-3
# Products in e4m3: the root of twice the cosine difference allowed, 1e-3. Peers round as they like, up to this.
MAX_FP8_MATH_RMSE = 4.5e-2


@dataclass(frozen=True)
class Options:
    """How a run measures."""

    replays: int = 21
    validate: bool = True
    h20_proxy: bool = False
    behind: bool = False

    @property
    def num_sms(self) -> int | None:
        """CTAs of ETAP's launch; None for the device's multiprocessors."""
        return H20_SMS if self.h20_proxy else None


class Graph:
    """A CUDA graph of `calls` calls, replayed once, and the result of its last call."""

    def __init__(self, call: Callable[[int], Tensor], calls: int):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for warm_up in range(2):
                call(warm_up)
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                for index in range(calls):
                    self.result = call(index)
            except BaseException:
                with suppress(RuntimeError):  # a broken capture cannot be ended; the first error is the one to report
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        self.calls = calls
        self.call = call  # keeps the memory that the graph reads and writes
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.graph.replay()

    def replay(self) -> None:
        """Replay between two events, for `timing`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        self.events.append((begin, end))

    def timing(self) -> dict:
        """Median and interquartile range of microseconds per call."""
        us = [begin.elapsed_time(end) * 1e3 / self.calls for begin, end in self.events]
        quartiles = statistics.quantiles(us, n=4)
        return {"us": statistics.median(us), "iqr_us": quartiles[2] - quartiles[0], "replays": len(us)}


def calls_of(workload: Workload) -> int:
    """Calls of a graph: at least one on each copy of the cache."""
    return max(MIN_CALLS, copies_of(workload), min(USUAL_CALLS, int(USUAL_BYTES) // workload.bytes))


def max_rmse(name: str, provider: Provider) -> float:
    """The largest error that a kernel may have."""
    exact = (name in OWN or provider.build) and not name.endswith(MATH_SUFFIX)
    return MAX_RMSE if exact else MAX_FP8_MATH_RMSE


@dataclass
class Timed:
    """A kernel whose graphs are recorded."""

    graph: Graph
    behind: Graph | None

    def found(self) -> dict:
        """Its result in the row, after the timed replays."""
        behind = {"behind": self.behind.timing()} if self.behind else {}
        return {"state": "measured", **self.graph.timing(), **behind}


class Row:
    """One row's tensors, and the kernels on them."""

    def __init__(self, workload: Workload, pool: Pool, options: Options):
        self.workload, self.pool, self.options = workload, pool, options
        self.inputs = inputs_of(workload, options.num_sms)
        self.calls = calls_of(workload)
        self._truths: dict[bool, Tensor] = {}

    def truth(self, fp8: bool) -> Tensor:
        """The output of a graph's last call in float64, from an FP8 cache or a bfloat16 one."""
        if fp8 not in self._truths:
            copies = self.pool.copies(self.workload, fp8)
            self._truths[fp8] = truth(with_cache(self.inputs, fp8), copies[(self.calls - 1) % len(copies)])
        return self._truths[fp8]

    def record(self, provider: Provider) -> Timed:
        """Record a kernel's graphs. Raises NotImplementedError where it refuses the row."""
        fp8 = self.workload.fp8 and not provider.bf16_cache
        copies, spare = self.pool.copies(self.workload, fp8), torch.empty_like(self.inputs.q)
        with provider.active():
            call = provider.prepare(with_cache(self.inputs, fp8))

            def on_a_copy(index: int) -> Tensor:
                return call(*copies[index % len(copies)])

            def behind_a_kernel(index: int) -> Tensor:
                # That kernel's result might be needed, so no part of the call begins earlier. It computes, since the
                # copy engine would do a copy.
                torch.neg(self.inputs.q, out=spare)
                return on_a_copy(index)

            graph = Graph(on_a_copy, self.calls)
            return Timed(graph, Graph(behind_a_kernel, self.calls) if self.options.behind else None)

    def judged(self, name: str, provider: Provider, one: Timed) -> dict:
        """What the row says of a kernel: its error and times, or that its output is wrong."""
        if not self.options.validate:
            return one.found()
        truth, limit = self.truth(self.workload.fp8 and not provider.bf16_cache), max_rmse(name, provider)
        errors = [relative_rmse(graph.result, truth) for graph in (one.graph, one.behind) if graph]
        if all(error <= limit for error in errors):  # NaN is not
            return one.found() | {"relative_rmse": max(errors)}
        text = f"wrong result: relative RMSE against float64 {errors}, limit {limit:.1e}"
        return {"state": "failed", "error": text}

    def record_all(self, of: dict[str, Provider]) -> dict[str, Timed | dict]:
        """By column: what is to be timed, or what the row says of a kernel that refused or failed."""
        kernels = {}
        for name, provider in of.items():
            try:
                kernels[name] = self.record(provider)
            except NotImplementedError as reason:
                kernels[name] = {"state": "refused", "reason": str(reason)}
            except Exception as error:
                # A peer may lack a file or fail on a shape; the others go on. A broken CUDA context ends the run at
                # the next synchronisation.
                kernels[name] = {"state": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        return kernels


def measure(workload: Workload, pool: Pool, of: dict[str, Provider], options: Options, gpu: str) -> dict:
    """One row of a results file: every kernel on the same tensors, replays in turns."""
    row = Row(workload, pool, options)
    kernels = row.record_all(of)
    torch.cuda.synchronize()
    timed = {name: one for name, one in kernels.items() if isinstance(one, Timed)}
    time_in_turns(list(timed.values()), options)
    kernels |= {name: row.judged(name, of[name], one) for name, one in timed.items()}
    for name, equal in same_bits({name: one.graph.result for name, one in timed.items()}, of).items():
        kernels[name]["same_bits"] = equal
    floor = floor_for(gpu, workload.kind)
    return {
        **workload.fields,
        "calls": row.calls,
        "rotated_bytes": copies_of(workload) * workload.bytes,
        "floor_us": floor and floor.us(workload),
        "results": kernels,
    }


def time_in_turns(kernels: list[Timed], options: Options) -> None:
    """Replay every graph once per turn, from outputs that are NaN."""
    graphs = [graph for one in kernels for graph in (one.graph, one.behind) if graph]
    for graph in graphs:
        graph.result.fill_(torch.nan)
    held = torch.cuda.get_device_properties(0).multi_processor_count - H20_SMS if options.h20_proxy else 0
    with sms_held(held):
        for _ in range(options.replays):
            for graph in graphs:
                graph.replay()
        torch.cuda.current_stream().synchronize()


def same_bits(results: dict[str, Tensor], of: dict[str, Provider]) -> dict[str, bool]:
    """For the columns of every build but the first: whether the output is the first build's, bit for bit."""
    first, same = {}, {}
    for name, result in results.items():
        if of[name].build:
            bits, math_ = result.view(torch.int16), name.endswith(MATH_SUFFIX)
            if math_ in first:
                same[name] = torch.equal(bits, first[math_])
            first.setdefault(math_, bits)
    return same


def problems(document: dict) -> list[str]:
    """Wrong or failed results of ETAP's own columns."""
    names = [*document["libraries"], *(name + MATH_SUFFIX for name in document["libraries"])] or OWN
    failed = [(row, name) for row in document["rows"] for name in names if name in row["results"]]
    failed = [(row, name) for row, name in failed if row["results"][name]["state"] == "failed"]
    return [f"{row['label']}: {name}: {row['results'][name]['error']}" for row, name in failed]
