"""Models with sparse attention in a real vLLM: selection, and vLLM's own layer around ETAP's backend on CPU tensors.

The library's CPU functions stand in for the kernels. A layer's indexer needs a GPU: its lists are written here.
"""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.ops import metadata
from vllm.v1.worker import workspace

from etap_backend import sparse_workspace_floats
from etap_backend.sparse import sparse_decode_shape
from etap_backend.vllm import log, registration, sparse, versions
from etap_backend.vllm.backend import ETAPBackend
from etap_backend.vllm.metadata import claim_workspace
from etap_backend.vllm.sparse import ETAPSparseBackend
from support.vllm_layer import (
    BLOCK,
    FP8,
    HEADS,
    LATENT,
    NAME,
    NOPE,
    ROPE,
    SCALE,
    SPECULATIVE,
    VALUE,
    Problem,
    decode,
    implementation_arguments,
    make_builder,
)

load_general_plugins()

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
RANKS = 8
needs_hisparse = pytest.mark.skipif(
    not hasattr(SparseMLACommonImpl, "_forward_mqa_kernel"), reason="vLLM 0.32: HiSparse is refused"
)
TOP_K = 128  # as in vLLM's own tests of sparse backends
H20_SMS = 78  # of the pretended GPU
MAX_TOKENS = 2048
SPARSE_MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"], "index_topk": TOP_K, "index_n_heads": 32, "index_head_dim": 128,
}  # fmt: skip
LAYER = {"head_size": LATENT + ROPE, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True}
ROW_BYTES = {"auto": 2 * (LATENT + ROPE), "fp8": 656}
NOTHING = -1
LENGTHS = [70, 700, 129, 1]
STEPS = {
    "decode": (LENGTHS, 1, {}),
    "drafts": ([70, 700, 4], 4, SPECULATIVE),
    "drafts of different numbers": ([70, 700, 4], [1, 4, 2], SPECULATIVE),
}
"""Lengths of a step's requests, their query tokens, and arguments of the engine."""


@pytest.fixture
def select(engine_config):
    """Selects as a sparse layer of DeepSeek-V3.2 does; keywords differ from that."""

    def call(model=SPARSE_MODEL, engine=None, **changes):
        selector._cached_get_attn_backend.cache_clear()
        config = engine_config(attention_backend="ETAP", hf_overrides=model, **(engine or {}))
        with set_current_vllm_config(config):
            return selector.get_attn_backend(**(LAYER | {"use_sparse": True, "num_heads": HEADS} | changes))

    yield call
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("changes", [
    {}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_ds_mla"},
    {"num_heads": 8}, {"num_heads": 128}, {"has_sink": True},
    {"head_size": 512}, {"head_size": 512, "kv_cache_dtype": "fp8"},
], ids=str)  # fmt: skip
def test_one_name_serves_sparse_and_dense_models(select, changes):
    assert select(**changes) is ETAPSparseBackend
    assert select(model={}, use_sparse=False) is ETAPBackend
    assert select(**changes) is ETAPSparseBackend


@pytest.mark.parametrize("changes, reason", [
    ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype float8_e4m3fn"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
    ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16"),
    ({"dtype": torch.float16}, "dtype float16"),
    ({"head_size": 320}, "head_dim 320"),
    ({"engine": {"block_size": 16}}, "block_size"),
    ({"use_sparse": False}, "non-sparse"),
    ({"model": {}}, "index_topk"),
    ({"engine": {"additional_config": {"etap_fp8_math": True}}}, "etap_fp8_math"),
], ids=str)  # fmt: skip
def test_refuses_by_name(select, changes, reason):
    with pytest.raises(ValueError, match=f"ETAP is not valid.*{reason}"):
        select(**changes)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_hy_v4_keeps_etap_for_its_sinks(engine_config, cache):
    from vllm.models.hy_v4.nvidia import attention

    layer = SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, is_sparse=True, num_local_heads=HEADS)
    config = engine_config(attention_backend="ETAP", hf_overrides=SPARSE_MODEL)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        assert attention.HYV4MLAAttention._resolve_sink_backend(layer, cache) is ETAPSparseBackend


def test_dots3_note_is_refused_with_the_backends_that_it_uses(engine_config):
    """Its layers are made with the named backend first, and then again with their own."""
    from vllm.models.dots3_note.nvidia import model
    from vllm.transformers_utils.configs.dots3_note import Dots3NoteConfig

    config = engine_config(attention_backend="ETAP", hf_overrides=SPARSE_MODEL)
    config.model_config.hf_text_config.model_type = Dots3NoteConfig.model_type
    selector._cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(config), pytest.raises(ValueError, match="ETAP is not valid") as refusal:
        selector.get_attn_backend(**(LAYER | {"use_sparse": True, "num_heads": HEADS}))
    selector._cached_get_attn_backend.cache_clear()
    for backend in model.Dots3NotePaddedSparseBackend, model.Dots3NoteTritonMLABackend:
        assert backend.get_name() in str(refusal.value)


def test_names_that_vllm_lacks_for_sparse_attention_refuse_no_dense_model(select, monkeypatch):
    registration.why_not.cache_clear()
    monkeypatch.delitem(sys.modules, "etap_backend.vllm.sparse")
    monkeypatch.delattr(sparse_utils, "triton_filter_and_convert_dcp_index")
    with pytest.raises(ValueError, match="lacks what ETAP uses: .*'triton_filter_and_convert_dcp_index'"):
        select()
    assert select(model={}, use_sparse=False) is ETAPBackend
    registration.why_not.cache_clear()


@needs_hisparse
def test_a_cache_in_host_memory_is_served_but_not_with_batch_invariance(select, monkeypatch):
    engine = {"attention_config": {"sparse_mla_force_mqa": True, "hisparse_config": {}}}
    assert select(engine=engine) is ETAPSparseBackend
    without_rope = {"engine": engine, "head_size": 512}
    assert select(**without_rope) is ETAPSparseBackend
    with pytest.raises(ValueError, match="an FP8 cache of a model without rope with .*HiSparse"):
        select(**without_rope, kv_cache_dtype="fp8")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="batch invariance with .*HiSparse"):
        select(engine=engine)


@pytest.mark.skipif(hasattr(SparseMLACommonImpl, "_forward_mqa_kernel"), reason="vLLM 0.33 brings the rows")
def test_a_cache_in_host_memory_is_refused_where_vllm_cannot_bring_its_rows(select):
    with pytest.raises(ValueError, match="HiSparse.* needs vLLM 0.33"):
        select(engine={"attention_config": {"hisparse_config": {}}})


class SparseProblem(Problem):
    """A step in which each query token has a list of positions of its request, as an indexer writes it.

    Positions are in no order, with unused entries between them. The cache is vLLM's, bfloat16 or rows of 656 bytes.
    """

    def __init__(self, lengths, s_q, cache="auto", seed=0, heads=HEADS, top_k=TOP_K, block=BLOCK):
        super().__init__(lengths, s_q, seed, heads, block=block)
        self.random = torch.Generator().manual_seed(seed + 1)
        ends = itertools.accumulate(self.query_lens)
        self.top_k = top_k
        self.lists = torch.full((self.tokens, top_k), NOTHING, dtype=torch.int32)
        for length, query_len, end in zip(lengths, self.query_lens, ends, strict=True):
            for row in range(end - query_len, end):
                self.lists[row] = self.list_of(length + row + 1 - end)
        self.rows = self.kv
        if cache == "fp8":
            packed, self.kv = zip(*map(pack, self.kv), strict=True)
            self.rows = list(packed)
            bf16 = self.cache
            self.cache = torch.full((*bf16.shape[:2], ROW_BYTES["fp8"]), 0xFF, dtype=torch.uint8)  # NaN
            for request, rows in enumerate(packed):
                for begin in range(0, len(rows), block):
                    part = rows[begin : begin + block]
                    self.cache[self.block_table[request, begin // block], : len(part)] = part

    def list_of(self, seen):
        """The list of a token that sees so many positions; at least a quarter of its entries are unused."""
        named = torch.randperm(max(seen, 0), generator=self.random)[: self.top_k * 3 // 4].int()
        entries = torch.nn.functional.pad(named, (0, self.top_k - len(named)), value=NOTHING)
        return entries[torch.randperm(self.top_k, generator=self.random)]


def pack(rows):
    """Rows of 656 bytes as vLLM's writer stores them, and their values."""
    latent, rope = rows.split([LATENT, ROPE], dim=-1)
    groups = latent.float().view(len(rows), 4, 128)
    scales = groups.abs().amax(dim=-1) / 448
    values = (groups / scales[..., None]).to(FP8)
    packed = torch.cat([values.view(torch.uint8).flatten(1), scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    dequantized = (values.double() * scales[..., None].double()).flatten(1)
    return packed, torch.cat([dequantized, rope.double()], dim=1)


def unabsorbed(problem, weight, dtype):
    """Attention of each token over the up-projected keys and values that its list names: [tokens, heads * 128]."""
    weight = weight.to(dtype).view(problem.heads, NOPE + VALUE, LATENT)
    out = torch.zeros(problem.tokens, problem.heads, VALUE, dtype=dtype)
    owners = [request for request, tokens in enumerate(problem.query_lens) for _ in range(tokens)]
    projected = []
    for rows in problem.kv:
        latent, rope = rows.to(dtype).split([LATENT, ROPE], dim=-1)
        key_value = torch.einsum("hdl,tl->htd", weight, latent)
        key = torch.cat([key_value[..., :NOPE], rope.expand(problem.heads, -1, -1)], dim=-1)
        projected.append((key, key_value[..., NOPE:]))
    for row, request in enumerate(owners):
        named = problem.lists[row][problem.lists[row] != NOTHING].long()
        if not len(named):
            continue
        key, value = (part[:, named] for part in projected[request])
        scores = torch.einsum("hd,htd->ht", problem.q[row].to(dtype), key) * SCALE
        out[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), value)
    return out.flatten(1)


def assert_as_exact_as_torch(out, problem, layer):
    """At most twice the error of the same attention computed by torch in bfloat16."""
    weight = layer.kv_b_proj.weight
    exact = unabsorbed(problem, weight, torch.float64)
    assert exact.abs().max() > 0.1
    error = (out.double() - exact).pow(2).mean().sqrt()
    torch_error = (unabsorbed(problem, weight, torch.bfloat16).double() - exact).pow(2).mean().sqrt()
    assert error <= 2 * torch_error, (error, torch_error)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Runs vLLM's own Triton kernels around ETAP's with Triton's interpreter."""
    kernels = [
        (metadata, "_token_request"), (metadata, "_token_request_mapping_kernel"), (triton.language, "sum"),
        (triton.language, "cumsum"), (sparse_utils.ConvertReqIndexToGlobalIndexKernel, "kernel"),
    ]  # fmt: skip
    for owner, name in kernels:
        monkeypatch.setattr(owner, name, InterpretedFunction(getattr(owner, name).fn))


@pytest.fixture
def make(one_rank, fresh_workspaces, make_layer):
    """Makes a sparse layer, its builder and the indexer that holds its lists."""

    def all_three(heads=HEADS, cache="auto", has_indexer=True, top_k=TOP_K, **arguments):
        buffer = torch.full((MAX_TOKENS, top_k), 2**30, dtype=torch.int32)
        indexer = SimpleNamespace(topk_indices_buffer=buffer)
        override = SPARSE_MODEL | {"index_topk": top_k, "num_attention_heads": heads, "num_key_value_heads": heads}
        layer_arguments = {
            "use_sparse": True,
            "topk_indices_buffer": buffer,
            "indexer": indexer if has_indexer else None,
        }
        engine = {"kv_cache_dtype": cache, "hf_overrides": override}
        layer, config = make_layer(heads, layer_arguments, **(engine | arguments))
        return layer, make_builder(layer, config), indexer

    return all_three


def run(layer, builder, indexer, problem, common=None):
    """A step of the layer, with the lists that its indexer wrote."""
    indexer.topk_indices_buffer[: problem.tokens] = problem.lists
    return decode(layer, problem, builder.build(0, common or problem.common_metadata()))


@pytest.mark.parametrize("cache", ROW_BYTES)
@pytest.mark.parametrize("step", STEPS)
def test_layer_decodes_as_exactly_as_torch(make, cache, step):
    lengths, s_q, arguments = STEPS[step]
    layer, builder, indexer = make(cache=cache, **arguments)
    problem = SparseProblem(lengths, s_q, cache)
    metadata = builder.build(0, problem.common_metadata())
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (
        len(lengths),
        problem.tokens,
        0,
    )
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)


BATCH_INVARIANT = {"attention_config": {"sparse_mla_force_mqa": True}}


@pytest.mark.parametrize("heads", [8, 128])
def test_batch_invariance_gives_a_token_the_same_bits_whatever_the_batch(make, monkeypatch, heads):
    """A list has 16 tiles, which a call of few tokens would split without batch invariance."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, builder, indexer = make(heads=heads, top_k=1024, **BATCH_INVARIANT)
    problem = SparseProblem([1000, 900, 700], 31, heads=heads, top_k=1024)
    step = builder.build(0, problem.common_metadata())
    q = torch.randn(problem.tokens, heads, LATENT + ROPE).bfloat16()
    partitions = H20_SMS // sparse_decode_shape(heads).row_groups
    assert problem.tokens > partitions and problem.tokens % partitions, "some tokens are in a second call"

    def outputs(rows):
        indexer.topk_indices_buffer[: len(rows)] = problem.lists[rows]
        of_rows = SimpleNamespace(block_table=step.block_table, req_id_per_token=step.req_id_per_token[rows])
        return layer.impl.forward_mqa(q[rows], problem.cache, of_rows, layer)

    everyone = outputs(torch.arange(problem.tokens))
    for rows in ([5], [92, 5], list(range(40, 93)), list(range(10, 88))):
        for one, other in zip(outputs(torch.tensor(rows)), everyone, strict=True):
            assert torch.equal(one, other[rows]), rows
    exact = torch.cat([problem.kv[0][problem.lists[5][problem.lists[5] != NOTHING].long()].double()])
    scores = q[5].double() @ exact.T * SCALE
    torch.testing.assert_close(everyone[1][5].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_batch_invariance_wants_prompts_that_attend_by_lists(select, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="batch invariance of sparse attention .*force_mqa"):
        select()
    assert select(engine=BATCH_INVARIANT) is ETAPSparseBackend


@pytest.mark.parametrize("cache, stored", [("auto", "auto"), ("bfloat16", "auto"), ("fp8", "fp8_ds_mla")])
def test_cache_is_vllms(make, cache, stored):
    """`fp8` becomes `fp8_ds_mla`, by the backend's name."""
    layer, builder, _ = make(cache=cache)
    assert layer.get_attn_backend() is ETAPSparseBackend
    assert layer.kv_cache_dtype == stored
    spec = builder.kv_cache_spec
    row_bytes = ROW_BYTES["auto" if stored == "auto" else "fp8"]
    assert (spec.block_size, spec.page_size_bytes) == (BLOCK, BLOCK * row_bytes)


@pytest.mark.parametrize("cache", ROW_BYTES)
def test_larger_blocks(make, cache):
    """vLLM does not split blocks of a multiple of 64 tokens."""
    layer, builder, indexer = make(cache=cache, block_size=128)
    assert builder.kv_cache_spec.block_size == 128
    problem = SparseProblem(LENGTHS, 1, cache, block=128)
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)


def test_blocks_may_lie_apart(make):
    layer, builder, indexer = make(cache="fp8")
    problem = SparseProblem(LENGTHS, 1, "fp8")
    apart = torch.zeros(len(problem.cache), 3, *problem.cache.shape[1:], dtype=torch.uint8)
    apart[:, 1] = problem.cache
    problem.cache = apart[:, 1]
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)


@pytest.mark.parametrize("cache", ROW_BYTES)
def test_a_step_with_a_long_prompt_is_one_call(make, monkeypatch, cache):
    """With a prompt longer than the lists, vLLM sends decodes and prompts together."""
    layer, builder, indexer = make(cache=cache)
    problem = SparseProblem([700, 130, 300], [1, 1, 300], cache)
    metadata = builder.build(0, problem.common_metadata())
    assert (metadata.num_decodes, metadata.num_prefills, metadata.prefill_max_seq_len) == (2, 1, 300)
    calls = []
    kernel = sparse.sparse_mla_decode
    monkeypatch.setattr(
        sparse, "sparse_mla_decode", lambda q, *rest, **more: calls.append(len(q)) or kernel(q, *rest, **more)
    )
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)
    assert calls == [problem.tokens]


def test_short_prompts_beside_decodes_stay_with_vllms_prefill(make, monkeypatch):
    """vLLM computes prompts densely that have no more tokens than the lists have entries."""
    layer, builder, indexer = make(top_k=256)
    problem = SparseProblem([700, 130, 200], [1, 1, 200], top_k=256)
    dense = []
    monkeypatch.setattr(layer.impl, "forward_mha", lambda q, *_, output, **__: dense.append(q) or output.fill_(7))
    output = run(layer, builder, indexer, problem)
    problem.query_lens, problem.tokens = [1, 1], 2
    assert_as_exact_as_torch(output[:2], problem, layer)
    assert torch.equal(dense[0], problem.q[2:]) and (output[2:] == 7).all()


def test_lists_are_read_from_the_indexers_current_buffer(make):
    """A draft model's indexer gets the target's buffer when its layers are made."""
    layer, builder, indexer = make()
    problem = SparseProblem(LENGTHS, 1)
    indexer.topk_indices_buffer = torch.full_like(indexer.topk_indices_buffer, NOTHING)
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)


def test_a_layer_without_an_indexer_reads_the_buffer_that_it_was_given(make):
    layer, builder, indexer = make(has_indexer=False)
    problem = SparseProblem(LENGTHS, 1)
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)


@pytest.mark.parametrize("has_indexer", [True, False])
def test_a_buffer_that_a_model_sets_later_is_read(make, has_indexer):
    """HY V4 gives the target's buffer to its draft model through the implementation's property."""
    layer, builder, indexer = make(has_indexer=has_indexer)
    problem = SparseProblem(LENGTHS, 1)
    layer.impl.topk_indices_buffer = target = torch.full_like(indexer.topk_indices_buffer, NOTHING)
    target[: problem.tokens] = problem.lists
    step = builder.build(0, problem.common_metadata())
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer)


@pytest.mark.parametrize("cache", ROW_BYTES)
def test_padding_and_empty_lists_give_zeros(make, cache):
    """Rows that pad a step for a CUDA graph have the lists of an earlier step; a request may have an empty list."""
    layer, builder, indexer = make(cache=cache, **SPECULATIVE)
    problem = SparseProblem([70, 700, 0], [4, 4, 4], cache)
    indexer.topk_indices_buffer[12:] = 2**31 - 1
    problem.lists[8] = NOTHING
    problem.lists[9:12] = torch.tensor([2**30, -(2**31), NOTHING, 2**20], dtype=torch.int32).repeat(TOP_K // 4)
    out = run(layer, builder, indexer, problem)
    problem.lists[9:12] = NOTHING
    assert_as_exact_as_torch(out, problem, layer)
    assert not out[8:].any()


def test_query_reaches_the_kernel_without_a_copy(make, monkeypatch):
    layer, builder, indexer = make()
    problem = SparseProblem(LENGTHS, 1)
    given, passed = [], []
    forward_mqa, kernel = layer.impl.forward_mqa, sparse.sparse_mla_decode
    monkeypatch.setattr(layer.impl, "forward_mqa", lambda q, *rest: given.append(q) or forward_mqa(q, *rest))
    monkeypatch.setattr(
        sparse, "sparse_mla_decode", lambda q, *rest, **more: passed.append((q, rest, more)) or kernel(q, *rest, **more)
    )
    run(layer, builder, indexer, problem)
    (latent, rope), (q, (cache, lists), more) = given[0], passed[0]
    assert cache is problem.cache
    for passed_on, vllms in ((q, latent), (more["q_rope"], rope)):
        assert (passed_on.data_ptr(), passed_on.stride()) == (vllms.data_ptr(), vllms.stride())
    assert rope.data_ptr() == problem.q[..., NOPE:].data_ptr()
    assert lists.data_ptr() == indexer.topk_indices_buffer.data_ptr()
    assert more["block_table"].shape[0] == len(LENGTHS) and more["request_ids"].tolist() == [0, 1, 2, 3]


def test_query_in_one_tensor_and_strided_gives_the_same(make):
    layer, builder, indexer = make()
    problem = SparseProblem(LENGTHS, 1)
    metadata = builder.build(0, problem.common_metadata())
    indexer.topk_indices_buffer[:4] = problem.lists
    q = torch.randn(4, HEADS, LATENT + ROPE).bfloat16()
    latent, rope = q.split([LATENT, ROPE], dim=-1)
    transposed = latent.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.nn.functional.pad(rope, (NOPE, 0))[..., NOPE:]
    whole = layer.impl.forward_mqa(q, problem.cache, metadata, layer)
    split = layer.impl.forward_mqa((transposed, wide), problem.cache, metadata, layer)
    assert [tuple(part.shape) for part in whole] == [(4, HEADS, LATENT), (4, HEADS)]
    assert whole[0].is_contiguous() and whole[1].is_contiguous() and whole[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
    none = layer.impl.forward_mqa(q[:0], problem.cache, metadata, layer)
    assert [tuple(part.shape) for part in none] == [(0, HEADS, LATENT), (0, HEADS)]


RANK_STEPS = {
    "decode": ([700, 129, 5, 64], 1),
    "drafts of different numbers": ([700, 129, 1, 6], [4, 2, 1, 3]),
    "with a long prompt": ([700, 130], [1, 130]),
}
RANK_CASES = [
    ("auto", 16, "decode"), ("auto", 16, "drafts of different numbers"),
    ("fp8", 1, "drafts of different numbers"), ("fp8", 1, "with a long prompt"),
]  # fmt: skip
"""Type of the cache, consecutive tokens that a rank has, and the step."""


def rank_problem(cache, step):
    return SparseProblem(*RANK_STEPS[step], cache, heads=2 * HEADS)


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks, tmp_path_factory):
    """Output and weight per case, for each of two ranks that share every context."""

    def saved(cache, _, step):
        problem = rank_problem(cache, step)
        about = {"lengths": problem.lengths, "query_lens": problem.query_lens, "q": problem.q, "lists": problem.lists}
        return about | {"rows": problem.rows}

    buffer = torch.full((MAX_TOKENS, TOP_K), NOTHING, dtype=torch.int32)
    path = tmp_path_factory.mktemp("steps") / "steps"
    torch.save({"model": SPARSE_MODEL, "buffer": buffer, "steps": {case: saved(*case) for case in RANK_CASES}}, path)
    return on_two_ranks("dcp_rank_sparse", path)


@pytest.mark.parametrize("case", RANK_CASES, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_decode_context_parallelism_on_two_ranks_is_the_whole_attention(two_ranks, rank, case):
    """With drafts and prompts. A rank without a token of a list gets its heads' result from the other rank."""
    out, weight = two_ranks[rank][case]
    cache, _, step = case
    everyone = rank_problem(cache, step)
    everyone.heads, everyone.q = HEADS, everyone.q[:, rank * HEADS : (rank + 1) * HEADS]
    assert_as_exact_as_torch(out, everyone, SimpleNamespace(kv_b_proj=SimpleNamespace(weight=weight)))


def test_a_replayed_graph_reads_the_next_step_in_the_same_buffers(make):
    layer, builder, indexer = make()
    first, second = SparseProblem([70, 700, 129], 1), SparseProblem([300, 64, 500], 1, seed=5)
    common = first.common_metadata()
    captured = builder.build(0, common)
    following = second.common_metadata()
    common.block_table_tensor[:, : following.block_table_tensor.shape[1]] = following.block_table_tensor
    common.query_start_loc.copy_(following.query_start_loc)
    assert builder.build(0, following).req_id_per_token.data_ptr() == captured.req_id_per_token.data_ptr()
    indexer.topk_indices_buffer[:3] = second.lists
    assert_as_exact_as_torch(decode(layer, second, captured), second, layer)


def test_draft_steps_in_one_graph_find_their_requests_again(make):
    _, builder, _ = make(**SPECULATIVE)
    assert builder.supports_draft_decode_metadata_update
    metadata = builder.build(0, SparseProblem(LENGTHS, 1).common_metadata())
    metadata.req_id_per_token.fill_(7)
    builder.update_draft_decode_metadata(metadata)
    assert metadata.req_id_per_token.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("arguments", [{}, SPECULATIVE], ids=["plain", "speculative"])
def test_full_graphs_and_decodes_of_any_length(make, arguments):
    _, builder, _ = make(**arguments)
    assert builder.get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec) is AttentionCGSupport.UNIFORM_BATCH
    assert builder.reorder_batch_threshold == 128 and not builder.require_uniform_decodes


@pytest.mark.parametrize("cache", ROW_BYTES)
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_workspace_is_claimed_before_vllm_locks_it(make, heads, cache):
    """It is the same for any step, and no step claims more."""
    layer, builder, indexer = make(heads, cache)
    if versions.reserves_in_profile_run(builder.vllm_config):
        layer.impl.reserve_workspace()
    workspace.lock_workspace()
    problem = SparseProblem([700, 300], 64, cache, heads=heads)
    assert run(layer, builder, indexer, problem).isfinite().all()
    floats = sparse_workspace_floats(heads, H20_SMS)
    with pytest.raises(AssertionError, match="Workspace is locked"):
        claim_workspace(floats + 1000)


def test_the_log_says_that_no_prefix_is_shared(make, monkeypatch):
    lines = []
    monkeypatch.setenv("ETAP_SHARED_PREFIX", "1")
    monkeypatch.setattr(log.logger, "info_once", lambda line, **_: lines.append(line))
    make()
    assert lines[0].endswith("sparse attention, KV cache bfloat16; ETAP_SHARED_PREFIX=1 has no effect on it")


def test_workspace_is_claimed_in_the_profile_run_of_the_fused_layer(make):
    """vLLM's own layer of DeepSeek-V3.2 and GLM-5, run without a batch as far as it needs no GPU."""
    layer, builder, _ = make()
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    class Prepared(Exception):
        pass

    def end(*_):
        raise Prepared

    projected = torch.zeros(3, 512 + LATENT + ROPE)
    fused = SimpleNamespace(
        impl=layer.impl, layer_name=NAME, indexer=None, hisparse_cache=None, num_local_heads=HEADS, v_head_dim=VALUE,
        q_lora_rank=512, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, _should_prepare_mqa_query=end,
        fused_qkv_a_proj=lambda hidden: (projected,),
    )  # fmt: skip
    with set_forward_context(None, builder.vllm_config, num_tokens=3, slot_mapping={}), pytest.raises(Prepared):
        DeepseekV32Attention.forward(fused, torch.arange(3), torch.zeros(3, 64))
    workspace.lock_workspace()
    floats = sparse_workspace_floats(HEADS, H20_SMS)
    assert claim_workspace(floats).numel() == floats
    with pytest.raises(AssertionError, match="Workspace is locked"):
        claim_workspace(floats + 1000)


def sparse_arguments(layer, indexer):
    return implementation_arguments(layer) | {"topk_indices_buffer": indexer.topk_indices_buffer}


def attend(problem, q, token, width):
    """Output and log-sum-exp of a token's list in float64, over the first `width` columns of its rows."""
    entries = problem.lists[token]
    rows = problem.kv[token][entries[entries != NOTHING].long(), :width].double()
    scores = q[token, :, :width].double() @ rows.T * SCALE
    return scores.softmax(-1) @ rows[:, :LATENT], scores.logsumexp(-1)


@pytest.mark.parametrize("cache", ROW_BYTES)
def test_rows_without_rope(make, cache):
    """GLM-5.3-Flash: the rope part of the query has width 0; that of vLLM's FP8 rows is not read."""
    layer, builder, indexer = make(cache=cache)
    stored = layer.kv_cache_dtype
    no_rope = {"head_size": LATENT, "qk_rope_head_dim": 0, "qk_head_dim": NOPE, "kv_cache_dtype": stored}
    impl = type(layer.impl)(**(sparse_arguments(layer, indexer) | no_rope))
    assert impl.supports_dense_mha_prefill is (cache == "auto")
    problem = SparseProblem(LENGTHS, 1, cache)
    indexer.topk_indices_buffer[:4] = problem.lists
    latent = torch.randn(4, HEADS, LATENT).bfloat16()
    if cache == "fp8":
        problem.cache[..., 528:] = 0xFF  # NaN
    else:
        problem.cache = problem.cache[..., :LATENT].contiguous()
    metadata = builder.build(0, problem.common_metadata())
    out, lse = impl.forward_mqa((latent, latent[..., :0]), problem.cache, metadata, layer)
    for token in range(4):
        exact, exact_lse = attend(problem, latent, token, LATENT)
        torch.testing.assert_close(lse[token].double(), exact_lse, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out[token].double(), exact, rtol=2e-2, atol=2e-2)


@needs_hisparse
@pytest.mark.parametrize("resident", [True, False], ids=["prompts' rows on the GPU", "prompts' rows staged"])
@pytest.mark.parametrize("cache", ROW_BYTES)
def test_rows_of_a_cache_in_host_memory_are_read_where_vllm_puts_them(make, monkeypatch, cache, resident):
    """vLLM's own layer, builder and `forward_mqa`; the transfers, which need a GPU, are stand-ins."""
    from vllm.v1.attention.backends.mla import index_group

    problem = SparseProblem([70, 700, 130], [1, 1, 130], cache)
    staged, hot, blocks = problem.cache, problem.cache.flip(0), len(problem.cache)
    runtime = SimpleNamespace(hot=SimpleNamespace(attention_cache=hot))
    prepared = []
    handle = SimpleNamespace(
        runtime=runtime, all_context_pages_resident=resident, prepare_group_for_batch=prepared.append
    )
    monkeypatch.setattr(index_group, "create_hisparse_cache_handle", lambda *_, **__: handle)
    for name in "_create_side_stream", "_create_event":
        monkeypatch.setattr(index_group, name, lambda *_: None)

    def bring(group, layer, lists, step, **options):
        assert options == {"block_stride_rows": None, "return_valid_counts": True}
        block = step.block_table[step.req_id_per_token[: len(lists), None], lists.clamp(min=0) // BLOCK]
        rows = ((blocks - 1 - block) * BLOCK + lists % BLOCK).masked_fill(lists == NOTHING, NOTHING)
        return rows.sort(dim=1, descending=True).values.int(), (rows != NOTHING).sum(1).int()

    def stage(group, layer, given, step):
        assert given is problem.cache
        return staged, step.block_table[2:], step.req_id_per_token[2 : problem.tokens] - 2

    monkeypatch.setattr(index_group.HiSparseMLAIndexGroup, "convert_logical_to_physical_topk", bring)
    monkeypatch.setattr(index_group.HiSparseMLAIndexGroup, "stage_prefill_rows", stage)
    layer, builder, indexer = make(cache=cache, attention_config={"hisparse_config": {}})
    assert layer.hisparse_cache is handle and builder.reorder_batch_threshold == 1
    layer.impl.prepare_for_batch("a step")  # as the layer of DeepSeek-V3.2 calls it
    assert prepared == ["a step"]
    problem.cache = torch.full_like(staged.view(torch.uint8), 0xFF).view(staged.dtype)  # NaN
    assert_as_exact_as_torch(run(layer, builder, indexer, problem), problem, layer)


@pytest.mark.parametrize("cache", ROW_BYTES)
def test_sinks_count_as_a_key_without_a_value(make, cache):
    """HY V4's sinks are weights, loaded after the layer is made."""
    layer, builder, indexer = make(cache=cache)
    sinks = torch.nn.Parameter(torch.full((HEADS,), -torch.inf), requires_grad=False)
    given = sparse_arguments(layer, indexer) | {"kv_cache_dtype": layer.kv_cache_dtype, "sinks": sinks}
    impl = type(layer.impl)(**given)
    sinks.data.copy_(torch.linspace(-2, 8, HEADS))
    problem = SparseProblem(LENGTHS, 1, cache)
    indexer.topk_indices_buffer[:4] = problem.lists
    q = torch.randn(4, HEADS, LATENT + ROPE).bfloat16()
    out, _ = impl.forward_mqa(q, problem.cache, builder.build(0, problem.common_metadata()), layer)
    for token in range(4):
        exact, lse = attend(problem, q, token, LATENT + ROPE)
        exact = exact * torch.sigmoid(lse - sinks.double())[:, None]
        torch.testing.assert_close(out[token].double(), exact, rtol=2e-2, atol=2e-2)


def test_sinks_with_decode_context_parallelism_are_refused(make, monkeypatch):
    layer, builder, indexer = make()
    monkeypatch.setattr(builder.vllm_config.parallel_config, "decode_context_parallel_size", 2)
    with pytest.raises(NotImplementedError, match="ETAP: sinks"):
        type(layer.impl)(**sparse_arguments(layer, indexer), sinks=torch.zeros(HEADS))


@pytest.mark.parametrize("changes, name", [
    ({"sliding_window": 128}, "sliding_window"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ({"kv_lora_rank": 256}, "v_head_dim"),
    ({"topk_indices_buffer": None}, "indexer or topk_indices_buffer"),
], ids=str)  # fmt: skip
def test_the_implementation_refuses_by_name(make, changes, name):
    layer, _, indexer = make()
    arguments = sparse_arguments(layer, indexer)
    type(layer.impl)(**arguments)
    with pytest.raises(NotImplementedError, match=f"ETAP: {name}"):
        type(layer.impl)(**(arguments | changes))
