"""What SGLang's own argument parser makes of the name etap, and what is refused there, before any weight is loaded."""

import importlib.metadata
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.arg_groups.hisparse_hook import validate_hisparse  # noqa: E402
from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.layers.attention import dsa_backend, flashmla_backend  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402 - reads the choices that plugins extend

from etap_backend.sglang import flash_mla, registration, versions  # noqa: E402

WHOLE_MODELS = Path(__file__).resolve().parents[2] / "configs/models"
INDEXER = {"index_topk": 128, "index_n_heads": 32, "index_head_dim": 128}
V32 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"} | INDEXER
V4 = INDEXER | {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "head_dim": 512, "sliding_window": 128,
    "compress_ratios": [4, 4],
}  # fmt: skip
CHANGES = {
    "dense": {},
    "V3.2": V32,
    "V3.2, latent 256": V32 | {"kv_lora_rank": 256},
    "V3.2, rope 32": V32 | {"qk_rope_head_dim": 32},
    "GLM-5": {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"} | INDEXER,
    "Mistral": {"llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}},
    "Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "V4": V4,
    "V4.1": V4 | {"model_type": "deepseek_v41", "compress_ratios": [1, 2]},
}
"""For each model, its differences from the configuration of a small dense one."""
SMALL_MODELS = {
    "HY-V4": {"architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4"},
    "Dots3-Note": {
        "architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note", "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    } | INDEXER,
}  # fmt: skip
"""Models whose configuration shares nothing with the dense one."""
SPARSE_MODELS = ("V3.2", "GLM-5")

ETAP = ("--attention-backend", "etap")
PHASES = ("", "prefill-", "decode-")
MTP = (
    "--speculative-algorithm", "EAGLE", "--speculative-num-steps", 3, "--speculative-eagle-topk", 1,
    "--speculative-num-draft-tokens", 4,
)  # fmt: skip
TREE = ("--speculative-eagle-topk", 2)
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 4)
DRAFT_BACKEND = "--speculative-draft-attention-backend"
DETERMINISTIC = "--enable-deterministic-inference"
HISPARSE = ("--enable-hisparse", "--disable-radix-cache")
PREFILL_CP = ("--tp-size", 8, "--enable-prefill-cp", "--cp-strategy", "interleave")
DCP = ("--tp-size", 8, "--dcp-size", 8)


@pytest.fixture
def folder(model_directory, tmp_path):
    """Makes the folder of a model with only its config.json."""

    def make(model):
        directory = tmp_path / model
        directory.mkdir(exist_ok=True)
        if model in CHANGES:
            config = json.loads((model_directory / "config.json").read_text()) | CHANGES[model]
        else:
            config = SMALL_MODELS.get(model) or json.loads((WHOLE_MODELS / f"{model}.json").read_text())
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


@pytest.fixture
def resolve(folder, monkeypatch):
    """Resolves flags as the launcher does, on a machine with eight GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "1")  # SGLang sets it

    def call(*flags, model="dense", raw=False):
        command = ["--model-path", folder(model), "--skip-tokenizer-init", "--load-format", "dummy", *flags]
        monkeypatch.setattr(sys, "argv", ["launch_server", *map(str, command)])
        parsed = prepare_server_args(list(map(str, command)))
        parsed.resolve_once()
        return parsed if raw else resolved_view(parsed)

    return call


def on_a_rank(arguments):
    """What a scheduler gets, with whatever environment."""
    return resolved_view(pickle.loads(pickle.dumps(arguments)))


def kernels(view):
    return view.attention_backend, view.dsa_prefill_backend, view.dsa_decode_backend


@pytest.fixture
def refuses(resolve):
    """Asserts that ETAP refuses flags and names an argument."""

    def check(flags, argument, model="dense", name="etap"):
        with pytest.raises(ValueError) as refusal:
            resolve(*flags, model=model)
        text = str(refusal.value)
        assert text.startswith(f"--attention-backend {name}: ") and argument in text, text

    return check


@pytest.fixture
def lines(monkeypatch):
    """What ETAP logs of arguments; SGLang configures logging anew and drops the handlers that pytest made."""
    logged = []
    registration._log_once.cache_clear()
    monkeypatch.setattr(registration._logger, "handle", lambda record: logged.append(record.getMessage()))
    monkeypatch.setattr(registration._logger, "isEnabledFor", lambda level: True)
    yield logged
    registration._log_once.cache_clear()


@pytest.mark.parametrize("name", ["etap", "etap_fp8_math"])
@pytest.mark.parametrize("phase", PHASES)
def test_name_is_a_choice_and_sets_the_page_size(resolve, phase, name):
    arguments = resolve(f"--{phase}attention-backend", name, raw=True)
    for view in (resolved_view(arguments), on_a_rank(arguments)):
        assert getattr(view, f"{phase}attention-backend".replace("-", "_")) == name
        assert view.page_size == 64 and not view.disable_chunked_prefix_cache


@pytest.mark.parametrize("name", ["etap_fp8", "nosuch"])
def test_another_name_is_refused_and_the_refusal_offers_etap(resolve, capsys, name):
    with pytest.raises(SystemExit):
        resolve("--attention-backend", name)
    error = capsys.readouterr().err
    assert f"invalid choice: '{name}'" in error and "'etap'" in error


def test_other_backends_keep_their_page_size(resolve):
    assert resolve("--attention-backend", "fa3").page_size == 1
    assert resolve("--attention-backend", "flashmla").page_size == 64


def test_prefill_may_have_another_backend(resolve):
    view = resolve("--decode-attention-backend", "etap", "--prefill-attention-backend", "fa3")
    assert (view.prefill_attention_backend, view.decode_attention_backend) == ("fa3", "etap")
    assert view.page_size == 64


AUTO = "etap-backend: ETAP_AUTO: "
FALLS = f"{AUTO}SGLang's own attention backend: "


@pytest.fixture
def auto(monkeypatch):
    monkeypatch.setenv("ETAP_AUTO", "1")


@pytest.mark.parametrize("model, wanted", [
    ("dense", ("etap", None, None, 64)),
    *((model, ("etap", "etap", "etap", 64)) for model in SPARSE_MODELS),
    ("V4", ("dsv4", None, "etap", 256)),
], ids=str)  # fmt: skip
def test_etap_may_be_the_default_on_all_ranks(resolve, auto, lines, model, wanted):
    for _ in range(2):
        view = on_a_rank(resolve(model=model, raw=True))
        assert (*kernels(view), view.page_size) == wanted
    assert lines == [f"{AUTO}etap"]


@pytest.mark.parametrize("wish", [None, "", "0"])
def test_it_is_not_by_itself(resolve, lines, monkeypatch, wish):
    monkeypatch.delenv("ETAP_AUTO", raising=False)
    if wish is not None:
        monkeypatch.setenv("ETAP_AUTO", wish)
    assert resolve().attention_backend == "fa3" and not lines
    assert kernels(resolve(model="V3.2")) == ("dsa", "flashmla_sparse", "fa3")


@pytest.mark.parametrize("phase", PHASES)
def test_a_backend_that_is_named_stays(resolve, auto, lines, phase):
    view = resolve(f"--{phase}attention-backend", "fa3")
    assert getattr(view, f"{phase}attention-backend".replace("-", "_")) == "fa3"
    assert "etap" not in (view.attention_backend, view.decode_attention_backend) and not lines


@pytest.mark.parametrize("flags, model, reason", [
    (("--page-size", 48), "dense", "page_size 48"),
    (("--kv-cache-dtype", "fp8_e5m2"), "dense", "kv_cache_dtype fp8_e5m2"),
    ((), "Llama", "the model's attention is not MLA"),
], ids=str)  # fmt: skip
def test_what_etap_refuses_falls_to_sglangs_default_with_one_line(resolve, auto, lines, flags, model, reason):
    assert resolve(*flags, model=model).attention_backend not in (None, "etap")
    (line,) = lines
    assert line.startswith(FALLS + reason)


def test_a_separate_draft_model_and_other_gpus_fall_to_sglangs_default(resolve, auto, lines, monkeypatch):
    with pytest.raises(Exception, match="no/such"):  # SGLang's own
        resolve(*MTP, "--speculative-draft-model-path", "/no/such")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert resolve().attention_backend != "etap"
    assert len(lines) == 2 and all(line.startswith(FALLS) for line in lines)
    assert "speculative_draft_model_path" in lines[0] and "compute capability 8.0" in lines[1]


@pytest.mark.parametrize("wish", [" ", "yes", "2"])
def test_other_values_are_refused_by_name(resolve, monkeypatch, wish):
    monkeypatch.setenv("ETAP_AUTO", wish)
    with pytest.raises(ValueError, match="ETAP_AUTO"):
        resolve()


@pytest.mark.parametrize("backend, model, cache", [
    ("etap", "dense", "auto"), ("flashinfer", "dense", "auto"),
    *((backend, "V3.2", cache) for backend in ("etap", "dsa") for cache in ("auto", "fp8_e4m3")),
], ids=str)  # fmt: skip
def test_blocks_of_drafts_are_a_chain(resolve, folder, backend, model, cache):
    view = resolve(
        "--attention-backend", backend, "--kv-cache-dtype", cache, "--speculative-algorithm", "DFLASH", DRAFT_BACKEND,
        "fa3", "--speculative-draft-model-path", folder("dense"), "--speculative-dflash-block-size", 4, model=model,
    )  # fmt: skip
    assert (view.attention_backend, view.speculative_draft_attention_backend) == (backend, "fa3")
    assert (view.speculative_eagle_topk, view.speculative_num_draft_tokens) == (1, 4)


@pytest.mark.parametrize("model", ["dense", "V3.2"])
@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_draft_of_a_block_has_another_backend_and_no_ragged_verification(
    refuses, folder, monkeypatch, model, algorithm
):
    flags = (*ETAP, "--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder("dense"))
    for draft in ((), (DRAFT_BACKEND, "etap")):
        refuses((*flags, *draft), "speculative_draft_attention_backend", model)
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    refuses((*flags, DRAFT_BACKEND, "fa3"), "SGLANG_RAGGED_VERIFY_MODE", model)


@pytest.mark.parametrize("flags", [
    ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"),
    ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"),
    ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake"),
    ("--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"),
    ("--enable-lmcache",),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_what_moves_pages_changes_nothing(resolve, flags, cache):
    view = resolve(*ETAP, "--kv-cache-dtype", cache, *flags)
    assert (view.attention_backend, view.page_size, view.kv_cache_dtype) == ("etap", 64, cache)
    other = resolve("--attention-backend", "flashmla", "--kv-cache-dtype", cache, *flags)
    for argument in ("hicache_io_backend", "hicache_mem_layout", "disaggregation_transfer_backend", "page_size"):
        assert getattr(view, argument) == getattr(other, argument)


@pytest.mark.parametrize("name", ["etap", "etap_fp8_math"])
def test_deterministic_inference_keeps_the_radix_cache(resolve, name):
    view = resolve("--attention-backend", name, DETERMINISTIC)
    assert (view.attention_backend, view.enable_deterministic_inference) == (name, True)
    assert not view.disable_radix_cache


def test_deterministic_decode_over_an_fp8_cache_with_anothers_prefill(resolve):
    flags = ("--decode-attention-backend", "etap", "--prefill-attention-backend", "fa3", "--kv-cache-dtype", "fp8_e4m3")
    assert resolve(*flags, DETERMINISTIC).decode_attention_backend == "etap"


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64, 128])
def test_page_size_of_the_user_stays(resolve, page_size):
    assert resolve(*ETAP, "--page-size", page_size).page_size == page_size


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_fp8_cache_with_every_type_of_model(resolve, dtype):
    view = resolve(*ETAP, "--kv-cache-dtype", "fp8_e4m3", "--dtype", dtype)
    assert (view.attention_backend, view.kv_cache_dtype, view.page_size) == ("etap", "fp8_e4m3", 64)


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_prefill_has_the_cuda_graph_that_it_has_with_flash_attention(resolve, cache):
    def graph(*flags):
        return resolve("--kv-cache-dtype", cache, *flags).cuda_graph_config

    assert graph(*ETAP).prefill.backend == graph("--attention-backend", "fa3").prefill.backend
    assert graph(*ETAP).decode.backend == "full"
    assert graph(*ETAP, "--cuda-graph-backend-prefill", "breakable").prefill.backend == "breakable"


@pytest.mark.parametrize("model, flags, argument", [
    ("dense", ("--page-size", 48), "page_size 48"),
    ("dense", ("--page-size", 8192), "page_size 8192"),
    ("dense", ("--dtype", "float32"), "dtype float32"),
    ("dense", ("--kv-cache-dtype", "fp8_e5m2"), "kv_cache_dtype fp8_e5m2"),
    ("dense", NGRAM, "speculative algorithm NGRAM"),
    *((model, (*MTP, *TREE), "speculative_eagle_topk 2") for model in ("dense", "V3.2")),
    ("dense", PREFILL_CP, "enable_prefill_cp"),
    ("dense", (DETERMINISTIC, "--kv-cache-dtype", "fp8_e4m3"), "enable_deterministic_inference"),
    ("dense", (DETERMINISTIC, *DCP), "enable_deterministic_inference"),
    ("V3.2", (DETERMINISTIC,), "enable_deterministic_inference"),
    ("Mistral", ("--kv-cache-dtype", "fp8_e4m3"), "kv_cache_dtype fp8_e4m3"),
    ("Mistral", DCP, "dcp_size 8"),
    ("Mistral", (DETERMINISTIC,), "enable_deterministic_inference"),
    ("V3.2", ("--dsa-decode-backend", "flashmla_kv"), "--dsa-decode-backend flashmla_kv"),
    ("V3.2", ("--dsa-prefill-backend", "fa3"), "--dsa-prefill-backend fa3"),
    ("V3.2", ("--dtype", "float16"), "dtype float16"),
    ("V3.2", ("--prefill-attention-backend", "dsa"), "beside dsa"),
    ("V3.2", ("--decode-attention-backend", "fa3"), "beside fa3"),
    ("V3.2", (*MTP, DRAFT_BACKEND, "dsa"), "speculative_draft_attention_backend dsa"),
    ("V3.2", (*MTP, DRAFT_BACKEND, "etap_fp8_math"), "speculative_draft_attention_backend etap_fp8_math"),
    ("V3.2", NGRAM, "speculative algorithm NGRAM"),
    ("V3.2", PREFILL_CP, "enable_prefill_cp"),
    ("V3.2", (*DCP, "--dsa-prefill-backend", "flashmla_sparse"), "--dsa-prefill-backend flashmla_sparse"),
    ("V3.2", (*DCP, *MTP), "dcp_size 8"),
    ("V3.2, latent 256", (), "head_dim 320"),
    ("V3.2, rope 32", (), "head_dim 544"),
    ("HY-V4", ("--dsa-prefill-backend", "flashmla_sparse"), "--dsa-prefill-backend flashmla_sparse"),
    ("Dots3-Note", (), "Dots3-Note"),
    ("V4", ("--dtype", "float16"), "dtype float16"),
    ("V4", ("--kv-cache-dtype", "bfloat16"), "kv_cache_dtype bfloat16"),
    ("V4", ("--decode-attention-backend", "etap"), "decode_attention_backend etap"),
    ("V4", ("--prefill-attention-backend", "fa3"), "prefill_attention_backend fa3"),
    ("V4", (*MTP, DRAFT_BACKEND, "etap"), "speculative_draft_attention_backend etap"),
    ("V4", HISPARSE, "enable_hisparse"),
    ("V4", DCP, "dcp_size"),
    ("V4", PREFILL_CP, "enable_prefill_cp"),
    ("V4", ("--dsv4-prefill-backend", "flashmla_sparse_q8"), "dsv4_prefill_backend flashmla_sparse_q8"),
], ids=str)  # fmt: skip
def test_refuses(refuses, model, flags, argument):
    refuses((*ETAP, *flags), argument, model)


def test_shared_prefixes_are_refused_beside_deterministic_inference(refuses, monkeypatch):
    monkeypatch.setenv("ETAP_SHARED_PREFIX", "1")
    refuses(
        (*ETAP, DETERMINISTIC), "enable_deterministic_inference is not supported with ETAP_SHARED_PREFIX=1", "dense"
    )


@pytest.mark.parametrize("phase, model, argument", [
    ("prefill-", "dense", "enable_prefill_cp"), ("decode-", "dense", "enable_prefill_cp"),
    ("decode-", "V3.2", "beside fa3"), ("decode-", "GLM-5", "beside fa3"), ("decode-", "Dots3-Note", "Dots3-Note"),
    ("prefill-", "V4", "prefill_attention_backend etap"), ("decode-", "V4", "decode_attention_backend etap"),
])  # fmt: skip
def test_refuses_a_part_of_the_name(refuses, phase, model, argument):
    refuses((f"--{phase}attention-backend", "etap", *(PREFILL_CP if model == "dense" else ())), argument, model)


@pytest.mark.parametrize("model", [*SPARSE_MODELS, "V4"])
def test_refuses_fp8_math_where_attention_is_sparse(refuses, model):
    refuses(("--attention-backend", "etap_fp8_math"), "wanted etap", model, name="etap_fp8_math")


@pytest.mark.parametrize("model, capability", [*(("dense", (n, 0)) for n in (8, 10, 12)), ("V4", (10, 0))], ids=str)
def test_refuses_other_gpus(refuses, monkeypatch, model, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    refuses(ETAP, f"compute capability {capability[0]}.0", model)


def test_refuses_without_the_compiled_library(refuses, monkeypatch, tmp_path):
    from etap_backend import _library

    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "nothing.so"))
    _library.library.cache_clear()
    try:
        refuses(ETAP, "nothing.so")
    finally:
        monkeypatch.undo()
        _library.library.cache_clear()


@pytest.fixture
def version(monkeypatch):
    """Gives SGLang another version."""
    real = importlib.metadata.version
    return lambda version: monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "sglang" else real(name)
    )


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
    (line,) = lines
    assert "SGLang 0.9.0" in line and str(versions.ENGINE) in line


def more_parameters(self, q, k, v, layer, forward_batch, save_kv_cache=True, *, window_left): ...


@pytest.mark.parametrize("installed", [versions.ENGINE.newest, "0.9.0"])
@pytest.mark.parametrize("remove, name", [
    (
        lambda patch: patch.delattr(flashmla_backend, "maybe_create_verify_mask"),
        f"'maybe_create_verify_mask' from '{flashmla_backend.__name__}'",
    ),
    (lambda patch: patch.delattr(AttentionBackend, "init_cuda_graph_state"), "AttentionBackend.init_cuda_graph_state"),
    (
        lambda patch: patch.setattr(AttentionBackend, "forward_decode", more_parameters),
        "AttentionBackend.forward_decode: new parameters window_left",
    ),
], ids=["name", "method", "parameter"])  # fmt: skip
def test_what_sglang_lacks_is_named_before_weights_are_loaded(
    refuses, resolve, version, lines, monkeypatch, remove, name, installed
):
    version(installed)
    with monkeypatch.context() as patch:
        remove(patch)
        # As in a process that imports it after this SGLang.
        patch.delitem(sys.modules, "etap_backend.sglang.backend", raising=False)
        refuses(ETAP, name)
        assert not lines, "nothing runs, so there is nothing to be warned of"
        assert resolve("--attention-backend", "fa3").page_size == 1


@pytest.mark.parametrize("model, remove, lacked", [
    ("V3.2", lambda patch: patch.delattr(DeepseekSparseAttnBackend, "_forward_fa3"), dsa_backend.__name__),
    ("V4", lambda patch: patch.delattr(flash_mla.module(), "flash_mla_sparse_fwd"), "flash_mla_sparse_fwd"),
    ("V4", lambda patch: patch.delattr(*flash_mla.targets()[-1]), flash_mla.TOP_K),
    ("V4", lambda patch: patch.setitem(ATTENTION_BACKENDS, "dsv4", lambda runner: None), "attention backend dsv4"),
    (
        "V4",
        lambda patch: patch.setattr(HookRegistry, "_patched", HookRegistry._patched - {versions.V4_STEPS_HOOK}),
        "_create_dsv4_decode_backend",
    ),
], ids=["method", "function", "top-k", "factory", "hook"])  # fmt: skip
def test_what_sglang_lacks_for_one_model_refuses_no_other(refuses, resolve, monkeypatch, model, remove, lacked):
    remove(monkeypatch)
    refuses(ETAP, lacked, model)
    assert resolve(*ETAP).attention_backend == "etap"


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("model", ["kimi-k2", "kimi-k3"])
def test_kimis_attention_is_taken(resolve, model, cache):
    view = resolve(*ETAP, "--tp-size", 8, "--kv-cache-dtype", cache, model=model)
    assert (view.attention_backend, view.page_size, view.kv_cache_dtype) == ("etap", 64, cache)
    assert not view.disable_radix_cache


def test_context_parallelism_of_kimi_is_for_backends_that_sglang_names(resolve):
    assert resolve(*ETAP, *DCP, model="kimi-k2").dcp_size == 8
    with pytest.raises(AssertionError, match="Kimi-K3 DCP must be .* got 'etap'"):
        resolve(*ETAP, *DCP, model="kimi-k3")


@pytest.mark.parametrize("model", SPARSE_MODELS)
@pytest.mark.parametrize("cache, stored", [("auto", "bfloat16"), ("bf16", "bfloat16"), ("fp8_e4m3", "fp8_e4m3")])
@pytest.mark.parametrize("speculation", [(), MTP], ids=["", "MTP"])
def test_sparse_attention_by_the_same_name_on_all_ranks(resolve, model, cache, stored, speculation):
    view = on_a_rank(resolve(*ETAP, "--kv-cache-dtype", cache, *speculation, model=model, raw=True))
    assert kernels(view) == ("etap", "etap", "etap")
    assert (view.page_size, view.kv_cache_dtype) == (64, stored)


@pytest.mark.parametrize("model", SPARSE_MODELS)
@pytest.mark.parametrize("flags, wanted", [
    (("--kv-cache-dtype", "auto"), ("dsa", "flashmla_sparse", "fa3")),
    (("--kv-cache-dtype", "fp8_e4m3"), ("dsa", "flashmla_kv", "flashmla_kv")),
    *(((*ETAP, "--dsa-prefill-backend", name), ("etap", name, "etap")) for name in ("flashmla_sparse", "tilelang")),
], ids=str)  # fmt: skip
def test_what_the_user_leaves_or_gives_to_sglangs_kernels(resolve, model, flags, wanted):
    assert kernels(resolve(*flags, model=model)) == wanted


@pytest.mark.parametrize("model", SPARSE_MODELS)
@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
def test_rows_in_host_memory(resolve, model, cache):
    """SGLang lists the kernels that may read its hot buffer, and looks there when it has resolved arguments."""
    flags = (*ETAP, "--kv-cache-dtype", cache, *HISPARSE)
    arguments = resolve(*flags, model=model, raw=True)
    validate_hisparse(arguments)
    assert kernels(resolved_view(arguments)) == ("etap", "etap", "etap")
    others = resolve(*flags, "--dsa-prefill-backend", "flashmla_auto", model=model, raw=True)
    with pytest.raises(ValueError, match="HiSparse supports DSA prefill backend.* but got .*flashmla_auto"):
        validate_hisparse(others)


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("model, flags", [
    ("glm-5.3-flash", ()), ("glm-5.3-flash", ("--tp-size", 8)), ("V3.2", DCP), ("V3.2", (*DCP, "--dcp-size", 2)),
], ids=str)  # fmt: skip
def test_both_caches_without_rope_and_with_context_parallelism(resolve, model, flags, cache):
    view = resolve(*ETAP, "--kv-cache-dtype", cache, *flags, model=model)
    assert (*kernels(view), view.kv_cache_dtype) == ("etap", "etap", "etap", cache)


def test_attention_sinks(resolve):
    assert kernels(resolve(*ETAP, "--tp-size", 8, model="HY-V4")) == ("etap", "etap", "etap")
    assert kernels(resolve(model="HY-V4")) == ("dsa", "flashmla_sparse", "flashmla_sparse")


def test_models_that_etap_leaves_to_sglang(resolve):
    assert resolve(model="Dots3-Note").attention_backend == "dsa"
    for backend in ("flashmla", "etap"):
        assert resolve("--attention-backend", backend, model="Mistral").attention_backend == backend


@pytest.mark.parametrize("model, flags", [
    *(("V4", ("--kv-cache-dtype", cache, *speculation)) for cache in ("auto", "fp8_e4m3") for speculation in ((), MTP)),
    ("V4.1", ()),
], ids=str)  # fmt: skip
def test_the_name_is_kept_for_deepseek_v4(resolve, model, flags):
    """SGLang renames the backend, and pickles for its ranks who decodes."""
    arguments = resolve(*ETAP, *flags, model=model, raw=True)
    for view in (resolved_view(arguments), on_a_rank(arguments)):
        assert (view.attention_backend, view.dsa_decode_backend, view.page_size) == ("dsv4", "etap", 256)
        assert view.kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("flags", [(), ("--attention-backend", "dsv4"), ("--attention-backend", "fa3")], ids=str)
def test_without_the_name_deepseek_v4_is_sglangs(resolve, flags):
    view = resolve(*flags, model="V4")
    assert (view.attention_backend, view.dsa_decode_backend) == ("dsv4", None)
