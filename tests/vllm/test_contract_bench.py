"""Peers of `etap bench`, for the sparse call and beside drop-ins, as the installed vLLM takes them: Python and
operators' schemas are vLLM's own, the GPU kernels behind them are replaced by what they are documented to compute."""

import pytest
import torch

from bench.kernels import tensors
from bench.kernels.grids import SparseWorkload, Workload
from bench.kernels.providers import installed, of_drop_ins
from etap_backend.reference import mla_decode_reference, relative_rmse, sparse_mla_decode_reference


@pytest.fixture
def kernels(monkeypatch):
    """CPU kernels of vLLM's operators; what they were asked for is in the list."""
    import vllm.third_party.flashmla.flash_mla_interface  # noqa: F401
    import vllm.vllm_flash_attn  # noqa: F401

    seen = []

    def decode(q, kv, indices, topk_length, sink, metadata, splits, extra, extra_indices, extra_length, d_v, scale, *_):
        assert indices.shape[:2] == q.shape[:2] and q.shape[2] in (64, 128) and kv.shape[2:] == (1, 656) and d_v == 512
        assert (metadata is None) == (not seen) and topk_length is sink is extra is extra_indices is None
        result, lse = sparse_mla_decode_reference(q[0], kv, indices[0], scale)
        seen.append("decode")
        return result.to(q.dtype)[None], lse.float()[None], torch.zeros(1), torch.zeros(1)

    def prefill(q, kv, indices, scale, d_v, sink, topk_length, *_):
        assert q.shape[1] % 64 == 0 and kv.shape[1:] == (1, 576) and indices.shape[:2] == (len(q), 1) and d_v == 512
        assert topk_length.tolist() == [indices.shape[2]] * len(q)
        result, lse = sparse_mla_decode_reference(q.nan_to_num(), kv.unsqueeze(1), indices[:, 0], scale)
        seen.append("prefill")
        return [result.to(q.dtype), lse.float(), lse.float()]

    def fa3(q, k, v, *rest):
        (q_v, _, starts, _, _, _, used, longest_q, longest_k, table), scale = rest[2:12], rest[20]
        assert starts.tolist() == list(range(len(q) + 1)) and used.tolist() == [table.shape[1]] * len(q)
        assert k.shape[1:] == (1, 1, 64) and v.shape[1:] == (1, 1, 512)
        assert (longest_q, longest_k) == (1, table.shape[1])
        rows = torch.cat([v, k], dim=-1).squeeze(2)
        result, lse = sparse_mla_decode_reference(torch.cat([q_v, q], dim=-1), rows, table, scale)
        seen.append("fa3")
        return [result.to(q.dtype), lse.float().T, torch.zeros(0), torch.zeros(0)]

    flashmla = torch.library.Library("_flashmla_C", "IMPL", "CPU")
    flashmla.impl("sparse_decode_fwd", decode)
    flashmla.impl("sparse_prefill_fwd", prefill)
    flash_attention = torch.library.Library("_vllm_fa3_C", "IMPL", "CPU")
    flash_attention.impl("fwd", fa3)
    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    yield seen
    flashmla._destroy()
    flash_attention._destroy()


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_peers_of_the_sparse_call_are_called_as_the_engine_calls_them(kernels, heads, kv_dtype):
    workload = SparseWorkload((128,) * 5, heads, kv_dtype=kv_dtype, context=1024)
    pool = tensors.pool_of((workload,))
    dtype = torch.uint8 if workload.fp8 else torch.bfloat16
    inputs = pool.with_cache(pool.inputs(workload, 8), dtype)
    (copy,) = pool.copies(workload, dtype)
    truth = pool.truth(inputs, copy)
    names = [name for name in installed().of(workload) if name != "etap"]
    assert names == (["FlashMLA", "FlashMLA alone"] + ["FA3"] * (not workload.fp8))
    for name in names:
        kernels.clear()
        prepare = installed().of(workload)[name].prepare
        if name == "FlashMLA alone" and heads >= 64:
            with pytest.raises(NotImplementedError, match=f"{heads} heads are not padded"):
                prepare(inputs)
            continue
        call = prepare(inputs)
        for _ in range(2):
            assert relative_rmse(call(*copy), truth) < 3e-3
        assert kernels == [{"FA3": "fa3"}.get(name, "decode" if workload.fp8 else "prefill")] * 2


@pytest.fixture
def dense_kernels(monkeypatch):
    """CPU kernels of vLLM's dense operators; in the list is what each was asked for, and with which plan."""
    import vllm.third_party.flashmla.flash_mla_interface  # noqa: F401
    import vllm.v1.attention.ops.flashmla as flashmla_ops
    import vllm.vllm_flash_attn  # noqa: F401

    seen = []

    def decoded(name, q, cache, table, used, scale, plan, kv_scale=None):
        seen.append((name, plan))
        return mla_decode_reference(q, cache, table, used, scale, kv_scale=kv_scale)[0].bfloat16()

    def flashmla(q, kv, d_v, used, table, scale, causal, metadata, splits, *_):
        assert causal and d_v == 512 and kv.shape[2:] == (1, 576) and (metadata is None) == (splits is None)
        out = decoded("flashmla", q, kv.squeeze(2), table, used, scale, metadata)
        return out, out.new_zeros(1).float(), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def flashmla_fp8(q, kv, d_v, used, table, scale, causal, metadata, splits, q_scale, k_scale, *_):
        assert causal and d_v == 512 and q.dtype == kv.dtype == torch.float8_e4m3fn and q_scale is not None
        queries = q.float() * q_scale
        out = decoded("flashmla fp8", queries, kv.squeeze(2), table, used, scale, metadata, k_scale)
        return out, out.new_zeros(1).float()

    def fp8_metadata(used, rows, kv_heads, *_):
        assert kv_heads == 1
        return torch.full((4, 8), rows, dtype=torch.int32), torch.zeros(len(used) + 1, dtype=torch.int32)

    def fa3(q, k, v, *rest):
        (q_v, _, starts, _, _, _, used, longest_q, longest_k, table), scale = rest[2:12], rest[20]
        assert starts.tolist() == list(range(len(used) + 1)) and (longest_q, longest_k) == (1, max(used))
        queries, cache = torch.cat([q_v, q], dim=-1)[:, None], torch.cat([v, k], dim=-1).squeeze(2)
        (plan,) = (one for one in rest[21:] if isinstance(one, torch.Tensor))
        out = decoded("fa3", queries, cache, table, used, scale, plan)
        return [out[:, 0], out.new_zeros(1).float(), torch.zeros(0), torch.zeros(0)]

    def fa3_metadata(batch, *_):
        return torch.zeros(batch, dtype=torch.int32)

    operators = {
        "_flashmla_C": {"dense_decode_fwd": flashmla},
        "_flashmla_extension_C": {
            "fwd_kvcache_mla_fp8": flashmla_fp8,
            "get_mla_decoding_metadata_dense_fp8": fp8_metadata,
        },
        "_vllm_fa3_C": {"fwd": fa3, "get_scheduler_metadata": fa3_metadata},
    }
    libraries = []
    for namespace, calls in operators.items():
        libraries.append(torch.library.Library(namespace, "IMPL", "CPU"))
        for name, call in calls.items():
            libraries[-1].impl(name, call)
    monkeypatch.setattr(flashmla_ops, "_is_flashmla_available", lambda: (True, None))
    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "ROTATED_BYTES", 4e5)
    yield seen
    for library in libraries:
        library._destroy()


@pytest.mark.parametrize("kv_dtype, kernels", [("same", ["flashmla", "fa3"]), ("fp8", ["flashmla fp8"])])
def test_what_drop_ins_stand_in_for_is_called_with_a_plan_of_its_own(dense_kernels, kv_dtype, kernels):
    workload = Workload((130, 40), 8, kv_dtype=kv_dtype)
    pool = tensors.pool_of((workload,))
    found = of_drop_ins().of(workload)
    for name, kernel in zip(("FlashMLA", "FA3"), kernels, strict=False):
        inputs = pool.with_cache(pool.inputs(workload, None), pool.cache_dtype(workload, found[name]))
        (copy, *_) = pool.copies(workload, inputs.kv_dtype)
        truth = pool.truth(inputs, copy)
        planned = found[name].prepare(inputs)
        dense_kernels.clear()
        for _ in range(2):
            assert relative_rmse(planned(*copy), truth) < (4.5e-2 if workload.fp8 else 3e-3)
        planned.plan()
        planned(*copy)
        assert [one for one, _ in dense_kernels] == [kernel] * 3
        first, second, third = (plan for _, plan in dense_kernels)
        if kernel == "flashmla":  # whose first call plans
            assert first is third is None and second is not None
        else:
            assert first is second and third is not first
