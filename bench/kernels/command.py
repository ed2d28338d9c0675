"""`python -m bench kernels GRID`: time ETAP's decode call and every installed peer in one process, on one GPU."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

import etap_backend
from bench.common import configs, results
from bench.common.provenance import provenance, sha256
from bench.kernels import libraries, measure, providers, report
from bench.kernels.floors import floor_for
from bench.kernels.grids import Grid, KvDtype, read_grid
from bench.kernels.inputs import Pool
from bench.kernels.libraries import Build
from bench.kernels.measure import Options
from bench.kernels.providers import Providers
from etap_backend import _library
from etap_backend.limits import COMPUTE_CAPABILITY


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
    found = providers.own() if h20_proxy else providers.AVAILABLE  # installed peers are not throttled
    return providers.with_file(found, peers) if peers else (found, {})


def document_of(grid: Grid, builds: list[Build], options: Options, versions: dict) -> dict:
    """The results file of a run that begins now, without a row."""
    about = provenance("python -m bench kernels")
    about["versions"] |= {"etap-backend": etap_backend.__version__, "torch": torch.__version__, **versions}
    about |= {"library_sha256": None} if builds else {}
    chip = torch.cuda.get_device_name()
    gpu = f"H20 proxy ({chip.removeprefix('NVIDIA ')} throttled)" if options.h20_proxy else chip
    floor = floor_for(gpu, grid.workloads[0].kind)
    return {
        **about,
        "gpu": gpu,
        "kind": "bench" if grid.workloads[0].call == "dense" else "bench-sparse",
        "grid": grid.name,
        "title": grid.title,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "options": asdict(options),
        "libraries": {build.name: {"sha256": sha256(build.path)} for build in builds},
        "published": grid.published,
        "floor": floor and {**floor._asdict(), "text": floor.text},
        "complete": False,
        "rows": [],
    }


def run(document: dict, grid: Grid, kernels: Providers, options: Options, output: Path) -> None:
    """Measure row by row; after each row the file is whole."""
    pool = Pool(grid.workloads)
    for index, workload in enumerate(grid.workloads):
        typer.echo(f"{index + 1} of {len(grid.workloads)}: {workload.label}", err=True)
        row = measure.measure(workload, pool, kernels[workload.kind], options, document["gpu"])
        document["rows"].append(row)
        document["complete"] = len(document["rows"]) == len(grid.workloads)
        results.write(document, output)


def main(
    grid: Annotated[str, typer.Argument(help=f"{', '.join(configs.shipped('grids'))}, or a TOML file like these.")],
    kv_dtype: Annotated[KvDtype, typer.Option(help="fp8: an FP8 cache in all rows; same: as the grid says.")] = "same",
    output: Annotated[Path | None, typer.Option(help="JSON file; default results/GRID.json.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Time only this kernel; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this kernel out; may be repeated.")] = None,
    peers: Annotated[Path | None, typer.Option(help="Python file with more kernels; see bench/README.md.")] = None,
    library: Annotated[list[str] | None, typer.Option(help="NAME=PATH of a build to compare; repeated.")] = None,
    replays: Annotated[int, typer.Option(min=2, help="Graph replays per kernel and row.")] = 21,
    validate: Annotated[bool, typer.Option(help="Compare every timed call with float64 first.")] = True,
    h20_proxy: Annotated[bool, typer.Option("--h20-proxy", help="78 CTAs; ETAP_LIBRARY is throttled.")] = False,
    behind: Annotated[bool, typer.Option("--behind", help="Time calls behind another kernel, too.")] = False,
) -> None:
    """Time ETAP's decode call and every installed peer side by side on one Hopper GPU."""
    try:
        whole = read_grid(grid, kv_dtype == "fp8")
        must_be_hopper()
        suffix = ("-fp8" if kv_dtype == "fp8" else "") + ("-h20-proxy" if h20_proxy else "")
        path = output or Path("results") / f"{whole.name}{suffix}.json"
        if output is None:
            results.must_be_new(path)
        results.must_be_writable(path)
        kept, left_out = whole.within(free := torch.cuda.mem_get_info()[0])
        if not kept.workloads:
            raise ValueError(f"grid: wanted rows that fit in {free / 1e9:.1f} GB of free memory, got none in {grid}")
        builds = libraries.load(library or [])
        found, versions = kernels_of(builds, peers, h20_proxy)
        if not builds and any(one.common for one in kept.workloads):
            found = providers.with_shared_prefixes(found)
        kernels = providers.chosen(found, dict.fromkeys(one.kind for one in kept.workloads), only or [], skip or [])
    except ValueError as error:
        typer.secho(f"bench kernels: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    options = Options(replays, validate, h20_proxy, behind)
    document = document_of(kept, builds, options, versions) | {"left_out": left_out}
    run(document, kept, kernels, options, path)
    typer.echo(report.text(kept.name, document))
    if wrong := measure.problems(document):
        typer.secho(f"ETAP's results are wrong or missing: {'; '.join(wrong)}", fg="red", err=True)
        raise typer.Exit(1)
