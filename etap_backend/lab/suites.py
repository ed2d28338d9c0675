"""What a page says of a run of another project's own tests on ETAP (tests/qualify)."""

from __future__ import annotations

import re
from collections import Counter


def part_numbers(part: str) -> tuple[int, int]:
    """(2, 4) of "2/4": the second of every four cases; (0, 0) of anything else."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def is_whole(parts: list[str]) -> bool:
    """Whether nothing is missing. Raises ValueError for a part that is there twice, and for parts of other numbers."""
    found, (_, every) = [part_numbers(part) for part in parts], part_numbers(parts[0])
    if len(set(found)) < len(found) or any(number != every for _, number in found):
        raise ValueError(f"part: wanted different parts of one number, got {', '.join(parts)}")
    return len(found) == every


def sentence(document: dict) -> str:
    """What a page says of a results file, of a run or of merged parts."""
    totals = Counter()
    for counts in document["cases"].values():
        totals.update(counts)
    skipped = f", {totals['skipped']:,} skip themselves" if totals["skipped"] else ""
    wrong = f"{document['failed']} are wrong" if document["failed"] else "none is wrong"
    by_dtype: dict[str, list[str]] = {}
    for part in document.get("parts", [document.get("part", "1/1")]):
        *dtype, numbers = part.split()
        by_dtype.setdefault(" ".join(dtype) or document.get("dtype", ""), []).append(numbers)
    types = " and ".join(filter(None, by_dtype))
    missing = [
        f"{dtype} {part_numbers(found[0])[1] - len(found)} of {part_numbers(found[0])[1]}".strip()
        for dtype, found in by_dtype.items()
        if not is_whole(found)
    ]
    said = f"{totals['passed']:,} of {totals['wanted']:,} cases{f' in {types}' if types else ''} pass{skipped}, {wrong}"
    not_run = f"; not run: {', '.join(missing)} parts" if missing else ""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{said}{not_run} ({document['gpu']}, driver {document['driver']}; {versions}; commit {document['commit']})."
