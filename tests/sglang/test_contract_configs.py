"""configs/sglang through SGLang's own parser of `--config`."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted((CONFIGS / "sglang").glob("*.yaml"))
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "deepseek-ai/DeepSeek-V4-Pro": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4.1-Flash": "deepseek-v4.1-flash",
    "zai-org/GLM-5-FP8": "glm-5-fp8",
}


@pytest.mark.parametrize("config_file", FILES, ids=lambda path: path.stem)
def test_sglangs_parser_takes_every_setting(config_file, tmp_path, monkeypatch):
    """Parsed as a user does, and resolved; only the model's name becomes a folder with its config.json."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "1")  # SGLang sets it
    settings, folder = yaml.safe_load(config_file.read_text()), tmp_path / "model"
    folder.mkdir()
    shutil.copy(CONFIGS / f"models/{MODELS[settings['model-path']]}.json", folder / "config.json")
    local = tmp_path / config_file.name
    local.write_text(config_file.read_text().replace(settings.pop("model-path"), str(folder)))
    flags = ["--config", str(local), "--skip-tokenizer-init", "--load-format", "dummy"]
    monkeypatch.setattr(sys, "argv", ["launch_server", *flags])
    record = prepare_server_args(flags)
    record.resolve_once()
    arguments = resolved_view(record)
    if v4 := config_file.stem.startswith("deepseek-v4"):  # SGLang renames it, and ETAP keeps the wish
        assert settings.pop("attention-backend") == arguments.dsa_decode_backend == "etap"
        assert arguments.attention_backend == "dsv4" and arguments.page_size == 256
    else:
        assert arguments.attention_backend in ("etap", "etap_fp8_math") and arguments.page_size == 64
    for name, wanted in settings.items():
        assert getattr(arguments, name.replace("-", "_")) == wanted, name
    # The file's name tells what it deploys.
    assert ("kv-cache-dtype" in settings) == (config_file.stem.endswith("-fp8-cache") or v4)
    assert settings.get("dcp-size", 1) == int((re.search(r"-dcp(\d)", config_file.stem) or (0, 1))[1])
    assert ("speculative-algorithm" in settings) == config_file.stem.endswith("-mtp")
