"""DeepSeek-V4 and V4.1 in a real vLLM: whose layers decode, what is refused, and steps of the layers on CPU tensors."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins

from bench.qualify import v4_server
from etap_backend.vllm import deepseek_v4, log, v4_selection
from support import vllm_v4_layer
from support.vllm_v4_layer import RATIOS, STEPS

load_general_plugins()

TESTS = Path(__file__).resolve().parents[1]
STEPS_SECONDS = 1800
WITHIN_BFLOAT16 = 2**-7
MODELS = ["v4"] + (["v41"] if importlib.util.find_spec("vllm.models.deepseek_v41") else [])
in_both = pytest.mark.parametrize("model", MODELS)


def module_of(model: str):
    return importlib.import_module(f"vllm.models.deepseek_{model}.nvidia.model")


@pytest.fixture
def select(tmp_path):
    """Asks a model's own function for the class of its layers; keywords are EngineArgs'."""

    def call(model, change=lambda config: None, **arguments):
        config = vllm_v4_layer.configuration(tmp_path, model, **arguments)
        change(config)
        with set_current_vllm_config(config):
            return module_of(model)._select_dsv4_attn_cls(config)

    return call


def test_no_other_model_of_this_vllm_chooses_such_layers():
    """One that did would decode with its own, whatever the option says."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    choosing = [
        path for path in root.glob("models/*/nvidia/*.py") if f"def {v4_selection.FUNCTION}(" in path.read_text()
    ]
    assert {".".join(path.relative_to(root.parent).with_suffix("").parts) for path in choosing} == {
        name for name in v4_selection.MODULES if importlib.util.find_spec(name.rsplit(".", 2)[0])
    }


@in_both
def test_the_option_gives_a_layer_derived_from_vllms_own(select, model):
    theirs = module_of(model).DeepseekV4FlashMLAAttention
    ours = select(model)
    assert issubclass(ours, deepseek_v4.ETAPLayer) and issubclass(ours, theirs)
    assert ours.backend_cls is theirs.backend_cls  # by its name vLLM chooses what it warms up
    assert ours is select(model)


@in_both
def test_the_program_that_compares_answers_makes_a_model_that_vllm_knows(tmp_path, model):
    v41 = model == "v41"
    folder = v4_server.write_model(tmp_path / "model", v41=v41)
    asked = {"attention_backend": "ETAP", "kv_cache_dtype": "fp8", "skip_tokenizer_init": True}
    asked |= v4_server.V41_ARGUMENTS if v41 else v4_server.V4_ARGUMENTS
    config = EngineArgs(model=str(folder), load_format="dummy", **asked).create_engine_config()
    with set_current_vllm_config(config):
        assert issubclass(module_of(model)._select_dsv4_attn_cls(config), deepseek_v4.ETAPLayer)
    assert config.model_config.hf_config.expert_dtype == "fp8"
    assert not v41 or config.model_config.multimodal_config.get_limit_per_prompt("image") == 0


@in_both
@pytest.mark.parametrize("backend", [None, "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_DSV4"])
def test_without_the_option_vllm_chooses(select, model, backend):
    theirs = module_of(model)._select_dsv4_attn_cls.__wrapped__
    found = []
    chosen = select(model, lambda config: found.append(theirs(config)), attention_backend=backend)
    assert [chosen] == found and not issubclass(chosen, deepseek_v4.ETAPLayer)


@in_both
@pytest.mark.parametrize("heads, padded", [(1, 8), (8, 8), (16, 16), (24, 32), (64, 64), (128, 128)])
def test_heads_are_padded_to_what_vllms_operator_writes_only(select, model, heads, padded):
    assert select(model).get_padded_num_q_heads(heads) == padded


def test_more_heads_than_the_operator_writes_are_refused(select):
    with pytest.raises(ValueError, match="num_heads: wanted at most 128 on a rank, got 256"):
        select("v4").get_padded_num_q_heads(256)


def set_pcp(config):
    object.__setattr__(config.parallel_config, "prefill_context_parallel_size", 2)


def set_dcp(config):
    object.__setattr__(config.parallel_config, "decode_context_parallel_size", 2)


def set_cache(config):
    config.cache_config.cache_dtype = "bfloat16"


def set_fp8_math(config):
    config.additional_config = {"etap_fp8_math": True}


def set_hisparse(config):
    config.attention_config.hisparse_config = object()


@in_both
@pytest.mark.parametrize("change, reason", [
    (set_hisparse, r"a KV cache in host memory \(HiSparse\) is not supported"),
    (set_pcp, "prefill_context_parallel_size 2 is not supported: wanted 1"),
    (set_dcp, "decode_context_parallel_size 2 is not supported: wanted 1"),
    (set_cache, "kv_cache_dtype bfloat16 is not supported: wanted auto, fp8 or fp8_ds_mla"),
    (set_fp8_math, "etap_fp8_math multiplies FP8 caches of dense attention"),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(select, model, change, reason):
    with pytest.raises(NotImplementedError, match=f"ETAP: DeepSeek-V4: {reason}.*vLLM serves it with its own kernels"):
        select(model, change)


@in_both
def test_batch_invariance_is_refused(select, model, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(NotImplementedError, match="batch invariance is not supported"):
        select(model)


@in_both
def test_other_gpus_are_refused(select, model, monkeypatch):
    monkeypatch.setattr(type(current_platform), "capability", DeviceCapability(10, 0))
    with pytest.raises(NotImplementedError, match=r"compute capability 10\.0 is not supported"):
        select(model)


@in_both
def test_a_layer_that_calls_no_prefill_of_flash_mla_is_refused(select, model, monkeypatch):
    theirs = module_of(model).DeepseekV4FlashMLAAttention
    monkeypatch.setattr(theirs, "_forward_prefill", lambda self, q: None)
    with pytest.raises(NotImplementedError, match="lacks what ETAP uses: .*_forward_prefill calls no flash_mla_sparse"):
        select(model)


def test_a_model_without_the_function_is_told_of_and_left_alone(caplog):
    module = SimpleNamespace(__name__="vllm.models.deepseek_v4.nvidia.model")
    with caplog.at_level("WARNING", logger=log.logger.name):
        log.logger.addHandler(caplog.handler)
        v4_selection.extend(module)
        log.logger.removeHandler(caplog.handler)
    assert "lacks what ETAP uses: vllm.models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls" in caplog.text
    assert vars(module) == {"__name__": "vllm.models.deepseek_v4.nvidia.model"}


def test_registering_imports_no_model():
    """In a process of its own: here the models are imported."""
    program = (
        "import sys; from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "assert not any(name.startswith('vllm.models.deepseek_v4') for name in sys.modules)\n"
        "import vllm.models.deepseek_v4.nvidia.model as model; print(model._select_dsv4_attn_cls.etap)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=STEPS_SECONDS)
    assert said.stdout.splitlines()[-1:] == ["True"], said.stderr[-3000:]


@pytest.fixture(scope="module", params=MODELS)
def steps(request, tmp_path_factory):
    """Outputs of a model's steps by ratio of compression and step, and the log; computed in a process of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, TESTS / "support/vllm_v4_layer.py", request.param, folder]
    ran = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=STEPS_SECONDS
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
    return request.param, torch.load(folder / "steps"), ran.stdout + ran.stderr


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("step", STEPS)
def test_steps_are_exact_within_bfloat16(steps, layer, step):
    model, results, _ = steps
    found = results[RATIOS[model][layer], step]
    exact = found["exact"]
    error = (found["out"].double() - exact).pow(2).mean((1, 2)).sqrt()  # of each token
    size = exact.pow(2).mean((1, 2)).sqrt()
    assert size.max() > 0.1 and bool((error <= WITHIN_BFLOAT16 * size).all()), (error, size)
    assert bool((found["behind"] == 7).all()), "rows that the metadata does not tell of were written"


@pytest.mark.parametrize("layer", range(3))
def test_a_step_without_metadata_gives_zeros(steps, layer):
    model, results, _ = steps
    assert not results[RATIOS[model][layer], "measured"]["out"].any()


def test_a_draft_without_a_backend_of_its_own_follows_its_target(steps):
    assert steps[1]["draft"]


@in_both
def test_layers_of_drafts_are_made_as_the_targets(model):
    package = f"vllm.models.deepseek_{model}.nvidia"
    drafts = [name for name in ("mtp", "dspark") if importlib.util.find_spec(f"{package}.{name}")]
    for name in drafts:
        draft = importlib.import_module(f"{package}.{name}")
        assert draft.DeepseekV4DecoderLayer is module_of(model).DeepseekV4DecoderLayer
    assert "dspark" in drafts


def test_the_log_says_once_that_etap_decodes(steps):
    _, _, log = steps
    assert log.count("ETAP decodes: DeepSeek-V4's sparse attention, 8 query heads, KV cache fp8_ds_mla") == 1
