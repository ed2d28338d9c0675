"""Weights and KV cache on the fullest GPU, and the tokens that fit beside them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Gpu
from etap_backend.plan.model import CSA, HCA, V4, V41, Model

PAGE_TOKENS = 64
# Activations of the largest prefill chunk, CUDA graphs, NCCL, allocator: what vLLM 0.26.0 on 8 x H200 had left beside
# weights and KV cache.
RESERVE_BYTES = 5.6e9
# The indexer's buffers in vLLM 0.33: 512 MiB for the scores of a prefill, and 40 keys of 132 bytes for each of 163,840
# tokens, DeepSeek-V3.2's longest context; a lower --max-model-len takes less.
INDEXER_RESERVE_BYTES = 1.4e9
ABSORBED = "attention, absorbed copy"


@dataclass(frozen=True)
class Weights:
    """Matrices of one kind: their weights together, how they are divided, and whether a step reads them."""

    name: str
    parameters: int
    shards: int
    bytes_each: float
    experts: bool = False
    ends: bool = False  # before the first layer or after the last, not in every pipeline stage
    read_by_decode: bool = True
    in_host_memory: bool = False

    @property
    def bytes_per_gpu(self) -> float:
        return self.parameters / self.shards * self.bytes_each


def predicting_layers(model: Model, on: Deployment) -> int:
    """Layers that predict the next tokens; they are loaded where drafts are made."""
    return model.num_nextn_predict_layers if on.s_q > 1 else 0


def weights_of(model: Model, on: Deployment) -> list[Weights]:
    """All weights of the model, divided as the engines divide them."""
    predicting, head = predicting_layers(model, on), model.vocab_size * model.hidden_size
    parts = [
        *_attention(model, on, len(model.attention_layers) + predicting),
        *_indexer(model, len(model.indexer_layers) + (predicting if model.sparse and not model.v4 else 0)),
        *_compression(model, len(model.attention_layers) + predicting),
        *_linear_attention(model, on),
        *_feed_forward(model, on, predicting),
        *_engram(model, on),
        Weights("embedding", head, on.tp, 2.0, ends=True, read_by_decode=False),
        Weights("output head", 0 if model.tie_word_embeddings else head, on.tp, 2.0, ends=True),
    ]
    return [part for part in parts if part.parameters]


def _attention(model: Model, on: Deployment, layers: int) -> list[Weights]:
    hidden, heads, each = model.hidden_size, model.num_attention_heads, model.attention_bytes
    down = hidden * (model.cache_row + model.q_lora_rank)
    queries = (model.q_lora_rank or hidden) * heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    output = heads * model.v_head_dim * hidden
    if model.v4:  # each group of heads has its own latent output
        output = model.o_lora_rank * (heads * model.v_head_dim + model.o_groups * hidden)
    gate = output if model.mla_use_output_gate else 0
    latent = layers * model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    latent = 0 if model.v4 else latent  # queries are already in the cache's space
    return [
        Weights("attention, latent projections", layers * down, 1, model.latent_bytes),
        Weights("attention, heads", layers * (queries + output + gate), on.tp, each),
        Weights("attention, latent to heads", latent, on.tp, each, read_by_decode=False),
        # The engines keep kv_b_proj's absorbed form in the activations' type beside the loaded weight.
        Weights(ABSORBED, latent, on.tp, 2.0),
    ]


def _indexer(model: Model, layers: int) -> list[Weights]:
    """Every rank has the whole indexer. Keys, gates and the pooling of keys stay in two bytes.

    DeepSeek-V4's pooling has two series of keys and gates; V4.1 makes keys from entries.
    """
    if not model.sparse:
        return []
    pool = model.index_head_dim * (3 if model.v4 else 1) if model.index_kpool > 1 else 0
    queries = model.q_lora_rank * model.index_n_heads * model.index_head_dim
    keys = layers * model.hidden_size * (model.index_head_dim + model.index_n_heads + pool)
    if model.shares_caches:
        keys = layers * model.hidden_size * model.index_n_heads
        keys += len(model.kv_source_layer_ids) * model.kv_lora_rank * model.index_head_dim
    return [
        Weights("indexer, queries", layers * queries, 1, model.attention_bytes),
        Weights("indexer, keys and gates", keys, 1, 2.0),
    ]


def _compression(model: Model, layers: int) -> list[Weights]:
    """DeepSeek-V4's compressors and hyper-connections (float32), whole on each rank.

    CSA makes two series of keys and gates, HCA and V4.1's pairs one; V4.1's single tokens have no gate.
    """
    if not model.v4:
        return []
    matrices = sum(count * len(model.compressing(ratio)) for ratio, count in {CSA: 4, HCA: 2, 2: 2, 1: 1}.items())
    mixes = 2 * (model.hc_mult + 2) * model.hc_mult * model.hc_mult * model.hidden_size
    return [
        Weights("compressors", matrices * model.kv_lora_rank * model.hidden_size, 1, 2.0),
        Weights("hyper-connections", layers * mixes, 1, 4.0),
    ]


def _linear_attention(model: Model, on: Deployment) -> list[Weights]:
    """Kimi's delta attention: queries, keys, values, output, the heads' steps, the forget gate, three convolutions."""
    if (linear := model.linear_attn_config) is None:
        return []
    hidden, width, layers = model.hidden_size, linear.num_heads * linear.head_dim, model.linear_layers
    divided = 4 * hidden * width + hidden * linear.num_heads + linear.head_dim * width
    divided += 3 * width * linear.short_conv_kernel_size
    whole = hidden * linear.head_dim
    if linear.use_full_rank_gate:
        divided += hidden * width
    else:
        divided, whole = divided + linear.head_dim * width, 2 * whole
    return [
        Weights("linear attention, heads", layers * divided, on.tp, model.attention_bytes),
        Weights("linear attention, gate's latent", layers * whole, 1, model.attention_bytes),
    ]


def _feed_forward(model: Model, on: Deployment, predicting: int) -> list[Weights]:
    """Dense layers and layers with experts, `predicting` ones included; routed experts are spread over tp x dp."""
    hidden, each, moe = model.hidden_size, model.weight_bytes, model.moe_layers + predicting
    experts = model.moe_layers * model.n_routed_experts
    experts += predicting * (model.dspark_n_routed_experts or model.n_routed_experts)
    dense = model.num_hidden_layers - model.moe_layers
    narrow, wide = model.routed_expert_hidden_size, 3 * model.moe_intermediate_size
    shared, routed = model.n_shared_experts * wide * hidden, experts * wide * (narrow or hidden)
    return [
        Weights("dense layers", dense * 3 * hidden * model.intermediate_size, on.tp, each),
        Weights("shared experts", moe * shared, on.tp, each),
        Weights("router", hidden * experts, 1, 2.0),
        Weights("experts' projections", moe * 2 * hidden * narrow, 1, each),
        Weights("experts", routed, on.tp * on.dp, model.expert_bytes, experts=True),
    ]


def _engram(model: Model, on: Deployment) -> list[Weights]:
    """DeepSeek-V4.1's tables of word groups, MXFP8 in host memory (vLLM's default), and their projections."""
    layers, rows = len(model.engram_num_embeddings), sum(model.engram_num_embeddings)
    read = (model.engram_max_ngram_size - 1) * model.engram_n_heads * model.engram_head_dim
    table = Weights("Engram, tables", rows * model.engram_head_dim, on.tp, 1 + 1 / 32, in_host_memory=True)
    into = layers * read * model.hidden_size * (model.hc_mult + 1)
    return [replace(table, read_by_decode=False), Weights("Engram, projections", into, on.tp, model.weight_bytes)]


def parameters_of(model: Model) -> int:
    """Parameters of the model without its next-token predictor, biases and norms."""
    return sum(part.parameters for part in weights_of(model, Deployment(gpus=1, tp=1)) if part.name != ABSORBED)


def state_bytes(model: Model, on: Deployment) -> int:
    """Bytes that linear attention keeps per request on a rank: a float32 matrix per head and layer, and the last
    inputs of the convolutions in bfloat16, in both engines."""
    if (linear := model.linear_attn_config) is None:
        return 0
    heads = linear.num_heads // on.tp
    convolved = 3 * heads * linear.head_dim * (linear.short_conv_kernel_size - 1)
    return -(-model.linear_layers // on.pp) * (4 * heads * linear.head_dim**2 + 2 * convolved)


def _most_in_a_stage(layers: tuple[int, ...], model: Model, pp: int) -> int:
    """How many of these layers the pipeline stage with most of them has."""
    stage = -(-model.num_hidden_layers // pp)
    return max(Counter((layer - 1) // stage for layer in layers).values(), default=0)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest GPU, and the tokens that its KV cache can hold.

    For DeepSeek-V4 the bytes are vLLM's: entries and keys per token, windows and partial sums per request.
    """

    total: float
    usable: float
    weights: float
    reserve: float
    state_per_request: int  # bytes that do not grow with a request's tokens
    requests: int  # that decode on this GPU
    cache_per_token: float
    indexer_per_token: float  # the indexers' part of it
    tokens_wanted: int
    page_tokens: int = PAGE_TOKENS

    @property
    def left(self) -> int:
        """Bytes left for requests: KV cache and state."""
        return max(0, math.floor(self.usable - self.weights - self.reserve))

    @property
    def state(self) -> int:
        return self.requests * self.state_per_request

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, in whole pages."""
        page = int(self.cache_per_token * self.page_tokens)
        return max(0, self.left - self.state) // page * self.page_tokens

    def requests_of(self, tokens: int) -> int:
        """Requests that fit when each needs so many tokens of the cache on this GPU."""
        return int(self.left // (tokens * self.cache_per_token + self.state_per_request))

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted

    @property
    def cache_wanted(self) -> int:
        return int(self.tokens_wanted * self.cache_per_token)


@dataclass(frozen=True)
class Pool:
    """vLLM 0.33's block pool for DeepSeek-V4 on one rank; every rank holds the same.

    A block holds a page of each layer's compressed entries and of its indexer's keys. A request takes other blocks for
    windows and partial sums, and prompts in flight (2 x 8,192 tokens) do too. Other versions and SGLang divide their
    memory otherwise; their logs tell the tokens that they hold.
    """

    block_tokens: int
    block_bytes: int
    key_bytes: int
    blocks_of_request: int
    blocks_of_prompts: int


# Tokens per block; bytes of a layer's page of entries and of keys by its ratio; blocks of a request and of prompts.
POOLS = {
    V4: (256, {CSA: (37_440, 8_640), HCA: (1_728, 0)}, 30, 6_682),
    V41: (64, {2: (19_008, 4_608), 1: (37_440, 8_640)}, 43, 3_620),
}


def pool_of(model: Model, on: Deployment) -> Pool:
    """DeepSeek-V4's pool in the fullest pipeline stage."""
    tokens, pages, *blocks = POOLS[model.model_type]
    layers = {ratio: _most_in_a_stage(model.compressing(ratio), model, on.pp) for ratio in pages}
    entries, keys = (sum(count * pages[ratio][part] for ratio, count in layers.items()) for part in (0, 1))
    return Pool(tokens, max(1, entries + keys), keys, *blocks)


def memory_of(model: Model, gpu: Gpu, on: Deployment) -> Memory:
    """The memory of a deployment that passes `Deployment.check`."""
    predicting = predicting_layers(model, on)
    layers, indexers = (
        _most_in_a_stage(kind, model, on.pp) + predicting for kind in (model.attention_layers, model.indexer_layers)
    )
    indexer_per_token = indexers * model.index_row_bytes
    reserve, page_tokens = RESERVE_BYTES + (INDEXER_RESERVE_BYTES if model.sparse else 0), PAGE_TOKENS
    cache_per_token, state = model.cache_row_bytes(on.cache) * layers + indexer_per_token, state_bytes(model, on)
    if model.v4:
        pool = pool_of(model, on)
        page_tokens = pool.block_tokens
        reserve += pool.blocks_of_prompts * pool.block_bytes
        cache_per_token, indexer_per_token = (each / page_tokens for each in (pool.block_bytes, pool.key_bytes))
        state = pool.blocks_of_request * pool.block_bytes
    # The fullest stage has ceil(layers / pp) layers and one end of the model.
    stage, parts = -(-model.num_hidden_layers // on.pp) / model.num_hidden_layers, weights_of(model, on)
    return Memory(
        total=gpu.memory_bytes.value,
        usable=gpu.memory_bytes.value * on.utilization,
        weights=sum(part.bytes_per_gpu * (1 if part.ends else stage) for part in parts if not part.in_host_memory),
        reserve=reserve,
        state_per_request=state,
        requests=on.local_batch,
        cache_per_token=cache_per_token,
        indexer_per_token=indexer_per_token,
        tokens_wanted=on.local_batch * -(-on.context // (page_tokens * on.dcp)) * page_tokens,
        page_tokens=page_tokens,
    )
