"""What becomes of the JSON of `etap e2e`: the table on the screen, the table in the README, the plot.

`python -m etap_backend.e2e_report results/e2e-*.json --readme README.md --plots results` does all of it without a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend.engines import ENGINES
from etap_backend.grids import in_k
from etap_backend.report import place_tables, write

METHOD = (
    "the engine's own load generator, random prompts, greedy, all requests at once up to the concurrency; TPOT is the "
    "median over requests, ITL that over all steps; median and range over repeated readings; prefill served: prompts "
    "new to the server; prefill cached: the same prompts were sent before and are in the prefix cache, so readings are "
    "decode alone; tokens a chunk: of the stream, ITL lies between chunks; host ms: a fixed loop of plain Python on "
    "the server's machine, the slower of before and after a reading: where it was timed, a point's readings are "
    "compared that are within 10% of each other"
)
COMPARABLE = (
    *("title", "engine", "gpu", "weights", "gpus", "layout", "draft_tokens", "kv_dtype", "versions", "environment"),
)
RUN_KEYS = ("date", "commit", "library_sha256", "command", "note")
HOST_TOLERANCE = 0.10
DUMMY = (
    "Dummy weights: times are those of the architecture, answers mean nothing, and requests of a batch choose much the "
    "same experts, so that the rest of a step is shorter than with a model's own."
)


def must_be_comparable(document: dict, other: dict) -> None:
    """Raises ValueError when rows of the two do not belong into one table."""
    # Documents of before there was a choice of the cache's type do not say it.
    defaults = {"kv_dtype": "same"}
    one, another = (defaults | each for each in (document, other))
    if differing := [key for key in COMPARABLE if one.get(key) != another.get(key)]:
        raise ValueError(f"differs in {', '.join(differing)}")


def runs_of(document: dict) -> list[dict]:
    """What each run was that rows are of; a row's `run` counts from 0, and a row without is of the first."""
    return document.get("runs") or [{key: document.get(key) for key in RUN_KEYS}]


def joined(documents: list[dict]) -> dict:
    """One document of several runs of one comparison. Of a backend's readings at a point the last document's stand.

    Raises ValueError when they are of different comparisons.
    """
    runs = list({json.dumps(run): run for document in documents for run in runs_of(document)}.values())
    rows, servers = {}, {}
    for document in documents:
        must_be_comparable(documents[0], document)
        for row in document["rows"]:
            key = row["backend"], *shape_of(row)
            if "tpot_ms" in row or key not in rows:
                rows[key] = row | {"run": runs.index(runs_of(document)[row.get("run", 0)])}
        servers |= document["servers"]
    stopped = dict.fromkeys(document["stopped"] for document in documents if document["stopped"])
    about = {"runs": runs, "rows": list(rows.values()), "servers": servers, "stopped": "; ".join(stopped) or None}
    return documents[-1] | about | {"complete": all(document["complete"] for document in documents)}


def summary(readings: list[dict], gpus: int) -> dict:
    """Median and range over the readings of a case."""

    def spread(values: list[float]) -> dict:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    found = {
        "tpot_ms": spread([reading["median_tpot_ms"] for reading in readings]),
        "ttft_ms": spread([reading["median_ttft_ms"] for reading in readings]),
        "tokens_per_second": spread([reading["output_throughput"] for reading in readings]),
        "tokens_per_second_per_gpu": spread([reading["output_throughput"] / gpus for reading in readings]),
    }
    if steps := [reading["median_itl_ms"] for reading in readings if "median_itl_ms" in reading]:
        found["itl_ms"] = spread(steps)
    if chunks := [reading["tokens_per_chunk"] for reading in readings if "tokens_per_chunk" in reading]:
        found["tokens_per_chunk"] = spread(chunks)
    if accepted := [reading["acceptance_length"] for reading in readings if "acceptance_length" in reading]:
        found["acceptance_length"] = spread(accepted)
    return found


def host_of(reading: dict) -> float | None:
    """The slower of the host's loops before and after a reading; None where it was not timed."""
    return max(reading["host_ms"]) if "host_ms" in reading else None


def _equal_host(rows: list[dict]) -> tuple[float, float] | None:
    """The span of host times, HOST_TOLERANCE wide, that has readings of most of these rows, then most readings, then
    the fastest; None where no host was timed."""
    of_rows = [[host for reading in row["readings"] if (host := host_of(reading))] for row in rows]
    hosts = [(host, number) for number, of_row in enumerate(of_rows) for host in of_row]

    def held(low: float) -> tuple[int, int, float]:
        within = [number for host, number in hosts if low <= host <= low * (1 + HOST_TOLERANCE)]
        return len(set(within)), len(within), -low

    low = max((host for host, _ in hosts), key=held, default=None)
    return None if low is None else (low, low * (1 + HOST_TOLERANCE))


def at_equal_host_speed(document: dict) -> dict:
    """The document with those readings of each point whose hosts were within HOST_TOLERANCE of each other, and in
    `left_out` how many others a row had. A row that has no such reading keeps its own and is `at_other_host`: it is
    compared with none. Readings from before hosts were timed stay."""
    rows = []
    for of_point in by_shape(document).values():
        timed = [row for row in of_point.values() if row.get("readings")]
        span = _equal_host(timed)
        for row in of_point.values():
            readings = [
                reading
                for reading in row.get("readings", [])
                if not span or host_of(reading) is None or span[0] <= host_of(reading) <= span[1]
            ]
            left_out = len(row.get("readings", [])) - len(readings)
            if left_out and readings:
                row = row | {"readings": readings, "left_out": left_out} | summary(readings, document["gpus"])
            elif left_out:
                row = row | {"at_other_host": True}
            rows.append(row)
    return document | {"rows": rows}


def shape_of(row: dict) -> tuple:
    return row["input"], row["output"], row["concurrency"], row["prefill"]


def shape_text(shape: tuple) -> str:
    given, made, concurrency, prefill = shape
    return f"{concurrency} x {in_k(given)}/{in_k(made)}, {prefill}"


def line(row: dict) -> str:
    """One row while the run goes on."""
    what = f"  {row['backend']}, {shape_text(shape_of(row))}: "
    if "skipped" in row or "error" in row:
        return what + (row.get("skipped") or row["error"].splitlines()[0])
    tpot, per_gpu = row["tpot_ms"], row["tokens_per_second_per_gpu"]["median"]
    return f"{what}TPOT {tpot['median']:.2f} ms ({tpot['min']:.2f} to {tpot['max']:.2f}), {per_gpu:.1f} tokens/s a GPU"


def backends_of(document: dict) -> list[str]:
    """Backends in their order, ours first."""
    names = dict.fromkeys(row["backend"] for row in document["rows"])
    ours = ENGINES[document["engine"]].ours
    return sorted(names, key=lambda name: name != ours)


def by_shape(document: dict) -> dict[tuple, dict[str, dict]]:
    """{shape: {backend: row}} in the order of the rows."""
    shapes: dict[tuple, dict[str, dict]] = {}
    for row in document["rows"]:
        shapes.setdefault(shape_of(row), {})[row["backend"]] = row
    return shapes


def _range(row: dict, key: str) -> str:
    if key in row:
        return "{median:.2f} ({min:.2f} to {max:.2f})".format(**row[key])
    return "cache too small" if "skipped" in row else "failed" if "error" in row else "-"


def _value(row: dict, key: str, digits: int) -> str:
    return f"{row[key]['median']:,.{digits}f}" if key in row else "-"


def _against(row: dict, ours: dict, key: str) -> str:
    at_one_host = not ("at_other_host" in row or "at_other_host" in ours)
    if row is ours or key not in row or key not in ours or not at_one_host:
        return "-"
    return f"{row[key]['median'] / ours[key]['median']:.3f}"


def _percent(share: float | None, digits: int) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _hosts(row: dict) -> str:
    hosts = [host for reading in row.get("readings", []) if (host := host_of(reading))]
    return f"{min(hosts):.1f} to {max(hosts):.1f}" if hosts else "-"


def _readings(row: dict) -> str:
    left_out = f", {row['left_out']} left out" if "left_out" in row else ""
    other = ", at another host speed" if "at_other_host" in row else ""
    return f"{len(row.get('readings', []))}{left_out}{other}"


Column = Callable[[dict, dict], str]


def columns_of(document: dict) -> dict[str, Column]:
    """Title and text of each column; the text is of a row and of ours at the same point."""
    name, known = ENGINES[document["engine"]].ours, {key for row in document["rows"] for key in row}
    columns: dict[str, Column] = {
        "requests x input/output, prefill": lambda row, ours: shape_text(shape_of(row)),
        "backend": lambda row, ours: row["backend"],
        "TPOT ms": lambda row, ours: _range(row, "tpot_ms"),
        f"TPOT / {name}'s": lambda row, ours: _against(row, ours, "tpot_ms"),
    }
    if "itl_ms" in known:
        columns["ITL ms"] = lambda row, ours: _range(row, "itl_ms")
        columns[f"ITL / {name}'s"] = lambda row, ours: _against(row, ours, "itl_ms")
    if "tokens_per_chunk" in known:
        columns["tokens a chunk"] = lambda row, ours: _value(row, "tokens_per_chunk", 2)
    columns["TTFT ms"] = lambda row, ours: _value(row, "ttft_ms", 0)
    columns["tokens/s a GPU"] = lambda row, ours: _value(row, "tokens_per_second_per_gpu", 1)
    if "attention_share" in known:
        columns["attention's share"] = lambda row, ours: _percent(row.get("attention_share"), 0)
    if "profile" in known:
        columns["attention's share, profiled"] = lambda row, ours: _percent(
            row.get("profile", {}).get("attention_share"), 1
        )
    if any("host_ms" in reading for row in document["rows"] for reading in row.get("readings", [])):
        columns["host ms"] = lambda row, ours: _hosts(row)
    columns["readings"] = lambda row, ours: _readings(row)
    if len(runs_of(document)) > 1:
        columns["run"] = lambda row, ours: str(1 + row.get("run", 0))
    return columns


def cells_of(document: dict) -> list[list[str]]:
    """The table's rows: all backends of a point, then the next point; without what was begun and has no reading."""
    columns, names = columns_of(document).values(), backends_of(document)
    ours, lines = ENGINES[document["engine"]].ours, []
    for rows in by_shape(document).values():
        told = [rows[name] for name in names if {"tpot_ms", "skipped", "error"} & rows.get(name, {}).keys()]
        lines += [[text(row, rows.get(ours, {})) for text in columns] for row in told]
    return lines


def title_of(document: dict) -> str:
    return f"{document['title']}, {document['engine']}, {document['gpus']} x {document['gpu']}: {document['weights']}"


def provenance(document: dict) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    layout = ", ".join(f"{name} {size}" for name, size in document["layout"].items())
    drafts = "; FP8 KV cache" if document.get("kv_dtype") == "fp8" else ""
    if document["draft_tokens"]:
        drafts += f"; {document['draft_tokens']} draft tokens"
        if document["acceptance"]:
            drafts += f", acceptance length {document['acceptance']} made up"
    runs = runs_of(document)
    notes = dict.fromkeys(run["note"] for run in runs)
    weights = " ".join(filter(None, (f"{document['weights']}.", document["dummy"] and DUMMY, *notes)))
    about = "; ".join(
        f"{f'run {number}: ' if len(runs) > 1 else ''}commit {run['commit']}; {run['date']}; `{run['command']}`"
        for number, run in enumerate(runs, 1)
    )
    return (
        f"{document['gpus']} x {document['gpu']}, {layout}{drafts}, driver {document['driver']}; {versions}; "
        f"{about}. {weights}"
    )


def problems(document: dict) -> list[str]:
    """Servers that failed and rows that did, by name; what the cache is too small for is none."""
    servers = [
        f"{name}: {record['error'].splitlines()[0]}"
        for name, record in document["servers"].items()
        if "error" in record
    ]
    rows = [line(row).strip() for row in document["rows"] if "error" in row]
    return servers + rows


def print_document(document: dict, console: Console) -> None:
    table = Table(title=title_of(document), title_justify="left")
    for number, title in enumerate(columns_of(document)):
        table.add_column(title, justify="left" if number < 2 else "right")
    for cells in cells_of(document):
        table.add_row(*cells)
    console.print(table)
    for name, record in document["servers"].items():
        if "seconds_to_ready" in record:
            room = f"{record['cache_tokens']:,}" if record.get("cache_tokens") else "unknown"
            eager = ", [red]decode not in full CUDA graphs[/]" if record.get("full_cuda_graphs") is False else ""
            console.print(f"{name}: ready after {record['seconds_to_ready']:.0f} s, KV cache of {room} tokens{eager}")
        if "error" in record:
            console.print(f"{name}: failed, see {record['log']}", style="red", markup=False, highlight=False)
    for row in document["rows"]:
        if "error" in row or "skipped" in row:
            console.print(line(row).strip(), markup=False, highlight=False)
    console.print(f"{provenance(document)}\n{document['method']}", markup=False, highlight=False)
    if not document["complete"]:
        console.print(f"stopped {document['stopped']}; --resume goes on", style="red")


def markdown(document: dict) -> str:
    columns = columns_of(document)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cells) + " |" for cells in cells_of(document)]
    ending = "" if document["complete"] else f" Stopped {document['stopped']}; what is missing was not measured."
    return "\n".join([*lines, "", f"{provenance(document)} TPOT: {document['method']}.{ending}"])


def update_readme(readme: Path, documents: list[dict]) -> None:
    """Put each table at its `<!-- e2e NAME -->`, NAME being that of the JSON file; see `place_tables`."""
    place_tables(readme, "e2e", {document["file"]: markdown(document) for document in documents})


def plot(document: dict, path: Path) -> None:
    """TPOT over the concurrency, one panel for each length; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in document["rows"] if "tpot_ms" in row]
    lengths = list(dict.fromkeys((row["input"], row["output"], row["prefill"]) for row in timed))
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(1 + 4.2 * len(lengths), 4), squeeze=False, layout="constrained"
    )
    for axis, length in zip(axes.flat, lengths, strict=True):
        for name in backends_of(document):
            rows = [row for row in timed if row["backend"] == name]
            rows = sorted(
                (row for row in rows if (row["input"], row["output"], row["prefill"]) == length),
                key=lambda row: row["concurrency"],
            )
            middle = [row["tpot_ms"]["median"] for row in rows]
            below = [row["tpot_ms"]["median"] - row["tpot_ms"]["min"] for row in rows]
            above = [row["tpot_ms"]["max"] - row["tpot_ms"]["median"] for row in rows]
            places = [row["concurrency"] for row in rows]
            axis.errorbar(places, middle, [below, above], marker="o", markersize=3, capsize=2, label=name)
        given, made, prefill = length
        axis.set(title=f"{in_k(given)} in, {in_k(made)} out, prefill {prefill}", xlabel="requests", ylabel="TPOT (ms)")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.suptitle(f"{document['title']}, {document['engine']}, {document['gpus']} x {document['gpu']}", fontsize=10)
    figure.supxlabel(document["weights"], fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `etap e2e`.", exists=True)],
    readme: Annotated[Path | None, typer.Option(help="File whose marked places get the tables.", exists=True)] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.", file_okay=False)] = None,
    join: Annotated[
        Path | None, typer.Option(help="Make one file of all, each row with the run that it is of, and show that.")
    ] = None,
    kernels: Annotated[
        list[Path] | None, typer.Option(help="JSON files of `etap bench` on that GPU, for attention's share of a step.")
    ] = None,
) -> None:
    """Print end-to-end results again, and put them into the README and into plots."""
    from etap_backend.estimate import with_shares  # it reads rows with this module's functions

    if join:
        try:
            write(joined([json.loads(path.read_text()) for path in results]), join)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--join") from error
        results = [join]
    benchmarks = [json.loads(path.read_text()) for path in kernels or []]
    read = [{**json.loads(path.read_text()), "file": path.stem} for path in results]
    documents = [with_shares(at_equal_host_speed(document), benchmarks) for document in read]
    console = Console()
    for document in documents:
        print_document(document, console)
        if plots:
            plots.mkdir(parents=True, exist_ok=True)
            plot(document, plots / f"{document['file']}.png")
    if readme:
        update_readme(readme, documents)


if __name__ == "__main__":
    typer.run(main)
