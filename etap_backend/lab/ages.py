"""How old a result is: lines of what it depends on, kernels, schedule and plugins, that changed since its commit.

LIMIT is where a result stops being evidence. csrc and the product have some 14,000 lines: a day of messages, types and
plugin code stays below 1,000, a kernel written anew does not, for the smallest has more with its launch and schedule.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("csrc", "etap_backend", ":(exclude)etap_backend/lab")
OF_CALLS = ("csrc", ":(exclude)csrc/cmake", ":(exclude)csrc/THIRD_PARTY_NOTICES")
SPARSE_ONLY = ("decode/sparse", "decode/sparse_fp8", "decode/instantiations/sparse*", "api/sparse_call.h")
DENSE_ONLY = ("decode/mixed_major", "schedule/schedule.*", "api/decode_call.h", "decode/instantiations/[bf]*.cu")
ENGINES = ("vllm", "sglang")
NOT_SERVED = ("compat", "cpu", "cli.py", "doctor.py")  # no server on a GPU runs these
V4, DENSE, SPARSE = "DeepSeek-V4", "dense", "sparse call"


def _without(folder: str, paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(f":(exclude){folder}/{path}" for path in paths)


SERVED_BY = {name: (*SOURCES, *_without("etap_backend", (*NOT_SERVED, *({*ENGINES} - {name})))) for name in ENGINES}
SOURCES_OF = {
    "bench": (*OF_CALLS, *_without("csrc", SPARSE_ONLY)),
    "bench-sparse": (*OF_CALLS, *_without("csrc", DENSE_ONLY)),
    "calls": (*SOURCES, *_without("etap_backend", ENGINES)),
    f"calls {SPARSE}": (*SOURCES, *_without("etap_backend", ENGINES), *_without("csrc", DENSE_ONLY)),
    **SERVED_BY,
    **{f"{name} {V4}": (*served, *_without("csrc", DENSE_ONLY)) for name, served in SERVED_BY.items()},
    **{f"{name} {DENSE}": (*served, *_without("csrc", SPARSE_ONLY)) for name, served in SERVED_BY.items()},
}
"""What kinds of files depend on: a call's times on kernels and schedule, its results on all but the engines' plugins;
an engine's answers and steps on what its server runs, of a model without what only dense or only sparse calls have."""
LIMIT = 1000
SAME = "Kernels: same instructions"
UNTOLD = ("", "unknown", "none")


def kind_of(content: dict) -> str:
    """A result's, a key of SOURCES_OF: its own, or its engine where it has one among its versions."""
    if (kind := content.get("kind")) in SOURCES_OF:
        return kind
    engine = next((name for name in ENGINES if name in (content.get("versions") or {})), "calls")
    dense = "model_shape" in content and "index_topk" not in content["model_shape"]  # an indexer makes a model sparse
    said = [name for name in (V4, SPARSE) if name in f"{content.get('what')} {content.get('title')}"]
    attention = said[0] if said else DENSE if dense else None
    return of if (of := f"{engine} {attention}") in SOURCES_OF else engine


@dataclass(frozen=True)
class Age:
    """Of one result: the lines that changed since its commit, None where they cannot be told, and what is wrong."""

    commit: object
    lines: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        told = "age not checked" if self.lines is None else f"{self.lines} lines changed"
        return self.problem or f"{told} since {self.commit}"


def _git(root: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, no repository, or no such thing in it."""
    try:
        found = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def why_unknown(root: Path) -> str | None:
    """Why no ages can be told of this source tree, or None where they can."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return "this source tree is no git checkout, so that ages of results cannot be told"
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        return "this clone is shallow, so that ages of results cannot be told: git fetch --unshallow"
    return None


def changed_lines(root: Path, commit: str, sources: tuple[str, ...]) -> int | None:
    """Lines added and removed in the sources from a commit to the working tree; None when there is no such commit.

    Those of csrc do not count in a commit that has the line SAME, which `qualify.same_instructions` showed.
    """
    if _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is None:
        return None
    lines, since = 0, commit
    for same in (_git(root, "rev-list", "--reverse", f"--grep=^{SAME}$", f"{commit}..HEAD") or "").split():
        lines += _lines(root, sources, since, f"{same}^")
        lines += _lines(root, (*sources, ":(exclude)csrc"), f"{same}^", same)
        since = same
    return lines + _lines(root, sources, since)


def _lines(root: Path, sources: tuple[str, ...], *commits: str) -> int:
    numbers = _git(root, "diff", "-M", "--numstat", *commits, "--", *sources) or ""
    return sum(int(number) for line in numbers.splitlines() for number in line.split("\t")[:2] if number.isdecimal())


def age_of(root: Path, commit: object, *, in_history: bool, kind: str = "calls") -> Age:
    """Of a result of a kind with this commit; without `in_history` only whether it names a clean one is looked at."""
    if not isinstance(commit, str) or commit in UNTOLD:
        return Age(commit, problem=f"wanted the commit that it was made with, got {commit}")
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return Age(commit, problem=f"wanted a commit, of a tree without changes, got {commit}")
    if not in_history:
        return Age(commit)
    lines = changed_lines(root, commit, SOURCES_OF[kind])
    if lines is None:
        return Age(commit, problem=f"commit {commit} is not in this history")
    too_old = f"{lines} lines changed since {commit}, at most {LIMIT} may: measure again, or delete it"
    return Age(commit, lines, too_old if lines > LIMIT else "")
