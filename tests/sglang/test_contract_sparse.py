"""SGLang's pools, batches and attention layer around ETAP's backend of sparse attention, on CPU tensors, both caches.

The runner is the one of SGLang's own tests of that attention. The reference executor stands in for the kernels and
Triton's interpreter runs SGLang's, but for two that it cannot run: one writes rows, one counts what each draft sees. A
layer's indexer needs a GPU, and so does what SGLang plans for it: its lists are written here, as its fused top-k writes
them. Real CUDA graphs and memory are not tested here.
"""

import re
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.dsa import dsa_backend_mtp_precompute, dsa_indexer
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

from etap_backend import sparse_workspace_floats
from etap_backend.reference import dequantized, relative_rmse, sparse_mla_decode_reference
from etap_backend.sglang import flash_mla, sparse
from etap_backend.sglang.sparse import ETAPSparseBackend
from support.sglang_layer import (
    DRAFTS,
    FP8,
    HEADS,
    LATENT,
    NOTHING,
    ONE_RANK,
    ROPE,
    STEPS,
    TOP_K,
    Problem,
    draft_factory,
    forbid_host_reads,
    make_layer,
    make_runner,
    pack,
)

load_plugins()

H20_SMS = 78  # of the pretended GPU
K, INDEX_HEADS = 512, 32  # GLM-5's, and the least k of a model
INDEXED = {"of_model": {"index_topk": K}}


def write_rows(buffer, loc, latent, rope):
    """What the pool's kernels do, in elements of the cache or in bytes; ranks write their own rows."""
    size, rank = get_parallel().attn_dcp_size, get_parallel().attn_dcp_rank
    mine = loc % size == rank
    buffer[loc[mine] // size] = torch.cat([latent[mine], rope[mine]], dim=-1).view(buffer.dtype)


def seen_by_drafts(extend_seq_lens, seq_lens, total_len, max_q_len):
    """Tokens that each draft token sees, itself included."""
    spans = [torch.arange(length - new + 1, length + 1) for length, new in zip(seq_lens, extend_seq_lens, strict=True)]
    return torch.cat(spans).int()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", seen_by_drafts)
    for kernel in ("set_mla_kv_buffer_triton", "set_mla_kv_buffer_dcp_sharded_triton"):
        monkeypatch.setattr(memory_pool, kernel, write_rows)
    # DeepGEMM's schedule and top-k's plan, for the indexer, and fused kernels in place of torch's.
    monkeypatch.setattr(dsa_backend, "is_cuda", lambda: False)
    monkeypatch.setattr(dsa_backend_mtp_precompute, "_is_cuda", False)
    monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")
    for package in ("attention", "attention.dsa"):
        monkeypatch.setitem(sys.modules, f"sglang.kernels.ops.{package}.fused_metadata_copy", None)
    # Prompts of no more tokens are computed densely.
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", str(TOP_K))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))


@pytest.fixture(autouse=True)
def parallel():
    """One rank; sets other widths until the test ends."""
    with ExitStack() as stack:

        def override(**values):
            stack.enter_context(get_parallel().override(**values))

        override(**ONE_RANK)
        yield override


@pytest.fixture(params=[False, True], ids=["bfloat16 cache", "FP8 cache"])
def make(request):
    """Makes a runner and our backend on it."""

    def both(name="etap", **options):
        runner = make_runner(**({"fp8_kv_cache": request.param} | options))
        return runner, ATTENTION_BACKENDS[name](runner)

    return both


@pytest.fixture
def sglang_calls(monkeypatch):
    """What SGLang's own backend calls, by torch in float64; counts the calls."""
    calls = []

    def attention(q, rows, lists, scale):
        calls.append(len(q))
        exact, _ = sparse_mla_decode_reference(q, rows.view(-1, 1, rows.shape[-1]), lists, softmax_scale=scale)
        return exact.bfloat16()

    def flash_attn_with_kvcache(*, q, qv, k_cache, v_cache, page_table, cache_seqlens, softmax_scale, **others):
        counted = torch.arange(page_table.shape[1]) < cache_seqlens[:, None]
        rows = torch.cat([v_cache, k_cache], dim=-1)
        lists = page_table.masked_fill(~counted, NOTHING)
        return attention(torch.cat([qv, q], dim=-1), rows, lists, softmax_scale)

    def flash_mla_sparse_fwd(*, q, kv, indices, sm_scale, **others):
        return attention(q, kv, indices[:, 0], sm_scale), None, None

    def flash_mla_with_kvcache(*, q, k_cache, indices, softmax_scale, **others):
        return attention(q[:, 0], k_cache, indices[:, 0], softmax_scale).unsqueeze(1), None

    def get_mla_metadata(*, cache_seqlens, **others):
        return torch.ones(1), torch.ones(len(cache_seqlens))

    for kernel in (flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata):
        monkeypatch.setattr(flash_mla.module(), kernel.__name__, kernel)
    monkeypatch.setattr(dsa_backend, "flash_attn_with_kvcache", flash_attn_with_kvcache)
    monkeypatch.setattr(dsa_backend, "concat_mla_absorb_q_general", lambda *parts: torch.cat(parts, dim=-1))
    return calls


@pytest.fixture
def calls(calls_of):
    return calls_of(sparse)


@pytest.mark.parametrize("make", [True], indirect=True, ids=[""])
def test_rows_of_an_fp8_cache_are_read_as_sglang_reads_them(make):
    runner, _ = make()
    rows, slots = torch.randn(8, 1, LATENT + ROPE).bfloat16(), torch.arange(8)
    runner.token_to_kv_pool.set_mla_kv_buffer(make_layer(), slots, *rows.split([LATENT, ROPE], dim=-1))
    written = runner.token_to_kv_pool.get_key_buffer(0)[:8].view(torch.uint8)
    packed = pack(rows, FP8).view(torch.uint8)
    # The interpreter rounds in its own way, to e4m3 and to bfloat16.
    assert torch.equal(written[..., LATENT:], packed[..., LATENT:])
    for stored in (written, packed):
        read = dequantized(stored.squeeze(1), torch.float64)
        sglangs = dequantize_k_cache(stored.view(FP8).view(1, 8, 1, -1)).view(8, -1)
        torch.testing.assert_close(sglangs.double(), read, rtol=2**-7, atol=0)
        assert relative_rmse(read, rows.double().view(read.shape)) < 0.1


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_one_call_as_exact_as_torch(make, calls, step):
    mode, lengths, new = STEPS[step]
    runner, backend = make(mode=mode)
    problem = Problem(runner, mode, lengths, new)
    problem.run(backend)
    assert [len(call["q"]) for call in calls] == [problem.tokens]


@pytest.mark.parametrize("step", STEPS)
def test_sglangs_own_backend_reads_the_same_rows(make, sglang_calls, calls, step):
    """With the kernels that SGLang chooses on Hopper, on the same cache, lists and batch."""
    mode, lengths, new = STEPS[step]
    runner, backend = make(mode=mode)
    fp8_cache = runner.token_to_kv_pool.dsa_kv_cache_store_fp8
    problem, batch = Problem(runner, mode, lengths, new), None
    outs = []
    own = {
        "prefill": "flashmla_kv" if fp8_cache else "flashmla_sparse",
        "decode": "flashmla_kv" if fp8_cache else "fa3",
    }
    for runs in (backend, ATTENTION_BACKENDS["dsa"](make_runner(mode=mode, fp8_kv_cache=fp8_cache, **own))):
        runs.token_to_kv_pool, runs.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        batch = problem.batch()
        runs.init_forward_metadata(batch)
        outs.append(problem.attend(runs, batch))
    assert type(runs) is DeepseekSparseAttnBackend and len(sglang_calls) == len(calls) == 1
    problem.check(outs[0])
    problem.check(outs[1])


def test_verifies_a_block_of_drafts_without_a_mask(make, calls):
    """DFLASH and DSPARK make one for backends that they do not know, as large as all contexts times the drafts."""
    mode, lengths, new = STEPS["drafts"]
    runner, backend = make(mode=mode)
    assert resolve_dflash_verify_mask_policy(backend) == ("ETAPSparseBackend", False)
    problem = Problem(runner, mode, lengths, new)
    batch = problem.batch(spec_info=DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=DRAFTS))
    backend.init_forward_metadata(batch)
    problem.check(problem.attend(backend, batch))
    assert [len(call["q"]) for call in calls] == [problem.tokens]


@pytest.mark.parametrize("step", STEPS)
def test_a_model_without_rope(make, calls, step):
    """GLM-5.3-Flash's, whose FP8 rows have 528 bytes and end with the scales."""
    runner, backend = make(mode=STEPS[step][0], rope=0)
    Problem(runner, *STEPS[step]).run(backend)
    (call,) = calls
    assert call["q_rope"] is None
    assert call["kv_cache"].shape[-1] == (528 if backend.dsa_kv_cache_store_fp8 else 512)


@pytest.mark.parametrize("heads", [16, 64])
def test_prompts_with_lists_that_have_a_tail_are_etaps(make, heads):
    """GLM-5.3-Flash's: its indexer chooses pools of tokens, and adds those that fill none."""
    _, backend = make(rope=0, heads=heads, mode=ForwardMode.EXTEND, of_model={"index_kpool": 4})
    lists = torch.zeros(1, TOP_K + 3, dtype=torch.int32)
    for kernel in (backend.dsa_prefill_impl, backend.dsa_decode_impl):
        backend._check_kpool_tail_backend(lists, backend._resolve_kpool_tail_backend(lists, kernel), "prefill")
    assert backend.dsa_prefill_impl == "fa3" and not backend.enable_auto_select_prefill_impl


@pytest.mark.parametrize("make", [False], indirect=True, ids=[""])
@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("step", STEPS)
def test_attention_sinks(make, calls, sglang_calls, step, heads):
    """HY-V4's, which SGLang hands to the kernel that this backend stands in for then."""
    runner, backend = make(heads=heads, mode=STEPS[step][0], of_model={"learnable_sink": True})
    problem, sinks = Problem(runner, *STEPS[step]), torch.linspace(-2, 6, heads)
    problem.sinks = sinks
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    out = problem.attend(backend, batch)
    problem.check(out)
    problem.sinks = None
    with pytest.raises(AssertionError):
        problem.check(out)  # what it would be without
    assert (len(calls), sglang_calls) == (1, [])
    assert calls[0]["q"].shape[1] == heads and calls[0]["sinks"] is sinks


class HotBuffer:
    """SGLang's coordinator of rows in host memory, whose kernels need a GPU: it swaps in the rows that lists name.

    Attributes:
        host: rows by a request's positions.
    """

    def __init__(self, problem, pool):
        self.problem, self.pool, self.host = problem, pool, problem.cache.view(torch.uint8).clone()
        self.asked = []

    def swap_in_selected_pages(self, requests, seq_lens, positions, layer_id):
        """Rows of the hot buffer, [tokens, top_k], in the order of the lists, -1 where those name none."""
        self.asked.append((requests.tolist(), seq_lens.tolist(), layer_id))
        hot, rows = self.pool.get_key_buffer(layer_id).view(torch.uint8), torch.full_like(positions, NOTHING)
        free = iter(range(1, len(hot)))
        for request, (named, found) in enumerate(zip(positions, rows, strict=True)):
            for place, position in enumerate(named.tolist()):
                if position != NOTHING:
                    found[place] = next(free)
                    hot[found[place]] = self.host[self.problem.slots[request, position]]
        return rows


def test_decodes_rows_that_were_swapped_in_from_host_memory(make):
    """HiSparse's hot buffer: the kernel gets its rows, and nothing else of the device's pool is a row."""
    runner, _ = make()
    problem = Problem(runner, *STEPS["decode"])
    problem.cache.view(torch.uint8)[problem.new_slots] = pack(problem.new_rows, problem.cache.dtype).view(torch.uint8)
    coordinator = runner.hisparse_coordinator = HotBuffer(problem, runner.token_to_kv_pool)
    backend = ATTENTION_BACKENDS["etap"](runner)
    assert backend.dsa_prefill_impl == "fa3" and not backend.enable_auto_select_prefill_impl
    places = {slot: place for part in problem.slots.tolist() for place, slot in enumerate(part)}
    positions = torch.tensor([[places.get(row, NOTHING) for row in named] for named in problem.lists.tolist()])
    whole, problem.cache = problem.cache, problem.cache.clone()
    whole.view(torch.uint8).fill_(0xFF)
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    out = problem.attend(backend, batch, positions.int())
    assert coordinator.asked == [(problem.requests.tolist(), problem.lengths, 0)]
    problem.check(out)


@pytest.mark.parametrize("heads", [16, 64])
def test_prompts_with_host_memory_are_etaps(make, heads):
    """SGLang translates their lists to rows of the device for a kernel that reads those, whatever it would choose."""
    runner, _ = make(heads=heads, mode=ForwardMode.EXTEND)
    problem = Problem(runner, *STEPS["prompts"])
    runner.hisparse_coordinator = object()
    moved = torch.randperm(len(problem.cache))
    pool = runner.token_to_kv_pool
    pool.translate_loc_to_hisparse_device = lambda rows: torch.where(rows < 0, rows, moved[rows].to(rows.dtype))
    backend = ATTENTION_BACKENDS["etap"](runner)
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    rows = problem.cache.view(torch.uint8)
    rows[moved] = rows.clone()
    batch.out_cache_loc = moved[problem.new_slots]
    out = problem.attend(backend, batch)
    problem.cache = rows[moved].view(problem.cache.dtype)
    problem.check(out)


@pytest.mark.parametrize("ranks, heads", [(2, HEADS), (8, HEADS), (2, 128)], ids=str)
@pytest.mark.parametrize("step", ["decode", "prompts"])
def test_ranks_of_decode_context_parallelism_merge_by_natural_log_sum_exp(make, parallel, ranks, step, heads):
    """Row r of the lists lies on rank r % ranks; each rank has the heads of all."""
    mode, lengths, new = STEPS[step]
    parts, whole = [], None
    for rank in range(ranks):
        sizes = dict.fromkeys(("tp_size", "moe_tp_size", "attn_tp_size", "attn_dcp_size"), ranks)
        parallel(**sizes, attn_dcp_rank=rank, dcp_enabled=True)
        runner, backend = make(mode=mode, heads=heads)
        problem = Problem(runner, mode, lengths, new)
        rows = problem.cache.view(torch.uint8).clone()
        whole = rows if rank == 0 else whole
        mine = torch.arange(rank, len(rows), ranks)
        problem.cache.view(torch.uint8).fill_(0xFF)
        problem.cache.view(torch.uint8)[: len(mine)] = rows[mine]
        batch = problem.batch()
        backend.init_forward_metadata(batch)
        k, k_rope = problem.new_rows.split([LATENT, ROPE], dim=-1)
        with forward_context(ForwardContext(attn_backend=backend)):
            given = {"q_rope": problem.q_rope, "k_rope": k_rope, "topk_indices": problem.lists}
            out, lse = make_layer(heads)(problem.q, k, k, batch, **given)
        assert lse.shape == (problem.tokens, heads) and lse.dtype == torch.float32
        assert backend.workspace.numel() == sparse_workspace_floats(heads, H20_SMS)
        parts.append((out.view(problem.tokens, heads, LATENT), lse))
        whole[mine] = problem.cache.view(torch.uint8)[: len(mine)]
    problem.cache = whole.view(problem.cache.dtype)
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    merged = sum(part.float() * (own - lse).exp()[..., None] for part, own in parts)
    assert all(own.isneginf().any() == (step == "decode") for _, own in parts[1:2])
    problem.check(merged.bfloat16())


@pytest.mark.parametrize("heads", [8, 12, 32, 128])
def test_other_numbers_of_heads(make, heads):
    runner, backend = make(heads=heads)
    Problem(runner, *STEPS["decode"]).run(backend)


@pytest.mark.parametrize("heads, prefills", [(8, True), (16, True), (32, True), (64, False), (128, False)])
def test_prompts_are_etaps_where_sglangs_kernels_would_pad_heads(make, sglang_calls, calls, heads, prefills):
    runner, backend = make(heads=heads, mode=ForwardMode.EXTEND)
    Problem(runner, *STEPS["prompts"]).run(backend)
    assert (len(calls), len(sglang_calls)) == ((1, 0) if prefills else (0, 1))


@pytest.mark.parametrize("prefill", ["flashmla_sparse", "flashmla_auto"])
def test_prompts_go_where_the_user_sends_them(make, sglang_calls, calls, prefill):
    runner, backend = make(mode=ForwardMode.EXTEND, prefill=prefill)
    own = ATTENTION_BACKENDS["dsa"](make_runner(prefill=prefill, fp8_kv_cache=backend.dsa_kv_cache_store_fp8))
    assert backend.get_topk_transform_method(ForwardMode.EXTEND) == own.get_topk_transform_method(ForwardMode.EXTEND)
    if not backend.dsa_kv_cache_store_fp8:
        Problem(runner, *STEPS["prompts"]).run(backend)
        assert (len(calls), len(sglang_calls)) == (0, 1)


def test_lists_of_prompts_name_rows_of_the_cache(make):
    """As SGLang's indexer is told; rows of a prompt's own keys would be another numbering."""
    _, backend = make(mode=ForwardMode.EXTEND)
    assert backend.get_topk_transform_method(ForwardMode.EXTEND).name == "PAGED"


def test_short_prompts_stay_with_sglangs_dense_attention(make):
    runner, backend = make(mode=ForwardMode.EXTEND)
    route = attention_backend_handler.AttentionBackendRegistry.get_handler("etap")
    layer = SimpleNamespace(use_dsa=True)
    for length, method in ((TOP_K, AttnForwardMethod.MHA_ONE_SHOT), (TOP_K + 1, AttnForwardMethod.MLA)):
        batch = Problem(runner, ForwardMode.EXTEND, [length], length).batch()
        backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=backend)):
            assert route(layer, batch) == method


def test_it_is_sglangs_backend_that_needs_no_lengths_on_the_host(make):
    _, backend = make()
    # SGLang captures CUDA graphs of prefill and of draft extension for the classes that it knows.
    assert isinstance(backend, DeepseekSparseAttnBackend)
    assert backend.needs_cpu_seq_lens is False and backend.get_cuda_graph_seq_len_fill_value() == 1
    # Else full CUDA graphs of prefill would be captured for its dense attention over chunks of a prefix.
    assert get_schedule().disable_chunked_prefix_cache


def test_queries_lists_and_cache_reach_the_kernel_without_a_copy(make, calls):
    runner, backend = make()
    problem = Problem(runner, *STEPS["decode"])
    problem.run(backend)
    (call,) = calls
    given = {"q": problem.q, "q_rope": problem.q_rope, "indices": problem.lists, "kv_cache": problem.cache}
    for name, tensor in given.items():
        assert (call[name].data_ptr(), call[name].stride()) == (tensor.data_ptr(), tensor.stride()), name
    assert call["valid_counts"].tolist() == [70, 128, 128, 1]


def test_the_workspace_is_one_for_all_steps(make, calls):
    runner, backend = make(mode=ForwardMode.EXTEND)
    Problem(runner, *STEPS["prompts"]).run(backend)
    Problem(runner, *STEPS["decode"], seed=1).run(backend)
    assert {call["workspace"].data_ptr() for call in calls} == {backend.workspace.data_ptr()}
    assert backend.workspace.numel() == sparse_workspace_floats(HEADS, H20_SMS)


def test_a_layer_reads_nothing_back_to_the_host(make, monkeypatch):
    runner, backend = make()
    problem = Problem(runner, *STEPS["decode"])
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    monkeypatch.setattr(sparse, "sparse_mla_decode", lambda q, *rest, **more: (torch.empty_like(q), None))
    monkeypatch.setattr(runner.token_to_kv_pool, "set_mla_kv_buffer", lambda *arguments: None)
    forbid_host_reads(monkeypatch)
    problem.attend(backend, batch)


@pytest.mark.parametrize("step", ["decode", "drafts"])
def test_metadata_captured_in_a_cuda_graph_serves_later_steps(make, calls, step):
    """A graph keeps addresses of the capture; later steps only plan again, into the same buffers."""
    mode, lengths, new = STEPS[step]
    runner, backend = make(mode=mode)
    backend.init_cuda_graph_state(8, 8 * DRAFTS)
    first = Problem(runner, mode, [DRAFTS] * 4, new)
    backend.init_forward_metadata_out_graph(first.batch(), in_capture=True)
    captured = backend.forward_metadata
    first.check(first.attend(backend, first.batch()))
    later = Problem(runner, mode, lengths, new, seed=1)
    backend.init_forward_metadata_out_graph(later.batch())
    assert backend.forward_metadata is captured
    later.check(later.attend(backend, later.batch()))
    before, after = ({name: call[name].data_ptr() for name in ("valid_counts", "workspace")} for call in calls)
    assert before == after
    assert calls[1]["valid_counts"].tolist() == later.seen().clamp(max=TOP_K).tolist()


def test_tokens_that_pad_a_step_give_zeros(make):
    """SGLang pads lists to the queries by empty ones; counts it pads for some steps only."""
    runner, backend = make()
    problem = Problem(runner, *STEPS["decode"])
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    real = problem.attend(backend, batch)
    for name in ("q", "q_rope"):
        part = getattr(problem, name)
        setattr(problem, name, torch.cat([part, torch.ones_like(part[:2])]))
    problem.tokens += 2
    out = problem.attend(backend, batch)
    assert not out[4:].any()
    torch.testing.assert_close(out[:4], real, rtol=0, atol=2e-2)


def test_counts_of_tokens_that_are_not_there_are_left_out(make, calls):
    runner, backend = make()
    problem = Problem(runner, *STEPS["decode"])
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    counts = backend.forward_metadata.dsa_cache_seqlens_int32
    padded = torch.cat([counts, torch.full((3,), 2**30, dtype=torch.int32)])
    object.__setattr__(backend.forward_metadata, "dsa_cache_seqlens_int32", padded)
    problem.check(problem.attend(backend, batch))
    assert calls[0]["valid_counts"].tolist() == counts.tolist()


def test_entries_that_name_no_row_may_be_anywhere(make):
    runner, backend = make()
    problem = Problem(runner, *STEPS["decode"])
    problem.lists[0, 3:9] = NOTHING
    problem.lists[1, ::2] = 2**31 - 1
    problem.lists[2] = NOTHING
    problem.run(backend)


@pytest.fixture
def factory(make, monkeypatch):
    """SGLang's, for a draft model that reuses the target's lists."""
    runner, _ = make(mode=ForwardMode.TARGET_VERIFY)
    return draft_factory(runner, monkeypatch, reuses_lists=True)


def test_a_draft_models_steps_share_a_workspace(factory, caplog):
    with caplog.at_level("INFO", logger=sparse.__name__):
        steps = factory.create_decode_backend()
    assert not caplog.messages
    assert isinstance(steps, dsa_backend.DeepseekSparseAttnMultiStepBackend)
    assert [type(backend) for backend in steps.attn_backends] == [ETAPSparseBackend] * (DRAFTS - 2)
    assert [backend.speculative_step_id for backend in steps.attn_backends] == [0, 1]
    assert len({backend.workspace.data_ptr() for backend in steps.attn_backends}) == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "graph"])
def test_a_draft_models_steps_read_the_lists_of_the_call(factory, calls, ahead):
    """The first step's lists are those that the draft's extension left, in a buffer of its own."""
    steps, runner = factory.create_decode_backend(), factory.draft_model_runner
    problem = Problem(runner, *STEPS["decode"])
    batch = problem.batch(spec_info=None)
    if ahead:
        steps.init_cuda_graph_state(8, 8)
        steps.init_forward_metadata_out_graph(Problem(runner, ForwardMode.DECODE, [1] * 4, 1).batch(), in_capture=True)
        problem = Problem(runner, *STEPS["decode"])
        steps.init_forward_metadata_out_graph(batch)
    else:
        steps.init_forward_metadata(batch)
    seeds = torch.full((16, TOP_K), 2**30, dtype=torch.int32)
    seeds[: problem.tokens] = problem.lists
    lists = [seeds[: problem.tokens], problem.lists]
    for backend, given in zip(steps.attn_backends, lists, strict=True):
        problem.check(problem.attend(backend, batch, given))
    assert [call["indices"].data_ptr() for call in calls] == [given.data_ptr() for given in lists]


def test_a_draft_models_cache_is_extended_by_a_backend_of_its_own(factory):
    extension = factory.create_draft_extend_backend()
    assert type(extension) is ETAPSparseBackend
    Problem(factory.draft_model_runner, *STEPS["draft extension"]).run(extension)


def test_sglangs_own_name_stays_sglangs(make):
    for name in ("dsa", "nsa"):
        _, own = make(name, prefill="flashmla_sparse", decode="fa3")
        assert type(own) is DeepseekSparseAttnBackend


@pytest.mark.parametrize("options, argument", [
    ({"dtype": torch.float16}, "dtype float16"), ({"kv_lora_rank": 256}, "head_dim 320"),
], ids=str)  # fmt: skip
def test_refuses(options, argument):
    with pytest.raises(ValueError, match=f"attention backend etap: {argument}"):
        ATTENTION_BACKENDS["etap"](make_runner(**options))


def test_refuses_a_cap_of_the_scores(make):
    runner, backend = make()
    problem, layer = Problem(runner, *STEPS["decode"]), make_layer()
    layer.logit_cap, batch = 30.0, problem.batch()
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=r"logit_cap 30\.0"):
        backend.forward_decode(problem.q, None, None, layer, batch, q_rope=problem.q_rope, topk_indices=problem.lists)


@pytest.mark.parametrize("options, text", [
    ({}, "KV cache bfloat16, prefill by etap"),
    ({"fp8_kv_cache": True}, "KV cache fp8_ds_mla, prefill by etap"),
    ({"heads": 128}, "KV cache bfloat16, prefill by flashmla_auto"),
    ({"prefill": "flashmla_sparse"}, "KV cache bfloat16, prefill by flashmla_sparse"),
], ids=str)  # fmt: skip
def test_the_log_names_cache_and_prefill(caplog, options, text):
    with caplog.at_level("INFO", logger=sparse.__name__):
        ATTENTION_BACKENDS["etap"](make_runner(**INDEXED | options))
    assert re.fullmatch(f"Attention backend etap: sparse attention, {text}, top-k by etap", caplog.messages[-1])


INDEX_STEPS = {
    "decode": (ForwardMode.DECODE, [K - 1, 1000, K + 1, 1], 1),
    "drafts": (ForwardMode.TARGET_VERIFY, [K + 2, 1000, 129, 4], DRAFTS),
    "draft extension": (ForwardMode.DRAFT_EXTEND_V2, [70, 1000, K + 3], DRAFTS),
}


class Indexed:
    """A step of SGLang's indexer with drawn logits in the place of DeepGEMM's, and the lists of a stable sort.

    Behind each row's length the logits are +inf; the last row has length 0, as one that pads a step.
    """

    def __init__(self, runner, backend, step, lengths=None, plan=None):
        self.backend = backend
        mode, of_step, new = INDEX_STEPS[step]
        self.problem = problem = Problem(runner, mode, lengths or of_step, new)
        self.batch = problem.batch()
        (plan or backend.init_forward_metadata)(self.batch)
        seen, random = problem.seen(), torch.Generator().manual_seed(1)
        assert torch.equal(backend.forward_metadata.dsa_seqlens_expanded, seen)
        backend.forward_metadata.dsa_seqlens_expanded[-1] = seen[-1] = 0
        width = backend.forward_metadata.real_page_table.shape[1] * 64
        self.logits = torch.full((problem.tokens, width + 256), torch.inf)[:, :width]
        owners = [request for request, new in enumerate(problem.new) for _ in range(new)]
        self.expected = torch.full((problem.tokens, K), NOTHING)
        for row, (owner, length) in enumerate(zip(owners, seen.tolist(), strict=True)):
            self.logits[row, :length] = torch.randint(-3, 4, (length,), generator=random) * -0.25  # with 0 and -0
            chosen = self.logits[row, :length].sort(descending=True, stable=True).indices[:K].sort().values
            self.expected[row, : len(chosen)] = problem.slots[owner, chosen]

    def metadata(self):
        return self.backend.get_indexer_metadata(0, self.batch)

    def run(self, monkeypatch, padding=0):
        monkeypatch.setattr(dsa_indexer, "deepgemm_paged_mqa_logits_split", lambda *_, **__: self.logits)
        monkeypatch.setattr(dsa_indexer, "resolve_paged_mqa_logits_metadata_fn", lambda: lambda *_: None)
        logits_kernel = SimpleNamespace(is_cutedsl=lambda: False, is_aiter=lambda: False)
        indexer = SimpleNamespace(
            paged_mqa_logits_backend=logits_kernel, sm_count=H20_SMS, n_heads=INDEX_HEADS, index_topk=K,
            _get_index_k_read_buffer=lambda *_: torch.zeros(1, 64 * 132, dtype=torch.uint8),
            _mask_init_and_local_tokens=lambda *_: None,
        )  # fmt: skip
        q = torch.zeros(len(self.logits) + padding, INDEX_HEADS, 128)
        given = (self.batch, 0, q, torch.zeros(len(q), INDEX_HEADS, 1), self.metadata())
        with forward_context(ForwardContext(attn_backend=self.backend)):
            return dsa_indexer.Indexer._get_topk_paged(indexer, *given)


@pytest.fixture
def top_k_calls(monkeypatch):
    """Arguments by name of each call of `sparse_top_k` by the plugin, and of SGLang's top-k."""
    etaps, sglangs, function = [], [], sparse.sparse_top_k
    record = lambda *given, **named: etaps.append((given, named)) or function(*given, **named)  # noqa: E731
    monkeypatch.setattr(sparse, "sparse_top_k", record)
    monkeypatch.setattr(DSATopKBackend, "topk_transform", lambda self, **named: sglangs.append(named))
    return etaps, sglangs


@pytest.mark.parametrize("step", INDEX_STEPS)
def test_sglangs_indexer_gets_the_rows_of_a_stable_sort(make, top_k_calls, monkeypatch, step):
    indexed = Indexed(*make(mode=INDEX_STEPS[step][0], **INDEXED), step)
    lists = indexed.run(monkeypatch, padding=3)
    assert torch.equal(lists[:-3].long(), indexed.expected) and (lists[-3:] == NOTHING).all()
    (((logits, lengths, k), named),), _ = top_k_calls
    plan = indexed.backend.forward_metadata
    assert logits is indexed.logits and lengths is plan.dsa_seqlens_expanded and k == K
    assert named == {"block_table": plan.real_page_table, "page_size": 64, "early_lengths": True}


@pytest.mark.parametrize("step", ["decode", "drafts"])
def test_a_cuda_graph_selects_by_the_lengths_of_its_replay(make, step):
    """It keeps the indexer's metadata of the capture."""
    runner, backend = make(mode=INDEX_STEPS[step][0], **INDEXED)
    backend.init_cuda_graph_state(8, 8 * DRAFTS)
    plan = backend.init_forward_metadata_out_graph
    captured = Indexed(runner, backend, step, [DRAFTS] * 4, lambda batch: plan(batch, in_capture=True)).metadata()
    replayed = Indexed(runner, backend, step, plan=plan)
    assert torch.equal(captured.topk_transform(replayed.logits, K).long(), replayed.expected)


def test_the_indexers_top_k_reads_nothing_back_to_the_host(make, monkeypatch):
    indexed = Indexed(*make(**INDEXED), "decode")
    metadata = indexed.metadata()
    monkeypatch.setattr(sparse, "sparse_top_k", lambda *_, **__: "lists")
    forbid_host_reads(monkeypatch)
    assert metadata.topk_transform(indexed.logits, K) == "lists"


def test_sglang_selects_for_prompts(make, top_k_calls):
    """Prompts' rows begin somewhere, have another method, or are more than requests have lengths."""
    indexed = Indexed(*make(**INDEXED), "decode")
    metadata, starts = indexed.metadata(), torch.zeros(4, dtype=torch.int32)
    metadata.topk_transform(indexed.logits, K, ks=starts)
    metadata.topk_transform(indexed.logits, K, ks=starts, ke_offset=starts, batch_idx_list=[0])
    metadata.topk_transform(indexed.logits[:3], K)
    ragged = vars(metadata) | {"topk_transform_method": TopkTransformMethod.RAGGED}
    type(metadata)(**ragged).topk_transform(indexed.logits, K)
    etaps, sglangs = top_k_calls
    assert not etaps and [call["row_starts"] is starts for call in sglangs] == [True, True, False, False]
    assert sglangs[1]["lengths"] is starts and sglangs[1]["batch_idx_list"] == [0]


def test_a_draft_models_steps_select_too(make, monkeypatch):
    runner, _ = make(mode=ForwardMode.TARGET_VERIFY, **INDEXED)
    factory = draft_factory(runner, monkeypatch)
    for backend in (*factory.create_decode_backend().attn_backends, factory.create_draft_extend_backend()):
        backend.init_forward_metadata(batch := Problem(runner, *STEPS["decode"]).batch(spec_info=None))
        assert type(backend.get_indexer_metadata(0, batch)) is sparse.ETAPIndexerMetadata


@pytest.mark.parametrize("options, environment, reason", [
    ({}, {"ETAP_TOP_K": "0"}, "ETAP_TOP_K=0"),
    ({"of_model": {"index_topk": 500}}, {}, "index_topk 500"),
    ({"of_model": {"index_topk": K, "index_kpool": 4}}, {}, "pools of keys (index_kpool)"),
    ({}, {"SGLANG_DSA_FUSE_TOPK": "0"}, "lists of positions (SGLANG_DSA_FUSE_TOPK=0 or IndexShare of prefill servers)"),
    ({"hisparse_coordinator": object()}, {}, "a KV cache in host memory (HiSparse)"),
    ({"ranks": 2}, {}, "decode context parallelism"),
    ({"kernel": "flashinfer"}, {}, "dsa_topk_backend flashinfer"),
], ids=str)  # fmt: skip
def test_what_is_sglangs_is_named(parallel, monkeypatch, caplog, options, environment, reason):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = INDEXED | options
    if ranks := options.pop("ranks", None):
        sizes = dict.fromkeys(("tp_size", "moe_tp_size", "attn_tp_size", "attn_dcp_size"), ranks)
        parallel(**sizes, attn_dcp_rank=0, dcp_enabled=True)
    if kernel := options.pop("kernel", None):
        monkeypatch.setattr(DSATopKBackend, "resolve", lambda runner: DSATopKBackend(kernel))
    coordinator = options.pop("hisparse_coordinator", None)
    runner = make_runner(**options)
    runner.hisparse_coordinator = coordinator
    with caplog.at_level("INFO", logger=sparse.__name__):
        backend = ATTENTION_BACKENDS["etap"](runner)
    assert caplog.messages[-1].endswith(f", top-k by SGLang, {reason}")
    backend.forward_metadata = SimpleNamespace(paged_mqa_schedule_metadata=None, paged_mqa_ctx_lens_2d=None)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    assert type(backend.get_indexer_metadata(0, batch)) is DSAIndexerMetadata


def test_the_log_says_that_no_prefix_is_shared(caplog, monkeypatch):
    monkeypatch.setenv("ETAP_SHARED_PREFIX", "1")
    with caplog.at_level("INFO", logger=sparse.__name__):
        ATTENTION_BACKENDS["etap"](make_runner(**INDEXED))
    assert caplog.messages[-1].endswith("top-k by etap; ETAP_SHARED_PREFIX=1 has no effect on it")
