"""FlashAttention-3's calls with `qv` on ETAP's kernels: what `import flash_attn_interface` gives for MLA on Hopper.

As of FlashAttention 0251105 (`hopper/flash_attn_interface.py`), of sgl-kernel's copy, and of vLLM 0.26 to 0.33's varlen
form. `from etap_backend.compat import flash_attn_interface` in place of `import flash_attn_interface`; or `install`,
which puts ETAP in front of an installed FlashAttention-3. What is not served is handed to that one, or refused by name.
"""

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._operator import check_tensor, type_name
from etap_backend.compat import check_out, named, plan, renamed, whole_rows
from etap_backend.dense import mla_decode
from etap_backend.limits import (
    FP8,
    LATENT_DIM,
    ROPE_DIM,
    WORK_RANGE_FIELDS,
    dtype_name,
    output_dtypes,
    why_unsupported,
)
from etap_backend.schedule import BuiltSchedule, count, decode_shape, sms_of

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata", "install"]

NAME = "flash_attn_interface"
"""Under which this module is imported where there is no FlashAttention-3."""
PROMPT_ROWS = 2048
"""Query rows (tokens * heads) of a request above which it is a prompt. FlashAttention-3, if there is one, gets those in
bfloat16. It refuses FP8 with qv, and builds without float16, as sgl-kernel's, end the process on it."""
WITHOUT_EFFECT = (
    "pack_gqa",
    "sm_margin",
    "rotary_interleaved",
    "rotary_seqlens",
    "cu_seqlens_k_new",
    "deterministic",
    "return_attn_probs",
    "cp_rank",
    "cp_tot_seqused_k",
)
"""Parameters that say how to compute, or that mean nothing without others that are not served."""
NEUTRAL = {"window_size": (-1, -1), "fa_version": 3, "ver": 3, "cp_world_size": 1}
"""Values of parameters that ask for nothing besides; None, False and 0 do not either."""
NAMES = {
    "q": "qv",
    "q_rope": "q",
    "kv_cache": "v_cache",
    "rope_cache": "k_cache",
    "q_scale": "q_descale",
    "kv_scale": "k_descale",
    "block_table": "page_table",
    "seq_lens": "cache_seqlens",
    "out_dtype": "out",
    "schedule": "scheduler_metadata",
    "work_ranges": "scheduler_metadata",
    "split_offsets": "scheduler_metadata",
}
"""`flash_attn_with_kvcache`'s of what ETAP's refusals name."""
TYPE_NAMES = {"dtype": "q.dtype", "kv_cache_dtype": "k_cache.dtype"}
PLAN_NAMES = {"seq_lens": "cache_seqlens"}


@dataclass(frozen=True)
class Form:
    """A function of theirs.

    Attributes:
        function, modules: its name, and where it may be installed.
        names: its names of parameters that the first form calls otherwise, by that one's names.
        score_columns: softmax_scale is 1 / sqrt of so many where it is None.
    """

    function: str
    modules: tuple[str, ...]
    names: dict[str, str] = field(compare=False)  # a dict has no hash
    score_columns: int

    def name(self, name: str) -> str:
        """Theirs of a parameter."""
        return self.names.get(name, name)

    @functools.cached_property
    def served(self) -> tuple[str, ...]:
        """Theirs of the parameters that this module looks at."""
        return tuple(map(self.name, SERVED))

    @functools.cached_property
    def refused(self) -> dict[str, str]:
        """Theirs of what ETAP's refusals name."""
        return {ours: self.name(name) for ours, name in NAMES.items()}


WITH_KVCACHE = Form(
    "flash_attn_with_kvcache", (NAME, f"flash_attn_3.{NAME}", "sgl_kernel.flash_attn"), {}, ROPE_DIM + LATENT_DIM
)
VARLEN = Form(
    "flash_attn_varlen_func",
    ("vllm.vllm_flash_attn",),
    {"k_cache": "k", "v_cache": "v", "qv": "q_v", "cache_seqlens": "seqused_k", "page_table": "block_table"},
    ROPE_DIM,
)
METADATA = Form("get_scheduler_metadata", (*WITH_KVCACHE.modules, *VARLEN.modules), {}, 0)


@dataclass
class Call:
    """The arguments of a call, by the names of the first form, of which this module looks at those that follow.

    The types are those of a call that is served; before it is known that it is, anything may be there.

    Attributes:
        form, given: the function that was called, and its arguments by its own names.
        defaults: what they are where the caller gives none, by the same names.
    """

    form: Form
    given: dict[str, Any]
    defaults: dict[str, Any]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    qv: Tensor
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    softmax_scale: float | None
    causal: bool
    scheduler_metadata: Tensor | None
    num_splits: int
    return_softmax_lse: bool
    out: Tensor | None

    @classmethod
    def of(cls, form: Form, given: dict[str, Any], defaults: dict[str, Any]) -> "Call":
        """The call of a form's function with these arguments; None stands for those that it has not."""
        served: list[Any] = [given.get(name) for name in form.served]
        return cls(form, given, defaults, *served)

    @property
    def refused(self) -> dict[str, str]:
        """The caller's names of what ETAP's refusals name."""
        names = self.form.refused
        return names if self.page_table is not None else names | {"block_table": "cache_batch_idx"}

    def said(self, name: str, wanted: str, got: object) -> str:
        """A refusal's text; of a tensor its shape came."""
        shown = list(got.shape) if isinstance(got, Tensor) else type_name(got) if got is None else got
        return f"{self.form.name(name)}: wanted {wanted}, got {shown}"


SERVED = tuple(one.name for one in fields(Call) if one.name not in ("form", "given", "defaults"))


def install(name: str = NAME) -> ModuleType:
    """Put ETAP in front of FlashAttention-3's functions in a module, in this process and from now on.

    A call that is served goes to ETAP's kernels, any other one to the function that was there. What the program took
    out of the module before stays as it was. Without a FlashAttention-3, `import flash_attn_interface` gives this
    module.

    Args:
        name: of the module: "flash_attn_interface", "sgl_kernel.flash_attn" (SGLang), "vllm.vllm_flash_attn" (vLLM), or
            another one that has `flash_attn_with_kvcache(qv=...)` or `flash_attn_varlen_func(q_v=...)`. It is imported.

    Returns:
        The module.

    Raises:
        ImportError: there is no such module, or it cannot be imported.
        ValueError: it has none of the functions.
    """
    here = sys.modules[__name__]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name == error.name == NAME:
            raise
        module = sys.modules[NAME] = here
    if module is here:
        return here
    found = [form for form in (WITH_KVCACHE, VARLEN) if form.name("qv") in _parameters(module, form)]
    if not found:
        wanted = "flash_attn_with_kvcache(qv=...) or flash_attn_varlen_func(q_v=...)"
        raise ValueError(f"name: wanted a module with {wanted}, got {name}")
    for form in found:
        theirs = getattr(module, form.function)
        if not hasattr(theirs, "handed_to"):
            setattr(module, form.function, _in_front(form, theirs))
    return module


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: Tensor | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode attention of MLA over a cache in two tensors, with pages of any size or one stretch for each request.

    May be captured in a CUDA graph; nothing is copied to the host. Queries may be ragged, one request's tokens behind
    another's: `cu_seqlens_q` says where each begins.

    Args:
        q: [b, s_q, h, 64], the rope part of the queries; with cu_seqlens_q [total_q, h, 64]. bfloat16, float16, or
            float8_e4m3fn where the cache has it. Any number of heads; any strides, but a last dimension that is not
            contiguous is copied.
        k_cache: [num_blocks, page_block_size, 1, 64], rows' rope part, of q's type or float8_e4m3fn. Without page_table
            [b, seqlen, 1, 64]; with cache_batch_idx [any number, seqlen, 1, 64]. It and v_cache may be two parts of one
            tensor's rows.
        v_cache: [.., 512], rows' latent part, which is also multiplied by qv; the rest as of k_cache.
        qv: [b, s_q, h, 512] or [total_q, h, 512], the latent part of the queries, of q's type.
        cache_seqlens: int32 [b] or an int, tokens of each request, the new ones included; all there is room for when
            None.
        cache_batch_idx: int32 [b], the row of page_table, or else of the caches, that is each request's.
        page_table: int32 [b, max_num_blocks_per_seq]; unused entries may hold anything. Of a view of a wider table, all
            columns in memory count for lengths in a tensor, as in FlashAttention.
        cu_seqlens_q: int32 [b + 1], where each request's tokens begin in q, and where the last one's end: at total_q
            or before it, where rows pad q. Requests without tokens may stand anywhere; behind all others where
            max_seqlen_q is 1 and q has b rows, as row i is then request i's.
        max_seqlen_q: no request has more tokens, with cu_seqlens_q. 2 lets requests without tokens stand anywhere even
            where q has b rows.
        q_descale: float32, one element, which may be expanded to [b, 1]; what elements of an FP8 q and qv are
            multiplied by. Without effect beside others, as FlashAttention's.
        k_descale, v_descale: the same of an FP8 cache, both the same tensor or both None.
        softmax_scale: factor of the scores; 1 / sqrt(576) when None.
        causal: query token i of a request sees the first cache_seqlens - (its s_q - 1 - i) tokens, else it sees all.
        scheduler_metadata: what this module's `get_scheduler_metadata` returned, or None: then each call plans.
            FlashAttention's own is ignored. Ragged queries that are served token by token plan anyway.
        return_softmax_lse: return lse, too.
        out: like q with 512 columns, of the output's type; allocated when None. Served where it is contiguous.
        num_splits: 1 asks for results whose bits do not depend on the batch: no context is split, and ragged queries
            are served token by token. A plan must have been made with 1, too. Other numbers are without effect.
        pack_gqa, sm_margin, rotary_interleaved, rotary_seqlens, cu_seqlens_k_new: without effect.
        k, v, rotary_cos, rotary_sin, cache_leftpad, window_size, attention_chunk, softcap, others: what these ask for
            is not served. others are those of newer versions and of sgl-kernel's copy.

    Returns:
        out [b, s_q, h, 512] or [total_q, h, 512], of q's type, bfloat16 for an FP8 q. With return_softmax_lse also lse,
        float32 [b, h, s_q] or [h, total_q], natural logarithm, contiguous. A query that sees nothing has out 0 and lse
        -inf; rows of q behind cu_seqlens_q's end get no meaning. What was handed over returns what it returns.

    Raises:
        NotImplementedError: a call that is not served, and no FlashAttention-3 is installed.
        ValueError, TypeError: an argument is not as described.
    """
    return _asked(WITH_KVCACHE, locals())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: None = None,
    fa_version: int = 2,
    s_aux: None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """vLLM's form of the same call, `vllm.vllm_flash_attn.flash_attn_varlen_func(..., q_v=..., fa_version=3)`.

    Args:
        q, q_v, max_seqlen_q, cu_seqlens_q: as q, qv and the rest of `flash_attn_with_kvcache`, ragged.
        k, v, block_table, seqused_k: as its k_cache, v_cache, page_table and cache_seqlens.
        softmax_scale: factor of the scores; 1 / sqrt(64) when None, as vLLM has it.
        fa_version: 3.
        causal, return_softmax_lse, out, scheduler_metadata, num_splits, q_descale, k_descale, v_descale: as there.
        max_seqlen_k: no request has more tokens in the cache; fewer pages' numbers are copied for some ragged queries.
        deterministic, return_attn_probs, cp_rank, cp_tot_seqused_k: without effect.
        cu_seqlens_k, dropout_p, window_size, softcap, alibi_slopes, output_scale, s_aux, cp_world_size, others: what
            these ask for is not served. others are those of newer versions.

    Returns, raises: as `flash_attn_with_kvcache`.
    """
    return _asked(VARLEN, locals())


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    *,
    num_splits: int = 0,
    **others: object,
) -> Tensor:
    """The plan of a step's calls, for all its layers. Copies nothing to the host and may be captured in a CUDA graph.

    Args:
        batch_size, max_seqlen_q, num_heads_q: of the calls.
        cache_seqlens: int32 [batch_size], tokens of each request, the new ones included.
        num_heads_kv, headdim, headdim_v: 1, 64 and 512.
        num_splits: of the calls; 1 splits no request.
        max_seqlen_k, qkv_dtype, others: the plan does not depend on them.

    Returns:
        int32 [n, 8] with an n that follows from batch_size, max_seqlen_q * num_heads_q and the GPU. What it means is
        ETAP's: FlashAttention's kernels cannot take it. With other lengths than it was made for a call gives results as
        right, but divides the work for those; with another n than a call's it is refused.

    Raises:
        NotImplementedError: sizes that are not served, and no FlashAttention-3 is installed, which would get them.
        ValueError, TypeError: an argument is not as described.
    """
    given = dict(locals())
    sizes = num_heads_kv, headdim, headdim_v
    if sizes != (1, ROPE_DIM, LATENT_DIM):
        reason = f"num_heads_kv, headdim, headdim_v: wanted 1, {ROPE_DIM}, {LATENT_DIM}, got {sizes}"
        call = Call.of(METADATA, given | given.pop("others"), _DEFAULTS[METADATA.function])
        return _hand_over(call, _installed(METADATA), reason)
    check_tensor("cache_seqlens", cache_seqlens)
    if cache_seqlens.shape != (batch_size,):
        raise ValueError(f"cache_seqlens: wanted shape [{batch_size}], got {list(cache_seqlens.shape)}")
    # As many rows of offsets as there are offsets, so that the shape says for how many requests they are.
    room = (batch_size + 1) * WORK_RANGE_FIELDS - 1
    rows = count("max_seqlen_q", max_seqlen_q) * count("num_heads_q", num_heads_q)
    options = {"batch_invariant": _unsplit(num_splits), "handed_over": True}
    built = named(PLAN_NAMES, plan, cache_seqlens, room, rows, cache_seqlens.device, **options)
    return torch.cat([built.work_ranges, built.split_offsets.view(-1, WORK_RANGE_FIELDS)])


def _parameters(module: ModuleType, form: Form) -> dict[str, inspect.Parameter]:
    theirs = getattr(module, form.function, None)
    return dict(inspect.signature(theirs).parameters) if callable(theirs) else {}


def _in_front(form: Form, theirs: Callable) -> Callable:
    """Answers what is served, and hands the rest to `theirs`; its arguments are theirs."""
    parameters = inspect.signature(theirs).parameters
    names = tuple(name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD)
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}

    @functools.wraps(theirs)
    def call(*arguments, **named):
        if len(arguments) > len(names):
            return theirs(*arguments, **named)
        given = defaults | dict(zip(names, arguments, strict=False)) | named
        return _answer(Call.of(form, given, defaults), lambda: theirs)

    marked: Any = call
    marked.handed_to = theirs
    return marked


@functools.cache
def _installed(form: Form) -> Callable | None:
    """The first function of FlashAttention-3 that can be imported; None where none can."""
    for name in form.modules:
        try:
            module = importlib.import_module(name)
        except ImportError:  # not there, or a build for other machines
            continue
        if module is not sys.modules[__name__] and (theirs := getattr(module, form.function, None)):
            return theirs
    return None


def _asked(form: Form, given: dict) -> Tensor | tuple:
    """A call of this module's own function."""
    given = dict(given)
    call = Call.of(form, given | given.pop("others"), _DEFAULTS[form.function])
    return _answer(call, lambda: _installed(form))


def _answer(call: Call, find: Callable[[], Callable | None]) -> Tensor | tuple:
    """Serve the call, or hand it to what `find` gives."""
    reason = _why_others(call) or _why_no_mla(call) or _why_scales(call) or _why_out(call)
    if reason:
        return _hand_over(call, find(), reason)
    batch, longest = _check_queries(call)
    prompt = longest * call.q.shape[-2] > PROMPT_ROWS
    if prompt and call.q.dtype == torch.bfloat16 and (theirs := find()):
        given = _handed(call)
        if not _not_taken(theirs, given):
            return theirs(**given)
    return _serve(call, batch, longest)


def _hand_over(call: Call, theirs: Callable | None, reason: str) -> Any:
    """What is not served here, for this reason."""
    if theirs is None:
        raise NotImplementedError(f"{reason}; and no FlashAttention-3 was found that serves it")
    given = _handed(call)
    if unknown := _not_taken(theirs, given):
        function = f"FlashAttention-3's {call.form.function}"
        raise NotImplementedError(f"{reason}; and {function}, which would get it, takes no {unknown}")
    return theirs(**given)


def _handed(call: Call) -> dict[str, object]:
    """What the caller gave of its own, without a plan that only these kernels read."""
    given = {
        name: value
        for name, value in call.given.items()
        if name not in call.defaults or value is not call.defaults[name]
    }
    if _is_ours(given.get("scheduler_metadata")):
        del given["scheduler_metadata"]
    return given


def _not_taken(theirs: Callable, given: dict[str, object]) -> str | None:
    """Name an argument that a function has no parameter for."""
    taken = _taken(theirs)
    return None if taken is None else next((name for name in given if name not in taken), None)


@functools.lru_cache(maxsize=64)
def _taken(theirs: Callable) -> frozenset[str] | None:
    """Names of the parameters of a function; None where it takes any."""
    parameters = inspect.signature(theirs).parameters.values()
    return None if any(one.kind is one.VAR_KEYWORD for one in parameters) else frozenset(one.name for one in parameters)


def _is_ours(metadata: object) -> bool:
    """Theirs has one dimension."""
    return isinstance(metadata, Tensor) and metadata.dim() == 2


@functools.cache
def _passed_over(form: Form) -> frozenset[str]:
    """Parameters of a form that ask for nothing that is not served, whatever their values."""
    return frozenset((*form.served, *WITHOUT_EFFECT))


def _why_others(call: Call) -> str | None:
    """Name a parameter that asks for what these kernels have not."""
    passed_over = _passed_over(call.form)
    for name, value in call.given.items():
        if value is None or value is False or name in passed_over:
            continue
        value, wanted = tuple(value) if isinstance(value, list) else value, NEUTRAL.get(name, 0)
        if isinstance(value, Tensor) or value != wanted:
            return call.said(name, str(NEUTRAL.get(name, "none")), value)
    return None


def _why_no_mla(call: Call) -> str | None:
    """Name what is not MLA's: a latent part and one KV head, in sizes that the kernels have."""
    if call.qv is None:
        return call.said("qv", "the latent part of the queries, as of MLA", None)
    for name, width in ("q", ROPE_DIM), ("qv", LATENT_DIM), ("k_cache", ROPE_DIM), ("v_cache", LATENT_DIM):
        tensor = getattr(call, name)
        check_tensor(call.form.name(name), tensor)
        if tensor.shape[-1:] != (width,):
            return call.said(name, f"{width} columns", tensor)
        if "cache" in name and (tensor.dim() != 4 or tensor.shape[2] != 1):
            return call.said(name, f"[num_blocks, page_block_size, 1, {width}]", tensor)
    reason = _why_types(call.q.dtype, call.k_cache.dtype)
    return reason and renamed(reason, {ours: call.form.name(name) for ours, name in TYPE_NAMES.items()})


@functools.lru_cache(maxsize=64)
def _why_types(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    return why_unsupported(dtype=dtype, kv_cache_dtype=cache_dtype)


def _why_scales(call: Call) -> str | None:
    """Name a scale that is not one for all requests, or the cache's where they are two."""
    for name in "q_descale", "k_descale", "v_descale":
        scale = getattr(call, name)
        if scale is None or not _is_scaled(call, name):
            continue
        check_tensor(name, scale)
        if any(size != 1 and stride != 0 for size, stride in zip(scale.shape, scale.stride(), strict=True)):
            return call.said(name, "one element, which may be expanded to [b, 1]", scale)
    if not _is_scaled(call, "k_descale"):
        return None
    k_place, v_place = (None if scale is None else scale.data_ptr() for scale in (call.k_descale, call.v_descale))
    if k_place != v_place:
        return "k_descale, v_descale: wanted one tensor for both, or None for both, got two"
    return None


def _why_out(call: Call) -> str | None:
    """Name an output in rows that lie apart, which theirs writes."""
    out = call.out
    if not isinstance(out, Tensor) or out.is_contiguous():
        return None
    return call.said("out", "a contiguous one", f"strides {list(out.stride())}")


def _is_scaled(call: Call, name: str) -> bool:
    """Elements of 16 bits stand for themselves, and FlashAttention ignores their scales."""
    return (call.q if name == "q_descale" else call.k_cache).dtype == FP8


def _scale(call: Call, name: str) -> Tensor | None:
    """As one element, float32 [1]."""
    scale = getattr(call, name)
    if scale is None or not _is_scaled(call, name):
        return None
    return scale[(0,) * scale.dim()].view(1)


def _check_queries(call: Call) -> tuple[int, int]:
    """Requests, and most query tokens of one; what cannot be is refused."""
    q, qv, starts = call.q, call.qv, call.cu_seqlens_q
    dims, shape = (4, "[b, s_q, h, 64]") if starts is None else (3, "[total_q, h, 64]")
    if q.dim() != dims:
        raise ValueError(call.said("q", f"shape {shape}", q))
    if qv.shape[:-1] != q.shape[:-1]:
        raise ValueError(call.said("qv", f"{[*q.shape[:-1], LATENT_DIM]} for q's shape", qv))
    if starts is None:
        return q.shape[0], q.shape[1]
    if not isinstance(starts, Tensor) or starts.dim() != 1 or starts.dtype != torch.int32 or len(starts) < 2:
        got = f"{dtype_name(starts.dtype)} {list(starts.shape)}" if isinstance(starts, Tensor) else type_name(starts)
        raise ValueError(call.said("cu_seqlens_q", "an int32 tensor of shape [b + 1], b at least 1", got))
    if starts.device != q.device:
        raise ValueError(call.said("cu_seqlens_q", f"a tensor on {q.device} like q", f"one on {starts.device}"))
    longest = _int(call.max_seqlen_q)
    if longest is None or longest < 1:
        raise ValueError(call.said("max_seqlen_q", "an int of at least 1 with cu_seqlens_q", call.max_seqlen_q))
    return starts.shape[0] - 1, longest


def _int(value: object) -> int | None:
    """Of what is one, numpy's, too; a tensor would have to be copied to the host."""
    return int(value) if isinstance(value, Integral) else None


def _cache(call: Call, batch: int) -> tuple[Tensor, Tensor]:
    """Block table [b, pages] and lengths [b]; a cache without pages is one page for each request."""
    table, caches, page_size = call.page_table, *call.k_cache.shape[:2]
    rows = _numbers(call, "cache_batch_idx", batch) if call.cache_batch_idx is not None else None
    device = call.q.device
    if table is None:
        # Where a row is named for each request there may be any number of them.
        if rows is None and caches != batch:
            raise ValueError(call.said("k_cache", f"[{batch}, seqlen, 1, 64] without page_table", call.k_cache))
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None] if rows is None else rows[:, None]
    elif not isinstance(table, Tensor) or table.dim() != 2 or rows is None and table.shape[0] != batch:
        raise ValueError(call.said("page_table", f"an int32 tensor of shape [{batch}, pages]", table))
    elif rows is not None:
        _check_rows(call, rows, table.shape[0])
        table = table.index_select(0, rows)
    lengths = _lengths(call, batch, table.shape[1] * page_size)
    table = table if table.stride(-1) == 1 else table.contiguous()
    return table if call.page_table is None else whole_rows(table), lengths.contiguous()


def _check_rows(call: Call, rows: Tensor, there: int) -> None:
    """Refuse numbers of rows that page_table has not."""
    if wrong := [number for number in _seen(rows) if not 0 <= number < there]:
        raise ValueError(call.said("cache_batch_idx", f"numbers from 0 on below {there}, page_table's rows", wrong[0]))


def _seen(numbers: Tensor) -> list[int]:
    """What the host sees of them: nothing on a GPU, which only a copy would show, and nothing of fake tensors."""
    return numbers.tolist() if numbers.is_cpu and type(numbers) is Tensor and not is_compiling() else []


def _numbers(call: Call, name: str, batch: int, wanted: str = "") -> Tensor:
    """A number for each request, beside the queries; `wanted` is what may stand for them, too."""
    given, device = getattr(call, name), call.q.device
    if not isinstance(given, Tensor) or given.shape != (batch,):
        raise ValueError(call.said(name, f"{wanted}an int32 tensor of shape [{batch}]", given))
    if given.dtype != torch.int32:
        raise TypeError(call.said(name, "int32", dtype_name(given.dtype)))
    if given.device != device:
        raise ValueError(call.said(name, f"a tensor on {device} like q", f"one on {given.device}"))
    return given


def _lengths(call: Call, batch: int, room: int) -> Tensor:
    """Tokens of each request, of which a block table has pages for so many."""
    given, device = call.cache_seqlens, call.q.device
    number = room if given is None else _int(given)
    if number is None:
        return _numbers(call, "cache_seqlens", batch, "an int, or ")
    if not 0 <= number <= room:
        raise ValueError(call.said("cache_seqlens", f"from 0 to {room}, what there is room for", number))
    return torch.full((batch,), number, dtype=torch.int32, device=device)


def _serve(call: Call, batch: int, longest: int) -> Tensor | tuple[Tensor, Tensor]:
    """The results, by the way that fits the lengths.

    Unsplit requests are not padded: the longest one would choose the kernel, and with it the bits, of all the others.
    """
    # As their wrapper does; a last dimension that is contiguous stays where it is.
    q, qv = (part if part.stride(-1) == 1 else part.contiguous() for part in (call.q, call.qv))
    call.q, call.qv = q, qv
    starts, out = call.cu_seqlens_q, call.out
    dtypes = output_dtypes(q.dtype)
    check_out("out", out, (*q.shape[:-1], LATENT_DIM), dtypes, q)
    if q.numel() == 0:
        out = q.new_empty(*q.shape[:-1], LATENT_DIM, dtype=dtypes[0]) if out is None else out
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    else:
        table, lengths = _cache(call, batch)
        if starts is None:
            out, lse = _decode(call, q, qv, table, lengths, out)
        elif longest == 1 and q.shape[0] == batch:
            _check_places(call, starts)
            out, lse = _singly(call, table, lengths, planned=True)
        else:
            _check_bounds(call, starts, longest)
            if not _unsplit(call.num_splits) and _padding_pays(q, batch, longest):
                out, lse = _padded(call, starts, longest, table, lengths)
            else:
                out, lse = _token_by_token(call, starts, table, lengths)
    # theirs: [b, h, s_q] or [h, total_q]
    return (out, lse.transpose(-2, -1).contiguous()) if call.return_softmax_lse else out


def _check_places(call: Call, starts: Tensor) -> None:
    """Refuse requests whose token is not in their own row of q."""
    numbers = _seen(starts)
    if numbers != [min(row, numbers[-1]) for row in range(len(numbers))]:
        wanted = "a token for each request and those without one last, or max_seqlen_q 2, where q has b rows"
        raise ValueError(call.said("cu_seqlens_q", wanted, numbers))


def _check_bounds(call: Call, starts: Tensor, longest: int) -> None:
    """Refuse tokens of a request that are not in q, and more of them than max_seqlen_q."""
    numbers, tokens = _seen(starts), call.q.shape[0]
    if not numbers:
        return
    if numbers != sorted(numbers) or numbers[0] != 0 or numbers[-1] > tokens:
        wanted = f"ascending numbers from 0 to at most {tokens}, q's rows"
        raise ValueError(call.said("cu_seqlens_q", wanted, numbers))
    most = max(end - start for start, end in itertools.pairwise(numbers))
    if most > longest:
        raise ValueError(call.said("max_seqlen_q", f"at least the {most} tokens of a request in cu_seqlens_q", longest))


def _padding_pays(q: Tensor, batch: int, longest: int) -> bool:
    """Whether requests padded to one length read their contexts less often than their tokens one by one."""
    num_sms, (tokens, heads) = sms_of(q.device), q.shape[:2]
    padded, alone = (decode_shape(rows, num_sms).row_groups for rows in (longest * heads, heads))
    return batch * padded <= tokens * alone


def _padded(call: Call, starts: Tensor, longest: int, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Each request's tokens at the end of as many rows as the longest has: so the causal rule fits every length.

    The rows before them repeat tokens of others; nothing takes their results. Requests that are equally long come this
    way, too, as only the device knows that they are. Small kernels are what this costs, hence one `arange`.
    """
    (tokens, heads), batch, ends = call.q.shape[:2], starts.shape[0] - 1, starts[1:]
    numbers = torch.arange(-longest, tokens + longest, dtype=torch.int32, device=starts.device)
    token = (ends[:, None] + numbers[:longest]).clamp_(0, tokens - 1).flatten()
    q, qv = (_rows(part, token).unflatten(0, (batch, longest)) for part in (call.q, call.qv))
    out, lse = _decode(call, q, qv, table, lengths, None)
    request = torch.bucketize(numbers[longest:-longest], starts[1:-1], right=True, out_int32=True)
    # Row (request + 1) * longest lies behind the request as its end does behind its tokens. Rows of q behind the last
    # token have no place, and take what the last one has.
    place = (numbers[2 * longest :] - ends.index_select(0, request)).add_(request, alpha=longest)
    place.clamp_(0, batch * longest - 1)
    done = torch.index_select(out.view(-1, heads, LATENT_DIM), 0, place, out=call.out)
    # Selected as theirs lies, [h, total_q].
    return done, lse.view(-1, heads).T.index_select(1, place).T if call.return_softmax_lse else lse


def _rows(part: Tensor, token: Tensor) -> Tensor:
    """A copy of these tokens' rows; not every torch selects rows of 8-bit floats."""
    bits = part.view(torch.uint8) if part.dtype == FP8 else part
    return bits.index_select(0, token).view(part.dtype)


def _token_by_token(call: Call, starts: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Each token a request of its own, which sees the context up to itself; block-table rows are all that is copied."""
    number = torch.arange(1, call.q.shape[0] + 1, dtype=torch.int32, device=starts.device)
    request = torch.bucketize(number, starts[1:-1], out_int32=True)
    following = starts[1:].index_select(0, request) - number  # tokens of the same request; below 0 behind the last one
    seen = lengths.index_select(0, request)
    seen = seen - following if call.causal else seen
    seen = seen.masked_fill_(following < 0, 0)
    return _singly(call, _narrow(call, table).index_select(0, request), seen, planned=False)


def _narrow(call: Call, table: Tensor) -> Tensor:
    """The columns that the caller's view and max_seqlen_k leave of a block table.

    All of them in a CUDA graph, whose replays may bring longer contexts than its capture; max_seqlen_k leaves all where
    no tensor has the lengths, which may then be all there is room for.
    """
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return table
    if call.page_table is not None:
        table = table[:, : call.page_table.shape[1]]
    longest = _int(call.max_seqlen_k)
    if longest is None or not isinstance(call.cache_seqlens, Tensor):
        return table
    return table[:, : max(1, -(-longest // max(1, call.k_cache.shape[1])))]


def _singly(call: Call, table: Tensor, lengths: Tensor, *, planned: bool) -> tuple[Tensor, Tensor]:
    """Row i of q sees lengths[i] tokens, of the pages in table's row i."""
    out = call.out
    whole = None if out is None else out[:, None]
    done, lse = _decode(call, call.q[:, None], call.qv[:, None], table, lengths, whole, planned=planned)
    return done.squeeze(1), lse.squeeze(1)


def _decode(call: Call, q, qv, table, lengths, out: Tensor | None, *, planned: bool = True) -> tuple[Tensor, Tensor]:
    """The call of `mla_decode` for q [b, s_q, h, 64] and qv; out [b, s_q, h, 512] and lse [b, s_q, h].

    Without a causal mask all queries of a request see the same tokens, as the heads of one query token do; so that is
    what they are for the kernel.
    """
    batch, s_q, heads, _ = q.shape
    tokens = s_q if call.causal else 1
    asked = (batch, tokens, s_q * heads // tokens)
    plan = _planned(call, lengths, batch, s_q * heads) if planned else _own_plan(call, lengths, batch, s_q * heads)
    scale = call.softmax_scale
    done, lse = named(
        call.refused,
        mla_decode,
        qv.reshape(*asked, LATENT_DIM),
        call.v_cache,
        table,
        lengths,
        plan._replace(s_q=tokens, num_heads=asked[2]),
        softmax_scale=call.form.score_columns**-0.5 if scale is None else scale,
        q_rope=q.reshape(*asked, ROPE_DIM),
        rope_cache=call.k_cache,
        q_scale=_scale(call, "q_descale"),
        kv_scale=_scale(call, "k_descale"),
        out=None if out is None else out.view(*asked, LATENT_DIM),
        out_dtype=None if call.out is None else call.out.dtype,
    )
    return done.view(batch, s_q, heads, LATENT_DIM), lse.view(batch, s_q, heads)


def _unsplit(num_splits: object) -> bool:
    """One split is how engines ask for bits that do not depend on the batch."""
    return _int(num_splits) == 1


def _own_plan(call: Call, lengths: Tensor, batch: int, rows: int) -> BuiltSchedule:
    options = {"batch_invariant": _unsplit(call.num_splits), "fp8_cache": call.k_cache.dtype == FP8}
    return named(call.refused, plan, lengths, batch, rows, lengths.device, **options)


def _planned(call: Call, lengths: Tensor, batch: int, rows: int) -> BuiltSchedule:
    """The plan of `get_scheduler_metadata`, or one for this call; how rows are shaped plays no part in it."""
    metadata = call.scheduler_metadata
    if metadata is not None:
        check_tensor("scheduler_metadata", metadata)
    if metadata is None or not _is_ours(metadata):
        return _own_plan(call, lengths, batch, rows)
    num_sms = sms_of(lengths.device)
    shape = decode_shape(rows, num_sms)
    partitions = shape.partitions(num_sms)
    size = (partitions + batch + 1, WORK_RANGE_FIELDS)
    if metadata.shape != size:
        wanted = f"what get_scheduler_metadata returned for {batch} requests of {rows} query rows, {list(size)}"
        raise ValueError(f"scheduler_metadata: wanted {wanted}, got {list(metadata.shape)}")
    workspace = lengths.new_empty(shape.workspace_floats(partitions), dtype=torch.float32)
    ranges, offsets = metadata[:partitions], metadata[partitions:].flatten()
    return BuiltSchedule(batch, 1, rows, partitions, shape.row_tile, ranges, offsets, workspace)


def _defaults_of(function: Callable) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


_DEFAULTS = {
    form.function: _defaults_of(function)
    for form, function in (
        (WITH_KVCACHE, flash_attn_with_kvcache),
        (VARLEN, flash_attn_varlen_func),
        (METADATA, get_scheduler_metadata),
    )
}
