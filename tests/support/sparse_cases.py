"""Sparse decode problems (`SparseCase`), their tensors (`SparseProblem`), and guarded calls on them (`SparseRunner`).

Whatever a call must not read is poison: NaN and infinities between rows and pages and in every cache row that no valid
entry names, also where an entry behind a token's valid count names it; wild pages in the block-table entries that no
valid entry needs; NaN and infinities beside the queries; NaN in the scales of V4's rows that no entry names and behind
a page's last. Memory between the rows of a sliced output must keep its values. Shapes do not depend on the seed, so
that a graph that was recorded with one case can be replayed with another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from etap_backend import sparse_mla_decode, sparse_workspace_floats
from etap_backend.limits import (
    SCALE_DIM,
    SCALES,
    SPARSE_FP8_BYTES,
    V4_DATA_BYTES,
    V4_NOPE_DIM,
    V4_ROW_BYTES,
    V4_SCALE_DIM,
    V4_SCALES,
)
from etap_backend.sparse import device_sms
from support.cases import (
    ALIGNED_LAWS,
    FP8,
    FP8_MAX,
    HEAD_DIM,
    LATENT,
    SOFTMAX_SCALE,
    Guarded,
    GuardedCall,
    draw,
    lay_out_queries,
    poison,
)

CACHES = ("bf16", "fp8", "fp8 as e4m3", "v4", "v4 as e4m3")
HOLES = ("none", "tail", "anywhere", "most", "wild", "all")
COUNTS = ("none", "drawn")
SINKS = ("none", "drawn", "infinite")
Q_LAYOUTS = ("packed", "strided", "split", "expanded")
SCALE_LAWS = ("fitted", "powers", "zeros", "tiny", "huge", "mixed")
CACHE_LAYOUTS = ("dense", "gapped", "rows apart", "headed")
OUT_LAYOUTS = ("dense", "sliced", "transposed")
WILD_ENTRIES = (-1, -7, -(2**31), 2**31 - 1, 2**31 - 65)
WILD_PAGES = (-1, -7, -(2**31), 2**31 - 1, 1 << 20)
TABLE_TAIL = 2  # entries behind a request's pages in the block table, all of them wild
FAR_PAGES_BYTES = 2**27  # from one page to the next where pages are far apart
V4_PAGE_MULTIPLE = 576  # engines pad V4's pages so
V4_APART_BYTES = 2**20  # from one of V4's pages to the next where an engine lays the pages of all layers side by side
SINKS_BEHIND = 2  # more than there are heads


@dataclass(frozen=True)
class SparseCase:
    """One sparse decode problem. Its repr is a constructor, so a failing case can be pasted into a shell."""

    tokens: int
    heads: int = 16
    top_k: int = 128
    cache: str = "bf16"  # or FP8 rows, V3.2's (fp8) or V4's, as uint8 or as float8_e4m3fn
    page_size: int = 64
    law: str = "normal"
    scales: str = "fitted"  # of FP8 rows: amax / 448, rounded up to powers of two (always in V4), ..., all of these
    holes: str = "none"  # entries that name nothing: at the end, anywhere, most, of every wild kind, all of some tokens
    counts: str | tuple[int, ...] = "none"  # valid counts: drawn from below 0 to above top_k, or each token's own
    sinks: str = "none"  # infinite: some +inf, some -inf, some numbers
    repeats: bool = False  # rows are named many times
    requests: int = 0  # entries are positions in so many requests; 0: rows of the cache
    q_layout: str = "packed"  # strided (a window of a wider buffer), split (latent transposed, rope a window), expanded
    # gapped (pages apart), rows apart (V4: pages 2^20 bytes apart), headed (4-D: [pages, page_size, 1, ...])
    cache_layout: str = "dense"
    pool_pages: int = 0  # pages of the cache, at least; more than needed puts the used ones at its two ends
    far_pages: bool = False  # pages 2^27 bytes apart, so that a few of them reach beyond 2^31 bytes and elements
    num_sms: int | None = None
    seed: int = 0
    rope: bool = True  # columns behind the latent part of queries and rows; V4 has none
    extra: int | None = None  # entries of a second list, None: no second cache
    extra_counts: tuple[int, ...] | None = None  # None: as counts, of the second list
    extra_page_size: int = 64
    extra_requests: int = 0  # as requests, of the second list
    out_layout: str = "dense"  # sliced (a window of a wider buffer), transposed (such a window, heads first)

    @property
    def fp8(self) -> bool:
        return self.cache != "bf16"

    @property
    def v4(self) -> bool:
        return self.cache.startswith("v4")

    @property
    def width(self) -> int:
        """Columns of queries and of dequantized rows."""
        return HEAD_DIM if self.rope and not self.v4 else LATENT

    @property
    def scaled_columns(self) -> int:
        """How many first columns of an FP8 row have scales."""
        return V4_NOPE_DIM if self.v4 else LATENT

    def of_each_list(self) -> list[SparseCase]:
        """This case, and the one whose only list is this one's second."""
        if self.extra is None:
            return [self]
        second = {"top_k": self.extra, "page_size": self.extra_page_size, "requests": self.extra_requests}
        counts = self.counts if self.extra_counts is None else self.extra_counts
        return [self, replace(self, **second, counts=counts, extra=None, seed=self.seed + 7919)]

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.uint8 if self.fp8 else torch.bfloat16

    @property
    def row_width(self) -> int:
        """Elements of a stored row, bytes of an FP8 one."""
        if self.v4:
            return V4_ROW_BYTES
        return SPARSE_FP8_BYTES + 2 * (self.width - LATENT) if self.fp8 else self.width

    @property
    def context(self) -> int:
        """Rows that lists choose from, per request where there are requests."""
        return 8 if self.repeats else max(64, self.top_k)

    @property
    def pages(self) -> int:
        """Pages of the cache: no list names half of the rows or more."""
        return max(self.pool_pages, max(1, self.requests) * self.request_pages + 1)

    @property
    def request_pages(self) -> int:
        return -(-2 * self.context // self.page_size)


@dataclass
class SparseProblem:
    """A case's tensors. `q` is always the packed query; `call_q` and `call_q_rope` are what the call is given."""

    case: SparseCase
    q: torch.Tensor  # bfloat16 [tokens, heads, 576, or 512 without rope]
    call_q: torch.Tensor
    call_q_rope: torch.Tensor | None
    kv_cache: torch.Tensor
    indices: torch.Tensor  # int32 [tokens, top_k], a window of a wider buffer
    meant: torch.Tensor  # int64 [tokens, top_k], the cache's row that an entry names, -1 where none
    block_table: torch.Tensor | None
    request_ids: torch.Tensor | None
    valid_counts: torch.Tensor | None
    sinks: torch.Tensor | None  # more than heads, NaN behind them
    extra_kv_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_meant: torch.Tensor | None = None
    extra_block_table: torch.Tensor | None = None
    extra_valid_counts: torch.Tensor | None = None

    def lists(self) -> dict:
        """The arguments that say which rows a token attends to, as the reference takes them."""
        names = ("indices", "block_table", "request_ids", "valid_counts")
        extra = ("extra_kv_cache", "extra_indices", "extra_block_table", "extra_valid_counts")
        return {name: getattr(self, name) for name in (*names, *extra)}

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The caches, each with the rows of it that entries name."""
        first = (self.kv_cache, self.meant)
        return [first] if self.extra_kv_cache is None else [first, (self.extra_kv_cache, self.extra_meant)]


def build(case: SparseCase, device: str) -> SparseProblem:
    """The tensors of a case: always the same on the same device."""
    host = torch.Generator().manual_seed(case.seed)
    cases = case.of_each_list()
    requests = max(one.requests for one in cases)
    request_ids = torch.randint(max(1, requests), (case.tokens,), generator=host)
    if requests and case.holes in ("wild", "all"):
        lost = torch.rand(case.tokens, generator=host) < 0.1
        lost[2::8] = True
        request_ids[lost] = torch.tensor([-1, requests, 2**31 - 1]).repeat(case.tokens)[: int(lost.sum())]
    q = _queries(case, device)
    built = [_list(one, request_ids, _direction(case, device), device) for one in cases]
    sinks = _sinks(case, host)
    return SparseProblem(
        case,
        q,
        *_call_queries(q, case.q_layout),
        *built[0][:4],
        request_ids.int().to(device) if requests else None,
        built[0][4],
        None if sinks is None else sinks.to(device),
        *(built[1] if len(built) > 1 else ()),
    )


def _list(case: SparseCase, request_ids: torch.Tensor, direction: torch.Tensor, device: str) -> tuple:
    """The cache, entries, rows that they name, block table and valid counts of a case's only list."""
    host = torch.Generator().manual_seed(case.seed)
    table, named, unnamed, slots = _pool(case, host)
    known = (request_ids >= 0) & (request_ids < case.requests)
    of_token = torch.where(known, request_ids, 0)
    lists = _Lists(case, named[of_token], unnamed[of_token], slots[of_token], host)
    lists.fill()
    if case.requests:
        lists.meant[~known] = -1
    entries = torch.full((case.tokens, case.top_k + 5), 3, dtype=torch.int32)
    entries[:, : case.top_k] = lists.entries
    return (
        _cache(case, lists, direction, device),
        entries.to(device)[:, : case.top_k],
        lists.meant.to(device),
        table.int().to(device)[:, :-1] if case.requests else None,
        None if lists.counts is None else lists.counts.int().to(device),
    )


def _pool(case: SparseCase, host: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Block table [requests, request_pages + tail + 1], and for each request the positions that lists may name, those
    that they may not, and the cache's row of each position. Without requests there is one, of all pages in their order.
    """
    requests, size = max(1, case.requests), case.page_size
    needed = requests * case.request_pages
    ends = torch.cat([torch.arange(needed // 2), torch.arange(case.pages - (needed - needed // 2), case.pages)])
    pages = ends[torch.randperm(needed, generator=host)] if case.requests else ends
    pages = pages.view(requests, case.request_pages)
    wild = torch.tensor([*WILD_PAGES, case.pages]).repeat(requests * (TABLE_TAIL + 1))
    table = torch.cat([pages, wild[: requests * (TABLE_TAIL + 1)].view(requests, -1)], dim=1)
    slots = (pages[:, :, None] * size + torch.arange(size)).flatten(1)
    order = torch.stack([torch.randperm(slots.shape[1], generator=host) for _ in range(requests)])
    return table, order[:, : case.context], order[:, case.context :], slots


class _Lists:
    """The entries of all lists, and the cache row that each names."""

    def __init__(self, case: SparseCase, named, unnamed, slots, host: torch.Generator):
        self.case, self.host = case, host
        self.named, self.unnamed, self.slots = named, unnamed, slots  # of each token's request
        self.counts: torch.Tensor | None = None
        shape = (case.tokens, case.top_k)
        if case.repeats:
            rank = torch.randint(case.context, shape, generator=host)
        else:
            rank = torch.rand(case.tokens, case.context, generator=host).argsort(dim=1)[:, : case.top_k]
        if case.law in ("rising", "falling"):
            rank = rank.sort(dim=1, descending=case.law == "falling").values
        positions = named.gather(1, rank)
        self.meant = slots.gather(1, positions)
        self.entries = self._written(positions)

    def _written(self, positions: torch.Tensor) -> torch.Tensor:
        return positions if self.case.requests else self.slots.gather(1, positions)

    def fill(self) -> None:
        """Make the holes, then the valid counts, behind which entries name rows of poison."""
        case, shape = self.case, self.meant.shape
        if case.holes == "tail":
            seen = torch.randint(case.top_k + 1, (case.tokens, 1), generator=self.host)
            self._spoil(torch.arange(case.top_k) >= seen, (-1,))
        elif case.holes != "none":
            share = 0.95 if case.holes == "most" else 0.3
            self._spoil(torch.rand(shape, generator=self.host) < share, self._wild())
        if case.holes == "all":
            self._spoil((torch.arange(case.tokens) % 2 == 0)[:, None].expand(shape), (-1,))
        if case.counts != "none":
            self.counts = self._drawn_counts() if case.counts == "drawn" else torch.tensor(case.counts)
            behind = torch.arange(case.top_k) >= self.counts[:, None]
            any_row = torch.randint(self.unnamed.shape[1], shape, generator=self.host)
            self.entries = torch.where(behind, self._written(self.unnamed.gather(1, any_row)), self.entries)
            self.meant = self.meant.masked_fill(behind, -1)

    def _drawn_counts(self) -> torch.Tensor:
        case = self.case
        counts = torch.randint(case.top_k + 1, (case.tokens,), generator=self.host)
        edges = torch.tensor([0, 1, case.top_k, case.top_k + 1, 2**31 - 1, -1, -(2**31), case.top_k - 1])
        chosen = edges[torch.randint(len(edges), (case.tokens,), generator=self.host)]
        return torch.where(torch.rand(case.tokens, generator=self.host) < 0.4, chosen, counts)

    def _wild(self) -> tuple[int, ...]:
        """Entries that name nothing, each kind of them."""
        case = self.case
        if case.holes in ("anywhere", "most"):
            return (-1,)
        if not case.requests:
            return (*WILD_ENTRIES, case.pages * case.page_size, case.pages * case.page_size + 1)
        last = case.request_pages * case.page_size  # of the request; behind it come wild pages, then the table's end
        return (*WILD_ENTRIES, last, last + (TABLE_TAIL * case.page_size) - 1, last + TABLE_TAIL * case.page_size)

    def _spoil(self, where: torch.Tensor, kinds: tuple[int, ...]) -> None:
        drawn = torch.tensor(kinds)[torch.randint(len(kinds), where.shape, generator=self.host)]
        self.entries = torch.where(where, drawn, self.entries)
        self.meant = self.meant.masked_fill(where, -1)


def _queries(case: SparseCase, device: str) -> torch.Tensor:
    q = draw((case.tokens, case.heads, case.width), case.law, case.seed, "q", device)
    if case.law in ALIGNED_LAWS:
        q = 0.5 * q + _direction(case, device)
    if case.q_layout == "expanded":
        q = q[:1, :1].repeat(case.tokens, case.heads, 1)[: case.tokens]
    # Rows whose scales are all tiny or huge have scores of the usual size for such queries.
    q[..., : case.scaled_columns] *= {"tiny": 1e30, "huge": 1e-30}.get(case.scales, 1.0) if case.fp8 else 1.0
    return q.bfloat16()


def _direction(case: SparseCase, device: str) -> torch.Tensor:
    """[width]: the part that all queries share with the keys of aligned laws."""
    return draw((case.width,), "normal", case.seed, "direction", device)


def _call_queries(q: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    if layout == "expanded":  # one row for all, with strides 0
        return q[:1, :1].expand(q.shape), None
    latent, rope = lay_out_queries(q[:, None], layout)
    return latent.squeeze(1), None if rope is None or q.shape[-1] == LATENT else rope.squeeze(1)


def _sinks(case: SparseCase, host: torch.Generator) -> torch.Tensor | None:
    if case.sinks == "none":
        return None
    sinks = 3 * torch.randn(case.heads + SINKS_BEHIND, generator=host) + math.log(max(1, case.top_k))
    if case.sinks == "infinite":
        kind = torch.rand(len(sinks), generator=host)
        sinks = sinks.masked_fill(kind < 0.3, torch.inf).masked_fill(kind > 0.7, -torch.inf)
    sinks[case.heads :] = torch.nan
    return sinks


def _cache(case: SparseCase, lists: _Lists, direction: torch.Tensor, device: str) -> torch.Tensor:
    """The cache with values in the rows that entries mean, and poison everywhere else."""
    meant = lists.meant.flatten()
    rows = meant[meant >= 0].unique()
    values = _values(case, lists, rows, direction, device)
    page, place = (rows // case.page_size).to(device), (rows % case.page_size).to(device)
    if case.v4:
        cache = _v4_pages(case, device)
        _store_v4(cache, page, place, _v4_rows(case, values, device))
    else:
        cache = _poisoned_pages(case, device)
        cache[page, place] = _fp8_rows(case, values, device) if case.fp8 else values.bfloat16()
    if case.cache.endswith("as e4m3"):
        cache = cache.view(FP8)
    return cache.unsqueeze(2) if case.cache_layout == "headed" else cache


def _poisoned_pages(case: SparseCase, device: str) -> torch.Tensor:
    """Poison [pages, page_size, row] in the case's layout."""
    width, dtype = case.row_width, case.row_dtype
    if case.far_pages:
        step = FAR_PAGES_BYTES // dtype.itemsize
        whole = torch.empty((case.pages - 1) * step + case.page_size * width, dtype=dtype, device=device)
        cache = whole.as_strided((case.pages, case.page_size, width), (step, width, 1))
        for page in cache:
            _poison_rows(page)
        return cache
    rows = case.page_size + (3 if case.cache_layout == "gapped" else 0)
    beside = 16 if case.cache_layout == "rows apart" else 0
    whole = torch.empty(case.pages, rows, width + beside, dtype=dtype, device=device)
    return _poison_rows(whole)[:, : case.page_size, :width]


def _v4_pages(case: SparseCase, device: str) -> torch.Tensor:
    """Poison [pages, page_size, 584] as a tensor of V4's pages has it, which are padded, and apart in some layouts."""
    padded = -(-case.page_size * V4_ROW_BYTES // V4_PAGE_MULTIPLE) * V4_PAGE_MULTIPLE
    step = {"gapped": padded + 11 * 64, "rows apart": max(padded, V4_APART_BYTES)}.get(case.cache_layout, padded)
    step = FAR_PAGES_BYTES if case.far_pages else step
    whole = torch.empty((case.pages - 1) * step + padded, dtype=torch.uint8, device=device)
    pages = whole.as_strided((case.pages, padded), (step, 1))
    pages.fill_(0xFF)[:, 1 : case.page_size * V4_DATA_BYTES : 2] = 0x7F
    return whole.as_strided((case.pages, case.page_size, V4_ROW_BYTES), (step, V4_ROW_BYTES, 1))


def _store_v4(cache: torch.Tensor, page: torch.Tensor, place: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, 584], data and scales, to V4's pages."""
    pages, page_size, _ = cache.shape
    data_bytes, scale_bytes = page_size * V4_DATA_BYTES, V4_ROW_BYTES - V4_DATA_BYTES
    whole = cache.as_strided((pages, page_size * V4_ROW_BYTES), (cache.stride(0), 1))
    columns = (torch.arange(size, device=page.device) for size in (V4_DATA_BYTES, scale_bytes))
    data, scales = (place[:, None] * len(each) + each for each in columns)
    whole[page[:, None], data] = rows[:, :V4_DATA_BYTES]
    whole[page[:, None], data_bytes + scales] = rows[:, V4_DATA_BYTES:]


def _poison_rows(rows: torch.Tensor) -> torch.Tensor:
    """NaN and infinities; bytes that are NaN as e4m3, as float32 and as bfloat16, of either sign."""
    if rows.dtype != torch.uint8:
        return poison(rows)
    rows.fill_(0xFF)[..., 1::2] = 0x7F
    rows[..., ::3, :] = 0xFF
    return rows


def _values(case: SparseCase, lists: _Lists, rows: torch.Tensor, direction: torch.Tensor, device: str) -> torch.Tensor:
    """Float32 [rows, width]: the named rows before rounding."""
    values = draw((len(rows), case.width), case.law, case.seed, "kv", device)
    if case.law not in ALIGNED_LAWS or not len(rows):
        return values
    # A row's rank among the rows that its request's lists may name: the order of rising and falling lists.
    place = torch.full((int(lists.slots.max()) + 1,), -1)
    place[lists.slots.gather(1, lists.named)] = torch.arange(case.context).expand(lists.named.shape)
    place = place[rows].to(device)[:, None]
    if case.law == "dominating":
        return torch.where(place == case.context // 2, direction, values)
    # Scores from about -48 to 48: the running maximum grows by much in every tile, or never after the first.
    return 0.1 * values + (4 * place / (case.context - 1) - 2) * direction


def _fp8_rows(case: SparseCase, values: torch.Tensor, device: str) -> torch.Tensor:
    """Bytes [rows, 656 or 528] of float32 values [rows, 576 or 512]."""
    host = torch.Generator().manual_seed(case.seed + 1)
    groups = values[:, :LATENT].view(len(values), SCALES, SCALE_DIM)
    fitted = groups.abs().amax(dim=2) / FP8_MAX
    elements = (groups / fitted.clamp(min=1e-30)[..., None]).clamp(-FP8_MAX, FP8_MAX)
    scales = fitted
    if case.scales == "powers":
        scales = torch.exp2(torch.log2(fitted.clamp(min=1e-30)).ceil())
        elements = groups / scales[..., None]
    elif case.scales in ("tiny", "huge"):
        scales = fitted * (1e-30 if case.scales == "tiny" else 1e30)
    elif case.scales in ("zeros", "mixed"):
        kind = torch.rand(fitted.shape, generator=host).to(device)
        scales = fitted.masked_fill(kind < 0.3, 0.0)
        if case.scales == "mixed":
            power = 6 * torch.rand(fitted.shape, generator=host).to(device) - 3
            scales = torch.where(kind > 0.5, fitted * 10**power, scales)
            scales = torch.where(kind > 0.8, -fitted, scales)
            scales = scales.masked_fill((kind > 0.9) & (kind < 0.95), 1e-30).masked_fill(kind > 0.97, 1e30)
    stored = (elements.to(FP8), scales.float(), values[:, LATENT:].bfloat16())
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in stored], dim=1)


def _v4_rows(case: SparseCase, values: torch.Tensor, device: str) -> torch.Tensor:
    """Bytes [rows, 584], data and scales, of float32 values [rows, 512]."""
    host = torch.Generator().manual_seed(case.seed + 1)
    groups = values[:, :V4_NOPE_DIM].view(len(values), V4_SCALES, V4_SCALE_DIM)
    powers = torch.log2(groups.abs().amax(dim=2).clamp(min=1e-30) / FP8_MAX).ceil()
    kind = torch.rand(powers.shape, generator=host).to(device)
    elements = (groups / torch.exp2(powers)[..., None]).clamp(-FP8_MAX, FP8_MAX)
    if case.scales in ("tiny", "huge"):
        powers = powers + (-100 if case.scales == "tiny" else 100)
    elif case.scales in ("zeros", "mixed"):
        # Nothing times the largest power is nothing; whatever times the least is next to nothing.
        elements = elements.masked_fill((kind < 0.3)[..., None], 0.0)
        powers = powers.masked_fill(kind < 0.15, 127).masked_fill((kind >= 0.15) & (kind < 0.3), -127)
        if case.scales == "mixed":
            powers = powers.masked_fill((kind >= 0.3) & (kind < 0.5), -127)
            shift = torch.randint(-9, 10, powers.shape, generator=host).to(device)
            powers = torch.where(kind > 0.7, powers + shift, powers)
    unread = torch.full((len(values), 1), 0xFF, dtype=torch.uint8, device=device)
    scales = (powers.clamp(-127, 127) + 127).to(torch.uint8)
    stored = (elements.to(FP8), values[:, V4_NOPE_DIM:].bfloat16(), scales, unread)
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in stored], dim=1)


class SlicedRows(Guarded):
    """[tokens, heads, columns] as a window of a wider buffer, around which `check` finds everything as it was."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device, transposed: bool):
        first, second, columns = (shape[1], shape[0], shape[2]) if transposed else shape
        self.whole = torch.full((first + 1, second + 3, columns + 16), 7.0, dtype=dtype, device=device)
        self.window = (slice(1, None), slice(2, second + 2), slice(8, columns + 8))
        self.tensor = self.whole[self.window].transpose(0, 1) if transposed else self.whole[self.window]
        self.poison()

    def check(self, name: str):
        around = self.whole.clone()
        around[self.window] = 7
        assert bool((around == 7).all()), f"{name}: bytes around it were written"


class SparseRunner(GuardedCall):
    """Workspace and outputs of one problem."""

    def __init__(self, problem: SparseProblem):
        self.problem = problem
        case, device = problem.case, problem.q.device
        floats = sparse_workspace_floats(max(1, case.heads), case.num_sms or device_sms(device))
        self.workspace = Guarded((floats,), torch.float32, device)
        of_out = (case.tokens, case.heads, LATENT), torch.bfloat16, device
        sliced = case.out_layout != "dense"
        self.out = SlicedRows(*of_out, case.out_layout == "transposed") if sliced else Guarded(*of_out)
        self.lse = Guarded((case.tokens, case.heads), torch.float32, device)

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = {"workspace": self.workspace.tensor, "out": self.out.tensor, "lse": self.lse.tensor}
        return decode(self.problem, num_sms=self.problem.case.num_sms, **buffers)


def _copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy; of caches with their strides, which V4's pages need."""
    if not name.endswith("kv_cache"):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class RecordedCall:
    """A CUDA graph of a problem's call, and replays of it with other problems of the same shapes."""

    def __init__(self, problem: SparseProblem):
        tensors = {name: _copy(name, value) for name, value in vars(problem).items() if isinstance(value, torch.Tensor)}
        self.static = replace(problem, **tensors)
        self.runner = SparseRunner(self.static)
        self.runner.run()  # as engines do, so that nothing is loaded while recording
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.runner.call()

    def replay(self, problem: SparseProblem) -> tuple[torch.Tensor, torch.Tensor]:
        """The graph's outputs for another problem's tensors, in poisoned buffers."""
        self.runner.poison()
        for name, value in vars(self.static).items():
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(problem, name))
        self.graph.replay()
        return self.runner.out.tensor, self.runner.lse.tensor


def decode(problem: SparseProblem, **more) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_mla_decode(
        problem.call_q,
        problem.kv_cache,
        **problem.lists(),
        softmax_scale=SOFTMAX_SCALE,
        q_rope=problem.call_q_rope,
        sinks=problem.sinks,
        **more,
    )
