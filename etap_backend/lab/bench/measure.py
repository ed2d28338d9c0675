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
from dataclasses import dataclass, replace
from functools import partial

import torch

from etap_backend.lab.bench import kernels
from etap_backend.lab.bench.floors import Floor
from etap_backend.lab.bench.grids import Workload
from etap_backend.lab.bench.hold import sms_held
from etap_backend.lab.bench.kernels import Call, Inputs
from etap_backend.lab.bench.providers import Kernels, Provider
from etap_backend.lab.bench.rows import MATH_SUFFIX, Failed, Measured, Refused, Result, Row, ScheduleBuild, Timing
from etap_backend.reference import mla_decode_reference, relative_rmse
from etap_backend.support import FP8, HEAD_DIM

DEVICE = "cuda"
PAGE_SIZE = 64
SOFTMAX_SCALE = HEAD_DIM**-0.5
ROTATED_BYTES = 400e6  # an H200's L2 holds 60 MB
MOST_CALLS, FEWEST_CALLS = 512, 4
# Calls a graph, unless they would read more than that: its start weighs little then, as in an engine.
USUAL_CALLS, USUAL_BYTES = 16, 10e9
H20_SMS = 78
HOST_TURNS = 9
KV_SCALE = 0.0125  # of FP8 caches: their largest number stands for 5.6 standard deviations
CHUNK_PAGES = 4096  # what is rounded to FP8 at a time
METHOD = (
    "CUDA graph replays, time of a graph / its calls, median and interquartile range of the replays, "
    f"kernels taking turns; calls rotate over copies of the cache of {ROTATED_BYTES / 1e6:.0f} MB together "
    f"(at most {MOST_CALLS} copies); inputs N(0, 1), page {PAGE_SIZE}, shuffled block table; "
    "scheduling metadata built before"
)
PROXY_METHOD = f"; a waiting kernel holds the SMs beyond {H20_SMS}, so that every call runs on the same ones"
FP8_METHOD = (
    f"; FP8 caches are e4m3 with the scale {KV_SCALE}, errors are against float64 on what they stand for; FlashMLA is "
    "given queries in e4m3, rounded before, all others bf16 ones"
)


@dataclass(frozen=True)
class Settings:
    """How rows are measured: replays of each graph, whether results are compared with float64, CTAs of our launch."""

    replays: int = 21
    validate: bool = True
    num_sms: int | None = None
    h20_proxy: bool = False
    libraries: tuple[str, ...] = ()  # whose outputs are compared with the first one's, bit for bit


class CachePool:
    """One buffer of random cache pages for all rows of a run, cut into copies for the row at hand."""

    def __init__(self, workloads: tuple[Workload, ...]):
        pages = max(self._pages(workload) * copies_of(workload) for workload in workloads)
        self.pages = torch.empty(pages, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE).normal_()
        self._others: dict[torch.dtype, torch.Tensor] = {}

    @staticmethod
    def _pages(workload: Workload) -> int:
        return sum(-(-length // PAGE_SIZE) for length in workload.lengths)

    def _pages_in(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype == self.pages.dtype:
            return self.pages
        if dtype not in self._others:
            pages = torch.empty_like(self.pages, dtype=dtype)
            for to, chunk in zip(pages.split(CHUNK_PAGES), self.pages.split(CHUNK_PAGES), strict=True):
                to.copy_(kernels.to_fp8(chunk, KV_SCALE) if dtype == FP8 else chunk)
            self._others[dtype] = pages
        return self._others[dtype]

    def copies(self, workload: Workload, dtype: torch.dtype) -> list[torch.Tensor]:
        pages, each = self._pages_in(dtype), self._pages(workload)
        return [pages[first * each : (first + 1) * each] for first in range(copies_of(workload))]


def copies_of(workload: Workload) -> int:
    return max(1, min(MOST_CALLS, -(-int(ROTATED_BYTES) // workload.kv_bytes)))


def cache_dtype(workload: Workload, provider: Provider) -> torch.dtype:
    """The type of the cache that a kernel of a row is given."""
    if workload.fp8 and not provider.bf16_cache:
        return FP8
    return getattr(torch, workload.dtype)


def inputs_of(workload: Workload, num_sms: int | None) -> Inputs:
    batch = len(workload.lengths)
    pages = [-(-length // PAGE_SIZE) for length in workload.lengths]
    shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    block_table = torch.zeros(batch, max(pages), dtype=torch.int32)
    for row, ids in zip(block_table, shuffled.split(pages), strict=True):
        row[: len(ids)] = ids
    q = torch.randn(batch, workload.s_q, workload.heads, HEAD_DIM, device=DEVICE)
    return Inputs(
        q=q.to(getattr(torch, workload.dtype)),
        block_table=block_table.to(DEVICE),
        seq_lens=torch.tensor(workload.lengths, dtype=torch.int32, device=DEVICE),
        lengths=workload.lengths,
        page_size=PAGE_SIZE,
        softmax_scale=SOFTMAX_SCALE,
        num_sms=num_sms,
    )


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


def _on_a_copy(call: Call, copies: list[torch.Tensor], index: int) -> torch.Tensor:
    return call(copies[index % len(copies)])


@dataclass(frozen=True)
class Bench:
    """One row's tensors and kernels."""

    workload: Workload
    inputs: Inputs
    pool: CachePool
    kernels: Kernels
    settings: Settings

    def prepared(self, name: str) -> tuple[Call, list[torch.Tensor]]:
        """A kernel's call, and copies of the cache in its type to call it with."""
        provider = self.kernels.of(self.workload)[name]
        dtype = cache_dtype(self.workload, provider)
        scale = KV_SCALE if dtype == FP8 else None
        call = provider.prepare(replace(self.inputs, kv_dtype=dtype, kv_scale=scale))
        return call, self.pool.copies(self.workload, dtype)

    @property
    def calls(self) -> int:
        """Of a graph: each copy of the cache at least once."""
        usual = min(USUAL_CALLS, int(USUAL_BYTES) // self.workload.kv_bytes)
        return max(FEWEST_CALLS, copies_of(self.workload), usual)

    def captured(self) -> tuple[dict[str, Captured], dict[str, Result]]:
        """The graph of each kernel that can run this row, and for the others why they cannot."""
        graphs, others = {}, {}
        for name in self.kernels.of(self.workload):
            try:
                call, copies = self.prepared(name)
                graphs[name] = Captured(partial(_on_a_copy, call, copies), self.calls)
            except NotImplementedError as reason:
                others[name] = Refused(reason=str(reason))
            except Exception as error:
                # A peer may lack a file or fail on a shape: the row says so and the others go on. An error that breaks
                # the CUDA context ends the run all the same, at the synchronisation after this.
                others[name] = Failed(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return graphs, others

    def errors(self, graphs: dict[str, Captured]) -> dict[str, float]:
        """Relative RMSE of each kernel's last result against float64 on what its own cache stands for."""
        wanted, errors = {}, {}
        for name, graph in graphs.items():
            dtype = cache_dtype(self.workload, self.kernels.of(self.workload)[name])
            if dtype not in wanted:
                copies = self.pool.copies(self.workload, dtype)
                scale = torch.tensor(KV_SCALE) if dtype == FP8 else None
                table, lengths = self.inputs.block_table, self.inputs.seq_lens
                last_copy = copies[(graph.calls - 1) % len(copies)]
                wanted[dtype], _ = mla_decode_reference(
                    self.inputs.q, last_copy, table, lengths, SOFTMAX_SCALE, kv_scale=scale
                )
            errors[name] = relative_rmse(graph.result, wanted[dtype])
        return errors


def same_bits(graphs: dict[str, Captured], libraries: tuple[str, ...]) -> dict[str, bool]:
    """Of each further library's kernels: whether the last output is that of the first library's, bit for bit."""
    same = {}
    for suffix in ("", MATH_SUFFIX):
        first, *others = (name + suffix for name in libraries or ("",))
        for other in others:
            if first in graphs and other in graphs:
                one, another = (graphs[name].result.view(torch.int16) for name in (first, other))
                same[other] = torch.equal(one, another)
    return same


def measure(
    workload: Workload, pool: CachePool, kernels_of_run: Kernels, settings: Settings, floor: Floor | None
) -> Row:
    """One row: every kernel on the same tensors, replays taking turns."""
    row = Bench(workload, inputs_of(workload, settings.num_sms), pool, kernels_of_run, settings)
    torch.cuda.synchronize()
    graphs, results = row.captured()
    events = {name: [] for name in graphs}
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    with sms_held(sms - H20_SMS if settings.h20_proxy else 0):
        for _ in range(settings.replays):
            for name, graph in graphs.items():
                events[name].append(graph.replay())
        torch.cuda.current_stream().synchronize()
    timings = {name: timing_of(graph.microseconds(events[name])) for name, graph in graphs.items()}
    errors = row.errors(graphs) if settings.validate else {}
    results |= results_of(timings, errors, same_bits(graphs, settings.libraries))
    shape = workload.shape
    return Row(
        **shape.model_dump(),
        calls=row.calls,
        rotated_bytes=copies_of(workload) * workload.kv_bytes,
        floor_us=floor and floor.microseconds(kv_bytes=shape.bytes, flops=shape.flops, fp8=shape.fp8),
        results={name: results[name] for name in kernels_of_run.of(workload)},
    )


def results_of(timings: dict[str, Timing], errors: dict[str, float], same: dict[str, bool]) -> dict[str, Result]:
    """What a row says of the kernels that were timed; the time of a result that is not a number is worth nothing."""
    results: dict[str, Result] = {}
    for name, timing in timings.items():
        rmse = errors.get(name)
        if rmse is not None and not math.isfinite(rmse):
            results[name] = Failed(error=f"wrong result: its relative RMSE against float64 is {rmse}")
        else:
            results[name] = Measured(**timing.model_dump(), relative_rmse=rmse, same_bits=same.get(name))
    return results


def measure_schedule(settings: Settings, batch: int = 256, builds: int = 100) -> ScheduleBuild:
    """Time of building the schedule of `batch` requests on the GPU, which an engine pays once a step."""
    seq_lens = torch.randint(1, 8192, (batch,), dtype=torch.int32, device=DEVICE)
    build = kernels.schedule_build(seq_lens, 16, settings.num_sms)
    graph = Captured(lambda _: build(), builds)
    events = [graph.replay() for _ in range(settings.replays)]
    torch.cuda.synchronize()
    return ScheduleBuild(batch=batch, **timing_of(graph.microseconds(events)).model_dump())


def measure_host(
    workload: Workload, pool: CachePool, ours: Kernels, names: list[str], settings: Settings, calls: int = 200
) -> dict[str, Timing]:
    """Host time to launch one call of each of these, in microseconds, where nothing waits for the GPU; in turns."""
    row = Bench(workload, inputs_of(workload, settings.num_sms), pool, ours, settings)
    prepared, times = {name: row.prepared(name) for name in names}, {name: [] for name in names}
    for _ in range(HOST_TURNS):
        for name, (call, copies) in prepared.items():
            call(copies[0])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call(copies[0])
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return {name: timing_of(found) for name, found in times.items()}
