"""The name etap in a real SGLang: found through the entry point, offered as a choice, errors made visible."""

from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import scripts_in_forks
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from sglang.srt.models.deepseek_common import utils
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel

import etap_backend.sglang
from etap_backend import doctor
from etap_backend.sglang import model_support, registration, versions

load_plugins()

# Nothing of this loads a plugin.
IMPORTS = """
import sglang.srt.layers.attention.attention_registry, sglang.srt.layers.attention.flashmla_backend
import sglang.srt.plugins, sglang.srt.server_args, sglang.srt.speculative.draft_utils
assert not any(name.startswith("etap_backend") for name in sys.modules)
"""

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

OLDER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.9" if name == "sglang" else real(name)
"""

NO_LIST = """
from sglang.srt import server_args
del server_args.add_chunked_prefix_cache_attention_backend
"""

NO_HOOK = """
from sglang.srt.speculative.draft_utils import DraftBackendFactory
del DraftBackendFactory._create_backend
"""

SWALLOWED = """
from sglang.srt import server_args
server_args.add_chunked_prefix_cache_attention_backend = server_args.add_attention_backend_choices([])
"""

NO_KERNEL = """
from sglang.srt.layers.attention import flashmla_backend
del flashmla_backend.create_flashmla_kv_indices_triton
"""


@pytest.fixture(scope="module")
def run_script(tmp_path_factory):
    with scripts_in_forks.runner(IMPORTS, tmp_path_factory.mktemp("scripts")) as run:
        yield run


def test_entry_point_is_installed_once_and_names_register():
    (point,) = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "etap"]
    assert point.load() is etap_backend.sglang.register


def test_the_installed_version_has_all_that_is_used():
    assert registration.why_unregistered() is None
    assert registration.why_unusable() is None and registration.why_unusable(sparse=True) is None
    assert registration.why_no_v4() is None


def test_registering_again_changes_nothing():
    before = list(server_args.ATTENTION_BACKEND_CHOICES)
    factory = ATTENTION_BACKENDS["etap"]
    etap_backend.sglang.register()
    assert list(server_args.ATTENTION_BACKEND_CHOICES) == before
    assert ATTENTION_BACKENDS["etap"] is factory
    for name in versions.NAMES:
        assert before.count(name) == server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(name) == 1


def test_models_route_prefill_as_with_sglangs_backends_and_hand_over_the_parts(monkeypatch):
    for _ in range(2):
        model_support.register()
    for kind in ("fa3", "dsa"):
        monkeypatch.setattr(handler, f"handle_attention_{kind}", lambda attn, batch, kind=kind: (kind, attn, batch))
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    dense, sparse = SimpleNamespace(num_local_heads=16), SimpleNamespace(use_dsa=True)
    for name in versions.NAMES:
        route = handler.AttentionBackendRegistry.get_handler(name)
        with get_parallel().override(attn_dcp_size=1):
            assert route(dense, batch) == ("fa3", dense, batch)
        assert route(sparse, batch) == ("dsa", sparse, batch)
        assert utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(name) == 1


def test_plugin_and_import_touch_no_cuda(run_script):
    output, _ = run_script(TOUCHES_NO_CUDA)
    assert output.strip().endswith("True")


def test_doctor_finds_the_plugin(run_script):
    output, _ = run_script(LOADS_AND_CHECKS)
    assert "found" in output and "registered: True True" in output


def test_the_doctor_says_what_is_served():
    (sglang,) = (plugin for plugin in doctor.PLUGINS if plugin.engine is versions.ENGINE)
    finding = doctor.check_plugin(sglang)
    assert finding.verdict is doctor.Verdict.OK, finding
    assert finding.sparse == (
        "sparse attention (DeepSeek-V3.2, GLM-5) too: --kv-cache-dtype auto, bfloat16 or fp8_e4m3",
        "DeepSeek-V4 too: --kv-cache-dtype auto or fp8_e4m3",
    )


@pytest.mark.parametrize(
    "change, reason",
    [
        (OLDER_VERSION, "0.5.22"),
        (NO_LIST, "sglang.srt.server_args.add_chunked_prefix_cache_attention_backend"),
        (NO_HOOK, versions.DRAFT_HOOK),
    ],
    ids=["older version", "list", "hook"],
)
def test_what_keeps_the_names_unknown_is_in_one_line_and_told_by_the_doctor(change, reason, run_script):
    output, errors = run_script(change + LOADS_AND_CHECKS)
    (told,) = [line for line in output.splitlines() if line.startswith("unavailable: ")]
    assert reason in told and ("0.5.9" in told or change != OLDER_VERSION)
    assert "registered: False True" in output
    (line,) = [line for line in errors.splitlines() if "other attention backends are not affected" in line]
    assert told.removeprefix("unavailable: ") in line


def test_an_error_that_sglang_swallows_is_in_one_line_and_told_by_the_doctor(run_script):
    output, errors = run_script(SWALLOWED + LOADS_AND_CHECKS)
    assert "unavailable: no attention backend etap; Failed to execute general plugin: etap: TypeError" in output
    assert "registered: False True" in output
    (line,) = [line for line in errors.splitlines() if "the attention backend etap is not available" in line]
    assert "TypeError" in line


def test_the_doctor_is_told_what_a_selected_backend_would_lack(run_script):
    output, _ = run_script(NO_KERNEL + LOADS_AND_CHECKS)
    (told,) = [line for line in output.splitlines() if line.startswith("unavailable: ")]
    assert "cannot import name 'create_flashmla_kv_indices_triton'" in told
    assert "registered: True True" in output
