"""`bench report`: tables, pages and the picture of results files, older ones included."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.common import results
from bench.kernels import report

FOLDER = Path(__file__).parents[2] / "results"
OLDER = [path for path in sorted(FOLDER.rglob("*.json")) if '"kind": "bench' in path.read_text()]
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
    assert all(found["commit"] in report.section(path, page) for page in (False, True))
    assert len(report.table(found)) == len(found["rows"]) + 1


def test_a_table_has_times_floor_rates_and_the_best_peer():
    titles, cells = report.table(DOCUMENT)
    assert titles[-1] == "best peer / etap"
    assert cells[:1] + cells[5:] == ["16 x 4K", "5.0", "10.0", "25.0", "20.0", "1.0", "50", "2.00"]
    shown = report.text(DOCUMENT)
    assert "RuntimeError: no (1 times, the first 16 x 4K, 16 heads, s_q 1, Triton)" in shown and "driver 580.1" in shown
    assert "stopped after 1 rows" in report.text(DOCUMENT | {"complete": False})


def test_builds_are_compared_with_the_first_and_unequal_bits_are_named():
    document = copy.deepcopy(DOCUMENT) | {"libraries": {name: {"sha256": "0123456789abcdef"} for name in ("a", "b")}}
    found = {"a": {"state": "measured", "us": 10.0}, "b": {"state": "measured", "us": 9.0, "same_bits": False}}
    document["rows"][0]["results"] = found
    shown = report.text(document)
    assert "b / a: 0.900" in shown and "0 of 1 outputs have the first build's bits, not 16 x 4K" in shown


def test_a_page_has_tables_and_a_line_per_check_and_a_picture_is_drawn(tmp_path):
    results.write(DOCUMENT, tmp_path / "a.json")
    results.write({"what": "random cases", "failed": 1}, tmp_path / "b.json")
    assert run_report(tmp_path / "b.json", tmp_path / "a.json", "--page", tmp_path / "page.md").exit_code == 0
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("## MLA decode, NVIDIA H200") and "## Checks\n\n- random cases: failed. " in page
    assert run_report(tmp_path / "a.json", "--plot", tmp_path / "x.png").exit_code == 0
    assert b"commit abc1234" in (tmp_path / "x.png").read_bytes()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"kind": "other"}', '{"kind": "bench"}'])
def test_files_of_something_else_are_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    shown = run_report(tmp_path / "other.json")
    assert shown.exit_code == 2 and "other.json" in shown.stderr
