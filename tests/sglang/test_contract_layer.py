"""SGLang's pools, batches and attention layer around our backend, on CPU tensors, with the model's KV cache and FP8.

The runner is the one that SGLang's own attention tests use, with its real pools and configuration. The reference
executor stands in for the kernels and Triton's interpreter runs SGLang's kernels, but for the one that writes the
cache's rows, which it cannot run. FlashInfer's wrappers, which serve longer prefill, need a GPU and are replaced; that
prefill, real CUDA graphs and memory are not tested here.
"""

import copy
import ctypes
import dataclasses
import importlib.util
import itertools
import re
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import attention_registry, flashattention_backend, flashinfer_mla_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common import attention_backend_handler, utils
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import (
    MLAAttentionCase,
    MockMLAModelRunner,
    TinyMLAModelConfig,
)

from etap_backend.reference import mla_decode_reference
from etap_backend.sglang import backend as backend_module
from etap_backend.sglang import prompts as prompts_module
from etap_backend.sglang.prompts import prompt_runs
from etap_backend.short_prompts import MAX_RUNS, equal_runs

load_plugins()

HEADS, LATENT, ROPE, PAGE = 16, 512, 64, 64
CONTEXT = 1024
SCALE = 0.1147  # not 1/sqrt of anything: the layer's own, as after YaRN
LENGTHS = [70, 129, 1]
DRAFTS = 4
WILD = 2**30


class Unused:
    """In place of a wrapper of FlashInfer, which takes a workspace on a GPU."""

    def __init__(self, *arguments, **options):
        pass


class LatentAttention:
    """FlashInfer's attention to latent rows, in torch."""

    def __init__(self, *arguments, **options):
        pass

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_lens, heads, latent, rope, page, causal, scale, *types):
        assert (latent, rope, page, causal) == (LATENT, ROPE, 1, True)
        assert kv_lens.tolist() == (kv_indptr[1:] - kv_indptr[:-1]).tolist()
        rows = zip(qo_indptr.tolist(), qo_indptr[1:].tolist(), kv_indptr.tolist(), kv_indptr[1:].tolist(), strict=False)
        self.requests = [(slice(a, b), kv_indices[c:d].long()) for a, b, c, d in rows]

    def run(self, q, q_rope, latent, rope, out):
        cache = torch.cat([latent, rope], dim=-1)
        for tokens, rows in self.requests:
            keys, table, length = cache[rows, 0][None], torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(rows)])
            queries = torch.cat([q[tokens], q_rope[tokens]], dim=-1)[None]
            out[tokens] = mla_decode_reference(queries, keys, table, length, SCALE)[0].to(out.dtype)
        return out


def write_rows(buffer, loc, latent, rope):
    """What the pool's kernels do: under decode context parallelism each rank keeps its slots."""
    size, rank = get_parallel().attn_dcp_size, get_parallel().attn_dcp_rank
    mine = loc % size == rank
    buffer[loc[mine] // size] = torch.cat([latent, rope], dim=-1)[mine]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_triton", write_rows)
    # Where decode context parallelism has a kernel of its own.
    monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_dcp_sharded_triton", write_rows, raising=False)
    monkeypatch.setattr(flashinfer_mla_backend, "BatchMLAPagedAttentionWrapper", Unused)
    monkeypatch.setattr(flashinfer_mla_backend, "BatchPrefillWithRaggedKVCacheWrapper", Unused)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))


@pytest.fixture
def parallel():
    """Sets widths and ranks until the test ends."""
    with ExitStack() as stack:
        yield lambda **values: stack.enter_context(get_parallel().override(**values))


@pytest.fixture(autouse=True)
def one_rank(parallel):
    parallel(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)


def make_runner(requests=8, heads=HEADS, mode=ForwardMode.DECODE, page_size=PAGE, dtype=torch.bfloat16, **options):
    """SGLang's runner for tests, with pools for this many requests; in modes with drafts for DRAFTS tokens."""
    drafts = () if mode.is_decode() else (DRAFTS,) * requests
    case = MLAAttentionCase("etap", "etap", mode, heads, page_size, (1,) * requests, drafts)
    dimensions = {"kv_lora_rank": options.pop("kv_lora_rank", LATENT), "qk_rope_head_dim": ROPE}
    config = TinyMLAModelConfig(num_heads=heads, hidden_size=64, context_len=CONTEXT, **dimensions)
    common = {"dtype": dtype, "device": "cpu", "max_context_len": CONTEXT}
    return MockMLAModelRunner(case=case, model_config=config, **common, **dimensions, **options)


class Problem:
    """Requests with their cache, of which the last `new` tokens of each come with the step's queries.

    What a step must not read is poison: NaN in every cache row past a request's length, and beyond its length in the
    table of its tokens a slot that does not exist.
    """

    def __init__(self, runner, lengths, s_q=1, new=None, ranks=1, seed=0):
        """s_q: query tokens of each request, or a number for each."""
        random = torch.Generator().manual_seed(seed)
        self.runner, self.lengths, self.s_q, self.ranks = runner, lengths, s_q, ranks
        self.query_lens = [s_q] * len(lengths) if isinstance(s_q, int) else s_q
        self.new = self.query_lens if new is None else [new] * len(lengths)
        heads, dtype, tokens = runner.model_config.num_attention_heads * ranks, runner.dtype, sum(self.query_lens)
        # As the model hands them over: the latent part out of a product with the heads in front, the rope part strided.
        self.q = torch.randn(heads, tokens, LATENT, generator=random).to(dtype).transpose(0, 1)
        wide = torch.randn(tokens, heads, 128 + ROPE, generator=random).to(dtype)
        self.q_rope = wide[..., 128:]
        rows = [torch.randn(length, LATENT + ROPE, generator=random).to(dtype) for length in lengths]
        for keys, new in zip(rows, self.new, strict=True):
            keys[len(keys) - new :] *= 2  # they weigh much, so that a length one too short shows
        self.new_rows = torch.cat([keys[len(keys) - new :] for keys, new in zip(rows, self.new, strict=True)])
        self.kv = [keys.to(runner.kv_cache_dtype) for keys in rows]
        table = runner.req_to_token_pool.req_to_token
        table.fill_(WILD)
        page = runner.page_size * ranks
        order = 1 + torch.randperm(len(lengths) * (CONTEXT // page), generator=random)
        self.slots = (order[:, None] * page + torch.arange(page)).view(len(lengths), -1).int()
        # Not the first rows of the pool: a batch may hold any requests of it.
        self.requests = torch.arange(table.shape[0])[-len(lengths) :]
        for request, slots, length in zip(self.requests.tolist(), self.slots, lengths, strict=True):
            table[request, :length] = slots[:length]
        self.cache = runner.token_to_kv_pool.get_key_buffer(0)
        self.write(rank=0)

    def write(self, rank, keep=None):
        """Write the cache of one rank, all but the last `keep` tokens of each request, the new ones when None."""
        self.cache.fill_(float("nan"))
        for rows, slots, new in zip(self.kv, self.slots, self.new, strict=True):
            mine = torch.arange(rank, max(rank, len(rows) - (new if keep is None else keep)), self.ranks)
            self.cache[slots[mine].long() // self.ranks, 0] = rows[mine]

    def batch(self, mode=ForwardMode.DECODE, seq_lens=None, **fields):
        """SGLang's batch; without lengths on the host, as for a backend that needs none."""
        positions = [range(length - new, length) for length, new in zip(self.lengths, self.new, strict=True)]
        out_cache_loc = [s[p.start : p.stop] for s, p in zip(self.slots, positions, strict=True)]
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.lengths),
            input_ids=torch.zeros(len(self.new_rows), dtype=torch.int64),
            req_pool_indices=self.requests,
            seq_lens=torch.tensor(self.lengths if seq_lens is None else seq_lens),
            seq_lens_cpu=None,
            seq_lens_sum=None,
            out_cache_loc=torch.cat(out_cache_loc).long(),
            positions=torch.cat([torch.tensor(p) for p in positions]),
            **fields,
        )

    def paged(self):
        """Cache, pages, lengths as the reference takes them; it never sees SGLang's pools."""
        pages = max(1, -(-max(self.lengths) // PAGE))
        cache = torch.zeros(len(self.lengths) * pages, PAGE, LATENT + ROPE, dtype=self.runner.dtype)
        for request, rows in enumerate(self.kv):
            # Every FP8 number is one of bfloat16 and of float16.
            cache.view(len(self.lengths), -1, LATENT + ROPE)[request, : len(rows)] = rows.to(cache.dtype)
        return cache, torch.arange(len(cache)).view(len(self.lengths), pages), torch.tensor(self.lengths)

    def check(self, out):
        """At most twice the error that the same attention has when torch computes it in the queries' type."""
        exact, plain = (self.attention(dtype)[0].flatten(1) for dtype in (torch.float64, self.runner.dtype))
        assert out.shape == (len(self.q), self.q.shape[1] * LATENT) and out.dtype == self.runner.dtype
        error = (out.double() - exact).pow(2).mean().sqrt()
        assert error <= 2 * (plain.double() - exact).pow(2).mean().sqrt(), error

    def attention(self, dtype=torch.float64):
        """Of each query token in `dtype`, with log-sum-exp: [tokens, heads, 512] and [tokens, heads]."""
        cache, table, lengths = self.paged()
        parts = torch.cat([self.q, self.q_rope], dim=-1).split(self.query_lens)
        results = [
            mla_decode_reference(q[None], cache, table[i : i + 1], lengths[i : i + 1], SCALE, dtype=dtype)
            for i, q in enumerate(parts)
        ]
        return [torch.cat([result[0] for result in part]) for part in zip(*results, strict=True)]


def make_layer(heads=HEADS, layer_id=0):
    return RadixAttention(heads, LATENT + ROPE, SCALE, num_kv_heads=1, layer_id=layer_id, v_head_dim=LATENT)


def attend(backend, problem, batch, *, split=True, save=True, layer_id=0):
    """One layer, called as SGLang's MLA models call it."""
    k, k_rope = problem.new_rows.unsqueeze(1).split([LATENT, ROPE], dim=-1)
    layer = make_layer(problem.q.shape[1], layer_id)
    with forward_context(ForwardContext(attn_backend=backend)):
        if split:
            keys = (k, k) if save else (None, None)
            return layer(problem.q, *keys, batch, save_kv_cache=save, q_rope=problem.q_rope, k_rope=k_rope)
        q = torch.cat([problem.q, problem.q_rope], dim=-1)
        return layer(q, problem.new_rows.unsqueeze(1), k, batch, save_kv_cache=save)


@pytest.fixture(params=[False, True], ids=["model's cache", "FP8 cache"])
def make(request):
    """Makes a runner and our backend on it, by its name; stale entries of its block table are wild."""

    def both(name="etap", **options):
        runner = make_runner(**({"fp8_kv_cache": request.param} | options))
        backend = ATTENTION_BACKENDS[name](runner)
        backend._block_table.fill_(WILD)
        return runner, backend

    return both


OTHER_PAGES = [1, 2, 16, 32, 256]


@pytest.mark.parametrize("split", [True, False], ids=["split", "concatenated"])
@pytest.mark.parametrize(
    "lengths, options",
    [
        *((LENGTHS, {}), ([1024], {}), ([300, 64, 65], {"dtype": torch.float16}), ([70, 129], {"heads": 128})),
        *(([70, 300, 1, 1024], {"page_size": page}) for page in OTHER_PAGES),
        ([70, 129], {"page_size": 1, "heads": 128}),
    ],
    ids=str,
)
def test_decodes_as_exactly_as_torch(make, lengths, options, split):
    runner, backend = make(**options)
    problem = Problem(runner, lengths)
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    problem.check(attend(backend, problem, batch, split=split))


@pytest.mark.parametrize("heads", [8, 12], ids=["Kimi-K2 on 8 ranks", "Kimi-K3 on 8 ranks"])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY], ids=str)
def test_other_numbers_of_heads(make, heads, mode):
    runner, backend = make(heads=heads, mode=mode)
    problem = Problem(runner, [70, 200], s_q=1 if mode.is_decode() else DRAFTS)
    batch = problem.batch(mode, seq_lens=None if mode.is_decode() else [length - DRAFTS for length in problem.lengths])
    backend.init_forward_metadata(batch)
    assert [call.early_loads for call in backend.forward_metadata] == [True]
    problem.check(attend(backend, problem, batch))


def test_the_pool_of_a_model_with_linear_attention_besides(make):
    """Kimi-K3's has rows for its 24 layers with latent attention only, and knows them by the model's numbers."""
    runner, _ = make(heads=12)
    problem, rows = Problem(runner, LENGTHS), runner.token_to_kv_pool
    runner.token_to_kv_pool = memory_pool.HybridLinearKVPool(
        size=rows.size, dtype=rows.dtype, page_size=PAGE, head_num=1, head_dim=LATENT + ROPE, device="cpu",
        full_attention_layer_ids=[3], mamba_pool=None, use_mla=True, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        full_kv_pool=rows,
    )  # fmt: skip
    backend, batch = ATTENTION_BACKENDS["etap"](runner), problem.batch()
    backend.init_forward_metadata(batch)
    problem.check(attend(backend, problem, batch, layer_id=3))


def test_it_is_a_flashmla_backend_that_needs_no_lengths_on_the_host(make):
    _, backend = make()
    # SGLang captures CUDA graphs of draft extension for the classes that it knows.
    assert isinstance(backend, FlashMLABackend)
    assert backend.needs_cpu_seq_lens is False
    assert not backend.supports_ragged_verify_graph
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_rows_written_before_are_not_written_again(make):
    runner, backend = make()
    problem = Problem(runner, LENGTHS)
    problem.write(rank=0, keep=0)
    before = problem.cache.view(torch.uint8).clone()
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    problem.check(attend(backend, problem, batch, save=False))
    assert torch.equal(problem.cache.view(torch.uint8), before)


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "lengths, page", [([70, 129, 4], PAGE), ([1024], PAGE), ([65, 67], PAGE), ([70, 129, 4], 1), ([1024], 16)], ids=str
)
def test_verifies_drafts(make, lengths, page, ahead):
    """The batch's lengths are those without the drafts."""
    runner, backend = make(mode=ForwardMode.TARGET_VERIFY, page_size=page)
    problem = Problem(runner, lengths, s_q=DRAFTS)
    batch = problem.batch(ForwardMode.TARGET_VERIFY, [length - DRAFTS for length in lengths])
    (backend.init_forward_metadata_out_graph if ahead else backend.init_forward_metadata)(batch)
    problem.check(attend(backend, problem, batch))


def test_verifies_a_block_of_drafts_as_sglangs_own_backend_does(make, monkeypatch):
    """DFLASH and DSPARK verify by such a batch, and make a mask for backends that they do not know."""
    monkeypatch.setattr(flashinfer_mla_backend, "BatchMLAPagedAttentionWrapper", LatentAttention)
    runner, backend = make(mode=ForwardMode.TARGET_VERIFY)
    problem = Problem(runner, [70, 129, 4], s_q=DRAFTS)
    before = [length - DRAFTS for length in problem.lengths]
    for runs in (backend, ATTENTION_BACKENDS["flashinfer"](runner)):
        assert resolve_dflash_verify_mask_policy(runs) == (type(runs).__name__, False)
        block = DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=DRAFTS)
        batch = problem.batch(ForwardMode.TARGET_VERIFY, before, spec_info=block)
        batch.seq_lens_sum, batch.seq_lens_cpu = sum(before), torch.tensor(before)
        if hasattr(backend.kv_index_translator, "bind_own_plan"):
            backend.kv_index_translator.bind_own_plan(batch)
        runs.init_forward_metadata(batch)
        problem.check(attend(runs, problem, batch))
    block.ragged_verify_layout = object()
    with pytest.raises(ValueError, match="etap: ragged verification is not supported: wanted as many drafts of each"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_draft_model_of_a_block_is_refused(make, algorithm):
    """Its tokens attend to each other without a mask."""
    runner, _ = make(mode=ForwardMode.TARGET_VERIFY)
    draft = DraftRunner(runner)
    with get_spec().override(speculative_algorithm=algorithm, speculative_eagle_topk=1):
        assert ATTENTION_BACKENDS["etap"](runner).prefill is not None
        with pytest.raises(ValueError, match=f"etap: a draft model of {algorithm} attends without a mask: wanted"):
            ATTENTION_BACKENDS["etap"](draft)


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("page", [PAGE, 1])
def test_extends_a_draft_models_cache(make, ahead, page):
    runner, backend = make(mode=ForwardMode.DRAFT_EXTEND_V2, page_size=page)
    problem = Problem(runner, LENGTHS[:2], s_q=DRAFTS)
    batch = problem.batch(ForwardMode.DRAFT_EXTEND_V2, extend_seq_lens=torch.tensor([DRAFTS, DRAFTS]))
    (backend.init_forward_metadata_out_graph if ahead else backend.init_forward_metadata)(batch)
    problem.check(attend(backend, problem, batch))


def test_eager_draft_extension_pads_a_short_extension_to_the_whole_window(make):
    runner, backend = make(mode=ForwardMode.DRAFT_EXTEND_V2)
    problem = Problem(runner, [70, 129], s_q=DRAFTS)
    batch = problem.batch(ForwardMode.DRAFT_EXTEND_V2, [68, 129], extend_seq_lens=torch.tensor([2, DRAFTS]))
    backend.init_forward_metadata(batch)
    (call,) = backend.forward_metadata
    assert call.seq_lens.tolist() == [70, 129] and call.early_loads


def prompts(problem, mode=ForwardMode.EXTEND):
    """A prefill step of the problem's query tokens, with the lists on the host that SGLang makes of its requests."""
    query_lens = problem.query_lens
    cached = [length - new for length, new in zip(problem.lengths, query_lens, strict=True)]
    lists = {"extend_prefix_lens_cpu": cached, "extend_seq_lens_cpu": query_lens}
    tensors = {name.removesuffix("_cpu"): torch.tensor(value) for name, value in lists.items()}
    return problem.batch(mode, **lists, **tensors)


def route(batch, heads=HEADS):
    """The way that SGLang's model takes a batch with our name."""
    handler = attention_backend_handler.AttentionBackendRegistry.get_handler("etap")
    return handler(SimpleNamespace(num_local_heads=heads, chunked_prefix_cache_threshold=8192), batch)


@pytest.fixture
def sglangs_prefill(monkeypatch):
    """The steps that SGLang's prefill plans, runs and routes, each with whose it is."""
    steps = []
    flashinfers, fa3s = flashinfer_mla_backend.FlashInferMLAAttnBackend, flashattention_backend.FlashAttentionBackend
    for whose, place, name in (
        ("FlashInfer", flashinfers, "init_forward_metadata"),
        ("FlashInfer", flashinfers, "init_mha_chunk_metadata"),
        ("FlashInfer", flashinfers, "forward_extend"),
        ("FlashInfer", attention_backend_handler, "handle_attention_flashmla"),
        ("FlashAttention", fa3s, "init_forward_metadata"),
        ("FlashAttention", fa3s, "forward_extend"),
        ("FlashAttention", attention_backend_handler, "handle_attention_fa3"),
    ):

        def step(*arguments, done=(whose, name), **parts):
            steps.append(done)
            if done == ("FlashAttention", "init_forward_metadata"):  # what of its plan is read
                table = torch.zeros(arguments[1].batch_size, CONTEXT, dtype=torch.int32)
                arguments[0].forward_metadata = SimpleNamespace(page_table=table)

        monkeypatch.setattr(place, name, step)
    return steps


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED], ids=str)
@pytest.mark.parametrize(
    "lengths, query_lens, options",
    [
        ([1024], [128], {}),
        ([70, 129, 300], [5, 5, 5], {}),
        ([128, 70, 1024, 129, 64, 65], [128, 1, 1, 1, 64, 33], {}),
        ([70, 129, 3], [2, 2, 1], {"page_size": 1}),
        ([200, 129], [16, 16], {"heads": 128}),
        ([300, 64, 65], [2, 1, 2], {"page_size": 16}),
        ([300, 65, 66], [7, 64, 65], {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_decodes_short_prompts_over_cached_ones(make, sglangs_prefill, lengths, query_lens, options, mode):
    runner, backend = make(requests=8, **options)
    problem = Problem(runner, lengths, s_q=query_lens)
    batch = prompts(problem, mode)
    backend.init_forward_metadata(batch)
    problem.check(attend(backend, problem, batch))
    with forward_context(ForwardContext(attn_backend=backend)):
        assert route(batch, options.get("heads", HEADS)) == AttnForwardMethod.MLA and not sglangs_prefill


@pytest.mark.parametrize(
    "lengths, query_lens, options",
    [
        ([64, 64], [64, 64], {}),  # nothing is cached
        ([1024, 70], [129, 5], {}),
        ([200, 129], [17, 16], {"heads": 128}),
        ([70] * 5, [1, 2, 3, 4, 5], {}),  # as many calls
    ],
    ids=str,
)
def test_other_prompts_are_sglangs(make, sglangs_prefill, lengths, query_lens, options):
    runner, backend = make(**options)
    problem = Problem(runner, lengths, s_q=query_lens)
    batch = prompts(problem)
    backend.init_forward_metadata(problem.batch())  # what was planned before must not serve it
    backend.init_forward_metadata(batch)
    backend.init_mha_chunk_metadata(batch)
    attend(backend, problem, batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        route(batch, options.get("heads", HEADS))
    steps = ("init_forward_metadata", "forward_extend", "handle_attention_fa3")
    assert sglangs_prefill == [("FlashAttention", name) for name in steps]


def long_prompts(runner, problem):
    batch = prompts(problem)
    batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens, sum(problem.lengths)
    if hasattr(runner, "kv_index_translator"):
        runner.kv_index_translator.bind_own_plan(batch)
    return batch


@pytest.mark.parametrize("page", [PAGE, 1])
def test_long_prompts_are_planned_and_run_by_sglangs_default(make, monkeypatch, page):
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", latent := Latent())
    runner, backend = make(page_size=page)
    assert isinstance(backend.prefill, flashattention_backend.FlashAttentionBackend)
    problem = Problem(runner, [300, 129, 1000], s_q=[130, 129, 200])
    batch = long_prompts(runner, problem)
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata is None
    problem.check(attend(backend, problem, batch))
    assert len(latent.splits) == 1


def keys_in_full(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, **options):
    """FlashAttention 3's call over keys and values of each head, in torch."""
    tokens, rows = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert causal and max(map(int.__sub__, rows[1:], rows)) == max_seqlen_k
    assert max(map(int.__sub__, tokens[1:], tokens)) == max_seqlen_q
    outs = []
    for a, b, c, d in zip(tokens, tokens[1:], rows, rows[1:], strict=False):
        parts = [part.transpose(0, 1).float() for part in (q[a:b], k[c:d], v[c:d])]
        seen = torch.ones(b - a, d - c).tril(d - c - (b - a)).bool()
        out = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=softmax_scale)
        outs.append(out.transpose(0, 1).to(q.dtype))
    return torch.cat(outs)


@pytest.mark.parametrize("cached", [0, 70])
def test_prompts_that_keys_are_made_of_are_planned_for_flashattention(make, monkeypatch, cached):
    """As SGLang's model calls it: keys and values of a whole request, of which some may be cached."""
    monkeypatch.setattr(flashattention_backend, "flash_attn_varlen_func", keys_in_full)
    runner, backend = make()
    lengths = [300, 129]
    batch = long_prompts(runner, Problem(runner, lengths, s_q=[length - cached for length in lengths]))
    backend.init_forward_metadata(batch)
    backend.init_mha_chunk_metadata(batch)
    batch.attn_attend_prefix_cache, batch.mha_return_lse, batch.mha_one_shot = False, False, True
    random = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths) - 2 * cached, HEADS, 192, generator=random).bfloat16()
    k, v = (torch.randn(sum(lengths), HEADS, width, generator=random).bfloat16() for width in (192, 128))
    layer = RadixAttention(HEADS, 192, SCALE, num_kv_heads=HEADS, layer_id=0, v_head_dim=128)
    with forward_context(ForwardContext(attn_backend=backend)):
        out = layer(q, k, v, batch, save_kv_cache=False)
    starts = (torch.tensor([0, *lengths]) - torch.tensor([0, cached, cached])).cumsum(0).int()
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    most = {"max_seqlen_q": 300 - cached, "max_seqlen_k": 300}
    wanted = keys_in_full(q, k, v, starts, ends, softmax_scale=SCALE, causal=True, **most)
    assert torch.equal(out.view(wanted.shape), wanted)


class Latent:
    """FlashAttention 3's call over pages of latent rows, in torch; what it is asked for."""

    def __init__(self):
        self.splits, self.pages = [], []

    def __call__(self, q, k_cache, v_cache, qv, page_table, cache_seqlens, cu_seqlens_q, num_splits, **options):
        self.splits.append(num_splits)
        self.pages.append(len(k_cache))
        assert options["causal"] and options["softmax_scale"] == SCALE
        cache, parts = torch.cat([v_cache, k_cache], dim=-1)[:, :, 0], torch.cat([qv, q], dim=-1)
        ends = cu_seqlens_q.tolist()
        rows = zip(ends, ends[1:], page_table.int(), cache_seqlens, strict=False)
        results = [mla_decode_reference(parts[None, a:b], cache, t[None], n[None], SCALE) for a, b, t, n in rows]
        return torch.cat([out for out, _ in results], dim=1)[0].to(q.dtype)


@contextmanager
def deterministic(runner, value=True):
    """What the argument says, once a runner has published the arguments; 0.5.17's FlashAttention reads the runner's."""
    own = "enable_deterministic_inference"
    if dataclasses.is_dataclass(runner.server_args):
        object.__setattr__(runner.server_args, own, value)
    with get_exec().deterministic.override(**{own: value}):
        yield


def outputs_of(problem, requests, mode):
    """What these requests of a problem get in a step of their own, with caches and pages as in the problem."""
    runner = problem.runner
    backend = ATTENTION_BACKENDS["etap"](runner)
    tokens = [range(i * problem.s_q, (i + 1) * problem.s_q) for i in requests]
    rows = [token for some in tokens for token in some]
    drafts = 0 if mode.is_decode() else problem.s_q
    batch = problem.batch(mode)
    batch.batch_size, batch.req_pool_indices = len(requests), problem.requests[requests]
    batch.seq_lens = torch.tensor([problem.lengths[i] - drafts for i in requests])
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        out = make_layer(problem.q.shape[1])(
            problem.q[rows], None, None, batch, q_rope=problem.q_rope[rows], k_rope=None
        )
    return dict(zip(requests, out.split(problem.s_q), strict=True))


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY], ids=str)
@pytest.mark.parametrize("mine", [True, False], ids=["deterministic", "as it comes"])
def test_deterministic_bits_are_the_same_whatever_runs_beside_a_request(make, mode, mine):
    runner, _ = make(mode=mode)
    with deterministic(runner, mine):
        problem = Problem(runner, [1000, 700, 129, 70, 1024], s_q=1 if mode.is_decode() else DRAFTS)
        problem.write(rank=0, keep=0)
        together = outputs_of(problem, [0, 1, 2, 3, 4], mode)
        problem.check(torch.cat(list(together.values())))
        batches = [outputs_of(problem, some, mode) for some in ([0], [1, 0], [4, 2, 3], [3, 1], [2, 4, 1, 0])]
    same = [torch.equal(out, together[request]) for batch in batches for request, out in batch.items()]
    assert all(same) == mine


@pytest.mark.parametrize("make", [False], indirect=True, ids=[""])
@pytest.mark.parametrize("query_lens", [[5, 6], [130, 129]], ids=str)
def test_deterministic_prompts_are_flashattentions(make, model_layer, monkeypatch, query_lens):
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", latent := Latent())
    runner, _ = make()
    with deterministic(runner):
        backend = ATTENTION_BACKENDS["etap"](runner)
        problem = Problem(runner, [300, 129], s_q=query_lens)
        batch = long_prompts(runner, problem)
        backend.init_forward_metadata(batch)
        problem.check(attend(backend, problem, batch))
        assert latent.splits == [1] and backend.forward_metadata is None
        handler = attention_backend_handler.AttentionBackendRegistry.get_handler("etap")
        with forward_context(ForwardContext(attn_backend=backend)):
            assert handler(model_layer, batch) == AttnForwardMethod.MLA


class ScaledLayer(forward_mla.DeepseekMLAForwardMixin):
    """As much of SGLang's MLA layer as hands the attention its queries."""

    dcp_size, learnable_sink_param, use_dsa = 1, None, False
    current_attention_backend = "etap"

    def __init__(self, backend):
        self.backend, self.layer = backend, make_layer()

    def attn_mqa(self, q, k, v, batch, save_kv_cache=True, **parts):
        with forward_context(ForwardContext(attn_backend=self.backend)):
            raise Attended(self.layer(q, k, v, batch, save_kv_cache=save_kv_cache, **parts))


class Attended(Exception):
    """Ends a layer's forward behind its attention."""


@pytest.fixture
def models_lists(monkeypatch):
    """Puts back what is entered in SGLang's lists."""
    monkeypatch.setattr(
        attention_backend_handler.AttentionBackendRegistry,
        "_handlers",
        dict(attention_backend_handler.AttentionBackendRegistry._handlers),
    )
    parts = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    before = list(parts)
    yield
    parts[:] = before


@pytest.mark.parametrize("query_lens", [[1, 1], [130, 5], [5, 5]], ids=str)
@pytest.mark.parametrize("make", [False], indirect=True, ids=[""])
def test_queries_scaled_by_position(make, monkeypatch, models_lists, model_layer, query_lens):
    """Mistral-Large-3's, through the code of SGLang's layer."""
    monkeypatch.setattr(flashinfer_mla_backend, "BatchMLAPagedAttentionWrapper", LatentAttention)
    runner, _ = make()
    runner.model_config.hf_text_config.llama_4_scaling = {"beta": 0.1, "original_max_position_embeddings": 64}
    backend = ATTENTION_BACKENDS["etap"](runner)
    problem = Problem(runner, [300, 129], s_q=query_lens)
    batch = long_prompts(runner, problem)
    handler = attention_backend_handler.AttentionBackendRegistry.get_handler("etap")
    assert handler(model_layer, batch) == AttnForwardMethod.MLA
    backend.init_forward_metadata(batch)
    k, k_rope = problem.new_rows[:, None].split([LATENT, ROPE], dim=-1)
    scaling = utils._get_llama_4_scaling(64, 0.1, batch.positions).bfloat16()
    parts = (problem.q_rope, k_rope, problem.q, k, batch, None, batch.positions, None, scaling)
    with pytest.raises(Attended) as attended:
        ScaledLayer(backend).forward_absorb_core(*parts)
    assert (scaling != 1).all()
    problem.q, problem.q_rope = problem.q * scaling, problem.q_rope * scaling
    problem.check(attended.value.args[0])


@pytest.mark.parametrize("query_lens, ours", [([5, 64], True), ([130, 129], False)], ids=str)
def test_a_graph_of_prefill_runs_a_batch_of_fewer_tokens(make, monkeypatch, query_lens, ours):
    """SGLang's segments are captured, attention between them is not: it gets the batch's rows of the graph's."""
    if not importlib.util.find_spec("sglang.srt.model_executor.runner_utils.prefill_graph"):
        pytest.skip("this SGLang captures no prefill of such models")
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
    from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", Latent())
    runner, backend = make()
    problem, tokens = Problem(runner, [300, 200], s_q=query_lens), sum(query_lens)
    batch = long_prompts(runner, problem)
    batch.global_num_token_non_padded_cpu = tokens
    padded = [
        torch.cat([rows, torch.full_like(rows[:3], torch.nan)])
        for rows in (problem.q, problem.q_rope, problem.new_rows[:, None, :LATENT], problem.new_rows[:, None, LATENT:])
    ]
    captured = []
    kernel = backend_module.mla_decode
    monkeypatch.setattr(
        backend_module, "mla_decode", lambda *args, out, **more: captured.append(out) or kernel(*args, out=out, **more)
    )
    with (
        enable_breakable_cuda_graph(),
        prefill_graph_scope(full_graph=False, raw_num_tokens=tokens),
        set_forward_batch(batch),
        forward_context(ForwardContext(attn_backend=backend)),
    ):
        backend.init_forward_metadata(batch)
        assert (backend.forward_metadata is not None) == ours
        assert route(batch) == AttnForwardMethod.MLA
        out = make_layer()(padded[0], padded[2], padded[2], batch, q_rope=padded[1], k_rope=padded[3])
    problem.check(out[:tokens])
    assert len(out) == tokens + 3 and not out[tokens:].any()
    own = out.untyped_storage().data_ptr()
    assert [rows.untyped_storage().data_ptr() == own for rows in captured] == [True] * (2 if ours else 0)


@pytest.fixture
def model_layer():
    """What the way of a batch is read from, of SGLang's MLA layer."""
    return SimpleNamespace(
        num_local_heads=HEADS, qk_rope_head_dim=ROPE, flashinfer_mla_disable_ragged=False,
        disable_chunked_prefix_cache=False, chunked_prefix_cache_threshold=8192,
    )  # fmt: skip


@pytest.mark.parametrize("lengths, new", [([600, 700, 65], [300, 200, 65]), ([1024] * 8, [200] * 8)], ids=str)
@pytest.mark.parametrize("make", [True], indirect=True, ids=[""])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_reads_rows_of_an_fp8_cache_in_the_models_type(make, monkeypatch, page_size, lengths, new):
    """FlashAttention 3 is given the batch's pages alone, or the pool's where those are as many."""
    attention = Latent()
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", attention)
    runner, backend = make(requests=8, page_size=page_size)
    problem = Problem(runner, lengths, s_q=new)
    batch = long_prompts(runner, problem)
    backend.init_forward_metadata(batch)
    problem.check(attend(backend, problem, batch))
    pages = sum(-(-length // page_size) for length in lengths)
    assert attention.pages == [min(pages, len(problem.cache) // page_size)]


def test_routes_of_prefill_are_flashattentions(make, model_layer):
    """With an FP8 cache, too: keys are made of long prefixes only."""
    runner, backend = make()
    batch = prompts(Problem(runner, [600, 700], s_q=[300, 200]))
    batch.seq_lens_cpu = batch.seq_lens
    batch.get_max_chunk_capacity = lambda: 128 * 1024
    with forward_context(ForwardContext(attn_backend=backend)):
        for name, threshold in itertools.product(("etap", "etap_fp8_math"), (8192, 0)):
            model_layer.chunked_prefix_cache_threshold = threshold
            handler = attention_backend_handler.AttentionBackendRegistry.get_handler(name)
            method = handler(model_layer, batch)
            assert method == attention_backend_handler.handle_attention_fa3(model_layer, batch)
            assert method == (AttnForwardMethod.MLA if threshold else AttnForwardMethod.MHA_ONE_SHOT)


def test_no_prompts_are_sglangs(make, model_layer):
    """As of a rank that has none in a step of the others."""
    batch = prompts(Problem(make()[0], [70, 129], s_q=[5, 5]))
    batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [], []
    assert prompt_runs(batch, HEADS) == []


def test_the_way_of_a_batch_is_found_once(make, monkeypatch):
    runner, backend = make()
    batch, asked = prompts(Problem(runner, [70, 129, 300], s_q=[5, 5, 3])), []
    monkeypatch.setattr(prompts_module, "equal_runs", lambda lens: asked.append(lens) or equal_runs(lens))
    backend.init_forward_metadata(batch)
    for _ in range(3):
        assert route(batch) == AttnForwardMethod.MLA
    assert asked == [[5, 5, 3]]
    other = copy.copy(batch)
    other.extend_seq_lens_cpu = [5, 200]
    assert prompt_runs(other, HEADS) == [] and prompt_runs(batch, HEADS)
    assert prompt_runs(batch, 4096) == [] and len(asked) == 1


def test_prompts_of_decode_context_parallelism_are_flashinfers(make, parallel, sglangs_prefill):
    parallel(attn_dcp_size=2, dcp_enabled=True)
    runner, backend = make()
    batch = prompts(Problem(runner, [70, 129], s_q=[5, 5], ranks=2))
    backend.init_forward_metadata(batch)
    route(batch)
    wanted = ["init_forward_metadata", "handle_attention_flashmla"]
    assert sglangs_prefill == [("FlashInfer", name) for name in wanted]


@pytest.mark.parametrize("query_lens, ours", [([2, 2], True), ([2, 3], False)], ids=str)
def test_many_rows_of_small_pages_are_sglangs(make, sglangs_prefill, query_lens, ours):
    """Which reads the latent rows, too: the model's route is the same. An FP8 cache it would copy."""
    runner, backend = make(page_size=1)
    ours = ours or runner.kv_cache_dtype != runner.dtype
    batch = prompts(Problem(runner, [70, 129], s_q=query_lens))
    backend.init_forward_metadata(batch)
    assert sglangs_prefill == ([] if ours else [("FlashAttention", "init_forward_metadata")])
    assert route(batch) == AttnForwardMethod.MLA


def test_rows_that_pad_prompts_are_zeros(make):
    """As with data parallel attention, whose ranks have equally many rows."""
    runner, backend = make()
    problem = Problem(runner, [70, 129, 300], s_q=[3, 5, 5])
    problem.write(rank=0, keep=0)
    batch = prompts(problem)
    backend.init_forward_metadata(batch)
    rows = [torch.cat([part, torch.full_like(part[:3], torch.nan)]) for part in (problem.q, problem.q_rope)]
    with forward_context(ForwardContext(attn_backend=backend)):
        out = make_layer()(rows[0], None, None, batch, q_rope=rows[1], k_rope=None)
    problem.check(out[:13])
    assert len(out) == 16 and not out[13:].any()


def test_calls_of_short_prompts_keep_apart_and_share_a_workspace(make):
    runner, backend = make()
    backend.init_forward_metadata(prompts(Problem(runner, [70, 129, 300, 65], s_q=[3, 5, 4, 1])))
    schedules = [call.schedule for call in backend.forward_metadata]
    assert len(schedules) == MAX_RUNS and not any(call.early_loads for call in backend.forward_metadata)
    for name in ("work_ranges", "split_offsets"):
        assert len({getattr(schedule, name).data_ptr() for schedule in schedules}) == MAX_RUNS, name
    assert all(schedule.workspace is backend.schedule.workspace for schedule in schedules)
    fp8_cache = runner.kv_cache_dtype != runner.dtype
    assert {buffers.fp8_cache for buffers in (backend.schedule, *backend._prompt_schedules)} == {fp8_cache}


def test_planning_short_prompts_reads_nothing_back_to_the_host(make, monkeypatch):
    runner, backend = make()
    batch = prompts(Problem(runner, [70, 129, 66], s_q=[3, 5, 5]))
    monkeypatch.setattr(backend_module, "create_flashmla_kv_indices_triton", Recorder())
    for name in ("item", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *arguments, _name=name: pytest.fail(f"{_name} was called"))
    backend.init_forward_metadata(batch)
    assert len(backend.forward_metadata) == 2


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND_V2], ids=str)
def test_a_step_that_is_padded_behind_its_plan(make, mode):
    """As SGLang does with data parallel attention to draft steps and draft extensions outside of CUDA graphs."""
    runner, backend = make(mode=mode)
    s_q = 1 if mode.is_decode() else DRAFTS
    problem = Problem(runner, [70, 129, 300], s_q=s_q)
    problem.write(rank=0, keep=0)
    batch = problem.batch(mode, extend_seq_lens=torch.full((3,), s_q))
    backend.init_forward_metadata(batch)
    batch.mark_forward_metadata_ready()
    batch.batch_size, batch.seq_lens = 4, torch.tensor([*problem.lengths, 1])
    assert not batch.needs_forward_metadata_init()
    rows = [torch.cat([part, torch.full_like(part[:s_q], torch.nan)]) for part in (problem.q, problem.q_rope)]
    with forward_context(ForwardContext(attn_backend=backend)):
        out = make_layer()(rows[0], None, None, batch, q_rope=rows[1], k_rope=None)
    problem.check(out[: 3 * s_q])
    assert len(out) == 4 * s_q and not out[3 * s_q :].any()


def test_a_step_wider_than_the_pool_is_refused_and_writes_nothing(make):
    """Steps that only warm kernels up may have any number of requests."""
    runner, backend = make(requests=4)
    before = backend._block_table.clone(), backend._seq_lens.data_ptr()
    batch = Problem(runner, LENGTHS).batch()
    batch.batch_size, batch.seq_lens = 6, torch.ones(6, dtype=torch.int64)
    batch.req_pool_indices = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="wanted at most 4 requests in a step, those that the request pool holds, got 6"
    ):
        backend.init_forward_metadata(batch)
    assert torch.equal(backend._block_table, before[0]) and backend._seq_lens.data_ptr() == before[1]


def test_drafts_change_nothing_that_was_planned_beside_them(make):
    """SGLang asks every backend, where SGLANG_ENABLE_OVERLAP_PLAN_STREAM is set."""
    runner, backend = make(mode=ForwardMode.TARGET_VERIFY)
    problem = Problem(runner, [70, 129], s_q=DRAFTS)
    batch = problem.batch(ForwardMode.TARGET_VERIFY, [66, 125])
    backend.init_forward_metadata_out_graph(batch)
    backend.update_verify_buffers_to_fill_after_draft(object(), 2)
    problem.check(attend(backend, problem, batch))


def test_pages_that_a_connector_moves_are_decoded(make):
    """What Mooncake and NIXL register of the pool is all that they know of it: pages of so many bytes, at addresses."""
    runner, backend = make()
    problem, pool = Problem(runner, [70, 129, 300]), runner.token_to_kv_pool
    problem.write(rank=0, keep=0)
    (address,), (size,), (page_bytes,) = pool.get_contiguous_buf_infos()
    rows = problem.cache.view(torch.uint8)
    assert (address, size) == (rows.data_ptr(), rows.numel()) and page_bytes == size // len(rows) * PAGE
    sent = (ctypes.c_char * size).from_address(address)
    pages = torch.randperm(size // page_bytes - 1) + 1  # the first page is no request's
    moved, before = dict(enumerate(pages.tolist(), start=1)), bytes(sent)
    problem.cache.fill_(float("nan"))
    table = runner.req_to_token_pool.req_to_token
    for request, length in zip(problem.requests.tolist(), problem.lengths, strict=True):
        for first in range(0, length, PAGE):
            page = int(table[request, first]) // PAGE
            there, here = moved[page] * page_bytes, page * page_bytes
            sent[there : there + page_bytes] = before[here : here + page_bytes]
            end = min(first + PAGE, length)
            table[request, first:end] += (moved[page] - page) * PAGE
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    problem.check(attend(backend, problem, batch, save=False))


def test_a_layer_waits_for_its_pages_from_host_memory(make):
    """HiCache loads layer by layer, and SGLang's pool waits where a backend asks for a layer's rows."""
    runner, backend = make()
    problem, waited = Problem(runner, LENGTHS), []
    problem.write(rank=0, keep=0)
    runner.token_to_kv_pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    assert not waited
    problem.check(attend(backend, problem, batch, save=False))
    assert waited == [0]


class DraftRunner:
    """What SGLang's factory of draft backends asks of the draft model's runner, beside what a runner has."""

    def __init__(self, runner):
        self.__dict__.update(vars(runner))
        self.use_mla_backend, self.is_draft_worker, self.draft_attention_backend = True, True, "etap"

    hybrid_gdn_config = kimi_linear_config = mamba2_config = mambaish_config = None


def make_factory(runner, monkeypatch, topk=1, name="etap"):
    factory = DraftBackendFactory.__new__(DraftBackendFactory)
    factory.draft_model_runner, factory.topk, factory.speculative_num_steps = runner, topk, DRAFTS - 1
    factory.server_args, factory.draft_attn_backend = runner.server_args, name
    factory.seed_dsa_topk_from_draft_extend, factory.qsa_profile = False, None
    # Wrappers for models that are not MLA; they read configurations that a runner for tests lacks.
    for wrapper in ("attn_backend_wrapper_for_draft_decode", "attn_backend_wrapper_for_draft_extend"):
        if hasattr(attention_registry, wrapper):
            monkeypatch.setattr(attention_registry, wrapper, lambda runner, backend: backend)
    return factory


@pytest.mark.parametrize("page", [PAGE, 1])
def test_a_draft_models_steps_are_planned_once_for_all(make, monkeypatch, page):
    """In step i a request has i + 1 tokens more than the batch says; some are in tiles that a shorter one has not."""
    runner, target = make(mode=ForwardMode.TARGET_VERIFY, page_size=page)
    steps = make_factory(DraftRunner(runner), monkeypatch).create_decode_backend()
    assert len(steps.attn_backends) == DRAFTS - 2
    for buffer in ("_block_table", "schedule"):
        of_steps = {id(getattr(backend, buffer)) for backend in steps.attn_backends}
        assert len(of_steps) == 1 and id(getattr(target, buffer)) not in of_steps
    problem = Problem(runner, [70, 129, 66, 64, 2], new=1)
    fill, build = backend_module.create_flashmla_kv_indices_triton, backend_module.DecodeSchedule.build
    for step, backend in enumerate(steps.attn_backends):
        batch = problem.batch(seq_lens=[length - step - 1 for length in problem.lengths])
        batch.spec_info = object()
        for plan in (steps.init_forward_metadata, steps.init_forward_metadata_out_graph):
            backend._block_table.fill_(WILD)
            builds = []
            with monkeypatch.context() as patch:
                fills = Recorder()
                patch.setattr(backend_module, "create_flashmla_kv_indices_triton", fills.of(fill))
                patch.setattr(
                    backend_module.DecodeSchedule, "build", lambda *of, builds=builds: builds.append(of) or build(*of)
                )
                plan(batch)
            assert fills.calls == len(builds) == 1
            problem.check(attend(backend, problem, batch))


def test_a_draft_models_steps_on_an_idle_rank(make, monkeypatch):
    """Without a CUDA graph they plan nothing; with one its requests, which pad."""
    runner, _ = make(mode=ForwardMode.TARGET_VERIFY)
    steps = make_factory(DraftRunner(runner), monkeypatch).create_decode_backend()
    batch = Problem(runner, LENGTHS).batch()
    batch.forward_mode = ForwardMode.IDLE
    steps.init_forward_metadata_out_graph(batch)
    planned = [backend.forward_metadata[0].seq_lens.tolist() for backend in steps.attn_backends]
    assert planned == [[length + step + 1 for length in LENGTHS] for step in range(DRAFTS - 2)]
    steps.init_forward_metadata(batch)
    assert [backend.forward_metadata for backend in steps.attn_backends] == [None] * (DRAFTS - 2)


def test_draft_model_has_a_backend_that_extends_its_cache(make, monkeypatch):
    runner, backend = make(mode=ForwardMode.DRAFT_EXTEND_V2)
    extension = make_factory(DraftRunner(runner), monkeypatch).create_draft_extend_backend()
    assert type(extension) is type(backend) and extension.schedule.max_s_q == DRAFTS


@pytest.mark.parametrize("fp8_math", [False, True])
@pytest.mark.parametrize("make", [True], indirect=True, ids=[""])
def test_a_draft_model_multiplies_as_its_backends_name_says(make, monkeypatch, fp8_math):
    runner, _ = make(mode=ForwardMode.TARGET_VERIFY)
    factory = make_factory(DraftRunner(runner), monkeypatch, name="etap_fp8_math" if fp8_math else "etap")
    backends = [*factory.create_decode_backend().attn_backends, factory.create_draft_extend_backend()]
    assert [backend._fp8_math for backend in backends] == [fp8_math] * (DRAFTS - 1)


def test_trees_of_drafts_are_refused(make, monkeypatch):
    runner, _ = make(mode=ForwardMode.TARGET_VERIFY)
    with pytest.raises(ValueError, match="topk: wanted 1, a chain of drafts, got 2"):
        make_factory(DraftRunner(runner), monkeypatch, topk=2).create_decode_backend()


def test_batch_padded_for_a_cuda_graph_leaves_the_other_requests_alone(make):
    """Padding has one token, in slot 0 of the pool's first request."""
    runner, backend = make()
    problem = Problem(runner, LENGTHS)
    runner.req_to_token_pool.req_to_token[0] = 0
    problem.cache[:PAGE] = 0
    batch = problem.batch()
    batch.batch_size = 5
    batch.req_pool_indices = torch.cat([problem.requests, torch.zeros(2, dtype=torch.int64)])
    batch.seq_lens = torch.tensor([*LENGTHS, 1, 1])
    backend.init_forward_metadata_out_graph(batch)
    padded = torch.cat([problem.q, torch.ones(2, HEADS, LATENT).bfloat16()])
    padded_rope = torch.cat([problem.q_rope, torch.ones(2, HEADS, ROPE).bfloat16()])
    problem.write(rank=0, keep=0)
    problem.cache[:PAGE] = 0
    with forward_context(ForwardContext(attn_backend=backend)):
        out = make_layer()(padded, None, None, batch, q_rope=padded_rope, k_rope=None)
    problem.check(out[:3])
    assert not out[3:].any()


def test_a_full_pool_padded_for_the_ranks_is_planned(make, parallel):
    """With data parallel attention SGLang pads a step without a CUDA graph so that the ranks of a group divide it."""
    parallel(tp_size=4, attn_tp_size=4, moe_tp_size=4)
    runner, backend = make(requests=6)
    problem = Problem(runner, [70, 129, 1, 300, 64, 65])
    batch = problem.batch()
    batch.batch_size = 8
    batch.req_pool_indices = torch.cat([problem.requests, torch.zeros(2, dtype=torch.int64)])
    batch.seq_lens = torch.tensor([*problem.lengths, 1, 1])
    backend.init_forward_metadata(batch)
    (call,) = backend.forward_metadata
    assert call.seq_lens.tolist() == [*problem.lengths, 1, 1]
    assert call.schedule.batch == len(call.block_table) == 8


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY], ids=str)
@pytest.mark.parametrize("page", [PAGE, 1])
def test_metadata_captured_in_a_cuda_graph_serves_later_steps(make, mode, page):
    """A graph keeps addresses and host values of the capture; later steps only plan again, into the same buffers."""
    runner, backend = make(mode=mode, page_size=page)
    backend.init_cuda_graph_state(8, 8 * DRAFTS)
    s_q = 1 if mode.is_decode() else DRAFTS
    drafts = 0 if mode.is_decode() else DRAFTS
    first = Problem(runner, [4, 4, 4], s_q=s_q)
    backend.init_forward_metadata_out_graph(first.batch(mode, [4 - drafts] * 3), in_capture=True)
    captured = backend.forward_metadata
    schedule = captured[0].schedule
    kept = (schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions)
    later = Problem(runner, [700, 129, 64], s_q=s_q, seed=1)
    batch = later.batch(mode, [length - drafts for length in later.lengths])
    backend.init_forward_metadata_out_graph(batch)
    schedule = backend.forward_metadata[0].schedule
    assert (schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions) == kept
    backend.forward_metadata = captured
    later.check(attend(backend, later, batch))


def test_a_cuda_graph_wider_than_the_pool_is_refused(make):
    _, backend = make(requests=4)
    with pytest.raises(ValueError, match="max_bs: wanted at most 4 requests"):
        backend.init_cuda_graph_state(5, 5)


def test_planning_reads_nothing_back_to_the_host(make, monkeypatch):
    runner, backend = make(mode=ForwardMode.TARGET_VERIFY)
    problem = Problem(runner, [70, 129, 66], s_q=DRAFTS)
    batch = problem.batch(ForwardMode.TARGET_VERIFY, [66, 125, 62])
    for name in ("item", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(backend_module, "create_flashmla_kv_indices_triton", Recorder())
        monkeypatch.setattr(torch.Tensor, name, lambda *arguments, _name=name: pytest.fail(f"{_name} was called"))
    backend.init_forward_metadata(batch)
    backend.init_forward_metadata_out_graph(batch)


class Recorder:
    """In place of a Triton kernel, whose interpreter does read its arguments, or before one."""

    def __init__(self):
        self.calls, self.kernel = 0, None

    def of(self, kernel):
        self.kernel = kernel
        return self

    def __getitem__(self, grid):
        self.calls += 1
        return self.kernel[grid] if self.kernel else lambda *arguments, **options: None


def test_an_idle_rank_plans_nothing(make):
    runner, backend = make()
    batch = Problem(runner, LENGTHS).batch()
    batch.forward_mode, batch.batch_size = ForwardMode.IDLE, 0
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata is None


@pytest.mark.parametrize("page", [PAGE, 1, 16])
def test_ranks_of_decode_context_parallelism_merge_by_natural_log_sum_exp(make, parallel, page):
    """Each rank has every second token, decodes with the heads of both, and weighs its output with exp(lse)."""
    parts = []
    for rank in (0, 1):
        parallel(attn_dcp_size=2, attn_dcp_rank=rank, dcp_enabled=True)
        runner, backend = make(page_size=page)
        assert backend.schedule.num_heads == 2 * HEADS
        problem = Problem(runner, [70, 260, 1], ranks=2)
        problem.write(rank)
        batch = problem.batch()
        backend.init_forward_metadata(batch)
        out, lse = attend(backend, problem, batch)
        assert lse.dtype == torch.float32 and lse.shape == (3, 2 * HEADS) and lse.is_contiguous()
        parts.append((out.view(3, 2 * HEADS, LATENT), lse))
    assert parts[1][1][2].isneginf().all() and not parts[1][0][2].any()
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    merged = sum(out.float() * (part - lse).exp()[..., None] for out, part in parts)
    exact, exact_lse = problem.attention()
    torch.testing.assert_close(lse, exact_lse.float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(merged, exact.float(), rtol=2e-2, atol=2e-2)
    name = "is_mla_dcp_lse_base_on_e"
    base_on_e = getattr(forward_mla, name, None) or getattr(forward_mla, f"_{name}")
    assert base_on_e("etap") and base_on_e("flashmla") and not base_on_e("trtllm_mla")


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"page_size": 48}, "page_size 48 is not supported: wanted a power of two of at most 4096"),
        ({"dtype": torch.float32}, "dtype float32 is not supported"),
        ({"kv_lora_rank": 256}, "head_dim 320 is not supported"),
    ],
    ids=str,
)
def test_refuses(options, reason):
    with pytest.raises(ValueError, match=f"attention backend etap: {reason}"):
        ATTENTION_BACKENDS["etap"](make_runner(**options))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint8], ids=str)
def test_refuses_other_8_bit_caches(dtype):
    runner = make_runner()
    runner.kv_cache_dtype = dtype
    with pytest.raises(ValueError, match=f"attention backend etap: kv_cache_dtype {str(dtype)[6:]} is not supported"):
        ATTENTION_BACKENDS["etap"](runner)


FP8_CACHE = pytest.mark.parametrize("make", [True], indirect=True, ids=[""])


@FP8_CACHE
def test_an_fp8_cache_has_no_scale(make):
    """The pool casts what it is given, whatever a checkpoint says of a scale, and prefill reads the cast values."""
    runner, backend = make()
    problem = Problem(runner, LENGTHS)
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    layer = make_layer()
    layer.k_scale, layer.k_scale_float = torch.nn.Parameter(torch.tensor(0.25), requires_grad=False), 0.25
    k, k_rope = problem.new_rows.unsqueeze(1).split([LATENT, ROPE], dim=-1)
    with forward_context(ForwardContext(attn_backend=backend)):
        problem.check(layer(problem.q, k, k, batch, q_rope=problem.q_rope, k_rope=k_rope))
    for request, slots in enumerate(problem.slots):
        loc = slots[: problem.lengths[request]].long()
        read = torch.cat(runner.token_to_kv_pool.get_mla_kv_buffer(layer, loc, torch.bfloat16), dim=-1)[:, 0]
        assert torch.equal(read, problem.kv[request].bfloat16())


@FP8_CACHE
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY], ids=str)
def test_fp8_math_is_as_exact_as_its_types_allow(make, mode):
    """At most twice the error of attention in float64 that rounds to e4m3 what the kernel rounds."""
    runner, backend = make("etap_fp8_math", mode=mode)
    s_q, drafts = (1, 0) if mode.is_decode() else (DRAFTS, DRAFTS)
    problem = Problem(runner, [70, 300], s_q=s_q)
    batch = problem.batch(mode, [length - drafts for length in problem.lengths])
    backend.init_forward_metadata(batch)
    out = attend(backend, problem, batch)
    exact, rounded = (attention_of(problem, round_to) for round_to in (torch.float64, torch.float8_e4m3fn))
    error, allowed = ((value.double().view_as(exact) - exact).norm() / exact.norm() for value in (out, rounded))
    # Half of it must be there, or the math was another one.
    assert out.dtype == torch.bfloat16 and allowed / 2 <= error <= 2 * allowed, (error, allowed)


def attention_of(problem, round_to):
    """Attention in float64, queries (scaled to e4m3's range) and probabilities rounded."""
    q = torch.cat([problem.q, problem.q_rope], dim=-1).unflatten(0, (-1, problem.s_q)).double()
    largest = q.abs().amax(-1, keepdim=True) / 256
    q = (q / largest).to(round_to).double() * largest
    out = []
    for request, rows in enumerate(problem.kv):
        for token in range(problem.s_q):
            keys = rows.double()[: len(rows) - problem.s_q + token + 1]
            scores = q[request, token] @ keys.T * SCALE
            p = (256 * (scores - scores.amax(-1, keepdim=True)).exp()).to(round_to).double()
            out.append(p @ keys[:, :LATENT] / p.sum(-1, keepdim=True))
    return torch.stack(out)


@pytest.mark.parametrize(
    "name, options, types",
    [
        ("etap_fp8_math", {}, "KV cache bfloat16, math bfloat16"),
        ("etap", {"fp8_kv_cache": True}, r"KV cache FP8 \(e4m3\), math float16"),
        ("etap_fp8_math", {"fp8_kv_cache": True}, r"KV cache FP8 \(e4m3\), math FP8 \(e4m3\)"),
    ],
    ids=str,
)
def test_the_log_names_cache_and_math(caplog, name, options, types):
    with caplog.at_level("INFO", logger=backend_module.__name__):
        ATTENTION_BACKENDS[name](make_runner(**options))
    assert re.fullmatch(f"Attention backend etap: {types}", caplog.messages[-1])


@pytest.mark.parametrize(
    "options, rows",
    [
        ({"page_size": 1}, None),
        ({"page_size": 16, "heads": 32}, None),
        ({"heads": 128}, None),
        ({"page_size": 256, "heads": 128}, None),
        ({"page_size": 1, "heads": 64}, 64),
        ({"page_size": 16, "mode": ForwardMode.TARGET_VERIFY}, 64),
    ],
    ids=str,
)
def test_the_log_warns_of_small_pages_for_many_rows(caplog, options, rows):
    ATTENTION_BACKENDS["etap"](make_runner(**options))
    lines = [record.getMessage() for record in caplog.records if record.name == backend_module.__name__]
    page = options.get("page_size", PAGE)
    begin = f"Attention backend etap: pages of {page} tokens with {rows} query rows (heads * tokens) for each request: "
    assert [line.startswith(begin) for line in lines if "pages" in line] == ([True] if rows else [])


def test_an_fp8_cache_takes_half_the_bytes():
    sizes = [make_runner(fp8_kv_cache=fp8).token_to_kv_pool.get_kv_size_bytes() for fp8 in (False, True)]
    assert sizes[0] == 2 * sizes[1]


def test_refuses_a_model_that_is_not_mla():
    runner = make_runner()
    runner.use_mla_backend = False
    with pytest.raises(ValueError, match="the model's attention is not MLA"):
        ATTENTION_BACKENDS["etap"](runner)


def test_refuses_a_cap_of_the_scores(make):
    runner, backend = make()
    problem = Problem(runner, LENGTHS)
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    layer = make_layer()
    layer.logit_cap = 30.0
    with pytest.raises(ValueError, match="logit_cap 30.0 is not supported"):
        backend.forward_decode(problem.q, None, None, layer, batch, q_rope=problem.q_rope)
