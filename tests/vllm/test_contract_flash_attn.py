"""ETAP in front of vLLM's own FlashAttention-3 function: what it serves, and what reaches vLLM's.

There is no GPU: vLLM's function ends in torch, which has it for CUDA tensors only, and says so.
"""

import inspect

import pytest
import torch
from vllm import vllm_flash_attn

from etap_backend.compat import flash_attn_interface
from etap_backend.reference import mla_decode_reference

LENGTHS = (70, 129, 1)
PAGE = 16


@pytest.fixture
def in_front(monkeypatch):
    """vLLM's function with ETAP in front of it, and vLLM's alone."""
    theirs = vllm_flash_attn.flash_attn_varlen_func
    monkeypatch.setattr(vllm_flash_attn, "flash_attn_varlen_func", theirs)  # so that it is as before behind the test
    assert flash_attn_interface.install("vllm.vllm_flash_attn") is vllm_flash_attn
    return vllm_flash_attn.flash_attn_varlen_func, theirs


@pytest.fixture
def call():
    """As vLLM's FlashAttnMLAImpl calls it: one cache, of whose rows k and v are parts."""
    torch.manual_seed(0)
    cache = torch.randn(40, PAGE, 576).bfloat16()
    q = torch.randn(6, 16, 576).bfloat16()
    return {
        "q": q[..., 512:],
        "k": cache[..., 512:].unsqueeze(-2),
        "v": cache[..., :512].unsqueeze(-2),
        "q_v": q[..., :512],
        "max_seqlen_q": 2,
        "cu_seqlens_q": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "max_seqlen_k": max(LENGTHS),
        "seqused_k": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": torch.randperm(40, dtype=torch.int32)[:27].view(3, 9),
        "softmax_scale": 0.1147,
        "causal": True,
        "return_softmax_lse": True,
        "fa_version": 3,
        "scheduler_metadata": torch.zeros(13, dtype=torch.int32),
        "num_splits": 32,
        "cp_world_size": 1,
        "cp_rank": 0,
        "cp_tot_seqused_k": None,
    }


def test_the_call_of_vllms_own_mla_backend_is_served(in_front, call):
    function, theirs = in_front
    assert function.handed_to is theirs and inspect.signature(function) == inspect.signature(theirs)
    out, lse = function(**call)
    q = torch.cat([call["q_v"], call["q"]], dim=-1).view(3, 2, 16, 576)
    cache = torch.cat([call["v"], call["k"]], dim=-1)
    true_out, true_lse = mla_decode_reference(q, cache, call["block_table"], call["seqused_k"], 0.1147)
    torch.testing.assert_close(out.double(), true_out.flatten(0, 1), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double().T, true_lse.flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spoiled, operator", [
    ({"softcap": 1.0}, "_vllm_fa3_C::fwd"),
    ({"window_size": [5, 0]}, "_vllm_fa3_C::fwd"),
    ({"q_v": None}, "_vllm_fa3_C::fwd"),
    ({"q_v": None, "fa_version": 2, "scheduler_metadata": None, "num_splits": 0}, "_vllm_fa2_C::varlen_fwd"),
])  # fmt: skip
def test_what_is_not_served_reaches_vllms_function(in_front, call, spoiled, operator):
    function, _ = in_front
    for one in function, flash_attn_interface.flash_attn_varlen_func:
        flash_attn_interface._installed.cache_clear()
        with pytest.raises(NotImplementedError, match=f"{operator}.* with arguments from the 'CPU' backend"):
            one(**call | spoiled)
