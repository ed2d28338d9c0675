"""The tables of README.md and docs/: filled from results files, and every difference and omission found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from etap_backend.lab import provenance, results, tables

RESULTS = Path(__file__).parents[2] / "results"
README = """a
<!-- bench targets: 1 x 1K; 16 x 16K -->
<!-- /bench -->
<!-- e2e e2e-decode-full-vllm: 1 x 2K -->
<!-- /e2e -->
b [all](results/sleep-vllm.json), ![picture](results/targets-latency.png)
"""
DOC = """<!-- bench targets -->
old
<!-- /bench -->
<!-- summary wide -->
<!-- /summary -->
<!-- figures targets: 16 x 4K -->
<!-- /figures -->
<!-- e2e e2e-decode-full-vllm -->
<!-- /e2e -->
<!-- estimate estimate-h20 -->
<!-- /estimate -->
"""


@pytest.fixture
def root(tmp_path) -> Path:
    for folder in ("docs", "results"):
        (tmp_path / folder).mkdir()
    for name in ("targets.json", "wide.json", "sleep-vllm.json", "e2e-decode-full-vllm.json", "estimate-h20.json"):
        shutil.copy(RESULTS / name, tmp_path / "results")
    (tmp_path / "results" / "targets-latency.png").write_bytes(b"")
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs" / "results.md").write_text(DOC)
    return tmp_path


def run(root: Path, *arguments: str):
    app = typer.Typer(add_completion=False)
    app.command()(tables.main)
    return CliRunner().invoke(app, ["--root", str(root), *arguments])


def test_all_places_are_filled_and_then_nothing_differs(root):
    assert len(tables.complaints(root)) == 7
    result = run(root)
    assert result.exit_code == 0 and result.stdout == "filled README.md\nfilled docs/results.md\n"
    readme, doc = (root / "README.md").read_text(), (root / "docs" / "results.md").read_text()
    assert readme.count("\n| 1") == 3 and "| 1 x 2K | 8.23 | 9.91 | 8.62 |" in readme
    assert "| 16 x 16K |" in readme and readme.startswith("a\n<!-- bench targets: 1 x")
    assert readme.endswith("targets-latency.png)\n") and "old" not in doc
    assert "| 128 x 4K |" in doc and "| query rows |" in doc and "16 x 4K tokens: etap " in doc and "| TPOT ms |" in doc
    assert "| 16 x 16K/256, cached | ETAP | 21.58 |" in doc and "Estimate for H20-96G; commit " in doc
    assert "`. e2e-decode-full-even-vllm, e2e-tp2-fp8-vllm, e2e-tp2-mtp-vllm: NVIDIA H200, commit " in doc
    assert "| e2e-tp2-fp8-vllm |\n" in doc, "several readings: each line says of which"
    assert tables.complaints(root) == [] and run(root).stdout == "" and run(root, "--check").exit_code == 0


def test_a_figure_that_is_not_its_files_is_found(root):
    run(root)
    page = root / "docs" / "results.md"
    page.write_text(page.read_text().replace("| 128 x 4K | 16 | 1 | 135.7 |", "| 128 x 4K | 16 | 1 | 135.6 |"))
    result = run(root, "--check")
    assert result.exit_code == 1
    assert result.stderr == "docs/results.md: <!-- bench targets --> is not what results/targets.json gives\n"
    path = root / "results" / "targets.json"
    document = results.read_json(path)
    document["commit"] = "other"
    results.write(document, path)
    assert len(tables.complaints(root)) == 4, "the table, the sentence, the README's rows and the estimate made from it"


def test_an_estimate_from_readings_that_were_taken_again_is_found(root):
    run(root)
    path = root / "results" / "targets.json"
    results.write(results.read_json(path) | {"date": "2027-01-01T00:00:00+00:00"}, path)
    said = "estimate-h20.json: wanted one made from the files beside it, got other targets.json: run its command"
    (found,) = [line for line in tables.complaints(root) if "estimate" in line]
    assert found.startswith("docs/results.md: <!-- estimate estimate-h20 -->: ") and found.endswith(said)


def test_a_file_that_no_page_cites_is_found_and_one_that_is_not_there(root):
    run(root)
    (root / "results" / "tuning").mkdir()
    (root / "results" / "tuning" / "targets.json").write_text("{}")
    (root / "results" / "more.json").write_text("{}")
    (root / "results" / "targets-latency.png").unlink()
    assert tables.complaints(root) == [
        "README.md: no results/targets-latency.png",
        "results/more.json: no page cites it",
        "results/tuning/targets.json: no page cites it",
    ]


def test_a_place_whose_file_need_not_be_there_says_so_until_it_is(root):
    page = root / "docs" / "z.md"
    page.write_text("<!-- bench later? -->\n<!-- /bench -->\n")
    assert run(root).exit_code == 0
    assert page.read_text() == "<!-- bench later? -->\nNot measured yet.\n<!-- /bench -->\n"
    assert tables.complaints(root) == []
    shutil.copy(RESULTS / "targets.json", root / "results" / "later.json")
    assert len(tables.complaints(root)) == 2, "the page differs, and the file is not cited"
    assert run(root).exit_code == 0 and "| 128 x 4K |" in page.read_text() and tables.complaints(root) == []
    (root / "results" / "later.json").unlink()
    assert tables.complaints(root) == [
        "docs/z.md: no results/later.json",
        "docs/z.md: <!-- bench later --> is not what results/later.json gives",
    ]


@pytest.mark.parametrize(
    "place, words",
    [
        ("<!-- bench nowhere -->\n<!-- /bench -->", "<!-- bench nowhere -->: .*nowhere.json"),
        ("<!-- bench sleep-vllm -->\n<!-- /bench -->", "<!-- bench sleep-vllm -->: .*sleep-vllm.json: "),
        ("<!-- bench targets: 9 x 9K -->\n<!-- /bench -->", "rows: wanted some of 1 x 1K, .*, got 9 x 9K"),
        ("<!-- e2e e2e-decode-full-vllm: 9 x 9K -->\n<!-- /e2e -->", "rows: wanted some of 16 x 16K, .*, got 9 x 9K"),
        (
            "<!-- chart targets -->\n<!-- /chart -->",
            "<!-- chart targets -->: wanted one of bench, summary, figures, e2e",
        ),
    ],
)
def test_a_place_that_nothing_belongs_in_is_named_and_left_as_it_is(root, place, words):
    page = root / "docs" / "z.md"
    page.write_text(f"{place}\n")
    result = run(root)
    assert result.exit_code == 1 and page.read_text() == f"{place}\n"
    assert re.search(f"^docs/z.md: .*{words}", result.stderr)
    assert "filled docs/results.md" in result.stdout and len(tables.complaints(root)) in (1, 2)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_result_names_a_path_of_its_machine(path):
    assert re.findall(r"(?<![\w.:/-])/(?:tmp|root|home|work|opt|mnt|usr)/[^\s\"']*", path.read_text()) == []


def test_paths_are_recorded_as_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert provenance.as_from_here(f"serve model {tmp_path}/traces/1 /elsewhere") == "serve model traces/1 /elsewhere"
