"""The reference that kernels and executor are measured against: plain attention, one request at a time, no tiles."""

import heapq
import itertools
import operator
from collections.abc import Iterator

import torch
from torch import Tensor

from etap_backend.limits import (
    FP8,
    LATENT_DIM,
    SCALE_DIM,
    SPARSE_FP8_BYTES,
    V4_DATA_BYTES,
    V4_NOPE_DIM,
    V4_ROW_BYTES,
    V4_SCALE_DIM,
    V4_SCALES,
)


def mla_decode_reference(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    *,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """MLA decode attention in `dtype` on the given (already rounded) inputs.

    Row t of a request's s_q query tokens sees its first seq_len - s_q + t + 1 tokens. A row that sees none gets output
    0 and log-sum-exp -inf. Cache rows and block-table entries past a request's length are never read.

    Args:
        q: [batch, s_q, heads, 576].
        kv_cache: [pages, page_size, 576] or [pages, page_size, 1, 576]; the values are the first 512 columns.
        block_table: integer [batch, max_pages], the page of each page_size tokens.
        seq_lens: integer [batch], tokens of each request, new ones included.
        softmax_scale: factor of the scores before softmax.
        q_scale, kv_scale: one element each, the factors of q's and the cache's elements; 1 when None. They are applied
            to scores and output, because `dtype` may not hold the scaled elements.
        dtype: type of every intermediate result.

    Returns:
        out [batch, s_q, heads, 512] and lse [batch, s_q, heads] (natural logarithm), both in `dtype`.

    Raises:
        ValueError: a request has more tokens than its row of the block table holds, or a page outside the cache.
    """
    batch, s_q, heads, _ = q.shape
    out = torch.zeros(batch, s_q, heads, LATENT_DIM, dtype=dtype, device=q.device)
    lse = torch.full((batch, s_q, heads), float("-inf"), dtype=dtype, device=q.device)
    kv_factor = 1.0 if kv_scale is None else kv_scale.item()
    score_factor = softmax_scale * kv_factor * (1.0 if q_scale is None else q_scale.item())
    for request, t, scores, values in scores_and_values(q, kv_cache, block_table, seq_lens, score_factor, dtype):
        lse[request, t] = torch.logsumexp(scores, dim=-1)
        out[request, t] = torch.softmax(scores, dim=-1) @ values * kv_factor
    return out, lse


def scores_and_values(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, score_factor: float, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield (request, query token, scores [heads, tokens], values [tokens, 512]) for each query token that sees any.

    Arguments and errors as in `mla_decode_reference`; values are as stored.
    """
    s_q = q.shape[1]
    pages, page_size = kv_cache.shape[:2]
    rows = kv_cache.reshape(pages, page_size, -1) if kv_cache.dim() == 4 else kv_cache
    capacity = block_table.shape[1] * page_size
    for request, length in enumerate(seq_lens.tolist()):
        if length > capacity:
            raise ValueError(f"seq_lens: wanted at most {capacity} tokens (max_pages * page_size), got {length}")
        if length <= 0:
            continue
        used_pages = block_table[request, : -(-length // page_size)].tolist()
        if wild := [page for page in used_pages if not 0 <= page < pages]:
            raise ValueError(f"block_table: wanted pages from 0 to {pages - 1} for request {request}, got {wild[0]}")
        keys = torch.cat([rows[page].to(dtype) for page in used_pages])[:length]
        for t in range(s_q):
            visible = keys[: max(0, length - s_q + t + 1)]
            if visible.shape[0] > 0:
                yield request, t, (q[request, t].to(dtype) @ visible.T) * score_factor, visible[:, :LATENT_DIM]


def sparse_mla_decode_reference(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    *,
    block_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    valid_counts: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_block_table: Tensor | None = None,
    extra_valid_counts: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA decode attention in `dtype` on the given (already rounded) inputs.

    Args:
        q: [tokens, heads, 576, or 512 where rows have no rope beside the latent part].
        kv_cache, indices, block_table, request_ids, valid_counts, sinks, extra_...: as in `sparse_mla_decode`. Cache
            rows and block-table entries that no list names are never read.
        softmax_scale: factor of the scores before softmax.
        dtype: type of every intermediate result and of an FP8 cache's scaled elements.

    Returns:
        out [tokens, heads, 512] and lse [tokens, heads] (natural logarithm), both in `dtype`.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, LATENT_DIM, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=dtype, device=q.device)
    lists = [named_rows(kv_cache, indices, block_table, request_ids, valid_counts)]
    if extra_kv_cache is not None and extra_indices is not None:
        lists.append(named_rows(extra_kv_cache, extra_indices, extra_block_table, request_ids, extra_valid_counts))
    token_of = operator.itemgetter(0)
    for token, of_token in itertools.groupby(heapq.merge(*lists, key=token_of), token_of):
        keys = dequantized(torch.cat([rows for _, rows in of_token]), dtype)
        scores = (q[token].to(dtype) @ keys.T) * softmax_scale
        lse[token] = torch.logsumexp(scores, dim=-1)
        out[token] = torch.softmax(scores, dim=-1) @ keys[:, :LATENT_DIM]
        if sinks is not None:
            out[token] *= torch.sigmoid(lse[token] - sinks[:heads].to(dtype))[:, None]
    return out, lse


def named_rows(
    kv_cache: Tensor,
    indices: Tensor,
    block_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    valid_counts: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (token, rows) for each token whose list names cache rows, in the list's order.

    Arguments as in `sparse_mla_decode`; rows are as stored, bfloat16 [named, 576 or 512] or uint8 [named, 656, 528 or,
    from V4's pages, 584].
    """
    pages, page_size = kv_cache.shape[:2]
    requests = [-1] * len(indices) if request_ids is None else request_ids.tolist()
    counts = [indices.shape[1]] * len(indices) if valid_counts is None else valid_counts.clamp(min=0).tolist()
    for token, (request, count) in enumerate(zip(requests, counts, strict=True)):
        entries = indices[token, :count].long()
        entries = entries[entries >= 0]
        page = entries // page_size
        if block_table is not None:
            if not 0 <= request < len(block_table):
                continue
            entries = entries[page < block_table.shape[1]]
            page = block_table[request, entries // page_size].long()
        there = (page >= 0) & (page < pages)
        if there.any():
            yield token, stored_rows(kv_cache, page[there], entries[there] % page_size)


def stored_rows(kv_cache: Tensor, page: Tensor, place: Tensor) -> Tensor:
    """Rows of a sparse call's cache at these places, as stored: [*page.shape, width]; V4's 576 bytes, then their 8."""
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    cache = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    if cache.dtype != torch.uint8 or cache.shape[2] != V4_ROW_BYTES:
        return cache[page, place]
    pages, page_size, _ = cache.shape
    whole = cache.as_strided((pages, page_size * V4_ROW_BYTES), (cache.stride(0), 1))
    data = place[..., None] * V4_DATA_BYTES + torch.arange(V4_DATA_BYTES, device=place.device)
    scale_bytes = V4_ROW_BYTES - V4_DATA_BYTES
    scales = place[..., None] * scale_bytes + torch.arange(scale_bytes, device=place.device)
    return whole[page[..., None], torch.cat([data, page_size * V4_DATA_BYTES + scales], dim=-1)]


def dequantized(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`stored_rows`' rows [n, width] as values [n, 576 or 512] in `dtype`; bytes become elements times scales."""
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    # Exact in float64; rounded once to narrower types.
    if rows.shape[1] == V4_ROW_BYTES:
        elements, rope, powers = (part.contiguous() for part in rows.tensor_split((V4_NOPE_DIM, V4_DATA_BYTES), dim=1))
        scales, columns = torch.exp2(powers[:, :V4_SCALES].double() - 127), V4_SCALE_DIM
    else:
        elements, scales, rope = (
            part.contiguous() for part in rows.tensor_split((LATENT_DIM, SPARSE_FP8_BYTES), dim=1)
        )
        scales, columns = scales.view(torch.float32).double(), SCALE_DIM
    latent = elements.view(FP8).double() * scales.repeat_interleave(columns, dim=1)
    return torch.cat([latent.to(dtype), rope.view(torch.bfloat16).to(dtype)], dim=1)


def relative_rmse(result: Tensor, truth: Tensor) -> float:
    """Root mean square of result - truth over that of truth; `truth` is float64, `result` has as many elements."""
    return ((result.double().reshape(truth.shape) - truth).norm() / truth.norm()).item()
