"""Reads JSON files into checked dataclasses, and finds the files that ship with the package."""

from __future__ import annotations

import dataclasses
import functools
import json
import os.path
import re
import reprlib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from etap_backend.config_list import FOLDER

MOST = 2**31
"""Above this a number is a mistake; within it no sum or quotient of the planner overflows a float."""
CACHE_BYTES = {"bfloat16": 2, "fp8": 1}
"""Bytes of an element of a dense KV cache."""
Size = Annotated[int, 1, MOST]
Count = Annotated[int, 0, MOST]
Quantity = Annotated[float, 1e-3, 1e18]
ALSO = {
    "h20-3e": "h20-141g",
    "glm-5": "glm-5-fp8",
    "glm-5.1": "glm-5-fp8",  # the same shapes
    "glm-5.1-fp8": "glm-5-fp8",
    "glm-5.2-fp8": "glm-5.2",
    "kimi-k2-instruct": "kimi-k2",
    "kimi-k2-instruct-0905": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2.5",  # the same text model
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2.7-code": "kimi-k2.5",
    "kimi-linear-48b-a3b-instruct": "kimi-linear",
    "mistral-large-3-675b-instruct-2512": "mistral-large-3",
}
"""Other names of shipped files, on hubs and in shops."""
CALLED = {"hardware": "gpu", "models": "model"}
"""The argument that names a file of each folder."""
HUB = r"^\w[\w-]*/(?=[^/]+$)"  # an organisation before a model's name
KINDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def shipped(kind: str) -> list[str]:
    """Names of the files in configs/`kind`."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.json"))


def shortened(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}..."


def find(kind: str, name: str) -> Path:
    """The file that `name` means: an existing path, or a file of configs/`kind` in any case of letters, with or without
    the organisation that a hub puts before it (deepseek-ai/DeepSeek-R1).

    Raises ValueError, naming the argument, when it means neither.
    """
    known = re.sub(HUB, "", name).lower()
    for path in Path(name), FOLDER / kind / f"{ALSO.get(known, known)}.json":
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long or below a closed folder
            return path
    got = shortened(name)
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{CALLED[kind]}: wanted a file that exists and can be read, got {got}")
    raise ValueError(f"{CALLED[kind]}: wanted a file or one of {', '.join(shipped(kind))}, got {got}")


def read_json(path: Path, argument: str) -> dict:
    """The object in a file. Raises ValueError, naming the argument, when there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{argument}: wanted a JSON file, got {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{argument}: wanted a JSON object, got {path}, which holds {type(content).__name__}")
    return content


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def record(kind: Any, data: dict, where: str = "", *, strict: bool = False) -> Any:
    """A dataclass from a JSON object, where null is like no key; `strict` refuses keys that the dataclass lacks.

    Raises ValueError, naming the key, what was wanted and what came.
    """
    hints, values = _hints(kind), {}
    for field in dataclasses.fields(kind):
        key = f"{where}{field.name}"
        if (value := data.get(field.name)) is not None:
            values[field.name] = _value(hints[field.name], value, key, strict)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{key}: wanted a value, got none")
    if strict and (more := sorted(set(data) - set(hints))):
        raise ValueError(f"{where}{more[0]}: wanted one of {', '.join(hints)}")
    return kind(**values)


def _value(hint: Any, value: object, key: str, strict: bool) -> Any:
    """`value` as a field of this type."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _value(arguments[0], value, key, strict)
    if get_origin(hint) is tuple:
        many = arguments[-1] is ...
        if not isinstance(value, list) or not many and len(value) != len(arguments):
            raise ValueError(
                f"{key}: wanted a list{'' if many else f' of {len(arguments)}'}, got {reprlib.repr(value)}"
            )
        return tuple(_value(arguments[0], one, f"{key}.{number}", strict) for number, one in enumerate(value))
    if get_origin(hint) is Literal:
        if value not in arguments:
            raise ValueError(f"{key}: wanted {' or '.join(map(repr, arguments))}, got {reprlib.repr(value)}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{key}: wanted an object, got {reprlib.repr(value)}")
        return record(hint, value, f"{key}.", strict=strict)
    return _scalar(hint, value, key)


def _scalar(hint: Any, value: Any, key: str) -> Any:
    base, *bounds = get_args(hint) or (hint,)
    allowed = (int, float) if base is float else base
    if not isinstance(value, allowed) or isinstance(value, bool) != (base is bool):
        raise ValueError(f"{key}: wanted {KINDS[base]}, got {reprlib.repr(value)}")
    if bounds and not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"{key}: wanted {bounds[0]} to {bounds[1]}, got {reprlib.repr(value)}")
    return base(value)


def parse_tokens(text: str, argument: str = "context") -> int:
    """A number of tokens, such as 4096, 4K or 1M. Raises ValueError, naming the argument, for anything else."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    number = text[:-1] if scale > 1 else text
    if not re.fullmatch(r"[0-9]{1,400}", number) or int(number) < 1:
        raise ValueError(f"{argument}: wanted a number of tokens such as 4096, 4K or 1M, got {text[:60]!r}")
    return int(number) * scale
