"""What weights and KV cache take on the fullest GPU, and what is left for tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from etap_backend.lab.plan.inputs import CACHE_BYTES, Deployment, Figure, Gpu, Model

PAGE_TOKENS = 64
# Activations of the largest prefill chunk, CUDA graphs, NCCL, allocator: what is missing between weights and cache in
# the one 8 x H200 start that reported its cache (674,597 tokens at vLLM 0.26.0's default share of the memory, 0.92).
RESERVE_BYTES = Figure(value=5.6e9, status="derived", source="8 x H200, vLLM 0.26.0: memory less weights less KV cache")


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
    layers, moe = model.num_hidden_layers, model.moe_layers
    if on.s_q > 1:  # the layer that predicts the next tokens
        layers, moe = layers + model.num_nextn_predict_layers, moe + model.num_nextn_predict_layers
    down = hidden * model.cache_row + (hidden * model.q_lora_rank if model.q_lora_rank else 0)
    up = (model.q_lora_rank or hidden) * heads * head_k + heads * model.v_head_dim * hidden
    latent = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    expert, dense = 3 * hidden * model.moe_intermediate_size, 3 * hidden * model.intermediate_size
    wide, spread, each = on.tp, on.tp * on.dp, model.weight_bytes
    head = model.vocab_size * hidden
    parts = [
        Weights("attention, latent projections", layers * down, 1, each),
        Weights("attention, heads", layers * up, wide, each),
        Weights("attention, latent to heads", layers * latent, wide, each, read_by_decode=False),
        Weights("dense layers", (layers - moe) * dense, wide, each),
        Weights("shared experts", moe * (model.n_shared_experts or 0) * expert, wide, each),
        Weights("router", moe * hidden * (model.n_routed_experts or 0), 1, 2.0),
        Weights("experts", moe * (model.n_routed_experts or 0) * expert, spread, each, experts=True),
        Weights("embedding", head, wide, 2.0, ends=True, read_by_decode=False),
        Weights("output head", 0 if model.tie_word_embeddings else head, wide, 2.0, ends=True),
    ]
    # The engines keep the absorbed form of kv_b_proj in the activations' type beside the weight as it was loaded.
    absorbed = Weights("attention, absorbed copy", layers * latent, wide, 2.0)
    return [part for part in (*parts, absorbed) if part.parameters]


def parameters_of(model: Model) -> int:
    """Parameters of the model without its next-token predictor and without biases and norms."""
    parts = weights_of(model, Deployment(gpus=1, tp=1))
    return sum(part.parameters for part in parts if part.name != "attention, absorbed copy")


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest GPU, and the tokens that its KV cache can hold."""

    total: float
    usable: float
    weights: float
    reserve: float
    cache_a_token: int
    tokens: int
    tokens_wanted: int

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
    layers = -(-model.num_hidden_layers // on.pp) + (model.num_nextn_predict_layers if on.s_q > 1 else 0)
    # The fullest stage has ceil(layers / pp) layers and an end of the model; its other parts are shared out evenly.
    stage = -(-model.num_hidden_layers // on.pp) / model.num_hidden_layers
    weights = sum(part.bytes_a_gpu * (1 if part.ends else stage) for part in weights_of(model, on))
    usable = gpu.memory_bytes.value * on.utilization
    cache_a_token = model.cache_row * CACHE_BYTES[on.cache] * layers
    left = usable - weights - RESERVE_BYTES.value
    tokens = max(0, math.floor(left / (cache_a_token * PAGE_TOKENS)) * PAGE_TOKENS)
    return Memory(
        gpu.memory_bytes.value, usable, weights, RESERVE_BYTES.value, cache_a_token, tokens, tokens_on_a_gpu(on)
    )
