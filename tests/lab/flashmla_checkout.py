"""The programs that run FlashMLA's own test scripts, on scripts of ours in a checkout's place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import typer
from typer.testing import CliRunner


@contextmanager
def runner(program: ModuleType, tmp_path: Path, monkeypatch) -> Iterator:
    """run(script, *arguments) runs the program on a checkout with that script; the command's result and its file."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    app = typer.Typer()
    app.command()(program.main)
    modules = ("flash_mla", program.SCRIPT.stem)

    def run(script: str, *arguments: str):
        for name in modules:
            monkeypatch.delitem(sys.modules, name, raising=False)
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "tests"
        folder.mkdir(parents=True)
        (folder / program.SCRIPT.name).write_text(script)
        output = tmp_path / "result.json"
        result = CliRunner().invoke(app, [str(folder.parent), "--output", str(output), *arguments])
        return result, json.loads(output.read_text())

    yield run
    for name in modules:
        sys.modules.pop(name, None)
