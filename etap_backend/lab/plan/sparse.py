"""Decode with sparse attention on one GPU. A call's time is fitted to files of `etap bench` on the sparse call; without
one of this GPU it is not measured, and no step is told. What the indexer takes at least is its roofline."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from etap_backend.lab import results
from etap_backend.lab.bench import rows as bench
from etap_backend.lab.configs import shipped
from etap_backend.lab.plan.inputs import Call, Deployment, Gpu, Model, Status, read_gpu
from etap_backend.lab.plan.memory import Memory, memory_of
from etap_backend.lab.plan.step import PADDED_ROWS, Attention, Gain, check, rest_of_step_ms
from etap_backend.limits import LATENT_DIM
from etap_backend.sparse import sparse_decode_shape

LEAST_POINTS = 3  # of a line, where two would always lie on one
PROXY, PROXY_RATES = "H20 proxy", "h20-96g"
LIKE = {"H100": "H200", "H800": "H200"}
"""Chips whose calls, where they were not timed, are as the other's with their own rates."""


def benchmarks(files: list[Path] | None = None) -> dict[str, bench.SparseDocument]:
    """Files of `etap bench` on the sparse call by their names; those of results/, as far as they are there, when None.

    Raises ValueError, naming the file, for a given one that is none.
    """
    found = {}
    for path in sorted(results.FOLDER.glob("sparse*.json")) if files is None else files:
        content = results.read_json(path)
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == bench.SparseDocument.model_fields["kind"].default:
            found[path.name] = results.parse(path, content, bench.SparseDocument)
        elif files is not None:
            raise ValueError(f"{path}: wanted a file of `etap bench` on the sparse call, got kind {kind}")
    return found


@dataclass(frozen=True)
class Roofline:
    """What one call takes at least, at sustained rates."""

    rows: int  # heads that the tensor cores compute, padding included
    us: float
    bound: str


def _roofline(gpu: Gpu, rows: int, data: float, flops: float, *, fp8: bool = False) -> Roofline:
    memory, tensor = data / gpu.sustained_bandwidth.value, flops / gpu.sustained_flops(fp8=fp8)
    return Roofline(rows, max(memory, tensor) * 1e6, "memory" if memory >= tensor else "tensor cores")


def computed_rows(kernel: str, heads: int) -> int:
    """Heads with padding: ours are rounded as the library says, the others' to multiples of 64."""
    if kernel == bench.OURS:
        shape = sparse_decode_shape(heads)
        return shape.row_groups * shape.row_tile
    return -(-heads // PADDED_ROWS) * PADDED_ROWS


def call_roofline(kernel: str, gpu: Gpu, heads: int, entries: int, row: int, row_bytes: int) -> Roofline:
    """Of a call whose lists have so many entries, each a row of so many elements and bytes, read once. All kernels
    widen FP8 rows to 16 bits before they multiply."""
    rows = computed_rows(kernel, heads)
    return _roofline(gpu, rows, entries * row_bytes, 2 * rows * entries * (row + LATENT_DIM))


def _chip(name: str) -> str | None:
    found = re.search(r"H\d+", name)
    return found and found[0]


def _rates(document: bench.SparseDocument) -> Gpu:
    """The GPU of configs/hardware that this was measured on."""
    if PROXY in document.gpu:
        return read_gpu(PROXY_RATES)
    alike = [gpu for gpu in map(read_gpu, shipped("hardware")) if _chip(gpu.name) == _chip(document.gpu)]
    memory = (document.gpu_memory_mib or 0) * 2**20
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes.value - memory))


def _measured_for(gpu: Gpu, documents: dict[str, bench.SparseDocument]) -> tuple[dict, Status, str]:
    """The documents that tell a call's time on this GPU, and what that makes of it."""
    chip, told = _chip(gpu.name), {name: one for name, one in documents.items() if _is_of_a_whole_gpu(one)}
    own = {name: one for name, one in told.items() if chip and _chip(one.gpu) == chip}
    if real := {name: one for name, one in own.items() if PROXY not in one.gpu}:
        names = {_rates(one).name for one in real.values()}
        return (real, "measured", "") if names == {gpu.name} else (real, "derived", f"as on an {', '.join(names)}")
    if own:
        return own, "derived", "an H200 throttled to an H20's rates, not an H20"
    like = LIKE.get(chip)
    return {name: one for name, one in told.items() if like and _chip(one.gpu) == like}, "derived", f"as on an {like}"


def _is_of_a_whole_gpu(document: bench.SparseDocument) -> bool:
    """Whether it timed kernels as they are installed on all of a GPU, or of what stands for one."""
    return not document.libraries and (document.options.num_sms is None or document.options.h20_proxy)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """fixed >= 0 and factor >= 1 of us = fixed + factor x roofline, for (roofline, us): least squares of the relative
    distances."""

    def total(of: Callable[[float, float], float]) -> float:
        return sum(of(roofline, us) / us**2 for roofline, us in points)

    w, x, y = total(lambda x, y: 1), total(lambda x, y: x), total(lambda x, y: y)
    xx, xy = total(lambda x, y: x * x), total(lambda x, y: x * y)
    spread = w * xx - x * x
    factor = max(1.0, (w * xy - x * y) / spread) if spread > 1e-9 * w * xx else 1.0
    fixed = (y - factor * x) / w
    return (fixed, factor) if fixed >= 0 else (0.0, max(1.0, xy / xx))


def fitted_calls(gpu: Gpu, documents: dict[str, bench.SparseDocument], heads: int, fp8: bool) -> dict[str, Call]:
    """What a call of each kernel that was timed with such rows takes on this GPU, ours first.

    A line is fitted to the decode rows with as many heads, or where there are too few to those of up to 64.
    """
    used, status, how = _measured_for(gpu, documents)
    rows = [
        (name, _rates(document), row)
        for name, document in used.items()
        for row in document.rows
        if row.fp8 == fp8 and row.heads <= max(PADDED_ROWS, heads) and row.tokens <= row.context
    ]
    same = [one for one in rows if one[2].heads == heads]
    kernels = dict.fromkeys(name for _, _, row in rows for name in row.results if row.us(name))
    calls = {}
    for kernel in sorted(kernels, key=lambda name: name != bench.OURS):
        timed = [one for one in same if one[2].us(kernel)]
        if len(timed) < LEAST_POINTS:
            timed = [one for one in rows if one[2].us(kernel)]
        if len(timed) >= LEAST_POINTS:
            calls[kernel] = _fitted(kernel, timed, status, how)
    return calls


def _fitted(kernel: str, timed: list[tuple[str, Gpu, bench.SparseRow]], status: Status, how: str) -> Call:
    """One kernel's line through its rows; its source says how far the farthest lies from it."""
    points = [(_roofline_of(kernel, gpu, row).us, row.us(kernel)) for _, gpu, row in timed]
    fixed, factor = _line(points)
    farthest = max(abs((fixed + factor * roofline) / us - 1) for roofline, us in points)
    files = ", ".join(dict.fromkeys(name for name, *_ in timed))
    source = f"{len(points)} rows of {kernel} in {files}, within {farthest:.0%}"
    return Call(fixed_us=fixed, factor=factor, status=status, source="; ".join(filter(None, (source, how))))


def _roofline_of(kernel: str, gpu: Gpu, row: bench.SparseRow) -> Roofline:
    """Of a row of `etap bench`, whose lists name different rows of the cache, all with rope."""
    elements = row.flops // (2 * row.heads * row.tokens) - LATENT_DIM
    return call_roofline(kernel, gpu, row.heads, row.tokens, elements, row.bytes // row.tokens)


@dataclass(frozen=True)
class Kernel:
    """A kernel by its column of `etap bench`, its fit, and its attention."""

    name: str
    call: Call
    attention: Attention


@dataclass(frozen=True)
class Indexer:
    """What choosing the tokens takes at least: scores of every key of the context in each layer that has an indexer.
    Quantising, and choosing the best scores, come on top; nobody timed them here."""

    layers: int
    roofline: Roofline

    @property
    def least_ms(self) -> float:
        return self.layers * self.roofline.us / 1e3


@dataclass(frozen=True)
class SparsePlan:
    """The planner's answer for a model with sparse attention."""

    memory: Memory
    tokens: int  # query tokens of a call
    entries: int  # of each one's list, on this rank
    layers: int
    roofline: Roofline  # of a call of ours
    kernels: tuple[Kernel, ...]  # that were timed for this GPU
    indexer: Indexer
    rest_ms: float
    bf16_tokens: int | None  # that fit in bfloat16, with an FP8 cache

    @property
    def ours(self) -> Kernel | None:
        return next((kernel for kernel in self.kernels if kernel.name == bench.OURS), None)

    @property
    def peers(self) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.name != bench.OURS)

    def least_step_ms(self, kernel: Kernel) -> float:
        """Milliseconds of a step, the indexer's at its least."""
        return self.rest_ms + self.indexer.least_ms + kernel.attention.step_ms

    def gain_over(self, peer: Kernel) -> Gain | None:
        """Of ours over a peer, at most: what the indexer takes besides is the same for both."""
        if self.ours is None:
            return None
        call = peer.attention.call_us / self.ours.attention.call_us
        return Gain(call, self.least_step_ms(peer) / self.least_step_ms(self.ours) - 1)

    @property
    def gain(self) -> Gain | None:
        """Over the fastest peer."""
        return self.gain_over(min(self.peers, key=lambda one: one.attention.call_us)) if self.peers else None


def _indexer(model: Model, gpu: Gpu, on: Deployment) -> Indexer:
    """Each rank has all heads of the indexer, and scores the keys of its share of a context."""
    keys = on.local_batch * -(-on.context // (on.dcp * model.index_kpool))
    flops = 2 * keys * on.s_q * model.index_n_heads * model.index_head_dim
    data = keys * model.index_row_bytes * model.index_kpool
    return Indexer(len(model.indexer_layers), _roofline(gpu, model.index_n_heads, data, flops, fp8=True))


def make_sparse_plan(model: Model, gpu: Gpu, on: Deployment, documents: dict[str, bench.SparseDocument]) -> SparsePlan:
    """Memory, attention and step of a model with sparse attention, as far as `documents` tell a call's time.

    Raises ValueError, naming the argument, when the deployment cannot be or ETAP cannot run the model.
    """
    check(model, on)
    # Each query token has a list of its own; a pooled indexer always adds the pool that is not full.
    tokens, width = on.local_batch * on.s_q, model.index_topk + model.index_kpool - 1
    entries = -(-min(on.context, width) // on.dcp)
    heads, fp8, layers = model.num_attention_heads // on.tp * on.dcp, on.cache == "fp8", len(model.attention_layers)

    def roofline(kernel: str) -> Roofline:
        row_bytes = model.cache_row_bytes(on.cache)
        return call_roofline(kernel, gpu, heads, tokens * entries, model.cache_row, row_bytes)

    kernels = []
    for name, call in fitted_calls(gpu, documents, heads, fp8).items():
        if not model.qk_rope_head_dim:
            call = call.model_copy(update={"status": "derived", "source": f"{call.source}; of rows with rope"})
        least = roofline(name)
        us = call.microseconds(least.us)
        kernels.append(Kernel(name, call, Attention(least.rows, least.us, least.bound, us, us * layers / 1e3)))
    bf16_tokens = memory_of(model, gpu, replace(on, cache="bfloat16")).tokens if fp8 else None
    return SparsePlan(
        memory=memory_of(model, gpu, on),
        tokens=tokens,
        entries=entries,
        layers=layers,
        roofline=roofline(bench.OURS),
        kernels=tuple(kernels),
        indexer=_indexer(model, gpu, on),
        rest_ms=rest_of_step_ms(model, gpu, on),
        bf16_tokens=bf16_tokens,
    )
