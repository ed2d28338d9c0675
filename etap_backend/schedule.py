"""The plan of one decode step: which CTA works on which tiles of which request."""

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend.support import LATENT_DIM

MAX_GROUP_ROWS = 64
ROW_TILES = (8, 16, 32, 64)
WORK_RANGE_FIELDS = 8
BATCH_INVARIANT_BYTES = 60 * 2**20
"""Workspace that a batch-invariant schedule may take to split requests; without splits it needs none of it."""
CPU_SMS = 8
"""Partitions that a schedule on the CPU plans for: enough to split requests, small enough to follow by hand."""
MEMORY_SMS = 100
"""A Hopper GPU with fewer (an H20 has 78, an H100 at least 114) has few tensor cores for its memory."""


def row_groups(rows: int) -> int:
    """How many groups of at most 64 packed rows (row = query token * heads + head) cover `rows`."""
    return -(-rows // MAX_GROUP_ROWS)


def row_tile(rows: int) -> int:
    """Rows that the kernel computes for one group: the smallest of 8, 16, 32, 64 that holds min(rows, 64)."""
    return next(tile for tile in ROW_TILES if tile >= min(rows, MAX_GROUP_ROWS))


def fixed_pieces(max_batch: int, num_heads: int, max_s_q: int, num_sms: int) -> int:
    """Most pieces of a request in a batch-invariant schedule: as many as fill the GPU, if max_batch times them fit."""
    rows = num_heads * max_s_q
    slot_bytes = 4 * row_groups(rows) * row_tile(rows) * (LATENT_DIM + 1)
    return max(1, min(num_sms // row_groups(rows), BATCH_INVARIANT_BYTES // (2 * slot_bytes * max_batch)))


class DecodeSchedule:
    """Per-CTA work partitions of one decode batch, in buffers whose addresses and shapes never change.

    Build it once per step, before the first layer; every layer's `mla_decode` then reads it. Because neither addresses
    nor shapes change, a captured CUDA graph may replay `build` and the layers with other lengths, as long as batch and
    s_q are those of the capture.

    With `batch_invariant`, a request's result has the same bits whatever shares its batch: it is cut into at most
    `fixed_pieces` pieces, whose number and ends follow from its own length. That number is what the workspace has room
    for with max_batch requests of as many; it is 1, so that no request is split, when that leaves no two.

    Attributes:
        work_ranges: int32 [>= num_sms, 8]; row p holds partition p's begin_request, begin_tile, end_request, end_tile
            (exclusive) and begin_split, which piece of its first request it owns; then, for the combination, the p-th
            request that was split (-1 behind the last), the slot of its first partial result and their number. A tile
            is 64 tokens.
        split_offsets: int32 [max_batch + 1]; exclusive prefix of the number of partial results of each request, which
            is 0 for a request that one partition decodes alone.
        workspace: float32 [>= workspace_floats(...)]; the partial results. Schedules used on one stream may share it.
        fixed_pieces: most pieces of a request where its length alone decides; 0 where the batch does.
        batch, s_q, partitions: what the last `build` planned for; batch is None before the first.
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
        batch_invariant: bool = False,
    ):
        """Allocate the buffers.

        Args:
            max_batch: most requests that one `build` will be given.
            num_heads: query heads on this GPU.
            max_s_q: most query tokens for each request.
            device: where the schedule and its work live, a CUDA device or the CPU.
            num_sms: CTAs to plan for; None means the device's multiprocessors (8 on the CPU).
            workspace: float32 [>= workspace_floats(...) of the same arguments] on `device`, to share among schedules.
            batch_invariant: cut requests by their own length only. Slower: a short batch does not fill the GPU.

        Raises:
            ValueError: a count is below 1 or the workspace too small; TypeError: the workspace is not float32.
        """
        for name, value in {"max_batch": max_batch, "num_heads": num_heads, "max_s_q": max_s_q}.items():
            if value < 1:
                raise ValueError(f"{name}: wanted at least 1, got {value}")
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if num_sms is None:
            on_gpu = device.type == "cuda"
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else CPU_SMS
        if num_sms < 1:
            raise ValueError(f"num_sms: wanted at least 1, got {num_sms}")
        self.max_batch, self.num_heads, self.max_s_q, self.num_sms = max_batch, num_heads, max_s_q, num_sms
        self.device = device
        self.fixed_pieces = fixed_pieces(max_batch, num_heads, max_s_q, num_sms) if batch_invariant else 0
        ranges = max(num_sms, max_batch * self.fixed_pieces if self.fixed_pieces > 1 else 0)
        self.work_ranges = torch.zeros(ranges, WORK_RANGE_FIELDS, dtype=torch.int32, device=device)
        self.split_offsets = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.workspace = self._checked_workspace(workspace)
        self.batch: int | None = None
        self.s_q = 0
        self.partitions = 0

    @staticmethod
    def workspace_floats(
        num_heads: int, max_s_q: int, num_sms: int, *, max_batch: int = 1, batch_invariant: bool = False
    ) -> int:
        """Floats that the partial results need: at most two pieces a CTA, each with its output rows and log-sum-exp."""
        rows = num_heads * max_s_q
        pieces = fixed_pieces(max_batch, num_heads, max_s_q, num_sms) if batch_invariant else 0
        ctas = max(num_sms, max_batch * pieces * row_groups(rows) if pieces > 1 else 0)
        return 2 * ctas * row_tile(rows) * (LATENT_DIM + 1)

    def _checked_workspace(self, workspace: Tensor | None) -> Tensor:
        floats = self.workspace_floats(
            self.num_heads,
            self.max_s_q,
            self.num_sms,
            max_batch=self.max_batch,
            batch_invariant=self.fixed_pieces > 0,
        )
        if workspace is None:
            return torch.empty(floats, dtype=torch.float32, device=self.device)
        if workspace.dtype != torch.float32:
            raise TypeError(f"workspace: wanted float32, got {workspace.dtype}")
        if workspace.device != self.device:
            raise ValueError(f"workspace: wanted a tensor on {self.device}, got one on {workspace.device}")
        if workspace.dim() != 1 or workspace.numel() < floats or not workspace.is_contiguous():
            raise ValueError(f"workspace: wanted a contiguous [>={floats}], got {list(workspace.shape)}")
        return workspace

    def _rows_of_a_split(self, s_q: int) -> int:
        """Query rows by which the batch's division weighs what a split costs beside a tile."""
        # Where tensor cores are few, a tile takes longer with more rows, a piece's start and end do not, and
        # no CTA reads faster because others have ended.
        return row_tile(s_q * self.num_heads) if self.num_sms >= MEMORY_SMS else 0

    def build(self, seq_lens: Tensor, s_q: int = 1) -> "DecodeSchedule":
        """Plan one step. Copies nothing to the host, allocates nothing, and may be captured in a CUDA graph.

        Args:
            seq_lens: int32 [batch <= max_batch] on the schedule's device, tokens of each request with the new ones.
            s_q: query tokens for each request, at most max_s_q.

        Returns:
            The schedule itself.

        Raises:
            ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        """
        if seq_lens.dtype != torch.int32:
            raise TypeError(f"seq_lens: wanted int32, got {seq_lens.dtype}")
        if seq_lens.dim() != 1 or seq_lens.shape[0] > self.max_batch or not seq_lens.is_contiguous():
            wanted = f"contiguous [batch <= {self.max_batch}]"
            raise ValueError(f"seq_lens: wanted {wanted}, got {list(seq_lens.shape)} with strides {seq_lens.stride()}")
        if seq_lens.device != self.device:
            raise ValueError(f"seq_lens: wanted a tensor on {self.device}, got one on {seq_lens.device}")
        if not 1 <= s_q <= self.max_s_q:
            raise ValueError(f"s_q: wanted 1 to {self.max_s_q} (max_s_q), got {s_q}")
        partitions = max(1, self.num_sms // row_groups(s_q * self.num_heads))
        if self.fixed_pieces > 1:
            partitions = max(1, seq_lens.shape[0] * self.fixed_pieces)
        buffers = (seq_lens, self.work_ranges, self.split_offsets)
        if self.fixed_pieces:
            library().build_fixed_schedule(*buffers, partitions, self.fixed_pieces)
        else:
            library().build_schedule(*buffers, partitions, self._rows_of_a_split(s_q))
        self.batch, self.s_q, self.partitions = seq_lens.shape[0], s_q, partitions
        return self
