"""docs/api.md: the public calls, their signatures and docstrings, as Markdown.

The page has what `help()` shows of the package, its references and its drop-ins; `python -m etap_backend.lab.tables`
writes it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType

import etap_backend

COMPAT = ("flash_mla", "flashinfer", "flash_attn_interface")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
ITEM = re.compile(r"([\w*`][\w*`., ]*): (.*)")
WIDEST = 100  # characters of a signature on one line
HEAD = """# API

The public calls with the docstrings of their sources, which `help()` shows too.

<!-- api -->
"""


def markdown(docstring: str) -> str:
    """A docstring's paragraphs as they are, its sections as lists, each item on one line."""
    lines: list[str] = []
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        if found := SECTION.match(line):
            inside = True
            lines += [f"**{found[1]}**", ""]
        elif not inside or not line.strip():
            lines.append(line)
        elif line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        else:
            inside = line.startswith("    ")
            item = ITEM.match(line.strip())
            lines.append(f"- `{item[1]}`: {item[2]}" if inside and item else f"{'- ' * inside}{line.strip()}")
    return "\n".join(lines)


def signature(name: str, called: Callable) -> str:
    """What a call looks like without `self`: on one line, or one parameter per line."""
    taken = inspect.signature(called)
    kept = [parameter for parameter in taken.parameters.values() if parameter.name != "self"]
    kinds, parameters = [parameter.kind for parameter in kept], [str(parameter) for parameter in kept]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    nothing = taken.return_annotation in (inspect.Signature.empty, None)
    returned = "" if nothing else f" -> {inspect.formatannotation(taken.return_annotation)}"
    text = f"{name}({', '.join(parameters)}){returned}"
    if len(text) > WIDEST:
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){returned}"
    return f"```text\n{text}\n```"


def entries(name: str, value: object, level: int = 3) -> Iterator[str]:
    """What the page says of a function, or of a class and its public methods."""
    yield f"{'#' * level} {name}\n\n{signature(name, value)}\n\n{markdown(inspect.getdoc(value) or '')}"
    if inspect.isclass(value):
        for method, called in vars(value).items():
            if not method.startswith("_") and inspect.isfunction(called) and called.__doc__:
                yield from entries(f"{name}.{method}", called, level + 1)


def public(module: ModuleType) -> dict[str, object]:
    """The functions and classes that a module names or, without such a list, defines and documents."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if callable(value) and inspect.getdoc(value)}


def page() -> str:
    """The whole of docs/api.md."""
    modules = [etap_backend, importlib.import_module("etap_backend.reference")]
    modules += [importlib.import_module(f"etap_backend.compat.{name}") for name in COMPAT]
    parts = []
    for module in modules:
        parts.append(f"## {module.__name__}")
        parts += [text for name, value in public(module).items() for text in entries(name, value)]
    return HEAD + "\n\n".join(parts) + "\n<!-- /api -->\n"
