"""The sparse kernels' algorithm in plain torch, for the CPU: the same partitions and pieces, the same rounding of P."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend.calls import SparseCall
from etap_backend.cpu.dense import (
    PARTIAL_FLOATS,
    REFERENCES,
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

# Scales of FP8 rows for which float16 holds P times scale: kLeastScale and kLargestScale of the kernels.
LEAST_SCALE, LARGEST_SCALE = 2.0**-13, 1.0
# Query rows of a CTA up to which V4's elements are multiplied as they are, as V3.2's always are.
MOST_ROWS_OF_V4 = 32


@dataclass(frozen=True)
class RowList:
    """What the tokens of a call attend to in one cache."""

    kv_cache: Tensor  # [pages, page_size, 576 or 512 elements, or 656, 528 or 584 bytes]
    indices: Tensor  # [tokens, top_k]
    block_table: Tensor | None
    request_ids: Tensor | None
    counts: list[int]  # entries of each token that count

    @staticmethod
    def of(kv_cache: Tensor, indices: Tensor, block_table, request_ids, valid_counts: Tensor | None) -> "RowList":
        """Of a call's arguments."""
        cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
        cache = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        tokens, top_k = indices.shape
        counts = [top_k] * tokens if valid_counts is None else valid_counts.clamp(0, top_k).tolist()
        return RowList(cache, indices, block_table, request_ids, counts)

    def tiles(self, token: int) -> int:
        return -(-self.counts[token] // TILE_TOKENS)

    def rows(self, token: int, tile: int) -> tuple[Tensor, Tensor]:
        """Of a tile's entries the cache rows, [64 or less, width] with zeros where none is named, and which are."""
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
        """Rows as they are in memory; of V4's pages each row's data and scales."""
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
        """The cache's page of each of a request's, -1 where the block table does not reach."""
        requests, max_pages = block_table.shape
        page = torch.full_like(logical, -1)
        if 0 <= request < requests:
            there = logical < max_pages
            page[there] = block_table[request, logical[there]].long()
        return page


@dataclass(frozen=True)
class Lists:
    """The one or two lists of a call: of each token first the tiles of the one, then those of the other."""

    lists: tuple[RowList, ...]

    @property
    def v4(self) -> bool:
        return self.lists[0].kv_cache.shape[2] == V4_ROW_BYTES

    def scaled(self, row_tile: int) -> bool:
        """Whether FP8 elements are multiplied as they are stored, with scales beside the products, where a CTA computes
        so many query rows."""
        return self.lists[0].kv_cache.dtype == torch.uint8 and (not self.v4 or row_tile <= MOST_ROWS_OF_V4)

    @property
    def most_tiles(self) -> int:
        """Of a token all of whose entries count."""
        return sum(-(-one.indices.shape[1] // TILE_TOKENS) for one in self.lists)

    def tiles(self, token: int) -> int:
        return sum(one.tiles(token) for one in self.lists)

    def rows(self, token: int, tile: int) -> tuple[Tensor, Tensor]:
        """As `RowList.rows`, of a tile of the token's."""
        first = self.lists[0]
        behind = tile - first.tiles(token)
        return first.rows(token, tile) if behind < 0 else self.lists[1].rows(token, behind)


@dataclass(frozen=True)
class Queries:
    """A token's queries as the products take them; those beside bfloat16 rows and V4's are all in `latent`."""

    latent: Tensor  # float32 [heads, 512; beside bfloat16 rows with rope 576]
    factor: Tensor  # float32 [heads]: what products with latent are multiplied by
    rope: Tensor  # float32 [heads, 64 or 0]


def queries_of(q: Tensor, v32: bool) -> Queries:
    """Of bfloat16 [heads, 576 or 512]. Beside V3.2's FP8 rows the latent part is multiplied as float16."""
    if not v32:
        return Queries(q.float(), torch.ones(len(q), dtype=torch.float32), q[:, :0].float())
    return Queries(*scaled_queries(q[:, :LATENT_DIM], torch.float16, 0), q[:, LATENT_DIM:].float())


def v4_parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of V4's rows, uint8 [n, 584] of data and scales: e4m3 elements in float32 [n, 448], the exponents of their scales
    [n, 7], and bfloat16 [n, 64]."""
    elements, rope, powers = (part.contiguous() for part in rows.tensor_split((V4_NOPE_DIM, V4_DATA_BYTES), dim=1))
    return elements.view(FP8).float(), powers[:, :V4_SCALES].int() - 127, rope.view(torch.bfloat16)


def v4_keys(elements: Tensor, exponents: Tensor, rope: Tensor) -> Tensor:
    """What V4's rows stand for, in their parts, as the kernels have it: bfloat16 [n, 512].

    A power of two changes no digit of an element of e4m3; what bfloat16 has no exponent for is subnormal or infinite.
    """
    nope = torch.ldexp(elements, exponents.repeat_interleave(V4_SCALE_DIM, dim=1))
    return torch.cat([nope.bfloat16(), rope], dim=1)


def v4_product(elements: Tensor, exponents: Tensor, rope: Tensor, pt: Tensor) -> tuple[Tensor, Tensor]:
    """As `rounded_product`, of V4's rows whose elements are multiplied as they are: P is rounded to bfloat16, and times
    a power of two to float16, which changes it where that is subnormal."""
    rounded_pt = pt.bfloat16().float()
    scaled = [torch.ldexp(rounded_pt, power[:, None]).half().float() for power in exponents.T]
    groups = zip(elements.split(V4_SCALE_DIM, dim=1), scaled, strict=True)
    return torch.cat([*(part.T @ p for part, p in groups), rope.float().T @ rounded_pt]), rounded_pt.sum(dim=0)


def has_ordinary_scales(scales: Tensor) -> bool:
    """Whether float16 has room for P times each of a tile's scales."""
    size = scales.abs()
    return bool((((size >= LEAST_SCALE) & (size <= LARGEST_SCALE)) | (size == 0)).all())


def scores_and_product(q: Queries, rows: Tensor, valid: Tensor, scaled: bool) -> tuple[Tensor, Product]:
    """K Q^T of some cache rows, [tokens, heads], and the product that takes their P.

    `scaled` FP8 elements are multiplied as they are: their scales multiply the scores of their columns, and in the
    product with V they multiply P before it is rounded: to float16, or to bfloat16 where a scale of the tile is beyond
    what float16 has room for. So the output is divided by the sum of P as it was. V4's scales are powers of two: there
    P is rounded before, and bfloat16 has room for all.
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


def decode_piece(
    q: Queries, lists: Lists, token: int, tiles: range, softmax_scale: float, scaled: bool
) -> tuple[Tensor, Tensor]:
    """Attention of one token over some tiles of its list: float32 out [heads, 512] and lse [heads]."""

    def scores_and_products() -> Iterator[tuple[Tensor, Product]]:
        for tile in tiles:
            rows, valid = lists.rows(token, tile)
            scores, product = scores_and_product(q, rows, valid, scaled)
            st = scores * (softmax_scale / math.log(2))
            yield st.masked_fill(~valid[:, None], float("-inf")), product

    kept = REFERENCES[scaled, torch.float16 if scaled else torch.bfloat16]
    return attend(len(q.factor), kept, scores_and_products())


@dataclass(frozen=True)
class Piece:
    """Tiles of a token that one partition decodes; slot: of its partial result, None where it is the whole."""

    token: int
    tiles: range
    slot: int | None


def pieces(tiles: list[int], most_tiles: int, heads: int, partitions: int) -> Iterator[Piece]:
    """The pieces of tokens with so many tiles each, in the order of the partitions, as the library divides them."""
    of_token = torch.tensor(tiles, dtype=torch.int32)
    for token, _, begin, end, slot in library().sparse_pieces(of_token, most_tiles, heads, partitions):
        yield Piece(token, range(begin, end), None if slot < 0 else slot)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Output rows [heads, 512] of log-sum-exp [heads] beside a sink, which takes a share of the weights."""
    return out if sinks is None else out * torch.sigmoid(lse - sinks[: len(lse)]).nan_to_num(0.0)[:, None]


@torch.inference_mode()
def decode(call: SparseCall) -> None:
    """Decode on the CPU a call that the library's `check_sparse_decode` has allowed; fills `out` and `lse`.

    Like the kernels it is nothing that autograd sees.
    """
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
    _, row_tile, *_ = library().sparse_decode_shape(heads)
    scaled = lists.scaled(row_tile)
    partial: dict[int, list[int]] = {}  # slots of each token that is split

    for piece in pieces(tiles, lists.most_tiles, heads, call.partitions):
        queries = queries_of(packed[piece.token], scaled and not lists.v4)
        piece_out, piece_lse = decode_piece(queries, lists, piece.token, piece.tiles, call.softmax_scale, scaled)
        if piece.slot is None:
            call.out[piece.token] = with_sinks(piece_out, piece_lse, call.sinks).to(call.out.dtype)
            call.lse[piece.token] = final_lse(piece_lse, call.empty_lse)
        else:
            slot = slots[piece.slot]
            slot[:, :LATENT_DIM], slot[:, LATENT_DIM] = piece_out, piece_lse
            partial.setdefault(piece.token, []).append(piece.slot)

    for token, its_slots in partial.items():
        parts = slots[its_slots]
        merged_out, merged_lse = combine(parts[..., :LATENT_DIM], parts[..., LATENT_DIM])
        call.out[token] = with_sinks(merged_out, merged_lse, call.sinks).to(call.out.dtype)
        call.lse[token] = final_lse(merged_lse, call.empty_lse)
