"""Measures rows: the time of one decode call on the GPU, beside its error against float64.

A CUDA graph of many calls is replayed, and its time is divided by the calls. The calls take copies of the cache in
turns that together exceed L2 by far. Graphs of all kernels take turns, replay by replay, so that drifting clocks affect
all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernels import providers
from bench.kernels.floors import Floor
from bench.kernels.grids import Workload
from bench.kernels.hold import sms_held
from bench.kernels.inputs import Call, Copy, Pool, copies_of
from bench.kernels.providers import BF16_CACHE, ETAP, MATH_SUFFIX, Provider
from etap_backend.reference import relative_rmse

H20_SMS = 78
MIN_CALLS = 4
# Calls per graph: 16, unless they would read more than this; the graph's start weighs little then, as in an engine.
USUAL_CALLS, USUAL_BYTES = 16, 10e9
# Relative RMSE, twice that of plain torch in the type; ETAP's is between 1.6e-3 and 2.5e-3 in bfloat16.
MAX_RMSE = {"bfloat16": 5e-3, "float16": 6e-4}
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
        self.graph.replay()

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        return begin, end

    def timing(self, events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> dict:
        return timing_of([begin.elapsed_time(end) * 1e3 / self.calls for begin, end in events])


def timing_of(us: list[float]) -> dict:
    """Median and interquartile range of microseconds per call."""
    quartiles = statistics.quantiles(us, n=4)
    return {"us": statistics.median(us), "iqr_us": quartiles[2] - quartiles[0], "replays": len(us)}


def calls_of(workload: Workload) -> int:
    """Calls of a graph: at least one on each copy of the cache."""
    return max(MIN_CALLS, copies_of(workload), min(USUAL_CALLS, int(USUAL_BYTES) // workload.bytes))


def _on_a_copy(call: Call, copies: list[Copy], index: int) -> Tensor:
    return call(*copies[index % len(copies)])


def _behind_a_kernel(q: Tensor, spare: Tensor, call: Callable[[int], Tensor], index: int) -> Tensor:
    """The call after a kernel whose result it might need, so that no part of it begins earlier. That kernel computes,
    since the copy engine would do a copy."""
    torch.neg(q, out=spare)
    return call(index)


def max_rmse(name: str, workload: Workload, provider: Provider) -> float:
    """The largest error that a kernel may have."""
    exact = name in (ETAP, BF16_CACHE) or provider.build and not name.endswith(MATH_SUFFIX)
    return MAX_RMSE[workload.dtype] if exact else MAX_FP8_MATH_RMSE


def checked(result: Tensor, truth: Tensor, limit: float) -> dict:
    """The error of a result, or the failure of a wrong one."""
    rmse = relative_rmse(result, truth)
    if rmse <= limit:
        return {"relative_rmse": rmse}
    return {"state": "failed", "error": f"wrong result: relative RMSE against float64 {rmse:.2e}, limit {limit:.1e}"}


@dataclass
class Timed:
    """A kernel whose graphs are recorded and whose result is right."""

    graph: Graph
    behind: Graph | None
    found: dict  # its result in the row


class Row:
    """One row's tensors, and the kernels on them."""

    def __init__(self, workload: Workload, pool: Pool, options: Options):
        self.workload, self.pool, self.options = workload, pool, options
        self.inputs = pool.inputs(workload, options.num_sms)
        self.calls = calls_of(workload)
        self._truths: dict[torch.dtype, Tensor] = {}

    def prepared(self, provider: Provider) -> tuple[Call, list[Copy], torch.dtype]:
        """A kernel's call, the copies that it takes in turns, and the type of their cache."""
        dtype = self.pool.cache_dtype(self.workload, provider.bf16_cache)
        return provider.prepare(self.pool.with_cache(self.inputs, dtype)), self.pool.copies(self.workload, dtype), dtype

    def truth(self, dtype: torch.dtype) -> Tensor:
        """The output of a graph's last call in float64, on the cache in this type."""
        if dtype not in self._truths:
            copies = self.pool.copies(self.workload, dtype)
            copy = copies[(self.calls - 1) % len(copies)]
            self._truths[dtype] = self.pool.truth(self.pool.with_cache(self.inputs, dtype), copy)
        return self._truths[dtype]

    def record(self, name: str, provider: Provider) -> Timed:
        """Record a kernel's graphs and check its result. Raises NotImplementedError where it refuses the row."""
        with provider.active():
            call, copies, dtype = self.prepared(provider)
            on_a_copy = partial(_on_a_copy, call, copies)
            graph, behind = Graph(on_a_copy, self.calls), None
            if self.options.behind:
                spare = torch.empty_like(self.inputs.q)
                behind = Graph(partial(_behind_a_kernel, self.inputs.q, spare, on_a_copy), self.calls)
        found = {"state": "measured"}
        if self.options.validate:
            found |= checked(graph.result, self.truth(dtype), max_rmse(name, self.workload, provider))
        return Timed(graph, behind, found)

    def record_all(self, of: dict[str, Provider]) -> dict[str, Timed | dict]:
        """By column: what is to be timed, or the result of a kernel that refused or failed."""
        kernels = {}
        for name, provider in of.items():
            try:
                timed = self.record(name, provider)
                kernels[name] = timed if timed.found["state"] == "measured" else timed.found
            except NotImplementedError as reason:
                kernels[name] = {"state": "refused", "reason": str(reason)}
            except Exception as error:
                # A peer may lack a file or fail on a shape; the others go on. A broken CUDA context ends the run at
                # the next synchronisation.
                kernels[name] = {"state": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        return kernels


def measure(workload: Workload, pool: Pool, of: dict[str, Provider], options: Options, floor: Floor | None) -> dict:
    """One row of a results file: every kernel on the same tensors, replays in turns."""
    row = Row(workload, pool, options)
    kernels = row.record_all(of)
    torch.cuda.synchronize()
    timed = {name: one for name, one in kernels.items() if isinstance(one, Timed)}
    time_in_turns(list(timed.values()), options)
    for name, equal in same_bits({name: one.graph.result for name, one in timed.items()}, of).items():
        timed[name].found["same_bits"] = equal
    return {
        **workload.fields,
        "calls": row.calls,
        "rotated_bytes": copies_of(workload) * workload.bytes,
        "floor_us": floor and floor.us(read=workload.bytes, flops=workload.flops, fp8=workload.fp8),
        "results": {name: one.found if isinstance(one, Timed) else one for name, one in kernels.items()},
    }


def time_in_turns(kernels: list[Timed], options: Options) -> None:
    """Replay every graph once per turn, and add the timings to what was found of the kernels."""
    graphs = [(one.found, one.graph, []) for one in kernels]
    graphs += [(one.found.setdefault("behind", {}), one.behind, []) for one in kernels if one.behind]
    held = torch.cuda.get_device_properties(0).multi_processor_count - H20_SMS if options.h20_proxy else 0
    with sms_held(held):
        for _ in range(options.replays):
            for _, graph, events in graphs:
                events.append(graph.replay())
        torch.cuda.current_stream().synchronize()
    for found, graph, events in graphs:
        found |= graph.timing(events)


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
    names = [*document["libraries"], *(name + MATH_SUFFIX for name in document["libraries"])] or providers.OWN
    wrong = []
    for row in document["rows"]:
        for name in names:
            if (found := row["results"].get(name)) and found["state"] == "failed":
                wrong.append(f"{row['label']}: {name}: {found['error']}")
    return wrong


def options_of(options: Options) -> dict:
    """The options as a results file holds them."""
    return asdict(options) | {"num_sms": options.num_sms}
