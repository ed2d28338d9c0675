"""Prefill steps of few new tokens over cached contexts: the decode kernels serve them, as they do drafts to verify."""

from itertools import islice

from etap_backend.short_prompts import MAX_RUNS, Run, equal_runs, short_prompt_tokens

PREFILL_MODES = ("EXTEND", "MIXED")


def prompt_runs(forward_batch, num_heads: int) -> list[Run]:
    """The calls that decode a prefill step; none where SGLang's prefill serves it.

    SGLang's model asks in every layer, which else makes keys of the whole context, and the backend that plans: all hear
    the same, which the batch keeps.

    Args:
        forward_batch: SGLang's.
        num_heads: query heads on this GPU.
    """
    if forward_batch.forward_mode.name not in PREFILL_MODES:
        return []
    query_lens, prefix_lens = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    of = (query_lens, prefix_lens, num_heads)
    kept = getattr(forward_batch, "_etap_runs", None)
    # SGLang copies batches, with other lists where their requests are others.
    if kept is None or any(mine is not given for mine, given in zip(kept[0], of, strict=True)):
        kept = forward_batch._etap_runs = of, _runs(query_lens, prefix_lens, num_heads)
    return kept[1]


# SGLang is imported in functions: `etap doctor` imports this module where there is none.
def is_deterministic() -> bool:
    """Whether a request's result must not depend on what runs beside it."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().deterministic.enable_deterministic_inference


def _runs(query_lens: list[int], prefix_lens: list[int], num_heads: int) -> list[Run]:
    from sglang.srt.runtime_context import get_parallel

    # The way that a prompt goes must not depend on those beside it; and a rank may have some of the context's tokens.
    if is_deterministic() or get_parallel().attn_dcp_size > 1:
        return []
    # Prompts of which nothing is cached read no context but themselves.
    short = query_lens and 0 < min(query_lens) <= max(query_lens) <= short_prompt_tokens(num_heads)
    if not short or not any(prefix_lens):
        return []
    runs = list(islice(equal_runs(query_lens), MAX_RUNS + 1))
    return runs if len(runs) <= MAX_RUNS else []
