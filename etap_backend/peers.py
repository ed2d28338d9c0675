"""The kernels that `etap bench` times, called as the engines call them, with all metadata built before the clock runs.

Peers are called as in vLLM 0.26 (FlashMLA, FA3, Triton) and SGLang 0.5 (FlashInfer). Each is imported when asked for.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend.ops import mla_decode
from etap_backend.schedule import DecodeSchedule
from etap_backend.support import FP8, LATENT_DIM, ROPE_DIM

Call = Callable[[Tensor], Tensor]
"""Takes one copy of the KV cache [pages, page_size, 576], returns out with batch * s_q * heads * 512 elements."""


@dataclass(frozen=True)
class Inputs:
    """What every kernel of a row is given, besides the cache."""

    q: Tensor  # [batch, s_q, heads, 576], contiguous
    block_table: Tensor  # int32 [batch, max_pages]
    seq_lens: Tensor  # int32 [batch]
    lengths: tuple[int, ...]  # the same on the host
    page_size: int
    softmax_scale: float
    num_sms: int | None  # CTAs of our own launch; None means the device's multiprocessors
    kv_dtype: torch.dtype = torch.bfloat16
    kv_scale: float | None = None  # of an FP8 cache

    @property
    def kv_scale_tensor(self) -> Tensor | None:
        return None if self.kv_scale is None else torch.tensor([self.kv_scale], device=self.q.device)

    @property
    def query_starts(self) -> Tensor:
        batch, s_q = self.q.shape[:2]
        return torch.arange(batch + 1, dtype=torch.int32, device=self.q.device) * s_q


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """`x` / `scale` in e4m3, saturated: what times `scale` stands for x."""
    return (x / scale).clamp(-448, 448).to(FP8)


class Unsupported(Exception):
    """A peer cannot run this row; the text says why."""


def etap(inputs: Inputs, *, fp8_math: bool = False) -> Call:
    batch, s_q, heads, _ = inputs.q.shape
    buffers = DecodeSchedule(batch, heads, max_s_q=s_q, device=inputs.q.device, num_sms=inputs.num_sms)
    schedule = buffers.build(inputs.seq_lens, s_q)
    out = inputs.q.new_empty(batch, s_q, heads, LATENT_DIM)
    lse = inputs.q.new_empty(batch, s_q, heads, dtype=torch.float32)
    kv_scale = inputs.kv_scale_tensor

    def call(kv_cache: Tensor) -> Tensor:
        return mla_decode(
            inputs.q,
            kv_cache,
            inputs.block_table,
            inputs.seq_lens,
            schedule,
            softmax_scale=inputs.softmax_scale,
            kv_scale=kv_scale,
            fp8_math=fp8_math,
            out=out,
            lse=lse,
        )[0]

    return call


def etap_fp8_math(inputs: Inputs) -> Call:
    return etap(inputs, fp8_math=True)


def flashmla(inputs: Inputs) -> Call:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    # Filled by the first call, which comes before the timed ones.
    metadata, _ = get_mla_metadata()

    def call(kv_cache: Tensor) -> Tensor:
        return flash_mla_with_kvcache(
            q=inputs.q,
            k_cache=kv_cache.unsqueeze(-2),
            block_table=inputs.block_table,
            cache_seqlens=inputs.seq_lens,
            head_dim_v=LATENT_DIM,
            tile_scheduler_metadata=metadata,
            softmax_scale=inputs.softmax_scale,
            causal=True,
            is_fp8_kvcache=False,
        )[0]

    return call


def flashmla_fp8(inputs: Inputs) -> Call:
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8

    s_q, heads = inputs.q.shape[1:3]
    metadata, splits = get_mla_metadata_dense_fp8(inputs.seq_lens, s_q * heads, 1)
    q = to_fp8(inputs.q, inputs.kv_scale)  # as vLLM hands them over; the rounding is not timed
    scale = inputs.kv_scale_tensor

    def call(kv_cache: Tensor) -> Tensor:
        return flash_mla_with_kvcache_fp8(
            q=q,
            k_cache=kv_cache.unsqueeze(-2),
            block_table=inputs.block_table,
            cache_seqlens=inputs.seq_lens,
            head_dim_v=LATENT_DIM,
            tile_scheduler_metadata=metadata,
            num_splits=splits,
            softmax_scale=inputs.softmax_scale,
            causal=True,
            descale_q=scale,
            descale_k=scale,
        )[0]

    return call


def fa3(inputs: Inputs) -> Call:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    batch, s_q, heads, _ = inputs.q.shape
    longest, starts = max(inputs.lengths), inputs.query_starts
    most_splits = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
    metadata = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=s_q,
        max_seqlen_k=longest,
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=ROPE_DIM,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=inputs.q.dtype,
        headdim_v=LATENT_DIM,
        page_size=inputs.page_size,
        cu_seqlens_q=starts,
        causal=True,
        num_splits=most_splits,
    )
    q_latent, q_rope = inputs.q.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], dim=-1)

    def call(kv_cache: Tensor) -> Tensor:
        return flash_attn_varlen_func(
            q=q_rope,
            k=kv_cache[..., LATENT_DIM:].unsqueeze(-2),
            v=kv_cache[..., :LATENT_DIM].unsqueeze(-2),
            q_v=q_latent,
            max_seqlen_q=s_q,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=inputs.seq_lens,
            block_table=inputs.block_table,
            softmax_scale=inputs.softmax_scale,
            causal=True,
            fa_version=3,
            scheduler_metadata=metadata,
            num_splits=most_splits,
        )

    return call


def flashinfer(inputs: Inputs) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    s_q, heads = inputs.q.shape[1:3]
    pages = [-(-length // inputs.page_size) for length in inputs.lengths]
    page_starts = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    page_ids = torch.cat([row[:used] for row, used in zip(inputs.block_table, pages, strict=True)])
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.int8, device=inputs.q.device), backend="fa3"
    )
    wrapper.plan(
        inputs.query_starts,
        page_starts.to(inputs.q.device),
        page_ids,
        inputs.seq_lens,
        heads,
        LATENT_DIM,
        ROPE_DIM,
        inputs.page_size,
        s_q > 1,
        inputs.softmax_scale,
        inputs.q.dtype,
        inputs.kv_dtype,
    )
    q_latent, q_rope = inputs.q.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], dim=-1)
    scales = {} if inputs.kv_scale is None else {"ckv_scale": inputs.kv_scale, "kpe_scale": inputs.kv_scale}

    def call(kv_cache: Tensor) -> Tensor:
        return wrapper.run(q_latent, q_rope, kv_cache[..., :LATENT_DIM], kv_cache[..., LATENT_DIM:], **scales)

    return call


def triton(inputs: Inputs) -> Call:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    batch, s_q, heads, _ = inputs.q.shape
    if s_q > 1:
        raise Unsupported("takes one query token a request")
    multiprocessors = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    # vLLM's choice: a power of two of at least 512 tokens a split, at most two splits a multiprocessor.
    wanted = max(1, max(inputs.lengths) // 512)
    splits = min(1 << math.ceil(math.log2(wanted)), 2 * multiprocessors)
    q = inputs.q.flatten(0, 1)
    out = q.new_empty(batch, heads, LATENT_DIM)
    lse = q.new_empty(batch, heads)
    partial = q.new_empty(batch, heads, splits, LATENT_DIM + 1, dtype=torch.float32)
    scale = torch.tensor(inputs.kv_scale or 1.0, device=q.device)

    def call(kv_cache: Tensor) -> Tensor:
        k = kv_cache.unsqueeze(2)
        decode_attention_fwd(
            q,
            k,
            k[..., :LATENT_DIM],
            out,
            lse,
            inputs.block_table,
            inputs.seq_lens,
            partial,
            splits,
            inputs.softmax_scale,
            inputs.page_size,
            k_scale=scale,
            v_scale=scale,
            is_mla=True,
        )
        return out

    return call


@dataclass(frozen=True)
class Provider:
    """A kernel by the name of its column; `package` is where it comes from, with the version that is installed."""

    name: str
    package: str
    prepare: Callable[[Inputs], Call]

    def version(self) -> str | None:
        """Installed version of the package, or None without it."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


OURS = "etap"
FP8_MATH = "etap-fp8-math"
OUR_BF16 = "etap-bf16"
OWN = (OURS, FP8_MATH, OUR_BF16)
"""Columns that are no peers'; the last is the time that a bf16 cache of the same tokens takes."""


def _by_name(*providers: Provider) -> dict[str, Provider]:
    return {provider.name: provider for provider in providers}


PROVIDERS = _by_name(
    Provider(OURS, "etap-backend", etap),
    Provider("FlashMLA", "vllm", flashmla),
    Provider("FA3", "vllm", fa3),
    Provider("FlashInfer", "flashinfer-python", flashinfer),
    Provider("Triton", "vllm", triton),
)
FP8_PROVIDERS = _by_name(
    Provider(OURS, "etap-backend", etap),
    Provider(FP8_MATH, "etap-backend", etap_fp8_math),
    Provider(OUR_BF16, "etap-backend", etap),
    Provider("FlashMLA", "vllm", flashmla_fp8),
    Provider("FlashInfer", "flashinfer-python", flashinfer),
    Provider("Triton", "vllm", triton),
)
"""The kernels of rows with an FP8 cache. All but FlashMLA's are given bf16 queries; FA3 has none for MLA."""
