"""The pictures of a benchmark; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from etap_backend.lab.bench.rows import FP8_MATH, OUR_BF16, OURS, Document, Row
from etap_backend.lab.units import in_k

COLOURS = {
    OURS: "#d1495b",
    FP8_MATH: "#8f2d56",
    OUR_BF16: "#f2a6b0",
    "FlashMLA": "#30638e",
    "FlashMLA alone": "#7fb2d9",
    "authors' ETAP": "#5b8e7d",
    "FA3": "#00798c",
    "FlashInfer": "#edae49",
    "Triton": "#8d96a3",
}
PADDED_ROWS = 64  # WGMMA's M
LEAST_PLACES = 3  # of a series: fewer are no line


def series_of(document: Document) -> list[list[Row]]:
    """The rows of each panel: every even batch size with at least three contexts, or what sparse rows have for it."""
    placed = sorted((row for row in document.rows if row.place), key=lambda row: (*row.series, row.place))
    series = [list(rows) for _, rows in groupby(placed, lambda row: row.series)]
    return [rows for rows in series if len(rows) >= LEAST_PLACES]


def order_of(document: Document) -> list[str]:
    """Kernels as bars stand: the peers, then ours."""
    return [*document.peers, *document.own]


def panels(count: int, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    across = min(3, count)
    down = -(-count // across)
    figure = Figure(figsize=(max(6.4, 5.2 * across), height * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, list(axes.flat[:count])


def legend(figure: Figure, axes: list[Axes]) -> None:
    """One for all panels, below them, where it covers nothing."""
    found = dict(pair for axis in axes for pair in zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    found = dict(sorted(found.items(), key=lambda pair: pair[0] not in COLOURS))  # kernels first
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 6), fontsize=8)


def roof(document: Document, row: Row, *, padded: bool = False) -> float:
    """TFLOP/s that the GPU allows this row at best, or with its query rows padded to WGMMA's 64."""
    wasted = max(1.0, PADDED_ROWS / (row.heads * row.s_q)) if padded else 1.0
    return row.flops / document.floor.seconds(kv_bytes=row.bytes, flops=row.flops * wasted, fp8=row.fp8) / 1e12


def bars(document: Document) -> Figure:
    """TFLOP/s of every kernel under the roof, a panel for each series; published figures as marks."""
    series, names = series_of(document), order_of(document)
    figure, axes = panels(len(series), height=4.4)
    width = 0.84 / len(names)
    for axis, rows in zip(axes, series, strict=True):
        for position, name in enumerate(names):
            places = [index + (position - (len(names) - 1) / 2) * width for index in range(len(rows))]
            heights = [row.tflops(us) if (us := row.us(name)) else 0 for row in rows]
            drawn = axis.bar(places, heights, width * 0.94, label=name, color=COLOURS.get(name), zorder=2)
            texts = [f"{height:.0f}" if height else "" for height in heights]
            for label in axis.bar_label(drawn, texts, fontsize=6, padding=1.5, zorder=4):
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
            label = f"published, {one.gpu} ({one.source})"
            axis.hlines(
                list(marks.values()),
                [place - width / 2 for place in marks],
                [place + width / 2 for place in marks],
                colors="black",
                linewidth=1.6,
                zorder=3,
                label=label,
            )


def _roofs(axis: Axes, document: Document, rows: list[Row]) -> None:
    places = [-0.5, *range(1, len(rows) - 1), len(rows) - 0.5]
    axis.plot(places, [roof(document, row) for row in rows], "k-", linewidth=1, label="roof", zorder=1)
    if rows[0].heads * rows[0].s_q < PADDED_ROWS:
        padded = [roof(document, row, padded=True) for row in rows]
        label = f"roof with {PADDED_ROWS} rows, most of them padding"
        axis.plot(places, padded, "k:", linewidth=1, label=label, zorder=1)


def latency(document: Document) -> Figure:
    """Time of a call against the floor, a panel for each series."""
    series = series_of(document)
    figure, axes = panels(len(series))
    for axis, rows in zip(axes, series, strict=True):
        for name in order_of(document):
            points = [(row.place, us) for row in rows if (us := row.us(name))]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=COLOURS.get(name))
        if rows[0].floor_us:
            axis.plot([row.place for row in rows], [row.floor_us for row in rows], "k--", label="floor")
        axis.set_xscale("log", base=2)
        _plain_log_ticks(axis)
        axis.set_xticks([row.place for row in rows], [in_k(row.place) for row in rows], fontsize=7)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(title=rows[0].series_text, xlabel=document.AXIS, ylabel="us a call")
    legend(figure, axes)
    return figure


def _plain_log_ticks(axis: Axes) -> None:
    """A logarithmic axis with 10, 20, 50, 100 instead of powers of ten."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


KINDS: dict[str, Callable[[Document], Figure]] = {"tflops": bars, "latency": latency}


def plot(document: Document, kind: str, stem: Path) -> Path:
    """Draw one of KINDS as stem-KIND.png. Raises ValueError when the document has no rows for it."""
    if kind not in KINDS:
        raise ValueError(f"kind: wanted one of {', '.join(KINDS)}, got {kind}")
    if not document.names or not series_of(document):
        raise ValueError(f"{kind}: wanted at least {LEAST_PLACES} rows for a panel, got none")
    figure = KINDS[kind](document)
    title = f"{document.title}, {document.gpu}"
    figure.suptitle(fill(title, int(10 * figure.get_figwidth())))
    path = stem.with_name(f"{stem.name}-{kind}.png")
    figure.savefig(path, dpi=150)
    return path
