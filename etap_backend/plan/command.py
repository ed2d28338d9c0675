"""The command line of `etap plan`: what a model needs on a number of GPUs, and what ETAP gains there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from etap_backend.plan.alternatives import plan_of, what_fits
from etap_backend.plan.inputs import CACHE_NAMES, Deployment, cache_named, read_gpu, read_model
from etap_backend.plan.report import document, print_plan, sources_table
from bench.common.screen import print_table
from bench.common.units import parse_tokens

FLAGS = {"gpus": "--count", "cache": "--kv-dtype", "s_q": "--s-q", "attention_share": "--attention-share"} | {
    name: f"--{name}"
    for name in ("gpu", "tp", "dp", "pp", "dcp", "context", "batch", "utilization", "experts", "kernels")
}


def tensor_parallel(count: int, over: int) -> int:
    """GPUs that data and pipeline parallelism leave. Raises ValueError, naming the flag, when they do not divide."""
    if over > 0 and count % over:
        raise ValueError(f"--count: wanted a multiple of --dp x --pp = {over}, got {count}")
    return max(1, count // max(1, over))


def as_typed(error: Exception, flags: dict[str, str]) -> str:
    """What an error says, with the flag in the place of the planner's name."""
    name, colon, said = str(error).partition(": ")
    return flags.get(name, name) + colon + said


def plan(
    model: Annotated[
        str, typer.Argument(help="A shipped model's name, the hub's included, or a config.json or its folder.")
    ] = "deepseek-r1",
    gpu: Annotated[
        str, typer.Option(help="A shipped GPU's name, or a file like those of configs/hardware.")
    ] = "H20-141G",
    count: Annotated[int, typer.Option(help="GPUs.")] = 8,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallel; all GPUs that dp and pp leave when not given.")
    ] = None,
    dp: Annotated[int, typer.Option(help="Data parallel attention.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel.")] = 1,
    dcp: Annotated[int, typer.Option(help="Decode context parallel.")] = 1,
    cache: Annotated[
        str, typer.Option("--kv-dtype", "--cache", help=f"Of the KV cache: {', '.join(CACHE_NAMES)}.")
    ] = "auto",
    context: Annotated[str, typer.Option(help="Tokens of each request, such as 65536, 64K or 1M.")] = "16K",
    batch: Annotated[int, typer.Option(help="Requests that decode at the same time.")] = 16,
    s_q: Annotated[int, typer.Option(help="Query tokens per step: 1 + draft tokens of multi-token prediction.")] = 1,
    utilization: Annotated[float, typer.Option(help="Share of the memory that the engine may take.")] = 0.92,
    experts: Annotated[
        float | None, typer.Option(help="Routed experts of a layer that a step reads, instead of an even choice.")
    ] = None,
    attention_share: Annotated[
        float | None, typer.Option(help="Measured share of a padded kernel in a step, instead of the estimate.")
    ] = None,
    kernels: Annotated[
        list[Path] | None,
        typer.Option(help="Files of `etap bench sparse` or `v4`, which tell a sparse call's time, not the GPU's own."),
    ] = None,
    sources: Annotated[bool, typer.Option("--sources", help="Also show where each number is from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what fits on these GPUs, how long decode attention takes there, and what ETAP gains."""
    derived = {"tp": "--count" if dp * pp == 1 else "--count / (--dp x --pp)"} if tp is None else {}
    try:
        described, hardware = read_model(model), read_gpu(gpu)
        ranks = tensor_parallel(count, dp * pp) if tp is None else tp
        tokens = parse_tokens(context, "context: ")
        held = cache_named(cache, described)
        on = Deployment(count, ranks, dp, pp, dcp, held, tokens, batch, s_q, utilization, experts)
        made = plan_of(described, hardware, on, attention_share, kernels)
        found = what_fits(described, hardware, on, attention_share, kernels)
    except (ValueError, ImportError) as error:  # the compiled library says how it groups query rows
        said = as_typed(error, FLAGS | derived)
        Console(stderr=True).print(f"etap plan: {said}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps(document(model, described, hardware, on, made, found), indent=1, allow_nan=False))
        return
    console = Console()
    print_plan(model, described, hardware, on, made, found, console)
    if sources:
        print_table(console, sources_table(hardware, described, made))
