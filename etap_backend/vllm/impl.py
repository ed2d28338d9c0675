"""The attention of one layer."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import AttentionLayer, AttentionType

from etap_backend import engine_contract, mla_decode, why_unsupported
from etap_backend.vllm import versions
from etap_backend.vllm.log import logger
from etap_backend.vllm.metadata import ETAPMetadata, claim_workspace
from etap_backend.vllm.policy import Policy


class KernelImpl:
    """Shared by the implementations of dense and sparse attention; stands before vLLM's class among the bases."""

    can_return_lse_for_decode: ClassVar[bool] = True
    lse_base_on_e: ClassVar[bool] = True
    supports_dcp: ClassVar[bool] = True
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = True  # but not with decode context parallelism: `why_not_parallel`

    @staticmethod
    def _kernel_arguments(arguments: dict[str, Any], latent_dim: int) -> tuple[VllmConfig, dict[str, Any]]:
        """vLLM's configuration, and the arguments of `why_unsupported` for a layer that vLLM makes with `arguments`.

        Raises NotImplementedError for variants of attention that no kernel computes.
        """
        for name in "alibi_slopes", "sliding_window", "logits_soft_cap":
            if arguments[name]:
                raise NotImplementedError(f"{versions.NAME}: {name} is not supported, got {arguments[name]}")
        if arguments["attn_type"] != AttentionType.DECODER:
            wanted = AttentionType.DECODER.value
            raise NotImplementedError(f"{versions.NAME}: attn_type: wanted {wanted}, got {arguments['attn_type']}")
        config = get_current_vllm_config()
        # Decode context parallelism gathers the query heads of its ranks before `forward_mqa`.
        return config, {
            "dtype": config.model_config.dtype,
            "num_heads": arguments["num_heads"] * config.parallel_config.decode_context_parallel_size,
            "head_dim": arguments["head_size"],
            "v_head_dim": latent_dim,
            "kv_cache_dtype": arguments["kv_cache_dtype"],
        }

    def _begin(self, config: VllmConfig, workspace_floats: int, types: str) -> None:
        """Claim the workspace if this vLLM does not ask later, and log what decodes."""
        # vLLM would round all queries with one scale; the kernels, where they round, scale each row by itself.
        self.supports_quant_query_input = False
        logger.info_once(f"{versions.NAME} decodes: {types}")
        self._workspace_floats = workspace_floats
        if not versions.reserves_in_profile_run(config):
            self.reserve_workspace()

    def reserve_workspace(self) -> None:
        """Claim the largest workspace that any step needs, while vLLM measures the memory that the model needs."""
        claim_workspace(self._workspace_floats)


class ETAPImpl(KernelImpl, MLACommonImpl[ETAPMetadata]):
    """One layer's MLA attention: decodes and short prompts by ETAP's kernels, prefill by vLLM's own."""

    def __init__(self, **arguments) -> None:
        """Takes vLLM's arguments, all by name."""
        super().__init__(**arguments)
        config, asked = self._kernel_arguments(arguments, self.kv_lora_rank)
        policy = Policy.of(config, asked["num_heads"])
        if reason := why_unsupported(**asked, s_q=policy.max_s_q):
            raise NotImplementedError(f"{versions.NAME}: {reason}")
        self._fp8_cache = asked["kv_cache_dtype"].startswith("fp8")
        self._fp8_math = policy.fp8_math and self._fp8_cache
        types = engine_contract.types_text(asked["dtype"], self._fp8_cache, self._fp8_math, policy.shared_prefix)
        self._begin(config, policy.workspace_floats(num_compute_units()), types)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: ETAPMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:
        """Attention of this layer for the requests that vLLM counts as decodes, short prompts among them.

        Args:
            q: (latent part [tokens, heads, 512], rope part [tokens, heads, 64]), both with any strides, or both parts
                in one tensor [tokens, heads, 576]. A request's tokens follow one another.
            kv_c_and_k_pe_cache: [blocks, block size, 576], dtype of q, or e4m3 to be multiplied by layer._k_scale.
            attn_metadata: the step's, from the builder.
            layer: vLLM's layer, for the scale, which stays on the device, where vLLM may still change it.

        Returns:
            The output in the latent space [tokens, heads, 512], dtype of q, and float32 [tokens, heads] log-sum-exp,
            base e.
        """
        decode = attn_metadata.decode
        latent, rope = q if isinstance(q, tuple) else (q, None)
        tokens, heads = latent.shape[:2]
        out = latent.new_empty(tokens, heads, self.kv_lora_rank)
        lse = latent.new_empty(tokens, heads, dtype=torch.float32)
        for call in decode.calls:
            mla_decode(
                call.rows(latent),
                kv_c_and_k_pe_cache,
                call.block_table,
                call.seq_lens,
                call.schedule,
                softmax_scale=self.scale,
                q_rope=None if rope is None else call.rows(rope),
                kv_scale=layer._k_scale if self._fp8_cache else None,
                fp8_math=self._fp8_math,
                workspace=claim_workspace(self._workspace_floats),
                out=call.rows(out),
                lse=call.rows(lse),
                early_loads=call.early_loads,
            )
        if decode.num_tokens < tokens:
            out[decode.num_tokens :].zero_()
            lse[decode.num_tokens :].fill_(-math.inf)
        return out, lse
