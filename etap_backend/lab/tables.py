"""The tables of README.md and docs/: filled from results/, and checked against it.

    python -m etap_backend.lab.tables            # fill every place between <!-- KIND NAME --> and <!-- /KIND -->
    python -m etap_backend.lab.tables --check    # say what differs, and which results no page speaks of

`<!-- bench NAME -->` is the table of results/NAME.json, `<!-- bench NAME: 1 x 1K; 16 x 4K -->` some of its rows,
`<!-- figures NAME: 16 x 64K -->` a sentence on them, `<!-- summary NAME -->` a wide sweep by query rows,
`<!-- e2e NAME -->` a table of `etap e2e`, `<!-- e2e NAME: 16 x 16K -->` the time between two tokens at some loads,
`<!-- estimate NAME -->` a table of `etap estimate`, `<!-- drop-in NAME: FlashMLA -->` a sentence on the drop-in for
it, and `<!-- tests NAME -->` one on another project's tests. A place whose NAME ends in a question mark says that
nothing was measured until there is such a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from etap_backend.lab import results, suites
from etap_backend.lab.bench import report
from etap_backend.lab.bench import rows as bench_rows
from etap_backend.lab.e2e import report as e2e_report
from etap_backend.lab.e2e import results_file as e2e_rows
from etap_backend.lab.estimate import results_file as estimates
from etap_backend.lab.results import Place

ROOT = results.FOLDER.parent
NOT_YET = "Not measured yet."
CITED = re.compile(r"results/([\w.-]+\.(?:json|png))")
KINDS: dict[str, Callable[[Path, Place], str]] = {
    "bench": lambda path, place: report.markdown(bench_rows.read(path), place.rows),
    "summary": lambda path, place: report.summary(bench_rows.read(path)),
    "figures": lambda path, place: report.figures(bench_rows.read(path), place.rows),
    "e2e": lambda path, place: e2e_report.markdown(e2e_rows.read(path), place.rows),
    "estimate": lambda path, place: estimates.markdown(path),
    "tests": lambda path, place: suites.sentence(results.read_json(path)),
    "drop-in": lambda path, place: drop_in_sentences(bench_rows.read(path), place.rows),
}


def drop_in_sentences(document: bench_rows.Document, originals: tuple[str, ...]) -> str:
    """How the drop-ins for these compare with them, and where that was measured."""
    said = " ".join(report.drop_in_sentence(document, original) for original in originals)
    return f"{said} {report.source(document)}."


def table(place: Place, folder: Path) -> str:
    """What belongs in a place. Raises ValueError, naming the place, when there is nothing for it."""
    try:
        if place.kind not in KINDS:
            raise ValueError(f"wanted one of {', '.join(KINDS)}")
        path = folder / place.file
        return NOT_YET if place.may_lack and not path.is_file() else KINDS[place.kind](path, place)
    except ValueError as error:
        raise ValueError(f"<!-- {place.kind} {place.name} -->: {error}") from error


def pages(root: Path) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.is_file()]


def fill(root: Path) -> tuple[list[Path], list[str]]:
    """Fill all places: the pages that changed, and the places that nothing belongs in, which stay as they are."""
    changed, refused = [], []
    for page in pages(root):

        def filled(place: Place, page: Path = page) -> str:
            try:
                return table(place, root / "results")
            except ValueError as error:
                refused.append(f"{page.relative_to(root)}: {error}")
                return place.body

        text = page.read_text()
        if (new := results.filled(text, filled)) != text:
            page.write_text(new)
            changed.append(page)
    return changed, refused


def complaints(root: Path) -> list[str]:
    """Places that differ from their results, results that no page cites, and citations of what is not there."""
    found, cited = [], set()
    for page in pages(root):
        name, text = page.relative_to(root), page.read_text()
        # The commands of captions name the files that they wrote then, which may have other names now.
        own_words = results.filled(text, lambda place: "")
        mentioned = set(CITED.findall(own_words))
        mentioned |= {place.file for place in results.places(text) if place.body != NOT_YET}
        found += [f"{name}: no results/{file}" for file in sorted(mentioned) if not (root / "results" / file).is_file()]
        cited |= mentioned
        for place in results.places(text):
            try:
                if table(place, root / "results") != place.body:
                    found.append(f"{name}: <!-- {place.kind} {place.name} --> is not what results/{place.file} gives")
            except ValueError as error:
                found.append(f"{name}: {error}")
    there = sorted(path.relative_to(root / "results") for path in (root / "results").rglob("*") if path.is_file())
    return found + [f"results/{path}: no page cites it" for path in there if str(path) not in cited]


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 when something is wrong.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The source tree.", exists=True, file_okay=False)] = ROOT,
) -> None:
    """Fill the tables of README.md and docs/ from results/, or check them."""
    changed, wrong = ([], complaints(root)) if check else fill(root)
    for page in changed:
        typer.echo(f"filled {page.relative_to(root)}")
    for text in wrong:
        typer.echo(text, err=True)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
