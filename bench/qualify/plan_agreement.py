"""Compares `etap plan` with the measured calls that it is fitted to, and fits it again.

    python -m bench.qualify.plan_agreement [RESULTS]           # a table, and the rows beyond the bounds
    python -m bench.qualify.plan_agreement [RESULTS] --fit     # the calls of configs/hardware again, then the table

RESULTS is a folder of files that `python -m bench kernels` and `top-k` wrote, results/ by default. Files of an H200 and
of the H20 proxy are fitted; those of `top-k`, whose few calls are fitted by hand, are only compared. Run it before a
release: neither needs a GPU.

A call may be 15% off where it has at least 65,536 cache rows (16 requests of 4K), 30% where it has fewer. The kernel
that the plan calls faster must be the faster one, unless the two are within 6% when measured. The exit status is 1
otherwise. ODD and WIDER name what is left out or may be further off, and why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy
import typer

from bench.common.results import read_json
from bench.kernels.report import KINDS
from etap_backend.config_list import FOLDER
from etap_backend.limits import V4_ROW_BYTES
from etap_backend.plan.files import CACHE_BYTES
from etap_backend.plan.gpu import Call, Gpu, numbers, read_gpu
from etap_backend.plan.sparse import ENGINES, LOGITS, logits, selection
from etap_backend.plan.step import ETAP, FP8_MATH, Attention, attention

GPUS = {"H20 proxy": "H20-141G", "H200": "H200"}
OWN = (ETAP, FP8_MATH)
PEERS: tuple[str, ...] = ("FlashMLA", "FA3", "FlashInfer")
IN_BF16 = "etap-bf16"  # in a grid of an FP8 cache
BIG, MOST_ROWS = 65536, 2**22  # no GPU holds more cache rows of a model's layers, and nothing is fitted there
SURE, TIE = (0.15, 0.30), 0.06
ODD = {("H20-141G", kind, rows, 8, 2048.0) for kind in ("sparse", "sparse_fp8") for rows in (8, 16)}
ODD |= {("H200", "top_k", 32768, 32, 32768.0), ("H200", "bfloat16", 32, 64, 1024.0)}
"""Shapes on which ETAP, or vLLM's selection, took longer than on twice as much, and 64 x 1K, which takes half longer
than 128 x 512. They are not fitted, and not judged."""
WIDER = {("H200", "bfloat16", rows, "FA3"): 1.1 for rows in (32, 64)} | {("H200", "bfloat16", 128, "FlashInfer"): 1.1}
"""Kernels whose calls may be a tenth further off: of FA3 one shape took 53 us as 16 heads x 4 and 74 us as 32 heads x 2
query tokens; FlashInfer took twice as long for 16 x 256 as for 16 x 128, and no form has both."""
BY_HAND = ("indexer", "top_k")
SERIALISED = {("H20-141G", "bfloat16", 128), *(("H20-141G", "sparse", rows) for rows in (64, 128))}
"""Kernels of ETAP that the proxy's fillers leave no registers: they take up to 1.7 times as long there."""
SELECTIONS = {"ETAP": ETAP, "vLLM cooperative": ENGINES}
INDEXER = 64, 128, 132  # heads, columns and bytes of a key
FORMS = ((0, 1), (0, 1, 2), (0, 1, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5, 6))
"""Costs of a Call; the first that are near enough are taken."""
COSTS = ("fixed_us", "factor", "part_us", "full_factor", "wave_factor", "split_us", "combine_us")
POWERS, NEARER, CLOSER, NEAR_ENOUGH = {8: 60, 0: 400}, 0.08, 0.7, 0.95
"""Rounds of a fit by its power: a mean of powers of the distances, or with 0 the greatest distance (Lawson's fit);
what it aims at for calls that servers make, what bounds shrink by in shapes of the wrong advice, what ends it."""
LONGEST = (0.0, 0.3, 0.35, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Timed:
    """One measured call."""

    gpu: str
    kernel: str
    kind: str
    rows: int
    requests: int
    tokens: float
    us: float
    file: str

    @property
    def shape(self) -> tuple:
        return self.gpu, self.kind, self.rows, self.requests, self.tokens

    @property
    def big(self) -> bool:
        return self.requests * self.tokens >= BIG

    @property
    def served(self) -> bool:
        """Whether servers make such calls: 16 to 128 requests of 4K to 64K."""
        return 16 <= self.requests <= 128 and 4096 <= self.tokens <= 65536

    def planned(self, gpu: Gpu, call: Call | None) -> Attention:
        if self.kind == "indexer":
            return logits(gpu, *INDEXER, self.requests, self.tokens, 1, 1, call)
        if self.kind == "top_k":
            return selection(gpu, self.kernel, self.requests, self.tokens, 1, call)
        row = {"row": 512, "row_bytes": V4_ROW_BYTES} if self.kind == "v4" else {}
        row = {"row_bytes": 656} if self.kind == "sparse_fp8" else row
        return attention(gpu, self.kernel, self.kind, self.rows, self.requests, self.tokens, call=call, **row)


def timed_calls(folder: Path) -> list[Timed]:
    """All measured calls that the plan knows, in a folder and those below it. Raises ValueError where there is none."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        document = read_json(path)
        if not isinstance(document, dict) or document.get("kind") not in (*KINDS, "top-k"):
            continue
        gpu = next((plan for name, plan in GPUS.items() if name in document["gpu"]), None)
        if gpu is None:
            continue
        if document["kind"] == "top-k":
            found += [one for row in document["rows"] for one in _of_choice(row, gpu, path.name)]
        elif not document["libraries"]:
            rows = [row for row in document["rows"] if not row.get("common")]  # the plan knows none of these
            found += [one for row in rows for one in _of_row(row, gpu, document["kind"], path.name)]
    found = [one for one in found if one.kernel not in OWN or (one.gpu, one.kind, one.rows) not in SERIALISED]
    if not found:
        raise ValueError(f"RESULTS: wanted a folder with files of `python -m bench kernels`, got {folder}")
    return found


def _of_row(row: dict, gpu: str, form: str, file: str) -> list[Timed]:
    """Its kernels; of DeepSeek-V4 their times behind another kernel, which differ less, where there are such."""
    fp8, lists = row["kv_dtype"] == "fp8", form == "bench-sparse"
    kind = ("sparse_fp8" if fp8 else "sparse") if lists else "fp8" if fp8 else "bfloat16"
    kind = "v4" if row.get("window") else kind
    heads, tokens = row["heads"] * (1 if lists else row["s_q"]), row.get("tokens", row["batch"] * row["length"])
    found = []
    for name, result in row["results"].items():
        if name not in (*OWN, *PEERS, IN_BF16) or not result.get("us") or tokens > MOST_ROWS:
            continue
        us = result.get("behind", result)["us"] if kind == "v4" else result["us"]
        what = (ETAP, "bfloat16") if name == IN_BF16 else (name, kind)
        found.append(Timed(gpu, *what, heads, row["batch"], tokens / row["batch"], us, file))
    return found


def _of_choice(row: dict, gpu: str, file: str) -> list[Timed]:
    """An indexer's logits, and the selections behind them."""
    kernels = {"logits": (LOGITS, "indexer", INDEXER[0])}
    kernels |= {name: (kernel, "top_k", row["length"]) for name, kernel in SELECTIONS.items()}
    taken = {name: row["results"][name]["us"] for name in kernels if row["results"].get(name, {}).get("us")}
    return [Timed(gpu, *kernels[name], row["rows"], float(row["length"]), us, file) for name, us in taken.items()]


def _costs(columns: numpy.ndarray, us: numpy.ndarray, weights: numpy.ndarray, power: int) -> numpy.ndarray:
    """Costs >= 0 with small weighted relative distances, by `power` (POWERS)."""
    kept, scale = list(range(columns.shape[1])), weights / us
    while True:
        by, best = numpy.ones(len(us)), (numpy.inf, numpy.zeros(len(kept)))
        for _ in range(POWERS[power]):
            half = scale * numpy.sqrt(by)
            costs = numpy.linalg.lstsq(columns[:, kept] * half[:, None], us * half, rcond=None)[0]
            off = numpy.abs(columns[:, kept] @ costs - us) * scale
            aim = numpy.mean((off / 10) ** power) if power else off.max()
            best = min(best, (aim, costs), key=lambda one: one[0])
            near = (off + 0.02) / (off.max() + 0.02)
            by = numpy.sqrt(by * near ** (power - 2)) if power else by * near  # whole steps of a power would swing
            by = by / by.mean() + 1e-12
        least = min(zip(best[1], kept, strict=True))
        if least[0] >= 0:
            costs = numpy.zeros(columns.shape[1])
            costs[kept] = best[1]
            return costs
        kept.remove(least[1])


def fitted(gpu: Gpu, group: list[Timed], close: set[tuple]) -> Call:
    """One kernel's costs for one number of rows, from all of its measured calls; the shapes in `close` come nearer."""
    us, bounds = numpy.array([one.us for one in group]), numpy.array([SURE[not one.big] for one in group])
    bounds = numpy.where([one.shape in close for one in group], bounds * CLOSER, bounds)
    nearer = numpy.where([one.served for one in group], numpy.minimum(NEARER, bounds), bounds)
    plain = [one.planned(gpu, None) for one in group]
    serial = group[0].kind in CACHE_BYTES and group[0].kernel in PEERS[1:]
    forms = [form for form in FORMS if form == FORMS[0] or len(group) >= 2 * len(form)]
    best: tuple[float, float, tuple[int, ...], numpy.ndarray] | None = None
    for aim, (power, form) in product((nearer, bounds), product(POWERS, forms)):
        for longest in LONGEST if serial else LONGEST[:1]:
            columns = numpy.array([numbers(one.roofline_us, one.load, longest) for one in plain])[:, form]
            costs = _costs(columns, us, 1 / aim, power)
            worst = (numpy.abs(columns @ costs / us - 1) / bounds).max()
            if best is None or worst < best[0]:
                best = worst, longest, form, costs
        if best and best[0] <= NEAR_ENOUGH and not close:
            break
    assert best is not None
    _, longest, form, costs = best
    values: dict[str, Any] = {
        COSTS[number]: round(float(cost), 3) for number, cost in zip(form, costs, strict=True) if cost >= 5e-4
    }
    proxy = "; an H200 throttled to an H20's rates, not an H20" if gpu.name.startswith("H20-") else ""
    one, files = group[0], ", ".join(sorted({one.file for one in group}))
    source = f"{len(group)} calls in {files}{proxy}"
    status = "derived" if proxy else "measured"
    more = {"longest_us": float(longest)} if longest else {}
    values = {"fixed_us": 0.0, "factor": 0.0} | values | more
    values |= {"kernel": one.kernel, "kind": one.kind, "rows": one.rows, "status": status, "source": source}
    return Call(**values)


def fits_of(gpu: Gpu, calls: list[Timed]) -> list[Call]:
    """Each kernel's fit. Where fits advise the slower kernel, their rows are fitted again with these shapes nearer.

    48 rows are computed in tiles of 64 or 16, and follow the next fit.
    """
    groups: dict[tuple, list[Timed]] = {}
    for one in calls:
        if one.rows != 48 and not (one.kernel in OWN and one.shape in ODD):
            groups.setdefault((one.kind, one.rows, (*OWN, *PEERS).index(one.kernel)), []).append(one)
    close: set[tuple] = set()
    found = {key: fitted(gpu, groups[key], close) for key in sorted(groups)}
    while wrong := _wrong_signs(_planned(gpu, groups, found)) - close:
        close |= wrong
        again = {shape[1:3] for shape in wrong}
        found |= {key: fitted(gpu, groups[key], close) for key in found if key[:2] in again}
    return list(found.values())


def _planned(gpu: Gpu, groups: dict[tuple, list[Timed]], found: dict[tuple, Call]) -> dict[tuple, list]:
    """The calls of each shape with their planned microseconds."""
    shapes: dict[tuple, list[tuple[Timed, float]]] = {}
    for key, call in found.items():
        for one in groups[key]:
            shapes.setdefault(one.shape, []).append((one, one.planned(gpu, call).call_us))
    return shapes


def fit(calls: list[Timed]) -> None:
    """Write the calls of configs/hardware again; those of kernels that RESULTS does not have stay."""
    for name in GPUS.values():
        lines = []
        gpu = read_gpu(name)
        found = fits_of(gpu, [one for one in calls if one.gpu == name and one.kind not in BY_HAND])
        again = {(call.kernel, call.kind, call.rows) for call in found}
        for call in [*found, *(call for call in gpu.calls if (call.kernel, call.kind, call.rows) not in again)]:
            kept = {field: value for field, value in vars(call).items() if value or field in ("fixed_us", "factor")}
            lines.append(json.dumps(kept))
        path = FOLDER / "hardware" / f"{name.lower()}.json"
        head = [
            line for line in path.read_text().splitlines() if not line.startswith(("    {", '  "calls"', "  ]", "}"))
        ]
        path.write_text("\n".join([*head, '  "calls": [', *(f"    {line}," for line in lines)])[:-1] + "\n  ]\n}\n")


def compared(calls: list[Timed]) -> tuple[list[str], list[str]]:
    """A line per call, and the lines of those beyond the bounds."""
    lines, beyond, shapes = [], [], {}
    gpus = {name: read_gpu(name) for name in GPUS.values()}
    fits = {key: gpus[key[0]].calls_of(*key[1:]) for key in {(one.gpu, one.kind, one.rows) for one in calls}}
    for one in calls:
        plan = one.planned(gpus[one.gpu], fits[one.gpu, one.kind, one.rows].get(one.kernel))
        shapes.setdefault(one.shape, []).append((one, plan.call_us))
    for shape, group in shapes.items():
        for one, us in group:
            ratio = us / one.us
            where = f"{one.gpu} {one.kind} {one.rows} rows, {one.requests} x {one.tokens:g}"
            line = f"{one.file:32} {where:48} {one.kernel:14} {one.us:9.1f} {us:9.1f} {ratio:6.2f}"
            lines.append(line)
            bound = SURE[not one.big] * WIDER.get((*shape[:3], one.kernel), 1)
            if round(abs(ratio - 1), 2) > bound and shape not in ODD:
                beyond.append(line)
    return lines, [*beyond, *(f"wrong advice: {shape}" for shape in _wrong_signs(shapes))]


def _wrong_signs(shapes: dict[tuple, list[tuple[Timed, float]]]) -> set[tuple]:
    """Where the plan advises the slower of ETAP, with its faster math, and the fastest other kernel."""
    wrong = set()
    for shape, group in shapes.items():
        sides = [[(one.us, us) for one, us in group if (one.kernel in OWN) is own] for own in (True, False)]
        if all(sides) and shape not in ODD:
            measured, planned = (min(us[part] for us in sides[1]) / min(us[part] for us in sides[0]) for part in (0, 1))
            if abs(measured - 1) > TIE and (measured > 1) != (planned > 1):
                wrong.add(shape)
    return wrong


def main(
    results: Annotated[Path, typer.Argument(help="folder of measured files", file_okay=False)] = Path("results"),
    fit_again: Annotated[bool, typer.Option("--fit", help="write the fits of configs/hardware")] = False,
) -> None:
    """Compare measured calls with `etap plan`."""
    try:
        calls = timed_calls(results)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if fit_again:
        fit(calls)
    lines, beyond = compared(calls)
    head = f"{'file':32} {'call':48} {'kernel':14} {'measured':>9} {'planned':>9} {'ratio':>6}"
    typer.echo("\n".join([head, *lines, f"{len(lines)} calls, {len(beyond)} beyond the bounds", *beyond]))
    raise typer.Exit(bool(beyond))


if __name__ == "__main__":
    typer.run(main)
