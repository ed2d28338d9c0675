"""The laboratory's programs: each says how it is run, and takes what it says; no text names a place of before."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import etap_backend

LAB = Path(etap_backend.__file__).parent / "lab"
CHECKS = sorted(path.stem for path in (LAB / "checks").glob("*.py") if '__name__ == "__main__"' in path.read_text())
GONE = re.compile(
    r"tests/(answers|soak|sanitize|two_nodes|vllm/(serve|offline|threshold|upstream)|sglang/serve)|compare_answers"
)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_says_how_it_is_run(name):
    text = (LAB / "checks" / f"{name}.py").read_text()
    assert f"    etap check {name} " in f"{ast.get_docstring(ast.parse(text), clean=False)} "


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_lists_its_options(name):
    app = typer.Typer()
    app.command()(importlib.import_module(f"etap_backend.lab.checks.{name}").main)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "Usage" in shown.output, shown.output


def test_no_text_names_a_place_of_before():
    found = [str(path) for path in LAB.rglob("*.py") if GONE.search(path.read_text())]
    assert found == []
