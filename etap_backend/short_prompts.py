"""Short prompts that the decode kernels serve: how many new tokens, and in which calls."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

MAX_RUNS = 4
"""Most runs per step. Each is one call per layer, about 10 us of host time; one prefill call of an engine serves any
number of prompts. Decodes take one run, or two where some requests have no drafts; two or three lengths of prompts fit.
"""
SHORT_PROMPT_TOKENS = 128
SHORT_PROMPT_ROWS = 2048
"""Most query rows (tokens * heads) per request that were faster than vLLM's prefill: 128 tokens with 16 heads. Every
64 rows read the context again, and more rows leave fewer CTAs to divide a single request's context.
"""


class Run(NamedTuple):
    """Consecutive requests of a step that one call decodes.

    Attributes:
        requests: their part of the step's requests.
        tokens: their part of the step's query tokens.
        s_q: query tokens per request; 0 where the requests differ, and each token is decoded as its own request.
    """

    requests: slice
    tokens: slice
    s_q: int


def short_prompt_tokens(num_heads: int) -> int:
    """Most new tokens of a prompt that the decode kernels serve faster than an engine's prefill."""
    return max(1, min(SHORT_PROMPT_TOKENS, SHORT_PROMPT_ROWS // num_heads))


def equal_runs(query_lens: Iterable[int]) -> Iterator[Run]:
    """Runs of requests with equally many query tokens, in the requests' order."""
    request, token = 0, 0
    for s_q, group in groupby(query_lens):
        requests = len(list(group))
        end = token + s_q * requests
        yield Run(slice(request, request + requests), slice(token, end), s_q)
        request, token = request + requests, end
