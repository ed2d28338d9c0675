"""How ETAP decodes under a configuration of vLLM: which requests, in how large calls, with which math; or why not."""

from dataclasses import dataclass

import vllm.envs as envs
from vllm.config import VllmConfig

from etap_backend.schedule import DecodeSchedule
from etap_backend.short_prompts import short_prompt_tokens
from etap_backend.vllm import versions

FP8_MATH_OPTION = "etap_fp8_math"
"""`--additional-config '{"etap_fp8_math": true}'`: an FP8 cache is multiplied as it is, by queries rounded to e4m3;
otherwise as float16, exactly. vLLM's configuration is the same for all ranks, an environment need not be.
"""


@dataclass(frozen=True)
class Policy:
    """What follows from vLLM's configuration alone, so that layers and builders decide alike.

    Attributes:
        num_heads: query heads of a call.
        verified: most query tokens of a request that is decoded: 1, and its drafts.
        longest: most of any request that is sent to `forward_mqa`, short prompts among them.
        max_s_q: most of any request as a call has it.
        max_batch: most requests as a call has them.
        batch_invariant: whether a result must not depend on the requests beside it.
        token_by_token: whether each query token is planned as a request of its own. With decode context parallelism
            because a rank has some of a request's last tokens only, and the kernel's causal mask wants all. With batch
            invariance because the way that a token goes must not depend on those beside it. With adaptive verification
            because the device alone knows how many tokens of a step are whose.
        graphs_change_batch: whether a CUDA graph may be replayed with a plan for another number of requests than at its
            capture. Micro-batches cut a request with drafts in two, which graphs do not expect; and where the number of
            drafts changes, the draft model's graph may be one for more requests than the target's step had.
        fp8_math: whether an FP8 cache is multiplied as it is.
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

    @classmethod
    def of(cls, config: VllmConfig, num_heads: int) -> "Policy":
        """That of a configuration with so many heads in a call; there need not be a builder yet."""
        parallel, drafts = config.parallel_config, config.speculative_config
        token_by_token = (
            parallel.decode_context_parallel_size > 1
            or envs.VLLM_BATCH_INVARIANT
            or getattr(drafts, "enable_adaptive_verification", False)  # since 0.33
        )
        verified = longest = versions.max_decode_query_len(config)
        # A prompt may hit blocks of the prefix cache that another one of its step is writing. vLLM keeps such two out
        # of different micro-batches, but not what it takes for a decode. With prefill context parallelism it divides
        # each prompt among the ranks.
        prompts_elsewhere = parallel.use_ubatching or parallel.prefill_context_parallel_size > 1
        if not (token_by_token or prompts_elsewhere or versions.pads_tokens_of_no_request(config)):
            longest = max(verified, short_prompt_tokens(num_heads))
        dynamic = drafts is not None and (parallel.use_ubatching or drafts.uses_dynamic_speculative_decoding())
        return cls(
            num_heads=num_heads,
            verified=verified,
            longest=longest,
            max_s_q=1 if token_by_token else longest,
            max_batch=config.scheduler_config.max_num_seqs * verified,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            token_by_token=token_by_token,
            graphs_change_batch=dynamic,
            fp8_math=wants_fp8_math(config),
        )

    def workspace_floats(self, num_sms: int) -> int:
        """Floats of scratch memory that the largest call needs."""
        return DecodeSchedule.workspace_floats(
            self.num_heads, self.max_s_q, num_sms, max_batch=self.max_batch, batch_invariant=self.batch_invariant
        )


def why_not_parallel(config: VllmConfig | None) -> str | None:
    """Say why ETAP cannot run the context parallelism of a configuration, or None when it can."""
    parallel = config and config.parallel_config
    if parallel and min(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1:
        return "prefill context parallelism beside decode context parallelism is not supported: wanted one of both"
    return None


def uses_hisparse(config: VllmConfig) -> bool:
    """Whether vLLM keeps a sparse model's cache in host memory, and on the GPU what lists name; since 0.33."""
    return getattr(config.attention_config, "hisparse_config", None) is not None


def why_not_sparse(config: VllmConfig) -> str | None:
    """Say why ETAP cannot run any sparse model under a configuration, or None; raises as `wants_fp8_math`."""
    if wants_fp8_math(config):
        return f"{FP8_MATH_OPTION} multiplies FP8 caches of dense attention, and the model's is sparse: wanted false"
    return None


def wants_fp8_math(config: VllmConfig) -> bool:
    """What the option says; raises ValueError unless it is true, false or absent, and for other options of ETAP's."""
    options = config.additional_config
    if not isinstance(options, dict):  # another plugin's own class
        return False
    if unknown := [name for name in options if name.lower().startswith("etap") and name != FP8_MATH_OPTION]:
        raise ValueError(f"additional_config: wanted {FP8_MATH_OPTION} at most, got {', '.join(unknown)}")
    value = options.get(FP8_MATH_OPTION, False)
    if not isinstance(value, bool):
        raise ValueError(f"additional_config: {FP8_MATH_OPTION}: wanted true or false, got {value!r}")
    return value
