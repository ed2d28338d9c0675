"""Calls that must be refused on every device: tables whose rows spoil one argument of a valid call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from etap_backend import DecodeSchedule, mla_decode

BATCH, S_Q, HEADS, PAGES, PAGE_SIZE = 3, 2, 16, 7, 64
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Refusal:
    """A spoiled call, whose error has this type and a text that begins with the argument's name."""

    argument: str
    what: str
    error: type[Exception]
    function: Callable
    arguments: Callable[[str], dict]  # of a device

    def __str__(self) -> str:
        return f"{self.argument} {self.what}"

    @property
    def text(self) -> str:
        """A pattern that the whole text matches: every refusal says what was wanted and what came."""
        return rf"(?s)^{self.argument}\b.*: wanted .+, got .+"

    def call(self, device: str) -> None:
        self.function(**self.arguments(device))


def spoiled(function: Callable, valid: Callable[[str], dict], rows: list[tuple]) -> list[Refusal]:
    """Refusals of (argument, what, error, spoil[, base]).

    Args:
        valid: a device's valid arguments.
        rows: `spoil` makes the argument's new value of the one that it has, and whatever is no function is the new
            value; `base` first changes the valid call, whose arguments it is given, to another valid one.
    """
    found = []
    for argument, what, error, spoil, *base in rows:

        def arguments(device: str, argument=argument, spoil=spoil, base=base) -> dict:
            call = valid(device)
            for change in base:
                call |= change(call)
            return call | {argument: spoil(call[argument]) if callable(spoil) else spoil}

        found.append(Refusal(argument, what, error, function, arguments))
    return found


def strided(dim: int, step: int) -> Callable[[Tensor], Tensor]:
    """The same shape, with steps of `step` elements in `dim`."""

    def change(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= step
        return tensor.new_zeros(shape)[(slice(None),) * (dim % tensor.dim()) + (slice(None, None, step),)]

    return change


def wide(more: int, first: int = 0) -> Callable[[Tensor], Tensor]:
    """The same shape as a window of rows that are `more` elements longer."""
    return lambda x: x.new_zeros(*x.shape[:-1], x.shape[-1] + more)[..., first : first + x.shape[-1]]


def shifted(tensor: Tensor) -> Tensor:
    """The same shape, one element behind an aligned address."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)


def to(*target) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(*target)


def inside(other: Tensor, like: Tensor) -> Tensor:
    """What is like `like`, in the memory of `other`."""
    return other.flatten().view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)


def within(other: str, argument: str) -> Callable[[dict], dict]:
    """An argument in another's memory."""
    return lambda c: {argument: inside(c[other], c[argument])}


def workspace(floats: int = 10**6, **options) -> Callable[[dict], dict]:
    return lambda c: {"workspace": torch.zeros(floats, **{"device": c["q"].device, **options})}


SAME = lambda x: x  # noqa: E731
SCALES = [
    *(("softmax_scale", f"{value}", ValueError, value) for value in (0.0, -1.0, float("nan"), float("inf"), 1e39)),
    ("softmax_scale", "text", TypeError, "1"),
    ("softmax_scale", "None", TypeError, None),
    *(("empty_lse", f"{value}", ValueError, value) for value in (0.0, float("nan"))),
    *(("empty_lse", f"{value}", TypeError, value) for value in ("inf", None)),
]
"""What both calls refuse of their numbers."""
WORKSPACES = [
    ("workspace", "too small", ValueError, SAME, workspace(99)),
    ("workspace", "dtype", TypeError, SAME, workspace(dtype=torch.float64)),
    ("workspace", "strides", ValueError, lambda x: x[::2], workspace(10**7)),
    ("workspace", "dims", ValueError, lambda x: x[None], workspace(10**7)),
    ("workspace", "address", ValueError, lambda x: x[1:], workspace(10**7)),
    ("workspace", "on meta", ValueError, to("meta"), workspace()),
]


# ------------------------------------------------------------------------------------------------------ the dense call


def valid_call(device: str) -> dict:
    """Arguments of a call that is fine; each refusal spoils one of them."""
    options = {"dtype": torch.bfloat16, "device": device}
    seq_lens = torch.tensor([70, 1, 128], dtype=torch.int32, device=device)
    return {
        "q": torch.zeros(BATCH, S_Q, HEADS, 576, **options),
        "kv_cache": torch.zeros(PAGES, PAGE_SIZE, 576, **options),
        "block_table": torch.zeros(BATCH, 2, dtype=torch.int32, device=device),
        "seq_lens": seq_lens,
        "schedule": DecodeSchedule(BATCH, HEADS, max_s_q=S_Q, device=device, num_sms=8).build(seq_lens, S_Q),
        "softmax_scale": 576**-0.5,
        "q_rope": None,
        "rope_cache": None,
        "out": torch.zeros(BATCH, S_Q, HEADS, 512, **options),
        "lse": torch.zeros(BATCH, S_Q, HEADS, dtype=torch.float32, device=device),
    }


def split(call: dict) -> dict:
    return {"q": call["q"][..., :512], "q_rope": call["q"][..., 512:]}


def apart(call: dict) -> dict:
    return {"kv_cache": call["kv_cache"][..., :512], "rope_cache": call["kv_cache"][..., 512:]}


def fp8(call: dict) -> dict:
    """With an FP8 cache and a scale."""
    scale = torch.ones((), device=call["q"].device)
    return {"kv_cache": call["kv_cache"].to(FP8), "kv_scale": scale}


def fp8_query(call: dict) -> dict:
    return fp8(call) | {"q": call["q"].to(FP8), "q_scale": torch.ones((), device=call["q"].device)}


def allocated(call: dict) -> dict:
    return {"out": None}


def then(*changes) -> Callable[[dict], dict]:
    """One change after the other."""

    def change(call: dict) -> dict:
        for one in changes:
            call = call | one(call)
        return call

    return change


def _schedule(batch=BATCH, heads=HEADS, s_q=S_Q) -> Callable:
    """A schedule built for another call."""

    def build(planned) -> object:
        device = planned.work_ranges.device
        lens = torch.ones(batch, dtype=torch.int32, device=device)
        return DecodeSchedule(8, heads, max_s_q=4, device=device, num_sms=8).build(lens, s_q)

    return build


def _split_offsets_in_table(call: dict) -> dict:
    schedule = call["schedule"]._replace(split_offsets=call["block_table"].flatten().repeat(16))
    return {"schedule": schedule, "lse": inside(schedule.split_offsets, call["lse"])}


def _wide_table(call: dict) -> dict:
    return {"block_table": call["block_table"].repeat(1, 32)}


REFUSALS = spoiled(mla_decode, valid_call, [
    ("q", "layout", TypeError, lambda x: x.to_sparse()),
    ("q", "dtype", TypeError, to(torch.float32)),
    ("q", "dims", ValueError, lambda x: x.flatten(1, 2)),
    ("q", "dims without out", ValueError, lambda x: x.flatten(1, 2), allocated),
    ("q", "width", ValueError, lambda x: x[..., :512]),
    ("q", "width beside rope", ValueError, lambda x: x.new_zeros(BATCH, S_Q, HEADS, 576), split),
    ("q", "last stride", ValueError, strided(-1, 2)),
    ("q", "row step", ValueError, wide(4)),
    ("q", "first row", ValueError, wide(8, first=4)),
    ("q", "list without out", TypeError, [0.0], allocated),
    ("q", "fp8 without fp8 cache", TypeError, to(FP8)),
    ("q", "bytes", TypeError, lambda x: x.view(torch.uint8), fp8_query),
    ("q", "fp8 row step", ValueError, wide(8), fp8_query),
    ("q_rope", "dtype", TypeError, to(torch.float16), split),
    ("q_rope", "shape", ValueError, lambda x: x[..., :32], split),
    ("q_rope", "row step", ValueError, wide(4), split),
    ("q_rope", "unlike fp8 q", TypeError, to(torch.bfloat16), then(fp8_query, split)),
    ("q_rope", "fp8 beside other q", TypeError, to(FP8), then(fp8, split)),
    ("q_rope", "fp8 first row", ValueError, wide(16, first=8), then(fp8_query, split)),
    ("kv_cache", "layout", TypeError, lambda x: x.to_sparse()),
    ("kv_cache", "dtype", TypeError, to(torch.float16)),
    ("kv_cache", "bytes", TypeError, lambda x: x.view(torch.uint8), fp8),
    ("kv_cache", "e5m2", TypeError, to(torch.float8_e5m2)),
    ("kv_cache", "powers of two", TypeError, to(torch.float8_e8m0fnu)),
    ("kv_cache", "width", ValueError, lambda x: x[..., :512]),
    ("kv_cache", "width beside rope", ValueError, lambda x: x.new_zeros(PAGES, PAGE_SIZE, 576), apart),
    ("kv_cache", "fp8 width", ValueError, lambda x: x[..., :512], fp8),
    ("kv_cache", "heads", ValueError, lambda x: x.new_zeros(PAGES, PAGE_SIZE, 2, 576)),
    ("kv_cache", "no pages", ValueError, lambda x: x[:0]),
    ("kv_cache", "empty pages", ValueError, lambda x: x[:, :0]),
    ("kv_cache", "row step", ValueError, wide(4)),
    ("kv_cache", "fp8 row step", ValueError, wide(8), fp8),
    ("kv_cache", "last stride", ValueError, strided(-1, 2)),
    ("kv_cache", "pages in one place", ValueError, lambda x: x[:1].expand(PAGES, -1, -1)),
    ("kv_cache", "rows in one place", ValueError, lambda x: x[:, :1].expand(-1, PAGE_SIZE, -1)),
    ("rope_cache", "dtype", TypeError, to(torch.float16), apart),
    ("rope_cache", "width", ValueError, lambda x: x[..., :32], apart),
    ("rope_cache", "other pages", ValueError, lambda x: x[:, :32], apart),
    ("rope_cache", "row step", ValueError, wide(4), apart),
    ("rope_cache", "rows in one place", ValueError, lambda x: x[:, :1].expand(-1, PAGE_SIZE, -1), apart),
    ("rope_cache", "on meta", ValueError, to("meta"), apart),
    ("block_table", "dtype", TypeError, to(torch.int64)),
    ("block_table", "batch", ValueError, lambda x: x[:2]),
    ("block_table", "stride", ValueError, strided(1, 2)),
    ("block_table", "list", TypeError, [[0]]),
    ("seq_lens", "dtype", TypeError, to(torch.int64)),
    ("seq_lens", "batch", ValueError, lambda x: x[:2]),
    ("seq_lens", "stride", ValueError, strided(0, 2)),
    ("kv_scale", "of another cache", ValueError, SAME, lambda c: {"kv_scale": fp8(c)["kv_scale"]}),
    ("kv_scale", "dtype", TypeError, to(torch.float64), fp8),
    ("kv_scale", "shape", ValueError, lambda x: x.expand(3), fp8),
    ("kv_scale", "dims", ValueError, lambda x: x.view(1, 1), fp8),
    ("kv_scale", "on meta", ValueError, to("meta"), fp8),
    ("kv_scale", "number", TypeError, 1.0, fp8),
    ("q_scale", "of another q", ValueError, SAME, lambda c: fp8_query(c) | {"q": c["q"]}),
    ("q_scale", "dtype", TypeError, to(torch.bfloat16), fp8_query),
    ("q_scale", "shape", ValueError, lambda x: x.expand(16), fp8_query),
    ("q_scale", "on meta", ValueError, to("meta"), fp8_query),
    ("fp8_math", "without fp8 cache", ValueError, True),
    ("out_dtype", "unlike q", ValueError, torch.float16, allocated),
    ("out_dtype", "unlike q beside fp8 cache", ValueError, torch.float16, then(fp8, allocated)),
    ("out_dtype", "text", TypeError, "bfloat16", allocated),
    ("out_dtype", "of fp8 q", ValueError, torch.float32, then(fp8_query, allocated)),
    ("out_dtype", "unlike out", ValueError, torch.float16, fp8_query),
    ("out", "dtype", TypeError, to(torch.float32)),
    ("out", "unlike q beside fp8 cache", TypeError, to(torch.float16), fp8),
    ("out", "fp8", TypeError, to(FP8), fp8_query),
    ("out", "shape", ValueError, lambda x: x[..., :256]),
    ("out", "strides", ValueError, wide(8)),
    ("out", "address", ValueError, shifted),
    ("lse", "dtype", TypeError, to(torch.float64)),
    ("lse", "shape", ValueError, lambda x: x.view(3, 16, 2)),
    ("lse", "strides", ValueError, wide(1)),
    ("schedule", "unbuilt", TypeError, lambda x: DecodeSchedule(8, HEADS, device=x.work_ranges.device, num_sms=8)),
    ("schedule", "tuple", TypeError, (1, 2)),
    ("schedule", "batch", ValueError, _schedule(batch=2)),
    ("schedule", "heads", ValueError, _schedule(heads=8)),
    ("schedule", "s_q", ValueError, _schedule(s_q=1)),
    ("workspace", "of neither", TypeError, None, lambda c: {"schedule": c["schedule"]._replace(workspace=None)}),
    # What is written while others are read.
    ("out", "in q", ValueError, SAME, within("q", "out")),
    ("lse", "in q", ValueError, SAME, within("q", "lse")),
    ("out", "in kv_cache", ValueError, SAME, within("kv_cache", "out")),
    ("lse", "in out", ValueError, SAME, within("out", "lse")),
    ("lse", "in block_table", ValueError, SAME, then(_wide_table, within("block_table", "lse"))),
    ("lse", "in split_offsets", ValueError, SAME, _split_offsets_in_table),
    ("workspace", "with lse in it", ValueError, SAME, then(workspace(), within("workspace", "lse"))),
    # What is no tensor, or has no memory.
    *((name, "on meta", ValueError, to("meta")) for name in ("q", "kv_cache", "block_table", "seq_lens", "out", "lse")),
    *((name, "None", TypeError, None) for name in ("q", "kv_cache", "block_table", "seq_lens")),
    *((name, "None", TypeError, None) for name in ("schedule", "fp8_math", "early_loads")),
    *SCALES,
    *WORKSPACES,
])  # fmt: skip
