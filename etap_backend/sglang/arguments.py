"""What ETAP asks of SGLang's arguments, and says before any weight is loaded."""

import torch

from etap_backend import engine_contract
from etap_backend.limits import SPARSE_FP8, TILE_TOKENS, why_unsupported, why_unsupported_sparse
from etap_backend.sglang import versions

SPECULATIVE_ALGORITHMS = (None, "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
"""Those whose drafts are a chain when topk is 1; others may verify a tree, whose mask the kernels do not take."""

BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")
"""Those whose drafts come as a block, and are verified as a chain. Tokens of a block attend to each other without a
mask, so that the draft model has another backend.
"""

FP8_PREFILL_GRAPH = (
    "a prefill CUDA graph with an FP8 cache is not supported: FlashInfer would copy the whole cache in every layer; "
    "wanted --kv-cache-dtype fp8_e4m3 with no --cuda-graph-backend-prefill, or with disabled"
)

_DTYPES = {"half": torch.float16, "float16": torch.float16, "float": torch.float32, "float32": torch.float32}
_CACHE_DTYPES = {"bf16": "bfloat16"}


def names_chosen(view) -> tuple[str | None, ...]:
    """The attention backends of the model, and last that of a draft model."""
    return (*_names_of_model(view), view.speculative_draft_attention_backend)


def _names_of_model(view) -> tuple[str | None, ...]:
    return view.attention_backend, view.decode_attention_backend, view.prefill_attention_backend


def why_not(view, name: str) -> str | None:
    """Say why ETAP, under this name, cannot serve a model with these arguments, or None; not for DeepSeek-V4."""
    model = versions.model_config(view)
    of_model = name in _names_of_model(view)
    reason = None
    if of_model and versions.scales_queries(model) and (other := _why_not_scaled(view, model)):
        reason = f"a model whose queries are scaled by position (llama_4_scaling) is not supported with {other}"
    elif versions.is_sparse(model):
        reason = _why_unsupported_sparse(view, model, name) if of_model else None
    else:
        reason = _why_unsupported(view, TILE_TOKENS if view.page_size is None else view.page_size)
        if reason is None and of_model and not versions.is_mla(model):
            reason = "the model's attention is not MLA"
        if reason is None and (view.enable_prefill_cp or view.attn_cp_size > 1):
            # Each rank has a share of a prompt, whose rows the backend would gather.
            reason = "prefill context parallelism (enable_prefill_cp) is not supported"
    reason = reason or why_unsupported_speculation(
        view.speculative_algorithm, view.speculative_eagle_topk, view.dcp_size, sparse=versions.is_sparse(model)
    )
    if reason is None and of_model and view.speculative_algorithm in BLOCK_ALGORITHMS:
        reason = _why_not_blocks(view)
    if reason is None and view.enable_deterministic_inference:
        reason = _why_not_deterministic(view, model)
    if reason is None and versions.named_prefill_graph(view) and captures_fp8_prefill(view):
        reason = FP8_PREFILL_GRAPH
    return reason or engine_contract.why_no_library()


def why_not_unasked(view) -> str | None:
    """Say what asks for another backend, where the user named none and SGLang could not fall back to its own."""
    if _compute_capability() is None:
        return "torch sees no GPU"
    if view.speculative_draft_model_path not in (None, view.model_path):
        return "a draft model of its own, which may have no MLA (speculative_draft_model_path)"
    named = ("enable_unified_memory", "enable_page_major_kv_layout", "dcp_size")
    found = [argument for argument in named if getattr(view, argument) not in (False, None, 1)]
    return f"{found[0]} needs a backend to be named" if found else why_not_kernels(view)


def _why_not_scaled(view, model) -> str | None:
    """What needs a query's two parts, or keys of the latent rows, which SGLang makes without the scaling."""
    if versions.is_sparse(model):
        return "sparse attention"
    if view.dcp_size > 1:
        return f"decode context parallelism (dcp_size {view.dcp_size})"
    return f"kv_cache_dtype {view.kv_cache_dtype}" if view.kv_cache_dtype == "fp8_e4m3" else None


def _why_not_blocks(view) -> str | None:
    draft, algorithm = view.speculative_draft_attention_backend, view.speculative_algorithm
    if draft in (None, *versions.NAMES):
        wanted = "wanted another's name, such as fa3: the draft model attends without a mask"
        return f"speculative_draft_attention_backend {draft} is not supported with {algorithm}: {wanted}"
    if versions.verifies_raggedly():
        return f"SGLANG_RAGGED_VERIFY_MODE is not supported with {algorithm}: wanted static"
    return None


def _why_not_deterministic(view, model) -> str | None:
    """Say what cannot be deterministic, for which prefill is FlashAttention 3's."""
    mode = "enable_deterministic_inference is not supported"
    if versions.is_sparse(model):
        return f"{mode} with sparse attention: SGLang has no indexer that chooses the same rows in every batch"
    if view.dcp_size > 1:
        return f"{mode} with decode context parallelism (dcp_size {view.dcp_size})"
    if view.kv_cache_dtype == "fp8_e4m3" and _prefills(view):
        return f"{mode} with an FP8 cache: FlashAttention 3 would copy the whole cache in every layer"
    return None


def _prefills(view) -> bool:
    return (view.prefill_attention_backend or view.attention_backend) in versions.NAMES


def captures_fp8_prefill(view) -> bool:
    """Whether SGLang would capture a CUDA graph of prefill over an FP8 cache of dense attention, with ETAP."""
    captures = view.cuda_graph_config.prefill.backend != versions.NO_GRAPH and view.kv_cache_dtype == "fp8_e4m3"
    return captures and _prefills(view) and not versions.is_sparse(versions.model_config(view))


def _why_unsupported(view, page_size: int) -> str | None:
    reason = why_unsupported(
        dtype=_DTYPES.get(view.dtype, torch.bfloat16),
        page_size=page_size,
        kv_cache_dtype=_cache_dtype(view.kv_cache_dtype, view.dtype),
        compute_capability=_compute_capability(),
    )
    return reason or why_page_size(page_size)


def why_page_size(page_size: int) -> str | None:
    """Say why pages may not have so many tokens, or None when they may.

    The kernels take any number, but SGLang's own, which fills the block table, steps through it in powers of two.
    """
    most = versions.TOKENS_PER_PROGRAM
    if page_size & (page_size - 1) or page_size > most:
        return f"page_size {page_size} is not supported: wanted a power of two of at most {most}"
    return None


def _why_unsupported_sparse(view, model, name: str) -> str | None:
    cache_dtype = _cache_dtype(view.kv_cache_dtype, view.dtype)
    reason = why_unsupported_sparse(
        dtype=_DTYPES.get(view.dtype, torch.bfloat16),
        head_dim=model.kv_lora_rank + model.qk_rope_head_dim,
        v_head_dim=model.kv_lora_rank,
        kv_cache_dtype=SPARSE_FP8 if cache_dtype == "fp8_e4m3" else cache_dtype,
        compute_capability=_compute_capability(),
    )
    if reason:
        return reason
    if name == versions.FP8_MATH_NAME:
        return f"it multiplies FP8 caches of dense attention, and the model's is sparse: wanted {versions.NAME}"
    # SGLang has filled in the model's by now, so that one is there for each phase.
    if others := sorted(other for other in _names_of_model(view) if other not in (None, name)):
        wanted = "wanted it for the whole model; --dsa-prefill-backend chooses the kernels of prefill"
        return f"beside {others[0]} it is not supported with sparse attention: {wanted}"
    draft_name = view.speculative_draft_attention_backend
    if draft_name in ("dsa", "nsa", versions.FP8_MATH_NAME):
        return f"speculative_draft_attention_backend {draft_name} is not supported: wanted {name}, or none"
    return None


def why_not_v4(view, name: str) -> str | None:
    """Say why ETAP, under this name, cannot serve DeepSeek-V4 with these arguments, or None."""
    model = versions.model_config(view)
    reason = why_unsupported_sparse(
        dtype=_DTYPES.get(view.dtype, torch.bfloat16),
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        compute_capability=_compute_capability(),
    )
    if reason:
        return reason
    if name != versions.NAME:
        return f"it multiplies FP8 caches of dense attention, and the model is DeepSeek-V4: wanted {versions.NAME}"
    if view.kv_cache_dtype not in ("auto", "fp8_e4m3"):
        return f"kv_cache_dtype {view.kv_cache_dtype} is not supported with DeepSeek-V4: wanted auto or fp8_e4m3"
    wanted = {
        "decode_attention_backend": (None, versions.V4_NAME),
        "prefill_attention_backend": (None, versions.V4_NAME),
        "speculative_draft_attention_backend": (None, versions.V4_NAME),
        "dsv4_attn_backend": ("auto", "flashmla"),
        "dsv4_prefill_backend": ("auto", "flashmla_sparse"),
    }
    for argument, values in wanted.items():
        value = getattr(view, argument, values[0])
        if value not in values:
            return f"{argument} {value} is not supported with DeepSeek-V4: wanted {values[0] or 'none'}"
    return _why_unsupported_variant(view) or engine_contract.why_no_library()


def resolve_sparse_kernels(declared: dict, view) -> dict | None:
    """Name ETAP as the kernel of sparse decode, and of prefill unless the user chose one, where ETAP was chosen.

    Raises:
        ValueError: the user chose kernels beside which it cannot run; the text says which.
    """
    if versions.NAME not in _names_of_model(view):
        return None
    if reason := why_not_kernels(view):
        raise ValueError(f"--attention-backend {versions.NAME}: {reason}")
    prefill, _ = versions.kernels_named(view)
    kernels = {"dsa_decode_backend": versions.NAME, "dsa_prefill_backend": prefill or versions.NAME}
    return declared | kernels


def why_not_kernels(view) -> str | None:
    """Say which kernels of sparse attention the user chose beside which ETAP cannot run, or None."""
    prefill, decode = versions.kernels_named(view)
    if reason := _why_unsupported_variant(view) if versions.is_sparse(versions.model_config(view)) else None:
        return reason
    if decode not in (None, versions.NAME):
        return f"--dsa-decode-backend {decode} is not supported: wanted none, ETAP decodes"
    if prefill == "fa3":
        return "--dsa-prefill-backend fa3 is not supported: ETAP stands in its place; wanted another, or none"
    if view.dcp_size > 1 and prefill not in (None, versions.NAME):
        return f"--dsa-prefill-backend {prefill} is not supported with decode context parallelism: wanted none"
    return None


def _why_unsupported_variant(view) -> str | None:
    v4 = versions.is_v4(versions.model_config(view))
    variants = {
        "decode context parallelism (dcp_size)": view.dcp_size > 1 and (v4 or versions.share_of_lists() is None),
        "prefill context parallelism (enable_prefill_cp)": view.enable_prefill_cp,
        "a KV cache in host memory (enable_hisparse)": view.enable_hisparse,
        "attention sinks (learnable_sink)": getattr(versions.model_config(view).hf_config, "learnable_sink", False),
    }
    unsupported = [variant for variant, present in variants.items() if present]
    return f"{unsupported[0]} is not supported with sparse attention" if unsupported else None


def _compute_capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _cache_dtype(name: str, dtype: str) -> str:
    """The KV cache's type by the name that `why_unsupported` reads; auto where it may follow the model's type."""
    if name == "auto" or dtype == "auto":
        return "auto" if name in ("auto", *_CACHE_DTYPES, *_CACHE_DTYPES.values()) else name
    return _CACHE_DTYPES.get(name, name)


def why_unsupported_speculation(
    algorithm: str | None, topk: int | None, dcp_size: int, *, sparse: bool = False
) -> str | None:
    """Say why this speculative decoding cannot run, or None when it can."""
    served = SPECULATIVE_ALGORITHMS if sparse else SPECULATIVE_ALGORITHMS + BLOCK_ALGORITHMS
    if algorithm not in served:
        names = ", ".join(filter(None, served))
        return f"speculative algorithm {algorithm} is not supported: wanted one of {names}"
    if algorithm is not None and topk not in (None, 1):
        return f"speculative_eagle_topk {topk} is not supported: wanted 1, a chain of drafts"
    if algorithm is not None and dcp_size > 1:
        return f"speculative decoding with decode context parallelism (dcp_size {dcp_size}) is not supported"
    return None
