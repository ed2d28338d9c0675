"""What vLLM's own selection says when the user names ETAP: accepted, or refused with the reason."""

import importlib.metadata
import logging
import sys

import pytest
import torch
from vllm import logger
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.utils import select_common_block_size

from etap_backend.vllm import registration, versions

pytestmark = pytest.mark.usefixtures("one_rank")

load_general_plugins()
ETAPBackend = AttentionBackendEnum.ETAP.get_class()


@pytest.fixture
def select(engine_config):
    """Selects as a layer does, for DeepSeek's attention on 16 heads; keywords differ from that."""

    def call(attention_backend="ETAP", block_size=None, **changes):
        selector._cached_get_attn_backend.cache_clear()
        layer = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True, "num_heads": 16}
        with set_current_vllm_config(engine_config(attention_backend=attention_backend, block_size=block_size)):
            return selector.get_attn_backend(**(layer | changes))

    yield call
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("changes", [
    {}, {"dtype": torch.float16}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8_e4m3", "dtype": torch.float16}, {"num_heads": 1}, {"num_heads": 128}, {"block_size": 64},
    {"block_size": 128}, {"block_size": 16}, {"block_size": 48},
], ids=str)  # fmt: skip
def test_accepts(select, changes):
    assert select(**changes) is ETAPBackend


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": torch.float32}, "dtype"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype fp8_ds_mla"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
    ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16"),
    ({"head_size": 320}, "head_dim 320"),
    ({"block_size": 8}, "block_size 8"),
    ({"block_size": 40}, "block_size 40"),
    ({"use_sparse": True}, "sparse"),
    ({"use_mla": False}, "non-MLA"),
    ({"has_sink": True}, "sink"),
], ids=str)  # fmt: skip
def test_refuses_by_name(select, changes, reason):
    with pytest.raises(ValueError, match=f"ETAP is not valid.*{reason}"):
        select(**changes)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_refuses_other_gpus(select, monkeypatch, capability):
    monkeypatch.setattr(type(current_platform), "capability", DeviceCapability(*capability))
    with pytest.raises(ValueError, match="compiled for sm_90a") as refusal:
        select()
    assert f"compute capability {capability[0]}.{capability[1]}" in str(refusal.value)


def test_refuses_without_the_compiled_library(select, monkeypatch, tmp_path):
    from etap_backend import _library

    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "nothing.so"))
    _library.library.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"no compiled library at .*nothing\.so"):
            select()
    finally:
        monkeypatch.undo()
        _library.library.cache_clear()


@pytest.fixture
def select_anew(select, monkeypatch):
    """Selects as in a new process; gives vLLM's log lines about ETAP, too."""
    lines, real = [], importlib.metadata.version
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())

    def call(version=versions.ENGINE.newest, **changes):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "vllm" else real(name))
        registration.why_not.cache_clear()
        logger._print_warning_once.cache_clear()
        return select(**changes)

    logging.getLogger("vllm").addHandler(handler)
    yield call, lines
    logging.getLogger("vllm").removeHandler(handler)
    registration.why_not.cache_clear()


@pytest.mark.parametrize("version", [versions.ENGINE.oldest, versions.ENGINE.newest, f"{versions.ENGINE.newest}.post1"])
def test_a_tested_version_is_selected_without_a_warning(select_anew, version):
    call, lines = select_anew
    assert call(version) is ETAPBackend and not lines


def test_a_newer_version_is_selected_with_one_warning(select_anew, select):
    call, lines = select_anew
    assert call("0.99.0") is select(dtype=torch.float16) is ETAPBackend
    (line,) = lines
    assert "vLLM 0.99.0" in line and str(versions.ENGINE) in line


def test_an_older_version_is_refused(select_anew):
    call, lines = select_anew
    with pytest.raises(ValueError, match="ETAP supports vLLM 0.32.0 and 0.33.0, this is vLLM 0.31.9"):
        call("0.31.9")
    assert not lines


def without(owner, name):
    return lambda patch: patch.delattr(owner, name)


def with_more_parameters(patch):
    old = MLACommonMetadataBuilder._build_decode
    patch.setattr(MLACommonMetadataBuilder, "_build_decode", lambda self, *, window_left, **more: old(self, **more))


MLA = mla_attention.__name__
LACKING = {
    "name": (
        without(workspace, "current_workspace_manager"),
        "ImportError: cannot import name 'current_workspace_manager' from 'vllm.v1.worker.workspace'",
    ),
    "module": (
        lambda patch: patch.setitem(sys.modules, "vllm.v1.kv_cache_interface", None),
        "ModuleNotFoundError: import of vllm.v1.kv_cache_interface halted",
    ),
    "hook": (without(AttentionBackend, "supports_combination"), f"{MLA}:MLACommonBackend.supports_combination"),
    "hook by a private name": (
        without(MLACommonMetadataBuilder, "_build_decode"),
        f"{MLA}:MLACommonMetadataBuilder._build_decode",
    ),
    "hook's parameter": (
        with_more_parameters,
        f"{MLA}:MLACommonMetadataBuilder._build_decode: new parameters window_left",
    ),
}
"""How something of vLLM goes, and the name that the refusal begins with."""


@pytest.mark.parametrize("what", LACKING)
def test_what_vllm_lacks_is_named_in_its_own_refusal(select_anew, monkeypatch, what):
    call, lines = select_anew
    remove, name = LACKING[what]
    version = "0.99.0"
    assert call(version) is ETAPBackend
    lines.clear()
    with monkeypatch.context() as patch:
        remove(patch)
        package = sys.modules["etap_backend.vllm"]
        for module in [name for name in sys.modules if name.startswith("etap_backend.vllm.")]:
            if module == registration.__name__:
                continue  # vLLM's enumeration holds its function
            patch.delitem(sys.modules, module)  # as in a process that imports them after this vLLM
            patch.delattr(package, module.rpartition(".")[2])
        with pytest.raises(ValueError, match="ETAP is not valid for this configuration") as refusal:
            call(version)
        assert f"vLLM {version} lacks what ETAP uses: {name}" in str(refusal.value)
        assert not lines, "nothing runs, so there is nothing to warn about"
        assert call(version, attention_backend="FLASH_ATTN_MLA").get_name() == "FLASH_ATTN_MLA"


@pytest.mark.parametrize("asked, chosen", [(None, 64), (16, 16), (48, 48), (128, 128)], ids=str)
def test_block_size_is_64_unless_the_user_asks_for_another(make_layer, fresh_workspaces, asked, chosen):
    _, config = make_layer(block_size=asked)
    assert config.cache_config.block_size == chosen


def test_beside_another_backend_the_block_size_is_64_too(engine_config):
    """vLLM looks for a size that all of a model's backends take, and prefers its default of 16."""
    flash_attention = AttentionBackendEnum.FLASH_ATTN_MLA.get_class()
    config = engine_config(attention_backend="ETAP")
    with set_current_vllm_config(config):
        assert not ETAPBackend.supports_block_size(16) and flash_attention.supports_block_size(16)
    assert current_platform._preferred_block_size_for_backends([ETAPBackend, flash_attention], 16, config) == 64


@pytest.mark.parametrize("block, split", [(16, 16), (48, 16), (64, 64), (96, 32), (128, 64), (1328, 16)])
@pytest.mark.parametrize("configured", [False, True], ids=["", "configured"])
def test_larger_blocks_are_split_into_the_largest_that_fit(engine_config, block, split, configured, monkeypatch):
    config = engine_config(attention_backend="ETAP", block_size=block) if configured else None
    monkeypatch.setattr("etap_backend.vllm.backend.get_current_vllm_config_or_none", lambda: config)
    spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert select_common_block_size(block, [ETAPBackend]) == split
    assert select_common_block_size(block, [ETAPBackend], [spec]) == split
