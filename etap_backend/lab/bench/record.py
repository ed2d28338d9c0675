"""The command line of `etap record`: one group of results measured again, in one process on one GPU, into one folder.

    ETAP_COMMIT=1a2b3c4 etap record h200 --output records                       # then copy records/*.json to results/
    ETAP_COMMIT=1a2b3c4 ETAP_LIBRARY=throttled.so etap record h20-proxy --output records --peers peers.py

Each result is made by the command that stands in it, so that anybody can make it alone. A machine without git is told
the commit. What is complete in the folder is not measured again, so that a call that was cut short is called again.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from etap_backend.lab import ages, provenance, results
from etap_backend.lab.bench import command
from etap_backend.lab.configs import Strict, find, read_toml, shipped


class Group(Strict):
    """A file of configs/record: what `etap bench` is given for each result, and which also have `peers` of a file."""

    results: dict[str, str]
    peers: list[str] = []


GROUPS = {name: read_toml(find("record", name), Group) for name in shipped("record")}


def commands(names: list[str]) -> dict[str, list[str]]:
    """The words of `etap bench` for each result that groups, or results by their names, mean.

    Raises ValueError for a name that is neither.
    """
    every = {name: shlex.split(words) for group in GROUPS.values() for name, words in group.results.items()}
    found = {}
    for name in names:
        if name not in GROUPS and name not in every:
            raise ValueError(f"names: wanted {', '.join(GROUPS)}, or some of {', '.join(every)}, got {name}")
        found |= {one: every[one] for one in (GROUPS[name].results if name in GROUPS else [name])}
    return found


def clean_commit() -> str:
    """The commit of this run. Raises ValueError, naming ETAP_COMMIT, when there is none or the tree has changes."""
    commit = provenance.commit()
    if problem := ages.age_of(Path(), commit, in_history=False).problem:
        raise ValueError(f"ETAP_COMMIT: {problem}")
    return commit


def is_complete(path: Path, commit: str) -> bool:
    if not path.is_file():
        return False
    content = results.read_json(path)
    return isinstance(content, dict) and bool(content.get("complete")) and content.get("commit") == commit


def measure(words: list[str], told: list[str]) -> int:
    """Run `etap bench` with these words in this process, the result telling others; its exit status."""
    app = typer.Typer(add_completion=False)
    app.command()(command.bench)
    before, sys.argv = sys.argv, ["etap", "bench", *told]
    try:
        return typer.main.get_command(app).main(args=words, prog_name="etap bench", standalone_mode=False) or 0
    finally:
        sys.argv = before
        gc.collect()
        torch.cuda.empty_cache()  # or the next result has rows that seem to find no memory


def main(
    names: Annotated[list[str], typer.Argument(help=f"{', '.join(GROUPS)}, or results by their names.")],
    output: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)],
    peers: Annotated[Path | None, typer.Option(help="Python file with kernels that were built apart.")] = None,
    time_limit: Annotated[float, typer.Option(help="Begin no result after this many seconds.")] = float("inf"),
    show: Annotated[bool, typer.Option("--show", help="Only print the commands.")] = False,
) -> None:
    """Measure a group of results of `etap bench` again."""
    begin, failed = time.monotonic(), []
    try:
        chosen, commit = commands(names), "" if show else clean_commit()
    except ValueError as error:
        typer.secho(f"etap record: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    output.mkdir(parents=True, exist_ok=True)
    for name, words in chosen.items():
        path = output / f"{name}.json"
        apart = peers if any(name in group.peers for group in GROUPS.values()) else None
        whole = [*words, *(["--peers", str(apart)] if apart else []), "--output", str(path)]
        told = [*words, *(["--peers", apart.name] if apart else []), "--output", f"results/{name}.json"]
        if show:
            typer.echo(f"etap bench {shlex.join(whole)}")
        elif is_complete(path, commit):
            typer.echo(f"{name}: there already")
        elif time.monotonic() - begin > time_limit:
            failed.append(f"{name}: not begun within {time_limit:g} s")
        else:
            typer.echo(f"{name}: {time.monotonic() - begin:.0f} s after the start")
            if measure(whole, told):
                failed.append(f"{name}: see above")
    for text in failed:
        typer.echo(text, err=True)
    raise typer.Exit(1 if failed else 0)
