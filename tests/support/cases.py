"""Decode problems (`Case`), their tensors (`Problem`), and guarded calls on them (`Runner`).

Whatever a request must not read is poison: NaN and infinities in every cache row past its length, between the pages and
in every unused page, wild page ids in the unused block-table entries, NaN and infinities beside the queries.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from etap_backend import BuiltSchedule, DecodeSchedule, mla_decode
from etap_backend import schedule as schedule_module

LATENT, ROPE = 512, 64
HEAD_DIM = LATENT + ROPE
SOFTMAX_SCALE = HEAD_DIM**-0.5
WILD_PAGES = (2**31 - 1, -7, 1 << 20, -(2**31))
LAWS = ("normal", "clamped", "outliers", "dominating", "rising", "falling")
ALIGNED_LAWS = ("dominating", "rising", "falling")  # keys along a direction that a request's queries share
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@contextmanager
def stacked_from(least_tiles: int):
    """Stacks of steps that share less than pays on a GPU."""
    before = schedule_module.stack_shape
    schedule_module.stack_shape = lambda *rows: before(*rows)._replace(least_tiles=least_tiles)
    try:
        yield
    finally:
        schedule_module.stack_shape = before


@dataclass(frozen=True)
class Case:
    """One decode problem. Its repr is a constructor, so a failing case can be pasted into a shell and built again."""

    lengths: tuple[int, ...]
    heads: int = 16
    s_q: int = 1
    dtype: str = "bfloat16"  # of the query: bfloat16, float16, or float8_e4m3fn beside an FP8 cache
    page_size: int = 64
    law: str = "normal"
    q_layout: str = "packed"  # packed, strided (a window of a wider buffer), split (latent transposed, rope a window)
    # gapped (pages apart), rows apart, headed ([pages, page_size, 1, 576]), apart (see lay_apart)
    cache_layout: str = "dense"
    pool_pages: int = 0  # pages of the cache, at least; more than needed puts the used ones at its two ends
    aliased: bool = False  # about half the block-table entries name a page that others name, too
    num_sms: int | None = None
    seed: int = 0
    kv_dtype: str = "same"  # same (the query's) or fp8
    kv_scale: float | None = None  # what the law draws is divided by it before it is rounded to FP8, and saturates
    q_scale: float | None = None
    q_power: int = 0  # queries are 2^q_power larger than the law's, keys as much smaller
    fp8_math: bool = False
    output: str = "same"  # dtype of the output; same: the query's, or bfloat16 when that is FP8
    # Requests, and tokens whose pages they have in common: of the first ones, of those behind them, and so on. Then the
    # schedule shares prefixes, however little that saves.
    prefixes: tuple[tuple[int, int], ...] = ()
    groups: bool = False  # few multiprocessors may take rows in groups of 16 where batch or cache suggest it

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def kv_torch_dtype(self) -> torch.dtype:
        return FP8 if self.kv_dtype == "fp8" else self.torch_dtype

    @property
    def planned(self) -> dict:
        """Arguments of a schedule for it, besides batch, heads and device."""
        types = {"fp8_cache": self.kv_dtype == "fp8", "fp8_math": self.fp8_math}
        shared = {"shared_prefix": True} if self.prefixes else {}
        return {"max_s_q": self.s_q, "num_sms": self.num_sms, "any_batch": not self.groups} | types | shared

    @property
    def out_dtype(self) -> torch.dtype:
        if self.output != "same":
            return getattr(torch, self.output)
        return torch.bfloat16 if self.torch_dtype == FP8 else self.torch_dtype


@dataclass
class Problem:
    """A case's tensors. `q` is always the packed query; `call_q` and `call_q_rope` are what the call is given."""

    case: Case
    q: torch.Tensor  # [batch, s_q, heads, 576]
    call_q: torch.Tensor
    call_q_rope: torch.Tensor | None
    kv_cache: torch.Tensor  # [pages, page_size, 576], or 4-D in the headed layout; always the whole rows
    block_table: torch.Tensor  # int32 [batch, max_pages], a window of a wider buffer
    seq_lens: torch.Tensor  # int32 [batch]
    q_scale: torch.Tensor | None = None
    kv_scale: torch.Tensor | None = None
    latent_cache: torch.Tensor | None = None  # in the apart layout what the call is given: windows of wider buffers
    rope_cache: torch.Tensor | None = None

    @property
    def call_kv_cache(self) -> torch.Tensor:
        return self.kv_cache if self.latent_cache is None else self.latent_cache

    @property
    def kv_cache_3d(self) -> torch.Tensor:
        return self.kv_cache.squeeze(2) if self.kv_cache.dim() == 4 else self.kv_cache


def build(case: Case, device: str) -> Problem:
    """The tensors of a case: always the same on the same device."""
    kv_cache, block_table, seq_lens = _paged_cache(
        case.lengths,
        case.kv_torch_dtype,
        2.0**-case.q_power / (case.kv_scale or 1.0),
        case.page_size,
        case.law,
        case.cache_layout,
        case.pool_pages,
        case.aliased,
        case.prefixes,
        case.seed,
        device,
    )
    q = draw((len(case.lengths), case.s_q, case.heads, HEAD_DIM), case.law, case.seed, "q", device)
    if case.law in ALIGNED_LAWS:
        q = 0.5 * q + _shared_direction(len(case.lengths), case.seed, device)[:, None, None]
    q = _rounded(q * 2.0**case.q_power / (case.q_scale or 1.0), case.torch_dtype)
    scales = [None if s is None else torch.tensor(s, device=device) for s in (case.q_scale, case.kv_scale)]
    apart = lay_apart(kv_cache) if case.cache_layout == "apart" else ()
    return Problem(case, q, *lay_out_queries(q, case.q_layout), kv_cache, block_table, seq_lens, *scales, *apart)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else x.to(dtype)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN and both infinities by turns; in FP8, which has none, with both its NaN, 0x7f and 0xff."""
    if tensor.dtype == FP8:
        tensor.view(torch.uint8).fill_(0x7F)[..., 1::2] = 0xFF
        return tensor
    tensor.fill_(torch.nan)[..., 1::3] = torch.inf
    tensor[..., 2::3] = -torch.inf
    return tensor


@lru_cache(maxsize=2)
def _paged_cache(lengths, dtype, factor, page_size, law, layout, pool_pages, aliased, prefixes, seed, device):
    batch = len(lengths)
    pages_of = [-(-n // page_size) for n in lengths]
    needed = sum(pages_of)
    pool = max(pool_pages, needed + 3)
    host = torch.Generator().manual_seed(seed)
    ends = torch.cat([torch.arange(needed // 2), torch.arange(pool - (needed - needed // 2), pool)])
    page_ids = ends[torch.randperm(needed, generator=host)]

    width = max(pages_of, default=0) + 2
    table = torch.tensor(WILD_PAGES, dtype=torch.int32).repeat(batch * (width + 3))[: batch * (width + 3)]
    table = table.view(batch, width + 3)
    token_pages, token_rows, first = [], [], 0
    for request, (length, pages) in enumerate(zip(lengths, pages_of, strict=True)):
        ids = page_ids[first : first + pages]
        table[request, :pages] = ids.to(torch.int32)
        position = torch.arange(length)
        token_pages.append(ids[position // page_size])
        token_rows.append(position % page_size)
        first += pages

    rows, columns = page_size + 8 * (layout == "gapped"), HEAD_DIM + 64 * (layout == "rows apart")
    cache = poison(torch.empty(pool, rows, columns, dtype=dtype, device=device))[:, :page_size, :HEAD_DIM]
    tokens = draw((sum(lengths), HEAD_DIM), law, seed, "kv", device)
    if law in ALIGNED_LAWS:
        _align(tokens, lengths, law, _shared_direction(batch, seed, device), host)
    if sum(lengths):
        # As bytes, since not every torch can index 8-bit floats on a GPU.
        place = torch.cat(token_pages).to(device), torch.cat(token_rows).to(device)
        cache.view(torch.uint8)[place] = _rounded(tokens * factor, dtype).view(torch.uint8)
    for page in _alias(table, lengths, page_size, host) if aliased else _share(table, lengths, page_size, prefixes):
        poison(cache[page])
    if layout == "headed":
        cache = cache.unsqueeze(2)
    return cache, table.to(device)[:, :width], torch.tensor(lengths, dtype=torch.int32, device=device)


def _alias(table: torch.Tensor, lengths, page_size: int, host: torch.Generator) -> list[int]:
    """Let about half the used entries name a full page of any request; returns the pages that lost their last entry."""
    full = [page for row, length in zip(table.tolist(), lengths, strict=True) for page in row[: length // page_size]]
    if not full:
        return []
    named = torch.arange(table.shape[1]) < torch.tensor([-(-length // page_size) for length in lengths])[:, None]
    before = set(table[named].tolist())
    exchanged = named & (torch.rand(table.shape, generator=host) < 0.5)
    table[exchanged] = torch.tensor(full, dtype=torch.int32)[
        torch.randint(len(full), (int(exchanged.sum()),), generator=host)
    ]
    return sorted(before - set(table[named].tolist()))


def _share(table: torch.Tensor, lengths, page_size: int, prefixes) -> list[int]:
    """Let requests begin with the full pages of their group's first one; returns the pages that lost their entry."""
    lost, first = [], 0
    for members, tokens in prefixes:
        pages = tokens // page_size
        assert min(lengths[first : first + members]) > tokens
        lost += table[first + 1 : first + members, :pages].flatten().tolist()
        table[first + 1 : first + members, :pages] = table[first, :pages].clone()
        first += members
    return lost


def _align(tokens: torch.Tensor, lengths, law: str, directions: torch.Tensor, host: torch.Generator) -> None:
    """Turn keys [all tokens, 576] towards their request's direction: one of them, or all with a slope."""
    for keys, direction in zip(tokens.split(lengths), directions, strict=True):
        if len(keys) and law == "dominating":
            # drawn over the whole context, so that most of the time the maximum comes late and by surprise
            keys[int(torch.randint(len(keys), (1,), generator=host))] = direction
        elif len(keys):
            # scores from about -48 to 48: the running maximum grows by much in every tile, or never after the first
            ends = (-2, 2) if law == "rising" else (2, -2)
            keys.copy_(0.1 * keys + torch.linspace(*ends, len(keys), device=keys.device)[:, None] * direction)


def _generator(seed: int, stream: str, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(1000 * seed + ("q", "kv", "direction").index(stream))


def draw(shape, law: str, seed: int, stream: str, device: str) -> torch.Tensor:
    generator = _generator(seed, stream, device)
    x = torch.randn(shape, generator=generator, device=device)
    if law == "clamped":
        return (x / 10).clamp(-1, 1)
    if law == "outliers":
        hit = torch.rand(shape, generator=generator, device=device) < 0.001
        return x + hit * 10 * torch.randn(shape, generator=generator, device=device)
    return x


def _shared_direction(batch: int, seed: int, device: str) -> torch.Tensor:
    """[batch, 576]: the part that all of a request's queries share with its dominating key (its logit is about 24)."""
    return torch.randn(batch, HEAD_DIM, generator=_generator(seed, "direction", device), device=device)


def lay_out_queries(q: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, s_q, heads, width = q.shape
    if layout == "packed":
        return q, None
    if layout == "strided":
        wide = poison(q.new_empty(batch, s_q, heads + 3, width + 64))
        window = wide[:, :, 1 : heads + 1, 32 : 32 + width]
        window.copy_(q)
        return window, None
    latent = q.new_empty(heads, batch, s_q, LATENT).permute(1, 2, 0, 3)
    latent.copy_(q[..., :LATENT])
    wide = poison(q.new_empty(batch, s_q, heads, 128 + width - LATENT))
    rope = wide[..., 128:]
    rope.copy_(q[..., LATENT:])
    return latent, rope


def lay_apart(cache: torch.Tensor) -> list[torch.Tensor]:
    """Latent and rope part of every row, each a window of a wider buffer: their strides differ."""
    parts = []
    for part, room in ((cache[..., :LATENT], 32), (cache[..., LATENT:], 64)):
        pages, rows, columns = part.shape
        window = poison(cache.new_empty(pages, rows + 1, room + columns))[:, :rows, room:]
        window.view(torch.uint8).copy_(part.view(torch.uint8))
        parts.append(window)
    return parts


class Guarded:
    """A contiguous tensor of poison between two guard regions, which `check` finds untouched or names."""

    GUARD = 1024

    def __init__(self, shape, dtype: torch.dtype, device):
        size = torch.Size(shape).numel()
        self.whole = torch.full((size + 2 * self.GUARD,), 7.0, dtype=dtype, device=device)
        self.tensor = self.whole[self.GUARD : self.GUARD + size].view(shape)
        self.poison()

    def poison(self, value: float = torch.nan):
        self.tensor.fill_(value)

    def check(self, name: str):
        before, after = self.whole[: self.GUARD], self.whole[self.whole.numel() - self.GUARD :]
        assert bool((before == 7).all()), f"{name}: bytes before it were written"
        assert bool((after == 7).all()), f"{name}: bytes behind it were written"


class GuardedCall:
    """A call whose workspace and outputs are guarded, and poisoned before every run."""

    workspace: Guarded
    out: Guarded
    lse: Guarded

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the call once, on these buffers."""
        raise NotImplementedError

    def poison(self, value: float = torch.nan) -> None:
        for guarded in (self.workspace, self.out, self.lse):
            guarded.poison(value)

    def run(self, poison: float = torch.nan) -> tuple[torch.Tensor, torch.Tensor]:
        self.poison(poison)
        out, lse = self.call()
        assert out.data_ptr() == self.out.tensor.data_ptr() and lse.data_ptr() == self.lse.tensor.data_ptr()
        return out, lse

    def check_guards(self) -> None:
        self.out.check("out")
        self.lse.check("lse")
        self.workspace.check("workspace")

    def differences(self, first: list[torch.Tensor], poisons: tuple[float, ...]) -> list[str]:
        """What further runs do wrong, one on buffers of each poison: other bits than the first run, broken guards."""
        found = []
        for run, poison in enumerate(poisons, start=2):
            for name, result, before in zip(("out", "lse"), self.run(poison), first, strict=True):
                if not torch.equal(result.view(torch.uint8), before.view(torch.uint8)):
                    found.append(f"{name}: run {run} gave other bits than run 1")
        try:
            self.check_guards()
        except AssertionError as error:
            found.append(str(error))
        return found


class Runner(GuardedCall):
    """Schedule, workspace and outputs of one problem."""

    def __init__(self, problem: Problem):
        self.problem = problem
        case, device = problem.case, problem.q.device
        batch = len(case.lengths)
        options = {"device": device} | case.planned
        probe = DecodeSchedule(batch, case.heads, **options)
        self.workspace = Guarded(probe.workspace.shape, torch.float32, device)
        self.schedule = DecodeSchedule(batch, case.heads, workspace=self.workspace.tensor, **options)
        self.out = Guarded((batch, case.s_q, case.heads, LATENT), case.out_dtype, device)
        self.lse = Guarded((batch, case.s_q, case.heads), torch.float32, device)

    def build(self) -> BuiltSchedule:
        problem = self.problem
        with stacked_from(0) if problem.case.prefixes else nullcontext():
            pages = dict(block_table=problem.block_table, page_size=problem.case.page_size)
            return self.schedule.build(problem.seq_lens, problem.case.s_q, **pages)

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(self.problem, self.build(), out=self.out.tensor, lse=self.lse.tensor)


def decode(problem: Problem, schedule: BuiltSchedule, **outputs) -> tuple[torch.Tensor, torch.Tensor]:
    return mla_decode(
        problem.call_q,
        problem.call_kv_cache,
        problem.block_table,
        problem.seq_lens,
        schedule,
        softmax_scale=SOFTMAX_SCALE,
        q_rope=problem.call_q_rope,
        rope_cache=problem.rope_cache,
        q_scale=problem.q_scale,
        kv_scale=problem.kv_scale,
        fp8_math=problem.case.fp8_math,
        **outputs,
    )
