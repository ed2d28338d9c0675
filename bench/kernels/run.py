"""One run of `etap bench`: its header, and row by row a file that is whole whatever ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import etap_backend
from etap_backend import _library
from bench.common import results
from bench.kernels import libraries, measure, tensors
from bench.kernels.floors import floor_for
from bench.kernels.grids import Grid, V4Workload, Workload
from bench.kernels.libraries import Build
from bench.kernels.providers import Kernels
from bench.kernels.rows import DROP_INS, OURS, Document, Options, SparseDocument, dumped
from bench.common.provenance import provenance
from bench.common.stopping import Stopped, stopping


def header(
    grid: Grid, left_out: list[str], kernels: Kernels, settings: Options, builds: list[Build], limit: float | None
) -> Document:
    """The document of a run that begins now, without a row."""
    about = provenance("etap bench", packages=kernels.packages, library=None if builds else _library.library_path())
    chip = torch.cuda.get_device_name()
    gpu = f"H20 proxy ({chip.removeprefix('NVIDIA ')} throttled)" if settings.h20_proxy else chip
    versions = {**about.versions, "etap-backend": etap_backend.__version__, **kernels.versions}
    versions |= {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    # Nobody has measured what gathering rows of 584 bytes takes.
    floor = None if isinstance(grid.workloads[0], V4Workload) else floor_for(gpu, sparse=grid.sparse)
    return (SparseDocument if grid.sparse else Document)(
        **about.model_copy(update={"gpu": gpu, "versions": versions}).model_dump(),
        grid=grid.name,
        title=grid.title,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        options=settings.model_copy(update={"kernels": kernels.names(grid.workloads), "time_limit": limit}),
        libraries={build.name: libraries.described(build) for build in builds},
        published=list(grid.published),
        floor=floor and floor.said(fp8=any(workload.fp8 for workload in grid.workloads)),
        left_out=left_out,
    )


def run(
    document: Document,
    workloads: tuple[Workload, ...],
    kernels: Kernels,
    settings: Options,
    output: Path,
    progress: Callable[[Workload], None],
) -> Document:
    """Measure row by row, `progress` being told each before; what was measured is in `output` whatever ends the run.

    An older file there stays as it is until there is a row.
    """
    rows = []
    with stopping(document.options.time_limit) as check:
        try:
            pool = tensors.pool_of(workloads)
            document = document.model_copy(update=_once(document, workloads[0], pool, kernels, settings))
            for workload in workloads:
                check()
                progress(workload)
                rows.append(measure.measure(workload, pool, kernels, settings, document.floor))
                document = document.model_copy(update={"rows": list(rows)})
                results.write(dumped(document), output)
            document = document.model_copy(update={"complete": True})
        except Stopped as reason:
            document = document.model_copy(update={"stopped": str(reason)})
        finally:
            if document.rows or not output.exists():
                results.write(dumped(document), output)
    return document


def _once(document: Document, first: Workload, pool: tensors.Pool, kernels: Kernels, settings: Options) -> dict:
    """What is measured once per run: what a call of ours takes of the host, and building a schedule.

    With a grid of drop-ins: what calls of theirs and of the originals take, and those with a plan. On the proxy not
    even that: the originals there are kernels without their Python.
    """
    there = [*kernels.of(first)]
    if not {*there}.isdisjoint(DROP_INS):
        if settings.h20_proxy:
            return {}
        return {"host_calls": measure.measure_hosts(first, pool, kernels, there, settings, plans=True)}
    names = [name for name in (OURS, *document.libraries) if name in there]
    found: dict = {"host_calls": measure.measure_hosts(first, pool, kernels, names, settings, plans=False)}
    if OURS in names and not isinstance(document, SparseDocument):  # whose call needs no schedule
        found["schedule_build"] = measure.measure_schedule(settings)
    return found
