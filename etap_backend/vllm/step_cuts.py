"""How a step's decodes are cut into calls: runs of requests with equally many query tokens, or token by token."""

from itertools import takewhile

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from etap_backend.short_prompts import MAX_RUNS, Run, equal_runs


def padded_query_lens(query_lens: list[int], num_tokens: int) -> list[int]:
    """Query tokens of each request that has rows in a step, its padding among them.

    Args:
        query_lens: of all requests. Those that pad a step for a CUDA graph are last and have none here.
        num_tokens: rows of the queries. Those that pad the step belong to its padding's requests, each as many as the
            first request has, or to no request: these are counted nowhere.

    Raises:
        ValueError: a request without tokens comes before one with some, or there are fewer rows than tokens.
    """
    queried = query_lens.index(0) if 0 in query_lens else len(query_lens)
    spare = num_tokens - sum(query_lens)
    if spare < 0 or any(query_lens[queried:]):
        raise ValueError(
            f"query_start_loc_cpu: wanted requests of {num_tokens} query tokens at most, those with none of them last, "
            f"got {query_lens}"
        )
    # A step of padding alone has as many tokens for each request as there is room for.
    s_q = query_lens[0] or max(1, num_tokens // len(query_lens))
    return query_lens[:queried] + [s_q] * min(spare // s_q, len(query_lens) - queried)


def cut_into_runs(query_lens: list[int], verified: int) -> list[Run]:
    """Runs of equally many query tokens.

    Where there are more than MAX_RUNS, those that lead with up to `verified` tokens are one run, which is decoded token
    by token: prefill would project their contexts up, and drafts are few enough to read a context once for each.
    """
    runs = list(equal_runs(query_lens))
    short = list(takewhile(lambda run: run.s_q <= verified, runs))
    if len(runs) > MAX_RUNS and len(short) > 1:
        first = Run(slice(0, short[-1].requests.stop), slice(0, short[-1].tokens.stop), 0)
        runs = [first, *runs[len(short) :]]
    return runs


def longest_decode(query_lens: list[int], longest: int, verified: int) -> int:
    """Most query tokens of the requests that a step decodes, at most `longest`, so that they are MAX_RUNS runs.

    vLLM decodes what comes before the first request that is longer. It sorts requests by their tokens, or at least
    puts decodes first.
    """
    runs = cut_into_runs(list(takewhile(lambda n: 0 < n <= longest, query_lens)), verified)
    if len(runs) <= MAX_RUNS:
        return longest
    return max(run.s_q for run in runs[: MAX_RUNS + 1]) - 1


class TokenRequests:
    """A step's query tokens as requests of one token each, in buffers that CUDA graphs may keep.

    Each sees the context up to itself. The kernel's own causal mask wants a request's last tokens one after another in
    the cache; with decode context parallelism a rank has some of them.
    """

    def __init__(
        self,
        max_tokens: int,
        max_pages: int,
        device: torch.device,
        dcp_size: int,
        dcp_rank: int,
        dcp_interleave: int,
    ):
        """Allocate for max_tokens query tokens of requests with max_pages pages on this rank."""
        # Nothing here may outlast a step: vLLM's sleep mode gives the memory back with other contents.
        self._seq_lens = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_tokens, max_pages, dtype=torch.int32, device=device)
        self._share = (dcp_size, dcp_rank, dcp_interleave)

    def fill(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Write block table [num_tokens, pages] and lengths on this rank [num_tokens], and return them.

        Args:
            block_table: int32 [requests, pages].
            seq_lens: int32 [requests], tokens of each on all ranks, the new ones included.
            query_start_loc: int32 [requests + 1], on the device.
            num_tokens: query tokens; those behind the last request's pad the step, and get length 0.
        """
        token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
        request = torch.bucketize(token, query_start_loc[1:], right=True).clamp_(max=len(seq_lens) - 1)
        later = query_start_loc[request + 1] - 1 - token
        total = (seq_lens[request] - later).clamp_(min=0).masked_fill_(later < 0, 0)
        size, rank, interleave = self._share
        # All ranks' at once: vLLM 0.26 would copy the number of a single one to the device.
        self._seq_lens[:num_tokens] = get_dcp_local_seq_lens(total, size, None, interleave)[:, rank]
        pages = min(block_table.shape[1], self._block_table.shape[1])
        table = self._block_table[:num_tokens, :pages]
        torch.index_select(block_table[:, :pages], 0, request, out=table)
        return table, self._seq_lens[:num_tokens]
