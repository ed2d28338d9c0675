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

# vLLM asks a process of its own about each class of models, 10 seconds each, and keeps the answers: here one asks all.
LOOK_AT_MODELS = """
import contextlib, json, sys
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
load_general_plugins()
registry._run_in_subprocess = lambda look: look()
for name in {name for path in sys.argv[1:] for name in json.load(open(path))["architectures"]} | {"DeepSeekMTPModel"}:
    with contextlib.suppress(Exception):  # a test that needs it fails of its own
        registry.ModelRegistry.models[name].inspect_model_cls()
"""
# Attention as in DeepSeek-V3 on one of 8 ranks; everything else as small as it may be.
MODEL = Path(__file__).resolve().parent.parent / "contract_model.json"


def pytest_report_header():
    if not IN_CONTRACT:
        return "vLLM contract tests: not collected here, tests/contract.py runs them in each vLLM's environment"


@pytest.fixture(scope="session", autouse=True)
def known_models():
    """In the cache of a new environment, what vLLM finds in its classes of models."""
    if not (Path(os.environ["VLLM_CACHE_ROOT"]) / "modelinfos").exists():
        shipped = (TESTS.parent / "configs/models").glob("*.json")
        subprocess.run([sys.executable, "-c", LOOK_AT_MODELS, *shipped], check=True)


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


@pytest.fixture(scope="session")
def in_forks(tmp_path_factory):
    """Runs scripts at the same time in forks of one process, which has vLLM with Triton's interpreter."""
    import scripts_in_forks

    path = [str(Path(__file__).parent), str(TESTS), *sys.path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    imports = "import dcp_rank_sparse\nfrom support import vllm_v4_layer\n"
    folder = tmp_path_factory.mktemp("forks")
    with scripts_in_forks.runner_of_several(imports, folder, environment) as run:
        yield run


@pytest.fixture(scope="module")
def on_two_ranks(in_forks, model_directory, tmp_path_factory):
    """Runs `main` of a module of this folder on two ranks, with RANK, PORT, MODEL, OUTPUT and arguments; gives their
    results."""

    def run(module, *arguments):
        import torch

        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        texts = [[port, model_directory, folder / str(rank), *arguments] for rank in range(2)]
        scripts = [f"import {module}\n{module}.main({rank}, *{list(map(str, texts[rank]))})" for rank in range(2)]
        logs = in_forks(*scripts)
        return [torch.load(folder / str(rank)) | {"log": "".join(log)} for rank, log in enumerate(logs)]

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
