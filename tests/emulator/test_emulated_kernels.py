"""The compiled kernels themselves, run instruction by instruction where there is no GPU (see tests/emulator).

ETAP_EMULATOR_SEEDS=N tries N interleavings of every case that depends on them; 3 by default.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from emulator import kernels
from emulator.machine import TIMINGS, Kernel
from emulator.ptx import EmulationError, Module

from etap_backend import DecodeSchedule
from etap_backend._library import library
from etap_backend.lab.checks.cases import SOFTMAX_SCALE, Case, Problem, Runner, build
from etap_backend.lab.checks.compare import Truth, problems_with, truth

pytestmark = kernels.NEEDS_COMPILER

SEEDS = range(int(os.environ.get("ETAP_EMULATOR_SEEDS", "3")))
LENGTHS = (0, 1, 63, 64, 65, 129, 321)
HEADS = (8, 16, 32, 64)  # a row tile each, with one query token
CACHES = {"bf16": {}, "fp8": {"kv_dtype": "fp8"}, "fp8_math": {"kv_dtype": "fp8", "fp8_math": True}}


@cache
def problem_and_truth(case: Case) -> tuple[Problem, Truth]:
    problem = build(case, "cpu")
    return problem, truth(problem)


def emulate(case: Case, **how) -> tuple[list[str], set[int]]:
    """What is wrong with the emulated kernels' result on a case, and which segments of the decode kernel ran."""
    problem, wanted = problem_and_truth(case)
    runner = Runner(problem)
    ran = kernels.run_decode(problem, runner.build(), runner.out.tensor, runner.lse.tensor, SOFTMAX_SCALE, **how)
    return problems_with(runner.out.tensor, runner.lse.tensor, problem, wanted), ran


def verify(case: Case, **how) -> None:
    found, _ = emulate(case, **how)
    assert not found, "\n".join([*found, f"the case: {case!r}, {how}"])


# One CTA for all pieces; ranges that end inside of requests; more CTAs than most requests have tiles.
@pytest.mark.parametrize("s_q, num_sms", [(1, 1), (2, 2), (1, 5)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode(dtype, heads, s_q, num_sms):
    verify(Case(LENGTHS, heads=heads, s_q=s_q, num_sms=num_sms, dtype=dtype), seed=num_sms)


@pytest.mark.parametrize("heads", HEADS)
def test_bits_do_not_depend_on_what_a_cta_decoded_before(heads):
    """Behind an odd number of tiles a piece begins elsewhere in the ring, and with 64 rows with the other consumer."""
    problem = build(Case((64, 450), heads=heads, num_sms=1), "cpu")
    results = []
    for requests in ([1], [0, 1]):
        case = replace(problem.case, lengths=tuple(problem.case.lengths[r] for r in requests))
        rows = dict(q=problem.q[requests], call_q=problem.q[requests], seq_lens=problem.seq_lens[requests])
        part = replace(problem, case=case, block_table=problem.block_table[requests], **rows)
        runner = Runner(part)
        kernels.run_decode(part, runner.build(), runner.out.tensor, runner.lse.tensor, SOFTMAX_SCALE)
        results.append([tensor[-1].view(torch.uint8) for tensor in (runner.out.tensor, runner.lse.tensor)])
    assert all(torch.equal(alone, behind) for alone, behind in zip(*results, strict=True))


def test_the_order_of_splits_does_not_depend_on_the_batch():
    """A request in three pieces alone and beside two short ones, in a batch-invariant schedule."""
    problem = build(Case((2100, 1, 5), heads=64, num_sms=132), "cpu")
    results = []
    for batch in (1, 3):
        case = replace(problem.case, lengths=problem.case.lengths[:batch])
        rows = dict(q=problem.q[:batch], call_q=problem.q[:batch], seq_lens=problem.seq_lens[:batch])
        part = replace(problem, case=case, block_table=problem.block_table[:batch], **rows)
        schedule = DecodeSchedule(64, 64, device="cpu", num_sms=132, batch_invariant=True)
        planned = schedule.build(part.seq_lens)
        assert schedule.split_offsets[1] == 3
        runner = Runner(part)
        kernels.run_decode(part, planned, runner.out.tensor, runner.lse.tensor, SOFTMAX_SCALE)
        results.append([tensor[0].view(torch.uint8) for tensor in (runner.out.tensor, runner.lse.tensor)])
    assert all(torch.equal(alone, among) for alone, among in zip(*results, strict=True))


def test_requests_of_many_and_of_few_splits():
    """A block of the combination takes two at a time, or one whose splits its warps divide."""
    verify(Case((2000, *(200,) * 15), heads=16, num_sms=46), seed=1)


@pytest.mark.parametrize("fp8_math", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "dtype, q_scale, s_q, num_sms",
    [("bfloat16", None, 1, 1), ("float16", None, 2, 2), ("float8_e4m3fn", 0.02, 1, 5), ("float8_e4m3fn", None, 2, 1)],
)
def test_decode_from_an_fp8_cache(dtype, q_scale, heads, s_q, num_sms, fp8_math):
    types = dict(dtype=dtype, kv_dtype="fp8", q_scale=q_scale, kv_scale=0.03, fp8_math=fp8_math)
    verify(Case(LENGTHS, heads=heads, s_q=s_q, num_sms=num_sms, **types), seed=num_sms)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "heads, page_size, cache_layout, q_layout",
    [
        (24, 128, "gapped", "strided"),
        (3, 256, "headed", "split"),
        (128, 64, "dense", "strided"),
        (16, 64, "dense", "split"),
    ],
)
def test_layouts(heads, page_size, cache_layout, q_layout, kind):
    layouts = dict(page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(Case((0, 65, 300), heads=heads, num_sms=4, **layouts, **CACHES[kind]), seed=3)


@pytest.mark.parametrize("kind, heads", [("bf16", 16), ("bf16", 64), ("fp8", 16)])
@pytest.mark.parametrize("law", ["dominating", "rising", "falling"])
def test_maxima_that_come_late_or_early(law, kind, heads):
    verify(Case((129, 500), law=law, heads=heads, num_sms=2, **CACHES[kind]), seed=4)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("heads", [16, 64])
def test_a_schedule_of_other_lengths_gives_the_same_result(heads, kind):
    """Pieces without tokens add nothing to what the others hold, though the workspace is full of NaN."""
    planned_for = torch.tensor([700, 300, 64], dtype=torch.int32)
    problem, wanted = problem_and_truth(Case((130, 0, 300), heads=heads, num_sms=9, **CACHES[kind]))
    runner = Runner(problem)
    planned = runner.schedule.build(planned_for)
    assert planned.split_offsets[2] > planned.split_offsets[1] > 1
    kernels.run_decode(problem, planned, runner.out.tensor, runner.lse.tensor, SOFTMAX_SCALE)
    assert not problems_with(runner.out.tensor, runner.lse.tensor, problem, wanted)


@pytest.mark.parametrize("num_sms", [1, 3])
@pytest.mark.parametrize("heads", [16, 64])
def test_scores_far_below_zero_are_attended_to(heads, num_sms):
    """All of a row's scores below -1e30, and such that float32 holds them: there is no difference between them."""
    softmax_scale = math.log(2) / 32
    problem = build(Case((200,), heads=heads, num_sms=num_sms), "cpu")
    problem.q[:], problem.kv_cache[problem.block_table[0, :4].long()] = 2.0**55, -(2.0**55)
    planned = (runner := Runner(problem)).build()
    kernels.run_decode(problem, planned, runner.out.tensor, runner.lse.tensor, softmax_scale)
    assert runner.out.tensor.eq(-(2.0**55)).all()
    score = -(2.0**110) * 576 * softmax_scale
    torch.testing.assert_close(runner.lse.tensor, torch.full_like(runner.lse.tensor, score), rtol=1e-6, atol=0)


@pytest.mark.parametrize("source", ["bf16", "fp16", "fp8", "fp8_math"])
def test_decode_waits_for_its_predecessor_before_it_lets_the_combination_begin(source):
    """The combination reads the list of split requests as soon as it begins."""
    module = kernels.module(source)
    for name in module.names().values():
        text = module.only(name)
        assert text.count("griddepcontrol.launch_dependents") == 1
        assert 0 < text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("row_tile", [8, 64])
@pytest.mark.parametrize(
    "lengths, partitions, fixed_pieces",
    [
        *[((0, 1, 64, 700, 3000), 7, 0), (tuple(range(0, 4000, 7)), 132, 0), ((5000, 3, 900), 24, 8), ((0, 0), 3, 0)],
        *[((300,) * 16 + (299,) * 8, 12, 0), ((200, 129) * 5, 20, 0)],
    ],
)
def test_schedule_kernel_does_what_the_library_does_on_the_host(lengths, partitions, fixed_pieces, row_tile):
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    results = []
    for emulated in (True, False):
        ranges = torch.full((partitions, 8), -77, dtype=torch.int32)
        offsets = torch.full((len(lengths) + 1,), -77, dtype=torch.int32)
        if emulated:
            kernels.run_schedule(seq_lens, ranges, offsets, fixed_pieces, row_tile)
        elif fixed_pieces:
            library().build_fixed_schedule(seq_lens, ranges, offsets, partitions, fixed_pieces)
        else:
            library().build_schedule(seq_lens, ranges, offsets, partitions, row_tile)
        ranges[ranges[:, 5] == -1, 6:] = 0  # these mean nothing there
        results.append((ranges, offsets))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


# ------------------------------------------------------------------------------------------------------- interleavings

# Tiles of one CTA such that a stage lent for the merge held the other consumer's tile just before: a kernel that took
# such a stage without a grant was caught by these.
LENT_STAGES = [
    *[("bf16", heads, lengths) for heads in (8, 16) for lengths in ((129,), (192,))],
    ("bf16", 32, (129, 192)),
    ("fp8", 32, (256,)),
    *[("fp8_math", heads, (320,)) for heads in (8, 16, 32)],
]
RAGGED = [(kind, 16, (192, 64, 0, 191, 1, 320)) for kind in CACHES]
RAGGED += [("bf16", 64, (129, 0, 64)), ("bf16", 64, (320, 1, 192, 64))]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("kind, heads, lengths", LENT_STAGES + RAGGED)
def test_interleavings(kind, heads, lengths, timing):
    for seed in SEEDS:
        verify(Case(lengths, heads=heads, num_sms=1, **CACHES[kind]), seed=seed, timing=timing)


# ------------------------------------------------------------------------------------------------------ planted faults

WAIT = r"(mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[%r\d+\]), (%r\d+);"
FAULT_CASE = Case((200, 449), num_sms=1)
ROWS_CASE = Case((200, 449), heads=64, num_sms=1)


@cache
def own_text(kernel: str = ", 16>") -> tuple[str, str]:
    """PTX and name of a bf16 decode kernel, that for 16 rows or query_major', alone."""
    module = kernels.module("bf16")
    name = module.find("decode_kernel", kernel)
    return module.only(name), name


def patched(site: re.Match, instead: str, kernel: str = ", 16>") -> Kernel:
    text, name = own_text(kernel)
    return Kernel(Module(text[: site.start()] + instead + text[site.end() :]), name)


def fault_of(kernel: Kernel, case: Case = FAULT_CASE, timings: tuple[str, ...] = TIMINGS) -> str:
    """What the emulator says of a faulty decode kernel; empty when it finds nothing."""
    for seed in range(3):
        for timing in timings:
            try:
                found, _ = emulate(case, decode=kernel, seed=seed, timing=timing)
            except EmulationError as error:
                return str(error)
            if found:
                return found[0]
    return ""


FAULTS = {
    "first wait for a product": (r"wgmma\.wait_group\.sync\.aligned 0;", 0, "", "in flight"),
    "last wait for a product": (r"wgmma\.wait_group\.sync\.aligned 0;", -1, "", "in flight"),
    "commit of products": (r"wgmma\.commit_group\.sync\.aligned;", 0, "", "in flight"),
    "fence of products' registers": (r"wgmma\.fence\.sync\.aligned;", -1, "", "wgmma.fence"),
    "arrival at an mbarrier": (r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", 3, "", "deadlock"),
    "expected bytes": (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], %r\d+;", 0, "", "deadlock"),
    "meeting over P^T": (
        r"barrier\.cta\.red\.or\.pred\.aligned out, %r\d+, %r\d+, in;",
        0,
        "mov.pred out, in;",
        "never written|inf/NaN elsewhere",
    ),
    "proxy fence of P^T": (r"fence\.proxy\.async\.shared::cta;", 1, "", "inf/NaN elsewhere"),
    "meeting after the mbarriers' initialisation": (r"bar\.sync\s+0;", 0, "", "no mbarrier"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_missing_synchronisation_is_found(name):
    pattern, number, instead, says = FAULTS[name]
    site = list(re.finditer(pattern, own_text()[0]))[number]
    assert re.search(says, fault_of(patched(site, instead)))


def test_waits_for_the_other_parity_are_found():
    kernel = kernels.kernel("bf16", "decode_kernel", ", 16>")
    idle = "\n".join(kernel.missed(emulate(FAULT_CASE)[1]))
    sites = [site for site in re.finditer(WAIT, own_text()[0]) if site[0].rstrip(";") not in idle]
    assert len(sites) > 8
    for site in sites[:: len(sites) // 4]:
        wrong = f".reg .b32 flipped; xor.b32 flipped, {site[2]}, 1; {site[1]}, flipped;"
        assert fault_of(patched(site, wrong)), f"not found: {site[0]}"


def test_an_access_behind_a_tensor_is_found():
    site = re.search(r"(ld\.global\.u32\s+%r\d+, \[%rd\d+)\];", own_text()[0])
    assert re.search(r"(?s)out of bounds.*ld\.global.*\.cuh:\d+", fault_of(patched(site, f"{site[1]}+4194304];")))


def waits_of(source_line: str, source="transposed/consumer", kernel=", 16>", wait=WAIT) -> list[re.Match]:
    """The waits that a line of decode/SOURCE.cuh was compiled to."""
    text, _ = own_text(kernel)
    lines = (kernels.CSRC / "decode" / f"{source}.cuh").read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if source_line in line)
    (file,) = re.findall(rf'\.file (\d+) "[^"]*decode/{source}\.cuh"', text)
    # A wait is inlined several levels deep; the outermost level is the last that names the source.
    levels = rf"(?m)\.loc\s+{file} (\d+)|inlined_at {file} (\d+)"
    places = [(place.start(), int(place[1] or place[2])) for place in re.finditer(levels, text)]
    sites = re.finditer(wait, text)
    return [site for site in sites if [0, *(line for at, line in places if at < site.start())][-1] == number]


def test_merging_into_stages_that_were_not_granted_is_found():
    text, name = own_text()
    sites = waits_of("ETAP_UNLESS_FAULT(merge_grant")
    assert sites
    for site in reversed(sites):
        text = text[: site.start()] + "setp.eq.u32 p, 0, 0;" + text[site.end() :]
    # What it overwrites is a tile still on its way, or one that the other consumer still multiplies.
    assert re.search(
        "in flight|inf/NaN elsewhere|cosine", fault_of(Kernel(Module(text), name), Case((192,), num_sms=1))
    )


ROWS_FAULTS = {
    "fence of a zeroed tail": (r"fence\.proxy\.async\.shared::cta;", "", "without fence.proxy.async"),
    "fence of products' registers": (r"wgmma\.fence\.sync\.aligned;", "", "wgmma.fence"),
    "wait for a product": (r"wgmma\.wait_group\.sync\.aligned 0;", "", "in flight"),
}


@pytest.mark.parametrize("name", ROWS_FAULTS)
def test_missing_synchronisation_of_64_rows_is_found(name):
    pattern, instead, says = ROWS_FAULTS[name]
    sites = list(re.finditer(pattern, own_text("query_major")[0]))
    found = [fault_of(patched(site, instead, "query_major"), ROWS_CASE) for site in sites[:: max(1, len(sites) // 4)]]
    assert any(re.search(says, fault) for fault in found), found


@pytest.mark.parametrize(
    "source, line, says",
    [
        ("softmax", "event::probabilities_handed_over(owner).meet", "."),
        ("output", "event::tail_zeroed(group).sync", "inf/NaN elsewhere"),
    ],
    ids=["taking P before it is there", "products before V's tail is zero"],
)
def test_missing_meetings_of_64_rows_are_found(source, line, says):
    sites = waits_of(line, f"query_major/{source}", "query_major", r"barrier\.cta\.sync\.aligned %r\d+, %r\d+;")
    found = [fault_of(patched(site, "", "query_major"), ROWS_CASE) for site in sites]
    assert any(re.search(says, fault) for fault in found), found


@pytest.mark.parametrize("kernel, case", [(", 16>", FAULT_CASE), ("query_major", ROWS_CASE)])
def test_the_kernel_without_a_planted_fault_has_none(kernel, case):
    text, name = own_text(kernel)
    assert fault_of(Kernel(Module(text), name), case) == ""
