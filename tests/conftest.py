"""The `gpu` marker: such tests skip without a Hopper GPU and say why; with --require-gpu nothing runs without one."""

import os

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu",
        action="store_true",
        default=os.environ.get("ETAP_REQUIRE_GPU") == "1",
        help="fail at once instead of skipping the tests marked gpu without a Hopper GPU (or ETAP_REQUIRE_GPU=1)",
    )


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
    return None


@pytest.fixture(scope="session")
def run_program(tmp_path_factory):
    """Runs a program in a Python of its own with torch imported; returns output and errors."""
    import scripts_in_forks  # not in contract tests, for which this folder is not on the path

    with scripts_in_forks.runner("import torch", tmp_path_factory.mktemp("programs")) as run:
        yield run


def pytest_configure(config):
    # The CPU's problems are small: beside other programs a second thread waits longer than it computes.
    torch.set_num_threads(1)
    if config.getoption("--require-gpu") and (reason := _why_no_gpu()):
        raise pytest.UsageError(f"a Hopper GPU is demanded: {reason}")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := _why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {reason}"))
