"""The clock of `etap bench`: one number is the time of one decode call on the GPU.

A CUDA graph of many calls is replayed, and its time is divided by the calls. The calls walk over copies of the KV cache
that are together larger than the L2 cache by far, and the graphs of all kernels take turns, so that a drift of the
clocks meets them all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels import kernels
from bench.kernels import rows as files
from bench.kernels.floors import Floor
from bench.kernels.grids import Workload
from bench.kernels.hold import sms_held
from bench.kernels.kernels import Call, Copy, Inputs, Planned, SparseInputs, V4Inputs
from bench.kernels.providers import Kernels
from bench.kernels.rows import Failed, Measured, Options, Refused, Result, Row, Timing, row_of
from bench.kernels.tensors import DEVICE, Pool, copies_of
from etap_backend.reference import relative_rmse

H20_SMS = 78
FEWEST_CALLS = 4
# Calls a graph, unless they would read more than that: its start weighs little then, as in an engine.
USUAL_CALLS, USUAL_BYTES = 16, 10e9
HOST_TURNS, HOST_CALLS = 9, 100


class Captured:
    """A CUDA graph of `calls` calls, and what its last call returned."""

    def __init__(self, call: Callable[[int], torch.Tensor | None], calls: int):
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
                with suppress(RuntimeError):  # a broken recording cannot be ended; what broke it is the news
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        self.calls = calls
        self.call = call  # the graph reads and writes what the call holds: its memory must not go to others
        self.graph.replay()

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        return begin, end

    def microseconds(self, events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        return [begin.elapsed_time(end) * 1e3 / self.calls for begin, end in events]


def timing_of(times: list[float]) -> Timing:
    quartiles = statistics.quantiles(times, n=4)
    return Timing(us=statistics.median(times), iqr_us=quartiles[2] - quartiles[0], replays=len(times))


def _on_a_copy(call: Call, copies: list[Copy], index: int) -> torch.Tensor:
    return call(*copies[index % len(copies)])


def _behind_another(queries: torch.Tensor, spare: torch.Tensor, call: Callable[[int], torch.Tensor], index: int):
    """The call behind a kernel of which it may need the result, so that nothing of it begins before that ends.

    It reads the queries and is no copy: a copy would be the copy engine's.
    """
    torch.neg(queries, out=spare)
    return call(index)


@dataclass(frozen=True)
class Bench:
    """One row's tensors and kernels."""

    workload: Workload
    inputs: Inputs | SparseInputs | V4Inputs
    pool: Pool
    kernels: Kernels
    settings: Options

    def cache_dtype(self, name: str) -> torch.dtype:
        return self.pool.cache_dtype(self.workload, self.kernels.of(self.workload)[name])

    def prepared(self, name: str) -> tuple[Call, list[Copy]]:
        """A kernel's call, and what to call it with, the cache in its type."""
        dtype = self.cache_dtype(name)
        call = self.kernels.of(self.workload)[name].prepare(self.pool.with_cache(self.inputs, dtype))
        return call, self.pool.copies(self.workload, dtype)

    @property
    def calls(self) -> int:
        """Of a graph: each copy of the cache at least once."""
        usual = min(USUAL_CALLS, int(USUAL_BYTES) // self.workload.kv_bytes)
        return max(FEWEST_CALLS, copies_of(self.workload), usual)

    def captured(self) -> tuple[dict[str, Captured], dict[str, Captured], dict[str, Result]]:
        """The graph of each kernel that can run this row, that with another kernel before each call where it is wanted,
        and for the others why they cannot."""
        graphs, behind, others = {}, {}, {}
        spare = torch.empty_like(self.inputs.q)
        for name in self.kernels.of(self.workload):
            try:
                on_a_copy = partial(_on_a_copy, *self.prepared(name))
                graph = Captured(on_a_copy, self.calls)
                if self.settings.behind:
                    behind[name] = Captured(partial(_behind_another, self.inputs.q, spare, on_a_copy), self.calls)
                graphs[name] = graph
            except NotImplementedError as reason:
                others[name] = Refused(reason=str(reason))
            except Exception as error:
                # A peer may lack a file or fail on a shape: the row says so and the others go on. An error that breaks
                # the CUDA context ends the run all the same, at the synchronisation after this.
                others[name] = Failed(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return graphs, behind, others

    def errors(self, graphs: dict[str, Captured]) -> dict[str, float]:
        """Relative RMSE of each kernel's last result against float64 on what its own cache stands for."""
        wanted, errors = {}, {}
        for name, graph in graphs.items():
            dtype = self.cache_dtype(name)
            if dtype not in wanted:
                copies = self.pool.copies(self.workload, dtype)
                last_copy = copies[(graph.calls - 1) % len(copies)]
                wanted[dtype] = self.pool.truth(self.pool.with_cache(self.inputs, dtype), last_copy)
            errors[name] = relative_rmse(graph.result, wanted[dtype])
        return errors


def same_bits(graphs: dict[str, Captured], libraries: tuple[str, ...]) -> dict[str, bool]:
    """Of each further library's kernels: whether the last output is that of the first library's, bit for bit."""
    same = {}
    for suffix in ("", files.MATH_SUFFIX):
        first, *others = (name + suffix for name in libraries or ("",))
        for other in others:
            if first in graphs and other in graphs:
                one, another = (graphs[name].result.view(torch.int16) for name in (first, other))
                same[other] = torch.equal(one, another)
    return same


def measure(workload: Workload, pool: Pool, kernels_of_run: Kernels, settings: Options, floor: Floor | None) -> Row:
    """One row: every kernel on the same tensors, replays taking turns."""
    row = Bench(workload, pool.inputs(workload, settings.num_sms), pool, kernels_of_run, settings)
    torch.cuda.synchronize()
    graphs, behind, results = row.captured()
    everything = [*graphs.items(), *((name, behind[name]) for name in graphs if name in behind)]
    events = [[] for _ in everything]
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    with sms_held(sms - H20_SMS if settings.h20_proxy else 0, settings.traffic * 1e12):
        for _ in range(settings.replays):
            for (_, graph), of in zip(everything, events, strict=True):
                of.append(graph.replay())
        torch.cuda.current_stream().synchronize()
    timed = [(name, timing_of(graph.microseconds(of))) for (name, graph), of in zip(everything, events, strict=True)]
    timings, later = dict(timed[: len(graphs)]), dict(timed[len(graphs) :])
    errors = row.errors(graphs) if settings.validated else {}
    results |= results_of(timings, errors, same_bits(graphs, kernels_of_run.libraries), later)
    shape = workload.shape
    return row_of(
        shape,
        calls=row.calls,
        rotated_bytes=copies_of(workload) * workload.kv_bytes,
        floor_us=floor and floor.microseconds(kv_bytes=shape.bytes, flops=shape.flops, fp8=shape.fp8),
        results={name: results[name] for name in kernels_of_run.of(workload)},
    )


def results_of(
    timings: dict[str, Timing], errors: dict[str, float], same: dict[str, bool], behind: dict[str, Timing]
) -> dict[str, Result]:
    """What a row says of the kernels that were timed; the time of a result that is not a number is worth nothing."""
    results: dict[str, Result] = {}
    for name, timing in timings.items():
        rmse = errors.get(name)
        if rmse is not None and not math.isfinite(rmse):
            results[name] = Failed(error=f"wrong result: its relative RMSE against float64 is {rmse}")
        else:
            found = {"behind": behind.get(name), "relative_rmse": rmse, "same_bits": same.get(name)}
            results[name] = Measured(**timing.model_dump(), **found)
    return results


def measure_schedule(settings: Options, batch: int = 256, builds: int = 100) -> files.ScheduleBuild:
    """Time of building the schedule of `batch` requests on the GPU, which an engine pays once a step."""
    seq_lens = torch.randint(1, 8192, (batch,), dtype=torch.int32, device=DEVICE)
    build = kernels.schedule_build(seq_lens, 16, settings.num_sms)
    graph = Captured(lambda _: build(), builds)
    events = [graph.replay() for _ in range(settings.replays)]
    torch.cuda.synchronize()
    return files.ScheduleBuild(batch=batch, **timing_of(graph.microseconds(events)).model_dump())


def measure_hosts(
    workload: Workload, pool: Pool, kernels_of_run: Kernels, names: list[str], settings: Options, *, plans: bool
) -> dict[str, Timing]:
    """Host time to launch one call of each of these, in microseconds, where nothing waits for the GPU; in turns.

    With `plans` that of a call behind its plan, too: a plan that copies something to the host waits for what runs on
    the GPU, and then this counts.
    """
    row = Bench(workload, pool.inputs(workload, settings.num_sms), pool, kernels_of_run, settings)
    found = {}
    for name in names:
        with suppress(Exception):  # the rows say what cannot be called, and why
            call, copies = row.prepared(name)
            call(*copies[0])
            found[name] = partial(call, *copies[0])
            if plans and isinstance(call, Planned):
                found[files.WITH_PLAN.format(name)] = partial(_plan_and_call, call, copies[0])
    return _host_times(found)


def _plan_and_call(planned: Planned, copy: Copy) -> None:
    planned.plan()
    planned(*copy)


def _host_times(found: dict[str, Callable[[], object]]) -> dict[str, Timing]:
    """Of each, launched HOST_CALLS times one behind another, in turns."""
    times = {name: [] for name in found}
    for _ in range(HOST_TURNS):
        for name, launch in found.items():
            launch()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                launch()
            times[name].append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: timing_of(each) for name, each in times.items()}
