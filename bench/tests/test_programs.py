"""The programs of this folder: each says how it is run, takes what it says, and needs no engine to say so."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.qualify import block_draft, sanitize

HERE = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py") if "    typer.run(main)\n" in path.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_run_and_lists_its_options(name):
    said = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text()), clean=False)
    assert f"    PYTHONPATH=tests python -m bench.qualify.{name} " in said
    app = typer.Typer()
    app.command()(importlib.import_module(f"qualify.{name}").main)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "Usage" in shown.output, shown.output


def test_the_programs_are_those_that_are_known():
    assert PROGRAMS == [
        "block_draft", "known_answers", "random_cases", "same_instructions", "sanitize", "theirs", "train_model",
        "two_nodes", "two_servers", "v4_server", "vllm_upstream",
    ]  # fmt: skip


def test_the_sanitizer_runs_the_cases_of_its_module(monkeypatch):
    commands = []
    ended = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(sanitize.subprocess, "run", lambda command, env: commands.append(command) or ended)
    assert sanitize.sanitize("memcheck") == 0
    words = commands[0][commands[0].index(sys.executable) :]
    assert words == [sys.executable, "-m", "qualify.sanitize", "--run-cases"]


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_a_draft_has_its_targets_width_and_words(tmp_path, algorithm):
    target = {"hidden_size": 6144, "vocab_size": 154880, "num_hidden_layers": 4, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(target))
    block_draft.main(tmp_path, tmp_path / "draft", algorithm)
    made = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert all(made[key] == target[key] for key in ("hidden_size", "vocab_size", "max_position_embeddings"))
    assert made["num_target_layers"] == 4 and made["dflash_config"]["target_layer_ids"] == [0, 2]
    assert ("markov_rank" in made) == (algorithm == "dspark")
