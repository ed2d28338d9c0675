"""The README's picture: TFLOP/s of every kernel by context, under the roof, with published figures as marks."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.units import in_k
from bench.kernels.report import OWN, names_of, time_of

COLOURS = {
    "etap": "#D55E00",
    "FlashMLA": "#0072B2",
    "authors' ETAP": "#999999",
    "FA3": "#009E73",
    "FlashInfer": "#E69F00",
}
BATCH = 16
WGMMA_ROWS = 64  # M, which kernels pad query rows to


def draw(document: dict, path: Path) -> None:
    """Draw a dense grid's rows of 16 requests as a PNG. Raises ValueError when there is none."""
    rows = [row for row in document["rows"] if row["batch"] == BATCH and row["length"] and row["s_q"] == 1]
    if document["kind"] != "bench" or not rows or not names_of(document):
        raise ValueError(f"--plot: wanted a dense grid with rows of {BATCH} requests, got {document['grid']}")
    with matplotlib.rc_context({"font.size": 13}):  # legible at half its size
        figure = bars(document, sorted(rows, key=lambda row: row["length"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        source = f"{document['grid']} of {document['date']}, commit {document['commit']}"
        figure.savefig(path, dpi=100, metadata={"Source": source})


def bars(document: dict, rows: list[dict]) -> Figure:
    """A group of bars per context, ETAP last."""
    names = sorted(names_of(document), key=lambda name: name in OWN)
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axis, width = figure.subplots(), 0.84 / len(names)
    for position, name in enumerate(names):
        places = [index + (position - (len(names) - 1) / 2) * width for index in range(len(rows))]
        heights = [row["flops"] / us / 1e6 if (us := time_of(row, name)) else 0 for row in rows]
        drawn = axis.bar(places, heights, width * 0.94, label=name, color=COLOURS.get(name, "#666666"), zorder=2)
        labels = axis.bar_label(drawn, [f"{height:.0f}" if height else "" for height in heights], padding=2, zorder=4)
        for label in labels:
            label.set(fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3})
        for one in document["published"]:
            if (one["kernel"], one["heads"], one["batch"]) == (name, rows[0]["heads"], BATCH):
                _mark(axis, one, dict(zip((str(row["length"]) for row in rows), places, strict=True)), width)
    if document.get("floor"):
        _roofs(axis, document["floor"], rows)
    axis.set_xticks(range(len(rows)), [in_k(row["length"]) for row in rows])
    axis.set(xlabel="context (tokens)", ylabel="TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"{document['title']}, {BATCH} requests, {document['gpu']}")
    legend = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))  # a label once
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2)
    return figure


def _mark(axis: Axes, published: dict, places: dict[str, float], width: float) -> None:
    """What others published of a kernel, as dashes across its bars."""
    label = f"published, {published['gpu']} ({published['source']})"
    for tokens, tflops in published["tflops"].items():
        if tokens in places:
            begin = places[tokens] - width / 2
            axis.hlines(tflops, begin, begin + width, colors="black", linewidth=2, zorder=3, label=label)


def _roofs(axis: Axes, floor: dict, rows: list[dict]) -> None:
    """TFLOP/s that bandwidth and tensor cores allow, and with query rows padded to 64."""
    places = [-0.5, *range(1, len(rows) - 1), len(rows) - 0.5]
    padding = max(1.0, WGMMA_ROWS / (rows[0]["heads"] * rows[0]["s_q"]))
    for factor, style, label in ((1.0, "k-", "roof"), (padding, "k:", "roof with 64 rows, mostly padding")):
        seconds = [max(row["bytes"] / floor["bandwidth"], row["flops"] * factor / floor["flops"]) for row in rows]
        axis.plot(places, [row["flops"] / s / 1e12 for row, s in zip(rows, seconds, strict=True)], style, label=label)
