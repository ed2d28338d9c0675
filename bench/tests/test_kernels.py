"""`bench kernels` without its clock: grids, floors, inputs, kernels, rows and runs; on a GPU also short whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from bench.common import configs, results
from bench.kernels import command, inputs, libraries, measure, peers, providers
from bench.kernels.floors import DENSE, SPARSE, floor_for
from bench.kernels.grids import KvDtype, Workload, read_grid
from bench.kernels.measure import MAX_RMSE, Options, Row
from bench.kernels.providers import BF16_CACHE, ETAP, FP8_MATH, Provider
from etap_backend import _library, _operator
from etap_backend.limits import FP8
from etap_backend.reference import relative_rmse, stored_rows

SMALL = {
    "plain": Workload("dense", (100, 333), 4),
    "fp8": Workload("dense", (100, 333), 4, fp8=True),
    "sparse": Workload("sparse", (100,) * 3, 4, context=1024),
    "sparse_fp8": Workload("sparse", (100,) * 3, 4, fp8=True, context=1024),
    "v4": Workload("v4", (192,) * 3, 8, fp8=True, context=1024),
}
"""A row of each kind that the CPU can run."""


@pytest.fixture
def grid(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "grid.toml").write_text(text)
        return str(tmp_path / "grid.toml")

    return write


@pytest.fixture
def on_cpu(monkeypatch):
    """Rows on the CPU with two or more copies; a graph's calls are made at once, its last result is kept."""

    def graph(call, calls):
        return SimpleNamespace(result=[call(index).clone() for index in range(calls)][-1], calls=calls)

    monkeypatch.setattr(inputs, "DEVICE", "cpu")
    monkeypatch.setattr(inputs, "ROTATED_BYTES", 6e5)
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
    return Row(workload, inputs.pool_of((workload,)), Options(**options))


def run_command(*words: object):
    import typer

    app = typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "NO_COLOR": "1"})


# Grids and floors


@pytest.mark.parametrize("name", configs.shipped("grids"))
def test_the_shipped_grids_can_be_read_by_name(name):
    made = read_grid(name)
    assert made.name == name and made.title
    assert len(made.workloads) == len(set(made.workloads)) > 0 and all(one.tokens for one in made.workloads)


def test_a_grid_is_the_product_of_its_lists(grid):
    made = read_grid(grid('[[rows]]\nheads = [8, 16]\ns_q = [1, 2]\nbatch = [1, 4]\ntokens = [64]\ndtype = "float16"'))
    assert len(made.workloads) == 8 and made.workloads[0] == Workload("dense", (64,), 8, 1, "float16")
    assert made.workloads[-1] == Workload("dense", (64,) * 4, 16, 2, "float16")


def test_an_uneven_batch_has_an_even_twin_of_the_same_tokens(grid):
    uneven, even = read_grid(grid('[[rows]]\nname = "n"\nmixed = [[1, 1000], [2, 7]]')).workloads
    assert uneven.lengths == (1000, 7, 7) and even.lengths == (338, 338, 338)


def test_the_type_of_the_cache_can_be_chosen_for_all_rows(grid):
    text = '[[rows]]\nshapes = [[1, 64]]\n[[rows]]\nshapes = [[1, 64]]\nkv_dtype = "fp8"'
    assert [one.fp8 for one in read_grid(grid(text)).workloads] == [False, True]
    assert [one.fp8 for one in read_grid(grid(text), KvDtype.FP8).workloads] == [True], "a row twice"
    with pytest.raises(ValueError, match="--kv-dtype: wanted fp8"):
        read_grid("v4", KvDtype.SAME)


@pytest.mark.parametrize(
    "text, key",
    [
        ("", "wanted .*rows"),
        ("[[rows]]\nshapes = [[1, 64]]\n[[sparse]]\ntokens = [1]\ncontext = 2048", "wanted .*rows"),
        ("[[rows]]", "wanted one of shapes"),
        ("[[rows]]\nbatch = [1]", "batch with tokens"),
        ("[[rows]]\nmixed = [[2, 5]]", "mixed with name"),
        ("[[rows]]\nbatchs = [1]", r"rows\.0\.batchs"),
        ("[[rows]]\nshapes = [[0, 64]]", r"rows\.0\.shapes\.0\.0: .* got 0"),
        ("[[rows]]\nshapes = [[1, 64]]\nheads = [true]", r"rows\.0\.heads\.0"),
        ("[[rows]]\nshapes = [[1, 64]]\nkv_dtype = 'int8'", r"rows\.0\.kv_dtype: .* got 'int8'"),
        ("[[sparse]]\ntokens = [1]\ncontext = 1024", "context: wanted at least top_k"),
        ("[[v4]]\ntokens = [1]\nheads = [8]\nextra = [-1]\ncontext = 65", r"v4\.0\.extra\.0: .*v4\.0\.context"),
        ("not toml", ""),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid, text, key):
    with pytest.raises(ValueError, match=rf"(?s)grid\.toml: .*{key}"):
        read_grid(grid(text))


def test_rows_beyond_the_memory_are_left_out_and_named(grid):
    made, left_out = read_grid(grid("[[rows]]\nshapes = [[1, 1024], [256, 131072]]")).within(20e9)
    assert [one.tokens for one in made.workloads] == [1024] and left_out == ["256 x 128K, 16 heads, s_q 1"]
    fp8 = read_grid(grid("[[rows]]\nshapes = [[1, 1000000]]"), KvDtype.FP8)  # 1.152 GB and 0.576 GB, within 80%
    assert fp8.within(2.2e9)[0].workloads and not fp8.within(2.1e9)[0].workloads


def test_bytes_and_operations_of_each_call():
    dense = Workload("dense", (65536,) * 16)
    assert dense.bytes == 16 * 65536 * 1152 and dense.flops == 2 * 16 * 16 * 65536 * (576 + 512)
    assert Workload("dense", (65536,) * 16, fp8=True).bytes == dense.bytes / 2
    prefill = Workload("sparse", (2048,) * 4096, context=65536)
    assert prefill.bytes == 65536 * 1152 and prefill.flops == 2 * 16 * 4096 * 2048 * (576 + 512)
    assert Workload("sparse", (2048,) * 128, fp8=True, context=2**21).bytes == 128 * 2048 * 656
    v4 = Workload("v4", (640,) * 16, 8, fp8=True, context=2**20)
    assert v4.bytes == 16 * 640 * 584 and v4.flops == 2 * 8 * 16 * 640 * 1024 and v4.extra == 512


def floor_us(floor, workload: Workload) -> float:
    return floor.us(read=workload.bytes, flops=workload.flops, fp8=workload.fp8)


def test_the_floor_is_the_longer_of_bytes_and_operations():
    plain, fp8 = (Workload("dense", (65536,) * 16, s_q=4, fp8=fp8) for fp8 in (False, True))
    assert floor_us(DENSE["H200"], plain) == pytest.approx(plain.bytes / 4.57e6 + 3.5)
    assert floor_us(DENSE["H20 proxy"], plain) == pytest.approx(plain.flops / 132e6 + 3.5)
    assert floor_us(DENSE["H20 proxy"], fp8) == pytest.approx(fp8.flops / 264e6 + 3.5)
    assert floor_for("NVIDIA H200", "fp8") is DENSE["H200"]
    assert floor_for("H20 proxy (H200 throttled)", "sparse") is SPARSE["H20 proxy"]
    assert floor_for("NVIDIA H100 80GB HBM3", "plain") is floor_for("NVIDIA H200", "v4") is None


@pytest.mark.parametrize(
    "gpu, fp8, gathers",
    [  # measured microseconds of reading the rows into shared memory, and nothing else, by tokens
        ("H200", True, {8: 5.7, 16: 8.5, 64: 26.1, 128: 49.1}),
        ("H200", False, {8: 7.3, 16: 11.6, 64: 36.8, 128: 70.9}),
        ("H20 proxy", True, {8: 6.3, 16: 10.0, 64: 32.0, 128: 61.5}),
        ("H20 proxy", False, {8: 7.3, 16: 11.8, 64: 37.6, 128: 72.4}),
    ],
)
def test_the_sparse_floor_is_what_gathering_was_measured_to_take(gpu, fp8, gathers):
    for tokens, us in gathers.items():
        workload = Workload("sparse", (2048,) * tokens, 1, fp8=fp8, context=2**21)
        assert 0.94 * us <= floor_us(SPARSE[gpu], workload) <= 1.005 * us


# Inputs


@pytest.mark.parametrize("name", ["targets", "targets-fp8", "sparse", "v4", "wide"])
def test_the_calls_of_a_graph_read_more_than_the_l2_cache_and_every_copy(name):
    for workload in read_grid(name).workloads:
        copies = inputs.copies_of(workload)
        enough = copies * workload.bytes >= 400e6 or copies == inputs.MAX_COPIES
        assert enough or name == "v4" and workload.extra and copies == 2**20 // (len(workload.lengths) * workload.extra)
        assert measure.calls_of(workload) >= max(copies, measure.MIN_CALLS)


def test_fp8_saturates():
    x = torch.tensor([0.0, 1.0, -5.6, 7.0, -100.0], dtype=torch.bfloat16)
    assert inputs.to_fp8(x, 0.0125).float().tolist() == [0.0, 80.0, -448.0, 448.0, -448.0]


def errors_of(values: torch.Tensor, scales: torch.Tensor, made_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of e4m3 values [rows, columns] times a scale per group, and the largest errors of rounding to e4m3."""
    groups = made_of.double().unflatten(1, (scales.shape[1], -1))
    error = (values.double().unflatten(1, (scales.shape[1], -1)) * scales.double().unsqueeze(2) - groups).abs()
    return error, groups.abs() / 16 + groups.abs().amax(dim=2, keepdim=True) / 224 / 1024


def test_fp8_rows_stand_for_what_they_were_made_of():
    made_of = torch.randn(50, 576, dtype=torch.bfloat16)
    values, scales, rope = inputs.fp8_rows(made_of).split([512, 16, 128], dim=1)
    assert torch.equal(rope.contiguous().view(torch.bfloat16), made_of[:, 512:])
    error, limit = errors_of(values.view(FP8), scales.contiguous().view(torch.float32), made_of[:, :512])
    assert (error <= limit).all() and error.max() > 0


def test_v4_pages_stand_for_what_they_were_made_of():
    made_of = torch.randn(3, 64, 512, dtype=torch.bfloat16)
    packed = inputs.v4_pages(made_of)
    page, place = torch.arange(3 * 64).div(64, rounding_mode="floor"), torch.arange(3 * 64) % 64
    values, rope, exponents, unused = stored_rows(packed, page, place).split([448, 128, 7, 1], dim=1)
    assert torch.equal(rope.contiguous().view(torch.bfloat16), made_of.flatten(0, 1)[:, 448:]) and not unused.any()
    error, limit = errors_of(values.view(FP8), (exponents.double() - 127).exp2(), made_of.flatten(0, 1)[:, :448])
    assert (error <= limit).all() and error.max() > 0


def test_calls_read_rows_that_no_other_call_reads(on_cpu):
    lists = torch.cat(inputs.lists_of(SMALL["sparse"], 100))
    assert len(lists) == 3 * inputs.copies_of(SMALL["sparse"]) > 3 and lists.unique().numel() == lists.numel()
    copies = row_of(SMALL["v4"]).pool.copies(SMALL["v4"], torch.uint8)
    extra = torch.cat([extra for *_, extra in copies])
    assert len(copies) > 1 and extra.shape[1] == 64 and extra.unique().numel() == extra.numel()
    assert all((window.diff(dim=1) == 1).all() and window.max() < 1024 for _, window, *_ in copies)
    (prefill,) = inputs.lists_of(Workload("sparse", (100,) * 64, context=1024), 100)
    assert all(len(each.unique()) == 100 for each in prefill), "a row is twice in a list"


# Kernels


@pytest.mark.parametrize("kind", SMALL)
def test_etap_is_right_on_its_own_copy_and_wrong_on_another(kind, on_cpu, library):
    row, own = row_of(SMALL[kind]), providers.own(providers.available())[kind]
    assert list(own) == ([ETAP, FP8_MATH, BF16_CACHE] if kind == "fp8" else [ETAP])
    found = row.record_all(own)
    errors = {name: one.found["relative_rmse"] for name, one in found.items()}
    assert errors[ETAP] <= MAX_RMSE["bfloat16"]
    if kind == "fp8":
        assert errors[BF16_CACHE] <= MAX_RMSE["bfloat16"] and 5 * errors[ETAP] < errors[FP8_MATH] < 4.5e-2
        assert relative_rmse(found[BF16_CACHE].graph.result, row.truth(torch.float8_e4m3fn)) > 1e-2
    call, copies, dtype = row.prepared(own[ETAP])
    other = copies[(row.calls - 2) % len(copies)]
    assert len(copies) > 1 and relative_rmse(call(*other), row.truth(dtype)) > 0.1


def test_the_flashmla_drop_in_gets_flashmlas_call(on_cpu, library):
    provider = providers.available()["plain"][providers.DROP_IN]
    found = row_of(SMALL["plain"]).record("x", provider).found
    assert found["relative_rmse"] <= MAX_RMSE["bfloat16"]
    with pytest.raises(NotImplementedError, match="pages of 64 tokens"):
        row_of(Workload("dense", (100,), 4, page_size=16)).record("x", provider)


def test_a_sparse_row_that_needs_no_padding_has_no_second_flashmla_column():
    with pytest.raises(NotImplementedError, match="64 heads need no padding"):
        peers._padded_heads(64, pad_in_call=False)
    assert [peers._padded_heads(heads, pad_in_call=True) for heads in (8, 64, 65, 128)] == [64, 64, 128, 128]


def test_a_row_says_what_was_wrong_refused_or_failed(on_cpu):
    def refuse(given):
        raise NotImplementedError("one query token only")

    def wrong(given):
        return lambda cache: torch.zeros(*given.q.shape[:3], 512)

    def broken(given):
        return lambda cache: torch.full((*given.q.shape[:3], 512), torch.nan)

    found = row_of(SMALL["plain"]).record_all({
        "refuses": Provider(refuse), ETAP: Provider(wrong), "peer": Provider(broken), "fails": Provider(lambda: None),
    })  # fmt: skip
    assert found["refuses"] == {"state": "refused", "reason": "one query token only"}
    assert found["fails"]["state"] == "failed" and "TypeError" in found["fails"]["error"]
    assert all("wrong result: relative RMSE" in found[name]["error"] for name in (ETAP, "peer"))
    document = {"libraries": {}, "rows": [{"label": "row", "results": found}]}
    assert len(measure.problems(document)) == 1 and measure.problems(document)[0].startswith("row: etap: wrong")


def test_peers_may_round_more_than_etap():
    fp8 = SMALL["fp8"]
    build = Provider(print, build=libraries.Build("new", Path()))
    exact = [measure.max_rmse(ETAP, fp8, Provider(print)), measure.max_rmse("new", fp8, build)]
    assert exact == [MAX_RMSE["bfloat16"]] * 2
    rounded = [measure.max_rmse(name, fp8, Provider(print)) for name in (FP8_MATH, "FlashMLA")]
    assert rounded == [measure.max_rmse("new-fp8-math", fp8, build)] * 2 == [measure.MAX_FP8_MATH_RMSE] * 2


def test_behind_another_kernel_each_call_follows_one_that_reads_the_queries(on_cpu, monkeypatch):
    log = []
    monkeypatch.setattr(measure.torch, "neg", lambda q, out: log.append("kernel"))

    def prepare(given):
        return lambda cache: log.append("call") or torch.zeros(1)

    row = row_of(SMALL["plain"], behind=True, validate=False)
    assert row.record("peer", Provider(prepare)).behind
    assert log == ["call"] * row.calls + ["kernel", "call"] * row.calls


PEERS = """
from etap_backend.reference import mla_decode_reference

def prepare(inputs):
    lists = (inputs.block_table, inputs.seq_lens, inputs.softmax_scale)
    return lambda cache: mla_decode_reference(inputs.q, cache, *lists)[0].bfloat16()

PEERS = {"FlashMLA": prepare, "authors' ETAP": prepare}
VERSIONS = {"FlashMLA": "9241ae3"}
"""


def test_a_files_peers_stand_beside_etap_and_replace_installed_ones(tmp_path, on_cpu, library):
    (tmp_path / "mine.py").write_text(PEERS)
    found, versions = providers.with_file(providers.own(providers.available()), tmp_path / "mine.py")
    assert list(found["plain"]) == [ETAP, "FlashMLA", "authors' ETAP"] and list(found["fp8"])[-1] == BF16_CACHE
    assert versions == {"FlashMLA": "9241ae3"} and not found["plain"]["FlashMLA"].package
    timed = row_of(SMALL["plain"]).record_all(found["plain"])
    assert 0 < timed["authors' ETAP"].found["relative_rmse"] < timed[ETAP].found["relative_rmse"]


@pytest.mark.parametrize("text", ["x = 1", "PEERS = [1]", "PEERS = {'a': 1}", "PEERS = {'etap': print}", "1 +", None])
def test_a_file_without_peers_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match="--peers: "):
        providers.with_file(providers.available(), tmp_path / "mine.py")


def test_without_a_choice_etap_and_the_installed_peers_are_timed(monkeypatch):
    monkeypatch.setattr(providers, "installed", lambda packages: {p: "1" for p in packages if p == "vllm"})
    plain = providers.chosen(providers.available(), ["plain"], [], [])
    assert list(plain["plain"]) == [ETAP, "FlashMLA", "FA3", "Triton"]
    fp8 = providers.chosen(providers.available(), ["fp8"], [], ["triton", "Etap-BF16"])
    assert list(fp8["fp8"]) == [ETAP, FP8_MATH, "FlashMLA"] and providers.packages(fp8) == ["vllm"]
    assert list(providers.chosen(providers.available(), ["plain"], ["flashmla drop-in"], [])["plain"])


@pytest.mark.parametrize(
    "only, skip, argument", [(["FA4"], [], "--only"), ([], ["x"], "--skip"), ([ETAP], [ETAP], "--skip")]
)
def test_kernels_that_are_not_there_are_refused(only, skip, argument):
    with pytest.raises(ValueError, match=f"{argument}: wanted"):
        providers.chosen(providers.available(), ["plain"], only, skip)


# Several builds


def test_each_build_is_called_while_it_is_active(tmp_path, on_cpu, library, monkeypatch):
    other = shutil.copy(library, tmp_path / "other.so")
    builds = libraries.load([f"old={library}", f"new-2={other}"])
    before, seen = _operator.compiled("check_decode"), {}
    for build in builds:
        with build.active():
            assert _library.library_path() == build.path
            seen[build.name] = _operator.compiled("check_decode")
    assert _library.library_path() == library and seen["old"] is not seen["new-2"] is not before
    of = providers.of_builds(builds)["fp8"]
    assert list(of) == ["old", "new-2", "old-fp8-math", "new-2-fp8-math"]
    results_ = {name: one.graph.result for name, one in row_of(SMALL["fp8"]).record_all(of).items()}
    assert measure.same_bits(results_, of) == {"new-2": True, "new-2-fp8-math": True}
    results_["new-2"] = results_["new-2"] * 2
    assert measure.same_bits(results_, of) == {"new-2": False, "new-2-fp8-math": True}


def test_a_build_that_cannot_be_called_is_refused_by_name(tmp_path, library, monkeypatch):
    (tmp_path / "lib.so").write_text("no library")
    for text in ("x", "=x", "a b=x", "a=", "a=/nonexistent", f"wrong={tmp_path / 'lib.so'}"):
        with pytest.raises(ValueError, match="--library"):
            libraries.load([text])
    with pytest.raises(ValueError, match="--library: wanted different names"):
        libraries.load([f"a={library}"] * 2)
    monkeypatch.setattr(_library, "ABI_VERSION", -1)
    with pytest.raises(ValueError, match="--library a: .* has ABI version"):
        libraries.load([f"a={library}"])
    with pytest.raises(ValueError, match="--peers: wanted without --library"):
        command.kernels_of([libraries.Build("a", library)], tmp_path, False)


# Runs


@pytest.fixture
def an_h200(monkeypatch, on_cpu):
    """An H200 without a clock: measuring takes no time, and a row of 128 heads breaks the CUDA context."""
    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(command, "must_be_hopper", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1e11, 1e11))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: chip)

    def row(workload, pool, of, options, floor):
        if workload.heads == 128:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        found = {"state": "measured", "relative_rmse": 2e-3, **measure.timing_of([1.0, 2.0, 3.0])}
        return {**workload.fields, "floor_us": floor and 1.0, "results": {name: found for name in of}}

    monkeypatch.setattr(measure, "measure", row)


def test_a_run_is_whole_in_its_file_whatever_ends_it(tmp_path, grid, an_h200):
    output, words = tmp_path / "r.json", ("--only", "etap", "--output", tmp_path / "r.json")
    broken = run_command(grid("[[rows]]\nheads = [8, 16, 128]\nshapes = [[1, 64]]"), *words)
    kept = json.loads(output.read_text())
    assert isinstance(broken.exception, RuntimeError) and [row["heads"] for row in kept["rows"]] == [8, 16]
    assert not kept["complete"] and kept["stopped"] is None
    whole = run_command(grid("[[rows]]\nheads = [8, 16]\nshapes = [[1, 64]]"), *words)
    assert whole.exit_code == 0 and "1 x 64 |" in whole.output and "2.0 |" in whole.output
    made = json.loads(output.read_text())
    assert made["complete"] and made["kind"] == "bench" and made["gpu"] == "NVIDIA H200" and made["command"]
    assert made["versions"].keys() >= {"torch", "etap-backend"} and made["options"]["kernels"] == [ETAP]
    late = run_command(grid("[[rows]]\nshapes = [[1, 64]]"), *words, "--time-limit", "0")
    assert late.exit_code == 1 and json.loads(output.read_text()) == made, "an older file stays until there is a row"
    run_command(grid("[[rows]]\nshapes = [[1, 64]]"), *words[:-1], tmp_path / "new.json", "--time-limit", "0")
    assert json.loads((tmp_path / "new.json").read_text())["stopped"] == "by the time limit of 0 s"


def test_the_proxy_needs_a_throttled_library_and_is_called_so(tmp_path, grid, an_h200, monkeypatch):
    words = (grid("[[rows]]\nshapes = [[1, 64]]"), "--h20-proxy", "--output", tmp_path / "r.json")
    monkeypatch.delenv("ETAP_LIBRARY", raising=False)
    assert "--h20-proxy: wanted ETAP_LIBRARY" in run_command(*words).output
    monkeypatch.setenv("ETAP_LIBRARY", str(tmp_path / "throttled.so"))
    assert run_command(*words).exit_code == 0
    made = json.loads((tmp_path / "r.json").read_text())
    assert made["gpu"] == "H20 proxy (H200 throttled)" and made["options"]["num_sms"] == 78
    assert "operations / 132 TFLOP/s" in made["floor"]["text"]


def test_an_existing_file_is_replaced_only_by_its_name(tmp_path, monkeypatch, grid, an_h200):
    monkeypatch.chdir(tmp_path)
    results.must_be_writable(older := Path("results") / "grid-fp8.json")
    older.write_text("{}")
    words = (grid("[[rows]]\nshapes = [[1, 64]]"), "--kv-dtype", "fp8", "--only", "etap")
    refused = run_command(*words)
    assert refused.exit_code == 2 and "--output: " in refused.output and older.read_text() == "{}"
    assert run_command(*words, "--output", older).exit_code == 0
    assert json.loads(older.read_text())["rows"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_without_a_gpu_the_command_refuses():
    for words, said in (
        (["targets"], "no CUDA device"),
        (["targest"], "grid: wanted"),
        (["v4", "--kv-dtype", "x"], "kv-dtype"),
    ):
        result = run_command(*words)
        assert result.exit_code == 2 and said in result.output


# On a GPU


def on_hopper(test):
    reason = "needs a Hopper GPU"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


@on_hopper
@pytest.mark.parametrize(
    "text",
    [
        "[[rows]]\nshapes = [[1, 1024], [16, 4096]]\ns_q = [1, 2]\n[[rows]]\nshapes = [[16, 4096]]\nkv_dtype = 'fp8'",
        "[[sparse]]\nkv_dtype = ['fp8', 'same']\nheads = [16, 64]\ntokens = [1, 64]\ncontext = 2097152",
        "[[v4]]\nheads = [8, 16]\nextra = [0, 512]\ntokens = [1, 64]\ncontext = 65536",
    ],
    ids=["dense", "sparse", "v4"],
)
def test_a_short_run_writes_right_results(tmp_path, grid, text):
    result = run_command(grid(text), "--behind", "--replays", "3", "--output", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "r.json").read_text())
    assert made["complete"]
    for row in made["rows"]:
        found = row["results"][ETAP]
        assert 0 < found["relative_rmse"] < MAX_RMSE["bfloat16"] and found["behind"]["us"] > found["us"] > 0
        assert not row["floor_us"] or found["us"] > 0.9 * row["floor_us"], "the L2 cache served the calls"


@on_hopper
def test_one_library_twice_takes_as_long_and_gives_the_same_bits(tmp_path, grid, library):
    path = grid("[[rows]]\nshapes = [[16, 4096]]\n[[rows]]\nshapes = [[16, 4096]]\nkv_dtype = 'fp8'")
    shutil.copy(library, tmp_path / "b.so")
    builds = ["--library", f"a={library}", "--library", f"b={tmp_path / 'b.so'}"]
    result = run_command(path, *builds, "--output", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    for row in json.loads((tmp_path / "r.json").read_text())["rows"]:
        one, other = row["results"]["a"], row["results"]["b"]
        assert other["same_bits"] and other["us"] == pytest.approx(one["us"], rel=0.05)
