"""The project's kernels in the emulator: compiled to PTX, and launched as csrc/api and csrc/decode/launch.cuh do it.

Tests skip where there is no compiler, unless ETAP_REQUIRE_NVCC=1 demands one.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from .machine import Kernel
from .memory import Memory, TensorMap
from .ptx import Module
from .shared import MAX_SHARED

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
SOURCES = {  # those that compile for longest first
    **{name: CSRC / "decode" / "instantiations" / f"{name}.cu" for name in ("bf16", "fp16", "fp8", "fp8_math")},
    "products": Path(__file__).with_name("products.cu"),
    "schedule": CSRC / "schedule" / "schedule.cu",
    "combine": CSRC / "combine" / "combine.cu",
}
CACHE = ROOT / "build" / "ptx"

LATENT, ROPE, TILE, GROUP_ROWS, CHUNK = 512, 64, 64, 64, 64
CHUNKS, VALUE_CHUNKS = (LATENT + ROPE) // CHUNK, LATENT // CHUNK
DECODE_THREADS, COMBINE_WARPS, SCHEDULE_THREADS = 384, 8, 256
FP8 = torch.float8_e4m3fn
ELEMENTS = {torch.bfloat16: "bfloat16_t", torch.float16: "half_t"}
QUERY_TYPES = [torch.bfloat16, torch.float16, FP8]  # etap::QueryType


# ------------------------------------------------------------------------------------------------------------ compiling


@cache
def toolchain() -> tuple[str, str] | None:
    """nvcc and CUTLASS's headers, as the build finds them; None where there are none."""
    found = subprocess.run(
        [sys.executable, CSRC / "cmake" / "find_wheels.py"], capture_output=True, text=True, check=True
    )
    wheels = dict(item.split("=", 1) for item in found.stdout.split(";"))
    root = wheels["ETAP_CUDA_ROOT"]
    nvcc = os.environ.get("CUDACXX") or (f"{root}/bin/nvcc" if root else shutil.which("nvcc"))
    return (nvcc, wheels["ETAP_CUTLASS_INCLUDE"]) if nvcc and wheels["ETAP_CUTLASS_INCLUDE"] else None


NEEDS_COMPILER = pytest.mark.skipif(
    toolchain() is None and os.environ.get("ETAP_REQUIRE_NVCC") != "1",
    reason="needs nvcc and CUTLASS's headers: the build requirements of pyproject.toml",
)


@cache
def compile_all() -> dict[str, Path]:
    """PTX of every source; what an earlier run compiled from the same sources with the same compiler is kept."""
    if toolchain() is None:
        raise FileNotFoundError("nvcc or CUTLASS's headers: install the build requirements of pyproject.toml")
    nvcc, cutlass = toolchain()
    key = hashlib.sha256(subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout)
    for path in sorted([*CSRC.rglob("*.cu"), *CSRC.rglob("*.cuh"), *CSRC.rglob("*.h"), SOURCES["products"]]):
        key.update(path.read_bytes())
    folder = CACHE / key.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    targets = {name: folder / f"{name}.ptx" for name in SOURCES}

    def compile_one(name: str) -> None:
        target = targets[name]
        if target.exists():
            return
        unfinished = target.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++17", "-lineinfo", "-gencode", "arch=compute_90a,code=compute_90a", "--expt-relaxed-constexpr"]
        subprocess.run([nvcc, *flags, f"-I{CSRC}", f"-I{cutlass}", "-ptx", "-o", unfinished, SOURCES[name]], check=True)
        unfinished.rename(target)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, SOURCES))
    return targets


@cache
def module(name: str) -> Module:
    return Module(compile_all()[name].read_text())


@cache
def kernel(source: str, *words: str) -> Kernel:
    """The translated kernel of a source whose name holds all words."""
    return Kernel(module(source), module(source).find(*words))


# ----------------------------------------------------------------------------------------------- what crosses from host


class FastDivmod(ctypes.Structure):
    """cutlass::FastDivmod."""

    _fields_ = [("divisor", ctypes.c_int32), ("multiplier", ctypes.c_uint32), ("shift_right", ctypes.c_uint32)]

    def __init__(self, divisor: int):
        power = 31 + math.ceil(math.log2(divisor))
        multiplier = ((1 << power) + divisor - 1) // divisor
        super().__init__(divisor, *((multiplier, power - 32) if divisor > 1 else (0, 0)))


class DecodeParams(ctypes.Structure):
    """etap::DecodeParams of csrc/params.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("q", "q_rope")),
        *((f"{q}_stride_{dim}", ctypes.c_int64) for q in ("q", "q_rope") for dim in ("batch", "token", "head")),
        ("block_table", ctypes.c_uint64),
        ("block_table_stride", ctypes.c_int64),
        ("max_pages", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("seq_lens", "work_ranges", "split_offsets")),
        *((name, ctypes.c_uint64) for name in ("out", "lse", "partial_out", "partial_lse")),
        *((name, ctypes.c_int32) for name in ("batch", "s_q", "heads", "rows", "row_tile", "row_groups", "partitions")),
        ("tiles_per_page", FastDivmod),
        ("scale_log2", ctypes.c_float),
        ("kv_scale", ctypes.c_uint64),
        ("q_scale", ctypes.c_uint64),
        ("query_type", ctypes.c_int32),
        ("float16_out", ctypes.c_bool),
        ("rows_on_lanes", ctypes.c_bool),
        ("paired_dims", ctypes.c_bool),
    ]


class ScheduleParams(ctypes.Structure):
    """etap::ScheduleParams of csrc/params.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("seq_lens", "work_ranges", "split_offsets")),
        *((name, ctypes.c_int32) for name in ("batch", "partitions", "fixed_pieces", "row_tile")),
    ]


def add_tensor(memory: Memory, tensor: torch.Tensor, name: str) -> int:
    """Register just what a tensor spans, which the kernel reads and writes in place; returns its address."""
    if tensor.numel() == 0:
        return memory.add(np.zeros(0, np.uint8), name)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()
    return memory.add(flat, name, offset=tensor.storage_offset() * tensor.element_size() % 4096)


def row_tile_of(rows: int) -> int:
    """Query rows that a CTA holds, for so many of them."""
    return next(tile for tile in (8, 16, 32, 64) if tile >= min(rows, GROUP_ROWS))


def _cache_maps(address: int, cache: torch.Tensor, row_tile: int) -> list[TensorMap]:
    """As make_cache_maps of csrc/decode/launch.cuh."""
    pages, page_size, _ = cache.shape
    page, row = (cache.element_size() * stride for stride in cache.stride()[:2])
    if cache.dtype == FP8:
        wide = LATENT // 128
        return [
            TensorMap(address, 1, (128, page_size, wide, pages), (row, 128, page), (128, TILE, wide, 1)),
            TensorMap(address + LATENT, 1, (ROPE, page_size, pages), (row, page), (ROPE, TILE, 1), swizzle=64),
        ]
    box = (CHUNK, TILE, 1 if row_tile > 32 else 3, 1)
    return [TensorMap(address, 2, (CHUNK, page_size, CHUNKS, pages), (row, 2 * CHUNK, page), box)]


def _query_maps(params: DecodeParams) -> list:
    """As make_query_maps of csrc/decode/launch.cuh: two maps, and whether they are usable."""
    heads = min(params.heads, params.row_tile)

    def known(extent, *strides):
        return extent == 1 or min(strides) > 0

    usable = (
        params.heads % heads == 0
        and params.row_tile % heads == 0
        and known(params.heads, params.q_stride_head, params.q_rope_stride_head)
        and known(params.s_q, params.q_stride_token, params.q_rope_stride_token)
        and known(params.batch, params.q_stride_batch, params.q_rope_stride_batch)
    )
    if not usable:
        return [bytes(3 * 128)]

    def encode(name: str, chunks: int) -> TensorMap:
        def stride(extent, dim):
            return 2 * (LATENT + ROPE if extent == 1 else getattr(params, f"{name}_stride_{dim}"))

        return TensorMap(
            getattr(params, name),
            2,
            (CHUNK, params.heads, params.s_q, chunks, params.batch),
            (stride(params.heads, "head"), stride(params.s_q, "token"), 2 * CHUNK, stride(params.batch, "batch")),
            (CHUNK, heads, params.row_tile // heads, chunks, 1),
        )

    return [encode("q", VALUE_CHUNKS), encode("q_rope", CHUNKS - VALUE_CHUNKS), bytes([1] + [0] * 127)]


def _decode_params(memory: Memory, problem, schedule, out, lse, softmax_scale: float) -> DecodeParams:
    """As decode_params of csrc/api/bindings.cpp."""
    q, q_rope = problem.call_q, problem.call_q_rope
    batch, s_q, heads, _ = q.shape
    rows = s_q * heads
    params = DecodeParams(batch=batch, s_q=s_q, heads=heads, rows=rows)
    params.row_tile = row_tile_of(rows)
    params.row_groups, params.partitions = -(-rows // GROUP_ROWS), schedule.partitions
    params.tiles_per_page = FastDivmod(problem.kv_cache.shape[1] // TILE)
    params.scale_log2 = softmax_scale * math.log2(math.e)
    params.q = add_tensor(memory, q, "q")
    params.q_rope = params.q + LATENT * q.element_size() if q_rope is None else add_tensor(memory, q_rope, "q_rope")
    for name, tensor in (("q", q), ("q_rope", q if q_rope is None else q_rope)):
        for dim, stride in zip(("batch", "token", "head"), tensor.stride(), strict=False):
            setattr(params, f"{name}_stride_{dim}", stride)
    params.block_table_stride, params.max_pages = problem.block_table.stride(0), problem.block_table.shape[1]
    tensors = dict(block_table=problem.block_table, seq_lens=problem.seq_lens, out=out, lse=lse)
    tensors |= dict(work_ranges=schedule.work_ranges, split_offsets=schedule.split_offsets)
    tensors |= dict(q_scale=problem.q_scale, kv_scale=problem.kv_scale)
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(params, name, add_tensor(memory, tensor, name))
    params.partial_out = add_tensor(memory, schedule.workspace, "workspace")
    params.partial_lse = params.partial_out + 4 * LATENT * 2 * params.partitions * params.row_groups * params.row_tile
    params.query_type = QUERY_TYPES.index(q.dtype)
    params.rows_on_lanes = params.row_tile == 64 and problem.kv_cache.dtype != FP8
    params.float16_out, params.paired_dims = out.dtype == torch.float16, problem.kv_cache.dtype == FP8
    return params


# ------------------------------------------------------------------------------------------------------------- launches


def decode_kernel(problem) -> Kernel:
    """The decode kernel that a problem takes."""
    case = problem.case
    row_tile = row_tile_of(case.s_q * case.heads)
    if problem.kv_cache.dtype == FP8:
        source, element = ("fp8_math", "float_e4m3_t") if case.fp8_math else ("fp8", "half_t")
        if row_tile == 64:
            return kernel(source, "decode_kernel", "::SharedTilesTraits<")
        return kernel(source, "decode_kernel", f"::Traits<cutlass::{element}, {row_tile}>")
    source = {torch.bfloat16: "bf16", torch.float16: "fp16"}[problem.q.dtype]
    element = f"cutlass::{ELEMENTS[problem.q.dtype]}"
    if row_tile == 64:
        return kernel(source, "decode_kernel", f"query_major::Traits<{element}>")
    return kernel(source, "decode_kernel", f"transposed::Traits<{element}, {row_tile}>")


def run_decode(problem, schedule, out, lse, softmax_scale: float, *, decode: Kernel | None = None, **how) -> set[int]:
    """Decode a problem of tests/cases.py into `out` and `lse`, and merge what the schedule cut.

    Args:
        decode: instead of the kernel that the problem takes.
        how: seed and timing, see Kernel.launch.

    Returns:
        The segments of the decode kernel that ran.
    """
    memory = Memory()
    params = _decode_params(memory, problem, schedule, out, lse, softmax_scale)
    cache = problem.kv_cache_3d
    cache_maps = _cache_maps(add_tensor(memory, cache, "kv_cache"), cache, params.row_tile)
    query_maps = [bytes(3 * 128)] if cache.dtype == FP8 else _query_maps(params)
    arguments = [bytes(params), cache_maps, query_maps]
    grid = (params.partitions * params.row_groups, 1)
    ran = (decode or decode_kernel(problem)).launch(grid, DECODE_THREADS, MAX_SHARED, arguments, memory, **how)
    if params.partitions > 1:
        _run_combine(params, out.dtype, memory, **how)
    return ran


def _run_combine(params: DecodeParams, dtype: torch.dtype, memory: Memory, **how) -> None:
    """As launch_combine of csrc/combine/combine.cu."""
    multiprocessors = params.partitions * params.row_groups
    requests = min(params.batch, params.partitions)
    tasks = params.row_groups * params.row_tile // 8 * VALUE_CHUNKS * 4
    wide = requests * tasks > 3 * multiprocessors
    steps = tasks // COMBINE_WARPS if wide else tasks
    fitting = max((2 if wide else 3) * multiprocessors // steps, 1)
    rounds = -(-requests * steps // (2 * multiprocessors))
    entries = {1: 1, 2: 2}.get(rounds, 4) if wide else 1
    values = f", {COMBINE_WARPS if wide else 1}, {entries}, {str(params.rows_on_lanes).lower()}>"
    combine = kernel("combine", "combine_kernel", ELEMENTS[dtype], values)
    combine.launch((steps, min(requests, fitting)), COMBINE_WARPS * 32, 0, [bytes(params)], memory, **how)


def run_schedule(seq_lens, work_ranges, split_offsets, fixed_pieces: int, row_tile: int, **how) -> None:
    """The schedule kernel, on tensors as etap_backend.DecodeSchedule has them."""
    memory = Memory()
    tensors = dict(seq_lens=seq_lens, work_ranges=work_ranges, split_offsets=split_offsets)
    pointers = {name: add_tensor(memory, tensor, name) for name, tensor in tensors.items()}
    counts = dict(batch=len(seq_lens), partitions=len(work_ranges), fixed_pieces=fixed_pieces)
    params = ScheduleParams(**counts, row_tile=row_tile, **pointers)
    kernel("schedule", "schedule_kernel").launch((1, 1), SCHEDULE_THREADS, 0, [bytes(params)], memory, **how)
