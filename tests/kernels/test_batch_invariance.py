"""Batch invariance: a request's bits are the same alone, in a batch and at another place of the batch."""

from __future__ import annotations

import pytest
import torch

from etap_backend import DecodeSchedule, mla_decode
from etap_backend.schedule import BATCH_INVARIANT_BYTES, decode_shape
from support.cases import LATENT, SOFTMAX_SCALE, Case, Problem, build
from support.compare import check, truth
from support.covering import both_devices, on_devices

LENGTHS = {
    "cpu": (2500, 0, 1, 64, 1025, 700),
    "cuda": (60_000, 0, 1, 64, 1025, 2048, 700, 9000, 65, *range(900, 20_000, 137)),
}


def run(problem: Problem, requests: list[int], max_batch: int, num_sms: int | None, *, invariant: bool = True):
    """Output and log-sum-exp of some requests of a problem, decoded together in this order; workspace full of NaN."""
    case = problem.case
    options = {"max_s_q": case.s_q, "device": problem.q.device, "num_sms": num_sms, "batch_invariant": invariant}
    schedule = DecodeSchedule(max_batch, case.heads, **options)
    schedule.workspace.fill_(torch.nan)
    index = torch.tensor(requests, device=problem.q.device)
    seq_lens = problem.seq_lens[index]
    planned = schedule.build(seq_lens, case.s_q)
    out = torch.full((len(requests), case.s_q, case.heads, LATENT), torch.nan, dtype=case.torch_dtype).to(index.device)
    lse = torch.full((len(requests), case.s_q, case.heads), torch.nan, device=index.device)
    outputs = {"out": out, "lse": lse, "softmax_scale": SOFTMAX_SCALE, "kv_scale": problem.kv_scale}
    outputs["fp8_math"] = case.fp8_math
    mla_decode(problem.q[index], problem.kv_cache, problem.block_table[index], seq_lens, planned, **outputs)
    return out, lse, schedule


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


FP8_CACHE = {"kv_dtype": "fp8", "kv_scale": 0.0137}
CACHES = {"bf16": {}, "fp8": FP8_CACHE, "fp8 math": {**FP8_CACHE, "fp8_math": True}}


@on_devices({
    "cache": list(CACHES),
    "max_batch": (160, 4096),  # some splits, and none
    "heads, s_q": [(8, 1), (16, 1), (16, 2), (64, 1), (128, 1)],
})  # fmt: skip
def test_bits_do_not_depend_on_the_batch(device, heads, s_q, max_batch, cache):
    case = Case(LENGTHS[device], heads=heads, s_q=s_q, **CACHES[cache])
    problem = build(case, device)
    everyone = list(range(len(case.lengths)))
    out, lse, schedule = run(problem, everyone, max_batch, None)
    check(out, lse, problem, truth(problem))
    if max_batch == 4096:
        assert schedule.fixed_splits == 1 and not schedule.split_offsets.any()
    crowds = {"cpu": [[0], [4, 0]], "cuda": [[0], [4], [7, 0], [1, 2, 0, 3, 7], [0] * 150]}
    for requests in (*crowds[device], everyone[::-1]):
        some_out, some_lse, _ = run(problem, requests, max_batch, None)
        for place, request in enumerate(requests):
            assert same_bits(some_out[place], out[request]), f"output of request {request} among {requests}"
            assert same_bits(some_lse[place], lse[request]), f"log-sum-exp of request {request} among {requests}"


@on_devices({"max_batch": (8, 24, 40, 64), "heads": (16, 64, 128)})
def test_the_order_of_many_splits_does_not_depend_on_the_batch(device, heads, max_batch):
    """The batch must not decide how many requests a block of the combine kernel takes at a time."""
    lengths = {"cpu": (2100, 1025, 1, 1100, 64), "cuda": (20_000, 9000, 1, 3000, 60_000)}[device]
    problem = build(Case(lengths, heads=heads), device)
    out, lse, _ = run(problem, [0, 1, 2, 3, 4], max_batch, None)
    for requests in ([0], [0, 1], [3, 0, 2], [1, 0, 1, 4], [0] * 8):
        some_out, some_lse, _ = run(problem, requests, max_batch, None)
        for place, request in enumerate(requests):
            assert same_bits(some_out[place], out[request]), f"output of request {request} among {requests}"
            assert same_bits(some_lse[place], lse[request]), f"log-sum-exp of request {request} among {requests}"


@both_devices
def test_long_requests_are_split_where_the_workspace_has_room(device):
    problem = build(Case((4096, 100, 1025)), device)
    _, _, schedule = run(problem, [0, 1, 2], 3, 8)
    assert schedule.fixed_splits == 8
    # 64, 2 and 17 tiles: no split is shorter than 16 tiles, but the last request's second.
    assert schedule.split_offsets.tolist() == [0, 4, 4, 6]


@both_devices
def test_without_it_the_batch_decides(device):
    """The negative control: the check above sees a request that is cut differently."""
    case = Case(LENGTHS[device])
    problem = build(case, device)
    together, *_ = run(problem, list(range(len(case.lengths))), 160, None, invariant=False)
    alone, *_ = run(problem, [0], 160, None, invariant=False)
    assert not same_bits(alone[0], together[0])


@pytest.mark.parametrize("max_s_q", [1, 4, 8])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("max_batch", [1, 16, 64, 256, 1024, 4096])
def test_workspace_stays_small(heads, max_batch, max_s_q):
    floats = DecodeSchedule.workspace_floats(heads, max_s_q, 132, max_batch=max_batch, batch_invariant=True)
    assert 4 * floats < 64e6
    assert floats >= DecodeSchedule.workspace_floats(heads, max_s_q, 132)


@pytest.mark.parametrize("max_batch", [16, 20, 55])
def test_the_bytes_for_all_partials_limit_the_splits(max_batch):
    schedule = DecodeSchedule(max_batch, 128, device="cpu", num_sms=132, batch_invariant=True)
    shape = decode_shape(128, 132)
    assert 1 < schedule.fixed_splits < shape.partitions(132)
    assert 4 * schedule.workspace.numel() <= BATCH_INVARIANT_BYTES
    assert 4 * shape.workspace_floats(max_batch * (schedule.fixed_splits + 1)) > BATCH_INVARIANT_BYTES
