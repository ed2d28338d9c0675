"""What ETAP asks of SGLang's arguments, and says before any weight is loaded."""

import torch

from etap_backend import plugins
from etap_backend.sglang import compat
from etap_backend.support import TILE_TOKENS, why_unsupported

SPECULATIVE_ALGORITHMS = (None, "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
"""Those whose drafts are a chain when topk is 1; the others may verify a tree, whose mask the kernels do not take."""

_DTYPES = {"half": torch.float16, "float16": torch.float16, "float": torch.float32, "float32": torch.float32}
_CACHE_DTYPES = {"bf16": "bfloat16"}


def names_chosen(view) -> tuple[str | None, ...]:
    """The attention backends of the model, and last that of a draft model."""
    model = (view.attention_backend, view.decode_attention_backend, view.prefill_attention_backend)
    return (*model, view.speculative_draft_attention_backend)


def resolve_arguments(declared: dict, view, name: str) -> dict | None:
    """Refuse arguments that ETAP, under this name, cannot serve, and set a page size of 64 where it is free.

    Raises:
        ValueError: the text says why.
    """
    asked_for = declared.get("page_size", view.page_size)
    page_size = TILE_TOKENS if asked_for is None else asked_for
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    reason = why_unsupported(
        dtype=_DTYPES.get(view.dtype, torch.bfloat16),
        page_size=page_size,
        kv_cache_dtype=_cache_dtype(view.kv_cache_dtype, view.dtype),
        compute_capability=capability,
    )
    reason = reason or plugins.why_page_size(page_size)
    reason = reason or why_unsupported_speculation(
        view.speculative_algorithm, view.speculative_eagle_topk, view.dcp_size
    )
    if reason is None and name in names_chosen(view)[:-1] and not compat.uses_mla(view):
        reason = "the model's attention is not MLA"
    if reason := reason or plugins.why_no_library():
        raise ValueError(f"--attention-backend {name}: {reason}")
    if asked_for is None:
        return declared | {"page_size": TILE_TOKENS}
    return None


def _cache_dtype(name: str, dtype: str) -> str:
    """The KV cache's type by the name that `why_unsupported` reads; auto where it may follow the model's type."""
    if name == "auto" or dtype == "auto":
        return "auto" if name in ("auto", *_CACHE_DTYPES, *_CACHE_DTYPES.values()) else name
    return _CACHE_DTYPES.get(name, name)


def why_unsupported_speculation(algorithm: str | None, topk: int | None, dcp_size: int) -> str | None:
    """Say why this speculative decoding cannot run, or None when it can."""
    if algorithm not in SPECULATIVE_ALGORITHMS:
        names = ", ".join(filter(None, SPECULATIVE_ALGORITHMS))
        return f"speculative algorithm {algorithm} is not supported: wanted one of {names}"
    if algorithm is not None and topk not in (None, 1):
        return f"speculative_eagle_topk {topk} is not supported: wanted 1, a chain of drafts"
    if algorithm is not None and dcp_size > 1:
        return f"speculative decoding with decode context parallelism (dcp_size {dcp_size}) is not supported"
    return None
