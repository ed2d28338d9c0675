"""The tables of README.md and docs/: made from results/, and checked against it.

    python -m etap_backend.lab.tables            # fill every place between <!-- KIND NAME --> and <!-- /KIND -->
    python -m etap_backend.lab.tables --check    # say what differs, and how old each result is

`<!-- bench NAME -->` is the table of results/NAME.json, `<!-- bench NAME: 1 x 1K; 16 x 4K, 8 heads -->` some of its
rows, `<!-- summary NAME -->` a wide sweep by query rows, `<!-- ratios NAME -->` how ours compares with each peer,
`<!-- e2e NAME -->` a table of `etap e2e`, `<!-- e2e NAME: 16 x 16K -->` the time between two tokens at some loads, and
`<!-- claims all -->` what checks say of themselves in their files. A place whose NAME ends in a question mark says that
nothing was measured until there is such a file. Each file of times has a page of its own in docs/tables. Where there is
torch to import the public calls with, docs/api.md is made from their docstrings.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from etap_backend.lab import ages, results
from etap_backend.lab.bench import plots, report
from etap_backend.lab.bench import rows as bench_rows
from etap_backend.lab.e2e import report as e2e_report
from etap_backend.lab.e2e import results_file as e2e_rows
from etap_backend.lab.results import Place

ROOT = results.FOLDER.parent
CITED = re.compile(r"\((?:\.\./)*results/([\w./-]+\.(?:json|png))\)")  # links; captions' commands name files of then
NOT_YET = "Not measured with these kernels."
KINDS: dict[str, Callable[[Path, Place], str]] = {
    "bench": lambda path, place: report.markdown(bench_rows.read(path), place.rows),
    "summary": lambda path, place: report.summary(bench_rows.read(path)),
    "ratios": lambda path, place: report.ratios(bench_rows.read(path)),
    "e2e": lambda path, place: e2e_report.markdown(e2e_rows.read(path), place.rows),
}
WHOLE = {"bench": "bench", "bench-sparse": "bench", "e2e": "e2e"}
"""Kinds of files with a page of their own, and the kind of the place on it."""
SWEPT = 200  # rows: the page of a file with more has them by query rows
OF_A_CHECK = ("what", "outcome", "gpu", "date", "commit")


def _documents(folder: Path) -> list[tuple[Path, Any]]:
    """Every result and its file, which may hold a list of results: checks that belong together."""
    files = [(path, results.read_json(path)) for path in sorted(folder.glob("*.json"))]
    lists = [(path, content if content and isinstance(content, list) else [content]) for path, content in files]
    return [(path, one) for path, together in lists for one in together]


def claims(folder: Path) -> str:
    """A table of the results of checks. Raises ValueError, naming the file, for one that does not say what came out."""
    lines = ["| check | outcome | seen on |", "|---|---|---|"]
    for path, content in _documents(folder):
        if kind_of(content) is None:
            if missing := [key for key in OF_A_CHECK if not isinstance(content, dict) or not content.get(key)]:
                raise ValueError(f"{path}: wanted what every check's result says, got none of {', '.join(missing)}")
            lines.append(f"| {content['what']} ([file](../results/{path.name})) | {_outcome(content)} |")
    return "\n".join(lines) if len(lines) > 2 else NOT_YET


def _outcome(content: dict) -> str:
    """What came out of a check, and where it was seen."""
    versions = content.get("versions", {})
    packages = [f"{name} {versions[name]}" for name in ("vllm", "sglang") if versions.get(name)]
    wrong = [f"**failed**: {one}" for one in content.get("failures") or [] if isinstance(one, str)]
    wrong += ["**cut short**"] if content.get("complete") is False else []
    seen = [content["gpu"], *packages, f"commit {content['commit']}", content["date"][:10]]
    return f"{'; '.join([*wrong, content['outcome']])} | {', '.join(seen)}"


def kind_of(content: object) -> str | None:
    """Of the place that a file's table goes to; None for a check's."""
    return WHOLE.get(content.get("kind")) if isinstance(content, dict) else None


def table(place: Place, folder: Path) -> str:
    """What belongs in a place. Raises ValueError, naming the place, when there is nothing for it."""
    try:
        if place.kind == "claims":
            return claims(folder)
        if place.kind not in KINDS:
            raise ValueError(f"wanted one of {', '.join((*KINDS, 'claims'))}")
        path = folder / f"{place.name}.json"
        return NOT_YET if place.may_lack and not path.is_file() else KINDS[place.kind](path, place)
    except ValueError as error:
        raise ValueError(f"<!-- {place.kind} {place.name} -->: {error}") from error


def whole_pages(root: Path) -> dict[Path, str]:
    """The pages of docs/tables as they are to be, but for their tables, which `filled` brings."""
    made, index = {}, ["# All tables", "", "<!-- index -->"]
    for path, content in _documents(root / "results"):
        if kind := kind_of(content):
            kind = "summary" if kind == "bench" and len(content["rows"]) > SWEPT else kind
            title = f"# {content['title']}"
            about = f"Made from [{path.name}](../../results/{path.name})."
            place = f"<!-- {kind} {path.stem} -->\n<!-- /{kind} -->\n"
            made[root / "docs" / "tables" / f"{path.stem}.md"] = f"{title}\n\n{about}\n\n{place}"
            index.append(f"- [{path.stem}]({path.stem}.md): {title[2:]}, {content['gpu']}")
    made[root / "docs" / "tables" / "README.md"] = "\n".join([*index, "<!-- /index -->", ""])
    return made


def wanted_pages(root: Path) -> tuple[dict[Path, str], list[str]]:
    """Every page with its places filled, and the places that nothing belongs in, which stay as they are."""
    by_hand = [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.is_file()]
    refused, made = [], {}
    if root == ROOT and importlib.util.find_spec("torch"):  # what the public calls need to be imported
        made[root / "docs" / "api.md"] = importlib.import_module("etap_backend.lab.api_page").page()
    for page, text in ({page: page.read_text() for page in by_hand if page not in made} | whole_pages(root)).items():

        def filled(place: Place, page: Path = page) -> str:
            try:
                return table(place, root / "results")
            except ValueError as error:
                refused.append(f"{page.relative_to(root)}: {error}")
                return place.body

        made[page] = results.filled(text, filled)
    return made, refused


def stale_pictures(root: Path) -> dict[Path, bench_rows.Document]:
    """Pictures that were not drawn from the results as they are; a picture names its result in its own text."""
    found = {}
    for name, (result, _, _) in plots.PICTURES.items():
        if (path := root / "results" / f"{result}.json").is_file():
            document, picture = bench_rows.read(path), root / "results" / f"{name}.png"
            if not picture.is_file() or plots.source_of(document).encode() not in picture.read_bytes():
                found[picture] = document
    return found


def fill(root: Path) -> tuple[list[Path], list[str]]:
    """Draw and write what changed, and name the places that nothing belongs in."""
    pictures = stale_pictures(root)
    for picture, document in pictures.items():
        _, kind, wanted = plots.PICTURES[picture.stem]
        plots.plot(document, kind, picture, wanted)
    made, refused = wanted_pages(root)
    changed = [page for page, text in made.items() if not page.is_file() or page.read_text() != text]
    (root / "docs" / "tables").mkdir(exist_ok=True)
    for page in changed:
        page.write_text(made[page])
    for page in set((root / "docs" / "tables").glob("*.md")) - set(made):
        page.unlink()
        changed.append(page)
    return [*pictures, *changed], refused


def complaints(root: Path) -> list[str]:
    """Pages that differ from their results or cite what is not there, and pictures and checks that no page shows."""
    made, found = wanted_pages(root)
    for page in sorted(set(made) | set((root / "docs" / "tables").glob("*.md"))):
        name, text = page.relative_to(root), page.read_text() if page.is_file() else ""
        if page not in made:
            found.append(f"{name}: it has no result")
        elif made[page] != text:
            found.append(f"{name}: it is not what results/ gives: python -m etap_backend.lab.tables")
    found += [f"{path.relative_to(root)}: it is not drawn from the result as it is" for path in stale_pictures(root)]
    there = {str(path.relative_to(root / "results")) for path in (root / "results").rglob("*") if path.is_file()}
    shown = {page: set(CITED.findall(text)) for page, text in made.items()}
    for page, names in shown.items():
        found += [f"{page.relative_to(root)}: no results/{name}" for name in sorted(names - there)]
    return found + [f"results/{name}: no page shows it" for name in sorted(there - set().union(*shown.values()))]


def ages_of(root: Path, *, in_history: bool) -> list[tuple[str, ages.Age]]:
    """Of every result."""
    every = [(path.name, one if isinstance(one, dict) else {}) for path, one in _documents(root / "results")]
    return [
        (name, ages.age_of(root, one.get("commit"), in_history=in_history, kind=ages.kind_of(one)))
        for name, one in every
    ]


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 when something is wrong.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The source tree.", exists=True, file_okay=False)] = ROOT,
) -> None:
    """Fill the tables of README.md and docs/ from results/, or check them and the results' ages."""
    changed, wrong = ([], complaints(root)) if check else fill(root)
    for page in changed:
        typer.echo(f"{'filled' if page.is_file() else 'deleted'} {page.relative_to(root)}")
    if check:
        if why := ages.why_unknown(root):
            typer.echo(f"{why}; limit {ages.LIMIT}", err=True)
        for name, age in ages_of(root, in_history=why is None):
            if age.problem:
                wrong.append(f"results/{name}: {age}")
            else:
                typer.echo(f"results/{name}: {age}")
    for text in wrong:
        typer.echo(text, err=True)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
