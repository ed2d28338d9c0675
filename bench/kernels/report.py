"""`python -m bench report FILES`: tables of results files, for a screen or, with --page, as one Markdown page.

Where calls were timed behind another kernel, too, a cell has both times: back to back / behind it.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.common import results
from bench.common.units import in_k

ETAP, BF16_CACHE = "etap", "etap-bf16"
OWN = (ETAP, "etap-fp8-math", BF16_CACHE)
KINDS = ("bench", "bench-sparse")
MAX_ROWS = 100  # a page shows ratios alone of larger grids
Pair = tuple[str, list[str], str]
"""A column that compares: its title, the kernels whose fastest time is divided, and the kernel that divides it."""


def time_of(row: dict, name: str, behind: bool = False) -> float | None:
    """Microseconds per call of a kernel, if it was measured."""
    found = row["results"].get(name, {})
    return (found.get("behind") or {} if behind else found).get("us")


def names_of(document: dict) -> list[str]:
    """Kernels with a time in at least one row."""
    names = dict.fromkeys(name for row in document["rows"] for name in row["results"])
    return [name for name in names if any(time_of(row, name) for row in document["rows"])]


def shape_of(row: dict) -> str:
    """A row's first column, such as "16 x 4K"; for DeepSeek-V4 "16 x 128 + 512"."""
    if window := row.get("window"):
        return f"{row['batch']} x {window} + {row['length'] - window}"
    return f"{row['batch']} x {in_k(row['length'])}"


def pairs_of(document: dict) -> list[Pair]:
    """Each build with the first one; else the best peer with ETAP, and ETAP from a bfloat16 cache with ETAP."""
    names = names_of(document)
    if builds := list(document["libraries"]):
        suffixes = [name.removeprefix(builds[0]) for name in names if name.startswith(builds[0])]
        pairs = [(other + suffix, builds[0] + suffix) for suffix in suffixes for other in builds[1:]]
        return [(f"{one} / {first}", [one], first) for one, first in pairs if one in names]
    peers = [name for name in names if name not in OWN]
    pairs = [(f"best peer / {ETAP}", peers, ETAP), (f"{BF16_CACHE} / {ETAP}", [BF16_CACHE], ETAP)]
    return [(title, over, under) for title, over, under in pairs if {*over} & {*names} and under in names]


def ratio(row: dict, over: list[str], under: str, behind: bool = False) -> float | None:
    """How many times as long the fastest of these kernels takes as another one."""
    times, base = [us for name in over if (us := time_of(row, name, behind))], time_of(row, under, behind)
    return min(times) / base if times and base else None


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(document: dict) -> list[list[str]]:
    """Titles, and cells of each row: shape, floor, times, the first kernel's rates, and how kernels compare."""
    names, pairs, digits = names_of(document), pairs_of(document), 3 if document["libraries"] else 2
    readings = (False, True) if document["options"].get("behind") else (False,)
    first, shape = next(iter(names), ETAP), ("heads", "s_q", "kv_dtype", "page_size")
    titles = ("floor", *names, "TFLOP/s", "% of floor", *(title for title, *_ in pairs))
    lines = [["requests x tokens" if document["kind"] == "bench" else "tokens x keys", *shape, *titles]]
    for row in document["rows"]:
        us, floor = time_of(row, first), row.get("floor_us")
        cells = [shape_of(row), *(str(row[name]) for name in shape), _number(floor)]
        cells += [" / ".join(_number(time_of(row, name, behind)) for behind in readings) for name in names]
        cells += [_number(us and row["flops"] / us / 1e6), _number(us and floor and 100 * floor / us, 0)]
        cells += [" / ".join(_number(ratio(row, *pair, behind), digits) for behind in readings) for _, *pair in pairs]
        lines.append(cells)
    return lines


def markdown_table(lines: list[list[str]]) -> str:
    """A Markdown table whose columns are aligned, so that a screen can show it, too."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [" | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "|".join("-" * (width + 1) + ":" for width in widths)
    return "\n".join([f"| {rows[0]} |", f"|{rule}|", *(f"| {row} |" for row in rows[1:])])


def remarks(document: dict) -> list[str]:
    """What a table does not show: ratios over all rows, equal bits, refusals and failures."""
    rows, lines = document["rows"], []
    for title, *pair in pairs_of(document):
        if values := {row["label"]: value for row in rows if (value := ratio(row, *pair))}:
            least, most = min(values, key=values.get), max(values, key=values.get)
            spread = f"{values[least]:.3f} ({least}) to {values[most]:.3f} ({most})"
            lines.append(f"{title}: {spread}, median {statistics.median(values.values()):.3f}")
    found = {f"{row['label']}, {name}": one for row in rows for name, one in row["results"].items()}
    if bits := {label: one["same_bits"] for label, one in found.items() if one.get("same_bits") is not None}:
        other = "; ".join(label for label, same in bits.items() if not same)
        equal = f"{sum(bits.values())} of {len(bits)} outputs have the first build's bits"
        lines.append(equal + (f", not {other}" if other else ""))
    reasons: dict[str, list[str]] = {}
    for label, one in found.items():
        if one["state"] != "measured":
            reasons.setdefault(one.get("reason") or one["error"], []).append(label)
    return lines + [f"{reason} ({len(labels)} times, the first {labels[0]})" for reason, labels in reasons.items()]


def provenance(document: dict) -> str:
    """Where the figures come from."""
    parts = [document["gpu"], f"driver {document['driver']}", *document["clocks"]]
    parts += [f"{name} {version}" for name, version in document["versions"].items()]
    parts += [f"commit {document['commit']}", document["date"]]
    parts += [f"{name}: SHA-256 {build['sha256'][:12]}" for name, build in document["libraries"].items()]
    floor = [f"floor = {document['floor']['text']}"] if document.get("floor") else []
    left_out = [f"{len(document['left_out'])} rows left out for want of memory"] if document["left_out"] else []
    stopped = [] if document["complete"] else [f"stopped after {len(document['rows'])} rows"]
    return "; ".join([", ".join(parts), f"`{document['command']}`", *floor, *left_out, *stopped])


def text(document: dict, page: bool = False) -> str:
    """All that a results file of `bench kernels` says; on a page, a large grid without its table."""
    both = ", back to back / behind another kernel" if document["options"].get("behind") else ""
    title = f"{document['title']}, {document['gpu']}: microseconds per call{both}"
    large = page and len(document["rows"]) > MAX_ROWS
    lines = "\n".join(f"- {line}" for line in remarks(document))
    body = [] if large else [markdown_table(table(document))]
    return "\n\n".join([f"## {title}" if page else title, *body, lines, f"{provenance(document)}."])


def section(path: Path, page: bool) -> str:
    """What a results file says: tables of kernels or servers, or a line per check. Raises ValueError, naming the file,
    when it is no results file."""
    content = results.read_json(path)
    documents = content if isinstance(content, list) else [content]
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise ValueError(f"{path}: wanted a results file, got {str(content)[:60]}")
    kind = documents[0].get("kind")
    if kind in KINDS and "rows" in documents[0]:
        return text(documents[0], page)
    if kind == "serve":
        return _served(documents[0], page)
    if not all("what" in one or "title" in one for one in documents):
        raise ValueError(f"{path}: wanted a results file of bench, got kind {kind!r}")
    return "\n".join(map(_check_line, documents))


def _served(document: dict, page: bool) -> str:
    from bench.servers.serve import show

    screen = Console(file=io.StringIO(), width=200)
    show(document, screen, markdown=True)
    title = f"Servers, {document['scenario']}, {document['engine']}"
    return f"{'## ' if page else ''}{title}\n\n{screen.file.getvalue().strip()}"


def _check_line(document: dict) -> str:
    """A check's outcome in one line. The tables of servers measured before v0.2 need the bench of their commit."""
    outcome = document.get("outcome") or ("failed" if document.get("failed") or document.get("failures") else "passed")
    if document.get("kind") == "e2e":
        outcome = f"{len(document['rows'])} readings in the file"
    what = document.get("what") or document["title"]
    about = ", ".join(str(document.get(key, "unknown")) for key in ("gpu", "commit", "date"))
    return f"- {what}: {outcome}. {about}; `{document.get('command', '')}`"


def page_of(paths: Iterable[Path]) -> str:
    """One Markdown page of several results files: tables first, then checks."""
    sections = [section(path, page=True) for path in paths]
    tables, checks = ([one for one in sections if one.startswith("- ") == listed] for listed in (False, True))
    return "\n\n".join([*tables, *(["## Checks", "\n".join(checks)] if checks else [])]) + "\n"


def main(
    files: Annotated[list[Path], typer.Argument(help="Results files of bench.")],
    page: Annotated[Path | None, typer.Option(help="Write one Markdown page of all files.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TFLOP/s of the one file into this PNG.")] = None,
) -> None:
    """Print the tables of results files, write a page of them, or draw a picture."""
    try:
        if page:
            page.write_text(page_of(files))
        elif plot:
            from bench.kernels.picture import draw  # needs matplotlib

            draw(results.read_json(files[0]), plot)
        else:
            typer.echo("\n\n".join(section(path, page=False) for path in files))
    except ValueError as error:
        typer.secho(f"bench report: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
