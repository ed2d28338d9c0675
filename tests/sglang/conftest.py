"""The contract tests run inside an engine's environment only, where tests/contract.py puts them."""

import os
import shutil
import sys
from pathlib import Path

import pytest

IN_CONTRACT = os.environ.get("ETAP_CONTRACT") == "sglang"
collect_ignore_glob = [] if IN_CONTRACT else ["test_contract_*.py"]

# For scripts_in_forks and support; last, because a folder there has the engine's name.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Attention as in DeepSeek-V3 on one of 8 ranks; everything else as small as it may be.
MODEL = Path(__file__).resolve().parent.parent / "contract_model.json"


def pytest_report_header():
    if not IN_CONTRACT:
        return "SGLang contract tests: not collected here, tests/contract.py runs them beside each SGLang"


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """The folder of a model with only its config.json."""
    directory = tmp_path_factory.mktemp("model")
    shutil.copy(MODEL, directory / "config.json")
    return directory


@pytest.fixture
def calls_of(monkeypatch):
    """Records the arguments, by name, of each call of ETAP's sparse kernel by a module."""

    def record(module):
        calls = []
        kernel = module.sparse_mla_decode

        def call(q, kv_cache, indices, **more):
            calls.append({"q": q, "kv_cache": kv_cache, "indices": indices} | more)
            return kernel(q, kv_cache, indices, **more)

        monkeypatch.setattr(module, "sparse_mla_decode", call)
        return calls

    return record
