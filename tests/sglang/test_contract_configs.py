"""configs/sglang through SGLang's own parser of `--config`, and the cache arithmetic in their comments."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from sglang.srt.plugins import load_plugins

from etap_backend.lab.plan.inputs import Deployment, read_gpu, read_model
from etap_backend.lab.plan.memory import PAGE_TOKENS, memory_of

load_plugins()

from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted((CONFIGS / "sglang").glob("*.yaml"))
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
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
    names = {path.stem for path in FILES}
    deployments = {f"deepseek-r1-8xh20-{gpu}{mtp}" for gpu in GPUS for mtp in ("", "-mtp")}
    small = {f"deepseek-r1-8xh20-96g-{kind}" for kind in ("fp8-cache", "dcp8", "dcp2-fp8-cache")}
    sparse = {"deepseek-v3.2-8xh20-96g-fp8-cache", "deepseek-v3.2-8xh20-141g", "glm-5-fp8-8xh20-141g"}
    assert names == {"smoke-1gpu"} | small | deployments | sparse


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
    assert arguments.attention_backend in ("etap", "etap_fp8_math") and arguments.page_size == PAGE_TOKENS
    for name, wanted in settings.items():
        if name != "model-path":
            assert getattr(arguments, name.replace("-", "_")) == wanted, name
    assert ("kv-cache-dtype" in settings) == config_file.stem.endswith("-fp8-cache")
    assert settings.get("dcp-size", 1) == int((re.search(r"-dcp(\d)", config_file.stem) or (0, 1))[1])
    assert ("speculative-algorithm" in settings) == config_file.stem.endswith("-mtp")


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
