"""`bench report`: tables, pages and the picture of results files, older ones included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.common import results
from bench.kernels import picture, report
from bench.kernels.grids import Workload

OLDER = [path for path in sorted(results.FOLDER.rglob("*.json")) if '"kind": "bench' in path.read_text()]


def run_report(*words: object):
    app = typer.Typer()
    app.command()(report.main)
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80", "NO_COLOR": "1"})


def a_row(workload: Workload, **times: float) -> dict:
    found = {name: {"state": "measured", "us": us, "iqr_us": 0.1, "relative_rmse": 2e-3} for name, us in times.items()}
    return {**workload.fields, "floor_us": 5.0, "results": found}


def a_document(*rows: dict, **fields) -> dict:
    usual = {
        "date": "2026-01-01T00:00:00+00:00", "gpu": "NVIDIA H200", "driver": "580.1", "clocks": ["1980 MHz"],
        "versions": {"vllm": "0.33.0"}, "commit": "abc1234", "command": "python -m bench kernels x", "note": "",
        "kind": "bench", "grid": "x", "title": "MLA decode", "multiprocessors": 132, "options": {"behind": False},
        "libraries": {}, "published": [], "left_out": [], "complete": True, "stopped": None,
        "floor": {"bandwidth": 4.57e12, "flops": 947e12, "text": "max(..)"},
    }  # fmt: skip
    return usual | fields | {"rows": list(rows)}


@pytest.fixture
def document() -> dict:
    rows = [a_row(Workload("dense", (n,) * 16), etap=n / 200 + 8, FlashMLA=n / 190 + 14) for n in (512, 4096, 65536)]
    for row in rows:
        row["results"] |= {"FA3": {"state": "measured", "us": row["results"]["etap"]["us"] * 2, "iqr_us": 1.0}}
        row["results"] |= {"Triton": {"state": "failed", "error": "RuntimeError: no"}}
    return a_document(*rows)


def cells(document: dict, line: int) -> list[str]:
    return report.table(document)[line]


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_every_results_file_of_the_repository_is_shown(path):
    found = report.read(path)
    for page in (False, True):
        shown = report.text(found, page)
        assert found["commit"] in shown and len(shown.splitlines()) > 4
    assert len(report.table(found)) == len(found["rows"]) + 1


def test_a_table_has_times_floor_rates_and_how_kernels_compare(document):
    assert cells(document, 0) == [
        "requests x tokens", "heads", "floor", "etap", "FlashMLA", "FA3", "TFLOP/s", "% of floor", "rel. RMSE",
        "FlashMLA / etap", "FA3 / etap",
    ]  # fmt: skip
    flops = 2 * 16 * 16 * 4096 * 1088
    us = 4096 / 200 + 8
    wanted = ["16 x 4K", "16", "5.0", f"{us:.1f}", f"{4096 / 190 + 14:.1f}", f"{2 * us:.1f}", f"{flops / us / 1e6:.1f}"]
    assert cells(document, 2)[:7] == wanted and cells(document, 2)[-1] == "2.00"
    shown = report.text(document)
    assert "Triton: RuntimeError: no (3 rows, the first 16 x 512, 16 heads, s_q 1)" in shown
    assert "driver 580.1" in shown and "vllm 0.33.0" in shown and "`python -m bench kernels x`" in shown


def test_of_more_peers_the_best_is_compared(document):
    for row in document["rows"]:
        row["results"]["FlashInfer"] = row["results"]["FlashMLA"]
    assert cells(document, 0)[-1] == "best peer / etap"
    document["rows"][0]["results"]["FA3"] = {"state": "measured", "us": 0.5 * (512 / 200 + 8)}
    assert cells(document, 1)[-1] == "0.50"


def test_columns_tell_apart_what_differs(document):
    more = [Workload("dense", (4096,), s_q=2, fp8=True), Workload("dense", (4096,), s_q=2, page_size=16)]
    document["rows"] += [a_row(workload, etap=1.0) for workload in more]
    assert cells(document, 0)[:5] == ["requests x tokens", "heads", "s_q", "cache", "page_size"]
    assert [line[2:5] for line in report.table(document)[-2:]] == [["2", "FP8", "64"], ["2", "bf16", "16"]]
    v4 = a_document(a_row(Workload("v4", (640,) * 16, 8, fp8=True, context=1024), etap=1.0), kind="bench-sparse")
    assert cells(v4, 0)[0] == "tokens x keys" and cells(v4, 1)[0] == "16 x 128 + 512"


def test_both_times_of_calls_behind_another_kernel_are_shown(document):
    document["options"] = {"behind": True}
    for name, us in (("etap", 10.0), ("FlashMLA", 30.0)):
        document["rows"][0]["results"][name] |= {"us": us, "behind": {"us": us + 2}}
    assert cells(document, 1)[3:5] == ["10.0 / 12.0", "30.0 / 32.0"] and "3.00 / 2.67" in cells(document, 1)


def test_builds_are_compared_with_the_first():
    rows = [a_row(Workload("dense", (n,) * 16), old=n / 100, new=n / 100 * f) for n, f in ((512, 0.9), (4096, 1.02))]
    for row, same in zip(rows, (True, False), strict=True):
        row["results"]["new"]["same_bits"] = same
    libraries = {"old": {"sha256": "0123456789abcdef"}, "new": {"sha256": "fedcba9876543210"}}
    shown = report.text(a_document(*rows, libraries=libraries))
    assert "new / old: 0.900 (16 x 512, 16 heads, s_q 1) to 1.020" in shown and "new: SHA-256 fedcba987654" in shown
    assert "1 of 2 outputs have the first build's bits, not 16 x 4K, 16 heads, s_q 1, new" in shown


def test_a_large_grid_is_summed_up_by_query_rows(document):
    times = {1: 13.0, 2: 9.0, 3: 9.9}
    rows = [a_row(Workload("dense", (64 * n,)), etap=10.0, FA3=us) for n, us in times.items()]
    rows += [a_row(Workload("dense", (64 * n,), 64), etap=10.0, FA3=20.0) for n in range(1, report.MAX_ROWS)]
    assert report.summary(a_document(*rows))[1:] == [
        ["16", "3", "0.900", "0.99", "1.30", "1", "1 x 128, 16 heads, s_q 1"],
        ["64", str(report.MAX_ROWS - 1), "2.000", "2.00", "2.00", "0", "-"],
    ]
    assert "query rows" in report.text(a_document(*rows), page=True) and "query rows" not in report.text(document)


def test_an_unfinished_run_says_so(document):
    document |= {"complete": False, "stopped": "by SIGTERM", "left_out": ["256 x 128K"]}
    assert "stopped by SIGTERM after 3 rows" in report.text(document) and "1 rows left out" in report.text(document)


def test_one_page_has_the_tables_of_several_files_and_a_line_per_check(document, tmp_path):
    check = {"what": "random cases", "outcome": "2,000 of 2,000", "gpu": "NVIDIA H200", "command": "python -m x"}
    for name, content in (("a", document), ("b", [check, {"what": "other", "failed": 1}])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    shown = run_report(tmp_path / "b.json", tmp_path / "a.json", "--page")
    assert shown.exit_code == 0 and shown.stdout.startswith("## MLA decode, NVIDIA H200: microseconds per call\n\n|")
    assert "## Checks\n\n- random cases: 2,000 of 2,000. NVIDIA H200, " in shown.stdout
    assert "- other: failed. " in shown.stdout
    assert "- other: failed. " in run_report(tmp_path / "b.json").stdout


def test_a_page_has_the_tables_of_servers(document, tmp_path):
    reading = {"backend": "ETAP", "turn": 0, "point": "16 x 16K/256, cached", "itl_ms": 12.5, "tpot_ms": 12.6}
    reading |= {"ttft_ms": 90.0, "tokens_per_second": 1200.0, "host_ms": 11.0, "cached_share": 1.0}
    served = {
        "kind": "serve",
        "scenario": "decode-short",
        "engine": "vllm",
        "model": "r1",
        "weights": "dummy",
        "gpus": 1,
    }
    served = document | served | {"skipped": [], "failures": ["FLASHMLA: no"], "rows": [reading]}
    (tmp_path / "served.json").write_text(json.dumps(served))
    shown = run_report(tmp_path / "served.json", "--page").stdout
    assert shown.startswith("## Servers, decode-short, vllm\n\n| requests x input/output, prefill")
    assert "12.50 (12.50 to 12.50)" in shown and "failed: FLASHMLA: no" in shown


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3", '{"kind": "other"}', '{"kind": "bench"}'])
def test_files_of_something_else_are_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    shown = run_report(path)
    assert shown.exit_code == 2 and "bench report: " in shown.stderr and "other.json" in shown.stderr


def test_no_number_is_cut_however_narrow_the_screen(document, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert run_report(tmp_path / "x.json").stdout.rstrip("\n") == report.text(document)


def test_the_picture_has_bars_published_figures_and_roofs(document, tmp_path):
    tflops = {"512": 9.0, "65536": 32.0, "1024": 1.0}
    document["published"] = [
        {"kernel": "FlashMLA", "gpu": "H20", "source": "paper", "batch": 16, "heads": 16, "tflops": tflops}
    ]
    figure = picture.bars(document, document["rows"])
    (axis,) = figure.axes
    heights = [[bar.get_height() for bar in container] for container in axis.containers]
    order = ["FlashMLA", "FA3", "etap"]
    assert heights == [[r["flops"] / r["results"][name]["us"] / 1e6 for r in document["rows"]] for name in order]
    marks = [segment[0, 1] for mark in axis.collections for segment in mark.get_segments()]
    assert marks == [9.0, 32.0]
    roof, padded = (line.get_ydata() for line in axis.lines)
    assert list(roof) == list(padded) == pytest.approx([4.57 * 34816 / 1152] * 3), (
        "an H200 reads longer than it multiplies"
    )
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert run_report(tmp_path / "x.json", "--plot", tmp_path / "more" / "x.png").exit_code == 0
    assert b"commit abc1234" in (tmp_path / "more" / "x.png").read_bytes()
    assert run_report(tmp_path / "x.json", tmp_path / "x.json", "--plot", Path("x.png")).exit_code == 2
    with pytest.raises(ValueError, match="--plot: wanted a dense grid"):
        picture.draw(a_document(), tmp_path / "x.png")
