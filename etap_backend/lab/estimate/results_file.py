"""What a file of `etap estimate` holds, and its table for a page. Reading one imports no kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from etap_backend.lab import results
from etap_backend.lab.configs import Strict
from etap_backend.lab.provenance import Provenance


class Kernel(Strict):
    """Microseconds of one attention call, and where they come from."""

    us: float
    source: str


class Estimate(Strict):
    """One reading carried over to another GPU; times in milliseconds a step, of all layers.

    `experts_here` are a layer's that a step read, where they were fewer than an even choice's, and `experts_there_ms`
    is what reading the others adds.
    """

    backend: str
    shape: str
    step_here_ms: float
    attention_here: Kernel
    attention_here_ms: float
    rest_here_ms: float
    rest_factor: float
    experts_here: float | None
    experts_there_ms: float
    attention_there: Kernel
    attention_there_ms: float
    step_ms: float
    tpot_ms: float
    tokens_per_second_per_gpu: float


class Document(Strict):
    """A results file of `etap estimate`."""

    kind: Literal["estimate"] = "estimate"
    target: str
    commit: str
    command: str
    sources: dict[str, Provenance]
    estimates: dict[str, list[Estimate]]  # by the stem of the file with the readings


TITLES = ("step read ms", "of it attention", "rest x", "other experts ms", "attention there ms", "**step there ms**")


def cells_of(one: Estimate) -> list[str]:
    """Load, backend, and the numbers from the step that was read to the one that is estimated."""
    here = (one.step_here_ms, one.attention_here_ms, one.rest_factor)
    numbers = (*here, one.experts_there_ms, one.attention_there_ms, one.step_ms)
    return [one.shape, one.backend, *(f"{number:.2f}" for number in numbers)]


def made_with(content: dict) -> Provenance:
    """What a results file says of how it was made, without what was measured."""
    return Provenance(**{key: content[key] for key in Provenance.model_fields if key in content})


def must_be_of_its_sources(document: Document, path: Path) -> None:
    """Raises ValueError, naming them, when files that it was made from have other readings by now."""
    others = []
    for name, of in document.sources.items():
        if (source := path.with_name(name)).is_file():
            others += [name] * (made_with(results.read_json(source)) != of)
    if others:
        wanted = "wanted one made from the files beside it"
        raise ValueError(f"{path}: {wanted}, got other {', '.join(others)}: run its command")


def markdown(path: Path) -> str:
    """The table of a page. Raises ValueError when the file is none of `etap estimate`, or of earlier readings."""
    document = results.read(path, Document)
    must_be_of_its_sources(document, path)
    several = len(document.estimates) > 1
    titles = ["requests x input/output, prefill", "backend", *TITLES] + ["readings"] * several
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for name, found in document.estimates.items():
        lines += ["| " + " | ".join(cells_of(one) + [name] * several) + " |" for one in found]
    by_origin: dict[str, list[str]] = {}
    for name, of in document.sources.items():
        by_origin.setdefault(f"{of.gpu}, commit {of.commit}", []).append(name.removesuffix(".json"))
    sources = "; ".join(f"{', '.join(names)}: {origin}" for origin, names in by_origin.items())
    about = f"Estimate for {document.target}; commit {document.commit}; `{document.command}`. {sources}."
    return "\n".join([*lines, "", about])
