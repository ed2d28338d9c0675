"""`etap bench` on the drop-ins, without its clock: their calls in the executor, beside originals of the same calls.
On a GPU also a short run of the whole."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import typer
from bench.tests.bench_documents import document_of
from typer.testing import CliRunner

from etap_backend.compat import flash_attn_interface, flash_mla
from bench.common import configs, results, tables
from bench.kernels import measure, peers, providers, report, run, tensors
from bench.kernels.command import bench, chosen, kernels_of
from bench.kernels.floors import H200_FLOOR
from bench.kernels.grids import SparseWorkload, Workload, read_grid, read_grids
from bench.kernels.kernels import Planned
from bench.kernels.rows import (
    AS_FA3,
    AS_FLASHINFER,
    AS_FLASHMLA,
    DROP_INS,
    FP8_MATH_RMSE,
    LARGEST_RMSE,
    Document,
    Measured,
    Refused,
    Row,
    dumped,
    problems,
    row_of,
)
from bench.common.results import Place

WORKLOADS = {
    "plain": Workload((100, 333), heads=4),
    "drafts": Workload((100, 333), heads=24, s_q=2),
    "fp8": Workload((100, 333), heads=4, kv_dtype="fp8"),
    "sparse_fp8": SparseWorkload((100,) * 3, heads=4, kv_dtype="fp8", context=1024),
}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "ROTATED_BYTES", 4e5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def bench_of(workload: Workload, num_sms: int | None = None) -> measure.Bench:
    pool = tensors.pool_of((workload,))
    return measure.Bench(workload, pool.inputs(workload, num_sms), pool, own(), measure.Options())


def own() -> providers.Kernels:
    return providers.of_drop_ins().chosen(list(DROP_INS))


# What is run


def test_each_drop_in_stands_before_what_it_stands_in_for():
    found = providers.of_drop_ins()
    pairs = [name for pair in DROP_INS.items() for name in pair]
    kinds = found.of_kinds
    assert [list(kinds[kind]) for kind in ("plain", "fp8", "sparse_fp8")] == [pairs, pairs[:4], pairs[:2]]
    assert not kinds["sparse"] and all(kinds["plain"][name].package for name in DROP_INS.values())
    assert all(each[name].there for each in found.of_kinds.values() for name in each if name in DROP_INS)


@pytest.mark.parametrize("name, rows", [("drop-ins", 35), ("drop-ins-fp8", 20), ("drop-ins-sparse", 20)])
def test_the_grids_have_few_heads_and_many(name, rows):
    made = read_grid(configs.find("bench", name))
    assert made.calls == "drop-ins" and len(made.workloads) == rows
    assert {workload.heads for workload in made.workloads} == {8, 16, 32, 64, 128}
    assert all(providers.of_drop_ins().of(workload) for workload in made.workloads)
    assert made.within(1e12)[0] == made


def test_grids_of_drop_ins_are_run_together_and_not_with_others():
    assert read_grids(["drop-ins", "drop-ins-fp8"]).calls == "drop-ins"
    with pytest.raises(ValueError, match="grids: wanted all of drop-ins or none, got targets, drop-ins"):
        read_grids(["targets", "drop-ins"])


def test_the_proxy_has_the_drop_ins_and_the_peers_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ETAP_LIBRARY", "throttled.so")
    path = tmp_path / "mine.py"
    path.write_text("PEERS = {'FlashMLA': print}")
    found = kernels_of([], path, True, tmp_path, drop_ins=True)
    plain = found.of_kinds["plain"]
    assert list(plain) == [*DROP_INS, "FlashMLA"] and plain["FlashMLA"].there
    assert chosen(found, read_grids(["drop-ins"]), [], []).of_kinds["plain"] == plain
    path.write_text(f"PEERS = {{'{AS_FA3}': print}}")
    with pytest.raises(ValueError, match=f"--peers: wanted other columns than .*, got {AS_FA3}"):
        kernels_of([], path, True, tmp_path, drop_ins=True)
    with pytest.raises(ValueError, match="--library: wanted without a grid of drop-ins"):
        kernels_of([None], None, False, tmp_path, drop_ins=True)


# What their calls give


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_drop_in_is_called_and_right(name, on_cpu):
    row = bench_of(WORKLOADS[name])
    for column in row.kernels.of(row.workload):
        call, copies = row.prepared(column)
        assert isinstance(call, Planned)
        truth = row.pool.truth(row.pool.with_cache(row.inputs, row.cache_dtype(column)), copies[-1])
        call.plan()
        for _ in range(2):
            error = (call(*copies[-1]).double().view(truth.shape) - truth).norm() / truth.norm()
            rounded = name == "fp8" and column == AS_FLASHMLA  # its queries
            assert (1e-2 < error < FP8_MATH_RMSE) if rounded else error < LARGEST_RMSE["bfloat16"]


@pytest.mark.parametrize("name", ["plain", "sparse_fp8"])
def test_flashmlas_drop_in_plans_for_the_proxys_multiprocessors(name, on_cpu, monkeypatch):
    asked = []
    decode = flash_mla.flash_mla_with_kvcache

    def seen(**given):
        metadata = given["tile_scheduler_metadata"]
        asked.append(flash_mla.sparse_mla_decode.__globals__["device_sms"](torch.device("cpu")))
        asked.append(None if metadata.tile_scheduler_metadata is None else len(metadata.tile_scheduler_metadata))
        return decode(**given)

    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", seen)
    row = bench_of(WORKLOADS[name], num_sms=5)
    call, copies = row.prepared(AS_FLASHMLA)
    truth = row.pool.truth(row.pool.with_cache(row.inputs, row.cache_dtype(AS_FLASHMLA)), copies[0])
    assert (call(*copies[0]).double().view(truth.shape) - truth).norm() < LARGEST_RMSE["bfloat16"] * truth.norm()
    assert (asked[1] if name == "plain" else asked[0]) == 5


def test_flashmlas_drop_in_takes_rows_as_the_proxys_plan_has_them(on_cpu, monkeypatch):
    """64 rows of two requests are four groups of 16 there, and one tile on all multiprocessors of the GPU beside it."""
    launched, decode = [], flash_mla.mla_decode
    monkeypatch.setattr(
        flash_mla, "mla_decode", lambda *given, **more: launched.append(given[4]) or decode(*given, **more)
    )
    monkeypatch.setattr(flash_mla, "sms_of", lambda device: 132)
    call, copies = bench_of(Workload((100, 333), heads=32, s_q=2), num_sms=9).prepared(AS_FLASHMLA)
    call(*copies[0])
    assert [(schedule.partitions, schedule.row_tile) for schedule in launched] == [(2, 16)]


@pytest.mark.parametrize("name, columns", [("plain", [AS_FLASHINFER, AS_FA3]), ("fp8", [AS_FLASHMLA, AS_FLASHINFER])])
def test_the_others_refuse_to_be_timed_on_fewer_multiprocessors(name, columns, on_cpu):
    row = bench_of(WORKLOADS[name], num_sms=5)
    for column in columns:
        with pytest.raises(NotImplementedError, match="plans for all multiprocessors"):
            row.prepared(column)


def test_the_originals_are_given_the_same_words(monkeypatch, on_cpu):
    """Each original's module is one that writes down what it was asked, and answers with ETAP."""
    asked = []

    def writing(answers: ModuleType, *names: str) -> ModuleType:
        def call(name: str):
            def answer(*arguments, **given):
                asked.append((name, len(arguments), sorted(given)))
                return getattr(answers, name)(*arguments, **given)

            return answer

        module = ModuleType("original")
        for name in names:
            setattr(module, name, call(name))
        return module

    modules = {
        peers.FLASHMLA: writing(flash_mla, "get_mla_metadata", "flash_mla_with_kvcache"),
        peers.FA3: writing(flash_attn_interface, "get_scheduler_metadata", "flash_attn_varlen_func"),
        flash_mla.__name__: writing(flash_mla, "get_mla_metadata", "flash_mla_with_kvcache"),
        flash_attn_interface.__name__: writing(
            flash_attn_interface, "get_scheduler_metadata", "flash_attn_varlen_func"
        ),
    }
    monkeypatch.setattr(peers.importlib, "import_module", modules.get)
    row = bench_of(WORKLOADS["plain"])
    for column in (AS_FLASHMLA, AS_FA3):
        words = []
        for name in (column, DROP_INS[column]):
            asked.clear()
            prepare = providers.of_drop_ins().of_kinds["plain"][name].prepare
            prepare(row.inputs)(*row.pool.copies(row.workload, torch.bfloat16)[0])
            words.append([one for one in asked if one[0] != "get_mla_metadata"])
        assert words[0] == words[1] and len(words[0]) == (1 if column == AS_FLASHMLA else 2)


def test_host_times_are_of_what_can_be_called_with_and_without_a_plan(on_cpu, monkeypatch):
    row = bench_of(WORKLOADS["plain"])
    plain = [*row.kernels.of_kinds["plain"].values(), providers.of_drop_ins().of_kinds["plain"]["FA3"]]
    kernels = providers.Kernels.listed(plain=plain)
    monkeypatch.setattr(measure, "HOST_CALLS", 2)
    names = list(kernels.of(row.workload))
    found = measure.measure_hosts(row.workload, row.pool, kernels, names, row.settings, plans=True)
    assert list(found) == [text for name in DROP_INS for text in (name, f"{name} with its plan")]
    assert all(timing.us > 0 and timing.replays == measure.HOST_TURNS for timing in found.values())


def test_a_run_measures_the_hosts_of_drop_ins(monkeypatch):
    workload = WORKLOADS["plain"]
    monkeypatch.setattr(measure, "measure_hosts", lambda first, *rest, plans: {"of": first, "plans": plans})
    assert run._once(None, workload, None, own(), measure.Options()) == {"host_calls": {"of": workload, "plans": True}}
    assert run._once(None, workload, None, own(), measure.Options(h20_proxy=True)) == {}


# What is said of them


def a_row(heads: int, requests: int = 16, kv_dtype: str = "same", rmse: float = 1.7e-3, **times: float) -> Row:
    shape = Workload((4096,) * requests, heads=heads, kv_dtype=kv_dtype).shape
    names = {**{name: name for name in DROP_INS.values()}, "mla": AS_FLASHMLA, "infer": AS_FLASHINFER, "fa3": AS_FA3}
    found = {names[name]: Measured(us=us, iqr_us=0.1, replays=21, relative_rmse=rmse) for name, us in times.items()}
    return row_of(shape, calls=16, rotated_bytes=0, floor_us=10.0, results=found)


@pytest.fixture
def document() -> Document:
    timing = {"iqr_us": 1.0, "replays": 9}
    return document_of(
        "drop-ins",
        title="Drop-ins",
        floor=H200_FLOOR.said(fp8=True),
        host_calls={
            AS_FLASHMLA: {"us": 20.0, **timing},
            f"{AS_FLASHMLA} with its plan": {"us": 55.0, **timing},
            "FlashMLA": {"us": 30.0, **timing},
        },
        rows=[
            a_row(16, mla=20.0, FlashMLA=40.0, infer=21.0, FlashInfer=30.0, fa3=21.0, FA3=25.2),
            a_row(8, mla=20.0, FlashMLA=30.0, infer=20.0, FlashInfer=22.0, fa3=20.0, FA3=24.0),
            a_row(128, mla=50.0, FlashMLA=60.0, infer=50.0, FlashInfer=47.5, fa3=50.0, FA3=50.0),
            a_row(16, kv_dtype="fp8", mla=18.0, FlashMLA=24.0, infer=18.5, FlashInfer=60.0),
        ],
    )


def test_the_table_has_each_drop_in_beside_its_original(document):
    header, _, first, *_ = report.markdown(document).splitlines()
    assert header == (
        "| requests x tokens | heads | s_q | cache | floor | **compat.flash_mla** | TFLOP/s | FlashMLA "
        "| compat.flashinfer | FlashInfer | compat.flash_attn_interface | FA3 | FlashMLA / compat.flash_mla "
        "| FlashInfer / compat.flashinfer | FA3 / compat.flash_attn_interface |"
    )
    assert first.startswith("| 16 x 4K | 16 | 1 | bf16 | 10.0 | **20.0** |")
    assert first.endswith("| 40.0 | 21.0 | 30.0 | 21.0 | 25.2 | 2.00 | 1.43 | 1.20 |")


def test_below_it_stands_how_they_compare_and_what_calls_take_of_the_host(document):
    lines = report.markdown(document).splitlines()
    few = "FlashMLA / compat.flash_mla, up to 32 heads, 3 shapes: 1.33 to 2.00, median 1.50; below 0.98 at none."
    assert few in lines
    (infer,) = (line for line in lines if line.startswith("FlashInfer / compat.flashinfer, more than 32"))
    assert infer.endswith("1 shapes: 0.95 to 0.95, median 0.95; below 0.98 at 1, 16 x 4K, 128 heads, s_q 1 (0.95).")
    assert (
        "Host time of one call of 16 x 4K, 16 heads, s_q 1: FlashMLA 30.0 us; compat.flash_mla 20.0 us, 55.0 with its "
        "plan."
    ) in lines
    text = report.text(document)
    assert infer in text and "host, one call of compat.flash_mla with its plan: 55.0" in text


def test_a_pages_place_has_the_comparison_with_each_library(document, tmp_path):
    place = Place("ratios", "drop-ins", (), "", may_lack=True)
    assert tables.table(place, tmp_path) == tables.NOT_YET
    results.write(dumped(document), tmp_path / "drop-ins.json")
    lines = tables.table(place, tmp_path).splitlines()
    said = "- FA3 / compat.flash_attn_interface, up to 32 heads, 2 shapes: 1.20 to 1.20"
    assert any(line.startswith(said) for line in lines) and lines[-1] == "NVIDIA H200, commit abc1234."
    with pytest.raises(ValueError, match="rows: wanted a comparison, got no times"):
        report.ratios(document.model_copy(update={"rows": []}))


def test_without_the_originals_nothing_is_compared(document):
    rows = [
        row.model_copy(update={"results": {**row.results, "FlashMLA": Refused(reason="no")}}) for row in document.rows
    ]
    assert AS_FLASHMLA not in document.model_copy(update={"rows": rows}).drop_ins
    assert document.own == list(DROP_INS) and document.peers == list(DROP_INS.values())


def test_wrong_drop_ins_are_found_and_rounded_queries_are_none(document):
    assert problems(document) == []
    fp8 = document.model_copy(update={"rows": [a_row(16, kv_dtype="fp8", rmse=3e-2, mla=1.0, infer=1.0)]})
    (wrong,) = problems(fp8)
    assert AS_FLASHINFER in wrong and "wanted at most 5.0e-03" in wrong
    sparse = SparseWorkload((2048,), heads=16, kv_dtype="fp8", context=4096).shape
    timing = Measured(us=1.0, iqr_us=0.1, replays=2, relative_rmse=3e-2)
    row = row_of(sparse, calls=4, rotated_bytes=0, floor_us=None, results={AS_FLASHMLA: timing})
    assert len(problems(document.model_copy(update={"rows": [row]}))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows", ["[[rows]]\nshapes = [[4, 1024]]", "[[sparse]]\nkv_dtype=['fp8']\ntokens=[3]\ncontext=4096"]
)
def test_a_short_run_writes_right_results(tmp_path, rows):
    path, output = tmp_path / "grid.toml", tmp_path / "results.json"
    path.write_text(f'calls = "drop-ins"\n{rows}')
    app = typer.Typer(add_completion=False)
    app.command()(bench)
    only = [word for name in (DROP_INS if "rows" in rows else [AS_FLASHMLA]) for word in ("--only", name)]
    result = CliRunner().invoke(app, [str(path), *only, "--replays", "3", "--output", str(output)])
    assert result.exit_code == 0, result.output
    made = results.read_json(output)
    assert made["complete"] and made["host_calls"][f"{AS_FLASHMLA} with its plan"]["us"] > 0
    assert all(one["state"] == "measured" for row in made["rows"] for one in row["results"].values())
