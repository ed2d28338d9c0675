"""SGLang's pools, batches and attention layer around ETAP's backend, on CPU tensors, with both caches.

The runner is the one that SGLang's own attention tests use, with its real pools and configuration. The reference
executor stands in for the kernels and Triton's interpreter runs SGLang's kernels, but for the one that writes the
cache's rows, which it cannot run. FlashInfer's wrappers and FlashAttention 3, which serve longer prefill, need a GPU
and are replaced. Real CUDA graphs and memory are not tested here.
"""

import copy
import ctypes
import importlib.util
import itertools
import re
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import flashattention_backend, flashinfer_mla_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.models.deepseek_common import attention_backend_handler, utils
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import (
    MLAAttentionCase,
    MockMLAModelRunner,
    TinyMLAModelConfig,
)

from etap_backend.compat import flash_attn_interface
from etap_backend.reference import mla_decode_reference
from etap_backend.sglang import backend as backend_module
from etap_backend.sglang import model_support
from etap_backend.sglang import prompts as prompts_module
from etap_backend.sglang.prompts import prompt_runs
from etap_backend.short_prompts import MAX_RUNS, equal_runs
from support.cases import stacked_from
from support.sglang_layer import (
    CONTEXT,
    DRAFTS,
    HEADS,
    LATENT,
    ONE_RANK,
    PAGE,
    ROPE,
    SCALE,
    DraftRunner,
    draft_factory,
    forbid_host_reads,
    make_layer,
)

load_plugins()

DECODE, EXTEND, MIXED = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED
VERIFY, DRAFT_EXTEND = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2
LENGTHS = [70, 129, 1]
WILD = 2**30
FA3, FLASHINFER = flashattention_backend.FlashAttentionBackend, flashinfer_mla_backend.FlashInferMLAAttnBackend
HANDLERS = attention_backend_handler.AttentionBackendRegistry


class Unused:
    """In place of a wrapper of FlashInfer, which takes a workspace on a GPU."""

    def __init__(self, *arguments, **options):
        pass


class LatentAttention(Unused):
    """FlashInfer's attention to latent rows, in torch."""

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


class PagedAttention:
    """FlashAttention 3's call over pages of latent rows, in torch; it keeps how it is called."""

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


def write_rows(buffer, loc, latent, rope):
    """What the pool's kernels do: under decode context parallelism each rank keeps its slots."""
    size, rank = get_parallel().attn_dcp_size, get_parallel().attn_dcp_rank
    mine = loc % size == rank
    buffer[loc[mine] // size] = torch.cat([latent, rope], dim=-1)[mine]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for kernel in ("set_mla_kv_buffer_triton", "set_mla_kv_buffer_dcp_sharded_triton"):
        monkeypatch.setattr(memory_pool, kernel, write_rows)
    for wrapper in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        monkeypatch.setattr(flashinfer_mla_backend, wrapper, Unused)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))


@pytest.fixture(autouse=True)
def parallel():
    """One rank; sets other widths and ranks until the test ends."""
    with ExitStack() as stack:

        def override(**values):
            stack.enter_context(get_parallel().override(**values))

        override(**ONE_RANK)
        yield override


def make_runner(requests=8, heads=HEADS, mode=DECODE, page_size=PAGE, dtype=torch.bfloat16, **options):
    """SGLang's runner for tests, with pools for this many requests; in modes with drafts for DRAFTS tokens."""
    drafts = () if mode.is_decode() else (DRAFTS,) * requests
    case = MLAAttentionCase("etap", "etap", mode, heads, page_size, (1,) * requests, drafts)
    dimensions = {"kv_lora_rank": options.pop("kv_lora_rank", LATENT), "qk_rope_head_dim": ROPE}
    config = TinyMLAModelConfig(num_heads=heads, hidden_size=64, context_len=CONTEXT, **dimensions)
    common = {"dtype": dtype, "device": "cpu", "max_context_len": CONTEXT}
    return MockMLAModelRunner(case=case, model_config=config, **common, **dimensions, **options)


@pytest.fixture(params=[False, True], ids=["model's cache", "FP8 cache"])
def make(request):
    """Makes a runner and ETAP's backend on it, by its name; stale entries of its block table are wild."""

    def both(name="etap", **options):
        runner = make_runner(**({"fp8_kv_cache": request.param} | options))
        backend = ATTENTION_BACKENDS[name](runner)
        backend._block_table.fill_(WILD)
        return runner, backend

    return both


MODELS_CACHE = pytest.mark.parametrize("make", [False], indirect=True, ids=[""])
FP8_CACHE = pytest.mark.parametrize("make", [True], indirect=True, ids=[""])


class Problem:
    """Requests with their cache; the last `new` tokens of each come with the step's queries.

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
        self.q_rope = torch.randn(tokens, heads, 128 + ROPE, generator=random).to(dtype)[..., 128:]
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

    def share(self, common):
        """Let requests begin with the first one's tokens, in its pages."""
        others = zip(self.requests.tolist(), self.kv, self.slots, self.new, strict=True)
        for request, rows, slots, new in list(others)[1:]:
            tokens = min(common, len(rows) - new) // self.runner.page_size * self.runner.page_size
            rows[:tokens], slots[:tokens] = self.kv[0][:tokens], self.slots[0, :tokens]
            self.runner.req_to_token_pool.req_to_token[request, :tokens] = slots[:tokens]
        self.write()
        return self

    def write(self, rank=0, keep=None):
        """Write the cache of one rank, all but the last `keep` tokens of each request, the new ones when None."""
        self.cache.fill_(float("nan"))
        for rows, slots, new in zip(self.kv, self.slots, self.new, strict=True):
            mine = torch.arange(rank, max(rank, len(rows) - (new if keep is None else keep)), self.ranks)
            self.cache[slots[mine].long() // self.ranks, 0] = rows[mine]

    def batch(self, mode=DECODE, **fields):
        """SGLang's batch; on the host it has lengths for prompts only, as for a backend that needs none."""
        ends = list(zip(self.lengths, self.new, strict=True))
        before = [length - new for length, new in zip(self.lengths, self.query_lens, strict=True)]
        out_cache_loc = [slots[length - new : length] for slots, (length, new) in zip(self.slots, ends, strict=True)]
        lengths = torch.tensor(before if mode.is_target_verify() else self.lengths)
        given = {"seq_lens": lengths, "seq_lens_cpu": None, "seq_lens_sum": None}
        if mode in (EXTEND, MIXED, DRAFT_EXTEND):
            lists = {"extend_prefix_lens": before, "extend_seq_lens": self.query_lens}
            given |= {name: torch.tensor(of_requests) for name, of_requests in lists.items()}
            if mode != DRAFT_EXTEND:
                given |= {f"{name}_cpu": of_requests for name, of_requests in lists.items()}
                given |= {"seq_lens_cpu": lengths, "seq_lens_sum": sum(self.lengths)}
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.lengths),
            input_ids=torch.zeros(len(self.new_rows), dtype=torch.int64),
            req_pool_indices=self.requests,
            out_cache_loc=torch.cat(out_cache_loc).long(),
            positions=torch.cat([torch.arange(length - new, length) for length, new in ends]),
            **given | fields,
        )
        if batch.seq_lens_cpu is not None:
            self.runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def run(self, backend, mode=DECODE, ahead=False):
        """Plan a step, ahead of a CUDA graph or not, run a layer of it, and check that."""
        batch = self.batch(mode)
        (backend.init_forward_metadata_out_graph if ahead else backend.init_forward_metadata)(batch)
        self.check(self.attend(backend, batch))

    def attend(self, backend, batch, *, split=True, save=True, layer_id=0, padding=0):
        """One layer, called as SGLang's MLA models call it; behind the step's tokens `padding` ones of NaN."""
        k, k_rope = self.new_rows.unsqueeze(1).split([LATENT, ROPE], dim=-1)
        q, q_rope, k, k_rope = (
            torch.cat([rows, torch.full_like(rows[:1], torch.nan).expand(padding, -1, -1)]) if padding else rows
            for rows in (self.q, self.q_rope, k, k_rope)
        )
        layer, keys = make_layer(q.shape[1], layer_id=layer_id), (k, k) if save else (None, None)
        with forward_context(ForwardContext(attn_backend=backend)):
            if split:
                return layer(q, *keys, batch, save_kv_cache=save, q_rope=q_rope, k_rope=k_rope)
            whole = torch.cat([k, k_rope], dim=-1)
            return layer(torch.cat([q, q_rope], dim=-1), whole, k, batch, save_kv_cache=save)

    def check(self, out):
        """At most twice the error that the same attention has when torch computes it in the queries' type."""
        exact, plain = (self.attention(dtype)[0].flatten(1) for dtype in (torch.float64, self.runner.dtype))
        assert out.shape == (len(self.q), self.q.shape[1] * LATENT) and out.dtype == self.runner.dtype
        error = (out.double() - exact).pow(2).mean().sqrt()
        assert error <= 2 * (plain.double() - exact).pow(2).mean().sqrt(), error

    def attention(self, dtype=torch.float64):
        """Attention in `dtype`, [tokens, heads, 512], and log-sum-exp, [tokens, heads].

        The reference never sees SGLang's pools.
        """
        pages = max(1, -(-max(self.lengths) // PAGE))
        table, lengths = torch.arange(len(self.lengths) * pages).view(-1, pages), torch.tensor(self.lengths)
        cache = torch.zeros(table.numel(), PAGE, LATENT + ROPE, dtype=self.runner.dtype)
        for request, rows in enumerate(self.kv):
            # Every FP8 number is one of bfloat16 and of float16.
            cache.view(len(self.lengths), -1, LATENT + ROPE)[request, : len(rows)] = rows.to(cache.dtype)
        parts = torch.cat([self.q, self.q_rope], dim=-1).split(self.query_lens)
        results = [
            mla_decode_reference(q[None], cache, table[i : i + 1], lengths[i : i + 1], SCALE, dtype=dtype)
            for i, q in enumerate(parts)
        ]
        return [torch.cat([result[0] for result in part]) for part in zip(*results, strict=True)]


@pytest.mark.parametrize(
    "lengths, options",
    [
        (LENGTHS, {}),
        (LENGTHS, {"split": False}),
        ([1024], {}),
        ([300, 64, 65], {"dtype": torch.float16}),
        ([70, 200], {"heads": 8}),  # Kimi-K2 on 8 ranks
        ([70, 200], {"heads": 12}),  # Kimi-K3 on 8 ranks
        ([70, 129], {"heads": 128}),
        *(([70, 300, 1, 1024], {"page_size": page}) for page in (1, 2, 16, 32, 256)),
        ([70, 129], {"page_size": 1, "heads": 128}),
        ([70, 129], {"page_size": 16, "split": False}),
    ],
    ids=str,
)
def test_decodes_as_exactly_as_torch(make, lengths, options):
    split = options.get("split", True)
    runner, backend = make(**{name: value for name, value in options.items() if name != "split"})
    problem = Problem(runner, lengths)
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    assert [call.early_loads for call in backend.forward_metadata] == [True]
    problem.check(problem.attend(backend, batch, split=split))


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
    problem.check(problem.attend(backend, batch, layer_id=3))


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
    problem.write(keep=0)
    before = problem.cache.view(torch.uint8).clone()
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    problem.check(problem.attend(backend, batch, save=False))
    assert torch.equal(problem.cache.view(torch.uint8), before)


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "mode, lengths, options",
    [
        *((VERIFY, lengths, {}) for lengths in ([70, 129, 4], [1024], [65, 67])),
        (VERIFY, [70, 129, 4], {"page_size": 1}),
        (VERIFY, [1024], {"page_size": 16}),
        (VERIFY, [70, 200], {"heads": 12}),
        (DRAFT_EXTEND, [70, 129], {}),
        (DRAFT_EXTEND, [70, 129], {"page_size": 1}),
    ],
    ids=str,
)
def test_verifies_drafts_and_extends_a_draft_models_cache(make, mode, lengths, options, ahead):
    runner, backend = make(mode=mode, **options)
    Problem(runner, lengths, s_q=DRAFTS).run(backend, mode, ahead)


def test_eager_draft_extension_pads_a_short_extension_to_the_whole_window(make):
    runner, backend = make(mode=DRAFT_EXTEND)
    verified = {"seq_lens": torch.tensor([68, 129]), "extend_seq_lens": torch.tensor([2, DRAFTS])}
    backend.init_forward_metadata(Problem(runner, [70, 129], s_q=DRAFTS).batch(DRAFT_EXTEND, **verified))
    (call,) = backend.forward_metadata
    assert call.seq_lens.tolist() == [70, 129] and call.early_loads


def test_verifies_a_block_of_drafts_as_sglangs_own_backend_does(make, monkeypatch):
    """DFLASH and DSPARK verify by such a batch, and make a mask for backends that they do not know."""
    monkeypatch.setattr(flashinfer_mla_backend, "BatchMLAPagedAttentionWrapper", LatentAttention)
    runner, backend = make(mode=VERIFY)
    problem = Problem(runner, [70, 129, 4], s_q=DRAFTS)
    before = torch.tensor(problem.lengths) - DRAFTS
    for runs in (backend, ATTENTION_BACKENDS["flashinfer"](runner)):
        assert resolve_dflash_verify_mask_policy(runs) == (type(runs).__name__, False)
        block = DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=DRAFTS)
        batch = problem.batch(VERIFY, spec_info=block, seq_lens_cpu=before, seq_lens_sum=int(before.sum()))
        runs.init_forward_metadata(batch)
        problem.check(problem.attend(runs, batch))
    block.ragged_verify_layout = object()
    with pytest.raises(ValueError, match="ragged verification"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_draft_model_of_a_block_is_refused(make, algorithm):
    """Its tokens attend to each other without a mask."""
    runner, _ = make(mode=VERIFY)
    with get_spec().override(speculative_algorithm=algorithm, speculative_eagle_topk=1):
        assert ATTENTION_BACKENDS["etap"](runner).prefill is not None
        with pytest.raises(ValueError, match=f"a draft model of {algorithm}"):
            ATTENTION_BACKENDS["etap"](DraftRunner(runner))


def model_layer(heads=HEADS):
    """The attributes of SGLang's MLA layer that routes of a batch read."""
    return SimpleNamespace(
        num_local_heads=heads, qk_rope_head_dim=ROPE, flashinfer_mla_disable_ragged=False,
        disable_chunked_prefix_cache=False, chunked_prefix_cache_threshold=8192,
    )  # fmt: skip


def route(backend, batch, heads=HEADS):
    """How SGLang's model computes a batch with ETAP's name."""
    with forward_context(ForwardContext(attn_backend=backend)):
        return HANDLERS.get_handler("etap")(model_layer(heads), batch)


@pytest.fixture
def sglangs_prefill(monkeypatch):
    """The steps that SGLang's prefill plans, runs and routes, each with the backend's name."""
    steps = []
    for whose, place, name in (
        *(("FlashInfer", FLASHINFER, f"{step}_metadata") for step in ("init_forward", "init_mha_chunk")),
        ("FlashInfer", FLASHINFER, "forward_extend"),
        ("FlashInfer", attention_backend_handler, "handle_attention_flashmla"),
        ("FlashAttention", FA3, "init_forward_metadata"),
        ("FlashAttention", FA3, "forward_extend"),
        ("FlashAttention", attention_backend_handler, "handle_attention_fa3"),
    ):

        def step(*arguments, done=(whose, name), **parts):
            steps.append(done)
            if done == ("FlashAttention", "init_forward_metadata"):  # what of its plan is read
                table = torch.zeros(arguments[1].batch_size, CONTEXT, dtype=torch.int32)
                arguments[0].forward_metadata = SimpleNamespace(page_table=table)

        monkeypatch.setattr(place, name, step)
    return steps


@pytest.mark.parametrize(
    "lengths, query_lens, options",
    [
        ([1024], [128], {}),
        ([70, 129, 300], [5, 5, 5], {}),
        ([70, 129, 300], [5, 5, 5], {"mode": MIXED}),
        ([128, 70, 1024, 129, 64, 65], [128, 1, 1, 1, 64, 33], {"mode": MIXED}),
        ([70, 129, 3], [2, 2, 1], {"page_size": 1}),
        ([200, 129], [16, 16], {"heads": 128}),
        ([300, 64, 65], [2, 1, 2], {"page_size": 16}),
        ([300, 65, 66], [7, 64, 65], {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_decodes_short_prompts_over_cached_ones(make, sglangs_prefill, lengths, query_lens, options):
    mode = options.get("mode", EXTEND)
    runner, backend = make(**options | {"mode": DECODE})
    problem = Problem(runner, lengths, s_q=query_lens)
    problem.run(backend, mode)
    assert route(backend, problem.batch(mode), options.get("heads", HEADS)) == AttnForwardMethod.MLA
    assert not sglangs_prefill


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
    batch = problem.batch(EXTEND)
    backend.init_forward_metadata(problem.batch())  # what was planned before must not serve it
    backend.init_forward_metadata(batch)
    backend.init_mha_chunk_metadata(batch)
    problem.attend(backend, batch)
    route(backend, batch, options.get("heads", HEADS))
    steps = ("init_forward_metadata", "forward_extend", "handle_attention_fa3")
    assert sglangs_prefill == [("FlashAttention", name) for name in steps]


@pytest.fixture
def fa3(monkeypatch):
    """FlashAttention 3's calls over latent rows."""
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", attention := PagedAttention())
    return attention


@pytest.mark.parametrize("page", [PAGE, 1])
def test_long_prompts_are_planned_and_run_by_sglangs_default(make, fa3, page):
    runner, backend = make(page_size=page)
    assert isinstance(backend.prefill, FA3)
    Problem(runner, [300, 129, 1000], s_q=[130, 129, 200]).run(backend, EXTEND)
    assert backend.forward_metadata is None and len(fa3.splits) == 1


@pytest.mark.parametrize("mode, s_q", [(DECODE, 1), (VERIFY, DRAFTS)], ids=str)
@MODELS_CACHE
def test_the_drop_in_takes_the_calls_of_sglangs_flash_attention_backend(make, monkeypatch, mode, s_q):
    """`etap_backend.compat.flash_attn_interface` in the place of sgl-kernel's function."""
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", flash_attn_interface.flash_attn_with_kvcache)
    runner, _ = make(mode=mode)
    problem, backend = Problem(runner, [70, 129, 300], s_q=s_q), ATTENTION_BACKENDS["fa3"](runner)
    before = torch.tensor(problem.lengths) - (s_q if mode == VERIFY else 0)
    batch = problem.batch(mode, seq_lens_cpu=before, seq_lens_sum=int(before.sum()))
    backend.init_forward_metadata(batch)
    problem.check(problem.attend(backend, batch))


@pytest.mark.parametrize("cached", [0, 70])
def test_prompts_that_keys_are_made_of_are_planned_for_flashattention(make, monkeypatch, cached):
    """As SGLang's model calls it: keys and values of a whole request; some may be cached."""
    monkeypatch.setattr(flashattention_backend, "flash_attn_varlen_func", keys_in_full)
    runner, backend = make()
    lengths = [300, 129]
    batch = Problem(runner, lengths, s_q=[length - cached for length in lengths]).batch(EXTEND)
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


@contextmanager
def deterministic(runner, value=True):
    """What the argument says, once a runner has published the arguments."""
    with get_exec().deterministic.override(enable_deterministic_inference=value):
        yield


def outputs_of(problem, requests, mode):
    """What these requests of a problem get in a step of their own, with caches and pages as in the problem."""
    backend = ATTENTION_BACKENDS["etap"](problem.runner)
    rows = [i * problem.s_q + token for i in requests for token in range(problem.s_q)]
    batch = problem.batch(mode)
    batch.batch_size, batch.req_pool_indices = len(requests), problem.requests[requests]
    batch.seq_lens = batch.seq_lens[requests]
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)):
        layer = make_layer(problem.q.shape[1])
        out = layer(problem.q[rows], None, None, batch, q_rope=problem.q_rope[rows], k_rope=None)
    return dict(zip(requests, out.split(problem.s_q), strict=True))


@pytest.mark.parametrize("mode", [DECODE, VERIFY], ids=str)
@pytest.mark.parametrize("wanted", [True, False], ids=["deterministic", "as it comes"])
def test_deterministic_bits_are_the_same_whatever_runs_beside_a_request(make, mode, wanted):
    runner, _ = make(mode=mode)
    with deterministic(runner, wanted):
        problem = Problem(runner, [1000, 700, 129, 70, 1024], s_q=1 if mode.is_decode() else DRAFTS)
        problem.write(keep=0)
        together = outputs_of(problem, [0, 1, 2, 3, 4], mode)
        problem.check(torch.cat(list(together.values())))
        batches = [outputs_of(problem, some, mode) for some in ([0], [1, 0], [4, 2, 3], [3, 1], [2, 4, 1, 0])]
    same = [torch.equal(out, together[request]) for batch in batches for request, out in batch.items()]
    assert all(same) == wanted


@MODELS_CACHE
@pytest.mark.parametrize("query_lens", [[5, 6], [130, 129]], ids=str)
def test_deterministic_prompts_are_flashattentions(make, fa3, query_lens):
    runner, _ = make()
    with deterministic(runner):
        backend = ATTENTION_BACKENDS["etap"](runner)
        problem = Problem(runner, [300, 129], s_q=query_lens)
        problem.run(backend, EXTEND)
        assert fa3.splits == [1] and backend.forward_metadata is None
        assert route(backend, problem.batch(EXTEND)) == AttnForwardMethod.MLA


class Attended(Exception):
    """Ends a layer's forward behind its attention."""


class ScaledLayer(forward_mla.DeepseekMLAForwardMixin):
    """As much of SGLang's MLA layer as hands the attention its queries."""

    dcp_size, learnable_sink_param, use_dsa = 1, None, False
    current_attention_backend = "etap"

    def __init__(self, backend):
        self.backend, self.layer = backend, make_layer()

    def attn_mqa(self, q, k, v, batch, save_kv_cache=True, **parts):
        with forward_context(ForwardContext(attn_backend=self.backend)):
            raise Attended(self.layer(q, k, v, batch, save_kv_cache=save_kv_cache, **parts))


@pytest.fixture
def models_lists(monkeypatch):
    """Puts back what is entered in SGLang's lists for one model."""
    model_support.register()
    monkeypatch.setattr(HANDLERS, "_handlers", dict(HANDLERS._handlers))
    parts = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    before = list(parts)
    yield
    parts[:] = before


@MODELS_CACHE
@pytest.mark.parametrize("query_lens", [[1, 1], [130, 5], [5, 5]], ids=str)
def test_queries_scaled_by_position(make, monkeypatch, models_lists, query_lens):
    """Mistral-Large-3's, through the code of SGLang's layer."""
    monkeypatch.setattr(flashinfer_mla_backend, "BatchMLAPagedAttentionWrapper", LatentAttention)
    runner, _ = make()
    runner.model_config.hf_text_config.llama_4_scaling = {"beta": 0.1, "original_max_position_embeddings": 64}
    backend = ATTENTION_BACKENDS["etap"](runner)
    problem = Problem(runner, [300, 129], s_q=query_lens)
    batch = problem.batch(EXTEND)
    assert route(backend, batch) == AttnForwardMethod.MLA
    backend.init_forward_metadata(batch)
    k, k_rope = problem.new_rows[:, None].split([LATENT, ROPE], dim=-1)
    scaling = utils._get_llama_4_scaling(64, 0.1, batch.positions).bfloat16()
    parts = (problem.q_rope, k_rope, problem.q, k, batch, None, batch.positions, None, scaling)
    with pytest.raises(Attended) as attended:
        ScaledLayer(backend).forward_absorb_core(*parts)
    assert (scaling != 1).all()
    problem.q, problem.q_rope = problem.q * scaling, problem.q_rope * scaling
    problem.check(attended.value.args[0])


@contextmanager
def prefill_graph(tokens):
    """SGLang's scope of such a graph; 0.5.22 has none, and narrows a padded batch by the same code without a graph."""
    if not importlib.util.find_spec("sglang.srt.model_executor.runner_utils.prefill_graph"):
        yield
        return
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    with enable_breakable_cuda_graph(), prefill_graph_scope(full_graph=False, raw_num_tokens=tokens):
        yield


@pytest.mark.parametrize("query_lens, decodes", [([5, 64], True), ([130, 129], False)], ids=str)
def test_a_graph_of_prefill_runs_a_batch_of_fewer_tokens(make, monkeypatch, fa3, query_lens, decodes):
    """SGLang's segments are captured, attention between them is not: it gets the batch's rows of the graph's."""
    runner, backend = make()
    problem, tokens, written = Problem(runner, [300, 200], s_q=query_lens), sum(query_lens), []
    batch, kernel = problem.batch(EXTEND), backend_module.mla_decode
    batch.global_num_token_non_padded_cpu = tokens
    monkeypatch.setattr(
        backend_module, "mla_decode", lambda *args, out, **more: written.append(out) or kernel(*args, out=out, **more)
    )
    with prefill_graph(tokens), set_forward_batch(batch):
        backend.init_forward_metadata(batch)
        assert (backend.forward_metadata is not None) == decodes
        assert route(backend, batch) == AttnForwardMethod.MLA
        out = problem.attend(backend, batch, padding=3)
    problem.check(out[:tokens])
    assert len(out) == tokens + 3 and not out[tokens:].any()
    own = out.untyped_storage().data_ptr()
    assert [rows.untyped_storage().data_ptr() == own for rows in written] == [True] * (2 if decodes else 0)


@FP8_CACHE
@pytest.mark.parametrize("lengths, new", [([600, 700, 65], [300, 200, 65]), ([1024] * 8, [200] * 8)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_reads_rows_of_an_fp8_cache_in_the_models_type(make, fa3, page_size, lengths, new):
    """FlashAttention 3 is given the batch's pages alone, or the pool's where those are as many."""
    runner, backend = make(page_size=page_size)
    problem = Problem(runner, lengths, s_q=new)
    problem.run(backend, EXTEND)
    pages = sum(-(-length // page_size) for length in lengths)
    assert fa3.pages == [min(pages, len(problem.cache) // page_size)]
    assert backend.prefill.token_to_kv_pool.rows is None, "the copy is as large as the contexts"


def test_routes_of_prefill_are_flashattentions(make):
    """With an FP8 cache, too: keys are made of long prefixes only."""
    runner, backend = make()
    batch, layer = Problem(runner, [600, 700], s_q=[300, 200]).batch(EXTEND), model_layer()
    batch.get_max_chunk_capacity = lambda: 128 * 1024
    with forward_context(ForwardContext(attn_backend=backend)):
        for name, threshold in itertools.product(("etap", "etap_fp8_math"), (8192, 0)):
            layer.chunked_prefix_cache_threshold = threshold
            method = HANDLERS.get_handler(name)(layer, batch)
            assert method == attention_backend_handler.handle_attention_fa3(layer, batch)
            assert method == (AttnForwardMethod.MLA if threshold else AttnForwardMethod.MHA_ONE_SHOT)


def test_the_runs_of_a_batch_are_found_once(make, monkeypatch):
    runner, backend = make()
    batch, asked = Problem(runner, [70, 129, 300], s_q=[5, 5, 3]).batch(EXTEND), []
    monkeypatch.setattr(prompts_module, "equal_runs", lambda lens: asked.append(lens) or equal_runs(lens))
    backend.init_forward_metadata(batch)
    for _ in range(3):
        assert route(backend, batch) == AttnForwardMethod.MLA
    assert asked == [[5, 5, 3]]
    other, none = copy.copy(batch), copy.copy(batch)
    other.extend_seq_lens_cpu = [5, 200]
    none.extend_seq_lens_cpu = none.extend_prefix_lens_cpu = []  # of a rank without prompts in a step of the others
    assert prompt_runs(other, HEADS) == prompt_runs(none, HEADS) == [] and prompt_runs(batch, HEADS)
    assert prompt_runs(batch, 4096) == [] and len(asked) == 1


def test_prompts_of_decode_context_parallelism_are_flashinfers(make, parallel, sglangs_prefill):
    parallel(attn_dcp_size=2, dcp_enabled=True)
    runner, backend = make()
    batch = Problem(runner, [70, 129], s_q=[5, 5], ranks=2).batch(EXTEND)
    backend.init_forward_metadata(batch)
    route(backend, batch)
    wanted = ["init_forward_metadata", "handle_attention_flashmla"]
    assert sglangs_prefill == [("FlashInfer", name) for name in wanted]


@pytest.mark.parametrize("query_lens, decodes", [([2, 2], True), ([2, 3], False)], ids=str)
def test_many_rows_of_small_pages_are_sglangs(make, sglangs_prefill, query_lens, decodes):
    """SGLang's prefill reads the latent rows too, so that the route is the same; it would copy an FP8 cache."""
    runner, backend = make(page_size=1)
    decodes = decodes or runner.kv_cache_dtype != runner.dtype
    batch = Problem(runner, [70, 129], s_q=query_lens).batch(EXTEND)
    backend.init_forward_metadata(batch)
    assert sglangs_prefill == ([] if decodes else [("FlashAttention", "init_forward_metadata")])
    assert route(backend, batch) == AttnForwardMethod.MLA


def test_calls_of_short_prompts_keep_apart_and_share_a_workspace(make):
    runner, backend = make()
    backend.init_forward_metadata(Problem(runner, [70, 129, 300, 65], s_q=[3, 5, 4, 1]).batch(EXTEND))
    schedules = [call.schedule for call in backend.forward_metadata]
    assert len(schedules) == MAX_RUNS and not any(call.early_loads for call in backend.forward_metadata)
    for name in ("work_ranges", "split_offsets"):
        assert len({getattr(schedule, name).data_ptr() for schedule in schedules}) == MAX_RUNS, name
    assert all(schedule.workspace is backend.schedule.workspace for schedule in schedules)
    fp8_cache = runner.kv_cache_dtype != runner.dtype
    assert {buffers.fp8_cache for buffers in (backend.schedule, *backend._prompt_schedules)} == {fp8_cache}


class Recorder:
    """In place of a Triton kernel, whose interpreter does read its arguments, or before one."""

    def __init__(self, kernel=None):
        self.calls, self.kernel = 0, kernel

    def __getitem__(self, grid):
        self.calls += 1
        return self.kernel[grid] if self.kernel else lambda *arguments, **options: None


@pytest.mark.parametrize("mode, s_q, calls", [(VERIFY, DRAFTS, 1), (EXTEND, [3, 5, 5], 2)], ids=str)
def test_planning_reads_nothing_back_to_the_host(make, monkeypatch, mode, s_q, calls):
    runner, backend = make(mode=mode)
    batch = Problem(runner, [70, 129, 66], s_q=s_q).batch(mode)
    monkeypatch.setattr(backend_module, "create_flashmla_kv_indices_triton", Recorder())
    forbid_host_reads(monkeypatch)
    backend.init_forward_metadata(batch)
    if mode == VERIFY:
        backend.init_forward_metadata_out_graph(batch)
    assert len(backend.forward_metadata) == calls


@pytest.mark.parametrize("mode, s_q", [(DECODE, 1), (DRAFT_EXTEND, DRAFTS), (EXTEND, [3, 5, 5])], ids=str)
def test_rows_that_pad_a_step_behind_its_plan_are_zeros(make, mode, s_q):
    """With data parallel attention ranks have equally many rows: SGLang pads steps outside of CUDA graphs."""
    runner, backend = make(mode=mode)
    problem = Problem(runner, [70, 129, 300], s_q=s_q)
    problem.write(keep=0)
    batch = problem.batch(mode)
    backend.init_forward_metadata(batch)
    batch.mark_forward_metadata_ready()
    batch.batch_size, batch.seq_lens = 4, torch.tensor([*problem.lengths, 1])
    assert not batch.needs_forward_metadata_init()
    tokens = len(problem.q)
    out = problem.attend(backend, batch, save=False, padding=3)
    problem.check(out[:tokens])
    assert len(out) == tokens + 3 and not out[tokens:].any()


def test_more_requests_than_the_pool_are_refused_and_nothing_is_written(make):
    """Steps that only warm kernels up may have any number of requests."""
    runner, backend = make(requests=4)
    before = backend._block_table.clone(), backend._seq_lens.data_ptr()
    batch = Problem(runner, LENGTHS).batch()
    batch.batch_size, batch.seq_lens = 6, torch.ones(6, dtype=torch.int64)
    batch.req_pool_indices = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 4 requests in a step.* got 6"):
        backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="max_bs: wanted at most 4 requests"):
        backend.init_cuda_graph_state(5, 5)
    assert torch.equal(backend._block_table, before[0]) and backend._seq_lens.data_ptr() == before[1]


def test_drafts_change_nothing_that_was_planned_beside_them(make):
    """SGLang asks every backend, where SGLANG_ENABLE_OVERLAP_PLAN_STREAM is set."""
    runner, backend = make(mode=VERIFY)
    problem = Problem(runner, [70, 129], s_q=DRAFTS)
    batch = problem.batch(VERIFY)
    backend.init_forward_metadata_out_graph(batch)
    backend.update_verify_buffers_to_fill_after_draft(object(), 2)
    problem.check(problem.attend(backend, batch))


def test_pages_that_a_connector_moves_are_decoded(make):
    """What Mooncake and NIXL register of the pool is all that they know of it: pages of so many bytes, at addresses."""
    runner, backend = make()
    problem, pool = Problem(runner, [70, 129, 300]), runner.token_to_kv_pool
    problem.write(keep=0)
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
            table[request, first : min(first + PAGE, length)] += (moved[page] - page) * PAGE
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    problem.check(problem.attend(backend, batch, save=False))


def test_a_layer_waits_for_its_pages_from_host_memory(make):
    """HiCache loads layer by layer, and SGLang's pool waits where a backend asks for a layer's rows."""
    runner, backend = make()
    problem, waited = Problem(runner, LENGTHS), []
    problem.write(keep=0)
    runner.token_to_kv_pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    assert not waited
    problem.check(problem.attend(backend, batch, save=False))
    assert waited == [0]


@pytest.mark.parametrize("page", [PAGE, 1])
def test_a_draft_models_steps_are_planned_once_for_all(make, monkeypatch, page):
    """In step i a request has i + 1 tokens more than the batch says, some of them in a tile more."""
    runner, target = make(mode=VERIFY, page_size=page)
    steps = draft_factory(runner, monkeypatch).create_decode_backend()
    assert len(steps.attn_backends) == DRAFTS - 2
    for buffer in ("_block_table", "schedule"):
        of_steps = {id(getattr(backend, buffer)) for backend in steps.attn_backends}
        assert len(of_steps) == 1 and id(getattr(target, buffer)) not in of_steps
    problem = Problem(runner, [70, 129, 66, 64, 2], new=1)
    fill, build = backend_module.create_flashmla_kv_indices_triton, backend_module.DecodeSchedule.build
    for step, backend in enumerate(steps.attn_backends):
        batch = problem.batch(seq_lens=torch.tensor(problem.lengths) - step - 1, spec_info=object())
        for plan in (steps.init_forward_metadata, steps.init_forward_metadata_out_graph):
            backend._block_table.fill_(WILD)
            fills, builds = Recorder(fill), []
            with monkeypatch.context() as patch:
                patch.setattr(backend_module, "create_flashmla_kv_indices_triton", fills)
                patch.setattr(
                    backend_module.DecodeSchedule,
                    "build",
                    lambda *of, builds=builds, **more: builds.append(of) or build(*of, **more),
                )
                plan(batch)
            assert fills.calls == len(builds) == 1
            problem.check(problem.attend(backend, batch))


def test_an_idle_rank(make, monkeypatch):
    """It plans nothing, but where a CUDA graph of a draft model's steps has requests, which pad."""
    runner, backend = make(mode=VERIFY)
    steps = draft_factory(runner, monkeypatch).create_decode_backend()
    batch = Problem(runner, LENGTHS).batch()
    batch.forward_mode = ForwardMode.IDLE
    steps.init_forward_metadata_out_graph(batch)
    planned = [step.forward_metadata[0].seq_lens.tolist() for step in steps.attn_backends]
    assert planned == [[length + step + 1 for length in LENGTHS] for step in range(DRAFTS - 2)]
    steps.init_forward_metadata(batch)
    batch.batch_size = 0
    backend.init_forward_metadata(batch)
    assert [step.forward_metadata for step in (*steps.attn_backends, backend)] == [None] * (DRAFTS - 1)


@pytest.mark.parametrize("name", ["etap", "etap_fp8_math"])
def test_a_draft_model_multiplies_as_its_backends_name_says(make, monkeypatch, name):
    runner, backend = make(mode=VERIFY)
    factory = draft_factory(runner, monkeypatch, name)
    extension = factory.create_draft_extend_backend()
    assert type(extension) is type(backend) and extension.schedule.max_s_q == DRAFTS
    fp8_math = name == "etap_fp8_math" and runner.kv_cache_dtype != runner.dtype
    backends = [*factory.create_decode_backend().attn_backends, extension]
    assert [draft._fp8_math for draft in backends] == [fp8_math] * (DRAFTS - 1)


def test_batch_padded_for_a_cuda_graph_leaves_the_other_requests_alone(make):
    """Padding has one token, in slot 0 of the pool's first request."""
    runner, backend = make()
    problem = Problem(runner, LENGTHS)
    runner.req_to_token_pool.req_to_token[0] = 0
    batch = problem.batch()
    batch.batch_size = 5
    batch.req_pool_indices = torch.cat([problem.requests, torch.zeros(2, dtype=torch.int64)])
    batch.seq_lens = torch.tensor([*LENGTHS, 1, 1])
    backend.init_forward_metadata_out_graph(batch)
    q, q_rope = (torch.cat([rows, torch.ones_like(rows[:2])]) for rows in (problem.q, problem.q_rope))
    problem.write(keep=0)
    problem.cache[:PAGE] = 0
    with forward_context(ForwardContext(attn_backend=backend)):
        out = make_layer()(q, None, None, batch, q_rope=q_rope, k_rope=None)
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


@pytest.mark.parametrize("mode", [DECODE, VERIFY], ids=str)
@pytest.mark.parametrize("page", [PAGE, 1])
def test_metadata_captured_in_a_cuda_graph_serves_later_steps(make, mode, page):
    """A graph keeps addresses and host values of the capture; later steps only plan again, into the same buffers."""
    runner, backend = make(mode=mode, page_size=page)
    backend.init_cuda_graph_state(8, 8 * DRAFTS)
    s_q = 1 if mode.is_decode() else DRAFTS

    def kept():
        schedule = backend.forward_metadata[0].schedule
        return schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions

    backend.init_forward_metadata_out_graph(Problem(runner, [4, 4, 4], s_q=s_q).batch(mode), in_capture=True)
    captured, before = backend.forward_metadata, kept()
    later = Problem(runner, [700, 129, 64], s_q=s_q, seed=1)
    batch = later.batch(mode)
    backend.init_forward_metadata_out_graph(batch)
    assert kept() == before
    backend.forward_metadata = captured
    later.check(later.attend(backend, batch))


@pytest.fixture
def shared_prefix(monkeypatch):
    """However little a step shares."""
    monkeypatch.setenv("ETAP_SHARED_PREFIX", "1")
    with stacked_from(0):
        yield


def stacks(backend):
    """Groups of requests whose common tiles the step's call reads once."""
    (call,) = backend.forward_metadata
    return 0 if call.schedule.shared is None else int(call.schedule.shared[-1, 0])


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("page", [PAGE, 1])
def test_a_shared_prefix_is_read_once(make, shared_prefix, page, ahead):
    """From the block table that a graph reads, filled anew for each step. On a GPU of few multiprocessors, as the CPU
    is one here, requests of 8 rows share."""
    runner, backend = make(page_size=page, heads=8)
    for common in (640, 0):
        problem = Problem(runner, [1000, 700, 900, 1024, 129]).share(common)
        problem.run(backend, ahead=ahead)
        assert (stacks(backend) > 0) == (common > 0)


def test_plans_are_made_of_the_tables_that_calls_read(make, monkeypatch, shared_prefix):
    runner, backend = make(page_size=1, heads=8)
    given, build = [], backend_module.DecodeSchedule.build
    record = lambda *of, **more: given.append(more) or build(*of, **more)  # noqa: E731
    monkeypatch.setattr(backend_module.DecodeSchedule, "build", record)
    backend.init_forward_metadata(Problem(runner, [70, 129, 300], s_q=[3, 4, 4]).batch(EXTEND))
    assert [more["page_size"] for more in given] == [1, 1]
    for more, call in zip(given, backend.forward_metadata, strict=True):
        assert more["block_table"].data_ptr() == call.block_table.data_ptr()


def test_a_draft_models_steps_share_no_prefix(make, monkeypatch, shared_prefix):
    """They share a plan, whose lengths are the last step's."""
    runner, backend = make(mode=VERIFY, heads=8)
    steps = draft_factory(runner, monkeypatch).create_decode_backend()
    assert backend.schedule.shared is not None and steps.attn_backends[0].schedule.shared is None
    problem = Problem(runner, [1000, 700, 900, 800], new=1).share(640)
    steps.init_forward_metadata(problem.batch(seq_lens=torch.tensor(problem.lengths) - 1, spec_info=object()))
    problem.check(problem.attend(steps.attn_backends[0], problem.batch()))


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
        out, lse = problem.attend(backend, batch)
        assert lse.dtype == torch.float32 and lse.shape == (3, 2 * HEADS) and lse.is_contiguous()
        parts.append((out.view(3, 2 * HEADS, LATENT), lse))
    assert parts[1][1][2].isneginf().all() and not parts[1][0][2].any()
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    merged = sum(out.float() * (part - lse).exp()[..., None] for out, part in parts)
    exact, exact_lse = problem.attention()
    torch.testing.assert_close(lse, exact_lse.float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(merged, exact.float(), rtol=2e-2, atol=2e-2)
    base_on_e = forward_mla.is_mla_dcp_lse_base_on_e
    assert base_on_e("etap") and base_on_e("flashmla") and not base_on_e("trtllm_mla")


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


def rounded_attention(problem, dtype):
    """Attention in float64, queries (scaled to e4m3's range) and probabilities rounded to this type."""
    q = torch.cat([problem.q, problem.q_rope], dim=-1).unflatten(0, (-1, problem.s_q)).double()
    largest = q.abs().amax(-1, keepdim=True) / 256
    q = (q / largest).to(dtype).double() * largest
    out = []
    for request, rows in enumerate(problem.kv):
        for token in range(problem.s_q):
            keys = rows.double()[: len(rows) - problem.s_q + token + 1]
            scores = q[request, token] @ keys.T * SCALE
            p = (256 * (scores - scores.amax(-1, keepdim=True)).exp()).to(dtype).double()
            out.append(p @ keys[:, :LATENT] / p.sum(-1, keepdim=True))
    return torch.stack(out)


@FP8_CACHE
@pytest.mark.parametrize("mode", [DECODE, VERIFY], ids=str)
def test_fp8_math_is_as_exact_as_its_types_allow(make, mode):
    """At most twice the error of attention in float64 that rounds to e4m3 what the kernel rounds."""
    runner, backend = make("etap_fp8_math", mode=mode)
    problem = Problem(runner, [70, 300], s_q=1 if mode.is_decode() else DRAFTS)
    batch = problem.batch(mode)
    backend.init_forward_metadata(batch)
    out = problem.attend(backend, batch)
    exact, rounded = (rounded_attention(problem, dtype) for dtype in (torch.float64, torch.float8_e4m3fn))
    error, allowed = ((value.double().view_as(exact) - exact).norm() / exact.norm() for value in (out, rounded))
    # Half of it must be there, or the math was another one.
    assert out.dtype == torch.bfloat16 and allowed / 2 <= error <= 2 * allowed, (error, allowed)


@pytest.mark.parametrize("name, options, types", [
    ("etap_fp8_math", {}, "KV cache bfloat16, math bfloat16"),
    ("etap", {"fp8_kv_cache": True}, r"KV cache FP8 \(e4m3\), math float16"),
    ("etap_fp8_math", {"fp8_kv_cache": True}, r"KV cache FP8 \(e4m3\), math FP8 \(e4m3\)"),
], ids=str)  # fmt: skip
def test_the_log_names_cache_and_math(caplog, name, options, types):
    with caplog.at_level("INFO", logger=backend_module.__name__):
        ATTENTION_BACKENDS[name](make_runner(**options))
    assert re.fullmatch(f"Attention backend etap: {types}", caplog.messages[-1])


def test_the_log_names_shared_prefixes(caplog, shared_prefix):
    with caplog.at_level("INFO", logger=backend_module.__name__):
        ATTENTION_BACKENDS["etap"](make_runner())
    assert caplog.messages[-1].endswith("math bfloat16, shared prefixes read once")


@pytest.mark.parametrize("options, warns", [
    ({"page_size": 1}, False), ({"page_size": 16, "heads": 32}, False), ({"page_size": 256, "heads": 128}, False),
    ({"page_size": 1, "heads": 64}, True), ({"page_size": 16, "mode": VERIFY}, True),
], ids=str)  # fmt: skip
def test_the_log_warns_of_small_pages_for_many_rows(caplog, options, warns):
    ATTENTION_BACKENDS["etap"](make_runner(**options))
    lines = [record.getMessage() for record in caplog.records if record.name == backend_module.__name__]
    begin = f"Attention backend etap: pages of {options['page_size']} tokens with 64 query rows"
    assert [line.startswith(begin) for line in lines if "pages" in line] == [True] * warns


@pytest.mark.parametrize("options, changes, argument", [
    ({"page_size": 48}, {}, "page_size 48"),
    ({"dtype": torch.float32}, {}, "dtype float32"),
    ({"kv_lora_rank": 256}, {}, "head_dim 320"),
    ({}, {"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype float8_e5m2"),
    ({}, {"kv_cache_dtype": torch.uint8}, "kv_cache_dtype uint8"),
    ({}, {"use_mla_backend": False}, "not MLA"),
], ids=str)  # fmt: skip
def test_refuses(options, changes, argument):
    runner = make_runner(**options)
    vars(runner).update(changes)
    with pytest.raises(ValueError, match=f"attention backend etap: .*{argument}"):
        ATTENTION_BACKENDS["etap"](runner)


def test_refuses_trees_of_drafts(make, monkeypatch):
    with pytest.raises(ValueError, match="topk"):
        draft_factory(make(mode=VERIFY)[0], monkeypatch, topk=2).create_decode_backend()


def test_refuses_a_cap_of_the_scores(make):
    runner, backend = make()
    problem, layer = Problem(runner, LENGTHS), make_layer()
    layer.logit_cap = 30.0
    with pytest.raises(ValueError, match=r"logit_cap 30\.0"):
        backend.forward_decode(problem.q, None, None, layer, problem.batch(), q_rope=problem.q_rope)
