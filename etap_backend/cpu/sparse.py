"""The sparse kernels' algorithm in plain torch, for the CPU: the same partitions and pieces, the same rounding of P."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend._library import library
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
from etap_backend.limits import FP8, LATENT_DIM, SCALE_DIM, SPARSE_FP8_BYTES, TILE_TOKENS

# Scales of FP8 rows for which float16 holds P times scale: kLeastScale and kLargestScale of the kernels.
LEAST_SCALE, LARGEST_SCALE = 2.0**-13, 1.0


@dataclass(frozen=True)
class Lists:
    """What the tokens of a call attend to."""

    kv_cache: Tensor  # [pages, page_size, 576 or 512 elements, or 656 or 528 bytes]
    indices: Tensor  # [tokens, top_k]
    block_table: Tensor | None
    request_ids: Tensor | None
    counts: list[int]  # entries of each token that count

    def rows(self, token: int, tile: int) -> tuple[Tensor, Tensor]:
        """Of a tile's entries the cache rows, [64 or less, width] with zeros where none is named, and which are."""
        first = tile * TILE_TOKENS
        entries = self.indices[token, first : first + TILE_TOKENS].long()
        counted = torch.arange(first, first + len(entries)) < self.counts[token]
        pages, page_size, width = self.kv_cache.shape
        page, offset = entries.clamp(min=0) // page_size, entries.clamp(min=0) % page_size
        if self.block_table is not None:
            page = self._translated(token, page)
        valid = counted & (entries >= 0) & (page >= 0) & (page < pages)
        rows = torch.zeros(len(entries), width, dtype=self.kv_cache.dtype)
        rows[valid] = self.kv_cache[page[valid], offset[valid]]
        return rows, valid

    def _translated(self, token: int, logical: Tensor) -> Tensor:
        """The cache's page of each of a request's, -1 where the block table does not reach."""
        requests, max_pages = self.block_table.shape
        request = int(self.request_ids[token])
        page = torch.full_like(logical, -1)
        if 0 <= request < requests:
            there = logical < max_pages
            page[there] = self.block_table[request, logical[there]].long()
        return page


@dataclass(frozen=True)
class Queries:
    """A token's queries as the products take them; those beside bfloat16 rows are all in `latent`."""

    latent: Tensor  # float32 [heads, 512; beside bfloat16 rows with rope 576]
    factor: Tensor  # float32 [heads]: what products with latent are multiplied by
    rope: Tensor  # float32 [heads, 64 or 0]


def queries_of(q: Tensor, fp8: bool) -> Queries:
    """Of bfloat16 [heads, 576 or 512]. Beside FP8 rows the latent part is multiplied as float16."""
    if not fp8:
        return Queries(q.float(), torch.ones(len(q), dtype=torch.float32), q[:, :0].float())
    return Queries(*scaled_queries(q[:, :LATENT_DIM], torch.float16, 0), q[:, LATENT_DIM:].float())


def scores_and_product(q: Queries, rows: Tensor) -> tuple[Tensor, Product]:
    """K Q^T of some cache rows, [tokens, heads], and the product that takes their P.

    FP8 elements are multiplied as they are: their scales multiply the scores of 128 columns at a time, and in the
    product with V they multiply P before it is rounded: to float16, or to bfloat16 where a scale of the tile is beyond
    what float16 has room for. So the output is divided by the sum of P as it was.
    """
    if rows.dtype != torch.uint8:
        keys = rows.float()
        return keys @ q.latent.T, functools.partial(rounded_product, keys[:, :LATENT_DIM], rows.dtype)
    elements, scales, rope = (part.contiguous() for part in rows.tensor_split((LATENT_DIM, SPARSE_FP8_BYTES), dim=1))
    values, scales = elements.view(FP8).float(), scales.view(torch.float32)
    groups = [slice(first, first + SCALE_DIM) for first in range(0, LATENT_DIM, SCALE_DIM)]
    scores = torch.zeros(len(rows), len(q.factor), dtype=torch.float32)
    for group, scale in zip(groups, scales.T, strict=True):
        scores += scale[:, None] * (values[:, group] @ q.latent[:, group].T)
    scores = scores * q.factor + rope.view(torch.bfloat16).float() @ q.rope.T

    size = scales.abs()
    ordinary = ((size >= LEAST_SCALE) & (size <= LARGEST_SCALE)) | (size == 0)
    p_dtype = torch.float16 if ordinary.all() else torch.bfloat16

    def product(pt: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            values[:, group].T @ (pt * scale[:, None]).to(p_dtype).float()
            for group, scale in zip(groups, scales.T, strict=True)
        ]
        return torch.cat(parts), pt.sum(dim=0)

    return scores, product


def decode_piece(q: Queries, lists: Lists, token: int, tiles: range, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one token over some tiles of its list: float32 out [heads, 512] and lse [heads]."""

    def scores_and_products() -> Iterator[tuple[Tensor, Product]]:
        for tile in tiles:
            rows, valid = lists.rows(token, tile)
            scores, product = scores_and_product(q, rows)
            st = scores * (softmax_scale / math.log(2))
            yield st.masked_fill(~valid[:, None], float("-inf")), product

    fp8 = lists.kv_cache.dtype == torch.uint8
    kept = REFERENCES[fp8, torch.float16 if fp8 else torch.bfloat16]
    return attend(len(q.factor), kept, scores_and_products())


@dataclass(frozen=True)
class Piece:
    """Tiles of a token's list that one partition decodes; slot: of its partial result, None where it is the whole."""

    token: int
    tiles: range
    slot: int | None


def pieces(tokens: int, tiles: int, partition_tiles: int) -> Iterator[Piece]:
    """The pieces in the order of the partitions, of which each has the next `partition_tiles` of all tokens' tiles."""
    for first in range(0, tokens * tiles, partition_tiles):
        last = min(first + partition_tiles, tokens * tiles)
        while first < last:
            token, begin = divmod(first, tiles)
            end = min(tiles, begin + last - first)
            partition = first // partition_tiles
            first_partition = token * tiles // partition_tiles
            whole = first_partition == (token * tiles + tiles - 1) // partition_tiles
            yield Piece(token, range(begin, end), None if whole else first_partition + partition)
            first += end - begin


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Output rows [heads, 512] of log-sum-exp [heads] beside a sink, which takes a share of the weights."""
    return out if sinks is None else out * torch.sigmoid(lse - sinks).nan_to_num(0.0)[:, None]


@torch.inference_mode()
def decode(
    q: Tensor,
    q_rope: Tensor | None,
    kv_cache: Tensor,
    indices: Tensor,
    block_table: Tensor | None,
    request_ids: Tensor | None,
    valid_counts: Tensor | None,
    sinks: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    partitions: int,
    empty_lse: float,
) -> None:
    """Decode on the CPU, with the arguments of the compiled `sparse_decode`, which has checked them; fills out, lse.

    Like the kernels it is nothing that autograd sees.
    """
    tokens, heads = q.shape[:2]
    if tokens * heads == 0:
        return
    packed = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    cache = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    top_k = indices.shape[1]
    counts = [top_k] * tokens if valid_counts is None else valid_counts.tolist()
    lists = Lists(cache, indices, block_table, request_ids, counts)
    partition_tiles = library().sparse_partition_tiles(tokens, top_k, partitions)
    slot_floats = heads * PARTIAL_FLOATS
    slots = workspace[: workspace.numel() // slot_floats * slot_floats].view(-1, heads, PARTIAL_FLOATS)
    partial: dict[int, list[int]] = {}  # slots of each token that is split

    for piece in pieces(tokens, -(-top_k // TILE_TOKENS), partition_tiles):
        queries = queries_of(packed[piece.token], cache.dtype == torch.uint8)
        piece_out, piece_lse = decode_piece(queries, lists, piece.token, piece.tiles, softmax_scale)
        if piece.slot is None:
            out[piece.token] = with_sinks(piece_out, piece_lse, sinks).to(out.dtype)
            lse[piece.token] = final_lse(piece_lse, empty_lse)
        else:
            slot = slots[piece.slot]
            slot[:, :LATENT_DIM], slot[:, LATENT_DIM] = piece_out, piece_lse
            partial.setdefault(piece.token, []).append(piece.slot)

    for token, its_slots in partial.items():
        parts = slots[its_slots]
        merged_out, merged_lse = combine(parts[..., :LATENT_DIM], parts[..., LATENT_DIM])
        out[token] = with_sinks(merged_out, merged_lse, sinks).to(out.dtype)
        lse[token] = final_lse(merged_lse, empty_lse)
