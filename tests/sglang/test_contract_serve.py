"""`python -m sglang.launch_server --attention-backend etap` as a user types it, up to the missing GPU.

Nothing here runs the model: on a machine without a GPU SGLang's scheduler stops when it sets up NCCL.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

SERVE_SECONDS = 240
NO_DEVICE = "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def served(model_directory, tmp_path_factory):
    """What the server wrote."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model_directory, "--load-format", "dummy",
        "--skip-tokenizer-init", "--attention-backend", "etap", "--port", free_port(), "--log-level", "info",
    ]  # fmt: skip
    with log.open("w") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True, "env": os.environ}
        server = subprocess.Popen(list(map(str, command)), **options)
    try:
        assert server.wait(SERVE_SECONDS) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    return log.read_text()


def test_scheduler_goes_on_to_the_missing_gpu(served):
    assert NO_DEVICE in served, served
    assert "invalid choice" not in served, served


def test_server_starts_with_the_name(served):
    # Older versions print the arguments as a call, later ones as a dictionary of what the user gave.
    assert re.search(r"\battention_backend'?[=:] ?'etap'", served), served


def test_no_plugin_failed(served):
    for failure in ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply hooks"):
        assert failure not in served, served
