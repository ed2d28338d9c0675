"""The contract tests run inside an engine's environment only, where run_contract.py puts them."""

import json
import os
import socket

import pytest

IN_CONTRACT = os.environ.get("ETAP_CONTRACT") == "vllm"
collect_ignore_glob = [] if IN_CONTRACT else ["test_contract_*.py"]

# Attention as in DeepSeek-V3 on one of 8 ranks; everything else as small as it may be.
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def pytest_report_header():
    if not IN_CONTRACT:
        return "vLLM contract tests: not collected here, tests/vllm/run_contract.py runs them beside each vLLM"


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """A model of which only the configuration exists."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


@pytest.fixture(scope="session")
def engine_config(model_directory):
    """Makes vLLM's configuration of that model; keywords are EngineArgs'."""
    from vllm.engine.arg_utils import EngineArgs

    def make(**arguments):
        defaults = {"max_model_len": 2048, "max_num_seqs": 8, "skip_tokenizer_init": True, "load_format": "dummy"}
        return EngineArgs(model=str(model_directory), **(defaults | arguments)).create_engine_config()

    return make


@pytest.fixture(scope="session")
def one_rank(engine_config):
    """The process groups of a single rank, which vLLM's layers ask for."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with set_current_vllm_config(engine_config(attention_backend="ETAP")):
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(backend="gloo")


@pytest.fixture
def fresh_workspaces(monkeypatch):
    """vLLM's workspace manager, for two micro-batches on the CPU."""
    import torch
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # asks for a device
    workspace.init_workspace_manager(torch.device("cpu"), 2)
    yield
    workspace.reset_workspace_manager()
