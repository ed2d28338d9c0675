"""The compiled top-k kernel in the emulator, against float64 keys: clusters, lists and every law of logits."""

from __future__ import annotations

import pytest
import torch
from kernels import NEEDS_COMPILER, run_top_k

from support.covering import covering
from support.top_k_cases import INF, LAWS, NAN, TopKCase, expected, on_pages

pytestmark = NEEDS_COMPILER


def select(case: TopKCase, num_sms: int, *, table=None, page_size=1, early_lengths=False, **how) -> torch.Tensor:
    out = torch.full((len(case.lengths), case.k), -77, dtype=torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    run_top_k(case.logits(), lengths, table, out, page_size, num_sms, early_lengths, **how)
    return out


def verify(case: TopKCase, num_sms: int, **how) -> None:
    assert torch.equal(select(case, num_sms, **how), expected(case.logits(), case.lengths, case.k))


@pytest.mark.exhaustive
@covering(1, {"law": tuple(LAWS), "ctas": (1, 2, 4, 8), "length": (3000, 5001, 17000), "k": (512, 2048)}, most=40)
def test_laws(law, ctas, length, k):
    """A row has so many CTAs where there are as many multiprocessors, and it is wide enough."""
    verify(TopKCase([length], k, law, width=max(length, 4096 * ctas), seed=20), ctas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_warps_may_run_in_any_order(seed):
    verify(TopKCase([5000, 4999], 512, "few_values", width=9000, seed=21), 4, seed=seed, timing="random")


@covering(1, {"sms": (1, 7, 40), "behind": (INF, NAN)})
def test_lengths(sms, behind):
    verify(TopKCase([0, 1, 511, 512, 513, 640, 5001], 512, behind=behind, seed=22), sms)


@covering(1, {"stride": (5001, 5002, 5004), "offset": (0, 1, 2)})
def test_strides_and_alignment(stride, offset):
    verify(TopKCase([5000, 4097], 512, width=5000, stride=stride, offset=offset, seed=23), 4)


def test_lengths_that_were_written_early_are_read_early():
    verify(TopKCase([700, 600, 3], 512, seed=24), 3, early_lengths=True)


def test_cache_rows_by_a_block_table():
    case = TopKCase([3000, 100], 512, seed=25)
    table = torch.randperm(100).int().view(2, 50)
    found = select(case, 2, table=table[:, :45], page_size=64)
    assert torch.equal(found, on_pages(expected(case.logits(), case.lengths, 512), table[:, :45], 64))


def test_a_request_s_query_tokens_have_one_length():
    case = TopKCase([0, 0, 1, 4998, 4999, 5000], 512, seed=26)
    out = torch.full((6, 512), -77, dtype=torch.int32)
    run_top_k(case.logits(), torch.tensor([1, 5000], dtype=torch.int32), None, out, 1, 12)
    assert torch.equal(out, expected(case.logits(), case.lengths, 512))
