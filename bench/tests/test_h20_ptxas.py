"""The H20 proxy's compiler: which fillers stand behind which products, and the toolchain with the real ptxas."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.qualify import h20_ptxas
from bench.qualify.h20_ptxas import complaints, fillers, throttled
from bench.qualify.h20_rates import kernel

SUMS = {n: "{" + ", ".join(f"%f{i}" for i in range(n // 2)) + "}" for n in (8, 16, 64)}


def product(n: int, a: str = "%da", kind: str = "k16.f32.bf16.bf16", rest: str = "%db, p, 1, 1, 0, 1") -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{n}{kind} {SUMS[n]}, {a}, {rest};"


def entry(name: str, *instructions: str) -> str:
    registers = ".reg .b64 %da, %db; .reg .pred p; .reg .f32 %f<64>;"
    return "\n".join([f".visible .entry {name}(.param .u64 x)", "{", registers, *instructions, "ret;", "}", ""])


HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
LOOP = ["wgmma.fence.sync.aligned;", *[product(16)] * 100, "wgmma.commit_group.sync.aligned;"]
TEXT = HEAD + entry("slowed", *LOOP) + entry("untouched", "bar.sync 0;")


@pytest.mark.parametrize("place", h20_ptxas.PLACES)
def test_fillers_follow_the_measured_number_on_average(place):
    text, counted = throttled(TEXT, lambda name: place)
    added = round(100 * fillers(16, False))
    assert counted == {(16, False): (100, added)} and added == 123
    filler = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, {%h20z0, %h20z1, %h20z2, %h20z3}, "
    )
    assert text.count(f"{filler}%db, %h20p, 1, 1, 1;") == added, "A in registers has no transposition, B keeps its own"
    slowed, untouched = text.split(".visible .entry untouched")
    assert slowed.count(h20_ptxas.ZEROS.strip()) == 1 and slowed.count("%h20z<4>") == 1
    assert untouched == TEXT.split(".visible .entry untouched")[1]
    zeros, fence = slowed.index("%nctaid.z"), slowed.index("wgmma.fence")
    assert (zeros < slowed.index(".reg .b64 %da")) == (place == "function") and zeros < fence


@pytest.mark.parametrize("place, zeros", [("function", 1), ("fence", 5), ("block", 3)])
def test_products_in_flight_share_zeros(place, zeros):
    wait = "wgmma.wait_group.sync.aligned 1;"
    text, _ = throttled(HEAD + entry("a", *LOOP, *LOOP, wait, *LOOP, *LOOP, "$L__BB0_2:", *LOOP), lambda name: place)
    assert text.count("%nctaid.z") == zeros


@pytest.mark.parametrize(
    "products, counted",
    [
        ([product(64)] * 40, {(64, False): (40, 131)}),
        (
            [product(8, a="{%r0, %r1, %r2, %r3}", kind="k32.f32.e4m3.e4m3", rest="%db, p, 1, 1")] * 40,
            {(8, True): (40, 13)},
        ),
        ([product(8, kind="k8.f32.tf32.tf32"), product(8, kind="k32.s32.s8.s8")], {}),
    ],
    ids=["wide", "fp8", "tf32 and integers"],
)
def test_each_shape_has_fillers_of_its_own(products, counted):
    text, found = throttled(HEAD + entry("a", *products), lambda name: "function")
    assert found == counted and text.count("wgmma.mma_async") == len(products) + sum(n for _, n in counted.values())
    assert ("m64n8k16" in text) is False, "from n = 64 on a filler has the instruction's shape"


def test_a_function_gets_the_place_where_ptxas_complains_least():
    messages = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in "
        "function 'a'\nptxas warning : Registers are spilled to local memory in function 'b', 8 bytes spill stores, "
        "4 bytes spill loads\n"
    )
    assert complaints(messages) == {"a": h20_ptxas.SERIALISED, "b": 12} and complaints("all is well") == {}


@pytest.fixture
def cuda() -> Path:
    """A CUDA toolkit, or the part of one that a package index has."""
    found = shutil.which("ptxas") or shutil.which("/usr/local/cuda/bin/ptxas")
    if not found or not (Path(found).resolve().parent / "nvcc").is_file():
        if os.environ.get("ETAP_REQUIRE_NVCC"):
            pytest.fail("no CUDA toolkit, and ETAP_REQUIRE_NVCC is set")
        pytest.skip("no CUDA toolkit")
    return Path(found).resolve().parents[1]


def test_the_toolchain_compiles_slowed_code_with_the_real_ptxas(cuda, tmp_path):
    nvcc = h20_ptxas.make_toolchain(tmp_path / "h20", cuda)
    assert nvcc.is_file() and not nvcc.is_symlink() and (tmp_path / "h20" / "bin" / "ptxas.real").is_symlink()
    source = tmp_path / "a.ptx"
    source.write_text(kernel(16, 16, False, False))
    run = subprocess.run(
        [nvcc.with_name("ptxas"), "-arch=sm_90a", source, "-o", tmp_path / "a.cubin"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "h20 proxy: m64n16 SS: 48 instructions, 59 fillers" in run.stderr
    assert (tmp_path / "a.cubin").read_bytes().startswith(b"\x7fELF") and source.read_text().count("h20z") == 0
    subprocess.run([cuda / "bin" / "ptxas", "-arch=sm_90a", source, "-o", tmp_path / "b.cubin"], check=True)
    assert (tmp_path / "a.cubin").read_bytes() != (tmp_path / "b.cubin").read_bytes()
    source.write_text("no PTX")
    assert subprocess.run([nvcc.with_name("ptxas"), "-arch=sm_90a", source], capture_output=True).returncode != 0
    assert h20_ptxas.make_toolchain(tmp_path / "h20", cuda) == nvcc, "made again in the same place"


def test_warnings_of_ptxas_are_no_errors(cuda, tmp_path):
    nvcc = h20_ptxas.make_toolchain(tmp_path / "h20", cuda)
    source = tmp_path / "a.ptx"
    local = ["cvta.local.u64 %da, in_local;", "ld.param.u64 %db, [x];", "st.volatile.u64 [%da], %db;"]
    source.write_text(HEAD + entry("a", ".local .b64 in_local;", *local))
    strict = ["-arch=sm_90a", "--warn-on-local-memory-usage", "--warning-as-error", source]
    run = subprocess.run([cuda / "bin" / "ptxas", *strict, "-o", tmp_path / "a.cubin"], capture_output=True, text=True)
    assert run.returncode != 0 and "Local memory used" in run.stderr
    run = subprocess.run([nvcc.with_name("ptxas"), *strict], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "Local memory used" in run.stderr


def test_a_folder_without_a_toolkit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="CUDA_HOME: wanted a CUDA toolkit with bin/nvcc and bin/ptxas, got "):
        h20_ptxas.make_toolchain(tmp_path / "h20", tmp_path)
