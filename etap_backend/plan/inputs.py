"""What a plan is made of: a model, a GPU, and how the one is served on the other. Each is checked before it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from bench.common import configs, results
from bench.common.configs import Strict
from etap_backend.limits import ROPE_DIM, SCALE_DIM, SPARSE_FP8_BYTES, V4_ROW_BYTES

# Beyond these a number is a mistake, and within them no sum or quotient of the planner leaves what a float holds.
MOST = 2**31
SMALLEST, GREATEST = 1e-3, 1e18

CACHE_BYTES = {"bfloat16": 2, "fp8": 1}
CACHE_NAMES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "auto": "bfloat16", "fp8": "fp8", "fp8_e4m3": "fp8"}
"""What the engines call the caches."""
V4, V41 = "deepseek_v4", "deepseek_v41_text"
CSA, HCA = 4, 128
"""Tokens of a compressed entry in the two kinds of DeepSeek-V4's layers that keep any; V4.1's have 2 and 1."""
RATIOS = {V4: (0, CSA, HCA), V41: (0, 1, 2)}
V4_SIZES = "head_dim qk_rope_head_dim moe_intermediate_size index_topk sliding_window o_groups o_lora_rank hc_mult"
"""What its config.json has, and its plan needs."""

Status = Literal["measured", "nominal", "derived", "given"]
Size = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class Figure(Strict):
    """A number, how it was come by, and from where."""

    value: float = Field(ge=SMALLEST, le=GREATEST)
    status: Status
    source: str


class Call(Strict):
    """Time of one attention call: `fixed_us` + `factor` x its roofline.

    `results` names the files of results/ that it was fitted to, and `kernel` their column.
    """

    fixed_us: float = Field(ge=0, le=GREATEST)
    factor: float = Field(ge=1, le=GREATEST)
    status: Status
    source: str
    kernel: str = ""
    results: tuple[str, ...] = ()

    def microseconds(self, roofline_us: float) -> float:
        return self.fixed_us + self.factor * roofline_us


class SparseCall(Call):
    """Time of one call of sparse attention for `heads` heads on rows of a bfloat16 cache, or of an FP8 one, as other
    models have it or DeepSeek-V4."""

    kernel: str
    heads: int
    fp8: bool
    v4: bool = False


LONGEST_REST = Figure(
    value=1.74,
    status="derived",
    source="attention is 30% of a step at 16 x 16K on 8 x H20 (README of FlashMLA-ETAP): 42.1 ms of rest, planned 24.2",
)


class Gpu(Strict):
    """A file of configs/hardware.

    `longest_rest` is how many times its estimate the rest of a step may take. `sparse_like` names the file whose
    `sparse` calls stand for this GPU's own, which nobody timed.
    """

    name: str
    memory_bytes: Figure
    bandwidth: Figure  # bytes a second
    sustained_bandwidth: Figure
    bf16_flops: Figure  # dense operations a second
    fp8_flops: Figure
    sustained_bf16_flops: Figure
    sms: Figure
    etap: Call
    etap_fp8_math: Call | None = None  # with FP8 products, where they follow another line
    padded: Call  # FlashMLA's kernels alone, built from its sources
    padded_in_vllm: Call | None = None  # FlashMLA as vLLM ships and calls it, where that was measured
    longest_rest: Figure = LONGEST_REST
    sparse: tuple[SparseCall, ...] = ()
    sparse_like: str = ""

    @property
    def sustained_share(self) -> float:
        """What WGMMA reaches of the nominal rate."""
        return self.sustained_bf16_flops.value / self.bf16_flops.value

    def sustained_flops(self, *, fp8: bool) -> float:
        """Operations a second of WGMMA on 16-bit numbers or on FP8 ones, the latter with the share of the former."""
        return self.fp8_flops.value * self.sustained_share if fp8 else self.sustained_bf16_flops.value

    @property
    def figures(self) -> dict[str, Figure]:
        return {name: value for name, value in self if isinstance(value, Figure)}

    @property
    def calls(self) -> dict[str, Call]:
        return {name: value for name, value in self if isinstance(value, Call)}


class Quantization(BaseModel):
    """The part of a model's quantization_config that says what a weight takes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    quant_method: Literal["fp8", "compressed-tensors"]
    weight_block_size: tuple[Size, Size] | None = None
    format: Literal["mxfp4-pack-quantized"] | None = None  # of compressed-tensors
    expert_dtype: Literal["fp4", "fp8"] | None = None  # of DeepSeek-V4.1; V4 has it beside this

    @model_validator(mode="after")
    def _format_is_known(self) -> Quantization:
        if self.quant_method == "compressed-tensors" and self.format is None:
            raise ValueError("wanted format mxfp4-pack-quantized beside quant_method compressed-tensors, got none")
        return self


class LinearAttention(BaseModel):
    """The part of a model's linear_attn_config that says what its layers without a KV cache hold (Kimi's KDA)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    full_attn_layers: tuple[Size, ...] = Field(min_length=1)  # counted from 1
    num_heads: Size
    head_dim: Size
    short_conv_kernel_size: Size
    use_full_rank_gate: bool = False


class Model(BaseModel):
    """What the planner reads of a Hugging Face config.json with multi-head latent attention; of a multimodal model its
    text_config."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_type: str = ""
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    intermediate_size: Size
    kv_lora_rank: Size
    qk_rope_head_dim: Count
    qk_nope_head_dim: Size
    v_head_dim: Size
    q_lora_rank: Size | None = None
    moe_intermediate_size: Count = 0
    n_routed_experts: Count | None = Field(None, validation_alias=AliasChoices("n_routed_experts", "num_experts"))
    n_shared_experts: Count | None = Field(
        None, validation_alias=AliasChoices("n_shared_experts", "num_shared_experts")
    )
    num_experts_per_tok: Count | None = Field(
        None, validation_alias=AliasChoices("num_experts_per_tok", "num_experts_per_token")
    )
    routed_expert_hidden_size: Size | None = None  # where routed experts work on a projection of the hidden states
    first_k_dense_replace: Count = 0
    num_nextn_predict_layers: Count = 0
    tie_word_embeddings: bool = False
    quantization_config: Quantization | None = None
    index_topk: Count | None = None  # of sparse attention; what follows is its indexer's
    index_n_heads: Count | None = None
    index_head_dim: Count | None = None
    index_kpool: Size = 1  # tokens whose keys are kept, and chosen, as one
    index_topk_freq: Size = 1  # each so many layers one chooses, and the others take what it chose
    index_skip_topk_offset: Count = 2
    index_topk_pattern: str | None = None  # F for a layer that chooses, S for one that does not
    mla_use_output_gate: bool = False
    linear_attn_config: LinearAttention | None = None
    layer_types: tuple[str, ...] | None = None
    compress_ratios: tuple[Count, ...] = ()  # DeepSeek-V4's, those of layers that predict at the end
    sliding_window: Size | None = None
    o_groups: Size | None = None
    o_lora_rank: Size | None = None
    hc_mult: Count | None = None
    expert_dtype: Literal["fp4", "fp8"] | None = None
    kv_source_layer_ids: tuple[Count, ...] = ()  # DeepSeek-V4.1's layers, from 0, whose entries those behind them read
    index_source_layer_ids: tuple[Count, ...] = ()  # and those that choose for them
    dspark_n_routed_experts: Count | None = None  # of layers that predict
    engram_num_embeddings: tuple[Count, ...] = ()  # rows of its tables of word groups, in host memory
    engram_head_dim: Count = 0
    engram_n_heads: Count = 0
    engram_max_ngram_size: Count = 0

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(text := data.get("text_config"), dict):
            data = {"quantization_config": data.get("quantization_config")} | text
        if isinstance(data, dict) and str(kind := data.get("model_type", "")).startswith(V4):
            if kind not in RATIOS:
                raise ValueError(f"model_type: wanted {' or '.join(RATIOS)}, which are planned, got {kind}")
            data = _as_latent(data)
        return data

    @model_validator(mode="after")
    def _is_whole(self) -> Model:
        layers = self.linear_attn_config.full_attn_layers if self.linear_attn_config else ()
        if len(set(layers)) < len(layers) or max(layers, default=0) > self.num_hidden_layers:
            wanted = f"different numbers of at most num_hidden_layers = {self.num_hidden_layers}"
            raise ValueError(f"linear_attn_config.full_attn_layers: wanted {wanted}, got {list(layers)}")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            wanted = f"as many as num_hidden_layers = {self.num_hidden_layers}"
            raise ValueError(f"layer_types: wanted {wanted}, got {len(self.layer_types)}")
        if self.v4:
            self._check_caches()
        if self.sparse and not (self.index_n_heads and self.index_head_dim and self.q_lora_rank):
            raise ValueError("wanted index_n_heads, index_head_dim and q_lora_rank beside index_topk")
        if self.n_routed_experts and not (self.num_experts_per_tok and self.moe_intermediate_size):
            raise ValueError("wanted num_experts_per_tok and moe_intermediate_size beside n_routed_experts")
        if self.n_routed_experts and self.num_experts_per_tok > self.n_routed_experts:
            wanted = f"at most n_routed_experts = {self.n_routed_experts}"
            raise ValueError(f"num_experts_per_tok: wanted {wanted}, got {self.num_experts_per_tok}")
        return self

    def _check_caches(self) -> None:
        """Raise ValueError unless each of DeepSeek-V4's layers has its entries, or those of a layer before it."""
        ratios, known = self.compress_ratios[: self.num_hidden_layers], RATIOS[self.model_type]
        if len(ratios) < self.num_hidden_layers:
            wanted = f"one for each of num_hidden_layers = {self.num_hidden_layers}"
            raise ValueError(f"compress_ratios: wanted {wanted}, got {len(ratios)}")
        if wrong := sorted(set(ratios) - set(known)):
            raise ValueError(f"compress_ratios: wanted {', '.join(map(str, known))} of {self.model_type}, got {wrong}")
        for name in ("kv_source_layer_ids", "index_source_layer_ids") if self.shares_caches else ():
            first, compressed = min(getattr(self, name), default=self.num_hidden_layers), sum(map(bool, ratios))
            if compressed and first > min(layer for layer, ratio in enumerate(ratios) if ratio):
                raise ValueError(f"{name}: wanted the first layer with entries among them, got {getattr(self, name)}")

    @property
    def moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace) if self.n_routed_experts else 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with latent attention and a KV cache, counted from 1 (GLM's full_attn_layers are from 0)."""
        if self.linear_attn_config is None:
            return self.all_layers
        if self.layer_types is None:
            return self.linear_attn_config.full_attn_layers
        return tuple(layer for layer, kind in enumerate(self.layer_types, 1) if kind != "linear_attention")

    @property
    def sparse(self) -> bool:
        return bool(self.index_topk)

    @property
    def v4(self) -> bool:
        """Whether each layer has a window of the last tokens, and entries that stand for the others: V4.1's too."""
        return self.model_type in RATIOS

    @property
    def shares_caches(self) -> bool:
        """Whether a layer of DeepSeek-V4.1 reads what another one compressed and chose."""
        return self.model_type == V41

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """DeepSeek-V4's layers, counted from 1, with an entry for so many tokens; 0 for those with a window alone."""
        return tuple(layer for layer in self.all_layers if self.compress_ratios[layer - 1] == ratio)

    def compressing(self, ratio: int) -> tuple[int, ...]:
        """Those of them that make the entries, and keep them."""
        layers = self.layers_of(ratio)
        return tuple(one for one in layers if one - 1 in self.kv_source_layer_ids) if self.shares_caches else layers

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        """Those of the attention layers that have an indexer, which chooses for the layers behind it too."""
        return tuple(layer for layer in self.attention_layers if self.sparse and self._chooses(layer - 1))

    def _chooses(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has an indexer: the engines' rule."""
        if self.v4:
            return layer in self.index_source_layer_ids or self.compress_ratios[layer] == CSA
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern[layer : layer + 1] != "S"
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    @property
    def all_layers(self) -> tuple[int, ...]:
        return tuple(range(1, self.num_hidden_layers + 1))

    def divides_into(self, stages: int) -> bool:
        """Whether there can be so many pipeline stages: layers that share entries stay together."""
        starts = range(0, self.num_hidden_layers, -(-self.num_hidden_layers // stages))[1:]
        alone = not self.shares_caches or all(start in self.kv_source_layer_ids for start in starts)
        return stages <= self.num_hidden_layers and alone

    @property
    def linear_layers(self) -> int:
        """Layers with linear attention, which keep a state of fixed size for each request."""
        return self.num_hidden_layers - len(self.attention_layers)

    @property
    def cache_row(self) -> int:
        """Elements of a row of the cache, which one token takes in one layer, DeepSeek-V4's rope among the latent's."""
        return self.kv_lora_rank + (0 if self.v4 else self.qk_rope_head_dim)

    def cache_row_bytes(self, cache: str) -> int:
        """What they take. FP8 rows of sparse attention have scales in them and a rope part of two bytes an element, for
        which vLLM has room without rope, too."""
        if self.sparse and cache == "fp8" and not self.v4:
            return SPARSE_FP8_BYTES + CACHE_BYTES["bfloat16"] * (self.qk_rope_head_dim or ROPE_DIM)
        return self.read_row_bytes(cache)

    def read_row_bytes(self, cache: str) -> int:
        """What a call reads of them."""
        if self.v4:
            return V4_ROW_BYTES
        if self.sparse and cache == "fp8":
            return SPARSE_FP8_BYTES + CACHE_BYTES["bfloat16"] * self.qk_rope_head_dim
        return self.cache_row * CACHE_BYTES[cache]

    @property
    def index_row_bytes(self) -> int:
        """What a token takes in an indexer's cache: its key in FP8, with a float32 scale for each 128 elements."""
        if not self.sparse:
            return 0
        return -(-(self.index_head_dim + 4 * (self.index_head_dim // SCALE_DIM)) // self.index_kpool)

    @property
    def fp8_weights(self) -> bool:
        """Whether products with the quantised weights are FP8's."""
        return self.quantization_config is not None and self.quantization_config.quant_method == "fp8"

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight that is no routed expert's, its share of a block's scale included."""
        if not self.fp8_weights:
            return 2.0
        rows, columns = self.quantization_config.weight_block_size or (128, 128)
        return 1 + 4 / (rows * columns)

    @property
    def attention_bytes(self) -> float:
        """Bytes of an attention weight: GLM-5.3-Flash's FP8 checkpoint has them in bfloat16."""
        return 2.0 if self.model_type.startswith("glm5_next") else self.weight_bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes of a routed expert's weight: MXFP4 has a byte of scale for 32 of 4 bits, and is the experts' alone."""
        mxfp4 = self.expert_dtype == "fp4" or (self.quantization_config is not None and not self.fp8_weights)
        return 4 / 8 + 1 / 32 if mxfp4 else self.weight_bytes


def _as_latent(data: dict) -> dict:
    """DeepSeek-V4's config.json with latent attention's names for what it has: one row of `head_dim` elements is key
    and value whole, and the engines take experts for FP4 where nothing else is said."""
    kind = data["model_type"]
    for name in V4_SIZES.split():
        if not isinstance(data.get(name), int):
            raise ValueError(f"{name}: wanted a number beside model_type {kind}, got {data.get(name)!r}")
    row, rope = data["head_dim"], data["qk_rope_head_dim"]
    names = {"kv_lora_rank": row, "v_head_dim": row, "qk_nope_head_dim": row - rope}
    names |= {"index_kpool": CSA if kind == V4 else 1, "intermediate_size": data["moe_intermediate_size"]}
    experts = (data.get("quantization_config") or {}).get("expert_dtype") or "fp4"
    return {"expert_dtype": experts} | data | names


def read_model(name: str) -> Model:
    """A shipped model by its name, the hub's such as deepseek-ai/DeepSeek-R1 included, or any config.json, or the
    folder that holds one. Raises ValueError, naming the argument, otherwise."""
    path = Path(name) / "config.json" if Path(name).is_dir() else configs.find("models", name, ".json")
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model: wanted a config.json, got {path}, which is no JSON file: {error}") from error
    return results.parse(path, content, Model)


def read_gpu(name: str) -> Gpu:
    """A shipped GPU by name, or any file like it. Raises ValueError otherwise."""
    return configs.read_toml(configs.find("hardware", name), Gpu)


def cache_named(name: str, model: Model) -> str:
    """The planner's name of a cache type, "auto" being the model's. Raises ValueError for what ETAP does not read."""
    if name not in CACHE_NAMES:
        raise ValueError(f"cache: wanted one of {', '.join(CACHE_NAMES)}, got {name}")
    return "fp8" if model.v4 and name == "auto" else CACHE_NAMES[name]


@dataclass(frozen=True)
class Deployment:
    """Where and how a model is served."""

    gpus: int = 8  # tp x dp x pp of them
    tp: int = 8  # tensor parallelism
    dp: int = 1  # data parallelism: attention is on each replica, experts are spread over tp x dp
    pp: int = 1  # pipeline parallelism
    dcp: int = 1  # decode context parallelism, over how many of the tp ranks a request's tokens are spread
    cache: str = "bfloat16"  # type of the KV cache, or fp8
    context: int = 16384  # tokens of every request, in the cache
    batch: int = 16  # requests that decode at the same time, on all GPUs together
    s_q: int = 1  # query tokens a request and step; more than 1 with multi-token prediction
    utilization: float = 0.92  # share of the GPU's memory that the engine may take
    experts: float | None = None  # routed experts of a layer that a step reads; None when tokens choose evenly

    def check(self, model: Model) -> None:
        """Raise ValueError, naming the argument, unless this can be."""
        for name in ("gpus", "tp", "dp", "pp", "dcp", "context", "batch", "s_q"):
            if not 1 <= (value := getattr(self, name)) <= MOST:
                raise ValueError(f"{name}: wanted at least 1 and at most {MOST}, got {value}")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization: wanted more than 0 and at most 1, got {self.utilization}")
        most = model.n_routed_experts or 0
        if self.experts is not None and not 0 < self.experts <= most:
            raise ValueError(f"experts: wanted more than 0 and at most the model's {most}, got {self.experts}")
        if self.cache not in CACHE_BYTES:
            raise ValueError(f"cache: wanted one of {', '.join(CACHE_BYTES)}, got {self.cache}")
        if self.tp * self.dp * self.pp != self.gpus:
            raise ValueError(f"gpus: wanted tp x dp x pp = {self.tp * self.dp * self.pp}, got {self.gpus}")
        linear = model.linear_attn_config
        for name, whole, what in (
            ("tp", model.num_attention_heads, f"{model.num_attention_heads} heads"),
            ("tp", linear and linear.num_heads, f"{linear and linear.num_heads} heads of linear attention"),
            ("tp", model.v4 and model.o_groups, f"{model.o_groups} groups of heads"),
            ("dcp", self.tp, f"tp = {self.tp}"),
        ):
            if whole and whole % (got := getattr(self, name)):
                raise ValueError(f"{name}: wanted a divisor of {what}, got {got}")
        for name, has in (("dcp", 1), ("cache", "fp8")) if model.v4 else ():
            if (got := getattr(self, name)) != has:
                raise ValueError(
                    f"{name}: wanted {has}, which is all that the engines have for {model.model_type}, got {got}"
                )
        if not model.divides_into(self.pp):
            alone = " in stages that read no other's entries" if model.shares_caches else ""
            raise ValueError(f"pp: wanted at most {model.num_hidden_layers} layers{alone}, got {self.pp}")

    @property
    def local_batch(self) -> int:
        """Requests of one attention replica."""
        return -(-self.batch // self.dp)
