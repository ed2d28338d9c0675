"""`bench report`: tables, pages and the picture of results files, older ones included."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from bench import __main__ as commands
from bench import release, report
from bench.common import results
from bench.kernels import report as kernels

FOLDER = Path(__file__).parents[2] / "results"
OLDER = sorted(FOLDER.rglob("*.json"))
DOCUMENT = {
    "date": "2026-01-01T00:00:00+00:00", "gpu": "NVIDIA H200", "driver": "580.1", "clocks": ["1980 MHz"],
    "versions": {}, "commit": "abc1234", "command": "python -m bench kernels x", "kind": "bench", "grid": "x",
    "title": "MLA decode", "options": {"behind": False}, "libraries": {}, "published": [], "left_out": [],
    "complete": True, "floor": None, "rows": [{
        "label": "16 x 4K, 16 heads, s_q 1", "batch": 16, "length": 4096, "heads": 16, "s_q": 1, "kv_dtype": "same",
        "page_size": 64, "bytes": 1, "flops": 10e6, "floor_us": 5.0,
        "results": {
            "etap": {"state": "measured", "us": 10.0}, "FlashMLA": {"state": "measured", "us": 25.0},
            "FA3": {"state": "measured", "us": 20.0}, "Triton": {"state": "failed", "error": "RuntimeError: no"},
        },
    }],
}  # fmt: skip


def run_report(*words: object):
    app = typer.Typer()
    app.command()(report.main)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_every_results_file_of_the_repository_is_shown(path):
    found = results.read_json(path)
    for document in found if isinstance(found, list) else [found]:
        shown = report.text_of([path], page=True)
        assert document["commit"] in shown and "## Without a table" not in shown
        if document.get("kind") in kernels.KINDS:
            assert len(kernels.cells(document)) == len(document["rows"]) + 1


def test_a_table_has_times_floor_rates_and_the_best_peer():
    titles, cells = kernels.cells(DOCUMENT)
    assert titles[-1] == "best peer / etap"
    assert cells == ["16 x 4K", "5.0", "10.0", "25.0", "20.0", "1.0", "50", "2.00"]
    shown = kernels.text("x", DOCUMENT)
    assert "x: MLA decode; NVIDIA H200; microseconds per call; 16 heads, s_q 1, 16 bits, pages of 64" in shown
    assert "RuntimeError: no (1 times, the first 16 x 4K, 16 heads, s_q 1, Triton)" in shown and "driver 580.1" in shown
    assert "stopped after 1 rows" in kernels.text("x", DOCUMENT | {"complete": False})


def test_builds_are_compared_with_the_first_and_unequal_bits_are_named():
    document = copy.deepcopy(DOCUMENT) | {"libraries": {name: {"sha256": "0123456789abcdef"} for name in ("a", "b")}}
    found = {"a": {"state": "measured", "us": 10.0}, "b": {"state": "measured", "us": 9.0, "same_bits": False}}
    document["rows"][0]["results"] = found
    shown = kernels.text("x", document)
    assert "b / a: median 0.900" in shown and "0 of 1 outputs have the first build's bits, not 16 x 4K" in shown


SERVED = {
    "kind": "serve", "scenario": "decode-short", "engine": "vllm", "model": "m", "weights": "dummy weights", "gpus": 1,
    "note": "", "skipped": [], "failures": ["ETAP: it died"], "stopped": None, "rows": [{
        "backend": "ETAP", "turn": 1, "point": "1 x 1K/8, cached", "ttft_ms": 1.0, "tpot_ms": 9.0, "itl_ms": 8.0,
        "tokens_per_second": 99.0, "host_ms": 10.0,
    }],
}  # fmt: skip
STEPS = {"requests": 48, "equal_answers": 47, "steps": 9, "median": 0.01, "max": 0.5}
ANSWERS = {
    "what": "answers, vllm", "yardsticks": {"plain, noise": STEPS}, "failures": [],
    "agreement": {"ETAP plain, few": STEPS | {"objections": ["median difference 9"]}},
}  # fmt: skip
SOAK = {
    "what": "soak, vllm", "settings": {}, "server": {}, "mode": "mtp", "seconds": 600.0, "complete": False,
    "requests": {"served": 7000},
    "counters": {"preempted": 3.0}, "memory": {"host": {"growth_mib": 4.0}, "gpu": {"growth_mib": None}},
    "failures": ["not complete"],
}  # fmt: skip


RANDOM = {"what": "random cases", "cases": 9, "wrong": 1, "outcome": "9 cases, 1 wrong", "part": "1/2", "note": "N."}


def test_a_page_has_a_table_of_every_kind_and_names_what_failed(tmp_path):
    about = {key: DOCUMENT[key] for key in ("date", "gpu", "driver", "clocks", "versions", "commit", "command")}
    others = [SERVED, ANSWERS, SOAK, RANDOM, {"kind": "new"}]
    results.write(DOCUMENT, tmp_path / "targets.json")
    for number, document in enumerate(others):
        results.write(about | document, tmp_path / f"{number}.json")
    files = sorted(tmp_path.glob("*.json"))
    assert run_report(*files, "--page", tmp_path / "page.md").exit_code == 0
    page = " ".join((tmp_path / "page.md").read_text().split())
    for text in (
        "| targets | NVIDIA H200 | 1 | best peer / etap | 2.000 |",
        "| 1 x 1K/8, cached | ETAP | 8.00 (8.00 to 8.00) | 1.000 | 99.0 | 10.0 to 10.0 | 1 |",
        "- failed: ETAP: it died",
        "| ETAP plain, few | 48 | 47 | 9 | 0.0100 | 0.5000 | median difference 9 |",
        "| soak, vllm, mtp, NVIDIA H200 | 600 | 7,000 | - | 3 | - | - | 4 | - | failed: not complete |",
        "| random cases, part 1/2 | 9 | failed: 9 cases, 1 wrong | NVIDIA H200 |",
        "- 3: N. NVIDIA H200",
        "## Without a table - 4: NVIDIA H200, driver 580.1, 1980 MHz, commit abc1234,",
    ):
        assert text in page, (text, page)
    assert run_report(tmp_path / "targets.json", "--plot", tmp_path / "x.png").exit_code == 0
    assert b"commit abc1234" in (tmp_path / "x.png").read_bytes()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"kind": "other"}'])
def test_files_of_something_else_are_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    shown = run_report(tmp_path / "other.json")
    assert shown.exit_code == 2 and "other.json" in shown.stderr


def test_a_release_runs_what_is_missing_and_writes_its_page(tmp_path, monkeypatch):
    runs = []

    def run(words, **_):
        runs.append(words)
        if "no" not in words:
            results.must_be_writable(path := Path(words[words.index("--output") + 1]))
            results.write(DOCUMENT, path)
        return SimpleNamespace(returncode=int("no" in words))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(release.subprocess, "run", run)
    monkeypatch.setitem(release.PARTS, "x", {"a": "kernels a", "b": "kernels no", "c": "answers m -- --flag x"})
    app = typer.Typer()
    app.command()(release.main)
    for count in (3, 4):
        shown = CliRunner().invoke(app, ["v9", "--part", "x"])
        assert (shown.exit_code, len(runs)) == (1, count) and "x: failed: b; left: b" in shown.output, shown
    assert runs[2][-2:] == ["--flag", "x"] and "a: MLA decode" in (tmp_path / "results/v9/README.md").read_text()
    assert "x: failed: none; left: b" in CliRunner().invoke(app, ["v9", "--part", "x", "--seconds", "-1"]).output
    assert "left: none" in CliRunner().invoke(app, ["v9", "--part", "x", "--share", "1/2"]).output
    for wrong in (["--part", "x", "--peers", "p.py"], ["--part", "proxy"]):
        assert CliRunner().invoke(app, ["v9", *wrong]).exit_code == 2


@pytest.mark.parametrize("name", [*release.MODELS, "v4"])
def test_a_release_makes_the_models_that_it_serves(tmp_path, name):
    release.make_model(tmp_path / name)
    assert (tmp_path / name / "config.json").exists() and (tmp_path / name / "tokenizer.json").exists()


def test_the_commands_of_a_release_are_known():
    for words in (words for part in release.PARTS.values() for words in part.values()):
        module, function = commands.COMMANDS[words.split()[0]].split(":")
        command = typer.Typer()
        command.command()(getattr(importlib.import_module(module), function))
        parsed = typer.main.get_command(command)
        parsed.make_context("x", [*words.split(" -- ")[0].split()[1:], "--output", "o.json"])
