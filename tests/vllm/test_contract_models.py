"""Every model that `etap plan` ships is one that vLLM serves with ETAP."""

from pathlib import Path

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

load_general_plugins()

UNKNOWN = {("0.32.0", "ling-3.0-flash")}  # to the Transformers that this version pins
MODELS = sorted((Path(__file__).resolve().parents[2] / "configs/models").glob("*.json"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_shipped_model_takes_etap(path, tmp_path, monkeypatch):
    """vLLM's configuration of the whole model on eight ranks: latent attention of the planned width, by ETAP."""
    from etap_backend.plan.model import read_model

    if (vllm.__version__, path.stem) in UNKNOWN:
        pytest.skip(f"vLLM {vllm.__version__} does not know the model's type")
    monkeypatch.setattr(type(current_platform), "device_count", classmethod(lambda cls: 8))
    (tmp_path / "config.json").write_text(path.read_text())
    model = read_model(str(path))
    defaults = {"max_model_len": 2048, "max_num_seqs": 8, "skip_tokenizer_init": True, "load_format": "dummy"}
    arguments = EngineArgs(model=str(tmp_path), attention_backend="ETAP", tensor_parallel_size=8, **defaults)
    config = arguments.create_engine_config()
    assert config.attention_config.backend is AttentionBackendEnum.ETAP
    assert config.model_config.use_mla
    assert config.model_config.get_head_size() == (512 if model.v4 else model.cache_row)
