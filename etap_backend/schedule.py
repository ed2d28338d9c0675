"""The plan of one decode step: which CTA computes which tiles of which request."""

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend._operator import Operator, constant_result, library_function, schema, type_name
from etap_backend.calls import ScheduleCall, SharedScheduleCall
from etap_backend.limits import (
    LATENT_DIM,
    MAX_COUNT,
    MAX_SMS,
    MOST_SHARED,
    SHARED_FIELDS,
    WORK_RANGE_FIELDS,
    count,
    dtype_name,
)

BATCH_INVARIANT_BYTES = 60 * 2**20
"""Workspace that a batch-invariant schedule may take for splitting requests."""
MOST_ROWS = 64
"""The largest row tile."""
ANY_BATCH = 0
"""In place of a step's number of requests: row tiles are those of every batch."""
CPU_SMS = 8
"""Partitions of a schedule on the CPU: enough to split requests, few enough to follow by hand."""


# An operator, so that fake tensors, which have no memory, do not reach the library.
_build = Operator(
    schema("build_schedule", ScheduleCall, written=("work_ranges", "split_offsets")),
    *(library_function("build_schedule"),) * 2,
)


_build_shared = Operator(
    schema("build_shared_schedule", SharedScheduleCall, written=("work_ranges", "split_offsets", "shared")),
    *(library_function("build_shared_schedule"),) * 2,
)


class DecodeShape(NamedTuple):
    """How the kernels compute a number of query rows (query tokens * heads); the compiled library decides it.

    Attributes:
        row_tile: query rows that a CTA computes: 8, 16, 32 or 64.
        row_groups: CTAs that share a split, each with another row tile.
        partial_floats: floats of the workspace that a CTA's partial takes.
        split_rows: the weight of one more split in a schedule; sparse calls have none.
        split_cost: a split's fixed cost in a schedule, in tiles.
        single_tiles: tiles of the longest request up to which a schedule makes every tile a split, if each gets a
            partition.
    """

    row_tile: int
    row_groups: int
    partial_floats: int
    split_rows: int
    split_cost: int
    single_tiles: int

    def partitions(self, num_sms: int) -> int:
        """Partitions of the work, each for one CTA per row group."""
        return max(1, num_sms // self.row_groups)

    def workspace_floats(self, partitions: int) -> int:
        """Floats of all partials: a partition has at most two, of the requests that it begins and ends in.

        A single partition splits no request.
        """
        return 2 * partitions * self.row_groups * self.partial_floats if partitions > 1 else 0


@functools.cache
@constant_result
def decode_shape(
    rows: int, num_sms: int, batch: int = ANY_BATCH, fp8_cache: bool = False, fp8_math: bool = False
) -> DecodeShape:
    """The shape of a request's query rows in a schedule for so many CTAs; arguments as for `DecodeSchedule`.

    With ANY_BATCH the shape depends neither on the batch nor on the cache; no other shape of as many rows takes more
    workspace. Raises ImportError without a library, ValueError for a count outside 1..MAX_COUNT or MAX_SMS.
    """
    rows, num_sms = count("rows", rows), count("num_sms", num_sms, MAX_SMS)
    return DecodeShape(*library().decode_shape(rows, num_sms, batch, fp8_cache, fp8_math))


class StackShape(NamedTuple):
    """How requests with common pages are decoded together; the compiled library decides it.

    Attributes:
        row_tile: query rows of the CTA that decodes a stack.
        places: requests that fill it; below 2 none are stacked.
        least: requests that a stack needs.
        least_tiles: tiles of all requests in stacks that a step needs.
    """

    row_tile: int
    places: int
    least: int
    least_tiles: int

    def exists(self, batch: int) -> bool:
        """Whether so many requests may have a stack."""
        return self.places > 1 and batch >= self.least

    def workspace_floats(self, shape: DecodeShape, num_sms: int, batch: int) -> int:
        """Floats of all partials: of the requests, whose query rows have this shape, and of the stacks."""
        own = (shape.partitions(num_sms) + batch) * shape.row_groups * shape.partial_floats
        return own + (num_sms + batch // self.least) * self.row_tile * (LATENT_DIM + 1)


@functools.cache
@constant_result
def stack_shape(rows: int, num_sms: int) -> StackShape:
    """The shape of stacks of requests with so many query rows, in a schedule for so many CTAs."""
    return StackShape(*library().stack_shape(rows, num_sms))


def fixed_splits(max_batch: int, num_heads: int, max_s_q: int, num_sms: int) -> int:
    """Most splits per request in a batch-invariant schedule: as many as fill the GPU and fit the workspace."""
    shape = decode_shape(num_heads * max_s_q, num_sms)
    slot_bytes = 4 * shape.row_groups * shape.partial_floats
    return max(1, min(shape.partitions(num_sms), BATCH_INVARIANT_BYTES // (2 * slot_bytes * max_batch)))


def _row_counts(num_heads: int, max_s_q: int) -> tuple[int, int]:
    """Both as ints. Raises as `count`; their product is one, too."""
    num_heads = count("num_heads", num_heads)
    return num_heads, count("max_s_q", max_s_q, MAX_COUNT // num_heads)


@functools.cache
@constant_result  # torch.compile cannot trace a GPU's properties
def sms_of(device: torch.device, on_cpu: int = CPU_SMS) -> int:
    """CTAs that fill a device: a GPU's multiprocessors, or `on_cpu`."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else on_cpu


@constant_result  # torch.compile cannot trace the question
def _cuda_devices() -> int:
    return torch.cuda.device_count()


def _device(device: torch.device | str) -> torch.device:
    """The device with its number. Raises ValueError for any but the CPU and CUDA devices that torch sees."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is not None and found.type == "cpu":
        return torch.device("cpu")  # tensors there have no number
    if found is None or found.type != "cuda" or (found.index or 0) >= _cuda_devices():
        raise ValueError(f"device: wanted the CPU or a CUDA device that torch sees, got {device}")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


class BuiltSchedule(NamedTuple):
    """The plan of one step, which `DecodeSchedule.build` makes and `mla_decode` takes.

    Its numbers never change. Its tensors are the schedule's buffers; the next `build` refills them on its stream, after
    the calls that were enqueued before it. A step whose calls are enqueued after another step's `build` needs another
    DecodeSchedule.

    Attributes:
        batch, s_q, num_heads: of the calls that the plan serves.
        partitions: partitions of the work, each for one CTA per row group.
        row_tile: query rows that a CTA computes.
        num_sms: CTAs that the work was divided for.
        work_ranges, split_offsets, workspace: the DecodeSchedule's.
        shared: the DecodeSchedule's; None without shared_prefix, and where batch and query rows allow no stack.
        page_size: tokens of the pages that `shared` was found in; None beside None.
    """

    batch: int
    s_q: int
    num_heads: int
    partitions: int
    row_tile: int
    num_sms: int
    work_ranges: Tensor
    split_offsets: Tensor
    workspace: Tensor | None
    shared: Tensor | None = None
    page_size: int | None = None

    # A tuple's own methods would compare and print the tensors' elements.
    def __eq__(self, other: object) -> bool:
        """Whether both have the same numbers and the same buffers."""
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
    """Partitions of one decode batch, one per CTA, in buffers whose addresses and shapes never change.

    Build it once per step, before the first layer; every layer's `mla_decode` then takes what `build` returned. Because
    neither addresses nor shapes change, a captured CUDA graph may replay `build` and the layers with other lengths, as
    long as batch and s_q are those of the capture.

    With `batch_invariant`, a request's result has the same bits whatever else is in its batch: its own length decides
    into how many splits it is cut, and where. It has at most `fixed_splits` splits, which the workspace holds for
    max_batch requests; where it does not hold two for each, no request is split.

    With `shared_prefix`, requests whose block tables begin with the same pages form stacks, as many as fill the 64
    query rows of one CTA: four of 16 rows, eight of 8, two of 32. What they have in common is read once for all of
    them. Each step's `build` finds the stacks on the device; where too little is shared for that to pay there are none.
    Where tensor cores are few only requests of 8 rows share, in pairs. Other steps and batches may round differently.

    Attributes:
        max_batch, num_heads, max_s_q, num_sms, device, fp8_cache, fp8_math: as given.
        any_batch: as given; True with batch_invariant.
        work_ranges: int32 [>= num_sms, 8]; row p holds partition p's begin_request, begin_tile, end_request, end_tile
            (exclusive) and begin_split, the index of its split of begin_request; then, for the combine, the p-th
            request that is split (-1 after the last), the slot of its first partial and the number of its partials. A
            tile is 64 tokens.
        split_offsets: int32 [max_batch + 1]; exclusive prefix sum of the requests' numbers of partials, which is 0
            for a request that one partition computes.
        workspace: float32, for calls without their own; None where every call has its own.
        max_workspace_floats: the most elements that a call needs in its workspace.
        fixed_splits: most splits per request where its length alone decides; 0 where the batch does.
        shared: int32 [SHARED_FIELDS, max_batch], the stacks of a step, see csrc/schedule/shared_prefixes.h; None
            without shared_prefix.
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
        shared_prefix: bool = False,
    ):
        """Allocate the buffers.

        Args:
            max_batch: most requests of one `build`.
            num_heads: query heads on this GPU.
            max_s_q: most query tokens per request.
            device: a CUDA device or the CPU, where the buffers are.
            num_sms: CTAs to plan for; None means the device's multiprocessors (8 on the CPU).
            workspace: float32 [>= workspace_floats(...) of the same arguments] on `device`, to share among schedules.
            allocate_workspace: False where every call has its own workspace; without effect beside `workspace`.
            batch_invariant: split requests by their own length only. Slower: a short batch does not fill the GPU.
            fp8_cache: the calls read a float8_e4m3fn cache.
            fp8_math: the calls multiply such a cache in FP8. On a GPU with fewer than 100 multiprocessors the batch,
                fp8_cache and fp8_math decide the row tile of 17 to 64 query rows; calls of another kind give right
                results there, up to 15% slower.
            any_batch: one row tile for every batch and cache, so that every step has equally many partitions; implied
                by batch_invariant. On those GPUs short calls of few requests take up to 1.7 times as long.
            shared_prefix: read once what requests' block tables have in common; not beside batch_invariant, since then
                a request's rounding depends on who shares its pages. The workspace is larger.

        Raises:
            ValueError: a count is below 1 or too large (at most MAX_COUNT, CTAs MAX_SMS, of etap_backend.limits; the
                first also for num_heads * max_s_q; max_batch MOST_SHARED with shared_prefix), the workspace too small,
                the device absent, or both batch_invariant and shared_prefix are wanted.
            TypeError: a count is not an int, or the workspace is not float32.
            ImportError: the compiled library is missing or of another version.
        """
        self.max_batch = count("max_batch", max_batch)
        self.num_heads, self.max_s_q = _row_counts(num_heads, max_s_q)
        self.device = _device(device)
        if num_sms is None:
            num_sms = sms_of(self.device)
        self.num_sms = num_sms = count("num_sms", num_sms, MAX_SMS)
        self.fp8_cache, self.fp8_math = bool(fp8_cache), bool(fp8_math)
        most = (self.max_batch, self.num_heads, self.max_s_q, num_sms)
        self.any_batch = bool(any_batch or batch_invariant)
        if batch_invariant and shared_prefix:
            raise ValueError("shared_prefix: wanted False beside batch_invariant, got True for both")
        if shared_prefix:
            count("max_batch", max_batch, MOST_SHARED)
        self.fixed_splits = fixed_splits(*most) if batch_invariant else 0
        ranges = max(num_sms, self.max_batch * self.fixed_splits if self.fixed_splits > 1 else 0)
        ranges += num_sms if shared_prefix else 0  # the stacks'
        self.work_ranges = torch.zeros(ranges, WORK_RANGE_FIELDS, dtype=torch.int32, device=self.device)
        self.split_offsets = torch.zeros(self.max_batch + 1, dtype=torch.int32, device=self.device)
        self.shared = None
        if shared_prefix:
            self.shared = torch.zeros(SHARED_FIELDS, self.max_batch, dtype=torch.int32, device=self.device)
        self.max_workspace_floats = self.workspace_floats(
            *most[1:], max_batch=self.max_batch, batch_invariant=batch_invariant, shared_prefix=shared_prefix
        )
        if workspace is not None:
            self._check_workspace(workspace)
        elif allocate_workspace:
            workspace = torch.empty(self.max_workspace_floats, dtype=torch.float32, device=self.device)
        self.workspace = workspace

    @staticmethod
    def workspace_floats(
        num_heads: int,
        max_s_q: int,
        num_sms: int,
        *,
        max_batch: int = 1,
        batch_invariant: bool = False,
        shared_prefix: bool = False,
    ) -> int:
        """Floats that the partials need: at most two per CTA, each with its output rows and log-sum-exp.

        With shared_prefix requests have partials, too, and so have stacks.

        Arguments as for the schedule. Raises ValueError and TypeError for counts as there.
        """
        num_heads, max_s_q = _row_counts(num_heads, max_s_q)
        num_sms, max_batch = count("num_sms", num_sms, MAX_SMS), count("max_batch", max_batch)
        splits = fixed_splits(max_batch, num_heads, max_s_q, num_sms) if batch_invariant else 0

        most = 0
        for s_q in range(1, max_s_q + 1):
            shape = decode_shape(num_heads * s_q, num_sms)
            partitions = max(shape.partitions(num_sms), max_batch * splits if splits > 1 else 0)
            # More rows may need more and smaller row groups.
            most = max(most, shape.workspace_floats(partitions))
            if shared_prefix and (stack := stack_shape(num_heads * s_q, num_sms)).exists(max_batch):
                most = max(most, stack.workspace_floats(shape, num_sms, max_batch))
            if partitions == 1 and shape.row_tile == MOST_ROWS:
                break  # from here on more rows mean more row groups, still with one partition
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
        """The shape of a step with so many requests."""
        batch = ANY_BATCH if self.any_batch else batch
        return decode_shape(s_q * self.num_heads, self.num_sms, batch, self.fp8_cache, self.fp8_math)

    def build(
        self, seq_lens: Tensor, s_q: int = 1, *, block_table: Tensor | None = None, page_size: int | None = None
    ) -> BuiltSchedule:
        """Plan one step. Copies nothing to the host, allocates nothing, and may be captured in a CUDA graph.

        Args:
            seq_lens: int32 [batch <= max_batch] on the schedule's device, tokens of each request, new ones included.
            s_q: query tokens per request, at most max_s_q.
            block_table: int32 [batch, max_pages] on the schedule's device, which the step's calls read; gaps between
                rows are allowed. Required with shared_prefix, else ignored. Entries behind a request's tokens are not
                read.
            page_size: tokens of a page, with block_table.

        Returns:
            The plan that this step's `mla_decode` calls take.

        Raises:
            ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        """
        if not isinstance(seq_lens, Tensor):
            raise TypeError(f"seq_lens: wanted a tensor, got {type(seq_lens).__name__}")
        if seq_lens.device != self.device:
            raise ValueError(f"seq_lens: wanted a tensor on {self.device}, got one on {seq_lens.device}")
        if (s_q := count("s_q", s_q)) > self.max_s_q:
            raise ValueError(f"s_q: wanted 1 to {self.max_s_q} (max_s_q), got {s_q}")
        # The plan depends on the number of requests: torch.compile makes one graph per number.
        batch = operator.index(seq_lens.shape[0]) if seq_lens.dim() else 0
        shape = self.shape(batch, s_q)
        partitions = max(1, batch * self.fixed_splits) if self.fixed_splits > 1 else shape.partitions(self.num_sms)
        buffers = (self.work_ranges, self.split_offsets)
        costs = (shape.split_rows, shape.split_cost, shape.single_tiles)
        shared = None
        if self.shared is not None:
            table, page_size = self._checked_pages(block_table, page_size, batch)
            stack = stack_shape(s_q * self.num_heads, self.num_sms)
            if stack.exists(batch):
                shared = self.shared
                numbers = (page_size, s_q, self.num_heads, stack.least_tiles, partitions, self.num_sms)
                _build_shared(seq_lens, SharedScheduleCall(seq_lens, table, *buffers, shared, *numbers, *costs))
        if shared is None:
            _build(seq_lens, ScheduleCall(seq_lens, *buffers, partitions, self.fixed_splits, *costs))
        return BuiltSchedule(
            batch,
            s_q,
            self.num_heads,
            partitions,
            shape.row_tile,
            self.num_sms,
            self.work_ranges,
            self.split_offsets,
            self.workspace,
            shared,
            None if shared is None else page_size,
        )

    def _checked_pages(self, block_table: Tensor | None, page_size: int | None, batch: int) -> tuple[Tensor, int]:
        if not isinstance(block_table, Tensor) or block_table.dtype != torch.int32:
            found = block_table.dtype if isinstance(block_table, Tensor) else type_name(block_table)
            raise TypeError(f"block_table: wanted a tensor of int32 with shared_prefix, got {found}")
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.device != self.device:
            found = f"{list(block_table.shape)} on {block_table.device}"
            raise ValueError(f"block_table: wanted [{batch}, max_pages] on {self.device}, got {found}")
        if page_size is None:
            raise TypeError("page_size: wanted an int with shared_prefix, got None")
        return block_table, count("page_size", page_size)
