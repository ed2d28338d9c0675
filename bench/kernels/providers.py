"""The kernels that a run times: ETAP, installed peers, those of a --peers file, or several builds of ETAP's library."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common.provenance import installed
from bench.kernels import peers
from bench.kernels.inputs import Call, Inputs, SparseInputs, V4Inputs
from bench.kernels.libraries import Build
from etap_backend.dense import mla_decode
from etap_backend.limits import FP8, LATENT_DIM
from etap_backend.schedule import DecodeSchedule
from etap_backend.sparse import device_sms, sparse_mla_decode, sparse_workspace_floats

ETAP, FP8_MATH, BF16_CACHE = "etap", "etap-fp8-math", "etap-bf16"
"""ETAP's columns: products in the query's type; in e4m3; and the same row from a bfloat16 cache."""
OWN = (ETAP, FP8_MATH, BF16_CACHE)
MATH_SUFFIX = FP8_MATH.removeprefix(ETAP)
DROP_IN = "FlashMLA drop-in"
"""ETAP called through `etap_backend.compat.flash_mla`."""


def etap(inputs: Inputs, *, fp8_math: bool = False) -> Call:
    """The dense call, its schedule built."""
    batch, s_q, heads, _ = inputs.q.shape
    types = {"fp8_cache": inputs.kv_dtype == FP8, "fp8_math": fp8_math}
    buffers = DecodeSchedule(batch, heads, max_s_q=s_q, device=inputs.q.device, num_sms=inputs.num_sms, **types)
    lists = (inputs.block_table, inputs.seq_lens, buffers.build(inputs.seq_lens, s_q))
    given = {"softmax_scale": inputs.softmax_scale, "kv_scale": inputs.kv_scale_tensor, "fp8_math": fp8_math}
    given |= {"out": inputs.q.new_empty(batch, s_q, heads, LATENT_DIM), "early_loads": True}  # as the plugins do
    given["lse"] = inputs.q.new_empty(batch, s_q, heads, dtype=torch.float32)
    return lambda kv_cache: mla_decode(inputs.q, kv_cache, *lists, **given)[0]


def _sparse_buffers(inputs: SparseInputs) -> dict:
    """Arguments of a sparse call that allocates nothing."""
    tokens, heads, _ = inputs.q.shape
    num_sms = inputs.num_sms or device_sms(inputs.q.device)
    return {
        "softmax_scale": inputs.softmax_scale,
        "workspace": inputs.q.new_empty(sparse_workspace_floats(heads, num_sms), dtype=torch.float32),
        "num_sms": num_sms,
        "out": inputs.q.new_empty(tokens, heads, LATENT_DIM),
        "lse": inputs.q.new_empty(tokens, heads, dtype=torch.float32),
    }


def etap_sparse(inputs: SparseInputs) -> Call:
    """The sparse call on lists of one cache."""
    given = _sparse_buffers(inputs)
    return lambda kv_cache, indices: sparse_mla_decode(inputs.q, kv_cache, indices, **given)[0]


def etap_v4(inputs: V4Inputs) -> Call:
    """DeepSeek-V4's call on lists of two caches, with counts as in the engines."""
    given = _sparse_buffers(inputs) | {"sinks": inputs.sinks, "valid_counts": inputs.counts(inputs.window)}
    given["extra_valid_counts"] = inputs.counts(inputs.extra) if inputs.extra else None

    def call(cache: Tensor, indices: Tensor, extra_cache: Tensor | None, extra_indices: Tensor | None) -> Tensor:
        extra = {"extra_kv_cache": extra_cache, "extra_indices": extra_indices}
        return sparse_mla_decode(inputs.q, cache, indices, **extra, **given)[0]

    return call


@dataclass(frozen=True)
class Provider:
    """A kernel: `prepare` takes a row's inputs and returns its Call, or raises NotImplementedError with the reason why
    it cannot run the row."""

    prepare: Callable[..., Call]
    package: str = ""  # that installs it; empty for one of a file or of a build
    build: Build | None = None
    bf16_cache: bool = False  # in rows of an FP8 cache, too
    asked_only: bool = False  # left out unless --only names it

    def active(self) -> AbstractContextManager:
        """While its calls are prepared, launched or recorded."""
        return self.build.active() if self.build else nullcontext()


Providers = dict[str, dict[str, Provider]]
"""By kind of workload, then by the name of a column."""

KINDS = {
    "plain": "PEERS",
    "fp8": "FP8_PEERS",
    "sparse": "SPARSE_PEERS",
    "sparse_fp8": "SPARSE_FP8_PEERS",
    "v4": "V4_PEERS",
}
"""Kinds of workloads, and the name of their kernels in a --peers file."""


def available() -> Providers:
    """ETAP and the peers of vLLM and SGLang, installed or not. FA3 has no MLA kernel for an FP8 cache."""

    def vllm(prepare: Callable[..., Call], **fixed) -> Provider:
        return Provider(partial(prepare, **fixed), "vllm")

    def drop_in(prepare: Callable[..., Call]) -> Provider:
        return Provider(partial(prepare, module=peers.FLASHMLA_DROP_IN), asked_only=True)

    dense, sparse, math = Provider(etap), Provider(etap_sparse), Provider(partial(etap, fp8_math=True))
    both = {"FlashInfer": Provider(peers.flashinfer, "flashinfer-python"), "Triton": vllm(peers.triton)}
    plain = {ETAP: dense, "FlashMLA": vllm(peers.flashmla), "FA3": vllm(peers.fa3), **both}
    fp8 = {ETAP: dense, FP8_MATH: math, BF16_CACHE: Provider(etap, bf16_cache=True)}
    alone = {
        name: {"FlashMLA": vllm(prepare), "FlashMLA alone": vllm(prepare, pad_in_call=False)}
        for name, prepare in (("sparse", peers.flashmla_sparse), ("sparse_fp8", peers.flashmla_sparse_fp8))
    }
    return {
        "plain": plain | {DROP_IN: drop_in(peers.flashmla)},
        "fp8": fp8 | {"FlashMLA": vllm(peers.flashmla_fp8), **both},
        "sparse": {ETAP: sparse, **alone["sparse"], "FA3": vllm(peers.fa3_sparse)},
        "sparse_fp8": {ETAP: sparse, **alone["sparse_fp8"], DROP_IN: drop_in(peers.flashmla_sparse_fp8)},
        "v4": {ETAP: Provider(etap_v4), "FlashMLA": vllm(peers.flashmla_v4)},
    }


def of_builds(builds: list[Build]) -> Providers:
    """Several builds of the library, with and without products in e4m3 from an FP8 cache."""

    def each(prepare: Callable[..., Call], suffix: str = "") -> dict[str, Provider]:
        return {build.name + suffix: Provider(prepare, build=build) for build in builds}

    sparse = each(etap_sparse)
    fp8 = each(etap) | each(partial(etap, fp8_math=True), MATH_SUFFIX)
    return {"plain": each(etap), "fp8": fp8, "sparse": sparse, "sparse_fp8": sparse, "v4": each(etap_v4)}


def own(providers: Providers) -> Providers:
    """ETAP alone, without peers."""
    return {kind: {name: one for name, one in each.items() if name in OWN} for kind, each in providers.items()}


def with_file(providers: Providers, path: Path) -> tuple[Providers, dict[str, str]]:
    """These kernels and those of a Python file, which may replace a peer; and the file's VERSIONS.

    The file defines some of the values of KINDS as {column: prepare}, and may define VERSIONS, {name: version}. A Call
    launches on torch's current stream and can be recorded in a CUDA graph.

    Raises ValueError, naming --peers, when the file is not like that.
    """
    if not path.is_file():
        raise ValueError(f"--peers: wanted a Python file, got {path}")
    try:
        defined = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"--peers: {path} does not import: {type(error).__name__}: {error}") from error
    found = {kind: defined.get(name, {}) for kind, name in KINDS.items()}
    tables = list(found.values())
    if not any(tables) or not all(isinstance(each, dict) and all(map(callable, each.values())) for each in tables):
        wanted = ", ".join(KINDS.values())
        raise ValueError(f"--peers: wanted a file that defines one of {wanted}, {{column: function}}, got {path}")
    if taken := [name for each in tables for name in each if name in (*OWN, DROP_IN)]:
        raise ValueError(f"--peers: wanted other columns than ETAP's, got {', '.join(taken)}")
    merged = {
        kind: each | {name: Provider(one) for name, one in found[kind].items()} for kind, each in providers.items()
    }
    return merged, defined.get("VERSIONS", {})


def chosen(providers: Providers, kinds: Iterable[str], only: list[str], skip: list[str]) -> Providers:
    """The kernels for these kinds: those that `only` names, else ETAP and what is installed; without those of `skip`.

    Raises ValueError, naming the argument, for an unknown name or when none is left.
    """
    every = {name: one for kind in kinds for name, one in providers[kind].items()}
    known = {name.lower(): name for name in every}
    for argument, names in (("--only", only), ("--skip", skip)):
        if unknown := [name for name in names if name.lower() not in known]:
            raise ValueError(f"{argument}: wanted one of {', '.join(every)}, got {', '.join(unknown)}")
    if only:
        wanted = {known[name.lower()] for name in only}
    else:
        there = {one.package for one in every.values() if not one.package or installed([one.package])}
        wanted = {name for name, one in every.items() if one.package in there and not one.asked_only}
    wanted -= {known[name.lower()] for name in skip}
    if not wanted:
        raise ValueError("--skip: wanted at least one kernel left to time, got none")
    return {kind: {name: one for name, one in providers[kind].items() if name in wanted} for kind in kinds}


def packages(providers: Providers) -> list[str]:
    """What installs these kernels."""
    return list(dict.fromkeys(one.package for each in providers.values() for one in each.values() if one.package))
