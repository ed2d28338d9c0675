"""Calls the compiled library directly; through a torch operator under torch.compile."""

import functools
import itertools
import string
from collections.abc import Callable, Collection
from typing import TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._library import library

_LIBRARY = torch.library.Library("etap_backend", "DEF")
_Function = TypeVar("_Function", bound=Callable)


@functools.cache
def compiled(name: str) -> Callable:
    """A function of the compiled library."""
    return library().get_function(name)


def constant_result(function: _Function) -> _Function:
    """Tell torch.compile, which cannot trace the library, that a function's result depends on its arguments alone.

    It is `torch.compiler.assume_constant_result`, which would import torch.compile's 2,000 modules for this mark.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


def library_function(name: str) -> Callable[..., None]:
    """A function of the library that is looked up when it is first called."""

    def run(*arguments: object) -> None:
        compiled(name)(*arguments)

    return run


def type_name(value: object) -> str:
    """The type of a value, as refusals name it."""
    return "None" if value is None else type(value).__name__


SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", int | None: "int?", float: "float", bool: "bool",
}  # fmt: skip


def schema(name: str, takes: Callable[..., object], written: Collection[str]) -> str:
    """torch's schema of an operator whose arguments are a named tuple's fields or a function's parameters.

    The operator writes the arguments named in `written`.
    """
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
    """A torch operator over a function of the library.

    torch.compile and fake tensors see the operator. Plain tensors go to the library directly: torch's dispatcher takes
    as long for so many arguments as a short decode step.
    """

    def __init__(self, schema: str, on_cuda: Callable[..., None], on_cpu: Callable[..., None]):
        """Register the operator.

        Args:
            schema: torch's schema without the namespace.
            on_cuda, on_cpu: functions that run the arguments and refuse the wrong ones that reach them.
        """
        # torch.library.custom_op costs several microseconds more. torch.compile must keep the strides of queries and
        # caches.
        _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        name = schema.partition("(")[0]
        # autocast would turn float32 products into bfloat16.
        self._on_cuda, self._on_cpu = on_cuda, torch.autocast("cpu", enabled=False)(on_cpu)
        _LIBRARY.impl(name, lambda *arguments: self._run(True, arguments), "CUDA")
        _LIBRARY.impl(name, lambda *arguments: self._run(False, arguments), "CPU")
        torch.library.register_fake(f"etap_backend::{name}", lambda *arguments: None, lib=_LIBRARY)
        self._operator = getattr(torch.ops.etap_backend, name).default

    def __call__(self, q: Tensor, arguments: tuple) -> None:
        """Run the arguments on the device of `q`, one of them."""
        if type(q) is not Tensor or is_compiling():
            if not isinstance(q, Tensor):
                self._refuse_wrong_types(arguments)
            self._operator(*arguments)
        else:
            self._run(q.is_cuda, arguments)

    def _run(self, on_cuda: bool, arguments: tuple) -> None:
        try:
            (self._on_cuda if on_cuda else self._on_cpu)(*arguments)
        except Exception:
            # Types that the library's bindings cannot take are named here, and only after a failure.
            self._refuse_wrong_types(arguments)
            raise

    def _refuse_wrong_types(self, arguments: tuple) -> None:
        """Raise TypeError or ValueError for the first argument whose type the library cannot take."""
        for wanted, value in zip(self._operator._schema.arguments, arguments, strict=True):
            kind = str(wanted.type)
            if kind == "Tensor" or kind == "Optional[Tensor]" and value is not None:
                check_tensor(wanted.name, value)
            elif kind == "float" and not isinstance(value, float | int):
                raise TypeError(f"{wanted.name}: wanted a number, got {type_name(value)}") from None
            elif kind == "bool" and not isinstance(value, bool | int):
                raise TypeError(f"{wanted.name}: wanted a bool, got {type_name(value)}") from None


def check_tensor(name: str, value: object) -> Tensor:
    """The value, if it is a strided tensor on a CUDA device or the CPU.

    Raises TypeError or ValueError, naming the argument, otherwise.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type_name(value)}") from None
    if not (value.is_cuda or value.is_cpu):
        raise ValueError(f"{name}: wanted a tensor on a CUDA device or the CPU, got one on {value.device}") from None
    if value.layout != torch.strided:
        raise TypeError(f"{name}: wanted a strided tensor, got one of layout {value.layout}") from None
    return value
