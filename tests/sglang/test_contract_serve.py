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

SERVE_SECONDS = 1800
NO_DEVICE = "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Every Python of the second server imports this.
NEWER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.9.0" if name == "sglang" else real(name)
"""


def start(model_directory, name, log, **variables):
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model_directory, "--load-format", "dummy",
        "--skip-tokenizer-init", "--attention-backend", name, "--port", free_port(), "--log-level", "info",
    ]  # fmt: skip
    with log.open("w") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(list(map(str, command)), env=os.environ | variables, **options)


@pytest.fixture(scope="module")
def logs(model_directory, tmp_path_factory):
    """What two servers wrote; they run at the same time because all they do is import."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "sitecustomize.py").write_text(NEWER_VERSION)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    servers = [
        start(model_directory, "etap", folder / "installed.log"),
        start(model_directory, "etap_fp8_math", folder / "newer.log", PYTHONPATH=path),
    ]
    try:
        assert all(server.wait(SERVE_SECONDS) != 0 for server in servers)
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    return {name: (folder / f"{name}.log").read_text() for name in ("installed", "newer")}


@pytest.fixture(params=["installed", "newer"])
def served(request, logs):
    return logs[request.param]


def test_scheduler_goes_on_to_the_missing_gpu(served):
    assert NO_DEVICE in served, served
    assert "invalid choice" not in served, served


def test_server_starts_with_the_name(served):
    assert re.search(r"\battention_backend'?[=:] ?'etap(_fp8_math)?'", served), served


def test_only_a_newer_version_is_warned_of_and_once(logs):
    warnings = {name: log.count("SGLang 0.9.0 has all names that etap uses, but") for name, log in logs.items()}
    assert warnings == {"installed": 0, "newer": 1}, logs["newer"]


def test_no_plugin_failed(served):
    for failure in ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply hooks"):
        assert failure not in served, served
