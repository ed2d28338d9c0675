"""What SGLang's own argument parser makes of the name etap, and what is refused there, before any weight is loaded."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

try:
    from sglang.srt.arg_groups.overrides import resolved_view
except ImportError:

    def resolved_view(arguments):
        """0.5.17 writes what it resolves into the arguments themselves."""
        return arguments


ETAP = ("--attention-backend", "etap")
CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs/sglang"


MODELS = Path(__file__).resolve().parents[2] / "configs/models"


@pytest.fixture
def resolve(model_directory, monkeypatch):
    """Resolves flags as the launcher does."""

    def call(*flags, model=model_directory):
        command = ["--model-path", model, "--skip-tokenizer-init", "--load-format", "dummy", *flags]
        monkeypatch.setattr(sys, "argv", ["launch_server", *map(str, command)])
        arguments = prepare_server_args(list(map(str, command)))
        if hasattr(arguments, "resolve_once"):
            arguments.resolve_once()
        return resolved_view(arguments)

    return call


@pytest.mark.parametrize("flag", ["--attention-backend", "--decode-attention-backend", "--prefill-attention-backend"])
def test_name_is_a_choice_and_sets_the_page_size(resolve, flag):
    view = resolve(flag, "etap")
    assert getattr(view, flag.removeprefix("--").replace("-", "_")) == "etap"
    assert view.page_size == 64


def test_other_backends_keep_their_page_size(resolve):
    assert resolve("--attention-backend", "fa3").page_size == 1
    assert resolve("--attention-backend", "flashmla").page_size == 64


def test_prefill_may_have_another_backend(resolve):
    view = resolve("--decode-attention-backend", "etap", "--prefill-attention-backend", "fa3")
    assert (view.prefill_attention_backend, view.decode_attention_backend) == ("fa3", "etap")
    assert view.page_size == 64


@pytest.mark.parametrize("page_size", [64, 128])
def test_page_size_of_the_user_stays(resolve, page_size):
    assert resolve(*ETAP, "--page-size", page_size).page_size == page_size


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_fp8_cache_with_every_type_of_model(resolve, dtype):
    view = resolve(*ETAP, "--kv-cache-dtype", "fp8_e4m3", "--dtype", dtype)
    assert (view.attention_backend, view.kv_cache_dtype, view.page_size) == ("etap", "fp8_e4m3", 64)


def test_chunked_prefix_cache_stays_on(resolve):
    assert not resolve(*ETAP).disable_chunked_prefix_cache


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--page-size", 16), "page_size 16 is not supported: wanted a multiple of 64"),
        (("--page-size", 1), "page_size 1 is not supported: wanted a multiple of 64"),
        (("--dtype", "float32"), "dtype float32 is not supported"),
        (("--kv-cache-dtype", "fp8_e5m2"), "kv_cache_dtype fp8_e5m2 is not supported"),
        (
            ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 4),
            "speculative algorithm NGRAM is not supported",
        ),
    ],
    ids=str,
)
def test_refuses(resolve, flags, reason):
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
        resolve(*ETAP, *flags)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_refuses_other_gpus(resolve, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    with pytest.raises(ValueError, match="compiled for sm_90a"):
        resolve(*ETAP)


def test_refuses_without_the_compiled_library(resolve, monkeypatch, tmp_path):
    from etap_backend import _library

    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "nothing.so"))
    _library.library.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"no compiled library at .*nothing\.so"):
            resolve(*ETAP)
    finally:
        monkeypatch.undo()
        _library.library.cache_clear()


def test_unknown_name_is_refused_and_the_refusal_offers_etap(resolve, capsys):
    with pytest.raises(SystemExit):
        resolve("--attention-backend", "nosuch")
    assert "'etap'" in capsys.readouterr().err


@pytest.fixture(params=["kimi-k2", "kimi-k3"])
def kimi(request, tmp_path, monkeypatch):
    """The folder of a whole Kimi model, of which only the config.json exists, on eight GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    shutil.copy(MODELS / f"{request.param}.json", tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_kimis_attention_is_taken(resolve, kimi, cache):
    view = resolve(*ETAP, "--tp-size", 8, "--kv-cache-dtype", cache, model=kimi)
    assert (view.attention_backend, view.page_size, view.kv_cache_dtype) == ("etap", 64, cache)
    assert not view.disable_radix_cache


@pytest.mark.parametrize("kimi", ["kimi-k2"], indirect=True)
def test_context_parallelism_of_kimi_k2(resolve, kimi):
    assert resolve(*ETAP, "--tp-size", 8, "--dcp-size", 8, model=kimi).dcp_size == 8


@pytest.mark.parametrize("kimi", ["kimi-k3"], indirect=True)
def test_context_parallelism_of_kimi_k3_is_for_backends_that_sglang_names(resolve, kimi):
    with pytest.raises(AssertionError, match="Kimi-K3 DCP must be .* got 'etap'"):
        resolve(*ETAP, "--tp-size", 8, "--dcp-size", 8, model=kimi)
