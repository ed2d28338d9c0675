"""The name ETAP in a real vLLM: found through the entry point, selected by the user, carried to other processes."""

import pickle
from importlib.metadata import entry_points

import cloudpickle
import pytest
import scripts_in_forks
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from etap_backend import doctor
from etap_backend.vllm import registration, versions
from etap_backend.vllm.v4_selection import PACKAGES, ExtendedModel

# These imports load no plugin.
IMPORTS = """
import vllm.platforms, vllm.plugins, vllm.v1.attention.backends.registry, vllm.v1.attention.selector
assert not any(name.startswith("etap_backend") for name in sys.modules)
"""

# Any use of CUDA goes through the lazy initialisation.
TOUCHES_NO_CUDA = """
import sys, torch
def refuse(): raise SystemExit("CUDA was initialised")
torch.cuda._lazy_init = refuse
from etap_backend.vllm.registration import register
register()
assert not any(name.startswith("vllm.models.deepseek_v4") for name in sys.modules), "it imports a model"
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print("selects", AttentionBackendEnum.ETAP.get_class().get_name())
"""

# A worker's configuration is pickled by the server, and again by the engine core.
SECOND_PICKLING = """
import pickle, sys
member = pickle.loads(bytes.fromhex({pickled!r}))
assert "etap_backend.vllm.backend" not in sys.modules
print(member.name, b"backend_member" in pickle.dumps(member))
"""

OTHER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: {version!r} if name == "vllm" else real(name)
from etap_backend.vllm.registration import register
register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
"""

# Two layers select ETAP and one another backend.
SELECT = """
register()
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig
for name, cache in (("ETAP", "auto"), ("FLASH_ATTN_MLA", "auto"), ("ETAP", "fp8")):
    config = AttentionSelectorConfig(576, torch.bfloat16, cache, None, use_mla=True)
    print(current_platform.get_attn_backend_cls(AttentionBackendEnum[name], config, 16))
"""

ANOTHER_REGISTRY = """
from vllm.v1.attention.backends import registry
del registry.AttentionBackendEnum
from vllm.plugins import load_general_plugins
load_general_plugins()
print("goes on")
"""


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_general_plugins()


@pytest.fixture(scope="module")
def run_script(tmp_path_factory):
    """Runs a program in a process of its own; gives the lines it wrote."""
    with scripts_in_forks.runner(IMPORTS, tmp_path_factory.mktemp("scripts")) as run:
        yield lambda program: "\n".join(run(program)).splitlines()


def test_the_entry_point_is_installed_once_and_names_register():
    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "etap"]
    assert point.load() is registration.register


def test_the_doctor_finds_the_plugin_and_what_it_serves():
    (vllm,) = (plugin for plugin in doctor.PLUGINS if plugin.engine is versions.ENGINE)
    finding = doctor.check_plugin(vllm)
    assert finding.verdict is doctor.Verdict.OK, finding
    assert all(" too: --kv-cache-dtype " in line for line in finding.sparse) and len(finding.sparse) == 2


def test_the_installed_version_has_all_that_is_used():
    assert registration.why_not(sparse=False) is None and registration.why_not(sparse=True) is None


def test_registering_again_changes_nothing():
    before = list(AttentionBackendEnum.__members__), AttentionBackendEnum.ETAP, dict(ModelRegistry.models)
    registration.register()
    registration.register()
    assert (list(AttentionBackendEnum.__members__), AttentionBackendEnum.ETAP, ModelRegistry.models) == before
    assert before[0].count("ETAP") == 1
    extended = [entry for entry in ModelRegistry.models.values() if isinstance(entry, ExtendedModel)]
    assert {entry.module_name for entry in extended} == set(PACKAGES)


@pytest.mark.parametrize("module", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_members_survive_pickling(module):
    for member in AttentionBackendEnum:
        assert pickle.loads(module.dumps(member)) is member
    assert b"backend_member" in module.dumps(AttentionBackendEnum.ETAP)
    assert b"backend_member" not in module.dumps(AttentionBackendEnum.FLASHMLA)


def test_a_process_that_unpickled_the_member_can_pickle_it_for_the_next(run_script):
    pickled = pickle.dumps(AttentionBackendEnum.ETAP).hex()
    assert "ETAP True" in run_script(SECOND_PICKLING.format(pickled=pickled))


@pytest.mark.parametrize("name", ["ETAP", "etap"])
def test_the_name_selects_the_backend(engine_config, name):
    config = engine_config(attention_backend=name)
    assert config.attention_config.backend is AttentionBackendEnum.ETAP
    assert pickle.loads(pickle.dumps(config)).attention_config.backend is AttentionBackendEnum.ETAP


def test_the_name_selects_the_backend_for_mla_layers_only(engine_config):
    config = engine_config(attention_config={"backend_per_kind": {"mla_attention": "ETAP"}})
    assert config.attention_config.backend_per_kind == {"mla_attention": AttentionBackendEnum.ETAP}


def test_registration_touches_no_cuda_and_imports_no_model(run_script):
    assert "selects ETAP" in run_script(TOUCHES_NO_CUDA)


def test_a_newer_version_runs_with_one_warning(run_script):
    lines = run_script(OTHER_VERSION.format(version="0.99.0") + SELECT)
    etap, other = "etap_backend.vllm.backend.ETAPBackend", "vllm.v1.attention.backends.mla.flashattn_mla"
    selected = [line for line in lines if line.startswith((etap, other))]
    assert selected == [etap, f"{other}.FlashAttnMLABackend", etap]
    (warning,) = [line for line in lines if "0.99.0" in line]
    assert str(versions.ENGINE) in warning


def test_an_older_version_registers_nothing_and_says_why(run_script):
    lines = run_script(OTHER_VERSION.format(version="0.31.9") + "print('ETAP' in AttentionBackendEnum.__members__)")
    assert lines.count("False") == 1
    (warning,) = [line for line in lines if "0.31.9" in line]
    assert f"ETAP supports {versions.ENGINE}" in warning and "other attention backends are not affected" in warning


def test_another_registry_leaves_other_backends_alone_and_is_named(run_script):
    lines = run_script(ANOTHER_REGISTRY)
    assert "goes on" in lines
    (warning,) = [line for line in lines if "other attention backends are not affected" in line]
    assert "lacks what ETAP uses: ImportError: cannot import name 'AttentionBackendEnum'" in warning
