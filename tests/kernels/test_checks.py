"""What must be refused is refused, by the same words on the CPU and on the GPU; what is allowed is not."""

import pytest
import torch
from refusals import REFUSALS, valid_call

from etap_backend import DecodeSchedule, mla_decode, why_unsupported

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_refused(refusal, device):
    with pytest.raises(refusal.error) as caught:
        refusal.call(device)
    missing = [word for word in refusal.words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert str(caught.value).startswith(refusal.words[0])


@pytest.mark.parametrize("device", DEVICES)
def test_the_unspoiled_call_is_allowed(device):
    mla_decode(**valid_call(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8_query", [False, True])
def test_the_unspoiled_call_with_an_fp8_cache_is_allowed(device, fp8_query):
    call, scale = valid_call(device), torch.ones((), device=device)
    call["kv_cache"] = call["kv_cache"].to(torch.float8_e4m3fn)
    mla_decode(**call, kv_scale=scale, fp8_math=True, out_dtype=torch.bfloat16)
    if fp8_query:
        call["q"] = call["q"].to(torch.float8_e4m3fn)
        mla_decode(**call, q_scale=scale, kv_scale=scale, out_dtype=torch.bfloat16)
        mla_decode(**{**call, "out": call["out"].half()})


@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused():
    call = valid_call("cuda")
    for name in ("block_table", "seq_lens", "kv_cache", "out", "lse"):
        with pytest.raises(ValueError, match=f"^{name}: wanted .*cuda"):
            mla_decode(**{**call, name: call[name].cpu()})
    with pytest.raises(ValueError, match="^schedule: wanted one on cuda:0 like q, got one on cpu"):
        mla_decode(**{**call, "schedule": valid_call("cpu")["schedule"]})


def test_a_length_beyond_the_block_table_is_refused_on_the_cpu():
    call = valid_call("cpu")
    lens = torch.tensor([70, 129, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_lens: wanted at most 128 tokens.*got 129"):
        mla_decode(**{**call, "seq_lens": lens, "schedule": call["schedule"].build(lens, 2)})


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"max_batch": 0}, "max_batch: wanted at least 1, got 0"),
        ({"num_heads": 0}, "num_heads: wanted at least 1, got 0"),
        ({"max_s_q": -1}, "max_s_q: wanted at least 1, got -1"),
        ({"num_sms": 0}, "num_sms: wanted at least 1, got 0"),
        ({"workspace": torch.empty(5)}, "workspace: wanted a contiguous .* got .5."),
        ({"workspace": torch.empty(10**6, dtype=torch.float64)}, "workspace: wanted float32, got .*float64"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        DecodeSchedule(**{"max_batch": 4, "num_heads": 16, "device": "cpu", **arguments})


@pytest.mark.parametrize(
    "seq_lens, s_q, words",
    [
        (torch.ones(4, dtype=torch.int64), 1, "seq_lens: wanted int32, got .*int64"),
        (torch.ones(5, dtype=torch.int32), 1, "seq_lens: wanted .*batch <= 4.*got .5."),
        (torch.ones(2, 2, dtype=torch.int32), 1, "seq_lens: wanted .*got .2, 2."),
        (torch.ones(8, dtype=torch.int32)[::2], 1, "seq_lens: wanted contiguous .*strides"),
        (torch.ones(4, dtype=torch.int32), 3, r"s_q: wanted 1 to 2 \(max_s_q\), got 3"),
        (torch.ones(4, dtype=torch.int32), 0, r"s_q: wanted 1 to 2 \(max_s_q\), got 0"),
    ],
)
def test_a_batch_that_the_schedule_cannot_hold_is_refused(seq_lens, s_q, words):
    schedule = DecodeSchedule(4, 16, max_s_q=2, device="cpu")
    with pytest.raises((ValueError, TypeError), match=words):
        schedule.build(seq_lens, s_q)
    assert schedule.batch is None


@pytest.mark.parametrize(
    "problem, word",
    [
        ({"dtype": torch.float32}, "dtype float32"),
        ({"head_dim": 192}, "head_dim 192"),
        ({"v_head_dim": 128}, "v_head_dim 128"),
        ({"page_size": 16}, "page_size 16"),
        ({"page_size": 0}, "page_size 0"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype float8_e5m2"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype fp8_ds_mla"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype nvfp4_ds_mla"),
        ({"kv_cache_dtype": "bfloat16", "dtype": torch.float8_e4m3fn}, "kv_cache_dtype bfloat16"),
        ({"compute_capability": (8, 0)}, "compute capability 8.0"),
        ({"compute_capability": (10, 0)}, "compute capability 10.0"),
        ({"num_heads": 0}, "num_heads 0"),
        ({"s_q": 0}, "s_q 0"),
    ],
)
def test_unsupported_problems_have_a_reason(problem, word):
    reason = why_unsupported(**{"dtype": torch.bfloat16, **problem})
    assert reason.startswith(f"{word} is not supported")


@pytest.mark.parametrize(
    "problem",
    [
        {},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"kv_cache_dtype": "auto", "page_size": 128, "compute_capability": (9, 0), "num_heads": 128, "s_q": 4},
        {"kv_cache_dtype": torch.bfloat16, "num_heads": 1},
    ],
)
def test_supported_problems_have_none(problem):
    assert why_unsupported(**{"dtype": torch.bfloat16, **problem}) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3", torch.float8_e4m3fn, "auto"])
def test_fp8_caches_are_supported_with_every_query(dtype, cache):
    assert why_unsupported(dtype=dtype, kv_cache_dtype=cache) is None
    assert why_unsupported(dtype=dtype, kv_cache_dtype=cache, page_size=16).startswith("page_size 16")
