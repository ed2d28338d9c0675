"""`etap bench` on the sparse call, without its clock: grids, floors, lists and caches, kernels, tables and plots. On a
GPU also a short run of the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import typer
from bench.tests.bench_documents import document_of
from typer.testing import CliRunner

from bench.common import configs, results
from bench.kernels import measure, plots, providers, report, rows, run, tensors
from bench.kernels.command import bench
from bench.kernels.floors import H200_GATHER_FLOOR, PROXY_GATHER_FLOOR, floor_for
from bench.kernels.grids import SparseWorkload, read_grid, read_grids
from bench.kernels.rows import (
    LARGEST_RMSE,
    Document,
    Measured,
    Refused,
    SparseDocument,
    SparseRow,
    problems,
)
from etap_backend.reference import what_rows_stand_for

MILLIONS = 2 * 1024**2


def decode(tokens: int, heads: int = 16, kv_dtype: str = "same", top_k: int = 2048, context: int = MILLIONS):
    return SparseWorkload((top_k,) * tokens, heads, kv_dtype=kv_dtype, context=context)


def small(tokens: int = 3, heads: int = 4, kv_dtype: str = "same") -> SparseWorkload:
    return decode(tokens, heads, kv_dtype, top_k=100, context=1024)


def a_row(workload: SparseWorkload, **times: float) -> SparseRow:
    found = {name: Measured(us=us, iqr_us=us / 100, replays=21, relative_rmse=1.9e-3) for name, us in times.items()}
    return rows.row_of(workload.shape, calls=4, rotated_bytes=0, floor_us=floor_us(workload), results=found)


def floor_us(workload: SparseWorkload, floor=H200_GATHER_FLOOR) -> float:
    return floor.microseconds(kv_bytes=workload.kv_bytes, flops=workload.flops, fp8=workload.fp8)


@pytest.fixture
def document() -> SparseDocument:
    fp8 = [a_row(decode(n, kv_dtype="fp8"), etap=n / 3 + 8, FlashMLA=n + 18) for n in (1, 16, 128)]
    refused = Refused(reason="64 heads are not padded, so this is the call as vLLM makes it")
    wide = a_row(decode(16, 64, "fp8"), etap=30.0, FlashMLA=31.0)
    wide = wide.model_copy(update={"results": {**wide.results, "FlashMLA alone": refused}})
    bf16 = [a_row(decode(n), etap=n / 2 + 8, FA3=n / 2 + 13) for n in (1, 16, 128)]
    return document_of(
        "sparse",
        SparseDocument,
        title="Sparse MLA decode",
        floor=H200_GATHER_FLOOR.said(fp8=True),
        rows=[*fp8, wide, *bf16],
    )


# Grids and floors


def test_the_grids_have_the_shapes_that_are_asked_about():
    made = read_grid(configs.find("bench", "sparse"))
    shapes = {(len(row.lengths), row.heads, row.kv_dtype) for row in made.workloads}
    assert made.sparse and {row.top_k for row in made.workloads} == {2048}
    for kv_dtype in ("same", "fp8"):
        assert {tokens for tokens, heads, kind in shapes if (heads, kind) == (16, kv_dtype)} == {1, 8, 16, 32, 64, 128}
        assert {(16, heads, kv_dtype) for heads in (8, 64, 128)} <= shapes
    prefill = read_grid(configs.find("bench", "sparse-prefill")).workloads[0]
    assert prefill == decode(4096, context=65536) and prefill.label == "4096 x 2K of 64K, 16 heads"


def test_a_cache_for_all_rows_can_be_chosen():
    both, fp8 = read_grids(["sparse"]).workloads, read_grids(["sparse"], "fp8").workloads
    assert {row.kv_dtype for row in fp8} == {"fp8"} and 2 * len(fp8) == len(both)


@pytest.mark.parametrize(
    "text, words",
    [
        ("tokens = [1]", "sparse.0.context: Field required"),
        ("tokens = []\ncontext = 64", "sparse.0.tokens: List should have at least 1 item"),
        ("tokens = [1]\ncontext = 2000\ntop_k = 64", "context: wanted a multiple of 64 of at least top_k, got 2000"),
        ("tokens = [1]\ncontext = 1024", "context: wanted a multiple of 64 of at least top_k, got 1024"),
        ("tokens = [1]\ncontext = 2048\nkv_dtype = ['int8']", "sparse.0.kv_dtype.0: Input should be 'same' or 'fp8'"),
        ("tokens = [1]\ncontext = 2048\n[[rows]]\nshapes = [[1, 64]]", r"wanted \[\[rows\]\], or"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, text, words):
    path = tmp_path / "grid.toml"
    path.write_text(f"[[sparse]]\n{text}")
    with pytest.raises(ValueError, match=f"grid.toml: .*{words}"):
        read_grid(path)


def test_one_run_is_of_one_call():
    assert read_grids(["sparse", "sparse-prefill"]).sparse
    with pytest.raises(ValueError, match="grids: wanted all of the dense call or all of the sparse one, got targets, "):
        read_grids(["targets", "sparse"])


def test_rows_that_several_tokens_name_are_read_once():
    assert decode(128).kv_bytes == 128 * 2048 * 1152 and decode(128, kv_dtype="fp8").kv_bytes == 128 * 2048 * 656
    prefill = decode(4096, context=65536)
    assert prefill.kv_bytes == 65536 * 1152 and prefill.flops == 2 * 16 * 4096 * 2048 * (576 + 512)
    assert floor_us(prefill) == pytest.approx(prefill.flops / 947e6 + 2.7)


@pytest.mark.parametrize(
    "floor, kv_dtype, gathers",
    [  # microseconds that reading the rows into shared memory takes, and nothing else, by tokens
        (H200_GATHER_FLOOR, "fp8", {8: 5.7, 16: 8.5, 64: 26.1, 128: 49.1}),
        (H200_GATHER_FLOOR, "same", {8: 7.3, 16: 11.6, 64: 36.8, 128: 70.9}),
        (PROXY_GATHER_FLOOR, "fp8", {8: 6.3, 16: 10.0, 64: 32.0, 128: 61.5}),
        (PROXY_GATHER_FLOOR, "same", {8: 7.3, 16: 11.8, 64: 37.6, 128: 72.4}),
    ],
)
def test_the_floor_is_what_gathering_was_measured_to_take(floor, kv_dtype, gathers):
    for tokens, us in gathers.items():
        workload = decode(tokens, heads=1, kv_dtype=kv_dtype)
        assert 0.94 * us <= floor_us(workload, floor) <= 1.005 * us


def test_products_of_fp8_rows_are_taken_in_16_bits():
    heavy = decode(128, heads=128, kv_dtype="fp8")
    assert floor_us(heavy) == pytest.approx(heavy.flops / 947e6 + 2.7)
    assert floor_for("NVIDIA H200", sparse=True) is H200_GATHER_FLOOR
    assert floor_for("H20 proxy (H200 throttled)", sparse=True) is PROXY_GATHER_FLOOR
    assert floor_for("NVIDIA H100 80GB HBM3", sparse=True) is None
    said = H200_GATHER_FLOOR.said(fp8=True).text
    assert said == "max(gathered bytes / 4.46 TB/s (rows of 656 bytes: 3.71), operations / 947 TFLOP/s) + 2.7 us"


# Lists and caches


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "ROTATED_BYTES", 5e5)


def test_calls_walk_over_rows_that_no_other_call_reads(on_cpu):
    workload = small()
    lists = tensors.lists_of(workload)
    assert len(lists) == tensors.copies_of(workload) == 2 and all(each.shape == (3, 100) for each in lists)
    everything = torch.cat(lists)
    assert everything.unique().numel() == everything.numel() and everything.min() >= 0 and everything.max() < 1024
    assert everything.dtype == torch.int32 and torch.equal(torch.cat(tensors.lists_of(workload)), everything)


def test_a_row_is_never_twice_in_a_list_of_a_prefill(on_cpu):
    (lists,) = tensors.lists_of(small(tokens=64))
    assert len(lists) == 64 and all(len(each.unique()) == 100 for each in lists)
    assert lists.view(-1).bincount(minlength=1024).max() <= 7 and len({tuple(each.tolist()) for each in lists}) == 64


def test_of_a_real_run_together_they_exceed_the_l2_cache():
    for workload in read_grids(["sparse"]).workloads:
        assert tensors.copies_of(workload) * workload.kv_bytes >= 400e6
    assert tensors.copies_of(decode(4096, context=65536)) == 1


def test_fp8_rows_stand_for_what_they_were_made_of():
    made_of = torch.randn(50, 576, dtype=torch.bfloat16)
    packed = tensors.fp8_rows(made_of)
    assert packed.dtype == torch.uint8 and packed.shape == (50, 656)
    back = what_rows_stand_for(packed, torch.float64)
    assert torch.equal(back[:, 512:], made_of[:, 512:].double()), "rope is not rounded"
    latent, groups = (rows[:, :512].double().view(50, 4, 128) for rows in (back, made_of))
    error, largest = (latent - groups).abs(), groups.abs().amax(dim=-1, keepdim=True)
    assert (error <= groups.abs() / 16 + largest / 448 / 1024).all() and error.max() > 0


# Kernels


def bench_of(workload: SparseWorkload, of: providers.Kernels) -> measure.Bench:
    pool = tensors.pool_of((workload,))
    return measure.Bench(workload, pool.inputs(workload, 8), pool, of, measure.Options())


def graphs_of(row: measure.Bench) -> dict:
    """What a graph of two calls would hold, without one."""
    graphs = {}
    for name in row.kernels.of(row.workload):
        call, copies = row.prepared(name)
        graphs[name] = SimpleNamespace(calls=2, result=call(*copies[1 % len(copies)]).clone())
    return graphs


@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_our_kernel_gets_its_cache_and_the_truth_of_it(kv_dtype, on_cpu):
    row = bench_of(small(kv_dtype=kv_dtype), providers.ours(providers.installed()))
    _, copies = row.prepared("etap")
    assert {cache.dtype for cache, _ in copies} == {torch.uint8 if kv_dtype == "fp8" else torch.bfloat16}
    graphs = graphs_of(row)
    assert list(graphs) == ["etap"] and row.errors(graphs)["etap"] <= LARGEST_RMSE["bfloat16"]
    call, (first, *_) = row.prepared("etap")
    graphs["etap"].result = call(*first)
    assert row.errors(graphs)["etap"] > 0.5, "the lists of another call go unseen"


def test_kernels_are_those_of_the_rows_cache():
    found = providers.installed()
    assert list(found.of(small())) == ["etap", "FlashMLA", "FlashMLA alone", "FA3"]
    assert list(found.of(small(kv_dtype="fp8"))) == ["etap", "FlashMLA", "FlashMLA alone"]


PEERS = """
from etap_backend.reference import sparse_mla_decode_reference

def prepare(inputs):
    def call(cache, indices):
        return sparse_mla_decode_reference(inputs.q, cache, indices, inputs.softmax_scale)[0].bfloat16()
    return call

SPARSE_PEERS = {"TileLang": prepare}
VERSIONS = {"TileLang": "0.1"}
"""


def test_peers_of_a_file_stand_beside_ours(tmp_path, on_cpu):
    path = tmp_path / "mine.py"
    path.write_text(PEERS)
    found = providers.with_file(providers.ours(providers.installed()), path)
    kinds = found.of_kinds
    assert list(kinds["sparse"]) == ["etap", "TileLang"]
    assert list(kinds["sparse_fp8"]) == list(kinds["plain"]) == ["etap"]
    row = bench_of(small(), found)
    errors = row.errors(graphs_of(row))
    assert 0 < errors["TileLang"] < errors["etap"] < LARGEST_RMSE["bfloat16"]


def test_a_build_of_before_the_sparse_call_has_no_rows_of_it():
    new, old = SimpleNamespace(etap=print, etap_sparse=print), SimpleNamespace(etap=print)
    found = providers.of_libraries({"new": new, "old": old}).of_kinds
    assert list(found["plain"]) == ["new", "old"] and list(found["sparse"]) == list(found["sparse_fp8"]) == ["new"]


# Results files, tables, plots


def test_a_results_file_is_read_as_what_it_is(document, tmp_path):
    path = tmp_path / "sparse.json"
    results.write(rows.dumped(document), path)
    again = rows.read(path)
    assert again == document and type(again) is SparseDocument and type(again.rows[0]) is SparseRow
    results.write(rows.dumped(again), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    with pytest.raises(ValueError, match="sparse.json: wanted a results file of kind 'bench', got 'bench-sparse'"):
        results.read(path, Document)  # what estimates of dense models read


def test_a_table_tells_fp8_rows_from_bf16_ones(document):
    text = report.markdown(document)
    header, _, first, *_ = text.splitlines()
    assert header.startswith("| tokens x keys | heads | cache | floor | **etap** | TFLOP/s | FlashMLA | FA3 |")
    assert first.startswith("| 1 x 2K | 16 | FP8 | 3.1 | **8.3** |") and first.endswith("| 19.0 | - | 2.28 | - |")
    assert "| 128 x 2K | 16 | bf16 | 70.4 | **72.0** |" in text and "| 16 x 2K | 64 | FP8 |" in text
    assert "gathered bytes" in text and "`etap bench sparse`" in text
    some = report.markdown(document, ("16 x 2K",))
    assert "| 16 x 2K | 16 | bf16 |" in some
    assert "16 heads, FP8 rows or 64 heads, FP8 rows or 16 heads, bf16 rows. NVIDIA H200" in some
    assert "refused: 64 heads are not padded" in report.text(document)


def test_wrong_results_of_ours_are_found(document):
    first, *others = document.rows
    wrong = {**first.results, "etap": first.results["etap"].model_copy(update={"relative_rmse": 0.1})}
    made = document.model_copy(update={"rows": [first.model_copy(update={"results": wrong}), *others]})
    assert problems(document) == [] and len(problems(made)) == 1


def test_plots_have_a_panel_for_each_cache_over_the_tokens(document, tmp_path):
    figure = plots.latency(document, plots.series_of(document))
    bf16, fp8 = figure.axes
    assert bf16.get_title() == "16 heads, bf16 rows, top-k 2048" and fp8.get_title() == "16 heads, FP8 rows, top-k 2048"
    lines = {line.get_label(): line.get_xydata().tolist() for line in fp8.lines}
    assert lines["etap"] == [[n, n / 3 + 8] for n in (1, 16, 128)] and set(lines) == {"etap", "FlashMLA", "floor"}
    assert fp8.get_xlabel() == "query tokens"
    for kind in plots.KINDS:
        assert plots.plot(document, kind, tmp_path / "sparse.png").read_bytes().startswith(b"\x89PNG")


# A run


@pytest.fixture
def an_h200(monkeypatch, on_cpu):
    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: chip)
    hosts = lambda *of, plans: {name: measure.timing_of([9.0] * 3) for name in of[3]}  # noqa: E731
    monkeypatch.setattr(measure, "measure_hosts", hosts)
    monkeypatch.setattr(measure, "measure", lambda workload, *_: a_row(workload, etap=10.0))


def test_a_run_writes_a_file_of_the_sparse_call(tmp_path, an_h200):
    path = tmp_path / "grid.toml"
    path.write_text("[[sparse]]\ntokens = [1, 2]\ntop_k = 100\ncontext = 1024\nkv_dtype = ['fp8', 'same']")
    made, of, settings = read_grid(path), providers.ours(providers.installed()), measure.Options()
    header = run.header(made, [], of, settings, [], None)
    assert type(header) is SparseDocument and header.floor.fp8_bandwidth == H200_GATHER_FLOOR.fp8_bandwidth
    whole = run.run(header, made.workloads, of, settings, tmp_path / "r.json", lambda _: None)
    assert whole.complete and len(whole.rows) == 4
    assert whole.schedule_build is None and list(whole.host_calls) == ["etap"]
    assert rows.read(tmp_path / "r.json") == whole


def run_command(*arguments: str):
    app = typer.Typer(add_completion=False)
    app.command()(bench)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_without_a_gpu_the_command_refuses():
    refusals = {("sparse", "sparse-prefill"): "no CUDA device", ("sparse", "heads"): "grids: wanted all of"}
    for arguments, words in refusals.items():
        result = run_command(*arguments)
        assert result.exit_code == 2 and words in result.stderr


@pytest.mark.gpu
def test_a_short_run_writes_right_results(tmp_path):
    path, output = tmp_path / "grid.toml", tmp_path / "results.json"
    path.write_text(
        "[[sparse]]\nkv_dtype = ['fp8', 'same']\nheads = [16, 64]\ntokens = [1, 64]\ncontext = 2097152\n"
        "[[sparse]]\ntokens = [512]\ncontext = 65536"
    )
    result = run_command(str(path), "--replays", "3", "--output", str(output))
    assert result.exit_code == 0, result.output
    made = rows.read(output)
    assert made.complete and len(made.rows) == 9 and made.host_calls["etap"].us > 0
    for row in made.rows:
        assert 0 < row.timing("etap").relative_rmse < LARGEST_RMSE["bfloat16"]
        if row.floor_us and row.tokens <= row.context:
            assert row.us("etap") > 0.9 * row.floor_us, "faster than the memory: the L2 cache served the calls"
