"""The contract tests run inside an engine's environment only, where tests/contract.py puts them."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

IN_CONTRACT = os.environ.get("ETAP_CONTRACT") == "vllm"
collect_ignore_glob = [] if IN_CONTRACT else ["test_contract_*.py"]

# For scripts_in_forks and support; last, because a folder there has the engine's name.
TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))

RANKS_SECONDS = 1800
# Attention as in DeepSeek-V3 on one of 8 ranks; everything else as small as it may be.
MODEL = Path(__file__).resolve().parent.parent / "contract_model.json"


def pytest_report_header():
    if not IN_CONTRACT:
        return "vLLM contract tests: not collected here, tests/contract.py runs them in each vLLM's environment"


@pytest.fixture(autouse=True)
def unchanged_environment():
    """vLLM sets variables where it makes DeepSeek-V4's configuration."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """A model that is only a config.json."""
    directory = tmp_path_factory.mktemp("model")
    shutil.copy(MODEL, directory / "config.json")
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


@pytest.fixture(scope="module")
def on_two_ranks(model_directory, tmp_path_factory):
    """Runs a script of this folder on two ranks, `script RANK PORT MODEL OUTPUT ARGUMENTS`; gives their results."""

    def run(script, *arguments):
        import torch

        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        ranks = []
        for rank in range(2):
            of_all = [Path(__file__).with_name(script), rank, port, model_directory, folder / str(rank)]
            command = [sys.executable, *map(str, [*of_all, *arguments])]
            with (folder / f"{rank}.log").open("w") as output:
                ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(RANKS_SECONDS) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        logs = [(folder / f"{rank}.log").read_text() for rank in range(2)]
        assert codes == [0, 0], "".join(log[-3000:] for log in logs)
        return [torch.load(folder / str(rank)) | {"log": log} for rank, log in enumerate(logs)]

    return run


@pytest.fixture
def make_layer(engine_config):
    """Makes a real MLA layer with ETAP's backend, and its configuration; keywords are EngineArgs'.

    `layer_arguments` are the layer's.
    """
    from vllm.config import set_current_vllm_config

    from support.vllm_layer import HEADS, MAX_REQUESTS, build_layer

    made = []

    def make(heads=HEADS, layer_arguments=None, **arguments):
        override = {"num_attention_heads": heads, "num_key_value_heads": heads}
        defaults = {"attention_backend": "ETAP", "max_num_seqs": MAX_REQUESTS, "hf_overrides": override}
        config = engine_config(**(defaults | arguments))
        context = set_current_vllm_config(config)
        context.__enter__()
        made.append(context)
        return build_layer(config, heads, **(layer_arguments or {})), config

    yield make
    for context in reversed(made):
        context.__exit__(None, None, None)


@pytest.fixture
def make(make_layer):
    """Makes a layer and its builder."""
    from support.vllm_layer import make_builder

    def both(**arguments):
        layer, config = make_layer(**arguments)
        return layer, make_builder(layer, config)

    return both
