"""Calls of other libraries on ETAP's kernels: one module per library, with its names, shapes and conventions."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._operator import check_tensor, type_name
from etap_backend.limits import dtype_name
from etap_backend.schedule import BuiltSchedule, DecodeSchedule

Result = TypeVar("Result")
UNSPLIT_BATCH = 1024
"""A batch-invariant schedule for this many requests splits none, whatever their heads."""


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
    """Plan for `rows` query rows per request, whatever their tokens and heads.

    There are as many work ranges as partitions, and offsets for `room` requests, so that the shapes describe the plan.
    With `handed_over` the caller keeps only these tensors: the plan has no workspace, and the same number of partitions
    for every batch.
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
    """A view of a block table [b, n] with all columns that its rows have in memory.

    Other libraries read as many columns as lengths ask for. Their programs capture CUDA graphs with a few columns of a
    wide table and replay them with longer contexts; ETAP's kernels read no column beyond the shape. The last row ends
    with the storage at the latest.
    """
    (rows, columns), (step, between) = table.shape, table.stride()
    if step == columns or between != 1 or type(table) is not Tensor or is_compiling():  # fake tensors have no storage
        return table
    after = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    room = min(step, after - (rows - 1) * step)
    return table.as_strided((rows, room), (step, 1)) if room > columns else table


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A refusal with the words in `names` replaced by the caller's argument names."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def named(names: Mapping[str, str], call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """The result of `call`, whose refusals are `renamed`."""
    try:
        return call(*arguments, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        kind = next(one for one in (TypeError, NotImplementedError, ValueError) if isinstance(error, one))
        raise kind(renamed(str(error), names)) from error


def refuse_options(
    options: Mapping[str, Any], choices: Mapping[str, tuple] | None = None, no_effect: Collection[str] = ()
) -> None:
    """Refuse options by name, but for None, False, 0, the values in `choices` and the names in `no_effect`."""
    for name, value in options.items():
        if value is None or name in no_effect:
            continue
        allowed = (choices or {}).get(name, (False, 0))
        if isinstance(value, Tensor) or value not in allowed:
            got = repr(value) if isinstance(value, bool | str | int | float | tuple | list) else type_name(value)
            raise NotImplementedError(f"{name}: wanted {' or '.join(map(repr, ('None', *allowed)))}, got {got}")


def check_out(
    name: str,
    out: object,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    q: Tensor,
    *,
    contiguous: bool = True,
) -> None:
    """Refuse an output that does not fit the queries; None fits."""
    if out is None:
        return
    out = check_tensor(name, out)
    wrong_strides = contiguous and not out.is_contiguous()
    if out.shape != shape or out.dtype not in dtypes or out.device != q.device or wrong_strides:
        types = " or ".join(map(dtype_name, dtypes))
        wanted = f"a {'contiguous ' if contiguous else ''}{list(shape)} of {types} on {q.device}"
        got = f"{list(out.shape)} of {dtype_name(out.dtype)} on {out.device} with strides {list(out.stride())}"
        raise ValueError(f"{name}: wanted {wanted}, got {got}")
