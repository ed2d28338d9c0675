"""`etap bench` without its clock: grids, floors, rows, tables and plots, further peers and libraries. On a GPU also
short runs of the whole."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from bench.tests.bench_documents import bench_of, document_of, put_on_cpu
from typer.testing import CliRunner

from etap_backend import _library
from bench.common import configs, results
from bench.kernels import command, kernels, libraries, measure, plots, providers, report, rows, run, tensors
from bench.kernels.command import bench, chosen, kernels_of
from bench.kernels.floors import H200_FLOOR, PROXY_FLOOR, floor_for
from bench.kernels.grids import Workload, read_grid, read_grids
from bench.kernels.rows import (
    LARGEST_RMSE,
    OWN,
    Document,
    Failed,
    Library,
    Measured,
    Published,
    Refused,
    Row,
    problems,
    read,
    row_of,
)
from etap_backend.lab.tables import kind_of

RESULTS = Path(__file__).parents[2] / "results"


def grid(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def measured(us: float, **others) -> Measured:
    return Measured(us=us, iqr_us=us / 100, replays=21, **{"relative_rmse": 1.7e-3, **others})


def a_row(workload: Workload, **times: float) -> Row:
    shape = workload.shape
    floor_us = H200_FLOOR.microseconds(kv_bytes=shape.bytes, flops=shape.flops, fp8=shape.fp8)
    about = {"calls": 4, "rotated_bytes": 0, "floor_us": floor_us}
    return row_of(shape, **about, results={name: measured(us) for name, us in times.items()})


def with_result(row: Row, name: str, result) -> Row:
    return row.model_copy(update={"results": {**row.results, name: result}})


@pytest.fixture
def document() -> Document:
    contexts = (512, 4096, 65536)
    rows = [a_row(Workload((n,) * 16), etap=n / 200 + 8, FlashMLA=n / 190 + 14, FA3=n / 195 + 12) for n in contexts]
    rows = [with_result(row, "FlashInfer", measured(row.us("FA3") + 1)) for row in rows]
    uneven = a_row(Workload((65536, 1024), s_q=2, name="skewed"), etap=50.0)
    rows.append(with_result(uneven, "FA3", Failed(error="RuntimeError: no")))
    return document_of(
        "targets",
        title="MLA decode",
        driver="580.1",
        versions={"vllm": "0.26.0", "torch": "2.11.0"},
        floor=H200_FLOOR.said(fp8=False),
        rows=rows,
    )


def changed(document: Document, **fields) -> Document:
    return document.model_copy(update=fields)


def run_command(function, *arguments: str, width: int = 200):
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width), "NO_COLOR": "1"})


# Grids


@pytest.mark.parametrize("name", configs.shipped("bench"))
def test_the_shipped_grids_are_found_by_name_and_can_be_read(name):
    made = read_grid(configs.find("bench", name))
    assert made.name == name and made.title
    assert len(made.workloads) == len(set(made.workloads)) > 0
    assert all(workload.tokens > 0 for workload in made.workloads)


def test_a_grid_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="grid: wanted a file or one of drop-ins, .*, fp16, heads, .*, got targest"):
        configs.find("bench", "targest")


def test_a_grid_is_the_product_of_its_lists(tmp_path):
    text = 'title = "t"\n[[rows]]\nheads = [8, 16]\ns_q = [1, 2]\nbatch = [1, 4]\ntokens = [64]\ndtype = "float16"'
    made = read_grid(grid(tmp_path, text))
    assert made.title == "t" and len(made.workloads) == 8
    assert made.workloads[0] == Workload((64,), 8, 1, "float16")
    assert made.workloads[-1] == Workload((64,) * 4, 16, 2, "float16")


def test_an_uneven_batch_has_an_even_twin_of_the_same_tokens(tmp_path):
    path = grid(tmp_path, '[[rows]]\nname = "n"\nmixed = [[1, 1000], [2, 7]]\neven = true')
    uneven, even = read_grid(path).workloads
    assert uneven.lengths == (1000, 7, 7)
    assert even.lengths == (338, 338, 338) and even.tokens == uneven.tokens


def test_log_normal_lengths_are_the_same_every_time(tmp_path):
    text = '[[rows]]\nname = "n"\nlognormal = { requests = 50, median = 100, sigma = 1.0, longest = 300, seed = 3 }'
    (first,), (again,) = (read_grid(grid(tmp_path, text)).workloads for _ in range(2))
    assert first == again and len(set(first.lengths)) > 20
    assert min(first.lengths) >= 1 and max(first.lengths) <= 300


def test_several_grids_make_one_run_without_a_row_twice():
    made = read_grids(["targets", "heads"])
    both = [*read_grids(["targets"]).workloads, *read_grids(["heads"]).workloads]
    assert made.name == "targets-heads" and set(made.workloads) == set(both)
    assert len(made.workloads) == len(set(both)) < len(both)


SHAPES = "[[rows]]\nshapes = [[1, 64]]\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", r"wanted \[\[rows\]\], or \[\[sparse\]\]"),
        ("rows = []", r"wanted \[\[rows\]\], or \[\[sparse\]\]"),
        ("rows = 3", "rows: Input should be a valid list, got 3"),
        ("[[rows]]\nbatchs = [1]", "rows.0.batchs: Extra inputs are not permitted"),
        ("[[rows]]\nbatch = [1]", "wanted batch and tokens together"),
        ("[[rows]]", "wanted one of shapes, batch with tokens, mixed, lognormal"),
        (SHAPES + "batch = [1]\ntokens = [1]", "wanted one of shapes, batch with tokens, mixed, lognormal"),
        (SHAPES + 'dtype = "fp8"', "rows.0.dtype: Input should be 'bfloat16' or 'float16', got 'fp8'"),
        (SHAPES + 'kv_dtype = "int8"', "rows.0.kv_dtype: Input should be 'same' or 'fp8', got 'int8'"),
        (SHAPES + "heads = [0]", "rows.0.heads.0: Input should be greater than or equal to 1, got 0"),
        (SHAPES + "heads = 16", "rows.0.heads: Input should be a valid list, got 16"),
        (SHAPES + "heads = []", "rows.0.heads: List should have at least 1 item"),
        (SHAPES + "s_q = [0]", "rows.0.s_q.0: Input should be greater than or equal to 1, got 0"),
        (SHAPES + "s_q = [true]", "rows.0.s_q.0: Input should be a valid integer, got True"),
        ("[[rows]]\nshapes = [[1, 1.5]]", "rows.0.shapes.0.1: Input should be a valid integer, got 1.5"),
        ("[[rows]]\nshapes = [[0, 64]]", "rows.0.shapes.0.0: Input should be greater than or equal to 1, got 0"),
        ("[[rows]]\nshapes = [[2, 0]]", "rows.0.shapes.0.1: Input should be greater than or equal to 1, got 0"),
        ("[[rows]]\nshapes = [[2]]", "rows.0.shapes.0.1: Field required"),
        ("[[rows]]\nmixed = [[2, 5]]", "wanted a name beside mixed or lognormal"),
        (SHAPES + "even = true", "even: wanted mixed or lognormal beside it"),
        ("not toml", "Expected '='"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, text, words):
    with pytest.raises(ValueError, match=f"grid.toml: .*{words}"):
        read_grid(grid(tmp_path, text))


def test_rows_beyond_the_memory_are_left_out_and_named(tmp_path):
    made, left_out = read_grid(grid(tmp_path, "[[rows]]\nshapes = [[1, 1024], [256, 131072]]")).within(20e9)
    assert [workload.tokens for workload in made.workloads] == [1024]
    assert left_out == ["256 x 128K, 16 heads, s_q 1"]


def test_rows_with_an_fp8_cache_need_room_for_both_caches(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1000000]]")
    # 1.152 GB in bf16, 0.576 GB more in FP8, within 80% of the memory
    assert read_grid(path).within(1.5e9)[0].workloads and read_grid(path, "fp8").within(2.2e9)[0].workloads
    assert not read_grid(path, "fp8").within(2.1e9)[0].workloads


def test_the_cache_of_a_grid_can_be_chosen_in_the_file_and_beside_it(tmp_path):
    path = grid(tmp_path, SHAPES + SHAPES + 'kv_dtype = "fp8"')
    assert [workload.kv_dtype for workload in read_grid(path).workloads] == ["same", "fp8"]
    assert [workload.kv_dtype for workload in read_grid(path, "fp8").workloads] == ["fp8"], "a row twice"


def test_the_papers_figures_are_marks_of_the_papers_grid():
    one, other = read_grids(["paper"]).published
    assert (one.kernel, one.tflops[65536], other.kernel, other.tflops[65536]) == ("FlashMLA", 32, "authors' ETAP", 89)


# Floors


def floor_us(floor, workload: Workload) -> float:
    return floor.microseconds(kv_bytes=workload.kv_bytes, flops=workload.flops, fp8=workload.fp8)


def test_bytes_operations_and_floors():
    workload = Workload((65536,) * 16)
    assert workload.kv_bytes == 16 * 65536 * 1152
    assert workload.flops == 2 * 16 * 16 * 65536 * (576 + 512)
    assert floor_us(H200_FLOOR, workload) == pytest.approx(267.8, abs=0.1)
    assert floor_us(PROXY_FLOOR, workload) == pytest.approx(284.4, abs=0.1)
    heavy = Workload((65536,) * 16, s_q=4)  # four times the operations on the same bytes: tensor time decides
    assert floor_us(PROXY_FLOOR, heavy) == pytest.approx(heavy.flops / 132e6 + 3.5)


def test_an_fp8_cache_has_half_the_bytes_and_twice_the_operations_a_second():
    workload = Workload((65536,) * 16, kv_dtype="fp8")
    assert workload.kv_bytes == 16 * 65536 * 576
    assert workload.flops == Workload((65536,) * 16).flops
    assert floor_us(H200_FLOOR, workload) == pytest.approx(16 * 65536 * 576 / 4.57e6 + 3.5)
    # Bytes still decide on the proxy, 140.5 us of them; in bf16 the operations would take 276.6 us, in FP8 138.3.
    assert floor_us(PROXY_FLOOR, workload) == pytest.approx(16 * 65536 * 576 / 4.30e6 + 3.5)
    heavy = Workload((65536,) * 16, s_q=2, kv_dtype="fp8")
    assert floor_us(PROXY_FLOOR, heavy) == pytest.approx(heavy.flops / 264e6 + 3.5)
    assert workload.label == "16 x 64K, 16 heads, s_q 1, FP8 cache" and workload.shape.kv_dtype == "fp8"
    assert "1894 TFLOP/s in FP8" in H200_FLOOR.said(fp8=True).text


def test_only_measured_gpus_have_a_floor():
    assert floor_for("NVIDIA H200") is H200_FLOOR
    assert floor_for("H20 proxy (H200 throttled)") is PROXY_FLOOR
    assert floor_for("NVIDIA H100 80GB HBM3") is None


def test_copies_of_the_cache_together_exceed_the_l2_cache():
    for length in (1024, 4096, 65536):
        workload = Workload((length,) * 16)
        assert tensors.copies_of(workload) * workload.kv_bytes >= 400e6
    assert tensors.copies_of(Workload((64,))) == tensors.MOST_COPIES


@pytest.mark.parametrize("tokens, requests", [(64, 1), (1024, 16), (65536, 16), (131072, 64)])
def test_a_graph_has_a_call_for_every_copy_of_the_cache(tokens, requests):
    workload = Workload((tokens,) * requests)
    row = measure.Bench(workload, None, None, None, measure.Options())
    copies = list(range(tensors.copies_of(workload)))
    seen = {measure._on_a_copy(lambda copy: copy, [(copy,) for copy in copies], index) for index in range(row.calls)}
    assert seen == set(copies) and row.calls >= measure.FEWEST_CALLS


# Results files


BENCHMARKS = [path for path in sorted(RESULTS.glob("*.json")) if kind_of(json.loads(path.read_text())) == "bench"]


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_results_file_is_read_and_written_as_it_is(path, tmp_path):
    made = read(path)
    assert made.complete and not problems(made) and made.own
    results.write(rows.dumped(made), tmp_path / path.name)
    assert (tmp_path / path.name).read_text() == path.read_text()


def test_a_result_is_measured_refused_or_failed_and_nothing_else(document, tmp_path):
    row = with_result(document.rows[0], "Triton", Refused(reason="takes one query token a request"))
    path = tmp_path / "r.json"
    results.write(changed(document, rows=[row]), path)
    again = results.read(path, Document)
    assert again.rows[0] == row and again.rows[0].us("Triton") is None
    content = json.loads(path.read_text())
    for wrong in ({"us": 1.0}, {"state": "skipped"}, {"state": "failed"}, {"state": "refused", "reason": "x", "us": 1}):
        content["rows"][0]["results"]["etap"] = wrong
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"r\.json: rows\.0\.results\.etap"):
            results.read(path, Document)


@pytest.mark.parametrize(
    "result",
    [measured(9.0, relative_rmse=rmse) for rmse in (0.5, float("nan"), float("inf"))]
    + [Failed(error="RuntimeError: launch failed")],
)
def test_wrong_results_of_our_own_are_found(document, result):
    assert problems(document) == []
    first, *others = document.rows
    wrong = changed(document, rows=[with_result(first, "etap", result), *others])
    assert len(problems(wrong)) == 1
    assert problems(changed(document, rows=[with_result(first, "FA3", result), *others])) == []


def test_the_time_of_a_result_that_is_no_number_is_worth_nothing():
    timings = {name: measure.timing_of([1.0, 2.0, 3.0]) for name in ("etap", "FA3", "Triton")}
    found = measure.results_of(timings, {"etap": 1e-3, "FA3": float("nan"), "Triton": float("inf")}, {}, {})
    assert found["etap"].us == 2.0 and found["etap"].relative_rmse == 1e-3
    assert isinstance(found["FA3"], Failed) and isinstance(found["Triton"], Failed)


# Tables


def test_the_screen_shows_rates_floor_and_best_peer(document):
    text = report.text(document)
    line = next(line for line in text.splitlines() if "16 x 4K" in line)
    row = document.rows[1]
    us = row.us("etap")
    for value in (
        f"{us:.1f}  ",
        f"  {us / 100:.1f}  ",
        f"{row.flops / us / 1e6:.1f}",
        f"{row.bytes / us / 1e3:.0f}",
        f"{100 * row.floor_us / us:.0f}",
        f"{min(4096 / 190 + 14, 4096 / 195 + 12) / us:.2f}",
    ):
        assert value in line
    assert "FA3: RuntimeError: no (1 rows, the first skewed, 16 heads, s_q 2)" in text
    assert "132 SMs; NVIDIA H200, driver 580.1; vllm 0.26.0" in text


def test_the_proxy_is_called_so_everywhere_and_need_have_no_peers(document):
    rows = [row.model_copy(update={"results": {"etap": row.results["etap"]}}) for row in document.rows]
    options = document.options.model_copy(update={"num_sms": 78})
    proxy = changed(document, rows=rows, gpu="H20 proxy (H200 throttled)", options=options)
    for text in (report.text(proxy), report.markdown(proxy)):
        assert "78 CTAs of 132 SMs; H20 proxy (H200 throttled), " in text
        assert "best peer" not in text
    assert report.text(proxy).startswith("MLA decode, H20 proxy (H200 throttled)")


def test_a_document_cut_short_says_so(document):
    cut = changed(document, complete=False, stopped="by SIGTERM", note="In two parts.")
    assert "stopped by SIGTERM: 4 rows" in report.text(cut)
    assert report.markdown(cut).endswith("In two parts. Stopped by SIGTERM: what is missing was not measured.")


def test_a_pages_table_has_times_ratios_and_what_it_was_made_with(document):
    text = report.markdown(document)
    assert "| requests x tokens | heads | s_q | floor | **etap** | TFLOP/s | FlashMLA | FA3 | FlashInfer |" in text
    assert "| 16 x 64K | 16 | 1 | 267.8 | **335.7** |" in text and "| skewed | 16 | 2 |" in text
    assert "132 SMs; NVIDIA H200, driver 580.1" in text and "`etap bench targets`" in text


def test_some_rows_of_a_table_have_a_short_caption(document):
    text = report.markdown(document, ("16 x 4K", "16 x 64K"))
    header, _, one, other, _, caption = text.splitlines()
    assert header.startswith("| requests x tokens | floor | **etap** |")
    assert one.startswith("| 16 x 4K |") and other.startswith("| 16 x 64K |")
    assert caption == "Microseconds per call, 16 heads, 1 query token per request. NVIDIA H200, commit abc1234."
    with pytest.raises(ValueError, match="rows: wanted some of 16 x 512, 16 x 4K, 16 x 64K, skewed, got 16 x 4k"):
        report.markdown(document, ("16 x 4k",))


def test_one_or_two_peers_each_have_a_ratio(document):
    rows = [
        row.model_copy(update={"results": {n: row.results[n] for n in ("etap", "FlashMLA")}})
        for row in document.rows[:3]
    ]
    text = report.markdown(changed(document, rows=rows))
    assert "| FlashMLA / etap |" in text and "best peer" not in text


def test_a_sweeps_summary_counts_where_a_peer_is_faster(document):
    rows = [
        a_row(Workload((64,), heads=16), etap=10.0, FA3=13.0),
        a_row(Workload((128,), heads=16), etap=10.0, FA3=9.9),
        a_row(Workload((64,), heads=8, s_q=2), etap=10.0, FA3=9.0, Triton=11.0),
        a_row(Workload((64,), heads=64), etap=10.0, FA3=20.0),
    ]
    lines = report.summary(changed(document, rows=rows)).splitlines()
    assert lines[2] == "| 16 | 3 | 0.900 | 0.99 | 1.30 | 1 | 1 x 64, 8 heads, s_q 2 |"
    assert lines[3] == "| 64 | 1 | 2.000 | 2.00 | 2.00 | 0 | - |"


@pytest.fixture
def fp8_document(document) -> Document:
    row = a_row(Workload((4096,) * 16, kv_dtype="fp8"), etap=20.0)
    row = with_result(row, "etap-fp8-math", measured(16.0, relative_rmse=3.4e-2))
    row = with_result(with_result(row, "etap-bf16", measured(35.0)), "FlashMLA", measured(30.0))
    return changed(document, rows=[row])


def test_an_fp8_table_compares_with_the_peers_and_with_our_bf16(fp8_document):
    text = report.text(fp8_document)
    header, line = (next(x for x in text.splitlines() if words in x) for words in ("etap-bf16 / etap", "16 x 4K"))
    assert header.index("etap-fp8-math") < header.index("etap-bf16") < header.index("FlashMLA")
    assert header.index("FlashMLA / etap") < header.index("etap-bf16 / etap")
    assert line.index("1.50") < line.index("1.75") and "  16.0  " in line and "  35.0  " in line
    markdown = report.markdown(fp8_document)
    assert (
        "| **etap** | TFLOP/s | etap-fp8-math | etap-bf16 | FlashMLA | FlashMLA / etap | etap-bf16 / etap |" in markdown
    )
    assert "| 16.0 | 35.0 | 30.0 | 1.50 | 1.75 |" in markdown


def test_fp8_math_may_err_more_and_not_too_much(fp8_document):
    assert problems(fp8_document) == []
    (row,) = fp8_document.rows
    row = with_result(row, "etap", measured(20.0, relative_rmse=3.4e-2))
    row = with_result(row, "etap-fp8-math", measured(16.0, relative_rmse=5e-2))
    assert len(problems(changed(fp8_document, rows=[row]))) == 2


# Pictures


def test_plots_are_drawn_for_what_the_rows_have(document, tmp_path):
    for kind in plots.KINDS:
        picture = plots.plot(document, kind, tmp_path / "more" / f"{kind}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and plots.source_of(document).encode() in picture
    with pytest.raises(ValueError, match="latency: wanted at least 3 rows for a panel, got none"):
        plots.plot(changed(document, rows=document.rows[-1:]), "latency", tmp_path / "few.png")
    with pytest.raises(ValueError, match="kind: wanted one of tflops, latency, got bars"):
        plots.plot(document, "bars", tmp_path / "targets.png")


def test_bars_stand_under_the_roof_with_published_figures_across_them(document):
    tflops = {512: 9.0, 65536: 32.0, 1024: 1.0}
    published = Published(kernel="FlashMLA", gpu="H20", source="paper", batch=16, heads=16, tflops=tflops)
    figure = plots.bars(changed(document, published=[published]), plots.series_of(document))
    (axis,) = figure.axes
    names = [*document.peers, "etap"]
    heights = [[bar.get_height() for bar in container] for container in axis.containers]
    rows = document.rows[:3]
    assert heights == [[row.tflops(row.us(name)) for row in rows] for name in names]
    (marks,) = axis.collections
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axis.containers[0]]
    found = [(segment[:, 0].mean(), segment[0, 1]) for segment in marks.get_segments()]
    assert found == [(pytest.approx(centres[0]), 9.0), (pytest.approx(centres[2]), 32.0)]
    roof, padded = (line.get_ydata() for line in axis.lines)
    assert roof == pytest.approx([4.57e12 * 34816 / 1152 / 1e12] * 3)
    assert padded == pytest.approx([4.57e12 * 34816 / 1152 / 1e12] * 3), (
        "an H200 reads longer than it multiplies 64 rows"
    )
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:4] == names and set(labels[4:]) == {
        "published, H20 (paper)",
        "roof",
        "roof with 64 rows, mostly padding",
    }


def test_the_axes_of_times_have_plain_numbers(document):
    figure = plots.latency(document, plots.series_of(document))
    figure.canvas.draw()
    (axis,) = figure.axes
    low, high = axis.get_ylim()
    ticks = [(place, tick.get_text()) for place, tick in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)]
    shown = [text for place, text in ticks if low <= place <= high]
    assert {"20", "50", "100"} <= set(shown) and all(text.isdecimal() for text in shown)
    assert not any(text.get_text() for text in axis.get_yticklabels(minor=True))
    assert axis.get_legend() is None and figure.legends


def test_results_are_shown_again_and_drawn_where_that_was_told(document, tmp_path):
    path = tmp_path / "targets.json"
    results.write(rows.dumped(document), path)
    result = run_command(report.main, str(path), "--plot", "latency", "--plots", str(tmp_path / "drawn"))
    assert result.exit_code == 0 and "16 x 64K" in result.stdout
    assert (tmp_path / "drawn" / "targets-latency.png").is_file() and len(list(tmp_path.iterdir())) == 2
    for alone in (["--plot", "latency"], ["--plots", str(tmp_path)]):
        result = run_command(report.main, str(path), *alone)
        assert result.exit_code == 2 and "--plots: wanted a folder beside --plot" in result.stderr


@pytest.mark.parametrize("width", [20, 60, 80])
def test_no_number_is_cut_however_narrow_the_screen(document, tmp_path, width):
    path = tmp_path / "targets.json"
    results.write(rows.dumped(document), path)
    shown = run_command(report.main, str(path), width=width).stdout
    assert shown.rstrip("\n") == report.text(document) and "…" not in shown


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "e2e"}', "{", '{"rows": 3}'])
def test_files_of_something_else_are_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    result = run_command(report.main, str(path))
    assert result.exit_code == 2 and "etap report: " in result.stderr and "other.json" in result.stderr


@pytest.mark.parametrize("name, kind", [("served", "'e2e'"), ("random", "None")])
def test_a_file_of_another_kind_is_refused_in_one_sentence(tmp_path, name, kind):
    path = tmp_path / f"{name}.json"
    results.write({"kind": kind.strip("'")} if kind != "None" else {"what": "random"}, path)
    said = f"etap report: {path}: wanted a results file of kind 'bench', got {kind}"
    assert " ".join(run_command(report.main, str(path)).stderr.split()) == said


def test_a_table_is_drawn_without_torch_and_without_a_kernel():
    """As far as this package goes: what `etap_backend` itself imports is not the report's."""
    program = (
        "import sys, types\n"
        "package = sys.modules['etap_backend'] = types.ModuleType('etap_backend')\n"
        "package.__path__ = sys.argv[1:]\n"
        "import bench.kernels.report\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", program, str(configs.PACKAGE)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    others = {name for name in found if name.startswith("etap_backend.") and not name.startswith("etap_backend.lab")}
    assert "bench.kernels.report" in found and others <= {"etap_backend.config_list"}
    assert not {"torch", "tvm_ffi", "vllm"} & {name.split(".")[0] for name in found}


# Kernels of a run


@pytest.fixture
def on_cpu(monkeypatch):
    put_on_cpu(monkeypatch, 4e5)


def graphs_of(row: measure.Bench, copy: int = 0) -> dict:
    """What a graph of two calls would hold, without one."""
    graphs = {}
    for name in row.kernels.of(row.workload):
        call, copies = row.prepared(name)
        graphs[name] = SimpleNamespace(calls=2, result=call(*copies[1 % len(copies)]).clone())
    return graphs


@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_each_of_our_kernels_gets_its_cache_and_the_truth_of_it(kv_dtype, on_cpu):
    workload = Workload((100, 333), heads=4, kv_dtype=kv_dtype)
    row = bench_of(workload, providers.ours(providers.installed()))
    own = list(row.kernels.of(workload))
    assert own == {"same": ["etap"], "fp8": ["etap", "etap-fp8-math", "etap-bf16"]}[kv_dtype]
    for name in own:
        _, copies = row.prepared(name)
        assert len(copies) == tensors.copies_of(workload) == {"same": 1, "fp8": 2}[kv_dtype]
        assert copies[0][0].dtype == (
            torch.float8_e4m3fn if kv_dtype == "fp8" and name != "etap-bf16" else torch.bfloat16
        )
    graphs = graphs_of(row)
    errors = row.errors(graphs)
    assert all(error <= LARGEST_RMSE["bfloat16"] for name, error in errors.items() if name != "etap-fp8-math")
    if kv_dtype == "fp8":
        assert 5 * errors["etap"] < errors["etap-fp8-math"] < 4.5e-2
        graphs["etap"].result = graphs["etap-bf16"].result
        assert row.errors(graphs)["etap"] > 1e-2, "the cache's rounding goes unseen"


class Recorded:
    """In place of a CUDA graph: its calls are made at once."""

    def __init__(self, call, calls):
        self.calls, self.results = calls, [call(index) for index in range(calls)]


def test_behind_another_kernel_each_call_waits_for_what_reads_the_queries(on_cpu, monkeypatch):
    """Ours and peers' alike; without that wish there is one graph per kernel."""
    log, workload = [], Workload((100,), heads=4)
    peer = providers.Provider("FlashMLA", lambda inputs: lambda cache: log.append("call"))
    monkeypatch.setattr(measure, "Captured", Recorded)
    monkeypatch.setattr(measure.torch, "neg", lambda queries, out: log.append(queries.shape == out.shape))
    for behind in (False, True):
        log.clear()
        row = bench_of(workload, providers.Kernels.listed(plain=[peer]))
        row = dataclasses.replace(row, settings=measure.Options(behind=behind))
        graphs, later, others = row.captured()
        assert list(graphs) == ["FlashMLA"] and list(later) == ["FlashMLA"] * behind and not others
        assert log == ["call"] * row.calls + [True, "call"] * row.calls * behind


def test_both_times_of_a_call_are_kept():
    timing, later = measure.timing_of([1.0, 2.0, 3.0]), measure.timing_of([4.0, 5.0, 6.0])
    found = measure.results_of({"etap": timing}, {}, {}, {"etap": later})["etap"]
    assert (found.us, found.behind.us) == (2.0, 5.0)


def test_fp8_saturates():
    x = torch.tensor([0.0, 1.0, -5.6, 7.0, -100.0], dtype=torch.bfloat16)
    assert kernels.to_fp8(x, 0.0125).float().tolist() == [0.0, 80.0, -448.0, 448.0, -448.0]


PEERS = """
from etap_backend.reference import mla_decode_reference

def prepare(inputs):
    if inputs.q.shape[1] > 1:
        raise NotImplementedError("one query token only")
    def call(cache):
        out, _ = mla_decode_reference(inputs.q, cache, inputs.block_table, inputs.seq_lens, inputs.softmax_scale)
        return out.bfloat16()
    return call

PEERS = {"FlashMLA": prepare, "authors' ETAP": prepare}
VERSIONS = {"FlashMLA": "9241ae3"}
"""


def test_peers_of_a_file_stand_beside_ours_and_take_the_place_of_others(tmp_path, on_cpu):
    path = tmp_path / "mine.py"
    path.write_text(PEERS)
    found = providers.with_file(providers.installed(), path)
    assert list(found.of_kinds["plain"]) == ["etap", "FlashMLA", "FA3", "FlashInfer", "Triton", "authors' ETAP"]
    assert found.versions == {"FlashMLA": "9241ae3"} and "authors' ETAP" not in found.of_kinds["fp8"]
    proxy = providers.with_file(providers.ours(providers.installed()), path)
    plain = proxy.of_kinds["plain"]
    assert list(plain) == ["etap", "FlashMLA", "authors' ETAP"] and plain["FlashMLA"].there
    row = bench_of(Workload((100, 333), heads=4), proxy)
    errors = row.errors(graphs_of(row))
    assert 0 < errors["authors' ETAP"] < errors["etap"] < LARGEST_RMSE["bfloat16"]
    *_, results_ = bench_of(Workload((100,), heads=4, s_q=2), proxy.chosen(["FlashMLA"])).captured()
    assert results_ == {"FlashMLA": Refused(reason="one query token only")}


@pytest.mark.parametrize(
    "text, words",
    [
        ("x = 1", "wanted a file that defines one of PEERS, FP8_PEERS"),
        ("PEERS = [1]", "wanted a file that defines one of PEERS, FP8_PEERS"),
        ("PEERS = {'a': 1}", "wanted a file that defines one of PEERS, FP8_PEERS"),
        ("PEERS = {'etap': print}", "wanted other columns than etap, .*, got etap"),
        ("import no_such_module", "does not import: ModuleNotFoundError"),
        ("1 +", "does not import: SyntaxError"),
        (None, "wanted a Python file, got"),
    ],
)
def test_a_file_without_peers_is_refused(tmp_path, text, words):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--peers: .*{words}"):
        providers.with_file(providers.installed(), path)


@pytest.mark.parametrize(
    "only, skip, words",
    [
        (["FA4"], [], "--only: wanted one of etap, .*, got FA4"),
        ([], ["x"], "--skip: .*, got x"),
        (["etap"], ["ETAP"], "at least one kernel left"),
    ],
)
def test_kernels_that_nobody_knows_are_refused(only, skip, words):
    with pytest.raises(ValueError, match=words):
        chosen(providers.installed(), read_grids(["targets"]), only, skip)


def test_without_a_choice_ours_and_the_installed_peers_are_timed(monkeypatch):
    monkeypatch.setattr(providers.provenance, "installed", lambda packages: {p: "1" for p in packages if p == "vllm"})
    plain = chosen(providers.installed(), read_grids(["targets"]), [], [])
    assert list(plain.of_kinds["plain"]) == ["etap", "FlashMLA", "FA3", "Triton"]
    fp8 = chosen(providers.installed(), read_grids(["targets-fp8"]), [], ["triton", "Etap-BF16"])
    assert list(fp8.of_kinds["fp8"]) == ["etap", "etap-fp8-math", "FlashMLA"]


# Several libraries


@pytest.fixture
def library() -> Path:
    try:
        _library.library()
    except ImportError as error:
        pytest.skip(f"no compiled library: {error}")
    return _library.library_path()


@pytest.fixture
def other_tree(tmp_path, library) -> Path:
    """A package of its own with its library in it, whose executor gives twice the output."""
    tree = tmp_path / "tree" / "etap_backend"
    shutil.copytree(configs.PACKAGE, tree, ignore=shutil.ignore_patterns("lib", "configs", "__pycache__"))
    (tree / "lib").mkdir()
    shutil.copy(library, tree / "lib")
    if library.name != "libetap_backend.so":
        (tree / "lib" / library.name).rename(tree / "lib" / "libetap_backend.so")
    executor = tree / "cpu" / "dense.py"
    text = executor.read_text()
    assert text.count("torch.where(divisor > 0, ot / divisor, 0.0)") == 1
    executor.write_text(text.replace("ot / divisor", "2 * ot / divisor"))
    return tree


def test_builds_of_our_own_stand_side_by_side_each_called_by_its_own_tree(tmp_path, other_tree, library, on_cpu):
    builds = [libraries.parse(f"new={library}"), libraries.parse(f"twice={other_tree}")]
    calls = {build.name: libraries.load(build, tmp_path / "copies") for build in builds}
    for kv_dtype, names in (("same", ["new", "twice"]), ("fp8", ["new", "twice", "new-fp8-math", "twice-fp8-math"])):
        row = bench_of(Workload((100, 333), heads=4, kv_dtype=kv_dtype), providers.of_libraries(calls))
        assert list(row.kernels.of(row.workload)) == names
        graphs = graphs_of(row)
        errors = row.errors(graphs)
        assert errors["new"] < LARGEST_RMSE["bfloat16"] and errors["twice"] == pytest.approx(1, abs=0.01)
        same = measure.same_bits(graphs, row.kernels.libraries)
        assert same and not any(same.values())
        for name in names:
            graphs[name].result = graphs["new"].result
        assert all(measure.same_bits(graphs, row.kernels.libraries).values())
    assert libraries.described(builds[1]).sha256 == libraries.described(builds[0]).sha256


def test_a_build_that_this_package_calls_is_of_this_commit(monkeypatch, library, other_tree):
    monkeypatch.setenv("ETAP_COMMIT", "abc1234")
    own, other = (libraries.described(libraries.parse(f"a={path}")) for path in (library, other_tree))
    assert own.commit == "abc1234" != other.commit


def test_one_library_under_two_names_gives_the_same_bits(tmp_path, library, on_cpu):
    calls = {name: libraries.load(libraries.parse(f"{name}={library}"), tmp_path) for name in ("a", "b-2")}
    row = bench_of(Workload((100, 333), heads=4), providers.of_libraries(calls))
    assert measure.same_bits(graphs_of(row), ("a", "b-2")) == {"b-2": True}


@pytest.mark.parametrize("text", ["x", "=x", "a b=x", "a=", "a=/nonexistent", "a={folder}"])
def test_a_library_that_cannot_be_had_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="--library: wanted"):
        libraries.parse(text.format(folder=tmp_path))


def test_a_library_of_another_version_is_refused_by_name(tmp_path):
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(ValueError, match="--library wrong: "):
        libraries.load(libraries.parse(f"wrong={tmp_path / 'lib.so'}"), tmp_path / "copies")
    assert "etap_backend_wrong" not in str(os.environ)


def test_libraries_need_different_names_and_no_peers(tmp_path, library):
    build = libraries.parse(f"a={library}")
    with pytest.raises(ValueError, match="--library: wanted different names"):
        kernels_of([build, build], None, False, tmp_path)
    with pytest.raises(ValueError, match="--peers: wanted without --library"):
        kernels_of([build], tmp_path / "peers.py", False, tmp_path)


def test_the_proxy_needs_its_library(monkeypatch, tmp_path):
    monkeypatch.delenv("ETAP_LIBRARY", raising=False)
    with pytest.raises(ValueError, match="--h20-proxy: wanted ETAP_LIBRARY"):
        kernels_of([], None, True, tmp_path)


def test_only_the_proxy_has_held_sms_that_read():
    refused = run_command(bench, "targets", "--traffic", "0.4")
    assert refused.exit_code == 2 and "--traffic: wanted with --h20-proxy" in refused.output
    assert run_command(bench, "targets", "--h20-proxy", "--traffic", "-1").exit_code == 2


@pytest.fixture
def libraries_document(document) -> Document:
    rows = [a_row(Workload((n,) * 16), old=n / 100, new=n / 100 * factor) for n, factor in ((512, 0.9), (4096, 1.02))]
    rows = [with_result(row, "new", measured(row.us("new"), same_bits=row.length == 512)) for row in rows]
    about = {name: Library(package="/p", sha256="0123456789abcdef", commit=f"c-{name}") for name in ("old", "new")}
    return changed(document, rows=rows, libraries=about)


def test_libraries_are_compared_with_the_first(libraries_document):
    assert libraries_document.own == ["old", "new"] and libraries_document.peers == []
    text = report.text(libraries_document)
    assert "new / old: median 0.960, at most 1.020 (16 x 4K, 16 heads, s_q 1)" in text
    assert "1 of 2 outputs have the bits of old's, not 16 x 4K, 16 heads, s_q 1: new" in text
    markdown = report.markdown(libraries_document)
    assert "| **old** | TFLOP/s | new | new / old |" in markdown and "| 1.020 |" in markdown
    assert "old: commit c-old, SHA-256 0123456789ab; new: commit c-new" in markdown


def test_wrong_results_of_a_library_are_found(libraries_document):
    assert problems(libraries_document) == []
    first, *others = libraries_document.rows
    wrong = with_result(first, "old", measured(1.0, relative_rmse=0.1))
    assert len(problems(changed(libraries_document, rows=[wrong, *others]))) == 1


# A run


@pytest.fixture
def an_h200(monkeypatch, on_cpu):
    """No clock, but all around it: rows take no time, and the third cannot be measured."""
    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: chip)
    hosts = lambda *of, plans: {name: measure.timing_of([9.0] * 3) for name in of[3]}  # noqa: E731
    monkeypatch.setattr(measure, "measure_hosts", hosts)
    monkeypatch.setattr(measure, "measure_schedule", lambda *_: None)

    def row_of(workload, pool, of, settings, floor):
        if workload.heads == 128:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return a_row(workload, **{name: 10.0 for name in of.of(workload)})

    monkeypatch.setattr(measure, "measure", row_of)


def test_a_run_is_whole_in_its_file_whatever_ends_it(tmp_path, an_h200):
    path = grid(tmp_path, "[[rows]]\nheads = [8, 16, 128]\nshapes = [[1, 64]]")
    made, output, of = read_grid(path), tmp_path / "r.json", providers.ours(providers.installed())
    settings, seen = measure.Options(), []
    header = run.header(made, ["x"], of, settings, [], None)
    assert (header.gpu, header.multiprocessors, header.left_out) == ("NVIDIA H200", 132, ["x"])
    assert header.versions.keys() >= {"torch", "cuda", "etap-backend"} and header.options.kernels == ["etap"]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run.run(header, made.workloads, of, settings, output, seen.append)
    kept = results.read(output, Document)
    assert [row.heads for row in kept.rows] == [8, 16] and not kept.complete and kept.stopped is None
    assert seen == list(made.workloads) and list(kept.host_calls) == ["etap"]
    whole = run.run(header, made.workloads[:2], of, settings, output, seen.append)
    assert whole.complete and results.read(output, Document) == whole
    short = run.header(made, [], of, settings, [], 0.0)
    for path in (output, tmp_path / "new.json"):
        assert run.run(short, made.workloads, of, settings, path, seen.append).stopped == "by the time limit of 0 s"
    assert results.read(output, Document) == whole, "an older file stays until there is a row"
    assert results.read(path, Document).rows == []


def test_the_proxys_header_says_that_it_is_one(an_h200):
    of, settings = providers.ours(providers.installed()), measure.Options(num_sms=78, h20_proxy=True)
    header = run.header(read_grids(["paper"]), [], of, settings, [], None)
    assert header.gpu == "H20 proxy (H200 throttled)" and header.floor.bandwidth == PROXY_FLOOR.bandwidth
    assert header.published and header.options.num_sms == 78 and header.options.h20_proxy


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["targets"], "no CUDA device"),
        ([str(configs.FOLDER / "bench" / "targets.toml")], "no CUDA device"),
        (["targest"], "etap bench: grid: wanted a file or one of"),
        (["targets", "--library", "x"], "--library: wanted NAME=PATH"),
        (["targets", "--kv-dtype", "int8"], "--kv-dtype: wanted same or fp8, got int8"),
    ],
)
def test_without_a_gpu_the_command_refuses(arguments, words):
    result = run_command(bench, *arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_a_file_that_exists_is_replaced_only_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    (older := Path("results") / "targets-fp8.json").parent.mkdir()
    older.write_text("{}")
    result = run_command(bench, "targets", "--kv-dtype", "fp8")
    assert result.exit_code == 2 and older.read_text() == "{}"
    assert "--output: wanted a file's name, got none, and results/targets-fp8.json exists" in result.stderr
    for arguments in (["targets"], ["targets", "--kv-dtype", "fp8", "--output", str(older)]):
        assert "grid: wanted rows that fit" in run_command(bench, *arguments).stderr, "which is asked later"


@pytest.mark.gpu
def test_a_short_run_writes_right_results(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1024], [16, 4096]]\ns_q = [1, 2]")
    output = tmp_path / "results.json"
    result = run_command(bench, str(path), "--only", "etap", "--replays", "3", "--output", str(output))
    assert result.exit_code == 0, result.output
    made = results.read(output, Document)
    assert (
        made.complete
        and len(made.rows) == 4
        and made.library_sha256
        and made.host_calls["etap"].us > 0
        and made.schedule_build
    )
    for row in made.rows:
        assert 0 < row.timing("etap").relative_rmse < LARGEST_RMSE["bfloat16"]
        if row.floor_us:
            assert row.us("etap") > 0.9 * row.floor_us, "faster than the memory: the L2 cache served the calls"


@pytest.mark.gpu
def test_a_short_run_with_an_fp8_cache_writes_right_results(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1024], [16, 4096]]\ns_q = [1, 2]")
    output = tmp_path / "results.json"
    only = [word for name in OWN for word in ("--only", name)]
    result = run_command(bench, str(path), "--kv-dtype", "fp8", *only, "--replays", "3", "--output", str(output))
    assert result.exit_code == 0, result.output
    made = results.read(output, Document)
    assert made.complete and len(made.rows) == 4
    for row in made.rows:
        assert row.fp8 and set(row.results) == set(OWN)
        if row.floor_us:
            assert row.us("etap") > 0.9 * row.floor_us, "faster than the memory"


@pytest.mark.gpu
def test_one_library_twice_takes_as_long_and_gives_the_same_bits(tmp_path, library):
    path = grid(tmp_path, "[[rows]]\nshapes = [[16, 4096]]\n[[rows]]\nshapes = [[16, 4096]]\nkv_dtype = 'fp8'")
    output = tmp_path / "results.json"
    arguments = [word for name in ("a", "b") for word in ("--library", f"{name}={library}")]
    result = run_command(bench, str(path), *arguments, "--output", str(output))
    assert result.exit_code == 0, result.output
    made = results.read(output, Document)
    assert list(made.host_calls) == ["a", "b"] and made.schedule_build is None
    plain, fp8 = made.rows
    for row, name, other in ((plain, "a", "b"), (fp8, "a", "b"), (fp8, "a-fp8-math", "b-fp8-math")):
        assert row.timing(other).same_bits and row.us(other) == pytest.approx(row.us(name), rel=0.05)


@pytest.mark.gpu
def test_a_run_cut_short_keeps_its_file(tmp_path):
    output = tmp_path / "results.json"
    result = run_command(bench, "targets", "--only", "etap", "--time-limit", "0", "--output", str(output))
    assert result.exit_code == 1, "nothing was measured"
    assert json.loads(output.read_text())["stopped"] == "by the time limit of 0 s"
