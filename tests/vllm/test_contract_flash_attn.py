"""FlashAttention-3's drop-in answers the decode call of vLLM's own FLASH_ATTN_MLA backend."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm import vllm_flash_attn
from vllm.v1.attention.backends.mla import flashattn_mla

from etap_backend.compat import flash_attn_interface as fa3
from etap_backend.reference import mla_decode_reference

LENGTHS = (70, 129, 1)
SCALE = 0.1147


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """In vLLM's module, as after a changed import."""
    monkeypatch.setattr(flashattn_mla, "flash_attn_varlen_func", fa3.flash_attn_varlen_func)
    monkeypatch.setattr(flashattn_mla, "get_scheduler_metadata", fa3.get_scheduler_metadata)


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2), (1, 3, 2)])
@pytest.mark.parametrize("planned", [False, True])
def test_vllms_backend_decodes(counts, planned):
    torch.manual_seed(0)
    cache, q = torch.randn(40, 16, 576).bfloat16(), torch.randn(sum(counts), 16, 576).bfloat16()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    table = torch.randperm(40, dtype=torch.int32)[:27].view(3, 9)
    builder = SimpleNamespace(
        fa_aot_schedule=True,
        num_heads=16,
        dcp_world_size=1,
        mla_dims=SimpleNamespace(qk_rope_head_dim=64, kv_lora_rank=512),
        kv_cache_spec=SimpleNamespace(dtype=torch.bfloat16),
        page_size=16,
    )
    schedule = flashattn_mla.FlashAttnMLAMetadataBuilder._schedule_decode
    sizes = (max(counts), lengths, max(LENGTHS), True, 32)
    decode = flashattn_mla.FlashAttnMLADecodeMetadata(
        block_table=table,
        seq_lens=lengths,
        query_start_loc=starts,
        max_query_len=max(counts),
        max_seq_len=max(LENGTHS),
        scheduler_metadata=schedule(builder, 3, starts, *sizes) if planned else torch.zeros(13, dtype=torch.int32),
        max_num_splits=32,
        dcp_tot_seq_lens=None,
    )
    impl = SimpleNamespace(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dtype="auto",
        scale=SCALE,
        need_to_return_lse_for_decode=True,
        dcp_world_size=1,
        dcp_rank=0,
    )
    out, lse = flashattn_mla.FlashAttnMLAImpl.forward_mqa(impl, q, cache, SimpleNamespace(decode=decode), None)
    for i, (rows, got) in enumerate(zip(q.split(counts), out.split(counts), strict=True)):
        one = slice(i, i + 1)
        true_out, true_lse = mla_decode_reference(rows[None], cache, table[one], lengths[one], SCALE)
        torch.testing.assert_close(got.double(), true_out[0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse.split(counts)[i].double(), true_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "get_scheduler_metadata"])
def test_positions_and_defaults_are_vllms_own(name):
    taken, given = (inspect.signature(getattr(one, name)).parameters for one in (fa3, vllm_flash_attn))
    by_position = [each.name for each in taken.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(given)[: len(by_position)] == by_position
    for each in taken.values():
        if each.kind is not each.VAR_KEYWORD:
            assert given[each.name].default == each.default, each
