"""`bench kernels` without its clock: grids, floors, inputs, kernels, rows and runs; on a GPU also short whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.common import configs
from bench.kernels import command, inputs, libraries, measure, providers
from bench.kernels.floors import FLOORS, floor_for
from bench.kernels.grids import Workload, read_grid
from bench.kernels.measure import MAX_RMSE, Options, Row
from bench.kernels.providers import BF16_CACHE, ETAP, FP8_MATH, SHARED, SHARED_MATH, Provider
from bench.qualify import proxy_peers
from etap_backend import _library, _operator
from etap_backend.reference import relative_rmse

SMALL = {
    "plain": Workload("dense", 2, 333, 4),
    "fp8": Workload("dense", 2, 333, 4, kv_dtype="fp8", page_size=16),
    "sparse": Workload("sparse", 3, 100, 4, context=1024),
    "sparse_fp8": Workload("sparse", 3, 100, 4, kv_dtype="fp8", context=1024),
    "v4": Workload("v4", 3, 192, 8, kv_dtype="fp8", context=1024),
}
"""A row of each kind that the CPU can run."""
COUNTS = {"targets": 12, "targets-fp8": 13, "heads": 25, "mtp": 24, "sparse": 36, "v4": 36, "wide": 594, "wide-64": 297}


@pytest.fixture
def grid(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "grid.toml").write_text(f'title = "t"\n{text}')
        return str(tmp_path / "grid.toml")

    return write


@pytest.fixture
def on_cpu(monkeypatch):
    """Rows on the CPU with two or more copies; a graph's calls are made at once, its last result stays."""

    def graph(call, calls):
        result = [call(index).clone() for index in range(calls)][-1]
        return SimpleNamespace(result=result, calls=calls, timing=lambda: {"us": 1.0})

    monkeypatch.setattr(inputs, "DEVICE", "cpu")
    monkeypatch.setattr(inputs, "ROTATED_BYTES", 8e5)
    monkeypatch.setattr(measure, "USUAL_CALLS", 1)
    monkeypatch.setattr(measure, "Graph", graph)


@pytest.fixture
def library() -> Path:
    try:
        _library.library()
    except ImportError as error:
        pytest.skip(f"no compiled library: {error}")
    return _library.library_path()


def row_of(workload: Workload, **options) -> Row:
    return Row(workload, inputs.Pool((workload,)), Options(**options))


def run_command(*words: object):
    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("name", configs.shipped("grids"))
def test_the_shipped_grids_can_be_read_by_name(name):
    workloads = read_grid(name).workloads
    assert len(workloads) == len(set(workloads)) == COUNTS.get(name, len(workloads)) > 0
    if name not in ("v4", "sparse-prefill"):  # lists without a common row need more rows than some of these have
        for workload in workloads:
            copies = inputs.copies_of(workload)
            assert copies * workload.bytes >= 400e6 or copies == inputs.MAX_COPIES, "L2 would serve the calls"
            assert measure.calls_of(workload) >= copies


@pytest.mark.parametrize(
    "text, key",
    [
        ("", "rows"),
        ("[[rows]]\nbatch = [1]", "wanted shapes, or batch and tokens"),
        ("[[rows]]\nbatchs = [1]", r"rows\.0\.batchs"),
        ("[[rows]]\ncommon = 128\nshapes = [[2, 100]]", "common: wanted .* at most a request's tokens"),
        ("[[rows]]\nshapes = [[0, 64]]", r"rows\.0\.shapes\.0\.0: .* got 0"),
        ("[[rows]]\ncall = 'sparse'\nbatch = [1]\ntokens = [2048]\ncontext = 1024", "context: wanted at least"),
        ("[[rows]]\nshapes = [[1, 1]]\n[[rows]]\ncall = 'sparse'\nbatch = [1]\ntokens = [1]\ncontext = 64", "one call"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid, text, key):
    with pytest.raises(ValueError, match=rf"(?s)grid\.toml: .*{key}"):
        read_grid(grid(text))


def test_rows_beyond_the_memory_are_left_out_and_all_can_be_fp8(grid):
    assert {one.kind for one in read_grid("heads", fp8=True).workloads} == {"fp8"}
    kept, left_out = read_grid(grid("[[rows]]\nshapes = [[1, 1024], [256, 131072]]")).within(20e9)
    assert [one.length for one in kept.workloads] == [1024] and left_out == ["256 x 128K, 16 heads, s_q 1"]


def test_bytes_operations_and_floors_of_each_call():
    dense, fp8 = (Workload("dense", 16, 65536, s_q=4, kv_dtype=kv_dtype) for kv_dtype in ("same", "fp8"))
    assert dense.bytes == 16 * 65536 * 1152 == 2 * fp8.bytes and dense.flops == 2 * 64 * 16 * 65536 * (576 + 512)
    assert Workload("dense", 64, 17408, common=16384).bytes == (16384 + 64 * 1024) * 1152, "a shared row counts once"
    assert Workload("sparse", 4096, 2048, context=65536).bytes == 65536 * 1152, "a shared row counts once"
    assert Workload("sparse", 128, 2048, kv_dtype="fp8", context=2**21).bytes == 128 * 2048 * 656
    v4 = Workload("v4", 16, 640, 8, kv_dtype="fp8", context=2**20)
    assert v4.bytes == 16 * 640 * 584 and v4.flops == 2 * 8 * 16 * 640 * 1024 and v4.extra == 512
    assert FLOORS["H200"]["plain"].us(dense) == pytest.approx(dense.bytes / 4.57e6 + 3.5)
    assert FLOORS["H20 proxy"]["fp8"].us(fp8) == pytest.approx(fp8.flops / 264e6 + 3.5)
    assert floor_for("H20 proxy (H200 throttled)", "sparse") is FLOORS["H20 proxy"]["sparse"]
    assert floor_for("NVIDIA H100 80GB HBM3", "plain") is floor_for("NVIDIA H200", "v4") is None


def test_calls_read_rows_that_no_other_call_reads(on_cpu):
    lists = torch.cat(inputs.lists_of(SMALL["sparse"], 100))
    assert len(lists) == 3 * inputs.copies_of(SMALL["sparse"]) > 3 and lists.unique().numel() == lists.numel()
    assert all((window.diff(dim=1) == 1).all() and window.max() < 1024 for window in inputs.windows_of(SMALL["v4"]))


@pytest.mark.parametrize("kind", SMALL)
def test_etap_is_right_on_its_own_copy_and_wrong_on_another(kind, on_cpu, library):
    row, own = row_of(SMALL[kind]), providers.own()[kind]
    found = {name: row.judged(name, own[name], one) for name, one in row.record_all(own).items()}
    errors = {name: one["relative_rmse"] for name, one in found.items()}
    assert errors[ETAP] <= MAX_RMSE
    if kind == "fp8":
        assert errors[BF16_CACHE] <= MAX_RMSE and 5 * errors[ETAP] < errors[FP8_MATH] < 4.5e-2
    copies = row.pool.copies(row.workload, row.workload.fp8)
    other = own[ETAP].prepare(inputs.with_cache(row.inputs, row.workload.fp8))(*copies[(row.calls - 2) % len(copies)])
    assert len(copies) > 1 and relative_rmse(other, row.truth(row.workload.fp8)) > 0.1


@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_shared_prefixes_have_columns_of_their_own(kv_dtype, on_cpu, library):
    row = row_of(Workload("dense", 5, 1100, 8, kv_dtype=kv_dtype, common=1024))
    table = row.inputs.block_table
    assert (table[:, :16] == table[:1, :16]).all() and table.unique().numel() == 16 + 5 * 3
    assert row.inputs.seq_lens.float().mean() == 1100 and row.inputs.seq_lens.unique().numel() == 5
    of = providers.with_shared_prefixes(providers.own())[row.workload.kind]
    found = {name: row.judged(name, of[name], one) for name, one in row.record_all(of).items()}
    assert [name for name in found if "shared" in name] == [SHARED, SHARED_MATH][: 1 + (kv_dtype == "fp8")]
    assert {one["state"] for one in found.values()} == {"measured"}, found


def test_a_wrong_call_has_no_time_and_refusals_are_named(on_cpu):
    def refuse(given):
        raise NotImplementedError("one query token only")

    def giving(value):
        return Provider(lambda given: lambda cache: torch.full((*given.q.shape[:3], 512), value))

    kernels = {"refuses": Provider(refuse), ETAP: giving(0.0), "peer": giving(torch.nan), "fails": Provider(len)}
    row = row_of(SMALL["plain"])
    found = row.record_all(kernels)
    found |= {name: row.judged(name, kernels[name], found[name]) for name in (ETAP, "peer")}
    assert found["refuses"] == {"state": "refused", "reason": "one query token only"}
    assert found["fails"]["state"] == "failed" and "TypeError" in found["fails"]["error"]
    assert all("wrong result: relative RMSE" in found[name]["error"] for name in (ETAP, "peer"))
    problems = measure.problems({"libraries": {}, "rows": [{"label": "row", "results": found}]})
    assert len(problems) == 1 and problems[0].startswith("row: etap: wrong")


def test_behind_another_kernel_each_call_follows_one_that_reads_the_queries(on_cpu, monkeypatch):
    log = []
    monkeypatch.setattr(measure.torch, "neg", lambda q, out: log.append("kernel"))
    row = row_of(SMALL["plain"], behind=True, validate=False)
    assert row.record(Provider(lambda given: lambda cache: log.append("call") or torch.zeros(1))).behind
    assert log == ["call"] * row.calls + ["kernel", "call"] * row.calls


def test_a_files_peers_stand_beside_etap_and_are_checked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("PEERS = {'FlashMLA': print}\nVERSIONS = {'FlashMLA': '9241ae3'}")
    found, versions = providers.with_file(providers.own(), path)
    assert list(found["plain"]) == [ETAP, "FlashMLA"] and versions == {"FlashMLA": "9241ae3"}
    for text in ("x = 1", "PEERS = {'etap': print}", "PEERS = {'x': 1}", "PEERS = 3", "1 +"):
        path.write_text(text)
        with pytest.raises(ValueError, match="--peers: "):
            providers.with_file(providers.AVAILABLE, path)


def test_the_peers_of_the_h20_proxy_are_of_every_kind():
    path = Path(proxy_peers.__file__)
    found, _ = providers.with_file(providers.own(), path)
    assert all("FlashMLA" in kernels for kernels in found.values()) and "authors' ETAP" in found["plain"]
    counted = proxy_peers.counted_as_on_an_h20("int n = of->multiProcessorCount;")
    assert counted == "int n = of->multiProcessorCount * 78 / 132;"


def test_without_a_choice_etap_and_the_installed_peers_are_timed(monkeypatch):
    monkeypatch.setattr(providers, "installed", lambda packages: {p: "1" for p in packages if p == "vllm"})
    plain = providers.chosen(providers.AVAILABLE, ["plain"], [], [])
    assert list(plain["plain"]) == [ETAP, "FlashMLA", "FA3", "Triton"]
    fp8 = providers.chosen(providers.AVAILABLE, ["fp8"], [], ["flashinfer", "Etap-BF16"])
    assert list(fp8["fp8"]) == [ETAP, FP8_MATH, "FlashMLA", "Triton"]
    for only, skip, argument in ((["FA4"], [], "--only"), ([], ["x"], "--skip"), ([ETAP], [ETAP], "--skip")):
        with pytest.raises(ValueError, match=f"{argument}: wanted"):
            providers.chosen(providers.AVAILABLE, ["plain"], only, skip)


def test_each_build_is_called_while_it_is_active_and_unequal_bits_are_found(tmp_path, on_cpu, library):
    builds = libraries.load([f"old={library}", f"new={shutil.copy(library, tmp_path / 'other.so')}"])
    seen = {}
    for build in builds:
        with build.active():
            assert _library.library_path() == build.path
            seen[build.name] = _operator.compiled("check_decode")
    assert _library.library_path() == library and seen["old"] is not seen["new"]
    of = providers.of_builds(builds)["fp8"]
    results = {name: one.graph.result for name, one in row_of(SMALL["fp8"]).record_all(of).items()}
    assert measure.same_bits(results, of) == {"new": True, "new-fp8-math": True}
    results["new"] = results["new"] * 2
    assert measure.same_bits(results, of) == {"new": False, "new-fp8-math": True}


def test_a_build_that_cannot_be_called_is_refused(tmp_path, library, monkeypatch):
    (tmp_path / "lib.so").write_text("no library")
    for texts in (["x"], ["a=/nonexistent"], [f"wrong={tmp_path / 'lib.so'}"], [f"a={library}"] * 2):
        with pytest.raises(ValueError, match="--library"):
            libraries.load(texts)
    monkeypatch.setattr(_library, "ABI_VERSION", -1)
    with pytest.raises(ValueError, match="--library a: .* has ABI version"):
        libraries.load([f"a={library}"])


def test_a_run_is_whole_in_its_file_whatever_ends_it(tmp_path, grid, on_cpu, monkeypatch):
    """An H200 without a clock: measuring takes no time, and a row of 128 heads breaks the CUDA context."""
    monkeypatch.setattr(command, "must_be_hopper", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1e11, 1e11))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))

    def row(workload, pool, of, options, gpu):
        if workload.heads == 128:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        found = {"state": "measured", "relative_rmse": 2e-3, "us": 2.0}
        return {**workload.fields, "floor_us": 1.0, "results": {name: found for name in of}}

    monkeypatch.setattr(measure, "measure", row)
    output, words = tmp_path / "r.json", ("--only", "etap", "--output", tmp_path / "r.json")
    broken = run_command(grid("[[rows]]\nheads = [8, 16, 128]\nshapes = [[1, 64]]"), *words)
    found = json.loads(output.read_text())
    assert isinstance(broken.exception, RuntimeError) and [row["heads"] for row in found["rows"]] == [8, 16]
    assert not found["complete"]
    whole = run_command(grid("[[rows]]\nheads = [8, 16]\nshapes = [[1, 64]]"), *words)
    found = json.loads(output.read_text())
    assert whole.exit_code == 0 and "1 x 64 |" in whole.output and found["complete"] and found["gpu"] == "NVIDIA H200"
    monkeypatch.delenv("ETAP_LIBRARY", raising=False)
    refused = run_command(grid("[[rows]]\nshapes = [[1, 64]]"), *words, "--h20-proxy")
    assert refused.exit_code == 2 and "--h20-proxy: wanted ETAP_LIBRARY" in refused.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "text",
    [
        "[[rows]]\nshapes = [[1, 1024], [16, 4096]]\ns_q = [1, 2]\nkv_dtype = ['same', 'fp8']",
        "[[rows]]\ncall = 'sparse'\nkv_dtype = ['fp8', 'same']\nbatch = [1, 64]\ntokens = [2048]\ncontext = 2097152",
        "[[rows]]\ncall = 'v4'\nkv_dtype = ['fp8']\nheads = [8]\nbatch = [1, 64]\ntokens = [128, 640]\ncontext = 65536",
    ],
    ids=["dense", "sparse", "v4"],
)
def test_a_short_run_of_two_equal_builds_writes_right_results(tmp_path, grid, library, text):
    builds = [f"--library=a={library}", f"--library=b={shutil.copy(library, tmp_path / 'b.so')}"]
    result = run_command(grid(text), *builds, "--behind", "--replays", "3", "--output", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    for row in json.loads((tmp_path / "r.json").read_text())["rows"]:
        one, other = row["results"]["a"], row["results"]["b"]
        assert other["same_bits"] and 0 < one["relative_rmse"] < MAX_RMSE and one["behind"]["us"] > 0 < one["us"]
        assert not row["floor_us"] or one["us"] > 0.9 * row["floor_us"], "L2 served the calls"
