"""Other libraries' calls, answered by ETAP: a module each, with that library's names, shapes and conventions."""

from torch import Tensor

from etap_backend._operator import type_name


def check_out(out: object, shape: tuple[int, ...]) -> None:
    """Refuse what is given for an output and is none of this shape; None is."""
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"out: wanted a tensor, got {type_name(out)}")
    if out.shape != shape or not out.is_contiguous():
        got = f"{list(out.shape)} with strides {list(out.stride())}"
        raise ValueError(f"out: wanted a contiguous {list(shape)}, got {got}")
