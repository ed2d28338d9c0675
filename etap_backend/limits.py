"""What the kernels support; engines, command line and tests all ask here."""

import operator

import torch

LATENT_DIM = 512
ROPE_DIM = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
SCALE_DIM = 128
"""Columns of a sparse FP8 cache row that share a scale."""
SCALES = LATENT_DIM // SCALE_DIM
SPARSE_FP8_BYTES = LATENT_DIM + 4 * SCALES
"""Bytes of a sparse FP8 cache row before its rope part, if it has one: 512 e4m3 elements and 4 float32 scales."""
V4_NOPE_DIM = LATENT_DIM - ROPE_DIM
V4_SCALE_DIM = 64
"""Columns of DeepSeek-V4's cache row that share a power of two; the last 64 of its 512 columns have no scale."""
V4_SCALES = V4_NOPE_DIM // V4_SCALE_DIM
V4_DATA_BYTES = V4_NOPE_DIM + 2 * ROPE_DIM
"""Bytes of a row's elements: 448 in e4m3 and 64 in bfloat16."""
V4_ROW_BYTES = V4_DATA_BYTES + 8
"""Bytes of a row with its scales: 7 powers of two and an unused byte, which follow the data of all rows of a page."""
TILE_TOKENS = 64
MAX_COUNT = 2**30
"""Most requests, heads, query rows and tokens of a page: the kernels count them, and a tile more, in 32 bits."""
MAX_SMS = 2**12
"""Most CTAs that a call is divided for."""
WORK_RANGE_FIELDS = 8
SHARED_FIELDS = 10
"""Rows of the buffer that describes the stacks of a step whose requests share prefixes."""
MOST_SHARED = 2**12
"""Most requests of a schedule with shared_prefix: one block sorts them."""
SELECTED = (512, 1024, 2048)
"""Tokens that `sparse_top_k` selects."""
COMPUTE_CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
"""The type of an FP8 KV cache in the engines' dense layout, 576 bytes per token; its queries may have it too."""

SPARSE_FP8 = "fp8_ds_mla"
"""The engines' name of a cache whose FP8 rows carry their own scales: DeepSeek-V3.2's and V4's."""

_DTYPE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8, "fp8_e4m3": FP8}
_FOREIGN_CACHES = {
    SPARSE_FP8: "it is the layout of sparse attention",
    "fp8_e5m2": "the kernels read 8-bit floats in e4m3 only",
    "float8_e5m2": "the kernels read 8-bit floats in e4m3 only",
    "nvfp4": "the kernels read no 4-bit floats",
}
"""Prefixes of other caches' names, and why the kernels cannot read them."""


def count(name: str, value: int, most: int = MAX_COUNT) -> int:
    """`value` as an int. Raises ValueError outside 1..`most` and TypeError for other types, naming the argument."""
    if not 1 <= (number := _int(name, value)) <= most:
        raise ValueError(f"{name}: wanted 1 to {most}, got {value}")
    return number


def _int(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: wanted an int, got {value!r}") from None


def dtype_name(dtype: object) -> str:
    """The name of an element type in refusals and logs; an engine's own name stays as it is."""
    return str(dtype).removeprefix("torch.")


def output_dtypes(q_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Output dtypes that a dense call allows for queries of this dtype; the default first."""
    return DTYPES if q_dtype == FP8 else (q_dtype,)


def _dtype(name: str, value: "torch.dtype | str | None") -> "torch.dtype | str":
    """The type that a name of torch's or an engine's means; another name as it is, for the refusal."""
    if isinstance(value, str):
        found = _DTYPE_NAMES.get(value) or getattr(torch, dtype_name(value), None)
        return found if isinstance(found, torch.dtype) else value
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: wanted a torch.dtype or its name, got {value!r}")
    return value


def _cache_dtype(kv_cache_dtype: "torch.dtype | str | None", dtype: "torch.dtype | str") -> "torch.dtype | str":
    return dtype if kv_cache_dtype in (None, "auto") else _dtype("kv_cache_dtype", kv_cache_dtype)


def _why_dtypes(dtype: "torch.dtype | str", cache: "torch.dtype | str") -> str | None:
    if dtype not in (*DTYPES, FP8):
        wanted = "bfloat16 or float16, or float8_e4m3fn with an FP8 cache"
        return f"dtype {dtype_name(dtype)} is not supported: wanted {wanted}"
    if cache in (dtype, FP8):
        return None
    wanted = "fp8 (e4m3) like the query" if dtype == FP8 else f"{dtype_name(dtype)} like the query, or fp8 (e4m3)"
    why = [f"{reason}; " for foreign, reason in _FOREIGN_CACHES.items() if dtype_name(cache).startswith(foreign)]
    return f"kv_cache_dtype {dtype_name(cache)} is not supported: {''.join(why)}wanted {wanted}"


def _why_gpu(compute_capability: tuple[int, int] | None) -> str | None:
    if compute_capability is None:
        return None
    if not isinstance(compute_capability, tuple | list) or len(compute_capability) != 2:
        raise TypeError(f"compute_capability: wanted (major, minor), got {compute_capability!r}")
    if (numbers := tuple(_int("compute_capability", one) for one in compute_capability)) == COMPUTE_CAPABILITY:
        return None
    found = ".".join(map(str, numbers))
    return f"compute capability {found} is not supported: the kernels are compiled for sm_90a (Hopper, 9.0) only"


def _why_page_size(page_size: int, cache: "torch.dtype | str") -> str | None:
    if cache == torch.float16 and page_size % TILE_TOKENS:
        return f"page_size {page_size} is not supported with a float16 cache: wanted a multiple of {TILE_TOKENS}"
    return None


def _why_v_head_dim(v_head_dim: int) -> str | None:
    if v_head_dim != LATENT_DIM:
        return f"v_head_dim {v_head_dim} is not supported: wanted {LATENT_DIM}"
    return None


def _why_counts(**counts: int | None) -> str | None:
    for name, value in counts.items():
        if value is not None and not 1 <= _int(name, value) <= MAX_COUNT:
            return f"{name} {value} is not supported: wanted 1 to {MAX_COUNT}"
    return None


def why_unsupported(
    *,
    dtype: "torch.dtype | str",
    num_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    v_head_dim: int = LATENT_DIM,
    page_size: int = TILE_TOKENS,
    kv_cache_dtype: "torch.dtype | str | None" = None,
    compute_capability: tuple[int, int] | None = None,
    s_q: int = 1,
) -> str | None:
    """The reason why a decode problem cannot run, or None when it can.

    Args:
        dtype: type of the query or its name, bfloat16 or float16; float8_e4m3fn with an FP8 cache.
        num_heads: query heads on this GPU; None when unknown.
        head_dim: width of a query and of a cache row in elements (latent + rope), 576.
        v_head_dim: width of an output row in elements (latent), 512.
        page_size: tokens in a page of the KV cache, any number; of a float16 cache a multiple of 64.
        kv_cache_dtype: a dtype or an engine's name for it: the query's, or FP8 (float8_e4m3fn, "fp8", "fp8_e4m3") in
            the dense layout of 576 bytes per token; None and "auto" mean the query's.
        compute_capability: (major, minor) of the GPU; None when unknown.
        s_q: query tokens per request.

    Raises TypeError, naming the argument, for one of another type.
    """
    dtype = _dtype("dtype", dtype)
    cache = _cache_dtype(kv_cache_dtype, dtype)
    if reason := _why_gpu(compute_capability) or _why_dtypes(dtype, cache):
        return reason
    if head_dim != HEAD_DIM:
        return f"head_dim {head_dim} is not supported: wanted {HEAD_DIM} (latent {LATENT_DIM} + rope {ROPE_DIM})"
    if reason := _why_v_head_dim(v_head_dim) or _why_page_size(page_size, cache):
        return reason
    return _why_counts(page_size=page_size, num_heads=num_heads, s_q=s_q)


def why_unsupported_sparse(
    *,
    dtype: "torch.dtype | str",
    num_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    v_head_dim: int = LATENT_DIM,
    page_size: int = TILE_TOKENS,
    kv_cache_dtype: "torch.dtype | str | None" = None,
    compute_capability: tuple[int, int] | None = None,
    top_k: int = 1,
) -> str | None:
    """The reason why a sparse decode problem cannot run, or None when it can.

    Args:
        dtype: type of the query or its name, bfloat16.
        num_heads: query heads on this GPU; None when unknown.
        head_dim: width of a query in elements, 576 (latent + rope) or 512 (without rope, or DeepSeek-V4).
        v_head_dim: width of an output row in elements (latent), 512.
        page_size: tokens in a page of the KV cache, any number.
        kv_cache_dtype: bfloat16 or its name; or "fp8_ds_mla", rows of 656 bytes beside head_dim 576, of 528 (without
            rope) or V4's 584 beside 512; None and "auto" mean the query's.
        compute_capability: (major, minor) of the GPU; None when unknown.
        top_k: entries in a query token's list, any number.

    Raises TypeError, naming the argument, for one of another type.
    """
    if reason := _why_gpu(compute_capability):
        return reason
    dtype = _dtype("dtype", dtype)
    if dtype != torch.bfloat16:
        return f"dtype {dtype_name(dtype)} is not supported: wanted bfloat16"
    cache = _cache_dtype(kv_cache_dtype, dtype)
    if cache not in (torch.bfloat16, SPARSE_FP8):
        wanted = f"bfloat16, or {SPARSE_FP8} (rows with their own scales)"
        return f"kv_cache_dtype {dtype_name(cache)} is not supported: wanted {wanted}"
    if head_dim not in (HEAD_DIM, LATENT_DIM):
        return f"head_dim {head_dim} is not supported: wanted {HEAD_DIM} (latent {LATENT_DIM} + rope) or {LATENT_DIM}"
    reason = _why_v_head_dim(v_head_dim)
    return reason or _why_counts(page_size=page_size, num_heads=num_heads, top_k=top_k)
