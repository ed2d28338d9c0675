"""What weights and KV cache take on the fullest GPU, and what is left for tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from etap_backend.lab.plan.inputs import Deployment, Figure, Gpu, Model

PAGE_TOKENS = 64
# Activations of the largest prefill chunk, CUDA graphs, NCCL, allocator: what is missing between weights and cache in
# the one 8 x H200 start that reported its cache (674,597 tokens at vLLM 0.26.0's default share of the memory, 0.92).
RESERVE_BYTES = Figure(value=5.6e9, status="derived", source="8 x H200, vLLM 0.26.0: memory less weights less KV cache")

# What vLLM 0.26 to 0.33 allocate for the indexer of sparse attention: 512 MiB for the scores of a prefill, and
# 40 keys of 132 bytes for each of 163,840 tokens, DeepSeek-V3.2's longest context. With a lower --max-model-len less.
INDEXER_RESERVE_BYTES = Figure(value=1.4e9, status="derived", source="vLLM 0.26.0 and 0.33.0: the indexer's buffers")


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

    @property
    def bytes_a_gpu(self) -> float:
        return self.parameters / self.shards * self.bytes_each


def weights_of(model: Model, on: Deployment) -> list[Weights]:
    """All weights of the model, divided as the engines divide them."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    head_k = model.qk_nope_head_dim + model.qk_rope_head_dim
    predicting = model.num_nextn_predict_layers if on.s_q > 1 else 0  # layers that predict the next tokens
    layers, moe = len(model.attention_layers) + predicting, model.moe_layers + predicting
    dense_layers = model.num_hidden_layers + predicting - moe
    down = hidden * model.cache_row + (hidden * model.q_lora_rank if model.q_lora_rank else 0)
    up = (model.q_lora_rank or hidden) * heads * head_k + heads * model.v_head_dim * hidden
    up += hidden * heads * model.v_head_dim if model.mla_use_output_gate else 0
    latent = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    expert, dense = 3 * hidden * model.moe_intermediate_size, 3 * hidden * model.intermediate_size
    routed = 3 * (model.routed_expert_hidden_size or hidden) * model.moe_intermediate_size
    between = 2 * hidden * (model.routed_expert_hidden_size or 0)
    linear, linear_a_rank = _linear_attention(model)
    index_queries, index_keys = _indexer(model)
    indexers = len(model.indexer_layers) + (predicting if model.sparse else 0)
    wide, spread, each, attention = on.tp, on.tp * on.dp, model.weight_bytes, model.attention_bytes
    head = model.vocab_size * hidden
    parts = [
        Weights("attention, latent projections", layers * down, 1, attention),
        Weights("attention, heads", layers * up, wide, attention),
        Weights("attention, latent to heads", layers * latent, wide, attention, read_by_decode=False),
        Weights("indexer, queries", indexers * index_queries, 1, attention),
        Weights("indexer, keys and gates", indexers * index_keys, 1, 2.0),
        Weights("linear attention, heads", model.linear_layers * linear, wide, attention),
        Weights("linear attention, gate's latent", model.linear_layers * linear_a_rank, 1, attention),
        Weights("dense layers", dense_layers * dense, wide, each),
        Weights("shared experts", moe * (model.n_shared_experts or 0) * expert, wide, each),
        Weights("router", moe * hidden * (model.n_routed_experts or 0), 1, 2.0),
        Weights("experts' projections", moe * between, 1, each),
        Weights("experts", moe * (model.n_routed_experts or 0) * routed, spread, model.expert_bytes, experts=True),
        Weights("embedding", head, wide, 2.0, ends=True, read_by_decode=False),
        Weights("output head", 0 if model.tie_word_embeddings else head, wide, 2.0, ends=True),
    ]
    # The engines keep the absorbed form of kv_b_proj in the activations' type beside the weight as it was loaded.
    absorbed = Weights("attention, absorbed copy", layers * latent, wide, 2.0)
    return [part for part in (*parts, absorbed) if part.parameters]


def _linear_attention(model: Model) -> tuple[int, int]:
    """Weights of a layer with Kimi's delta attention: divided by tensor parallelism, and on every rank."""
    if (linear := model.linear_attn_config) is None:
        return 0, 0
    hidden, width = model.hidden_size, linear.num_heads * linear.head_dim
    # Queries, keys, values and output; the step of each head; the forget gate's second half; three convolutions.
    divided = 4 * hidden * width + hidden * linear.num_heads + linear.head_dim * width
    divided += 3 * width * linear.short_conv_kernel_size
    gate = (hidden * width, 0) if linear.use_full_rank_gate else (linear.head_dim * width, hidden * linear.head_dim)
    return divided + gate[0], hidden * linear.head_dim + gate[1]


def _indexer(model: Model) -> tuple[int, int]:
    """Weights of a layer's indexer, which every rank has whole: those of its queries, and those that stay in two bytes,
    of its keys, of its heads' gates and, where keys are pooled, of the pool's."""
    if not model.sparse:
        return 0, 0
    pool = model.index_head_dim if model.index_kpool > 1 else 0
    keys = model.hidden_size * (model.index_head_dim + model.index_n_heads + pool)
    return model.q_lora_rank * model.index_n_heads * model.index_head_dim, keys


def parameters_of(model: Model) -> int:
    """Parameters of the model without its next-token predictor and without biases and norms."""
    parts = weights_of(model, Deployment(gpus=1, tp=1))
    return sum(part.parameters for part in parts if part.name != "attention, absorbed copy")


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
    """Bytes of the fullest GPU, and the tokens that its KV cache can hold."""

    total: float
    usable: float
    weights: float
    reserve: float
    state_a_request: int  # of linear attention
    requests: int  # that decode on this GPU
    cache_a_token: int
    indexer_a_token: int  # of that, in the caches of indexers
    tokens_wanted: int

    @property
    def left(self) -> int:
        """Bytes for requests: KV cache, and state of linear attention."""
        return max(0, math.floor(self.usable - self.weights - self.reserve))

    @property
    def state(self) -> int:
        return self.requests * self.state_a_request

    @property
    def tokens(self) -> int:
        """Tokens for which there is a KV cache, in whole pages."""
        return max(0, self.left - self.state) // (self.cache_a_token * PAGE_TOKENS) * PAGE_TOKENS

    def requests_of(self, tokens: int) -> int:
        """How many requests fit that need so many tokens of the cache on this GPU."""
        return self.left // (tokens * self.cache_a_token + self.state_a_request)

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted

    @property
    def cache_wanted(self) -> int:
        return self.tokens_wanted * self.cache_a_token


def tokens_on_a_gpu(on: Deployment) -> int:
    """Cache rows that one GPU must hold for the whole batch, in whole pages."""
    return on.local_batch * -(-on.context // (PAGE_TOKENS * on.dcp)) * PAGE_TOKENS


def memory_of(model: Model, gpu: Gpu, on: Deployment) -> Memory:
    on.check(model)
    predicting = model.num_nextn_predict_layers if on.s_q > 1 else 0
    layers, indexers = (
        _most_in_a_stage(of, model, on.pp) + predicting for of in (model.attention_layers, model.indexer_layers)
    )
    indexer_a_token = indexers * model.index_row_bytes
    # The fullest stage has ceil(layers / pp) layers and an end of the model; its other parts are shared out evenly.
    stage = -(-model.num_hidden_layers // on.pp) / model.num_hidden_layers
    weights = sum(part.bytes_a_gpu * (1 if part.ends else stage) for part in weights_of(model, on))
    usable = gpu.memory_bytes.value * on.utilization
    return Memory(
        total=gpu.memory_bytes.value,
        usable=usable,
        weights=weights,
        reserve=RESERVE_BYTES.value + (INDEXER_RESERVE_BYTES.value if model.sparse else 0),
        state_a_request=state_bytes(model, on),
        requests=on.local_batch,
        cache_a_token=model.cache_row_bytes(on.cache) * layers + indexer_a_token,
        indexer_a_token=indexer_a_token,
        tokens_wanted=tokens_on_a_gpu(on),
    )
