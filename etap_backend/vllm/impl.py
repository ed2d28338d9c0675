"""What each layer runs."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import AttentionLayer, AttentionType

from etap_backend import mla_decode, plugins, why_unsupported
from etap_backend.vllm import compat
from etap_backend.vllm.metadata import ETAPMetadata, Limits, claim_workspace

# vLLM gives its handler and level to loggers below "vllm" only.
_logger = init_logger(f"vllm.{__name__}")

FP8_MATH_OPTION = "etap_fp8_math"
"""`--additional-config '{"etap_fp8_math": true}'`: an FP8 cache is multiplied as it is, by queries rounded to e4m3;
otherwise as float16, exactly. vLLM's configuration is the same for all ranks, an environment need not be.
"""


def wants_fp8_math(config: VllmConfig) -> bool:
    """What the option says; raises ValueError unless it is true, false or absent, and for other options of ETAP's."""
    options = config.additional_config
    if not isinstance(options, dict):  # another plugin's own class
        return False
    if unknown := [name for name in options if name.lower().startswith("etap") and name != FP8_MATH_OPTION]:
        raise ValueError(f"additional_config: wanted {FP8_MATH_OPTION} at most, got {', '.join(unknown)}")
    value = options.get(FP8_MATH_OPTION, False)
    if not isinstance(value, bool):
        raise ValueError(f"additional_config: {FP8_MATH_OPTION}: wanted true or false, got {value!r}")
    return value


def refuse_variants(attn_type: str, **wanted_none: object) -> None:
    """Raise NotImplementedError for variants of attention that no kernel computes; keywords are arguments by name."""
    for name, value in wanted_none.items():
        if value:
            raise NotImplementedError(f"{compat.NAME}: {name} is not supported, got {value}")
    if attn_type != AttentionType.DECODER:
        wanted = AttentionType.DECODER.value
        raise NotImplementedError(f"{compat.NAME}: attn_type: wanted {wanted}, got {attn_type}")


class ETAPImpl(MLACommonImpl[ETAPMetadata]):
    """One layer's MLA attention: decodes and short prompts by ETAP's kernels, prefill by vLLM's own."""

    can_return_lse_for_decode: ClassVar[bool] = True
    lse_base_on_e: ClassVar[bool] = True
    supports_dcp: ClassVar[bool] = True
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = True
    # Combined with decode context parallelism it gathers other heads than the builder plans for.
    supports_pcp: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        refuse_variants(
            attn_type, alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap
        )
        config = get_current_vllm_config()
        # Decode context parallelism gathers the query heads of its ranks, which the base class counts later until 0.27.
        kernel_heads = num_heads * config.parallel_config.decode_context_parallel_size
        limits = Limits.of(config, kernel_heads)
        reason = why_unsupported(
            dtype=config.model_config.dtype,
            num_heads=kernel_heads,
            head_dim=head_size,
            v_head_dim=self.kv_lora_rank,
            kv_cache_dtype=kv_cache_dtype,
            s_q=limits.max_s_q,
        )
        if reason:
            raise NotImplementedError(f"{compat.NAME}: {reason}")
        self._fp8_cache = kv_cache_dtype.startswith("fp8")
        self._fp8_math = wants_fp8_math(config) and self._fp8_cache
        # The kernels round each query row by a scale of its own, if at all; vLLM would with one for all of them.
        self.supports_quant_query_input = False
        types = plugins.types_text(config.model_config.dtype, self._fp8_cache, self._fp8_math)
        _logger.info_once(f"{compat.NAME} decodes: {types}")
        self._workspace_floats = limits.workspace_floats(kernel_heads, num_compute_units())
        if not compat.reserves_in_profile_run():
            self.reserve_workspace()

    def reserve_workspace(self) -> None:
        """Claim the largest workspace that any step needs, while vLLM measures the memory that the model needs."""
        claim_workspace(self._workspace_floats)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: ETAPMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:
        """Attention of this layer for what vLLM takes for decodes, short prompts among them.

        Args:
            q: (latent part [tokens, heads, 512], rope part [tokens, heads, 64]), both with any strides, or both parts
                in one tensor [tokens, heads, 576]. A request's tokens follow one another.
            kv_c_and_k_pe_cache: [blocks, block size, 576], dtype of q, or e4m3: a value is what is stored times
                layer._k_scale.
            attn_metadata: this step's, from the builder.
            layer: vLLM's, for the scale; it stays on the device, where vLLM may still change it.

        Returns:
            The output in the latent space [tokens, heads, 512], dtype of q, and float32 [tokens, heads] log-sum-exp,
            base e.
        """
        decode = attn_metadata.decode
        latent, rope = q if isinstance(q, tuple) else (q, None)
        tokens, heads = latent.shape[:2]
        out = latent.new_empty(tokens, heads, self.kv_lora_rank)
        lse = latent.new_empty(tokens, heads, dtype=torch.float32)
        for run in decode.runs:
            rows, per_request = run.tokens, (run.schedule.batch, run.schedule.s_q)
            mla_decode(
                latent[rows].unflatten(0, per_request),
                kv_c_and_k_pe_cache,
                run.block_table,
                run.seq_lens,
                run.schedule,
                softmax_scale=self.scale,
                q_rope=None if rope is None else rope[rows].unflatten(0, per_request),
                kv_scale=layer._k_scale if self._fp8_cache else None,
                fp8_math=self._fp8_math,
                workspace=claim_workspace(self._workspace_floats),
                out=out[rows].unflatten(0, per_request),
                lse=lse[rows].unflatten(0, per_request),
            )
        if decode.num_tokens < tokens:
            out[decode.num_tokens :].zero_()
            lse[decode.num_tokens :].fill_(-math.inf)
        return out, lse
