"""Cuts a step's decodes into calls: runs of requests with equally many query tokens, or token by token."""

from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from etap_backend.short_prompts import MAX_RUNS, Run


def cut(starts: np.ndarray, num_tokens: int, verified: int) -> list[Run]:
    """Runs of equally many query tokens, in the order of the requests, a step's padding included.

    Where there are more than MAX_RUNS, the leading requests of up to `verified` tokens become one run, decoded token by
    token: prefill would project their contexts up, and drafts are few enough to read a context once per token.

    Args:
        starts: int32 [requests + 1], where each request's query tokens begin, and where the last one's end. Requests
            that pad a step for a CUDA graph are last and have no tokens here.
        num_tokens: rows of the queries. Rows that pad the step belong to its padding requests, each with as many as the
            first request, or to no request, and then to no run.
        verified: most query tokens of a decode with its drafts.

    Raises:
        ValueError: a request without tokens comes before one with some, or there are fewer rows than tokens.
    """
    query_lens = starts[1:] - starts[:-1]
    requests, first, runs = len(query_lens), 0, []
    ends = np.flatnonzero(query_lens[1:] != query_lens[:-1]) + 1  # of every run but the last
    if len(ends) >= MAX_RUNS:
        others = np.flatnonzero((query_lens > verified) | (query_lens <= 0))
        lead = int(others[0]) if len(others) else requests
        if len(ends[ends < lead]):
            runs, first, ends = [Run(slice(0, lead), slice(0, int(starts[lead])), 0)], lead, ends[ends > lead]
    for end in (*ends.tolist(), requests) if first < requests else ():
        runs.append(Run(slice(first, end), slice(int(starts[first]), int(starts[end])), int(query_lens[first])))
        first = end
    padding = runs.pop().requests if query_lens[-1] == 0 else slice(requests, requests)
    spare = num_tokens - int(starts[-1])
    if spare < 0 or any(run.tokens.start >= run.tokens.stop for run in runs):
        raise ValueError(
            f"query_start_loc_cpu: wanted requests of {num_tokens} query tokens at most, empty ones last, "
            f"got {query_lens.tolist()}"
        )
    # A step that is all padding divides its rows evenly.
    s_q = int(query_lens[0]) or max(1, num_tokens // requests)
    if padded := min(spare // s_q, requests - padding.start):
        requests_begin, tokens_begin = padding.start, int(starts[-1])
        requests_end, tokens_end = requests_begin + padded, tokens_begin + s_q * padded
        if runs and runs[-1].s_q == s_q:
            alike = runs.pop()
            requests_begin, tokens_begin = alike.requests.start, alike.tokens.start
        runs.append(Run(slice(requests_begin, requests_end), slice(tokens_begin, tokens_end), s_q))
    return runs


def longest_decode(runs: list[Run], longest: int) -> int:
    """The limit on query tokens, at most `longest`, with which a step decodes no more than MAX_RUNS runs.

    vLLM decodes all requests before the first one above the limit. It sorts requests by their tokens, or at least puts
    decodes first.
    """
    decoded = list(takewhile(lambda run: run.s_q <= longest, runs))
    return longest if len(decoded) <= MAX_RUNS else max(run.s_q for run in decoded[: MAX_RUNS + 1]) - 1


class TokenRequests:
    """A step's query tokens as requests of one token each, in buffers at addresses that CUDA graphs can keep.

    Each token sees the context up to itself, or all of it. The kernel's own causal mask needs all of a request's last
    tokens in the cache; with decode context parallelism a rank has only some.
    """

    def __init__(self, max_tokens: int, max_pages: int, device: torch.device, share: tuple[int, int, int]):
        """Allocate for max_tokens query tokens of requests with max_pages pages on this rank.

        `share` is the number of ranks that share a context, this rank's number, and how many consecutive tokens a rank
        has at a time.
        """
        # Contents may not outlast a step: after vLLM's sleep mode they are lost.
        self._seq_lens = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_tokens, max_pages, dtype=torch.int32, device=device)
        self._share = share

    def fill(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int, causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Write block table [num_tokens, pages] and lengths on this rank [num_tokens], and return them.

        Args:
            block_table: int32 [requests, pages].
            seq_lens: int32 [requests], tokens of each on all ranks, the new ones included.
            query_start_loc: int32 [requests + 1], on the device.
            num_tokens: query tokens; those behind the last request's pad the step and get length 0.
            causal: whether a token sees no later token of its request; otherwise it sees the whole request.
        """
        token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
        request = torch.bucketize(token, query_start_loc[1:], right=True).clamp_(max=len(seq_lens) - 1)
        later = query_start_loc[request + 1] - 1 - token
        total = (seq_lens[request] - later if causal else seq_lens[request]).clamp_(min=0).masked_fill_(later < 0, 0)
        size, rank, interleave = self._share
        if size > 1:
            total = get_dcp_local_seq_lens(total, size, rank, interleave)
        self._seq_lens[:num_tokens] = total
        pages = min(block_table.shape[1], self._block_table.shape[1])
        table = self._block_table[:num_tokens, :pages]
        torch.index_select(block_table[:, :pages], 0, request, out=table)
        return table, self._seq_lens[:num_tokens]
