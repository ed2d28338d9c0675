"""`etap bench` without its clock: grids, floors, tables, README and plots. On a GPU also short runs of the whole."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import etap
from rich.console import Console

from etap_backend.lab.bench import command as bench
from etap_backend.lab.bench import report
from etap_backend.lab.bench.grids import H200_FLOOR, PROXY_FLOOR, Workload, floor_for, load_grid

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"


def grid(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def a_row(workload: Workload, **times: float) -> dict:
    results = {
        name: {"us": us, "iqr_us": us / 100, "replays": 21, "relative_rmse": 1.7e-3} for name, us in times.items()
    }
    return {**workload.describe(), "floor_us": H200_FLOOR.microseconds(workload), "calls": 4, "results": results}


@pytest.fixture
def document() -> dict:
    contexts = (512, 4096, 65536)
    rows = [a_row(Workload((n,) * 16), etap=n / 200 + 8, FlashMLA=n / 190 + 14, FA3=n / 195 + 12) for n in contexts]
    rows.append(a_row(Workload((65536, 1024), s_q=2, name="skewed"), etap=50.0))
    rows[-1]["results"]["FA3"] = {"error": "RuntimeError: no"}
    return {
        "file": "targets",
        "grid": "targets",
        "title": "MLA decode",
        "gpu": "NVIDIA H200",
        "multiprocessors": 132,
        "options": {"num_sms": None},
        "driver": "580.1",
        "versions": {"vllm": "0.26.0", "torch": "2.11.0"},
        "commit": "abc1234",
        "command": "etap bench targets.toml",
        "date": "2026-01-01T00:00:00+00:00",
        "method": "graphs",
        "floor": H200_FLOOR.describe(),
        "complete": True,
        "stopped": None,
        "rows": rows,
    }


def text_of(document: dict) -> str:
    text = io.StringIO()
    report.print_document(document, Console(width=200, file=text))
    return text.getvalue()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_grids_can_be_read(path):
    title, workloads = load_grid(path)
    assert title and len(workloads) == len(set(workloads)) > 0
    assert all(workload.tokens > 0 for workload in workloads)


def test_a_grid_is_the_product_of_its_lists(tmp_path):
    text = 'title = "t"\n[[rows]]\nheads = [8, 16]\ns_q = [1, 2]\nbatch = [1, 4]\ntokens = [64]\ndtype = "float16"'
    title, workloads = load_grid(grid(tmp_path, text))
    assert title == "t" and len(workloads) == 8
    assert workloads[0] == Workload((64,), 8, 1, "float16")
    assert workloads[-1] == Workload((64,) * 4, 16, 2, "float16")


def test_an_uneven_batch_has_an_even_twin_of_the_same_tokens(tmp_path):
    _, (uneven, even) = load_grid(grid(tmp_path, '[[rows]]\nname = "n"\nmixed = [[1, 1000], [2, 7]]\neven = true'))
    assert uneven.lengths == (1000, 7, 7)
    assert even.lengths == (338, 338, 338) and even.tokens == uneven.tokens


def test_log_normal_lengths_are_the_same_every_time(tmp_path):
    text = '[[rows]]\nname = "n"\nlognormal = { requests = 50, median = 100, sigma = 1.0, longest = 300, seed = 3 }'
    (first,), (again,) = (load_grid(grid(tmp_path, text))[1] for _ in range(2))
    assert first == again and len(set(first.lengths)) > 20
    assert min(first.lengths) >= 1 and max(first.lengths) <= 300


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "at least one"),
        ("[[rows]]\nbatchs = [1]", "unknown key batchs"),
        ("[[rows]]\nbatch = [1]", "no 'tokens'"),
        ('[[rows]]\nshapes = [[1, 64]]\ndtype = "fp8"', "dtype: wanted bfloat16 or float16, got fp8"),
        ('[[rows]]\nshapes = [[1, 64]]\nkv_dtype = "int8"', "kv_dtype: wanted same or fp8, got int8"),
        ("[[rows]]\nshapes = [[0, 64]]", "at least one request"),
        ("[[rows]]\nshapes = [[2, 0]]", "at least one token"),
        ("[[rows]]\nmixed = [[2, 5]]", "no 'name'"),
        ("not toml", "grid.toml: "),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        load_grid(grid(tmp_path, text))


def test_rows_beyond_the_memory_are_left_out(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1024], [256, 131072]]")
    assert [workload.tokens for workload in load_grid(path, memory_bytes=20e9)[1]] == [1024]


def test_bytes_operations_and_floors():
    workload = Workload((65536,) * 16)
    assert workload.kv_bytes == 16 * 65536 * 1152
    assert workload.flops == 2 * 16 * 16 * 65536 * (576 + 512)
    assert H200_FLOOR.microseconds(workload) == pytest.approx(267.8, abs=0.1)
    assert PROXY_FLOOR.microseconds(workload) == pytest.approx(284.4, abs=0.1)
    heavy = Workload((65536,) * 16, s_q=4)  # four times the operations on the same bytes: tensor time decides
    assert PROXY_FLOOR.microseconds(heavy) == pytest.approx(heavy.flops / 132e6 + 3.5)


def test_an_fp8_cache_has_half_the_bytes_and_twice_the_operations_a_second():
    workload = Workload((65536,) * 16, kv_dtype="fp8")
    assert workload.kv_bytes == 16 * 65536 * 576
    assert workload.flops == Workload((65536,) * 16).flops
    assert H200_FLOOR.microseconds(workload) == pytest.approx(16 * 65536 * 576 / 4.57e6 + 3.5)
    # Bytes still decide on the proxy, 140.5 us of them; in bf16 the operations would take 276.6 us, in FP8 138.3.
    assert PROXY_FLOOR.microseconds(workload) == pytest.approx(16 * 65536 * 576 / 4.30e6 + 3.5)
    heavy = Workload((65536,) * 16, s_q=2, kv_dtype="fp8")
    assert PROXY_FLOOR.microseconds(heavy) == pytest.approx(heavy.flops / 264e6 + 3.5)
    assert workload.label == "16 x 64K, 16 heads, s_q 1, FP8 cache" and workload.describe()["kv_dtype"] == "fp8"
    assert "1894 TFLOP/s in FP8" in H200_FLOOR.describe(fp8=True)["text"]


def test_the_cache_of_a_grid_can_be_chosen_in_the_file_and_beside_it(tmp_path):
    path = grid(tmp_path, '[[rows]]\nshapes = [[1, 64]]\n[[rows]]\nshapes = [[1, 64]]\nkv_dtype = "fp8"')
    assert [workload.kv_dtype for workload in load_grid(path)[1]] == ["same", "fp8"]
    assert [workload.kv_dtype for workload in load_grid(path, kv_dtype="fp8")[1]] == ["fp8", "fp8"]
    with pytest.raises(ValueError, match="kv_dtype: wanted same or fp8, got fp16"):
        load_grid(path, kv_dtype="fp16")


def test_rows_with_an_fp8_cache_need_room_for_both_caches(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1000000]]")
    # 1.152 GB in bf16, 0.576 GB more in FP8, within 80% of the memory
    assert load_grid(path, memory_bytes=1.5e9)[1] and load_grid(path, memory_bytes=2.2e9, kv_dtype="fp8")[1]
    assert load_grid(path, memory_bytes=2.1e9, kv_dtype="fp8")[1] == []


def test_only_measured_gpus_have_a_floor():
    assert floor_for("NVIDIA H200") is H200_FLOOR
    assert floor_for("H20 proxy (H200 throttled)") is PROXY_FLOOR
    assert floor_for("NVIDIA H100 80GB HBM3") is None


def test_copies_of_the_cache_together_exceed_the_l2_cache():
    for length in (1024, 4096, 65536):
        workload = Workload((length,) * 16)
        assert bench.copies_of(workload) * workload.kv_bytes >= 400e6
    assert bench.copies_of(Workload((64,))) == bench.MOST_CALLS


def test_the_screen_shows_rates_floor_and_best_peer(document):
    text = text_of(document)
    line = next(line for line in text.splitlines() if "16 x 4K" in line)
    row = document["rows"][1]
    us = row["results"]["etap"]["us"]
    for value in (
        f"{us:.1f} ± {us / 100:.1f}",
        f"{row['flops'] / us / 1e6:.1f}",
        f"{row['bytes'] / us / 1e3:.0f}",
        f"{100 * row['floor_us'] / us:.0f}",
        f"{min(4096 / 190 + 14, 4096 / 195 + 12) / us:.2f}",
    ):
        assert value in line
    assert "FA3: RuntimeError: no (1 rows, the first skewed, 16 heads, s_q 2)" in text
    assert "NVIDIA H200, 132 SMs, driver 580.1; vllm 0.26.0" in text


def test_the_proxy_is_called_so_everywhere_and_has_no_peers(document):
    for row in document["rows"]:
        row["results"] = {"etap": row["results"]["etap"]}
    document |= {"gpu": "H20 proxy (H200 throttled)", "options": {"num_sms": 78}}
    for text in (text_of(document), report.markdown(document)):
        assert "H20 proxy (H200 throttled), 78 CTAs of 132 SMs" in text
        assert "best peer" not in text
    assert text_of(document).splitlines()[0].strip().startswith("MLA decode, H20 proxy (H200 throttled)")


def test_a_document_cut_short_says_so(document):
    document |= {"complete": False, "stopped": "by SIGTERM"}
    assert "stopped by SIGTERM: 4 rows" in text_of(document)


def test_the_table_in_the_readme_is_replaced_and_nothing_else(document, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- bench targets -->\nold\n<!-- /bench -->\nafter\n<!-- bench other -->\nx\n<!-- /bench -->\n"
    )
    report.update_readme(readme, [document])
    report.update_readme(readme, [document])
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench targets -->\n| requests x tokens |") and "old" not in text
    assert text.endswith("<!-- /bench -->\nafter\n<!-- bench other -->\nx\n<!-- /bench -->\n")
    assert "| 16 x 64K | 16 | 1 | 267.8 | **335.7** |" in text
    assert "| skewed | 16 | 2 |" in text
    assert "NVIDIA H200, 132 SMs, driver 580.1" in text and "`etap bench targets.toml`" in text


def test_a_readme_without_a_place_is_refused(document, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="<!-- bench targets -->"):
        report.update_readme(readme, [document])


def test_plots_are_drawn_for_what_the_rows_have(document, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib, of the extra 'bench'")
    paths = report.plot(document, tmp_path / "targets")
    assert sorted(path.name for path in paths) == [
        "targets-latency.png",
        "targets-roofline.png",
        "targets-tflops.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    document["rows"] = document["rows"][-1:]
    assert [path.name for path in report.plot(document, tmp_path / "few")] == ["few-roofline.png"]


def test_a_file_is_replaced_in_one_step(document, tmp_path):
    path = tmp_path / "results.json"
    report.write(document, path)
    report.write({**document, "title": "again"}, path)
    assert json.loads(path.read_text())["title"] == "again"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("rmse", [0.5, float("nan")])
def test_wrong_results_of_our_own_are_found(document, rmse):
    assert bench.wrong_results(document) == []
    document["rows"][0]["results"]["etap"]["relative_rmse"] = rmse
    document["rows"][1]["results"]["etap"] = {"error": "RuntimeError: launch failed"}
    assert len(bench.wrong_results(document)) == 2


@pytest.fixture
def fp8_document(document) -> dict:
    row = a_row(Workload((4096,) * 16, kv_dtype="fp8"), etap=20.0, FlashMLA=30.0)
    row["results"] |= {"etap-fp8-math": {**row["results"]["etap"], "us": 16.0, "relative_rmse": 3.4e-2}}
    row["results"] |= {"etap-bf16": {**row["results"]["etap"], "us": 35.0}}
    return {**document, "rows": [row]}


def test_an_fp8_table_compares_with_the_peers_and_with_our_bf16(fp8_document):
    text = text_of(fp8_document)
    header, line = (next(x for x in text.splitlines() if words in x) for words in ("x best peer", "16 x 4K"))
    assert header.index("etap-fp8-math") < header.index("etap-bf16") < header.index("FlashMLA")
    assert header.index("x best peer") < header.index("x our bf16")
    assert line.index("1.50") < line.index("1.75") and "16.0 ± 0.2" in line and "35.0 ± 0.2" in line
    markdown = report.markdown(fp8_document)
    assert (
        "| **etap** | TFLOP/s | etap-fp8-math | etap-bf16 | FlashMLA | best peer / etap | our bf16 / etap |" in markdown
    )
    assert "| 16.0 | 35.0 | 30.0 | 1.50 | 1.75 |" in markdown


def test_fp8_math_may_err_more_and_not_too_much(fp8_document):
    assert bench.wrong_results(fp8_document) == []
    results = fp8_document["rows"][0]["results"]
    results["etap"]["relative_rmse"] = 3.4e-2
    results["etap-fp8-math"]["relative_rmse"] = 5e-2
    assert len(bench.wrong_results(fp8_document)) == 2


@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_each_of_our_kernels_gets_its_cache_and_the_truth_of_it(kv_dtype, monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "ROTATED_BYTES", 4e5)
    workload = Workload((100, 333), heads=4, kv_dtype=kv_dtype)
    pool, inputs = bench.CachePool([workload]), bench.inputs_of(workload, 8)
    own = [name for name in bench.providers_of(workload) if name in bench.peers.OWN]
    assert own == {"same": ["etap"], "fp8": ["etap", "etap-fp8-math", "etap-bf16"]}[kv_dtype]
    captured = {}
    for name in own:
        call, copies = bench.prepared(workload, inputs, pool, name)
        assert len(copies) == bench.copies_of(workload) == {"same": 1, "fp8": 2}[kv_dtype]
        assert copies[0].dtype == (torch.float8_e4m3fn if kv_dtype == "fp8" and name != "etap-bf16" else torch.bfloat16)
        captured[name] = SimpleNamespace(calls=2, result=call(copies[1 % len(copies)]).clone())
    errors = bench.errors_of(workload, inputs, pool, captured)
    row = {"label": "", "dtype": "bfloat16", "results": {name: {"relative_rmse": e} for name, e in errors.items()}}
    assert bench.wrong_results({"rows": [row]}) == []
    if kv_dtype == "fp8":
        assert errors["etap-fp8-math"] > 5 * errors["etap"]
        captured["etap"].result = captured["etap-bf16"].result
        assert bench.errors_of(workload, inputs, pool, captured)["etap"] > 1e-2, "the cache's rounding goes unseen"


def test_fp8_saturates():
    x = torch.tensor([0.0, 1.0, -5.6, 7.0, -100.0], dtype=torch.bfloat16)
    assert bench.peers.to_fp8(x, 0.0125).float().tolist() == [0.0, 80.0, -448.0, 448.0, -448.0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_and_the_handler_comes_back(number):
    before = signal.getsignal(number)
    with pytest.raises(bench.Stopped, match=f"by {number.name}"), bench.stopping(None) as check:
        check()
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_time_limit_stops_a_run():
    with pytest.raises(bench.Stopped, match="time limit of 0 s"), bench.stopping(0) as check:
        check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_without_a_gpu_the_command_refuses():
    result = etap("bench", str(CONFIGS / "targets.toml"))
    assert result.exit_code == 2
    assert "no CUDA device" in result.stderr


@pytest.mark.gpu
def test_a_short_run_writes_right_results(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1024], [16, 4096]]\ns_q = [1, 2]")
    output = tmp_path / "results.json"
    arguments = ["bench", str(path), "--only", "etap", "--replays", "3", "--output", str(output)]
    result = etap(*arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(output.read_text())
    assert document["complete"] and len(document["rows"]) == 4
    for row in document["rows"]:
        ours = row["results"]["etap"]
        assert 0 < ours["relative_rmse"] < bench.LARGEST_RMSE["bfloat16"]
        if row["floor_us"]:
            assert ours["us"] > 0.9 * row["floor_us"], "faster than the memory: the L2 cache served the calls"


@pytest.mark.gpu
def test_a_short_run_with_an_fp8_cache_writes_right_results(tmp_path):
    path = grid(tmp_path, "[[rows]]\nshapes = [[1, 1024], [16, 4096]]\ns_q = [1, 2]")
    output = tmp_path / "results.json"
    only = [word for name in bench.peers.OWN for word in ("--only", name)]
    arguments = ["bench", str(path), "--kv-dtype", "fp8", *only, "--replays", "3", "--output", str(output)]
    result = etap(*arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(output.read_text())
    assert document["complete"] and len(document["rows"]) == 4
    for row in document["rows"]:
        assert row["kv_dtype"] == "fp8" and set(row["results"]) == set(bench.peers.OWN)
        if row["floor_us"]:
            assert row["results"]["etap"]["us"] > 0.9 * row["floor_us"], "faster than the memory"


@pytest.mark.gpu
def test_a_run_cut_short_keeps_its_file(tmp_path):
    output = tmp_path / "results.json"
    arguments = ["bench", str(CONFIGS / "targets.toml"), "--only", "etap", "--time-limit", "0", "--output", str(output)]
    assert etap(*arguments).exit_code == 0
    assert json.loads(output.read_text())["stopped"] == "by the time limit of 0 s"
