"""Measures the rate of WGMMA of every shape on 78 CTAs of this GPU, with and without the H20 proxy's fillers.

    python -m bench.qualify.h20_rates [--output rates.json]

Two warpgroups per CTA issue products from shared memory, or from registers and shared memory, in chains of four on up
to four accumulators. A line has for each shape TFLOP/s without fillers and with h20_ptxas.py's, whether the
accumulators are the same bit for bit, and how many fillers give the H20's rate, for h20_ptxas.py's tables. Run it
again for another ptxas or card; one run varies by 2%. The exit status is 1 if a rate with fillers is more than 5% off,
or a result is not the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.cuda._utils import _cuda_load_module

from bench.common.provenance import provenance
from bench.common.results import write
from bench.qualify import h20_ptxas

SMS, TARGET = 78, {16: 131.0, 8: 262.0}  # TFLOP/s on that many SMs, by the bits of an operand
SLOW = {(8, False)}  # (n, A in registers) that an H200 itself does not bring to the rate
MAX_OFF = 0.05
WIDTHS = (8, 16, 32, 64, 128, 256)
PTXAS = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
SHARED = 160 * 1024  # one CTA per SM
KERNEL = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 sm[];
.visible .entry rate(.param .u64 p_out, .param .u32 p_groups)
.maxntid 256, 1, 1
{{
.reg .pred %p, %one, %zero; .reg .b32 %r<16>; .reg .b32 %a<16>; .reg .f32 %f<{total}>; .reg .b64 %rd<4>, %base, %out;
.reg .b64 %da<16>, %db<4>;
setp.eq.b32 %one, 0, 0;
ld.param.u64 %out, [p_out]; ld.param.u32 %r0, [p_groups]; setp.eq.u32 %zero, %r0, 0;
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
mul.lo.u32 %r3, %r2, {cta_bytes}; shl.b32 %r4, %r1, 2; add.u32 %r3, %r3, %r4;
cvt.u64.u32 %rd0, %r3; add.u64 %out, %out, %rd0;
mov.u32 %r5, sm; add.u32 %r6, %r5, %r4; mov.u32 %r7, 0;
mov.u32 %r11, %ntid.x; shl.b32 %r12, %r11, 2;
fill: mad.lo.u32 %r8, %r7, 7919, %r1; mul.lo.u32 %r8, %r8, 0x9E3779B1; shr.u32 %r9, %r8, 15; xor.b32 %r8, %r8, %r9;
mul.lo.u32 %r8, %r8, 0x85EBCA6B; and.b32 %r8, %r8, {mask}; or.b32 %r8, %r8, {exponent}; st.shared.b32 [%r6], %r8;
add.u32 %r6, %r6, %r12; add.u32 %r7, %r7, %r12;
setp.lt.u32 %p, %r7, 65536; @%p bra fill;
bar.sync 0; fence.proxy.async; bar.sync 0;
shr.u32 %r8, %r5, 4; cvt.u64.u32 %base, %r8; or.b64 %base, %base, 0x4000004002000000;
{descriptors}
add.u32 %r6, %r5, %r4;
{loads}
{zeros}
loop:
wgmma.fence.sync.aligned;
{body}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
sub.u32 %r0, %r0, 1; setp.ne.u32 %p, %r0, 0; @%p bra loop;
{store}
ret;
}}
"""


def shape(n: int) -> tuple[int, int]:
    """Instructions per group, accumulators."""
    return (48, 4) if n <= 32 else (24, 3) if n == 64 else (12, 1) if n == 128 else (8, 1)


def kernel(bits: int, n: int, from_registers: bool, across: bool) -> str:
    """PTX of a loop of products; `across`: operands lie MN-major in shared memory."""
    group, accumulators = shape(n)
    sums = n // 2
    kind = "k16.f32.bf16.bf16" if bits == 16 else "k32.f32.e4m3.e4m3"
    mask, exponent = (0x807F807F, 0x3E003E00) if bits == 16 else (0x87878787, 0x28282828)
    transpose = f", {int(across)}" * (1 if from_registers else 2) if bits == 16 else ""
    body = []
    for i in range(group):
        d = ", ".join(f"%f{(i // 4) % accumulators * sums + r}" for r in range(sums))
        a = "{" + ", ".join(f"%a{4 * (i % 4) + r}" for r in range(4)) + "}"
        a = a if from_registers else f"%da{(i % 4) * 4 + (i // 4) % 4}"
        add = "%one" if i >= 4 * accumulators or i % 4 else "%zero"  # a group's sums begin anew
        body.append(f"wgmma.mma_async.sync.aligned.m64n{n}{kind} {{{d}}}, {a}, %db{i % 4}, {add}, 1, 1{transpose};")
    apart, total = 128 if across else 2, accumulators * sums  # from one k-step to the next, in 16 bytes
    tiles = [f"add.u64 %da{s * 4 + t}, %base, {t * 512 + s * apart};" for t, s in product(range(4), repeat=2)]
    return KERNEL.format(
        total=total,
        cta_bytes=total * 1024,
        mask=mask,
        exponent=exponent,
        descriptors="\n".join([*tiles, *(f"add.u64 %db{s}, %base, {2048 + s * apart};" for s in range(4))]),
        loads=" ".join(f"ld.shared.b32 %a{i}, [%r6+{1024 * i}];" for i in range(16)),
        zeros=" ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(total)),
        body="\n".join(body),
        store="\n".join(f"st.global.f32 [%out+{1024 * r}], %f{r};" for r in range(total)),
    )


def build(folder: Path, case: tuple, slowed: bool) -> tuple[bytes, float]:
    """The kernel's binary, with fillers or without, and its fillers per instruction."""
    wanted = h20_ptxas.fillers if slowed else lambda *key: 0.0
    text, counted = h20_ptxas.throttled(kernel(*case), lambda _: "function", lambda: h20_ptxas.Throttle(wanted))
    source = folder / f"{'_'.join(map(str, (*case, slowed)))}.ptx"
    source.write_text(text)
    command = [PTXAS, "-arch=sm_90a", "--warn-on-spills", source, "-o", source.with_suffix(".cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    messages = run.stdout + run.stderr
    if run.returncode or h20_ptxas.complaints(messages):
        raise SystemExit(f"ptxas refuses or spoils {source.stem}: {messages.strip()[:400]}")
    total, added = counted[case[1:3]]
    return source.with_suffix(".cubin").read_bytes(), added / total


def measure(cubin: bytes, bits: int, n: int):
    """TFLOP/s on SMS CTAs, and the accumulators."""
    group, accumulators = shape(n)
    function = _cuda_load_module(cubin, ["rate"])["rate"]
    function.set_shared_memory_config(SHARED)
    out = torch.zeros(SMS, accumulators * n // 2, 256, device="cuda")
    count, times = int(1.6e6 / (2 * 38.9 * n / 16 * group)), []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function((SMS, 1, 1), (256, 1, 1), (out, count), shared_mem=SHARED)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    flop = SMS * 2 * count * group * 2 * 64 * n * (16 if bits == 16 else 32)
    return flop / sorted(times[1:])[2] / 1e9, out


def measured(case: tuple, plain: tuple[bytes, float], slowed: tuple[bytes, float]) -> dict:
    """Rates of a case's two binaries, whether their results are the same, and the fillers that give the H20's rate."""
    bits, n, registers, across = case
    (free, reference), (rate, out) = (measure(cubin, bits, n) for cubin, _ in (plain, slowed))
    # An instruction's time is linear in its fillers.
    cost = (1 / rate - 1 / free) / slowed[1] if slowed[1] else 0
    wanted = max(0.0, (1 / TARGET[bits] - 1 / free) / cost) if cost > 0 else 0.0
    same = bool((out == reference).all() and reference.any())
    right = same and ((n, registers) in SLOW or abs(rate / TARGET[bits] - 1) <= MAX_OFF)
    found = {"bits": bits, "n": n, "registers": registers, "mn_major": across, "free": free, "rate": rate}
    return found | {"fillers": slowed[1], "wanted": wanted, "same": same, "right": right}


def main(output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None) -> None:
    """Measure every shape's rate; exit with 1 if one is off or a result is not the same."""
    cases = list(product((16, 8), WIDTHS, (False, True), (False, True)))
    cases = [case for case in cases if case[0] == 16 or not case[3]]  # 8-bit operands are K-major only
    found = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        built = {case: [pool.submit(build, Path(folder), case, slowed) for slowed in (False, True)] for case in cases}
        for case, binaries in built.items():
            found.append(measured(case, *(each.result() for each in binaries)))
            typer.echo(found[-1])
    if output:
        write(
            {
                "what": "rates of WGMMA on the H20 proxy",
                **provenance("python -m bench.qualify.h20_rates"),
                "shapes": found,
            },
            output,
        )
    raise typer.Exit(not all(one["right"] for one in found))


if __name__ == "__main__":
    typer.run(main)
