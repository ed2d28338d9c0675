"""What becomes of a benchmark's JSON: the table on the screen, the table in the README, the plots.

`python -m etap_backend.lab.bench.report results/*.json --readme README.md --plots results` does all of it without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import defaultdict
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend.lab.bench.grids import in_k
from etap_backend.lab.bench.peers import FP8_MATH, OUR_BF16, OURS, OWN

COLOURS = {
    OURS: "#d1495b",
    FP8_MATH: "#8f2d56",
    OUR_BF16: "#f2a6b0",
    "FlashMLA": "#30638e",
    "FA3": "#00798c",
    "FlashInfer": "#edae49",
    "Triton": "#8d96a3",
}


def write(document: dict, path: Path) -> None:
    """Replace the file in one step, so that a run cut short never leaves half of one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def commit() -> str:
    """The commit that a result is made with: ETAP_COMMIT, or what git says of these sources."""
    if named := os.environ.get("ETAP_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return "unknown"


def tflops(row: dict, us: float) -> float:
    return row["flops"] / us / 1e6


def gigabytes(row: dict, us: float) -> float:
    return row["bytes"] / us / 1e3


def time_of(row: dict, name: str) -> float | None:
    return row["results"].get(name, {}).get("us")


def best_peer(row: dict) -> float | None:
    times = [result["us"] for name, result in row["results"].items() if name not in OWN and "us" in result]
    return min(times, default=None)


def _columns(document: dict) -> tuple[list[str], list[str]]:
    """Our further kernels, and the peers, in their order of columns."""
    names = names_in(document)
    return [name for name in names if name in OWN and name != OURS], [name for name in names if name not in OWN]


def _comparisons(document: dict) -> list[tuple[str, str]]:
    """(Column of the screen, column of the README) that `_compared` fills."""
    ours, peers = _columns(document)
    columns = [("x best peer", "best peer / etap")] if peers else []
    return columns + ([("x our bf16", "our bf16 / etap")] if OUR_BF16 in ours else [])


def _compared(document: dict, row: dict) -> list[str]:
    times = {"x best peer": best_peer(row), "x our bf16": time_of(row, OUR_BF16)}
    return [_number(_ratio(times[column], time_of(row, OURS)), 2) for column, _ in _comparisons(document)]


def names_in(document: dict) -> list[str]:
    """Kernels that have a time in at least one row, in their order of columns."""
    first_seen = dict.fromkeys(name for row in document["rows"] for name in row["results"])
    return [name for name in first_seen if any(time_of(row, name) for row in document["rows"])]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def _peer_cell(result: dict | None) -> str:
    if not result or "us" not in result:
        return "-"
    return f"{result['us']:.1f} ± {result['iqr_us']:.1f}"


def screen_table(document: dict) -> Table:
    """One line a shape: our time with its spread, rates, share of the floor, the peers' times, and how we compare."""
    others, peers = _columns(document)
    table = Table(title=f"{document['title']}, {document['gpu']}: us a call, median ± interquartile range")
    table.add_column("shape")
    compared = (*others, *peers, *(on_screen for on_screen, _ in _comparisons(document)))
    for column in ("floor", OURS, "TFLOP/s", "GB/s", "% of floor", "rel. RMSE", *compared):
        table.add_column(column, justify="right")
    for row in document["rows"]:
        ours = row["results"].get(OURS, {})
        us, floor = ours.get("us"), row["floor_us"]
        share = _ratio(floor, us)
        rmse = ours.get("relative_rmse")
        table.add_row(
            row["label"],
            _number(floor),
            _peer_cell(ours),
            _number(us and tflops(row, us)),
            _number(us and gigabytes(row, us), 0),
            _number(share and 100 * share, 0),
            "-" if rmse is None else f"{rmse:.2e}",
            *(_peer_cell(row["results"].get(name)) for name in (*others, *peers)),
            *_compared(document, row),
        )
    return table


def print_document(document: dict, console: Console) -> None:
    console.print(screen_table(document))
    for key, what in (("schedule_build", "building the schedule of {batch} requests"), ("host_call", "host, one call")):
        if key in document:
            console.print(f"{what.format(**document[key])}: {_peer_cell(document[key])} us")
    errors = defaultdict(list)
    for name in names_in(document):
        found = [row["results"].get(name, {}).get("relative_rmse") for row in document["rows"]]
        if found := [rmse for rmse in found if rmse is not None]:
            console.print(f"relative RMSE against float64, {name}: {min(found):.2e} to {max(found):.2e}")
    for row in document["rows"]:
        for name, result in row["results"].items():
            if "error" in result:
                errors[f"{name}: {result['error']}"].append(row["label"])
    for error, labels in errors.items():
        console.print(f"{error} ({len(labels)} rows, the first {labels[0]})", style="red", markup=False)
    console.print(f"{provenance(document)}\n{document['method']}", markup=False, highlight=False)
    if not document["complete"]:
        console.print(f"stopped {document['stopped']}: {len(document['rows'])} rows", style="red")


def provenance(document: dict) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    floor = f"; floor = {document['floor']['text']}" if document["floor"] else ""
    ctas = document["options"]["num_sms"]
    launch = f"{ctas} CTAs of " if ctas else ""
    return (
        f"{document['gpu']}, {launch}{document['multiprocessors']} SMs, driver {document['driver']}; {versions}; "
        f"commit {document['commit']}; {document['date']}; `{document['command']}`{floor}"
    )


def markdown(document: dict) -> str:
    """The README's table: microseconds a call, the floor, and over ours the best peer's time and that of our bf16."""
    others, peers = _columns(document)
    columns = ["requests x tokens", "heads", "s_q", "floor", f"**{OURS}**", "TFLOP/s"]
    columns += [*others, *peers, *(in_readme for _, in_readme in _comparisons(document))]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in document["rows"]:
        us = time_of(row, OURS)
        cells = [
            row["name"] or f"{row['batch']} x {in_k(row['length'])}",
            str(row["heads"]),
            str(row["s_q"]),
            _number(row["floor_us"]),
            f"**{_number(us)}**",
            _number(us and tflops(row, us)),
            *(_number(time_of(row, name)) for name in (*others, *peers)),
            *_compared(document, row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Microseconds a call. {provenance(document)}. {document['method']}."])


def place_tables(readme: Path, kind: str, tables: dict[str, str]) -> None:
    """Put each table between `<!-- KIND NAME -->` and `<!-- /KIND -->`, NAME being its key.

    Raises ValueError when the README has no such place for any of the tables.
    """
    text, placed = readme.read_text(), 0
    for name, body in tables.items():
        place = re.compile(rf"(<!-- {kind} {re.escape(name)} -->\n).*?(<!-- /{kind} -->)", re.DOTALL)
        text, count = place.subn(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
        placed += count
    if not placed:
        wanted = ", ".join(f"<!-- {kind} {name} -->" for name in tables)
        raise ValueError(f"{readme}: wanted a place marked {wanted} ... <!-- /{kind} -->")
    readme.write_text(text)


def update_readme(readme: Path, documents: list[dict]) -> None:
    """Put each document's table at its `<!-- bench NAME -->`, NAME being that of its JSON file; see `place_tables`."""
    place_tables(readme, "bench", {document["file"]: markdown(document) for document in documents})


def _series(document: dict, least: int = 3) -> list[tuple[tuple, list[dict]]]:
    """((heads, s_q, batch), rows by context) of every even batch size with at least `least` contexts."""

    def key(row):
        return (row["heads"], row["s_q"], row["batch"])

    even = sorted((row for row in document["rows"] if row["length"]), key=lambda row: (*key(row), row["length"]))
    series = [(shape, list(rows)) for shape, rows in groupby(even, key)]
    return [(shape, rows) for shape, rows in series if len(rows) >= least]


def _panels(count: int):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(3, count)
    down = -(-count // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.2 * across, 3.8 * down), squeeze=False, layout="constrained"
    )
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, list(axes.flat[:count])


def _shape_title(shape: tuple) -> str:
    heads, s_q, batch = shape
    return f"batch {batch}, {heads} heads" + (f", s_q {s_q}" if s_q > 1 else "")


def plot_bars(document: dict):
    """TFLOP/s of every kernel over the context, one panel a batch size."""
    series, names = _series(document), names_in(document)
    figure, axes = _panels(len(series))
    width = 0.8 / len(names)
    for axis, (shape, rows) in zip(axes, series, strict=True):
        for position, name in enumerate(names):
            heights = [tflops(row, us) if (us := time_of(row, name)) else 0 for row in rows]
            places = [index + (position - (len(names) - 1) / 2) * width for index in range(len(rows))]
            bars = axis.bar(places, heights, width, label=name, color=COLOURS.get(name))
            axis.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=5)
        axis.set_xticks(range(len(rows)), [in_k(row["length"]) for row in rows])
        axis.set(title=_shape_title(shape), xlabel="context (tokens)", ylabel="TFLOP/s")
    axes[0].legend()
    return figure


def plot_latency(document: dict):
    """Time of a call over the context against the floor, one panel a batch size."""
    series = _series(document)
    figure, axes = _panels(len(series))
    for axis, (shape, rows) in zip(axes, series, strict=True):
        for name in names_in(document):
            points = [(row["length"], us) for row in rows if (us := time_of(row, name))]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=COLOURS.get(name))
        if rows[0]["floor_us"]:
            axis.plot([row["length"] for row in rows], [row["floor_us"] for row in rows], "k--", label="floor")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([row["length"] for row in rows], [in_k(row["length"]) for row in rows], fontsize=7)
        axis.set(title=_shape_title(shape), xlabel="context (tokens)", ylabel="us a call")
    axes[0].legend()
    return figure


def plot_roofline(document: dict):
    """TFLOP/s over operations a byte under the two roofs; the kernels of one shape stand side by side."""
    figure, (axis,) = _panels(1)
    for position, name in enumerate(names_in(document)):
        nudge = 1.06**position
        timed = [(row, us) for row in document["rows"] if (us := time_of(row, name))]
        wider = 2 if name == OUR_BF16 else 1  # it reads a cache of its own, and `bytes` are those of the FP8 one
        points = [(nudge * row["flops"] / row["bytes"] / wider, tflops(row, us)) for row, us in timed]
        axis.scatter(*zip(*points, strict=True), s=14, label=name, color=COLOURS.get(name), alpha=0.8)
    if floor := document["floor"]:
        ridge = floor["flops"] / floor["bandwidth"]
        xs = [min(row["flops"] / row["bytes"] for row in document["rows"]) / 2, ridge, 4 * ridge]
        axis.plot(xs, [min(x * floor["bandwidth"], floor["flops"]) / 1e12 for x in xs], "k-", linewidth=1, label="roof")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="operations a byte of the cache", ylabel="TFLOP/s")
    axis.legend()
    return figure


def plot(document: dict, stem: Path) -> list[Path]:
    """Draw what the document has rows for, as PNG files that begin with `stem`; needs matplotlib."""
    kinds = {"roofline": plot_roofline}
    if _series(document):
        kinds |= {"tflops": plot_bars, "latency": plot_latency}
    paths = []
    for kind, draw in kinds.items():
        figure = draw(document)
        title = f"{document['title']} ({document['gpu']})"
        figure.suptitle(fill(title, int(10 * figure.get_figwidth())))
        paths.append(stem.with_name(f"{stem.name}-{kind}.png"))
        figure.savefig(paths[-1], dpi=150)
    return paths


def main(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `etap bench`.", exists=True)],
    readme: Annotated[Path | None, typer.Option(help="File whose marked places get the tables.", exists=True)] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.", file_okay=False)] = None,
) -> None:
    """Print benchmark results again, and put them into the README and into plots."""
    documents = [{**json.loads(path.read_text()), "file": path.stem} for path in results]
    console = Console()
    for document in documents:
        print_document(document, console)
        if plots:
            plots.mkdir(parents=True, exist_ok=True)
            plot(document, plots / document["file"])
    if readme:
        update_readme(readme, documents)


if __name__ == "__main__":
    typer.run(main)
