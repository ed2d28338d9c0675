"""Decode attention and the rest of a step on one GPU, and what ETAP gains. docs/plan.md has the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from etap_backend.plan.inputs import CACHE_BYTES, Call, Deployment, Figure, Gpu, Model, Status
from etap_backend.plan.memory import Memory, Weights, memory_of, state_bytes, weights_of
from etap_backend.limits import SPARSE_FP8, why_unsupported, why_unsupported_sparse
from etap_backend.schedule import decode_shape

LEAST_SHARE, MOST_SHARE = 0.001, 0.999  # of attention, that can be
PADDED_ROWS = 64  # WGMMA's M: the rows of a kernel that puts queries there
FP4_ROWS = 8  # least of Marlin's products, which both engines have for FP4 weights on Hopper

# What serving costs beside the attention kernel. Fitted together to five readings of DeepSeek-R1 on 8 x H200 (a step of
# vLLM at batch 1, TPOT of SGLang 0.5.7 at concurrency 8 to 64): see docs/plan.md. The layer's share holds whatever does
# not grow with the batch: launches, small kernels, latency of the two all-reduces.
LAYER_US = Figure(value=107.0, status="derived", source="fitted to 8 x H200 readings of vLLM 0.26.0 and SGLang 0.5.7")
GEMM_BANDWIDTH = Figure(value=0.75, status="derived", source="of the sustained bandwidth; fitted with the time a layer")


def why_not(model: Model, on: Deployment) -> str | None:
    """Why ETAP cannot decode this model, or None."""
    shape = {"dtype": torch.bfloat16, "head_dim": model.cache_row, "v_head_dim": model.kv_lora_rank}
    if not model.sparse:
        return why_unsupported(kv_cache_dtype=on.cache, **shape)
    cache = SPARSE_FP8 if on.cache == "fp8" else on.cache
    return why_unsupported_sparse(kv_cache_dtype=cache, top_k=model.index_topk, **shape)


def check(model: Model, on: Deployment) -> None:
    """Raise ValueError, naming the argument, when the deployment cannot be or ETAP cannot run the model."""
    on.check(model)
    if reason := why_not(model, on):
        raise ValueError(f"model: wanted one that ETAP runs: {reason}")


@dataclass(frozen=True)
class Attention:
    """One kernel's decode attention on one GPU."""

    kernel: str
    rows: int  # query rows that the tensor cores compute, padding included
    roofline_us: float  # of one call: bytes over bandwidth or operations over the tensor cores' rate, both sustained
    bound: str
    layers: int
    call: Call | None  # how its time follows from the roofline; None where nobody timed it

    @property
    def call_us(self) -> float:
        """As it is expected, and at least the roofline where nobody timed it."""
        return self.call.microseconds(self.roofline_us) if self.call else self.roofline_us

    @property
    def step_ms(self) -> float:
        """Of all layers."""
        return self.layers * self.call_us / 1e3


def attention_on(
    gpu: Gpu, kernel: str, call: Call | None, *, layers: int, rows: int, data: float, flops: float, fp8: bool = False
) -> Attention:
    """Of calls that read `data` bytes and multiply with so many operations, in FP8 or on 16-bit numbers."""
    memory, tensor = data / gpu.sustained_bandwidth.value, flops / gpu.sustained_flops(fp8=fp8)
    bound = "memory" if memory >= tensor else "tensor cores"
    return Attention(kernel, rows, max(memory, tensor) * 1e6, bound, layers, call)


def _dense(
    model: Model, gpu: Gpu, on: Deployment, kernel: str, call: Call, rows: int, reads: int, fp8_math: bool
) -> Attention:
    """`reads` is how often a call reads its part of the cache."""
    if on.cache != "bfloat16":  # for which calls were fitted
        call = call.model_copy(update={"status": "derived"})
    tokens = on.local_batch * -(-on.context // on.dcp)
    data = reads * tokens * model.cache_row * CACHE_BYTES[on.cache]
    flops = 2 * rows * tokens * (model.cache_row + model.kv_lora_rank)
    layers = len(model.attention_layers)
    return attention_on(gpu, kernel, call, layers=layers, rows=rows, data=data, flops=flops, fp8=fp8_math)


def query_rows(model: Model, on: Deployment) -> int:
    """Query rows of one request on one GPU; with decode context parallelism the ranks gather each other's heads."""
    return model.num_attention_heads // on.tp * on.dcp * on.s_q


def etap_attention(model: Model, gpu: Gpu, on: Deployment, *, fp8_math: bool = False, name: str = "ETAP") -> Attention:
    """Our kernels: rows rounded up to row tiles, of which each further 64 read the cache again; the library says how.

    It reads an FP8 cache as such and multiplies it as float16, or with `fp8_math` as it is.
    """
    shape = decode_shape(query_rows(model, on), int(gpu.sms.value), on.local_batch, on.cache == "fp8", fp8_math)
    rows = shape.row_groups * shape.row_tile
    call = gpu.etap_fp8_math if fp8_math and gpu.etap_fp8_math else gpu.etap
    # Groups of fewer rows find in the L2 cache what the first of them has read.
    return _dense(model, gpu, on, name, call, rows, -(-rows // PADDED_ROWS), fp8_math)


def padded_attention(model: Model, gpu: Gpu, on: Deployment, *, in_vllm: bool = False) -> Attention:
    """FlashMLA, with query rows on WGMMA's M, in tiles of 64; it multiplies an FP8 cache in FP8."""
    tiles = -(-query_rows(model, on) // PADDED_ROWS)
    name, call = ("FlashMLA in vLLM", gpu.padded_in_vllm) if in_vllm else ("FlashMLA alone", gpu.padded)
    return _dense(model, gpu, on, name, call, tiles * PADDED_ROWS, tiles, on.cache == "fp8")


def _gemm_seconds(part: Weights, model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a step's products with these weights: reading them, or multiplying in tiles of 64 rows. FP4 is widened to
    16 bits, in smaller tiles."""
    touched, rows = 1.0, on.local_batch * on.s_q
    if part.experts:
        tokens, chosen = on.batch * on.s_q, model.num_experts_per_tok / model.n_routed_experts
        touched = 1 - (1 - chosen) ** tokens if on.experts is None else on.experts / model.n_routed_experts
        rows = tokens * chosen / touched
    fp4 = part.bytes_each < 1
    tile = FP4_ROWS if fp4 else PADDED_ROWS
    tiled = math.ceil(rows / tile) * tile
    rate = gpu.sustained_flops(fp8=model.fp8_weights and part.bytes_each < 2 and not fp4)
    memory = touched * part.bytes_per_gpu / (gpu.sustained_bandwidth.value * GEMM_BANDWIDTH.value)
    return max(memory, 2 * tiled * touched * part.parameters / part.shards / rate)


def rest_of_step_ms(model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a decode step without the attention kernel (derived). Prefill of other requests is not in it."""
    gemms = sum(_gemm_seconds(part, model, gpu, on) for part in weights_of(model, on) if part.read_by_decode)
    # Linear attention reads and writes its state.
    states = 2 * on.local_batch * state_bytes(model, replace(on, pp=1)) / gpu.sustained_bandwidth.value
    return (gemms + states) * 1e3 + model.num_hidden_layers * LAYER_US.value / 1e3


@dataclass(frozen=True)
class Gain:
    """What ETAP brings in place of another kernel: time of a call over ours; tokens a second more than with the other,
    as a share, by a lower and an upper estimate of the rest of a step."""

    call: float
    lower: float
    upper: float
    fp8_math: bool = False  # whether ours multiplies in FP8


@dataclass(frozen=True)
class Plan:
    """The planner's answer. With sparse attention a step's time is a lower bound, as its indexer's is."""

    memory: Memory
    etap: Attention
    peers: tuple[Attention, ...]  # that were timed for this GPU
    rest_ms: float
    rest_status: Status
    longest_rest: float  # times `rest_ms`, of the lower estimate of a gain
    fp8_math: Attention | None = None  # ours with FP8 products, with an FP8 cache
    in_bf16: Attention | None = None  # ours with a bfloat16 cache, beside an FP8 one
    bf16_tokens: int | None = None  # that fit in bfloat16, beside an FP8 cache
    indexer: Attention | None = None  # of sparse attention; its roofline

    @property
    def ours(self) -> Attention:
        """With the faster math: FlashMLA multiplies an FP8 cache in FP8."""
        return min(filter(None, (self.etap, self.fp8_math)), key=lambda kernel: kernel.call_us)

    @property
    def fixed_ms(self) -> float:
        """Milliseconds of a step without attention."""
        return self.rest_ms + (self.indexer.step_ms if self.indexer else 0)

    def step_with(self, kernel: Attention) -> float:
        """Milliseconds of a whole step."""
        return self.fixed_ms + kernel.step_ms

    def gain_over(self, peer: Attention) -> Gain | None:
        """None where nobody timed our call."""
        if self.ours.call is None:
            return None
        fixed = self.fixed_ms, self.fixed_ms + (self.longest_rest - 1) * self.rest_ms
        lower, upper = sorted((rest + peer.step_ms) / (rest + self.ours.step_ms) - 1 for rest in fixed)
        return Gain(peer.call_us / self.ours.call_us, lower, upper, self.ours is self.fp8_math)

    @property
    def fastest_peer(self) -> Attention | None:
        return min(self.peers, key=lambda kernel: kernel.call_us, default=None)

    @property
    def gain(self) -> Gain | None:
        """Over the fastest peer."""
        return self.gain_over(self.fastest_peer) if self.fastest_peer else None

    @property
    def share(self) -> float | None:
        """Of the fastest peer's step, what attention takes."""
        peer = self.fastest_peer
        return peer and peer.step_ms / self.step_with(peer)


def make_plan(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> Plan:
    """Memory, attention and step of a deployment of a model with dense attention.

    `attention_share` is the measured share of attention in a step with a padded kernel, where one is known; it then
    says how long the rest takes instead of the built-in estimate. Raises ValueError, naming the argument, when the
    deployment cannot be or ETAP cannot run the model.
    """
    check(model, on)
    peers = [padded_attention(model, gpu, on)]
    if attention_share is None:
        rest = {"rest_ms": rest_of_step_ms(model, gpu, on), "rest_status": "derived"}
        rest["longest_rest"] = gpu.longest_rest.value
    elif LEAST_SHARE <= attention_share <= MOST_SHARE:
        rest = {"rest_ms": peers[0].step_ms * (1 / attention_share - 1), "rest_status": "given", "longest_rest": 1.0}
    else:
        raise ValueError(f"attention_share: wanted {LEAST_SHARE} to {MOST_SHARE}, got {attention_share}")
    beside_bf16 = {}
    if on.cache == "fp8":
        plain = replace(on, cache="bfloat16")
        beside_bf16 = {
            "fp8_math": etap_attention(model, gpu, on, fp8_math=True, name="ETAP, FP8 math"),
            "in_bf16": etap_attention(model, gpu, plain, name="ETAP, bf16 cache"),
            "bf16_tokens": memory_of(model, gpu, plain).tokens,
        }
    elif gpu.padded_in_vllm:
        peers.append(padded_attention(model, gpu, on, in_vllm=True))
    return Plan(memory_of(model, gpu, on), etap_attention(model, gpu, on), tuple(peers), **rest, **beside_bf16)
