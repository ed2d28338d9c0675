"""The arguments of the compiled library's functions, in its order (`library().arguments()`).

A call is built by position, which costs a third of building it by name, and is read by name.
"""

from typing import NamedTuple

from torch import Tensor


class DenseCall(NamedTuple):
    """The library's `decode`: `mla_decode`'s arguments, with the schedule's parts."""

    q: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    rope_cache: Tensor | None
    q_scale: Tensor | None
    kv_scale: Tensor | None
    block_table: Tensor
    seq_lens: Tensor
    work_ranges: Tensor
    split_offsets: Tensor
    shared: Tensor | None
    workspace: Tensor
    out: Tensor
    lse: Tensor
    softmax_scale: float
    batch: int
    s_q: int
    heads: int
    partitions: int
    row_tile: int
    num_sms: int
    fp8_math: bool
    empty_lse: float
    early_loads: bool


class SparseCall(NamedTuple):
    """The library's `sparse_decode`: `sparse_mla_decode`'s arguments, with `partitions` beside `num_sms`."""

    q: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    indices: Tensor
    block_table: Tensor | None
    request_ids: Tensor | None
    valid_counts: Tensor | None
    extra_kv_cache: Tensor | None
    extra_indices: Tensor | None
    extra_block_table: Tensor | None
    extra_valid_counts: Tensor | None
    sinks: Tensor | None
    workspace: Tensor
    out: Tensor
    lse: Tensor
    softmax_scale: float
    partitions: int
    num_sms: int
    empty_lse: float


class TopKCall(NamedTuple):
    """The library's `top_k`: `sparse_top_k`'s arguments, with k in the shape of `out`."""

    logits: Tensor
    lengths: Tensor
    block_table: Tensor | None
    out: Tensor
    page_size: int
    num_sms: int
    early_lengths: bool


class ScheduleCall(NamedTuple):
    """The library's `build_schedule`.

    Attributes:
        seq_lens: int32 [batch].
        work_ranges, split_offsets: the buffers to fill.
        partitions: partitions of the work.
        fixed_splits: most splits per request where its length alone decides; 0 where the whole batch does.
        split_rows, split_cost, single_tiles: from the DecodeShape; nothing beside fixed_splits.
    """

    seq_lens: Tensor
    work_ranges: Tensor
    split_offsets: Tensor
    partitions: int
    fixed_splits: int
    split_rows: int
    split_cost: int
    single_tiles: int


class SharedScheduleCall(NamedTuple):
    """The library's `build_shared_schedule`: a step's stacks, and both schedules.

    Attributes:
        seq_lens: int32 [batch].
        block_table: int32 [batch, max_pages].
        work_ranges, split_offsets, shared: the buffers to fill; the stacks' ranges lie behind the first `partitions`.
        page_size: tokens of a page.
        s_q, heads: of the calls.
        least_tiles: tiles of all members in their stacks, below which there are none.
        partitions: partitions of the requests' own tiles.
        num_sms: partitions of the stacks' tiles.
        split_rows, split_cost, single_tiles: as for a ScheduleCall.
    """

    seq_lens: Tensor
    block_table: Tensor
    work_ranges: Tensor
    split_offsets: Tensor
    shared: Tensor
    page_size: int
    s_q: int
    heads: int
    least_tiles: int
    partitions: int
    num_sms: int
    split_rows: int
    split_cost: int
    single_tiles: int
