"""Sparse attention (DeepSeek-V3.2, GLM-5, HY V4): backend, metadata and implementation.

A layer's indexer writes, for each query token, the positions of its request that it attends to. It makes no difference
then whether a token is decoded, verifies a draft or is part of a prompt: one call takes them all, and needs no plan.
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
from etap_backend.vllm import top_k, versions
from etap_backend.vllm.backend import KernelBackend
from etap_backend.vllm.impl import KernelImpl
from etap_backend.vllm.metadata import claim_workspace
from etap_backend.vllm.policy import why_not_sparse


class ETAPSparseMetadataBuilder(FlashAttnMLASparseMetadataBuilder):
    """vLLM's builder of a backend without a plan; with decode context parallelism, drafts may differ in number."""

    @engine_contract.override
    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        super()._init_reorder_batch_threshold(reorder_batch_threshold, supports_spec_as_decode, True)


class ETAPSparseImpl(KernelImpl, SparseMLACommonImpl[FlashAttnMLASparseMetadata]):
    """One layer's sparse MLA attention by ETAP's kernels; short prompts, which vLLM computes densely, stay vLLM's."""

    def __init__(
        self,
        *,
        indexer: Any = None,
        topk_indices_buffer: Tensor | None = None,
        index_group_builder: object = None,
        sinks: Tensor | None = None,
        **arguments,
    ) -> None:
        """Takes vLLM's arguments, all by name."""
        self._hisparse = versions.uses_hisparse(get_current_vllm_config())
        lists = {}  # given them, vLLM allocates memory for converted lists, which ETAP needs with HiSparse only
        if self._hisparse:
            lists = {"indexer": indexer, "topk_indices_buffer": topk_indices_buffer}
            lists["index_group_builder"] = index_group_builder
        super().__init__(**arguments, **lists)
        config, asked = self._kernel_arguments(arguments, self.kv_lora_rank)
        no_lists = indexer is None and topk_indices_buffer is None
        missing = "indexer or topk_indices_buffer: wanted one of them, got None" if no_lists else None
        if reason := why_unsupported_sparse(**asked) or missing:
            raise NotImplementedError(f"{versions.NAME}: {reason}")
        fp8_cache = asked["kv_cache_dtype"] == SPARSE_FP8
        # The indexer's buffer is read in each call: a draft's indexer gets the target's after its layers are made. Some
        # models replace the buffer through vLLM's property `topk_indices_buffer`, which sets these two names.
        self._indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer
        if sinks is not None and config.parallel_config.decode_context_parallel_size > 1:
            # Each rank would count a sink once.
            raise NotImplementedError(f"{versions.NAME}: sinks with decode context parallelism are not supported")
        self._sinks = sinks
        # vLLM's rows have room for a rope part that this model lacks, and its dense prefill cannot read such rows.
        self._leaves_rope_out = fp8_cache and not self.qk_rope_head_dim
        if self._leaves_rope_out:
            self.supports_dense_mha_prefill = False
        self._num_sms = num_compute_units()
        self._shape = sparse_decode_shape(asked["num_heads"])
        self._batch_invariant = envs.VLLM_BATCH_INVARIANT
        types = f"sparse attention, KV cache {SPARSE_FP8 if fp8_cache else 'bfloat16'}"
        types += engine_contract.no_shared_prefix_text()
        self._begin(config, sparse_workspace_floats(asked["num_heads"], self._num_sms), types)
        top_k.install(config)

    def prepare_for_batch(self, attn_metadata: FlashAttnMLASparseMetadata | None) -> None:
        """Claim the workspace in the profile run, which has no batch; with HiSparse, prepare a batch's rows.

        vLLM's layer of DeepSeek-V3.2 and GLM-5 calls this in the profile run, and never `reserve_workspace`.
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
        """Attention of this layer for a step's decodes, or for all its tokens.

        Args:
            q: (latent part [tokens, heads, 512], rope part [tokens, heads, 64]), both with any strides, or both parts
                in one tensor [tokens, heads, 576]. Without rope, its part has width 0 and the tensor width 512.
            kv_c_and_k_pe_cache: bfloat16 [blocks, block size, 576 (512 without rope)] or uint8 [blocks, block size,
                656]; blocks may lie apart.
            attn_metadata: the step's, from the builder.
            layer: vLLM's layer; unused, because this cache has its scales in its rows.

        Returns:
            The output in the latent space, bfloat16 [tokens, heads, 512], and float32 [tokens, heads] log-sum-exp, base
            e. Tokens without an index on this rank have output 0 and log-sum-exp -inf.
        """
        if self._hisparse:  # vLLM brings the rows to the GPU and calls `_forward_mqa_kernel`
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        tokens = len(q[0]) if isinstance(q, tuple) else len(q)
        indices: Any = self._topk_indices_buffer if self._indexer is None else self._indexer.topk_indices_buffer
        indices, block_table = indices[:tokens], attn_metadata.block_table
        request_ids = attn_metadata.req_id_per_token[:tokens]
        if self.dcp_world_size > 1:
            # Lists hold positions on all ranks; converted, they hold rows of the cache, -1 for other ranks' tokens.
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
        """`forward_mqa` with lists of rows, int32 [tokens, top_k]; valid_counts, int32 [tokens], of each are valid."""
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
        """The `sparse_mla_decode` calls of a step."""
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
        """Tokens of each call of a step, and the number of SMs that it is planned for.

        With batch invariance no token is split, so its bits depend on nothing else: where all partitions have equally
        many tokens, they have whole ones. An even split would give the longest partition as many tiles.
        """
        if not self._batch_invariant:
            return [(slice(0, tokens), self._num_sms)]
        partitions = self._shape.partitions(self._num_sms)
        even = tokens - tokens % partitions
        calls = [(slice(0, even), partitions), (slice(even, tokens), tokens - even)]
        return [(rows, parts * self._shape.row_groups) for rows, parts in calls if rows.start < rows.stop]


class ETAPSparseBackend(KernelBackend, FlashMLASparseBackend):
    """Sparse MLA attention with ETAP's kernels; cache layouts and the writing of the cache stay vLLM's.

    Its name stays FLASHMLA_SPARSE, also in vLLM's log and in NIXL's handshake, whose peers share the layout.
    Reason: vLLM selects the cache format `fp8_ds_mla`, its warm-ups and when prompts are computed densely by that name;
    its own subclass for HY V4 keeps it, too.
    Versions: all. Goes when a backend can say which format it stores.
    """

    # Refused types are listed too: for a type that is not, vLLM says only "not supported".
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
        """True: HY V4 then uses this backend, and gives its sinks to the implementation."""
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
                "Dots3-Note's layers decode with their own backends, DOTS3_NOTE_PADDED_MLA_SPARSE and TRITON_MLA: "
                f"leave {versions.NAME} out"
            )
        if reason := why_not_sparse(config) or versions.why_no_hisparse(config):
            return reason
        if versions.uses_hisparse(config):
            mode = "with a KV cache in host memory (HiSparse) is not supported"
            if envs.VLLM_BATCH_INVARIANT:
                return f"batch invariance {mode}"
            if asked["kv_cache_dtype"] == SPARSE_FP8 and asked["head_dim"] == LATENT_DIM:
                # vLLM stages prompts' rows only where it can compute them densely, which such rows do not allow.
                return f"an FP8 cache of a model without rope {mode}: wanted --kv-cache-dtype bfloat16"
        # Otherwise the longest prompt of a step decides how all prompts attend.
        if envs.VLLM_BATCH_INVARIANT and not config.attention_config.sparse_mla_force_mqa:
            return "batch invariance of sparse attention needs --attention-config '{\"sparse_mla_force_mqa\": true}'"
        return None
