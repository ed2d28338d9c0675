"""Decode attention and the rest of a step on one GPU, and what ETAP gains. docs/sizing.md has the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from etap_backend.limits import HEAD_DIM, LATENT_DIM, SPARSE_FP8, why_unsupported, why_unsupported_sparse
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.files import CACHE_BYTES
from etap_backend.plan.gpu import Call, Gpu, Load, Status
from etap_backend.plan.memory import Memory, Weights, memory_of, predicting_layers, state_bytes, weights_of
from etap_backend.plan.model import Model
from etap_backend.schedule import decode_shape
from etap_backend.sparse import sparse_decode_shape

LEAST_SHARE, MOST_SHARE = 0.001, 0.999  # of attention in a step
ETAP, FP8_MATH = "etap", "etap-fp8-math"  # in files of results; other kernels are peers
NAMES = {ETAP: "ETAP", FP8_MATH: "ETAP, FP8 math"}
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
    load: Load
    call: Call | None  # how the time follows from the roofline; None where no call was timed

    @property
    def call_us(self) -> float:
        """Expected time; the roofline, a lower bound, where no call was timed."""
        return self.call.microseconds(self.roofline_us, self.load) if self.call else self.roofline_us

    @property
    def step_ms(self) -> float:
        """All layers' calls."""
        return self.layers * self.call_us / 1e3


def roofline_us(gpu: Gpu, data: float, flops: float, *, fp8: bool) -> tuple[float, str]:
    """The longer of reading so many bytes and so many operations, in FP8 or on 16-bit numbers, and which it is."""
    memory, tensor = data / gpu.sustained_bandwidth.value, flops / gpu.sustained_flops(fp8=fp8)
    return max(memory, tensor) * 1e6, "memory" if memory >= tensor else "tensor cores"


def computed_rows(kernel: str, kind: str, rows: int, requests: int, sms: int) -> int:
    """Query rows with padding: to the library's row tiles for ETAP, to multiples of 64 for other kernels."""
    if kernel not in NAMES:
        return -(-rows // PADDED_ROWS) * PADDED_ROWS
    dense = kind in CACHE_BYTES
    fp8 = kind == "fp8", kernel == FP8_MATH
    shape = decode_shape(rows, sms, requests, *fp8) if dense else sparse_decode_shape(rows)
    return shape.row_groups * shape.row_tile


def attention(
    gpu: Gpu,
    kernel: str,
    kind: str,
    rows: int,
    requests: int,
    tokens: float,
    *,
    call: Call | None = None,
    row: int = HEAD_DIM,
    row_bytes: int | None = None,
    layers: int = 1,
) -> Attention:
    """Calls of one kernel for so many requests (sparse attention: query tokens) of so many cache rows each.

    A dense call reads a row again for each further 64 query rows; smaller row groups find in the L2 cache what the
    first one read. A dense FP8 cache is multiplied in FP8, by ETAP without FP8 math as float16; sparse calls widen it.
    """
    dense, sms = kind in CACHE_BYTES, int(gpu.sms.value)
    computed = computed_rows(kernel, kind, rows, requests, sms)
    groups = -(-computed // PADDED_ROWS)
    data = requests * tokens * (row_bytes or CACHE_BYTES.get(kind, 2) * row) * (groups if dense else 1)
    flops = 2 * computed * requests * tokens * (row + LATENT_DIM)
    roofline, bound = roofline_us(gpu, data, flops, fp8=kind == "fp8" and kernel != ETAP)
    load = Load(requests, tokens, max(1, sms // groups))
    return Attention(NAMES.get(kernel, kernel), computed, roofline, bound, layers, load, call)


def query_rows(model: Model, on: Deployment) -> int:
    """Query rows per request on one GPU; under decode context parallelism the ranks gather each other's heads."""
    return model.num_attention_heads // on.tp * on.dcp * on.s_q


def dense_kernels(model: Model, gpu: Gpu, on: Deployment) -> dict[str, Attention]:
    """Every kernel that was timed for this cache, and ETAP's."""
    rows, tokens, layers = query_rows(model, on), -(-on.context // on.dcp), len(model.attention_layers)
    calls = gpu.calls_of(on.cache, rows)
    own = (ETAP, FP8_MATH) if on.cache == "fp8" else (ETAP,)
    return {
        kernel: attention(gpu, kernel, on.cache, rows, on.local_batch, tokens, call=calls.get(kernel), layers=layers)
        for kernel in dict.fromkeys((*own, *calls))
    }


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


def _drafting_seconds(model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of predicting one draft per request: one predicting layer without its attention, and the output head.

    0 where the model does not say how many layers predict.
    """
    alone, layers = replace(on, s_q=1), predicting_layers(model, on)
    whole, seconds = {part.name: part.parameters for part in weights_of(model, alone)}, LAYER_US / 1e6
    for part in weights_of(model, on) if layers else ():
        more = part.parameters if part.name == "output head" else (part.parameters - whole.get(part.name, 0)) // layers
        seconds += _gemm_seconds(replace(part, parameters=more), model, gpu, alone) if part.read_by_decode else 0
    return seconds if layers else 0.0


def rest_of_step_ms(model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a decode step without the attention kernel and without other requests' prefill; drafts come on top."""
    parts = [part for part in weights_of(model, replace(on, s_q=1)) if part.read_by_decode]
    gemms = sum(_gemm_seconds(part, model, gpu, on) for part in parts)
    drafting = (on.s_q - 1) * _drafting_seconds(model, gpu, on)
    # Linear attention reads and writes its state.
    states = 2 * on.local_batch * state_bytes(model, replace(on, pp=1)) / gpu.sustained_bandwidth.value
    return (gemms + drafting + states) * 1e3 + model.num_hidden_layers * LAYER_US / 1e3


@dataclass(frozen=True)
class Gain:
    """ETAP in place of another kernel."""

    call: float  # the other kernel's time per call over ETAP's
    lower: float  # two estimates of the share of tokens per second gained
    upper: float
    fp8_math: bool = False  # whether ETAP multiplies in FP8


@dataclass(frozen=True)
class Shared:
    """Microseconds of a call of ETAP's faster math where all requests begin with the same tokens."""

    tokens: int
    apart_us: float  # in pages of their own
    from_l2_us: tuple[float, ...]  # from least to most in the same pages, without the flag; empty where nobody read it
    once_us: float | None  # in the same pages, with the flag; None where it has no effect


@dataclass(frozen=True)
class Plan:
    """The planner's answer. `indexer` are the logits of a sparse model's choice of tokens, `selections` what takes the
    largest: in a step with ETAP, and in one with another kernel."""

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
    selections: tuple[Attention, Attention] | None = None
    shared: Shared | None = None

    @property
    def best(self) -> Attention:
        """ETAP with the faster math."""
        return min(filter(None, (self.etap, self.fp8_math)), key=lambda kernel: kernel.call_us)

    @property
    def fixed_ms(self) -> float:
        """Milliseconds of a step without attention."""
        return self.rest_ms + (self.indexer.step_ms if self.indexer else 0)

    def varying_ms(self, kernel: Attention) -> float:
        """Milliseconds of a step that depend on the attention kernel."""
        return kernel.step_ms + (self.selections[kernel in self.peers].step_ms if self.selections else 0)

    def step_with(self, kernel: Attention) -> float:
        """Milliseconds of a whole step."""
        return self.fixed_ms + self.varying_ms(kernel)

    @property
    def at_least(self) -> bool:
        """Whether steps are lower bounds, since nobody timed how this GPU chooses tokens."""
        return any(part.call is None for part in (self.indexer, *(self.selections or ())) if part)

    def gain_over(self, peer: Attention) -> Gain | None:
        """The gain over one peer; None where ETAP's call was not timed."""
        if self.best.call is None:
            return None
        fixed = self.fixed_ms, self.fixed_ms + (self.longest_rest - 1) * self.rest_ms
        other, own = self.varying_ms(peer), self.varying_ms(self.best)
        lower, upper = sorted((rest + other) / (rest + own) - 1 for rest in fixed)
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

    A measured `attention_share` of attention in a step with the fastest other kernel replaces the estimate of the rest.
    Raises ValueError, naming the argument, when the model cannot be served so or ETAP cannot run it.
    """
    check(model, on)
    kernels = dense_kernels(model, gpu, on)
    etap, fp8_math, *peers = kernels.pop(ETAP), kernels.pop(FP8_MATH, None), *kernels.values()
    rest: tuple[float, Status, float] = (rest_of_step_ms(model, gpu, on), "derived", gpu.longest_rest.value)
    if attention_share is not None:
        if not LEAST_SHARE <= attention_share <= MOST_SHARE:
            raise ValueError(f"attention_share: wanted {LEAST_SHARE} to {MOST_SHARE}, got {attention_share}")
        if not peers:
            raise ValueError(f"attention_share: wanted a GPU on which another kernel was timed, got {gpu.name}")
        share_of = min(peer.step_ms for peer in peers)
        rest = (share_of * (1 / attention_share - 1), "given", 1.0)
    plan = Plan(memory_of(model, gpu, on), etap, tuple(peers), *rest, fp8_math=fp8_math)
    if on.cache == "bfloat16":
        return plan
    plain = replace(on, cache="bfloat16")
    in_bf16 = replace(dense_kernels(model, gpu, plain)[ETAP], kernel="ETAP, bf16 cache")
    return replace(plan, in_bf16=in_bf16, bf16_tokens=memory_of(model, gpu, plain).tokens)
