"""The way of a public call to the library: past torch's dispatcher for plain tensors, through it for compilers."""

import functools
import itertools
import string
from collections.abc import Callable, Collection
from typing import get_type_hints

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._library import library

_LIBRARY = torch.library.Library("etap_backend", "DEF")


@functools.cache
def compiled(name: str) -> Callable:
    """A function of the compiled library."""
    return library().get_function(name)


def type_name(value: object) -> str:
    """As a refusal names what came."""
    return "None" if value is None else type(value).__name__


SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", int | None: "int?", float: "float", bool: "bool",
}  # fmt: skip


def schema(name: str, takes: Callable[..., object], written: Collection[str]) -> str:
    """torch's schema of an operator with the fields of a named tuple or a function's parameters; `written` it fills."""
    letters, arguments = itertools.count(), []
    hints = get_type_hints(takes)
    hints.pop("return", None)
    for field, hint in hints.items():
        kind = SCHEMA_TYPES[hint]
        if field in written:
            kind = kind.replace("Tensor", f"Tensor({string.ascii_lowercase[next(letters)]}!)")
        arguments.append(f"{kind} {field}")
    return f"{name}({', '.join(arguments)}) -> ()"


class Operator:
    """A torch operator with the arguments of a function of the library.

    The operator is what torch.compile and fake tensors see. Plain tensors go to the library directly: on its way
    through torch's dispatcher a call with so many arguments takes as long as a short decode step.
    """

    def __init__(self, schema: str, on_cuda: Callable[..., None], on_cpu: Callable[..., None]):
        """Register it.

        Args:
            schema: torch's, without the namespace.
            on_cuda, on_cpu: what runs the arguments there, and refuses by itself what it can look at.
        """
        # Defined by hand: torch.library.custom_op costs several microseconds more. The strides of queries and caches
        # carry meaning: torch.compile must pass them as they are.
        _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        name = schema.partition("(")[0]
        # The types of what is computed are ours to choose: autocast would make bfloat16 of float32 products.
        self._on_cuda, self._on_cpu = on_cuda, torch.autocast("cpu", enabled=False)(on_cpu)
        _LIBRARY.impl(name, lambda *arguments: self._run(True, arguments), "CUDA")
        _LIBRARY.impl(name, lambda *arguments: self._run(False, arguments), "CPU")
        torch.library.register_fake(f"etap_backend::{name}", lambda *arguments: None, lib=_LIBRARY)
        self._operator = getattr(torch.ops.etap_backend, name).default

    def __call__(self, q: Tensor, arguments: tuple) -> None:
        """Run the arguments where `q`, one of them, is."""
        if type(q) is not Tensor or is_compiling():
            if not isinstance(q, Tensor):
                self._refuse_what_cannot_cross(arguments)
            self._operator(*arguments)
        else:
            self._run(q.is_cuda, arguments)

    def _run(self, on_cuda: bool, arguments: tuple) -> None:
        try:
            (self._on_cuda if on_cuda else self._on_cpu)(*arguments)
        except Exception:
            # What never reached the library is looked at here, and only then.
            self._refuse_what_cannot_cross(arguments)
            raise

    def _refuse_what_cannot_cross(self, arguments: tuple) -> None:
        """Name the argument that cannot be handed to the library; nothing where all can."""
        for wanted, value in zip(self._operator._schema.arguments, arguments, strict=True):
            kind = str(wanted.type)
            if kind == "Tensor" or kind == "Optional[Tensor]" and value is not None:
                check_tensor(wanted.name, value)
            elif kind == "float" and not isinstance(value, float | int):
                raise TypeError(f"{wanted.name}: wanted a number, got {type_name(value)}") from None
            elif kind == "bool" and not isinstance(value, bool | int):
                raise TypeError(f"{wanted.name}: wanted a bool, got {type_name(value)}") from None


def check_tensor(name: str, value: object) -> Tensor:
    """The value, or a refusal of what is no tensor, and of tensors that no function of the library takes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type_name(value)}") from None
    if not (value.is_cuda or value.is_cpu):
        raise ValueError(f"{name}: wanted a tensor on a CUDA device or the CPU, got one on {value.device}") from None
    if value.layout != torch.strided:
        raise TypeError(f"{name}: wanted a strided tensor, got one of layout {value.layout}") from None
    return value
