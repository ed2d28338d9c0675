"""The project's kernels in the emulator: compiled to PTX, and launched as the library launches them.

Tests skip where there is no compiler, unless ETAP_REQUIRE_NVCC=1 demands one.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator.machine import Kernel
from emulator.memory import Memory, TensorMap
from emulator.ptx import Edit, Module

from etap_backend._library import library
from etap_backend.limits import LATENT_DIM, ROPE_DIM
from etap_backend.sparse import sparse_decode_shape

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
DECODES = ("sixteen_bit", "fp8", "fp8_math", "lists_bf16", "lists_fp8")
SOURCES = {
    **{name: CSRC / "decode" / "instantiations" / f"{name}.cu" for name in DECODES},
    "products": HERE / "products.cu",
    "marked": HERE / "marked.cu",
    "marked_sparse": HERE / "marked_sparse.cu",
    "schedule": CSRC / "schedule" / "schedule.cu",
    "shared_prefixes": CSRC / "schedule" / "shared_prefixes.cu",
    "combine": CSRC / "combine" / "combine.cu",
    "merge": CSRC / "combine" / "merge.cu",
    "top_k": CSRC / "top_k" / "top_k.cu",
}
SHIPPED = (*DECODES, "combine", "merge")  # the library's kernels
MARKED = ("marked", "combine", "merge")  # the kernels for planted faults
MARKED_SPARSE = ("marked_sparse", "combine")
CACHE = ROOT / "build" / "ptx"
BUILT = "build/*/ptx"  # where the wheel's build leaves the PTX that it assembles

SCHEDULE_THREADS = 256
FAR = 1 << 28  # bytes on both sides of a tensor, a multiple of a page; none of them is ever touched
SOFTMAX_SCALE = (LATENT_DIM + ROPE_DIM) ** -0.5  # of support.cases, which is not imported: `make` runs this file alone
NO_MAPS = bytes(1)  # etap::sparse::NoMaps
NAN = {
    6: b"\x00\x7e",
    9: b"\xc0\x7f",
}  # by CUtensorMapDataType: FLOAT16, BFLOAT16; which one TMA fills with is not known


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
def ptx_folder() -> Path:
    """Folder for the PTX of these sources and this compiler, shared by all runs."""
    if toolchain() is None:
        raise FileNotFoundError("nvcc or CUTLASS's headers: install the build requirements of pyproject.toml")
    key = hashlib.sha256(subprocess.run([toolchain()[0], "--version"], capture_output=True, check=True).stdout)
    for path in all_sources():
        key.update(path.read_bytes())
    folder = CACHE / key.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def all_sources() -> list[Path]:
    return sorted([*CSRC.rglob("*.cu"), *CSRC.rglob("*.cuh"), *CSRC.rglob("*.h"), *HERE.glob("*.cu")])


def compiled(name: str) -> Path:
    """PTX of a source: an earlier run's, or the wheel build's if it is younger than every source, or compiled now."""
    target = ptx_folder() / f"{name}.ptx"
    if target.exists():
        return target
    unfinished = target.with_suffix(f".{os.getpid()}")
    youngest = max(path.stat().st_mtime for path in all_sources())
    built = [path for path in ROOT.glob(f"{BUILT}/{name}.ptx") if path.stat().st_mtime > youngest]
    if built:
        shutil.copy(built[0], unfinished)
    else:
        nvcc, cutlass = toolchain()
        flags = ["-std=c++17", "-lineinfo", "-gencode", "arch=compute_90a,code=compute_90a", "--expt-relaxed-constexpr"]
        subprocess.run([nvcc, *flags, f"-I{CSRC}", f"-I{cutlass}", "-ptx", "-o", unfinished, SOURCES[name]], check=True)
    unfinished.rename(target)
    return target


def compile_ahead(*names: str) -> None:
    """Compile sources, two at a time, so that tests which run at once do not each do it."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, names))


@cache
def module(name: str) -> Module:
    return Module(compiled(name).read_text())


def find(pretty_function: str, sources: tuple[str, ...]) -> tuple[str, str]:
    """Source and name of the one kernel among sources that a function of the library launches.

    pretty_function: the function's name with its template arguments, which are the kernel's; see `decode_launches`.
    """
    if "prepare_merge" in pretty_function:
        return "merge", *module("merge").names.values()
    called = _combine_kernel(pretty_function)
    inner = re.escape(_short(_template_arguments(pretty_function)))
    pattern = re.compile(rf"{called}<(\w+::)?{inner}(, true)?>\(")  # kWholeTiles' default
    names = {(source, name): full for source in sources for full, name in module(source).names.items()}
    found = [place for place, full in names.items() if pattern.search(_short(full))]
    if len(found) != 1:
        raise KeyError(f"{len(found)} kernels are {called}<{inner}>, of {list(names.values())}")
    return found[0]


def _short(name: str) -> str:
    """A name without namespace and without the chunks of a tile (kChunks), which compilers write or leave out."""
    return name.replace("etap::", "").replace(" >", ">").replace(", 9>", ">")


@lru_cache(64)
def kernel_of(source: str, name: str, edit: Edit | None) -> Kernel:
    """A kernel, translated, with changed instructions."""
    return Kernel(module(source), name, edit)


# ------------------------------------------------------------------------------------------------------------- launches


def placed(memory: Memory, tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Registered copies of the tensors' spans, far from each other: an overrun of one hits nothing."""
    return {name: None if tensor is None else _placed(memory, tensor, name) for name, tensor in tensors.items()}


def _placed(memory: Memory, tensor: torch.Tensor, name: str) -> torch.Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()
    room = mmap.mmap(-1, len(flat) + 2 * FAR, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    copy = np.frombuffer(room, np.uint8, len(flat), FAR + tensor.data_ptr() % mmap.PAGESIZE)
    copy[:] = flat
    memory.add(copy, name)
    return torch.from_numpy(copy).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def every_byte(tensors: dict[str, torch.Tensor | None], besides: tuple[str, ...] = ()) -> np.ndarray:
    """[ranges, 2], the addresses of the tensors' spans."""
    ranges = []
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and name not in besides:
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()))
    return np.array(ranges, np.uint64).reshape(-1, 2)


def late_for_decode(tensors: dict[str, torch.Tensor | None], s_q: int) -> np.ndarray:
    """The same for what early loads may find unwritten: cache rows of the last s_q tokens, queries, outputs."""
    caches = [tensors[name] for name in ("kv_cache", "rope_cache") if tensors[name] is not None]
    rows = []
    for request, length in enumerate(tensors["seq_lens"].tolist()):
        for token in range(max(0, length - s_q), length):
            page, row = divmod(token, caches[0].shape[1])
            for each in caches:
                last = each[tensors["block_table"][request, page], row]
                rows.append((last.data_ptr(), last.data_ptr() + last.numel() * last.element_size()))
    settled = (
        "kv_cache",
        "rope_cache",
        "kv_scale",
        "block_table",
        "seq_lens",
        "work_ranges",
        "split_offsets",
        "shared",
    )
    return np.concatenate([every_byte(tensors, settled), np.array(rows, np.uint64).reshape(-1, 2)])


def tensor_map(numbers: list[int]) -> TensorMap:
    """A tensor map from the numbers that the library gives for it."""
    address, kind, fills_nan, swizzle, rank, *rest = numbers
    extents, strides, box = rest[:rank], rest[rank : 2 * rank - 1], rest[2 * rank - 1 :]
    fill = NAN[kind] if fills_nan else b"\0"
    return TensorMap(address, len(NAN[kind]), tuple(extents), tuple(strides), tuple(box), 16 << swizzle, fill)


def _decodes(pretty_function: str) -> bool:
    return not _combine_kernel(pretty_function) and "prepare_merge" not in pretty_function


def _combine_kernel(pretty_function: str) -> str:
    """Name of the combine kernel that a function launches; empty for other functions."""
    found = re.search(r"(few|many)_launch", pretty_function)
    return f"{found[1]}_combine_kernel" if found else ""


def _template_arguments(pretty_function: str) -> str:
    """The arguments in "... [with A = a; int N = 1]", which lists typedefs, too."""
    pairs = re.findall(r"(\w+) = ([^;\]]+)", pretty_function)
    return ", ".join(value for key, value in pairs if value != key)


def run_decode(
    problem,
    planned,
    runner,
    *,
    softmax_scale=SOFTMAX_SCALE,
    empty_lse=-math.inf,
    early_loads=False,
    sources=SHIPPED,
    edit=None,
    **how,
) -> set[int]:
    """Launch what the library launches for a problem of support.cases; the result is in the runner's `out` and `lse`.

    Args:
        planned: the built schedule.
        sources: where the kernels come from.
        edit: how they are changed (see emulator.ptx.Edit).
        how: seed and timing, see Kernel.launch.

    Returns:
        The segments of the decode kernel that ran.
    """
    tensors = decode_tensors(problem, planned, runner)
    memory = Memory()
    copies = placed(memory, tensors)
    late = late_for_decode(copies, planned.s_q) if early_loads else every_byte(copies)
    ran = []
    for launch in decode_launches(problem.case, planned, copies, softmax_scale, empty_lse, early_loads):
        name, x, y, threads, shared_bytes, params, cache_maps, query_maps = launch
        # Those that sum partials take the first argument alone.
        arguments = [bytes(params), *(_maps(cache_maps, query_maps) if _decodes(name) else [])]
        # Those read the schedule before they wait for partials: decode has waited before they begin.
        memory.late = late if _decodes(name) else every_byte(copies, besides=("work_ranges", "shared"))
        kernel = kernel_of(*find(name, sources), edit)
        ran.append(kernel.launch((x, y), threads, shared_bytes, arguments, memory, **how))
    tensors["out"].copy_(copies["out"])
    tensors["lse"].copy_(copies["lse"])
    return ran[0]


def _maps(cache_maps: list, query_maps: list) -> list:
    """The decode kernel's tensor maps; kernels that gather rows declare the maps of parts, too, and use none."""
    caches = [*map(tensor_map, cache_maps)] if cache_maps else bytes(2 * 128)
    return [caches, [*map(tensor_map, query_maps), bytes([1] + [0] * 127)] if query_maps else bytes(3 * 128)]


def decode_tensors(problem, planned, runner) -> dict[str, torch.Tensor | None]:
    """The tensors of a dense call in their order."""
    tensors = dict(q=problem.call_q, q_rope=problem.call_q_rope)
    tensors |= dict(kv_cache=problem.call_kv_cache, rope_cache=problem.rope_cache)
    tensors |= {name: getattr(problem, name) for name in ("q_scale", "kv_scale", "block_table", "seq_lens")}
    tensors |= {name: getattr(planned, name) for name in ("work_ranges", "split_offsets", "shared", "workspace")}
    return tensors | dict(out=runner.out.tensor, lse=runner.lse.tensor)


def decode_launches(case, planned, tensors, softmax_scale=SOFTMAX_SCALE, empty_lse=-math.inf, early_loads=False):
    """What the library launches for a call of a case with these tensors."""
    return library().decode_launches(
        *tensors.values(), softmax_scale, *planned[:6], case.fp8_math, empty_lse, early_loads
    )


def run_sparse(problem, runner, *, empty_lse=-math.inf, sources=SHIPPED, edit=None, **how) -> set[int]:
    """The same for a problem of support.sparse_cases."""
    memory = Memory()
    tensors = sparse_tensors(problem, runner)
    copies = placed(memory, tensors)
    memory.late = every_byte(copies)
    ran = []
    for launch in sparse_launches(problem.case, copies, empty_lse):
        name, x, y, cluster, threads, shared_bytes, params = launch
        arguments = [bytes(params), *([] if ran else [NO_MAPS, bytes(3 * 128)])]
        kernel = kernel_of(*find(name, sources), edit)
        ran.append(kernel.launch((x, y), threads, shared_bytes, arguments, memory, cluster=cluster, **how))
    tensors["out"].copy_(copies["out"])
    tensors["lse"].copy_(copies["lse"])
    return ran[0]


def sparse_tensors(problem, runner) -> dict[str, torch.Tensor | None]:
    """The tensors of a sparse call in their order."""
    names = ("indices", "block_table", "request_ids", "valid_counts")
    extra = ("extra_kv_cache", "extra_indices", "extra_block_table", "extra_valid_counts")
    tensors = dict(q=problem.call_q, q_rope=problem.call_q_rope, kv_cache=problem.kv_cache)
    tensors |= {name: getattr(problem, name) for name in (*names, *extra)}
    workspace, out, lse = (buffer.tensor for buffer in (runner.workspace, runner.out, runner.lse))
    return tensors | dict(sinks=problem.sinks, workspace=workspace, out=out, lse=lse)


def sparse_launches(case, tensors: dict, empty_lse=-math.inf) -> list:
    """What the library launches for a call of a case with these tensors."""
    partitions = sparse_decode_shape(case.heads).partitions(case.num_sms)
    return library().sparse_decode_launches(*tensors.values(), SOFTMAX_SCALE, partitions, case.num_sms, empty_lse)


class ScheduleParams(ctypes.Structure):
    """etap::ScheduleParams of csrc/params.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("seq_lens", "work_ranges", "split_offsets")),
        *((name, ctypes.c_int32) for name in ("batch", "partitions", "fixed_splits", "split_rows")),
        *((name, ctypes.c_int32) for name in ("split_cost", "single_tiles")),
        *((name, ctypes.c_uint64) for name in ("batch_count", "merged")),
    ]


def run_schedule(
    seq_lens,
    work_ranges,
    split_offsets,
    fixed_splits: int,
    split_rows: int,
    split_cost: int,
    single_tiles: int,
    batch_count=None,
    merged=None,
) -> None:
    """The schedule kernel, on the buffers of an etap_backend.DecodeSchedule."""
    memory = Memory()
    copies = placed(memory, dict(seq_lens=seq_lens, work_ranges=work_ranges, split_offsets=split_offsets))
    more = placed(memory, dict(batch_count=batch_count, merged=merged))
    counts = (len(seq_lens), len(work_ranges), fixed_splits, split_rows, split_cost, single_tiles)
    known = (0 if tensor is None else tensor.data_ptr() for tensor in more.values())
    params = bytes(ScheduleParams(*(tensor.data_ptr() for tensor in copies.values()), *counts, *known))
    (name,) = module("schedule").names.values()
    Kernel(module("schedule"), name).launch((1, 1), SCHEDULE_THREADS, 0, [params], memory)
    work_ranges.copy_(copies["work_ranges"])
    split_offsets.copy_(copies["split_offsets"])


class SharedParams(ctypes.Structure):
    """etap::SharedParams of csrc/schedule/shared_prefixes.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("fields", "max_batch", "seq_lens", "block_table", "block_table_stride")),
        *((name, ctypes.c_int32) for name in ("max_pages", "page_size", "batch", "s_q", "stack_places")),
        *((name, kind) for name, kind in [("least_members", ctypes.c_int32), ("least_tiles", ctypes.c_int64)]),
    ]


def run_find_stacks(shared, seq_lens, block_table, page_size: int, s_q: int, places: int, least: int, least_tiles: int):
    """The kernels that find a step's stacks, on the buffer of an etap_backend.DecodeSchedule."""
    memory = Memory()
    copies = placed(memory, dict(shared=shared, seq_lens=seq_lens, block_table=block_table))
    plan, lengths, table = copies.values()
    numbers = (block_table.shape[1], page_size, len(seq_lens), s_q, places, least, least_tiles)
    addresses = (plan.data_ptr(), plan.shape[1], lengths.data_ptr(), table.data_ptr(), block_table.stride(0))
    params = bytes(SharedParams(*addresses, *numbers))
    names = module("shared_prefixes").names
    for kernel, blocks, threads in [("order", 1, 1024), ("compare", len(seq_lens), 1024), ("stack", 1, 256)]:
        (name,) = (name for full, name in names.items() if f"{kernel}_kernel" in full)
        Kernel(module("shared_prefixes"), name).launch((blocks, 1), threads, 0, [params], memory)
    shared.copy_(plan)


def run_top_k(
    logits, lengths, block_table, out, page_size: int, num_sms: int, early_lengths=False, edit=None, **how
) -> set[int]:
    """The top-k kernel, as the library launches it; fills `out` and returns the segments that ran."""
    memory = Memory()
    tensors = dict(logits=logits, lengths=lengths, block_table=block_table, out=out)
    copies = placed(memory, tensors)
    arguments = (*copies.values(), page_size, num_sms, early_lengths)
    blocks, cluster, threads, shared_bytes, params = library().top_k_launch(*arguments)
    memory.late = every_byte(copies, besides=("lengths",) if early_lengths else ())
    kernel = top_k_kernel(edit)
    ran = kernel.launch((blocks, 1), threads, shared_bytes, [bytes(params)], memory, cluster=cluster, **how)
    out.copy_(copies["out"])
    return ran


def top_k_kernel(edit: Edit | None = None) -> Kernel:
    (name,) = module("top_k").names.values()
    return kernel_of("top_k", name, edit)
