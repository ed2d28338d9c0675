"""`etap bench`: this project's call and every installed peer, side by side in one process on the same tensors.

One number is the time of one decode call on the GPU: a CUDA graph of many calls is replayed, and its time is divided by
the calls. The calls walk over copies of the KV cache that are together larger than the L2 cache by far, and the graphs
of all kernels take turns, so that a drift of the clocks meets them all.
"""

from __future__ import annotations

import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import etap_backend
from etap_backend.lab.bench import peers, report
from etap_backend.lab.bench.grids import Workload, floor_for, load_grid
from etap_backend.reference import mla_decode_reference, relative_rmse
from etap_backend.schedule import DecodeSchedule
from etap_backend.support import COMPUTE_CAPABILITY, FP8, HEAD_DIM

DEVICE = "cuda"
PAGE_SIZE = 64
SOFTMAX_SCALE = HEAD_DIM**-0.5
ROTATED_BYTES = 400e6  # an H200's L2 holds 60 MB
MOST_CALLS, FEWEST_CALLS = 512, 4
# Calls a graph, unless they would read more than that: its start weighs little then, as in an engine.
USUAL_CALLS, USUAL_BYTES = 16, 10e9
H20_SMS = 78
# Every register and all shared memory of an SM, until it is told to stop or some 20 seconds are over.
HOLDING_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(volatile int* stop) {
  int held[56];
  for (int i = 0; i < 56; ++i) held[i] = *stop;
  const long long begin = clock64();
  while (*stop == 0 && clock64() - begin < 40000000000LL) {
    for (int i = 0; i < 56; ++i) asm volatile("" : "+r"(held[i]));
    __nanosleep(1000);
  }
}
"""
# Twice what plain torch errs in that type; the kernels of this table lie between 1.6e-3 and 2.5e-3 in bf16.
LARGEST_RMSE = {"bfloat16": 5e-3, "float16": 6e-4}
FP8_MATH_RMSE = 4.5e-2  # the root of twice the cosine difference that it may have, 1e-3
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


class Stopped(KeyboardInterrupt):
    """The run ends early, by a signal or its time limit; what was measured is kept."""


@dataclass(frozen=True)
class Options:
    """What one run was asked for."""

    providers: tuple[str, ...]
    replays: int
    validate: bool
    num_sms: int | None
    time_limit: float | None
    h20_proxy: bool = False


class CachePool:
    """One buffer of random cache pages for all rows of a run, cut into copies for the row at hand."""

    def __init__(self, workloads: list[Workload]):
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
                to.copy_(peers.to_fp8(chunk, KV_SCALE) if dtype == FP8 else chunk)
            self._others[dtype] = pages
        return self._others[dtype]

    def copies(self, workload: Workload, dtype: torch.dtype) -> list[torch.Tensor]:
        pages, each = self._pages_in(dtype), self._pages(workload)
        return [pages[first * each : (first + 1) * each] for first in range(copies_of(workload))]


def copies_of(workload: Workload) -> int:
    return max(1, min(MOST_CALLS, -(-int(ROTATED_BYTES) // workload.kv_bytes)))


def cache_dtype(workload: Workload, name: str) -> torch.dtype:
    """The type of the cache that a kernel of a row is given."""
    if workload.fp8 and name != peers.OUR_BF16:
        return FP8
    return getattr(torch, workload.dtype)


def inputs_of(workload: Workload, num_sms: int | None) -> peers.Inputs:
    batch = len(workload.lengths)
    pages = [-(-length // PAGE_SIZE) for length in workload.lengths]
    shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    block_table = torch.zeros(batch, max(pages), dtype=torch.int32)
    for row, ids in zip(block_table, shuffled.split(pages), strict=True):
        row[: len(ids)] = ids
    q = torch.randn(batch, workload.s_q, workload.heads, HEAD_DIM, device=DEVICE)
    return peers.Inputs(
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


@cache
def holding_kernel() -> tuple[Callable, int]:
    """The kernel that holds an SM a block, and its bytes of shared memory."""
    bytes_held = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin
    kernel = torch.cuda._compile_kernel(HOLDING_KERNEL, "hold")
    kernel.set_shared_memory_config(bytes_held)
    return kernel, bytes_held


@contextmanager
def sms_held(count: int) -> Iterator[None]:
    """Keep `count` SMs from what runs inside, which may wait for its own stream only: the whole GPU is never done.

    Calls on fewer CTAs than there are SMs, each of which may begin while the last one ends, come to lie where the last
    one does not, in another arrangement each time. On a GPU that has no more SMs they cannot.
    """
    if count == 0:
        yield
        return
    kernel, bytes_held = holding_kernel()
    stop = torch.zeros((), dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel(grid=(count, 1, 1), block=(1024, 1, 1), args=[stop], shared_mem=bytes_held, stream=stream)
    try:
        yield
    finally:
        stop.fill_(1)
        torch.cuda.synchronize()


def summary(times: list[float]) -> dict:
    quartiles = statistics.quantiles(times, n=4)
    return {"us": statistics.median(times), "iqr_us": quartiles[2] - quartiles[0], "replays": len(times)}


def capture_all(workload: Workload, inputs: peers.Inputs, pool: CachePool, calls: int, names: tuple[str, ...]):
    """The graph of each kernel that can run this row, and for the others why they cannot."""
    captured, failures = {}, {}
    for name in names:
        try:
            call, copies = prepared(workload, inputs, pool, name)
            captured[name] = Captured(lambda index, call=call, copies=copies: call(copies[index % len(copies)]), calls)
        except Exception as error:
            # A peer may lack a file or refuse a shape: the row says so and the others go on. An error that breaks the
            # CUDA context ends the run all the same, at the synchronisation after this.
            failures[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return captured, failures


def prepared(
    workload: Workload, inputs: peers.Inputs, pool: CachePool, name: str
) -> tuple[peers.Call, list[torch.Tensor]]:
    """A kernel's call, and copies of the cache in its type to call it with."""
    dtype = cache_dtype(workload, name)
    scale = KV_SCALE if dtype == FP8 else None
    call = providers_of(workload)[name].prepare(replace(inputs, kv_dtype=dtype, kv_scale=scale))
    return call, pool.copies(workload, dtype)


def providers_of(workload: Workload) -> dict[str, peers.Provider]:
    return peers.FP8_PROVIDERS if workload.fp8 else peers.PROVIDERS


def measure(workload: Workload, pool: CachePool, options: Options) -> dict:
    """One row: every kernel on the same tensors, replays taking turns."""
    inputs = inputs_of(workload, options.num_sms)
    names = tuple(name for name in options.providers if name in providers_of(workload))
    calls = max(FEWEST_CALLS, copies_of(workload), min(USUAL_CALLS, int(USUAL_BYTES) // workload.kv_bytes))
    torch.cuda.synchronize()
    captured, results = capture_all(workload, inputs, pool, calls, names)
    events = {name: [] for name in captured}
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    with sms_held(sms - H20_SMS if options.h20_proxy else 0):
        for _ in range(options.replays):
            for name, graph in captured.items():
                events[name].append(graph.replay())
        torch.cuda.current_stream().synchronize()
    for name, graph in captured.items():
        results[name] = summary(graph.microseconds(events[name]))
    if options.validate:
        for name, rmse in errors_of(workload, inputs, pool, captured).items():
            results[name]["relative_rmse"] = rmse
    return {
        **workload.describe(),
        "calls": calls,
        "rotated_bytes": copies_of(workload) * workload.kv_bytes,
        "results": {name: results[name] for name in names},
    }


def errors_of(workload: Workload, inputs: peers.Inputs, pool: CachePool, captured: dict[str, Captured]) -> dict:
    """Relative RMSE of each kernel's last result against float64 on what its own cache stands for."""
    wanted, errors = {}, {}
    for name, graph in captured.items():
        dtype = cache_dtype(workload, name)
        if dtype not in wanted:
            copies = pool.copies(workload, dtype)
            scale = torch.tensor(KV_SCALE) if dtype == FP8 else None
            table, lengths = inputs.block_table, inputs.seq_lens
            last_copy = copies[(graph.calls - 1) % len(copies)]
            wanted[dtype], _ = mla_decode_reference(inputs.q, last_copy, table, lengths, SOFTMAX_SCALE, kv_scale=scale)
        errors[name] = relative_rmse(graph.result, wanted[dtype])
    return errors


def measure_schedule(options: Options, batch: int = 256, builds: int = 100) -> dict:
    """Time of `DecodeSchedule.build` on the GPU, which an engine pays once a step."""
    seq_lens = torch.randint(1, 8192, (batch,), dtype=torch.int32, device=DEVICE)
    schedule = DecodeSchedule(batch, 16, device=DEVICE, num_sms=options.num_sms)

    def build(_: int) -> None:
        schedule.build(seq_lens)

    graph = Captured(build, builds)
    events = [graph.replay() for _ in range(options.replays)]
    torch.cuda.synchronize()
    return {"batch": batch, **summary(graph.microseconds(events))}


def measure_host(workload: Workload, pool: CachePool, options: Options, calls: int = 200) -> dict:
    """Host time to launch one call, in microseconds, where nothing waits for the GPU."""
    call, copies = prepared(workload, inputs_of(workload, options.num_sms), pool, peers.OURS)
    times = []
    for _ in range(9):
        call(copies[0])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call(copies[0])
        times.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return summary(times)


@contextmanager
def stopping(time_limit: float | None) -> Iterator[Callable[[], None]]:
    """Turn SIGTERM, Ctrl-C and the time limit into `Stopped`; the yielded function is to be called between the rows."""
    deadline = None if time_limit is None else time.monotonic() + time_limit

    def stop(number, frame):
        raise Stopped(f"by {signal.Signals(number).name}")

    def check():
        if deadline is not None and time.monotonic() > deadline:
            raise Stopped(f"by the time limit of {time_limit:g} s")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment(proxy: bool) -> dict:
    """What a figure is worth nothing without: GPU, driver, clocks, versions, commit and command line."""
    queried = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    nvidia = _output_of("nvidia-smi", f"--query-gpu={queried}", "--format=csv,noheader", "--id=0")
    driver, *clocks = (nvidia or "unknown").split(", ")
    versions = {provider.package: provider.version() for provider in peers.PROVIDERS.values()}
    name = torch.cuda.get_device_name()
    return {
        "gpu": f"H20 proxy ({name.removeprefix('NVIDIA ')} throttled)" if proxy else name,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "driver": driver,
        "clocks": clocks,
        "versions": {
            **{package: version for package, version in versions.items() if version},
            "etap-backend": etap_backend.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": report.commit(),
        "command": shlex.join(["etap", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def run(workloads: list[Workload], header: dict, options: Options, output: Path, console: Console) -> dict:
    """Measure row by row; the file is whole after every row, whatever ends the run."""
    document = {**header, "complete": False, "stopped": None, "rows": []}
    floor = floor_for(header["gpu"])
    with _progress(console) as progress, stopping(options.time_limit) as check:
        task = progress.add_task("", total=len(workloads))
        try:
            pool = CachePool(workloads)
            if peers.OURS in options.providers:
                document["schedule_build"] = measure_schedule(options)
                document["host_call"] = measure_host(workloads[0], pool, options)
            for workload in workloads:
                check()
                progress.update(task, description=workload.label)
                row = measure(workload, pool, options)
                row["floor_us"] = floor and floor.microseconds(workload)
                document["rows"].append(row)
                report.write(document, output)
                progress.advance(task)
            document["complete"] = True
        except Stopped as reason:
            document["stopped"] = str(reason)
        finally:
            report.write(document, output)
    return document


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


def _refuse(text: str) -> typer.Exit:
    Console(stderr=True).print(f"etap bench: {text}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


def _why_not(h20_proxy: bool) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device: the kernels run on Hopper GPUs only, and there is nothing to time without one"
    found = torch.cuda.get_device_capability()
    if found != COMPUTE_CAPABILITY:
        return f"wanted a GPU of compute capability 9.0 (Hopper), got {found[0]}.{found[1]}"
    if h20_proxy and "ETAP_LIBRARY" not in os.environ:
        return "--h20-proxy: wanted ETAP_LIBRARY, the library built with the throttled toolchain, but it is not set"
    return None


def _chosen(
    workloads: list[Workload], only: list[str] | None, skip: list[str] | None, h20_proxy: bool
) -> tuple[str, ...]:
    """Names of the kernels to time: those asked for, or ours and every installed peer."""
    providers = {name: each for workload in workloads for name, each in providers_of(workload).items()}
    known = {name.lower(): name for name in providers}
    for name in [*(only or []), *(skip or [])]:
        if name.lower() not in known:
            raise _refuse(f"wanted one of {', '.join(providers)}, got {name}")
    skipped = {known[name.lower()] for name in skip or []}
    if h20_proxy:  # the peers' binaries are not throttled
        return tuple(name for name in providers if name in peers.OWN and name not in skipped)
    if only:
        return tuple(known[name.lower()] for name in only)
    installed = (name for name, provider in providers.items() if name in peers.OWN or provider.version())
    return tuple(name for name in installed if name not in skipped)


def wrong_results(document: dict) -> list[str]:
    """Rows where a result of our own is missing or further from the reference than its type allows."""
    wrong = []
    for row in document["rows"]:
        for name in peers.OWN:
            ours = row["results"].get(name, {})
            limit = FP8_MATH_RMSE if name == peers.FP8_MATH else LARGEST_RMSE[row["dtype"]]
            if "error" in ours:
                wrong.append(f"{row['label']}: {name}: {ours['error']}")
            elif not ours.get("relative_rmse", 0.0) <= limit:
                wrong.append(f"{row['label']}: {name}: relative RMSE {ours['relative_rmse']:.2e}")
    return wrong


def bench(
    grid: Annotated[Path, typer.Argument(help="Shapes to time, a file of configs/bench.", exists=True, dir_okay=False)],
    kv_dtype: Annotated[str | None, typer.Option(help="Of the cache in all rows: fp8, or same as the query.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; results/<grid>.json when not given.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Time only this kernel; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this kernel out; may be repeated.")] = None,
    replays: Annotated[int, typer.Option(min=2, help="Graph replays a kernel and row.")] = 21,
    validate: Annotated[bool, typer.Option(help="Compare every timed output with float64.")] = True,
    num_sms: Annotated[int | None, typer.Option(min=1, help="CTAs of our launch; the GPU's when not given.")] = None,
    h20_proxy: Annotated[bool, typer.Option(help="78 CTAs and a throttled library in ETAP_LIBRARY.")] = False,
    time_limit: Annotated[float | None, typer.Option(help="Stop after this many seconds, keep the rows.")] = None,
    plots: Annotated[bool, typer.Option(help="Also draw the plots beside the JSON file.")] = False,
) -> None:
    """Time the decode call and every installed peer side by side on one Hopper GPU."""
    if reason := _why_not(h20_proxy):
        raise _refuse(reason)
    try:
        title, workloads = load_grid(grid, memory_bytes=torch.cuda.mem_get_info()[0], kv_dtype=kv_dtype)
    except ValueError as error:
        raise _refuse(str(error)) from error
    fp8 = any(workload.fp8 for workload in workloads)
    names = _chosen(workloads, only, skip, h20_proxy)
    options = Options(names, replays, validate, H20_SMS if h20_proxy else num_sms, time_limit, h20_proxy)
    suffix = ("-fp8" if kv_dtype == "fp8" else "") + ("-h20-proxy" if h20_proxy else "")
    output = output or Path("results") / f"{grid.stem}{suffix}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    method = METHOD + (FP8_METHOD if fp8 else "") + (PROXY_METHOD if h20_proxy else "")
    header = {"grid": grid.stem, "title": title, **environment(h20_proxy), "method": method, "options": asdict(options)}
    floor = floor_for(header["gpu"])
    header["floor"] = floor and floor.describe(fp8=fp8)
    console = Console() if sys.stdout.isatty() else Console(width=220)  # a log has no edge to wrap the table at
    document = run(workloads, header, options, output, console)
    report.print_document(document, console)
    if plots:
        report.plot(document, output.with_suffix(""))
    if wrong := wrong_results(document):
        raise _refuse("wrong or missing results of our own: " + "; ".join(wrong))
