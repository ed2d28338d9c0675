"""What weights and KV cache take on the fullest GPU, and what is left for tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from etap_backend.plan.inputs import CSA, HCA, Deployment, Figure, Gpu, Model
from etap_backend.plan.v4_caches import BATCHES, V4Caches, V41Caches

PAGE_TOKENS = 64
# Activations of the largest prefill chunk, CUDA graphs, NCCL, allocator: what is missing between weights and cache in
# the one 8 x H200 start that reported its cache (674,597 tokens at vLLM 0.26.0's default share of the memory, 0.92).
RESERVE_BYTES = Figure(value=5.6e9, status="derived", source="8 x H200, vLLM 0.26.0: memory less weights less KV cache")

# What vLLM 0.26 to 0.33 allocate for the indexer of sparse attention: 512 MiB for the scores of a prefill, and
# 40 keys of 132 bytes for each of 163,840 tokens, DeepSeek-V3.2's longest context. With a lower --max-model-len less.
INDEXER_RESERVE_BYTES = Figure(value=1.4e9, status="derived", source="vLLM 0.26.0 and 0.33.0: the indexer's buffers")
ABSORBED = "attention, absorbed copy"


@dataclass(frozen=True)
class Weights:
    """Matrices of one kind: how many weights all of them have, how they are divided, and when a step reads them."""

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
    """Layers that predict the next tokens, which are loaded where drafts are made."""
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
    down = hidden * (model.cache_row + (model.q_lora_rank or 0))
    queries = (model.q_lora_rank or hidden) * heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    output = heads * model.v_head_dim * hidden
    if model.v4:  # each group of heads has a latent output of its own
        output = model.o_lora_rank * (heads * model.v_head_dim + model.o_groups * hidden)
    gate = output if model.mla_use_output_gate else 0
    latent = layers * model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    latent = 0 if model.v4 else latent  # queries are made in the cache's own space
    return [
        Weights("attention, latent projections", layers * down, 1, each),
        Weights("attention, heads", layers * (queries + output + gate), on.tp, each),
        Weights("attention, latent to heads", latent, on.tp, each, read_by_decode=False),
        # The engines keep the absorbed form of kv_b_proj in the activations' type beside the weight as it was loaded.
        Weights(ABSORBED, latent, on.tp, 2.0),
    ]


def _indexer(model: Model, layers: int) -> list[Weights]:
    """Every rank has the indexer whole. Weights of its keys, of its heads' gates and, where keys are pooled, of the
    pool's stay in two bytes; DeepSeek-V4's pool has two series of keys and of gates, V4.1 makes keys of entries."""
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
    """What each rank has whole of DeepSeek-V4: CSA makes two series of keys and gates, HCA and V4.1's pairs one, and
    V4.1's single tokens have no gate; and each layer mixes the streams of its residual before and behind both of its
    parts, in float32."""
    if not model.v4:
        return []
    matrices = sum(count * len(model.compressing(ratio)) for ratio, count in {CSA: 4, HCA: 2, 2: 2, 1: 1}.items())
    mixes = 2 * (model.hc_mult + 2) * model.hc_mult * model.hc_mult * model.hidden_size
    return [
        Weights("compressors", matrices * model.kv_lora_rank * model.hidden_size, 1, 2.0),
        Weights("hyper-connections", layers * mixes, 1, 4.0),
    ]


def _linear_attention(model: Model, on: Deployment) -> list[Weights]:
    """Kimi's delta attention."""
    if (linear := model.linear_attn_config) is None:
        return []
    hidden, width, layers = model.hidden_size, linear.num_heads * linear.head_dim, model.linear_layers
    # Queries, keys, values and output; the step of each head; the forget gate's second half; three convolutions.
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
    """Dense layers, and those with experts, the `predicting` ones among them. Routed experts are spread over tp x dp
    ranks."""
    hidden, each, moe = model.hidden_size, model.weight_bytes, model.moe_layers + predicting
    experts = model.moe_layers * (model.n_routed_experts or 0)
    experts += predicting * (model.dspark_n_routed_experts or model.n_routed_experts or 0)
    dense = model.num_hidden_layers - model.moe_layers
    narrow, wide = model.routed_expert_hidden_size or 0, 3 * model.moe_intermediate_size
    shared, routed = (model.n_shared_experts or 0) * wide * hidden, experts * wide * (narrow or hidden)
    return [
        Weights("dense layers", dense * 3 * hidden * model.intermediate_size, on.tp, each),
        Weights("shared experts", moe * shared, on.tp, each),
        Weights("router", hidden * experts, 1, 2.0),
        Weights("experts' projections", moe * 2 * hidden * narrow, 1, each),
        Weights("experts", routed, on.tp * on.dp, model.expert_bytes, experts=True),
    ]


def _engram(model: Model, on: Deployment) -> list[Weights]:
    """DeepSeek-V4.1's tables of word groups, a row with a byte of scale for 32, which vLLM keeps in host memory, and
    what brings the rows of a token's groups, of 2 words and more, into its streams."""
    layers, rows = len(model.engram_num_embeddings), sum(model.engram_num_embeddings)
    read = (model.engram_max_ngram_size - 1) * model.engram_n_heads * model.engram_head_dim
    table = Weights("Engram, tables", rows * model.engram_head_dim, on.tp, 1 + 1 / 32, in_host_memory=True)
    into = layers * read * model.hidden_size * ((model.hc_mult or 0) + 1)
    return [replace(table, read_by_decode=False), Weights("Engram, projections", into, on.tp, model.weight_bytes)]


def parameters_of(model: Model) -> int:
    """Parameters of the model without its next-token predictor and without biases and norms."""
    return sum(part.parameters for part in weights_of(model, Deployment(gpus=1, tp=1)) if part.name != ABSORBED)


def state_bytes(model: Model, on: Deployment) -> int:
    """What linear attention keeps of one request on a rank: in every layer a float32 matrix of each head, and the
    convolutions' last inputs in bfloat16, as both engines have it."""
    if (linear := model.linear_attn_config) is None:
        return 0
    heads = linear.num_heads // on.tp
    convolved = 3 * heads * linear.head_dim * (linear.short_conv_kernel_size - 1)
    return -(-model.linear_layers // on.pp) * (4 * heads * linear.head_dim**2 + 2 * convolved)


def _most_in_a_stage(layers: tuple[int, ...], model: Model, pp: int) -> int:
    """How many of these layers the pipeline stage has that has most of them."""
    stage = -(-model.num_hidden_layers // pp)
    return max(Counter((layer - 1) // stage for layer in layers).values(), default=0)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest GPU, and the tokens that its KV cache can hold. Of DeepSeek-V4 they are vLLM's: entries and
    keys count for each token, windows and the compressors' state for each request."""

    total: float
    usable: float
    weights: float
    reserve: float
    state_per_request: int  # of what does not grow with its tokens
    requests: int  # that decode on this GPU
    cache_per_token: float
    indexer_per_token: float  # of that, in the caches of indexers
    tokens_wanted: int
    page_tokens: int = PAGE_TOKENS

    @property
    def left(self) -> int:
        """Bytes for requests: KV cache and state."""
        return max(0, math.floor(self.usable - self.weights - self.reserve))

    @property
    def state(self) -> int:
        return self.requests * self.state_per_request

    @property
    def tokens(self) -> int:
        """Tokens for which there is a KV cache, in whole pages."""
        page = int(self.cache_per_token * self.page_tokens)
        return max(0, self.left - self.state) // page * self.page_tokens

    def requests_of(self, tokens: int) -> int:
        """How many requests fit that need so many tokens of the cache on this GPU."""
        return int(self.left // (tokens * self.cache_per_token + self.state_per_request))

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted

    @property
    def cache_wanted(self) -> int:
        return int(self.tokens_wanted * self.cache_per_token)


def v4_caches(model: Model, on: Deployment) -> V4Caches | V41Caches:
    """Of the pipeline stage that has most of each kind of layers; those that predict have a window alone."""
    made, first, second = (V41Caches, 2, 1) if model.shares_caches else (V4Caches, CSA, HCA)
    kinds = model.attention_layers, model.compressing(first), model.compressing(second)
    layers, *entries = (_most_in_a_stage(layers, model, on.pp) for layers in kinds)
    return made(layers + predicting_layers(model, on), model.sliding_window, *entries)


def memory_of(model: Model, gpu: Gpu, on: Deployment) -> Memory:
    """Of a deployment that can be (`Deployment.check`)."""
    predicting = predicting_layers(model, on)
    layers, indexers = (
        _most_in_a_stage(of, model, on.pp) + predicting for of in (model.attention_layers, model.indexer_layers)
    )
    indexer_per_token = indexers * model.index_row_bytes
    reserve, page_tokens = RESERVE_BYTES.value + (INDEXER_RESERVE_BYTES.value if model.sparse else 0), PAGE_TOKENS
    cache_per_token, state = model.cache_row_bytes(on.cache) * layers + indexer_per_token, state_bytes(model, on)
    if model.v4:
        caches = v4_caches(model, on)
        page_tokens = caches.block_tokens
        reserve += caches.blocks_of_prompts * caches.block_bytes
        cache_per_token, indexer_per_token = (each / page_tokens for each in (caches.block_bytes, caches.keys_bytes))
        state = caches.blocks(BATCHES * on.s_q) * caches.block_bytes
    # The fullest stage has ceil(layers / pp) layers and an end of the model; its other parts are shared out evenly.
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
