"""The pictures of a benchmark; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from textwrap import fill

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from bench.kernels.rows import FP8_MATH, OUR_BF16, OURS, Document, Row
from bench.common.units import in_k

# Okabe and Ito's colours, which colour-blind readers tell apart, and marks that need no colour.
STYLES = {
    OURS: ("#D55E00", "o"),
    FP8_MATH: ("#CC79A7", "s"),
    OUR_BF16: ("#8B4513", "D"),
    "FlashMLA": ("#0072B2", "^"),
    "FlashMLA alone": ("#56B4E9", "v"),
    "authors' ETAP": ("#999999", "P"),
    "FA3": ("#009E73", "X"),
    "FlashInfer": ("#E69F00", "*"),
    "Triton": ("#000000", "d"),
}
OTHER_STYLE = ("#666666", ".")
FONT_SIZE = 13  # legible where a page shows the picture at half its size
PADDED_ROWS = 64  # WGMMA's M
LEAST_PLACES = 3  # of a series: fewer are no line
Series = list[list[Row]]


def series_of(document: Document, wanted: Callable[[Row], bool] = lambda row: True) -> Series:
    """The rows of each panel: every even batch size with at least three contexts, or what sparse rows have for it."""
    placed = [row for row in document.rows if row.place and wanted(row)]
    placed.sort(key=lambda row: (*row.series, row.place))
    series = [list(rows) for _, rows in groupby(placed, lambda row: row.series)]
    return [rows for rows in series if len(rows) >= LEAST_PLACES]


def panels(count: int) -> tuple[Figure, list[Axes]]:
    across = min(2, count)
    down = -(-count // across)
    figure = Figure(figsize=(10 if across == 1 else 12, 5.2 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, list(axes.flat[:count])


def legend(figure: Figure, axes: list[Axes]) -> None:
    """One for all panels, below them, where it covers nothing."""
    found = dict(pair for axis in axes for pair in zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    found = dict(sorted(found.items(), key=lambda pair: pair[0] not in STYLES))  # kernels first
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2 * min(2, len(axes)))


def roof(document: Document, row: Row, *, padded: bool = False) -> float:
    """TFLOP/s that the GPU allows this row at best, or with its query rows padded to WGMMA's 64."""
    wasted = max(1.0, PADDED_ROWS / (row.heads * row.s_q)) if padded else 1.0
    return row.flops / document.floor.seconds(kv_bytes=row.bytes, flops=row.flops * wasted, fp8=row.fp8) / 1e12


def bars(document: Document, series: Series) -> Figure:
    """TFLOP/s of every kernel under the roof, a panel for each series; published figures as marks."""
    names = [*document.peers, *document.own]
    figure, axes = panels(len(series))
    width = 0.84 / len(names)
    for axis, rows in zip(axes, series, strict=True):
        for position, name in enumerate(names):
            places = [index + (position - (len(names) - 1) / 2) * width for index in range(len(rows))]
            heights = [row.tflops(us) if (us := row.us(name)) else 0 for row in rows]
            colour, _ = STYLES.get(name, OTHER_STYLE)
            drawn = axis.bar(places, heights, width * 0.94, label=name, color=colour, zorder=2)
            texts = [f"{height:.0f}" if height else "" for height in heights]
            for label in axis.bar_label(drawn, texts, fontsize=FONT_SIZE - 3, padding=2, zorder=4):
                label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})
            _mark(axis, document, name, rows, places, width)
        if document.floor:
            _roofs(axis, document, rows)
        axis.set_xticks(range(len(rows)), [in_k(row.place) for row in rows])
        axis.set(title=rows[0].series_text, xlabel=document.AXIS, ylabel="TFLOP/s")
        axis.spines[["top", "right"]].set_visible(False)
    legend(figure, axes)
    return figure


def _mark(axis: Axes, document: Document, kernel: str, rows: list[Row], places: list[float], width: float) -> None:
    """What others published of this kernel, as dashes across its bars."""
    for one in document.published:
        if one.kernel == kernel and (one.heads, 1, one.batch) == rows[0].series:
            found = zip(rows, places, strict=True)
            marks = {place: one.tflops[row.place] for row, place in found if row.place in one.tflops}
            begins, ends = ([place + sign * width / 2 for place in marks] for sign in (-1, 1))
            label = f"published, {one.gpu} ({one.source})"
            axis.hlines(list(marks.values()), begins, ends, colors="black", linewidth=2, zorder=3, label=label)


def _roofs(axis: Axes, document: Document, rows: list[Row]) -> None:
    places = [-0.5, *range(1, len(rows) - 1), len(rows) - 0.5]
    axis.plot(places, [roof(document, row) for row in rows], "k-", linewidth=1.2, label="roof", zorder=1)
    if rows[0].heads * rows[0].s_q < PADDED_ROWS:
        padded = [roof(document, row, padded=True) for row in rows]
        label = f"roof with {PADDED_ROWS} rows, mostly padding"
        axis.plot(places, padded, "k:", linewidth=1.5, label=label, zorder=1)


def latency(document: Document, series: Series) -> Figure:
    """Time of a call against the floor, a panel for each series; behind another kernel where that was timed."""
    figure, axes = panels(len(series))
    time, said = (Row.behind, " behind another kernel") if document.options.behind else (Row.us, "")
    for axis, rows in zip(axes, series, strict=True):
        for name in [*document.peers, *document.own]:
            points = [(row.place, us) for row in rows if (us := time(row, name))]
            colour, mark = STYLES.get(name, OTHER_STYLE)
            if points:
                axis.plot(*zip(*points, strict=True), marker=mark, markersize=8, label=name, color=colour)
        if rows[0].floor_us:
            axis.plot([row.place for row in rows], [row.floor_us for row in rows], "k--", label="floor")
        axis.set_xscale("log", base=2)
        _plain_log_ticks(axis)
        axis.set_xticks([row.place for row in rows], [in_k(row.place) for row in rows])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(True, color="#dddddd")
        axis.set(title=rows[0].series_text, xlabel=document.AXIS, ylabel=f"us per call{said}")
    legend(figure, axes)
    return figure


def _plain_log_ticks(axis: Axes) -> None:
    """A logarithmic axis with 10, 20, 50, 100 instead of powers of ten."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


KINDS: dict[str, Callable[[Document, Series], Figure]] = {"tflops": bars, "latency": latency}
PICTURES: dict[str, tuple[str, str, Callable[[Row], bool]]] = {
    "paper-h20-proxy-tflops": ("paper-h20-proxy", "tflops", lambda row: row.batch == 16),
    "targets-latency": ("targets", "latency", lambda row: True),
}
"""Those of the pages: the result that each is drawn from, its kind, and which rows it shows."""


def source_of(document: Document) -> str:
    """What a picture says of the result that it was drawn from, in the text of its file."""
    return f"{document.grid} of {document.date}, commit {document.commit}"


def plot(document: Document, kind: str, path: Path, wanted: Callable[[Row], bool] = lambda row: True) -> Path:
    """Draw one of KINDS as a PNG. Raises ValueError when the document has no rows for it."""
    if kind not in KINDS:
        raise ValueError(f"kind: wanted one of {', '.join(KINDS)}, got {kind}")
    series = series_of(document, wanted)
    if not document.names or not series:
        raise ValueError(f"{kind}: wanted at least {LEAST_PLACES} rows for a panel, got none")
    with matplotlib.rc_context({"font.size": FONT_SIZE}):
        figure = KINDS[kind](document, series)
        figure.suptitle(fill(f"{document.title}, {document.gpu}", 80))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Source": source_of(document)})
    return path
