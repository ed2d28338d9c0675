"""The command line: `etap doctor` says what is wrong, `etap demo` shows one decode, `etap bench` measures, `etap plan`
says what to expect, `etap e2e` serves and loads engines."""

import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import etap_backend
from etap_backend import _library
from etap_backend.reference import mla_decode_reference, relative_rmse
from etap_backend.support import HEAD_DIM, why_unsupported

app = typer.Typer(
    help="MLA decode attention for Hopper GPUs: check the installation, try it, measure it.", no_args_is_help=True
)
console = Console()

MIN_DRIVER = 580  # the first driver that runs CUDA 13
PROBE_SECONDS = 300


class Verdict(Enum):
    OK = "[green]ok[/]"
    ABSENT = "[dim]not installed[/]"
    NO_PLUGIN = "[dim]no plugin[/]"
    BROKEN = "[red]broken[/]"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table; `remedy` tells what to do unless all is well."""

    part: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Engine:
    """A serving engine, the entry points it reads, and a program that loads them and fails if ETAP is missing."""

    name: str
    package: str
    entry_points: str
    probe: str
    allow_list: str


ENGINES = (
    Engine(
        "vLLM",
        "vllm",
        "vllm.general_plugins",
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "assert 'ETAP' in AttentionBackendEnum.__members__, 'ETAP is not among the attention backends'",
        "VLLM_PLUGINS",
    ),
    Engine(
        "SGLang",
        "sglang",
        "sglang.srt.plugins",
        "from etap_backend.sglang.compat import check_plugin; check_plugin()",
        "SGLANG_PLUGINS",
    ),
)


def check_gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            "GPU",
            Verdict.BROKEN,
            "torch sees no CUDA device",
            "run where nvidia-smi lists a Hopper GPU (H100, H200, H20), with a CUDA build of torch",
        )
    reasons = {}
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        reasons[torch.cuda.get_device_name(index)] = why_unsupported(
            dtype=torch.bfloat16, compute_capability=capability
        )
    refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if refused:
        return Finding("GPU", Verdict.BROKEN, "; ".join(refused), "choose a Hopper GPU (CUDA_VISIBLE_DEVICES)")
    return Finding("GPU", Verdict.OK, f"{torch.cuda.device_count()} x {', '.join(reasons)}")


def check_driver() -> Finding:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        version = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        remedy = f"install the NVIDIA driver, {MIN_DRIVER} or newer"
        return Finding("driver", Verdict.BROKEN, "nvidia-smi finds no driver", remedy)
    if int(version.split(".")[0]) < MIN_DRIVER:
        return Finding("driver", Verdict.BROKEN, version, f"update the NVIDIA driver to {MIN_DRIVER} or newer")
    return Finding("driver", Verdict.OK, version)


def check_library() -> Finding:
    try:
        version = _library.library().abi_version()
    except ImportError as error:
        return Finding("library", Verdict.BROKEN, str(error), "reinstall etap-backend from its wheel")
    return Finding("library", Verdict.OK, f"ABI version {version}, {_library.library_path()}")


def _why_probe_fails(program: str) -> str | None:
    """Run it in a process of its own: importing an engine takes long, changes the process and may end it."""
    try:
        probe = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"nothing came for {PROBE_SECONDS} s"
    if probe.returncode == 0:
        return None
    return (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]


def check_engine(engine: Engine) -> Finding:
    try:
        version = importlib.metadata.version(engine.package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(engine.name, Verdict.ABSENT, "", f"pip install '{engine.package}' to serve with it")
    if importlib.util.find_spec(f"etap_backend.{engine.package}") is None:
        return Finding(engine.name, Verdict.NO_PLUGIN, version, "this version of etap-backend has none for it")
    if "etap" not in importlib.metadata.entry_points(group=engine.entry_points).names:
        remedy = "install etap-backend with pip: from a source tree alone its entry points are unknown"
        return Finding(engine.name, Verdict.BROKEN, f"{version}, no entry point etap in {engine.entry_points}", remedy)
    allowed = os.environ.get(engine.allow_list)
    if allowed is not None and "etap" not in allowed.split(","):
        remedy = f"add etap to {engine.allow_list} or unset it"
        return Finding(engine.name, Verdict.BROKEN, f"{version}, {engine.allow_list}={allowed} leaves etap out", remedy)
    if reason := _why_probe_fails(engine.probe):
        remedy = f"{engine.name} does not come up with the plugin here; its own error is on the left"
        return Finding(engine.name, Verdict.BROKEN, f"{version}, not registered: {reason}", remedy)
    return Finding(engine.name, Verdict.OK, f"{version}, backend registered")


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


@app.command()
def doctor() -> None:
    """Check GPU, driver, compiled library and engines; exit with 1 when something that decoding needs is broken."""
    checks = [("GPU", check_gpu), ("driver", check_driver), ("library", check_library)]
    checks += [(engine.name, lambda engine=engine: check_engine(engine)) for engine in ENGINES]
    findings = []
    with _progress() as progress:
        task = progress.add_task("", total=None)
        for name, check in checks:
            progress.update(task, description=f"checking {name}")
            findings.append(check())
    table = Table(title=f"etap-backend {etap_backend.__version__}, torch {torch.__version__}", title_justify="left")
    for column in ("part", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.part, finding.verdict.value, finding.found, finding.remedy)
    console.print(table)
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise typer.Exit(1)


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


@dataclass(frozen=True)
class DemoBatch:
    """A ragged batch in a paged cache; what no request owns holds NaN and wild page numbers."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @staticmethod
    def random(lengths: list[int], heads: int, device: str, seed: int, page_size: int = 64) -> "DemoBatch":
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages), generator=generator).to(torch.int32)
        table = torch.full((len(lengths), max(pages)), torch.iinfo(torch.int32).max, dtype=torch.int32)
        cache = torch.full((sum(pages), page_size, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
        for request, used in enumerate(order.split(pages)):
            table[request, : len(used)] = used
            tokens = torch.randn(lengths[request], HEAD_DIM, generator=generator).bfloat16()
            for page, rows in zip(used.tolist(), tokens.split(page_size), strict=True):
                cache[page, : len(rows)] = rows
        q = torch.randn(len(lengths), 1, heads, HEAD_DIM, generator=generator).bfloat16()
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        return DemoBatch(q.to(device), cache.to(device), table.to(device), seq_lens.to(device))


def _microseconds(run, device: str) -> float:
    """Median time of one call; on a GPU between two events, after the first calls have warmed it up."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def _choose_device(device: Device) -> tuple[str, str]:
    """Where the demo runs, and the sentence that says so."""
    reason = "the CPU was asked for"
    if device is not Device.cpu:
        finding = check_gpu()
        if finding.verdict is Verdict.OK:
            return "cuda", f"[bold]the compiled sm_90a kernels[/] on {torch.cuda.get_device_name()}"
        if device is Device.cuda:
            raise typer.BadParameter(f"{finding.found}; {finding.remedy}", param_hint="--device")
        reason = finding.found
    return "cpu", f"[bold]the reference executor in plain torch[/] on the CPU, no GPU kernel ({reason})"


def _schedule(requests: int, heads: int, where: str) -> etap_backend.DecodeSchedule:
    finding = check_library()
    if finding.verdict is not Verdict.OK:
        console.print(f"[red]No demo without the compiled library, which also plans for the CPU.[/] {finding.found}")
        raise typer.Exit(1)
    return etap_backend.DecodeSchedule(requests, heads, device=where)


@app.command()
def demo(
    device: Annotated[Device, typer.Option(help="auto takes the GPU where there is a Hopper one.")] = Device.auto,
    heads: Annotated[int, typer.Option(min=1, help="Query heads; DeepSeek-R1 on 8 GPUs has 16 on each.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of lengths, queries and cache.")] = 0,
) -> None:
    """Decode one ragged batch through schedule, kernel and combination, and compare it with float64."""
    where, sentence = _choose_device(device)
    longest, requests = (8192, 16) if where == "cuda" else (1024, 6)
    lengths = torch.randint(1, longest, (requests,), generator=torch.Generator().manual_seed(seed)).tolist()
    scale = HEAD_DIM**-0.5
    with _progress() as progress:
        task = progress.add_task("making a ragged batch", total=None)
        batch = DemoBatch.random(lengths, heads, where, seed)
        schedule = _schedule(requests, heads, where).build(batch.seq_lens)
        inputs = (batch.q, batch.kv_cache, batch.block_table, batch.seq_lens)
        progress.update(task, description="decoding")
        out, lse = etap_backend.mla_decode(*inputs, schedule, softmax_scale=scale)
        outputs = {"out": out, "lse": lse}
        us = _microseconds(lambda: etap_backend.mla_decode(*inputs, schedule, softmax_scale=scale, **outputs), where)
        progress.update(task, description="decoding the same in float64, and in plain bfloat16")
        true_out, true_lse = mla_decode_reference(*inputs, scale)
        plain_out, _ = mla_decode_reference(*inputs, scale, dtype=torch.bfloat16)
    error, plain_error = relative_rmse(out, true_out), relative_rmse(plain_out, true_out)
    pieces = schedule.split_offsets.diff().clamp(min=1).tolist()

    console.print(f"Ran {sentence}.")
    console.print(f"{requests} requests of {min(lengths)} to {max(lengths)} tokens, {heads} heads, bfloat16")
    console.print(
        f"schedule     {sum(pieces)} pieces for {schedule.partitions} partitions, {max(pieces)} at most a request"
    )
    console.print(f"time         {us:,.0f} us a call")
    console.print(f"error        {error:.2e} relative RMSE against float64; plain bfloat16 torch has {plain_error:.2e}")
    console.print(f"log-sum-exp  {(lse.double() - true_lse).abs().max().item():.1e} at most")
    if not error <= 2 * plain_error:
        console.print("[red]The error is more than twice that of plain bfloat16 torch: this result is wrong.[/]")
        raise typer.Exit(1)


PASSED_ON = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}}


def _hand_over(context: typer.Context, run: Callable) -> None:
    """Let a command whose module is imported late read its own arguments."""
    command = typer.Typer(add_completion=False)
    command.command()(run)
    command(args=context.args, prog_name=context.command_path)


@app.command(**PASSED_ON, short_help="Measure the kernels, and compare them with others'.")
def bench(context: typer.Context) -> None:
    # Imported here: what it compares with and draws with is optional, and the other commands must work without.
    from etap_backend.lab.bench.command import bench as run

    _hand_over(context, run)


@app.command(**PASSED_ON, short_help="Say what fits on which GPUs, and what ETAP gains there.")
def plan(context: typer.Context) -> None:
    from etap_backend.lab.plan.command import plan as run

    _hand_over(context, run)


@app.command(**PASSED_ON, short_help="Serve a model with ETAP and with an engine's own backends, and compare.")
def e2e(context: typer.Context) -> None:
    from etap_backend.lab.e2e.command import e2e as run

    _hand_over(context, run)
