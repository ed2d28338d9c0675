"""FlashMLA and the paper's kernel on the H20 proxy: builds them with its compiler, and is their file for --peers.

    CUDA_HOME=$PWD/h20-cuda python -m bench.qualify.proxy_peers OUT CHECKOUT...
    PYTHONPATH=OUT ETAP_LIBRARY=PROXY.so python -m bench kernels paper --h20-proxy --peers bench/qualify/proxy_peers.py

Checkouts are of FlashMLA, of the paper's FlashMLA-ETAP, and of vLLM's FlashMLA, whose kernel for a dense FP8 cache is
taken. Each divides a call among the device's SMs: here among an H20's 78, as ETAP does. A build needs torch, setuptools
and ninja; CUTLASS comes from a checkout's submodule or from the package cutlass_library.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from torch import Tensor

from bench.common.provenance import commit_of
from bench.kernels import peers
from bench.kernels.inputs import Call, Inputs, to_fp8
from bench.kernels.measure import H20_SMS
from etap_backend.limits import LATENT_DIM

SMS = re.compile(r"(?<=->)multiProcessorCount\b")
FLASHMLA = "flash_mla.flash_mla_interface"  # its own package instead of vLLM's
FP8 = "flash_mla_fp8"
COMMITS = "proxy-peers.txt"  # in OUT: a line per checkout, name and commit


def counted_as_on_an_h20(text: str) -> str:
    """A source that takes an H20's share of an H200's SMs for all of them."""
    return SMS.sub(f"multiProcessorCount * {H20_SMS} / 132", text)


def build(checkout: Path, out: Path) -> None:
    """Build a checkout's kernels, and FlashMLA's Python package, into a folder.

    Raises ValueError for a compiler that is not the proxy's or a checkout that does not count SMs, and
    CalledProcessError if a build fails.
    """
    from torch.utils.cpp_extension import CUDA_HOME  # says on import where it finds CUDA

    if not Path(CUDA_HOME or "", "bin", "ptxas.real").exists():
        raise ValueError(f"CUDA_HOME: wanted the toolchain of bench.qualify.h20_ptxas, got {CUDA_HOME}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, checkout.name)
        shutil.copytree(checkout, tree, ignore=shutil.ignore_patterns(".git", "build"))
        sources = [path for path in (tree / "csrc").rglob("*") if path.suffix in (".h", ".cpp")]
        texts = {path: path.read_text() for path in sources if "cutlass" not in path.parts}
        counting = {path: text for path, text in texts.items() if SMS.search(text)}
        if not counting:
            raise ValueError(f"CHECKOUT: wanted one whose csrc reads multiProcessorCount, got {checkout}")
        for path, text in counting.items():
            path.write_text(counted_as_on_an_h20(text))
        cutlass = tree / "csrc" / "cutlass"
        if not (cutlass / "include").is_dir():
            (found,) = importlib.util.find_spec("cutlass_library").submodule_search_locations  # type: ignore
            shutil.rmtree(cutlass, ignore_errors=True)
            cutlass.symlink_to(Path(found, "source"))
        setup = tree / "setup.py"
        flags = setup.read_text().replace("-std=c++17", "-std=c++20")  # as today's torch wants
        setup.write_text(flags.replace('"--source-in-ptx",', ""))  # the proxy's ptxas would slow the sources' text, too
        headers = Path(CUDA_HOME or "", "include", "cccl")  # nvcc looks there by itself, c++ does not
        environment = os.environ | {"FLASH_MLA_DISABLE_SM100": "1", "CPATH": str(headers)}
        kernel = tree / "csrc/extension/sm90/dense_fp8"
        name = "vLLM-" * kernel.is_dir() + checkout.name
        if kernel.is_dir():
            os.environ |= environment
            build_fp8(kernel, cutlass, out)
        else:
            what = "build" if (tree / "csrc/api").is_dir() else "build_ext"  # the paper's package has FlashMLA's name
            command = [sys.executable, "setup.py", what, "--build-lib", str(out.absolute())]
            subprocess.run(command, cwd=tree, env=environment, check=True)
    with (out / COMMITS).open("a") as file:
        file.write(f"{name} {commit_of(checkout)}\n")


def build_fp8(folder: Path, cutlass: Path, out: Path) -> None:
    """Build the kernel for a dense FP8 cache of vLLM's FlashMLA, with the flags of its setup.py."""
    from torch.utils import cpp_extension

    out.mkdir(parents=True, exist_ok=True)
    names = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    flags = ["-O3", "-std=c++20", "-DNDEBUG", "-DNO_PYBIND11=1", *(f"-U__CUDA_NO_{name}__" for name in names)]
    flags += ["--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math", "-gencode"]
    cpp_extension.load(
        FP8,
        [str(folder / name) for name in ("pybind.cpp", "flash_fwd_mla_fp8_sm90.cu", "flash_fwd_mla_metadata.cu")],
        extra_cflags=["-O3", "-std=c++20", "-DNO_PYBIND11=1"],
        extra_cuda_cflags=[*flags, "arch=compute_90a,code=sm_90a", "--ptxas-options=--register-usage-level=10"],
        extra_include_paths=[str(folder), str(cutlass / "include")],
        build_directory=str(out),
        is_python_module=False,
    )


def fp8(inputs: Inputs) -> Call:
    """As vLLM calls it: queries are rounded before the call."""
    kernel, given = importlib.import_module(FP8), peers.flashmla_dense(inputs)
    s_q, heads = inputs.q.shape[1:3]
    plan = kernel.get_mla_decoding_metadata_dense_fp8(inputs.seq_lens, s_q * heads, 1)
    q, scale = to_fp8(inputs.q, inputs.kv_scale), inputs.kv_scale_tensor
    lists = (LATENT_DIM, inputs.seq_lens, inputs.block_table, given["softmax_scale"], True, *plan, scale, scale)
    return lambda kv_cache: kernel.fwd_kvcache_mla_fp8(q, kv_cache.unsqueeze(-2), *lists)[0]


def paper(inputs: Inputs) -> Call:
    """The authors' ETAP, whose extension is called without its Python package: FlashMLA's has the same name."""
    kernel, (_, s_q, heads, _) = importlib.import_module("flash_mla_cuda"), inputs.q.shape
    plan = kernel.get_mla_metadata(inputs.seq_lens, s_q * heads, 1)
    given = (LATENT_DIM, inputs.seq_lens, inputs.block_table, inputs.softmax_scale, True, *plan)

    def call(kv_cache: Tensor) -> Tensor:
        return kernel.fwd_kvcache_mla(inputs.q, kv_cache.unsqueeze(-2), None, *given)[0]

    return call


def versions() -> dict[str, str]:
    """Commits of the checkouts that were built."""
    files = (Path(folder, COMMITS) for folder in sys.path)
    lines = next((path.read_text().splitlines() for path in files if path.is_file()), [])
    return {name: f"{commit}, built for the proxy" for name, commit in map(str.split, lines)}


PEERS = {"FlashMLA": partial(peers.flashmla, module=FLASHMLA), "authors' ETAP": paper}
FP8_PEERS = {"FlashMLA": fp8}
SPARSE_PEERS = {"FlashMLA": partial(peers.flashmla_sparse, module=FLASHMLA)}
SPARSE_FP8_PEERS = {"FlashMLA": partial(peers.flashmla_sparse_fp8, module=FLASHMLA)}
V4_PEERS = {"FlashMLA": partial(peers.flashmla_v4, module=FLASHMLA)}
VERSIONS = versions()

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: python -m bench.qualify.proxy_peers OUT CHECKOUT..., got {sys.argv[1:]}")
    for argument in sys.argv[2:]:
        build(Path(argument), Path(sys.argv[1]))
