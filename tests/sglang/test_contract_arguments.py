"""What SGLang's own argument parser makes of the name etap, and what is refused there, before any weight is loaded."""

import importlib.metadata
import importlib.util
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.arg_groups.hisparse_hook import validate_hisparse  # noqa: E402
from sglang.srt.layers.attention import dsa_backend, flashmla_backend  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

from etap_backend.sglang import registration, versions  # noqa: E402

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

    def call(*flags, model=model_directory, raw=False):
        command = ["--model-path", model, "--skip-tokenizer-init", "--load-format", "dummy", *flags]
        monkeypatch.setattr(sys, "argv", ["launch_server", *map(str, command)])
        parsed = prepare_server_args(list(map(str, command)))
        if hasattr(parsed, "resolve_once"):
            parsed.resolve_once()
        return parsed if raw else resolved_view(parsed)

    return call


@pytest.mark.parametrize("name", ["etap", "etap_fp8_math"])
@pytest.mark.parametrize("flag", ["--attention-backend", "--decode-attention-backend", "--prefill-attention-backend"])
def test_name_is_a_choice_and_sets_the_page_size(resolve, flag, name):
    view = resolve(flag, name)
    assert getattr(view, flag.removeprefix("--").replace("-", "_")) == name
    assert view.page_size == 64


def test_a_name_goes_to_all_ranks_with_the_arguments(resolve):
    """What SGLang pickles for its schedulers has it, and their environment has no part in it."""
    arguments = resolve("--attention-backend", "etap_fp8_math", raw=True)
    assert resolved_view(pickle.loads(pickle.dumps(arguments))).attention_backend == "etap_fp8_math"


def test_a_mistyped_name_is_refused(resolve, capsys):
    with pytest.raises(SystemExit):
        resolve("--attention-backend", "etap_fp8")
    assert "invalid choice: 'etap_fp8'" in capsys.readouterr().err


def test_other_backends_keep_their_page_size(resolve):
    assert resolve("--attention-backend", "fa3").page_size == 1
    assert resolve("--attention-backend", "flashmla").page_size == 64


def test_prefill_may_have_another_backend(resolve):
    view = resolve("--decode-attention-backend", "etap", "--prefill-attention-backend", "fa3")
    assert (view.prefill_attention_backend, view.decode_attention_backend) == ("fa3", "etap")
    assert view.page_size == 64


MTP = (
    "--speculative-algorithm", "EAGLE", "--speculative-num-steps", 3, "--speculative-eagle-topk", 1,
    "--speculative-num-draft-tokens", 4,
)  # fmt: skip


CHOSEN = "etap-backend: ETAP_AUTO: "


@pytest.fixture
def auto(monkeypatch):
    registration._say.cache_clear()
    monkeypatch.setenv("ETAP_AUTO", "1")


def chosen(lines):
    return [line.removeprefix(CHOSEN) for line in lines if line.startswith(CHOSEN)]


def test_etap_may_be_the_default(resolve, auto, lines, model_directory):
    view = resolve()
    assert (view.attention_backend, view.page_size, view.dsa_decode_backend) == ("etap", 64, None)
    assert resolve().attention_backend == "etap" and chosen(lines) == ["etap"]


@pytest.mark.parametrize("wish", [None, "0"])
def test_it_is_not_by_itself(resolve, lines, monkeypatch, wish, sparse_model, model_directory):
    monkeypatch.delenv("ETAP_AUTO", raising=False)
    if wish:
        monkeypatch.setenv("ETAP_AUTO", wish)
    assert resolve().attention_backend == "fa3" and not chosen(lines)
    assert sparse_kernels(resolve(model=sparse_model)) == ("dsa", "flashmla_sparse", "fa3")


def test_sparse_attention_and_its_ranks_by_default(resolve, auto, lines, sparse_model):
    arguments = resolve(model=sparse_model, raw=True)
    assert sparse_kernels(resolved_view(pickle.loads(pickle.dumps(arguments)))) == ("etap", "etap", "etap")
    assert chosen(lines) == ["etap"]


def test_deepseek_v4_and_its_ranks_by_default(resolve, auto, lines, v4_model):
    arguments = resolve(model=v4_model, raw=True)
    view = resolved_view(pickle.loads(pickle.dumps(arguments)))
    assert (view.attention_backend, view.dsa_decode_backend, view.page_size) == ("dsv4", "etap", 256)
    assert chosen(lines) == ["etap"]


@pytest.mark.parametrize("flag", ["--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"])
def test_a_backend_that_is_named_stays(resolve, auto, lines, flag):
    view = resolve(flag, "fa3")
    assert getattr(view, flag.removeprefix("--").replace("-", "_")) == "fa3"
    assert "etap" not in (view.attention_backend, view.decode_attention_backend) and not chosen(lines)


@pytest.mark.parametrize("flags, reason", [
    (("--page-size", 48), "page_size 48 is not supported: wanted a power of two of at most 4096"),
    (("--kv-cache-dtype", "fp8_e5m2"), "kv_cache_dtype fp8_e5m2 is not supported: "),
    ((*MTP, "--speculative-draft-model-path", "/no/such"), "a draft model of its own, which may have no MLA "),
], ids=str)  # fmt: skip
def test_what_etap_refuses_falls_to_sglangs_default_with_one_line(resolve, auto, lines, flags, reason):
    if "--speculative-draft-model-path" in flags:
        with pytest.raises(Exception, match="no/such"):  # SGLang's own
            resolve(*flags)
    else:
        view = resolve(*flags)
        assert view.attention_backend not in (None, "etap")
    (line,) = chosen(lines)
    assert line.startswith(f"SGLang's own attention backend: {reason}")


def test_other_models_and_gpus_fall_to_sglangs_default(resolve, auto, lines, model_directory, tmp_path, monkeypatch):
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert resolve(model=changed_model(model_directory, tmp_path, **llama)).attention_backend == "fa3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert resolve().attention_backend != "etap"
    begins = ["the model's attention is not MLA", "compute capability 8.0 is not supported"]
    lines = [line.removeprefix("SGLang's own attention backend: ") for line in chosen(lines)]
    assert len(lines) == 2 and all(map(str.startswith, lines, begins)), lines


@pytest.mark.parametrize("wish", ["", "yes", "2"])
def test_other_values_are_refused_by_name(resolve, monkeypatch, wish):
    monkeypatch.setenv("ETAP_AUTO", wish)
    with pytest.raises(ValueError, match=f"ETAP_AUTO: wanted 0 or 1, got '{wish}'"):
        resolve()


@pytest.fixture
def a_chain(resolve, model_directory):
    """Asserts that a backend's blocks of drafts are one."""

    def check(backend, cache="auto", **model):
        view = resolve(
            "--attention-backend", backend, "--kv-cache-dtype", cache, "--speculative-algorithm", "DFLASH",
            "--speculative-draft-attention-backend", "fa3", "--speculative-draft-model-path", model_directory,
            "--speculative-dflash-block-size", 4, **model,
        )  # fmt: skip
        assert (view.attention_backend, view.speculative_draft_attention_backend) == (backend, "fa3")
        assert (view.speculative_eagle_topk, view.speculative_num_draft_tokens) == (1, 4)

    return check


@pytest.mark.parametrize("backend", ["etap", "flashinfer"])
def test_blocks_of_drafts_are_a_chain(a_chain, backend):
    a_chain(backend)


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("backend", ["etap", "dsa"])
def test_blocks_of_drafts_of_a_sparse_model_are_a_chain(a_chain, sparse_model, backend, cache):
    a_chain(backend, cache, model=sparse_model)


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_draft_of_a_block_has_another_backend(resolve, model_directory, monkeypatch, sparse_model, algorithm):
    flags = (*ETAP, "--speculative-algorithm", algorithm, "--speculative-draft-model-path", model_directory)
    named = "--speculative-draft-attention-backend"
    for draft, name in (((), None), ((named, "etap"), "etap")):
        reason = f"speculative_draft_attention_backend {name} is not supported with {algorithm}: wanted another's name"
        with pytest.raises(ValueError, match=f"etap: {reason}, such as fa3"):
            resolve(*flags, *draft)
    other = (named, "fa3")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    for model in (model_directory, sparse_model):
        with pytest.raises(ValueError, match=f"etap: SGLANG_RAGGED_VERIFY_MODE is not supported with {algorithm}"):
            resolve(*flags, *other, model=model)


@pytest.mark.parametrize("flags", [
    ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"),
    ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"),
    ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake"),
    ("--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"),
    ("--enable-hierarchical-cache", "--hicache-storage-backend", "nixl"),
    ("--enable-lmcache",),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_what_moves_pages_changes_nothing(resolve, flags, cache):
    view = resolve(*ETAP, "--kv-cache-dtype", cache, *flags)
    assert (view.attention_backend, view.page_size, view.kv_cache_dtype) == ("etap", 64, cache)
    other = resolve("--attention-backend", "flashmla", "--kv-cache-dtype", cache, *flags)
    for argument in ("hicache_io_backend", "hicache_mem_layout", "disaggregation_transfer_backend", "page_size"):
        assert getattr(view, argument) == getattr(other, argument)


DETERMINISTIC = "--enable-deterministic-inference"


@pytest.mark.parametrize("name", ["etap", "etap_fp8_math"])
def test_deterministic_inference_keeps_the_radix_cache(resolve, name):
    view = resolve("--attention-backend", name, DETERMINISTIC)
    assert (view.attention_backend, view.enable_deterministic_inference) == (name, True)
    assert not view.disable_radix_cache


def test_deterministic_decode_over_an_fp8_cache_with_anothers_prefill(resolve):
    flags = ("--decode-attention-backend", "etap", "--prefill-attention-backend", "fa3", "--kv-cache-dtype", "fp8_e4m3")
    assert resolve(*flags, DETERMINISTIC).decode_attention_backend == "etap"


def test_what_cannot_be_deterministic_is_refused(resolve, sparse_model, model_directory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for flags, reason, model in (
        (("--kv-cache-dtype", "fp8_e4m3"), "with an FP8 cache: nobody has shown", model_directory),
        (("--tp-size", 8, "--dcp-size", 8), "with decode context parallelism .dcp_size 8.", model_directory),
        ((), "with sparse attention: SGLang has no indexer", sparse_model),
    ):
        with pytest.raises(ValueError, match=f"etap: enable_deterministic_inference is not supported {reason}"):
            resolve(*ETAP, DETERMINISTIC, *flags, model=model)


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64, 128])
def test_page_size_of_the_user_stays(resolve, page_size):
    assert resolve(*ETAP, "--page-size", page_size).page_size == page_size


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_fp8_cache_with_every_type_of_model(resolve, dtype):
    view = resolve(*ETAP, "--kv-cache-dtype", "fp8_e4m3", "--dtype", dtype)
    assert (view.attention_backend, view.kv_cache_dtype, view.page_size) == ("etap", "fp8_e4m3", 64)


def prefill_graph(view):
    return view.cuda_graph_config.prefill.backend


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_prefill_has_the_cuda_graph_that_it_has_with_flash_attention(resolve, cache):
    own = prefill_graph(resolve("--attention-backend", "fa3", "--kv-cache-dtype", cache))
    view = resolve("--attention-backend", "etap", "--kv-cache-dtype", cache)
    assert prefill_graph(view) == own
    assert view.cuda_graph_config.decode.backend == "full"
    asked = ("--cuda-graph-backend-prefill", "breakable")
    assert prefill_graph(resolve("--attention-backend", "etap", "--kv-cache-dtype", cache, *asked)) == "breakable"


@pytest.mark.parametrize("name", ["etap", "etap_fp8_math"])
def test_chunked_prefix_cache_stays_on(resolve, name):
    assert not resolve("--attention-backend", name).disable_chunked_prefix_cache


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--page-size", 48), "page_size 48 is not supported: wanted a power of two of at most 4096"),
        (("--page-size", 192), "page_size 192 is not supported: wanted a power of two of at most 4096"),
        (("--page-size", 8192), "page_size 8192 is not supported: wanted a power of two of at most 4096"),
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


@pytest.mark.parametrize("phase", ["", "prefill-", "decode-"])
def test_prefill_context_parallelism_is_refused(resolve, monkeypatch, phase):
    """SGLang's experiment: the backend has to gather a prompt's rows, which FlashInfer's does not."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    flags = ("--tp-size", 8, "--enable-prefill-cp", "--cp-strategy", "interleave")
    with pytest.raises(ValueError, match="etap: prefill context parallelism .enable_prefill_cp. is not supported$"):
        resolve(f"--{phase}attention-backend", "etap", *flags)


@pytest.fixture
def version(monkeypatch):
    """Gives SGLang another version, and makes ETAP forget of which it warned."""
    real = importlib.metadata.version

    def change(version):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "sglang" else real(name))
        registration._say.cache_clear()

    yield change
    registration._say.cache_clear()


@pytest.fixture
def lines(monkeypatch):
    """What ETAP logs of arguments; SGLang configures logging anew and drops the handlers that pytest made."""
    logged = []
    monkeypatch.setattr(registration._logger, "handle", lambda record: logged.append(record.getMessage()))
    monkeypatch.setattr(registration._logger, "isEnabledFor", lambda level: True)
    return logged


@pytest.mark.parametrize("tested", [versions.ENGINE.oldest, versions.ENGINE.newest])
def test_a_tested_version_resolves_without_a_warning(resolve, version, lines, tested):
    version(tested)
    resolve(*ETAP)
    assert not lines


def test_a_newer_version_resolves_with_one_warning(resolve, version, lines):
    version("0.9.0")
    resolve("--attention-backend", "fa3")
    assert not lines
    assert resolve(*ETAP).page_size == resolve("--attention-backend", "etap_fp8_math").page_size == 64
    assert lines == [
        "etap-backend: SGLang 0.9.0 has all names that etap uses, but the tests of it ran in SGLang 0.5.17 to 0.5.23"
    ]


def with_more_parameters(patch):
    def more(self, q, k, v, layer, forward_batch, save_kv_cache=True, *, window_left): ...

    patch.setattr(AttentionBackend, "forward_decode", more)


FLASHMLA, BASE = flashmla_backend.__name__, AttentionBackend.__module__
LACKING = {
    "name": (
        lambda patch: patch.delattr(flashmla_backend, "maybe_create_verify_mask"),
        f"ImportError: cannot import name 'maybe_create_verify_mask' from '{FLASHMLA}'",
    ),
    "hook": (
        lambda patch: patch.delattr(AttentionBackend, "init_cuda_graph_state"),
        f"{BASE}:AttentionBackend.init_cuda_graph_state",
    ),
    "hook's parameter": (
        with_more_parameters,
        f"{BASE}:AttentionBackend.forward_decode: new parameters window_left",
    ),
}
"""By what of SGLang is gone: how it goes, and how the refusal begins to name it."""


@pytest.mark.parametrize("installed", [versions.ENGINE.newest, "0.9.0"])
@pytest.mark.parametrize("what", LACKING)
def test_what_sglang_lacks_is_named_before_weights_are_loaded(resolve, version, lines, monkeypatch, what, installed):
    version(installed)
    remove, name = LACKING[what]
    with monkeypatch.context() as patch:
        remove(patch)
        # As in a process that imports it after this SGLang.
        patch.delitem(sys.modules, "etap_backend.sglang.backend", raising=False)
        with pytest.raises(ValueError, match="--attention-backend etap: ") as refusal:
            resolve(*ETAP)
        assert f"SGLang {installed} lacks what etap uses: {name}" in str(refusal.value)
        assert not lines, "nothing runs, so there is nothing to be warned of"
        assert resolve("--attention-backend", "fa3").page_size == 1


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


SPARSE_MODELS = {
    "DeepSeek-V3.2": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "GLM-5": {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"},
}
INDEXER = {"index_topk": 128, "index_n_heads": 32, "index_head_dim": 128}


def changed_model(model_directory, folder, **changes):
    config = json.loads((model_directory / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=SPARSE_MODELS)
def sparse_model(request, model_directory, tmp_path):
    """The folder of a small model with sparse attention, of which only the config.json exists."""
    return changed_model(model_directory, tmp_path, **INDEXER, **SPARSE_MODELS[request.param])


def sparse_kernels(view):
    return view.attention_backend, view.dsa_prefill_backend, view.dsa_decode_backend


@pytest.mark.parametrize("cache, stored", [("auto", "bfloat16"), ("bf16", "bfloat16"), ("fp8_e4m3", "fp8_e4m3")])
@pytest.mark.parametrize("speculation", [(), MTP], ids=["", "MTP"])
def test_sparse_attention_by_the_same_name(resolve, sparse_model, cache, stored, speculation):
    view = resolve(*ETAP, "--kv-cache-dtype", cache, *speculation, model=sparse_model)
    assert sparse_kernels(view) == ("etap", "etap", "etap")
    assert (view.page_size, view.kv_cache_dtype) == (64, stored)


def test_the_kernels_of_sparse_attention_go_to_all_ranks_with_the_arguments(resolve, sparse_model):
    arguments = resolve(*ETAP, model=sparse_model, raw=True)
    assert sparse_kernels(resolved_view(pickle.loads(pickle.dumps(arguments)))) == ("etap", "etap", "etap")


@pytest.mark.parametrize("cache, prefill, decode", [
    ("auto", "flashmla_sparse", "fa3"), ("fp8_e4m3", "flashmla_kv", "flashmla_kv"),
])  # fmt: skip
def test_without_the_name_sparse_attention_is_sglangs(resolve, sparse_model, cache, prefill, decode):
    view = resolve("--kv-cache-dtype", cache, model=sparse_model)
    assert sparse_kernels(view) == ("dsa", prefill, decode)


@pytest.mark.parametrize("prefill", ["flashmla_sparse", "flashmla_kv", "tilelang"])
def test_prefill_of_sparse_attention_may_have_another_kernel(resolve, sparse_model, prefill):
    view = resolve(*ETAP, "--dsa-prefill-backend", prefill, model=sparse_model)
    assert sparse_kernels(view) == ("etap", prefill, "etap")


@pytest.mark.parametrize("sparse_model", ["DeepSeek-V3.2"], indirect=True)
@pytest.mark.parametrize("flags, reason", [
    (("--dsa-decode-backend", "flashmla_kv"), "--dsa-decode-backend flashmla_kv is not supported: wanted none"),
    (("--dsa-prefill-backend", "fa3"), "--dsa-prefill-backend fa3 is not supported: ETAP stands in its place"),
    (("--dtype", "float16"), "dtype float16 is not supported: wanted bfloat16"),
    (("--prefill-attention-backend", "dsa"), "beside dsa it is not supported with sparse attention"),
    (("--decode-attention-backend", "fa3"), "beside fa3 it is not supported with sparse attention"),
    ((*MTP, "--speculative-draft-attention-backend", "dsa"), "speculative_draft_attention_backend dsa is not"),
    (
        (*MTP, "--speculative-draft-attention-backend", "etap_fp8_math"),
        "speculative_draft_attention_backend etap_fp8_math is not supported: wanted etap, or none",
    ),
    (
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 4),
        "speculative algorithm NGRAM is not supported",
    ),
], ids=str)  # fmt: skip
def test_refuses_with_sparse_attention(resolve, sparse_model, flags, reason):
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
        resolve(*ETAP, *flags, model=sparse_model)


HISPARSE = ("--enable-hisparse", "--disable-radix-cache")


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
def test_rows_in_host_memory(resolve, sparse_model, cache):
    """SGLang has a list of the kernels that may read its hot buffer, and looks there when it has resolved arguments."""
    flags = (*ETAP, "--kv-cache-dtype", cache, *HISPARSE)
    arguments = resolve(*flags, model=sparse_model, raw=True)
    validate_hisparse(arguments)
    assert sparse_kernels(resolved_view(arguments)) == ("etap", "etap", "etap")
    others = resolve(*flags, "--dsa-prefill-backend", "flashmla_auto", model=sparse_model, raw=True)
    with pytest.raises(ValueError, match="HiSparse supports DSA prefill backend.* but got .*flashmla_auto"):
        validate_hisparse(others)


@pytest.fixture(params=["GLM-5.3-Flash", "HY-V4", "Dots3-Note"])
def newer_model(request, tmp_path, monkeypatch):
    """The folder of a model that SGLang 0.5.17 does not know; of the last a small one, of the others as they come."""
    if not importlib.util.find_spec("sglang.srt.configs.glm5_next"):
        pytest.skip("this SGLang does not know the model")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = {"architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4"}
    if request.param == "GLM-5.3-Flash":
        config = json.loads((MODELS / "glm-5.3-flash.json").read_text())
    elif request.param == "Dots3-Note":
        layers = ["full_attention", "sliding_attention"] * 2
        config = {"architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note", "num_hidden_layers": 4}
        config |= INDEXER | {"layer_types": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("newer_model", ["GLM-5.3-Flash"], indirect=True)
@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("tp", [1, 8])
def test_a_model_without_rope_has_both_caches(resolve, newer_model, cache, tp):
    view = resolve(*ETAP, "--kv-cache-dtype", cache, "--tp-size", tp, model=newer_model)
    assert (*sparse_kernels(view), view.kv_cache_dtype) == ("etap", "etap", "etap", cache)


@pytest.mark.parametrize("newer_model", ["HY-V4"], indirect=True)
def test_attention_sinks(resolve, newer_model):
    assert sparse_kernels(resolve(*ETAP, "--tp-size", 8, model=newer_model)) == ("etap", "etap", "etap")
    assert sparse_kernels(resolve(model=newer_model)) == ("dsa", "flashmla_sparse", "flashmla_sparse")
    with pytest.raises(
        ValueError, match="etap: --dsa-prefill-backend .* is not supported with attention sinks: wanted"
    ):
        resolve(*ETAP, "--dsa-prefill-backend", "flashmla_sparse", model=newer_model)


@pytest.mark.parametrize("newer_model", ["Dots3-Note"], indirect=True)
def test_a_model_with_two_backends_of_sglangs_is_refused(resolve, newer_model):
    assert resolve(model=newer_model).attention_backend == "dsa"
    for flags in (ETAP, ("--decode-attention-backend", "etap")):
        with pytest.raises(ValueError, match="etap: Dots3-Note is not supported: .* wanted no attention backend named"):
            resolve(*flags, model=newer_model)


def test_a_part_of_the_name_is_refused_with_sparse_attention(resolve, sparse_model):
    with pytest.raises(ValueError, match="--attention-backend etap: beside fa3 it is not supported with sparse"):
        resolve("--decode-attention-backend", "etap", model=sparse_model)


def test_fp8_math_is_refused_with_sparse_attention(resolve, sparse_model):
    reason = "it multiplies FP8 caches of dense attention, and the model's is sparse: wanted etap"
    with pytest.raises(ValueError, match=f"--attention-backend etap_fp8_math: {reason}"):
        resolve("--attention-backend", "etap_fp8_math", model=sparse_model)


@pytest.mark.parametrize("sparse_model", ["DeepSeek-V3.2"], indirect=True)
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_decode_context_parallelism_of_sparse_attention(resolve, sparse_model, monkeypatch, ranks, cache):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    flags = (*ETAP, "--tp-size", 8, "--dcp-size", ranks, "--kv-cache-dtype", cache)
    if versions.share_of_lists() is None:
        with pytest.raises(ValueError, match="etap: decode context parallelism .* is not supported with sparse"):
            resolve(*flags, model=sparse_model)
        return
    view = resolve(*flags, model=sparse_model)
    assert (*sparse_kernels(view), view.dcp_size) == ("etap", "etap", "etap", ranks)
    for more, reason in (
        (("--dsa-prefill-backend", "flashmla_sparse"), "--dsa-prefill-backend flashmla_sparse is not supported with"),
        (MTP, "speculative decoding with decode context parallelism"),
    ):
        with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
            resolve(*flags, *more, model=sparse_model)


@pytest.mark.parametrize("parallelism, reason", [
    (("--enable-prefill-cp", "--cp-strategy", "interleave"), "prefill context parallelism"),
], ids=str)  # fmt: skip
def test_context_parallelism_is_refused_with_sparse_attention(resolve, sparse_model, monkeypatch, parallelism, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason} .* is not supported with sparse"):
        resolve(*ETAP, "--tp-size", 8, *parallelism, model=sparse_model)


@pytest.mark.parametrize("changes, reason", [
    ({"kv_lora_rank": 256}, "head_dim 320 is not supported: wanted 576"),
    ({"qk_rope_head_dim": 32}, "head_dim 544 is not supported: wanted 576"),
], ids=str)  # fmt: skip
def test_other_dimensions_of_sparse_attention_are_refused(resolve, model_directory, tmp_path, changes, reason):
    model = changed_model(model_directory, tmp_path, **INDEXER, **SPARSE_MODELS["DeepSeek-V3.2"], **changes)
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
        resolve(*ETAP, model=model)


def test_queries_that_are_scaled_by_position(resolve, model_directory, tmp_path, monkeypatch):
    """Mistral-Large-3's. SGLang scales them in one tensor only, and no keys that it makes of latent rows."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    scaling = {"llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}}
    model = changed_model(model_directory, tmp_path, **scaling)
    for backend in ("flashmla", "etap"):
        assert resolve("--attention-backend", backend, model=model).attention_backend == backend
    for flags, what in (
        (("--kv-cache-dtype", "fp8_e4m3"), "kv_cache_dtype fp8_e4m3"),
        (("--tp-size", 8, "--dcp-size", 8), "decode context parallelism .dcp_size 8."),
        ((DETERMINISTIC,), "enable_deterministic_inference"),
    ):
        with pytest.raises(
            ValueError, match=rf"etap: a model whose .* \(llama_4_scaling\) is not supported with {what}"
        ):
            resolve(*ETAP, *flags, model=model)


V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "compress_ratios": [4, 4],
    "sliding_window": 128,
}


@pytest.fixture
def v4_model(model_directory, tmp_path):
    """The folder of a small DeepSeek-V4, of which only the config.json exists."""
    return changed_model(model_directory, tmp_path, **INDEXER, **V4)


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("speculation", [(), MTP], ids=["", "MTP"])
def test_the_name_is_kept_for_deepseek_v4(resolve, v4_model, cache, speculation):
    """SGLang renames the backend, and pickles for its ranks who decodes."""
    arguments = resolve(*ETAP, "--kv-cache-dtype", cache, *speculation, model=v4_model, raw=True)
    for view in (resolved_view(arguments), resolved_view(pickle.loads(pickle.dumps(arguments)))):
        assert (view.attention_backend, view.dsa_decode_backend, view.page_size) == ("dsv4", "etap", 256)
        assert view.kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("flags", [(), ("--attention-backend", "dsv4"), ("--attention-backend", "fa3")], ids=str)
def test_without_the_name_deepseek_v4_is_sglangs(resolve, v4_model, flags):
    view = resolve(*flags, model=v4_model)
    assert (view.attention_backend, view.dsa_decode_backend) == ("dsv4", None)


@pytest.mark.parametrize("flags, reason", [
    (("--dtype", "float16"), "dtype float16 is not supported: wanted bfloat16"),
    (("--kv-cache-dtype", "bfloat16"), "kv_cache_dtype bfloat16 is not supported with DeepSeek-V4: wanted auto or fp8"),
    (("--decode-attention-backend", "etap"), "decode_attention_backend etap is not supported with DeepSeek-V4: wanted"),
    (("--prefill-attention-backend", "fa3"), "prefill_attention_backend fa3 is not supported with DeepSeek-V4: wanted"),
    (
        (*MTP, "--speculative-draft-attention-backend", "etap"),
        "speculative_draft_attention_backend etap is not supported with DeepSeek-V4: wanted none",
    ),
    (("--enable-hisparse", "--disable-radix-cache"), "a KV cache in host memory .* is not supported with sparse"),
], ids=str)  # fmt: skip
def test_refuses_with_deepseek_v4(resolve, v4_model, flags, reason):
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
        resolve(*ETAP, *flags, model=v4_model)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_part_of_the_name_is_refused_with_deepseek_v4(resolve, v4_model, phase):
    reason = f"{phase}_attention_backend etap is not supported with DeepSeek-V4: wanted none"
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
        resolve(f"--{phase}-attention-backend", "etap", model=v4_model)


def test_fp8_math_is_refused_with_deepseek_v4(resolve, v4_model):
    reason = "it multiplies FP8 caches of dense attention, and the model is DeepSeek-V4: wanted etap"
    with pytest.raises(ValueError, match=f"--attention-backend etap_fp8_math: {reason}"):
        resolve("--attention-backend", "etap_fp8_math", model=v4_model)


@pytest.mark.parametrize("flags, reason", [
    (("--dcp-size", 8), "decode context parallelism"),
    (("--enable-prefill-cp", "--cp-strategy", "interleave"), "prefill context parallelism"),
], ids=str)  # fmt: skip
def test_context_parallelism_is_refused_with_deepseek_v4(resolve, v4_model, monkeypatch, flags, reason):
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "1")  # SGLang sets it
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason} .* is not supported"):
        resolve(*ETAP, "--tp-size", 8, *flags, model=v4_model)


def test_prefill_in_fp8_is_refused_with_deepseek_v4(resolve, v4_model):
    if not hasattr(resolved_view(resolve(model=v4_model, raw=True)), "dsv4_prefill_backend"):
        pytest.skip("this SGLang has no such prefill")
    reason = "dsv4_prefill_backend flashmla_sparse_q8 is not supported with DeepSeek-V4: wanted auto"
    with pytest.raises(ValueError, match=f"--attention-backend etap: {reason}"):
        resolve(*ETAP, "--dsv4-prefill-backend", "flashmla_sparse_q8", model=v4_model)


def test_the_name_is_kept_for_deepseek_v4_1(resolve, model_directory, tmp_path):
    if not importlib.util.find_spec("sglang.srt.configs.deepseek_v41"):
        pytest.skip("this SGLang does not know the model")
    v41 = V4 | {"model_type": "deepseek_v41", "compress_ratios": [1, 2]}
    view = resolve(*ETAP, model=changed_model(model_directory, tmp_path, **INDEXER, **v41))
    assert (view.attention_backend, view.dsa_decode_backend) == ("dsv4", "etap")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=str)
def test_other_gpus_are_refused_with_deepseek_v4(resolve, v4_model, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    with pytest.raises(ValueError, match="compiled for sm_90a"):
        resolve(*ETAP, model=v4_model)


def without_function(patch):
    patch.delattr(versions.flash_mla(), "flash_mla_sparse_fwd")


def without_factory(patch):
    patch.setitem(ATTENTION_BACKENDS, "dsv4", lambda runner: None)


def without_hook(patch):
    patch.setattr(HookRegistry, "_patched", HookRegistry._patched - {versions.V4_STEPS_HOOK})


@pytest.mark.parametrize("remove, lacked", [
    (without_function, "AttributeError: .*flash_mla_sparse_fwd"),
    (without_factory, "attention backend dsv4"),
    (without_hook, "sglang.*_create_dsv4_decode_backend"),
])  # fmt: skip
def test_what_sglang_lacks_for_deepseek_v4_refuses_no_other_model(resolve, v4_model, monkeypatch, remove, lacked):
    remove(monkeypatch)
    with pytest.raises(ValueError, match=f"--attention-backend etap: .* lacks what etap uses: {lacked}"):
        resolve(*ETAP, model=v4_model)
    assert resolve(*ETAP).attention_backend == "etap"


@pytest.mark.parametrize("sparse_model", ["DeepSeek-V3.2"], indirect=True)
def test_what_sglang_lacks_for_sparse_attention_refuses_no_other_model(resolve, sparse_model, monkeypatch):
    monkeypatch.delattr(DeepseekSparseAttnBackend, "_forward_fa3")
    with pytest.raises(ValueError, match=f"lacks what etap uses: {dsa_backend.__name__}:.*_forward_fa3"):
        resolve(*ETAP, model=sparse_model)
    assert resolve(*ETAP).attention_backend == "etap"
