"""`python -m bench top-k`: time the sparse indexer's selection behind the kernel that writes its logits.

A CUDA graph has logits and selection of several layers, another one the logits alone; a selection's time is the
difference, so what overlaps counts as an engine sees it. The logits are DeepGEMM's, called as vLLM 0.33 does, from
caches that together exceed L2, or those of a kernel that writes random ones (--logits random).
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor

from bench.common import results
from bench.common.provenance import provenance
from bench.kernels.command import must_be_hopper
from bench.kernels.measure import Graph
from etap_backend import sparse_top_k

Call = Callable[[Tensor], Tensor]  # logits -> positions
Writer = Callable[[int], Tensor]  # layer -> logits

HEADS, DIM, PAGE_SIZE, KEY_BYTES = 64, 128, 64, 132
ROTATED_BYTES = 240e6  # four times an H200's L2
LAYERS = 12  # of a graph
DEFAULT_CASES = ["1x8192", "1x32768", "16x32768", "32x32768", "64x32768", "1x131072", "16x131072", "64x131072"]
DEFAULT_CASES += ["16x8192x512", "16x8192x1024", "64x8192x512", "64x8192x1024"]  # DeepSeek-V4's


@dataclass(frozen=True)
class Case:
    """Rows of the same length; `width` is the widest row that a server allows, as its graphs have it."""

    rows: int
    length: int
    width: int
    k: int

    @property
    def lengths(self) -> Tensor:
        return torch.full((self.rows,), self.length, dtype=torch.int32, device="cuda")

    @property
    def copies(self) -> int:
        return max(2, min(LAYERS, -(-int(ROTATED_BYTES) // (self.rows * self.length * KEY_BYTES))))


# ---------------------------------------------------------------------------------------------------- who writes logits


def deep_gemm(case: Case) -> Writer:
    """The paged FP8 logits of DeepSeek-V3.2, with keys drawn from a normal distribution."""
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    pages = -(-case.length // PAGE_SIZE)
    q = torch.randn(case.rows, 1, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(case.rows, HEADS, device="cuda")
    lengths = case.lengths.view(-1, 1)
    table = torch.zeros(case.rows, -(-case.width // PAGE_SIZE), dtype=torch.int32, device="cuda")
    table[:, :pages] = torch.randperm(case.rows * pages, device="cuda").view(case.rows, pages)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    metadata = get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, sms)

    def cache() -> Tensor:
        keys = torch.empty(case.rows * pages, PAGE_SIZE * KEY_BYTES, dtype=torch.uint8, device="cuda")
        for part in keys.split(4096):
            values = torch.randn(len(part), PAGE_SIZE * DIM, device="cuda").to(torch.float8_e4m3fn)
            part[:, : PAGE_SIZE * DIM] = values.view(torch.uint8)
            part[:, PAGE_SIZE * DIM :] = torch.full((len(part), PAGE_SIZE), 0.01, device="cuda").view(torch.uint8)
        return keys.view(-1, PAGE_SIZE, 1, KEY_BYTES)

    caches = [cache() for _ in range(case.copies)]

    def write(layer: int) -> Tensor:
        of = caches[layer % len(caches)]
        return fp8_fp4_paged_mqa_logits((q, None), of, weights, lengths, table, metadata, case.width)

    return write


def drawn(case: Case) -> Writer:
    """Logits from a normal distribution, copied from memory; NaN lies behind each row's length."""
    logits = torch.full((case.rows, -(-case.width // 256) * 256), torch.nan, device="cuda")
    sources = [torch.randn(case.rows, case.length, device="cuda") for _ in range(max(2, case.copies))]

    def write(layer: int) -> Tensor:
        torch.mul(sources[layer % len(sources)], 1, out=logits[:, : case.length])
        return logits

    return write


WRITERS: dict[str, Callable[[Case], Writer]] = {"deep-gemm": deep_gemm, "random": drawn}

# ---------------------------------------------------------------------------------------------------------- who selects


def etap(case: Case, early: bool = True) -> Call:
    out, lengths = torch.empty(case.rows, case.k, dtype=torch.int32, device="cuda"), case.lengths
    return lambda logits: sparse_top_k(logits, lengths, case.k, out=out, early_lengths=early)


def etap_late(case: Case) -> Call:
    return etap(case, early=False)


def _vllm(name: str) -> Callable[[Case], Call]:
    def prepare(case: Case) -> Call:
        importlib.import_module("vllm._C_stable_libtorch")
        select = getattr(torch.ops._C, name)
        if name == "cooperative_topk" and case.rows > 64:
            raise NotImplementedError("takes at most 64 rows")
        out, lengths = torch.empty(case.rows, case.k, dtype=torch.int32, device="cuda"), case.lengths
        workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")

        def call(logits: Tensor) -> Tensor:
            select(logits, lengths, out, workspace, case.k, case.width)
            return out

        return call

    return prepare


def sgl_kernel(case: Case) -> Call:
    select = importlib.import_module("sgl_kernel").fast_topk_v2
    if case.k != 2048:
        raise NotImplementedError("takes k 2048 only")
    lengths = case.lengths
    return lambda logits: select(logits, lengths, case.k)


def sglang_v2(case: Case) -> Call:
    module = importlib.import_module("sglang.kernels.ops.attention.dsv4.topk")
    out, lengths = torch.empty(case.rows, case.k, dtype=torch.int32, device="cuda"), case.lengths
    plan = module.plan_topk_v2(lengths)

    def call(logits: Tensor) -> Tensor:
        module.topk_transform_paged_v2(logits, lengths, None, out, 1, plan)
        return out

    return call


def _flashinfer(deterministic: bool) -> Callable[[Case], Call]:
    def prepare(case: Case) -> Call:
        select = importlib.import_module("flashinfer.topk").top_k_ragged_transform
        lengths, offsets = case.lengths, torch.zeros(case.rows, dtype=torch.int32, device="cuda")
        how = {"deterministic": deterministic, "dsa_graph_safe": True}
        return lambda logits: select(logits, offsets, lengths, case.k, **how)

    return prepare


PEERS: dict[str, Callable[[Case], Call]] = {
    "ETAP": etap,
    "ETAP, lengths late": etap_late,
    "vLLM cooperative": _vllm("cooperative_topk"),
    "vLLM persistent": _vllm("persistent_topk"),
    "SGLang topk_v2": sglang_v2,
    "sgl_kernel fast_topk_v2": sgl_kernel,
    "FlashInfer": _flashinfer(False),
    "FlashInfer deterministic": _flashinfer(True),
}
EXACT = ("ETAP", "ETAP, lengths late")
ENGINE = ("vLLM cooperative", "vLLM persistent")  # ETAP's times stand as parts of the faster one's

# ------------------------------------------------------------------------------------------------------------ measuring


def expected(logits: Tensor, case: Case) -> Tensor:
    """Positions of the k largest logits, lowest positions first among equals, ascending."""
    order = logits[:, : case.length].sort(dim=1, descending=True, stable=True).indices
    return order[:, : case.k].sort(dim=1).values


def judge(name: str, found: Tensor, wanted: Tensor) -> dict:
    """How many entries of the exact selection are missing; of ETAP's, those that do not stand in their place."""
    if name in EXACT:
        return {"wrong_entries": int((found.long() != wanted).sum())}
    there = torch.zeros(len(wanted), int(wanted.max()) + 2, dtype=torch.bool, device=wanted.device)
    last = there.shape[1] - 1  # for positions that no exact selection has
    there.scatter_(1, torch.where(found < 0, last, found.long().clamp(max=last)), True)
    return {"wrong_entries": int((~there.gather(1, wanted)).sum())}


def measure(case: Case, write: Writer, names: list[str], replays: int) -> dict[str, dict]:
    """By kernel: its time behind the logits, or why there is none."""
    alone = Graph(write, LAYERS)
    wanted = expected(write(LAYERS - 1), case)
    graphs, found = {}, {}
    for name in names:
        try:
            call = PEERS[name](case)
            graphs[name] = Graph(lambda layer, call=call: call(write(layer)), LAYERS)
            torch.cuda.synchronize()
            found[name] = judge(name, graphs[name].result, wanted)
        except NotImplementedError as reason:
            found[name] = {"refused": str(reason)}
        except Exception as error:  # a peer may be missing or fail; the others go on
            found[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    for _ in range(replays):
        alone.replay()
        for graph in graphs.values():
            graph.replay()
    torch.cuda.synchronize()
    logits_us = [begin.elapsed_time(end) * 1e3 / LAYERS for begin, end in alone.events]
    for name, graph in graphs.items():
        both = [begin.elapsed_time(end) * 1e3 / LAYERS for begin, end in graph.events]
        more = [a - b for a, b in zip(both, logits_us, strict=True)]
        quartiles = statistics.quantiles(more, n=4)
        found[name] |= {"us": round(statistics.median(more), 2), "iqr_us": round(quartiles[2] - quartiles[0], 2)}
    return {"logits": {"us": round(statistics.median(logits_us), 2)}, **found}


def text_of(row: dict) -> str:
    lines = [f"{row['rows']} x {row['length']}, width {row['width']}, k {row['k']}"]
    engine = min((row["results"][name]["us"] for name in ENGINE if "us" in row["results"].get(name, {})), default=None)
    for name, one in row["results"].items():
        said = f"{one['us']:8.2f} us" if "us" in one else one.get("refused") or one.get("failed")
        if name in EXACT and engine and "us" in one:
            said += f"   {one['us'] / engine:.2f} of vLLM's"
        wrong = f"   {one['wrong_entries']} wrong entries" if one.get("wrong_entries") else ""
        lines.append(f"  {name:26} {said}{wrong}")
    return "\n".join(lines)


def document_of(logits: str) -> dict:
    """The results file of a run that begins now, without a row."""
    about = provenance("python -m bench top-k")
    return about | {"kind": "top-k", "logits": logits, "layers": LAYERS, "complete": False, "rows": []}


def case_of(text: str, width: int, k: int) -> Case:
    """A case from ROWSxLENGTH or ROWSxLENGTHxK. Raises ValueError, naming the argument."""
    numbers = text.split("x")
    if len(numbers) not in (2, 3) or not all(number.isdigit() for number in numbers):
        raise ValueError(f"case: wanted ROWSxLENGTH or ROWSxLENGTHxK, got {text}")
    rows, length, k = *map(int, numbers), *([k] if len(numbers) == 2 else [])
    if rows < 1 or k < 1 or not k <= length <= width:
        raise ValueError(f"case: wanted rows, and a length from {k} to {width}, got {text}")
    return Case(rows, length, width, k)


def main(
    cases: Annotated[list[str] | None, typer.Argument(help="ROWSxLENGTH or ROWSxLENGTHxK, such as 16x32768.")] = None,
    logits: Annotated[Literal["deep-gemm", "random"], typer.Option(help="Who writes the logits.")] = "deep-gemm",
    width: Annotated[int, typer.Option(help="Columns of the logits: a server's longest context.")] = 163840,
    k: Annotated[int, typer.Option(help="Positions to select where a case does not say.")] = 2048,
    only: Annotated[list[str] | None, typer.Option(help="Time only this kernel; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave out kernels that begin so; may be repeated.")] = None,
    replays: Annotated[int, typer.Option(min=2, help="Graph replays per kernel and case.")] = 41,
    output: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Time ETAP's top-k and every installed peer behind the indexer's logits on one Hopper GPU."""
    try:
        must_be_hopper()
        chosen = [case_of(text, width, k) for text in cases or DEFAULT_CASES]
        if unknown := sorted(set(only or []) - set(PEERS)):
            raise ValueError(f"--only: wanted some of {', '.join(PEERS)}, got {', '.join(unknown)}")
        if unknown := [one for one in skip or [] if not any(name.startswith(one) for name in PEERS)]:
            raise ValueError(f"--skip: wanted beginnings of {', '.join(PEERS)}, got {', '.join(unknown)}")
        names = [name for name in only or PEERS if not name.startswith(tuple(skip or []))]
        if not names:
            raise ValueError(f"--skip: wanted a kernel left to time, got {', '.join(skip or [])}")
        if output:
            results.must_be_writable(output)
    except ValueError as error:
        typer.secho(f"bench top-k: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    document = document_of(logits)
    for case in chosen:
        row = {"rows": case.rows, "length": case.length, "width": case.width, "k": case.k}
        row["results"] = measure(case, WRITERS[logits](case), names, replays)
        typer.echo(text_of(row))
        document["rows"].append(row)
        document["complete"] = len(document["rows"]) == len(chosen)
        if output:
            results.write(document, output)
    wrong = [row for row in document["rows"] for name in EXACT if row["results"].get(name, {}).get("wrong_entries")]
    if wrong:
        typer.secho(f"ETAP's results are wrong in {len(wrong)} cases", fg="red", err=True)
        raise typer.Exit(1)
