"""vLLM logits processor: a request that names its output tokens gets exactly these.

Its log-probabilities are those before any processor, so they say how likely the model held the given tokens.
"""

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves one token possible at each step of a request that has the argument."""

    def is_argmax_invariant(self) -> bool:
        """False: it decides what is chosen."""
        return False

    def new_req_logits_processor(self, params: SamplingParams):
        """What is applied to the logits [vocabulary] of one request, given its output so far."""
        tokens = (params.extra_args or {}).get("forced_tokens")  # its vllm_xargs
        if tokens is None:
            return None

        def force(output: list[int], logits: Tensor) -> Tensor:
            # Beyond the last token a step's result is thrown away.
            token = tokens[min(len(output), len(tokens) - 1)]
            logits.fill_(float("-inf"))
            logits[token] = 0.0
            return logits

        return force
