"""DeepSeek-V4 and V4.1 in a real vLLM: selection of the layer, refusals, and steps of the layers on CPU tensors."""

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins

from etap_backend.vllm import deepseek_v4, log, v4_selection
from support import vllm_v4_layer
from support.vllm_v4_layer import RATIOS, STEPS, load_model

load_general_plugins()

WITHIN_BFLOAT16 = 2**-7
in_both = pytest.mark.parametrize("model", RATIOS)


@pytest.fixture
def select(tmp_path):
    """Asks a model's own function for the class of its layers; keywords are EngineArgs'."""

    def call(model, change=lambda config: None, **arguments):
        config = vllm_v4_layer.configuration(tmp_path, model, **arguments)
        change(config)
        with set_current_vllm_config(config):
            return load_model(model)._select_dsv4_attn_cls(config)

    return call


def test_no_other_model_of_this_vllm_chooses_such_layers():
    """Such a model would silently decode with its own."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    choosing = [
        path for path in root.glob("models/*/nvidia/*.py") if f"def {v4_selection.FUNCTION}(" in path.read_text()
    ]
    names = {".".join(path.relative_to(root.parent).parts[:-2]) for path in choosing}
    assert names == set(v4_selection.PACKAGES)


@in_both
def test_the_option_gives_a_layer_derived_from_vllms_own(select, model):
    vllm_layer = load_model(model).DeepseekV4FlashMLAAttention
    layer = select(model)
    assert issubclass(layer, deepseek_v4.ETAPLayer) and issubclass(layer, vllm_layer)
    assert layer.backend_cls is vllm_layer.backend_cls  # by its name vLLM chooses what it warms up
    assert layer is select(model)


@in_both
@pytest.mark.parametrize("backend", [None, "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_DSV4"])
def test_without_the_option_vllm_chooses(select, model, backend):
    vllm_select = load_model(model)._select_dsv4_attn_cls.__wrapped__
    found = []
    chosen = select(model, lambda config: found.append(vllm_select(config)), attention_backend=backend)
    assert [chosen] == found and not issubclass(chosen, deepseek_v4.ETAPLayer)


@in_both
@pytest.mark.parametrize("heads, padded", [(1, 8), (8, 8), (16, 16), (24, 32), (64, 64), (128, 128)])
def test_heads_are_padded_to_a_number_that_vllms_operator_writes(select, model, heads, padded):
    assert select(model).get_padded_num_q_heads(heads) == padded


def test_more_heads_than_the_operator_writes_are_refused(select):
    with pytest.raises(ValueError, match="num_heads: wanted at most 128 on a rank, got 256"):
        select("v4").get_padded_num_q_heads(256)


def setting(part, name, value):
    """Changes a field of a part of vLLM's configuration."""
    return lambda config: object.__setattr__(getattr(config, part) if part else config, name, value)


@in_both
@pytest.mark.parametrize("change, reason", [
    (setting("attention_config", "hisparse_config", object()), "HiSparse"),
    (setting("parallel_config", "prefill_context_parallel_size", 2), "prefill_context_parallel_size 2"),
    (setting("parallel_config", "decode_context_parallel_size", 2), "decode_context_parallel_size 2"),
    (setting("cache_config", "cache_dtype", "bfloat16"), "kv_cache_dtype bfloat16"),
    (setting(None, "additional_config", {"etap_fp8_math": True}), "etap_fp8_math"),
], ids=["HiSparse", "prefill parallelism", "decode parallelism", "cache", "FP8 math"])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(select, model, change, reason):
    with pytest.raises(
        NotImplementedError, match=f"ETAP: DeepSeek-V4: .*{reason}.*vLLM serves it with its own kernels"
    ):
        select(model, change)


@in_both
def test_batch_invariance_and_other_gpus_are_refused(select, model, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(NotImplementedError, match="batch invariance"):
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        select(model)
    monkeypatch.setattr(type(current_platform), "capability", DeviceCapability(10, 0))
    with pytest.raises(NotImplementedError, match=r"compute capability 10\.0"):
        select(model)


@in_both
def test_a_layer_that_calls_no_prefill_of_flash_mla_is_refused(select, model, monkeypatch):
    vllm_layer = load_model(model).DeepseekV4FlashMLAAttention
    monkeypatch.setattr(vllm_layer, "_forward_prefill", lambda self, q: None)
    with pytest.raises(NotImplementedError, match="lacks what ETAP uses: .*_forward_prefill calls no flash_mla_sparse"):
        select(model)


def test_a_module_without_the_function_is_left_alone_with_a_warning(caplog):
    module = SimpleNamespace(__name__="vllm.models.deepseek_v4.nvidia.model")
    with caplog.at_level("WARNING", logger=log.logger.name):
        log.logger.addHandler(caplog.handler)
        v4_selection.extend(module)
        log.logger.removeHandler(caplog.handler)
    assert "lacks what ETAP uses: vllm.models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls" in caplog.text
    assert vars(module) == {"__name__": "vllm.models.deepseek_v4.nvidia.model"}


@pytest.fixture(scope="module", params=RATIOS)
def steps(request, in_forks, tmp_path_factory):
    """Outputs of a model's steps by compression ratio and step, and the log; computed in a process of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    (log,) = in_forks(f"from support import vllm_v4_layer\nvllm_v4_layer.main({request.param!r}, {str(folder)!r})")
    return request.param, torch.load(folder / "steps"), "".join(log)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("step", STEPS)
def test_steps_are_exact_within_bfloat16(steps, layer, step):
    model, results, _ = steps
    found = results[RATIOS[model][layer], step]
    exact = found["exact"]
    error = (found["out"].double() - exact).pow(2).mean((1, 2)).sqrt()  # of each token
    size = exact.pow(2).mean((1, 2)).sqrt()
    assert size.max() > 0.1 and bool((error <= WITHIN_BFLOAT16 * size).all()), (error, size)
    assert bool((found["behind"] == 7).all()), "rows that the metadata does not describe were written"


@pytest.mark.parametrize("layer", range(3))
def test_a_step_without_metadata_gives_zeros_and_counts_a_prompts_workspace(steps, layer):
    model, results, _ = steps
    measured = results[RATIOS[model][layer], "measured"]
    assert not measured["out"].any() and measured["prompts"]


def test_a_draft_without_a_backend_of_its_own_follows_its_target(steps):
    assert steps[1]["draft"]


@pytest.mark.parametrize("model, draft", [("v4", "mtp"), ("v4", "dspark"), ("v41", "dspark")])
def test_layers_of_drafts_are_made_as_the_targets(model, draft):
    layer = importlib.import_module(f"vllm.models.deepseek_{model}.nvidia.{draft}").DeepseekV4DecoderLayer
    assert layer is load_model(model).DeepseekV4DecoderLayer


def test_flash_mla_serves_the_prefill_of_other_layers(monkeypatch):
    """One module may hold layers of both: a draft's backend may be named apart from its target's."""
    module = SimpleNamespace(flash_mla_sparse_fwd=lambda **_: "FlashMLA")
    deepseek_v4._dispatch_prefill(module)

    class VLLMLayer:
        def _forward_prefill(self, **arguments):
            return found.append(module.flash_mla_sparse_fwd(**arguments))

    found = []
    monkeypatch.setattr(deepseek_v4, "_attend_to_gathered", lambda **_: "ETAP")
    layer = object.__new__(deepseek_v4.derived(VLLMLayer))
    VLLMLayer()._forward_prefill()
    layer._forward_prefill()
    VLLMLayer()._forward_prefill()
    assert found == ["FlashMLA", "ETAP", "FlashMLA"]


def test_the_log_says_once_that_etap_decodes_and_who_selects(steps):
    _, _, log = steps
    assert log.count("Top-k of the indexer: vLLM, index_topk 128") == 1
    assert log.count("ETAP decodes: DeepSeek-V4's sparse attention, 8 query heads, KV cache fp8_ds_mla") == 1
