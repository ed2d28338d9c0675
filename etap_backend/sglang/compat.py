"""What differs between SGLang versions, each with its reason and when it can go; and the lists of its models."""

from etap_backend import plugins

NAME = "etap"
SUPPORTED_VERSIONS = plugins.Versions("0.5.17", "0.5.24")

PAGES_PER_PROGRAM = 64  # of a block table, filled by one Triton program


def why_unsupported_version() -> str | None:
    """Say why the installed SGLang cannot run ETAP, or None when it can."""
    return plugins.why_unsupported_version("SGLang", "sglang", NAME, SUPPORTED_VERSIONS)


def uses_mla(view) -> bool:
    """Whether SGLang runs this model's attention as MLA.

    Reason: a method of the arguments became a function when they were taken apart.
    Versions: below 0.5.19. Goes when 0.5.19 is the oldest one supported.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import use_mla_backend
    except ImportError:
        return view.use_mla_backend()
    return use_mla_backend(view)


def write_location(forward_batch):
    """Where the pool shall write this batch's rows.

    Reason: the pool took the bare slots, and later an object made from the batch.
    Versions: below 0.5.22. Goes when 0.5.22 is the oldest one supported.
    """
    from sglang.srt.mem_cache import memory_pool

    make = getattr(getattr(memory_pool, "KVWriteLoc", None), "for_batch", None)
    return make(forward_batch) if make else forward_batch.out_cache_loc


def fill_rank_share(backend, req_pool_indices, lengths, table) -> None:
    """Turn lengths and block table into those of this rank under decode context parallelism.

    Token t of a request lies on rank t % ranks, there in the row of its slot // ranks.

    Reason: the kernel that fills the table got a table of the unified memory pool, which ETAP does not serve.
    Versions: below 0.5.20. Goes when 0.5.20 is the oldest one supported.
    """
    from sglang.kernels.ops.attention.dcp_kernels import create_mla_kv_page_table_for_dcp as fill
    from sglang.srt.layers.dcp.layout import get_dcp_lens
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    lengths.copy_(get_dcp_lens(lengths, parallel.attn_dcp_size, parallel.attn_dcp_rank))
    no_unified_pool = {"v2p_ptr": None, "HAS_V2P": False} if "HAS_V2P" in fill.arg_names else {}
    fill[(len(lengths), -(-table.shape[1] // PAGES_PER_PROGRAM))](
        backend.req_to_token,
        req_pool_indices,
        lengths,
        table,
        req_to_token_stride=backend.req_to_token.stride(0),
        block_table_stride=table.stride(0),
        PHYSICAL_PAGE_SIZE=backend.page_size,
        DCP_SIZE=parallel.attn_dcp_size,
        DCP_RANK=parallel.attn_dcp_rank,
        PAGES_PER_BLOCK=PAGES_PER_PROGRAM,
        **no_unified_pool,
    )


def register_model_support() -> None:
    """Enter ETAP where SGLang's MLA models look; here and not in `register`, because it imports those models.

    They route prefill as with FlashMLA (without: Triton's routes), hand over the latent and the rope part of queries
    and keys apart (without: concatenated, a copy of each for every layer), and under decode context parallelism take
    our log-sum-exp as a natural one (without: base 2).
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    handler.AttentionBackendRegistry.register(NAME, handler.handle_attention_flashmla)
    if NAME in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        return
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
    # It is public since 0.5.18.
    public = "is_mla_dcp_lse_base_on_e"
    function = public if hasattr(forward_mla, public) else f"_{public}"
    known = getattr(forward_mla, function)
    setattr(forward_mla, function, lambda attention_backend: attention_backend == NAME or known(attention_backend))
