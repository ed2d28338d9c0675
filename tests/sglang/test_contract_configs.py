"""configs/sglang through SGLang's own parser of `--config`, and the cache arithmetic in their comments."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from sglang.srt.plugins import load_plugins

from etap_backend.plan.inputs import Deployment, read_gpu, read_model
from etap_backend.plan.memory import PAGE_TOKENS, RESERVE_BYTES, memory_of, v4_caches
from etap_backend.plan.v4_caches import SWA_FULL_TOKENS_RATIO

load_plugins()

from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

HAS_V41 = importlib.util.find_spec("sglang.srt.configs.deepseek_v41") is not None  # since 0.5.23
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted((CONFIGS / "sglang").glob("*.yaml"))
FILES = [path for path in SHIPPED if HAS_V41 or not path.stem.startswith("deepseek-v4.1")]
V4_FILES = [path for path in FILES if path.stem.startswith("deepseek-v4")]
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "deepseek-ai/DeepSeek-V4-Pro": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4.1-Flash": "deepseek-v4.1-flash",
    "zai-org/GLM-5-FP8": "glm-5-fp8",
}
GPUS = {"96g": "H20-96G", "141g": "H20-141G"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def config_file(request):
    return request.param


@pytest.fixture
def settings(config_file):
    return yaml.safe_load(config_file.read_text())


def test_there_is_one_for_each_deployment():
    names = {path.stem for path in SHIPPED}
    deployments = {f"deepseek-r1-8xh20-{gpu}{mtp}" for gpu in GPUS for mtp in ("", "-mtp")}
    small = {f"deepseek-r1-8xh20-96g-{kind}" for kind in ("fp8-cache", "dcp8", "dcp2-fp8-cache")}
    sparse = {"deepseek-v3.2-8xh20-96g-fp8-cache", "deepseek-v3.2-8xh20-141g", "glm-5-fp8-8xh20-141g"}
    v4 = {f"deepseek-{name}flash-8xh20-{gpu}" for gpu in GPUS for name in ("v4-", "v4.1-")} | {
        "deepseek-v4-pro-8xh20-141g"
    }
    assert names == {"smoke-1gpu"} | small | deployments | sparse | v4


def test_sglangs_parser_takes_every_setting(config_file, settings, tmp_path, monkeypatch):
    """Parsed as a user does, and resolved; only the model's name becomes a folder with its config.json."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(CONFIGS / f"models/{MODELS[settings['model-path']]}.json", folder / "config.json")
    local = tmp_path / config_file.name
    local.write_text(config_file.read_text().replace(settings["model-path"], str(folder)))
    flags = ["--config", str(local), "--skip-tokenizer-init", "--load-format", "dummy"]
    monkeypatch.setattr(sys, "argv", ["launch_server", *flags])
    arguments = prepare_server_args(flags)
    if hasattr(arguments, "resolve_once"):
        from sglang.srt.arg_groups.overrides import resolved_view

        arguments.resolve_once()
        arguments = resolved_view(arguments)
    if v4 := config_file in V4_FILES:  # SGLang renames it, and ETAP keeps the wish
        assert settings.pop("attention-backend") == arguments.dsa_decode_backend == "etap"
        assert arguments.attention_backend == "dsv4" and arguments.page_size == 256
        bounded = "v4.1" in config_file.stem  # by the requests that may run
        assert arguments.swa_full_tokens_ratio == (None if bounded else SWA_FULL_TOKENS_RATIO)
    else:
        assert arguments.attention_backend in ("etap", "etap_fp8_math") and arguments.page_size == PAGE_TOKENS
    for name, wanted in settings.items():
        if name != "model-path":
            assert getattr(arguments, name.replace("-", "_")) == wanted, name
    assert ("kv-cache-dtype" in settings) == (config_file.stem.endswith("-fp8-cache") or v4)
    assert settings.get("dcp-size", 1) == int((re.search(r"-dcp(\d)", config_file.stem) or (0, 1))[1])
    assert ("speculative-algorithm" in settings) == config_file.stem.endswith("-mtp")


@pytest.mark.parametrize("config_file", sorted(set(FILES) - set(V4_FILES)), ids=lambda path: path.stem, indirect=True)
def test_comments_count_the_cache_as_sglang_does(config_file, settings):
    """The fraction is of the whole memory, and the cache is what the weights leave of it."""
    text = config_file.read_text()
    form = r"of (\d+) layers x (?:(\d+) x (\d+)|\(([\d,]+) \+ (\d+)\)) = ([\d,]+) bytes"
    layers, *one, a_token = (int((found or "0").replace(",", "")) for found in re.search(form, text).groups())
    width, size, row, key = one
    assert layers * (width * size + row + key) == a_token
    gpu = next((gpu for name, gpu in GPUS.items() if name in config_file.stem), "H100")
    ranks, fraction = settings.get("tp-size", 1), settings["mem-fraction-static"]
    s_q, cache = settings.get("speculative-num-draft-tokens", 1), "fp8" if "kv-cache-dtype" in settings else "bfloat16"
    on = Deployment(gpus=ranks, tp=ranks, s_q=s_q, utilization=fraction, cache=cache)
    plan = memory_of(read_model(MODELS[settings["model-path"]]), read_gpu(gpu), on)
    tokens = int((plan.usable - plan.weights) / (a_token * PAGE_TOKENS)) * PAGE_TOKENS
    assert a_token == plan.cache_per_token
    assert f"KV cache: {tokens:,} tokens" in text
    shared = tokens * settings.get("dcp-size", 1)
    assert shared == tokens or f"{shared:,} of requests" in text
    assert shared >= 2 * settings["context-length"], "two requests of the greatest length"
    assert plan.total * (1 - fraction) >= plan.reserve, "activations, CUDA graphs and NCCL have what they need"


@pytest.mark.parametrize("config_file", V4_FILES, ids=lambda path: path.stem, indirect=True)
def test_comments_count_deepseek_v4s_cache_as_the_plan_does(config_file, settings):
    """SGLang has a ring of sums for each request that may run, for one more, and room for two behind the last; of
    V4.1, windows of each."""
    text = " ".join(config_file.read_text().replace("#", " ").split())
    requests, fraction = settings["max-running-requests"], settings["mem-fraction-static"]
    gpu = next(gpu for name, gpu in GPUS.items() if name in config_file.stem)
    model, on = read_model(MODELS[settings["model-path"]]), Deployment(cache="fp8", utilization=fraction)
    plan, caches = memory_of(model, read_gpu(gpu), on), v4_caches(model, on)
    slots = requests + (0 if model.shares_caches else 3)
    kept, a_token = slots * caches.sglang_request_bytes, caches.sglang_token_bytes
    tokens = int((plan.usable - plan.weights - kept) / a_token) // 256 * 256
    held = f"{tokens:,} tokens of {a_token:,.10g} bytes (SGLang 0.5.23), beside {kept / 1e9:.1f} GB"
    what = "the windows" if model.shares_caches else f"{caches.hca} layers' partial sums"
    beside = f"for {what} of {requests} requests"
    assert f"{(plan.usable - plan.weights) / 1e9:.1f} GB KV cache: {held} {beside}" in text
    assert f"{requests} requests have {tokens // requests:,} tokens each when the cache is full" in text
    assert tokens >= 2 * settings["context-length"], "two requests of the greatest length"
    assert plan.total * (1 - fraction) >= RESERVE_BYTES.value, "activations, CUDA graphs and NCCL have what they need"
