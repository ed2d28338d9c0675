"""configs/vllm through the parser of `vllm serve --config`, and the backend that each configuration's model gets."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from etap_backend.vllm import deepseek_v4
from etap_backend.vllm.backend import ETAPBackend
from etap_backend.vllm.sparse import ETAPSparseBackend
from support import vllm_v4_layer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "deepseek-ai/DeepSeek-V4-Pro": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4.1-Flash": "deepseek-v4.1-flash",
    "zai-org/GLM-5-FP8": "glm-5-fp8",
}
SPARSE = ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5-FP8")
RANKS = 8


@pytest.fixture(params=sorted((CONFIGS / "vllm").glob("*.yaml")), ids=lambda path: path.stem)
def config_file(request):
    return request.param


@pytest.fixture
def settings(config_file):
    return yaml.safe_load(config_file.read_text())


@pytest.fixture
def config(config_file, settings, tmp_path, monkeypatch):
    """vLLM's configuration from a file, parsed as for a user; the model is a folder with its config.json."""
    load_general_plugins()
    monkeypatch.setattr(type(current_platform), "device_count", classmethod(lambda cls: RANKS))
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(CONFIGS / f"models/{MODELS[settings['model']]}.json", folder / "config.json")
    local = tmp_path / config_file.name
    local.write_text(config_file.read_text().replace(f"model: {settings['model']}", f"model: {folder}"))
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    extra = ["--skip-tokenizer-init", "--load-format", "dummy"]
    arguments = parser.parse_args(["serve", "--config", str(local), *extra])
    made = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    assert made.model_config.model == str(folder)
    return made


def selected_backend(config, sparse):
    selector._cached_get_attn_backend.cache_clear()
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    layer = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": config.cache_config.cache_dtype}
    return selector.get_attn_backend(**layer, use_mla=True, use_sparse=sparse, num_heads=heads)


def test_vllms_parser_takes_every_setting(settings, config):
    assert config.attention_config.backend is AttentionBackendEnum.ETAP
    assert config.parallel_config.decode_context_parallel_size == settings.get("decode-context-parallel-size", 1)
    assert config.parallel_config.tensor_parallel_size == settings.get("tensor-parallel-size", 1)
    assert config.model_config.max_model_len == settings["max-model-len"]
    assert config.scheduler_config.max_num_seqs == settings["max-num-seqs"]
    assert config.cache_config.gpu_memory_utilization == settings["gpu-memory-utilization"]
    assert config.cache_config.cache_dtype == settings.get("kv-cache-dtype", "auto")
    assert config.additional_config == settings.get("additional-config", {})
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    assert drafts == settings.get("speculative-config", {}).get("num_speculative_tokens", 0)


def test_every_configurations_model_decodes_with_etap(settings, config):
    name = settings["model"]
    with set_current_vllm_config(config):
        if "DeepSeek-V4" in name:
            model = "v41" if "V4.1" in name else "v4"
            select = vllm_v4_layer.load_model(model)._select_dsv4_attn_cls
            assert issubclass(select(config), deepseek_v4.ETAPLayer)
            assert config.cache_config.block_size == vllm_v4_layer.BLOCK[model]
        else:
            sparse = name in SPARSE
            assert selected_backend(config, sparse) is (ETAPSparseBackend if sparse else ETAPBackend)
