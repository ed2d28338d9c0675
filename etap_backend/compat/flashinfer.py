"""FlashInfer's wrapper for paged MLA decode on ETAP's kernels, with the arguments of FlashInfer 0.6 and 0.7.

Use `from etap_backend.compat.flashinfer import BatchMLAPagedAttentionWrapper` in place of FlashInfer's class.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etap_backend._operator import check_tensor
from etap_backend.compat import check_out, named, refuse_options
from etap_backend.dense import mla_decode
from etap_backend.limits import DTYPES, FP8, LATENT_DIM, ROPE_DIM, count, dtype_name
from etap_backend.schedule import BuiltSchedule, DecodeSchedule

__all__ = ["BatchMLAPagedAttentionWrapper"]

BACKENDS = ("auto", "etap", "fa2", "fa3")
"""Values of `backend` that are served; calls for the others have another form."""
LISTS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
CHOICES = {
    "query_layout": ("packed", "split"),
    "kv_cache_layout": ("packed", "split"),
    "lse_mode": ("none", "base2", "basee"),
    "output_scale": ("none",),
    "scale_mode": ("default", "kv-per-tensor"),
}
"""Values of a plan's options that are served, beside None and False."""
NAMES = {
    "q": "q_nope",
    "q_rope": "q_pe",
    "kv_cache": "ckv_cache",
    "rope_cache": "kpe_cache",
    "block_table": "kv_indices",
    "seq_lens": "kv_len_arr",
    "softmax_scale": "sm_scale",
}
"""FlashInfer's argument names by ETAP's, for refusals."""
ALIGNMENT = 16
"""Bytes, of the workspace."""
GRAPH_TABLE_BYTES = 1 << 28
"""Most memory for the block table of a wrapper for CUDA graphs, whose longest request is not known in advance."""


class _Problem(NamedTuple):
    """What the calls of a plan have in common; it must not change while CUDA graphs use the wrapper."""

    batch: int
    s_q: int
    num_heads: int
    page_size: int
    causal: bool
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """Requests, query tokens and heads of the kernel's call.

        Without a causal mask all query tokens of a request see the same context, so they are heads of one token.
        """
        return (self.batch, self.s_q, self.num_heads) if self.causal else (self.batch, 1, self.s_q * self.num_heads)


class BatchMLAPagedAttentionWrapper:
    """Paged MLA decode: `plan` once per step, then `run` once per layer, on one stream.

    All requests have the same number of query tokens; requests without a query token come last. With `use_cuda_graph`,
    a captured `run` may be replayed after each further `plan`.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Take the workspace.

        Args:
            float_workspace_buffer: contiguous, any type, on the device of queries and cache; 128 MiB are enough.
                Wrappers on one stream may share it.
            use_cuda_graph: later plans reuse the memory of the first.
            qo_indptr, kv_indptr, kv_len_arr: not used; a plan has its own memory.
            kv_indices: with use_cuda_graph, int32 [most pages of all requests]; only its size is used.
            backend: one of BACKENDS; each means ETAP.

        Raises:
            ValueError, TypeError: an argument is not as described.
        """
        check_tensor("float_workspace_buffer", float_workspace_buffer)
        if not float_workspace_buffer.is_contiguous():
            got = f"strides {list(float_workspace_buffer.stride())}"
            raise ValueError(f"float_workspace_buffer: wanted a contiguous tensor, got {got}")
        if backend not in BACKENDS:
            raise ValueError(f"backend: wanted one of {', '.join(BACKENDS)}, got {backend!r}")
        self.device = float_workspace_buffer.device
        space = float_workspace_buffer.view(-1).view(torch.uint8)
        self._space = space[-space.data_ptr() % ALIGNMENT :]
        self._graph_pages = len(_check_list("kv_indices", kv_indices)) if use_cuda_graph else None
        self._problem: _Problem | None = None

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: object | None = None,
        output_dtype: torch.dtype | None = None,
        **options: object,
    ) -> None:
        """Plan one step. Like FlashInfer's, it copies lists that are on the GPU to the host, to check them.

        Args:
            qo_indptr: int32 [>= b + 1], the first query token of each request; starts at 0.
            kv_indptr: int32 [>= b + 1], where the pages of each request begin in kv_indices.
            kv_indices: int32 [>= kv_indptr[b]], page numbers.
            kv_len_arr: int32 [b], tokens of each request, the new ones included.
            num_heads: query heads.
            head_dim_ckv, head_dim_kpe: 512 and 64.
            page_size: tokens per page, any number.
            causal: a request's last query token sees all its tokens, each earlier one sees one less; else all see all.
            sm_scale: factor of the scores.
            q_data_type: bfloat16 or float16.
            kv_data_type: q_data_type or float8_e4m3fn.
            metadata: FlashInfer's MLAPlanMetadata with page lists, in place of qo_indptr to kv_len_arr.
            output_dtype: None or q_data_type.
            use_profiler, options: FlashInfer's, with values in CHOICES.

        Raises:
            NotImplementedError: FlashInfer serves this, ETAP does not; the text names the argument.
            ValueError, TypeError: an argument is not as described, or changed after the first plan for CUDA graphs.
        """
        refuse_options({"use_profiler": use_profiler} | options, CHOICES)
        lists = _page_lists((qo_indptr, kv_indptr, kv_indices, kv_len_arr), metadata)
        given: dict[str, Any] = {"num_heads": num_heads, "page_size": page_size, "causal": causal, "sm_scale": sm_scale}
        given |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        _check_model(given, head_dim_ckv, head_dim_kpe, output_dtype)
        problem = _Problem(**_requests(lists, given["page_size"], given["num_heads"]), **given)
        before = None if self._graph_pages is None else self._problem
        for name, old, new in zip(problem._fields, before or problem, problem, strict=True):
            if old != new:
                name = {"batch": "kv_len_arr", "s_q": "qo_indptr"}.get(name, name)
                raise ValueError(f"{name}: wanted {old} as in the first plan for CUDA graphs, got {new}")
        self._place(lists, problem, first=before is None)

    def _place(self, lists: dict[str, Tensor], problem: _Problem, first: bool) -> None:
        """Copy the requests to the device and plan for them; for CUDA graphs always into the same memory."""
        starts, pages, lengths = (lists[name] for name in LISTS[1:])
        longest = max(1, int(starts.diff().max()))
        most = longest
        if self._graph_pages is not None:
            most = max(1, min(self._graph_pages, GRAPH_TABLE_BYTES // (4 * problem.batch)))
        if longest > most:
            raise ValueError(f"kv_indptr: wanted at most {most} pages per request for CUDA graphs, got {longest}")
        if first:
            self._allocate(problem, most)
        self._problem = problem
        starts, pages = (one.to(self.device, non_blocking=True) for one in (starts, pages))
        place = torch.arange(len(pages), dtype=torch.int32, device=self.device)
        row = torch.searchsorted(starts[1:], place, right=True)
        self._table[row, place - starts[row]] = pages
        self._lengths.copy_(lengths, non_blocking=True)
        self._built: BuiltSchedule = named(NAMES, self._schedule.build, self._lengths, problem.shape[1])

    def _allocate(self, problem: _Problem, most_pages: int) -> None:
        batch, s_q, heads = problem.shape
        options = {"device": self.device, "allocate_workspace": False, "fp8_cache": problem.kv_data_type == FP8}
        schedule = DecodeSchedule(batch, heads, max_s_q=s_q, **options)
        size = 4 * schedule.max_workspace_floats
        if self._space.numel() < size:
            raise ValueError(f"float_workspace_buffer: wanted at least {size} bytes, got {self._space.numel()}")
        self._schedule, self._workspace = schedule, self._space[:size].view(torch.float32)
        self._table = torch.empty(batch, most_pages, dtype=torch.int32, device=self.device)
        self._lengths = torch.empty(batch, dtype=torch.int32, device=self.device)

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: None = None,
        kv_len: None = None,
        page_table: None = None,
        return_lse_base_on_e: bool = False,
        o_scale: None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
        **options: None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Decode one layer. Copies nothing to the host and may be captured in a CUDA graph.

        Args:
            q_nope, q_pe: [b * s_q, num_heads, 512] and [.., 64] of the planned type; any strides with a contiguous last
                dimension. s_q is the most query tokens of a request; rows without a token have results without meaning.
            ckv_cache, kpe_cache: [pages, page_size, 512] and [.., 64] of the planned type, each row contiguous; two
                tensors or two parts of one.
            out: [b * s_q, num_heads, 512] of the query type, contiguous; allocated when None.
            lse: float32 [b * s_q, num_heads], contiguous; allocated when None.
            return_lse: return the log-sum-exp, too.
            return_lse_base_on_e: natural logarithm instead of base 2.
            ckv_scale, kpe_scale: factors of an FP8 cache's elements. Where they differ, q_pe is multiplied by
                kpe_scale / ckv_scale and rounded to its type.
            profiler_buffer, kv_len, page_table, o_scale, options: None.

        Returns:
            out, or (out, lse). A query that sees nothing has out 0 and lse -inf.

        Raises:
            RuntimeError: there is no plan yet.
            NotImplementedError: FlashInfer serves this, ETAP does not; the text names the argument.
            ValueError, TypeError: an argument is not as described.
        """
        legacy = {"profiler_buffer": profiler_buffer, "kv_len": kv_len, "page_table": page_table, "o_scale": o_scale}
        refuse_options(legacy | options)
        if (plan := self._problem) is None:
            raise RuntimeError("run: wanted a plan before it, got none")
        rows = (plan.batch * plan.s_q, plan.num_heads)
        q_nope = self._checked("q_nope", q_nope, (*rows, LATENT_DIM), plan.q_data_type)
        q_pe = self._checked("q_pe", q_pe, (*rows, ROPE_DIM), plan.q_data_type)
        ckv_cache = self._checked("ckv_cache", ckv_cache, (None, plan.page_size, LATENT_DIM), plan.kv_data_type)
        kpe_cache = self._checked("kpe_cache", kpe_cache, (len(ckv_cache), plan.page_size, ROPE_DIM), plan.kv_data_type)
        kv_scale, q_pe = self._scaled(q_pe, plan.kv_data_type, ckv_scale, kpe_scale)
        check_out("out", out, (*rows, LATENT_DIM), (plan.q_data_type,), q_nope)
        check_out("lse", lse, rows, (torch.float32,), q_nope)
        out = q_nope.new_empty(*rows, LATENT_DIM) if out is None else out
        lse = q_nope.new_empty(rows, dtype=torch.float32) if lse is None else lse
        named(
            NAMES,
            mla_decode,
            q_nope.reshape(*plan.shape, LATENT_DIM),
            ckv_cache,
            self._table,
            self._lengths,
            self._built,
            q_rope=q_pe.reshape(*plan.shape, ROPE_DIM),
            rope_cache=kpe_cache,
            softmax_scale=plan.sm_scale,
            kv_scale=kv_scale,
            workspace=self._workspace,
            out=out.view(*plan.shape, LATENT_DIM),
            lse=lse.view(plan.shape),
        )
        if not return_lse_base_on_e:
            lse.mul_(math.log2(math.e))
        return (out, lse) if return_lse else out

    def _checked(self, name: str, tensor: object, shape: tuple, dtype: torch.dtype) -> Tensor:
        tensor = check_tensor(name, tensor)
        shape = tuple(tensor.shape[:1] if shape[0] is None else shape[:1]) + shape[1:]
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != self.device:
            wanted = f"{list(shape)} of {dtype_name(dtype)} on {self.device} as planned"
            got = f"{list(tensor.shape)} of {dtype_name(tensor.dtype)} on {tensor.device}"
            raise ValueError(f"{name}: wanted {wanted}, got {got}")
        return tensor

    def _scaled(self, q_pe: Tensor, kv_dtype: torch.dtype, ckv: Any, kpe: Any) -> tuple[Tensor | None, Tensor]:
        """An FP8 cache's scale on the device, and q_pe, which makes up for another scale of the rope."""
        for name, scale in {"ckv_scale": ckv, "kpe_scale": kpe}.items():
            if kv_dtype != FP8 and scale is not None:
                raise ValueError(f"{name}: wanted None with a cache of {dtype_name(kv_dtype)}, got {scale}")
            if kv_dtype == FP8 and not (isinstance(scale, Real) and 0 < float(scale) < math.inf):
                raise ValueError(f"{name}: wanted a positive finite number with an FP8 cache, got {scale}")
        if kv_dtype != FP8:
            return None, q_pe
        scale = torch.full((1,), float(ckv), dtype=torch.float32, device=self.device)
        return scale, q_pe if kpe == ckv else q_pe * float(kpe / ckv)


def _check_list(name: str, values: object) -> Tensor:
    values = check_tensor(name, values)
    if values.dtype != torch.int32 or values.dim() != 1:
        raise ValueError(f"{name}: wanted int32 [n], got {dtype_name(values.dtype)} {list(values.shape)}")
    return values


def _page_lists(given: tuple[Tensor | None, ...], metadata: object) -> dict[str, Tensor]:
    """The four lists, cut to the requests and their pages; all but the pages on the host."""
    lists: dict[str, Any] = dict(zip(LISTS, given, strict=True))
    if metadata is not None:
        refuse_options(lists)
        lists = {name: getattr(metadata, name, None) for name in LISTS}
    lists = {name: _check_list(name, values) for name, values in lists.items()}
    lists = {name: values if name == "kv_indices" else values.cpu() for name, values in lists.items()}
    if not (batch := len(lists["kv_len_arr"])):
        raise ValueError("kv_len_arr: wanted at least one request, got none")
    for name in LISTS[:2]:
        lists[name] = starts = lists[name][: batch + 1]
        if len(starts) <= batch or int(starts[0]) or int(starts.diff().min()) < 0:
            wanted = f"{batch + 1} ascending numbers from 0 for {batch} requests"
            raise ValueError(f"{name}: wanted {wanted}, got {len(starts)}: {starts.tolist()[:8]}")
    if len(lists["kv_indices"]) < (total := int(lists["kv_indptr"][-1])):
        raise ValueError(f"kv_indices: wanted kv_indptr's {total} pages, got {len(lists['kv_indices'])}")
    return lists | {"kv_indices": lists["kv_indices"][:total]}


def _requests(lists: dict[str, Tensor], page_size: int, num_heads: int) -> dict[str, int]:
    """Number of requests and query tokens of each, which must be equal; pages must be enough."""
    starts, room, lengths = lists["qo_indptr"], lists["kv_indptr"].diff().long() * page_size, lists["kv_len_arr"]
    if len(wrong := ((lengths > room) | (lengths < 0)).nonzero()):
        request = int(wrong[0])
        wanted = f"0 to {int(room[request])} tokens of request {request}, which its pages in kv_indptr hold"
        raise ValueError(f"kv_len_arr: wanted {wanted}, got {int(lengths[request])}")
    s_q = max(1, int(starts.diff().max()))
    if not torch.equal(starts, (torch.arange(len(starts), dtype=torch.int32) * s_q).clamp_(max=int(starts[-1]))):
        wanted = "equally many query tokens for each request, those without a token last"
        raise NotImplementedError(f"qo_indptr: wanted {wanted}, got {starts.tolist()[:8]}")
    count("qo_indptr's query rows", s_q * num_heads)
    return {"batch": len(lengths), "s_q": s_q}


def _check_model(given: dict[str, Any], head_dim_ckv: object, head_dim_kpe: object, output_dtype: object) -> None:
    """Refuse what the kernels do not serve."""
    count("num_heads", given["num_heads"])
    count("page_size", given["page_size"])
    dtype = given["q_data_type"]
    for name, value, served in (
        ("head_dim_ckv", head_dim_ckv, (LATENT_DIM,)),
        ("head_dim_kpe", head_dim_kpe, (ROPE_DIM,)),
        ("causal", given["causal"], (False, True)),
        ("q_data_type", dtype, DTYPES),
        ("kv_data_type", given["kv_data_type"], (dtype, FP8)),
        ("output_dtype", output_dtype, (None, dtype)),
    ):
        if value not in served:
            wanted = " or ".join(map(dtype_name, served))
            raise NotImplementedError(f"{name}: wanted {wanted}, got {dtype_name(value)}")
