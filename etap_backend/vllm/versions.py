"""Supported versions of vLLM, and what differs between them: each difference with its reason, versions and end."""

from etap_backend.engine_contract import Engine

NAME = "ETAP"
ENGINE = Engine("vLLM", "vllm", NAME, oldest="0.32.0", newest="0.33.0")

NEW_HOOKS = ("reserve_workspace", "_forward_mqa_kernel")
"""Overridden methods that vLLM calls since 0.33."""


def why_no_indexer() -> str | None:
    """Say why vLLM cannot choose the tokens of sparse attention, or None. Without it, loading such a model fails."""
    from vllm.utils.import_utils import has_deep_gemm

    return None if has_deep_gemm() else "DeepGEMM, which vLLM's indexer needs, is not installed"


def reserves_in_profile_run(vllm_config) -> bool:
    """Whether vLLM calls the implementation's `reserve_workspace` while it measures the memory that a model needs.

    Reason: without the hook, an implementation has to claim its workspace when it is constructed; with the hook that
    is too early, in the memory pool of the weights. The layer of Kimi-K3 and Kimi-Linear never calls it; there, too
    early is better than unmeasured.
    Versions: 0.32; for Kimi-K3 and Kimi-Linear all. Goes when 0.33 is the oldest supported and their layer calls it.
    """
    from vllm.v1.attention.backend import MLAAttentionImpl

    return hasattr(MLAAttentionImpl, "reserve_workspace") and not _is_kimi_linear(vllm_config)


def _is_kimi_linear(vllm_config) -> bool:
    """Whether the model is Kimi-K3 or Kimi-Linear, whose MLA layer is not the one that other models share."""
    return vllm_config.model_config.hf_text_config.model_type == "kimi_linear"


def why_no_fp8_cache(vllm_config) -> str | None:
    """Say why vLLM cannot prefill this model over an FP8 cache on Hopper, whatever decodes, or None.

    Reason: the layer of Kimi-K3 and Kimi-Linear needs FP8 queries for it, which vLLM has on Blackwell only. Otherwise
    the first long prompt ends the server.
    Versions: all. Goes when that layer accepts other queries.
    """
    if not _is_kimi_linear(vllm_config):
        return None
    return "an FP8 KV cache is not supported with this model: vLLM prefills it with FP8 queries, on Blackwell only"


def why_no_hisparse(vllm_config) -> str | None:
    """Say why ETAP cannot read a sparse model's cache in host memory (HiSparse), or None.

    Reason: ETAP runs as the kernel of vLLM's own `forward_mqa`, which brings the rows to the GPU.
    Versions: 0.32 has no such method. Goes when 0.33 is the oldest supported.
    """
    from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl

    if not uses_hisparse(vllm_config) or hasattr(SparseMLACommonImpl, "_forward_mqa_kernel"):
        return None
    return "a KV cache in host memory (HiSparse) needs vLLM 0.33"


def uses_hisparse(vllm_config) -> bool:
    """Whether vLLM keeps a sparse model's cache in host memory, and only the listed rows on the GPU."""
    return vllm_config.attention_config.hisparse_config is not None


def writes_rows_first(vllm_config, layer_names: list[str]) -> bool:
    """Whether the kernel right before a decode call writes no row that the call reads, except each request's new ones.

    Reason: vLLM's MLA layer writes a step's rows before it projects the queries into the latent space. The layer of
    Kimi-K3 and Kimi-Linear writes them last, and a request may hit prefix-cache blocks that another one of the step
    fills.
    Versions: all. Goes when that layer writes first, or says that it does not.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    if all(isinstance(layers.get(name), MLAAttention) for name in layer_names):
        return True
    return not vllm_config.cache_config.enable_prefix_caching
