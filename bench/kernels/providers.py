"""Which kernels a run times: ours, every installed peer, those of a file, or several builds of our own."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from bench.common import provenance
from bench.kernels import drop_ins, kernels, peers
from bench.kernels import rows as files
from bench.kernels.grids import Workload
from bench.kernels.rows import DROP_INS, FP8_MATH, MATH_SUFFIX, OUR_BF16, OURS, OWN

KINDS = {
    "plain": "PEERS",
    "fp8": "FP8_PEERS",
    "sparse": "SPARSE_PEERS",
    "sparse_fp8": "SPARSE_FP8_PEERS",
    "v4": "V4_PEERS",
}
"""Of rows: the dense call's, the sparse one's, DeepSeek-V4's; what a file of --peers calls their kernels."""


@dataclass(frozen=True)
class Provider:
    """A kernel by the name of its column; `prepare` takes a row's inputs and returns a `kernels.Call`.

    `package` is what it is installed with; it is empty where a file or a library brings it.
    """

    name: str
    prepare: Callable[..., kernels.Call]
    package: str = ""
    bf16_cache: bool = False  # in rows with an FP8 cache too

    @property
    def there(self) -> bool:
        return not self.package or bool(provenance.installed([self.package]))


@dataclass(frozen=True)
class Kernels:
    """The kernels of each of KINDS by their names, and versions of what brings them."""

    of_kinds: dict[str, dict[str, Provider]]
    versions: dict[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()  # builds of our own, whose outputs are compared with the first one's, bit for bit

    @classmethod
    def listed(cls, **of_kinds: list[Provider]) -> Kernels:
        return cls({kind: {one.name: one for one in of_kinds.get(kind, ())} for kind in KINDS})

    def of(self, workload: Workload) -> dict[str, Provider]:
        return self.of_kinds[workload.kind]

    def names(self, workloads: tuple[Workload, ...]) -> list[str]:
        """Of all kernels that any of these rows has."""
        return list(dict.fromkeys(name for workload in workloads for name in self.of(workload)))

    @property
    def packages(self) -> list[str]:
        everything = (provider for each in self.of_kinds.values() for provider in each.values())
        return list(dict.fromkeys(provider.package for provider in everything if provider.package))

    def chosen(self, names: list[str]) -> Kernels:
        left = {kind: {n: p for n, p in each.items() if n in names} for kind, each in self.of_kinds.items()}
        return replace(self, of_kinds=left)


def _in_both() -> list[Provider]:
    return [Provider("FlashInfer", peers.flashinfer, "flashinfer-python"), Provider("Triton", peers.triton, "vllm")]


def installed() -> Kernels:
    """Ours, and the peers of vLLM and SGLang. FA3 has no kernel for MLA with an FP8 cache."""
    dense = Provider(OURS, kernels.etap, "etap-backend")
    sparse = Provider(OURS, kernels.etap_sparse, "etap-backend")
    return Kernels.listed(
        plain=[dense, Provider("FlashMLA", peers.flashmla, "vllm"), Provider("FA3", peers.fa3, "vllm"), *_in_both()],
        fp8=[
            dense,
            Provider(FP8_MATH, partial(kernels.etap, fp8_math=True), "etap-backend"),
            Provider(OUR_BF16, kernels.etap, "etap-backend", bf16_cache=True),
            Provider("FlashMLA", peers.flashmla_fp8, "vllm"),
            *_in_both(),
        ],
        sparse=[
            sparse,
            Provider("FlashMLA", peers.flashmla_sparse, "vllm"),
            Provider("FlashMLA alone", partial(peers.flashmla_sparse, pad=False), "vllm"),
            Provider("FA3", peers.fa3_sparse, "vllm"),
        ],
        sparse_fp8=[
            sparse,
            Provider("FlashMLA", peers.flashmla_sparse_fp8, "vllm"),
            Provider("FlashMLA alone", partial(peers.flashmla_sparse_fp8, pad=False), "vllm"),
        ],
        v4=[Provider(OURS, kernels.etap_v4, "etap-backend"), Provider("FlashMLA", peers.flashmla_v4, "vllm")],
    )


def of_drop_ins() -> Kernels:
    """The drop-ins, each before what it stands in for; FA3 has no kernel for MLA with an FP8 cache."""

    def both(name: str, ours: Callable, theirs: Callable, package: str = "vllm") -> list[Provider]:
        return [Provider(name, ours), Provider(DROP_INS[name], theirs, package)]

    flashinfer = both(files.AS_FLASHINFER, drop_ins.flashinfer, peers.flashinfer, "flashinfer-python")
    fa3 = both(files.AS_FA3, drop_ins.fa3, peers.fa3)
    return Kernels.listed(
        plain=[*both(files.AS_FLASHMLA, drop_ins.flash_mla, peers.flashmla), *flashinfer, *fa3],
        fp8=[*both(files.AS_FLASHMLA, drop_ins.flash_mla_fp8, peers.flashmla_fp8), *flashinfer],
        sparse_fp8=both(files.AS_FLASHMLA, drop_ins.flash_mla_sparse, peers.flashmla_sparse_fp8),
    )


def ours(all_of_them: Kernels) -> Kernels:
    """Without the peers."""
    return all_of_them.chosen([*OWN, *DROP_INS])


def with_file(before: Kernels, path: Path) -> Kernels:
    """These kernels and those of a Python file, which may take the place of one of the same name.

    The file defines one or several of the values of KINDS, each {column: prepare}, and may define VERSIONS, {name:
    version}. `prepare` is given a row's `kernels.Inputs`, `SparseInputs` or `V4Inputs`; it returns a call that takes
    the tensors of a `kernels.Copy`, launches on torch's current stream, can be captured in a CUDA graph and returns its
    output, or raises NotImplementedError with the reason why the kernel does not take the row.

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
    if taken := [name for each in tables for name in each if name in (*OWN, *DROP_INS)]:
        known = ", ".join((*OWN, *DROP_INS))
        raise ValueError(f"--peers: wanted other columns than {known}, got {', '.join(taken)}")
    more = {kind: {name: Provider(name, made) for name, made in each.items()} for kind, each in found.items()}
    both = {kind: each | more[kind] for kind, each in before.of_kinds.items()}
    return Kernels(both, {**before.versions, **defined.get("VERSIONS", {})})


def of_libraries(modules: dict[str, ModuleType]) -> Kernels:
    """The kernels of several builds of our own; `modules` has each one's `kernels` by its name."""

    def calls(function: str) -> list[Provider]:  # a tree of before a call has no rows of it
        return [Provider(name, getattr(of, function)) for name, of in modules.items() if hasattr(of, function)]

    plain, sparse = calls("etap"), calls("etap_sparse")
    math = [Provider(one.name + MATH_SUFFIX, partial(one.prepare, fp8_math=True)) for one in plain]
    of = Kernels.listed(plain=plain, fp8=[*plain, *math], sparse=sparse, sparse_fp8=sparse, v4=calls("etap_v4"))
    return replace(of, libraries=tuple(modules))
