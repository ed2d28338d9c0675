"""Floating-point formats that numpy lacks, and pairs of them in one register."""

import numpy as np


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def f64_to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded once: float32 on the way keeps in its last bit that it is not exact."""
    with np.errstate(all="ignore"):
        near = x.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(x)
    bits = near.view(np.uint32) - beyond.astype(np.uint32)
    return f32_to_bf16(np.where((near != x) & ~np.isnan(x), bits | 1, bits).view(np.float32))


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (mantissa + np.where(exponent > 0, 8, 0)) * 2.0 ** (np.maximum(exponent, 1) - 10)
    value[code % 128 == 127] = np.nan
    return np.where(code >= 128, -value, value).astype(np.float32)


E4M3 = _e4m3_values()


def f32_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, saturating to the largest finite value; NaN to 0x7f."""
    size = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    _, exponent = np.frexp(np.where(size > 0, size, 1))
    quantum = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    rounded = np.minimum(np.rint(size / quantum) * quantum, 448.0).astype(np.float32)
    code = np.searchsorted(E4M3[:127], np.nan_to_num(rounded)).astype(np.uint8)
    code |= np.signbit(x).astype(np.uint8) << 7
    return np.where(np.isnan(x), np.uint8(0x7F), code)


def to_f32(raw: np.ndarray, kind: str) -> np.ndarray:
    """The values in bytes, whose last dimension is contiguous."""
    if kind == "bf16":
        return bf16_to_f32(raw.view(np.uint16))
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return E4M3[raw]


def multiply_bf16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Two products in a register of 32 bits; float32 holds each exactly, but for subnormal ones."""
    x, y = (bf16_to_f32(pair.view(np.uint16)) for pair in (a, b))
    return f32_to_bf16(x * y).view(np.uint32)


def fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Two products and sums in a register, each rounded once where float64 holds the sum: exponents 2^37 apart."""
    x, y, z = (bf16_to_f32(part.view(np.uint16)).astype(np.float64) for part in (a, b, c))
    return f64_to_bf16(x * y + z).view(np.uint32)


def pack2(high: np.ndarray, low: np.ndarray, kind: str) -> np.ndarray:
    """Two float32 a lane as one register of 32 bits (f16, bf16) or 16 (e4m3)."""
    x = np.stack([low, high], axis=1).reshape(-1)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint32)
    if kind == "bf16":
        return f32_to_bf16(x).view(np.uint32)
    return f32_to_e4m3(x).view(np.uint16)
