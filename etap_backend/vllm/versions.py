"""Which versions of vLLM run ETAP, and what differs between them: the reason, the versions and when it can go."""

import importlib.util

from etap_backend.engine_contract import Engine, release

NAME = "ETAP"
ENGINE = Engine("vLLM", "vllm", NAME, oldest="0.26.0", newest="0.33.0")

HOOKS_OF_SOME = (
    *("reserve_workspace", "update_draft_decode_metadata", "prepare_for_batch"),
    *("supports_non_causal_multi_token_decode", "_forward_mqa_kernel"),
    "get_kv_cache_stride_order",  # until layouts have names
)
"""Methods of ours that only some of the versions ask for."""


def why_no_indexer() -> str | None:
    """Say why vLLM cannot choose the tokens of sparse attention, or None; without it a model fails as it is loaded."""
    try:
        from vllm.utils.import_utils import has_deep_gemm
    except ImportError:  # a vLLM of which that is not known
        return None
    return None if has_deep_gemm() else "DeepGEMM, which vLLM's indexer needs, is not installed"


def reserves_in_profile_run(vllm_config) -> bool:
    """Whether vLLM calls `reserve_workspace` of the implementation while it measures the memory that a model needs.

    Reason: the hook exists since 0.33. Before, an implementation claims its workspace when it is constructed; where the
    hook exists that is too early, in the pool of the weights. The layer of their own that Kimi-K3 and Kimi-Linear have
    calls nothing of an implementation while memory is measured: early is better than unmeasured.
    Versions: below 0.33, and of those models all. Goes when 0.33 is the oldest one supported and their layer calls it.
    """
    from vllm.v1.attention.backend import MLAAttentionImpl

    return hasattr(MLAAttentionImpl, "reserve_workspace") and not _has_layer_of_its_own(vllm_config)


def _has_layer_of_its_own(vllm_config) -> bool:
    """Whether the model's MLA layer is not vLLM's for all models, as Kimi-K3's and Kimi-Linear's are since 0.33."""
    known = importlib.util.find_spec("vllm.models.kimi_k3") is not None
    return known and vllm_config.model_config.hf_text_config.model_type == "kimi_linear"


def why_no_fp8_cache(vllm_config) -> str | None:
    """Say why vLLM does not prefill this model over an FP8 cache on Hopper, whatever decodes, or None.

    Reason: the layer of their own that Kimi-K3 and Kimi-Linear have wants queries in FP8 for that, which vLLM has on
    Blackwell only; it says so at the first longer prompt, which ends the server.
    Versions: 0.33. Goes when that layer takes other queries.
    """
    if not _has_layer_of_its_own(vllm_config):
        return None
    return "an FP8 KV cache is not supported with this model: vLLM prefills it with queries that it has not on Hopper"


def writes_rows_first(vllm_config, layer_names: list[str]) -> bool:
    """Whether all rows that a call may read are written before the kernel ahead of it, but each request's new ones.

    Reason: vLLM's MLA layer writes a step's rows, and brings its queries into the latent space then. The layer of
    Kimi-K3 and Kimi-Linear writes them last, and a request may hit blocks of the prefix cache that another one of its
    step fills.
    Versions: 0.33. Goes when that layer writes first, or tells that it does not.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    if all(isinstance(layers.get(name), MLAAttention) for name in layer_names):
        return True
    return not vllm_config.cache_config.enable_prefix_caching


def max_decode_query_len(vllm_config) -> int:
    """Query tokens of a request that is decoded: 1, more with speculative decoding.

    Reason: this rule is a function since 0.31; before, it is inside a builder of metadata, which is made too late.
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
