"""`python -m bench kernels GRID`: time ETAP's decode call and every installed peer in one process, on one GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import etap_backend
from bench.common import configs, results
from bench.common.provenance import provenance, sha256
from bench.common.stopping import Stopped, stopping
from bench.kernels import libraries, measure, providers, report
from bench.kernels.floors import Floor, floor_for
from bench.kernels.grids import Grid, KvDtype, read_grid
from bench.kernels.inputs import pool_of
from bench.kernels.libraries import Build
from bench.kernels.measure import Options
from bench.kernels.providers import Providers
from etap_backend import _library
from etap_backend.limits import COMPUTE_CAPABILITY


@dataclass(frozen=True)
class Run:
    """What a run measures, and how."""

    grid: Grid
    providers: Providers
    options: Options
    output: Path
    versions: dict[str, str]  # of the kernels of a --peers file
    builds: list[Build]
    left_out: list[str]  # labels of rows that do not fit in memory
    time_limit: float | None


def must_be_hopper() -> None:
    """Raises ValueError where there is no GPU that can run the kernels."""
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device: the kernels run on Hopper GPUs only")
    found = torch.cuda.get_device_capability()
    if found != COMPUTE_CAPABILITY:
        raise ValueError(f"wanted a GPU of compute capability 9.0 (Hopper), got {found[0]}.{found[1]}")


def kernels_of(builds: list[Build], peers: Path | None, h20_proxy: bool) -> tuple[Providers, dict[str, str]]:
    """The kernels that the arguments allow, and versions of those of a file. Raises ValueError, naming the argument."""
    if builds and peers:
        raise ValueError("--peers: wanted without --library, which compares builds of ETAP only")
    if builds:
        return providers.of_builds(builds), {}
    if h20_proxy and _library.PATH_VARIABLE not in os.environ:
        raise ValueError(f"--h20-proxy: wanted {_library.PATH_VARIABLE}, a library built with the throttled toolchain")
    # Installed peers are not throttled; a file's are taken to be.
    found = providers.own(providers.available()) if h20_proxy else providers.available()
    return providers.with_file(found, peers) if peers else (found, {})


def document_of(run: Run, gpu: str, floor: Floor | None) -> dict:
    """The results file of a run that begins now, without a row."""
    packages = ["etap-backend", *providers.packages(run.providers)]
    library = None if run.builds else _library.library_path()
    about = provenance("python -m bench kernels", packages=packages, library=library).model_dump()
    about["versions"] |= {"etap-backend": etap_backend.__version__, "torch": torch.__version__, **run.versions}
    names = list(dict.fromkeys(name for each in run.providers.values() for name in each))
    built = {build.name: {"sha256": sha256(build.path)} for build in run.builds}
    options = measure.options_of(run.options)
    return {
        **about,
        "gpu": gpu,
        "kind": "bench" if run.grid.workloads[0].call == "dense" else "bench-sparse",
        "grid": run.grid.name,
        "title": run.grid.title,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "options": {"kernels": names, "time_limit": run.time_limit, **options},
        "libraries": built,
        "published": [one.model_dump(mode="json") for one in run.grid.published],
        "floor": floor and {"bandwidth": floor.bandwidth, "flops": floor.flops, "text": floor.text},
        "left_out": run.left_out,
        "complete": False,
        "stopped": None,
        "rows": [],
    }


def measured(run: Run, progress: Progress) -> dict:
    """Measure row by row. After each row the file is whole; an older file stays until there is a row."""
    chip = torch.cuda.get_device_name()
    gpu = f"H20 proxy ({chip.removeprefix('NVIDIA ')} throttled)" if run.options.h20_proxy else chip
    workloads, task = run.grid.workloads, progress.add_task("", total=len(run.grid.workloads))
    document = document_of(run, gpu, floor_for(gpu, workloads[0].kind))
    with stopping(run.time_limit) as check:
        try:
            pool = pool_of(workloads)
            for workload in workloads:
                check()
                progress.update(task, description=workload.label)
                floor = floor_for(gpu, workload.kind)
                row = measure.measure(workload, pool, run.providers[workload.kind], run.options, floor)
                document["rows"].append(row)
                results.write(document, run.output)
                progress.advance(task)
            document["complete"] = True
        except Stopped as reason:
            document["stopped"] = str(reason)
        finally:
            if document["rows"] or not run.output.exists():
                results.write(document, run.output)
    return document


def output_of(output: Path | None, grid: Grid, kv_dtype: KvDtype | None, h20_proxy: bool) -> Path:
    """Where the results go. Raises ValueError, naming --output, when they cannot go there."""
    if output is None:
        suffix = ("-fp8" if kv_dtype == KvDtype.FP8 else "") + ("-h20-proxy" if h20_proxy else "")
        output = Path("results") / f"{grid.name}{suffix}.json"
        results.must_be_new(output)
    results.must_be_writable(output)
    return output


def fitting(grid: Grid) -> tuple[Grid, list[str]]:
    """The rows that fit in the GPU's free memory, and the labels of the others. Raises ValueError when none fits."""
    free = torch.cuda.mem_get_info()[0]
    kept, left_out = grid.within(free)
    if not kept.workloads:
        raise ValueError(f"grid: wanted rows that fit in {free / 1e9:.1f} GB of free memory, got none in {grid.name}")
    return kept, left_out


def main(
    grid: Annotated[str, typer.Argument(help=f"{', '.join(configs.shipped('grids'))}, or a TOML file like these.")],
    kv_dtype: Annotated[KvDtype | None, typer.Option(help="Type of the cache in all rows.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default results/GRID.json.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Time only this kernel; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this kernel out; may be repeated.")] = None,
    peers: Annotated[Path | None, typer.Option(help="Python file with more kernels; see bench/README.md.")] = None,
    library: Annotated[list[str] | None, typer.Option(help="NAME=PATH of a build to compare; repeated.")] = None,
    replays: Annotated[int, typer.Option(min=2, help="Graph replays per kernel and row.")] = 21,
    validate: Annotated[bool, typer.Option(help="Compare every timed call with float64 first.")] = True,
    h20_proxy: Annotated[bool, typer.Option("--h20-proxy", help="78 CTAs; ETAP_LIBRARY is throttled.")] = False,
    behind: Annotated[bool, typer.Option("--behind", help="Time calls behind another kernel, too.")] = False,
    time_limit: Annotated[float | None, typer.Option(help="Stop after this many seconds, keep the rows.")] = None,
) -> None:
    """Time ETAP's decode call and every installed peer side by side on one Hopper GPU."""
    stderr = Console(stderr=True)
    try:
        whole = read_grid(grid, kv_dtype)
        must_be_hopper()
        path = output_of(output, whole, kv_dtype, h20_proxy)
        kept, left_out = fitting(whole)
        builds = libraries.load(library or [])
        found, versions = kernels_of(builds, peers, h20_proxy)
        kernels = providers.chosen(found, dict.fromkeys(one.kind for one in kept.workloads), only or [], skip or [])
        options = Options(replays, validate, h20_proxy, behind)
        run = Run(kept, kernels, options, path, versions, builds, left_out, time_limit)
    except ValueError as error:
        stderr.print(f"bench kernels: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr, transient=True) as progress:
        document = measured(run, progress)
    typer.echo(report.text(document))
    if wrong := measure.problems(document):
        stderr.print(f"ETAP's results are wrong or missing: {'; '.join(wrong)}", style="red", markup=False)
    if wrong or not document["rows"]:
        raise typer.Exit(1)
