"""Which kernels a run times: ours, every installed peer, those of a file, or several builds of our own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

from etap_backend.lab import provenance
from etap_backend.lab.bench import drop_ins, kernels, peers
from etap_backend.lab.bench.grids import Workload
from etap_backend.lab.bench.kernels import Call, Inputs, SparseInputs
from etap_backend.lab.bench.rows import (
    AS_FA3,
    AS_FLASHINFER,
    AS_FLASHMLA,
    DROP_INS,
    FP8_MATH,
    MATH_SUFFIX,
    OUR_BF16,
    OURS,
    OWN,
)

Prepare = Callable[[Inputs], Call] | Callable[[SparseInputs], Call]
KINDS = {"plain": "PEERS", "fp8": "FP8_PEERS", "sparse": "SPARSE_PEERS", "sparse_fp8": "SPARSE_FP8_PEERS"}
"""Of rows, the dense call's and the sparse one's, each with a 16-bit cache and with an FP8 one; what a file of --peers
calls their kernels."""


@dataclass(frozen=True)
class Provider:
    """A kernel by the name of its column.

    `package` is what it is installed with; it is empty where a file or a library brings it.
    """

    name: str
    prepare: Prepare
    package: str = ""
    bf16_cache: bool = False  # in rows with an FP8 cache too

    @property
    def there(self) -> bool:
        return not self.package or bool(provenance.installed([self.package]))


Providers = dict[str, Provider]


def _by_name(*providers: Provider) -> Providers:
    return {provider.name: provider for provider in providers}


@dataclass(frozen=True)
class Kernels:
    """The kernels of each of KINDS, and versions of what brings them."""

    plain: Providers
    fp8: Providers
    sparse: Providers
    sparse_fp8: Providers
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def of_kinds(self) -> dict[str, Providers]:
        return {kind: getattr(self, kind) for kind in KINDS}

    def of(self, workload: Workload) -> Providers:
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
        return Kernels(**left, versions=self.versions)


def installed() -> Kernels:
    """Ours, and the peers of vLLM and SGLang. FA3 has no kernel for MLA with an FP8 cache."""
    fp8_math = partial(kernels.etap, fp8_math=True)
    in_both = (
        Provider("FlashInfer", peers.flashinfer, "flashinfer-python"),
        Provider("Triton", peers.triton, "vllm"),
    )
    plain = _by_name(
        Provider(OURS, kernels.etap, "etap-backend"),
        Provider("FlashMLA", peers.flashmla, "vllm"),
        Provider("FA3", peers.fa3, "vllm"),
        *in_both,
    )
    fp8 = _by_name(
        Provider(OURS, kernels.etap, "etap-backend"),
        Provider(FP8_MATH, fp8_math, "etap-backend"),
        Provider(OUR_BF16, kernels.etap, "etap-backend", bf16_cache=True),
        Provider("FlashMLA", peers.flashmla_fp8, "vllm"),
        *in_both,
    )
    sparse = _by_name(
        Provider(OURS, kernels.etap_sparse, "etap-backend"),
        Provider("FlashMLA", peers.flashmla_sparse, "vllm"),
        Provider("FlashMLA alone", partial(peers.flashmla_sparse, pad=False), "vllm"),
        Provider("FA3", peers.fa3_sparse, "vllm"),
    )
    sparse_fp8 = _by_name(
        Provider(OURS, kernels.etap_sparse, "etap-backend"),
        Provider("FlashMLA", peers.flashmla_sparse_fp8, "vllm"),
        Provider("FlashMLA alone", partial(peers.flashmla_sparse_fp8, pad=False), "vllm"),
    )
    return Kernels(plain, fp8, sparse, sparse_fp8)


def of_drop_ins() -> Kernels:
    """The drop-ins, each beside what it stands in for; FA3 has no kernel for MLA with an FP8 cache."""
    in_both = (
        Provider(AS_FLASHINFER, drop_ins.flashinfer),
        Provider(DROP_INS[AS_FLASHINFER], peers.flashinfer, "flashinfer-python"),
    )
    plain = _by_name(
        Provider(AS_FLASHMLA, drop_ins.flash_mla),
        Provider(DROP_INS[AS_FLASHMLA], peers.flashmla, "vllm"),
        *in_both,
        Provider(AS_FA3, drop_ins.fa3),
        Provider(DROP_INS[AS_FA3], peers.fa3, "vllm"),
    )
    fp8 = _by_name(
        Provider(AS_FLASHMLA, drop_ins.flash_mla_fp8),
        Provider(DROP_INS[AS_FLASHMLA], peers.flashmla_fp8, "vllm"),
        *in_both,
    )
    sparse_fp8 = _by_name(
        Provider(AS_FLASHMLA, drop_ins.flash_mla_sparse),
        Provider(DROP_INS[AS_FLASHMLA], peers.flashmla_sparse_fp8, "vllm"),
    )
    return Kernels(plain, fp8, {}, sparse_fp8)


def ours(all_of_them: Kernels) -> Kernels:
    """Without the peers."""
    return all_of_them.chosen([*OWN, *DROP_INS])


def with_file(before: Kernels, path: Path) -> Kernels:
    """These kernels and those of a Python file, which may take the place of one of the same name.

    The file defines PEERS, {column: prepare}, for rows with a 16-bit cache, FP8_PEERS for those with an FP8 one,
    SPARSE_PEERS and SPARSE_FP8_PEERS for those of the sparse call, or several of them, and may define VERSIONS, {name:
    version}. `prepare` is given a row's `kernels.Inputs` or `SparseInputs`; it returns a call that takes the tensors of
    a `kernels.Copy`, launches on torch's current stream, can be captured in a CUDA graph and returns its output, or
    raises NotImplementedError with the reason why the kernel does not take the row.

    Raises ValueError, naming --peers, when the file is not like that.
    """
    module = _module_of(path)
    found = {kind: getattr(module, name, {}) for kind, name in KINDS.items()}
    tables = list(found.values())
    if not any(tables) or not all(isinstance(each, dict) and all(map(callable, each.values())) for each in tables):
        wanted = ", ".join(KINDS.values())
        raise ValueError(f"--peers: wanted a file that defines one of {wanted}, {{column: function}}, got {path}")
    if taken := [name for each in tables for name in each if name in (*OWN, *DROP_INS)]:
        known = ", ".join((*OWN, *DROP_INS))
        raise ValueError(f"--peers: wanted other columns than {known}, got {', '.join(taken)}")
    more = {kind: _by_name(*(Provider(name, made) for name, made in each.items())) for kind, each in found.items()}
    versions = {**before.versions, **getattr(module, "VERSIONS", {})}
    return Kernels(**{kind: each | more[kind] for kind, each in before.of_kinds.items()}, versions=versions)


def _module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"etap_peers_{path.stem}", path)
    if spec is None or not path.is_file():
        raise ValueError(f"--peers: wanted a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--peers: {path} does not import: {type(error).__name__}: {error}") from error
    return module


def of_libraries(modules: dict[str, ModuleType]) -> Kernels:
    """The kernels of several builds of our own; `modules` has each one's `kernels` by its name."""
    plain = [Provider(name, module.etap) for name, module in modules.items()]
    math = [Provider(name + MATH_SUFFIX, partial(module.etap, fp8_math=True)) for name, module in modules.items()]
    # Trees of before there was a sparse call have no rows of it.
    sparse = [Provider(name, module.etap_sparse) for name, module in modules.items() if hasattr(module, "etap_sparse")]
    return Kernels(_by_name(*plain), _by_name(*plain, *math), _by_name(*sparse), _by_name(*sparse))
