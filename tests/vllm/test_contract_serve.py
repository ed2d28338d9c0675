"""`vllm serve --attention-backend ETAP` up to the missing GPU, with and without the reducer for pickle.

Nothing here runs the model: on a machine without a GPU vLLM's worker stops when it sets its device.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hopper import WITHOUT_REDUCER, WITNESS

SERVE_SECONDS = 1800
NO_REDUCER = {WITHOUT_REDUCER: "1"}
NO_DEVICE = "out of bounds for 0 devices"
TRAP = "is not a valid AttentionBackendEnum"
ENGINE_CORE = re.compile(r"^\(EngineCore pid=(\d+)\)", re.MULTILINE)
WITNESSED = re.compile(r"witness (\d+): unpickles (\S+)", re.MULTILINE)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(model_directory, log, **variables):
    command = [
        Path(sys.executable).with_name("vllm"), "serve", model_directory, "--load-format", "dummy",
        "--skip-tokenizer-init", "--max-model-len", "2048", "--attention-backend", "ETAP", "--port", free_port(),
    ]  # fmt: skip
    environment = os.environ | {WITNESS: "1"} | variables
    with log.open("w") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(list(map(str, command)), env=environment, **options)


@pytest.fixture(scope="module")
def served(model_directory, tmp_path_factory):
    """The logs of two servers, which run at the same time because they only import."""
    logs = {name: tmp_path_factory.mktemp("serve") / f"{name}.log" for name in ("reducer", "no_reducer")}
    servers = [
        start(model_directory, logs["reducer"]),
        start(model_directory, logs["no_reducer"], **NO_REDUCER),
    ]
    try:
        assert all(server.wait(SERVE_SECONDS) != 0 for server in servers)
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    return {name: log.read_text() for name, log in logs.items()}


def test_engine_core_rebuilds_the_name_and_goes_on_to_the_missing_gpu(served):
    log = served["reducer"]
    assert "'attention_backend': 'ETAP'" in log, log
    (core,) = set(map(int, ENGINE_CORE.findall(log)))
    # A virtual environment may be read twice, as lib and as lib64, so the witness may speak twice.
    assert set(WITNESSED.findall(log)) == {(str(core), "etap_backend.vllm.registration.backend_member")}, log
    assert re.search(rf"^\(EngineCore pid={core}\).*{NO_DEVICE}", log, re.MULTILINE), log
    assert TRAP not in log, log


def test_engine_core_cannot_start_without_the_reducer(served):
    log = served["no_reducer"]
    assert TRAP in log, log
    assert NO_DEVICE not in log, log
