"""The dense kernels' algorithm in plain torch on the CPU: the same work ranges, tiles and rounding of P.

It is there to be read and tested against: faults of schedule and combine show here without a GPU.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend._operator import compiled
from etap_backend.calls import DenseCall
from etap_backend.limits import FP8, HEAD_DIM, LATENT_DIM, TILE_TOKENS

Product = Callable[[Tensor], tuple[Tensor, Tensor]]
PARTIAL_FLOATS = LATENT_DIM + 1  # an output row and its log-sum-exp
# With an FP8 cache a query row is scaled by the power of two that brings its largest element into [2^n, 2^(n+1)).
QUERY_EXPONENT = {torch.float16: 14, FP8: 7}
# The largest scaling, of a row of (nearly) zeros: the factor and its reciprocal are normal float32 numbers.
MOST_QUERY_EXPONENT = 126


@dataclass(frozen=True)
class PRange:
    """The range of P: 2^shift is the largest at a new reference, which is renewed when P would exceed 2^most."""

    shift: float
    most: float


# By (FP8 cache, P's type): the kernels' kProbabilityShift and kLargestExponent. The shift keeps small P above what
# float16 and e4m3 lose, and P still fits just before the reference is renewed.
P_RANGES = {
    (False, torch.bfloat16): PRange(0.0, 8.0),
    (False, torch.float16): PRange(0.0, 8.0),
    (True, torch.float16): PRange(7.0, 15.0),
    (True, FP8): PRange(8.0, 8.8),
}


@dataclass(frozen=True)
class Batch:
    """The inputs that all splits of a decode share; rows are packed, row = query token * heads + head."""

    q: Tensor  # float32 [batch, rows, 576], values that the product's type holds
    score_factor: Tensor  # float32 [batch, rows], factor of Q times K
    kv_cache: Tensor  # [pages, page_size, 576]
    output_factor: float
    p_dtype: torch.dtype  # P's type in its product with V
    block_table: Tensor  # [batch, max_pages]
    seq_lens: list[int]
    s_q: int
    heads: int

    @property
    def p_range(self) -> PRange:
        return P_RANGES[self.kv_cache.dtype == FP8, self.p_dtype]

    def tile(self, request: int, tile: int) -> Tensor:
        """K of one tile, float32 [tokens <= 64, 576], without rows past the request's length."""
        page_size = self.kv_cache.shape[1]
        tokens = torch.arange(tile * TILE_TOKENS, min((tile + 1) * TILE_TOKENS, self.seq_lens[request]))
        return self.kv_cache[self.block_table[request, tokens // page_size].long(), tokens % page_size].float()

    def visible(self, request: int) -> Tensor:
        """Tokens that each packed row sees, [rows]: causal inside the query block."""
        token = torch.arange(self.s_q).repeat_interleave(self.heads)
        return self.seq_lens[request] - self.s_q + token + 1


def batch_of(
    rows: Tensor,
    kv_cache: Tensor,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    block_table: Tensor,
    seq_lens: list[int],
    heads: int,
    softmax_scale: float,
    fp8_math: bool,
) -> Batch:
    """The Batch for packed query rows [batch, s_q * heads, 576] and `decode`'s other arguments."""
    p_dtype = rows.dtype
    if kv_cache.dtype == FP8:
        p_dtype = FP8 if fp8_math else torch.float16
    q, powers = product_queries(rows, p_dtype)
    q_factor, kv_factor = (1.0 if scale is None else scale.item() for scale in (q_scale, kv_scale))
    score_factor = powers * (softmax_scale * q_factor * kv_factor)
    return Batch(q, score_factor, kv_cache, kv_factor, p_dtype, block_table, seq_lens, rows.shape[1] // heads, heads)


def product_queries(rows: Tensor, p_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Query rows in the product's type, and the factors that undo their scaling.

    Args:
        rows: [batch, rows, 576]; rows in p_dtype or FP8 stay as they are.
        p_dtype: the type of Q and P in the products.

    Returns:
        float32 [batch, rows, 576], values that p_dtype holds, and float32 [batch, rows], powers of two.
    """
    if rows.dtype in (p_dtype, FP8):
        return rows.float(), torch.ones(rows.shape[:2], dtype=torch.float32)
    return scaled_queries(rows, p_dtype, QUERY_EXPONENT[p_dtype])


def scaled_queries(rows: Tensor, dtype: torch.dtype, wanted: int) -> tuple[Tensor, Tensor]:
    """Rows [..., columns] rounded to `dtype`, as float32, and the powers of two [...] that undo their scaling.

    Each row's largest element is scaled into [2^wanted, 2^(wanted + 1)).
    """
    rows = rows.float()
    _, exponent = torch.frexp(rows.abs().amax(dim=-1))  # the largest element lies in [2^(exponent - 1), 2^exponent)
    shift = (wanted + 1 - exponent).clamp(-MOST_QUERY_EXPONENT, MOST_QUERY_EXPONENT)
    ones = torch.ones(shift.shape, dtype=torch.float32)
    return torch.ldexp(rows, shift[..., None]).to(dtype).float(), torch.ldexp(ones, -shift)


@dataclass(frozen=True)
class Stacks:
    """What a plan says of requests that share prefixes; see csrc/schedule/shared_prefixes.h."""

    members: list[list[int]]  # requests of each stack
    tile_counts: list[int]
    offsets: list[int]  # of the stacks' slots
    first_tiles: list[int]  # where each request's own tiles begin
    places: list[tuple[int, int] | None]  # each request's stack, and its place there

    @classmethod
    def of(cls, call: DenseCall) -> "Stacks":
        """Those of a call; none where it shares nothing."""
        if call.shared is None:
            return cls([], [], [0], [0] * call.batch, [None] * call.batch)
        _, room, _, _ = compiled("stack_shape")(call.s_q * call.heads, call.num_sms)
        _, _, _, first_tiles, places, lens, offsets, *members, counts = call.shared.tolist()
        count, flat = counts[0], members[0] + members[1]
        return cls(
            [[m for m in flat[s * room : (s + 1) * room] if 0 <= m < call.batch] for s in range(count)],
            [length // TILE_TOKENS for length in lens[:count]],
            offsets[: count + 1] if count else [0],
            first_tiles[: call.batch],
            [None if place < 0 else divmod(place, room) for place in places[: call.batch]],
        )

    def of_request(self, slots: Tensor, request: int) -> Tensor:
        """A request's partials among its stack's, [splits, rows, 513], of slots [slots, places, rows, 513]."""
        if (place := self.places[request]) is None:
            return slots[:0, 0]
        stack, member = place
        return slots[self.offsets[stack] : self.offsets[stack + 1], member]


def decode_split(batch: Batch, request: int, tiles: range, pages_of: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention of one request over one split's tiles: float32 out [rows, 512] and lse [rows].

    As in the kernel, st has the context on its rows and the queries on its columns.

    Args:
        batch, request, tiles: whose, and which.
        pages_of: the request whose pages are read; None: this one.
    """
    pages_of = request if pages_of is None else pages_of
    qt = batch.q[request].T
    visible = batch.visible(request)

    def scores_and_products() -> Iterator[tuple[Tensor, Product]]:
        for tile in tiles:
            k = batch.tile(pages_of, tile)
            st = (k @ qt) * (batch.score_factor[request] / math.log(2))
            position = torch.arange(k.shape[0]) + tile * TILE_TOKENS
            st.masked_fill_(position[:, None] >= visible, float("-inf"))
            yield st, functools.partial(rounded_product, k[:, :LATENT_DIM], batch.p_dtype)

    out, lse = attend(visible.shape[0], batch.p_range, scores_and_products())
    return out * batch.output_factor, lse


def rounded_product(values: Tensor, p_dtype: torch.dtype, pt: Tensor) -> tuple[Tensor, Tensor]:
    """V^T [512, tokens] times rounded P^T [tokens, rows], and the divisor of the result.

    The divisor is the sum of the rounded P, so that the rounding of a dominating key cancels. The log-sum-exp uses the
    sum of the unrounded P.
    """
    rounded_pt = pt.to(p_dtype).float()
    return values.T @ rounded_pt, rounded_pt.sum(dim=0)


def attend(rows: int, p_range: PRange, tiles: Iterable[tuple[Tensor, Product]]) -> tuple[Tensor, Tensor]:
    """Attention over tiles, one after the other: float32 out [rows, 512] and lse [rows].

    Args:
        rows: columns of each tile's scores.
        p_range: the range of P.
        tiles: for each tile its scores in base 2, [tokens, rows], -inf for masked ones; and its product, a function of
            P [tokens, rows] that returns the addends of the output [512, rows] and of the divisor [rows].
    """
    ot = torch.zeros(LATENT_DIM, rows, dtype=torch.float32)
    reference = torch.full((rows,), float("-inf"), dtype=torch.float32)
    column_sum, divisor = torch.zeros(2, rows, dtype=torch.float32)
    for st, product in tiles:
        column_max = st.amax(dim=0)
        renewed = torch.where(column_max - reference > p_range.most, column_max - p_range.shift, reference)
        # A column without visible tokens has the reference -inf; 0 instead avoids -inf - -inf.
        finite = torch.where(renewed.isinf(), 0.0, renewed)
        pt = torch.exp2(st - finite)
        correction = torch.exp2(reference - finite)
        column_sum = column_sum * correction + pt.sum(dim=0)
        more_ot, more_divisor = product(pt)
        divisor = divisor * correction + more_divisor
        ot = ot * correction + more_ot
        reference = renewed
    out = torch.where(divisor > 0, ot / divisor, 0.0).T
    return out, (reference + torch.log2(column_sum)) * math.log(2)


def combine(partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge one request's partials: [splits, rows, 512] and [splits, rows] to [rows, 512] and [rows]."""
    largest = partial_lse.amax(dim=0)
    weight = torch.exp(partial_lse - torch.where(largest.isinf(), 0.0, largest))
    # Divide by the sum: exp(lse - total lse) would lose the logarithm of the number of splits beside a very large lse.
    total = weight.sum(dim=0)
    out = (weight[..., None] * partial_out).sum(dim=0) / total.clamp(min=1)[:, None]
    return out, largest + torch.log(total)


def final_lse(lse: Tensor, empty_lse: float) -> Tensor:
    """Log-sum-exps for the caller: `empty_lse` in place of -inf, for rows that see no token."""
    return lse.masked_fill(lse.isneginf(), empty_lse)


def splits(work_ranges: Tensor, partitions: int, tile_counts: list[int]) -> Iterator[tuple[int, range, int]]:
    """Yield (request, tiles, split index) of every split, partition by partition as the kernel walks them."""
    for begin_request, begin_tile, end_request, end_tile, begin_split, *_ in work_ranges[:partitions].tolist():
        for request in range(begin_request, min(end_request + 1, len(tile_counts))):
            first = begin_tile if request == begin_request else 0
            last = min(end_tile, tile_counts[request]) if request == end_request else tile_counts[request]
            if request < end_request or end_tile > 0:
                yield request, range(first, max(first, last)), begin_split if request == begin_request else 0


def _check_contents(batch: Batch, tile_counts: list[int], planned: list[tuple[int, range]]) -> None:
    """Refuse wrong lengths, pages and schedules, which a GPU could only check by waiting for its own data."""
    pages, page_size, _ = batch.kv_cache.shape
    capacity = batch.block_table.shape[1] * page_size
    longest = max(batch.seq_lens, default=0)
    if longest > capacity:
        raise ValueError(f"seq_lens: wanted at most {capacity} tokens (max_pages * page_size), got {longest}")
    covered = [[] for _ in tile_counts]
    for request, tiles in planned:
        covered[request].extend(tiles)
    for request, tiles in enumerate(tile_counts):
        if covered[request] != list(range(tiles)):
            raise ValueError(
                "schedule: wanted the buffers that build() filled for these requests, got others': "
                f"{len(covered[request])} of {tiles} tiles of request {request}"
            )
    for request, length in enumerate(batch.seq_lens):
        for page in batch.block_table[request, : -(-length // page_size)].tolist():
            if not 0 <= page < pages:
                raise ValueError(
                    f"block_table: wanted pages from 0 to {pages - 1} for the tokens of request {request}, got {page}"
                )


@torch.inference_mode()
def decode(call: DenseCall) -> None:
    """Decode a call that the library's `check_decode` allowed; fills `out` and `lse`, unseen by autograd.

    The kernels' row tiles play no part here. Raises ValueError for impossible lengths, pages and schedules, which a GPU
    could only check by waiting for its own data.
    """
    rows = call.s_q * call.heads
    packed = call.q if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=-1)
    parts = [
        part.squeeze(2) if part.dim() == 4 else part for part in (call.kv_cache, call.rope_cache) if part is not None
    ]
    batch = batch_of(
        packed.reshape(call.batch, rows, HEAD_DIM),
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1),
        call.q_scale,
        call.kv_scale,
        call.block_table,
        [max(0, length) for length in call.seq_lens.tolist()],
        call.heads,
        call.softmax_scale,
        call.fp8_math,
    )
    tile_counts = [-(-length // TILE_TOKENS) for length in batch.seq_lens]
    stacks = Stacks.of(call)
    own_counts = [tiles - first for tiles, first in zip(tile_counts, stacks.first_tiles, strict=True)]
    planned = [
        (request, range(tiles.start + stacks.first_tiles[request], tiles.stop + stacks.first_tiles[request]), split)
        for request, tiles, split in splits(call.work_ranges, call.partitions, own_counts)
    ]
    stacked = list(splits(call.work_ranges[call.partitions :], call.num_sms, stacks.tile_counts))
    shared = [(member, tiles) for stack, tiles, _ in stacked for member in stacks.members[stack]]
    _check_contents(batch, tile_counts, [*shared, *((request, tiles) for request, tiles, _ in planned)])
    offsets = call.split_offsets[: call.batch + 1].tolist()
    own_floats, room = offsets[-1] * rows * PARTIAL_FLOATS, max(map(len, stacks.members), default=1)
    stack_floats = stacks.offsets[-1] * room * rows * PARTIAL_FLOATS
    slots = call.workspace[:own_floats].view(-1, rows, PARTIAL_FLOATS)
    stack_slots = call.workspace[own_floats : own_floats + stack_floats].view(-1, room, rows, PARTIAL_FLOATS)
    out_rows, lse_rows = call.out.view(call.batch, rows, LATENT_DIM), call.lse.view(call.batch, rows)

    for stack, tiles, split in stacked:
        members = stacks.members[stack]
        for slot, member in zip(stack_slots[stacks.offsets[stack] + split], members, strict=False):
            slot[:, :LATENT_DIM], slot[:, LATENT_DIM] = decode_split(batch, member, tiles, pages_of=members[0])

    for request, tiles, split in planned:
        split_out, split_lse = decode_split(batch, request, tiles)
        if offsets[request] == offsets[request + 1]:
            out_rows[request] = split_out.to(call.out.dtype)
            lse_rows[request] = final_lse(split_lse, call.empty_lse)
        else:
            slot = slots[offsets[request] + split]
            slot[:, :LATENT_DIM], slot[:, LATENT_DIM] = split_out, split_lse

    for request in range(call.batch):
        own = slots[offsets[request] : offsets[request + 1]]
        partial = torch.cat([stacks.of_request(stack_slots, request), own])
        if len(partial):
            merged_out, merged_lse = combine(partial[..., :LATENT_DIM], partial[..., LATENT_DIM])
            out_rows[request] = merged_out.to(call.out.dtype)
            lse_rows[request] = final_lse(merged_lse, call.empty_lse)
