"""Prefill steps with few new tokens over cached contexts, which the decode kernels serve as they do drafts."""

from itertools import islice

from etap_backend.short_prompts import MAX_RUNS, Run, equal_runs, short_prompt_tokens

PREFILL_MODES = ("EXTEND", "MIXED")


def prompt_runs(forward_batch, num_heads: int) -> list[Run]:
    """The calls that decode a prefill step; an empty list where SGLang's prefill serves it.

    The backend asks when it plans the step, and the model in every layer. The batch stores the result, so that both
    agree.

    Args:
        forward_batch: SGLang's.
        num_heads: query heads on this GPU.
    """
    if forward_batch.forward_mode.name not in PREFILL_MODES:
        return []
    query_lens, prefix_lens = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    asked = (query_lens, prefix_lens, num_heads)
    stored = getattr(forward_batch, "_etap_runs", None)
    # SGLang copies batches, and gives a copy with other requests other lists.
    if stored is None or any(old is not new for old, new in zip(stored[0], asked, strict=True)):
        stored = forward_batch._etap_runs = asked, _runs(query_lens, prefix_lens, num_heads)
    return stored[1]


# SGLang is imported inside functions, because `etap doctor` imports this module where SGLang is not installed.
def is_deterministic() -> bool:
    """Whether a request's result must not depend on the requests beside it."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().deterministic.enable_deterministic_inference


def _runs(query_lens: list[int], prefix_lens: list[int], num_heads: int) -> list[Run]:
    from sglang.srt.runtime_context import get_parallel

    # A prompt's kernel must not depend on the prompts beside it; and a rank may hold only some of a context's tokens.
    if is_deterministic() or get_parallel().attn_dcp_size > 1:
        return []
    # Without a cached prefix a prompt reads no context but itself.
    short = query_lens and 0 < min(query_lens) <= max(query_lens) <= short_prompt_tokens(num_heads)
    if not short or not any(prefix_lens):
        return []
    runs = list(islice(equal_runs(query_lens), MAX_RUNS + 1))
    return runs if len(runs) <= MAX_RUNS else []
