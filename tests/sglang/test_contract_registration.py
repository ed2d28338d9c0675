"""The name etap in a real SGLang: found through the entry point, offered as a choice, errors made visible."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from sglang.srt.models.deepseek_common import utils
from sglang.srt.plugins import load_plugins

import etap_backend.sglang
from etap_backend.sglang import compat

load_plugins()

SCRIPT_SECONDS = 180

# Any use of CUDA goes through the lazy initialisation.
TOUCHES_NO_CUDA = """
import torch
def refuse(): raise SystemExit("CUDA was initialised")
torch.cuda._lazy_init = refuse
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
print("etap" in ATTENTION_BACKENDS)
"""

LOADS_AND_CHECKS = """
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from etap_backend.sglang import registration
try:
    registration.check_plugin()
    print("found")
except registration.Unavailable as error:
    print("unavailable:", error)
print("registered:", "etap" in ATTENTION_BACKENDS, "flashmla" in ATTENTION_BACKENDS)
"""

UNSUPPORTED_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.9.0" if name == "sglang" else real(name)
"""

BROKEN_PLUGIN = """
from sglang.srt import server_args
del server_args.add_chunked_prefix_cache_attention_backend
"""


def run_script(script):
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_entry_point_is_installed_once_and_names_register():
    (point,) = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "etap"]
    assert point.load() is etap_backend.sglang.register


def test_installed_version_is_supported():
    assert compat.why_unsupported_version() is None


def test_registering_again_changes_nothing():
    before = list(server_args.ATTENTION_BACKEND_CHOICES)
    factory = ATTENTION_BACKENDS["etap"]
    etap_backend.sglang.register()
    assert list(server_args.ATTENTION_BACKEND_CHOICES) == before
    assert before.count("etap") == 1 and ATTENTION_BACKENDS["etap"] is factory
    assert server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("etap") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_models_route_prefill_as_with_flashmla_and_hand_over_the_parts(times):
    compat.register_model_support()
    registry = handler.AttentionBackendRegistry
    assert registry.get_handler("etap") is registry.get_handler("flashmla") is handler.handle_attention_flashmla
    assert utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count("etap") == 1


def test_plugin_and_import_touch_no_cuda():
    output, _ = run_script(TOUCHES_NO_CUDA)
    assert output.strip().endswith("True")


def test_doctor_finds_the_plugin():
    output, _ = run_script(LOADS_AND_CHECKS)
    assert "found" in output and "registered: True True" in output


def test_unsupported_version_is_refused_in_one_line_and_to_the_doctor():
    output, errors = run_script(UNSUPPORTED_VERSION + LOADS_AND_CHECKS)
    reason = f"the attention backend etap supports SGLang {compat.SUPPORTED_VERSIONS}, this is SGLang 0.9.0"
    assert f"unavailable: {reason}" in output
    assert "registered: False True" in output
    (line,) = [line for line in errors.splitlines() if reason in line]
    assert "other attention backends are not affected" in line


def test_an_error_that_sglang_swallows_is_in_one_line_and_told_by_the_doctor():
    output, errors = run_script(BROKEN_PLUGIN + LOADS_AND_CHECKS)
    assert "unavailable: no attention backend etap; Failed to execute general plugin: etap: AttributeError" in output
    assert "registered: False True" in output
    (line,) = [line for line in errors.splitlines() if "the attention backend etap is not available" in line]
    assert "AttributeError" in line and "add_chunked_prefix_cache_attention_backend" in line
