"""Prompts of few new tokens, which the decode kernels serve: how few, and in which calls."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

MAX_RUNS = 4
"""Most runs of a step. Each costs every layer a call, some 10 us of the host, where one call of an engine's prefill
serves any number of prompts. Decodes take one, or two where some have no drafts, so that two or three lengths of
prompts fit.
"""
SHORT_PROMPT_TOKENS = 128
SHORT_PROMPT_ROWS = 2048
"""Query rows (tokens * heads) of one request that were timed against vLLM's prefill, and won: those of 128 tokens with
16 heads. Each 64 of them read the context again, and more would leave fewer CTAs to divide a lone request's context.
"""


class Run(NamedTuple):
    """Requests that follow one another in a step, and that one call decodes.

    Attributes:
        requests: which of the step's requests.
        tokens: which of the step's query tokens.
        s_q: query tokens for each request; 0 where their numbers differ, and each token is decoded by itself.
    """

    requests: slice
    tokens: slice
    s_q: int


def short_prompt_tokens(num_heads: int) -> int:
    """Most new tokens of a prompt that the decode kernels are better at than an engine's prefill."""
    return max(1, min(SHORT_PROMPT_TOKENS, SHORT_PROMPT_ROWS // num_heads))


def equal_runs(query_lens: Iterable[int]) -> Iterator[Run]:
    """Runs of equally many query tokens, in the order of the requests."""
    request, token = 0, 0
    for s_q, group in groupby(query_lens):
        requests = len(list(group))
        end = token + s_q * requests
        yield Run(slice(request, request + requests), slice(token, end), s_q)
        request, token = request + requests, end
