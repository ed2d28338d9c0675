"""Decode attention and the rest of a step on one GPU, and what ETAP gains. docs/sizing.md has the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from etap_backend.limits import SPARSE_FP8, why_unsupported, why_unsupported_sparse
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Call, Gpu, Status
from etap_backend.plan.memory import Memory, Weights, memory_of, state_bytes, weights_of
from etap_backend.plan.model import CACHE_BYTES, Model
from etap_backend.schedule import decode_shape

LEAST_SHARE, MOST_SHARE = 0.001, 0.999  # of attention in a step
PADDED_ROWS = 64  # WGMMA's M: row tile of kernels with query rows there
FP4_ROWS = 8  # smallest row tile of Marlin, which both engines use for FP4 weights on Hopper

# Fitted to five readings of DeepSeek-R1 on 8 x H200 (vLLM's step at batch 1, SGLang 0.5.7's TPOT at concurrency 8 to
# 64): a layer's time that does not grow with the batch (launches, small kernels, two all-reduces' latency), and the
# share of the sustained bandwidth that other products reach.
LAYER_US, GEMM_BANDWIDTH = 107.0, 0.75


def why_not(model: Model, on: Deployment) -> str | None:
    """Why ETAP cannot decode this model, or None."""
    shape = {"dtype": torch.bfloat16, "head_dim": model.cache_row, "v_head_dim": model.kv_lora_rank}
    if not model.sparse:
        return why_unsupported(kv_cache_dtype=on.cache, **shape)
    cache = SPARSE_FP8 if on.cache == "fp8" else on.cache
    return why_unsupported_sparse(kv_cache_dtype=cache, top_k=model.index_topk, **shape)


def check(model: Model, on: Deployment) -> None:
    """Raise ValueError, naming the argument, when the model cannot be served so or ETAP cannot run it."""
    on.check(model)
    if reason := why_not(model, on):
        raise ValueError(f"model: wanted one that ETAP runs: {reason}")


@dataclass(frozen=True)
class Attention:
    """One kernel's decode attention on one GPU."""

    kernel: str
    rows: int  # query rows that the tensor cores compute, padding included
    roofline_us: float  # one call's bytes over bandwidth, or operations over the tensor cores' rate, both sustained
    bound: str  # the longer of the two
    layers: int
    call: Call | None  # how the time follows from the roofline; None where no call was timed

    @property
    def call_us(self) -> float:
        """Expected time; the roofline, a lower bound, where no call was timed."""
        return self.call.microseconds(self.roofline_us) if self.call else self.roofline_us

    @property
    def step_ms(self) -> float:
        """All layers' calls."""
        return self.layers * self.call_us / 1e3


def attention_on(
    gpu: Gpu, kernel: str, call: Call | None, *, layers: int, rows: int, data: float, flops: float, fp8: bool = False
) -> Attention:
    """Calls that read `data` bytes and multiply with so many operations, in FP8 or on 16-bit numbers."""
    memory, tensor = data / gpu.sustained_bandwidth.value, flops / gpu.sustained_flops(fp8=fp8)
    bound = "memory" if memory >= tensor else "tensor cores"
    return Attention(kernel, rows, max(memory, tensor) * 1e6, bound, layers, call)


def _dense(
    model: Model, gpu: Gpu, on: Deployment, kernel: str, call: Call, rows: int, reads: int, fp8_math: bool
) -> Attention:
    """Dense calls that read their part of the cache `reads` times."""
    if on.cache != "bfloat16":  # the calls were fitted with bfloat16
        call = replace(call, status="derived")
    tokens = on.local_batch * -(-on.context // on.dcp)
    data = reads * tokens * model.cache_row * CACHE_BYTES[on.cache]
    flops = 2 * rows * tokens * (model.cache_row + model.kv_lora_rank)
    layers = len(model.attention_layers)
    return attention_on(gpu, kernel, call, layers=layers, rows=rows, data=data, flops=flops, fp8=fp8_math)


def query_rows(model: Model, on: Deployment) -> int:
    """Query rows per request on one GPU; under decode context parallelism the ranks gather each other's heads."""
    return model.num_attention_heads // on.tp * on.dcp * on.s_q


def etap_attention(model: Model, gpu: Gpu, on: Deployment, *, fp8_math: bool = False, name: str = "ETAP") -> Attention:
    """ETAP's kernels: the library says how query rows are rounded up; each further 64 rows read the cache again.

    An FP8 cache is multiplied as float16, or in FP8 with `fp8_math`.
    """
    shape = decode_shape(query_rows(model, on), int(gpu.sms.value), on.local_batch, on.cache == "fp8", fp8_math)
    rows = shape.row_groups * shape.row_tile
    call = gpu.etap_fp8_math if fp8_math and gpu.etap_fp8_math else gpu.etap
    # Smaller row groups find in the L2 cache what the first one read.
    return _dense(model, gpu, on, name, call, rows, -(-rows // PADDED_ROWS), fp8_math)


def padded_attention(model: Model, gpu: Gpu, on: Deployment, *, in_vllm: bool = False) -> Attention:
    """FlashMLA: query rows on WGMMA's M in row tiles of 64; it multiplies an FP8 cache in FP8."""
    tiles = -(-query_rows(model, on) // PADDED_ROWS)
    name, call = "FlashMLA alone", gpu.padded
    if in_vllm and gpu.padded_in_vllm:
        name, call = "FlashMLA in vLLM", gpu.padded_in_vllm
    return _dense(model, gpu, on, name, call, tiles * PADDED_ROWS, tiles, on.cache == "fp8")


def _gemm_seconds(part: Weights, model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a step's products with these weights: the longer of reading them and multiplying in tiles of 64 rows.

    FP4 is widened to 16 bits, in smaller tiles.
    """
    touched, rows = 1.0, on.local_batch * on.s_q
    if part.experts:
        tokens, chosen = on.batch * on.s_q, model.num_experts_per_tok / model.n_routed_experts
        touched = 1 - (1 - chosen) ** tokens  # tokens choose evenly
        rows = tokens * chosen / touched
    fp4 = part.bytes_each < 1
    tile = FP4_ROWS if fp4 else PADDED_ROWS
    tiled = math.ceil(rows / tile) * tile
    rate = gpu.sustained_flops(fp8=model.fp8_weights and part.bytes_each < 2 and not fp4)
    memory = touched * part.bytes_per_gpu / (gpu.sustained_bandwidth.value * GEMM_BANDWIDTH)
    return max(memory, 2 * tiled * touched * part.parameters / part.shards / rate)


def rest_of_step_ms(model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a decode step without the attention kernel and without other requests' prefill."""
    gemms = sum(_gemm_seconds(part, model, gpu, on) for part in weights_of(model, on) if part.read_by_decode)
    # Linear attention reads and writes its state.
    states = 2 * on.local_batch * state_bytes(model, replace(on, pp=1)) / gpu.sustained_bandwidth.value
    return (gemms + states) * 1e3 + model.num_hidden_layers * LAYER_US / 1e3


@dataclass(frozen=True)
class Gain:
    """ETAP in place of another kernel."""

    call: float  # the other kernel's time per call over ETAP's
    lower: float  # two estimates of the share of tokens per second gained
    upper: float
    fp8_math: bool = False  # whether ETAP multiplies in FP8


@dataclass(frozen=True)
class Plan:
    """The planner's answer. With sparse attention the indexer's time, and so a step's, is a lower bound."""

    memory: Memory
    etap: Attention
    peers: tuple[Attention, ...]  # the other kernels that were timed for this GPU
    rest_ms: float
    rest_status: Status
    longest_rest: float  # how many times rest_ms the lower estimate of a gain assumes
    fp8_math: Attention | None = None  # with an FP8 cache: ETAP with FP8 products,
    in_bf16: Attention | None = None  # ETAP with a bfloat16 cache, and the tokens that fit then
    bf16_tokens: int | None = None
    indexer: Attention | None = None

    @property
    def best(self) -> Attention:
        """ETAP with the faster math."""
        return min(filter(None, (self.etap, self.fp8_math)), key=lambda kernel: kernel.call_us)

    @property
    def fixed_ms(self) -> float:
        """Milliseconds of a step without attention."""
        return self.rest_ms + (self.indexer.step_ms if self.indexer else 0)

    def step_with(self, kernel: Attention) -> float:
        """Milliseconds of a whole step."""
        return self.fixed_ms + kernel.step_ms

    def gain_over(self, peer: Attention) -> Gain | None:
        """The gain over one peer; None where ETAP's call was not timed."""
        if self.best.call is None:
            return None
        fixed = self.fixed_ms, self.fixed_ms + (self.longest_rest - 1) * self.rest_ms
        lower, upper = sorted((rest + peer.step_ms) / (rest + self.best.step_ms) - 1 for rest in fixed)
        return Gain(peer.call_us / self.best.call_us, lower, upper, self.best is self.fp8_math)

    @property
    def fastest_peer(self) -> Attention | None:
        return min(self.peers, key=lambda kernel: kernel.call_us, default=None)

    @property
    def gain(self) -> Gain | None:
        """The gain over the fastest peer."""
        return self.gain_over(self.fastest_peer) if self.fastest_peer else None

    @property
    def share(self) -> float | None:
        """Attention's share of a step with the fastest peer."""
        return self.fastest_peer and self.fastest_peer.step_ms / self.step_with(self.fastest_peer)


def make_dense_plan(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> Plan:
    """The plan of a model with dense attention.

    A measured `attention_share` of attention in a step with a padded kernel replaces the estimate of the step's rest.
    Raises ValueError, naming the argument, when the model cannot be served so or ETAP cannot run it.
    """
    check(model, on)
    peers = [padded_attention(model, gpu, on)]
    rest: tuple[float, Status, float] = (rest_of_step_ms(model, gpu, on), "derived", gpu.longest_rest.value)
    if attention_share is not None:
        if not LEAST_SHARE <= attention_share <= MOST_SHARE:
            raise ValueError(f"attention_share: wanted {LEAST_SHARE} to {MOST_SHARE}, got {attention_share}")
        rest = (peers[0].step_ms * (1 / attention_share - 1), "given", 1.0)
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
    return Plan(memory_of(model, gpu, on), etap_attention(model, gpu, on), tuple(peers), *rest, **beside_bf16)
