"""FlashMLA's calls on ETAP, against float64 by FlashMLA's own rules: its data, its mask, its limits.

Unused cache rows are NaN and unused block-table entries 2147480000, queries and cache lie in wider buffers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from drop_ins import DOCS, FP8, KINDS, KV_SCALE, Q_SCALE, WILD, both_devices
from torch._subclasses.fake_tensor import FakeTensorMode

from etap_backend import why_unsupported
from etap_backend.compat import _capture, flash_mla, plan, whole_rows
from etap_backend.compat._capture import capture_id
from etap_backend.schedule import CPU_SMS, decode_shape, sms_of
from support import sparse_compare
from support.cases import SOFTMAX_SCALE
from support.sparse_cases import SparseCase
from support.sparse_cases import build as build_sparse

PAGE = DOCS / "flash_mla.md"


@dataclass
class Dense:
    """A dense call's tensors, and what they stand for in float64."""

    call: dict
    q: torch.Tensor
    keys: list[torch.Tensor]  # [tokens, h_k, 576] of each request

    def run(self, **more) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, splits = flash_mla.get_mla_metadata()
        plan = {"tile_scheduler_metadata": metadata, "num_splits": splits}
        return flash_mla.flash_mla_with_kvcache(**self.call | plan | more)

    def truth(self, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out and lse; key i is seen by query token t of s_q when i <= t + s_k - s_q, or always."""
        batch, s_q, h_q, _ = self.q.shape
        out, lse = self.q.new_zeros(batch, s_q, h_q, 512), self.q.new_full((batch, h_q, s_q), torch.inf)
        for i, keys in enumerate(self.keys):
            tokens, h_k, _ = keys.shape
            of_heads = keys.repeat_interleave(h_q // h_k, dim=1)
            scores = torch.einsum("qhd,khd->hqk", self.q[i], of_heads) * 576**-0.5
            if causal:
                seen = torch.ones(s_q, tokens, dtype=torch.bool, device=scores.device).tril(tokens - s_q)
                scores.masked_fill_(~seen, -torch.inf)
            sums = scores.logsumexp(-1)
            lse[i] = sums.masked_fill(sums.isneginf(), torch.inf)
            out[i] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), of_heads[..., :512])
        return out, lse


def dense(lengths, h_q=16, h_k=1, s_q=1, kind="bf16", device="cpu", seed=0, pages=None) -> Dense:
    torch.manual_seed(seed)
    batch, (dtype, kv_dtype) = len(lengths), KINDS[kind]
    most = pages or -(-max(*lengths, 1) // 64) + 1
    q = (torch.randn(batch + 1, s_q, h_q + 1, 576 + 128) / 10).clamp(-1, 1)
    cache = (torch.randn(batch * most + 1, 64, h_k, 576 + 128) / 10).clamp(-1, 1)
    q = (q / Q_SCALE if dtype == FP8 else q).to(dtype)[:batch, :, :h_q, :576]
    cache = (cache / KV_SCALE if kv_dtype == FP8 else cache).to(kv_dtype)[:-1, ..., :576]
    table = torch.randperm(batch * most, dtype=torch.int32).view(batch, most)
    keys, unused = [], torch.ones(cache.shape[:2], dtype=torch.bool)
    for i, length in enumerate(lengths):
        used = torch.arange(length)
        page, place = table[i, used // 64].long(), used % 64
        keys.append(cache[page, place].double() * (KV_SCALE if kv_dtype == FP8 else 1))
        unused[page, place] = False
        table[i, -(-length // 64) :] = WILD
    if kv_dtype == FP8:
        cache.view(torch.uint8)[unused] = 0x7F  # NaN
    else:
        cache[unused] = torch.nan
    truth_q, keys = (q.double() * (Q_SCALE if dtype == FP8 else 1)).to(device), [one.to(device) for one in keys]
    call = {
        "q": q.to(device),
        "k_cache": cache.to(device),
        "block_table": table.to(device),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "head_dim_v": 512,
        "descale_q": torch.tensor([Q_SCALE], device=device) if dtype == FP8 else None,
        "descale_k": torch.tensor([KV_SCALE], device=device) if kv_dtype == FP8 else None,
    }
    return Dense(call, truth_q, keys)


def check(results, wanted, q_dtype=torch.bfloat16) -> None:
    """FlashMLA's limits for its dense kernel: absolute or relative, and the cosine; infinities in the same places."""
    (out, lse), (true_out, true_lse) = results, wanted
    assert out.dtype == (torch.bfloat16 if q_dtype == FP8 else q_dtype) and out.shape == true_out.shape
    assert lse.dtype == torch.float32 and lse.shape == true_lse.shape
    assert out.is_contiguous() and lse.transpose(1, 2).is_contiguous()  # FlashMLA's strides
    out, lse = out.double(), lse.double()
    assert torch.equal(lse.isposinf(), true_lse.isposinf()) and not lse.isneginf().any()
    assert out.transpose(1, 2)[true_lse.isinf()].eq(0).all()
    for ours, truth, most, share in (out, true_out, 8e-4, 2.01 / 128), (lse, true_lse, 1e-6, 8.01 / 65536):
        ours, truth = (one.masked_fill(one.isposinf(), 0) for one in (ours, truth))
        error = (ours - truth).abs()
        wrong = ~((error < most) | (error < share * (truth.abs() + 1e-6)))  # NaN is wrong, too
        assert not wrong.any(), (error[wrong].max(), truth[wrong][:3])
    assert 1 - 2 * (out * true_out).sum() / ((out**2).sum() + (true_out**2).sum()).clamp(min=1e-12) < 5e-6


@both_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q, h_k, s_q", [(1, 1, 1), (128, 1, 2), (63, 1, 4), (64, 8, 1), (9, 3, 2), (126, 2, 4)])
def test_dense_is_as_flashmla_defines_it(device, h_q, h_k, s_q, causal, kind):
    problem = dense((140, 0, 1, 64, 3, 300), h_q, h_k, s_q, kind, device)
    check(problem.run(causal=causal), problem.truth(causal), KINDS[kind][0])


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q, h_k", [(16, 1), (6, 3)])
def test_two_tensors_are_as_good_as_the_object(device, h_q, h_k, causal):
    problem = dense((700, 65, 0), h_q, h_k, 2, device=device)
    ranges, splits = flash_mla.get_mla_decoding_metadata(problem.call["cache_seqlens"], 2 * h_q // h_k, h_k)
    assert ranges.dtype == splits.dtype == torch.int32 and ranges.shape[1] == 8 and splits.shape == (4,)
    buffer = splits.new_full((9,), -1)
    buffer[:4].copy_(splits)
    plan = {"tile_scheduler_metadata": ranges.clone(), "num_splits": buffer[:4]}
    by_hand = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=ranges, num_splits=splits)
    results = [problem.run(causal=causal, **more) for more in (plan, {"tile_scheduler_metadata": by_hand})]
    assert all(map(torch.equal, *results))
    check(results[0], problem.truth(causal))
    assert by_hand.have_initialized and by_hand.tile_scheduler_metadata is ranges


@both_devices
@pytest.mark.parametrize("h_q", [8, 16, 128])
def test_two_tensors_of_other_heads_divide_the_work_otherwise_and_are_as_right(device, h_q):
    """128 heads are two row groups, which half as many work ranges are for."""
    problem = dense((700, 65, 0), h_q, device=device)
    for rows in 16, 128:
        ranges, splits = flash_mla.get_mla_decoding_metadata(problem.call["cache_seqlens"], rows, 1)
        check(problem.run(tile_scheduler_metadata=ranges, num_splits=splits), problem.truth(False))


@pytest.mark.parametrize("rows", [16, 48, 64])
def test_two_tensors_have_the_same_shape_whatever_the_batch_and_the_cache(rows):
    """Programs keep them in buffers that serve CUDA graphs of every batch."""
    lengths = torch.full((20,), 100, dtype=torch.int32)
    batches = [flash_mla.get_mla_decoding_metadata(lengths[:b], rows, 1, is_fp8_kvcache=b > 1)[0] for b in (1, 9, 20)]
    assert len({ranges.shape for ranges in batches}) == 1


@both_devices
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_plan_of_the_call_itself_may_be_of_groups_of_rows(device, kind):
    problem = dense((700, 65, 0), 32, s_q=2, kind=kind, device=device)
    num_sms = sms_of(problem.q.device)
    shape = decode_shape(64, num_sms, 3, kind == "fp8")
    assert (shape.row_tile == 16) == (num_sms < 100)
    metadata, _ = flash_mla.get_mla_metadata()
    for _ in range(2):  # the second takes what the first has kept
        check(problem.run(causal=True, tile_scheduler_metadata=metadata), problem.truth(True), KINDS[kind][0])
        assert metadata.row_tile == shape.row_tile
        assert len(metadata.tile_scheduler_metadata) == shape.partitions(num_sms)


def test_two_tensors_have_rows_that_lie_as_those_of_any_batch():
    problem = dense((700, 65, 0), 32, s_q=2)
    ranges, splits = flash_mla.get_mla_decoding_metadata(problem.call["cache_seqlens"], 64, 1)
    by_hand = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=ranges, num_splits=splits)
    check(problem.run(causal=True, tile_scheduler_metadata=by_hand), problem.truth(True))
    assert (by_hand.row_tile, len(ranges)) == (64, CPU_SMS)


@both_devices
@pytest.mark.parametrize("kind", KINDS)
def test_no_requests_and_no_query_tokens_are_no_work(device, kind):
    problem = dense((65, 1), kind=kind, device=device)
    call = problem.call
    none = {name: call[name][:0] for name in ("q", "block_table", "cache_seqlens")}
    for shape, more in ((0, 1), none), ((2, 0), {"q": call["q"][:, :0]}):
        out, lse = problem.run(**more)
        assert out.shape == (*shape, 16, 512) and lse.shape == (shape[0], 16, shape[1])
        assert out.dtype == (KINDS[kind][0] if KINDS[kind][0] != FP8 else torch.bfloat16) and lse.dtype == torch.float32
    ranges, splits = flash_mla.get_mla_decoding_metadata(none["cache_seqlens"], 16, 1)
    assert splits.shape == (1,)
    problem.run(**none, tile_scheduler_metadata=ranges, num_splits=splits)


@both_devices
def test_one_plan_serves_the_layers_of_a_step_and_is_right_for_other_lengths(device):
    problems = [dense((300, 65, 1), seed=seed, device=device) for seed in (0, 1)]
    problems.append(dense((64, 900, 0), device=device))
    metadata, _ = flash_mla.get_mla_metadata()
    for problem in problems:
        check(problem.run(tile_scheduler_metadata=metadata), problem.truth(False))
    assert metadata.config.b == 3 and metadata.config.h_k == 1 and metadata.config.topk is None
    assert metadata.tile_scheduler_metadata.shape[1] == 8 and metadata.num_splits.shape == (4,)


def test_a_plan_for_other_shapes_is_refused_by_name_and_a_refused_call_leaves_it_empty():
    problem, metadata = dense((300, 65)), flash_mla.get_mla_metadata()[0]
    with pytest.raises(ValueError, match="block_table"):
        problem.run(tile_scheduler_metadata=metadata, block_table=problem.call["block_table"][:1])
    assert (metadata.have_initialized, metadata.config, metadata.tile_scheduler_metadata) == (False, None, None)
    problem.run(tile_scheduler_metadata=metadata)
    for other, name in (dense((300, 65), h_q=8), "h_q"), (dense((300,)), "b"), (dense((300, 65), s_q=2), "s_q"):
        with pytest.raises(ValueError, match=f"^tile_scheduler_metadata: wanted one of calls with {name} "):
            other.run(tile_scheduler_metadata=metadata)
    with pytest.raises(ValueError, match="calls with causal True, got one with False"):
        problem.run(tile_scheduler_metadata=metadata, causal=True)


@both_devices
@pytest.mark.parametrize("h_q, h_k", [(16, 1), (6, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_goes_where_it_is_wanted(device, causal, h_q, h_k):
    problem = dense((300, 0, 65), h_q, h_k, 2, device=device)
    wanted = problem.run(causal=causal)
    buffer = torch.full((5, 2, h_q, 512), torch.nan, dtype=torch.bfloat16, device=device)
    out, lse = problem.run(causal=causal, out=buffer[1:4])
    assert out.data_ptr() == buffer[1:4].data_ptr() and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert buffer[[0, 4]].isnan().all()
    with pytest.raises(ValueError, match=r"^out: wanted a contiguous \[3, 2, "):
        problem.run(causal=causal, out=buffer[1:4].transpose(1, 2))
    with pytest.raises(ValueError, match="^out: wanted .* of bfloat16 on .*, got .* of float16 "):
        problem.run(causal=causal, out=buffer[1:4].to(torch.float16))


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q, h_k", [(16, 1), (6, 3)])
def test_lengths_alone_say_how_far_a_tables_rows_are_read(device, h_q, h_k, causal):
    problem = dense((300, 0, 65), h_q, h_k, 2, device=device)
    check(problem.run(causal=causal, block_table=problem.call["block_table"][:, :1]), problem.truth(causal))


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
    check([one[None] for one in alone], [one[:1] for one in problem.truth(False)])


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


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 192])
def test_page_sizes_are_those_of_the_product(page_size):
    problem = dense((page_size,), pages=6)
    k_cache = problem.call["k_cache"].contiguous()[:6].view(-1, page_size, 1, 576)
    rows = k_cache.flatten(0, 1).nan_to_num(0.5)
    call = {"k_cache": rows.view(k_cache.shape), "block_table": torch.zeros(1, 1, dtype=torch.int32)}
    assert why_unsupported(dtype=torch.bfloat16, page_size=page_size) is None
    wanted = Dense({}, problem.q, [rows[:page_size].double()]).truth(False)
    check(problem.run(**call), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["object filled in the graph", "object filled before", "tensors copied into buffers"])
@pytest.mark.parametrize("h_q, h_k, s_q, causal", [(16, 1, 1, False), (16, 1, 2, True), (16, 2, 2, False)])
def test_a_graph_serves_other_lengths(h_q, h_k, s_q, causal, form):
    shape = {"h_q": h_q, "h_k": h_k, "s_q": s_q, "device": "cuda", "pages": 100}
    problems = [dense(lengths, seed=9, **shape) for lengths in ((700, 5000, 1), (64, 0, 6000), (2, 65, 3))]
    static = Dense({name: one.clone() if name in LOADED else one for name, one in problems[0].call.items()}, None, [])
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
            for buffer, one in zip(
                (metadata, splits),
                flash_mla.get_mla_decoding_metadata(static.call["cache_seqlens"], rows, h_k),
                strict=True,
            ):
                buffer.copy_(one)
        graph.replay()
        for layer in layers:
            check(layer, problem.truth(causal))


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
    check(results, problem.truth(False))


@pytest.mark.gpu
@pytest.mark.parametrize("h_q, h_k, s_q, causal", [(16, 1, 1, False), (16, 1, 2, True), (16, 2, 2, False)])
def test_a_plan_that_a_capture_made_serves_no_call_outside_of_it(h_q, h_k, s_q, causal):
    problem = dense((700, 5000, 1), h_q, h_k, s_q, device="cuda", pages=100)
    problem.run(causal=causal)  # so that nothing is loaded while recording
    metadata, plans, graphs, results = flash_mla.get_mla_metadata()[0], [], [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            layers = [problem.run(causal=causal, tile_scheduler_metadata=metadata) for _ in range(2)]
            plans.append((metadata.tile_scheduler_metadata, metadata.capture))
        results.append(layers)
    assert plans[0][0] is not plans[1][0] and plans[0][1] != plans[1][1], "the driver tells captures apart"
    check(problem.run(causal=causal, tile_scheduler_metadata=metadata), problem.truth(causal))
    assert metadata.capture is None and metadata.tile_scheduler_metadata is not plans[1][0]
    for graph, layers in zip(graphs[::-1], results[::-1], strict=True):  # the second without the first
        graph.replay()
        for layer in layers:
            check(layer, problem.truth(causal))


@pytest.mark.gpu
def test_layers_of_a_capture_share_its_plan():
    problem, metadata, plans = dense((700, 65), device="cuda"), flash_mla.get_mla_metadata()[0], []
    problem.run()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for _ in range(3):
            problem.run(tile_scheduler_metadata=metadata)
            plans.append(metadata.tile_scheduler_metadata)
    assert isinstance(metadata.capture, int) and plans[0] is plans[1] is plans[2]


CAPTURED = "in a capture"


@pytest.mark.parametrize("after", [None, "in another"])
def test_a_plan_that_was_only_recorded_is_made_anew(monkeypatch, after):
    """As a capture leaves it: nothing has filled its buffers, which say here that there is no work."""
    problem, metadata, now = dense((700, 65)), flash_mla.get_mla_metadata()[0], [CAPTURED]
    monkeypatch.setattr(flash_mla, "capture_id", lambda device: now[0])
    problem.run(tile_scheduler_metadata=metadata)
    recorded = metadata.tile_scheduler_metadata
    problem.run(tile_scheduler_metadata=metadata)
    assert metadata.tile_scheduler_metadata is recorded, "layers of one capture share a plan"
    recorded.zero_()
    now[0] = after
    check(problem.run(tile_scheduler_metadata=metadata), problem.truth(False))
    made = metadata.tile_scheduler_metadata
    assert made is not recorded and metadata.capture == after
    check(problem.run(tile_scheduler_metadata=metadata), problem.truth(False))
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


def test_captures_that_the_driver_does_not_tell_apart_are_each_another(monkeypatch):
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


LOADED = ("q", "k_cache", "block_table", "cache_seqlens")


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
    """By our policy; `lse` [tokens, heads], whose empty rows are theirs."""
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
    """As vLLM has it: the first heads of a buffer that is padded to 64."""
    problem = build_sparse(SparseCase(6, 16, 130, holes="all", sinks="drawn", **LAYOUTS["584 bytes"]), device)
    buffer = torch.full((batch, s_q, 64, 512), torch.nan, dtype=torch.bfloat16, device=device)
    sliced = buffer[:, :, :16]
    out, lse = flash_mla.flash_mla_with_kvcache(**sparse_call(problem, batch, s_q), out=sliced)
    assert out is sliced and buffer[:, :, 16:].isnan().all()
    check_sparse(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), problem)


@both_devices
def test_lengths_of_two_lists_are_each_its_own(device):
    problem = build_sparse(SparseCase(6, 5, 70, **LAYOUTS["584 bytes, two caches"] | {"extra": 100}), device)
    call = sparse_call(problem, 2, 3) | {"kv_format": "V4"}
    lengths = {"topk_length": [0, 70], "extra_topk_length": [100, 33]}
    lengths = {name: torch.tensor(each, dtype=torch.int32, device=device) for name, each in lengths.items()}
    out, lse = flash_mla.flash_mla_with_kvcache(**call, **lengths)
    first, extra = (torch.arange(n, device=device) for n in (70, 100))
    for request, (counted, extra_counted) in enumerate(((0, 100), (70, 33))):
        of_request = slice(3 * request, 3 * request + 3)
        problem.meant[of_request, first >= counted] = -1
        problem.extra_meant[of_request, extra >= extra_counted] = -1
    sparse_compare.check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), problem, sparse_compare.truth(problem))


@both_devices
def test_lengths_of_sparse_lists_are_a_requests(device):
    problem = build_sparse(SparseCase(6, 5, 70, "fp8 as e4m3", cache_layout="headed"), device)
    lengths = torch.tensor([3, 70], dtype=torch.int32, device=device)
    call = sparse_call(problem, 2, 3)
    out, lse = flash_mla.flash_mla_with_kvcache(**call, topk_length=lengths)
    problem.meant[:3, 3:] = -1
    sparse_compare.check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), problem, sparse_compare.truth(problem))
    if device == "cuda":  # a CPU's product of fewer rows may be summed in another order
        call["indices"] = call["indices"].clone()
        call["indices"][0, :, 3:] = -1
        assert all(map(torch.equal, (out, lse), flash_mla.flash_mla_with_kvcache(**call)))


@both_devices
@pytest.mark.parametrize("batch, s_q", [(1, 6), (6, 1), (3, 2)])
def test_lengths_of_sparse_lists_may_lie_apart_and_be_one(device, batch, s_q):
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
    """150 tokens are more than one call gives a partition of their own."""
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
def test_a_prompts_tokens(device, rope):
    problem = build_sparse(SparseCase(7, 24, 130, page_size=200, rope=rope, holes="all", sinks="drawn"), device)
    kv = problem.kv_cache.flatten(0, 1)[:, None]
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(
        problem.q, kv, problem.indices[:, None], SOFTMAX_SCALE, attn_sink=problem.sinks
    )
    assert largest is None
    check_sparse(out, lse, problem)
    counts = torch.arange(7, dtype=torch.int32, device=device) * 20
    counted, _, _ = flash_mla.flash_mla_sparse_fwd(
        problem.q, kv, problem.indices[:, None], SOFTMAX_SCALE, 512, None, counts
    )
    cut = problem.indices.masked_fill(torch.arange(130, device=device) >= counts[:, None], -1)
    assert torch.equal(counted, flash_mla.flash_mla_sparse_fwd(problem.q, kv, cut[:, None], SOFTMAX_SCALE)[0])


def test_a_prompts_statistics_are_as_sgl_flash_mla_is_asked_for_them():
    problem = build_sparse(SparseCase(7, 16, 130, page_size=200, holes="all"), "cpu")
    call = (problem.q, problem.kv_cache.flatten(0, 1)[:, None], problem.indices[:, None], SOFTMAX_SCALE)
    out, _, natural = flash_mla.flash_mla_sparse_fwd(*call, use_legacy=True, return_log2_lse=None)
    other, _, base_2 = flash_mla.flash_mla_sparse_fwd(*call, use_legacy=True, return_log2_lse=True)
    torch.testing.assert_close(base_2, natural / math.log(2))
    assert natural.isposinf().any() and torch.equal(out, other)
    assert flash_mla.flash_mla_sparse_fwd(*call, return_log2_lse=False)[1:] == (None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2])
def test_a_dense_call_with_a_plan_launches_our_kernels_and_nothing_else(s_q, causal):
    problem, metadata = dense((700, 0, 65), s_q=s_q, device="cuda"), flash_mla.get_mla_metadata()[0]
    problem.call["q"] = problem.call["q"].contiguous()  # so that other rows of it are a view
    check_launches(lambda: problem.run(causal=causal, tile_scheduler_metadata=metadata))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch, s_q", [(6, 1), (2, 3)])
def test_a_sparse_call_launches_our_kernels_and_nothing_else(batch, s_q, layout):
    problem = build_sparse(SparseCase(6, 16, 512, holes="all", sinks="drawn", **LAYOUTS[layout]), "cuda")
    call = sparse_call(problem, batch, s_q)
    check_launches(lambda: flash_mla.flash_mla_with_kvcache(**call))


def check_launches(call) -> None:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(launched) <= 2 and all("etap" in name for name in launched), launched


META = flash_mla.FlashMLASchedMeta
TENSORS = flash_mla.get_mla_decoding_metadata(torch.tensor([65, 1], dtype=torch.int32), 16, 1)
LENGTHS = torch.ones(3, dtype=torch.int32)
ROWS = torch.zeros(4, 64, 1, 656, dtype=torch.uint8)
LISTS = {"indices": torch.zeros(2, 1, 64, dtype=torch.int32), "k_cache": ROWS}
REFUSALS = {
    "rows without rope": (NotImplementedError, "^q's head_dim 512 ",
                          lambda c: {name: c[name][..., :512] for name in ("q", "k_cache")}),
    "another value width": (NotImplementedError, "^head_dim_v 256 ", {"head_dim_v": 256}),
    "a list of value widths": (TypeError, r"^head_dim_v: wanted an int, got \[512\]", {"head_dim_v": [512]}),
    "a sparse list of them": (TypeError, r"^head_dim_v: wanted an int, got \[512\]", {**LISTS, "head_dim_v": [512]}),
    "a list of formats": (TypeError, r"^kv_format: wanted a str or None, got \['V32'\]",
                          {**LISTS, "kv_format": ["V32"]}),
    "another type": (NotImplementedError, r"^q\.dtype float32 ", lambda c: {"q": c["q"].float()}),
    "a cache of another type": (NotImplementedError, r"^k_cache\.dtype float16 ",
                                lambda c: {"k_cache": c["k_cache"].half()}),
    "a second cache of a dense call": (ValueError, "^extra_k_cache: .* without indices", {"extra_k_cache": ROWS}),
    "its lists": (ValueError, "^extra_indices_in_kvcache: .* without indices", {"extra_indices_in_kvcache": ROWS}),
    "their lengths": (ValueError, "^extra_topk_length: .* without indices", {"extra_topk_length": LENGTHS}),
    "a second cache without lists": (ValueError, "^extra_indices_in_kvcache: wanted a tensor beside extra_k_cache",
                                     {**LISTS, "extra_k_cache": ROWS}),
    "lists of no second cache": (ValueError, "^extra_k_cache: wanted a tensor beside extra_indices_in_kvcache",
                                 {**LISTS, "extra_indices_in_kvcache": LISTS["indices"]}),
    "lengths of no second cache": (ValueError, "^extra_k_cache: wanted a tensor beside extra_topk_length",
                                   {**LISTS, "extra_topk_length": LENGTHS[:2]}),
    "second lists of another batch": (ValueError, r"^extra_indices_in_kvcache: wanted \[2, 1, topk\]", {
        **LISTS, "extra_k_cache": ROWS, "extra_indices_in_kvcache": torch.zeros(3, 1, 9)}),
    "second lengths of more requests": (ValueError, r"^extra_topk_length: wanted shape \[2\], got \[3\]", {
        **LISTS, "extra_k_cache": ROWS, "extra_indices_in_kvcache": LISTS["indices"], "extra_topk_length": LENGTHS}),
    "a second cache of other rows": (ValueError, "^extra_k_cache: wanted rows like k_cache's, 656 of uint8, got 528", {
        **LISTS, "extra_k_cache": ROWS[..., :528], "extra_indices_in_kvcache": LISTS["indices"]}),
    "a second cache of three dimensions": (ValueError, "^extra_k_cache: wanted shape", {
        **LISTS, "extra_k_cache": ROWS[:, :, 0], "extra_indices_in_kvcache": LISTS["indices"]}),
    "V4's rows with V3.2's queries": (NotImplementedError,
                                      "V32: 576 columns, 656 bytes.* got kv_format None, 576 columns, 584 bytes",
                                      {**LISTS, "k_cache": ROWS[..., :584]}),
    "an output whose tokens are apart": (ValueError, "^out: wanted strides by which b and s_q are one", lambda c: {
        **LISTS, "q": c["q"].expand(2, 2, 16, 576), "indices": LISTS["indices"].expand(2, 2, 64),
        "out": torch.zeros(2, 3, 16, 512, dtype=torch.bfloat16)[:, :2]}),
    "V4.1, by its size alone": (NotImplementedError, "got kv_format None, 512 columns, 528 bytes",
                                lambda c: {**LISTS, "q": c["q"][..., :512], "k_cache": ROWS[..., :528]}),
    "V4.1": (NotImplementedError, "kv_format V41", {**LISTS, "kv_format": "V41"}),
    "a sparse float16 query": (NotImplementedError, r"^q\.dtype float16 ", lambda c: {**LISTS, "q": c["q"].half()}),
    "KV heads that do not divide": (ValueError, "^k_cache: wanted KV heads that divide",
                                    lambda c: {"k_cache": c["k_cache"].expand(-1, -1, 3, -1)}),
    "sparse KV heads": (ValueError, "^k_cache: wanted 1 KV head", {**LISTS, "k_cache": ROWS.expand(-1, -1, 2, -1)}),
    "a causal sparse call": (ValueError, "^causal: .* with indices, got True", {**LISTS, "causal": True}),
    "a scale of a sparse cache": (ValueError, "^descale_k: .* with indices", {**LISTS, "descale_k": torch.ones(1)}),
    "FP8 math of a sparse cache": (ValueError, "^fp8_math: .* with indices", {**LISTS, "fp8_math": True}),
    "sinks without lists": (ValueError, "^attn_sink: .* without indices", {"attn_sink": torch.zeros(16)}),
    "lengths without lists": (ValueError, "^topk_length: .* without indices", {"topk_length": torch.zeros(2)}),
    "a format without lists": (ValueError, "^kv_format: .* got V32", {"kv_format": "V32"}),
    "lists of another batch": (ValueError, r"^indices: wanted \[2, 1, topk\]",
                               {**LISTS, "indices": LISTS["indices"][:1]}),
    "no FP8 cache": (ValueError, "^is_fp8_kvcache: ", {"is_fp8_kvcache": True}),
    "three dimensions": (ValueError, r"^k_cache: wanted shape \[num_blocks,",
                         lambda c: {"k_cache": c["k_cache"][:, :, 0]}),
    "no query": (TypeError, "^q: wanted a tensor, got None", {"q": None}),
    "no plan": (TypeError, "^tile_scheduler_metadata: .* got None", {"tile_scheduler_metadata": None}),
    "half a plan": (TypeError, "^num_splits: wanted a tensor", {"tile_scheduler_metadata": TENSORS[0]}),
    "a plan and a half": (TypeError, "^num_splits: wanted None", {"num_splits": TENSORS[1]}),
    "a plan that splits": (ValueError, "^enable_batch_invariant: ", {
        "tile_scheduler_metadata": TENSORS[0], "num_splits": TENSORS[1], "enable_batch_invariant": True}),
    "an object with one": (ValueError, "^enable_batch_invariant: ", {
        "tile_scheduler_metadata": META(False, None, *TENSORS), "enable_batch_invariant": True}),
    "a plan of fewer requests": (ValueError, r"^num_splits: wanted shape \[3\], got \[2\]", {
        "tile_scheduler_metadata": TENSORS[0], "num_splits": TENSORS[1][:2]}),
    "an output that is none": (TypeError, "^out: wanted a tensor", {"out": 1}),
    "lengths of 64 bits": (TypeError, "^cache_seqlens: wanted int32, got int64",
                           lambda c: {"cache_seqlens": c["cache_seqlens"].long()}),
    "lengths of more requests": (ValueError, "^cache_seqlens: wanted", {"cache_seqlens": LENGTHS}),
    "a table of 64 bits": (TypeError, "^block_table: wanted int32, got int64",
                           lambda c: {"block_table": c["block_table"].long()}),
    "no pages": (ValueError, "^k_cache: wanted at least one page", lambda c: {"k_cache": c["k_cache"][:0]}),
    "rows that step": (ValueError, "^k_cache: wanted stride 1",
                       lambda c: {"k_cache": c["k_cache"].repeat_interleave(2, -1)[..., ::2]}),
    "a cache without memory": (ValueError, "^k_cache: .* got one on meta",
                               lambda c: {"k_cache": c["k_cache"].to("meta")}),
    "queries without memory": (ValueError, "^q: .* got one on meta", lambda c: {"q": c["q"].to("meta")}),
    "no heads": (ValueError, r"^q: wanted at least one head, got \[2, 1, 0, 576\]", lambda c: {"q": c["q"][:, :, :0]}),
    "a scale of queries of 16 bits": (ValueError, "^descale_q: wanted None beside a q of bfloat16",
                                      {"descale_q": torch.ones(1)}),
    "a scale of a cache of 16 bits": (ValueError, "^descale_k: wanted None beside a k_cache of bfloat16",
                                      {"descale_k": torch.ones(1)}),
    "a scale that is no tensor": (TypeError, "^descale_k: wanted a tensor, got float",
                                  lambda c: {"k_cache": c["k_cache"].to(FP8), "descale_k": 0.5}),
    "a plan of one dimension": (ValueError, r"^tile_scheduler_metadata: wanted shape \[n, 8\], got \[8\]", {
        "tile_scheduler_metadata": TENSORS[0][0], "num_splits": TENSORS[1]}),
    "a plan of nothing": (ValueError, "^tile_scheduler_metadata: wanted at least one row of 8", {
        "tile_scheduler_metadata": TENSORS[0][:0], "num_splits": TENSORS[1]}),
    "a plan of another type": (TypeError, "^tile_scheduler_metadata: wanted int32, got float32", {
        "tile_scheduler_metadata": TENSORS[0].float(), "num_splits": TENSORS[1]}),
    "a plan of more requests": (ValueError, r"^num_splits: wanted shape \[3\], got \[4\]", {
        "tile_scheduler_metadata": TENSORS[0], "num_splits": torch.zeros(4, dtype=torch.int32)}),
    "sparse lengths of more requests": (ValueError, r"^topk_length: wanted shape \[2\], got \[3\]",
                                        {**LISTS, "topk_length": LENGTHS}),
    "sparse lengths that are no tensor": (TypeError, "^topk_length: wanted a tensor, got list",
                                          {**LISTS, "topk_length": [1, 2]}),
    "sparse lengths of 64 bits": (TypeError, "^topk_length: wanted int32, got int64",
                                  {**LISTS, "topk_length": LENGTHS[:2].long()}),
    "sinks of other heads": (ValueError, r"^attn_sink: wanted shape \[>=16\], got \[8\]",
                             {**LISTS, "attn_sink": torch.zeros(8)}),
    "no lengths": (TypeError, "^cache_seqlens: wanted a tensor, got None", {"cache_seqlens": None}),
    "no table": (TypeError, "^block_table: wanted a tensor, got None", {"block_table": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_served_is_refused_by_name(name):
    kind, text, spoiled = REFUSALS[name]
    problem = dense((65, 1))
    with pytest.raises(kind, match=text):
        problem.run(**(spoiled(problem.call) if callable(spoiled) else spoiled))


def test_metadata_wants_the_lengths():
    lengths = torch.ones(2, dtype=torch.int32)
    for wrong, rows, text in (
        (None, 16, "seqlens_k: wanted a tensor, got None"),
        (lengths[None], 16, r"seqlens_k: wanted shape \[b\], got \[1, 2\]"),
        (lengths.long(), 16, "seqlens_k: wanted int32, got int64"),
        (lengths.to("meta"), 16, "seqlens_k: wanted a tensor on .* got one on meta"),
        (lengths, 0, "num_q_tokens_per_head_k: wanted at least 1, got 0"),
        (lengths, None, "num_q_tokens_per_head_k: wanted an int, got None"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{text}"):
            flash_mla.get_mla_decoding_metadata(wrong, rows, 1)


KV = torch.zeros(9, 1, 576, dtype=torch.bfloat16)


@pytest.mark.parametrize("wrong, kind, text", [
    ({"kv": KV.expand(9, 2, 576)}, ValueError, r"^kv: wanted shape \[s_kv, 1, d\], got \[9, 2, 576\]"),
    ({"kv": torch.zeros(9, 1, 528, dtype=torch.uint8)}, TypeError, "^kv: wanted bfloat16, got uint8"),
    ({"kv": KV[:0]}, ValueError, "^kv's s_kv: wanted at least 1, got 0"),
    ({"d_v": 256}, NotImplementedError, "^d_v 256 is not supported: wanted 512"),
    ({"d_v": [512]}, TypeError, r"^d_v: wanted an int, got \[512\]"),
    ({"sm_scale": None}, TypeError, "^sm_scale: wanted a number, got None"),
    ({"topk_length": LENGTHS}, ValueError, r"^topk_length: wanted shape \[2\], got \[3\]"),
])  # fmt: skip
def test_what_a_prompt_cannot_have_is_refused_by_name(wrong, kind, text):
    call = {"q": torch.zeros(2, 16, 576, dtype=torch.bfloat16), "kv": KV, "sm_scale": 0.1}
    with pytest.raises(kind, match=text):
        flash_mla.flash_mla_sparse_fwd(**call | {"indices": torch.zeros(2, 1, 64, dtype=torch.int32)} | wrong)


INSTALLED = {
    "install(); import flash_mla; print(flash_mla.FlashMLASchedMeta is FlashMLASchedMeta)": "True",
    "install(); from flash_mla.flash_mla_interface import get_mla_metadata as f; print(f()[1])": "None",
    "install(); import flash_mla.flash_mla_interface as f; print(f.get_mla_metadata()[1])": "None",
    "install(); import flash_mla.flash_mla_interface; print(flash_mla.flash_mla_interface is flash_mla)": "True",
    "print(install() is install())": "True",
    "install(); from flash_mla import flash_attn_varlen_func": "cannot import name 'flash_attn_varlen_func'",
}


@pytest.mark.parametrize("program, wanted", INSTALLED.items())
def test_it_takes_the_place_of_a_flash_mla_that_is_not_there(run, program, wanted):
    assert wanted in run(program)


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", ["", "import flash_mla; "])
def test_it_takes_the_place_of_another_flash_mla_only_when_told_to(run, tmp_path, before):
    (tmp_path / "flash_mla.py").write_text("def get_mla_metadata(): return 'another'")
    path = f"import sys; sys.path.append({str(tmp_path)!r}); {before}"
    after = "; import flash_mla; print(type(flash_mla.get_mla_metadata()).__name__)"
    refused = run(f"{path}install(){after}")
    assert "ImportError: flash_mla: wanted no other one" in refused and str(tmp_path / "flash_mla.py") in refused
    assert run(f"{path}install(replace=True){after}") == "tuple\n"
    assert run(f"{path}{after[2:]}") == "str\n", "importing the module alone takes no place"


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", ["", "import flash_mla; "])
def test_names_that_only_the_replaced_flash_mla_has_are_its(run, tmp_path, before):
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text("from . import fused\ndef get_mla_metadata(): return 'another'")
    (package / "fused.py").write_text("name = 'theirs'")
    after = "; import flash_mla.fused; from flash_mla import fused, get_mla_metadata as f; print(fused.name, f()[1])"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {before}"
    assert run(f"{path}install(replace=True); install(){after}") == "theirs None\n"
    assert "cannot import name 'more'" in run(f"{path}install(replace=True); from flash_mla import more")
    (package / "__init__.py").write_text("raise OSError('libcuda.so.1')")
    if not before:
        assert (
            run(f"{path}install(replace=True); from flash_mla import get_mla_metadata as f; print(f()[1])") == "None\n"
        )


def test_the_programs_of_the_page_run(run):
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(first, names)
    keys = names["kv_cache"].double().flatten(0, 1).view(2, 256, 1, 576)
    keys = [own[:tokens] for own, tokens in zip(keys, (200, 7), strict=True)]
    out, lse = Dense({}, names["q"].double(), keys).truth(True)
    torch.testing.assert_close(names["out"].double(), out, rtol=0.02, atol=0.01)
    torch.testing.assert_close(names["lse"].double(), lse, rtol=1e-5, atol=1e-5)
    assert run(f"{second}\nimport flash_mla as f; print(f is flash_mla)") == "True\n"


@pytest.fixture
def run(run_program):
    head = "from etap_backend.compat.flash_mla import FlashMLASchedMeta, install; "
    return lambda program: "".join(run_program(head + program, may_fail=True))
