"""The indexer of sparse models in a real vLLM, its metadata and its operator, around ETAP's top-k on CPU tensors.

The library's CPU function stands in for the kernel. DeepGEMM's logits need a GPU: they are drawn here, behind each
row's length +inf, which must not be read.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from etap_backend.vllm import log, top_k

load_general_plugins()

NAME, CPU, WIDTH, K, BEHIND, UNTOUCHED = "indexer", torch.device("cpu"), 4096, 512, 3, 7
GLM_HEADS, V4_RATIO = 32, 4
MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": K,
    "index_n_heads": GLM_HEADS,
    "index_head_dim": 128,
}
VLLMS = indexer_topk.get_indexer_topk
LENGTHS = [K - 1, K, K + 1, 3000, 1, 0, 2049]
LOGITS = {
    "ties": lambda random, shape: torch.randint(-3, 4, shape, generator=random) * 0.25 * -1.0,  # with 0 and -0
    "all alike": lambda random, shape: torch.zeros(shape),
    "no ties": lambda random, shape: torch.rand(shape, generator=random).argsort(dim=1).float() - 1000,
}
STEPS = {
    "decode": (1, [1] * 7),
    "2 tokens": (2, [2] * 7),
    "4 tokens": (4, [4] * 7),
    "flattened": (3, [3, 1, 2, 3, 1, 0, 2]),
}
"""Query tokens for which vLLM is configured, and those of each request; 0 pad a step of drafts of different numbers."""


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    """vLLM's function in its place again after a test; and what needs a GPU: DeepGEMM's plan and V4's slots."""
    monkeypatch.setattr(sparse_attn_indexer, "get_indexer_topk", VLLMS)
    monkeypatch.setattr(indexer, "get_paged_mqa_logits_metadata", lambda *_, **__: torch.zeros(1, 2, dtype=torch.int32))
    monkeypatch.setattr(indexer, "get_compressed_slot_mapping", lambda tokens, *_, out, **__: out[:tokens])


@pytest.fixture
def configured(engine_config):
    """vLLM's configuration of a sparse model, which is its current one; keywords are EngineArgs'."""
    contexts = []

    def make(model=None, tokens=1, **arguments):
        drafts = {"method": "ngram", "num_speculative_tokens": tokens - 1, "prompt_lookup_max": 2}
        arguments |= {"speculative_config": drafts} if tokens > 1 else {}
        defaults = {"attention_backend": "ETAP", "max_model_len": WIDTH, "max_num_seqs": 16}
        config = engine_config(hf_overrides=MODEL | (model or {}), **(defaults | arguments))
        contexts.append(set_current_vllm_config(config))
        contexts[-1].__enter__()
        return config

    yield make
    for context in reversed(contexts):
        context.__exit__(None, None, None)


class Step:
    """A step of decodes: vLLM's metadata of it, logits, and the lists that a stable sort gives."""

    def __init__(self, config, query_lens, ratio=1, law="ties"):
        self.config, random = config, torch.Generator().manual_seed(0)
        self.tokens = sum(query_lens)
        spec = MLAAttentionSpec(
            block_size=64 * ratio, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=ratio
        )
        builder = indexer.DeepseekV32IndexerMetadataBuilder(spec, [NAME], config, CPU, block_table_width=WIDTH // 64)
        counts, lengths = torch.tensor(query_lens), torch.tensor(LENGTHS, dtype=torch.int32) * ratio
        starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.clone(),
            num_reqs=len(lengths),
            num_actual_tokens=self.tokens,
            max_query_len=max(query_lens),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.zeros(len(lengths), WIDTH // 64, dtype=torch.int32),
            slot_mapping=torch.zeros(self.tokens, dtype=torch.int64),
        )
        self.metadata = builder.build(0, common)
        requests = zip(lengths.tolist(), query_lens, strict=True)
        self.seen = [max(0, length - count + 1 + t) // ratio for length, count in requests for t in range(count)]
        wide = torch.full((self.tokens, WIDTH + 256), torch.inf)
        self.logits = wide[:, :WIDTH]  # DeepGEMM's rows have strides of their own
        drawn = LOGITS[law](random, (self.tokens, WIDTH))
        for row, (length, values) in enumerate(zip(self.seen, drawn, strict=True)):
            self.logits[row, :length] = values[:length]
        self.buffer = torch.full((self.tokens + BEHIND + 2, K + 64), UNTOUCHED, dtype=torch.int32)

    def expected(self):
        """Ascending positions of the K largest, of equal ones the first, and -1 behind."""
        lists = torch.full((self.tokens, K), -1)
        for row, length in enumerate(self.seen):
            chosen = self.logits[row, :length].sort(descending=True, stable=True).indices[:K].sort().values
            lists[row, : len(chosen)] = chosen
        return lists

    def run(self, monkeypatch, heads=GLM_HEADS, kernel="auto"):
        """vLLM's operator; gives the step's lists."""

        def logits(q, cache, weights, seq_lens, *_, **__):
            assert q[0].shape == (*seq_lens.shape, heads, 128) and seq_lens.numel() == self.tokens
            return self.logits

        monkeypatch.setattr(sparse_attn_indexer, "fp8_fp4_paged_mqa_logits", logits)
        rows = self.tokens + BEHIND  # those of a CUDA graph
        with set_forward_context({NAME: self.metadata}, self.config):
            sparse_attn_indexer.sparse_attn_indexer(
                hidden_states=torch.zeros(rows, 8), k_cache_prefix=NAME,
                kv_cache=torch.zeros(1, 64, 132, dtype=torch.uint8),
                q_quant=torch.zeros(rows, heads, 128).to(torch.float8_e4m3fn), q_scale=None, k=None,
                weights=torch.zeros(rows, heads), quant_block_size=128, scale_fmt="ue8m0", topk_tokens=K, head_dim=128,
                max_model_len=WIDTH, total_seq_lens=WIDTH, topk_indices_buffer=self.buffer, skip_k_cache_insert=True,
                use_pcp=False, pcp_shard_decode_requests=False, dense_mha_metadata_layer_name="", topk_backend=kernel,
            )  # fmt: skip
        assert (self.buffer[self.tokens : rows] == -1).all() and (self.buffer[rows:] == UNTOUCHED).all()
        assert (self.buffer[:rows, K:] == -1).all()
        return self.buffer[: self.tokens, :K].long()


@pytest.fixture
def calls(monkeypatch):
    """Arguments of each call of `sparse_top_k` by the plugin."""
    made, function = [], top_k.sparse_top_k
    record = lambda *given, **named: made.append((given, named)) or function(*given, **named)  # noqa: E731
    monkeypatch.setattr(top_k, "sparse_top_k", record)
    return made


@pytest.mark.parametrize("law", LOGITS)
@pytest.mark.parametrize("step", STEPS)
def test_vllms_operator_gets_the_lists_of_a_stable_sort(configured, monkeypatch, calls, step, law):
    tokens, query_lens = STEPS[step]
    config = configured(tokens=tokens)
    top_k.install(config)
    problem = Step(config, query_lens, law=law)
    assert torch.equal(problem.run(monkeypatch), problem.expected())
    ((logits, lengths, k), named), seq_lens = calls[0], problem.metadata.decode.seq_lens
    assert len(calls) == 1 and k == K and logits is problem.logits
    assert seq_lens.shape[1] == (1 if step == "flattened" else tokens)
    assert (named["out"].data_ptr(), lengths.data_ptr()) == (problem.buffer.data_ptr(), seq_lens.data_ptr())


@pytest.mark.parametrize("tokens", [1, 2])
def test_deepseek_v4_selects_among_compressed_entries(configured, monkeypatch, calls, tokens):
    config = configured(tokens=tokens)
    top_k.install(config)
    problem = Step(config, [tokens] * len(LENGTHS), ratio=V4_RATIO)
    assert torch.equal(problem.run(monkeypatch, heads=64), problem.expected()) and len(calls) == 1


@pytest.mark.parametrize("step", STEPS)
def test_vllms_own_selects_the_same_where_no_tie_crosses_the_border(configured, monkeypatch, calls, step):
    """By its kernel in torch, which a user may name: then it stays vLLM's, whatever another model installed."""
    tokens, query_lens = STEPS[step]
    config = configured(tokens=tokens)
    top_k.install(config)
    problem = Step(config, query_lens, law="no ties")
    vllms = problem.run(monkeypatch, kernel="torch").sort(dim=1).values
    assert not calls and torch.equal(vllms, problem.expected().sort(dim=1).values)


def test_nothing_is_read_back_to_the_host(monkeypatch):
    given = []
    monkeypatch.setattr(top_k, "sparse_top_k", lambda *arguments, **named: given.append(named))
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "clone", "contiguous", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, _name=name: pytest.fail(f"{_name} was called"))
    lengths = torch.zeros(4, 2, dtype=torch.int32)
    top_k._get_etaps("auto")(torch.zeros(8, 64), lengths, 2, torch.zeros(8, K, dtype=torch.int32), K, 64)
    assert given[0]["early_lengths"] is True and top_k._get_etaps("auto") is top_k._get_etaps("auto")
    with pytest.raises(RuntimeError, match="view"):  # a copy would be younger than the logits
        top_k._get_etaps("auto")(torch.zeros(8, 64), lengths.T, 2, torch.zeros(8, K), K, 64)


@pytest.fixture
def said(caplog, monkeypatch):
    """Installs for a configuration, and gives the line of the log."""
    lines = []
    monkeypatch.setattr(log.logger, "info_once", lambda text, *_, scope: lines.append(text))

    def install(config):
        lines.clear()
        top_k.install(config)
        (line,) = lines
        return line

    return install


def test_the_switch_leaves_it_to_vllm(configured, said, monkeypatch):
    config = configured()
    for off, line in (("1", "ETAP"), ("0", "vLLM, ETAP_TOP_K=0"), ("", "ETAP")):
        monkeypatch.setenv("ETAP_TOP_K", off)
        assert said(config) == f"Top-k of the indexer: {line}"
        assert (sparse_attn_indexer.get_indexer_topk is VLLMS) == (off == "0")
    monkeypatch.setenv("ETAP_TOP_K", "off")
    with pytest.raises(ValueError, match="ETAP_TOP_K: wanted 0 or 1, got 'off'"):
        said(config)


@pytest.mark.parametrize("model, arguments, reason", [
    ({"index_topk": 2048}, {}, None),
    ({"index_topk": 1024}, {}, None),
    ({"index_topk": 500}, {}, "index_topk 500"),
    ({"index_kpool": 4}, {}, "pools of keys (index_kpool)"),
    ({"candidate_source_layer_id": 20}, {}, "candidate blocks (DeepSeek-V4.1)"),
    ({"candidate_source_layer_id": -1, "index_kpool": None}, {}, None),
    ({}, {"attention_config": {"hisparse_config": {}}}, "a KV cache in host memory (HiSparse)"),
    ({}, {"sparse_indexer_topk_backend": "persistent"}, "--sparse-indexer-topk-backend persistent"),
], ids=str)  # fmt: skip
def test_what_is_vllms_is_named(configured, said, model, arguments, reason):
    said(configured())
    assert sparse_attn_indexer.get_indexer_topk is not VLLMS
    assert said(configured(model, **arguments)) == f"Top-k of the indexer: {f'vLLM, {reason}' if reason else 'ETAP'}"
    assert (sparse_attn_indexer.get_indexer_topk is VLLMS) == (reason is not None)


def test_the_merge_of_decode_context_parallelism_is_vllms(configured, said, monkeypatch):
    config = configured()
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    assert said(config) == "Top-k of the indexer: vLLM, decode context parallelism"


def test_a_vllm_that_calls_it_differently_keeps_its_own(configured, said, monkeypatch):
    def forward(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len, scale):
        """A newer one's."""

    monkeypatch.setattr(indexer_topk.SparseIndexerTopk, "forward", forward)
    assert "lacks what ETAP uses: " in (line := said(configured())) and line.endswith("new parameters scale")


def test_a_layer_installs_it(one_rank, fresh_workspaces, make_layer):
    for k, is_etaps in ((K, True), (128, False)):
        buffer = torch.full((64, k), -1, dtype=torch.int32)
        arguments = {"use_sparse": True, "topk_indices_buffer": buffer, "indexer": SimpleNamespace()}
        make_layer(layer_arguments=arguments, hf_overrides=MODEL | {"index_topk": k})
        assert (sparse_attn_indexer.get_indexer_topk is not VLLMS) == is_etaps
