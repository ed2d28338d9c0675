"""Tables of results files of `bench kernels`.

Where calls were timed behind another kernel, too, a cell has both times: back to back / behind it.
"""

from __future__ import annotations

import statistics

from bench.common.tables import number, provenance_line, table
from bench.common.units import in_k

ETAP, FP8_MATH, BF16_CACHE, SHARED, SHARED_MATH = OWN = (
    "etap",
    "etap-fp8-math",
    "etap-bf16",
    "etap-shared",
    "etap-shared-fp8-math",
)
"""ETAP's columns: products in the query's type; in e4m3; the same row from a bfloat16 cache; the first two with shared
prefixes read once, in grids with such requests."""
KINDS = ("bench", "bench-sparse")
MAX_ROWS = 100  # a page shows ratios alone of larger grids
Pair = tuple[str, list[str], str]
"""A column that compares: its title, the kernels whose fastest time is divided, and the kernel that divides it."""


def time_of(row: dict, name: str, behind: bool = False) -> float | None:
    """Microseconds per call of a kernel, if it was measured."""
    found = row["results"].get(name, {})
    return (found.get("behind") or {} if behind else found).get("us")


def names_of(document: dict) -> list[str]:
    """Kernels with a time in at least one row."""
    names = dict.fromkeys(name for row in document["rows"] for name in row["results"])
    return [name for name in names if any(time_of(row, name) for row in document["rows"])]


def shape_of(row: dict) -> str:
    """A row's first column, such as "16 x 4K", with common tokens "64 x (16K + 1K)"; for V4 "16 x 128 + 512"."""
    if window := row.get("window"):
        return f"{row['batch']} x {window} + {row['length'] - window}"
    if common := row.get("common"):
        return f"{row['batch']} x ({in_k(common)} + {in_k(row['length'] - common)})"
    return f"{row['batch']} x {in_k(row['length'])}"


def pairs_of(document: dict) -> list[Pair]:
    """Each build with the first one; else the best peer with ETAP, and ETAP from a bfloat16 cache with ETAP."""
    names = names_of(document)
    if builds := list(document["libraries"]):
        suffixes = [name.removeprefix(builds[0]) for name in names if name.startswith(builds[0])]
        pairs = [(other + suffix, builds[0] + suffix) for suffix in suffixes for other in builds[1:]]
        return [(f"{one} / {first}", [one], first) for one, first in pairs if one in names]
    peers = [name for name in names if name not in OWN]
    pairs = [(f"best peer / {ETAP}", peers, ETAP), (f"{BF16_CACHE} / {ETAP}", [BF16_CACHE], ETAP)]
    pairs += [(f"{off} / {on}", [off], on) for off, on in ((ETAP, SHARED), (FP8_MATH, SHARED_MATH))]
    return [(title, over, under) for title, over, under in pairs if {*over} & {*names} and under in names]


def ratio(row: dict, over: list[str], under: str, behind: bool = False) -> float | None:
    """How many times as long the fastest of these kernels takes as another one."""
    times, base = [us for name in over if (us := time_of(row, name, behind))], time_of(row, under, behind)
    return min(times) / base if times and base else None


def shape_columns(document: dict) -> tuple[list[str], str]:
    """Keys of the shape that differ between rows, and the others in words, such as "16 heads, s_q 1"."""
    texts = {"heads": "{} heads", "s_q": "s_q {}", "kv_dtype": "{} cache", "page_size": "pages of {}"}
    found = {key: {str(row[key]) for row in document["rows"] if key in row} for key in texts}
    same = [texts[key].format(*values) for key, values in found.items() if len(values) == 1]
    return [key for key, values in found.items() if len(values) > 1], ", ".join(same).replace("same cache", "16 bits")


def cells(document: dict) -> list[list[str]]:
    """Titles, and cells of each row: shape, floor, times, the first kernel's rates, and how kernels compare."""
    names, pairs, digits = names_of(document), pairs_of(document), 3 if document["libraries"] else 2
    readings = (False, True) if document["options"].get("behind") else (False,)
    first, shape = next(iter(names), ETAP), shape_columns(document)[0]
    titles = ("floor", *names, "TFLOP/s", "% of floor", *(title for title, *_ in pairs))
    lines = [["requests x tokens" if document["kind"] == "bench" else "tokens x keys", *shape, *titles]]
    for row in document["rows"]:
        us, floor = time_of(row, first), row.get("floor_us")
        line = [shape_of(row), *(str(row[name]) for name in shape), number(floor)]
        line += [" / ".join(number(time_of(row, name, behind)) for behind in readings) for name in names]
        line += [number(us and row["flops"] / us / 1e6), number(us and floor and 100 * floor / us, 0)]
        line += [" / ".join(number(ratio(row, *pair, behind), digits) for behind in readings) for _, *pair in pairs]
        lines.append(line)
    return lines


def spreads(document: dict) -> dict[str, tuple[str, str, str]]:
    """By the title of a comparison: its median over all rows, and the least and the greatest with their rows."""
    found = {}
    for title, *pair in pairs_of(document):
        if values := {row["label"]: value for row in document["rows"] if (value := ratio(row, *pair))}:
            ends = (min(values, key=values.get), max(values, key=values.get))
            median = f"{statistics.median(values.values()):.3f}"
            found[title] = (median, *(f"{values[label]:.3f} ({label})" for label in ends))
    return found


def remarks(document: dict) -> list[str]:
    """What a table does not show: ratios over all rows, equal bits, refusals and failures."""
    rows = document["rows"]
    lines = [
        f"{title}: median {median}, {least} to {most}" for title, (median, least, most) in spreads(document).items()
    ]
    found = {f"{row['label']}, {name}": one for row in rows for name, one in row["results"].items()}
    if bits := {label: one["same_bits"] for label, one in found.items() if one.get("same_bits") is not None}:
        other = "; ".join(label for label, same in bits.items() if not same)
        equal = f"{sum(bits.values())} of {len(bits)} outputs have the first build's bits"
        lines.append(equal + (f", not {other}" if other else ""))
    reasons: dict[str, list[str]] = {}
    for label, one in found.items():
        if one["state"] != "measured":
            reasons.setdefault(one.get("reason") or one["error"], []).append(label)
    return lines + [f"{reason} ({len(labels)} times, the first {labels[0]})" for reason, labels in reasons.items()]


def text(name: str, document: dict, page: bool = False) -> str:
    """All that a results file says; on a page, a large grid without its table."""
    lines = remarks(document)
    if document["options"].get("behind"):
        lines.insert(0, "a cell has the time back to back / behind another kernel")
    if large := page and len(document["rows"]) > MAX_ROWS:
        lines.insert(0, f"{len(document['rows'])} rows, which `python -m bench report` shows")
    builds = [f"{name} is SHA-256 {build['sha256'][:12]}" for name, build in document["libraries"].items()]
    floor = [f"floor = {document['floor']['text']}"] if document.get("floor") else []
    left_out = [f"{len(document['left_out'])} rows left out for want of memory"] if document["left_out"] else []
    stopped = [] if document["complete"] else [f"stopped after {len(document['rows'])} rows"]
    listed = "\n".join(
        f"- {line}" for line in [*lines, *builds, *floor, *left_out, *stopped, provenance_line(document)]
    )
    title = f"{name}: {document['title']}; {document['gpu']}; microseconds per call; {shape_columns(document)[1]}"
    return "\n\n".join([f"### {title}", *([] if large else [table(cells(document))]), listed])


def summary(documents: list[tuple[str, dict]]) -> str:
    """A line per results file and comparison."""
    lines = [["file", "GPU", "rows", "ratio of times", "median", "least", "greatest"]]
    for name, one in documents:
        ends = spreads(one).items()
        lines += [[name, one["gpu"], str(len(one["rows"])), title, *numbers] for title, numbers in ends]
    return table(lines)
