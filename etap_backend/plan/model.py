"""A model's config.json, and what follows from it: layers, rows of the cache, bytes of a weight."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etap_backend.limits import ROPE_DIM, SCALE_DIM, SPARSE_FP8_BYTES, V4_ROW_BYTES
from etap_backend.plan import files
from etap_backend.plan.files import CACHE_BYTES, Count, Size

PACKED = ("awq", "awq_marlin", "gptq", "gptq_marlin")
V4, V41 = "deepseek_v4", "deepseek_v41_text"
CSA, HCA = 4, 128
"""Tokens per compressed entry in the two kinds of DeepSeek-V4's layers that keep entries; V4.1's keep 2 and 1."""
RATIOS = {V4: (0, CSA, HCA), V41: (0, 1, 2)}
NOT_PLANNED = {"longcat_flash": "LongCat-Flash has two attentions and two dense networks in each layer"}
NOT_PLANNED["longcat_flash_ngram"] = NOT_PLANNED["longcat_flash"]
ONE_GROUP = 4096
V4_SIZES = "head_dim qk_rope_head_dim moe_intermediate_size index_topk sliding_window o_groups o_lora_rank hc_mult"
OTHER_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_mtp_layers": "num_nextn_predict_layers",
}


@dataclass(frozen=True)
class Quantization:
    """The part of a quantization_config that says how many bytes a weight takes, under the names of `_quantization`."""

    quant_method: Literal["fp8", "compressed-tensors", "awq", "awq_marlin", "gptq", "gptq_marlin"]
    weight_block_size: tuple[Size, Size] | None = None
    format: Literal["mxfp4-pack-quantized", "pack-quantized"] | None = None  # of compressed-tensors
    expert_dtype: Literal["fp4", "fp8"] | None = None  # DeepSeek-V4.1; V4 has it outside
    bits: Literal[4, 8] | None = None  # of weights packed into words, with a scale and perhaps a zero per group
    group_size: Size | None = None
    zero_point: bool = False
    left_out: tuple[str, ...] = ()  # modules in two bytes: parts of their names, or patterns after re:

    def __post_init__(self) -> None:
        if self.quant_method == "compressed-tensors" and self.format is None:
            wanted = "mxfp4-pack-quantized, pack-quantized or float-quantized"
            raise ValueError(f"format: wanted {wanted} beside quant_method compressed-tensors, got none")
        if self.packed and not (self.bits and self.group_size):
            raise ValueError(f"bits: wanted 4 or 8, and a group_size, beside quant_method {self.quant_method}")
        try:
            self.bytes_of("")
        except re.error as error:
            raise ValueError(f"left_out: wanted regular expressions after re:, got {error.pattern!r}") from error

    @property
    def packed(self) -> bool:
        return self.quant_method in PACKED or self.format == "pack-quantized"

    def bytes_of(self, module: str) -> float:
        """Bytes of a weight with its share of scale and zero, or 2 where the module is left out."""
        for name in self.left_out:
            if re.search(name[3:], module) if name.startswith("re:") else name in module:
                return 2.0
        if self.bits and self.group_size:
            return self.bits / 8 + (2 + self.zero_point * self.bits / 8) / self.group_size
        rows, columns = self.weight_block_size or (128, 128)
        return 1 + 4 / (rows * columns)


@dataclass(frozen=True)
class LinearAttention:
    """The part of a linear_attn_config that says what layers without a KV cache hold (Kimi's delta attention)."""

    full_attn_layers: tuple[Size, ...]  # counted from 1
    num_heads: Size
    head_dim: Size
    short_conv_kernel_size: Size
    use_full_rank_gate: bool = False


@dataclass(frozen=True)
class Model:
    """A Hugging Face config.json with multi-head latent attention; the text_config of a multimodal model."""

    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    intermediate_size: Size
    kv_lora_rank: Size
    qk_rope_head_dim: Count
    qk_nope_head_dim: Size
    v_head_dim: Size
    model_type: str = ""
    q_lora_rank: Count = 0
    moe_intermediate_size: Count = 0
    n_routed_experts: Count = 0
    n_shared_experts: Count = 0
    num_experts_per_tok: Count = 0
    routed_expert_hidden_size: Count = 0  # routed experts may work on a projection of the hidden states
    first_k_dense_replace: Count = 0
    num_nextn_predict_layers: Count = 0
    tie_word_embeddings: bool = False
    quantization_config: Quantization | None = None
    index_topk: Count = 0  # sparse attention and its indexer
    index_n_heads: Count = 0
    index_head_dim: Count = 0
    index_kpool: Size = 1  # tokens per key of the indexer
    index_topk_freq: Size = 1  # one layer in so many has an indexer, and the next ones use its choice
    index_skip_topk_offset: Count = 2
    index_topk_pattern: str | None = None  # F for a layer with an indexer, S for one without
    mla_use_output_gate: bool = False
    linear_attn_config: LinearAttention | None = None
    layer_types: tuple[str, ...] | None = None
    compress_ratios: tuple[Count, ...] = ()  # DeepSeek-V4; the predicting layers' come last
    sliding_window: Count = 0
    o_groups: Count = 0
    o_lora_rank: Count = 0
    hc_mult: Count = 0
    expert_dtype: Literal["fp4", "fp8"] | None = None
    kv_source_layer_ids: tuple[Count, ...] = ()  # DeepSeek-V4.1's layers, from 0, that make entries for the next ones
    index_source_layer_ids: tuple[Count, ...] = ()  # and those with an indexer
    dspark_n_routed_experts: Count = 0  # of the predicting layers
    engram_num_embeddings: tuple[Count, ...] = ()  # rows of the tables of word groups, in host memory
    engram_head_dim: Count = 0
    engram_n_heads: Count = 0
    engram_max_ngram_size: Count = 0

    def __post_init__(self) -> None:
        """Raise ValueError, naming the key, where keys contradict each other."""
        layers = self.linear_attn_config.full_attn_layers if self.linear_attn_config else (1,)
        if not layers or len(set(layers)) < len(layers) or max(layers) > self.num_hidden_layers:
            wanted = f"different numbers of at most num_hidden_layers = {self.num_hidden_layers}"
            raise ValueError(f"linear_attn_config.full_attn_layers: wanted {wanted}, got {list(layers)}")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            wanted = f"as many as num_hidden_layers = {self.num_hidden_layers}"
            raise ValueError(f"layer_types: wanted {wanted}, got {len(self.layer_types)}")
        if self.v4:
            self._check_caches()
        if self.sparse and not (self.index_n_heads and self.index_head_dim and self.q_lora_rank):
            raise ValueError("index_topk: wanted index_n_heads, index_head_dim and q_lora_rank beside it")
        if self.n_routed_experts and not (self.num_experts_per_tok and self.moe_intermediate_size):
            raise ValueError("n_routed_experts: wanted num_experts_per_tok and moe_intermediate_size beside it")
        if self.n_routed_experts and self.num_experts_per_tok > self.n_routed_experts:
            wanted = f"at most n_routed_experts = {self.n_routed_experts}"
            raise ValueError(f"num_experts_per_tok: wanted {wanted}, got {self.num_experts_per_tok}")

    def _check_caches(self) -> None:
        """Raise ValueError unless each of DeepSeek-V4's layers has its own entries or an earlier layer's."""
        ratios, known = self.compress_ratios[: self.num_hidden_layers], RATIOS[self.model_type]
        if len(ratios) < self.num_hidden_layers:
            wanted = f"one for each of num_hidden_layers = {self.num_hidden_layers}"
            raise ValueError(f"compress_ratios: wanted {wanted}, got {len(ratios)}")
        if wrong := sorted(set(ratios) - set(known)):
            raise ValueError(f"compress_ratios: wanted {', '.join(map(str, known))} of {self.model_type}, got {wrong}")
        first = next((layer for layer, ratio in enumerate(ratios) if ratio), None)
        for name in ("kv_source_layer_ids", "index_source_layer_ids") if self.shares_caches else ():
            sources = getattr(self, name)
            if first is not None and min(sources, default=self.num_hidden_layers) > first:
                raise ValueError(f"{name}: wanted the first layer with entries among them, got {sources}")

    @property
    def moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace) if self.n_routed_experts else 0

    @property
    def all_layers(self) -> tuple[int, ...]:
        return tuple(range(1, self.num_hidden_layers + 1))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with latent attention and a KV cache, counted from 1 (GLM counts full_attn_layers from 0)."""
        if self.linear_attn_config is None:
            return self.all_layers
        if self.layer_types is None:
            return self.linear_attn_config.full_attn_layers
        return tuple(layer for layer, kind in enumerate(self.layer_types, 1) if kind != "linear_attention")

    @property
    def linear_layers(self) -> int:
        """Layers with linear attention, which keep a state of fixed size for each request."""
        return self.num_hidden_layers - len(self.attention_layers)

    @property
    def sparse(self) -> bool:
        return bool(self.index_topk)

    @property
    def v4(self) -> bool:
        """DeepSeek-V4 or V4.1: each layer keeps a window of the last tokens, and entries that stand for the others."""
        return self.model_type in RATIOS

    @property
    def shares_caches(self) -> bool:
        """DeepSeek-V4.1: a layer reads the entries that another layer compressed and chose."""
        return self.model_type == V41

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """DeepSeek-V4's layers, counted from 1, with one entry per `ratio` tokens; 0 for those with a window only."""
        return tuple(layer for layer in self.all_layers if self.compress_ratios[layer - 1] == ratio)

    def compressing(self, ratio: int) -> tuple[int, ...]:
        """The layers of this ratio that make and keep entries."""
        layers = self.layers_of(ratio)
        return tuple(one for one in layers if one - 1 in self.kv_source_layer_ids) if self.shares_caches else layers

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        """The attention layers that have an indexer."""
        return tuple(layer for layer in self.attention_layers if self.sparse and self._has_indexer(layer - 1))

    def _has_indexer(self, layer: int) -> bool:
        """The engines' rule, for a layer counted from 0."""
        if self.v4:
            return layer in self.index_source_layer_ids or self.compress_ratios[layer] == CSA
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern[layer : layer + 1] != "S"
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def divides_into(self, stages: int) -> bool:
        """Whether so many pipeline stages are possible: layers that share entries stay together."""
        starts = range(0, self.num_hidden_layers, -(-self.num_hidden_layers // stages))[1:]
        apart = not self.shares_caches or all(start in self.kv_source_layer_ids for start in starts)
        return stages <= self.num_hidden_layers and apart

    @property
    def cache_row(self) -> int:
        """Elements of a token's cache row in one layer; DeepSeek-V4's rope is part of the latent."""
        return self.kv_lora_rank + (0 if self.v4 else self.qk_rope_head_dim)

    def cache_row_bytes(self, cache: str) -> int:
        """Bytes of a row in memory. vLLM's sparse FP8 rows have room for rope even without it."""
        if self.sparse and cache == "fp8" and not self.v4:
            return SPARSE_FP8_BYTES + CACHE_BYTES["bfloat16"] * (self.qk_rope_head_dim or ROPE_DIM)
        return self.read_row_bytes(cache)

    def read_row_bytes(self, cache: str) -> int:
        """Bytes that a call reads of a row."""
        if self.v4:
            return V4_ROW_BYTES
        if self.sparse and cache == "fp8":
            return SPARSE_FP8_BYTES + CACHE_BYTES["bfloat16"] * self.qk_rope_head_dim
        return self.cache_row * CACHE_BYTES[cache]

    @property
    def index_row_bytes(self) -> int:
        """Bytes per token in an indexer's cache: a key in FP8 with a float32 scale per 128 elements."""
        if not self.sparse:
            return 0
        return -(-(self.index_head_dim + 4 * (self.index_head_dim // SCALE_DIM)) // self.index_kpool)

    @property
    def fp8_weights(self) -> bool:
        """Whether quantised weights are multiplied in FP8."""
        return self.quantization_config is not None and self.quantization_config.quant_method == "fp8"

    def _bytes(self, module: str) -> float:
        """Bytes of a weight outside the routed experts, with its share of a block's or group's scale."""
        how = self.quantization_config
        if how is None or not (self.fp8_weights or how.packed):
            return 2.0
        return how.bytes_of(f"model.layers.{self.first_k_dense_replace}.{module}")

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight of shared experts and dense layers."""
        return self._bytes("mlp.shared_experts.up_proj")

    @property
    def attention_bytes(self) -> float:
        """Bytes of an attention weight; GLM-5.3-Flash's FP8 checkpoint keeps them in bfloat16."""
        return 2.0 if self.model_type.startswith("glm5_next") else self._bytes("self_attn.o_proj")

    @property
    def latent_bytes(self) -> float:
        """Bytes of a weight that projects to the latent; Mistral-Large-3 leaves it in bfloat16."""
        return max(self.attention_bytes, self._bytes("self_attn.q_a_proj"))

    @property
    def expert_bytes(self) -> float:
        """Bytes of a routed expert's weight; MXFP4 has 4 bits and one byte of scale per 32."""
        how = self.quantization_config
        mxfp4 = self.expert_dtype == "fp4" or (how is not None and how.format == "mxfp4-pack-quantized")
        return 4 / 8 + 1 / 32 if mxfp4 else self._bytes("mlp.experts.0.up_proj")


def _normalised(data: dict) -> dict:
    """A config.json under the names of `Model`."""
    if isinstance(text := data.get("text_config"), dict):
        outside = {"quantization_config": data.get("quantization_config")}
        data = outside | {key: value for key, value in text.items() if value is not None}
    data = {OTHER_NAMES.get(key, key): value for key, value in data.items()}
    kind = str(data.get("model_type", ""))
    if reason := NOT_PLANNED.get(kind):
        raise ValueError(f"model_type: wanted a model that the plan knows, got {kind}: {reason}")
    if isinstance(how := data.get("quantization_config"), dict):
        data["quantization_config"] = _quantization(how)
    if kind == "bailing_hybrid":
        data = _hybrid(data)
    if kind.startswith(V4):
        if kind not in RATIOS:
            raise ValueError(f"model_type: wanted {' or '.join(RATIOS)}, got {kind}")
        data = _v4_as_latent(data)
    return data


def _quantization(how: dict) -> dict:
    """A quantization_config under the names of `Quantization`: of compressed-tensors its first group's weights."""
    left_out = [*(how.get("ignore") or ()), *(how.get("modules_to_not_convert") or ())]
    how = how | {"left_out": left_out}
    groups = how.get("config_groups")
    weights = next((group.get("weights") for group in groups.values()), None) if isinstance(groups, dict) else None
    if how.get("quant_method") == "compressed-tensors" and isinstance(weights, dict):
        if how.get("format") == "float-quantized":
            return {"quant_method": "fp8", "weight_block_size": weights.get("block_structure"), "left_out": left_out}
        zero = weights.get("symmetric") is False
        how |= {"bits": weights.get("num_bits"), "group_size": weights.get("group_size"), "zero_point": zero}
    if how.get("group_size") == -1:  # one group per column
        how["group_size"] = ONE_GROUP
    return how


def _hybrid(data: dict) -> dict:
    """Ling 3.0's config.json: the last layer of every layer_group_size has latent attention, the others Kimi's."""
    layers, group = data.get("num_hidden_layers"), data.get("layer_group_size")
    if not isinstance(group, int) or not isinstance(layers, int) or not 1 <= group <= layers:
        raise ValueError(f"layer_group_size: wanted at most num_hidden_layers = {layers}, got {group!r}")
    linear = {name: data.get(name) for name in ("head_dim", "short_conv_kernel_size")}
    linear |= {"num_heads": data.get("num_attention_heads"), "use_full_rank_gate": True}
    return data | {"linear_attn_config": linear | {"full_attn_layers": list(range(group, layers + 1, group))}}


def _v4_as_latent(data: dict) -> dict:
    """DeepSeek-V4's config.json under latent attention's names: a row of `head_dim` elements is both key and value.

    The engines take experts for FP4 unless the file says otherwise.
    """
    kind = data["model_type"]
    for name in V4_SIZES.split():
        if not isinstance(data.get(name), int):
            raise ValueError(f"{name}: wanted a number beside model_type {kind}, got {data.get(name)!r}")
    row, rope = data["head_dim"], data["qk_rope_head_dim"]
    names = {"kv_lora_rank": row, "v_head_dim": row, "qk_nope_head_dim": row - rope}
    names |= {"index_kpool": CSA if kind == V4 else 1, "intermediate_size": data["moe_intermediate_size"]}
    quantization = data.get("quantization_config")  # `record` refuses what is no object
    experts = quantization.get("expert_dtype") if isinstance(quantization, dict) else None
    return {"expert_dtype": experts or "fp4"} | data | names


def read_model(name: str) -> Model:
    """A shipped model by its name or its name on a hub, or any config.json, or the folder of one.

    Raises ValueError, naming the argument and the key, otherwise.
    """
    if name.rpartition("/")[2].lower().startswith("longcat-flash") and not os.path.exists(name):
        reason = NOT_PLANNED["longcat_flash"]
        raise ValueError(f"model: wanted one that the plan knows, got {files.shortened(name)}: {reason}")
    path = Path(name) / "config.json" if os.path.isdir(name) else files.find("models", name)
    content = files.read_json(path, "model")
    try:
        return files.record(Model, _normalised(content))
    except ValueError as error:
        raise ValueError(f"model: {path}: {error}") from error
