"""One `mla_decode` call of an engine's step, planned once and run by every layer."""

from dataclasses import dataclass

from torch import Tensor

from etap_backend.schedule import BuiltSchedule


@dataclass(frozen=True)
class DecodeCall:
    """The requests that one call decodes; each has `schedule.s_q` query tokens.

    Attributes:
        tokens: the call's part of the step's query tokens.
        block_table: int32 [requests, max_pages].
        seq_lens: int32 [requests], tokens of each request, the step's own included.
        schedule: what `DecodeSchedule.build` returned for these requests.
        early_loads: as in `mla_decode`.
    """

    tokens: slice
    block_table: Tensor
    seq_lens: Tensor
    schedule: BuiltSchedule
    early_loads: bool

    def rows(self, per_token: Tensor) -> Tensor:
        """The call's part of a tensor with one row per query token: [tokens, ...] as a view [requests, s_q, ...]."""
        return per_token[self.tokens].unflatten(0, (self.schedule.batch, self.schedule.s_q))
