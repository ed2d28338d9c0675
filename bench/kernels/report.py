"""The tables of a benchmark, on the screen and in Markdown for a page, and the command line of `etap report`.

Drawing one imports no kernel. Where calls were timed behind another kernel, too, a cell has both times: those of calls
back to back, and of calls behind it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.kernels import plots as pictures
from bench.kernels import rows as files
from bench.kernels.rows import Document, Failed, Measured, Row, Timing, fastest, ratio

FEW_PEERS = 2  # each of so few has a column of its own beside ours
SLOWER = 0.98  # a ratio that counts as slower: the readings of a run differ by less
MOST_NAMED = 3  # rows where ours is slower
FEW_HEADS = 32  # more than others' kernels pad to 64
BUILT_APART = "(peers)"
TOLD_APART = ("cache", "page_size")  # columns of a table whose rows differ in them

Time = Callable[[Row, str], float | None]


@dataclass(frozen=True)
class Comparison:
    """A column: the fastest of some kernels over another."""

    title: str
    over: tuple[str, ...]
    under: str

    def of(self, row: Row, time: Time = Row.us) -> float | None:
        return ratio(fastest(row, self.over, time), time(row, self.under))


def comparisons(document: Document) -> list[Comparison]:
    """How the kernels of a document compare: peers with ours, originals with drop-ins, or libraries with the first."""
    names, found = document.names, []
    if document.libraries:
        first, *others = document.libraries
        pairs = [(other + suffix, first + suffix) for suffix in ("", files.MATH_SUFFIX) for other in others]
    elif document.drop_ins:
        pairs = [(original, name) for name, original in document.drop_ins.items()]
    elif document.own:
        ours, peers = document.own[0], document.peers
        pairs = [(peer, ours) for peer in peers] if len(peers) <= FEW_PEERS else []
        found = [] if pairs or not peers else [Comparison(f"best peer / {ours}", tuple(peers), ours)]
        pairs += [(files.OUR_BF16, ours)] if files.OUR_BF16 in document.own else []
    else:
        return []
    return found + [Comparison(f"{over} / {under}", (over,), under) for over, under in pairs if over in names]


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _both(document: Document, of: Callable[[Time], float | None], digits: int = 1) -> str:
    """A value of calls back to back, and of those behind another kernel where the run timed them."""
    times = (Row.us, Row.behind) if document.options.behind else (Row.us,)
    return " / ".join(number(of(time), digits) for time in times)


def table(document: Document, rows: list[Row], *, page: bool, short: bool = False) -> list[list[str]]:
    """Titles and cells: our time, the floor, the others' times, and how they compare.

    A screen's has spread, bandwidth, share of the floor and error of our first kernel, too; a short one only those of
    the shape's columns in which rows differ.
    """
    first, *others = document.names or ["-"]
    compared = comparisons(document)
    values = {title: {getattr(row, title) for row in rows} for title in (*document.OTHERS, *TOLD_APART)}
    shown = [title for title, of in values.items() if len(of) > 1 or (title in document.OTHERS and not short)]
    ours = f"**{first}**" if page else first
    extra = [] if page else ["±", "GB/s", "% of floor", "rel. RMSE"]
    titles = [document.BATCHES, *shown, "floor", ours, "TFLOP/s", *extra, *others]
    lines = [titles + [comparison.title for comparison in compared]]
    for row in rows:
        us, timing = row.us(first), row.timing(first)
        time = _both(document, lambda time, row=row: time(row, first))
        cells = [row.batch_text, *(str(getattr(row, title)) for title in shown), number(row.floor_us)]
        cells += [f"**{time}**" if page else time, number(us and row.tflops(us))]
        if not page:
            share, rmse = ratio(row.floor_us, us), timing and timing.relative_rmse
            cells += [number(timing and timing.iqr_us), number(us and row.gigabytes(us), 0)]
            cells += [number(share and 100 * share, 0), "-" if rmse is None else f"{rmse:.1e}"]
        cells += [_both(document, lambda time, row=row, name=name: time(row, name)) for name in others]
        digits = 3 if document.libraries else 2
        cells += [_both(document, lambda time, row=row, one=one: one.of(row, time), digits) for one in compared]
        lines.append(cells)
    return lines


def as_text(lines: list[list[str]]) -> str:
    """Aligned columns, however wide: a number is never cut."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def as_markdown(lines: list[list[str]]) -> str:
    titles, *cells = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([titles, "|" + "---|" * len(lines[0]), *cells])


def text(document: Document) -> str:
    """All that a document says, for a screen."""
    lines = [f"{document.title}, {document.gpu}: us per call", as_text(table(document, document.rows, page=False))]
    if built := document.schedule_build:
        lines.append(f"building the schedule of {built.batch} requests: {_spread(built)} us")
    lines += [f"host, one call of {name}: {_spread(timing)} us" for name, timing in document.host_calls.items()]
    lines += [*ratio_lines(document), *library_lines(document), *error_lines(document), *failure_lines(document)]
    if document.left_out:
        lines.append(f"left out, for want of memory: {len(document.left_out)} rows")
    lines.append(provenance_line(document))
    if not document.complete:
        lines.append(f"stopped {document.stopped}: {len(document.rows)} rows")
    return "\n".join(lines)


def _spread(timing: Timing) -> str:
    return f"{timing.us:.1f} ± {timing.iqr_us:.1f}"


def ratio_lines(document: Document) -> list[str]:
    """Of each comparison: smallest, median and largest ratio with few heads and with many, and where ours is slower."""
    lines = []
    for one in [] if document.libraries else comparisons(document):
        found = [(row, value) for row in document.rows if (value := one.of(row))]
        for said, few in ((f"up to {FEW_HEADS} heads", True), (f"more than {FEW_HEADS} heads", False)):
            values = {row.label: value for row, value in found if (row.heads <= FEW_HEADS) == few}
            if values:
                least, middle, most = min(values.values()), statistics.median(values.values()), max(values.values())
                slower = sorted((value, label) for label, value in values.items() if value < SLOWER)
                worst = [f"{label} ({value:.2f})" for value, label in slower[:MOST_NAMED]]
                behind = f"below {SLOWER} at {len(slower) or 'none'}" + (f", {'; '.join(worst)}" if worst else "")
                spread = f"{least:.2f} to {most:.2f}, median {middle:.2f}"
                lines.append(f"{one.title}, {said}, {len(values)} shapes: {spread}; {behind}.")
    return lines


def library_lines(document: Document) -> list[str]:
    """Of each further library: how its times compare with the first one's, and whether its outputs do."""
    if not document.libraries:
        return []
    lines = []
    for one in comparisons(document):
        found = {row.label: value for row in document.rows if (value := one.of(row))}
        worst = max(found, key=found.get)
        lines.append(
            f"{one.title}: median {statistics.median(found.values()):.3f}, at most {found[worst]:.3f} ({worst})"
        )
    same = {
        f"{row.label}: {name}": timing.same_bits
        for row in document.rows
        for name in document.names
        if (timing := row.timing(name)) and timing.same_bits is not None
    }
    other = [label for label, equal in same.items() if not equal]
    of_first = f"outputs have the bits of {next(iter(document.libraries))}'s"
    return [
        *lines,
        f"{len(same) - len(other)} of {len(same)} {of_first}" + (f", not {'; '.join(other)}" if other else ""),
    ]


def error_lines(document: Document) -> list[str]:
    lines = []
    for name in document.names:
        timings = [timing for row in document.rows if (timing := row.timing(name))]
        if found := [timing.relative_rmse for timing in timings if timing.relative_rmse is not None]:
            lines.append(f"relative RMSE against float64, {name}: {min(found):.2e} to {max(found):.2e}")
    return lines


def failure_lines(document: Document) -> list[str]:
    """What has no time and why, each reason once."""
    labels = defaultdict(list)
    for row in document.rows:
        for name, result in row.results.items():
            if not isinstance(result, Measured):
                why = result.error if isinstance(result, Failed) else f"refused: {result.reason}"
                labels[f"{name}: {why}"].append(row.label)
    return [f"{why} ({len(rows)} rows, the first {rows[0]})" for why, rows in labels.items()]


def _host_line(document: Document) -> str:
    """What launching a call takes of the host, of drop-ins and their originals."""
    said = []
    for name in (name for pair in document.drop_ins.items() for name in reversed(pair)):
        if timing := document.host_calls.get(name):
            planned = document.host_calls.get(files.WITH_PLAN.format(name))
            said.append(f"{name} {number(timing.us)} us" + (f", {number(planned.us)} with its plan" if planned else ""))
    return f"Host time of one call of {document.rows[0].label}: {'; '.join(said)}." if said else ""


def source(document: Document) -> str:
    """Where figures come from."""
    versions = ", ".join(f"{package} {version}" for package, version in document.versions.items())
    libraries = [f"{name}: commit {of.commit}, SHA-256 {of.sha256[:12]}" for name, of in document.libraries.items()]
    apart = "; (peers): built apart, not part of this repository" if BUILT_APART in versions else ""
    said = [f"driver {document.driver}", versions + apart, f"commit {document.commit}", *libraries]
    return f"{document.gpu}, {'; '.join(said)}; `{document.command}`"


def provenance_line(document: Document) -> str:
    ctas, floor = document.options.num_sms, document.floor
    launch = f"{ctas} CTAs of " if ctas else ""
    traffic = f"; held SMs read {document.options.traffic} TB/s" if document.options.traffic else ""
    said = f"; floor = {floor.text}" if floor else ""
    return f"{launch}{document.multiprocessors} SMs; {source(document)}; {document.date}{traffic}{said}"


def rows_named(document: Document, only: tuple[str, ...]) -> list[Row]:
    """Rows of these batches, such as "16 x 4K"; "16 x 4K, FP8" wants the words of its label besides.

    Raises ValueError for a batch that the document has not.
    """
    found = []
    for text_ in only:
        batch, *words = text_.split(", ")
        rows = [row for row in document.rows if row.batch_text == batch and _has(row.label, words)]
        if not rows:
            known = ", ".join(dict.fromkeys(row.batch_text for row in document.rows))
            raise ValueError(f"rows: wanted some of {known}, got {text_}")
        found += rows
    return found


def _has(label: str, words: list[str]) -> bool:
    """Whether each of these begins a part of the label: "8 heads" none of "16 x 4K, 128 heads"."""
    return all(any(part.startswith(word) for part in label.split(", ")) for word in words)


def caption(document: Document, rows: list[Row], *, short: bool) -> str:
    """What stands below a table; a short one leaves date, floor and method to the whole table's page."""
    both = ", back to back / behind another kernel" if document.options.behind else ""
    shapes = f", {' or '.join(dict.fromkeys(row.others_text for row in rows))}" if short else ""
    said = f"Microseconds per call{both}{shapes}. "
    if short:
        return f"{said}{document.gpu}, commit {document.commit}."
    stopped = "" if document.complete else f" Stopped {document.stopped}: what is missing was not measured."
    return f"{said}{provenance_line(document)}." + (f" {document.note}" if document.note else "") + stopped


def markdown(document: Document, only: tuple[str, ...] = ()) -> str:
    """A page's table; with `only` of these rows, with a short caption. Raises ValueError when there is no such row."""
    rows = rows_named(document, only) if only else document.rows
    parts = [as_markdown(table(document, rows, page=True, short=bool(only)))]
    if not only:
        parts += [*ratio_lines(document), *library_lines(document), _host_line(document)]
    return "\n\n".join(filter(None, [*parts, caption(document, rows, short=bool(only))]))


def ratios(document: Document) -> str:
    """A page's sentences on how kernels compare over all rows. Raises ValueError when there is nothing to compare."""
    if not (lines := ratio_lines(document)):
        raise ValueError(f"rows: wanted a comparison, got {', '.join(document.names) or 'no times'}")
    return "\n".join(f"- {line}" for line in lines) + f"\n\n{document.gpu}, commit {document.commit}."


def summary(document: Document) -> str:
    """A page's table of a wide sweep, by query rows: how the best peer compares, and where it is faster."""
    by_rows = defaultdict(list)
    ours, peers = document.own[0], document.peers
    for row in document.rows:
        if value := ratio(fastest(row, peers), row.us(ours)):
            by_rows[row.heads * row.s_q].append((value, f"{row.batch_text}, {row.heads} heads, s_q {row.s_q}"))
    lines = [["query rows", "points", f"best peer / {ours}, least", "median", "most"]]
    lines[0] += ["points where a peer is faster by more than 2%", "the worst"]
    for rows, found in sorted(by_rows.items()):
        values, (least, label) = sorted(value for value, _ in found), min(found)
        slower = sum(value < SLOWER for value in values)
        cells = [rows, len(values), f"{least:.3f}", f"{statistics.median(values):.2f}", f"{values[-1]:.2f}", slower]
        lines.append([*map(str, cells), label if least < 1 else "-"])
    return f"{as_markdown(lines)}\n\n{provenance_line(document)}." + (f" {document.note}" if document.note else "")


def main(
    paths: Annotated[list[Path], typer.Argument(metavar="FILES", help="Results files of `etap bench`.")],
    plot: Annotated[list[str] | None, typer.Option(help="Also draw: tflops, latency; repeated.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder that the pictures go to; wanted with --plot.")] = None,
) -> None:
    """Print benchmark results again, and draw them; pages are filled by `python -m etap_backend.lab.tables`."""
    try:
        if bool(plot) != bool(plots):
            raise ValueError("--plots: wanted a folder beside --plot, and none without, which is where pictures go")
        documents = {path: files.read(path) for path in paths}
        for path, document in documents.items():
            typer.echo(text(document))
            for kind in plot or []:
                typer.echo(pictures.plot(document, kind, plots / f"{path.stem}-{kind}.png"))
    except ValueError as error:
        typer.secho(f"etap report: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
