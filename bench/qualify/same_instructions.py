"""Compares two builds of the library: do they have the same kernels, instruction for instruction?

    python -m bench same-instructions BEFORE AFTER    # two libetap_backend.so from one compiler

A change that only moves or renames sources leaves the instructions alone, so no GPU needs to test and time the kernels
again. Encodings are compared in order, control words included. A kernel with a new name and unchanged instructions
counts as the same. The exit status is 0 if all kernels are the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from support.sass import cuobjdump, kernels

ENCODING = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")


def compared(before: str, after: str) -> tuple[int, list[str]]:
    """Compare two dumps of `cuobjdump -sass`: the number of equal kernels, and a line for each other one.

    Raises ValueError where a dump has no kernel, or one without instructions.
    """
    builds = [{name: ENCODING.findall(text) for name, text in kernels(dump).items()} for dump in (before, after)]
    for what, build in zip(("before", "after"), builds, strict=True):
        if not build or not all(build.values()):
            raise ValueError(f"{what}: wanted kernels with instructions, got {len(build)} kernels: {sorted(build)}")
    first, second = builds
    changed = [name for name in first.keys() & second.keys() if first[name] != second[name]]
    gone = {name: code for name, code in first.items() if name not in second}
    new = {name: code for name, code in second.items() if name not in first}
    for name, code in list(gone.items()):
        if renamed := [other for other, its in new.items() if its == code]:
            del gone[name], new[renamed[0]]
    differences = {"instructions differ": changed, "only before": gone, "only after": new}
    lines = sorted(f"{name}: {how}" for how, names in differences.items() for name in names)
    return len(first) - len(gone) - len(changed), lines


def main(
    before: Annotated[Path, typer.Argument(help="the library before the change", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(help="the library after it", exists=True, dir_okay=False)],
) -> None:
    """Compare the kernels of two built libraries, instruction for instruction."""
    same, differ = compared(*(cuobjdump(library, "-sass") for library in (before, after)))
    typer.echo("\n".join([*differ, f"{same} kernels are the same, {len(differ)} differ"]))
    raise typer.Exit(bool(differ))
