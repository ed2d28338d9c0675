"""`ETAP_AUTO`: what vLLM's own selection chooses where no backend is named."""

import logging

import pytest
import torch
from vllm import logger, plugins
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector

from etap_backend.vllm import deepseek_v4, registration
from etap_backend.vllm.backend import ETAPBackend
from etap_backend.vllm.sparse import ETAPSparseBackend
from support import vllm_v4_layer

pytestmark = pytest.mark.usefixtures("one_rank")

SPARSE = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 128, "index_n_heads": 32, "index_head_dim": 128}


@pytest.fixture(autouse=True)
def logged(monkeypatch):
    """The lines that vLLM logs about ETAP_AUTO, in a process that seems to have loaded no plugin."""
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage()) if "ETAP_AUTO" in record.getMessage() else None
    monkeypatch.setattr(CudaPlatformBase, "get_valid_backends", vars(CudaPlatformBase)["get_valid_backends"])
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.delenv("ETAP_AUTO", raising=False)
    logger._print_info_once.cache_clear()
    logging.getLogger("vllm").addHandler(handler)
    yield lines
    logging.getLogger("vllm").removeHandler(handler)
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture
def select(engine_config, monkeypatch):
    """The backend that two layers get with this value; keywords are a layer's, `engine` EngineArgs'."""

    def call(auto, engine=None, **layer):
        if auto is not None:
            monkeypatch.setenv("ETAP_AUTO", auto)
        plugins.load_general_plugins()
        registration.register()  # vLLM may call it again
        selector._cached_get_attn_backend.cache_clear()
        layer = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True} | layer
        with set_current_vllm_config(engine_config(**(engine or {}))):
            (backend,) = {selector.get_attn_backend(**layer, num_heads=heads) for heads in (16, 8)}
        return backend

    return call


@pytest.fixture
def select_v4(tmp_path, monkeypatch):
    """The class of DeepSeek-V4's layers with this value, and vLLM's own; keywords are EngineArgs'."""

    def call(auto, **arguments):
        monkeypatch.setenv("ETAP_AUTO", auto)
        plugins.load_general_plugins()
        config = vllm_v4_layer.configuration(tmp_path, "v4", **({"attention_backend": None} | arguments))
        module = vllm_v4_layer.load_model("v4")
        with set_current_vllm_config(config):
            classes = {module._select_dsv4_attn_cls(config) for _ in range(2)}
        return *classes, module.DeepseekV4FlashMLAAttention

    return call


@pytest.mark.parametrize("layer, engine, backend", [
    ({}, {}, ETAPBackend),
    ({"kv_cache_dtype": "fp8"}, {}, ETAPBackend),
    ({"use_sparse": True}, {"hf_overrides": SPARSE}, ETAPSparseBackend),
], ids=["dense", "dense, fp8", "sparse"])  # fmt: skip
def test_etap_is_the_first_choice_where_it_is_on(select, logged, layer, engine, backend):
    assert not issubclass(select(None, engine, **layer), backend) and not issubclass(
        select("0", engine, **layer), backend
    )
    assert select("1", engine, **layer) is backend
    assert not logged


def test_etap_is_the_first_choice_for_deepseek_v4(select_v4, logged):
    found, vllm_layer = select_v4("1")
    assert issubclass(found, deepseek_v4.ETAPLayer) and issubclass(found, vllm_layer)
    assert select_v4("0") == (vllm_layer, vllm_layer) and not logged


REFUSED = {
    "another MLA": ({"head_size": 320}, "attention of head size 320: head_size not supported; head_dim 320 is not"),
    "no MLA": ({"head_size": 128, "use_mla": False}, "attention of head size 128: head_size not supported; non-MLA"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_vllms_choice_and_one_line_says_why(select, logged, what):
    layer, reason = REFUSED[what]
    vllm_choice = select("0", **layer)
    assert not logged
    assert select("1", **layer) is vllm_choice
    assert select("1", **layer) is vllm_choice
    (line,) = logged
    assert line.startswith(f"ETAP_AUTO=1 has no effect on {reason}")


def test_on_another_gpu_vllm_chooses_and_one_line_says_why(select, logged, monkeypatch):
    monkeypatch.setattr(type(current_platform), "capability", DeviceCapability(8, 0))
    vllm_choice = select("0")
    assert select("1") is vllm_choice
    (line,) = logged
    assert "compute capability 8.0 is not supported" in line


def test_a_refused_deepseek_v4_is_vllms_choice_and_one_line_says_why(select_v4, logged):
    found, vllm_layer = select_v4("1", additional_config={"etap_fp8_math": True})
    assert found is vllm_layer
    (line,) = logged
    assert line.startswith("ETAP_AUTO=1 has no effect on DeepSeek-V4: etap_fp8_math")


@pytest.mark.parametrize("engine", [
    {"attention_backend": "FLASHMLA"},
    {"attention_config": {"backend_per_kind": {"mla_attention": "FLASHMLA"}}},
], ids=["for all layers", "for a kind"])  # fmt: skip
def test_a_named_backend_wins(select, logged, engine):
    assert select("1", engine).get_name() == "FLASHMLA" and not logged


def test_a_named_backend_wins_for_deepseek_v4(select_v4, logged):
    found, vllm_layer = select_v4("1", attention_backend="FLASHMLA_SPARSE")
    assert found is vllm_layer and not logged


def test_a_named_etap_that_is_refused_is_refused_as_without_the_variable(select, logged):
    with pytest.raises(ValueError, match="ETAP is not valid"):
        select("1", {"attention_backend": "ETAP"}, head_size=320)
    assert not logged


@pytest.mark.parametrize("value", [" ", "yes", "2", "01"])
def test_another_value_ends_the_start(monkeypatch, value):
    monkeypatch.setenv("ETAP_AUTO", value)
    with pytest.raises(ValueError, match=f"ETAP_AUTO: wanted 0 or 1, got '{value}'"):
        plugins.load_general_plugins()
