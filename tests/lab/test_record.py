"""The driver that measures published results again, without a clock: what it runs, and when it refuses to."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from etap_backend.lab import provenance, results
from etap_backend.lab.bench import command, record
from etap_backend.lab.bench.grids import read_grids

PAGES = Path(__file__).parents[2] / "docs"


def run(*arguments: str):
    app = typer.Typer(add_completion=False)
    app.command()(record.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def measured(monkeypatch):
    """In place of the clock: what was asked for and what would be told is kept, a result is written, heads fail."""
    seen = []
    monkeypatch.setenv("ETAP_COMMIT", "abc1234")

    def measure(words, told):
        output = Path(words[-1])
        seen.append((output.stem, told))
        results.write({"complete": output.stem != "heads", "commit": provenance.commit()}, output)
        return int(output.stem == "heads")

    monkeypatch.setattr(record, "measure", measure)
    return seen


@pytest.mark.parametrize("words", record.commands([*record.GROUPS]).values(), ids=" ".join)
def test_every_command_is_one_that_the_bench_takes(words):
    grids = [word for word in words if not word.startswith("--")]
    grids = [word for word in grids if words[words.index(word) - 1] not in ("--skip", "--replays", "--kv-dtype")]
    assert read_grids(grids).workloads
    known = {"--behind", "--skip", "--no-validate", "--replays", "--h20-proxy", "--kv-dtype"}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_pages_show_what_it_measures():
    text = "".join(page.read_text() for page in PAGES.rglob("*.md"))
    names = {name for group in record.GROUPS.values() for name in group.results}
    shown = {name for name in names if f" {name}?" in text or f" {name} -->" in text}
    alone = {"targets-fp8-h100", "v4-h20-proxy", "v4", "short", "drop-ins", "drop-ins-sparse", "sparse-prefill"}
    alone |= {"heads-fp8-h20-proxy", "sparse-h20-proxy", "sparse-prefill-h20-proxy"}
    assert names - shown <= alone, "whole tables come with their files"


def test_a_group_is_measured_into_a_folder_and_what_is_there_is_not_measured_again(measured, tmp_path):
    output = tmp_path / "records"
    result = run("h200", "--output", str(output), "--peers", "/somewhere/mine.py")
    assert result.exit_code == 1 and result.stderr == "heads: see above\n"
    names = list(record.GROUPS["h200"].results)
    assert [name for name, _ in measured] == names and len(list(output.iterdir())) == len(names)
    told = dict(measured)
    assert shlex.join(told["targets"]) == (
        "targets --behind --skip triton --peers mine.py --output results/targets.json"
    ), "no path of the machine"
    assert "--peers" not in told["wide"] and "--peers" not in told["drop-ins"]
    measured.clear()
    assert run("h200", "--output", str(output)).exit_code == 1 and [name for name, _ in measured] == ["heads"]


def test_what_another_commit_left_is_measured_again(measured, tmp_path, monkeypatch):
    run("mtp", "--output", str(tmp_path))
    monkeypatch.setenv("ETAP_COMMIT", "def5678")
    measured.clear()
    assert run("mtp", "--output", str(tmp_path)).exit_code == 0 and len(measured) == 1


def test_no_result_is_begun_behind_the_time_limit(measured, tmp_path):
    result = run("h200", "--output", str(tmp_path), "--time-limit", "-1")
    assert result.exit_code == 1 and not measured and "targets: not begun within -1 s" in result.stderr


@pytest.mark.parametrize(
    "commit, words",
    [
        ("abc1234-dirty", "ETAP_COMMIT: wanted a commit, of a tree without changes, got abc1234-dirty"),
        ("main", "ETAP_COMMIT: wanted a commit, of a tree without changes, got main"),
        ("unknown", "ETAP_COMMIT: wanted the commit that it was made with, got unknown"),
    ],
)
def test_a_result_without_a_clean_commit_is_not_made(measured, tmp_path, monkeypatch, commit, words):
    monkeypatch.setenv("ETAP_COMMIT", commit)
    result = run("h200", "--output", str(tmp_path))
    assert result.exit_code == 2 and words in result.stderr and not measured


def test_names_of_neither_groups_nor_results_are_refused(measured, tmp_path):
    result = run("h300", "--output", str(tmp_path))
    assert result.exit_code == 2 and "names: wanted h100, h20-proxy, h200, or some of targets-h100, " in result.stderr


def test_the_bench_is_run_as_if_it_had_been_called_so(monkeypatch):
    def bench(grids: list[str], output: Path = Path(), behind: bool = False) -> None:
        assert grids == ["short"] and behind and output == Path("/x/short.json")
        assert provenance.command_line("etap bench") == "etap bench short --behind --output results/short.json"
        raise typer.Exit(3)

    monkeypatch.setattr(command, "bench", bench)
    before = list(sys.argv)
    told = ["short", "--behind", "--output", "results/short.json"]
    assert record.measure(["short", "--behind", "--output", "/x/short.json"], told) == 3 and sys.argv == before
