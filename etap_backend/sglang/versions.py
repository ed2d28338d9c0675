"""Which versions of SGLang run ETAP; what differs between them, why and until when; its models' lists."""

import importlib

from etap_backend.engine_contract import Engine
from etap_backend.sglang.prompts import prompt_runs

NAME = "etap"
FP8_MATH_NAME = "etap_fp8_math"
"""ETAP that multiplies an FP8 cache as it is, by queries rounded to e4m3; the other does as float16, exactly. A name of
its own goes to all ranks with SGLang's arguments, an environment need not be the same for all.
"""
NAMES = (NAME, FP8_MATH_NAME)
ENGINE = Engine("SGLang", "sglang", NAME, oldest="0.5.17", newest="0.5.23")

PAGE_HOOK = "sglang.srt.arg_groups.overrides._mla_backend_page_constraints"
SPARSE_HOOK = "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution"
HISPARSE_LIST = "sglang.srt.arg_groups.hisparse_hook.HISPARSE_CUDA_DSA_BACKENDS_BY_DTYPE"
"""By the cache's type the kernels that may read a hot buffer of rows in host memory."""
DRAFT_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
V4_NAME = "dsv4"
"""The name that SGLang gives DeepSeek-V4's backend, whatever the user named."""
V4_STEPS_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_decode_backend"
V4_DRAFT_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_prefill_backend"

TOKENS_PER_PROGRAM = 4096
"""Whose pages one Triton program enters in the block table, as in SGLang's kernels; a page has no more."""


def refuse(reason: str | None) -> None:
    """Raise ValueError in the name of a backend that cannot do what it is given; None is no reason."""
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
    """Whether the model's layers are DeepSeek-V4's; V4.1 and the draft models have names with the same start."""
    return _architecture(model_config).startswith("DeepseekV4")


def is_dots(model_config) -> bool:
    """Whether the model is Dots3-Note, whose layers SGLang has two backends for, and one of its own around both."""
    return _architecture(model_config).startswith("Dots3")


def has_sinks(model_config) -> bool:
    """Whether sparse attention has sinks that are learned (HY-V4)."""
    return bool(getattr(model_config.hf_config, "learnable_sink", False))


def scales_queries(model_config) -> bool:
    """Whether queries are scaled by position (Mistral-Large-3)."""
    return bool(getattr(model_config.hf_text_config, "llama_4_scaling", None))


def v4_is_ours() -> bool:
    """Whether DeepSeek-V4's kernels are to be ETAP's: `registration.resolve_arguments` says so to all ranks."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().kernel.dsa_decode_backend == NAME


def verifies_raggedly() -> bool:
    """Whether requests of a step may have different numbers of drafts to verify."""
    from sglang.srt.environ import envs

    return envs.SGLANG_RAGGED_VERIFY_MODE.get().lower() != "static"


def given(view):
    """SGLang's arguments behind a view of them: what the user gave. 0.5.17 writes what it chooses into them."""
    return object.__getattribute__(view, "_server_args")


def name_given(view) -> str | None:
    """What the user named as `--attention-backend`, before a model's own choice; not after SGLang has resolved it."""
    return getattr(given(view), "_etap_chosen", None) or given(view).attention_backend


def if_chosen(arguments):
    """SGLang's view of its arguments as if the user had named ETAP."""
    from sglang.srt.arg_groups.overrides import ResolvedView

    declared = {}
    for _, fields in getattr(arguments, "_resolved_overrides", None) or ():
        declared |= fields
    return ResolvedView(arguments, overlay=declared | {"attention_backend": NAME})


def choose(arguments) -> None:
    """Name ETAP in the user's place.

    Reason: SGLang wrote what it decided into its arguments, and later declares it beside them.
    Versions: 0.5.17 at least. Goes when the oldest one supported has the new way.
    """
    arguments._etap_chosen = NAME
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        arguments.attention_backend = NAME
    else:
        declare_resolution(arguments, "etap_backend", attention_backend=NAME)


def hook_choice(choose_by_default) -> None:
    """Have this called with SGLang's arguments before it chooses attention backends for some models.

    Reason: a method of the arguments became a step with a list of hooks.
    Versions: 0.5.17 at least. Goes when the oldest one supported has the new way.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        step = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
        HookRegistry.register(step, choose_by_default, HookType.BEFORE)
        return

    @register_resolution_hook("handle_model_specific_adjustments")
    def resolve(arguments, previous) -> None:
        choose_by_default(arguments)
        previous(arguments)


def model_config(view):
    """SGLang's description of the model that its arguments name.

    Reason: a method of the arguments became a function when they were taken apart.
    Versions: below 0.5.19. Goes when 0.5.19 is the oldest one supported.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import model_config_of
    except ImportError:
        return view.get_model_config()
    return model_config_of(view)


def write_location(forward_batch):
    """Where the pool shall write this batch's rows.

    Reason: the pool took the bare slots, and later an object made from the batch.
    Versions: below 0.5.22. Goes when 0.5.22 is the oldest one supported.
    """
    from sglang.srt.mem_cache import memory_pool

    make = getattr(getattr(memory_pool, "KVWriteLoc", None), "for_batch", None)
    return make(forward_batch) if make else forward_batch.out_cache_loc


def output(forward_batch):
    """What the layer's output may be written to, or None: in a CUDA graph of prefill, which reads it there.

    Versions: 0.5.17 at least has none. Goes when the oldest one supported has it.
    """
    return getattr(forward_batch, "_attn_output", None)


def fill_rank_share(backend, req_pool_indices, lengths, table) -> None:
    """Turn lengths and block table into those of this rank under decode context parallelism.

    Token t of a request lies on rank t % ranks, there in the row of its slot // ranks.

    Reason: the kernel that fills the table got a table of the unified memory pool, which ETAP does not serve.
    Versions: below 0.5.20. Goes when 0.5.20 is the oldest one supported.
    """
    from sglang.kernels.ops.attention.dcp_kernels import create_mla_kv_page_table_for_dcp as fill
    from sglang.srt.layers.dcp.layout import get_dcp_lens
    from sglang.srt.runtime_context import get_parallel

    parallel, pages_per_program = get_parallel(), TOKENS_PER_PROGRAM // backend.page_size
    lengths.copy_(get_dcp_lens(lengths, parallel.attn_dcp_size, parallel.attn_dcp_rank))
    no_unified_pool = {"v2p_ptr": None, "HAS_V2P": False} if "HAS_V2P" in fill.arg_names else {}
    fill[(len(lengths), -(-table.shape[1] // pages_per_program))](
        backend.req_to_token,
        req_pool_indices,
        lengths,
        table,
        req_to_token_stride=backend.req_to_token.stride(0),
        block_table_stride=table.stride(0),
        PHYSICAL_PAGE_SIZE=backend.page_size,
        DCP_SIZE=parallel.attn_dcp_size,
        DCP_RANK=parallel.attn_dcp_rank,
        PAGES_PER_BLOCK=pages_per_program,
        **no_unified_pool,
    )


def share_of_lists():
    """What turns lists of rows into those of a rank's own under decode context parallelism, with their counts, or None.

    Reason: sparse attention got that parallelism, whose kernels were a Blackwell GPU's only.
    Versions: 0.5.17 at least has none. Goes when the oldest one supported has it.
    """
    try:
        from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_dcp
    except ImportError:
        return None
    return transform_index_page_table_dcp


def v4_row_bytes(pool) -> int:
    """Bytes of a row of DeepSeek-V4's window cache.

    Reason: there was one format of rows, and later several, one of which also has 528 bytes without rope.
    Versions: 0.5.17 at least. Goes when the oldest one supported has the method.
    """
    method = getattr(pool, "get_swa_key_bytes_per_token", None)
    return method() if method else pool.swa_kv_pool.kv_cache_total_dim


def flash_mla():
    """The module that DeepSeek-V4's backend imports FlashMLA's functions from, in each call.

    Reason: they were in a package of their own, and later among SGLang's kernels.
    Versions: 0.5.17 at least. Goes when the oldest one supported has the second module.
    """
    try:
        return importlib.import_module("sglang.kernels.ops.attention.flash_mla_interface")
    except ModuleNotFoundError:
        return importlib.import_module("sgl_kernel.flash_mla")


def register_model_support() -> None:
    """Enter ETAP where SGLang's MLA models look; here and not in `register`, because it imports those models.

    They route short prompts to the latent rows (without: long contexts are made keys of), other prefill as with the
    backend that runs it, FlashAttention 3's or FlashInfer's, sparse
    ones as with SGLang's sparse backend (without: Triton's routes), hand over the latent and the rope part of queries
    and keys apart (without: concatenated, a copy of each for every layer), and under decode context parallelism take
    our log-sum-exp as a natural one (without: base 2). DFLASH makes no mask for our backends (without: one of a chain,
    which nothing reads, in every step, as large as all contexts times the drafts).
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative import dflash_utils

    def route(attn, forward_batch):
        if getattr(attn, "use_dsa", False):
            return handler.handle_attention_dsa(attn, forward_batch)
        if prompt_runs(forward_batch, attn.num_local_heads):
            return AttnForwardMethod.MLA
        if get_parallel().attn_dcp_size > 1:  # FlashInfer copies only what it reads of the other ranks'
            return handler.handle_attention_flashmla(attn, forward_batch)
        return handler.handle_attention_fa3(attn, forward_batch)

    if NAME in handler.AttentionBackendRegistry._handlers:
        return
    # It is public since 0.5.18.
    maskless = "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS"
    setattr(dflash_utils, maskless, getattr(dflash_utils, maskless) | {"ETAPBackend", "ETAPSparseBackend"})
    public = "is_mla_dcp_lse_base_on_e"
    function = public if hasattr(forward_mla, public) else f"_{public}"
    known = getattr(forward_mla, function)
    for name in NAMES:
        handler.AttentionBackendRegistry.register(name, route)
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
    setattr(forward_mla, function, lambda attention_backend: attention_backend in NAMES or known(attention_backend))


def register_scaled_queries() -> None:
    """Change what `register_model_support` entered for a model that scales its queries by position.

    SGLang forgets the scaling where it hands over a query's two parts, and where it makes keys of the latent rows:
    neither is done then.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    parts = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    parts[:] = [name for name in parts if name not in NAMES]
    for name in NAMES:
        handler.AttentionBackendRegistry.register(name, lambda attn, forward_batch: AttnForwardMethod.MLA)
