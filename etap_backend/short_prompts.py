"""Short prompts, which the decode kernels serve: their greatest length, and the calls of a step."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

MAX_RUNS = 4
"""Most runs per step. Each costs every layer a call, some 10 us on the host, where one call of an engine's prefill
serves any number of prompts. Decodes take one run, or two where some requests have no drafts, which leaves two or three
for prompts of different lengths.
"""
SHORT_PROMPT_TOKENS = 128
SHORT_PROMPT_ROWS = 2048
"""Most query rows (tokens * heads) of one request that beat vLLM's prefill: 128 tokens with 16 heads. Each 64 rows read
the context again, and more rows would leave fewer CTAs to split the context of a single request.
"""


class Run(NamedTuple):
    """Consecutive requests of a step that one call decodes.

    Attributes:
        requests: their part of the step's requests.
        tokens: their part of the step's query tokens.
        s_q: query tokens per request; 0 where the numbers differ and each token is decoded by itself.
    """

    requests: slice
    tokens: slice
    s_q: int


def short_prompt_tokens(num_heads: int) -> int:
    """Most new tokens of a prompt for which the decode kernels beat an engine's prefill."""
    return max(1, min(SHORT_PROMPT_TOKENS, SHORT_PROMPT_ROWS // num_heads))


def equal_runs(query_lens: Iterable[int]) -> Iterator[Run]:
    """Runs of consecutive requests with equally many query tokens, in the order of the requests."""
    request, token = 0, 0
    for s_q, group in groupby(query_lens):
        requests = len(list(group))
        end = token + s_q * requests
        yield Run(slice(request, request + requests), slice(token, end), s_q)
        request, token = request + requests, end
