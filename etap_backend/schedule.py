"""The plan of one decode step: which CTA works on which tiles of which request."""

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend._operator import Operator, compiled, schema
from etap_backend.calls import ScheduleCall
from etap_backend.limits import WORK_RANGE_FIELDS, dtype_name

BATCH_INVARIANT_BYTES = 60 * 2**20
"""Workspace that a batch-invariant schedule may take to split requests; without splits it needs none of it."""
MOST_ROWS = 64
"""Query rows that a CTA computes at most."""
ANY_BATCH = 0
"""In place of a step's number of requests: its rows shall lie as those of every other."""
CPU_SMS = 8
"""Partitions that a schedule on the CPU plans for: enough to split requests, small enough to follow by hand."""


def _fill(*arguments) -> None:
    call = ScheduleCall(*arguments)
    buffers = (call.seq_lens, call.work_ranges, call.split_offsets, call.partitions)
    if call.fixed_pieces:
        compiled("build_fixed_schedule")(*buffers, call.fixed_pieces)
    else:
        compiled("build_schedule")(*buffers, call.split_rows, call.piece_cost, call.single_tiles)


# As an operator, so that fake tensors, which have no memory, do not reach the library.
_build = Operator(schema("build_schedule", ScheduleCall, written=("work_ranges", "split_offsets")), _fill, _fill)


class DecodeShape(NamedTuple):
    """What a number of query rows (query tokens * heads) means for the kernels; the compiled library says it.

    Attributes:
        kernel: "transposed", "transposed_fp8" or "query_major".
        row_tile: rows that a CTA computes: 8, 16, 32 or 64.
        row_groups: CTAs that share a piece of a request, each with another row tile of it.
        piece_floats: what a CTA's partial result of one piece takes of the workspace.
        split_rows: what a schedule weighs a split by; sparse calls have none.
        piece_cost: what it takes a piece of a request for beside its tiles, in tiles.
        single_tiles: tiles of the longest request that a schedule cuts into single ones where each has a partition.
    """

    kernel: str
    row_tile: int
    row_groups: int
    piece_floats: int
    split_rows: int
    piece_cost: int
    single_tiles: int

    def partitions(self, num_sms: int) -> int:
        """Parts that the work is divided into, each for one CTA (for as many as there are row groups)."""
        return max(1, num_sms // self.row_groups)

    def workspace_floats(self, partitions: int) -> int:
        """A partition begins in one request and ends in another: it holds at most two pieces of split ones.

        One partition alone splits no request.
        """
        return 2 * partitions * self.row_groups * self.piece_floats if partitions > 1 else 0


@functools.cache
@torch.compiler.assume_constant_result  # a compiler cannot look into the library
def decode_shape(
    rows: int, num_sms: int, batch: int = ANY_BATCH, fp8_cache: bool = False, fp8_math: bool = False
) -> DecodeShape:
    """How a schedule for so many CTAs takes a request's rows, of calls as `DecodeSchedule` is told of them.

    Of ANY_BATCH rows lie alike whatever the batch and the cache: no shape of as many rows takes more workspace. Raises
    ImportError where there is no library, ValueError for a count below 1.
    """
    return DecodeShape(*library().decode_shape(rows, num_sms, batch, fp8_cache, fp8_math))


def fixed_pieces(max_batch: int, num_heads: int, max_s_q: int, num_sms: int) -> int:
    """Most pieces of a request in a batch-invariant schedule: as many as fill the GPU, if max_batch times them fit."""
    shape = decode_shape(num_heads * max_s_q, num_sms)
    slot_bytes = 4 * shape.row_groups * shape.piece_floats
    return max(1, min(shape.partitions(num_sms), BATCH_INVARIANT_BYTES // (2 * slot_bytes * max_batch)))


def count(name: str, value: int) -> int:
    """`value` as an int of at least 1, or a ValueError or TypeError that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: wanted an int, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name}: wanted at least 1, got {value}")
    return number


@functools.cache
def sms_of(device: torch.device, on_cpu: int = CPU_SMS) -> int:
    """CTAs that fill a device: a GPU's multiprocessors, or what the CPU's executor divides the work for."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else on_cpu


def _device(device: torch.device | str) -> torch.device:
    """The device with its number, or a ValueError for one that schedules do not live on."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # no name of a device, or nothing that could be one
        found = None
    if found is not None and found.type == "cpu":
        return torch.device("cpu")  # as tensors there say it, without a number
    if found is None or found.type != "cuda" or (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: wanted the CPU or a CUDA device that torch sees, got {device}")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


class BuiltSchedule(NamedTuple):
    """What `DecodeSchedule.build` planned for one step, as `mla_decode` takes it.

    What it says in Python never changes. The tensors are the schedule's buffers, which its next `build` fills anew, on
    the stream where it runs: calls that were enqueued before it have read them by then. Steps whose calls are
    enqueued later than another step's `build` need another DecodeSchedule.

    Attributes:
        batch, s_q, num_heads: of the calls that it serves.
        partitions: parts of the work, each for one CTA (for as many as there are row groups).
        row_tile: query rows that a CTA computes.
        work_ranges, split_offsets, workspace: the DecodeSchedule's.
    """

    batch: int
    s_q: int
    num_heads: int
    partitions: int
    row_tile: int
    work_ranges: Tensor
    split_offsets: Tensor
    workspace: Tensor | None

    # A tuple would compare and print what the tensors hold.
    def __eq__(self, other: object) -> bool:
        """Whether both say the same of the same buffers."""
        return isinstance(other, BuiltSchedule) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        parts = (f"{name}={_described(value)}" for name, value in zip(self._fields, self, strict=True))
        return f"BuiltSchedule({', '.join(parts)})"

    def _key(self) -> tuple[object, ...]:
        return tuple(id(value) if isinstance(value, Tensor) else value for value in self)


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"<{dtype_name(value.dtype)} {list(value.shape)} on {value.device}>"


class DecodeSchedule:
    """Per-CTA work partitions of one decode batch, in buffers whose addresses and shapes never change.

    Build it once per step, before the first layer; every layer's `mla_decode` then takes what `build` returned. Because
    neither addresses nor shapes change, a captured CUDA graph may replay `build` and the layers with other lengths, as
    long as batch and s_q are those of the capture.

    With `batch_invariant`, a request's result has the same bits whatever shares its batch: it is cut into at most
    `fixed_pieces` pieces, whose number and ends follow from its own length. That number is what the workspace has room
    for with max_batch requests of as many; it is 1, so that no request is split, when that leaves no two.

    Attributes:
        max_batch, num_heads, max_s_q, num_sms, device, fp8_cache, fp8_math: as given.
        any_batch: as given, and with batch_invariant.
        work_ranges: int32 [>= num_sms, 8]; row p holds partition p's begin_request, begin_tile, end_request, end_tile
            (exclusive) and begin_split, which piece of its first request it owns; then, for the combination, the p-th
            request that was split (-1 behind the last), the slot of its first partial result and their number. A tile
            is 64 tokens.
        split_offsets: int32 [max_batch + 1]; exclusive prefix of the number of partial results of each request, which
            is 0 for a request that one partition decodes alone.
        workspace: float32, for calls that bring none of their own; None where they all do.
        max_workspace_floats: elements that the workspace of a call may have to have.
        fixed_pieces: most pieces of a request where its length alone decides; 0 where the batch does.
    """

    def __init__(
        self,
        max_batch: int,
        num_heads: int,
        *,
        max_s_q: int = 1,
        device: torch.device | str = "cuda",
        num_sms: int | None = None,
        workspace: Tensor | None = None,
        allocate_workspace: bool = True,
        batch_invariant: bool = False,
        fp8_cache: bool = False,
        fp8_math: bool = False,
        any_batch: bool = False,
    ):
        """Allocate the buffers.

        Args:
            max_batch: most requests that one `build` will be given.
            num_heads: query heads on this GPU.
            max_s_q: most query tokens for each request.
            device: where the schedule and its work live, a CUDA device or the CPU.
            num_sms: CTAs to plan for; None means the device's multiprocessors (8 on the CPU).
            workspace: float32 [>= workspace_floats(...) of the same arguments] on `device`, to share among schedules.
            allocate_workspace: False where every call brings its own; nothing to a workspace that is given.
            batch_invariant: cut requests by their own length only. Slower: a short batch does not fill the GPU.
            fp8_cache: the cache that calls read is of float8_e4m3fn.
            fp8_math: they multiply such a cache as it is. Of the batch and both follows how 17 to 64 query rows lie on
                a GPU of fewer than 100 multiprocessors; others' calls are as right, and up to 15% slower there.
            any_batch: rows lie alike whatever the batch and the cache, so that every step has as many partitions; with
                batch_invariant they do. Short calls of few requests take up to 1.7 times as long there.

        Raises:
            ValueError: a count is below 1, the workspace too small or the device not there; TypeError: a count is no
                int, or the workspace is not float32; ImportError: there is no library, or one of another version.
        """
        self.max_batch, self.num_heads = count("max_batch", max_batch), count("num_heads", num_heads)
        self.max_s_q = count("max_s_q", max_s_q)
        self.device = _device(device)
        if num_sms is None:
            num_sms = sms_of(self.device)
        self.num_sms = num_sms = count("num_sms", num_sms)
        self.fp8_cache, self.fp8_math = bool(fp8_cache), bool(fp8_math)
        most = (self.max_batch, self.num_heads, self.max_s_q, num_sms)
        self.any_batch = bool(any_batch or batch_invariant)
        self.fixed_pieces = fixed_pieces(*most) if batch_invariant else 0
        ranges = max(num_sms, self.max_batch * self.fixed_pieces if self.fixed_pieces > 1 else 0)
        self.work_ranges = torch.zeros(ranges, WORK_RANGE_FIELDS, dtype=torch.int32, device=self.device)
        self.split_offsets = torch.zeros(self.max_batch + 1, dtype=torch.int32, device=self.device)
        self.max_workspace_floats = self.workspace_floats(
            *most[1:], max_batch=self.max_batch, batch_invariant=batch_invariant
        )
        if workspace is not None:
            self._check_workspace(workspace)
        elif allocate_workspace:
            workspace = torch.empty(self.max_workspace_floats, dtype=torch.float32, device=self.device)
        self.workspace = workspace

    @staticmethod
    def workspace_floats(
        num_heads: int, max_s_q: int, num_sms: int, *, max_batch: int = 1, batch_invariant: bool = False
    ) -> int:
        """Floats that the partial results need: at most two pieces a CTA, each with its output rows and log-sum-exp.

        Arguments as of the schedule. Raises ValueError and TypeError for a count that is below 1 or no int.
        """
        num_heads, max_s_q = count("num_heads", num_heads), count("max_s_q", max_s_q)
        num_sms, max_batch = count("num_sms", num_sms), count("max_batch", max_batch)
        pieces = fixed_pieces(max_batch, num_heads, max_s_q, num_sms) if batch_invariant else 0

        most = 0
        for s_q in range(1, max_s_q + 1):
            shape = decode_shape(num_heads * s_q, num_sms)
            partitions = max(shape.partitions(num_sms), max_batch * pieces if pieces > 1 else 0)
            # More rows may lie in more and smaller groups.
            most = max(most, shape.workspace_floats(partitions))
            if partitions == 1 and shape.row_tile == MOST_ROWS:
                break  # more rows are more groups from here on, and one partition, too
        return most

    def _check_workspace(self, workspace: Tensor) -> None:
        floats = self.max_workspace_floats
        if not isinstance(workspace, Tensor):
            raise TypeError(f"workspace: wanted a tensor, got {type(workspace).__name__}")
        if workspace.dtype != torch.float32:
            raise TypeError(f"workspace: wanted float32, got {workspace.dtype}")
        if workspace.device != self.device:
            raise ValueError(f"workspace: wanted a tensor on {self.device}, got one on {workspace.device}")
        if workspace.dim() != 1 or workspace.numel() < floats or not workspace.is_contiguous():
            raise ValueError(f"workspace: wanted a contiguous [>={floats}], got {list(workspace.shape)}")

    def shape(self, batch: int, s_q: int = 1) -> DecodeShape:
        """How the rows of a step of so many requests lie."""
        batch = ANY_BATCH if self.any_batch else batch
        return decode_shape(s_q * self.num_heads, self.num_sms, batch, self.fp8_cache, self.fp8_math)

    def build(self, seq_lens: Tensor, s_q: int = 1) -> BuiltSchedule:
        """Plan one step. Copies nothing to the host, allocates nothing, and may be captured in a CUDA graph.

        Args:
            seq_lens: int32 [batch <= max_batch] on the schedule's device, tokens of each request with the new ones.
            s_q: query tokens for each request, at most max_s_q.

        Returns:
            What `mla_decode` takes for this step.

        Raises:
            ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        """
        if not isinstance(seq_lens, Tensor):
            raise TypeError(f"seq_lens: wanted a tensor, got {type(seq_lens).__name__}")
        if seq_lens.device != self.device:
            raise ValueError(f"seq_lens: wanted a tensor on {self.device}, got one on {seq_lens.device}")
        if (s_q := count("s_q", s_q)) > self.max_s_q:
            raise ValueError(f"s_q: wanted 1 to {self.max_s_q} (max_s_q), got {s_q}")
        # A plan is for one number of requests: a compiler that left it open makes another graph for each.
        batch = operator.index(seq_lens.shape[0]) if seq_lens.dim() else 0
        shape = self.shape(batch, s_q)
        partitions = max(1, batch * self.fixed_pieces) if self.fixed_pieces > 1 else shape.partitions(self.num_sms)
        call = ScheduleCall(
            seq_lens,
            self.work_ranges,
            self.split_offsets,
            partitions,
            self.fixed_pieces,
            shape.split_rows,
            shape.piece_cost,
            shape.single_tiles,
        )
        _build(seq_lens, call)
        return BuiltSchedule(
            batch,
            s_q,
            self.num_heads,
            partitions,
            shape.row_tile,
            self.work_ranges,
            self.split_offsets,
            self.workspace,
        )
