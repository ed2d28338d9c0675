"""configs/vllm through the parser of `vllm serve --config`, and the cache arithmetic in their comments."""

import importlib
import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.nvidia import model as v4_model
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention import selector
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from etap_backend.plan.inputs import Deployment, read_gpu, read_model
from etap_backend.plan.memory import memory_of, v4_caches
from etap_backend.vllm import deepseek_v4

HAS_V41 = importlib.util.find_spec("vllm.models.deepseek_v41") is not None  # since 0.33
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted((CONFIGS / "vllm").glob("*.yaml"))
FILES = [path for path in SHIPPED if HAS_V41 or not path.stem.startswith("deepseek-v4.1")]
V4_FILES = [path for path in FILES if path.stem.startswith("deepseek-v4-")]
V41_FILES = [path for path in FILES if path.stem.startswith("deepseek-v4.1")]
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "deepseek-ai/DeepSeek-V4-Pro": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4.1-Flash": "deepseek-v4.1-flash",
    "zai-org/GLM-5-FP8": "glm-5-fp8",
}
PLANNING = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
"""Where vLLM divides its memory, in 0.33 and in 0.26."""
GPUS = {"96g": "H20-96G", "141g": "H20-141G"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def config_file(request):
    return request.param


@pytest.fixture
def settings(config_file):
    return yaml.safe_load(config_file.read_text())


def cache_bytes_a_token(text):
    """The figure of a comment, and whether its product is right: of elements, or of a row's bytes and an indexer's."""
    form = r"of (\d+) layers x (?:(\d+) x (\d+)|\(([\d,]+) \+ (\d+)\)) = ([\d,]+) bytes"
    layers, *one, product = (int((found or "0").replace(",", "")) for found in re.search(form, text).groups())
    width, size, row, key = one
    assert layers * (width * size + row + key) == product
    return product


def test_there_is_one_for_each_deployment():
    names = {path.stem for path in SHIPPED}
    deployments = {f"deepseek-r1-8xh20-{gpu}{mtp}" for gpu in GPUS for mtp in ("", "-mtp")}
    small = {f"deepseek-r1-8xh20-96g-{kind}" for kind in ("fp8-cache", "dcp8", "dcp2-fp8-cache")}
    sparse = {"deepseek-v3.2-8xh20-96g-fp8-cache", "deepseek-v3.2-8xh20-141g", "glm-5-fp8-8xh20-141g"}
    v4 = {f"deepseek-{name}flash-8xh20-{gpu}" for gpu in GPUS for name in ("v4-", "v4.1-")} | {
        "deepseek-v4-pro-8xh20-141g"
    }
    assert names == {"smoke-1gpu"} | small | deployments | sparse | v4


def selected_for(config, sparse):
    """What each layer of this configuration gets: vLLM asks the backend that was named whether it can."""
    selector._cached_get_attn_backend.cache_clear()
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    with set_current_vllm_config(config):
        layer = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": config.cache_config.cache_dtype}
        return selector.get_attn_backend(**layer, use_mla=True, use_sparse=sparse, num_heads=heads)


@pytest.fixture
def config(config_file, settings, tmp_path, monkeypatch):
    """Parsed as a user does, and made a configuration; only the model's name becomes a folder with its config.json."""
    load_general_plugins()
    monkeypatch.setattr(type(current_platform), "device_count", classmethod(lambda cls: 8))
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


def test_vllms_parser_takes_every_setting(config_file, settings, config):
    assert config.attention_config.backend is AttentionBackendEnum.ETAP
    described = read_model(MODELS[settings["model"]])
    if described.v4:
        shares = described.shares_caches
        module = importlib.import_module("vllm.models.deepseek_v41.nvidia.model") if shares else v4_model
        with set_current_vllm_config(config):
            assert issubclass(module._select_dsv4_attn_cls(config), deepseek_v4.ETAPLayer)
        assert config.cache_config.block_size == (64 if shares else 256)
    else:
        with set_current_vllm_config(config):
            backend = AttentionBackendEnum.ETAP.get_class()
        assert selected_for(config, described.sparse) is backend and backend.is_sparse() == described.sparse
    ranks_of_a_context = config.parallel_config.decode_context_parallel_size
    assert ranks_of_a_context == settings.get("decode-context-parallel-size", 1)
    assert ranks_of_a_context == int((re.search(r"-dcp(\d)", config_file.stem) or (0, 1))[1])
    assert config.parallel_config.tensor_parallel_size == settings.get("tensor-parallel-size", 1)
    assert config.model_config.max_model_len == settings["max-model-len"]
    assert config.scheduler_config.max_num_seqs == settings["max-num-seqs"]
    assert config.cache_config.gpu_memory_utilization == settings["gpu-memory-utilization"]
    assert config.cache_config.cache_dtype == settings.get("kv-cache-dtype", "auto")
    assert ("kv-cache-dtype" in settings) == (config_file.stem.endswith("-fp8-cache") or described.v4)
    assert config.additional_config == settings.get("additional-config", {})
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    assert drafts == settings.get("speculative-config", {}).get("num_speculative_tokens", 0)
    assert (drafts > 0) == config_file.stem.endswith("-mtp")


@pytest.mark.parametrize(
    "config_file", sorted({*FILES} - {*V4_FILES, *V41_FILES}), ids=lambda path: path.stem, indirect=True
)
def test_comments_count_the_cache_as_the_plan_does(config_file, settings):
    text = config_file.read_text()
    a_token = cache_bytes_a_token(text)
    tokens = int(re.search(r"KV cache: ([\d,]+) tokens", text)[1].replace(",", ""))
    left = float(re.search(r"([\d.]+) GB  KV cache", text)[1])
    assert tokens == pytest.approx(left * 1e9 / a_token, rel=0.02)
    shared = tokens * settings.get("decode-context-parallel-size", 1)
    assert shared == tokens or f"{shared:,} of requests" in text
    assert shared >= 2 * settings["max-model-len"], "two requests of the greatest length"
    gpu = next((gpu for name, gpu in GPUS.items() if name in config_file.stem), "H100")
    ranks = settings.get("tensor-parallel-size", 1)
    s_q = 1 + settings.get("speculative-config", {}).get("num_speculative_tokens", 0)
    cache = settings.get("kv-cache-dtype", "bfloat16")
    on = Deployment(gpus=ranks, tp=ranks, s_q=s_q, utilization=settings["gpu-memory-utilization"], cache=cache)
    plan = memory_of(read_model(MODELS[settings["model"]]), read_gpu(gpu), on)
    assert (tokens, a_token) == (plan.tokens, plan.cache_per_token)


def v4_specs(config, model):
    """What vLLM's own layers of DeepSeek-V4 ask of its cache, by name."""
    cache = config.cache_config
    cache.cache_dtype = "fp8_ds_mla"  # as an attention layer sets it
    layer = {"head_dim": 512, "kv_cache_dtype": cache.cache_dtype, "kv_cache_torch_dtype": torch.uint8}
    specs = {}
    with set_current_vllm_config(config):
        for number, ratio in enumerate(model.compress_ratios[: model.num_hidden_layers]):
            sums = (1 + (ratio == 4)) * 2 * 512
            caches = {"window": DeepseekV4SWACache(512, 128, torch.uint8, f"{number}.window", cache)}
            if ratio:
                caches["sums"] = CompressorStateCache(sums, torch.float32, ratio, f"{number}.sums")
                attention = SimpleNamespace(compress_ratio=ratio, **layer)
                specs[f"{number}.entries"] = v4_model.DeepseekV4FlashMLAAttention.get_kv_cache_spec(attention, config)
            if ratio == 4:
                caches["keys"] = DeepseekV4IndexerCache(132, torch.uint8, f"{number}.keys", cache, ratio)
                caches["key sums"] = CompressorStateCache(512, torch.float32, ratio, f"{number}.key sums")
            specs |= {f"{number}.{name}": one.get_kv_cache_spec(config) for name, one in caches.items()}
    return specs


@pytest.mark.parametrize("config_file", [*V4_FILES, *V41_FILES], ids=lambda path: path.stem, indirect=True)
def test_comments_count_deepseek_v4s_blocks_as_the_plan_does(config_file, settings):
    text = " ".join(config_file.read_text().replace("#", " ").split())
    form = r"(\d+) x \(([\d,]+) \+ ([\d,]+)\) \+ (?:(\d+) x )?([\d,]+)(?: \+ ([\d,]+))? = ([\d,]+) bytes"
    found = (int((one or "0").replace(",", "")) for one in re.search(form, text).groups())
    layers, entry, key, others, other_entry, other_key, block = found
    assert layers * (entry + key) + (others or 1) * other_entry + other_key == block
    gpu = next(gpu for name, gpu in GPUS.items() if name in config_file.stem)
    requests, fraction = settings["max-num-seqs"], settings["gpu-memory-utilization"]
    model, on = read_model(MODELS[settings["model"]]), Deployment(batch=requests, utilization=fraction, cache="fp8")
    plan, caches = memory_of(model, read_gpu(gpu), on), v4_caches(model, on)
    prompts = caches.blocks_of_prompts * block
    assert caches.block_bytes == block and settings["max-num-batched-tokens"] == 8192, "as the plan has them"
    said = f"{plan.tokens:,} tokens, beside {plan.state / 1e9:.1f} GB for the windows of {requests} requests and"
    assert f"{(plan.left + prompts) / 1e9:.1f} GB KV cache: {said} {prompts / 1e9:.1f} GB for prompts in flight" in text
    assert f"{requests} requests have {plan.tokens // requests:,} tokens each when the cache is full" in text
    assert plan.tokens >= 2 * settings["max-model-len"], "two requests of the greatest length"


def v41_specs(config, model):
    """What vLLM's own layers of DeepSeek-V4.1 ask of its cache, by name."""
    attention, compressor, made = (
        importlib.import_module(f"vllm.models.deepseek_v41.{name}")
        for name in ("attention", "compressor", "nvidia.flashmla")
    )
    cache = config.cache_config
    cache.cache_dtype = "fp8_ds_mla"
    layer = {"head_dim": 512, "kv_cache_dtype": cache.cache_dtype, "kv_cache_torch_dtype": torch.uint8}
    layer |= {"is_kv_source": True, "kv_page_alignment": 576, "compressed_bytes_per_token": 584}
    window = {"block_size": 32, "packed_bytes_per_token": 584, "packed_page_alignment": 576}
    specs = {}
    with set_current_vllm_config(config):
        for number in range(model.num_hidden_layers):
            caches = {"window": DeepseekV4SWACache(512, 128, torch.uint8, f"{number}.window", cache, **window)}
            if number in model.kv_source_layer_ids:
                ratio = model.compress_ratios[number]
                keys = attention.DeepseekV4IndexerCache(132, torch.uint8, f"{number}.keys", cache, ratio)
                caches |= {"keys": keys}
                if ratio > 1:
                    caches["sums"] = compressor.CompressorStateCache(2 * 512, torch.float32, f"{number}.sums")
                entries = SimpleNamespace(compress_ratio=ratio, **layer)
                layers = made.DeepseekV4FlashMLAAttention
                specs[f"{number}.entries"] = layers.get_kv_cache_spec(entries, config)
            specs |= {f"{number}.{name}": one.get_kv_cache_spec(config) for name, one in caches.items()}
    return specs


@pytest.mark.parametrize("config_file", [*V4_FILES, *V41_FILES], ids=lambda path: path.stem, indirect=True)
def test_the_plan_counts_deepseek_v4s_caches_as_vllm_does(settings, config):
    """Bytes of a block and blocks of a request, in vLLM's own sums. 0.26 keeps a place for each page of each size, of
    which its groups leave some empty."""
    planning = importlib.import_module(next(name for name in PLANNING if importlib.util.find_spec(name)))
    described = read_model(MODELS[settings["model"]])
    config.cache_config.kv_cache_layout = "BLHNC"  # as vLLM 0.33 resolves it for what these layers ask; 0.26 has none
    specs, kinds = (v41_specs, 9) if described.shares_caches else (v4_specs, 5)
    groups = planning.get_kv_cache_groups(config, specs(config, described))
    caches = v4_caches(described, Deployment(cache="fp8"))
    assert len(groups) == kinds
    available = 10**12
    blocks = planning.get_kv_cache_config_from_groups(config, groups, available).num_blocks
    wasted = 0.04 if planning.__name__ == PLANNING[-1] else 1e-6
    assert caches.block_bytes <= available / blocks <= caches.block_bytes * (1 + wasted)
    most = sum(group.kv_cache_spec.max_memory_usage_pages(config) for group in groups)
    assert most == settings["max-model-len"] // caches.block_tokens + caches.blocks_of_prompts
