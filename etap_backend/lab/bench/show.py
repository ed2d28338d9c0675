"""The command line of `etap report`: benchmark results again, as tables and pictures, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from etap_backend.lab.bench import plots, report, rows


def show(
    files: Annotated[list[Path], typer.Argument(help="Results files of `etap bench`.")],
    plot: Annotated[
        list[str] | None, typer.Option(help=f"Also draw beside each file: {', '.join(plots.KINDS)}; repeated.")
    ] = None,
) -> None:
    """Print benchmark results again, and draw them; pages are filled by `python -m etap_backend.lab.tables`."""
    console = Console()
    try:
        documents = {path: rows.read(path) for path in files}
        for path, document in documents.items():
            report.print_document(document, console)
            for kind in plot or []:
                plots.plot(document, kind, path.with_suffix(""))
    except ValueError as error:
        Console(stderr=True).print(f"etap report: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
