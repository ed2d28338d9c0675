"""What becomes of the JSON of `etap e2e`: the table on the screen, with the whole method, the table of a page of docs/,
where measuring.md has the method, the plot.

    python -m bench.e2e.report results/e2e-*.json --plots results

does it without a GPU; `python -m etap_backend.lab.tables` puts the tables into the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.e2e.results_file import Document, Failed, Measured, Skipped, at_equal_host_speed, read
from bench.common.provenance import without_note
from bench.common.screen import print_table
from bench.serving.engines import ENGINES
from bench.common.units import in_k

METHOD = (
    "the engine's own load generator, random prompts, greedy, all requests at once up to the concurrency; TPOT is the "
    "median over requests, ITL that over all steps; median and range over repeated readings; prefill served: prompts "
    "new to the server; prefill cached: their cache is there before, sent once or, where a server's flags say so, made "
    "up, so readings are decode alone; tokens a chunk: of the stream, ITL lies between chunks; host ms: a fixed loop "
    "of plain Python on the server's machine, the slower of before and after a reading: where it was timed, a point's "
    "readings are compared that are within 10% of each other"
)
DUMMY = "Dummy weights: times are those of the architecture, answers mean nothing, and "
SAME_EXPERTS = (
    "requests of a batch choose much the same experts, so that the rest of a step is shorter than with a model's own."
)
DRAWN_EXPERTS = "each token's experts are drawn, all equally likely, in place of the router's choice."
PREFILL_OUTPUT = 4  # tokens: a point of at most so many is of prefill
AT_OTHER_HOST = "\\*"


Row = Measured | Skipped | Failed


def line(row: Row, gpus: int) -> str:
    """One row while the run goes on."""
    what = f"  {row.backend}, {row.load_text}: "
    match row:
        case Skipped(reason=reason):
            return what + reason
        case Failed(error=error):
            return what + error.splitlines()[0]
    tpot, per_gpu = row.tpot_ms, row.tokens_per_second.median / gpus
    return f"{what}TPOT {tpot.median:.2f} ms ({tpot.min:.2f} to {tpot.max:.2f}), {per_gpu:.1f} tokens/s a GPU"


def backends_of(document: Document) -> list[str]:
    """Backends in their order, ours first."""
    names = dict.fromkeys(row.backend for row in document.rows)
    return sorted(names, key=lambda name: name != ours_beside(name, document))


def ours_beside(backend: str, document: Document) -> str:
    """Our own backend with this one's cache."""
    _, plus, cache = backend.partition("+")
    return ENGINES[document.engine].ours + plus + cache


def _range(row: Row, key: str) -> str:
    match row:
        case Skipped():
            return "cache too small"
        case Failed():
            return "failed"
    if found := getattr(row, key):
        alone = len(row.readings) == 1
        return f"{found.median:.2f}" + ("" if alone else f" ({found.min:.2f} to {found.max:.2f})")
    return "-"


def _spread(row: Row | None, key: str):
    return getattr(row, key) if isinstance(row, Measured) else None


def _value(row: Row, key: str, digits: int, over: int = 1) -> str:
    return f"{found.median / over:,.{digits}f}" if (found := _spread(row, key)) else "-"


def _against(row: Row, ours: Row | None, key: str) -> str:
    theirs, own = _spread(row, key), _spread(ours, key)
    if row is ours or not theirs or not own or row.at_other_host or ours.at_other_host:
        return "-"
    return f"{theirs.median / own.median:.3f}"


def _share(row: Row) -> str:
    share = row.profile.attention_share if isinstance(row, Measured) and row.profile else None
    return "-" if share is None else f"{share:.1%}"


def _hosts(row: Row) -> str:
    hosts = [reading.host for reading in getattr(row, "readings", []) if reading.host]
    return " to ".join(f"{host:.1f}" for host in sorted({min(hosts), max(hosts)})) if hosts else "-"


def _readings(row: Row) -> str:
    text = str(len(getattr(row, "readings", [])))
    if isinstance(row, Measured):
        text += f", {row.left_out} left out" if row.left_out else ""
        text += ", at another host speed" if row.at_other_host else ""
    return text


Column = Callable[[Row, Row | None], str]


def columns_of(document: Document) -> dict[str, Column]:
    """Title and text of each column; the text is of a row and of ours at the same point."""
    name, gpus, measured = ENGINES[document.engine].ours, document.gpus, document.measured()
    columns: dict[str, Column] = {
        "requests x input/output, prefill": lambda row, ours: row.load_text,
        "backend": lambda row, ours: row.backend,
    }
    if measured and all(row.output <= PREFILL_OUTPUT for row in measured):
        columns["TTFT ms"] = lambda row, ours: _range(row, "ttft_ms")
        columns[f"TTFT / {name}'s"] = lambda row, ours: _against(row, ours, "ttft_ms")
    else:
        columns["TPOT ms"] = lambda row, ours: _range(row, "tpot_ms")
        columns[f"TPOT / {name}'s"] = lambda row, ours: _against(row, ours, "tpot_ms")
        if any(row.itl_ms for row in measured):
            columns["ITL ms"] = lambda row, ours: _range(row, "itl_ms")
            columns[f"ITL / {name}'s"] = lambda row, ours: _against(row, ours, "itl_ms")
        if any(row.tokens_per_chunk for row in measured):
            columns["tokens a chunk"] = lambda row, ours: _value(row, "tokens_per_chunk", 2)
        columns["TTFT ms"] = lambda row, ours: _value(row, "ttft_ms", 0)
    columns["tokens/s a GPU"] = lambda row, ours: _value(row, "tokens_per_second", 1, gpus)
    if any(row.profile for row in measured):
        columns["attention's share, profiled"] = lambda row, ours: _share(row)
    if any(reading.host for row in measured for reading in row.readings):
        columns["host ms"] = lambda row, ours: _hosts(row)
    columns["readings"] = lambda row, ours: _readings(row)
    if len(document.all_runs) > 1:
        columns["run"] = lambda row, ours: str(1 + row.run)
    return columns


def cells_of(document: Document) -> list[list[str]]:
    """The table's rows: all backends of a point, then the next point."""
    columns, names, lines = columns_of(document).values(), backends_of(document), []
    for rows in document.by_shape().values():
        found = [rows[name] for name in names if name in rows]
        told = [row for row in found if not isinstance(row, Measured) or row.readings]  # a row may be only begun
        lines += [[text(row, rows.get(ours_beside(row.backend, document))) for text in columns] for row in told]
    return lines


def made_with(document: Document) -> str:
    """GPUs, versions, commits, commands, and what the weights were."""
    versions = ", ".join(f"{package} {version}" for package, version in document.versions.items())
    layout = ", ".join(f"{name} {size}" for name, size in document.layout if name != "dcp" or size > 1)
    drafts = "; FP8 KV cache" if document.kv_dtype == "fp8" else ""
    if document.draft_tokens:
        drafts += f"; {document.draft_tokens} draft tokens"
        if document.acceptance:
            drafts += f", acceptance length {document.acceptance} made up"
    runs, shown = document.all_runs, {row.run for row in document.rows}
    said = [f"commit {run.commit}; {run.date}; `{without_note(run.command)}`" for run in runs]
    numbered = [f"run {1 + number}: {text}" for number, text in enumerate(said) if number in shown]
    about = "; ".join(numbered if len(runs) > 1 else said)
    where = f"{document.gpus} x {document.gpu}, {layout}{drafts}, driver {document.driver}"
    return f"{where}; {versions}; {about}; {document.weights}"


def notes_of(document: Document) -> str:
    return " ".join(dict.fromkeys(run.note for run in document.all_runs if run.note))


def provenance(document: Document) -> str:
    """The screen's: it says what dummy weights mean, too."""
    dummy = document.dummy and DUMMY + (DRAWN_EXPERTS if document.draws_experts else SAME_EXPERTS)
    return " ".join(filter(None, (f"{made_with(document)}.", dummy, notes_of(document))))


def caption(document: Document) -> str:
    """A page's, without what measuring.md says of every table."""
    experts = "drawn" if document.draws_experts else "as dummy weights choose them"
    made = made_with(document) + (f", experts {experts}." if document.dummy else ".")
    cut = "" if document.complete else f"Stopped {document.stopped}; what is missing was not measured."
    return " ".join(filter(None, (made, notes_of(document), cut)))


def problems(document: Document) -> list[str]:
    """Servers that failed and rows that did, by name; what the cache is too small for is none."""
    servers = [f"{name}: {about.error.splitlines()[0]}" for name, about in document.servers.items() if about.error]
    return servers + [line(row, document.gpus).strip() for row in document.rows if isinstance(row, Failed)]


def print_document(document: Document, console: Console) -> None:
    title = f"{document.title}, {document.engine}, {document.gpus} x {document.gpu}: {document.weights}"
    table = Table(title=title, title_justify="left")
    for number, title in enumerate(columns_of(document)):
        table.add_column(title, justify="left" if number < 2 else "right")
    for cells in cells_of(document):
        table.add_row(*cells)
    print_table(console, table)
    for name, about in document.servers.items():
        if about.seconds_to_ready is not None:
            room = f"{about.cache_tokens:,}" if about.cache_tokens else "unknown"
            eager = ", [red]decode not in full CUDA graphs[/]" if about.full_cuda_graphs is False else ""
            console.print(f"{name}: ready after {about.seconds_to_ready:.0f} s, KV cache of {room} tokens{eager}")
        if about.error:
            console.print(f"{name}: failed, see {about.log}", style="red", markup=False, highlight=False)
    for row in document.rows:
        if not isinstance(row, Measured):
            console.print(line(row, document.gpus).strip(), markup=False, highlight=False)
    console.print(f"{provenance(document)}\n{document.method}", markup=False, highlight=False)
    if not document.complete:
        console.print(f"stopped {document.stopped}; --resume goes on", style="red")


def markdown(document: Document, only: tuple[str, ...] = ()) -> str:
    """The table of a page: readings at equal speed of the host.

    With `only`, the time between two tokens at these loads, such as "16 x 16K", and a short caption: the whole table
    has the command. Raises ValueError when the document has no such load.
    """
    document = at_equal_host_speed(document)
    if only:
        return _between_tokens(document, only)
    columns = columns_of(document)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cells) + " |" for cells in cells_of(document)]
    return "\n".join([*lines, "", caption(document)])


def _between_tokens(document: Document, only: tuple[str, ...]) -> str:
    """A row for each of these loads, a column for each backend."""
    names, points = backends_of(document), {}
    for rows in document.by_shape().values():
        points[next(iter(rows.values())).load_text.partition("/")[0]] = rows
    if missing := [text for text in only if text not in points]:
        raise ValueError(f"rows: wanted some of {', '.join(points)}, got {', '.join(missing)}")

    def cell(row: Row | None) -> str:
        text = _value(row, "itl_ms", 2)
        return text + AT_OTHER_HOST if isinstance(row, Measured) and row.at_other_host else text

    lines = ["| requests x tokens | " + " | ".join(names) + " |", "|" + "---|" * (1 + len(names))]
    lines += ["| " + " | ".join([load, *(cell(points[load].get(name)) for name in names)]) + " |" for load in only]
    compared = [name for name in (document.engine, "etap-backend") if name in document.versions]
    where = f"{document.gpus} x {document.gpu}, driver {document.driver}"
    commits = ", ".join(dict.fromkeys(run.commit for run in document.all_runs))
    versions = ", ".join(f"{name} {document.versions[name]}" for name in compared)
    about = f"Milliseconds between two tokens (ITL); {where}; {versions}; commit {commits}; {document.weights}."
    starred = f" {AT_OTHER_HOST} at another host speed." if any(AT_OTHER_HOST in line for line in lines) else ""
    return "\n".join([*lines, "", about + starred])


def plot(document: Document, path: Path) -> None:
    """TPOT over the concurrency, one panel for each length; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = list(dict.fromkeys((row.input, row.output, row.prefill) for row in document.measured()))
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(1 + 4.2 * len(lengths), 4), squeeze=False, layout="constrained"
    )
    for axis, length in zip(axes.flat, lengths, strict=True):
        for name in backends_of(document):
            rows = [row for row in document.measured() if (row.backend, *row.shape[:2], row.prefill) == (name, *length)]
            points = sorted((row.concurrency, row.tpot_ms) for row in rows)
            errors = [[of.median - of.min for _, of in points], [of.max - of.median for _, of in points]]
            middle = [of.median for _, of in points]
            axis.errorbar([place for place, _ in points], middle, errors, marker="o", capsize=2, label=name)
        given, made, prefill = length
        axis.set(title=f"{in_k(given)} in, {in_k(made)} out, prefill {prefill}", xlabel="requests", ylabel="TPOT (ms)")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.suptitle(f"{document.title}, {document.engine}, {document.gpus} x {document.gpu}", fontsize=10)
    figure.supxlabel(document.weights, fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `etap e2e`.")],
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.", file_okay=False)] = None,
) -> None:
    """Print end-to-end results again, and draw them."""
    try:
        documents = {path.stem: read(path) for path in results}
        if plots:
            plots.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    for name, document in documents.items():
        compared = at_equal_host_speed(document)
        print_document(compared, console)
        if plots and compared.measured():
            plot(compared, plots / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
