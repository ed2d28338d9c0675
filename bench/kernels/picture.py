"""The README's picture: TFLOP/s of every kernel by context, under the roof, with published figures as marks."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.common.units import in_k
from bench.kernels.report import KINDS, OWN, names_of, time_of

BATCH = 16


def draw(document: object, path: Path) -> None:
    """Draw a dense grid's rows of 16 requests as a PNG, ETAP's bars last. Raises ValueError when there is none."""
    if not isinstance(document, dict) or document.get("kind") != KINDS[0]:
        raise ValueError("--plot: wanted a results file of a dense grid")
    rows = [row for row in document["rows"] if row["batch"] == BATCH and row["s_q"] == 1]
    rows, names = sorted(rows, key=lambda row: row["length"]), sorted(names_of(document), key=OWN.__contains__)
    if not rows or not names:
        raise ValueError(f"--plot: wanted rows of {BATCH} requests, got none in {document['grid']}")
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axis, width = figure.subplots(), 0.84 / len(names)
    for position, name in enumerate(names):
        places = [index + (position - (len(names) - 1) / 2) * width for index in range(len(rows))]
        heights = [row["flops"] / us / 1e6 if (us := time_of(row, name)) else 0 for row in rows]
        axis.bar_label(axis.bar(places, heights, width * 0.94, label=name), fmt="%.0f", padding=2)
        for one in document["published"]:
            if one["kernel"] == name and one["batch"] == BATCH:
                marks = [one["tflops"].get(str(row["length"]), float("nan")) for row in rows]
                label = f"{name}, published, {one['gpu']} ({one['source']})"
                axis.plot(places, marks, "k_", markersize=12, label=label)
    if limits := document.get("floor"):
        us = [max(row["bytes"] / limits["bandwidth"], row["flops"] / limits["flops"]) * 1e6 for row in rows]
        roof = [row["flops"] / each / 1e6 for row, each in zip(rows, us, strict=True)]
        axis.plot(range(len(rows)), roof, "k-", label="roof")
    axis.set_xticks(range(len(rows)), [in_k(row["length"]) for row in rows])
    axis.set(xlabel="context (tokens)", ylabel="TFLOP/s", title=f"{document['title']}, {document['gpu']}")
    figure.legend(loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Source": f"{document['date']}, commit {document['commit']}"})
