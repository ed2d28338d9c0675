"""The attention backend that vLLM selects: its names, its classes, and what it can run."""

import math
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.platforms.interface import DeviceCapability

from etap_backend import engine_contract
from etap_backend.limits import COMPUTE_CAPABILITY, DTYPES, HEAD_DIM, TILE_TOKENS, why_unsupported
from etap_backend.vllm import versions
from etap_backend.vllm.impl import ETAPImpl
from etap_backend.vllm.metadata import ETAPMetadataBuilder
from etap_backend.vllm.policy import why_no_shared_prefix, why_not_parallel

BLOCK_SIZES = (TILE_TOKENS, 32, 16)
"""Tokens per block that the kernels are given. They take any number; vLLM's own kernels take multiples of 16."""


class KernelBackend:
    """Shared by the backends of dense and sparse attention; stands before vLLM's class among the bases."""

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Hopper only."""
        return (capability.major, capability.minor) == COMPUTE_CAPABILITY

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True: requests can be independent of each other; conditions are in `supports_combination`."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Say why the kernels cannot run this, or None when they can."""
        asked: dict[str, Any] = {
            "dtype": dtype,
            "head_dim": head_size,
            "page_size": TILE_TOKENS if block_size is None else block_size,
            "kv_cache_dtype": kv_cache_dtype,
            "compute_capability": (device_capability.major, device_capability.minor),
        }
        reason = cls._why_not(use_sparse, asked) or why_not_parallel(get_current_vllm_config_or_none())
        return reason or engine_contract.why_no_library()

    @classmethod
    def _why_not(cls, use_sparse: bool, asked: dict[str, Any]) -> str | None:
        """Reasons of one kind of attention; `asked` are arguments of `why_unsupported`."""
        raise NotImplementedError


class ETAPBackend(KernelBackend, MLACommonBackend):
    """MLA attention with ETAP's decode kernels; prefill and the writing of the KV cache stay vLLM's."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    # FP8 is listed although some models refuse it: for a type that is not listed, vLLM says only "not supported"; for
    # the others it gives the reason of `supports_combination`.
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """The name that `--attention-backend` selects."""
        return versions.NAME

    @staticmethod
    def get_builder_cls() -> type[ETAPMetadataBuilder]:
        """The class that plans each step."""
        return ETAPMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[ETAPImpl]:
        """The class that runs each layer."""
        return ETAPImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        """Tokens per block of the KV cache; vLLM splits larger blocks that are a multiple of it.

        The largest of BLOCK_SIZES that divides the cache's blocks, or 64 before their size is chosen, so that users who
        ask for no size get 64, also with several backends or cache types. All sizes where nothing is known; vLLM
        then takes the largest that divides.
        """
        if kv_cache_spec is not None:
            block_size = kv_cache_spec.block_size
        elif config := get_current_vllm_config_or_none():
            cache = config.cache_config
            block_size = cache.block_size if cache.user_specified_block_size else TILE_TOKENS
        else:
            return list(BLOCK_SIZES)
        return [max(min(BLOCK_SIZES), math.gcd(block_size, TILE_TOKENS))]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens per block where the user gives no size: vLLM's default if it is a multiple of 64, else 64."""
        return default_block_size if default_block_size % TILE_TOKENS == 0 else TILE_TOKENS

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Widths of a row of the KV cache."""
        return [HEAD_DIM]

    @classmethod
    def supports_non_causal(cls) -> bool:
        """True: a draft's tokens may all see each other."""
        return True

    @classmethod
    def _why_not(cls, use_sparse: bool, asked: dict[str, Any]) -> str | None:
        if reason := why_unsupported(**asked):
            return reason
        if asked["page_size"] % min(BLOCK_SIZES):
            return f"block_size {asked['page_size']} is not supported: wanted a multiple of {min(BLOCK_SIZES)} tokens"
        if use_sparse:
            return "sparse attention without index_topk in the model's configuration is not supported"
        config = get_current_vllm_config_or_none()
        if reason := why_no_shared_prefix(config):
            return reason
        if config and config.model_config and str(asked["kv_cache_dtype"]).startswith("fp8"):
            return versions.why_no_fp8_cache(config)
        return None
