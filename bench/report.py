"""`python -m bench report FILES`: tables of results files for a screen or, with --page, as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from bench.common import results
from bench.common.tables import number, provenance_line, table
from bench.common.units import in_k
from bench.kernels import report as kernels
from bench.servers import table as servers

INTRODUCTION = """# Measurements

Each part names its GPU, versions, commit and command. Kernels: microseconds per call; a ratio above 1 means that ETAP
is faster. Servers: a reading at another host speed is void. Answers: differences of log-probabilities in nats; *noise*
is the reference at another batch size, *control* the reference behind another beginning."""
SECTIONS = ("Kernels", "Top-k", "Servers", "Answers", "Soaks", "Other checks", "Without a table")
ANSWERS = [
    "compared with the reference",
    "requests",
    "equal answers",
    "steps",
    "median nats",
    "largest nats",
    "outcome",
]
SOAKS = ["soak", "seconds", "served", "aborted", "preempted", "prefix tokens found", "drafts accepted"]
SOAKS += ["host MiB grown", "GPU MiB grown", "outcome"]
MAX_TEXT = 160


def outcome(document: dict) -> str:
    """Whether a check passed, with its own words where it has some."""
    failures = document.get("failures") or document.get("wrong") or document.get("failed")
    if failures or document.get("complete") is False:
        first = failures[0] if isinstance(failures, list) and failures else failures or document.get("stopped")
        return f"failed: {str(document.get('outcome') or first)[:MAX_TEXT]}"
    return str(document.get("outcome") or "passed")[:MAX_TEXT]


def section_of(document: dict) -> str:
    """Which of SECTIONS a file's content belongs to."""
    kind = document.get("kind")
    if kind in kernels.KINDS and "rows" in document:
        return "Kernels"
    if kind == "top-k":
        return "Top-k"
    if kind == "serve":
        return "Servers"
    if "agreement" in document:
        return "Answers"
    if "settings" in document and "server" in document:
        return "Soaks"
    return "Other checks" if "what" in document else "Without a table"


def top_k(name: str, document: dict) -> str:
    """A line per case: the logits' time, and what each selection adds to it."""
    rows = document["rows"]
    titles = list(dict.fromkeys(title for row in rows for title in row["results"]))
    lines = [["rows x logits", "k", *titles]]
    for row in rows:
        times = [number(row["results"].get(title, {}).get("us"), 2) for title in titles]
        lines.append([f"{row['rows']} x {in_k(row['length'])}", str(row["k"]), *times])
    about = f"{document['gpu']}; microseconds of a selection behind the logits, less those of the logits alone"
    return f"### {name}: {about}\n\n{table(lines)}\n\n- {provenance_line(document)}"


def answers(name: str, document: dict) -> str:
    """A line per backend and stage, the reference's own noise before them."""
    lines = [ANSWERS]
    for case, one in {**document["yardsticks"], **document["agreement"]}.items():
        verdict = "; ".join(one.get("objections") or []) or ("agrees" if "objections" in one else "yardstick")
        counts = [number(one.get(key), 0) for key in ("requests", "equal_answers", "steps")]
        lines.append([case, *counts, *(number(one.get(key), 4) for key in ("median", "max")), verdict])
    failed = [f"failed: {text}" for text in document["failures"]]
    about = [*failed, document.get("note"), provenance_line(document)]
    listed = "\n".join(f"- {line}" for line in about if line)
    return f"### {name}: {document['what']}, {document['gpu']}\n\n{table(lines)}\n\n{listed}"


def soak(document: dict) -> list[str]:
    requests, counters = document["requests"], document["counters"]
    found = [document["seconds"], requests.get("served"), requests.get("aborted")]
    found += [counters.get(name) for name in ("preempted", "prefix tokens found", "drafts accepted")]
    found += [document["memory"][kind]["growth_mib"] for kind in ("host", "gpu")]
    shown = [number(one, 0) for one in found]
    verdict = outcome(document) if document["failures"] or not document["complete"] else "passed"
    return [f"{document['what']}, {document['mode']}, {document['gpu']}", *shown, verdict]


def soaks(documents: list[tuple[str, dict]]) -> str:
    """A line per soak, and what failed. One that could not begin has no counts."""
    lines = [soak(one) for _, one in documents if "memory" in one]
    failed = [f"- {name}: failed: {text}" for name, one in documents for text in one["failures"]]
    return "\n\n".join([*([table([SOAKS, *lines])] if lines else []), *(["\n".join(failed)] if failed else [])])


def check(document: dict) -> list[str]:
    cases = document.get("cases")
    count = (
        sum(each.get("cases", each.get("wanted", 0)) for each in cases.values()) if isinstance(cases, dict) else cases
    )
    part = f", part {document['part']}" if document.get("part", "1/1") != "1/1" else ""
    return [document["what"] + part, number(count, 0), outcome(document), document.get("gpu", "unknown GPU")]


def body(section: str, documents: list[tuple[str, dict]], page: bool) -> str:
    """A section's tables, and where each comes from."""
    if section == "Kernels":
        parts = [kernels.summary(documents)] if page else []
        return "\n\n".join([*parts, *(kernels.text(name, one, page) for name, one in documents)])
    if section == "Top-k":
        return "\n\n".join(top_k(name, one) for name, one in documents)
    if section == "Servers":
        return "\n\n".join(servers.text(name, one) for name, one in documents)
    if section == "Answers":
        return "\n\n".join(answers(name, one) for name, one in documents)
    notes = [f"{one['note'].rstrip('.')}. " if one.get("note") else "" for _, one in documents]
    sources = "\n".join(
        f"- {name}: {note}{provenance_line(one)}" for (name, one), note in zip(documents, notes, strict=True)
    )
    if section == "Soaks":
        return f"{soaks(documents)}\n\n{sources}"
    if section == "Other checks":
        return f"{table([['check', 'cases', 'outcome', 'GPU'], *(check(one) for _, one in documents)])}\n\n{sources}"
    return sources


def text_of(paths: Iterable[Path], page: bool) -> str:
    """All that results files say, by section. Raises ValueError, naming the file, for one that is no results file."""
    found: dict[str, list[tuple[str, dict]]] = {section: [] for section in SECTIONS}
    for path in paths:
        content = results.read_json(path)
        documents = content if isinstance(content, list) else [content]
        if not documents or not all(isinstance(one, dict) and "date" in one for one in documents):
            raise ValueError(f"{path}: wanted a results file of bench, got {str(content)[:60]}")
        for document in documents:
            found[section_of(document)].append((path.stem, document))
    parts = [f"## {section}\n\n{body(section, of, page)}" for section, of in found.items() if of]
    return "\n\n".join([*([INTRODUCTION] if page else []), *parts]) + "\n"


def main(
    files: Annotated[list[Path], typer.Argument(help="Results files of bench.")],
    page: Annotated[Path | None, typer.Option(help="Write one Markdown page of all files.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TFLOP/s of the one file into this PNG.")] = None,
) -> None:
    """Print the tables of results files, write a page of them, or draw a picture."""
    try:
        if plot:
            from bench.kernels.picture import draw  # needs matplotlib

            draw(results.read_json(files[0]), plot)
        elif page:
            page.write_text(text_of(files, page=True))
        else:
            typer.echo(text_of(files, page=False))
    except ValueError as error:
        typer.secho(f"bench report: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
