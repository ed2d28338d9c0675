"""FlashAttention-3's drop-in answers the MLA decode calls of SGLang's own backends."""

import ast
import inspect

import pytest
import torch
from sglang.kernels.ops.attention import flash_attention
from sglang.srt.layers.attention import dsa_backend, flashattention_backend

from etap_backend.compat import flash_attn_interface as fa3
from etap_backend.reference import mla_decode_reference

LENGTHS = (70, 129, 1)


@pytest.mark.parametrize("module", [flashattention_backend, dsa_backend])
def test_sglangs_calls_have_no_unknown_argument(module):
    calls = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "flash_attn_with_kvcache"
    ]
    with_latent = [names for names in calls if "qv" in names]
    known = {*inspect.signature(fa3.flash_attn_with_kvcache).parameters, *fa3.NO_EFFECT, *fa3.CHOICES}
    assert with_latent and not set().union(*with_latent) - known - {"softcap", "only_qv"}


def test_positions_and_defaults_are_sglangs():
    theirs = inspect.signature(flash_attention.flash_attn_with_kvcache).parameters
    ours = inspect.signature(fa3.flash_attn_with_kvcache).parameters
    assert list(theirs)[:3] == list(ours)[:3]
    for each in ours.values():
        if each.kind is not each.VAR_KEYWORD:
            assert theirs[each.name].default == each.default, each
    others = {name: each.default for name, each in theirs.items() if name not in ours}
    fa3.refuse_options(others, fa3.CHOICES, fa3.NO_EFFECT)


def test_drafts_over_pages_of_one_token():
    """The arguments of `FlashAttentionBackend.forward_decode`."""
    torch.manual_seed(0)
    cache, q = torch.randn(300, 1, 1, 576).bfloat16(), torch.randn(6, 16, 576).bfloat16()
    table, lengths = torch.randint(300, (3, 140), dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q=q[..., 512:],
        k_cache=cache[..., 512:],
        v_cache=cache[..., :512],
        qv=q[..., :512],
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        cu_seqlens_k_new=torch.tensor([0, 70, 199, 200], dtype=torch.int32),
        max_seqlen_q=2,
        softmax_scale=0.1147,
        causal=True,
        softcap=0.0,
        k_descale=None,
        v_descale=None,
        return_softmax_lse=True,
        num_splits=0,
        ver=3,
    )
    true_out, true_lse = mla_decode_reference(q.view(3, 2, 16, 576), cache, table, lengths, 0.1147)
    torch.testing.assert_close(out.double(), true_out.flatten(0, 1), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double().T, true_lse.flatten(0, 1), rtol=1e-5, atol=1e-5)
