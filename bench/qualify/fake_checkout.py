"""The suites that run other projects' test files, on files of ours in a checkout's place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bench.qualify.theirs import Case, Errors

OPTIONS = {"dtype": "bf16", "beside": None, "format": "V3.2", "query_heads": None}


@contextmanager
def checkout(suite: ModuleType, tmp_path: Path, monkeypatch, modules: tuple[str, ...]) -> Iterator:
    """cases(text, **options) gives the suite's cases on a checkout with that file; these modules are none before."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(suite.SUITE, "errors", Errors())

    def cases(text: str, files: dict[Path, str] | None = None, **options) -> list[Case]:
        for name in modules:
            monkeypatch.delitem(sys.modules, name, raising=False)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for path, content in {suite.SUITE.script: text, **(files or {})}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        return suite.cases(SimpleNamespace(checkout=folder, **OPTIONS | options))

    yield cases
    for name in modules:
        sys.modules.pop(name, None)


def outcomes(cases: list[Case]) -> dict[str, Counter]:
    """By kind how many cases pass, fail and skip themselves."""
    found: dict[str, Counter] = {}
    for case in cases:
        try:
            case.run()
            outcome = "passed"
        except pytest.skip.Exception:
            outcome = "skipped"
        except (Exception, pytest.fail.Exception):
            outcome = "failed"
        found.setdefault(case.kind, Counter()).update([outcome])
    return found
