"""FlashMLA's calls on ETAP against float64: FlashMLA's data, mask and limits."""

from __future__ import annotations

import importlib
import math
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from drop_ins import (
    FP8,
    KINDS,
    KV_SCALE,
    Q_SCALE,
    Drawn,
    both_devices,
    check_traced,
    check_traces,
    draw,
    refused,
    traced_gpu,
)
from drop_ins import check as check_drawn
from torch._subclasses.fake_tensor import FakeTensorMode

from etap_backend.compat import _capture, flash_mla, plan, whole_rows
from etap_backend.compat._capture import capture_id
from etap_backend.schedule import decode_shape, sms_of
from support import sparse_compare
from support.cases import SOFTMAX_SCALE
from support.sparse_cases import SparseCase
from support.sparse_cases import build as build_sparse

META = flash_mla.FlashMLASchedMeta
CAPTURED = "in a capture"
LOADED = ("q", "k_cache", "block_table", "cache_seqlens")


@dataclass
class Dense:
    """A dense call's arguments."""

    drawn: Drawn
    call: dict

    def run(self, **more) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, splits = flash_mla.get_mla_metadata()
        plan = {"tile_scheduler_metadata": metadata, "num_splits": splits}
        return flash_mla.flash_mla_with_kvcache(**self.call | plan | more)

    def check(self, results, causal=False) -> None:
        """FlashMLA's layouts and strides, +inf where a query sees nothing, and the reference."""
        out, lse = results
        assert out.shape == (*self.call["q"].shape[:3], 512) and out.is_contiguous()
        assert lse.transpose(1, 2).shape == out.shape[:3] and lse.transpose(1, 2).is_contiguous()
        assert not lse.isneginf().any()
        lse = lse.masked_fill(lse.isposinf(), -torch.inf).transpose(1, 2)
        check_drawn(out.flatten(0, 1), lse.flatten(0, 1), self.drawn.truth(causal), self.call["q"].dtype)


def dense(lengths, h_q=16, h_k=1, s_q=1, kind="bf16", device="cpu", **more) -> Dense:
    drawn = draw(lengths, s_q, h_q, kv_heads=h_k, kind=kind, device=device, **more)
    dtype, kv_dtype = KINDS[kind]
    call = {
        "q": drawn.q.unflatten(0, (len(lengths), s_q)),
        "k_cache": drawn.rows,
        "block_table": drawn.table,
        "cache_seqlens": drawn.lengths,
        "head_dim_v": 512,
        "descale_q": torch.tensor([Q_SCALE], device=device) if dtype == FP8 else None,
        "descale_k": torch.tensor([KV_SCALE], device=device) if kv_dtype == FP8 else None,
    }
    return Dense(drawn, call)


@both_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q, h_k, s_q", [(1, 1, 1), (128, 1, 2), (63, 1, 4), (64, 8, 1), (9, 3, 2), (126, 2, 4)])
def test_dense_is_as_flashmla_defines_it(device, h_q, h_k, s_q, causal, kind):
    problem = dense((140, 0, 1, 64, 3, 300), h_q, h_k, s_q, kind, device)
    problem.check(problem.run(causal=causal), causal)


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q, h_k", [(16, 1), (6, 3), (128, 1)])
def test_two_tensors_in_place_of_the_object(device, h_q, h_k, causal):
    problem = dense((700, 65, 0), h_q, h_k, 2, device=device)
    lengths = problem.call["cache_seqlens"]
    ranges, splits = flash_mla.get_mla_decoding_metadata(lengths, 2 * h_q // h_k, h_k)
    assert ranges.dtype == splits.dtype == torch.int32 and ranges.shape[1] == 8 and splits.shape == (4,)
    assigned = META(tile_scheduler_metadata=ranges, num_splits=splits)
    given = {"tile_scheduler_metadata": ranges.clone(), "num_splits": splits.clone()}
    results = [problem.run(causal=causal, **more) for more in (given, {"tile_scheduler_metadata": assigned})]
    assert all(map(torch.equal, *results)) and assigned.tile_scheduler_metadata is ranges
    problem.check(results[0], causal)
    for rows in 16, 128:  # a plan for other rows divides the work otherwise
        ranges, splits = flash_mla.get_mla_decoding_metadata(lengths, rows, 1)
        problem.check(problem.run(causal=causal, tile_scheduler_metadata=ranges, num_splits=splits), causal)


@pytest.mark.parametrize("rows", [16, 48, 64])
def test_two_tensors_have_one_shape_for_all_batches_and_caches(rows):
    """Programs keep them in buffers that serve CUDA graphs of every batch."""
    lengths = torch.full((20,), 100, dtype=torch.int32)
    batches = [flash_mla.get_mla_decoding_metadata(lengths[:b], rows, 1, is_fp8_kvcache=b > 1)[0] for b in (1, 9, 20)]
    assert len({len(ranges) for ranges in batches}) == 1


@both_devices
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_call_plans_in_the_rows_that_suit_it(device, kind):
    """GPUs with few multiprocessors take 17 to 64 rows in smaller tiles; a plan in two tensors cannot."""
    problem, metadata = dense((700, 65, 0), 32, s_q=2, kind=kind, device=device), META()
    shape = decode_shape(64, num_sms := sms_of(problem.drawn.q.device), 3, kind == "fp8")
    assert (shape.row_tile == 16) == (num_sms < 100)
    for _ in range(2):  # the second call reads the plan of the first
        problem.check(problem.run(causal=True, tile_scheduler_metadata=metadata), True)
        assert (metadata.row_tile, len(metadata.num_splits)) == (shape.row_tile, 4)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_no_requests_and_no_query_tokens(kind):
    problem = dense((65, 1), kind=kind)
    none = {name: problem.call[name][:0] for name in ("q", "block_table", "cache_seqlens")}
    plan = dict(zip(PLAN, flash_mla.get_mla_decoding_metadata(none["cache_seqlens"], 16, 1), strict=True))
    for shape, more in ((0, 1), none), ((0, 1), none | plan), ((2, 0), {"q": problem.call["q"][:, :0]}):
        out, lse = problem.run(**more)
        assert out.shape == (*shape, 16, 512) and lse.shape == (shape[0], 16, shape[1])
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


@both_devices
def test_one_plan_serves_the_layers_of_a_step_and_is_right_for_other_lengths(device):
    problems = [dense((300, 65, 1), seed=seed, device=device) for seed in (0, 1)]
    problems.append(dense((64, 900, 0), device=device))
    metadata, _ = flash_mla.get_mla_metadata()
    for problem in problems:
        problem.check(problem.run(tile_scheduler_metadata=metadata))
    assert metadata.config.b == 3 and metadata.config.h_k == 1 and metadata.config.topk is None
    assert metadata.tile_scheduler_metadata.shape[1] == 8 and metadata.num_splits.shape == (4,)


def test_a_plan_for_other_shapes_is_refused_by_name_and_a_refused_call_leaves_it_empty():
    problem, metadata = dense((300, 65)), flash_mla.get_mla_metadata()[0]
    with refused(ValueError, "block_table"):
        problem.run(tile_scheduler_metadata=metadata, block_table=problem.call["block_table"][:1])
    assert (metadata.have_initialized, metadata.config, metadata.tile_scheduler_metadata) == (False, None, None)
    problem.run(tile_scheduler_metadata=metadata)
    for other, name in (dense((300, 65), h_q=8), "h_q"), (dense((300,)), "b"), (dense((300, 65), s_q=2), "s_q"):
        with pytest.raises(ValueError, match=f"^tile_scheduler_metadata: wanted a plan for {name} "):
            other.run(tile_scheduler_metadata=metadata)
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: wanted a plan for causal True, got one for False"):
        problem.run(tile_scheduler_metadata=metadata, causal=True)


@both_devices
@pytest.mark.parametrize("h_q, h_k", [(16, 1), (6, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_outputs(device, causal, h_q, h_k):
    problem = dense((300, 0, 65), h_q, h_k, 2, device=device)
    wanted = problem.run(causal=causal)
    buffer = torch.full((5, 2, h_q, 512), torch.nan, dtype=torch.bfloat16, device=device)
    out, lse = problem.run(causal=causal, out=buffer[1:4])
    assert out.data_ptr() == buffer[1:4].data_ptr() and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert buffer[[0, 4]].isnan().all()
    for wrong in buffer[1:4].transpose(1, 2), buffer[1:4].to(torch.float16):
        with refused(ValueError, "out"):
            problem.run(causal=causal, out=wrong)


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q, h_k", [(16, 1), (6, 3)])
def test_lengths_alone_bound_the_columns_that_are_read(device, h_q, h_k, causal):
    problem = dense((300, 0, 65), h_q, h_k, 2, device=device)
    problem.check(problem.run(causal=causal, block_table=problem.call["block_table"][:, :1]), causal)


def test_rows_of_a_view_end_with_the_next_row_or_the_storage():
    table = torch.arange(64, dtype=torch.int32).view(2, 32)
    views = {(2, 32): table[:, :1], (1, 32): table[:1, :2], (2, 27): table[:, 5:7], (1, 2): table[1:, 30:31]}
    views |= {(2, 26): table.flatten()[:58].clone().as_strided((2, 3), (32, 1))}
    for shape, view in views.items():
        whole = whole_rows(view)
        assert whole.shape == shape and torch.equal(whole[:, : view.shape[1]], view)
        assert whole.data_ptr() == view.data_ptr() and whole[-1, -1] == whole[-1, 0] + shape[1] - 1
    for view in table, table[:, ::2][:, :1], table.T[:, :1], table[:1].expand(3, 32), table[:0, :1]:
        assert whole_rows(view).shape == (view.shape if len(view) else (0, 32))
    assert whole_rows(FakeTensorMode().from_tensor(table)[:, :1]).shape == (2, 1)


@both_devices
@pytest.mark.parametrize("h_q, h_k", [(8, 1), (6, 3)])
def test_batch_invariant_bits_do_not_depend_on_the_batch(device, h_q, h_k):
    lengths = {"cpu": (2000, *[65] * 11), "cuda": (5000, *[2000] * 11)}[device]
    problem = dense(lengths, h_q, h_k, device=device)

    def first(requests: int, **more) -> list[torch.Tensor]:
        names = "q", "block_table", "cache_seqlens"
        results = problem.run(**{name: problem.call[name][:requests] for name in names}, **more)
        return [one[0] for one in results]

    alone, beside = (first(requests, enable_batch_invariant=True) for requests in (1, 12))
    assert all(map(torch.equal, alone, beside))
    assert not torch.equal(first(1)[0], first(12)[0]), "without it they do"
    problem.check(problem.run(enable_batch_invariant=True))


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 16, 64, 65, 120])
def test_a_batch_invariant_plan_splits_nothing_whatever_its_rows(rows, fp8_cache):
    lengths = torch.tensor([100_000, 5], dtype=torch.int32)
    options = {"device": lengths.device, "fp8_cache": fp8_cache}
    planned = plan(lengths, 2, rows, batch_invariant=True, **options)
    assert planned.split_offsets[:3].tolist() == [0, 0, 0]
    split = plan(lengths, 2, rows, batch_invariant=False, **options)
    assert (split.split_offsets[1] > 1) == (split.partitions > 1)  # five row groups leave one partition
    assert (split.partitions > 1) == (rows != 65)


@both_devices
@pytest.mark.parametrize("page_size", [1, 16, 53, 64, 128, 192])
def test_pages_of_any_size(device, page_size):
    problem = dense((page_size, 300, 1), s_q=2, page_size=page_size, device=device)
    problem.check(problem.run(causal=True), True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["object filled in the graph", "object filled before", "tensors copied into buffers"])
@pytest.mark.parametrize("h_q, h_k, s_q, causal", [(16, 1, 1, False), (16, 1, 2, True), (16, 2, 2, False)])
def test_a_graph_serves_other_lengths(h_q, h_k, s_q, causal, form):
    shape = {"h_q": h_q, "h_k": h_k, "s_q": s_q, "device": "cuda", "pages": 100}
    problems = [dense(lengths, seed=9, **shape) for lengths in ((700, 5000, 1), (64, 0, 6000), (2, 65, 3))]
    call = {name: one.clone() if name in LOADED else one for name, one in problems[0].call.items()}
    static = Dense(problems[0].drawn, call)
    rows = s_q * h_q // h_k
    metadata, splits = flash_mla.get_mla_metadata()
    if form == "tensors copied into buffers":
        metadata, splits = flash_mla.get_mla_decoding_metadata(static.call["cache_seqlens"], rows, h_k)
    plan = {"tile_scheduler_metadata": metadata, "num_splits": splits, "causal": causal}
    # Once before, as engines do, so that nothing is loaded while recording.
    static.run(**plan | ({"tile_scheduler_metadata": flash_mla.get_mla_metadata()[0]} if "in the" in form else {}))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [static.run(**plan) for _ in range(3)]
    for problem in [*problems, *problems[::-1]]:
        for name in LOADED:
            static.call[name].copy_(problem.call[name])
        if splits is not None:
            made = flash_mla.get_mla_decoding_metadata(static.call["cache_seqlens"], rows, h_k)
            for buffer, one in zip((metadata, splits), made, strict=True):
                buffer.copy_(one)
        graph.replay()
        for layer in layers:
            problem.check(layer, causal)


@pytest.mark.gpu
def test_a_graph_of_one_column_of_a_table_serves_longer_contexts():
    problem = dense((700, 5000, 1), device="cuda", pages=100)
    lengths = problem.call["cache_seqlens"].clone()
    narrow = {"block_table": problem.call["block_table"][:, :1]}
    problem.run()  # so that nothing is loaded while recording
    problem.call["cache_seqlens"].fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = problem.run(**narrow)
    problem.call["cache_seqlens"].copy_(lengths)
    graph.replay()
    problem.check(results)


@pytest.mark.gpu
@pytest.mark.parametrize("h_q, h_k, s_q, causal", [(16, 1, 1, False), (16, 1, 2, True), (16, 2, 2, False)])
def test_a_plan_that_a_capture_made_serves_no_call_outside_of_it(h_q, h_k, s_q, causal):
    problem = dense((700, 5000, 1), h_q, h_k, s_q, device="cuda", pages=100)
    problem.run(causal=causal)  # so that nothing is loaded while recording
    metadata, plans, graphs, results = flash_mla.get_mla_metadata()[0], [], [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            layers = [problem.run(causal=causal, tile_scheduler_metadata=metadata)]
            plans.append((metadata.tile_scheduler_metadata, metadata.capture))
            layers.append(problem.run(causal=causal, tile_scheduler_metadata=metadata))
            assert metadata.tile_scheduler_metadata is plans[-1][0], "layers of one capture share a plan"
        results.append(layers)
    assert plans[0][0] is not plans[1][0] and plans[0][1] != plans[1][1], "the driver tells captures apart"
    problem.check(problem.run(causal=causal, tile_scheduler_metadata=metadata), causal)
    assert metadata.capture is None and metadata.tile_scheduler_metadata is not plans[1][0]
    for graph, layers in zip(graphs[::-1], results[::-1], strict=True):  # the second without the first
        graph.replay()
        for layer in layers:
            problem.check(layer, causal)


@pytest.mark.parametrize("after", [None, "in another"])
def test_a_plan_that_was_only_recorded_is_made_anew(monkeypatch, after):
    """A capture fills no buffer; here they say that there is no work."""
    problem, metadata, now = dense((700, 65)), flash_mla.get_mla_metadata()[0], [CAPTURED]
    monkeypatch.setattr(flash_mla, "capture_id", lambda device: now[0])
    problem.run(tile_scheduler_metadata=metadata)
    recorded = metadata.tile_scheduler_metadata
    problem.run(tile_scheduler_metadata=metadata)
    assert metadata.tile_scheduler_metadata is recorded, "layers of one capture share a plan"
    recorded.zero_()
    now[0] = after
    problem.check(problem.run(tile_scheduler_metadata=metadata))
    made = metadata.tile_scheduler_metadata
    assert made is not recorded and metadata.capture == after
    problem.check(problem.run(tile_scheduler_metadata=metadata))
    assert metadata.tile_scheduler_metadata is made


@pytest.mark.parametrize("assigned", [False, True])
def test_a_plan_that_is_there_serves_captures_as_well(monkeypatch, assigned):
    problem, metadata, now = dense((65, 1)), flash_mla.get_mla_metadata()[0], [None]
    monkeypatch.setattr(flash_mla, "capture_id", lambda device: now[0])
    if assigned:
        metadata = META(tile_scheduler_metadata=TENSORS[0], num_splits=TENSORS[1])
        now[0] = CAPTURED
    problem.run(tile_scheduler_metadata=metadata)
    made = metadata.tile_scheduler_metadata
    for now[0] in CAPTURED, "in another", None:
        problem.run(tile_scheduler_metadata=metadata)
        assert metadata.tile_scheduler_metadata is made and metadata.capture is None


def test_captures_without_numbers_are_all_different(monkeypatch):
    """A driver that is not there, that refuses, or says that the capture is no longer active."""
    cuda = torch.device("cuda")
    assert capture_id(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert capture_id(cuda) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))

    def driver(status: int, error: int = 0):
        def ask(stream, to_status, to_number, *unwanted) -> int:
            assert stream == 7 and unwanted == (None, None, None)
            to_status._obj.value, to_number._obj.value = status, 41
            return error

        return ask

    monkeypatch.setattr(_capture, "_driver", lambda: driver(_capture.ACTIVE))
    assert capture_id(cuda) == capture_id(cuda) == 41
    for broken in None, driver(_capture.ACTIVE, error=1), driver(2):
        monkeypatch.setattr(_capture, "_driver", lambda broken=broken: broken)
        assert capture_id(cuda) != capture_id(cuda) and capture_id(cuda) is not None


LAYOUTS = {
    "656 bytes": {"cache": "fp8 as e4m3", "cache_layout": "headed", "page_size": 7},
    "528 bytes without rope": {"cache": "fp8", "cache_layout": "headed", "rope": False},
    "bf16": {"cache_layout": "headed", "page_size": 61},
    "584 bytes": {"cache": "v4", "cache_layout": "headed", "page_size": 2},
    "584 bytes, two caches": {"cache": "v4 as e4m3", "cache_layout": "headed", "extra": 70, "extra_page_size": 2},
    "bf16, two caches": {"cache_layout": "headed", "page_size": 2, "extra": 64, "rope": False},
}


def sparse_call(problem, batch: int, s_q: int) -> dict:
    case, extra = problem.case, problem.extra_indices
    return {
        "q": problem.q.view(batch, s_q, case.heads, case.width),
        "k_cache": problem.kv_cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "softmax_scale": SOFTMAX_SCALE,
        "is_fp8_kvcache": case.fp8,
        "indices": problem.indices.reshape(batch, s_q, case.top_k),
        "attn_sink": problem.sinks,
        "kv_format": "V32_NO_ROPE" if case.fp8 and not case.rope else None,
        "extra_k_cache": problem.extra_kv_cache,
        "extra_indices_in_kvcache": extra if extra is None else extra.reshape(batch, s_q, case.extra),
    }


def check_sparse(out: torch.Tensor, lse: torch.Tensor, problem) -> None:
    """By the sparse tests' limits; `lse` [tokens, heads], +inf for empty lists."""
    assert lse.isposinf().any() and not lse.isneginf().any()
    sparse_compare.check(out, lse.masked_fill(lse.isposinf(), -torch.inf), problem, sparse_compare.truth(problem))


@both_devices
@pytest.mark.parametrize("heads", [5, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_rows_of_any_format_heads_and_page_size(device, layout, heads):
    problem = build_sparse(SparseCase(6, heads, 130, holes="all", sinks="infinite", **LAYOUTS[layout]), device)
    buffer = torch.full((2, 3, heads, 512), torch.nan, dtype=torch.bfloat16, device=device)
    for more in {}, {"out": buffer}, {"enable_batch_invariant": True}:
        out, lse = flash_mla.flash_mla_with_kvcache(**sparse_call(problem, 2, 3), **more)
        assert (out.shape, lse.shape) == ((2, 3, heads, 512), (2, heads, 3))
        assert lse.transpose(1, 2).is_contiguous()
        check_sparse(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), problem)
    assert not buffer.isnan().any()


@both_devices
@pytest.mark.parametrize("batch, s_q", [(6, 1), (1, 6), (2, 3)])
def test_a_sliced_output_is_written_in_place(device, batch, s_q):
    """vLLM passes the first heads of a buffer that is padded to 64."""
    problem = build_sparse(SparseCase(6, 16, 130, holes="all", sinks="drawn", **LAYOUTS["584 bytes"]), device)
    buffer = torch.full((batch, s_q, 64, 512), torch.nan, dtype=torch.bfloat16, device=device)
    sliced = buffer[:, :, :16]
    out, lse = flash_mla.flash_mla_with_kvcache(**sparse_call(problem, batch, s_q), out=sliced)
    assert out is sliced and buffer[:, :, 16:].isnan().all()
    check_sparse(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), problem)


@both_devices
@pytest.mark.parametrize("layout, extra", [("656 bytes", 0), ("584 bytes, two caches", 100)])
def test_lists_count_to_their_lengths(device, layout, extra):
    problem = build_sparse(SparseCase(6, 5, 70, **LAYOUTS[layout] | ({"extra": extra} if extra else {})), device)
    counts = {"topk_length": [0, 70]} | ({"extra_topk_length": [100, 33]} if extra else {})
    given = {name: torch.tensor(each, dtype=torch.int32, device=device) for name, each in counts.items()}
    out, lse = flash_mla.flash_mla_with_kvcache(**sparse_call(problem, 2, 3), **given)
    for meant, each in zip((problem.meant, problem.extra_meant), counts.values(), strict=False):
        for request, counted in enumerate(each):
            meant[3 * request : 3 * request + 3, counted:] = -1
    lse = lse.masked_fill(lse.isposinf(), -torch.inf).transpose(1, 2)
    sparse_compare.check(out.flatten(0, 1), lse.flatten(0, 1), problem, sparse_compare.truth(problem))


@both_devices
@pytest.mark.parametrize("batch, s_q", [(1, 6), (6, 1), (3, 2)])
def test_list_lengths_may_be_strided(device, batch, s_q):
    problem = build_sparse(SparseCase(6, 5, 70, "fp8 as e4m3", cache_layout="headed"), device)
    call = sparse_call(problem, batch, s_q)
    lengths = torch.full((2 * batch,), 3, dtype=torch.int32, device=device)[::2]
    results = flash_mla.flash_mla_with_kvcache(**call, topk_length=lengths)
    call["indices"] = call["indices"][..., :3]
    call["tile_scheduler_metadata"] = flash_mla.get_mla_metadata()[0]
    assert all(map(torch.equal, results, flash_mla.flash_mla_with_kvcache(**call)))


@both_devices
@pytest.mark.parametrize("tokens", [20, 150])
def test_batch_invariant_sparse_bits_do_not_depend_on_the_batch(device, tokens):
    """150 tokens have more than the partitions of one call."""
    top_k = {"cpu": 512, "cuda": 2048}[device]
    problem = build_sparse(SparseCase(tokens, 16, top_k, "fp8", cache_layout="headed", page_size=61), device)
    call = sparse_call(problem, tokens, 1)

    def first(requests: int, invariant: bool) -> torch.Tensor:
        some = {name: call[name][:requests] for name in ("q", "indices")}
        some["tile_scheduler_metadata"] = flash_mla.get_mla_metadata()[0]
        return flash_mla.flash_mla_with_kvcache(**call | some, enable_batch_invariant=invariant)[0][0]

    assert torch.equal(first(1, True), first(tokens, True))
    assert not torch.equal(first(1, False), first(tokens, False)), "without it they do"


@both_devices
@pytest.mark.parametrize("rope", [True, False])
def test_sparse_prompts(device, rope):
    problem = build_sparse(SparseCase(7, 24, 130, page_size=200, rope=rope, holes="all", sinks="drawn"), device)
    call = {"q": problem.q, "kv": problem.kv_cache.flatten(0, 1)[:, None], "indices": problem.indices[:, None]}
    call |= {"sm_scale": SOFTMAX_SCALE, "attn_sink": problem.sinks, "use_legacy": True}
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(**call)
    assert largest is None and lse.isposinf().any()
    check_sparse(out, lse, problem)
    other, _, base_2 = flash_mla.flash_mla_sparse_fwd(**call, return_log2_lse=True)
    torch.testing.assert_close(base_2, lse / math.log(2))
    assert torch.equal(out, other) and flash_mla.flash_mla_sparse_fwd(**call, return_log2_lse=False)[1:] == (None, None)
    counts = torch.arange(7, dtype=torch.int32, device=device) * 20
    counted, _, _ = flash_mla.flash_mla_sparse_fwd(**call, topk_length=counts)
    shorter = problem.indices.masked_fill(torch.arange(130, device=device) >= counts[:, None], -1)
    assert torch.equal(counted, flash_mla.flash_mla_sparse_fwd(**call | {"indices": shorter[:, None]})[0])


@pytest.mark.gpu
@pytest.mark.parametrize("batch, s_q", [(6, 1), (2, 3)])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_call_launches_etaps_kernels_and_no_other(batch, s_q, layout):
    if layout is None:
        problem = dense((700, 0, 65, 1, 2, 3)[:batch], s_q=s_q, device="cuda")
        call = problem.call | {
            "q": problem.call["q"].contiguous(),
            "tile_scheduler_metadata": META(),
            "causal": s_q > 1,
        }
    else:
        case = SparseCase(6, 16, 512, holes="all", sinks="drawn", **LAYOUTS[layout])
        call = sparse_call(build_sparse(case, "cuda"), batch, s_q)
    flash_mla.flash_mla_with_kvcache(**call)  # plans
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flash_mla.flash_mla_with_kvcache(**call)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(launched) <= 2 and all("etap" in name for name in launched), launched


TENSORS = flash_mla.get_mla_decoding_metadata(torch.tensor([65, 1], dtype=torch.int32), 16, 1)
LENGTHS = torch.ones(3, dtype=torch.int32)
ROWS = torch.zeros(4, 64, 1, 656, dtype=torch.uint8)
INDICES = torch.zeros(2, 1, 64, dtype=torch.int32)
LISTS = {"indices": INDICES, "k_cache": ROWS}
EXTRA = {**LISTS, "extra_k_cache": ROWS, "extra_indices_in_kvcache": INDICES}
PLAN = {"tile_scheduler_metadata": TENSORS[0], "num_splits": TENSORS[1]}
REFUSALS = [
    (NotImplementedError, "q's head_dim", lambda c: {name: c[name][..., :512] for name in ("q", "k_cache")}),
    (NotImplementedError, "head_dim_v", {"head_dim_v": 256}),
    (TypeError, "head_dim_v", {"head_dim_v": [512]}),
    (TypeError, "head_dim_v", {**LISTS, "head_dim_v": [512]}),
    (NotImplementedError, "q.dtype", lambda c: {"q": c["q"].float()}),
    (NotImplementedError, "k_cache.dtype", lambda c: {"k_cache": c["k_cache"].half()}),
    (NotImplementedError, "q.dtype", lambda c: {**LISTS, "q": c["q"].half()}),
    (TypeError, "q", {"q": None}),
    (ValueError, "q", lambda c: {"q": c["q"][:, :, :0]}),
    (ValueError, "q", lambda c: {"q": c["q"].to("meta")}),
    (ValueError, "k_cache", lambda c: {"k_cache": c["k_cache"][:, :, 0]}),
    (ValueError, "k_cache", lambda c: {"k_cache": c["k_cache"].expand(-1, -1, 3, -1)}),
    (ValueError, "k_cache", {**LISTS, "k_cache": ROWS.expand(-1, -1, 2, -1)}),
    (ValueError, "k_cache", lambda c: {"k_cache": c["k_cache"][:0]}),
    (ValueError, "k_cache", lambda c: {"k_cache": c["k_cache"].repeat_interleave(2, -1)[..., ::2]}),
    (ValueError, "k_cache", lambda c: {"k_cache": c["k_cache"].to("meta")}),
    (ValueError, "is_fp8_kvcache", {"is_fp8_kvcache": True}),
    # Lengths and tables.
    (TypeError, "cache_seqlens", {"cache_seqlens": None}),
    (TypeError, "cache_seqlens", lambda c: {"cache_seqlens": c["cache_seqlens"].long()}),
    (ValueError, "cache_seqlens", {"cache_seqlens": LENGTHS}),
    (TypeError, "block_table", {"block_table": None}),
    (TypeError, "block_table", lambda c: {"block_table": c["block_table"].long()}),
    # Plans.
    (TypeError, "tile_scheduler_metadata", {"tile_scheduler_metadata": None}),
    (ValueError, "tile_scheduler_metadata", {**PLAN, "tile_scheduler_metadata": TENSORS[0][0]}),
    (ValueError, "tile_scheduler_metadata", {**PLAN, "tile_scheduler_metadata": TENSORS[0][:0]}),
    (TypeError, "tile_scheduler_metadata", {**PLAN, "tile_scheduler_metadata": TENSORS[0].float()}),
    (TypeError, "num_splits", {"tile_scheduler_metadata": TENSORS[0]}),
    (TypeError, "num_splits", {"num_splits": TENSORS[1]}),
    (ValueError, "num_splits", {**PLAN, "num_splits": TENSORS[1][:2]}),
    (ValueError, "num_splits", {**PLAN, "num_splits": torch.zeros(4, dtype=torch.int32)}),
    (ValueError, "enable_batch_invariant", {**PLAN, "enable_batch_invariant": True}),
    (ValueError, "enable_batch_invariant", {
        "tile_scheduler_metadata": META(False, None, *TENSORS), "enable_batch_invariant": True}),
    # Scales and outputs.
    (ValueError, "descale_q", {"descale_q": torch.ones(1)}),
    (ValueError, "descale_k", {"descale_k": torch.ones(1)}),
    (TypeError, "descale_k", lambda c: {"k_cache": c["k_cache"].to(FP8), "descale_k": 0.5}),
    (TypeError, "out", {"out": 1}),
    (ValueError, "out", lambda c: {**LISTS, "q": c["q"].expand(2, 2, 16, 576), "indices": INDICES.expand(2, 2, 64),
                                   "out": torch.zeros(2, 3, 16, 512, dtype=torch.bfloat16)[:, :2]}),
    # Dense arguments beside lists, and sparse ones without.
    *((ValueError, name, {**LISTS, name: value}) for name, value in (
        ("causal", True), ("descale_k", torch.ones(1)), ("fp8_math", True))),
    *((ValueError, name, {name: value}) for name, value in (
        ("attn_sink", torch.zeros(16)), ("topk_length", torch.zeros(2)), ("kv_format", "V32"),
        ("extra_k_cache", ROWS), ("extra_indices_in_kvcache", ROWS), ("extra_topk_length", LENGTHS))),
    # Lists.
    (ValueError, "indices", {**LISTS, "indices": INDICES[:1]}),
    (ValueError, "topk_length", {**LISTS, "topk_length": LENGTHS}),
    (TypeError, "topk_length", {**LISTS, "topk_length": [1, 2]}),
    (TypeError, "topk_length", {**LISTS, "topk_length": LENGTHS[:2].long()}),
    (ValueError, "attn_sink", {**LISTS, "attn_sink": torch.zeros(8)}),
    # Row formats: V4's rows with V3.2's queries, V4.1's.
    (TypeError, "kv_format", {**LISTS, "kv_format": ["V32"]}),
    (NotImplementedError, "k_cache", {**LISTS, "k_cache": ROWS[..., :584]}),
    (NotImplementedError, "k_cache", lambda c: {**LISTS, "q": c["q"][..., :512], "k_cache": ROWS[..., :528]}),
    (NotImplementedError, "k_cache", {**LISTS, "kv_format": "V41"}),
    # The second cache.
    (ValueError, "extra_indices_in_kvcache", {**LISTS, "extra_k_cache": ROWS}),
    (ValueError, "extra_k_cache", {**LISTS, "extra_indices_in_kvcache": INDICES}),
    (ValueError, "extra_k_cache", {**LISTS, "extra_topk_length": LENGTHS[:2]}),
    (ValueError, "extra_indices_in_kvcache", {**EXTRA, "extra_indices_in_kvcache": torch.zeros(3, 1, 9)}),
    (ValueError, "extra_topk_length", {**EXTRA, "extra_topk_length": LENGTHS}),
    (ValueError, "extra_k_cache", {**EXTRA, "extra_k_cache": ROWS[..., :528]}),
    (ValueError, "extra_k_cache", {**EXTRA, "extra_k_cache": ROWS[:, :, 0]}),
]  # fmt: skip


@pytest.mark.parametrize("kind, name, wrong", REFUSALS, ids=lambda one: one if isinstance(one, str) else "")
def test_calls_are_refused_by_name(kind, name, wrong):
    problem = dense((65, 1))
    with refused(kind, name):
        problem.run(**(wrong(problem.call) if callable(wrong) else wrong))


@pytest.mark.parametrize("kind, name, lengths, rows", [
    (TypeError, "seqlens_k", None, 16),
    (ValueError, "seqlens_k", LENGTHS[None], 16),
    (TypeError, "seqlens_k", LENGTHS.long(), 16),
    (ValueError, "seqlens_k", LENGTHS.to("meta"), 16),
    (ValueError, "num_q_tokens_per_head_k", LENGTHS, 0),
    (TypeError, "num_q_tokens_per_head_k", LENGTHS, None),
])  # fmt: skip
def test_metadata_is_refused_by_name(kind, name, lengths, rows):
    with refused(kind, name):
        flash_mla.get_mla_decoding_metadata(lengths, rows, 1)


KV = torch.zeros(9, 1, 576, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind, name, value", [
    (ValueError, "kv", KV.expand(9, 2, 576)),
    (TypeError, "kv", torch.zeros(9, 1, 528, dtype=torch.uint8)),
    (ValueError, "kv", KV[:0]),
    (NotImplementedError, "d_v", 256),
    (TypeError, "d_v", [512]),
    (TypeError, "sm_scale", None),
    (ValueError, "topk_length", LENGTHS),
])  # fmt: skip
def test_prompts_are_refused_by_name(kind, name, value):
    call = {"q": torch.zeros(2, 16, 576, dtype=torch.bfloat16), "kv": KV, "sm_scale": 0.1}
    with refused(kind, name):
        flash_mla.flash_mla_sparse_fwd(**call | {"indices": torch.zeros(2, 1, 64, dtype=torch.int32), name: value})


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Another FlashMLA on the path; what `install` changes is taken back."""
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla/__init__.py").write_text("from . import fused\ndef get_mla_metadata(): return 'other'")
    (tmp_path / "flash_mla/fused.py").write_text("name = 'fused'")
    monkeypatch.setattr(flash_mla, "_replaced", None)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_mla"]:
        del sys.modules[name]


def test_install_gives_the_module(other):
    assert flash_mla.install() is flash_mla is flash_mla.install()
    for name in flash_mla.MODULES:
        assert importlib.import_module(name) is flash_mla
    assert flash_mla.flash_mla_interface is flash_mla and not hasattr(flash_mla, "flash_attn_varlen_func")


@pytest.mark.parametrize("imported", [False, True])
def test_install_replaces_another_flash_mla_only_when_told_to(other, monkeypatch, imported):
    monkeypatch.syspath_prepend(other)
    if imported:
        importlib.import_module("flash_mla")
    with pytest.raises(ImportError, match=f"^flash_mla: wanted no other .*{re.escape(str(other))}"):
        flash_mla.install()
    assert importlib.import_module("flash_mla").get_mla_metadata() == "other"
    flash_mla.install(replace=True)
    assert importlib.import_module("flash_mla") is flash_mla is flash_mla.install()
    assert importlib.import_module("flash_mla.fused").name == flash_mla.fused.name == "fused"
    assert not hasattr(flash_mla, "more")


def test_install_replaces_a_flash_mla_that_cannot_be_loaded(other, monkeypatch):
    monkeypatch.syspath_prepend(other)
    (other / "flash_mla/__init__.py").write_text("raise OSError('libcuda.so.1')")
    assert flash_mla.install(replace=True) is importlib.import_module("flash_mla") is flash_mla


@both_devices
@pytest.mark.parametrize("h_q, h_k, kind", [(16, 1, "bf16"), (6, 3, "fp8")])
def test_torch_compile_leaves_no_graph_break_and_the_same_bits(device, h_q, h_k, kind):
    problem = dense((700, 65), h_q, h_k, 2, kind, device)
    ranges, splits = flash_mla.get_mla_decoding_metadata(problem.call["cache_seqlens"], 2 * h_q // h_k, h_k)
    check_traced(lambda: problem.run(causal=True))
    check_traced(lambda: problem.run(causal=True, tile_scheduler_metadata=ranges, num_splits=splits))
    filled = META()
    problem.run(causal=True, tile_scheduler_metadata=filled)
    check_traced(lambda: problem.run(causal=True, tile_scheduler_metadata=filled))
    lists = torch.arange(2 * 2 * 64, dtype=torch.int32, device=device).view(2, 2, 64)
    cache = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16, device=device)
    q = torch.ones(2, 2, h_q, 576, dtype=torch.bfloat16, device=device)
    check_traced(
        lambda: flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], indices=lists
        )
    )


def test_torch_compile_traces_calls_on_a_gpu():
    """Whether a capture records the traced call is not known there, so no other call may read its plan."""
    problem, metadata = dense((700, 65), 16, 1, 2), META()
    with traced_gpu() as moved:
        problem.call = moved(problem.call)
        check_traces(lambda: problem.run(causal=True, tile_scheduler_metadata=metadata))
    assert metadata.have_initialized and metadata.tile_scheduler_metadata is None
