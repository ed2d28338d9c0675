"""ETAP in front of sgl-kernel's FlashAttention-3 function: what it serves, and what reaches sgl-kernel's.

There is no GPU: sgl-kernel's function ends in torch, which has it for CUDA tensors only, and says so.
"""

import inspect

import pytest
import torch
from sgl_kernel import flash_attn

from etap_backend.compat import flash_attn_interface
from etap_backend.reference import mla_decode_reference

LENGTHS = (70, 129, 1)


@pytest.fixture
def in_front(monkeypatch):
    """sgl-kernel's function with ETAP in front of it, and sgl-kernel's alone."""
    theirs = flash_attn.flash_attn_with_kvcache
    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", theirs)  # so that it is as before behind the test
    assert flash_attn_interface.install("sgl_kernel.flash_attn") is flash_attn
    return flash_attn.flash_attn_with_kvcache, theirs


@pytest.fixture
def call():
    """As SGLang's FlashAttentionBackend calls it, for drafts over pages of one token."""
    torch.manual_seed(0)
    cache = torch.randn(300, 1, 1, 576).bfloat16()
    q = torch.randn(6, 16, 576).bfloat16()
    return {
        "q": q[..., 512:],
        "k_cache": cache[..., 512:],
        "v_cache": cache[..., :512],
        "qv": q[..., :512],
        "page_table": torch.randint(300, (3, 140), dtype=torch.int32),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "cu_seqlens_k_new": torch.tensor([0, 70, 199, 200], dtype=torch.int32),
        "max_seqlen_q": 2,
        "softmax_scale": 0.1147,
        "causal": True,
        "softcap": 0.0,
        "k_descale": None,
        "v_descale": None,
        "return_softmax_lse": True,
        "num_splits": 0,
        "ver": 3,
    }


def test_the_call_of_sglangs_own_mla_backend_is_served(in_front, call):
    function, theirs = in_front
    assert function.handed_to is theirs and inspect.signature(function) == inspect.signature(theirs)
    out, lse, *_ = function(**call)
    q = torch.cat([call["qv"], call["q"]], dim=-1).view(3, 2, 16, 576)
    cache = torch.cat([call["v_cache"], call["k_cache"]], dim=-1)
    true_out, true_lse = mla_decode_reference(q, cache, call["page_table"], call["cache_seqlens"], 0.1147)
    torch.testing.assert_close(out.double(), true_out.flatten(0, 1), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double().T, true_lse.flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spoiled", [{"softcap": 1.0}, {"window_size": (5, 0)}, {"qv": None}, {"only_qv": True}])
def test_what_is_not_served_reaches_sgl_kernels_function(in_front, call, spoiled):
    function, _ = in_front
    for one in function, flash_attn_interface.flash_attn_with_kvcache:
        flash_attn_interface._installed.cache_clear()
        with pytest.raises(NotImplementedError, match="sgl_kernel::fwd.* with arguments from the 'CPU' backend"):
            one(**call | spoiled)
