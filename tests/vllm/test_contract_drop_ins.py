"""The drop-ins against what they stand in for: vLLM's bundled FlashAttention-3 and the installed FlashInfer."""

import inspect

import pytest
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from vllm import vllm_flash_attn

from etap_backend.compat import flash_attn_interface, flashinfer
from etap_backend.reference import mla_decode_reference

LENGTHS = (70, 129, 1)
PAGE, HEADS, SCALE = 16, 16, 0.1147


def test_the_call_of_vllms_own_mla_backend_is_served():
    """As FlashAttnMLAImpl calls it: k and v are parts of one cache's rows."""
    torch.manual_seed(0)
    cache, q = torch.randn(40, PAGE, 576).bfloat16(), torch.randn(6, HEADS, 576).bfloat16()
    table, lengths = torch.randperm(40, dtype=torch.int32)[:27].view(3, 9), torch.tensor(LENGTHS, dtype=torch.int32)
    call = {
        "q": q[..., 512:], "k": cache[..., 512:].unsqueeze(-2), "v": cache[..., :512].unsqueeze(-2),
        "q_v": q[..., :512], "max_seqlen_q": 2, "cu_seqlens_q": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "max_seqlen_k": max(LENGTHS), "seqused_k": lengths, "block_table": table, "softmax_scale": SCALE,
        "causal": True, "return_softmax_lse": True, "fa_version": 3, "num_splits": 32, "cp_world_size": 1, "cp_rank": 0,
        "scheduler_metadata": torch.zeros(13, dtype=torch.int32), "cp_tot_seqused_k": None,
    }  # fmt: skip
    assert call.keys() <= inspect.signature(vllm_flash_attn.flash_attn_varlen_func).parameters.keys()
    out, lse = flash_attn_interface.flash_attn_varlen_func(**call)
    exact, exact_lse = mla_decode_reference(q.view(3, 2, HEADS, 576), cache, table, lengths, SCALE)
    torch.testing.assert_close(out.double(), exact.flatten(0, 1), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double().T, exact_lse.flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plan", "run"])
def test_flashinfers_arguments_are_taken_in_its_order(name):
    wrappers = BatchMLAPagedAttentionWrapper, flashinfer.BatchMLAPagedAttentionWrapper
    given, taken = (inspect.signature(getattr(wrapper, name)).parameters for wrapper in wrappers)
    by_position = [each.name for each in given.values() if each.kind is not each.KEYWORD_ONLY]
    assert list(taken)[: len(by_position)] == by_position
    assert set(given) <= set(taken) or any(each.kind is each.VAR_KEYWORD for each in taken.values())


@pytest.mark.parametrize("as_metadata", [False, True])
def test_flashinfers_page_lists_and_metadata_are_served(as_metadata):
    torch.manual_seed(3)
    q, cache = torch.randn(2, HEADS, 576).bfloat16(), torch.randn(20, PAGE, 576).bfloat16()
    starts, ends = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 13, 14]).int()
    pages, lengths = torch.randperm(20)[:14].int(), torch.tensor([200, 7]).int()
    lists = dict(zip(flashinfer.LISTS, (starts, ends, pages, lengths), strict=True))
    if as_metadata:
        mla = pytest.importorskip("flashinfer.mla")
        lists = {"metadata": mla.MLAPlanMetadata.csr(*lists.values())}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(64 << 20, dtype=torch.int8))
    model = {"num_heads": HEADS, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE, "causal": True}
    wrapper.plan(**lists, **model, sm_scale=SCALE, q_data_type=q.dtype, kv_data_type=q.dtype)
    parts = {"q_nope": q[..., :512], "q_pe": q[..., 512:], "ckv_cache": cache[..., :512], "kpe_cache": cache[..., 512:]}
    out, lse = wrapper.run(**parts, return_lse=True)
    table = torch.zeros(2, 13, dtype=torch.int32)
    table[0], table[1, 0] = pages[:13], pages[13]
    exact, exact_lse = mla_decode_reference(q[:, None], cache, table, lengths, SCALE)
    torch.testing.assert_close(out.double(), exact[:, 0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), exact_lse[:, 0] / torch.tensor(2.0).log(), rtol=1e-5, atol=1e-5)
