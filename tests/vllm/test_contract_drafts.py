"""Which backend a draft's layers get when the user names ETAP, by vLLM's own code up to the loading of the draft.

vLLM's first model runner leaves the target's backend out of the draft's configuration, its second one leaves it in.
"""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

load_general_plugins()

DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 256, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
DENSE_HEADS = {"head_size": 128, "use_mla": False, "num_heads": 8}
MTP = {"head_size": 576, "use_mla": True, "num_heads": 16}

NAMED = {"attention_backend": "ETAP"}
BY_KIND = {"attention_config": {"backend_per_kind": {"mla_attention": "ETAP"}}}


class Loading(Exception):
    """A draft's layers would be made in this configuration."""

    def __init__(self, vllm_config, **_):
        self.config = vllm_config


def loading(**arguments):
    raise Loading(**arguments)


def module_of_second_runner(name):
    return importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{name}")


def first_runner(config):
    proposer = SimpleNamespace(speculative_config=config.speculative_config, vllm_config=config)
    raise Loading(SpecDecodeBaseProposer._create_draft_vllm_config(proposer))


def second_runner(config):
    module_of_second_runner("eagle.utils").load_eagle_model(None, config)


def second_runner_draft_model(config):
    draft = config.speculative_config
    speculator = SimpleNamespace(
        speculative_config=draft, vllm_config=config, draft_model_config=draft.draft_model_config
    )
    loads = module_of_second_runner("standalone_ar.speculator").StandaloneARSpeculator.load_draft_model
    loads(speculator, None, set())


@pytest.fixture
def select(one_rank, engine_config, model_directory, tmp_path, monkeypatch):
    """The backend's name for a draft's layer, or vLLM's refusal; keywords are the engine's."""
    target = json.loads((model_directory / "config.json").read_text())
    of_target = {"hidden_size": target["hidden_size"], "vocab_size": target["vocab_size"]}
    (tmp_path / "config.json").write_text(json.dumps(DRAFT | of_target | {"draft_vocab_size": target["vocab_size"]}))
    for name in "eagle.utils", "standalone_ar.speculator":
        monkeypatch.setattr(module_of_second_runner(name), "get_model", loading)

    def call(load, layer, speculative=None, **arguments):
        draft = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
        config = engine_config(speculative_config=draft | (speculative or {}), **arguments)
        with pytest.raises(Loading) as made:
            load(config)
        selector._cached_get_attn_backend.cache_clear()
        with set_current_vllm_config(made.value.config):
            return selector.get_attn_backend(dtype=torch.bfloat16, kv_cache_dtype="auto", **layer).get_name()

    yield call
    selector._cached_get_attn_backend.cache_clear()


RUNNERS = [first_runner, second_runner, second_runner_draft_model]


@pytest.mark.parametrize("load", RUNNERS)
def test_named_for_mla_alone_etap_is_mtps_backend_and_no_other_drafts(select, load):
    assert select(load, MTP, **BY_KIND) == "ETAP"
    assert select(load, DENSE_HEADS, **BY_KIND) == "FLASH_ATTN"


@pytest.mark.parametrize("load", RUNNERS[1:])
def test_the_second_runner_wants_etap_for_a_draft_without_mla(select, load):
    assert select(load, MTP, **NAMED) == "ETAP"
    with pytest.raises(ValueError, match="ETAP is not valid for this configuration.*non-MLA not supported"):
        select(load, DENSE_HEADS, **NAMED)


def test_the_first_runner_lets_vllm_choose_for_a_draft(select):
    assert select(first_runner, DENSE_HEADS, **NAMED) == "FLASH_ATTN"
    assert select(first_runner, MTP, **NAMED) != "ETAP"
    assert select(first_runner, MTP, {"attention_backend": "ETAP"}, **NAMED) == "ETAP"


@pytest.mark.parametrize(
    "load, read", [(first_runner, True), (second_runner, True), (second_runner_draft_model, False)]
)
def test_which_runner_reads_the_backend_in_the_speculative_configuration(select, load, read):
    speculative = {"attention_backend": "FLASH_ATTN"}
    if read:
        assert select(load, DENSE_HEADS, speculative, **NAMED) == "FLASH_ATTN"
    else:
        with pytest.raises(ValueError, match="ETAP is not valid"):
            select(load, DENSE_HEADS, speculative, **NAMED)
