"""Comparing two builds' kernels: which count as the same, and which are named."""

from __future__ import annotations

import pytest

from bench.qualify.same_instructions import compared


def dump(**kernels: str) -> str:
    """What cuobjdump prints for kernels with these encodings, a word each."""
    lines = []
    for name, codes in kernels.items():
        lines += [f"\t\tFunction : {name}", '\t.headerflags\t@"EF_CUDA_SM90"']
        for code in codes.split():
            lines.append(f"        /*0000*/    MOV R0, R{code} ;    /* 0x{int(code):016x} */")
            lines.append(f"                                          /* 0x000fe200000{int(code):05x} */")
    return "\n".join(lines)


BOTH = dump(decode="1 2 3", combine="4 5")


@pytest.mark.parametrize(
    "after, same, differ",
    [
        (dump(combine="4 5", decode="1 2 3"), 2, []),
        (dump(decode="1 2 3", sum="4 5"), 2, []),
        (dump(decode="1 3 2", combine="4 5"), 1, ["decode: instructions differ"]),
        (dump(decode="1 2 3", sum="4 6"), 1, ["combine: only before", "sum: only after"]),
        (BOTH.replace("0x000fe200000", "0x000fe400000", 1), 1, ["decode: instructions differ"]),
    ],
    ids=["in another order", "renamed", "reordered", "renamed and changed", "another control word"],
)
def test_kernels_are_compared_by_their_instructions(after, same, differ):
    assert compared(BOTH, after) == (same, differ)


@pytest.mark.parametrize("empty", ["", dump(decode="")])
def test_a_dump_without_instructions_is_refused(empty):
    with pytest.raises(ValueError, match="after: wanted kernels with instructions, got"):
        compared(BOTH, empty)
