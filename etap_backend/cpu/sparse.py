"""The sparse kernels' algorithm in plain torch on the CPU: the same partitions, splits and rounding of P."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend.calls import SparseCall
from etap_backend.cpu.dense import (
    P_RANGES,
    PARTIAL_FLOATS,
    Product,
    attend,
    combine,
    final_lse,
    rounded_product,
    scaled_queries,
)
from etap_backend.limits import (
    FP8,
    LATENT_DIM,
    SCALE_DIM,
    SPARSE_FP8_BYTES,
    TILE_TOKENS,
    V4_DATA_BYTES,
    V4_NOPE_DIM,
    V4_ROW_BYTES,
    V4_SCALE_DIM,
    V4_SCALES,
)

# Scales of FP8 rows for which float16 holds P times scale: the kernels' kLeastScale and kLargestScale.
LEAST_SCALE, LARGEST_SCALE = 2.0**-13, 1.0
# The largest row tile that multiplies V4's elements unscaled; V3.2's always are.
MOST_ROWS_OF_V4 = 32


@dataclass(frozen=True)
class RowList:
    """One cache and its lists: the rows that each token of a call attends to."""

    kv_cache: Tensor  # [pages, page_size, 576 or 512 elements, or 656, 528 or 584 bytes]
    indices: Tensor  # [tokens, top_k]
    block_table: Tensor | None
    request_ids: Tensor | None
    counts: list[int]  # entries of each token's list that count

    @staticmethod
    def of(kv_cache: Tensor, indices: Tensor, block_table, request_ids, valid_counts: Tensor | None) -> "RowList":
        """The list in a call's arguments."""
        cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
        cache = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        tokens, top_k = indices.shape
        counts = [top_k] * tokens if valid_counts is None else valid_counts.clamp(0, top_k).tolist()
        return RowList(cache, indices, block_table, request_ids, counts)

    def tiles(self, token: int) -> int:
        return -(-self.counts[token] // TILE_TOKENS)

    def rows(self, token: int, tile: int) -> tuple[Tensor, Tensor]:
        """A tile's cache rows [64 or less, width], zeros where an entry names no row, and which entries name one."""
        first = tile * TILE_TOKENS
        entries = self.indices[token, first : min(first + TILE_TOKENS, self.counts[token])].long()
        pages, page_size, width = self.kv_cache.shape
        page, offset = entries.clamp(min=0) // page_size, entries.clamp(min=0) % page_size
        if self.block_table is not None and self.request_ids is not None:
            page = self._translated(page, self.block_table, int(self.request_ids[token]))
        valid = (entries >= 0) & (page >= 0) & (page < pages)
        rows = torch.zeros(len(entries), width, dtype=self.kv_cache.dtype)
        rows[valid] = self._stored(page[valid], offset[valid])
        return rows, valid

    def _stored(self, page: Tensor, offset: Tensor) -> Tensor:
        """Rows as they are in memory; a row of V4's pages is its data, then its scales."""
        cache = self.kv_cache
        if cache.shape[2] != V4_ROW_BYTES:
            return cache[page, offset]
        pages, page_size, _ = cache.shape
        data = cache.as_strided((pages, page_size, V4_DATA_BYTES), (cache.stride(0), V4_DATA_BYTES, 1))
        scale_bytes = V4_ROW_BYTES - V4_DATA_BYTES
        behind = cache.storage_offset() + page_size * V4_DATA_BYTES
        scales = cache.as_strided((pages, page_size, scale_bytes), (cache.stride(0), scale_bytes, 1), behind)
        return torch.cat([data[page, offset], scales[page, offset]], dim=1)

    @staticmethod
    def _translated(logical: Tensor, block_table: Tensor, request: int) -> Tensor:
        """The cache's pages for a request's, -1 past the end of the block table."""
        requests, max_pages = block_table.shape
        page = torch.full_like(logical, -1)
        if 0 <= request < requests:
            there = logical < max_pages
            page[there] = block_table[request, logical[there]].long()
        return page


@dataclass(frozen=True)
class Lists:
    """A call's one or two lists: the tiles of a token's first list come before those of its second."""

    lists: tuple[RowList, ...]

    @property
    def v4(self) -> bool:
        return self.lists[0].kv_cache.shape[2] == V4_ROW_BYTES

    def scaled(self, row_tile: int) -> bool:
        """Whether CTAs with this row tile multiply FP8 elements as stored, and apply their scales to the products."""
        return self.lists[0].kv_cache.dtype == torch.uint8 and (not self.v4 or row_tile <= MOST_ROWS_OF_V4)

    @property
    def most_tiles(self) -> int:
        """Tiles of a token whose entries all count."""
        return sum(-(-one.indices.shape[1] // TILE_TOKENS) for one in self.lists)

    def tiles(self, token: int) -> int:
        return sum(one.tiles(token) for one in self.lists)

    def rows(self, token: int, tile: int) -> tuple[Tensor, Tensor]:
        """`RowList.rows` for a tile of either list."""
        first = self.lists[0]
        behind = tile - first.tiles(token)
        return first.rows(token, tile) if behind < 0 else self.lists[1].rows(token, behind)


@dataclass(frozen=True)
class Queries:
    """A token's queries as the products take them; with bfloat16 rows and V4's, `latent` holds all of them.

    Attributes:
        latent: float32 [heads, 512, or 576 with bfloat16 rows that have rope].
        factor: float32 [heads], factor of the products with latent.
        rope: float32 [heads, 64 or 0].
    """

    latent: Tensor
    factor: Tensor
    rope: Tensor


def queries_of(q: Tensor, v32: bool) -> Queries:
    """Queries from bfloat16 [heads, 576 or 512]. With V3.2's FP8 rows the latent part becomes float16."""
    if not v32:
        return Queries(q.float(), torch.ones(len(q), dtype=torch.float32), q[:, :0].float())
    return Queries(*scaled_queries(q[:, :LATENT_DIM], torch.float16, 0), q[:, LATENT_DIM:].float())


def v4_parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V4's rows, uint8 [n, 584], as float32 elements [n, 448], exponents of scales [n, 7], bfloat16 rope [n, 64]."""
    elements, rope, powers = (part.contiguous() for part in rows.tensor_split((V4_NOPE_DIM, V4_DATA_BYTES), dim=1))
    return elements.view(FP8).float(), powers[:, :V4_SCALES].int() - 127, rope.view(torch.bfloat16)


def v4_keys(elements: Tensor, exponents: Tensor, rope: Tensor) -> Tensor:
    """The values of V4's rows, bfloat16 [n, 512], as the kernels compute them from the parts.

    A power of two changes no digit of an e4m3 element; beyond bfloat16's exponents the value is subnormal or infinite.
    """
    nope = torch.ldexp(elements, exponents.repeat_interleave(V4_SCALE_DIM, dim=1))
    return torch.cat([nope.bfloat16(), rope], dim=1)


def v4_product(elements: Tensor, exponents: Tensor, rope: Tensor, pt: Tensor) -> tuple[Tensor, Tensor]:
    """`rounded_product` with V4's elements as stored: P is rounded to bfloat16, then scaled and rounded to float16.

    The second rounding changes P only where the scaled value is subnormal.
    """
    rounded_pt = pt.bfloat16().float()
    scaled = [torch.ldexp(rounded_pt, power[:, None]).half().float() for power in exponents.T]
    groups = zip(elements.split(V4_SCALE_DIM, dim=1), scaled, strict=True)
    return torch.cat([*(part.T @ p for part, p in groups), rope.float().T @ rounded_pt]), rounded_pt.sum(dim=0)


def has_ordinary_scales(scales: Tensor) -> bool:
    """Whether float16 holds P times each of a tile's scales."""
    size = scales.abs()
    return bool((((size >= LEAST_SCALE) & (size <= LARGEST_SCALE)) | (size == 0)).all())


def scores_and_product(q: Queries, rows: Tensor, valid: Tensor, scaled: bool) -> tuple[Tensor, Product]:
    """K Q^T of some cache rows, [tokens, heads], and the product that takes their P.

    With `scaled`, FP8 elements are multiplied as stored. Their scales multiply the partial scores of their columns, and
    in the product with V they multiply P before it is rounded to float16, or to bfloat16 where a scale of the tile
    exceeds float16; the divisor is then the sum of the unrounded P. V4's scales are powers of two: P is rounded first,
    and bfloat16 holds them all.
    """
    if rows.dtype != torch.uint8:
        keys = rows.float()
        return keys @ q.latent.T, functools.partial(rounded_product, keys[:, :LATENT_DIM], torch.bfloat16)
    if rows.shape[1] == V4_ROW_BYTES:
        elements, exponents, v4_rope = v4_parts(rows)
        keys = v4_keys(elements, exponents, v4_rope).float()
        if scaled and has_ordinary_scales(torch.exp2(exponents[valid].float())):
            return keys @ q.latent.T, functools.partial(v4_product, elements, exponents, v4_rope)
        return keys @ q.latent.T, functools.partial(rounded_product, keys, torch.bfloat16)
    elements, scales, rope = (part.contiguous() for part in rows.tensor_split((LATENT_DIM, SPARSE_FP8_BYTES), dim=1))
    values, scales = elements.view(FP8).float(), scales.view(torch.float32)
    groups = [slice(first, first + SCALE_DIM) for first in range(0, LATENT_DIM, SCALE_DIM)]
    scores = torch.zeros(len(rows), len(q.factor), dtype=torch.float32)
    for group, scale in zip(groups, scales.T, strict=True):
        scores += scale[:, None] * (values[:, group] @ q.latent[:, group].T)
    scores = scores * q.factor + rope.view(torch.bfloat16).float() @ q.rope.T
    p_dtype = torch.float16 if has_ordinary_scales(scales) else torch.bfloat16

    def product(pt: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            values[:, group].T @ (pt * scale[:, None]).to(p_dtype).float()
            for group, scale in zip(groups, scales.T, strict=True)
        ]
        return torch.cat(parts), pt.sum(dim=0)

    return scores, product


def decode_split(
    q: Queries, lists: Lists, token: int, tiles: range, softmax_scale: float, scaled: bool
) -> tuple[Tensor, Tensor]:
    """Attention of one token over one split's tiles: float32 out [heads, 512] and lse [heads]."""

    def scores_and_products() -> Iterator[tuple[Tensor, Product]]:
        for tile in tiles:
            rows, valid = lists.rows(token, tile)
            scores, product = scores_and_product(q, rows, valid, scaled)
            st = scores * (softmax_scale / math.log(2))
            yield st.masked_fill(~valid[:, None], float("-inf")), product

    p_range = P_RANGES[scaled, torch.float16 if scaled else torch.bfloat16]
    return attend(len(q.factor), p_range, scores_and_products())


@dataclass(frozen=True)
class Split:
    """A token's tiles in one partition; slot is its partial's, None where the split is the whole token."""

    token: int
    tiles: range
    slot: int | None


def splits(tiles: list[int], most_tiles: int, heads: int, partitions: int) -> Iterator[Split]:
    """The splits of tokens with so many tiles each, in the partitions' order, as the library divides them."""
    of_token = torch.tensor(tiles, dtype=torch.int32)
    for token, _, begin, end, slot in library().sparse_splits(of_token, most_tiles, heads, partitions):
        yield Split(token, range(begin, end), None if slot < 0 else slot)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Output rows [heads, 512] with log-sum-exp [heads], reduced by the sinks' share of the weights."""
    return out if sinks is None else out * torch.sigmoid(lse - sinks[: len(lse)]).nan_to_num(0.0)[:, None]


@torch.inference_mode()
def decode(call: SparseCall) -> None:
    """Decode a call that the library's `check_sparse_decode` allowed; fills `out` and `lse`, unseen by autograd."""
    tokens, heads = call.q.shape[:2]
    if tokens * heads == 0:
        return
    packed = call.q if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=-1)
    found = [RowList.of(call.kv_cache, call.indices, call.block_table, call.request_ids, call.valid_counts)]
    if call.extra_kv_cache is not None and call.extra_indices is not None:
        tables = (call.extra_block_table, call.request_ids, call.extra_valid_counts)
        found.append(RowList.of(call.extra_kv_cache, call.extra_indices, *tables))
    lists = Lists(tuple(found))
    tiles = [lists.tiles(token) for token in range(tokens)]
    slot_floats = heads * PARTIAL_FLOATS
    slots = call.workspace[: call.workspace.numel() // slot_floats * slot_floats].view(-1, heads, PARTIAL_FLOATS)
    row_tile, *_ = library().sparse_decode_shape(heads)
    scaled = lists.scaled(row_tile)
    partials: dict[int, list[int]] = {}  # slots by token

    for split in splits(tiles, lists.most_tiles, heads, call.partitions):
        queries = queries_of(packed[split.token], scaled and not lists.v4)
        split_out, split_lse = decode_split(queries, lists, split.token, split.tiles, call.softmax_scale, scaled)
        if split.slot is None:
            call.out[split.token] = with_sinks(split_out, split_lse, call.sinks).to(call.out.dtype)
            call.lse[split.token] = final_lse(split_lse, call.empty_lse)
        else:
            slot = slots[split.slot]
            slot[:, :LATENT_DIM], slot[:, LATENT_DIM] = split_out, split_lse
            partials.setdefault(split.token, []).append(split.slot)

    for token, its_slots in partials.items():
        parts = slots[its_slots]
        merged_out, merged_lse = combine(parts[..., :LATENT_DIM], parts[..., LATENT_DIM])
        call.out[token] = with_sinks(merged_out, merged_lse, call.sinks).to(call.out.dtype)
        call.lse[token] = final_lse(merged_lse, call.empty_lse)
