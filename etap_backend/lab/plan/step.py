"""Decode attention and the rest of a step on one GPU, and what ETAP gains. docs/plan.md has the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from etap_backend.lab.plan.inputs import (
    CACHE_BYTES,
    LEAST_SHARE,
    MOST_SHARE,
    Call,
    Deployment,
    Figure,
    Gpu,
    Model,
    Status,
)
from etap_backend.lab.plan.memory import Memory, Weights, memory_of, state_bytes, weights_of
from etap_backend.limits import SPARSE_FP8, why_unsupported, why_unsupported_sparse
from etap_backend.schedule import decode_shape

PADDED_ROWS = 64  # WGMMA's M: the rows of a kernel that puts queries there

# What serving costs beside the attention kernel. Fitted together to five readings of DeepSeek-R1 on 8 x H200 (a step of
# vLLM at batch 1, TPOT of SGLang 0.5.7 at concurrency 8 to 64): see docs/plan.md. The layer's share holds whatever does
# not grow with the batch: launches, small kernels, latency of the two all-reduces.
LAYER_US = Figure(value=107.0, status="derived", source="fitted to 8 x H200 readings of vLLM 0.26.0 and SGLang 0.5.7")
GEMM_BANDWIDTH = Figure(value=0.75, status="derived", source="of the sustained bandwidth; fitted with the time a layer")


def why_not(model: Model, on: Deployment) -> str | None:
    """Why ETAP cannot decode this model, or None when it can."""
    shape = {"dtype": torch.bfloat16, "head_dim": model.cache_row, "v_head_dim": model.kv_lora_rank}
    if not model.sparse:
        return why_unsupported(kv_cache_dtype=on.cache, **shape)
    fp8 = on.cache == "fp8"
    reason = why_unsupported_sparse(kv_cache_dtype=SPARSE_FP8 if fp8 else on.cache, top_k=model.index_topk, **shape)
    if reason is None and fp8 and not model.qk_rope_head_dim:
        # The kernels take rows of 528 bytes for queries without rope.
        reason = "cache fp8 is not supported for a model without rope: vLLM stores rows of 656 bytes all the same"
    return reason


def check(model: Model, on: Deployment) -> None:
    """Raise ValueError, naming the argument, when the deployment cannot be or ETAP cannot run the model."""
    on.check(model)
    if reason := why_not(model, on):
        raise ValueError(f"model: wanted one that ETAP runs: {reason}")


@dataclass(frozen=True)
class Attention:
    """One kernel's decode attention on one GPU."""

    rows: int  # query rows that the tensor cores compute, padding included
    roofline_us: float  # of one call: bytes over bandwidth or operations over the tensor cores' rate, both sustained
    bound: str
    call_us: float  # as this GPU's file expects it from measurements
    step_ms: float  # of all layers


def _attention(
    model: Model, gpu: Gpu, on: Deployment, rows: int, groups: int, call: Call, *, fp8_math: bool
) -> Attention:
    tokens = on.local_batch * -(-on.context // on.dcp)
    memory = groups * tokens * model.cache_row * CACHE_BYTES[on.cache] / gpu.sustained_bandwidth.value
    tensor = 2 * rows * tokens * (model.cache_row + model.kv_lora_rank) / gpu.sustained_flops(fp8=fp8_math)
    roofline = max(memory, tensor) * 1e6
    us = call.microseconds(roofline)
    layers = len(model.attention_layers)
    return Attention(rows, roofline, "memory" if memory >= tensor else "tensor cores", us, us * layers / 1e3)


def query_rows(model: Model, on: Deployment) -> int:
    """Query rows of one request on one GPU; with decode context parallelism the ranks gather each other's heads."""
    return model.num_attention_heads // on.tp * on.dcp * on.s_q


def etap_attention(model: Model, gpu: Gpu, on: Deployment, *, fp8_math: bool = False) -> Attention:
    """Our kernels: rows rounded up to row tiles, of which each further 64 read the cache again; the library says how.

    It reads an FP8 cache as such and multiplies it as float16, or with `fp8_math` as it is.
    """
    calls = (on.local_batch, on.cache == "fp8", fp8_math)
    shape = decode_shape(query_rows(model, on), int(gpu.sms.value), *calls)
    rows = shape.row_groups * shape.row_tile
    call = gpu.etap_fp8_math if fp8_math and gpu.etap_fp8_math else gpu.etap
    # Groups of fewer rows find in the L2 cache what the first of them has read.
    return _attention(model, gpu, on, rows, -(-rows // PADDED_ROWS), call, fp8_math=fp8_math)


def padded_attention(model: Model, gpu: Gpu, on: Deployment, call: Call | None = None) -> Attention:
    """A kernel with query rows on WGMMA's M, in tiles of 64; as FlashMLA does, it multiplies an FP8 cache in FP8.

    `call` says how its time follows from its roofline, the GPU's `padded` when it is None.
    """
    tiles = -(-query_rows(model, on) // PADDED_ROWS)
    fp8 = on.cache == "fp8"
    return _attention(model, gpu, on, tiles * PADDED_ROWS, tiles, call or gpu.padded, fp8_math=fp8)


def _gemm_seconds(part: Weights, model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a step's products with these weights: reading them, or multiplying in tiles of 64 rows."""
    touched, rows = 1.0, on.local_batch * on.s_q
    if part.experts:
        tokens, chosen = on.batch * on.s_q, model.num_experts_per_tok / model.n_routed_experts
        touched = 1 - (1 - chosen) ** tokens if on.experts is None else on.experts / model.n_routed_experts
        rows = tokens * chosen / touched
    tiled = math.ceil(rows / PADDED_ROWS) * PADDED_ROWS
    rate = gpu.sustained_flops(fp8=model.fp8_weights and part.bytes_each < 2)
    memory = touched * part.bytes_a_gpu / (gpu.sustained_bandwidth.value * GEMM_BANDWIDTH.value)
    return max(memory, 2 * tiled * touched * part.parameters / part.shards / rate)


def rest_of_step_ms(model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a decode step without the attention kernel (derived). Prefill of other requests is not in it."""
    gemms = sum(_gemm_seconds(part, model, gpu, on) for part in weights_of(model, on) if part.read_by_decode)
    # Linear attention reads and writes its state.
    states = 2 * on.local_batch * state_bytes(model, replace(on, pp=1)) / gpu.sustained_bandwidth.value
    return (gemms + states) * 1e3 + model.num_hidden_layers * LAYER_US.value / 1e3


@dataclass(frozen=True)
class BesideBf16:
    """What an FP8 cache changes: the same deployment with a bfloat16 cache, and FP8 in the products besides."""

    tokens: int  # that fit in bfloat16
    capacity_gain: float | None  # tokens that fit, over those; None where none does
    bf16: Attention
    fp8_math: Attention


@dataclass(frozen=True)
class Gain:
    """What replacing a padded kernel by the transposed one brings."""

    call: float  # the padded kernel's time over the transposed one's
    tokens: float  # tokens a second over those with the padded one, less 1
    fp8_math: bool = False  # whether the transposed kernel multiplies in FP8


@dataclass(frozen=True)
class Plan:
    """The planner's answer."""

    memory: Memory
    etap: Attention
    padded: Attention
    rest_ms: float
    rest_status: Status
    padded_in_vllm: Attention | None = None  # where that was measured, with a bfloat16 cache
    beside_bf16: BesideBf16 | None = None  # with an FP8 cache

    def step_with(self, kernel: Attention) -> float:
        """Milliseconds of a whole step."""
        return self.rest_ms + kernel.step_ms

    @property
    def step_ms(self) -> float:
        return self.step_with(self.etap)

    @property
    def padded_step_ms(self) -> float:
        return self.step_with(self.padded)

    @property
    def share(self) -> float:
        """Of the padded kernel's step, what attention takes."""
        return self.padded.step_ms / self.padded_step_ms

    def gain_over(self, kernel: Attention) -> Gain:
        """Of the transposed kernel with its faster math: the padded one multiplies an FP8 cache in FP8."""
        ours, math = self.etap, self.beside_bf16 and self.beside_bf16.fp8_math
        fp8_math = bool(math and math.call_us < ours.call_us)
        if fp8_math:
            ours = math
        return Gain(kernel.call_us / ours.call_us, self.step_with(kernel) / self.step_with(ours) - 1, fp8_math)

    @property
    def gain(self) -> float:
        """Tokens a second with the transposed kernel over those with the padded one, less 1."""
        return self.padded_step_ms / self.step_ms - 1


def _beside_bf16(model: Model, gpu: Gpu, on: Deployment, tokens_in_fp8: int) -> BesideBf16:
    plain = replace(on, cache="bfloat16")
    tokens_in_bf16 = memory_of(model, gpu, plain).tokens
    gain = tokens_in_fp8 / tokens_in_bf16 if tokens_in_bf16 else None
    fp8_math = etap_attention(model, gpu, on, fp8_math=True)
    return BesideBf16(tokens_in_bf16, gain, etap_attention(model, gpu, plain), fp8_math)


def make_plan(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> Plan:
    """Memory, attention and step of a deployment of a model with dense attention.

    `attention_share` is the measured share of attention in a step with a padded kernel, where one is known; it then
    says how long the rest takes instead of the built-in estimate. Raises ValueError, naming the argument, when the
    deployment cannot be or ETAP cannot run the model.
    """
    check(model, on)
    memory, padded = memory_of(model, gpu, on), padded_attention(model, gpu, on)
    if attention_share is None:
        rest, status = rest_of_step_ms(model, gpu, on), "derived"
    elif LEAST_SHARE <= attention_share <= MOST_SHARE:
        rest, status = padded.step_ms * (1 / attention_share - 1), "given"
    else:
        raise ValueError(f"attention_share: wanted {LEAST_SHARE} to {MOST_SHARE}, got {attention_share}")
    in_vllm = None
    if gpu.padded_in_vllm and on.cache == "bfloat16":
        in_vllm = padded_attention(model, gpu, on, gpu.padded_in_vllm)
    beside = _beside_bf16(model, gpu, on, memory.tokens) if on.cache == "fp8" else None
    return Plan(memory, etap_attention(model, gpu, on), padded, rest, status, in_vllm, beside)
