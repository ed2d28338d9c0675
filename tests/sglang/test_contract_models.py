"""Every model that `etap plan` ships is one that SGLang serves with ETAP."""

import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

MODELS = sorted((Path(__file__).resolve().parents[2] / "configs/models").glob("*.json"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_shipped_model_takes_etap(path, tmp_path, monkeypatch):
    """SGLang's arguments for the whole model on eight ranks; DeepSeek-V4's backend has SGLang's name there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "1")  # SGLang sets it
    (tmp_path / "config.json").write_text(path.read_text())
    flags = ["--model-path", str(tmp_path), "--attention-backend", "etap", "--tp-size", "8"]
    flags += ["--skip-tokenizer-init", "--load-format", "dummy"]
    monkeypatch.setattr(sys, "argv", ["launch_server", *flags])
    record = prepare_server_args(flags)
    record.resolve_once()
    arguments = resolved_view(record)
    if path.stem.startswith("deepseek-v4"):
        assert (arguments.dsa_decode_backend, arguments.attention_backend) == ("etap", "dsv4")
    else:
        assert arguments.attention_backend == "etap" and arguments.page_size == 64
