"""Sparse attention (DeepSeek-V3.2, GLM-5, HY V4): the backend, what it plans for a step, and what each layer runs.

The layer's indexer writes for each query token which positions of its request it attends to. Whether tokens are
decoded, verify drafts or are a prompt's makes no difference then: one call takes them all, with nothing planned ahead.
"""

from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseMetadata,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.sparse_utils import triton_filter_and_convert_dcp_index

from etap_backend import engine_contract, sparse_mla_decode, sparse_workspace_floats
from etap_backend.limits import LATENT_DIM, SPARSE_FP8, SPARSE_FP8_BYTES, why_unsupported_sparse
from etap_backend.sparse import sparse_decode_shape
from etap_backend.vllm import versions
from etap_backend.vllm.backend import KernelBackend
from etap_backend.vllm.impl import KernelImpl
from etap_backend.vllm.metadata import claim_workspace
from etap_backend.vllm.policy import uses_hisparse, why_not_sparse


class ETAPSparseMetadataBuilder(FlashAttnMLASparseMetadataBuilder):
    """vLLM's own for a backend without a schedule; with decode context parallelism requests may be of any length."""

    @engine_contract.override
    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        super()._init_reorder_batch_threshold(reorder_batch_threshold, supports_spec_as_decode, True)


class ETAPSparseImpl(KernelImpl, SparseMLACommonImpl[FlashAttnMLASparseMetadata]):
    """One layer's sparse MLA attention by ETAP's kernels; what vLLM computes densely stays vLLM's."""

    def __init__(
        self,
        *,
        indexer: Any = None,
        topk_indices_buffer: Tensor | None = None,
        index_group_builder: object = None,
        sinks: Tensor | None = None,
        **arguments,
    ) -> None:
        """All by name, as vLLM gives them."""
        self._hisparse = uses_hisparse(get_current_vllm_config())
        lists = {}  # without them vLLM 0.33 makes no group of layers that share converted lists, and no memory for them
        if self._hisparse:
            lists = {"indexer": indexer, "topk_indices_buffer": topk_indices_buffer}
            lists["index_group_builder"] = index_group_builder
        super().__init__(**arguments, **lists)
        config, asked = self._asked_of_kernels(arguments, self.kv_lora_rank)
        no_lists = indexer is None and topk_indices_buffer is None
        missing = "indexer or topk_indices_buffer: wanted one of both, got None" if no_lists else None
        if reason := why_unsupported_sparse(**asked) or missing:
            raise NotImplementedError(f"{versions.NAME}: {reason}")
        fp8_cache = asked["kv_cache_dtype"] == SPARSE_FP8
        # Asked for its buffer in each call: a draft model's gets the target's after its layers are made. The names are
        # those behind 0.33's property `topk_indices_buffer`, by which some models replace the buffer.
        self._indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer
        if sinks is not None and config.parallel_config.decode_context_parallel_size > 1:
            # Each rank would weigh a sink against its own share of the context.
            raise NotImplementedError(f"{versions.NAME}: sinks beside decode context parallelism are not supported")
        self._sinks = sinks
        # vLLM keeps rows with room for a rope part that the model has not; its dense prefill has no such room.
        self._leaves_rope_out = fp8_cache and not self.qk_rope_head_dim
        if self._leaves_rope_out:
            self.supports_dense_mha_prefill = False
        self._num_sms = num_compute_units()
        self._shape = sparse_decode_shape(asked["num_heads"])
        self._batch_invariant = envs.VLLM_BATCH_INVARIANT
        types = f"sparse attention, KV cache {SPARSE_FP8 if fp8_cache else 'bfloat16'}"
        self._begin(config, sparse_workspace_floats(asked["num_heads"], self._num_sms), types)

    def prepare_for_batch(self, attn_metadata: FlashAttnMLASparseMetadata | None) -> None:
        """Claim the workspace in the profile run, in which there is no batch; with HiSparse make a batch's rows ready.

        vLLM 0.33's own layer of DeepSeek-V3.2 and GLM-5 calls this there, and never `reserve_workspace`.
        """
        if attn_metadata is None:
            self.reserve_workspace()
        if self._hisparse:
            super().prepare_for_batch(attn_metadata)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: FlashAttnMLASparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:
        """Attention of this layer for a step's decodes, or for all of its tokens.

        Args:
            q: (latent part [tokens, heads, 512], rope part [tokens, heads, 64]), both with any strides, or both parts
                in one tensor [tokens, heads, 576]. Without rope its part has width 0, and the tensor 512.
            kv_c_and_k_pe_cache: bfloat16 [blocks, block size, 576, 512 without rope] or uint8 [blocks, block size,
                656]; blocks may lie apart.
            attn_metadata: this step's, from the builder.
            layer: vLLM's; scales of this cache are in its rows.

        Returns:
            The output in the latent space, bfloat16 [tokens, heads, 512], and float32 [tokens, heads] log-sum-exp, base
            e. Tokens without an index on this rank have output 0 and log-sum-exp -inf.
        """
        if self._hisparse:  # vLLM brings the rows to the GPU, and calls `_forward_mqa_kernel`
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        tokens = len(q[0]) if isinstance(q, tuple) else len(q)
        indices: Any = self._topk_indices_buffer if self._indexer is None else self._indexer.topk_indices_buffer
        indices, block_table = indices[:tokens], attn_metadata.block_table
        request_ids = attn_metadata.req_id_per_token[:tokens]
        if self.dcp_world_size > 1:
            # Positions are those on all ranks; the result is rows of the cache, -1 where another rank has the token.
            indices = triton_filter_and_convert_dcp_index(
                request_ids,
                block_table,
                indices,
                dcp_size=self.dcp_world_size,
                dcp_rank=self.dcp_rank,
                cp_kv_cache_interleave_size=attn_metadata.cp_kv_cache_interleave_size,
                BLOCK_SIZE=attn_metadata.block_size,
                NUM_TOPK_TOKENS=indices.shape[1],
                compact_valid_to_front=False,
            )
            block_table = request_ids = None
        return self._attend(q, kv_c_and_k_pe_cache, indices, block_table=block_table, request_ids=request_ids)

    @engine_contract.override
    def _forward_mqa_kernel(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        topk_indices: Tensor,
        valid_counts: Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[Tensor, Tensor]:
        """As `forward_mqa`, of lists of rows, int32 [tokens, top_k], of which the first int32 [tokens] count."""
        return self._attend(q, kv_cache, topk_indices, valid_counts=valid_counts)

    def _attend(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        indices: Tensor,
        *,
        block_table: Tensor | None = None,
        request_ids: Tensor | None = None,
        valid_counts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`sparse_mla_decode` of a step; what is not said here is as there."""
        latent, rope = q if isinstance(q, tuple) else (q, None)
        rope = rope if self.qk_rope_head_dim else None
        if self._leaves_rope_out:
            kv_cache = kv_cache[..., :SPARSE_FP8_BYTES]
        tokens, heads = latent.shape[:2]
        out = latent.new_empty(tokens, heads, self.kv_lora_rank)
        lse = latent.new_empty(tokens, heads, dtype=torch.float32)
        for rows, num_sms in self._calls(tokens):
            sparse_mla_decode(
                latent[rows],
                kv_cache,
                indices[rows],
                softmax_scale=self.scale,
                q_rope=None if rope is None else rope[rows],
                block_table=block_table,
                request_ids=None if request_ids is None else request_ids[rows],
                valid_counts=None if valid_counts is None else valid_counts[rows],
                sinks=self._sinks,
                workspace=claim_workspace(self._workspace_floats),
                num_sms=num_sms,
                out=out[rows],
                lse=lse[rows],
            )
        return out, lse

    def _calls(self, tokens: int) -> list[tuple[slice, int]]:
        """Tokens of each call of a step, and the SMs that it is divided for.

        With batch invariance no token is split, so that its bits are its own: the library gives each partition whole
        tokens where all have equally many. Split evenly, the longest partition would have as many tiles.
        """
        if not self._batch_invariant:
            return [(slice(0, tokens), self._num_sms)]
        partitions = self._shape.partitions(self._num_sms)
        even = tokens - tokens % partitions
        calls = [(slice(0, even), partitions), (slice(even, tokens), tokens - even)]
        return [(rows, parts * self._shape.row_groups) for rows, parts in calls if rows.start < rows.stop]


class ETAPSparseBackend(KernelBackend, FlashMLASparseBackend):
    """Sparse MLA attention with ETAP's kernels; cache layouts, and the writing of the cache, are vLLM's own.

    The name stays FLASHMLA_SPARSE, as vLLM's own subclasses of it have it: by that name vLLM stores `fp8` in rows with
    scales of their own, fp8_ds_mla, where it would store one scale for all otherwise.
    """

    # Those that are refused are listed too: of types that are not, vLLM says no more than "not supported".
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto", "bfloat16", "float16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "nvfp4", "nvfp4_ds_mla",
    ]  # fmt: skip

    @staticmethod
    def get_builder_cls() -> type[ETAPSparseMetadataBuilder]:
        """The class that describes each step."""
        return ETAPSparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[ETAPSparseImpl]:
        """The class that runs each layer."""
        return ETAPSparseImpl

    @classmethod
    def supports_sink(cls) -> bool:
        """True: HY V4 keeps a backend that takes its sinks, and gives them to the implementation."""
        return True

    @classmethod
    def _why_not(cls, use_sparse: bool, asked: dict[str, Any]) -> str | None:
        if asked["kv_cache_dtype"] == "fp8":
            asked = asked | {"kv_cache_dtype": SPARSE_FP8}
        if reason := why_unsupported_sparse(**asked):
            return reason
        config = get_current_vllm_config()
        if config.model_config.hf_text_config.model_type.startswith("dots3_note"):
            return (
                "Dots3-Note's layers decode with backends of their own, DOTS3_NOTE_PADDED_MLA_SPARSE and TRITON_MLA, "
                f"whatever is named: leave {versions.NAME} out"
            )
        if reason := why_not_sparse(config):
            return reason
        if uses_hisparse(config):
            mode = "beside a KV cache in host memory (HiSparse) is not supported"
            if envs.VLLM_BATCH_INVARIANT:
                return f"batch invariance {mode}"
            if asked["kv_cache_dtype"] == SPARSE_FP8 and asked["head_dim"] == LATENT_DIM:
                # vLLM stages prompts' rows where it could compute them densely, which it cannot of such rows.
                return f"an FP8 cache of a model without rope {mode}: wanted --kv-cache-dtype bfloat16"
        # Without it the longest prompt of a step decides how all of them attend.
        if envs.VLLM_BATCH_INVARIANT and not getattr(config.attention_config, "sparse_mla_force_mqa", False):
            return "batch invariance of sparse attention wants --attention-config '{\"sparse_mla_force_mqa\": true}'"
        return None
