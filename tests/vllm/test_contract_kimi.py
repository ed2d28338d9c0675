"""Kimi-K2's and Kimi-K3's attention on one of eight ranks: 8 heads, and 12, which is no power of two.

vLLM has a MLA layer of its own for Kimi-K3. Its fused kernel, which joins the parts of the query and writes the cache,
needs a GPU; a torch function stands in for it.
"""

import json
from pathlib import Path

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.models.kimi_k3.nvidia import mla
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker import workspace

from etap_backend import mla_decode
from etap_backend.vllm import versions
from support.vllm_layer import (
    BLOCK,
    CPU,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    VALUE,
    Problem,
    assert_as_exact_as_torch,
)

load_general_plugins()
ETAPBackend = AttentionBackendEnum.ETAP.get_class()

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
HEADS = {"kimi-k2": 8, "kimi-k3": 12}
RANKS = 8
HIDDEN = 768
NAME = "model.layers.3.self_attn.mla_attn"

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_workspaces")


def engine_config(folder: Path, config: dict, **arguments):
    """vLLM's configuration of a model that is only a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    defaults = {"max_model_len": 2048, "max_num_seqs": 8, "skip_tokenizer_init": True, "load_format": "dummy"}
    return EngineArgs(model=str(folder), attention_backend="ETAP", **(defaults | arguments)).create_engine_config()


def shipped(model: str) -> dict:
    return json.loads((MODELS / f"{model}.json").read_text())


@pytest.mark.parametrize("model", HEADS)
def test_vllm_makes_a_configuration_of_the_whole_model_with_etap(model, tmp_path, monkeypatch):
    monkeypatch.setattr(type(current_platform), "device_count", classmethod(lambda cls: RANKS))
    config = engine_config(tmp_path, shipped(model), tensor_parallel_size=RANKS)
    assert config.attention_config.backend is AttentionBackendEnum.ETAP
    assert config.model_config.get_num_attention_heads(config.parallel_config) == HEADS[model]
    assert config.model_config.use_mla and config.model_config.get_head_size() == LATENT + ROPE


def concat_and_insert(latent, rope, new_latent, new_rope, cache, slots, **_):
    """Kimi-K3's fused kernel, without rotation and quantisation."""
    cache.flatten(0, 1)[slots] = torch.cat([new_latent, new_rope.flatten(1)], -1)
    return torch.cat([latent, rope], -1)


def kimi_k3_config(folder: Path, cache: str):
    """vLLM's configuration of Kimi-K3 with the heads of one of eight ranks."""
    whole = shipped("kimi-k3")
    text = whole["text_config"] | {"num_attention_heads": HEADS["kimi-k3"], "num_key_value_heads": HEADS["kimi-k3"]}
    text |= {"hidden_size": HIDDEN}
    text["linear_attn_config"] = text["linear_attn_config"] | {"num_heads": HEADS["kimi-k3"]}
    return engine_config(folder, whole | {"text_config": text}, kv_cache_dtype=cache)


def make_kimi_k3_layer(config):
    return mla.MultiHeadLatentAttention(
        config.model_config.hf_text_config, HIDDEN, HEADS["kimi-k3"], NOPE, ROPE, VALUE, 128, LATENT,
        use_output_gate=True, cache_config=config.cache_config, prefix=NAME,
    )  # fmt: skip


@pytest.fixture
def kimi_k3_layer(tmp_path, monkeypatch, request):
    """Kimi-K3's own MLA layer and its configuration; the parameter is the type of the cache, FP8 not being refused."""
    monkeypatch.setattr(mla, "fused_mla_decode_q_concat_kv_cache_insert", concat_and_insert)
    monkeypatch.setattr(versions, "why_no_fp8_cache", lambda _: None)
    config = kimi_k3_config(tmp_path, getattr(request, "param", "auto"))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            layer = make_kimi_k3_layer(config)
            torch.manual_seed(1)
            layer.kv_b_proj.weight.data.normal_(std=LATENT**-0.5)
            layer.process_weights_after_loading(torch.bfloat16)
            current_platform.update_block_size_for_backend(config)
            yield layer, config
    finally:
        torch.set_default_dtype(dtype)


def test_kimi_k3s_own_layer_gets_etap_and_pages_that_it_can_split(kimi_k3_layer):
    layer, config = kimi_k3_layer
    assert layer.get_attn_backend() is ETAPBackend and type(layer.impl) is ETAPBackend.get_impl_cls()
    spec = layer.get_kv_cache_spec(config)
    assert spec.block_size % BLOCK == 0 and spec.page_size_bytes == spec.block_size * 1152
    assert config.cache_config.block_size > BLOCK, "a page holds a layer's state of linear attention"


def test_kimi_k3s_own_layer_has_its_workspace_before_memory_is_measured(kimi_k3_layer):
    """In the profile run the layer calls nothing of the implementation."""
    layer, config = kimi_k3_layer
    heads = HEADS["kimi-k3"]
    out = torch.full((3, heads * VALUE), torch.nan)
    q, latent, rope = torch.zeros(3, heads, NOPE + ROPE), torch.zeros(3, LATENT), torch.zeros(3, 1, ROPE)
    with set_forward_context(None, config, num_tokens=3, slot_mapping={}):
        layer._attention(torch.arange(3), q, latent, rope, out)
    assert not out.any()
    workspace.lock_workspace()
    ETAPBackend.get_builder_cls()(layer.get_kv_cache_spec(config).copy_with_new_block_size(BLOCK), [NAME], config, CPU)


def decode_in_own_layer(layer, config, problem):
    """Output of Kimi-K3's own layer for a step whose new rows it has to write itself."""
    spec = layer.get_kv_cache_spec(config)
    builder = ETAPBackend.get_builder_cls()(spec.copy_with_new_block_size(BLOCK), [NAME], config, CPU)
    step = builder.build(0, problem.common_metadata())
    last = [length - 1 for length in problem.lengths]
    slots = torch.tensor(
        [int(row[t // BLOCK]) * BLOCK + t % BLOCK for row, t in zip(problem.block_table, last, strict=True)]
    )
    new = problem.cache.flatten(0, 1)[slots].clone()
    problem.cache.flatten(0, 1)[slots] = torch.nan
    layer.kv_cache = problem.cache
    layer.impl.scale = SCALE
    out = torch.full((problem.tokens, problem.heads * VALUE), torch.nan)
    with set_forward_context({NAME: step}, config, slot_mapping={NAME: slots}):
        layer._attention(torch.tensor(last), problem.q, new[:, :LATENT], new[:, None, LATENT:], out)
    return out


def test_kimi_k3s_own_layer_decodes_as_exactly_as_torch(kimi_k3_layer):
    """Nothing is rotated; a row has 576 elements, as in other models."""
    layer, config = kimi_k3_layer
    problem = Problem([70, 200, 1], 1, heads=HEADS["kimi-k3"])
    out = decode_in_own_layer(layer, config, problem)
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_kimi_k3s_own_layer_reads_the_rows_that_its_step_writes(kimi_k3_layer, monkeypatch, prefix_caching):
    """A request completes a prefix-cache block in the same step in which another request hits that block.

    The layer's kernel right before the call writes the row. A call with early loads may read the cache as it was before
    that kernel, except for each request's own new rows; here it always does.
    """
    layer, config = kimi_k3_layer
    config.cache_config.enable_prefix_caching = prefix_caching
    problem = Problem([BLOCK, BLOCK + 1], 1, heads=HEADS["kimi-k3"])
    if prefix_caching:
        problem.kv[1][:BLOCK] = problem.kv[0]
        problem.block_table[1, 0] = problem.block_table[0, 0]
    before, early = [], []

    def insert(*arguments, **keywords):
        before.append(arguments[4].clone())
        return concat_and_insert(*arguments, **keywords)

    def decode_early(q, cache, block_table, seq_lens, *arguments, early_loads, **keywords):
        early.append(early_loads)
        if early_loads:
            table, caches = block_table.clone(), []
            for request, length in enumerate(seq_lens.tolist()):
                page, row = block_table[request, (length - 1) // BLOCK], (length - 1) % BLOCK
                caches.append(before[-1].clone())
                caches[-1][page, row] = cache[page, row]
                table[request, : -(-length // BLOCK)] += request * len(cache)
            cache, block_table = torch.cat(caches), table
        return mla_decode(q, cache, block_table, seq_lens, *arguments, **keywords)

    monkeypatch.setattr("vllm.models.kimi_k3.nvidia.mla.fused_mla_decode_q_concat_kv_cache_insert", insert)
    monkeypatch.setattr("etap_backend.vllm.impl.mla_decode", decode_early)
    out = decode_in_own_layer(layer, config, problem)
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)
    assert early == [not prefix_caching]


def test_its_fp8_cache_is_refused_when_the_model_is_built(tmp_path, monkeypatch):
    config = kimi_k3_config(tmp_path, "fp8")
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    selector._cached_get_attn_backend.cache_clear()  # it may hold another test's backend
    refusal = "ETAP is not valid for this configuration.*an FP8 KV cache is not supported with this model"
    with set_current_vllm_config(config), pytest.raises(ValueError, match=refusal):
        make_kimi_k3_layer(config)
