"""What ETAP uses of SGLang; what differs between versions, with the reason and when it can go; its models' lists."""

from etap_backend.engine_contract import Engine, Use
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
DRAFT_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"

REGISTRATION_USES = (
    Use(PAGE_HOOK, positional=1),
    Use(DRAFT_HOOK, positional=1, keywords="backend_name backend_map error_template **"),
    Use("sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS"),
    Use("sglang.srt.layers.attention.attention_registry:register_attention_backend", positional=1),
    Use("sglang.srt.plugins.hook_registry:HookRegistry.register", positional=3),
    Use("sglang.srt.plugins.hook_registry:HookType", has="AFTER BEFORE"),
    Use("sglang.srt.server_args", has="add_attention_backend_choices add_chunked_prefix_cache_attention_backend"),
    Use(
        "sglang.srt.server_args:ServerArgs",
        has="attention_backend attn_cp_size dcp_size decode_attention_backend dtype enable_prefill_cp kv_cache_dtype "
        "page_size prefill_attention_backend speculative_algorithm speculative_draft_attention_backend "
        "speculative_eagle_topk",
    ),
)
"""Without these the names stay unknown."""

_ATTENTION = "sglang.srt.layers.attention"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_PREFILL = f"{_ATTENTION}.flashinfer_mla_backend:FlashInferMLAAttnBackend"
_MODELS = "sglang.srt.models.deepseek_common"
_SPARSE = f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend"
_POOL = "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool"
USES = (
    Use(
        "sglang.srt.configs.model_config:ModelConfig",
        has="attention_arch hf_config hf_text_config kv_lora_rank num_attention_heads qk_rope_head_dim",
    ),
    Use("sglang.srt.configs.model_config:AttentionArch", has="MLA"),
    Use("sglang.srt.configs.model_config:is_deepseek_dsa", positional=1),
    Use(
        "sglang.srt.model_executor.model_runner:ModelRunner",
        has="device dtype kv_cache_dtype model_config page_size use_mla_backend",
    ),
    Use("sglang.kernels.ops.attention.dcp_kernels:create_mla_kv_page_table_for_dcp"),
    Use(
        f"{_ATTENTION}.flashmla_backend:FlashMLABackend",
        has="num_draft_tokens kv_indptr device req_to_token page_size token_to_kv_pool is_draft_runner skip_prefill "
        "max_context_len forward_metadata",
    ),
    Use(f"{_ATTENTION}.flashmla_backend:FlashMLABackend.__init__", positional=5),
    Use(f"{_ATTENTION}.flashmla_backend:FlashMLAMultiStepDraftBackend"),
    Use(f"{_ATTENTION}.flashmla_backend:create_flashmla_kv_indices_triton", positional=7, keywords="PAGED_SIZE"),
    Use(f"{_ATTENTION}.flashmla_backend:get_num_kv_index_blocks_flashmla", positional=2),
    Use(
        f"{_ATTENTION}.flashmla_backend:maybe_create_verify_mask",
        keywords="is_draft_runner skip_prefill max_bs max_context_len num_draft_tokens device is_read",
    ),
    Use(_PREFILL),
    Use(f"{_PREFILL}.forward_extend", positional=9),
    Use(f"{_PREFILL}.init_forward_metadata", positional=2),
    Use(f"{_PREFILL}.init_forward_metadata_out_graph", positional=3),
    Use("sglang.srt.layers.dcp.layout:get_dcp_lens", positional=3),
    Use(
        "sglang.srt.layers.radix_attention:RadixAttention",
        has="head_dim layer_id logit_cap scaling tp_q_head_num v_head_dim",
    ),
    Use("sglang.srt.mem_cache.memory_pool"),
    Use(f"{_POOL}.get_key_buffer", positional=2),
    Use(f"{_POOL}.set_kv_buffer", positional=5),
    Use(f"{_POOL}.set_mla_kv_buffer", positional=5),
    Use(
        f"{_BATCH}:ForwardBatch",
        has="batch_size extend_prefix_lens_cpu extend_seq_lens extend_seq_lens_cpu forward_mode out_cache_loc "
        "req_pool_indices seq_lens",
    ),
    Use(
        f"{_BATCH}:ForwardMode",
        has="EXTEND MIXED is_decode is_decode_or_idle is_draft_extend_v2 is_idle is_target_verify",
    ),
    Use(f"{_MODELS}.attention_backend_handler:AttentionBackendRegistry.register", positional=2),
    Use(f"{_MODELS}.attention_backend_handler", has="handle_attention_flashmla"),
    Use(f"{_MODELS}.attention_forward_methods.forward_methods:AttnForwardMethod", has="MLA"),
    Use(f"{_MODELS}.attention_forward_methods.forward_mla", has="is_mla_dcp_lse_base_on_e|_is_mla_dcp_lse_base_on_e"),
    Use(f"{_MODELS}.utils", has="FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"),
    Use("sglang.srt.runtime_context:ParallelContext", has="attn_dcp_rank attn_dcp_size attn_tp_size"),
    Use("sglang.srt.runtime_context:get_parallel", positional=0),
    Use("sglang.srt.runtime_context:get_spec", positional=0),
    Use(
        "sglang.srt.speculative.draft_utils:DraftBackendFactory",
        has="_create_flashmla_decode_backend draft_model_runner speculative_num_steps topk",
    ),
)
"""What the backend needs when it is selected."""

SPARSE_HOOK_USE = Use(SPARSE_HOOK, positional=1)
SPARSE_USES = (
    SPARSE_HOOK_USE,
    Use(
        "sglang.srt.server_args:ServerArgs",
        has="disable_chunked_prefix_cache dsa_decode_backend dsa_prefill_backend enable_hisparse",
    ),
    Use(
        _SPARSE,
        has="dsa_decode_impl dsa_kv_cache_store_fp8 dsa_prefill_impl enable_auto_select_prefill_impl num_q_heads",
    ),
    Use(
        f"{_SPARSE}.__init__",
        positional=2,
        keywords="skip_prefill speculative_step_id topk speculative_num_steps seed_dsa_topk_from_draft_extend",
    ),
    Use(
        f"{_SPARSE}._forward_fa3",
        positional=1,
        keywords="q_rope kv_cache v_head_dim q_nope page_table cache_seqlens cu_seqlens_q cu_seqlens_k max_seqlen_q "
        "sm_scale logit_cap page_size",
    ),
    Use(f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnMultiStepBackend", has="attn_backends"),
    Use(f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnMultiStepBackend.__init__", positional=5),
    Use("sglang.srt.runtime_context:get_context", positional=0),
    Use("sglang.srt.runtime_context:RuntimeContext.override", positional=2, keywords="**"),
    Use("sglang.srt.utils:get_device_core_count", positional=0),
    Use(f"{_MODELS}.attention_backend_handler", has="handle_attention_dsa"),
    Use("sglang.srt.speculative.draft_utils:DraftBackendFactory", has="seed_dsa_topk_from_draft_extend"),
)
"""What the backend needs besides for a model with sparse attention."""

TOKENS_PER_PROGRAM = 4096
"""Whose pages one Triton program enters in the block table, as in SGLang's kernels; a page has no more."""


def is_mla(model_config) -> bool:
    """Whether SGLang runs this model's attention as MLA."""
    from sglang.srt.configs.model_config import AttentionArch

    return model_config.attention_arch == AttentionArch.MLA


def is_sparse(model_config) -> bool:
    """Whether SGLang builds this model's attention layers as sparse ones."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return is_deepseek_dsa(model_config.hf_config)


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


def register_model_support() -> None:
    """Enter ETAP where SGLang's MLA models look; here and not in `register`, because it imports those models.

    They route short prompts to the latent rows (without: long contexts are made keys of), other prefill as with
    FlashMLA, sparse ones as with SGLang's sparse backend (without: Triton's routes), hand over the latent and the rope
    part of queries and keys apart (without: concatenated, a copy of each for every layer), and under decode context
    parallelism take our log-sum-exp as a natural one (without: base 2).
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def route(attn, forward_batch):
        if getattr(attn, "use_dsa", False):
            return handler.handle_attention_dsa(attn, forward_batch)
        if prompt_runs(forward_batch, attn.num_local_heads):
            return AttnForwardMethod.MLA
        return handler.handle_attention_flashmla(attn, forward_batch)

    if NAME in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        return
    for name in NAMES:
        handler.AttentionBackendRegistry.register(name, route)
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
    # It is public since 0.5.18.
    public = "is_mla_dcp_lse_base_on_e"
    function = public if hasattr(forward_mla, public) else f"_{public}"
    known = getattr(forward_mla, function)
    setattr(forward_mla, function, lambda attention_backend: attention_backend in NAMES or known(attention_backend))
