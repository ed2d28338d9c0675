"""`etap e2e`: ETAP and an engine's own attention backends behind the same server flags and the same load, in turn."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

import etap_backend
from etap_backend import _library
from bench.common import gpus as driver
from bench.common import results
from bench.e2e import report
from bench.e2e import results_file as rows
from bench.e2e import scenario as asked
from bench.e2e.model import Prepared, parse_changes, prepare_model, serving_of
from bench.e2e.results_file import Document, Layout
from bench.e2e.scenario import Case, EngineScenario, Scenario, cases_of, chosen, read_scenario, turns_of
from bench.e2e.turns import Run, of_cache
from bench.common.provenance import provenance
from bench.serving.engines import ENGINES, Engine, Serving
from bench.common.stopping import Stopped, stopping
from bench.common.units import parse_tokens

ASK_SECONDS = 120
SHOWN_PORT, SHOWN_RESULT = 8000, Path("r.json")


def must_have_gpus(wanted: int) -> None:
    """Raises ValueError where there are not so many."""
    if not (found := len(driver.gpus())):
        raise ValueError("no GPU: the driver sees none, and engines serve on Hopper GPUs only; --show needs none")
    if found < wanted:
        raise ValueError(f"--gpus: wanted {wanted} GPUs, this machine shows {found}")


def engine_versions(engine: Engine, python: str) -> tuple[str, dict[str, str]]:
    """Python's version and those of the packages that matter, as the engine's interpreter has them.

    Raises ValueError when there is no such interpreter, or no such engine in it.
    """
    packages = (engine.package, "torch", "apache-tvm-ffi", "flashinfer-python", "triton", "etap-backend")
    program = (
        "import importlib.metadata as m, json, sys\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return None\n"
        f"print(json.dumps([sys.version.split()[0], {{name: version(name) for name in {packages!r}}}]))"
    )
    try:
        asked = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=ASK_SECONDS)
        if asked.returncode:
            raise ValueError(asked.stderr.strip()[-300:])
        version, versions = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(f"--python: wanted the engine's interpreter, got {python}: {error}") from error
    if not versions[engine.package]:
        raise ValueError(f"--engine: wanted {engine.package} installed for {python}, found none")
    found = {package: number for package, number in versions.items() if number}
    return version, found | {"etap-backend": etap_backend.__version__}


def document_of(
    scenario: Scenario, engine: Engine, specific: EngineScenario, prepared: Prepared, serving: Serving, python: str
) -> Document:
    """An empty one. Raises ValueError when the interpreter has no such engine."""
    version, versions = engine_versions(engine, python)
    about = provenance("etap e2e", versions=versions, python=version, library=_library.library_path())
    return Document(
        **about.model_dump(),
        title=scenario.title,
        engine=engine.name,
        model=scenario.model,
        weights=prepared.what,
        dummy=prepared.dummy,
        model_shape=prepared.config,
        gpus=scenario.gpus,
        layout=Layout(tp=serving.tp, pp=serving.pp, dp=serving.dp, dcp=serving.dcp),
        draft_tokens=scenario.draft_tokens,
        acceptance=serving.acceptance,
        kv_dtype=scenario.kv_dtype,
        environment={**scenario.environment, **specific.environment},
        method=report.METHOD,
    )


def show_commands(
    engine: Engine, serving: Serving, backends: list[str], cases: list[Case], python: str, flags: list[str]
) -> None:
    """Those of every server, and of the load generator at every point."""
    asked_of = (of_cache(backend, serving) for backend in backends)
    servers = [engine.server(python, served, name, SHOWN_PORT, flags) for name, served in asked_of]
    loads = [engine.load(serving, case.load, SHOWN_PORT, SHOWN_RESULT) for case in cases]
    console = Console()
    for command in [*servers, *([python, "-m", engine.load_module, *load] for load in loads)]:
        console.print(shlex.join(command), markup=False, highlight=False, soft_wrap=True)
    if serving.dummy:
        console.print(f"A run writes the model's folder: {serving.model}", soft_wrap=True)


def resumed(path: Path, fresh: Document) -> Document:
    """The document in `path` to go on with, as another run. Raises ValueError when it is of another comparison."""
    try:
        before = rows.read(path)
        rows.must_be_comparable(before, fresh)
    except ValueError as error:
        raise ValueError(f"--resume: {path}: {str(error).removeprefix(f'{path}: ')}") from error
    [about] = fresh.all_runs
    changes = about.model_dump() | {"runs": [*before.all_runs, about], "complete": False, "stopped": None}
    return before.model_copy(update=changes)


def _refuse(text: str) -> typer.Exit:
    Console(stderr=True).print(f"etap e2e: {text}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


def e2e(
    scenario: Annotated[str, typer.Argument(help="A file, or the name of one of configs/e2e.")],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose server and load generator.")] = "vllm",
    model: Annotated[
        str | None, typer.Option(help="Folder or name of real weights, or a name of configs/models.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this attention backend; may be repeated. With +fp8 behind it: from an FP8 cache."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs, instead of the scenario's.")] = None,
    dcp: Annotated[
        int | None, typer.Option(min=1, help="Decode context parallel, over so many of the tensor-parallel ranks.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of a dummy model.")] = None,
    rank_of: Annotated[
        int | None, typer.Option(min=1, help="Give each GPU the work of one of so many tensor-parallel ranks.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a dummy model's config.json; may be repeated.")
    ] = None,
    context: Annotated[list[str] | None, typer.Option(help="Only points of this input length, such as 16K.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Only this concurrency; may be repeated.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Readings of each point, instead of the scenario's.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Also profile some decode steps of this point, as 16x16K, for attention's share.")
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Servers of each backend, in turn: A B A B; they share the readings.")
    ] = 1,
    together: Annotated[bool, typer.Option("--together", help="All servers at once; flags divide the memory.")] = False,
    flag: Annotated[list[str] | None, typer.Option(help="One more flag for the server, as --flag=--x=y.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, one more variable for the server; kept in the output.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file; results/e2e-<scenario>-<engine>.json if absent.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Stop after this many seconds, keep what there is.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the output file; measure what it lacks.")
    ] = False,
    python: Annotated[str, typer.Option(help="Interpreter that has the engine.")] = sys.executable,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this machine.")] = "",
    plots: Annotated[bool, typer.Option(help="Draw a plot beside the JSON file.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Print the commands, run and write nothing.")] = False,
) -> None:
    """Serve one model with ETAP and with the engine's own attention backends, and compare what users see."""
    begin = time.monotonic()
    named, output = bool(output), output or Path("results") / f"e2e-{Path(scenario).stem}-{engine}.json"
    try:
        wanted = read_scenario(scenario)
        updates = {"model": model, "gpus": gpus, "decode_context_parallel": dcp}
        wanted = wanted.model_copy(update={key: value for key, value in updates.items() if value is not None})
        if (specific := getattr(wanted, engine)) is None:
            raise ValueError(f"{scenario}: wanted a table [{engine}], found none")
        variables = {**specific.environment, **asked.parse_variables(env or [])}
        specific = specific.model_copy(update={"environment": variables})
        points = chosen(wanted.points, [parse_tokens(text) for text in context or []], concurrency)
        known = {name.lower(): name for name in specific.backends}
        order = turns_of([known.get(name.lower(), name) for name in backend or specific.backends], turns)
        least = max(turn.of for turn in order)  # each server is to have a reading of every point
        cases = cases_of(
            [point.model_copy(update={"repeats": max(repeats or point.repeats, least)}) for point in points]
        )
        asked_for, folder = parse_changes(changes or [], layers), output.with_suffix("") / "model"
        prepared = prepare_model(wanted.model, asked_for, rank_of, wanted.tensor_parallel, folder)
        serving, served_by = serving_of(wanted, prepared, cases), ENGINES[engine]
        for turn in order:
            of_cache(turn.backend, serving)
        if together and turns > 1:
            raise ValueError("--together: wanted one server of each backend, got --turns")
        profiled = asked.parse_profile(profile, cases)
        if show:
            backends = list(dict.fromkeys(turn.backend for turn in order))
            show_commands(served_by, serving, backends, cases, python, [*specific.flags, *(flag or [])])
            return
        must_have_gpus(wanted.gpus)
        if not (named or resume):
            results.must_be_new(output, ", or --resume to go on with it")
        document = document_of(wanted, served_by, specific, prepared, serving, python)
        document.note = note
        if resume and output.exists():
            document = resumed(output, document)
        results.must_be_writable(output)
        prepared.write()
    except (ValueError, OSError) as error:
        raise _refuse(str(error)) from error
    run = Run(
        engine=served_by,
        scenario=wanted,
        specific=specific,
        serving=serving,
        cases=cases,
        turns=order,
        python=python,
        flags=flag or [],
        output=output,
        document=document,
        deadline=None if time_limit is None else begin + time_limit,
        console=Console() if sys.stdout.isatty() else Console(width=180),
        profile=profiled,
        together=together,
    )
    run.console.print(f"{wanted.title}: {prepared.what}, {wanted.gpus} GPUs", markup=False)
    try:
        with stopping(time_limit):
            run.all()
        document.complete = True
    except Stopped as reason:
        document.stopped = str(reason)
    finally:
        run.write()
    finish(document, output, run.console, plots)


def finish(document: Document, output: Path, console: Console, plots: bool) -> None:
    """Show what a run has measured; it failed where a server or a point did, and where there is no reading."""
    report.print_document(document, console)
    if plots and document.measured():
        report.plot(document, output.with_suffix(".png"))
    if problems := report.problems(document):
        raise _refuse("failed: " + "; ".join(problems))
    if document.stopped and not document.measured():
        raise _refuse(f"stopped {document.stopped}, before the first reading")
