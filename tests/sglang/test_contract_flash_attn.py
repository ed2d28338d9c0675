"""FlashAttention-3's drop-in and the calls of SGLang's own backends; test_contract_layer runs one of them on it."""

import ast
import inspect

import pytest
from sglang.kernels.ops.attention import flash_attention
from sglang.srt.layers.attention import dsa_backend, flashattention_backend

from etap_backend.compat import flash_attn_interface as fa3


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
    sglangs = inspect.signature(flash_attention.flash_attn_with_kvcache).parameters
    drop_in = inspect.signature(fa3.flash_attn_with_kvcache).parameters
    assert list(sglangs)[:3] == list(drop_in)[:3]
    for each in drop_in.values():
        if each.kind is not each.VAR_KEYWORD:
            assert sglangs[each.name].default == each.default, each
    others = {name: each.default for name, each in sglangs.items() if name not in drop_in}
    fa3.refuse_options(others, fa3.CHOICES, fa3.NO_EFFECT)
