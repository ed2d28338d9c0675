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
from bench.kernels.grids import KINDS, V4_WINDOW
from bench.kernels.inputs import Call, Inputs
from bench.kernels.libraries import Build
from bench.kernels.report import BF16_CACHE, ETAP, FP8_MATH, OWN, SHARED, SHARED_MATH
from etap_backend.dense import mla_decode
from etap_backend.limits import FP8, LATENT_DIM
from etap_backend.schedule import DecodeSchedule
from etap_backend.sparse import device_sms, sparse_mla_decode, sparse_workspace_floats

MATH_SUFFIX = FP8_MATH.removeprefix(ETAP)


def etap(inputs: Inputs, *, fp8_math: bool = False, shared_prefix: bool = False) -> Call:
    """The dense call, its schedule built."""
    batch, s_q, heads, _ = inputs.q.shape
    types = {"fp8_cache": inputs.kv_dtype == FP8, "fp8_math": fp8_math, "shared_prefix": shared_prefix}
    buffers = DecodeSchedule(batch, heads, max_s_q=s_q, device=inputs.q.device, num_sms=inputs.num_sms, **types)
    pages = {"block_table": inputs.block_table, "page_size": inputs.workload.page_size}
    lists = (inputs.block_table, inputs.seq_lens, buffers.build(inputs.seq_lens, s_q, **pages))
    given = {"softmax_scale": inputs.softmax_scale, "kv_scale": inputs.kv_scale_tensor, "fp8_math": fp8_math}
    given |= {"out": inputs.q.new_empty(batch, s_q, heads, LATENT_DIM), "early_loads": True}  # as the plugins do
    given["lse"] = inputs.q.new_empty(batch, s_q, heads, dtype=torch.float32)
    return lambda kv_cache: mla_decode(inputs.q, kv_cache, *lists, **given)[0]


def etap_sparse(inputs: Inputs) -> Call:
    """The call on lists of one cache, or of DeepSeek-V4's two with counts as in the engines; it allocates nothing."""
    (tokens, heads, _), workload = inputs.q.shape, inputs.workload
    num_sms = inputs.num_sms or device_sms(inputs.q.device)
    given = {
        "softmax_scale": inputs.softmax_scale,
        "workspace": inputs.q.new_empty(sparse_workspace_floats(heads, num_sms), dtype=torch.float32),
        "num_sms": num_sms,
        "out": inputs.q.new_empty(tokens, heads, LATENT_DIM),
        "lse": inputs.q.new_empty(tokens, heads, dtype=torch.float32),
    }
    if workload.call == "v4":
        given |= {"sinks": inputs.sinks, "valid_counts": inputs.counts(V4_WINDOW)}
        given["extra_valid_counts"] = inputs.counts(workload.extra) if workload.extra else None

    def call(cache: Tensor, indices: Tensor, extra_cache: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        lists = {"extra_kv_cache": extra_cache, "extra_indices": extra}
        return sparse_mla_decode(inputs.q, cache, indices, **lists, **given)[0]

    return call


@dataclass(frozen=True)
class Provider:
    """A kernel: `prepare` takes a row's inputs and returns its Call, or raises NotImplementedError with the reason why
    it cannot run the row."""

    prepare: Callable[..., Call]
    package: str = ""  # that installs it; empty for one of a file or of a build
    build: Build | None = None
    bf16_cache: bool = False  # in rows of an FP8 cache, too

    def active(self) -> AbstractContextManager:
        """While its calls are prepared, launched or recorded."""
        return self.build.active() if self.build else nullcontext()


Providers = dict[str, dict[str, Provider]]
"""By kind of workload, then by the name of a column."""

IN_BOTH = {"FlashInfer": Provider(peers.flashinfer, "flashinfer-python"), "Triton": Provider(peers.triton, "vllm")}
AVAILABLE: Providers = {
    "plain": {
        ETAP: Provider(etap),
        "FlashMLA": Provider(peers.flashmla, "vllm"),
        "FA3": Provider(peers.fa3, "vllm"),
        **IN_BOTH,
    },
    "fp8": {  # FA3 has no MLA kernel for an FP8 cache
        ETAP: Provider(etap),
        FP8_MATH: Provider(partial(etap, fp8_math=True)),
        BF16_CACHE: Provider(etap, bf16_cache=True),
        "FlashMLA": Provider(peers.flashmla_fp8, "vllm"),
        **IN_BOTH,
    },
    "sparse": {
        ETAP: Provider(etap_sparse),
        "FlashMLA": Provider(peers.flashmla_sparse, "vllm"),
        "FlashMLA alone": Provider(partial(peers.flashmla_sparse, pad_in_call=False), "vllm"),
        "FA3": Provider(peers.fa3_sparse, "vllm"),
    },
    "sparse_fp8": {
        ETAP: Provider(etap_sparse),
        "FlashMLA": Provider(peers.flashmla_sparse_fp8, "vllm"),
        "FlashMLA alone": Provider(partial(peers.flashmla_sparse_fp8, pad_in_call=False), "vllm"),
    },
    "v4": {ETAP: Provider(etap_sparse), "FlashMLA": Provider(peers.flashmla_v4, "vllm")},
}
"""ETAP and the peers of vLLM and SGLang, installed or not."""


def own() -> Providers:
    """ETAP without peers."""
    return {kind: {name: one for name, one in each.items() if name in OWN} for kind, each in AVAILABLE.items()}


def with_shared_prefixes(providers: Providers) -> Providers:
    """These kernels, and ETAP's that read shared prefixes once."""
    shared, math_ = (Provider(partial(etap, fp8_math=fp8, shared_prefix=True)) for fp8 in (False, True))
    more = {"plain": {SHARED: shared}, "fp8": {SHARED: shared, SHARED_MATH: math_}}
    return {kind: more.get(kind, {}) | each for kind, each in providers.items()}


def of_builds(builds: list[Build]) -> Providers:
    """Several builds of the library, with and without products in e4m3 from an FP8 cache."""
    found: Providers = {kind: {} for kind in AVAILABLE}
    for kind, each in own().items():
        for name in (ETAP, FP8_MATH) if kind == "fp8" else (ETAP,):
            suffix = name.removeprefix(ETAP)
            found[kind] |= {one.name + suffix: Provider(each[name].prepare, build=one) for one in builds}
    return found


def with_file(providers: Providers, path: Path) -> tuple[Providers, dict[str, str]]:
    """These kernels and those of a Python file, which may replace a peer; and the file's VERSIONS.

    The file defines PEERS, FP8_PEERS, SPARSE_PEERS, SPARSE_FP8_PEERS or V4_PEERS as {column: prepare}, and may define
    VERSIONS, {name: version}. A Call launches on torch's current stream and can be recorded in a CUDA graph.

    Raises ValueError, naming --peers, when the file is not like that.
    """
    try:
        defined = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"--peers: wanted a Python file that runs, got {path}: {error!r}") from error
    tables = {kind: "PEERS" if kind == "plain" else f"{kind.upper()}_PEERS" for kind in KINDS.values()}
    found = {kind: defined.get(name, {}) for kind, name in tables.items()}
    right = all(isinstance(each, dict) and all(map(callable, each.values())) for each in found.values())
    if not right or not any(found.values()):
        wanted = ", ".join(tables.values())
        raise ValueError(f"--peers: wanted a file that defines one of {wanted}, {{column: function}}, got {path}")
    if taken := {name for each in found.values() for name in each} & set(OWN):
        raise ValueError(f"--peers: wanted other columns than ETAP's, got {', '.join(taken)}")
    both = {kind: each | {name: Provider(one) for name, one in found[kind].items()} for kind, each in providers.items()}
    return both, defined.get("VERSIONS", {})


def chosen(providers: Providers, kinds: Iterable[str], only: list[str], skip: list[str]) -> Providers:
    """The kernels for these kinds: those that `only` names, else ETAP and what is installed; without those of `skip`.

    Raises ValueError, naming the argument, for an unknown name or when none is left.
    """
    every = {name: one for kind in kinds for name, one in providers[kind].items()}
    known = {name.lower(): name for name in every}
    for argument, names in (("--only", only), ("--skip", skip)):
        if unknown := [name for name in names if name.lower() not in known]:
            raise ValueError(f"{argument}: wanted one of {', '.join(every)}, got {', '.join(unknown)}")
    wanted = {known[name.lower()] for name in only}
    wanted = wanted or {name for name, one in every.items() if not one.package or installed([one.package])}
    wanted -= {known[name.lower()] for name in skip}
    if not wanted:
        raise ValueError("--skip: wanted at least one kernel left to time, got none")
    return {kind: {name: one for name, one in providers[kind].items() if name in wanted} for kind in kinds}
