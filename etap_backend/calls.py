"""What the functions of the compiled library take: each argument has its place here, and nowhere else.

The fields of a call stand in the order of its function in csrc/api/bindings.cpp. A call is made with arguments by
position, which costs a third of what names cost, and is read by name.
"""

from typing import NamedTuple

from torch import Tensor


class DenseCall(NamedTuple):
    """The arguments of the library's `decode`, as `mla_decode` describes them; the schedule's parts stand apart."""

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
    workspace: Tensor
    out: Tensor
    lse: Tensor
    softmax_scale: float
    batch: int
    s_q: int
    heads: int
    partitions: int
    row_tile: int
    fp8_math: bool
    empty_lse: float
    early_loads: bool


class SparseCall(NamedTuple):
    """The arguments of the library's `sparse_decode`, as `sparse_mla_decode` describes them, with its partitions."""

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
    empty_lse: float


class ScheduleCall(NamedTuple):
    """What the two functions that plan a step take between them.

    Attributes:
        seq_lens: int32 [batch].
        work_ranges, split_offsets: the buffers that are filled.
        partitions: parts of the work.
        fixed_pieces: most pieces of a request where its length alone decides (`build_fixed_schedule`); 0 where the
            batch does (`build_schedule`).
        split_rows, piece_cost, single_tiles: of the DecodeShape; a schedule of fixed pieces does not need them.
    """

    seq_lens: Tensor
    work_ranges: Tensor
    split_offsets: Tensor
    partitions: int
    fixed_pieces: int
    split_rows: int
    piece_cost: int
    single_tiles: int
