"""The emulator itself: against CuTe's layouts, against torch, and against mistakes that it must not let pass."""

from __future__ import annotations

import math
import re

import kernels
import numpy as np
import pytest
import torch
from emulator import machine
from emulator.formats import f32_to_bf16, f32_to_e4m3, to_f32
from emulator.machine import TIMINGS, Kernel
from emulator.memory import Memory, TensorMap
from emulator.ptx import LANES, EmulationError, Module, UnknownInstruction

from support.covering import covering

# --------------------------------------------------------------------------------------------- WGMMA and CuTe's layouts

PRODUCTS = re.findall(
    r"^PRODUCT\((\w+), (?:\w+), .*, (\d+), (\d+), \w+\)$", kernels.SOURCES["products"].read_text(), flags=re.M
)
ENCODERS = {"bf16": f32_to_bf16, "f16": lambda x: x.astype(np.float16), "e4m3": f32_to_e4m3}


@kernels.NEEDS_COMPILER
@covering(1, {"name, columns, depth": PRODUCTS, "timing": TIMINGS})
def test_products_of_cute(name, columns, depth, timing):
    kind = name.split("_")[1]
    generator = np.random.default_rng(0)
    a, b = (ENCODERS[kind](generator.standard_normal((rows, int(depth)), np.float32)) for rows in (64, int(columns)))
    d = np.full((64, int(columns)), np.nan, np.float32)
    memory = Memory()
    pointers = [memory.add(x, which).to_bytes(8, "little") for x, which in ((a, "a"), (b, "b"), (d, "d"))]
    Kernel(kernels.module("products"), name).launch((1, 1), 128, 0, pointers, memory, timing=timing)
    wide = [to_f32(x.view(np.uint8), kind).reshape(x.shape).astype(np.float64) for x in (a, b)]
    np.testing.assert_allclose(d, wide[0] @ wide[1].T, atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------------------- single instructions


def run(body: str, inputs: np.ndarray, *, outputs: int = 1, threads: int = LANES, tensor=None, **how) -> np.ndarray:
    """The registers %o0 to %o<outputs> of each thread [threads, outputs] that code makes of %i0 to %i3 [threads, 4].

    %in points to the thread's inputs, %sh to 8 KB of shared memory, p_map is a tensor map.
    """
    store = "".join(f"st.global.u32 [%out+{4 * n}], %o{n};\n" for n in range(outputs))
    text = f"""
        .visible .entry test(.param .u64 p_in, .param .u64 p_out, .param .align 128 .b8 p_map[128]) {{
        .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %i<20>; .reg .b32 %o<20>; .reg .b64 %d<20>; .reg .f32 %f<20>;
        .reg .b64 %in, %out, %map, %policy; .reg .b32 %t, %lane, %sh;
        .shared .align 1024 .b8 buffer[8192];
        mov.u32 %t, %tid.x; mov.u32 %lane, %laneid; mov.u32 %sh, buffer;
        ld.param.u64 %in, [p_in]; ld.param.u64 %out, [p_out];
        mul.wide.u32 %d0, %t, 16; add.s64 %in, %in, %d0; add.s64 %out, %out, %d0;
        ld.global.v4.u32 {{%i0, %i1, %i2, %i3}}, [%in];
        {body}
        {store} ret; }}"""
    given, out = np.zeros((threads, 4), np.uint32), np.zeros((threads, 4), np.uint32)
    raw = np.ascontiguousarray(inputs).reshape(threads, -1).view(np.uint32)
    given[:, : raw.shape[1]] = raw
    memory = Memory()
    pointers = [memory.add(x, name).to_bytes(8, "little") for x, name in ((given, "in"), (out, "out"))]
    tensor_map = tensor(memory) if tensor else bytes(128)
    Kernel(Module(text), "test").launch((1, 1), threads, 0, [*pointers, tensor_map], memory, **how)
    return out[:, :outputs].copy()


def random_bits(columns: int, threads: int = LANES) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 32, (threads, columns), dtype=np.uint32)


def signed(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def permuted(a: int, b: int, selector: int) -> int:
    source, out = (b << 32 | a).to_bytes(8, "little"), 0
    for n in range(4):
        nibble = selector >> 4 * n & 15
        byte = source[nibble & 7]
        out |= ((255 if byte >> 7 else 0) if nibble & 8 else byte) << 8 * n
    return out


INTEGERS = {
    "sub.s32 %o0, %i0, 7;": lambda a, b, c: a - 7,
    "mul.hi.u32 %o0, %i0, %i1;": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %o0, %i0, %i1, %i2;": lambda a, b, c: a * b + c,
    "div.s32 %o0, %i0, 77;": lambda a, b, c: int(signed(a) / 77),
    "rem.u32 %o0, %i0, 77;": lambda a, b, c: a % 77,
    "min.s32 %o0, %i0, %i1;": lambda a, b, c: min(signed(a), signed(b)),
    "shr.s32 %o0, %i0, 5;": lambda a, b, c: signed(a) >> 5,
    "and.b32 %i1, %i1, 63; shl.b32 %o0, %i0, %i1;": lambda a, b, c: a << (b & 63),
    "and.b32 %i1, %i1, 63; shr.u32 %o0, %i0, %i1;": lambda a, b, c: a >> (b & 63),
    "bfi.b32 %o0, %i0, %i1, 5, 9;": lambda a, b, c: (b & ~(0x1FF << 5)) | (a & 0x1FF) << 5,
    "prmt.b32 %o0, %i0, %i1, 0x4D61;": lambda a, b, c: permuted(a, b, 0x4D61),
    "prmt.b32 %o0, %i0, %i1, %i2;": lambda a, b, c: permuted(a, b, c),
    "setp.lt.s32 %p0, %i0, %i1; selp.b32 %o0, %i2, 3, %p0;": lambda a, b, c: c if signed(a) < signed(b) else 3,
    "setp.gt.u32 %p1, %i0, %i1; @%p1 mov.b32 %o0, %i2; @!%p1 mov.b32 %o0, 4;": lambda a, b, c: c if a > b else 4,
    "cvt.s64.s32 %d1, %i0; shr.s64 %d1, %d1, 3; cvt.u32.u64 %o0, %d1;": lambda a, b, c: signed(a) >> 3,
    "mov.b64 %d1, {%i0, %i1}; shr.u64 %d1, %d1, 20; mov.b64 {%o0, %i3}, %d1;": lambda a, b, c: (b << 32 | a) >> 20,
    "mov.b32 {%h0, %h1}, %i0; mov.b32 %o0, {%h1, %h0};": lambda a, b, c: a << 16 | a >> 16,
    "mul.wide.s32 %d1, %i0, %i1; shr.u64 %d1, %d1, 32; cvt.u32.u64 %o0, %d1;": lambda a, b, c: (
        signed(a) * signed(b) >> 32
    ),
}


@pytest.mark.parametrize("code", INTEGERS)
def test_integer_instruction(code):
    bits = random_bits(3)
    assert run(code, bits)[:, 0].tolist() == [INTEGERS[code](*map(int, row)) & 0xFFFFFFFF for row in bits]


@pytest.mark.parametrize(
    "code, target",
    [
        ("cvt.rn.f16x2.f32 %o0, %i0, %i1;", torch.float16),
        ("cvt.rn.bf16x2.f32 %o0, %i0, %i1;", torch.bfloat16),
        ("cvt.rn.satfinite.e4m3x2.f32 %h0, %i0, %i1; mov.b32 %o0, {%h0, 0};", torch.float8_e4m3fn),
    ],
)
def test_packed_conversion(code, target):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LANES, 2, generator=generator) * torch.exp2(torch.arange(LANES)[:, None] - 16)
    x[:4] = torch.tensor([[0.0, -0.0], [448, -464], [2**-9, 3 * 2**-10], [17, 19]])
    limited = x.clamp(-448, 448) if target.itemsize == 1 else x
    want = limited.flip(1).to(target).contiguous()  # the first operand goes to the upper half
    raw = want.view(torch.uint8).numpy().reshape(LANES, -1)
    assert run(code, x.numpy())[:, 0].tolist() == [int.from_bytes(row.tobytes(), "little") for row in raw]


def test_products_of_two_bf16():
    """Subnormal numbers, zeros, infinities and NaN as well; torch multiplies in float32 and rounds once."""
    bits = random_bits(2, threads=256)
    bits[:8, 0] = [0x00018001, 0x7F807F80, 0x00000000, 0x7FC07FC0, 0x007F0001, 0x80000000, 0x7F7F7F7F, 0x00700010]
    bits[:8, 1] = 0x7B807B80
    a, b = (torch.from_numpy(np.ascontiguousarray(bits[:, n]).view(np.int16)).view(torch.bfloat16) for n in range(2))
    got = run("mul.rn.bf16x2 %o0, %i0, %i1;", bits, threads=256)[:, 0].copy().view(np.int16)
    got, want = torch.from_numpy(got).view(torch.bfloat16).float(), (a.float() * b.float()).bfloat16().float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_product_and_a_sum_of_bf16_are_rounded_once():
    """The first two sums lie just beside the middle of two neighbours; float32 would round them onto it."""
    bits = np.random.default_rng(0).integers(0x3F00, 0x4100, (256, 3, 2), dtype=np.uint16)
    bits ^= np.random.default_rng(1).integers(0, 2, bits.shape, dtype=np.uint16) << 15
    bits[:4, :, 0] = [[0x3F81, 0x3FC0, 0xAF80], [0x3F83, 0x3FC0, 0x2F80], [0x3F81, 0x3F80, 0], [0x7F80, 0x3F80, 0xFF80]]
    a, b, c = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).double().unbind(1)
    words = np.ascontiguousarray(bits).view(np.uint32)[..., 0]
    got = run("fma.rn.bf16x2 %o0, %i0, %i1, %i2;", words, threads=256)[:, 0].copy().view(np.int16).reshape(-1, 2)
    got = torch.from_numpy(got).view(torch.bfloat16)
    assert got[3, 0].isnan() and got[2, 0] == a[2, 0]
    others = torch.arange(256) != 3
    exact, got = (a * b + c)[others], got[others].double()
    low, high = (torch.nextafter(got.bfloat16(), torch.tensor(to, dtype=torch.bfloat16)).double() for to in (-9e9, 9e9))
    assert ((got - exact).abs() <= torch.minimum((low - exact).abs(), (high - exact).abs())).all()


def test_two_sums_of_halves_are_rounded_each():
    halves = np.array([1.0, 448.0, 2**-9, 2048.0, 3.0, -448.0, 0.125, 1.0], np.float16)
    words = np.resize(halves.view(np.uint32), (128, 2))
    got = run("add.f16x2 %o0, %i0, %i1;", words, threads=128)[:, 0].copy().view(np.float16)
    pairs = words.view(np.float16).reshape(-1, 2, 2)
    np.testing.assert_array_equal(got.reshape(-1, 2), pairs[:, 0] + pairs[:, 1])


def test_integers_lose_and_regain_their_upper_half():
    numbers = np.array([0, 1, 0xFFFF, 0x10000, 0x12345678, 0xFFFFFFFF], np.uint32)
    got = run("cvt.u16.u32 %h0, %i0; cvt.u32.u16 %o0, %h0;", np.resize(numbers, 128), threads=128)[:, 0]
    assert got.tolist() == np.resize(numbers & 0xFFFF, 128).tolist()


def test_every_e4m3_value_becomes_its_half():
    pairs = np.arange(256, dtype=np.uint8).view(np.uint16).astype(np.uint32)
    got = run("cvt.u16.u32 %h0, %i0; cvt.rn.f16x2.e4m3x2 %o0, %h0;", pairs, threads=128)[:, 0]
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
    np.testing.assert_array_equal(got.view(np.float16), want.numpy())


def test_a_float_becomes_one_bf16():
    x = torch.tensor([1.0, -1.00390625, 1.01171875, 3e38, 2**-130, math.inf, 0.1, -0.0]).repeat(4)
    got = run("cvt.rn.bf16.f32 %h0, %i0; mov.b32 %o0, {%h0, 0};", x.numpy())[:, 0]
    assert got.tolist() == (x.bfloat16().view(torch.int16).int() & 0xFFFF).tolist()


def test_loads_that_leave_l1_alone():
    bits = random_bits(4)
    code = """mov.b32 %o0, 0; setp.gt.u32 %p0, %lane, 15; @%p0 ld.global.L1::no_allocate.b32 %o0, [%in];
    ld.global.L1::no_allocate.v2.u32 {%o1, %o2}, [%in+8];"""
    want = np.stack([np.where(np.arange(LANES) > 15, bits[:, 0], 0), bits[:, 2], bits[:, 3]], axis=1)
    np.testing.assert_array_equal(run(code, bits, outputs=3), want)


def test_comparisons_and_maxima_with_nan():
    nan = np.full((LANES, 2), np.nan, np.float32)
    assert not run("setp.ne.f32 %p0, %i0, %i1; selp.u32 %o0, 1, 0, %p0;", nan).any()
    one = np.stack([nan[:, 0], np.ones(LANES, np.float32)], axis=1)
    np.testing.assert_array_equal(run("max.f32 %o0, %i0, %i1;", one)[:, 0].view(np.float32), 1)


def test_exchanges_between_lanes():
    bits = random_bits(1)
    x, lane = bits[:, 0], np.arange(LANES)
    for code, want in {
        "redux.sync.add.u32 %o0, %i0, -1;": np.full(LANES, x.sum(dtype=np.uint32)),
        "redux.sync.max.u32 %o0, %i0, -1;": np.full(LANES, x.max()),
        "setp.gt.u32 %p0, %lane, 20; vote.sync.ballot.b32 %o0, %p0, -1;": np.full(LANES, 0xFFE00000),
        "shfl.sync.bfly.b32 %o0|%p0, %i0, 5, 31, -1;": x[lane ^ 5],
        "shfl.sync.idx.b32 %o0, %i0, 3, 0x181f, -1;": x[lane // 8 * 8 + 3],
        "shfl.sync.up.b32 %o0, %i0, 4, 0, -1;": x[np.where(lane >= 4, lane - 4, lane)],
        "elect.sync %i1|%p0, -1; selp.b32 %o0, %i0, %i1, %p0;": np.where(lane == 31, x, 31),
    }.items():
        np.testing.assert_array_equal(run(code, bits)[:, 0], want, err_msg=code)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_between_lanes_and_shared_memory(trans):
    bits = random_bits(4)
    rows = bits.view(np.uint16).reshape(4, 8, 8)  # 16 bytes a lane, a row each
    code = f"""mad.lo.s32 %i4, %lane, 16, %sh; st.shared.v4.u32 [%i4], {{%i0, %i1, %i2, %i3}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.x4{trans}.m8n8.shared.b16 {{%o0, %o1, %o2, %o3}}, [%i4];"""
    want = (rows.transpose(0, 2, 1) if trans else rows).reshape(4, -1).copy().view(np.uint32).T
    np.testing.assert_array_equal(run(code, bits, outputs=4), want)
    code += f"""stmatrix.sync.aligned.x4{trans}.m8n8.shared.b16 [%i4], {{%o0, %o1, %o2, %o3}};
    bar.warp.sync -1; ld.shared.v4.u32 {{%o0, %o1, %o2, %o3}}, [%i4];"""
    np.testing.assert_array_equal(run(code, bits, outputs=4), bits)
    want = np.ascontiguousarray(bits[:, 0].copy().view(np.uint16).reshape(8, 8).T).reshape(-1).view(np.uint32)
    np.testing.assert_array_equal(run("movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;", bits)[:, 0], want)


def test_lanes_that_part_and_meet_again():
    code = """mov.u32 %o0, 0; mov.u32 %i4, 0;
    LOOP: setp.ge.s32 %p0, %i4, %lane; @%p0 bra DONE;
    and.b32 %i5, %i4, 1; setp.eq.s32 %p1, %i5, 0; @%p1 bra EVEN;
    add.s32 %o0, %o0, 100; bra NEXT;
    EVEN: add.s32 %o0, %o0, 1;
    NEXT: add.s32 %i4, %i4, 1; bra LOOP;
    DONE: shfl.sync.bfly.b32 %o0, %o0, 1, 31, -1;"""
    lane = np.arange(LANES) ^ 1
    np.testing.assert_array_equal(run(code, random_bits(1))[:, 0], lane // 2 * 100 + (lane + 1) // 2)


@pytest.mark.parametrize("swizzle", [64, 128])
@pytest.mark.parametrize("first", [(0, 0, 0), (-8, -2, 0), (24, 5, 2)])
def test_tensor_copy(swizzle, first):
    columns = swizzle // 2
    source = np.random.default_rng(2).integers(0, 1 << 16, (3, 11, 96), dtype=np.uint16)
    size = columns * 2 * 4 * 2

    def tensor(memory):
        return TensorMap(memory.add(source, "source"), 2, (72, 8, 3), (192, 11 * 192), (columns, 4, 2), swizzle)

    moves = "".join(f"mov.u32 %i{10 + n}, {c};" for n, c in enumerate(first))
    code = f"""setp.ne.s32 %p0, %t, 0; @%p0 bra ALL; mov.b64 %map, p_map;
    mbarrier.init.shared::cta.b64 [%sh+4096], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%sh+4096], {size};
    cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%sh],
      [%map, {{%i10, %i11, %i12}}], [%sh+4096], %policy;
    ALL: bar.sync 0;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%sh+4096], 0; @!%p1 bra WAIT;
    mad.lo.s32 %i4, %t, 4, %sh; mov.b32 %o0, 0; setp.lt.u32 %p2, %t, {size // 4}; @%p2 ld.shared.u32 %o0, [%i4];"""
    got = run(moves + code, random_bits(1, threads=256), threads=256, tensor=tensor)[:, 0].copy()
    want = np.zeros((2, 4, columns), np.uint16)
    for page, row, column in np.ndindex(want.shape):
        c, r, p = column + first[0], row + first[1], page + first[2]
        if 0 <= c < 72 and 0 <= r < 8 and 0 <= p < 3:
            want[page, row, column] = source[p, r, c]
    linear, swizzled = want.reshape(-1).view(np.uint8), np.zeros(1024, np.uint8)
    for offset in range(size):  # CuTe's Swizzle<B, 4, 3>
        swizzled[offset ^ (offset >> 7 & swizzle // 16 - 1) << 4] = linear[offset]
    assert got.view(np.uint8).tolist() == swizzled.tolist()


@pytest.mark.parametrize("timing", TIMINGS)
def test_cp_async_fills_with_zeros(timing):
    code = """mad.lo.s32 %i4, %t, 16, %sh; and.b32 %i5, %t, 1; shl.b32 %i5, %i5, 4;
    cp.async.cg.shared.global.L2::128B [%i4], [%in], 16, %i5; cp.async.wait_all; bar.warp.sync -1;
    ld.shared.v4.u32 {%o0, %o1, %o2, %o3}, [%i4];"""
    bits = random_bits(4)
    want = bits.copy()
    want[::2] = 0
    np.testing.assert_array_equal(run(code, bits, outputs=4, timing=timing), want)


GROUPS = """mad.lo.s32 %i4, %t, 32, %sh; add.u32 %i5, %i4, 16;
    cp.async.cg.shared.global [%i4], [%in], 16; cp.async.commit_group;
    cp.async.cg.shared.global [%i5], [%in], 16; cp.async.commit_group;
    cp.async.wait_group 1; bar.warp.sync -1;"""


@pytest.mark.parametrize("timing", TIMINGS)
def test_the_first_of_two_groups_of_copies_is_waited_for(timing):
    bits = random_bits(4)
    code = f"{GROUPS} ld.shared.v4.u32 {{%o0, %o1, %o2, %o3}}, [%i4]; cp.async.wait_group 0;"
    np.testing.assert_array_equal(run(code, bits, outputs=4, timing=timing), bits)
    with pytest.raises(EmulationError, match="being filled by a copy in flight"):
        run(f"{GROUPS} ld.shared.u32 %o0, [%i5]; cp.async.wait_group 0;", bits, timing="late")


def test_a_look_at_an_mbarrier_does_not_wait():
    code = """setp.eq.s32 %p0, %t, 0; @%p0 mbarrier.init.shared::cta.b64 [%sh+4096], 1; bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%sh+4096], 0; selp.u32 %o0, 1, 0, %p1; bar.warp.sync -1;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [%sh+4096]; bar.warp.sync -1;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%sh+4096], 0; selp.u32 %o1, 1, 0, %p1;
    setp.lt.u32 %p2, %t, 31; vote.sync.all.pred %p3, %p1, -1; selp.u32 %o2, 1, 0, %p3;
    vote.sync.all.pred %p3, %p2, -1; selp.u32 %o3, 1, 0, %p3;"""
    assert run(code, random_bits(1), outputs=4).tolist() == [[0, 1, 1, 0]] * LANES


@pytest.mark.parametrize("timing", TIMINGS)
def test_an_mbarrier_that_waits_for_copies(timing):
    """Each lane's arrival is one more than the barrier was initialised for."""
    code = """setp.eq.s32 %p0, %t, 0; @%p0 mbarrier.init.shared::cta.b64 [%sh+4096], 1; bar.sync 0;
    mad.lo.s32 %i4, %t, 16, %sh; cp.async.cg.shared.global [%i4], [%in], 16;
    cp.async.mbarrier.arrive.shared::cta.b64 [%sh+4096]; bar.sync 0;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [%sh+4096];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%sh+4096], 0; @!%p1 bra WAIT;
    xor.b32 %i5, %t, 33; mad.lo.s32 %i4, %i5, 16, %sh; ld.shared.v4.u32 {%o0, %o1, %o2, %o3}, [%i4];"""
    bits = random_bits(4, threads=64)
    got = run(code, bits, outputs=4, threads=64, timing=timing)
    np.testing.assert_array_equal(got, bits[np.arange(64) ^ 33])


INIT = "setp.eq.s32 %p0, %t, 0; @%p0 mbarrier.init.shared::cta.b64 [%sh], 1; bar.warp.sync -1;"
MISTAKES = {
    "frobnicate.b32 %o0, %i0;": (UnknownInstruction, r"frobnicate\.b32 %o0, %i0"),
    "add.sat.s32 %o0, %i0, %i1;": (UnknownInstruction, r"add\.sat"),
    "mbarrier.inval.shared::cta.b64 [%sh];": (UnknownInstruction, "inval"),
    "ld.global.u32 %o0, [%out+512];": (EmulationError, "out of bounds"),
    "ld.global.u32 %o0, [%in+2];": (EmulationError, "misaligned"),
    "ld.shared.u32 %o0, [%sh+16];": (EmulationError, "never written"),
    "st.shared.u32 [%sh+8192], %i0;": (EmulationError, "out of bounds"),
    "bar.sync 1, 64;": (EmulationError, r"(?s)deadlock.*barrier 1: 32 of 64"),
    "mbarrier.arrive.shared::cta.b64 _, [%sh];": (EmulationError, "no mbarrier"),
    INIT + "mbarrier.arrive.shared::cta.b64 _, [%sh], 2;": (EmulationError, "more arrivals"),
    INIT + "st.shared.u32 [%sh], %i0;": (EmulationError, "an mbarrier"),
    INIT + "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%sh], 0; @!%p1 bra W;": (
        EmulationError,
        r"(?s)deadlock.*phase 0, 1 of 1",
    ),
    "cp.async.cg.shared.global [%sh], [%in], 16;": (EmulationError, "ended with copies in flight"),
    INIT + "cp.async.mbarrier.arrive.shared::cta.b64 [%sh]; "
    "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%sh], 0; @!%p1 bra W;": (
        EmulationError,
        "(?s)deadlock.*phase 0",
    ),
    "cp.async.cg.shared.global [%sh], [%in], 16; ld.shared.u32 %o0, [%sh];": (EmulationError, "in flight"),
    "ld.global.L2::no_allocate.b32 %o0, [%in];": (UnknownInstruction, "no_allocate"),
    "setp.lt.u32 %p1, %t, 8; @%p1 elect.sync %i1|%p0, -1;": (EmulationError, "deadlock"),
    "A: bra A;": (EmulationError, "livelock"),
}


@pytest.mark.parametrize("code", MISTAKES)
def test_mistakes_are_errors(code, monkeypatch):
    monkeypatch.setattr(machine, "MOST_STEPS", 10_000)
    error, text = MISTAKES[code]
    with pytest.raises(error, match=text):
        run(code, random_bits(4), timing="late")
