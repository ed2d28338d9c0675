"""Which of SGLang's arguments ETAP serves; the others are refused before any weight is loaded."""

from collections.abc import Iterator

import torch

from etap_backend import engine_contract
from etap_backend.limits import MOST_SHARED, SPARSE_FP8, TILE_TOKENS, why_unsupported, why_unsupported_sparse
from etap_backend.sglang import versions

BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")
"""Algorithms that draft a block and verify it as a chain. Tokens of a block attend to each other without a mask, so
that the draft model needs another backend.
"""

ALGORITHMS = ("NEXTN", "EAGLE", "EAGLE3", "STANDALONE", *BLOCK_ALGORITHMS)
"""Algorithms whose drafts are a chain when topk is 1. Others may verify a tree, and the kernels take no mask."""

_DTYPES = {"half": torch.float16, "float16": torch.float16, "float": torch.float32, "float32": torch.float32}


def model_backends(view) -> tuple[str | None, ...]:
    """The names of the model's attention backends; a draft model may have another."""
    return view.attention_backend, view.decode_attention_backend, view.prefill_attention_backend


def why_not(view, name: str) -> str | None:
    """Say why ETAP, under this name, cannot serve the model with these arguments, or None."""
    for variable in engine_contract.FLAGS:
        engine_contract.is_on(variable)  # a wrong value is refused now
    model = versions.model_config(view)
    refusals = _v4_refusals if versions.is_v4(model) else _non_v4_refusals
    return next(filter(None, refusals(view, model, name)), None) or engine_contract.why_no_library()


def why_not_default(view) -> str | None:
    """Say why ETAP must not become the default, beside what `why_not` refuses, or None.

    With these arguments SGLang itself would refuse ETAP, or could not fall back to its own backend.
    """
    if _compute_capability() is None:
        return "torch sees no GPU"
    if view.speculative_draft_model_path not in (None, view.model_path):
        return "a separate draft model may have no MLA (speculative_draft_model_path)"
    named = ("enable_unified_memory", "enable_page_major_kv_layout", "dcp_size")
    found = [argument for argument in named if getattr(view, argument) not in (False, None, 1)]
    return f"{found[0]} needs a backend to be named" if found else why_not_kernels(view)


def why_not_page_size(page_size: int) -> str | None:
    """Say why pages may not have this many tokens, or None.

    ETAP's kernels take any number. SGLang's kernel that fills the block table takes powers of two.
    """
    most = versions.TOKENS_PER_PROGRAM
    if page_size & (page_size - 1) or page_size > most:
        return f"page_size {page_size} is not supported: wanted a power of two of at most {most}"
    return None


def _non_v4_refusals(view, model, name: str) -> Iterator[str | None]:
    sparse, is_models = versions.is_sparse(model), name in model_backends(view)
    if versions.is_dots(model):
        why = "SGLang makes the backend of its sparse layers itself, and its window layers read other plans"
        yield f"Dots3-Note is not supported: {why}; wanted no attention backend named, SGLang's own then runs"
    if is_models and versions.scales_queries(model):
        yield from _scaled_query_refusals(view, sparse)
    if not sparse:
        yield from _dense_refusals(view, is_models and not versions.is_mla(model))
    elif is_models:
        yield from _sparse_refusals(view, model, name)
    yield from _draft_refusals(view, is_models)
    if view.enable_deterministic_inference:
        yield from _determinism_refusals(view, sparse)


def _scaled_query_refusals(view, sparse: bool) -> Iterator[str]:
    """Modes that need queries in two tensors, or keys made of the latent rows: SGLang forgets the scaling there."""
    modes = {
        "sparse attention": sparse,
        f"decode context parallelism (dcp_size {view.dcp_size})": view.dcp_size > 1,
        f"kv_cache_dtype {view.kv_cache_dtype}": view.kv_cache_dtype == "fp8_e4m3",
        "enable_deterministic_inference": view.enable_deterministic_inference,
    }
    for mode in (mode for mode, chosen in modes.items() if chosen):
        yield f"a model whose queries are scaled by position (llama_4_scaling) is not supported with {mode}"


def _dense_refusals(view, not_mla: bool) -> Iterator[str | None]:
    page_size = TILE_TOKENS if view.page_size is None else view.page_size
    yield _kernel_refusal(view, why_unsupported, page_size=page_size, kv_cache_dtype=_cache_dtype(view))
    yield why_not_page_size(page_size)
    if not_mla:
        yield "the model's attention is not MLA"
    if view.enable_prefill_cp or view.attn_cp_size > 1:
        # Each rank computes a share of a prompt, and the backend would have to gather the rows.
        yield "prefill context parallelism (enable_prefill_cp) is not supported"
    if engine_contract.shares_prefixes() and (view.max_running_requests or 0) > MOST_SHARED:
        flag, most = engine_contract.SHARED_PREFIX_VARIABLE, view.max_running_requests
        yield f"max_running_requests {most} is not supported with {flag}=1: wanted at most {MOST_SHARED}"


def _sparse_refusals(view, model, name: str) -> Iterator[str | None]:
    cache_dtype = _cache_dtype(view)
    yield _kernel_refusal(
        view,
        why_unsupported_sparse,
        head_dim=model.kv_lora_rank + model.qk_rope_head_dim,
        v_head_dim=model.kv_lora_rank,
        kv_cache_dtype=SPARSE_FP8 if cache_dtype == "fp8_e4m3" else cache_dtype,
    )
    if name == versions.FP8_MATH_NAME:
        yield f"it multiplies FP8 caches of dense attention, and the model's is sparse: wanted {versions.NAME}"
    # SGLang has filled in a name for each phase by now.
    if others := sorted(other for other in model_backends(view) if other not in (None, name)):
        wanted = "wanted it for the whole model; --dsa-prefill-backend chooses the kernels of prefill"
        yield f"beside {others[0]} it is not supported with sparse attention: {wanted}"
    draft_name = view.speculative_draft_attention_backend
    if draft_name in ("dsa", "nsa", versions.FP8_MATH_NAME):
        yield f"speculative_draft_attention_backend {draft_name} is not supported: wanted {name}, or none"


def _draft_refusals(view, is_models: bool) -> Iterator[str]:
    algorithm, topk = view.speculative_algorithm, view.speculative_eagle_topk
    if algorithm is None:
        return
    if algorithm not in ALGORITHMS:
        yield f"speculative algorithm {algorithm} is not supported: wanted one of {', '.join(ALGORITHMS)}"
    if topk not in (None, 1):
        yield f"speculative_eagle_topk {topk} is not supported: wanted 1, a chain of drafts"
    if view.dcp_size > 1:
        yield f"speculative decoding with decode context parallelism (dcp_size {view.dcp_size}) is not supported"
    if is_models and algorithm in BLOCK_ALGORITHMS:
        draft = view.speculative_draft_attention_backend
        if draft in (None, *versions.NAMES):
            wanted = "wanted another backend, such as fa3: the draft model attends without a mask"
            yield f"speculative_draft_attention_backend {draft} is not supported with {algorithm}: {wanted}"
        if versions.verifies_raggedly():
            yield f"SGLANG_RAGGED_VERIFY_MODE is not supported with {algorithm}: wanted static"


def _determinism_refusals(view, sparse: bool) -> Iterator[str]:
    """Modes that cannot be deterministic. In the others FlashAttention 3 prefills."""
    mode = "enable_deterministic_inference is not supported"
    if engine_contract.shares_prefixes():
        yield f"{mode} with {engine_contract.SHARED_PREFIX_VARIABLE}=1"
    if sparse:
        yield f"{mode} with sparse attention: SGLang has no indexer that chooses the same rows in every batch"
    if view.dcp_size > 1:
        yield f"{mode} with decode context parallelism (dcp_size {view.dcp_size})"
    if view.kv_cache_dtype == "fp8_e4m3" and _prefills(view):
        yield f"{mode} with an FP8 cache: prefill from it is not known to be deterministic"


def _v4_refusals(view, model, name: str) -> Iterator[str | None]:
    yield _kernel_refusal(view, why_unsupported_sparse, head_dim=model.head_dim, v_head_dim=model.v_head_dim)
    if name != versions.NAME:
        yield f"it multiplies FP8 caches of dense attention, and the model is DeepSeek-V4: wanted {versions.NAME}"
    if view.kv_cache_dtype not in ("auto", "fp8_e4m3"):
        yield f"kv_cache_dtype {view.kv_cache_dtype} is not supported with DeepSeek-V4: wanted auto or fp8_e4m3"
    phases = ("decode_attention_backend", "prefill_attention_backend", "speculative_draft_attention_backend")
    wanted = dict.fromkeys(phases, (None, versions.V4_NAME))
    wanted |= {"dsv4_attn_backend": ("auto", "flashmla"), "dsv4_prefill_backend": ("auto", "flashmla_sparse")}
    for argument, values in wanted.items():
        value = getattr(view, argument)
        if value not in values:
            yield f"{argument} {value} is not supported with DeepSeek-V4: wanted {values[0] or 'none'}"
    yield _sparse_mode_refusal(view, v4=True)


def resolve_sparse_kernels(declared: dict, view) -> dict | None:
    """Name ETAP as the kernel of sparse decode, and of prefill unless the user chose one, where ETAP was chosen.

    Raises:
        ValueError: the user chose kernels that ETAP cannot run beside; the text says which.
    """
    if versions.NAME not in model_backends(view):
        return None
    if reason := why_not_kernels(view):
        raise ValueError(f"--attention-backend {versions.NAME}: {reason}")
    prefill = versions.given(view).dsa_prefill_backend or versions.NAME
    return declared | {"dsa_decode_backend": versions.NAME, "dsa_prefill_backend": prefill}


def why_not_kernels(view) -> str | None:
    """Say which kernels or modes of sparse attention the user chose that ETAP cannot run beside, or None."""
    model = versions.model_config(view)
    if reason := versions.is_sparse(model) and _sparse_mode_refusal(view, versions.is_v4(model)):
        return reason
    prefill, decode = versions.given(view).dsa_prefill_backend, versions.given(view).dsa_decode_backend
    if decode not in (None, versions.NAME):
        return f"--dsa-decode-backend {decode} is not supported: wanted none, ETAP decodes"
    if prefill == "fa3":
        return "--dsa-prefill-backend fa3 is not supported: ETAP stands in its place; wanted another, or none"
    mode = "decode context parallelism" if view.dcp_size > 1 else "attention sinks" if versions.has_sinks(model) else ""
    if mode and prefill not in (None, versions.NAME):
        return f"--dsa-prefill-backend {prefill} is not supported with {mode}: wanted none"
    return None


def _sparse_mode_refusal(view, v4: bool) -> str | None:
    modes = {
        "decode context parallelism (dcp_size)": view.dcp_size > 1 and v4,
        "prefill context parallelism (enable_prefill_cp)": view.enable_prefill_cp,
        "a KV cache in host memory (enable_hisparse)": view.enable_hisparse and v4,
    }
    chosen = [mode for mode, is_chosen in modes.items() if is_chosen]
    return f"{chosen[0]} is not supported with sparse attention" if chosen else None


def _kernel_refusal(view, why_unsupported, **asked) -> str | None:
    dtype = _DTYPES.get(view.dtype, torch.bfloat16)
    return why_unsupported(dtype=dtype, compute_capability=_compute_capability(), **asked)


def _compute_capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _cache_dtype(view) -> str:
    """The KV cache's type by the name that `why_unsupported` reads; auto where it may follow the model's type."""
    name = "bfloat16" if view.kv_cache_dtype == "bf16" else view.kv_cache_dtype
    return "auto" if name == "bfloat16" and view.dtype == "auto" else name


def _prefills(view) -> bool:
    return (view.prefill_attention_backend or view.attention_backend) in versions.NAMES
