"""Other libraries' calls, answered by ETAP: a module each, with that library's names, shapes and conventions."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._operator import check_tensor
from etap_backend.limits import dtype_name
from etap_backend.schedule import BuiltSchedule, DecodeSchedule

Result = TypeVar("Result")
UNSPLIT_BATCH = 1024
"""A batch-invariant schedule with room for so many requests splits none, whatever their heads."""


def plan(
    lengths: Tensor,
    room: int,
    rows: int,
    device: torch.device,
    *,
    batch_invariant: bool,
    fp8_cache: bool = False,
    fp8_math: bool = False,
    handed_over: bool = False,
) -> BuiltSchedule:
    """Plan for so many query rows of each request, tokens times heads; how they are shaped plays no part.

    There are as many work ranges as partitions, and offsets for `room` requests: in tensors that a caller hands over
    the shapes alone say how many; then, with `handed_over`, calls bring a workspace, and every batch has as many
    partitions.
    """
    schedule = DecodeSchedule(
        max(room, UNSPLIT_BATCH if batch_invariant else 1),
        rows,
        device=device,
        allocate_workspace=not handed_over,
        any_batch=handed_over,
        batch_invariant=batch_invariant,
        fp8_cache=fp8_cache,
        fp8_math=fp8_math,
    )
    built = schedule.build(lengths)
    work_ranges, split_offsets = built.work_ranges[: built.partitions], built.split_offsets[: room + 1]
    return built._replace(work_ranges=work_ranges, split_offsets=split_offsets)


def whole_rows(table: Tensor) -> Tensor:
    """A block table [b, n] with all columns that its rows have in memory, as elsewhere only lengths limit a row.

    Their programs capture CUDA graphs with a few columns of a wide table, and replay them with longer contexts. Our
    kernels read no more columns than they are told of. The last row ends with the storage at the latest.
    """
    (rows, columns), (step, between) = table.shape, table.stride()
    if step == columns or between != 1 or type(table) is not Tensor or is_compiling():  # fake tensors have no storage
        return table
    behind = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    room = min(step, behind - (rows - 1) * step)
    return table.as_strided((rows, room), (step, 1)) if room > columns else table


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A text of ETAP's in the caller's words: `names` has the caller's names by ETAP's."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def named(names: Mapping[str, str], call: Callable[..., Result], *arguments: object, **options: object) -> Result:
    """What `call` returns; what it refuses it refuses in the caller's words, `names` as of `renamed`."""
    try:
        return call(*arguments, **options)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(renamed(str(error), names)) from error


def check_out(
    name: str,
    out: object,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    q: Tensor,
    *,
    contiguous: bool = True,
) -> None:
    """Refuse what is given for an output beside queries and cannot be one; None is."""
    if out is None:
        return
    out = check_tensor(name, out)
    lies_wrong = contiguous and not out.is_contiguous()
    if out.shape != shape or out.dtype not in dtypes or out.device != q.device or lies_wrong:
        types = " or ".join(map(dtype_name, dtypes))
        wanted = f"a {'contiguous ' if contiguous else ''}{list(shape)} of {types} on {q.device}"
        got = f"{list(out.shape)} of {dtype_name(out.dtype)} on {out.device} with strides {list(out.stride())}"
        raise ValueError(f"{name}: wanted {wanted}, got {got}")
