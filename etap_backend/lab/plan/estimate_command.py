"""The command line of `etap estimate`.

    etap estimate results/e2e-decode-full-vllm.json --kernels results/targets.json \\
        --kernels results/targets-h20-proxy.json
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etap_backend.lab import results
from etap_backend.lab.bench.rows import Document
from etap_backend.lab.e2e.rows import Document as Served
from etap_backend.lab.e2e.rows import at_equal_host_speed
from etap_backend.lab.plan.estimate import Estimate, estimate
from etap_backend.lab.plan.served import TARGET_RANKS
from etap_backend.lab.provenance import Provenance, command_line, commit

COLUMNS = (
    *("requests", "backend", "step here", "of it attention", "rest x"),
    *("other experts", "attention there", "step there ms", "tokens/s a GPU"),
)


def table_of(served: Served, found: list[Estimate], target: str) -> Table:
    table = Table(title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.title = f"ESTIMATE for {TARGET_RANKS} x {target}, tensor parallel, from {served.gpus} x {served.gpu}"
    for number, title in enumerate(COLUMNS):
        table.add_column(title, justify="left" if number < 2 else "right")
    for one in found:
        here = (one.step_here_ms, one.attention_here_ms, one.rest_factor)
        cells = [f"{number:.2f}" for number in (*here, one.experts_there_ms, one.attention_there_ms, one.step_ms)]
        table.add_row(one.shape, one.backend, *cells, f"{one.tokens_per_second_per_gpu:.1f}")
    return table


def made_with(path: Path) -> dict:
    """What a results file says of how it was made."""
    content = results.read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: wanted a results file, got {type(content).__name__}")
    return {key: content[key] for key in Provenance.model_fields if key in content}


def main(
    files: Annotated[list[Path], typer.Argument(help="Results files of `etap e2e`.")],
    kernels: Annotated[list[Path], typer.Option(help="Files of `etap bench`, of that GPU and of the H20 proxy.")],
    target: Annotated[str, typer.Option(help="A GPU of configs/hardware.")] = "H20-96G",
    output: Annotated[Path | None, typer.Option(help="JSON file for the estimates.")] = None,
) -> None:
    """Estimate from end-to-end readings what eight H20 would do."""
    console, written = Console(), {}
    try:
        if output:
            results.must_be_writable(output)
        sources = {path.name: made_with(path) for path in (*files, *kernels)}
        benchmarks = [results.read(path, Document) for path in kernels]
        for path in files:
            served = at_equal_host_speed(results.read(path, Served))
            try:
                found, reasons = estimate(served, benchmarks, target)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            console.print(table_of(served, found, target))
            for reason in reasons:
                console.print(reason, markup=False, highlight=False)
            written[path.stem] = [asdict(one) for one in found]
    except ValueError as error:
        Console(stderr=True).print(f"etap estimate: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    if output:
        command = command_line("python -m etap_backend.lab.plan.estimate_command")
        about = {"kind": "estimate", "target": target, "commit": commit(), "command": command, "sources": sources}
        results.write({**about, "estimates": written}, output)


if __name__ == "__main__":
    typer.run(main)
