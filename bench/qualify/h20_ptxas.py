"""The H20 proxy's compiler: a CUDA toolchain whose ptxas slows the WGMMA stream down to an H20's tensor-core rate.

    python -m bench.qualify.h20_ptxas OUT_DIR [CUDA_HOME]    # then build with CUDACXX=OUT_DIR/bin/nvcc

The sources stay as they are: the toolchain's ptxas is this file, which rewrites every .ptx argument and runs the real
ptxas on it. It puts fillers behind each warpgroup matrix instruction: products with A in registers that hold zeros, and
with scale-d 1. They keep the tensor cores busy, add exactly nothing to the accumulator, and read only B from shared
memory. Their number slows one H200 SM, on which two warpgroups issue, down to an H20 SM's 131 TFLOP/s / 78 (bfloat16
and float16; twice that in 8 bits), as h20_rates.py measures; fractions are met on average over a function. tf32 and
integer products stay as they are.

ptxas must not know that the zeros are zeros, or it builds them anew for every filler and serialises the instructions.
They are the upper half of the grid's size in z, computed once per function, at every wgmma.fence, or at the first fence
of a basic block and behind a wait, so that products in flight share them. Each function gets the place that neither
serialises nor spills. A function that has no such place is named: it comes out too slow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Fillers per instruction: {n: (A from shared memory, A from registers)}.
# Below n = 64 a filler is m64n8 on the first sums of the accumulator: it reads least, and narrow products are short of
# shared memory. PTX promises an order only among instructions of one shape; on an H200 the results are the same bit for
# bit. From 64 on a filler has the instruction's own shape: 8 to 32 of m64n8 would be needed.
NARROW = {8: (0.0, 0.325), 16: (1.23, 1.645), 32: (3.62, 4.03), 64: (7.71, 8.09)}
ALIKE = {64: (3.275, 3.265), 128: (3.28, 3.295), 256: (3.3, 3.28)}
WGMMA = re.compile(r"wgmma\.mma_async\.[^;]*;")
SLOWED = re.compile(r"k16|k32\.\w+\.e[45]m")
FENCE = re.compile(r"wgmma\.fence\.sync\.aligned;")
FENCE_OR_EDGE = re.compile(rf"{FENCE.pattern}|^\$L__BB\w+:|wgmma\.wait_group", re.M)
FUNCTION = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+|\.extern\s+)*\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", re.M)
DECLARE = ".reg .b32 %h20z<4>; .reg .b32 %h20t; .reg .pred %h20p; setp.eq.b32 %h20p, 0, 0;\n"
# A grid has at most 65535 blocks in z. Four shifts of that number: ptxas must take them for four different values.
ZEROS = "mov.u32 %h20t, %nctaid.z; " + " ".join(f"shr.u32 %h20z{i}, %h20t, {16 + i};" for i in range(4)) + "\n"
PLACES = ("function", "fence", "block")  # where the zeros are worked out
SERIALISED, WARNED = 10**6, 10**3  # in spilled bytes that are as bad
REAL = "H20_PROXY_REAL_PTXAS"

Wanted = Callable[[int, bool], float]


def fillers(n: int, from_registers: bool) -> float:
    """Fillers per instruction of width n, linear between the measured widths."""
    table = NARROW if n < min(ALIKE) else ALIKE
    low, high = max(m for m in table if m <= n), min(m for m in table if m >= n)
    a, b = table[low][from_registers], table[high][from_registers]
    return a if low == high else a + (b - a) * (n - low) / (high - low)


def operands(text: str) -> list[str]:
    """The operands of an instruction; braces group registers."""
    return [one.strip() for one in re.findall(r"\{[^}]*\}|[^,{}]+", text) if one.strip()]


class Throttle:
    """Puts fillers behind instructions so that their running mean follows each shape's number.

    `counted`: by (n, whether A is in registers) the numbers of instructions and of fillers.
    """

    def __init__(self, wanted: Wanted = fillers):
        self.wanted, self.debt, self.counted = wanted, {}, {}

    def __call__(self, match: re.Match) -> str:
        text = match.group(0)
        if not SLOWED.search(text):
            return text
        operation, rest = text.split(None, 1)
        sums, a, b, *_, last = found = operands(rest.rstrip(";"))  # D, A, B, scale-d, scale-a, scale-b, [transposes]
        n = int(re.search(r"m64n(\d+)k", operation)[1])
        key = n, a.startswith("{")
        want = self.debt.get(key, 0.0) + self.wanted(*key)
        count = max(0, round(want))
        self.debt[key] = want - count
        total, added = self.counted.get(key, (0, 0))
        self.counted[key] = total + 1, added + count
        width = 8 if n < min(ALIKE) else n
        registers = operands(sums.strip("{}"))
        sums = "{" + ", ".join(registers[: len(registers) * width // n]) + "}"
        transpose_b = [last] if len(found) > 6 else []
        zeros = "{%h20z0, %h20z1, %h20z2, %h20z3}"
        operation = operation.replace(f"m64n{n}k", f"m64n{width}k")
        filler = f"{operation} {', '.join([sums, zeros, b, '%h20p', '1', '1', *transpose_b])};"
        return "\n".join([text] + [filler] * count)


def throttled(ptx: str, place: Callable[[str], str], throttle: Callable[[], Throttle] = Throttle) -> tuple[str, dict]:
    """PTX text with every function's WGMMA stream slowed down, and the counts of fillers.

    Args:
        place: gives one of PLACES for a function's name.
    """
    found, counted = list(FUNCTION.finditer(ptx)), {}
    out = [ptx[: found[0].start()] if found else ptx]
    for match, end in zip(found, [m.start() for m in found[1:]] + [len(ptx)], strict=True):
        text = ptx[match.start() : end]
        if WGMMA.search(text):
            slowing = throttle()
            text = WGMMA.sub(slowing, text)
            for key, counts in slowing.counted.items():
                counted[key] = tuple(map(sum, zip(counted.get(key, (0, 0)), counts, strict=True)))
            where = place(match.group(1))
            once = where == "function" or not FENCE.search(text)
            if not once:
                text = _at_fences(text, first_of_block=where == "block")
            body = text.index("\n{") + 2
            text = text[:body] + "\n" + DECLARE + (ZEROS if once else "") + text[body:]
        out.append(text)
    return "".join(out), counted


def _at_fences(text: str, first_of_block: bool) -> str:
    """The zeros at every fence, or only at the first one behind each edge of a basic block and each wait."""
    stale = True

    def put(match: re.Match) -> str:
        nonlocal stale
        is_edge = not FENCE.match(match.group(0))
        zeros = ZEROS if stale and not is_edge else ""
        stale = is_edge or not first_of_block
        return zeros + match.group(0)

    return FENCE_OR_EDGE.sub(put, text)


def complaints(messages: str) -> dict[str, int]:
    """By function how bad ptxas says it is: spilled bytes, or far worse, serialised instructions."""
    out: dict[str, int] = {}
    for line in messages.splitlines():
        name = re.search(r"function '([^']+)'", line)
        if name and "(C75" in line:
            out[name[1]] = out.get(name[1], 0) + (SERIALISED if "serialized" in line else WARNED)
        elif name and "spilled" in line:
            out[name[1]] = out.get(name[1], 0) + sum(map(int, re.findall(r"(\d+) bytes spill", line)))
    return out


def _tried(real: str, arguments: list[str], source: str, text: str) -> dict[str, int]:
    """ptxas's complaints about this text; its output is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trial.ptx")
        path.write_text(text)
        trial = [str(path) if a == source else a for a in arguments]
        if "-o" in trial:
            trial[trial.index("-o") + 1] = str(path.with_suffix(".cubin"))
        run = subprocess.run([real, *trial, "--warn-on-spills"], cwd=folder, capture_output=True, text=True)
        return complaints(run.stdout + run.stderr)


def _slowed(real: str, arguments: list[str], source: str) -> str:
    """The slowed text of a source, for the real ptxas; a summary goes to stderr."""
    text = Path(source).read_text()
    if not WGMMA.search(text):
        return text
    trials = {p: _tried(real, arguments, source, throttled(text, lambda name, p=p: p)[0]) for p in PLACES}
    before = _tried(real, arguments, source, text) if any(trials.values()) else {}
    for name in sorted({name for trial in trials.values() for name in trial}):
        if min(trial.get(name, 0) for trial in trials.values()) > before.get(name, 0):
            print(f"h20 proxy: fillers make ptxas serialise or spill: {name}", file=sys.stderr)
    text, counted = throttled(text, lambda name: min(PLACES, key=lambda p: trials[p].get(name, 0)))
    for (n, registers), (total, added) in sorted(counted.items()):
        kind = "RS" if registers else "SS"
        print(f"h20 proxy: m64n{n} {kind}: {total} instructions, {added} fillers", file=sys.stderr)
    return text


def as_ptxas(arguments: list[str]) -> int:
    """Run the real ptxas on slowed sources; its exit status. Warnings are no errors: fillers may spill."""
    real = os.environ.get(REAL) or str(Path(__file__).resolve().with_name("ptxas.real"))
    arguments = [a for a in arguments if a not in ("--warning-as-error", "-Werror")]
    with tempfile.TemporaryDirectory() as folder:
        given = list(arguments)
        for place, argument in enumerate(arguments):
            if argument.endswith(".ptx") and os.path.exists(argument):
                given[place] = os.path.join(folder, f"{place}.ptx")
                Path(given[place]).write_text(_slowed(real, arguments, argument))
        return subprocess.call([real, *given])


def make_toolchain(out: Path, cuda: Path) -> Path:
    """Make a folder like CUDA's with this file as its ptxas; returns its nvcc.

    Raises ValueError, naming CUDA_HOME, when there is no toolkit.
    """
    cuda = cuda.resolve()
    if not all((cuda / "bin" / tool).is_file() for tool in ("nvcc", "ptxas")):
        raise ValueError(f"CUDA_HOME: wanted a CUDA toolkit with bin/nvcc and bin/ptxas, got {cuda}")
    shutil.rmtree(out / "bin", ignore_errors=True)
    (out / "bin").mkdir(parents=True)
    for entry in [*cuda.iterdir(), *(cuda / "bin").iterdir()]:
        link = out / entry.relative_to(cuda)
        # nvcc looks for its tools beside its own file: these two must be real files here.
        if entry.name in ("nvcc", "nvcc.profile"):
            shutil.copy(entry, link)
        elif entry.name not in ("bin", "ptxas"):
            link.unlink(missing_ok=True)
            link.symlink_to(entry)
    (out / "bin" / "ptxas.real").symlink_to(cuda / "bin" / "ptxas")
    ptxas = out / "bin" / "ptxas"
    ptxas.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    ptxas.chmod(0o755)
    return out / "bin" / "nvcc"


if __name__ == "__main__":
    if Path(__file__).name == "ptxas":
        sys.exit(as_ptxas(sys.argv[1:]))
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(f"usage: python -m bench.qualify.h20_ptxas OUT_DIR [CUDA_HOME], got {sys.argv[1:]}")
    home = (sys.argv[2:] or [os.environ.get("CUDA_HOME", "/usr/local/cuda")])[0]
    print(make_toolchain(Path(sys.argv[1]), Path(home)))
