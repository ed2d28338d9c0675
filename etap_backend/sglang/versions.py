"""The SGLang releases that run ETAP, the names that the plugin adds or hooks, and what SGLang's objects tell it.

Where SGLang has no public way, a function reads or calls a private one, and says why and until when.
"""

from torch import Tensor

from etap_backend.engine_contract import Engine

NAME = "etap"
FP8_MATH_NAME = "etap_fp8_math"
"""ETAP with FP8 math: queries are rounded to e4m3. Without, an FP8 cache is converted to float16, which is exact.

It is a name and no environment variable, because SGLang sends its arguments to all ranks.
"""
NAMES = (NAME, FP8_MATH_NAME)
ENGINE = Engine("SGLang", "sglang", NAME, oldest="0.5.22", newest="0.5.23")

PAGE_HOOK = "sglang.srt.arg_groups.overrides._mla_backend_page_constraints"
SPARSE_HOOK = "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution"
HISPARSE_LIST = "sglang.srt.arg_groups.hisparse_hook.HISPARSE_CUDA_DSA_BACKENDS_BY_DTYPE"
"""For each type of cache, the kernels that may read HiSparse's hot buffer of rows from host memory."""
DRAFT_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
V4_NAME = "dsv4"
"""The name that SGLang gives DeepSeek-V4's backend, whatever the user named."""
V4_STEPS_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_decode_backend"
V4_DRAFT_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_prefill_backend"

TOKENS_PER_PROGRAM = 4096
"""Tokens whose pages one Triton program of SGLang enters in the block table; a page has no more."""


def refuse(reason: str | None) -> None:
    """Raise ValueError with the backend's name and this reason; None is no reason."""
    if reason:
        raise ValueError(f"attention backend {NAME}: {reason}")


def is_mla(model_config) -> bool:
    """Whether SGLang runs this model's attention as MLA."""
    from sglang.srt.configs.model_config import AttentionArch

    return model_config.attention_arch == AttentionArch.MLA


def is_sparse(model_config) -> bool:
    """Whether SGLang builds this model's attention layers as sparse ones."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return is_deepseek_dsa(model_config.hf_config)


def _architecture(model_config) -> str:
    return (getattr(model_config.hf_config, "architectures", None) or [""])[0]


def is_v4(model_config) -> bool:
    """Whether the model is DeepSeek-V4, V4.1 or a draft model of them: their names share this start."""
    return _architecture(model_config).startswith("DeepseekV4")


def is_dots(model_config) -> bool:
    """Whether the model is Dots3-Note: SGLang combines two backends for its layers."""
    return _architecture(model_config).startswith("Dots3")


def has_sinks(model_config) -> bool:
    """Whether sparse attention has learned sinks (HY-V4)."""
    return bool(getattr(model_config.hf_config, "learnable_sink", False))


def scales_queries(model_config) -> bool:
    """Whether queries are scaled by position (Mistral-Large-3)."""
    return bool(getattr(model_config.hf_text_config, "llama_4_scaling", None))


def serves_v4() -> bool:
    """Whether ETAP serves DeepSeek-V4: `registration.resolve_arguments` tells all ranks by this argument."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().kernel.dsa_decode_backend == NAME


def verifies_raggedly() -> bool:
    """Whether the requests of a step may have different numbers of drafts to verify."""
    from sglang.srt.environ import envs

    return envs.SGLANG_RAGGED_VERIFY_MODE.get().lower() != "static"


def given(view):
    """The arguments that the user gave, behind SGLang's view of what it has resolved."""
    from sglang.srt.arg_groups.model_override_base import record_of

    return record_of(view)


def name_given(view) -> str | None:
    """The attention backend that the user named, or `choose` did, before a model's override replaces it."""
    return getattr(given(view), "_etap_chosen", None) or given(view).attention_backend


def if_chosen(arguments):
    """SGLang's view of its arguments as if the user had named ETAP.

    Reason: `resolved_view` takes no further values.
    Versions: 0.5.22 and 0.5.23. Goes when it does, or when the values behind it are public.
    """
    from sglang.srt.arg_groups.model_override_base import ResolvedView, _declaration_overlay

    return ResolvedView(arguments, overlay=_declaration_overlay(arguments) | {"attention_backend": NAME})


def choose(arguments) -> None:
    """Name ETAP in the user's place."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    arguments._etap_chosen = NAME
    declare_resolution(arguments, "etap_backend", attention_backend=NAME)


def model_config(view):
    """SGLang's description of the model that its arguments name."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(view)


def unhooked(hooks: tuple[str, ...]) -> list[str]:
    """The functions among `hooks` to which SGLang could not apply the plugin's hook.

    Reason: SGLang logs a hook that fails, and tells the plugin nothing.
    Versions: 0.5.22 and 0.5.23. Goes when HookRegistry tells which hooks it has applied.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [hook for hook in hooks if hook not in HookRegistry._patched]


def captured_output(forward_batch) -> Tensor | None:
    """The tensor from which a CUDA graph of prefill reads a layer's output; None outside of such graphs.

    Reason: SGLang copies an output that is elsewhere, in every layer.
    Versions: 0.5.22 and 0.5.23, whose own backends read it too. Goes when it has a public name.
    """
    return getattr(forward_batch, "_attn_output", None)


def fill_rank_share(backend, req_pool_indices: Tensor, lengths: Tensor, table: Tensor) -> None:
    """Turn lengths and block table into this rank's share under decode context parallelism, on the device.

    Token t of a request lies on rank t % ranks, in row slot // ranks of that rank's cache.

    Args:
        backend: has req_to_token and page_size.
        req_pool_indices: int64 [requests], rows of req_to_token.
        lengths: int32 [requests], tokens on all ranks before the call, on this rank after it.
        table: int32 [requests, pages], written.
    """
    from sglang.kernels.ops.attention.dcp_kernels import create_mla_kv_page_table_for_dcp
    from sglang.srt.layers.dcp.layout import get_dcp_lens
    from sglang.srt.runtime_context import get_parallel

    parallel, pages_per_program = get_parallel(), TOKENS_PER_PROGRAM // backend.page_size
    lengths.copy_(get_dcp_lens(lengths, parallel.attn_dcp_size, parallel.attn_dcp_rank))
    create_mla_kv_page_table_for_dcp[(len(lengths), -(-table.shape[1] // pages_per_program))](
        backend.req_to_token,
        req_pool_indices,
        lengths,
        table,
        v2p_ptr=None,  # of the unified memory pool, which ETAP does not serve
        HAS_V2P=False,
        req_to_token_stride=backend.req_to_token.stride(0),
        block_table_stride=table.stride(0),
        PHYSICAL_PAGE_SIZE=backend.page_size,
        DCP_SIZE=parallel.attn_dcp_size,
        DCP_RANK=parallel.attn_dcp_rank,
        PAGES_PER_BLOCK=pages_per_program,
    )
