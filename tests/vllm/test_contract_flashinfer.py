"""FlashInfer's drop-in takes the arguments of the installed FlashInfer's wrapper."""

import inspect

import pytest
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

from etap_backend.compat import flashinfer
from etap_backend.reference import mla_decode_reference


@pytest.mark.parametrize("name", ["__init__", "plan", "run"])
def test_positions_and_defaults_are_flashinfers(name):
    taken, given = (
        inspect.signature(getattr(one, name)).parameters
        for one in (flashinfer.BatchMLAPagedAttentionWrapper, BatchMLAPagedAttentionWrapper)
    )
    by_position = [each.name for each in given.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(taken)[: len(by_position)] == by_position
    for each in taken.values():
        if each.kind is not each.VAR_KEYWORD:
            assert given[each.name].default == each.default, each


def test_defaults_of_other_options_ask_for_nothing():
    given = inspect.signature(BatchMLAPagedAttentionWrapper.plan).parameters
    taken = inspect.signature(flashinfer.BatchMLAPagedAttentionWrapper.plan).parameters
    for name in given.keys() - taken.keys():
        flashinfer.refuse_options({name: given[name].default}, flashinfer.CHOICES)


@pytest.mark.parametrize("flat", [False, True])
def test_flashinfers_metadata_is_read(flat):
    torch.manual_seed(3)
    q, cache = torch.randn(2, 16, 576).bfloat16(), torch.randn(20, 16, 576).bfloat16()
    pages, lengths = torch.randperm(20)[:14].int(), torch.tensor([200, 7], dtype=torch.int32)
    lists = [torch.tensor([0, 1, 2]).int(), torch.tensor([0, 13, 14]).int(), pages, lengths]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(64 << 20, dtype=torch.int8))
    model = (16, 512, 64, 16, True, 192**-0.5, q.dtype, q.dtype)
    names = list(inspect.signature(wrapper.plan).parameters)[4:12]
    if flat:
        wrapper.plan(*lists, *model)
    else:
        wrapper.plan(metadata=MLAPlanMetadata.csr(*lists), **dict(zip(names, model, strict=True)))
    out = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:])
    table = torch.stack([pages[:13], pages[13].expand(13)])
    wanted, _ = mla_decode_reference(q[:, None], cache, table, lengths, 192**-0.5)
    torch.testing.assert_close(out.double(), wanted[:, 0], rtol=0.02, atol=0.02)
