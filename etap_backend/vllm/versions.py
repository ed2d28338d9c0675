"""What ETAP uses of vLLM; and differences between versions, each with its reason, the versions and when it can go."""

import copyreg
import logging
from enum import Enum

from etap_backend.engine_contract import Engine, Use, release

NAME = "ETAP"
ENGINE = Engine("vLLM", "vllm", NAME, oldest="0.26.0", newest="0.33.0")

_MLA = "vllm.model_executor.layers.attention.mla_attention"
USES = (
    Use("vllm.config:get_current_vllm_config", positional=0),
    Use("vllm.config:get_current_vllm_config_or_none", positional=0),
    Use(
        "vllm.config:VllmConfig",
        has="additional_config cache_config model_config parallel_config scheduler_config speculative_config",
    ),
    Use("vllm.config:CacheConfig", has="block_size user_specified_block_size"),
    Use("vllm.config:ModelConfig", has="dtype hf_text_config max_model_len"),
    Use("vllm.config:ParallelConfig", has="decode_context_parallel_size use_ubatching"),
    Use("vllm.config:SchedulerConfig", has="max_num_seqs"),
    Use("vllm.config:SpeculativeConfig", has="uses_dynamic_speculative_decoding"),
    Use("vllm.config.cache:CacheDType"),
    Use("vllm.distributed:get_dcp_group", positional=0),
    Use("vllm.envs", has="VLLM_BATCH_INVARIANT"),
    Use("vllm.logger:init_logger", positional=1),
    Use(f"{_MLA}:MLACommonBackend", has="validate_configuration"),
    Use(f"{_MLA}:MLACommonDecodeMetadata", keywords="block_table seq_lens dcp_tot_seq_lens"),
    Use(
        f"{_MLA}:MLACommonImpl",
        has="supports_quant_query_input kv_lora_rank scale "
        "can_return_lse_for_decode lse_base_on_e supports_dcp supports_pcp",
    ),
    Use(
        f"{_MLA}:MLACommonImpl.__init__",
        keywords="num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name **",
    ),
    Use(f"{_MLA}:MLACommonMetadata", has="decode"),
    Use(
        f"{_MLA}:MLACommonMetadataBuilder",
        has="num_heads dcp_world_size dcp_local_block_size page_size model_config "
        "_build_decode _cudagraph_support query_len_support reorder_batch_threshold",
    ),
    Use(f"{_MLA}:MLACommonMetadataBuilder.__init__", positional=6, keywords="supports_dcp_with_varlen"),
    Use(f"{_MLA}:MLACommonMetadataBuilder.build", positional=4),
    Use(f"{_MLA}:QueryLenSupport", has="VARLEN"),
    Use("vllm.platforms.interface:DeviceCapability", has="major minor"),
    Use("vllm.utils.platform_utils:num_compute_units", positional=1),
    Use("vllm.v1.attention.backend:AttentionCGSupport", has="UNIFORM_BATCH"),
    Use("vllm.v1.attention.backend:AttentionLayer"),
    Use("vllm.v1.attention.backend:AttentionMetadataBuilder.__init__", positional=5),
    Use("vllm.v1.attention.backend:AttentionType", has="DECODER"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata", has="max_query_len query_start_loc_cpu"),
    Use("vllm.v1.attention.backend:MLAAttentionImpl"),
    Use("vllm.v1.attention.backends.utils:get_dcp_local_seq_lens", positional=4),
    Use("vllm.v1.kv_cache_interface:AttentionSpec"),
    Use("vllm.v1.worker.workspace:WorkspaceManager.get_simultaneous", positional=2),
    Use("vllm.v1.worker.workspace:current_workspace_manager", positional=0),
)
"""What the backend needs when it is selected; the registry, which registration needs, is there then."""

_SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
_BACKENDS = "vllm.v1.attention.backends.mla"
SPARSE_USES = (
    Use("vllm.config:VllmConfig", has="attention_config"),
    Use(
        f"{_SPARSE}:SparseMLACommonImpl",
        has="supports_quant_query_input kv_lora_rank qk_rope_head_dim scale dcp_rank dcp_world_size "
        "can_return_lse_for_decode lse_base_on_e supports_dcp supports_pcp",
    ),
    Use(
        f"{_SPARSE}:SparseMLACommonImpl.__init__",
        keywords="num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name **",
    ),
    Use(
        f"{_BACKENDS}.flashattn_mla_sparse:FlashAttnMLASparseMetadata",
        has="block_table req_id_per_token block_size cp_kv_cache_interleave_size",
    ),
    Use(
        f"{_BACKENDS}.flashattn_mla_sparse:FlashAttnMLASparseMetadataBuilder._init_reorder_batch_threshold",
        positional=4,
    ),
    Use(f"{_BACKENDS}.flashmla_sparse:FlashMLASparseBackend", has="validate_configuration"),
    Use(
        f"{_BACKENDS}.sparse_utils:triton_filter_and_convert_dcp_index",
        positional=3,
        keywords="dcp_size dcp_rank cp_kv_cache_interleave_size BLOCK_SIZE NUM_TOPK_TOKENS compact_valid_to_front",
    ),
)
"""What the backend of models with sparse attention needs besides."""

HOOKS_OF_SOME = (
    *("supports_device_cpu_query_lens_mismatch", "reserve_workspace", "update_draft_decode_metadata"),
    "prepare_for_batch",
    "get_kv_cache_stride_order",  # until layouts have names
)
"""Methods of ours that only some of the versions ask for."""

_BACKEND_PATH = "etap_backend.vllm.selected.Backend"

# vLLM gives its handler and level to loggers below "vllm" only.
_logger = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Register ETAP. Where vLLM's registry is another one this only warns: a start with another backend goes on."""
    try:
        backend_member()
    except Exception as error:  # nothing is known of that registry
        reason = ENGINE.why_too_old() or ENGINE.why_lacking([f"{type(error).__name__}: {error}"])
        _logger.warning("%s; other attention backends are not affected", reason)


def backend_member() -> Enum:
    """The member ETAP of vLLM's enumeration of attention backends, added when it is not there yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if NAME not in AttentionBackendEnum.__members__:
        _add_member(AttentionBackendEnum, _BACKEND_PATH)
        _make_picklable(AttentionBackendEnum)
        _logger.info("Attention backend %s registered", NAME)
    return AttentionBackendEnum[NAME]


def _add_member(enum: type[Enum], path: str) -> None:
    """Add the member ETAP with the class path as its value.

    Reason: `register_backend` takes the name of a new backend since vLLM 0.32 (vllm#41091); before, it only replaces
    existing members. The steps are those that 0.32 takes.
    Versions: below 0.32. Goes when 0.32 is the oldest one supported.
    """
    if hasattr(enum, "register"):
        from vllm.v1.attention.backends.registry import register_backend

        register_backend(NAME, path)
        return
    member = object.__new__(enum)
    member._name_ = NAME
    member._value_ = path
    setattr(enum, NAME, member)
    enum._member_map_[NAME] = member
    enum._value2member_map_[path] = member
    enum._member_names_.append(NAME)


def _make_picklable(enum: type[Enum]) -> None:
    """Let a spawned process unpickle the member ETAP.

    Reason: the engine core and the workers get their configuration by pickle before they load any plugin. An
    enumeration member pickles as its class and value, and there the value is not known yet: "... is not a valid
    AttentionBackendEnum". A reducer that names `rebuild_member` makes unpickling import this module and register.
    Versions: all. Goes when vLLM loads plugins first, or gives added members a reducer of its own.
    """
    # Another plugin may cure its own member in the same way.
    previous = copyreg.dispatch_table.get(enum)

    def reduce(member: Enum) -> "str | tuple":
        if member.name == NAME:
            return rebuild_member, ()
        return previous(member) if previous else member.__reduce_ex__(2)

    copyreg.pickle(enum, reduce)


def rebuild_member() -> Enum:
    """What a pickled member ETAP becomes: the member of the process that unpickles it."""
    return backend_member()


def why_no_indexer() -> str | None:
    """Say why vLLM cannot choose the tokens of sparse attention, or None; without it a model fails as it is loaded."""
    try:
        from vllm.utils.import_utils import has_deep_gemm
    except ImportError:  # a vLLM of which that is not known
        return None
    return None if has_deep_gemm() else "DeepGEMM, which vLLM's indexer needs, is not installed"


def reserves_in_profile_run(vllm_config) -> bool:
    """Whether vLLM calls `reserve_workspace` of the implementation while it measures the memory that a model needs.

    Reason: the hook exists since 0.33. Before, an implementation claims its workspace when it is constructed, which is
    ahead of the measurement too. Where the hook exists, construction is too early: there the manager allocates from a
    pool of its own, and not inside that of the weights. Kimi-K3 and Kimi-Linear have a layer of their own there, which
    calls nothing of an implementation while memory is measured: early is better than unmeasured.
    Versions: below 0.33, and of those models all. Goes when 0.33 is the oldest one supported and their layer calls it.
    """
    from vllm.v1.attention.backend import MLAAttentionImpl

    layer_of_its_own = vllm_config.model_config.hf_text_config.model_type == "kimi_linear"
    return hasattr(MLAAttentionImpl, "reserve_workspace") and not layer_of_its_own


def max_decode_query_len(vllm_config) -> int:
    """Query tokens of a request that is decoded: 1, more with speculative decoding.

    Reason: this rule is a function since 0.31. Before, it is inside `AttentionMetadataBuilder`, which is constructed
    when memory has been measured.
    Versions: below 0.31. Goes when 0.31 is the oldest one supported.
    """
    from vllm.v1.attention import backend

    if hasattr(backend, "max_decode_query_len"):
        return backend.max_decode_query_len(vllm_config)
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return 1
    return 1 + (2 if speculative.parallel_drafting else 1) * speculative.num_speculative_tokens


def pads_tokens_of_no_request(vllm_config) -> bool:
    """Whether a step of prompts, however short, may come with tokens that belong to none of its requests.

    Reason: beside breakable CUDA graphs the V2 model runner pads the tokens of a step, and its requests too only where
    it decodes. In a step of short prompts of one length those tokens are none's, but counted as decodes'.
    Versions: 0.26; 0.33 pads for full graphs alone. Goes when 0.33 is the oldest one supported.
    """
    import vllm.envs as envs

    padded = release(ENGINE.version) < (0, 33, 0)
    return padded and envs.VLLM_USE_BREAKABLE_CUDAGRAPH and vllm_config.use_v2_model_runner
