"""The tables of a benchmark: on the screen, with the whole method, and in Markdown for a page of docs/, where
measuring.md has the method. Drawing one imports no kernel."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from etap_backend.lab.bench import method
from etap_backend.lab.bench.rows import (
    MATH_SUFFIX,
    OUR_BF16,
    WITH_PLAN,
    Document,
    Failed,
    Measured,
    Row,
    Timing,
    fastest,
    ratio,
)
from etap_backend.lab.results import beside_the_usual

FEW_PEERS = 2  # each of so few has a column of its own beside ours
BEHIND = 0.98  # a ratio that counts as slower: the readings of a run differ by less
TOLD_APART = ("cache", "page_size")  # columns of a table whose rows differ in them
FEW_HEADS = 32  # more than others' kernels pad to 64


@dataclass(frozen=True)
class Comparison:
    """A column of times over ours."""

    title: str
    over: Callable[[Row], float | None]
    under: Callable[[Row], float | None]

    def of(self, row: Row) -> float | None:
        return ratio(self.over(row), self.under(row))


def _us(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.us(name)


def comparisons(document: Document) -> list[Comparison]:
    """How the kernels of a document compare: peers with ours, or further libraries with the first."""
    if document.libraries:
        first, *others = document.libraries
        pairs = [(other + suffix, first + suffix) for suffix in ("", MATH_SUFFIX) for other in others]
        return [
            Comparison(f"{over} / {under}", _us(over), _us(under)) for over, under in pairs if over in document.names
        ]
    if document.drop_ins:
        pairs = [(original, name) for name, original in document.drop_ins.items()]
        return [Comparison(f"{over} / {under}", _us(over), _us(under)) for over, under in pairs]
    if not document.own:
        return []
    ours, peers = document.own[0], document.peers
    found = [Comparison(f"{peer} / {ours}", _us(peer), _us(ours)) for peer in peers]
    if len(peers) > FEW_PEERS:
        found = [Comparison(f"best peer / {ours}", lambda row: fastest(row, peers), _us(ours))]
    if OUR_BF16 in document.own:
        found.append(Comparison(f"our bf16 / {ours}", _us(OUR_BF16), _us(ours)))
    return found


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(timing: Timing | None) -> str:
    return f"{timing.us:.1f} ± {timing.iqr_us:.1f}" if timing else "-"


def screen_table(document: Document) -> Table:
    """One line a shape: our time and spread, rates, share of the floor, the others' times, and how they compare."""
    first, *others = document.names or ["-"]
    compared = comparisons(document)
    table = Table(title=f"{document.title}, {document.gpu}: us a call, median ± interquartile range")
    table.add_column("shape")
    titles = [comparison.title for comparison in compared]
    for column in ("floor", first, "TFLOP/s", "GB/s", "% of floor", "rel. RMSE", *others, *titles):
        table.add_column(column, justify="right")
    for row in document.rows:
        timing = row.timing(first)
        us = timing and timing.us
        share = ratio(row.floor_us, us)
        rmse = timing and timing.relative_rmse
        table.add_row(
            row.label,
            number(row.floor_us),
            _spread(timing),
            number(us and row.tflops(us)),
            number(us and row.gigabytes(us), 0),
            number(share and 100 * share, 0),
            "-" if rmse is None else f"{rmse:.2e}",
            *(_spread(row.timing(name)) for name in others),
            *(number(comparison.of(row), 3 if document.libraries else 2) for comparison in compared),
        )
    return table


def print_document(document: Document, console: Console) -> None:
    console.print(screen_table(document))
    if built := document.schedule_build:
        console.print(f"building the schedule of {built.batch} requests: {_spread(built)} us")
    for name, timing in document.host_calls.items():
        console.print(f"host, one call of {name}: {_spread(timing)} us", highlight=False)
    for text in (*drop_in_lines(document), *library_lines(document), *error_lines(document)):
        console.print(text, markup=False, highlight=False)
    for text in failure_lines(document):
        console.print(text, style="red", markup=False, highlight=False)
    if document.left_out:
        console.print(f"left out, for want of memory: {len(document.left_out)} rows", highlight=False)
    console.print(f"{provenance_line(document)}\n{document.method}", markup=False, highlight=False)
    if not document.complete:
        console.print(f"stopped {document.stopped}: {len(document.rows)} rows", style="red")


def library_lines(document: Document) -> list[str]:
    """Of each further library: how its times compare with the first one's, and whether its outputs do."""
    if not document.libraries:
        return []
    lines = []
    for comparison in comparisons(document):
        found = {row.label: value for row in document.rows if (value := comparison.of(row))}
        worst = max(found, key=found.get)
        middle = statistics.median(found.values())
        lines.append(f"{comparison.title}: median {middle:.3f}, at most {found[worst]:.3f} ({worst})")
    names = document.names
    timings = [(row, name, row.timing(name)) for row in document.rows for name in names]
    compared = [(row, name, timing) for row, name, timing in timings if timing and timing.same_bits is not None]
    other = [f"{row.label}: {name}" for row, name, timing in compared if not timing.same_bits]
    same = (
        f"{len(compared) - len(other)} of {len(compared)} outputs have the bits of {next(iter(document.libraries))}'s"
    )
    return [*lines, same + (f", not {'; '.join(other)}" if other else "")]


def drop_in_lines(document: Document) -> list[str]:
    """How many times as fast as its original each drop-in is."""
    return [f"{name}: {drop_in_sentence(document, original)}" for name, original in document.drop_ins.items()]


def _host_lines(document: Document) -> list[str]:
    """What launching a call takes of the host, of drop-ins and their originals."""
    said = []
    for name in (name for pair in document.drop_ins.items() for name in reversed(pair)):
        if timing := document.host_calls.get(name):
            planned = document.host_calls.get(WITH_PLAN.format(name))
            said.append(f"{name} {number(timing.us)} us" + (f", {number(planned.us)} with its plan" if planned else ""))
    return [f"Host time of one call of {document.rows[0].label}: {'; '.join(said)}."] if said else []


def drop_in_sentence(document: Document, original: str) -> str:
    """How many times as fast as that column the drop-in for it is, with few heads and with many; where it is slower.

    Raises ValueError when the document has no such column beside a drop-in.
    """
    known = {theirs: name for name, theirs in document.drop_ins.items()}
    if original not in known:
        raise ValueError(f"rows: wanted one of {', '.join(known)}, got {original}")
    pairs = [(row, ratio(row.us(original), row.us(known[original]))) for row in document.rows]
    found = [(row, value) for row, value in pairs if value]
    few, many = ([value for row, value in found if (row.heads <= FEW_HEADS) == small] for small in (True, False))
    said = [
        f"{min(values):.2f} to {max(values):.2f} times as fast as {original} with {text} (median {middle:.2f})"
        for text, values in ((f"up to {FEW_HEADS} heads", few), (f"more than {FEW_HEADS} heads", many))
        if values and (middle := statistics.median(values))
    ]
    slower = [f"{row.label} ({value:.2f})" for row, value in found if round(value, 2) < 1]
    behind = f"slower at {'; '.join(slower)}" if slower else f"slower at none of {len(found)} points"
    return f"{', '.join(said)}; {behind}."


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


def versions_line(document: Document) -> str:
    return ", ".join(f"{package} {version}" for package, version in document.versions.items())


def provenance_line(document: Document) -> str:
    floor = f"; floor = {document.floor.text}" if document.floor else ""
    ctas = document.options.num_sms
    launch = f"{ctas} CTAs of " if ctas else ""
    libraries = "".join(
        f"; {name}: commit {library.commit}, SHA-256 {library.sha256[:12]}"
        for name, library in document.libraries.items()
    )
    return (
        f"{document.gpu}, {launch}{document.multiprocessors} SMs, driver {document.driver}; "
        f"{versions_line(document)}; commit {document.commit}{libraries}; {document.date}; `{document.command}`{floor}"
    )


def markdown(document: Document, only: tuple[str, ...] = ()) -> str:
    """A page's table: microseconds a call, the floor, and over ours the peers' times and that of our bf16.

    With `only`, rows of these batches, such as "16 x 4K", and a short caption: the whole table has date and floor.
    Raises ValueError when the document has no such row.
    """
    rows = rows_named(document, only) if only else document.rows
    first, *others = document.names or ["-"]
    compared = comparisons(document)
    titles = dict.fromkeys((*document.OTHERS, *TOLD_APART))
    values = {title: {getattr(row, title) for row in rows} for title in titles}
    shown = [title for title, found in values.items() if len(found) > 1 or (title in document.OTHERS and not only)]
    digits = 3 if document.libraries else 2
    columns = [document.BATCHES, *shown, "floor", f"**{first}**", "TFLOP/s", *others]
    columns += [comparison.title for comparison in compared]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        us = row.us(first)
        cells = [
            row.batch_text,
            *(str(getattr(row, title)) for title in shown),
            number(row.floor_us),
            f"**{number(us)}**",
            number(us and row.tflops(us)),
            *(number(row.us(name)) for name in others),
            *(number(comparison.of(row), digits) for comparison in compared),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if only:
        return "\n".join([*lines, "", short_caption(document, rows)])
    below = (*drop_in_lines(document), *_host_lines(document), caption(document))
    return "\n".join([*lines, *(line for text in below for line in ("", text))])


def rows_named(document: Document, only: tuple[str, ...]) -> list[Row]:
    """Rows of these batches. Raises ValueError for one that the document has not."""
    known = dict.fromkeys(row.batch_text for row in document.rows)
    if missing := [text for text in only if text not in known]:
        raise ValueError(f"rows: wanted some of {', '.join(known)}, got {', '.join(missing)}")
    return [row for row in document.rows if row.batch_text in only]


def _endings(document: Document) -> str:
    """What is special to a table."""
    other = beside_the_usual(document.method, method.USUAL)
    stopped = "" if document.complete else f" Stopped {document.stopped}: what is missing was not measured."
    return (f" Method: {other}." if other else "") + (f" {document.note}" if document.note else "") + stopped


def caption(document: Document) -> str:
    return f"Microseconds a call. {provenance_line(document)}.{_endings(document)}"


def source(document: Document) -> str:
    """Where figures come from, in short."""
    return (
        f"{document.gpu}, driver {document.driver}; {versions_line(document)}; commit {document.commit}; "
        f"`{document.command}`"
    )


def short_caption(document: Document, rows: list[Row]) -> str:
    shapes = dict.fromkeys(row.others_text for row in rows)
    return f"Microseconds a call, {' or '.join(shapes)}; {source(document)}.{_endings(document)}"


def figures(document: Document, only: tuple[str, ...]) -> str:
    """A page's sentence: TFLOP/s of every kernel on these batches, and how many times as fast as each ours is."""
    rows, (ours, *others) = rows_named(document, only), [*document.own[:1], *document.peers]

    def rates(name: str) -> str:
        times = [row.us(name) for row in rows]
        return ", ".join(number(us and row.tflops(us), 0) for row, us in zip(rows, times, strict=True))

    said = [f"{ours} {rates(ours)} TFLOP/s"]
    for name in others:
        faster = ", ".join(number(ratio(row.us(name), row.us(ours)), 2) for row in rows)
        said.append(f"{name} {rates(name)} ({ours} is {faster} times as fast)")
    return f"{', '.join(row.batch_text for row in rows)} tokens: {'; '.join(said)}. {source(document)}."


def summary(document: Document) -> str:
    """A page's table of a wide sweep, by query rows: how the best peer compares, and where it is faster."""
    by_rows = defaultdict(list)
    ours, peers = document.own[0], document.peers
    for row in document.rows:
        if value := ratio(fastest(row, peers), row.us(ours)):
            by_rows[row.heads * row.s_q].append((value, f"{row.batch_text}, {row.heads} heads, s_q {row.s_q}"))
    columns = ["query rows", "points", f"best peer / {ours}, least", "median", "most"]
    columns += ["points where a peer is faster by more than 2%", "the worst"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for rows, found in sorted(by_rows.items()):
        values = sorted(value for value, _ in found)
        behind = sum(value < BEHIND for value in values)
        least, label = min(found)
        cells = [rows, len(values), f"{least:.3f}", f"{statistics.median(values):.2f}", f"{values[-1]:.2f}", behind]
        lines.append("| " + " | ".join(map(str, [*cells, label if least < 1 else "-"])) + " |")
    return "\n".join([*lines, "", f"{provenance_line(document)}.{_endings(document)}"])
