"""The command line of `etap estimate`.

    etap estimate results/e2e-decode-full-even-vllm.json --kernels results/targets.json \\
        --kernels results/targets-h20-proxy.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etap_backend.lab import results
from etap_backend.lab.bench.rows import Document
from etap_backend.lab.e2e.results_file import Document as Served
from etap_backend.lab.e2e.results_file import at_equal_host_speed
from etap_backend.lab.estimate.carry_over import TARGET_RANKS, estimate
from etap_backend.lab.estimate.results_file import TITLES, Estimate, cells_of, made_with
from etap_backend.lab.estimate.results_file import Document as Estimates
from etap_backend.lab.provenance import command_line, commit
from etap_backend.lab.screen import print_table

TARGETS = ("H20-96G", "H20-141G")


def table_of(served: Served, found: list[Estimate], target: str) -> Table:
    table = Table(title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.title = f"ESTIMATE for {TARGET_RANKS} x {target}, tensor parallel, from {served.gpus} x {served.gpu}"
    for number, title in enumerate(("requests", "backend", *TITLES, "tokens/s a GPU")):
        table.add_column(title.strip("*"), justify="left" if number < 2 else "right")
    for one in found:
        table.add_row(*cells_of(one), f"{one.tokens_per_second_per_gpu:.1f}")
    return table


def main(
    files: Annotated[list[Path], typer.Argument(help="Results files of `etap e2e`.")],
    kernels: Annotated[list[Path], typer.Option(help="Files of `etap bench`, of that GPU and of the H20 proxy.")],
    target: Annotated[str, typer.Option(help=f"{' or '.join(TARGETS)}.")] = TARGETS[0],
    output: Annotated[Path | None, typer.Option(help="JSON file for the estimates.")] = None,
) -> None:
    """Estimate from end-to-end readings what eight H20 would do."""
    console, written = Console(), {}
    try:
        if target.upper() not in TARGETS:
            raise ValueError(f"--target: wanted {' or '.join(TARGETS)}, for which the H20 proxy stands, got {target}")
        target = target.upper()
        if output:
            results.must_be_writable(output)
        benchmarks = {path: results.read(path, Document) for path in kernels}
        readings = {path: at_equal_host_speed(results.read(path, Served)) for path in files}
        for path, served in readings.items():
            try:
                found, reasons = estimate(served, list(benchmarks.values()), target)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            print_table(console, table_of(served, found, target))
            for reason in reasons:
                console.print(reason, markup=False, highlight=False)
            written[path.stem] = found
    except ValueError as error:
        Console(stderr=True).print(f"etap estimate: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    if output:
        command = command_line("python -m etap_backend.lab.estimate.command")
        sources = {path.name: made_with(vars(document)) for path, document in (readings | benchmarks).items()}
        made = Estimates(target=target, commit=commit(), command=command, sources=sources, estimates=written)
        results.write(made, output)


if __name__ == "__main__":
    typer.run(main)
