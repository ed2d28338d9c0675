"""What must be refused is refused, by the same words on the CPU and on the GPU; what is allowed is not."""

import math

import pytest
import sparse_refusals
import torch
from refusals import REFUSALS, valid_call

from etap_backend import (
    DecodeSchedule,
    dense,
    mla_decode,
    sparse_mla_decode,
    why_unsupported,
    why_unsupported_sparse,
)
from etap_backend._library import library
from etap_backend.calls import DenseCall, SparseCall
from support.cases import Case, build, decode
from support.compare import check, truth

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
@pytest.mark.parametrize("refusal", sparse_refusals.REFUSALS, ids=str)
def test_refused_by_the_sparse_call(refusal, device):
    test_refused(refusal, device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_unspoiled_call_is_allowed(device):
    mla_decode(**valid_call(device))
    sparse_mla_decode(**sparse_refusals.valid_call(device))


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_between_the_requests_of_a_buffer_is_nobodys(device):
    """An output there shares no memory with the queries."""
    call = valid_call(device)
    own, between = call["q"][0].numel(), call["out"].numel()
    buffer = call["q"].new_zeros(3, own + between)
    out = buffer[0, own:].view(call["out"].shape)
    mla_decode(**{**call, "q": buffer[:, :own].view(call["q"].shape), "out": out})


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["q", "kv_cache", "out"])
@pytest.mark.parametrize(
    "call, valid", [(mla_decode, valid_call), (sparse_mla_decode, sparse_refusals.valid_call)], ids=["dense", "sparse"]
)
def test_autograd_sees_nothing_of_a_call(call, valid, name, device):
    arguments = valid(device)
    wanted = call(**{**arguments, "out": None, "lse": None})
    arguments[name] = arguments[name].clone().requires_grad_()
    out, lse = call(**arguments)
    assert out.grad_fn is None and lse.grad_fn is None and not lse.requires_grad
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_inference_mode_serve_outside_of_it(device):
    for call, valid in (mla_decode, valid_call), (sparse_mla_decode, sparse_refusals.valid_call):
        with torch.inference_mode():
            arguments = valid(device)
            wanted = [one.clone() for one in call(**arguments)]
        assert all(map(torch.equal, call(**arguments), wanted))


@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused():
    call = valid_call("cuda")
    for name in ("block_table", "seq_lens", "kv_cache", "out", "lse"):
        with pytest.raises(ValueError, match=f"^{name}: wanted .*cuda"):
            mla_decode(**{**call, name: call[name].cpu()})
    with pytest.raises(ValueError, match="^schedule: wanted one on cuda:0 like q, got one on cpu"):
        mla_decode(**{**call, "schedule": valid_call("cpu")["schedule"]})


def as_the_library_takes_it(device: str, **spoiled) -> DenseCall:
    """The valid call as the compiled `decode` takes it, with some of it replaced."""
    call = valid_call(device)
    planned = call.pop("schedule")._asdict()
    planned["heads"] = planned.pop("num_heads")
    call |= planned | {"q_scale": None, "kv_scale": None, "fp8_math": False}
    call |= {"empty_lse": -math.inf, "early_loads": False}
    return DenseCall(**call)._replace(**spoiled)


BYTES = torch.zeros(3, dtype=torch.int8)
REFUSED_ALONE = {
    name: (name, BYTES)
    for name in (
        *("q", "kv_cache", "q_scale", "kv_scale", "block_table", "seq_lens"),
        *("work_ranges", "split_offsets", "workspace", "out", "lse"),
    )
} | {
    "softmax_scale": ("softmax_scale", 0.0),
    "batch": ("schedule", 7),
    "s_q": ("schedule", 7),
    "heads": ("schedule", 7),
    "partitions": ("partitions", 0),
    "row_tile": ("row_tile", 7),
    "fp8_math": ("fp8_math", True),
    "empty_lse": ("empty_lse", 0.0),
}
"""By argument what the library says of such a value in its place; it refuses no `early_loads`."""


@pytest.mark.parametrize("field", DenseCall._fields)
def test_each_argument_reaches_the_place_of_its_name(monkeypatch, field):
    """In the call that `mla_decode` makes, and in the library, which names what it refuses."""
    made, call = [], valid_call("cpu")
    monkeypatch.setattr(dense, "_decode", lambda q, arguments: made.append(arguments))
    given = {"q_scale": 1, "kv_scale": 2, "fp8_math": 3, "empty_lse": 4, "early_loads": 5}
    mla_decode(**call, **given)
    of_schedule = {"heads": "num_heads"}.get(field, field)
    wanted = (
        getattr(call["schedule"], of_schedule) if hasattr(call["schedule"], of_schedule) else {**call, **given}[field]
    )
    assert getattr(made[0], field) is wanted
    if field in REFUSED_ALONE:
        name, value = REFUSED_ALONE[field]
        with pytest.raises((ValueError, TypeError), match=f"^{name}\\b"):
            library().check_decode(*as_the_library_takes_it("cpu", **{field: value}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", ["check_decode", "decode", "decode_launches"])
@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (lambda device: {"partitions": 9}, ValueError, "work_ranges' size: wanted at least 9, got 8"),
        (lambda device: {"partitions": 0}, ValueError, "partitions: wanted at least 1, got 0"),
        (lambda device: {"row_tile": 0}, ValueError, "row_tile: wanted 8, 16, 32 or 64, got 0"),
        (lambda device: {"row_tile": 2**32 + 8}, ValueError, "row_tile: wanted 8, 16, 32 or 64, got 4294967304"),
        (
            lambda device: {"work_ranges": torch.zeros(8, 8, device=device)},
            TypeError,
            "work_ranges: wanted int32, got float32",
        ),
        (
            lambda device: {"work_ranges": torch.zeros(8, 7, dtype=torch.int32, device=device)},
            ValueError,
            r"work_ranges: wanted shape \[partitions, 8\], got \[8, 7\]",
        ),
        (
            lambda device: {"split_offsets": torch.zeros(4, device=device)},
            TypeError,
            "split_offsets: wanted int32, got float32",
        ),
        (
            lambda device: {"split_offsets": torch.zeros(3, dtype=torch.int32, device=device)},
            ValueError,
            "split_offsets' size: wanted at least 4, got 3",
        ),
        (
            lambda device: {"workspace": torch.zeros(99, device=device)},
            ValueError,
            r"workspace: wanted a contiguous \[>=131328\], got \[99\]",
        ),
        (lambda device: {"q": torch.zeros(3, 32, 576, device=device)}, ValueError, r"q: wanted shape \[batch, s_q"),
        (lambda device: {"softmax_scale": float("nan")}, ValueError, "softmax_scale: wanted a positive finite number"),
        (lambda device: {"empty_lse": 0.0}, ValueError, "empty_lse: wanted -inf or inf, got 0"),
    ],
)
def test_a_direct_call_of_the_library_is_refused_as_well(spoil, error, words, function, device):
    with pytest.raises(error, match=f"^{words}"):
        getattr(library(), function)(*as_the_library_takes_it(device, **spoil(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["split_offsets", "workspace", "work_ranges"])
def test_a_direct_call_with_parts_of_a_schedule_elsewhere_is_refused(name):
    there = getattr(valid_call("cuda")["schedule"], name).cpu()
    with pytest.raises(ValueError, match="^(schedule|workspace): wanted .* on cuda:0.*got one on cpu"):
        library().decode(*as_the_library_takes_it("cuda", **{name: there}))


def test_the_compiled_decode_runs_on_gpus_only():
    with pytest.raises(ValueError, match="^q: wanted a tensor on a CUDA device, got one on cpu"):
        library().decode(*as_the_library_takes_it("cpu"))
    with pytest.raises(ValueError, match="^q: wanted a tensor on a CUDA device, got one on cpu"):
        library().sparse_decode(*as_the_library_takes_sparse_calls("cpu"))


def as_the_library_takes_sparse_calls(device: str, **spoiled) -> SparseCall:
    """The valid sparse call as the compiled `sparse_decode` takes it, with some of it replaced."""
    call = sparse_refusals.valid_call(device) | {"workspace": torch.zeros(10**6, device=device), "partitions": 8}
    call |= {"empty_lse": -math.inf, **spoiled}
    return SparseCall(*map(call.get, SparseCall._fields))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", ["check_sparse_decode", "sparse_decode", "sparse_decode_launches"])
@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (lambda device: {"partitions": 0}, ValueError, "partitions: wanted at least 1, got 0"),
        (
            lambda device: {"partitions": 2**28},
            ValueError,
            r"indices: wanted at most 2\^29 .* for 268435456 partitions",
        ),
        (lambda device: {"softmax_scale": float("nan")}, ValueError, "softmax_scale: wanted a positive finite number"),
        (lambda device: {"empty_lse": 0.0}, ValueError, "empty_lse: wanted -inf or inf, got 0"),
        (
            lambda device: {"workspace": torch.zeros(99, device=device)},
            ValueError,
            r"workspace: wanted a contiguous \[>=131328\], got \[99\]",
        ),
        (
            lambda device: {"indices": torch.zeros(3, 100, device=device)},
            TypeError,
            "indices: wanted int32, got float32",
        ),
    ],
)
def test_a_direct_sparse_call_of_the_library_is_refused_as_well(spoil, error, words, function, device):
    with pytest.raises(error, match=f"^{words}"):
        getattr(library(), function)(*as_the_library_takes_sparse_calls(device, **spoil(device)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_sparse_output_may_lie_between_the_queries(device):
    """Slices of one buffer, none of which has a byte of the other's."""
    call = sparse_refusals.valid_call(device)
    call |= sparse_refusals.v4(call)
    buffer = torch.zeros(3, 64, 512, dtype=torch.bfloat16, device=device)
    sparse_mla_decode(**call | {"q": buffer[:, :16], "out": buffer[:, 16:32]})
    sparse_mla_decode(**call | {"q": buffer[:, 48:], "out": buffer[:, 16:32]})


@pytest.mark.gpu
def test_sparse_calls_with_tensors_of_two_devices_are_refused():
    call = sparse_refusals.valid_call("cuda")
    call |= sparse_refusals.table(call, workspace=torch.zeros(10**6, device="cuda"))
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and name != "q":
            with pytest.raises(ValueError, match=f"^{name}: wanted .*cuda"):
                sparse_mla_decode(**{**call, name: value.cpu()})


def test_pages_further_apart_than_tma_reaches_are_refused(tmp_path):
    """Two pages 2^40 bytes apart, in a file without blocks."""
    step = 2**39
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=step + 64 * 576, dtype=torch.bfloat16)
    for apart, refused in ((step, True), (step - 8, False)):
        call = valid_call("cpu") | {"kv_cache": file.as_strided((2, 64, 576), (apart, 576, 1))}
        if refused:
            with pytest.raises(ValueError, match=r"^kv_cache: wanted .*2\^40 bytes apart.*549755813888"):
                mla_decode(**call)
        else:
            mla_decode(**call)


@pytest.mark.parametrize("units, page_size, refused", [(2**32 + 1, 1, True), (2**32 + 1, 16, False), (2**32, 1, False)])
def test_rows_that_32_bits_do_not_count_are_refused_where_they_are_gathered(units, page_size, refused, tmp_path):
    """Two pages so many times 16 bytes apart, in a file without blocks."""
    step = units * 8
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=step + 64 * 576, dtype=torch.bfloat16)
    cache = file.as_strided((2, page_size, 576), (step, 576, 1))
    arguments = as_the_library_takes_it("cpu", kv_cache=cache)
    if refused:
        with pytest.raises(ValueError, match="^kv_cache: wanted pages of a multiple of 16 tokens, or strides"):
            library().check_decode(*arguments)
    else:
        library().check_decode(*arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_page_may_have_any_stride(device):
    call = valid_call(device)
    pool = call["kv_cache"].new_zeros(64 * 576)
    for stride in (0, 3, 2**50):
        mla_decode(**{**call, "kv_cache": pool.as_strided((1, 64, 576), (stride, 576, 1))})


@pytest.mark.parametrize("page", [7, -1, 2**31 - 1])
def test_pages_that_are_not_there_are_refused_on_the_cpu(page):
    call = valid_call("cpu")
    call["block_table"][2, 1] = page
    with pytest.raises(ValueError, match=f"^block_table: wanted pages from 0 to 6 .*request 2, got {page}"):
        mla_decode(**call)
    call["block_table"][2, 1], call["block_table"][1, 1] = 0, page  # behind the end of its request
    mla_decode(**call)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(300, 0, 1, 64), (1500, 130, 2999, 0), (3000, 4000, 65, 1000)])
@pytest.mark.parametrize("heads, any_batch", [(16, False), (64, False), (64, True)])
def test_other_lengths_than_the_schedules_give_the_same_result(heads, any_batch, lengths, device):
    """As a graph meets them: a piece ends with its request, and without tokens adds nothing to what the others hold."""
    planned_for = torch.tensor([1500, 700, 3000, 64], dtype=torch.int32, device=device)
    schedule = DecodeSchedule(4, heads, device=device, num_sms=24, any_batch=any_batch).build(planned_for)
    assert schedule.split_offsets[-1] > 0
    schedule.workspace.fill_(torch.nan)
    problem = build(Case(lengths, heads), device)
    check(*decode(problem, schedule), problem, truth(problem))


def test_a_schedule_that_was_built_again_for_other_requests_is_refused_on_the_cpu():
    call, schedule = valid_call("cpu"), DecodeSchedule(3, 16, max_s_q=2, device="cpu", num_sms=8)
    first = schedule.build(call["seq_lens"], 2)
    mla_decode(**{**call, "schedule": first})
    schedule.build(call["seq_lens"][:1], 2)
    with pytest.raises(ValueError, match="^schedule: wanted the buffers that build.. filled for these requests"):
        mla_decode(**{**call, "schedule": first})


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_may_bring_its_workspace(device):
    call = valid_call(device)
    schedule = DecodeSchedule(3, 16, max_s_q=2, device=device, num_sms=8, allocate_workspace=False)
    planned = schedule.build(call["seq_lens"], 2)
    assert planned.workspace is None
    wanted = [tensor.clone() for tensor in mla_decode(**call)]
    workspace = torch.full((schedule.max_workspace_floats,), torch.nan, device=device)
    got = mla_decode(**{**call, "schedule": planned}, workspace=workspace)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_length_beyond_the_block_table_is_refused_on_the_cpu():
    call = valid_call("cpu")
    lens = torch.tensor([70, 129, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_lens: wanted at most 128 tokens.*got 129"):
        mla_decode(**{**call, "seq_lens": lens})


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"max_batch": 0}, "max_batch: wanted at least 1, got 0"),
        ({"num_heads": 0}, "num_heads: wanted at least 1, got 0"),
        ({"max_s_q": -1}, "max_s_q: wanted at least 1, got -1"),
        ({"num_sms": 0}, "num_sms: wanted at least 1, got 0"),
        ({"num_heads": 16.0}, "num_heads: wanted an int, got 16.0"),
        ({"max_batch": None}, "max_batch: wanted an int, got None"),
        ({"max_s_q": "2"}, "max_s_q: wanted an int, got '2'"),
        ({"device": "meta"}, "device: wanted the CPU or a CUDA device that torch sees, got meta"),
        ({"device": "gpu"}, "device: wanted the CPU or a CUDA device that torch sees, got gpu"),
        ({"device": None}, "device: wanted the CPU or a CUDA device that torch sees, got None"),
        ({"device": "cuda:99"}, "device: wanted the CPU or a CUDA device that torch sees, got cuda:99"),
        ({"workspace": [0.0]}, "workspace: wanted a tensor, got list"),
        ({"workspace": torch.empty(5)}, "workspace: wanted a contiguous .* got .5."),
        ({"workspace": torch.empty(10**6, dtype=torch.float64)}, "workspace: wanted float32, got .*float64"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        DecodeSchedule(**{"max_batch": 4, "num_heads": 16, "device": "cpu", **arguments})


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_heads": 0}, "num_heads: wanted at least 1, got 0"),
        ({"num_heads": 16.0}, "num_heads: wanted an int, got 16.0"),
        ({"max_s_q": None}, "max_s_q: wanted an int, got None"),
        ({"num_sms": -1}, "num_sms: wanted at least 1, got -1"),
        ({"max_batch": 0, "batch_invariant": True}, "max_batch: wanted at least 1, got 0"),
    ],
)
def test_a_workspace_for_nothing_is_refused(arguments, words):
    with pytest.raises((ValueError, TypeError), match=f"^{words}"):
        DecodeSchedule.workspace_floats(**{"num_heads": 16, "max_s_q": 1, "num_sms": 8, **arguments})


def test_a_schedule_on_the_cpu_by_number_takes_what_lies_there():
    schedule = DecodeSchedule(1, 16, device="cpu:0")
    assert schedule.build(torch.ones(1, dtype=torch.int32)).work_ranges.device == torch.device("cpu")


def test_a_schedule_for_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="^device: wanted the CPU or a CUDA device that torch sees, got cuda"):
        DecodeSchedule(4, 16)


@pytest.mark.parametrize(
    "seq_lens, s_q, words",
    [
        (torch.ones(4, dtype=torch.int64), 1, "seq_lens: wanted int32, got .*int64"),
        (torch.ones(5, dtype=torch.int32), 1, "seq_lens: wanted .*batch <= 4.*got .5."),
        (torch.ones(2, 2, dtype=torch.int32), 1, "seq_lens: wanted .*got .2, 2."),
        (torch.ones(8, dtype=torch.int32)[::2], 1, "seq_lens: wanted a contiguous .*strides"),
        (torch.ones(4, dtype=torch.int32), 3, r"s_q: wanted 1 to 2 \(max_s_q\), got 3"),
        (torch.ones(4, dtype=torch.int32), 0, "s_q: wanted at least 1, got 0"),
        (torch.ones(4, dtype=torch.int32), 1.0, "s_q: wanted an int, got 1.0"),
        (torch.ones(4, dtype=torch.int32, device="meta"), 1, "seq_lens: wanted a tensor on cpu, got one on meta"),
        ([1, 2], 1, "seq_lens: wanted a tensor, got list"),
    ],
)
def test_a_batch_that_the_schedule_cannot_hold_is_refused(seq_lens, s_q, words):
    schedule = DecodeSchedule(4, 16, max_s_q=2, device="cpu")
    with pytest.raises((ValueError, TypeError), match=words):
        schedule.build(seq_lens, s_q)


@pytest.mark.parametrize(
    "problem, word",
    [
        ({"dtype": torch.float32}, "dtype float32"),
        ({"head_dim": 192}, "head_dim 192"),
        ({"v_head_dim": 128}, "v_head_dim 128"),
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
        {"page_size": 1},
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
    assert why_unsupported(dtype=dtype, kv_cache_dtype=cache, page_size=16) is None


@pytest.mark.parametrize(
    "problem, word",
    [
        ({"dtype": torch.float16}, "dtype float16"),
        ({"dtype": torch.float8_e4m3fn}, "dtype float8_e4m3fn"),
        ({"head_dim": 192}, "head_dim 192"),
        ({"v_head_dim": 128}, "v_head_dim 128"),
        ({"page_size": 0}, "page_size 0"),
        ({"top_k": 0}, "top_k 0"),
        ({"num_heads": 0}, "num_heads 0"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype float8_e4m3fn"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_cache_dtype float8_e4m3fn"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype nvfp4_ds_mla"),
        ({"compute_capability": (10, 0)}, "compute capability 10.0"),
    ],
)
def test_unsupported_sparse_problems_have_a_reason(problem, word):
    assert why_unsupported_sparse(**{"dtype": torch.bfloat16, **problem}).startswith(f"{word} is not supported")


@pytest.mark.parametrize("cache", [None, "auto", "bfloat16", torch.bfloat16, "fp8_ds_mla"])
def test_supported_sparse_problems_have_none(cache):
    problem = {"num_heads": 3, "page_size": 1, "top_k": 100, "compute_capability": (9, 0)}
    for head_dim in (576, 512):
        assert why_unsupported_sparse(dtype=torch.bfloat16, kv_cache_dtype=cache, head_dim=head_dim, **problem) is None
