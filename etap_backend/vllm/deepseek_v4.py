"""DeepSeek-V4 and V4.1: vLLM's own attention layer, with ETAP's kernels where it calls FlashMLA's.

ETAP's layer is derived from vLLM's, per model. Everything around the attention itself stays vLLM's, and so do the
caches, their writing, the lists of rows, and the gathering of a prompt's rows in bfloat16.
"""

import functools
import sys
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units

from etap_backend import engine_contract, sparse_mla_decode, sparse_workspace_floats
from etap_backend.limits import SPARSE_FP8, why_unsupported_sparse
from etap_backend.vllm import top_k
from etap_backend.vllm.log import logger
from etap_backend.vllm.metadata import claim_workspace
from etap_backend.vllm.policy import why_not_sparse
from etap_backend.vllm.versions import ENGINE, NAME, uses_hisparse

QUERY_HEADS = (8, 16, 32, 64, 128)
"""Numbers of heads that vLLM's operator writes queries for; it fills those that a rank lacks with zeros."""
FLASH_MLA_PREFILL = "flash_mla_sparse_fwd"
_in_prefill = ContextVar("etap_in_prefill", default=False)


class ETAPLayer:
    """ETAP's overrides of vLLM's layer; stands before it among the bases of a class."""

    _etap_layer: ClassVar[bool] = True  # v4_selection.LAYER_MARK

    # Attributes of vLLM's layer, the next base.
    padded_heads: int
    swa_cache_layer: Any
    scale: float
    attn_sink: Tensor
    compress_ratio: int
    topk_indices_buffer: Tensor
    indexer: Any

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Heads of queries and outputs: a rank's own, rounded up to one of QUERY_HEADS."""
        if num_heads > max(QUERY_HEADS):
            raise ValueError(f"{NAME}: num_heads: wanted at most {max(QUERY_HEADS)} on a rank, got {num_heads}")
        return min(heads for heads in QUERY_HEADS if heads >= num_heads)

    def __init__(self, *arguments, **keywords) -> None:
        """Takes what vLLM's layer takes."""
        super().__init__(*arguments, **keywords)
        self._etap_num_sms = num_compute_units()
        self._etap_workspace_floats = sparse_workspace_floats(self.padded_heads, self._etap_num_sms)
        logger.info_once(
            f"{NAME} decodes: DeepSeek-V4's sparse attention, {self.padded_heads} query heads, KV cache {SPARSE_FP8}"
            f"{engine_contract.no_shared_prefix_text()}"
        )
        if self.indexer is not None:
            top_k.install(get_current_vllm_config())

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attention of a step, written to output: its prompts, then its decodes.

        Args:
            q: bfloat16 [tokens, heads, 512].
            kv: as vLLM's layer takes it; the keys are already in the cache.
            positions: int64 [tokens].
            output: bfloat16 [tokens, heads, 512]. Rows that the step's metadata does not describe stay as they are.
        """
        if get_forward_context().attn_metadata is None:  # vLLM measures the memory that the model needs
            claim_workspace(self._etap_workspace_floats)
            q.new_empty(self._etap_workspace_floats, dtype=torch.float32)  # a prompt's, in addition to vLLM's
        super().forward_mqa(q, kv, positions, output)  # pyright: ignore[reportAttributeAccessIssue]

    @engine_contract.override
    def _forward_prefill(self, **arguments) -> None:
        token = _in_prefill.set(True)
        try:
            super()._forward_prefill(**arguments)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            _in_prefill.reset(token)

    @engine_contract.override
    def _forward_decode(
        self, q: Tensor, kv_cache: Tensor | None, swa_metadata: Any, attn_metadata: Any, swa_only: bool, output: Tensor
    ) -> None:
        compressed = {}  # entries that a token attends to in addition to its window, in a second cache
        if not swa_only and self.compress_ratio == 128:
            compressed = {  # all entries, as rows of the cache
                "extra_kv_cache": kv_cache,
                "extra_indices": attn_metadata.c128a_global_decode_topk_indices[:, 0],
                "extra_valid_counts": attn_metadata.c128a_decode_topk_lens,
            }
        elif not swa_only:
            positions = self.topk_indices_buffer[: len(q)]
            compressed = {  # the entries that the indexer chose, as positions
                "extra_kv_cache": kv_cache,
                "extra_indices": positions,
                "extra_block_table": attn_metadata.block_table,
                "request_ids": swa_metadata.token_to_req_indices[: len(q)],
                "extra_valid_counts": _valid_counts(swa_metadata, positions),
            }
        sparse_mla_decode(
            q,
            self.swa_cache_layer.kv_cache,
            swa_metadata.decode_swa_indices[:, 0],
            softmax_scale=self.scale,
            valid_counts=swa_metadata.decode_swa_lens,
            **compressed,
            sinks=self.attn_sink,
            workspace=claim_workspace(self._etap_workspace_floats),
            num_sms=self._etap_num_sms,
            out=output,
        )


def _valid_counts(swa_metadata: Any, positions: Tensor) -> Tensor:
    """Valid entries of each token's list, int32 [tokens]: 0 for rows that pad the step, whose lists are old.

    All layers of a step have the same counts, so they are cached in its metadata. A CUDA graph has to compute what it
    reads: while one is captured, nothing cached before counts.
    """
    cached = vars(swa_metadata).setdefault("etap_valid_counts", {})
    tokens, top_k = positions.shape
    key = top_k, positions.is_cuda and torch.cuda.is_current_stream_capturing()
    if key not in cached:
        cached[key] = swa_metadata.is_valid_token[:tokens].to(torch.int32).mul_(top_k)
    return cached[key]


def _attend_to_gathered(
    *, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, attn_sink: Tensor, topk_length: Tensor, out: Tensor
) -> None:
    """FlashMLA's sparse prefill as vLLM calls it: prompts' tokens, over rows that vLLM gathered in bfloat16.

    Its workspace is allocated here: vLLM's only one holds the gathered rows.
    """
    rows = kv.view(1, -1, kv.shape[-1])
    sparse_mla_decode(
        q, rows, indices[:, 0], softmax_scale=sm_scale, valid_counts=topk_length, sinks=attn_sink, out=out
    )


def _dispatch_prefill(module: ModuleType) -> None:
    """Let a layer's module call ETAP's kernel in the prefill of ETAP's layers, and FlashMLA's in the others.

    Reason: vLLM's `_forward_prefill` gathers a prompt's rows and calls FlashMLA by its name in the module; no
    method wraps the call.
    Versions: all. Goes when vLLM's layer has one.
    """
    flash_mla = getattr(module, FLASH_MLA_PREFILL)

    @functools.wraps(flash_mla)
    def attend(*arguments, **keywords):
        kernel = _attend_to_gathered if _in_prefill.get() else flash_mla
        return kernel(*arguments, **keywords)

    setattr(module, FLASH_MLA_PREFILL, attend)


def derived(base: type) -> type:
    """ETAP's layer, derived from vLLM's."""
    return type(f"ETAP{base.__name__}", (ETAPLayer, base), {})


@functools.cache
def _layer_class(base: type) -> type:
    _dispatch_prefill(sys.modules[base.__module__])
    return derived(base)


def lacking(base: type) -> list[str]:
    """The names that ETAP's layer needs and vLLM's layer lacks."""
    prefill = getattr(base, "_forward_prefill", None)
    if prefill is None or FLASH_MLA_PREFILL not in prefill.__code__.co_names:
        return [f"{base.__module__}:{base.__qualname__}._forward_prefill calls no {FLASH_MLA_PREFILL}"]
    return engine_contract.lacking(lambda: [derived(base)])


def why_not(base: type, config: VllmConfig) -> str | None:
    """Say why ETAP cannot run a model's layers under a configuration, or None when it can."""
    if reason := ENGINE.why_too_old() or ENGINE.why_lacking(lacking(base)) or engine_contract.why_no_library():
        return reason
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (ranks := getattr(config.parallel_config, name)) > 1:
            return f"{name} {ranks} is not supported: wanted 1"
    # All name the one format that vLLM has for these layers.
    if (cache := config.cache_config.cache_dtype) not in ("auto", "fp8", SPARSE_FP8):
        return f"kv_cache_dtype {cache} is not supported: wanted auto, fp8 or {SPARSE_FP8}"
    if uses_hisparse(config):
        return "a KV cache in host memory (HiSparse) is not supported"
    if envs.VLLM_BATCH_INVARIANT:
        return "batch invariance is not supported"
    if reason := why_not_sparse(config):
        return reason
    capability = current_platform.get_device_capability()
    return why_unsupported_sparse(
        dtype=config.model_config.dtype,
        head_dim=config.model_config.hf_config.head_dim,
        v_head_dim=config.model_config.hf_config.head_dim,
        kv_cache_dtype=SPARSE_FP8,
        compute_capability=None if capability is None else (capability.major, capability.minor),
    )


def attention_class(base: type, config: VllmConfig) -> type:
    """The class of a model's attention layers where ETAP is selected; `base` is vLLM's for FlashMLA.

    Raises NotImplementedError with the reason where ETAP cannot run them.
    """
    if reason := why_not(base, config):
        raise NotImplementedError(reason)
    if untested := ENGINE.why_untested():
        logger.warning_once(untested, scope="global")  # on one rank only
    return _layer_class(base)
