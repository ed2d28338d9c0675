"""Our own calls as `etap bench` times them, and what every kernel of a row is given.

`etap bench --library` imports this module out of another source tree to call that tree's library: what it uses of
itself and of `Inputs` is what trees have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend.dense import mla_decode
from etap_backend.limits import FP8, LATENT_DIM
from etap_backend.schedule import DecodeSchedule
from etap_backend.sparse import sparse_mla_decode, sparse_workspace_floats

Copy = tuple[Tensor, ...]
"""What differs from call to call: one copy of the KV cache [pages, page_size, 576] alone; of the sparse call its cache,
the same with 576 bfloat16 or 656 uint8 per row, and int32 [tokens, top_k], the rows of each token; of DeepSeek-V4's
call both lists' caches, uint8 [pages, page_size, 584], each before its list, the second None where there is none."""

Call = Callable[..., Tensor]
"""Takes a copy's tensors, returns out with batch * s_q * heads * 512 elements, or tokens * heads * 512."""


class Planned:
    """A call that takes what `new_plan` gives, too: its users make that once a step, before the first layer's call."""

    def __init__(self, call: Callable[..., Tensor], new_plan: Callable[[], object]):
        self.call, self.new_plan = call, new_plan
        self.plan()

    def plan(self) -> None:
        self.made = self.new_plan()

    def __call__(self, *copy: Tensor) -> Tensor:
        return self.call(self.made, *copy)


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


@dataclass(frozen=True)
class V4Inputs:
    """What every kernel of a row of DeepSeek-V4's call is given, besides the caches and the lists."""

    q: Tensor  # bfloat16 [tokens, heads, 512], contiguous
    window: int  # entries of each token's list of its last tokens
    extra: int  # entries of its list of compressed tokens, 0 where it has none
    sinks: Tensor  # float32 [heads]
    softmax_scale: float
    num_sms: int | None
    kv_dtype: torch.dtype = torch.uint8

    def counts(self, entries: int) -> Tensor:
        return torch.full(self.q.shape[:1], entries, dtype=torch.int32, device=self.q.device)


@dataclass(frozen=True)
class SparseInputs:
    """What every kernel of a row of the sparse call is given, besides the cache and the lists."""

    q: Tensor  # bfloat16 [tokens, heads, 576], contiguous
    top_k: int
    softmax_scale: float
    num_sms: int | None  # CTAs of our own launch; None means the device's multiprocessors
    kv_dtype: torch.dtype = torch.bfloat16  # or uint8: FP8 rows


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """`x` / `scale` in e4m3, saturated: what times `scale` stands for x."""
    return (x / scale).clamp(-448, 448).to(FP8)


def etap(inputs: Inputs, *, fp8_math: bool = False) -> Call:
    """The decode call on these inputs, its schedule built."""
    batch, s_q, heads, _ = inputs.q.shape
    types = {"fp8_cache": inputs.kv_dtype == FP8, "fp8_math": fp8_math}
    buffers = DecodeSchedule(batch, heads, max_s_q=s_q, device=inputs.q.device, num_sms=inputs.num_sms, **types)
    schedule = buffers.build(inputs.seq_lens, s_q)
    out = inputs.q.new_empty(batch, s_q, heads, LATENT_DIM)
    lse = inputs.q.new_empty(batch, s_q, heads, dtype=torch.float32)
    kv_scale = inputs.kv_scale_tensor

    def call(kv_cache: Tensor) -> Tensor:
        lists = (inputs.block_table, inputs.seq_lens, schedule)
        more = {"softmax_scale": inputs.softmax_scale, "kv_scale": kv_scale, "fp8_math": fp8_math}
        return mla_decode(inputs.q, kv_cache, *lists, **more, out=out, lse=lse, early_loads=True)[0]  # as in engines

    return call


def etap_sparse(inputs: SparseInputs) -> Call:
    """The sparse call on these inputs, its buffers allocated."""
    given = _sparse_buffers(inputs)

    def call(kv_cache: Tensor, indices: Tensor) -> Tensor:
        return sparse_mla_decode(inputs.q, kv_cache, indices, softmax_scale=inputs.softmax_scale, **given)[0]

    return call


def _sparse_buffers(inputs: SparseInputs | V4Inputs) -> dict:
    """What a sparse call is given besides its inputs, so that it allocates nothing."""
    tokens, heads, _ = inputs.q.shape
    num_sms = inputs.num_sms or torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    floats = sparse_workspace_floats(heads, num_sms)
    return {
        "workspace": inputs.q.new_empty(floats, dtype=torch.float32),
        "num_sms": num_sms,
        "out": inputs.q.new_empty(tokens, heads, LATENT_DIM),
        "lse": inputs.q.new_empty(tokens, heads, dtype=torch.float32),
    }


def etap_v4(inputs: V4Inputs) -> Call:
    """DeepSeek-V4's call on these inputs, its buffers allocated; lists have counts, as in the engines."""
    given = _sparse_buffers(inputs) | {"sinks": inputs.sinks, "softmax_scale": inputs.softmax_scale}
    given["valid_counts"] = inputs.counts(inputs.window)
    given["extra_valid_counts"] = inputs.counts(inputs.extra) if inputs.extra else None

    def call(cache: Tensor, indices: Tensor, extra_cache: Tensor | None, extra_indices: Tensor | None) -> Tensor:
        extra = {"extra_kv_cache": extra_cache, "extra_indices": extra_indices}
        return sparse_mla_decode(inputs.q, cache, indices, **extra, **given)[0]

    return call


def schedule_build(seq_lens: Tensor, heads: int, num_sms: int | None) -> Callable[[], object]:
    """What an engine does once a step for requests of these lengths."""
    buffers = DecodeSchedule(seq_lens.shape[0], heads, device=seq_lens.device, num_sms=num_sms)
    return lambda: buffers.build(seq_lens)
