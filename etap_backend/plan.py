"""`etap plan`: what a model needs on a number of GPUs, and what transposed decode attention gains there.

Every number of the answer is measured, nominal or derived, and says so. docs/plan.md has the formulas.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.console import Console
from rich.table import Table

from etap_backend import configs
from etap_backend.configs import Strict
from etap_backend.schedule import row_groups, row_tile
from etap_backend.support import why_unsupported

PAGE_TOKENS = 64
PADDED_ROWS = 64  # WGMMA's M: the rows of a kernel that puts queries there
CACHE_BYTES = {"bfloat16": 2, "fp8": 1}

Status = Literal["measured", "nominal", "derived", "given"]


class Figure(Strict):
    """A number, how it was come by, and from where."""

    value: float = Field(gt=0)
    status: Status
    source: str


class Call(Strict):
    """Time of one attention call: `fixed_us` + `factor` x its roofline."""

    fixed_us: float = Field(ge=0)
    factor: float = Field(ge=1)
    status: Status
    source: str

    def microseconds(self, roofline_us: float) -> float:
        return self.fixed_us + self.factor * roofline_us


class Gpu(Strict):
    """A file of configs/hardware."""

    name: str
    memory_bytes: Figure
    bandwidth: Figure  # bytes a second
    sustained_bandwidth: Figure
    bf16_flops: Figure  # dense operations a second
    fp8_flops: Figure
    sustained_bf16_flops: Figure
    sms: Figure
    etap: Call
    padded: Call

    @property
    def sustained_share(self) -> float:
        """What WGMMA reaches of the nominal rate."""
        return self.sustained_bf16_flops.value / self.bf16_flops.value

    def sustained_flops(self, *, fp8: bool) -> float:
        """Operations a second of WGMMA on 16-bit numbers or on FP8 ones, the latter with the share of the former."""
        return self.fp8_flops.value * self.sustained_share if fp8 else self.sustained_bf16_flops.value


# What serving costs beside the attention kernel. Fitted together to five readings of DeepSeek-R1 on 8 x H200 (a step of
# vLLM at batch 1, TPOT of SGLang 0.5.7 at concurrency 8 to 64): see docs/plan.md. The layer's share holds whatever does
# not grow with the batch: launches, small kernels, latency of the two all-reduces.
LAYER_US = Figure(value=107.0, status="derived", source="fitted to 8 x H200 readings of vLLM 0.26.0 and SGLang 0.5.7")
GEMM_BANDWIDTH = Figure(value=0.75, status="derived", source="of the sustained bandwidth; fitted with the time a layer")
# Activations of the largest prefill chunk, CUDA graphs, NCCL, allocator: what is missing between weights and cache in
# the one 8 x H200 start that reported its cache (674,597 tokens at vLLM 0.26.0's default share of the memory, 0.92).
RESERVE_BYTES = Figure(value=5.6e9, status="derived", source="8 x H200, vLLM 0.26.0: memory less weights less KV cache")


class Model(BaseModel):
    """What the planner reads of a Hugging Face config.json with multi-head latent attention."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    q_lora_rank: int | None = None
    moe_intermediate_size: int = 0
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int = 0
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    quantization_config: dict | None = None

    @model_validator(mode="after")
    def _experts_are_whole(self) -> Model:
        if self.n_routed_experts and not (self.num_experts_per_tok and self.moe_intermediate_size):
            raise ValueError("wanted num_experts_per_tok and moe_intermediate_size beside n_routed_experts")
        if self.quantization_config and self.quantization_config.get("quant_method") != "fp8":
            raise ValueError("quantization_config: wanted quant_method fp8 or none")
        return self

    @property
    def moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace) if self.n_routed_experts else 0

    @property
    def cache_row(self) -> int:
        """Elements of the cache that one token takes in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def weight_bytes(self) -> float:
        """Bytes of one quantised (or, without quantisation, any) weight, its share of a block's scale included."""
        if not self.quantization_config:
            return 2.0
        rows, columns = self.quantization_config.get("weight_block_size") or (128, 128)
        return 1 + 4 / (rows * columns)


def read_model(name: str) -> Model:
    """A shipped model by name, or any config.json (or the folder that holds one)."""
    path = Path(name) / "config.json" if Path(name).is_dir() else configs.find("models", name, ".json")
    try:
        return configs.parse(Model, json.loads(path.read_text()))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_gpu(name: str) -> Gpu:
    return configs.read_toml(configs.find("hardware", name), Gpu)


@dataclass(frozen=True)
class Deployment:
    """Where and how a model is served.

    Attributes:
        gpus: how many, tp x dp x pp of them.
        tp, dp, pp: tensor, data (replicated attention) and pipeline parallelism; experts are spread over tp x dp.
        dcp: decode context parallelism, over how many of the tp ranks the tokens of a request are spread.
        cache: type of the KV cache, bfloat16 or fp8.
        context: tokens of every request, in the cache.
        batch: requests that decode at the same time, on all GPUs together.
        s_q: query tokens a request and step; more than 1 with multi-token prediction.
        utilization: share of the GPU's memory that the engine may take.
        experts: routed experts of a layer that a step reads, where it is known; None when tokens choose evenly.
    """

    gpus: int = 8
    tp: int = 8
    dp: int = 1
    pp: int = 1
    dcp: int = 1
    cache: str = "bfloat16"
    context: int = 16384
    batch: int = 16
    s_q: int = 1
    utilization: float = 0.92
    experts: float | None = None

    def check(self, model: Model) -> None:
        """Raise ValueError, naming the argument, unless this can be."""
        for name in ("gpus", "tp", "dp", "pp", "dcp", "context", "batch", "s_q"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: wanted at least 1, got {value}")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization: wanted more than 0 and at most 1, got {self.utilization}")
        most = model.n_routed_experts or 0
        if self.experts is not None and not 0 < self.experts <= most:
            raise ValueError(f"experts: wanted more than 0 and at most the model's {most}, got {self.experts}")
        if self.cache not in CACHE_BYTES:
            raise ValueError(f"cache: wanted one of {', '.join(CACHE_BYTES)}, got {self.cache}")
        if self.tp * self.dp * self.pp != self.gpus:
            raise ValueError(f"gpus: wanted tp x dp x pp = {self.tp * self.dp * self.pp}, got {self.gpus}")
        if model.num_attention_heads % self.tp:
            raise ValueError(f"tp: wanted a divisor of {model.num_attention_heads} heads, got {self.tp}")
        if self.tp % self.dcp:
            raise ValueError(f"dcp: wanted a divisor of tp = {self.tp}, got {self.dcp}")
        if self.pp > model.num_hidden_layers:
            raise ValueError(f"pp: wanted at most {model.num_hidden_layers} layers, got {self.pp}")

    @property
    def local_batch(self) -> int:
        """Requests of one attention replica."""
        return -(-self.batch // self.dp)


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
    layers = model.num_hidden_layers
    return Attention(rows, roofline, "memory" if memory >= tensor else "tensor cores", us, us * layers / 1e3)


def query_rows(model: Model, on: Deployment) -> int:
    """Query rows of one request on one GPU; with decode context parallelism the ranks gather each other's heads."""
    return model.num_attention_heads // on.tp * on.dcp * on.s_q


def etap_attention(model: Model, gpu: Gpu, on: Deployment, *, fp8_math: bool = False) -> Attention:
    """The transposed kernel: rows rounded up to 8, 16, 32 or 64; beyond 64 in groups, each reading the cache.

    It reads an FP8 cache as such and multiplies it as float16, or with `fp8_math` as it is.
    """
    rows = query_rows(model, on)
    groups = row_groups(rows)
    return _attention(model, gpu, on, groups * row_tile(rows), groups, gpu.etap, fp8_math=fp8_math)


def padded_attention(model: Model, gpu: Gpu, on: Deployment) -> Attention:
    """A kernel with query rows on WGMMA's M, in tiles of 64; as FlashMLA does, it multiplies an FP8 cache in FP8."""
    tiles = -(-query_rows(model, on) // PADDED_ROWS)
    return _attention(model, gpu, on, tiles * PADDED_ROWS, tiles, gpu.padded, fp8_math=on.cache == "fp8")


def _gemm_seconds(part: Weights, model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a step's products with these weights: reading them, or multiplying in tiles of 64 rows."""
    touched, rows = 1.0, on.local_batch * on.s_q
    if part.experts:
        tokens, chosen = on.batch * on.s_q, model.num_experts_per_tok / model.n_routed_experts
        touched = 1 - (1 - chosen) ** tokens if on.experts is None else on.experts / model.n_routed_experts
        rows = tokens * chosen / touched
    tiled = math.ceil(rows / PADDED_ROWS) * PADDED_ROWS
    quantised = model.quantization_config and part.bytes_each < 2
    rate = gpu.sustained_flops(fp8=bool(quantised))
    memory = touched * part.bytes_a_gpu / (gpu.sustained_bandwidth.value * GEMM_BANDWIDTH.value)
    return max(memory, 2 * tiled * touched * part.parameters / part.shards / rate)


def rest_of_step_ms(model: Model, gpu: Gpu, on: Deployment) -> float:
    """Time of a decode step without the attention kernel (derived). Prefill of other requests is not in it."""
    gemms = sum(_gemm_seconds(part, model, gpu, on) for part in weights_of(model, on) if part.read_by_decode)
    return gemms * 1e3 + model.num_hidden_layers * LAYER_US.value / 1e3


@dataclass(frozen=True)
class BesideBf16:
    """What an FP8 cache changes: the same deployment with a bfloat16 cache, and FP8 in the products besides."""

    tokens: int  # that fit in bfloat16
    capacity_gain: float  # tokens that fit, over those; infinite where none does
    bf16: Attention
    fp8_math: Attention


@dataclass(frozen=True)
class Plan:
    """The planner's answer."""

    memory: Memory
    etap: Attention
    padded: Attention
    rest_ms: float
    rest_status: Status
    beside_bf16: BesideBf16 | None = None  # with an FP8 cache

    @property
    def step_ms(self) -> float:
        return self.rest_ms + self.etap.step_ms

    @property
    def padded_step_ms(self) -> float:
        return self.rest_ms + self.padded.step_ms

    @property
    def share(self) -> float:
        """Of the padded kernel's step, what attention takes."""
        return self.padded.step_ms / self.padded_step_ms

    @property
    def gain(self) -> float:
        """Tokens a second with the transposed kernel over those with the padded one, less 1."""
        return self.padded_step_ms / self.step_ms - 1


def _beside_bf16(model: Model, gpu: Gpu, on: Deployment, tokens_in_fp8: int) -> BesideBf16:
    plain = replace(on, cache="bfloat16")
    tokens_in_bf16 = memory_of(model, gpu, plain).tokens
    gain = tokens_in_fp8 / tokens_in_bf16 if tokens_in_bf16 else math.inf
    fp8_math = etap_attention(model, gpu, on, fp8_math=True)
    return BesideBf16(tokens_in_bf16, gain, etap_attention(model, gpu, plain), fp8_math)


def make_plan(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> Plan:
    """Memory, attention and step of a deployment.

    `attention_share` is the measured share of attention in a step with a padded kernel, where one is known; it then
    says how long the rest takes instead of the built-in estimate. Raises ValueError when the deployment cannot be.
    """
    memory, padded = memory_of(model, gpu, on), padded_attention(model, gpu, on)
    if attention_share is None:
        rest, status = rest_of_step_ms(model, gpu, on), "derived"
    elif 0 < attention_share < 1:
        rest, status = padded.step_ms * (1 / attention_share - 1), "given"
    else:
        raise ValueError(f"attention_share: wanted more than 0 and less than 1, got {attention_share}")
    beside = _beside_bf16(model, gpu, on, memory.tokens) if on.cache == "fp8" else None
    return Plan(memory, etap_attention(model, gpu, on), padded, rest, status, beside)


@dataclass(frozen=True)
class Alternative:
    """A change of the deployment, and whether batch and context fit after it."""

    change: str
    tokens: int
    tokens_wanted: int
    most_requests: int  # of this context, on all GPUs
    most_context: int  # of this batch
    note: str = ""

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted


def _alternative(change: str, model: Model, gpu: Gpu, on: Deployment) -> Alternative:
    memory = memory_of(model, gpu, on)
    pages = memory.tokens // PAGE_TOKENS
    most = pages // -(-on.context // (PAGE_TOKENS * on.dcp)) * on.dp
    context = pages // on.local_batch * PAGE_TOKENS * on.dcp
    reason = why_unsupported(
        dtype=torch.bfloat16, kv_cache_dtype=on.cache, head_dim=model.cache_row, v_head_dim=model.kv_lora_rank
    )
    return Alternative(change, memory.tokens, memory.tokens_wanted, most, context, reason and f"ETAP: {reason}" or "")


def what_fits(model: Model, gpu: Gpu, on: Deployment) -> list[Alternative]:
    """What the deployment holds as it is, and with another cache, more context parallelism, other or more GPUs."""
    asked = f"{on.gpus} x {gpu.name}"
    changes = {asked: (gpu, on)}
    for dcp in (2, 4, 8):
        if dcp > on.dcp and on.tp % dcp == 0:
            changes[f"{asked}, dcp {dcp}"] = gpu, replace(on, dcp=dcp)
    for name in configs.shipped("hardware"):
        other = read_gpu(name)
        if other.memory_bytes.value > 1.05 * gpu.memory_bytes.value:
            changes[f"{on.gpus} x {other.name}"] = other, on
    more = replace(on, gpus=2 * on.gpus, pp=2 * on.pp)
    if more.pp <= model.num_hidden_layers:
        changes[f"{more.gpus} x {gpu.name}, pp {more.pp}"] = gpu, more
    if on.cache != "fp8":
        halved = {
            f"{change}, FP8 cache": (where, replace(how, cache="fp8")) for change, (where, how) in changes.items()
        }
        changes |= halved
    return [_alternative(change, model, where, how) for change, (where, how) in changes.items()]


def tokens(text: str) -> int:
    """A number of tokens, such as 4096 or 4K. Raises ValueError otherwise."""
    number, scale = (text[:-1], 1024) if text[-1:] in "kK" else (text, 1)
    if not number.isdigit() or int(number) < 1:
        raise ValueError(f"wanted a number of tokens such as 4096 or 4K, got {text!r}")
    return int(number) * scale


def document(name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan) -> dict:
    """Everything that the planner knows of one deployment, for --json."""
    return {
        "model": {"name": name, "parameters": parameters_of(model), **model.model_dump()},
        "gpu": gpu.model_dump(),
        "deployment": asdict(on),
        "assumptions": {
            "layer_us": LAYER_US.model_dump(),
            "gemm_bandwidth_share": GEMM_BANDWIDTH.model_dump(),
            "reserve_bytes": RESERVE_BYTES.model_dump(),
        },
        "weights": [{**asdict(part), "bytes_a_gpu": part.bytes_a_gpu} for part in weights_of(model, on)],
        "memory": {**asdict(plan.memory), "cache_wanted": plan.memory.cache_wanted, "fits": plan.memory.fits},
        "attention": {"etap": asdict(plan.etap), "padded": asdict(plan.padded)},
        "beside_bf16": plan.beside_bf16 and asdict(plan.beside_bf16),
        "step": {
            "rest_ms": plan.rest_ms,
            "rest_status": plan.rest_status,
            "etap_ms": plan.step_ms,
            "padded_ms": plan.padded_step_ms,
            "attention_share_padded": plan.share,
            "gain": plan.gain,
            "tokens_per_second_per_gpu": on.batch / plan.step_ms * 1e3 / on.gpus,
        },
        "what_fits": [{**asdict(found), "fits": found.fits} for found in what_fits(model, gpu, on)],
    }


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def _memory_table(gpu: Gpu, on: Deployment, memory: Memory, beside: BesideBf16 | None) -> Table:
    table = Table("one GPU", "", "", title="Memory", title_justify="left")
    table.add_row("memory", _gb(memory.total), gpu.memory_bytes.status)
    table.add_row(f"usable, {on.utilization:.0%}", _gb(memory.usable), "derived")
    table.add_row("weights", _gb(memory.weights), "derived")
    table.add_row("activations, graphs, NCCL", _gb(memory.reserve), RESERVE_BYTES.status)
    table.add_row("KV cache, a token", f"{memory.cache_a_token:,} B", "derived")
    table.add_row("KV cache, tokens that fit", f"{memory.tokens:,}", "derived")
    if beside:
        gain = f"{beside.tokens:,} (FP8 holds {beside.capacity_gain:.2f}x)"
        table.add_row("KV cache, tokens that would fit in bfloat16", gain, "derived")
    wanted = f"{memory.tokens_wanted:,} = {_gb(memory.cache_wanted)}"
    table.add_row(f"KV cache, {on.batch} x {on.context}", wanted, "derived")
    return table


def _attention_table(gpu: Gpu, plan: Plan) -> Table:
    table = Table(
        "", "rows", "roofline us", "bound by", "expected us", "all layers ms", "step ms", title_justify="left"
    )
    status = "derived" if plan.beside_bf16 else gpu.etap.status
    table.title = f"Decode attention and step ({gpu.name}; expected times {status}, rest {plan.rest_status})"
    kernels = [("ETAP", plan.etap), (f"padded to {PADDED_ROWS} rows", plan.padded)]
    if plan.beside_bf16:
        kernels[1:1] = [("ETAP, FP8 math", plan.beside_bf16.fp8_math), ("ETAP, bfloat16 cache", plan.beside_bf16.bf16)]
    for name, kernel in kernels:
        step = plan.rest_ms + kernel.step_ms
        numbers = (f"{kernel.roofline_us:.1f}", kernel.bound, f"{kernel.call_us:.1f}", f"{kernel.step_ms:.2f}")
        table.add_row(name, str(kernel.rows), *numbers, f"{step:.1f}")
    return table


def _alternatives_table(found: list[Alternative], on: Deployment) -> Table:
    table = Table(title="What fits, the first line being what was asked", title_justify="left")
    for column in ("", f"{on.batch} x {on.context}", f"most requests of {on.context}", f"most context of {on.batch}"):
        table.add_column(column, overflow="fold")
    for row in found:
        verdict = "[green]fits[/]" if row.fits else "[red]does not fit[/]"
        table.add_row(
            row.change + (" *" if row.note else ""), verdict, f"{row.most_requests:,}", f"{row.most_context:,}"
        )
    if notes := dict.fromkeys(row.note for row in found if row.note):
        table.caption = f"* {'; '.join(notes)}"
    return table


def _sources_table(gpu: Gpu) -> Table:
    table = Table(title="What the numbers are", title_justify="left")
    for column in ("", "value", "", "source"):
        table.add_column(column, overflow="fold")
    figures = {name: getattr(gpu, name) for name in type(gpu).model_fields if isinstance(getattr(gpu, name), Figure)}
    figures |= {"time a layer, us": LAYER_US, "GEMM share of bandwidth": GEMM_BANDWIDTH, "reserve": RESERVE_BYTES}
    for name, figure in figures.items():
        table.add_row(name.replace("_", " "), f"{figure.value:,.4g}", figure.status, figure.source)
    for name in ("etap", "padded"):
        call = getattr(gpu, name)
        table.add_row(f"call, {name}", f"{call.fixed_us:g} us + {call.factor:g} x roofline", call.status, call.source)
    return table


def print_plan(name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, console: Console) -> None:
    layout = f"tp {on.tp}, dp {on.dp}, pp {on.pp}, dcp {on.dcp}, cache {on.cache}"
    console.print(
        f"[bold]{name}[/] ({parameters_of(model) / 1e9:.0f} G parameters) on {on.gpus} x {gpu.name}: {layout}"
    )
    console.print(_memory_table(gpu, on, plan.memory, plan.beside_bf16))
    if plan.memory.tokens == 0:
        console.print(f"[red]The weights do not leave room for a KV cache on {on.gpus} x {gpu.name}.[/]")
    elif not plan.memory.fits:
        wanted, room = _gb(plan.memory.cache_wanted), _gb(plan.memory.tokens * plan.memory.cache_a_token)
        console.print(
            f"[red]The cache of {on.batch} x {on.context} does not fit beside the weights:[/] it takes {wanted} a GPU, "
            f"and {room} are left. The times below are those of the shape all the same."
        )
    console.print(_alternatives_table(what_fits(model, gpu, on), on))
    console.print(_attention_table(gpu, plan))
    console.print(
        f"Attention is {plan.share:.0%} of a step with the padded kernel. Expected gain of ETAP: "
        f"{plan.padded.call_us / plan.etap.call_us:.2f}x a call, {plan.gain:+.0%} tokens a second, "
        f"{on.batch / plan.step_ms * 1e3 / on.gpus:.0f} tokens/s a GPU. Prefill of other requests is not in this."
    )
    if plan.beside_bf16:
        console.print(
            f"Against its own bfloat16 cache: {plan.beside_bf16.bf16.call_us / plan.etap.call_us:.2f}x a call, "
            f"{plan.beside_bf16.bf16.call_us / plan.beside_bf16.fp8_math.call_us:.2f}x with FP8 math. The form of the "
            "expected times is fitted to bfloat16 caches; calls from 65 us on with FP8 ones were within 15% of it."
        )
    if plan.rest_status == "derived":
        console.print(
            "The rest of a step is fitted to 8 x H200 and carried over by rates, without what a serving engine does "
            "besides: where the share of attention was measured, give it as --attention-share."
        )
    console.print(_sources_table(gpu))


def plan(
    model: Annotated[
        str, typer.Argument(help="A shipped model's name, or a config.json or its folder.")
    ] = "deepseek-r1",
    gpu: Annotated[
        str, typer.Option(help="A shipped GPU's name, or a file like those of configs/hardware.")
    ] = "H20-96G",
    count: Annotated[int, typer.Option(help="GPUs.")] = 8,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallel; all GPUs that dp and pp leave when not given.")
    ] = None,
    dp: Annotated[int, typer.Option(help="Data parallel attention.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel.")] = 1,
    dcp: Annotated[int, typer.Option(help="Decode context parallel.")] = 1,
    cache: Annotated[str, typer.Option("--kv-dtype", "--cache", help="Of the KV cache: bfloat16 or fp8.")] = "bfloat16",
    context: Annotated[str, typer.Option(help="Tokens of each request, such as 65536 or 64K.")] = "16K",
    batch: Annotated[int, typer.Option(help="Requests that decode at the same time.")] = 16,
    s_q: Annotated[int, typer.Option(help="Query tokens a step: 1 + draft tokens of multi-token prediction.")] = 1,
    utilization: Annotated[float, typer.Option(help="Share of the memory that the engine may take.")] = 0.92,
    experts: Annotated[
        float | None, typer.Option(help="Routed experts of a layer that a step reads, instead of an even choice.")
    ] = None,
    attention_share: Annotated[
        float | None, typer.Option(help="Measured share of a padded kernel in a step, instead of the estimate.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what fits on these GPUs, how long decode attention takes there, and what ETAP gains."""
    try:
        described, hardware = read_model(model), read_gpu(gpu)
        wide = tp or max(1, count // max(1, dp * pp))
        on = Deployment(count, wide, dp, pp, dcp, cache, tokens(context), batch, s_q, utilization, experts)
        made = make_plan(described, hardware, on, attention_share)
    except ValueError as error:
        Console(stderr=True).print(f"etap plan: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    if as_json:
        print(json.dumps(document(model, described, hardware, on, made), indent=1))
        return
    console = Console()
    print_plan(model, described, hardware, on, made, console)
