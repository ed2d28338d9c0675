"""The H20 proxy's compiler: which fillers stand behind which products, and the toolchain with the real ptxas."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bench.qualify import h20_ptxas
from bench.qualify.h20_ptxas import fillers, throttled
from bench.qualify.h20_rates import kernel

PRODUCT = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, %da, %db, "
LOOP = ["wgmma.fence.sync.aligned;", *[f"{PRODUCT}p, 1, 1, 0, 1;"] * 50, "wgmma.commit_group.sync.aligned;"]


def entry(name: str, *instructions: str) -> str:
    return "\n".join([f".visible .entry {name}(.param .u64 x)", "{", *instructions, "ret;", "}", ""])


@pytest.mark.parametrize("place, zeros", [("function", 1), ("fence", 3), ("block", 2)])
def test_fillers_follow_the_measured_number_on_average(place, zeros):
    body = [*LOOP, *LOOP, "wgmma.wait_group.sync.aligned 1;", *LOOP]
    text, counted = throttled(entry("slowed", *body) + entry("untouched", "bar.sync 0;"), lambda name: place)
    added = round(150 * fillers(16, False))
    assert counted == {(16, False): (150, added)} and text.count("%nctaid.z") == zeros
    filler = PRODUCT.replace("n16", "n8").replace(", %f4, %f5, %f6, %f7", "")
    filler = filler.replace("%da", "{%h20z0, %h20z1, %h20z2, %h20z3}") + "%h20p, 1, 1, 1;"
    assert text.count(filler) == added, "A in registers has no transposition, B stays as it was"
    assert text.endswith(entry("untouched", "bar.sync 0;"))


def test_tf32_and_integers_stay_and_a_function_s_complaints_are_counted():
    text = entry("a", PRODUCT.replace("k16.f32.bf16.bf16", "k8.f32.tf32.tf32") + "p, 1, 1;")
    assert throttled(text, lambda name: "function")[1] == {}
    messages = "(C7510) wgmma.mma_async instructions are serialized in function 'a'\n"
    messages += "Registers are spilled to local memory in function 'b', 8 bytes spill stores, 4 bytes spill loads\n"
    assert h20_ptxas.complaints(messages) == {"a": h20_ptxas.SERIALISED, "b": 12}


def test_the_toolchain_compiles_slowed_code_with_the_real_ptxas(tmp_path):
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found or not Path(found).resolve().with_name("ptxas").is_file():
        pytest.skip("no CUDA toolkit")
    nvcc = h20_ptxas.make_toolchain(tmp_path / "h20", Path(found).resolve().parents[1])
    source = tmp_path / "a.ptx"
    source.write_text(kernel(16, 16, False, False))
    command = [nvcc.with_name("ptxas"), "-arch=sm_90a", source, "-o", tmp_path / "a.cubin"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and "h20 proxy: m64n16 SS: 48 instructions, 59 fillers" in run.stderr, run.stderr
    assert (tmp_path / "a.cubin").read_bytes().startswith(b"\x7fELF") and "h20z" not in source.read_text()
    source.write_text("no PTX")
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_a_folder_without_a_toolkit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="CUDA_HOME: wanted a CUDA toolkit with bin/nvcc and bin/ptxas, got "):
        h20_ptxas.make_toolchain(tmp_path / "h20", tmp_path)
