"""PTX as text to PTX as data: a module's kernels with parameters, registers, shared memory and instructions.

Every instruction keeps its text and the source line that it was compiled from, for messages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LANES = 32
SHARED_BASE = 1024  # where a CTA's shared memory begins, as on hardware: address 0 is never valid
PARAM_BASE = 0x7E00_0000_0000

DTYPES = {
    **{f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype("float16"),
    "bf16": np.dtype("uint16"),
    "f32": np.dtype("float32"),
    "f64": np.dtype("float64"),
    "f16x2": np.dtype("uint32"),
    "bf16x2": np.dtype("uint32"),
    "e4m3x2": np.dtype("uint16"),
    "pred": np.dtype("bool"),
}


class EmulationError(Exception):
    """The kernel did what it must not do."""


class UnknownInstruction(EmulationError):
    """The emulator does not know this instruction; the message is its text."""


@dataclass(frozen=True, eq=False)  # each register is one object
class Reg:
    index: int
    dtype: np.dtype
    name: str


@dataclass(frozen=True)
class Imm:
    text: str  # a number, a special register or a symbol


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Mem:
    base: object
    offset: int
    coordinates: tuple = ()  # of a tensor map


@dataclass(frozen=True)
class Not:
    reg: Reg


SINK = Imm("_")  # a result that nobody wants


@dataclass
class Instruction:
    parts: tuple[str, ...]  # of the opcode, between its dots
    operands: tuple
    guard: tuple[Reg, bool] | None  # predicate, negated
    text: str
    place: str  # in the source
    scope: tuple[int, ...]
    reads: frozenset[Reg]
    writes: frozenset[Reg]

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)

    def __str__(self) -> str:
        return f"{self.text} at {self.place}"


@dataclass(frozen=True)
class Label:
    scope: tuple[int, ...]
    name: str


# Given an instruction and the mark around it: the PTX to run in its place, which may be its own text, or nothing. A
# mark is the NAME between .pragma "begin NAME" and .pragma "end NAME"; elsewhere it is empty.
Edit = Callable[[Instruction, str], str]


class Module:
    """The kernels of one PTX file."""

    def __init__(self, text: str):
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        self.files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.M)}
        self.text = re.sub(r"//[^\n]*", "", text)
        self._starts = {m[1]: m.start() for m in re.finditer(r"\.entry\s+([\w$]+)", self.text)}

    @cached_property
    def names(self) -> dict[str, str]:
        """Demangled name of each kernel -> its name in the PTX."""
        tool = shutil.which("c++filt")
        mangled = list(self._starts)
        if tool is None:
            raise FileNotFoundError("c++filt, which comes with the C++ compiler that builds the library")
        out = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
        return dict(zip(out.splitlines(), mangled, strict=True))

    def source(self, name: str) -> tuple[str, str]:
        """Parameter list and body of a kernel."""
        start = self._starts[name]
        body = self.text.index("{", start)
        depth = 0
        for brace in re.finditer(r"[{}]", self.text[body:]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return self.text[start:body], self.text[body + 1 : body + brace.start()]
        raise ValueError(f"{name} has no end")

    def place(self, loc: str) -> str:
        """A .loc directive as file:line."""
        place = re.match(r"\.loc\s+(\d+)\s+(\d+)", loc)
        inlined = re.search(r"inlined_at\s+(\d+)\s+(\d+)", loc)
        text = f"{self._file(place[1])}:{place[2]}"
        return f"{text} (inlined at {self._file(inlined[1])}:{inlined[2]})" if inlined else text

    def _file(self, number: str) -> str:
        return self.files.get(int(number), "?").rsplit("/", 1)[-1]


class Entry:
    """One kernel as it is written."""

    def __init__(self, module: Module, name: str, edit: Edit | None = None):
        self.module, self.name = module, name
        header, body = module.source(name)
        self.params = [
            (m[3], int(m[1] or DTYPES[m[2]].itemsize), DTYPES[m[2]].itemsize * int(m[4] or 1))
            for m in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", header)
        ]
        self.constants = {name: array for name, array in _constants(module.text) if name in body}
        # Addresses of constants, parameters and shared variables.
        self.symbols: dict[str, int] = {name: array.ctypes.data for name, array in self.constants.items()}
        self.static_shared = self._lay_out_shared(body)
        self.param_bytes = self._lay_out_params()
        self.registers: list[Reg] = []
        self._names: dict[tuple[int, ...], dict[str, Reg]] = {(): {}}
        self._opened = 0
        self.marks: set[str] = set()
        self.items = self._parse(body, edit)

    def instructions(self) -> list[Instruction]:
        return [item for item in self.items if isinstance(item, Instruction)]

    def _lay_out_shared(self, body: str) -> int:
        inside = _shared_variables(body)
        names = {variable[0] for variable in inside}
        outside = [v for v in _shared_variables(self.module.text) if v[0] not in names and v[0] in body]
        end = SHARED_BASE
        for variable, align, size in sorted(inside + outside, key=lambda v: v[2] == 0):  # dynamic memory lies behind
            end = -(-end // align) * align
            self.symbols[variable] = end
            end += size
        return end - SHARED_BASE

    def _lay_out_params(self) -> int:
        offset = 0
        for name, align, size in self.params:
            offset = -(-offset // align) * align
            self.symbols[name] = PARAM_BASE + offset
            offset += size
        return offset

    def _parse(self, body: str, edit: Edit | None, scope: tuple = (), place: str = "?") -> list[Instruction | Label]:
        label, blanks = re.compile(r"([\w$%]+)\s*:(?!:)"), re.compile(r"\s*")
        items, mark, i = [], "", 0
        while True:
            i = blanks.match(body, i).end()
            if i >= len(body):
                return items
            if body[i] == "{":
                self._opened += 1
                scope += (self._opened,)
                self._names[scope] = {}
                i += 1
            elif body[i] == "}":
                scope = scope[:-1]
                i += 1
            elif body.startswith(".loc", i):
                end = body.index("\n", i)
                place = self.module.place(body[i:end])
                i = end
            elif found := label.match(body, i):
                items.append(Label(scope, found[1]))
                i = found.end()
            else:
                end = body.index(";", i)
                text = " ".join(body[i:end].split())
                i = end + 1
                if text.startswith(".reg"):
                    self._declare(text, self._names[scope])
                elif marked := re.match(r'\.pragma "(begin|end) (\w+)"', text):
                    if (mark == "") != (marked[1] == "begin"):
                        raise ValueError(f"{text} inside of {mark!r} in {self.name}")
                    mark = marked[2] if mark == "" else ""
                    self.marks.add(marked[2])
                elif text.startswith("."):
                    if not text.startswith((".shared", ".pragma")):
                        raise UnknownInstruction(f"{text} in {self.name}")
                elif text:
                    item = self._instruction(text, place, scope)
                    instead = edit(item, mark) if edit else text
                    items += [item] if instead == text else self._parse(instead, None, scope, place)

    def _declare(self, text: str, names: dict[str, Reg]) -> None:
        kind, rest = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
        dtype = DTYPES[kind if kind in ("pred", "f32", "f64") else f"b{kind.lstrip('busf')}"]
        for name in split_operands(rest):
            ranged = re.match(r"(.*)<(\d+)>$", name)
            for one in [f"{ranged[1]}{n}" for n in range(int(ranged[2]))] if ranged else [name]:
                names[one] = Reg(len(self.registers), dtype, one)
                self.registers.append(names[one])

    def _instruction(self, text: str, place: str, scope: tuple) -> Instruction:
        guarded = re.match(r"@(!?)\s*([\w$%]+)\s+(.*)", text)
        guard = (self._register(guarded[2], scope), bool(guarded[1])) if guarded else None
        rest = guarded[3] if guarded else text
        opcode, tail = re.match(r"([^\s\[{]+)\s*(.*)", rest).groups()
        parts = tuple(opcode.split("."))
        operands = tuple(self._operand(operand, scope) for operand in split_operands(tail))
        outputs = 0 if writes_nothing(parts) else 1
        reads = frozenset().union(*map(registers_of, operands[outputs:]))
        writes = frozenset().union(*map(registers_of, operands[:outputs]))
        if guard:
            reads |= {guard[0]}
        return Instruction(parts, operands, guard, text, place, scope, reads, writes)

    def _register(self, name: str, scope: tuple) -> Reg | None:
        for depth in range(len(scope), -1, -1):
            if name in self._names[scope[:depth]]:
                return self._names[scope[:depth]][name]
        return None

    def _operand(self, text: str, scope: tuple):
        if text.startswith("["):
            inner = split_operands(text[1:-1])
            base, sign, digits = re.match(r"(.+?)\s*(?:([+-])\s*(-?\w+))?$", inner[0]).groups()
            offset = int(digits, 0) * (-1 if sign == "-" else 1) if digits else 0
            coordinates = self._operand(inner[1], scope).items if len(inner) > 1 else ()
            return Mem(self._operand(base, scope), offset, coordinates)
        if text.startswith("{"):
            return Vec(tuple(self._operand(item, scope) for item in split_operands(text[1:-1])))
        if "|" in text:
            return Vec(tuple(self._operand(item.strip(), scope) for item in text.split("|")))
        if text.startswith("!"):
            return Not(self._register(text[1:].strip(), scope))
        return self._register(text, scope) or Imm(text)


def writes_nothing(parts: tuple[str, ...]) -> bool:
    """Whether an instruction's first operand is none that it writes."""
    if "try_wait" in parts or "mma_async" in parts or parts[:3] == ("barrier", "cta", "red"):
        return False
    return parts[0] in ("st", "stmatrix", "bra", "bar", "barrier", "wgmma", "cp", "prefetch", "mbarrier")


def split_operands(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def registers_of(operand) -> frozenset[Reg]:
    if isinstance(operand, Reg):
        return frozenset({operand})
    if isinstance(operand, Not):
        return frozenset({operand.reg})
    if isinstance(operand, Vec):
        return frozenset().union(*map(registers_of, operand.items))
    if isinstance(operand, Mem):
        return registers_of(operand.base).union(*map(registers_of, operand.coordinates))
    return frozenset()


def _shared_variables(text: str) -> list[tuple[str, int, int]]:
    """(name, alignment, bytes) of what a text declares in shared memory; dynamic memory has no bytes."""
    found = []
    pattern = r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.([a-z]\d+)\s+([\w$]+)(\[\d*\])?;"
    for align, kind, name, count in re.findall(pattern, text):
        size = DTYPES[kind].itemsize
        found.append((name, int(align or size), size * int(count.strip("[]") or 0) if count else size))
    return found


def _constants(text: str) -> list[tuple[str, np.ndarray]]:
    """Names and bytes of the arrays that a text declares in global memory."""
    pattern = r"\.global\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([\d,\s]+)\};"
    found = []
    for name, values in re.findall(pattern, text):
        array = np.empty(values.count(",") + 17, np.uint8)
        array = array[-array.ctypes.data % 16 :][: values.count(",") + 1]  # aligned as cp.async wants it
        array[:] = [int(value) for value in values.split(",")]
        found.append((name, array))
    return found
