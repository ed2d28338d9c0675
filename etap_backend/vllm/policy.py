"""How ETAP decodes under vLLM's configuration: which requests, in calls of which size, with which math; or why not."""

from dataclasses import dataclass

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.v1.attention.backend import max_decode_query_len

from etap_backend import engine_contract
from etap_backend.limits import MOST_SHARED
from etap_backend.schedule import DecodeSchedule
from etap_backend.short_prompts import short_prompt_tokens

FP8_MATH_OPTION = "etap_fp8_math"
"""`--additional-config '{"etap_fp8_math": true}'` multiplies an FP8 cache in e4m3, with rounded queries; without it, an
FP8 cache is multiplied as float16, which is exact. All ranks share vLLM's configuration; an environment may differ.
"""


@dataclass(frozen=True)
class Policy:
    """Decisions that follow from vLLM's configuration, the same for layers and builders.

    Attributes:
        num_heads: query heads of a call.
        verified: most query tokens of a decode: 1 plus its drafts.
        longest: most query tokens of a request that is sent to `forward_mqa`, short prompts included.
        max_s_q: most query tokens per request of a call.
        max_batch: most requests of a call.
        batch_invariant: whether a request's result must not depend on the other requests.
        token_by_token: whether each query token is planned as a request of its own. With decode context parallelism,
            because a rank has only some of a request's last tokens and the kernel's causal mask needs all of them. With
            batch invariance, because a token's splits must not depend on the tokens beside it. With adaptive
            verification, because only the device knows which request each token belongs to.
        graphs_change_batch: whether a CUDA graph may be replayed with a plan for another number of requests than it was
            captured with. Micro-batches may cut a request with drafts in two, and where the number of drafts changes,
            the draft model's graph may be one for more requests than the target's step.
        fp8_math: whether an FP8 cache is multiplied in e4m3.
        shared_prefix: whether pages that requests begin with are read once for several requests.
    """

    num_heads: int
    verified: int
    longest: int
    max_s_q: int
    max_batch: int
    batch_invariant: bool
    token_by_token: bool
    graphs_change_batch: bool
    fp8_math: bool
    shared_prefix: bool

    @classmethod
    def of(cls, config: VllmConfig, num_heads: int) -> "Policy":
        """The policy for calls of `num_heads` heads."""
        parallel, drafts = config.parallel_config, config.speculative_config
        token_by_token = (
            parallel.decode_context_parallel_size > 1
            or envs.VLLM_BATCH_INVARIANT
            or (drafts is not None and drafts.enable_adaptive_verification)
        )
        verified = longest = max_decode_query_len(config)
        # A prompt may hit prefix-cache blocks that another prompt of the step is writing. vLLM keeps the two in one
        # micro-batch, unless it counts them as decodes. With prefill context parallelism it divides every prompt.
        prompts_elsewhere = parallel.use_ubatching or parallel.prefill_context_parallel_size > 1
        if not (token_by_token or prompts_elsewhere):
            longest = max(verified, short_prompt_tokens(num_heads))
        return cls(
            num_heads=num_heads,
            verified=verified,
            longest=longest,
            max_s_q=1 if token_by_token else longest,
            max_batch=config.scheduler_config.max_num_seqs * verified,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            token_by_token=token_by_token,
            graphs_change_batch=_graphs_change_batch(config),
            fp8_math=wants_fp8_math(config),
            shared_prefix=engine_contract.shares_prefixes(),
        )

    def workspace_floats(self, num_sms: int) -> int:
        """Floats of scratch memory that the largest call needs."""
        return DecodeSchedule.workspace_floats(
            self.num_heads,
            self.max_s_q,
            num_sms,
            max_batch=self.max_batch,
            batch_invariant=self.batch_invariant,
            shared_prefix=self.shared_prefix,
        )


def _graphs_change_batch(config: VllmConfig) -> bool:
    drafts = config.speculative_config
    return drafts is not None and (config.parallel_config.use_ubatching or drafts.uses_dynamic_speculative_decoding())


def why_no_shared_prefix(config: VllmConfig | None) -> str | None:
    """Say why requests cannot share prefixes as the flag wants, or None. Raises ValueError for another value of it."""
    if not engine_contract.shares_prefixes():
        return None
    modes = {"VLLM_BATCH_INVARIANT=1": envs.VLLM_BATCH_INVARIANT}
    if config:
        most = config.scheduler_config.max_num_seqs * max_decode_query_len(config)
        modes["drafts in micro-batches or of changing number"] = _graphs_change_batch(config)
        modes[f"max_num_seqs x (1 + drafts) {most}, wanted at most {MOST_SHARED}"] = most > MOST_SHARED
    found = next((mode for mode, holds in modes.items() if holds), None)
    return found and f"{engine_contract.SHARED_PREFIX_VARIABLE}=1 is not supported with {found}"


def why_not_parallel(config: VllmConfig | None) -> str | None:
    """Say why ETAP cannot run the context parallelism of a configuration, or None when it can."""
    parallel = config and config.parallel_config
    if parallel and min(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1:
        return "prefill context parallelism with decode context parallelism is not supported: wanted one of them"
    return None


def why_not_sparse(config: VllmConfig) -> str | None:
    """Say why ETAP cannot run any sparse model under a configuration, or None; raises as `wants_fp8_math`."""
    if wants_fp8_math(config):
        return f"{FP8_MATH_OPTION} is for FP8 caches of dense attention, and the model's is sparse: wanted false"
    return None


def wants_fp8_math(config: VllmConfig) -> bool:
    """Whether FP8_MATH_OPTION is set; raises ValueError for a value that is no bool, and for unknown options."""
    options = config.additional_config
    if not isinstance(options, dict):  # another plugin's class
        return False
    if unknown := [name for name in options if name.lower().startswith("etap") and name != FP8_MATH_OPTION]:
        raise ValueError(f"additional_config: wanted {FP8_MATH_OPTION} at most, got {', '.join(unknown)}")
    value = options.get(FP8_MATH_OPTION, False)
    if not isinstance(value, bool):
        raise ValueError(f"additional_config: {FP8_MATH_OPTION}: wanted true or false, got {value!r}")
    return value
