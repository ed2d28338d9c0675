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
from etap_backend.lab.bench import kernels, peers
from etap_backend.lab.bench.grids import Workload
from etap_backend.lab.bench.kernels import Call, Inputs
from etap_backend.lab.bench.rows import FP8_MATH, MATH_SUFFIX, OUR_BF16, OURS, OWN

Prepare = Callable[[Inputs], Call]


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
    """The kernels of rows with a 16-bit cache and of rows with an FP8 one, and versions of what brings them."""

    plain: Providers
    fp8: Providers
    versions: dict[str, str] = field(default_factory=dict)

    def of(self, workload: Workload) -> Providers:
        return self.fp8 if workload.fp8 else self.plain

    def names(self, workloads: tuple[Workload, ...]) -> list[str]:
        """Of all kernels that any of these rows has."""
        return list(dict.fromkeys(name for workload in workloads for name in self.of(workload)))

    @property
    def packages(self) -> list[str]:
        everything = (*self.plain.values(), *self.fp8.values())
        return list(dict.fromkeys(provider.package for provider in everything if provider.package))

    def chosen(self, names: list[str]) -> Kernels:
        plain, fp8 = ({n: p for n, p in each.items() if n in names} for each in (self.plain, self.fp8))
        return Kernels(plain, fp8, self.versions)


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
    return Kernels(plain, fp8)


def ours(all_of_them: Kernels) -> Kernels:
    """Without the peers."""
    return all_of_them.chosen(list(OWN))


def with_file(before: Kernels, path: Path) -> Kernels:
    """These kernels and those of a Python file, which may take the place of one of the same name.

    The file defines PEERS, {column: prepare}, for rows with a 16-bit cache, or FP8_PEERS for the others, or both, and
    may define VERSIONS, {name: version}. `prepare` is given a row's `kernels.Inputs`; it returns a call that takes one
    copy of the cache [pages, page_size, 576], launches on torch's current stream, can be captured in a CUDA graph and
    returns its output, or raises NotImplementedError with the reason why the kernel does not take the row.

    Raises ValueError, naming --peers, when the file is not like that.
    """
    module = _module_of(path)
    found = [getattr(module, name, {}) for name in ("PEERS", "FP8_PEERS")]
    if not any(found) or not all(isinstance(each, dict) and all(map(callable, each.values())) for each in found):
        raise ValueError(f"--peers: wanted a file that defines PEERS or FP8_PEERS, {{column: function}}, got {path}")
    if taken := [name for each in found for name in each if name in OWN]:
        raise ValueError(f"--peers: wanted other columns than {', '.join(OWN)}, got {', '.join(taken)}")
    plain, fp8 = ([Provider(name, prepare) for name, prepare in each.items()] for each in found)
    versions = {**before.versions, **getattr(module, "VERSIONS", {})}
    return Kernels(before.plain | _by_name(*plain), before.fp8 | _by_name(*fp8), versions)


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


def of_libraries(calls: dict[str, Callable[..., Call]]) -> Kernels:
    """The kernels of several builds of our own; `calls` has each one's `kernels.etap` by its name."""
    plain = [Provider(name, call) for name, call in calls.items()]
    math = [Provider(name + MATH_SUFFIX, partial(call, fp8_math=True)) for name, call in calls.items()]
    return Kernels(_by_name(*plain), _by_name(*plain, *math))
