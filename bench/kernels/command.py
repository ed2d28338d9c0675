"""The command line of `etap bench`: our call and every installed peer, in one process on the same tensors."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from etap_backend import _library
from bench.common import configs, results
from bench.kernels import libraries, providers, report
from bench.kernels.grids import Grid, Workload, read_grids
from bench.kernels.libraries import Build
from bench.kernels.measure import H20_SMS
from bench.kernels.providers import Kernels
from bench.kernels.rows import DROP_INS, OWN, Document, Options, problems
from bench.kernels.run import header, run
from etap_backend.limits import COMPUTE_CAPABILITY

KV_DTYPES = ("same", "fp8")


def why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device: the kernels run on Hopper GPUs only, and there is nothing to time without one"
    found = torch.cuda.get_device_capability()
    if found != COMPUTE_CAPABILITY:
        return f"wanted a GPU of compute capability 9.0 (Hopper), got {found[0]}.{found[1]}"
    return None


def kernels_of(
    builds: list[Build], peers_file: Path | None, h20_proxy: bool, folder: Path, *, drop_ins: bool = False
) -> Kernels:
    """The kernels that the arguments allow. Raises ValueError, naming the argument, when they cannot be had."""
    if builds and drop_ins:
        raise ValueError("--library: wanted without a grid of drop-ins, which are beside others' calls")
    if builds:
        if len({build.name for build in builds}) < len(builds):
            raise ValueError("--library: wanted different names")
        if peers_file:
            raise ValueError("--peers: wanted without --library, which compares builds of our own only")
        return providers.of_libraries({build.name: libraries.load(build, folder) for build in builds})
    if h20_proxy and _library.PATH_VARIABLE not in os.environ:
        raise ValueError(
            f"--h20-proxy: wanted {_library.PATH_VARIABLE}, the library built with the throttled toolchain, "
            "but it is not set"
        )
    found = providers.of_drop_ins() if drop_ins else providers.installed()
    if h20_proxy:  # the installed peers' binaries are not throttled; those of a file are taken to be
        found = providers.ours(found)
    return providers.with_file(found, peers_file) if peers_file else found


def chosen(kernels: Kernels, grid: Grid, only: list[str], skip: list[str]) -> Kernels:
    """The kernels asked for, or those that are installed. Raises ValueError, naming the argument, for others."""
    names = kernels.names(grid.workloads)
    known = {name.lower(): name for name in names}
    for argument, asked in (("--only", only), ("--skip", skip)):
        if unknown := [name for name in asked if name.lower() not in known]:
            raise ValueError(f"{argument}: wanted one of {', '.join(names)}, got {', '.join(unknown)}")
    there = {name for each in kernels.of_kinds.values() for name, provider in each.items() if provider.there}
    wanted = [known[name.lower()] for name in only] or [n for n in names if n in (*OWN, *DROP_INS) or n in there]
    skipped = {known[name.lower()] for name in skip}
    if left := [name for name in wanted if name not in skipped]:
        return kernels.chosen(left)
    raise ValueError("--skip: wanted at least one kernel left to time, got none")


def path_of(output: Path | None, name: str, kv_dtype: str | None, h20_proxy: bool) -> Path:
    """Where the results go. Raises ValueError, naming the argument, when they cannot go there."""
    if output is None:
        suffix = ("-fp8" if kv_dtype == "fp8" else "") + ("-h20-proxy" if h20_proxy else "")
        output = Path("results") / f"{name}{suffix}.json"
        results.must_be_new(output)
    results.must_be_writable(output)
    return output


def _run(document: Document, grid: Grid, kernels: Kernels, settings: Options, path: Path, console: Console) -> Document:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(grid.workloads), completed=-1)

        def show(workload: Workload) -> None:
            progress.update(task, advance=1, description=workload.label)

        return run(document, grid.workloads, kernels, settings, path, show)


def bench(
    grids: Annotated[
        list[str],
        typer.Argument(help=f"Shapes to time: {', '.join(configs.shipped('bench'))}, or a file like configs/bench's."),
    ],
    kv_dtype: Annotated[str | None, typer.Option(help="Of the cache in all rows: fp8, or same as the query.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; results/<grid>.json when not given.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Time only this kernel; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this kernel out; may be repeated.")] = None,
    peers: Annotated[Path | None, typer.Option(help="Python file with further kernels; see docs/measuring.md.")] = None,
    library: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of a library, or of a package with one: time these in turns; repeated."),
    ] = None,
    replays: Annotated[int, typer.Option(min=2, help="Graph replays a kernel and row.")] = 21,
    validate: Annotated[bool, typer.Option(help="Compare every timed output with float64.")] = True,
    num_sms: Annotated[int | None, typer.Option(min=1, help="CTAs of our launch; the GPU's when not given.")] = None,
    h20_proxy: Annotated[bool, typer.Option(help="78 CTAs and throttled libraries, ours in ETAP_LIBRARY.")] = False,
    behind: Annotated[bool, typer.Option("--behind", help="Time calls behind another kernel, too.")] = False,
    traffic: Annotated[float, typer.Option(min=0, help="TB/s that the proxy's held SMs read meanwhile.")] = 0.0,
    time_limit: Annotated[float | None, typer.Option(help="Stop after this many seconds, keep the rows.")] = None,
) -> None:
    """Time the decode call and every installed peer side by side on one Hopper GPU."""
    stderr = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="etap-bench-") as folder:
        try:
            if kv_dtype not in (None, *KV_DTYPES):
                raise ValueError(f"--kv-dtype: wanted {' or '.join(KV_DTYPES)}, got {kv_dtype}")
            if traffic and not h20_proxy:
                raise ValueError(f"--traffic: wanted with --h20-proxy, whose held SMs read, got {traffic} without it")
            builds = [libraries.parse(text) for text in library or []]
            whole = read_grids(grids, kv_dtype)
            if reason := why_no_gpu():
                raise ValueError(reason)
            free = torch.cuda.mem_get_info()[0]
            path = path_of(output, whole.name, kv_dtype, h20_proxy)
            grid, left_out = whole.within(free)
            if not grid.workloads:
                wanted = f"rows that fit in {free / 1e9:.1f} GB of free memory"
                raise ValueError(f"grid: wanted {wanted}, got none in {whole.name}")
            known = kernels_of(builds, peers, h20_proxy, Path(folder), drop_ins=grid.calls == "drop-ins")
            kernels = chosen(known, grid, only or [], skip or [])
        except ValueError as error:
            stderr.print(f"etap bench: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(2) from error
        how = {"replays": replays, "validated": validate, "num_sms": H20_SMS if h20_proxy else num_sms}
        settings = Options(**how, h20_proxy=h20_proxy, behind=behind, traffic=traffic)
        document = header(grid, left_out, kernels, settings, builds, time_limit)
        document = _run(document, grid, kernels, settings, path, stderr)
    typer.echo(report.text(document))
    if wrong := problems(document):
        stderr.print(f"wrong or missing results of our own: {'; '.join(wrong)}", style="red", markup=False)
    if wrong or not document.rows:
        raise typer.Exit(1)
