"""Whether two builds of the library have the same kernels, instruction for instruction.

    PYTHONPATH=tests python -m bench.qualify.same_instructions BEFORE AFTER    # two libetap_backend.so of one compiler

Sources that are only moved, renamed or said once instead of twice leave the instructions as they are: then no GPU has
to test and time the kernels again. Encodings are compared, in their order. A kernel that one build lacks is the other's
under a new name where that one has its instructions. The exit status is 0 where all kernels are the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from support.sass import cuobjdump, kernels

ENCODING = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")


def compared(before: str, after: str) -> tuple[int, list[str]]:
    """How many kernels of two dumps of `cuobjdump -sass` are the same, and which are not, a line each.

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
    ways = {"other instructions": changed, "before alone": gone, "after alone": new}
    differ = sorted(f"{name}: {how}" for how, names in ways.items() for name in names)
    return len(first) - len(gone) - len(changed), differ


def main(
    before: Annotated[Path, typer.Argument(help="the library before the change", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(help="the library with it", exists=True, dir_okay=False)],
) -> None:
    """Compare the kernels of two built libraries, instruction for instruction."""
    same, differ = compared(*(cuobjdump(library, "-sass") for library in (before, after)))
    typer.echo("\n".join([*differ, f"{same} kernels are the same, {len(differ)} are not"]))
    raise typer.Exit(bool(differ))


if __name__ == "__main__":
    typer.run(main)
