"""FlashInfer's wrapper of paged MLA attention on ETAP's kernels, with the arguments of FlashInfer 0.6 and 0.7.

`from etap_backend.compat.flashinfer import BatchMLAPagedAttentionWrapper`; or `install()`, after which FlashInfer's own
wrapper knows `backend="etap"`.
"""

import functools
import inspect
import math
from collections.abc import Collection
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etap_backend._operator import check_tensor, type_name
from etap_backend.compat import check_out, named, renamed
from etap_backend.compat._capture import capture_id
from etap_backend.dense import mla_decode
from etap_backend.limits import DTYPES, FP8, LATENT_DIM, ROPE_DIM, dtype_name, why_unsupported
from etap_backend.schedule import BuiltSchedule, DecodeSchedule, count
from etap_backend.short_prompts import equal_runs

__all__ = ["BatchMLAPagedAttentionWrapper", "install"]

BACKENDS = ("auto", "etap", "fa2", "fa3")
"""What a program may have asked FlashInfer for on a Hopper GPU; the others take calls of another form."""
CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")
ENDS = ("qo_indptr", "kv_indptr")
CHOICES = {
    "query_layout": (None, "packed", "split"),
    "kv_cache_layout": (None, "packed", "split"),
    "lse_mode": ("none", "base2", "basee"),
    "output_scale": ("none",),
    "scale_mode": ("default", "kv-per-tensor"),
    "use_profiler": (False,),
    "skip_softmax": (False,),
    "enable_pdl": (None, False),
    "use_sinks": (False,),
}
"""What arguments of a plan may be that choose among FlashInfer's backends, or among their forms."""
NAMES = {
    "q": "q_nope",
    "q_rope": "q_pe",
    "kv_cache": "ckv_cache",
    "rope_cache": "kpe_cache",
    "workspace": "float_workspace_buffer",
}
"""FlashInfer's of what ETAP's refusals name."""
NAMES_IN_FORMS = {
    CSR: {"block_table": "kv_indices", "seq_lens": "kv_len_arr"},
    DENSE: {"block_table": "block_tables"},
}
PLAN_NAMES = {"dtype": "q_data_type", "kv_cache_dtype": "kv_data_type"}
READ_IN_PLACE = ("kv_indptr", "kv_indices", "block_tables")
"""What a plan does not copy where it need not. It has read page lists by its end; of all these only a block table has
to stay as it is until the last run."""
SAID = {CSR: "page lists", DENSE: "a block table"}
ALIGNMENT = 16
"""Bytes, of a workspace."""
FLOAT32 = torch.finfo(torch.float32)
MAX_RUNS = 4
"""Most calls for a batch of mixed query lengths; where it takes more, one serves queries padded to the longest."""
TABLE_BYTES = 1 << 30
"""Most that the block table takes which is made of page lists whose longest is not known."""


def install(*, backends: Collection[str] = ("etap",)) -> type:
    """Let FlashInfer's own wrapper answer with this one, in this process and from now on.

    Wrappers that were made before stay as they are, and so do those of other backends. The class stays FlashInfer's;
    who took it out of `flashinfer.mla` before has it as well.

    Args:
        backends: for which values of its `backend`; ("etap", "auto", "fa3") to serve programs as they are.

    Returns:
        FlashInfer's class.

    Raises:
        ImportError: there is no FlashInfer, or one with another wrapper.
        ValueError: `backends` has one whose calls have another form.
    """
    if others := [name for name in backends if name not in BACKENDS]:
        raise ValueError(f"backends: wanted some of {', '.join(BACKENDS)}, got {', '.join(map(str, others))}")
    from flashinfer.mla import BatchMLAPagedAttentionWrapper as theirs

    make = getattr(theirs.__init__, "_flashinfers", theirs.__init__)
    wanted, got = inspect.signature(BatchMLAPagedAttentionWrapper), inspect.signature(make)
    if list(wanted.parameters) != list(got.parameters)[1:]:
        raise ImportError(f"flashinfer: wanted a wrapper that takes {wanted}, as in 0.6 and 0.7, got {got}")

    @functools.wraps(make)
    def init(self, *args, **kwargs) -> None:
        given = wanted.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["backend"] not in backends:
            return make(self, *args, **kwargs)
        own = BatchMLAPagedAttentionWrapper(*args, **kwargs)
        # The instance's come before the class's. FlashInfer's table of backends would not do: it makes a backend anew
        # in every plan, and a captured graph would keep the buffers of the one before.
        self.plan, self.run, self._backend = own.plan, own.run, "etap"

    marked: Any = init
    marked._flashinfers = make
    theirs.__init__ = marked
    return theirs


class _Plan(NamedTuple):
    """What a plan's calls have in common; in later plans of a wrapper for CUDA graphs it has to be the same.

    Attributes:
        metadata: CSR or DENSE, the form of the requests.
    """

    metadata: tuple[str, ...]
    batch: int
    num_heads: int
    page_size: int
    causal: bool
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    max_q_len: int | None
    max_kv_len: int | None


class _Requests(NamedTuple):
    """A plan's requests, on the wrapper's device.

    Attributes:
        starts: int32 [b + 1], the first query token of each.
        block_table: int32 [b, max_pages].
        seq_lens: int32 [b].
        query_lens: query tokens of each, where the host knows them.
    """

    starts: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_lens: list[int] | None


class BatchMLAPagedAttentionWrapper:
    """Plans once a step, then decodes each layer; an instance serves one stream.

    With `use_cuda_graph` a captured `run` may be replayed after each further `plan`, for as many requests and query
    tokens as it was captured with.
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
        """Take the buffers.

        Args:
            float_workspace_buffer: contiguous, of any type; for partial results, 128 MiB are enough. Its device is that
                of the queries and the cache. Wrappers of one stream may share it.
            use_cuda_graph: plans are copied into buffers that never move.
            qo_indptr, kv_indptr, kv_indices, kv_len_arr: with use_cuda_graph, int32 buffers for page lists: [b + 1],
                [b + 1], [most pages of all requests], [b]. Else, and for block tables, not looked at.
            backend: one of BACKENDS, which all mean these kernels.

        Raises:
            ValueError, TypeError: an argument is not as described.
        """
        check_tensor("float_workspace_buffer", float_workspace_buffer)
        if not float_workspace_buffer.is_contiguous():
            raise ValueError(f"float_workspace_buffer: wanted a contiguous one, got {_shape(float_workspace_buffer)}")
        if backend not in BACKENDS:
            raise ValueError(f"backend: wanted one of {', '.join(BACKENDS)}, got {backend!r}")
        self.device = float_workspace_buffer.device
        space = float_workspace_buffer.view(-1).view(torch.uint8)
        self._workspace = space[-space.data_ptr() % ALIGNMENT :]
        self._use_cuda_graph = bool(use_cuda_graph)
        self._buffers: dict[str, Tensor | None] = dict(
            zip(CSR, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True)
        )
        for name, buffer in self._buffers.items():
            if use_cuda_graph and buffer is not None:
                _check_buffer(name, buffer, self.device)
        self._plan: _Plan | None = None
        self._requests: _Requests | None = None
        self._calls: _Calls | None = None
        self._scales: dict[float, Tensor] = {}

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
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Say what the step's requests are, as page lists or as a block table.

        Copies nothing to the host. What is on the CPU is looked at, without use_cuda_graph. What is on the GPU is not:
        then requests have equally many query tokens, or at most `max_q_len`, which is checked on the GPU by an
        assertion; and a block table is made of the page lists, with room in each row for all of them or for
        `max_kv_len` tokens. A plan keeps what it was given, but for a block table on the GPU: each run reads that.

        Args:
            qo_indptr: int32 [>= b + 1], where each request's query tokens begin; the first begin at 0.
            kv_indptr: int32 [>= b + 1], where each request's pages begin in kv_indices.
            kv_indices: int32 [>= kv_indptr[-1]], pages.
            kv_len_arr: int32 [b], tokens of each request, the new ones included.
            num_heads: query heads.
            head_dim_ckv, head_dim_kpe: 512 and 64.
            page_size: tokens in a page, any number.
            causal: a request's last query token sees all of its tokens, each before it one less; else all see all.
            sm_scale: factor of the scores.
            q_data_type: bfloat16 or float16.
            kv_data_type: q_data_type or float8_e4m3fn.
            metadata: FlashInfer's MLAPlanMetadata in place of qo_indptr to kv_len_arr, or of cum_seq_lens_q to
                max_q_len. Of one that has both the block table is taken.
            cum_seq_lens_q, block_tables, seq_lens: int32 [b + 1], [b, max_pages] and [b]: the other form of the
                requests. Unused entries of the table may hold anything.
            max_q_len: most query tokens of a request, with either form, and beside metadata that has none. For lengths
                on the GPU more than 1 has queries copied; with 1 and as many query rows as requests those without a
                token stand behind all others.
            max_kv_len: not FlashInfer's: most tokens of a request, for page lists. With use_cuda_graph of all plans.
            query_layout, kv_cache_layout, lse_mode: not needed; any are served, whatever was said here.
            output_dtype: None or q_data_type.
            output_scale, scale_mode, use_profiler, skip_softmax, enable_pdl, use_sinks: as CHOICES says.

        Raises:
            NotImplementedError: something that FlashInfer has and this has not; the text names it.
            ValueError, TypeError: an argument is not as described, or, with use_cuda_graph, not what it was before.
        """
        _check_choices(
            query_layout=query_layout,
            kv_cache_layout=kv_cache_layout,
            lse_mode=lse_mode,
            output_scale=output_scale,
            scale_mode=scale_mode,
            use_profiler=use_profiler,
            skip_softmax=skip_softmax,
            enable_pdl=enable_pdl,
            use_sinks=use_sinks,
        )
        lists = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        table = {"cum_seq_lens_q": cum_seq_lens_q, "block_tables": block_tables, "seq_lens": seq_lens}
        tensors, form, max_q_len = _forms({**lists, **table, "max_q_len": max_q_len}, metadata)
        batch = _check_requests(tensors, form, self.device)
        # FlashInfer looks at as many ends as there are lengths; programs hand over more.
        tensors |= {name: tensors[name][: batch + 1] for name in ENDS if name in tensors}
        problem: tuple[Any, Any, Any, Any, Any, Any] = (
            num_heads,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
        )
        plan = _Plan(form, batch, *problem, max_q_len, max_kv_len)
        _check_plan(plan, head_dim_ckv, head_dim_kpe, output_dtype)
        if self._use_cuda_graph and self._plan is not None:
            _check_same(plan, self._plan)
        self._requests = self._placed(tensors, plan)
        self._plan = plan
        if not self._use_cuda_graph:
            self._calls = None
        elif self._calls is not None:
            self._calls.build(self._requests)

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
        query: Tensor | tuple[Tensor, Tensor] | None = None,
        kv_cache: Tensor | tuple[Tensor, Tensor] | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: None = None,
        kpe_scale: float | None = None,
        sinks: None = None,
        skip_softmax_threshold_scale_factor: None = None,
        bmm1_scale: None = None,
        bmm2_scale: None = None,
        fp8_math: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Decode one layer. May be captured in a CUDA graph, best after a call that was not.

        Args:
            q_nope, q_pe: [tokens, num_heads, 512] and [.., 64] of the planned type, strides free but the last. Tokens
                of all requests, one after another; the results of rows behind them have no meaning.
            ckv_cache, kpe_cache: [pages, page_size, 512] and [.., 64] of the planned type, each row contiguous; parts
                of one tensor or two of their own.
            out: [tokens, num_heads, 512] of the planned query type, contiguous; allocated when None.
            lse: float32 [tokens, num_heads], contiguous; allocated when None. Is filled without return_lse, too.
            return_lse: return the log-sum-exp beside the output.
            return_lse_base_on_e: natural logarithm instead of base 2.
            query, kv_cache: in place of the pairs above: a pair, or one tensor whose rows have 576 columns.
            ckv_scale, kpe_scale: with an FP8 cache: what its elements are multiplied by. If they differ, q_pe is
                multiplied by kpe_scale / ckv_scale and rounded to its type.
            profiler_buffer, kv_len, page_table, o_scale, ckv_scale_arr, sinks, skip_softmax_threshold_scale_factor,
                bmm1_scale, bmm2_scale: None.
            fp8_math: not FlashInfer's: with an FP8 cache, multiply in float8_e4m3fn instead of float16.

        Returns:
            out, or (out, lse). A query that sees nothing has out 0 and lse -inf.

        Raises:
            RuntimeError: there is no plan yet.
            NotImplementedError: something that FlashInfer has and this has not; the text names it.
            ValueError, TypeError: an argument is not as described. Parts of `query` and `kv_cache` have the names of
                those that they replace.
        """
        _refuse_given(
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=o_scale,
            ckv_scale_arr=ckv_scale_arr,
            sinks=sinks,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        plan, requests = self._plan, self._requests
        if plan is None or requests is None:
            raise RuntimeError("run: wanted a plan before it, got none")
        of_query, of_cache = (plan.q_data_type, self.device), (plan.kv_data_type, self.device)
        q, q_rope = _pair("query", query, {"q_nope": q_nope, "q_pe": q_pe}, *of_query)
        kv, rope = _pair("kv_cache", kv_cache, {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache}, *of_cache)
        if q.shape[1] != plan.num_heads:
            raise ValueError(f"q_nope: wanted {plan.num_heads} heads as planned, got {list(q.shape)}")
        if kv.shape[1] != plan.page_size:
            raise ValueError(f"ckv_cache: wanted pages of {plan.page_size} tokens as planned, got {list(kv.shape)}")
        kv_scale, q_rope = self._scaled(q_rope, plan.kv_data_type, ckv_scale, kpe_scale)
        wants_lse = return_lse or lse is not None
        out = _result("out", out, (*q.shape[:2], LATENT_DIM), plan.q_data_type, q)
        lse = _result("lse", lse, (*q.shape[:2],), torch.float32, q)
        tokens = q.shape[0]
        if requests.query_lens is not None and not tokens:
            _check_tokens(requests.query_lens, 0)
        if not tokens or not kv.shape[0] or not plan.batch:
            # Without queries or pages there is nothing to launch.
            out.zero_()
            lse.fill_(-math.inf)
            return (out, lse) if return_lse else out
        options = {"softmax_scale": plan.sm_scale, "kv_scale": kv_scale, "fp8_math": fp8_math}
        self._calls_for(tokens, plan, requests).run(q, q_rope, kv, rope, out, lse, options)
        if wants_lse and not return_lse_base_on_e:
            lse.mul_(math.log2(math.e))
        return (out, lse) if return_lse else out

    def _placed(self, given: dict[str, Tensor], plan: _Plan) -> _Requests:
        """The requests where the calls find them; with use_cuda_graph always at the same place."""
        form = plan.metadata
        starts = given[form[0]]
        looked_at = not self._use_cuda_graph and starts.device.type == "cpu"
        query_lens = _query_lens(form[0], starts, plan.max_q_len) if looked_at else None
        width = self._table_width(given, plan) if form is CSR else 0
        # A refused plan has written nothing.
        places = [self._place(name, tensor) for name, tensor in given.items()]
        for place, tensor in zip(places, given.values(), strict=True):
            if place is not tensor:
                place.copy_(tensor, non_blocking=True)
        first, *pages, lengths = places
        # For graphs the whole buffer, of which a plan may have filled a part: the next one may have more.
        whole = self._buffers.get("block_tables") if form is DENSE else self._table(plan.batch, width, *pages)
        table = pages[0] if whole is None else whole
        return _Requests(first, table, lengths, query_lens)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Where to copy it; pages that are there stay where they are.

        Of those page lists are read once, by the plan, and a block table until the last run.
        """
        if not self._use_cuda_graph:
            there = name in READ_IN_PLACE and tensor.device == self.device
            return tensor if there else torch.empty_like(tensor, device=self.device)
        buffer = self._buffers.get(name)
        if buffer is None and name in CSR:
            raise ValueError(f"{name}: wanted a buffer in the wrapper for CUDA graphs, got None")
        if buffer is None:
            buffer = self._buffers[name] = torch.empty_like(tensor, device=self.device)
        part = buffer
        if name == "kv_indices":
            part = buffer[: len(tensor)]
        elif name == "block_tables":
            part = buffer[:, : tensor.shape[1]]
        if part.shape != tensor.shape:
            raise ValueError(f"{name}: wanted {_shape(buffer)} as the wrapper's buffer has, got {_shape(tensor)}")
        return part

    def _table_width(self, given: dict[str, Tensor], plan: _Plan) -> int:
        """Pages in a row of a block table that is made of page lists."""
        starts, pages = given["kv_indptr"], given["kv_indices"]
        if not self._use_cuda_graph and starts.device.type == "cpu":
            return _most_pages(given, plan)
        if plan.max_kv_len is not None:
            width = _pages(plan.max_kv_len, plan)
            _assert_on_device(starts.diff() <= width, f"kv_indptr: wanted max_kv_len's {width} pages at most, got more")
            return width
        entries = len(pages if self._buffers["kv_indices"] is None else self._buffers["kv_indices"])
        most = TABLE_BYTES // (4 * (plan.batch + 1))
        if entries > most:
            wanted = f"max_kv_len, or at most {most} entries for {plan.batch} requests"
            raise ValueError(f"kv_indices: wanted {wanted}, whose pages the host cannot count, got {entries}")
        return max(1, entries)

    def _table(self, batch: int, width: int, starts: Tensor, pages: Tensor) -> Tensor:
        """Page lists as a block table, made on the device."""
        table = self._buffers.get("table")
        if table is None:
            # The row behind the requests' takes what lies behind their pages.
            table = torch.empty(batch + 1, width, dtype=torch.int32, device=self.device)
        if self._use_cuda_graph:
            self._buffers["table"] = table
        place = torch.arange(len(pages), dtype=torch.int32, device=self.device)
        row = torch.searchsorted(starts[1:], place, right=True)
        table[row, (place - starts[row]).clamp_(max=table.shape[1] - 1)] = pages
        return table[:batch]

    def _calls_for(self, tokens: int, plan: _Plan, requests: _Requests) -> "_Calls":
        """The calls for so many query tokens, planned."""
        calls = self._calls
        if calls is None or calls.tokens != tokens:
            if calls is not None and self._use_cuda_graph:
                raise ValueError(f"q_nope: wanted {calls.tokens} query tokens as before, got {tokens}")
            calls = self._calls = _Calls(plan, requests, tokens, self._workspace)
        # What a capture plans is there only where it is replayed, which another graph's replays do not wait for.
        if not calls.built or calls.capture is not None and calls.capture != capture_id(self.device):
            calls.build(requests)
        return calls

    def _scaled(self, q_rope: Tensor, kv_dtype: torch.dtype, ckv: Any, kpe: Any) -> tuple[Tensor | None, Tensor]:
        """The cache's scale on the device, None for one of 16 bits; and q_rope, which makes up for the rope's."""
        for name, scale in {"ckv_scale": ckv, "kpe_scale": kpe}.items():
            if kv_dtype != FP8 and scale is not None:
                raise ValueError(f"{name}: wanted None with a cache of {dtype_name(kv_dtype)}, got {scale}")
            if kv_dtype == FP8 and not _is_float32(scale):
                raise ValueError(f"{name}: wanted a positive finite number of float32 with an FP8 cache, got {scale}")
        if kv_dtype != FP8:
            return None, q_rope
        scale = self._scales.get(ckv)
        if scale is None:
            scale = torch.full((1,), float(ckv), dtype=torch.float32, device=self.device)
            if capture_id(self.device) is None:
                self._scales[ckv] = scale
        return scale, q_rope if kpe == ckv else q_rope * float(kpe / ckv)


class _Run(NamedTuple):
    """Requests that one call decodes.

    Attributes:
        requests: which of the plan's.
        tokens: which of the query tokens.
        s_q: query tokens of each; at most so many where `padded`.
        padded: whether queries are copied, so that each request has s_q.
    """

    requests: slice
    tokens: slice
    s_q: int
    padded: bool


def _cut(plan: _Plan, query_lens: list[int] | None, tokens: int) -> list[_Run]:
    """Runs of requests with equally many query tokens, or one of all whose queries are padded."""
    everything = slice(0, plan.batch), slice(0, tokens)
    if query_lens is None:
        s_q = plan.max_q_len or tokens // plan.batch
        if plan.max_q_len is None and tokens % plan.batch:
            wanted = f"equally many query tokens for each of {plan.batch} requests, max_q_len, or qo_indptr on the CPU"
            raise ValueError(f"q_nope: wanted {wanted}, got {tokens}")
        # Static rows for a CUDA graph are as many as the longest lengths have, and say nothing of a replay's. Of one
        # token each, which nothing copies, row i is request i's.
        padded = plan.max_q_len is not None and (s_q > 1 or tokens != plan.batch)
        return [_Run(*everything, s_q, padded)]
    _check_tokens(query_lens, tokens)
    runs = [_Run(*run, padded=False) for run in equal_runs(query_lens) if run.s_q]
    return runs if len(runs) <= MAX_RUNS else [_Run(*everything, max(query_lens), padded=True)]


def _check_tokens(query_lens: list[int], tokens: int) -> None:
    """More rows than the requests' are no one's."""
    if tokens < sum(query_lens):
        raise ValueError(f"q_nope: wanted {sum(query_lens)} query tokens as planned, got {tokens}")


class _Call:
    """One run's call: its schedule, and where padded queries come from and go to."""

    def __init__(self, run: _Run, plan: _Plan, tokens: int, checked: bool, workspace: Tensor):
        """Allocate for it; `checked` where the host has seen the query lengths."""
        self.run, self.tokens, self._checked, self._bounded = run, tokens, checked, plan.max_q_len is not None
        requests = run.requests.stop - run.requests.start
        # Without a causal mask all queries of a request see the same tokens, as the heads of one query token do; so
        # that is what they are for the kernel.
        s_q = run.s_q if plan.causal else 1
        self.shape = (requests, s_q, run.s_q * plan.num_heads // s_q)
        device = workspace.device
        options = {"device": device, "allocate_workspace": False, "fp8_cache": plan.kv_data_type == FP8}
        self._schedule = DecodeSchedule(requests, self.shape[2], max_s_q=s_q, **options)
        size = 4 * self._schedule.max_workspace_floats
        if workspace.numel() < size:
            wanted = f"at least {size} bytes for {run.s_q} query tokens with {plan.num_heads} heads"
            raise ValueError(f"float_workspace_buffer: wanted {wanted}, got {workspace.numel()}")
        self._workspace = workspace[:size].view(torch.float32)
        self._built: BuiltSchedule | None = None
        self._names = NAMES | NAMES_IN_FORMS[plan.metadata]
        self._seq_lens = self._block_table = None
        if run.padded:
            self._source = torch.empty(requests * run.s_q, dtype=torch.int32, device=device)
            self._target = torch.empty(tokens, dtype=torch.int32, device=device)

    def build(self, requests: _Requests) -> None:
        """Plan for the lengths of now, on the device."""
        mine = self.run.requests
        self._seq_lens, self._block_table = requests.seq_lens[mine], requests.block_table[mine]
        if not self._checked:
            self._assert_lengths(requests.starts)
        if self.run.padded:
            self._pad(requests.starts)
        self._built = named(self._names, self._schedule.build, self._seq_lens, self.shape[1])

    def _assert_lengths(self, starts: Tensor) -> None:
        """Query lengths that the host has not seen are such as the run takes."""
        s_q, lengths = self.run.s_q, starts.diff()
        if self.run.padded:
            right, wanted = lengths <= s_q, f"at most {s_q} query tokens for each request"
        elif self._bounded:
            rows = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
            right, wanted = starts == rows.minimum(starts[-1]), "a query token for each request, those without one last"
        else:
            right, wanted = lengths == s_q, f"exactly {s_q} query tokens for each request"
        _assert_on_device(right, f"qo_indptr: wanted {wanted}, or it on the CPU, got others")

    def _pad(self, starts: Tensor) -> None:
        """A request's query tokens are the last of its s_q rows, so that the mask is theirs; those before are any."""
        s_q, ends = self.run.s_q, starts[1:]
        row = torch.arange(s_q, dtype=torch.int32, device=ends.device)
        self._source.view(-1, s_q).copy_((ends[:, None] - s_q + row).clamp_(0, self.tokens - 1))
        token = torch.arange(self.tokens, dtype=torch.int32, device=ends.device)
        request = torch.searchsorted(ends, token, right=True, out_int32=True).clamp_(max=len(ends) - 1)
        self._target.copy_((request * s_q + token - ends[request] + s_q).clamp_(0, len(self._source) - 1))

    def __call__(self, q, q_rope, kv, rope, out, lse, options: dict) -> None:
        """Write the run's rows of out and lse."""
        padded, mine = self.run.padded, self.run.tokens
        if padded:
            q, q_rope = (part.index_select(0, self._source) for part in (q, q_rope))
        elif mine.stop - mine.start < self.tokens:
            q, q_rope, out, lse = (part[mine] for part in (q, q_rope, out, lse))
        results = {} if padded else {"out": out.view(*self.shape, LATENT_DIM), "lse": lse.view(self.shape)}
        options = {**options, **results, "rope_cache": rope, "workspace": self._workspace}
        options["q_rope"] = q_rope.reshape(*self.shape, ROPE_DIM)
        q = q.reshape(*self.shape, LATENT_DIM)
        done = named(self._names, mla_decode, q, kv, self._block_table, self._seq_lens, self._built, **options)
        if padded:
            heads = lse.shape[1]
            torch.index_select(done[0].view(-1, heads, LATENT_DIM), 0, self._target, out=out)
            torch.index_select(done[1].view(-1, heads), 0, self._target, out=lse)


class _Calls:
    """What a plan means for a number of query tokens; a layer's calls follow one another on one workspace."""

    def __init__(self, plan: _Plan, requests: _Requests, tokens: int, workspace: Tensor):
        """Allocate for them."""
        self.tokens = tokens
        self.built, self.capture = False, None
        checked = requests.query_lens is not None
        runs = _cut(plan, requests.query_lens, tokens)
        self._calls = [_Call(run, plan, tokens, checked, workspace) for run in runs]

    def build(self, requests: _Requests) -> None:
        for call in self._calls:
            call.build(requests)
        self.built, self.capture = True, capture_id(requests.starts.device)

    def run(self, *arguments) -> None:
        for call in self._calls:
            call(*arguments)


def _assert_on_device(right: Tensor, wanted: str) -> None:
    """Refuse what the host does not look at: where not all are right, an assertion fails, on a GPU some time later."""
    torch.ops.aten._assert_async.msg(right.all(), wanted)


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {dtype_name(tensor.dtype)}"


def _check_choices(**given: object) -> None:
    for name, known in CHOICES.items():
        if given[name] not in known:
            raise NotImplementedError(f"{name}: wanted {' or '.join(map(repr, known))}, got {given[name]!r}")


def _refuse_given(**not_served: object) -> None:
    for name, value in not_served.items():
        if value is not None:
            raise NotImplementedError(f"{name}: wanted None, got {type_name(value)}")


def _forms(given: dict[str, Any], metadata: object) -> tuple[dict[str, Tensor], tuple[str, ...], Any]:
    """The requests' tensors in one of the two forms, its names, and max_q_len."""
    if metadata is not None:
        said = {name: getattr(metadata, name, None) for name in given}
        if said["max_q_len"] is None:  # MLAPlanMetadata.csr takes none
            said["max_q_len"] = given.pop("max_q_len")
        if doubled := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{doubled[0]}: wanted None beside metadata, got {type_name(given[doubled[0]])}")
        if not any(hasattr(metadata, name) for name in said):
            raise TypeError(f"metadata: wanted FlashInfer's MLAPlanMetadata, got {type_name(metadata)}")
        given = said
    dense, csr = (any(given[name] is not None for name in form) for form in (DENSE, CSR))
    if dense and csr and metadata is None:
        raise ValueError(f"{CSR[0]}: wanted None beside a block table, or the table's arguments None, got both")
    form = DENSE if dense else CSR
    for name in form:
        if not isinstance(given[name], Tensor):
            raise TypeError(f"{name}: wanted a tensor, got {type_name(given[name])}")
    return {name: given[name] for name in form}, form, given["max_q_len"]


def _check_requests(given: dict[str, Tensor], form: tuple[str, ...], device: torch.device) -> int:
    """Number of requests, in tensors that agree in it."""
    batch = len(given[form[-1]]) if given[form[-1]].dim() else 0
    shapes = {form[0]: "[b + 1]", "kv_indptr": "[b + 1]", form[-1]: "[b]", "kv_indices": "[pages]"}
    sizes = {form[0]: batch + 1, "kv_indptr": batch + 1, form[-1]: batch, DENSE[1]: batch}
    for name, tensor in given.items():
        dims = 2 if name == DENSE[1] else 1
        wanted = shapes.get(name, "[b, max_pages]")
        fits = tensor.dtype == torch.int32 and tensor.dim() == dims
        if not fits or len(tensor) != sizes.get(name, len(tensor)) and not (name in ENDS and len(tensor) > batch):
            raise ValueError(f"{name}: wanted int32 {wanted} for {batch} requests, got {_shape(tensor)}")
        if tensor.device.type != "cpu" and tensor.device != device:
            wanted = "the CPU" if device.type == "cpu" else f"{device} or the CPU"
            raise ValueError(f"{name}: wanted a tensor on {wanted}, got one on {tensor.device}")
    return batch


def _check_buffer(name: str, buffer: object, device: torch.device) -> None:
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type_name(buffer)}")
    if buffer.dtype != torch.int32 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device != device:
        wanted = f"a contiguous int32 tensor of one dimension on {device}"
        raise ValueError(f"{name}: wanted {wanted}, got {_shape(buffer)} on {buffer.device}")


def _pages(tokens: int, plan: _Plan) -> int:
    return -(-tokens // plan.page_size)


def _most_pages(given: dict[str, Tensor], plan: _Plan) -> int:
    """Pages of the longest list, where the host has the lists' ends, and may have the lengths too."""
    starts, lengths, page_size = given["kv_indptr"], given["kv_len_arr"], plan.page_size
    counts = starts.diff()
    if len(counts) and (int(starts[0]) or int(counts.min()) < 0 or int(starts[-1]) > len(given["kv_indices"])):
        wanted = f"ascending numbers from 0 to at most {len(given['kv_indices'])}, the pages"
        raise ValueError(f"kv_indptr: wanted {wanted}, got {starts.tolist()[:8]}")
    if lengths.device.type == "cpu" and (lengths > counts * page_size).any():
        wrong = int((lengths > counts * page_size).nonzero()[0])
        wanted = f"pages for {int(lengths[wrong])} tokens of request {wrong}"
        raise ValueError(f"kv_indptr: wanted {wanted}, got {int(counts[wrong])} of {page_size}")
    longest = max(1, int(counts.max())) if len(counts) else 1
    if plan.max_kv_len is not None and longest > _pages(plan.max_kv_len, plan):
        wanted = f"room for the {longest} pages of {page_size} of a request in kv_indptr"
        raise ValueError(f"max_kv_len: wanted {wanted}, got {plan.max_kv_len}")
    return longest


def _query_lens(name: str, starts: Tensor, most: int | None) -> list[int]:
    """Query tokens of each request, where the host has their ends: at most `most`."""
    lengths = starts.diff().tolist()
    if int(starts[0]) or min(lengths, default=0) < 0:
        raise ValueError(f"{name}: wanted ascending numbers from 0, got {starts.tolist()[:8]}")
    if most is not None and (longest := max(lengths, default=0)) > most:
        raise ValueError(f"max_q_len: wanted at least the {longest} query tokens of a request in {name}, got {most}")
    return lengths


def _check_plan(plan: _Plan, head_dim_ckv: object, head_dim_kpe: object, output_dtype: object) -> None:
    """Refuse what is missing, and what these kernels cannot run."""
    given = {**plan._asdict(), "head_dim_ckv": head_dim_ckv, "head_dim_kpe": head_dim_kpe}
    for name, value in given.items():
        if value is None and name not in ("max_q_len", "max_kv_len"):
            raise TypeError(f"{name}: wanted one, got None")
    for name in ("num_heads", "page_size", "max_q_len", "max_kv_len"):
        if given[name] is not None:
            count(name, given[name])
    # Powers are of 2 in the kernels, which therefore take log2(e) times the scale.
    if not (_is_float32(plan.sm_scale) and _is_float32(plan.sm_scale * math.log2(math.e))):
        wanted = "a positive finite number of float32, log2(e) times it too"
        raise ValueError(f"sm_scale: wanted {wanted}, got {plan.sm_scale!r}")
    dtypes = {"q_data_type": plan.q_data_type, "kv_data_type": plan.kv_data_type, "output_dtype": output_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: wanted a torch.dtype, got {dtype!r}")
    if plan.q_data_type not in DTYPES:
        wanted = " or ".join(map(dtype_name, DTYPES))
        raise NotImplementedError(f"q_data_type: wanted {wanted}, got {dtype_name(plan.q_data_type)}")
    if (head_dim_ckv, head_dim_kpe) != (LATENT_DIM, ROPE_DIM):
        wanted, got = f"{LATENT_DIM} and {ROPE_DIM}", f"{head_dim_ckv} and {head_dim_kpe}"
        raise NotImplementedError(f"head_dim_ckv, head_dim_kpe: wanted {wanted}, got {got}")
    reason = why_unsupported(
        dtype=plan.q_data_type,
        kv_cache_dtype=plan.kv_data_type,
        num_heads=plan.num_heads,
        page_size=plan.page_size,
    )
    if reason:
        raise NotImplementedError(renamed(reason, PLAN_NAMES))
    if output_dtype not in (None, plan.q_data_type):
        wanted = f"None or {dtype_name(plan.q_data_type)} like q_data_type"
        raise NotImplementedError(f"output_dtype: wanted {wanted}, got {dtype_name(output_dtype)}")


def _is_float32(scale: object) -> bool:
    """Whether it is a number that the kernels' float32 holds as a positive and finite one."""
    try:
        return isinstance(scale, Real) and FLOAT32.tiny <= float(scale) <= FLOAT32.max
    except OverflowError:  # a whole number beyond float64
        return False


def _check_same(now: _Plan, before: _Plan) -> None:
    for name, old in before._asdict().items():
        new = getattr(now, name)
        if new != old:
            old, new = (SAID.get(one, one) for one in (old, new))
            raise ValueError(f"{name}: wanted {old} as in the first plan for CUDA graphs, got {new}")


def _pair(
    name: str, whole: object, parts: dict[str, object], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Latent and rope, [.., 512] and [.., 64], of one tensor or of two."""
    if whole is not None:
        if doubled := [part for part, value in parts.items() if value is not None]:
            raise ValueError(f"{doubled[0]}: wanted None beside {name}, got {type_name(parts[doubled[0]])}")
        if isinstance(whole, Tensor):
            _check_part(name, whole, LATENT_DIM + ROPE_DIM, dtype, device)
            return whole[..., :LATENT_DIM], whole[..., LATENT_DIM:]
        if not isinstance(whole, tuple) or len(whole) != len(parts):
            raise TypeError(f"{name}: wanted a tensor or a pair of them, got {type_name(whole)}")
        parts = dict(zip(parts, whole, strict=True))
    (latent_name, latent), (name, rope) = parts.items()
    latent = _check_part(latent_name, latent, LATENT_DIM, dtype, device)
    rope = _check_part(name, rope, ROPE_DIM, dtype, device)
    if latent.shape[:2] != rope.shape[:2]:
        raise ValueError(f"{name}: wanted {[*latent.shape[:2], ROPE_DIM]}, got {list(rope.shape)}")
    return latent, rope


def _check_part(name: str, tensor: object, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = check_tensor(name, tensor)
    if tensor.dim() != 3 or tensor.shape[2] != width:
        raise ValueError(f"{name}: wanted three dimensions, the last of {width}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}.dtype: wanted {dtype_name(dtype)} as planned, got {dtype_name(tensor.dtype)}")
    if tensor.device != device:
        wanted = f"a tensor on {device} like float_workspace_buffer"
        raise ValueError(f"{name}: wanted {wanted}, got one on {tensor.device}")
    return tensor


def _result(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> Tensor:
    check_out(name, given, shape, (dtype,), q)
    return q.new_empty(shape, dtype=dtype) if given is None else given
