"""Decode steps for vLLM's own MLA layer with float64 references; shared by the contract tests of the layer."""

import itertools

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups  # noqa: F401
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups  # noqa: F401

HEADS, NOPE, ROPE, LATENT, VALUE = 16, 128, 64, 512, 128
SCALE = 0.1147  # not 1/sqrt of anything: the layer's own, as after YaRN
BLOCK = 64
MAX_REQUESTS = 8
NAME = "model.layers.0.self_attn.attn"
LENGTHS = [70, 129, 1]
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
KV_SCALE = 0.3  # no power of two: it must not be rounded into the values
CACHES = {"auto": None, "fp8": KV_SCALE}
"""Types of the KV cache, with their scales."""
DCP_CONFIGURATIONS = [("auto", 1, BLOCK), ("fp8", 1, BLOCK), ("auto", 1, 16), ("auto", 16, BLOCK)]
"""With decode context parallelism: type of the cache, consecutive tokens that a rank has, and tokens per block."""
DCP_STEPS = {
    "decode": (LENGTHS, 1),
    "drafts": ([700, 129, 5, 64], 4),
    "drafts of different numbers": ([700, 129, 1, 6], [4, 2, 1, 3]),
    "drafts that share their context": ([1400, 64], 4),
}
"""Lengths of a step's requests, and their query tokens."""


class Problem:
    """One decode step: requests with their cache, and every token's query and key.

    `s_q` is the query tokens per request, a list where they differ, and `block` the tokens per block of the cache. With
    `kv_scale` the cache is FP8, as bytes like vLLM's, and `kv` its elements times the scale.
    """

    def __init__(self, lengths, s_q, seed=0, heads=HEADS, kv_scale=None, block=BLOCK):
        random = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=random).bfloat16()

        self.lengths, self.heads, self.block = lengths, heads, block
        self.query_lens = [s_q] * len(lengths) if isinstance(s_q, int) else s_q
        self.tokens = sum(self.query_lens)
        self.q = normal(self.tokens, heads, NOPE + ROPE)
        rows = [normal(length, LATENT + ROPE) for length in lengths]
        self.stored = rows if kv_scale is None else [(row.float() / kv_scale).to(FP8) for row in rows]
        self.kv = rows if kv_scale is None else [row.double() * kv_scale for row in self.stored]
        widest = max(2, -(-max(lengths) // block))
        blocks = 1 + torch.randperm(len(lengths) * widest, generator=random).int()
        self.block_table = blocks.view(len(lengths), widest).clone()
        self.store(self.stored, 1 + blocks.numel())
        for request, length in enumerate(lengths):
            self.block_table[request, -(-length // block) :] = 2**30

    def store(self, rows_of_requests, blocks):
        """Make the cache: these rows, and NaN everywhere else."""
        dtype = rows_of_requests[0].dtype
        cache = torch.full((blocks, self.block, LATENT + ROPE), float("nan"), dtype=dtype)
        for request, rows in enumerate(rows_of_requests):
            for index, part in enumerate(rows.split(self.block)):
                cache[self.block_table[request, index], : len(part)] = part
        self.cache = cache.view(torch.uint8) if dtype == FP8 else cache

    def common_metadata(self, prefill_lengths=(), context=0):
        """vLLM's description of the batch: the decodes, then prompts after `context` tokens without blocks."""
        query_lens = [n if length else 0 for n, length in zip(self.query_lens, self.lengths, strict=True)]
        query_lens += prefill_lengths
        totals = self.lengths + [context + length for length in prefill_lengths]
        seq_lens = torch.tensor(totals, dtype=torch.int32)
        starts = torch.tensor([0] + query_lens).cumsum(0).int()
        tokens = self.tokens + sum(prefill_lengths)
        block_table = torch.zeros(len(seq_lens), self.block_table.shape[1] + 3, dtype=torch.int32)
        block_table[: len(self.lengths), : self.block_table.shape[1]] = self.block_table
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            num_reqs=len(seq_lens),
            num_actual_tokens=tokens,
            max_query_len=max(query_lens),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table[:, : self.block_table.shape[1]],
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        )


def unabsorbed(problem, weight, dtype):
    """Attention over up-projected keys and values, as in the model's formula: [tokens, heads * 128].

    It shares nothing with the layer: neither the latent query nor pages nor schedule.
    """
    heads = problem.heads
    weight = weight.to(dtype).view(heads, NOPE + VALUE, LATENT)
    out = torch.zeros(problem.tokens, heads, VALUE, dtype=dtype)
    ends = itertools.accumulate(problem.query_lens)
    for rows, query_len, end in zip(problem.kv, problem.query_lens, ends, strict=True):
        latent, rope = rows.to(dtype).split([LATENT, ROPE], dim=-1)
        key_value = torch.einsum("hdl,tl->htd", weight, latent)
        key = torch.cat([key_value[..., :NOPE], rope.expand(heads, -1, -1)], dim=-1)
        scores = torch.einsum("qhd,htd->hqt", problem.q[end - query_len : end].to(dtype), key) * SCALE
        last = torch.arange(len(rows) - query_len, len(rows))  # position that each query token sees last
        scores.masked_fill_(torch.arange(len(rows)) > last[:, None], float("-inf"))
        seen = scores.softmax(-1).masked_fill(last[:, None] < 0, 0.0)  # a token that sees nothing gets 0
        out[end - query_len : end] = torch.einsum("hqt,htd->qhd", seen, key_value[..., NOPE:])
    return out.flatten(1)


def build_layer(config, heads, **arguments):
    """A real MLA layer of one rank's heads; `config` has to be vLLM's current one, keywords are the layer's."""
    ranks = config.parallel_config.tensor_parallel_size
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        projection = ColumnParallelLinear(LATENT, ranks * heads * (NOPE + VALUE), bias=False)
        torch.manual_seed(1)
        projection.weight.data.normal_(std=LATENT**-0.5)
        dimensions = (NOPE, ROPE, VALUE, 512, LATENT)
        shared = {"cache_config": config.cache_config, "prefix": NAME}
        layer = MLAAttention(heads, SCALE, *dimensions, projection, **shared, **arguments)
    finally:
        torch.set_default_dtype(dtype)
    layer.process_weights_after_loading(torch.bfloat16)
    current_platform.update_block_size_for_backend(config)
    return layer


def make_builder(layer, config):
    return layer.get_attn_backend().get_builder_cls()(layer.get_kv_cache_spec(config), [NAME], config, CPU)


def decode(layer, problem, step):
    output = torch.full((problem.tokens, problem.heads * VALUE), float("nan"), dtype=torch.bfloat16)
    unused = torch.empty(problem.tokens, 0)
    return layer.forward_impl(problem.q, unused, unused, problem.cache, step, output=output)


def assert_as_exact_as_torch(out, problem, weight):
    """At most twice the error of the same attention computed by torch in bfloat16."""
    exact = unabsorbed(problem, weight, torch.float64)
    assert exact.abs().max() > 0.1
    error = (out.double() - exact).pow(2).mean().sqrt()
    torch_error = (unabsorbed(problem, weight, torch.bfloat16).double() - exact).pow(2).mean().sqrt()
    assert error <= 2 * torch_error, (error, torch_error)


def implementation_arguments(layer):
    """The arguments that vLLM makes the layer's implementation with, but those of a sparse one."""
    return {
        "num_heads": HEADS, "head_size": LATENT + ROPE, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": 512, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "qk_head_dim": NOPE + ROPE, "v_head_dim": VALUE, "kv_b_proj": layer.kv_b_proj,
    }  # fmt: skip


SPECULATIVE = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}
