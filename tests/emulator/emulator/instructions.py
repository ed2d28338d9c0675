"""What the instructions do that concern a thread alone: arithmetic, conversions, loads and stores.

Straight-line code of them becomes one Python function on arrays of a warp's 32 lanes; here is the line for each. R[i]
are the registers; `mask` names the variable with the lanes that take part, "None" when all do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import formats
from .ptx import DTYPES, LANES, SINK, Entry, Imm, Instruction, Mem, Not, Reg, UnknownInstruction, Vec


class Translator:
    """Python for the instructions of one kernel, and the names that it uses."""

    def __init__(self, entry: Entry):
        self.entry = entry
        helpers = (_fma, _ftz, _shl, _shr, _div, _rem, _mul_wide, _mul_hi, _bfi, _prmt)
        helpers += (_popc, _clz, _brev, _bfind_shift)
        helpers += (formats.pack2, formats.multiply_bf16x2, formats.fma_bf16x2, formats.f32_to_bf16)
        self.names = {f.__name__: f for f in helpers} | {dtype.name: dtype for dtype in DTYPES.values()}
        self.names |= {"np": np, "where": np.where, "E4M3": formats.E4M3}

    def function(self, instructions: list[Instruction], masked: bool) -> Callable:
        """run(warp, mask) of straight-line code."""
        lines = [self.line(item, "m" if masked else "None") for item in instructions]
        source = "def run(w, m):\n R = w.R\n" + "".join(f" {line}\n" for line in lines)
        scope: dict = {}
        exec(compile(source, "<ptx>", "exec"), self.names, scope)
        return scope["run"]

    def line(self, item: Instruction, mask: str) -> str:
        """One line of Python for an instruction; one that is not known raises."""
        prefix = ""
        if item.guard:
            reg, negated = item.guard
            guard = f"{'~' if negated else ''}R[{reg.index}]"
            prefix, mask = f"g = {guard if mask == 'None' else f'm & {guard}'}; ", "g"
        try:
            text = TRANSLATIONS[item.parts[0]](self, item, mask)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise UnknownInstruction(str(item)) from error
        return prefix + text

    def reader(self, operand, kind: str) -> Callable:
        """A function of a warp that reads an operand in all lanes."""
        code, names = compile(self.read(operand, kind), "<operand>", "eval"), self.names
        return lambda warp: eval(code, names, {"R": warp.R, "w": warp})

    def address(self, mem: Mem, kind: str = "u32") -> Callable:
        """A function of a warp for the address in all lanes."""
        code, names = compile(self.address_text(mem, kind), "<address>", "eval"), self.names
        return lambda warp: eval(code, names, {"R": warp.R, "w": warp})

    def address_text(self, mem: Mem, kind: str) -> str:
        base = self.read(mem.base, kind)
        return f"({base} + {self.constant(str(mem.offset), DTYPES[kind])})" if mem.offset else base

    def read(self, operand, kind: str) -> str:
        """Expression of an operand as an array of a type's dtype."""
        dtype = DTYPES[kind]
        if isinstance(operand, Not):
            return f"~R[{operand.reg.index}]"
        if isinstance(operand, Imm):
            if operand.text.startswith("%"):
                return f"w.special({operand.text!r}).astype({dtype.name})"
            return self.constant(operand.text, dtype)
        if not isinstance(operand, Reg):
            raise ValueError(operand)
        if operand.dtype == dtype:
            return f"R[{operand.index}]"
        if operand.dtype.itemsize == dtype.itemsize:
            return f"R[{operand.index}].view({dtype.name})"
        if operand.dtype.itemsize < dtype.itemsize:
            raise ValueError(f"{operand.name} read as .{kind}")
        unsigned = np.dtype(f"uint{dtype.itemsize * 8}")
        low = f"R[{operand.index}].view(uint{operand.dtype.itemsize * 8}).astype({unsigned.name})"
        return low if unsigned == dtype else f"{low}.view({dtype.name})"

    def write(self, operand, kind: str, value: str, mask: str) -> str:
        """Statement that gives a register a value of a type's dtype, where the mask holds."""
        if operand == SINK:
            return value
        dtype, target = DTYPES[kind], operand.dtype
        if target != dtype:
            if target.itemsize < dtype.itemsize:
                raise ValueError(f"{operand.name} written as .{kind}")
            if target.itemsize > dtype.itemsize:
                value = f"({value}).astype({'int' if kind[0] == 's' else 'uint'}{target.itemsize * 8})"
            value = f"({value}).view({target.name})"
        if mask != "None":
            value = f"where({mask}, {value}, R[{operand.index}])"
        return f"R[{operand.index}] = {value}"

    def constant(self, text: str, dtype: np.dtype) -> str:
        """Name of an immediate's or a symbol's value in all lanes."""
        key = f"K_{dtype.name}_{re.sub(r'[^0-9a-zA-Z_]', '_m', text)}"
        if key not in self.names:
            array = np.full(LANES, 0, dtype)
            if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
                digits = found[1] or found[2]
                array = np.full(LANES, int(digits, 16), f"uint{4 * len(digits)}").view(dtype)
            elif text in self.entry.symbols:
                array[:] = self.entry.symbols[text]
            elif dtype.kind in "iu" and re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0|[1-9]\d*)U?", text):
                unsigned = np.dtype(f"uint{dtype.itemsize * 8}")
                value = int(text.rstrip("U"), 0) & (1 << dtype.itemsize * 8) - 1
                array = np.full(LANES, value, unsigned).view(dtype)
            elif dtype.kind == "b" and text in ("0", "-1", "1"):
                array[:] = text != "0"
            else:
                raise ValueError(f"operand {text!r}")
            array.setflags(write=False)
            self.names[key] = array
        return key


# ------------------------------------------------------------------------------------------ arithmetic that numpy lacks


def _fma(a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _ftz(x):
    return np.where(np.abs(x) < np.float32(1.1754944e-38), np.copysign(np.float32(0), x), x)


def _shl(a, b):
    width = a.dtype.itemsize * 8
    return np.where(b >= width, a.dtype.type(0), a << np.minimum(b, width - 1).astype(a.dtype))


def _shr(a, b):
    width = a.dtype.itemsize * 8
    shifted = a >> np.minimum(b, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(b >= width, a.dtype.type(0), shifted)


def _div(a, b):
    """Integer division towards zero; by zero all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~b.dtype.type(0), quotient)


def _rem(a, b):
    return np.where(b == 0, a, a - _div(a, np.where(b == 0, b.dtype.type(1), b)) * b)


def _mul_wide(a, b):
    wide = np.dtype(f"{'int' if a.dtype.kind == 'i' else 'uint'}{a.dtype.itemsize * 16}")
    return a.astype(wide) * b.astype(wide)


def _mul_hi(a, b):
    bits = a.dtype.itemsize * 8
    if bits < 64:
        return (_mul_wide(a, b) >> bits).astype(a.dtype)
    high = [(int(x) * int(y) >> 64) & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]
    return np.array(high, np.uint64).view(a.dtype)


def _bfi(a, b, position, length):
    """b with the low `length` bits of a at `position`."""
    position, length = (position & 255).astype(np.uint64), (length & 255).astype(np.uint64)
    mask = _shl(_shl(np.ones(LANES, np.uint64), length) - np.uint64(1), position)
    return ((b.astype(np.uint64) & ~mask) | (_shl(a.astype(np.uint64), position) & mask)).astype(a.dtype)


def _prmt(a, b, selector):
    source = np.stack([a, b], axis=1).view(np.uint8)  # [lanes, 8]
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    picked = np.take_along_axis(source, (nibbles & 7).astype(np.int64), axis=1)
    sign = np.where(picked >= 128, np.uint8(255), np.uint8(0))
    return np.ascontiguousarray(np.where(nibbles >= 8, sign, picked)).view(np.uint32)[:, 0]


def _bit_table(a):
    """[lanes, 32], the highest bit first."""
    return np.unpackbits(a.astype(">u4").view(np.uint8)).reshape(LANES, 32)


def _popc(a):
    return _bit_table(a).sum(axis=1).astype(np.uint32)


def _clz(a):
    return np.where(a == 0, 32, _bit_table(a).argmax(axis=1)).astype(np.uint32)


def _brev(a):
    return np.packbits(np.ascontiguousarray(_bit_table(a)[:, ::-1])).view(">u4").astype(np.uint32)


def _bfind_shift(a):
    return np.where(a == 0, np.uint32(0xFFFFFFFF), _clz(a)).astype(np.uint32)


# --------------------------------------------------------------------------------------------- a translation for each


def _known(item: Instruction, *allowed: str) -> set[str]:
    """The modifiers of an instruction, which must all be known."""
    modifiers = set(item.parts[1:-1])
    if modifiers - set(allowed):
        raise UnknownInstruction(str(item))
    return modifiers


def _arithmetic(integer: str | None = None, real: str | None = None):
    """Translation of an operation with one type for all operands: expressions in {0}, {1}, {2}."""

    def translate(t: Translator, item: Instruction, mask: str) -> str:
        kind = item.parts[-1]
        expression, allowed = (real, ("rn", "approx", "ftz")) if kind in ("f32", "f64") else (integer, ("lo",))
        if expression is None:
            raise UnknownInstruction(str(item))
        flush = "_ftz({})" if "ftz" in _known(item, *allowed) else "{}"
        operands = [flush.format(t.read(operand, kind)) for operand in item.operands[1:]]
        return t.write(item.operands[0], kind, flush.format(expression.format(*operands)), mask)

    return translate


def _product(integer: str, real: str | None):
    """mul and mad, which may keep the high half or widen."""
    same = _arithmetic(integer, real)

    def translate(t: Translator, item: Instruction, mask: str) -> str:
        kind, mode = item.parts[-1], item.parts[1]
        if item.opcode == "mul.rn.bf16x2":
            a, b = (t.read(operand, kind) for operand in item.operands[1:])
            return t.write(item.operands[0], kind, f"multiply_bf16x2({a}, {b})", mask)
        if mode not in ("wide", "hi"):
            return same(t, item, mask)
        if item.parts[0] != "mul":
            raise UnknownInstruction(str(item))
        result = f"{kind[0]}{DTYPES[kind].itemsize * 16}" if mode == "wide" else kind
        a, b = (t.read(operand, kind) for operand in item.operands[1:])
        return t.write(item.operands[0], result, f"_mul_{mode}({a}, {b})", mask)

    return translate


def _sum(t: Translator, item: Instruction, mask: str) -> str:
    if item.opcode != "add.f16x2":
        return _arithmetic("{0} + {1}", "{0} + {1}")(t, item, mask)
    a, b = (t.read(operand, "f16x2") for operand in item.operands[1:])
    return t.write(item.operands[0], "f16x2", f"({a}.view(float16) + {b}.view(float16)).view(uint32)", mask)


def _fused(t: Translator, item: Instruction, mask: str) -> str:
    if item.opcode != "fma.rn.bf16x2":
        return _arithmetic(None, "_fma({0}, {1}, {2})")(t, item, mask)
    a, b, c = (t.read(operand, "bf16x2") for operand in item.operands[1:])
    return t.write(item.operands[0], "bf16x2", f"fma_bf16x2({a}, {b}, {c})", mask)


def _shift(t: Translator, item: Instruction, mask: str) -> str:
    _known(item)
    kind, (target, value, amount) = item.parts[-1], item.operands
    if isinstance(amount, Imm) and int(amount.text, 0) < DTYPES[kind].itemsize * 8:
        symbol = "<<" if item.parts[0] == "shl" else ">>"
        shifted = f"{t.read(value, kind)} {symbol} {t.constant(amount.text, DTYPES[kind])}"
    else:
        shifted = f"_{item.parts[0]}({t.read(value, kind)}, {t.read(amount, 'u32')})"
    return t.write(target, kind, shifted, mask)


def _mov(t: Translator, item: Instruction, mask: str) -> str:
    kind, (target, source) = item.parts[-1], item.operands
    bits = DTYPES[kind].itemsize * 8
    if isinstance(source, Vec):  # packs, the first item lowest
        parts = ", ".join(t.read(x, f"b{bits // len(source.items)}") for x in source.items)
        return t.write(target, f"b{bits}", f"np.stack([{parts}], axis=1).view(uint{bits})[:, 0]", mask)
    if isinstance(target, Vec):
        size = bits // len(target.items)
        whole = f"v = {t.read(source, kind)}.view(uint{size}).reshape({LANES}, {len(target.items)})"
        parts = [t.write(x, f"b{size}", f"v[:, {n}].copy()", mask) for n, x in enumerate(target.items)]
        return "; ".join([whole, *parts])
    return t.write(target, kind, t.read(source, kind), mask)


COMPARISONS = {"num": "==", "neu": "!=", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS |= {"nan": "==", "geu": "<"}  # turned round: they hold for NaN


def _setp(t: Translator, item: Instruction, mask: str) -> str:
    _, compare, kind = item.parts
    a, b = (t.read(operand, kind) for operand in item.operands[1:])
    value = f"{a} {COMPARISONS[compare]} {b}"
    if compare in ("num", "nan"):  # whether both are numbers
        value = f"({a} == {a}) & ({b} == {b})"
    if compare in ("geu", "nan"):
        value = f"~({value})"
    if compare == "ne" and kind[0] == "f":  # numpy's holds for NaN, PTX's does not
        value = f"({value}) & ({a} == {a}) & ({b} == {b})"
    return t.write(item.operands[0], "pred", value, mask)


def _selp(t: Translator, item: Instruction, mask: str) -> str:
    kind, (target, a, b, p) = item.parts[-1], item.operands
    return t.write(target, kind, f"where({t.read(p, 'pred')}, {t.read(a, kind)}, {t.read(b, kind)})", mask)


def _cvta(t: Translator, item: Instruction, mask: str) -> str:
    """Generic addresses of parameters and global memory are their addresses."""
    if item.opcode not in ("cvta.param.u64", "cvta.global.u64", "cvta.to.global.u64"):
        raise UnknownInstruction(str(item))
    return t.write(item.operands[0], "u64", t.read(item.operands[1], "u64"), mask)


INTEGER_CONVERSIONS = ("cvt.s64.s32", "cvt.u16.u32", "cvt.u32.u16", "cvt.u32.u64", "cvt.u64.u32")
CONVERSIONS = {
    "cvt.rn.bf16x2.f32": "pack2({0}, {1}, 'bf16')",
    "cvt.rn.bf16.f32": "f32_to_bf16({0})",
    "cvt.rn.f16x2.f32": "pack2({0}, {1}, 'f16')",
    "cvt.rn.satfinite.e4m3x2.f32": "pack2({0}, {1}, 'e4m3')",
    "cvt.rn.f16x2.e4m3x2": "E4M3[{0}.view(uint8)].astype(float16).view(uint32)",
    "cvt.f32.f16": "{0}.astype(float32)",
    "cvt.rn.f32.s32": "{0}.astype(float32)",
    "cvt.rn.f64.s64": "{0}.astype(float64)",
    "cvt.rpi.f64.f64": "np.ceil({0})",
    "cvt.rzi.s64.f64": "np.trunc({0}).astype(int64)",
    "cvt.rzi.s32.f32": "np.trunc({0}).astype(int32)",
}


def _cvt(t: Translator, item: Instruction, mask: str) -> str:
    to, source = item.parts[-2:]
    expression = f"{{0}}.astype({DTYPES[to].name})" if item.opcode in INTEGER_CONVERSIONS else CONVERSIONS[item.opcode]
    value = expression.format(*(t.read(operand, source) for operand in item.operands[1:]))
    return t.write(item.operands[0], to, value, mask)


def _memory_shape(item: Instruction) -> tuple[str, int, str]:
    """Space, number of items and type of a load or store."""
    spaces = r"(shared|shared::cluster|param|global)(?:(?<=global)\.(?:cg|L1::no_allocate))?"
    shape = re.fullmatch(rf"(?:ld|ld\.volatile|st)\.{spaces}(?:\.v([24]))?\.(\w+)", item.opcode)
    if shape is None or shape[3] not in DTYPES:
        raise UnknownInstruction(str(item))
    return shape[1].removeprefix("shared::"), int(shape[2] or 1), shape[3]


def _ld(t: Translator, item: Instruction, mask: str) -> str:
    space, count, kind = _memory_shape(item)
    target, source = item.operands
    targets = target.items if isinstance(target, Vec) else (target,)
    address = t.address_text(source, "u32" if space in ("shared", "cluster") else "u64")
    function = "load_past_l1" if "cg" in item.parts else f"load_{space}"
    loaded = f"t = w.{function}({address}, {mask}, {DTYPES[kind].itemsize}, {count})"
    parts = [t.write(x, kind, f"t[{n}].view({DTYPES[kind].name})", mask) for n, x in enumerate(targets)]
    return "; ".join([loaded, *parts])


def _st(t: Translator, item: Instruction, mask: str) -> str:
    if item.opcode == "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32":
        target, barrier = (t.address_text(operand, "u32") for operand in item.operands[::2])
        return f"w.send({target}, {mask}, {t.read(item.operands[1], 'u32')}, {barrier})"
    space, _, kind = _memory_shape(item)
    if space == "param":
        raise UnknownInstruction(str(item))
    target, value = item.operands
    values = value.items if isinstance(value, Vec) else (value,)
    size = DTYPES[kind].itemsize
    raw = ", ".join(t.read(x, f"b{size * 8}") for x in values)
    return f"w.store_{space}({t.address_text(target, 'u64' if space == 'global' else 'u32')}, {mask}, {size}, [{raw}])"


def _atom(t: Translator, item: Instruction, mask: str) -> str:
    if item.opcode != "atom.shared.add.u32":
        raise UnknownInstruction(str(item))
    target, place, value = item.operands
    added = f"t = w.add_shared({t.address_text(place, 'u32')}, {mask}, {t.read(value, 'u32')})"
    return f"{added}; {t.write(target, 'u32', 't', mask)}"


CLUSTER_SHIFT = 24  # shared memory of a cluster's CTA: an address above it has its rank + 1, one below is the CTA's own


def _mapa(t: Translator, item: Instruction, mask: str) -> str:
    if item.opcode != "mapa.shared::cluster.u32":
        raise UnknownInstruction(str(item))
    target, address, rank = item.operands
    mapped = f"{t.read(address, 'u32')} + (({t.read(rank, 'u32')} + np.uint32(1)) << np.uint32({CLUSTER_SHIFT}))"
    return t.write(target, "u32", mapped, mask)


def _call(name: str, *kinds: str):
    """Translation to a function of operands with given types."""

    def translate(t: Translator, item: Instruction, mask: str) -> str:
        if item.parts[1:] != ("b32",):
            raise UnknownInstruction(str(item))
        operands = ", ".join(t.read(x, kind) for x, kind in zip(item.operands[1:], kinds, strict=True))
        return t.write(item.operands[0], "b32", f"{name}({operands})", mask)

    return translate


def _bits(function: str):
    """Translation of an operation on a word's bits."""

    def translate(t: Translator, item: Instruction, mask: str) -> str:
        if item.opcode not in ("popc.b32", "clz.b32", "brev.b32", "bfind.shiftamt.u32"):
            raise UnknownInstruction(str(item))
        return t.write(item.operands[0], "u32", f"{function}({t.read(item.operands[1], 'u32')})", mask)

    return translate


def _nothing(t: Translator, item: Instruction, mask: str) -> str:
    """Prefetches and register budgets change no result here."""
    return "pass"


def _griddepcontrol(t: Translator, item: Instruction, mask: str) -> str:
    """A warp that has not waited may not touch what the kernel's predecessor still writes; see Memory.late."""
    return "w.followed = True" if "wait" in item.parts else "pass"


TRANSLATIONS = {
    "mov": _mov,
    "add": _sum,
    "sub": _arithmetic("{0} - {1}", "{0} - {1}"),
    "mul": _product("{0} * {1}", "{0} * {1}"),
    "mad": _product("{0} * {1} + {2}", None),
    "fma": _fused,
    "div": _arithmetic("_div({0}, {1})", "{0} / {1}"),
    "rem": _arithmetic("_rem({0}, {1})"),
    "min": _arithmetic("np.minimum({0}, {1})", "np.fmin({0}, {1})"),
    "max": _arithmetic("np.maximum({0}, {1})", "np.fmax({0}, {1})"),
    "neg": _arithmetic("-{0}", "-{0}"),
    "abs": _arithmetic("np.abs({0})", "np.abs({0})"),
    "ex2": _arithmetic(None, "np.exp2({0})"),
    "lg2": _arithmetic(None, "np.log2({0})"),
    "rcp": _arithmetic(None, "1 / {0}"),
    "sqrt": _arithmetic(None, "np.sqrt({0})"),
    "and": _arithmetic("{0} & {1}"),
    "or": _arithmetic("{0} | {1}"),
    "xor": _arithmetic("{0} ^ {1}"),
    "not": _arithmetic("~{0}"),
    "shl": _shift,
    "shr": _shift,
    "setp": _setp,
    "selp": _selp,
    "cvta": _cvta,
    "cvt": _cvt,
    "ld": _ld,
    "st": _st,
    "atom": _atom,
    "mapa": _mapa,
    "popc": _bits("_popc"),
    "clz": _bits("_clz"),
    "brev": _bits("_brev"),
    "bfind": _bits("_bfind_shift"),
    "bfi": _call("_bfi", "b32", "b32", "u32", "u32"),
    "prmt": _call("_prmt", "b32", "b32", "b32"),
    "prefetch": _nothing,
    "setmaxnreg": _nothing,
    "griddepcontrol": _griddepcontrol,
}
