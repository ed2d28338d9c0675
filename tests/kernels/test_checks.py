"""What must be refused is refused, on the CPU as on the GPU, and names its argument; what is allowed is not."""

import math
from typing import get_type_hints

import pytest
import sparse_refusals
import torch
from refusals import REFUSALS, fp8, valid_call

from etap_backend import (
    DecodeSchedule,
    dense,
    mla_decode,
    sparse_mla_decode,
    why_unsupported,
    why_unsupported_sparse,
)
from etap_backend._library import library
from etap_backend._operator import SCHEMA_TYPES
from etap_backend.calls import DenseCall, ScheduleCall, SharedScheduleCall, SparseCall, TopKCall
from support.cases import Case, build, decode
from support.compare import check, truth

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_both = pytest.mark.parametrize("device", DEVICES)
both_calls = pytest.mark.parametrize(
    "call, valid", [(mla_decode, valid_call), (sparse_mla_decode, sparse_refusals.valid_call)], ids=["dense", "sparse"]
)


@on_both
@pytest.mark.parametrize(
    "refusal", [*REFUSALS, *sparse_refusals.REFUSALS], ids=lambda one: f"{one.function.__name__} {one}"
)
def test_refused(refusal, device):
    with pytest.raises(refusal.error, match=refusal.text):
        refusal.call(device)


@on_both
@both_calls
def test_the_unspoiled_call_is_allowed(call, valid, device):
    call(**valid(device))


@on_both
def test_memory_between_the_requests_of_a_buffer_is_free(device):
    """An output there shares no memory with the queries."""
    call = valid_call(device)
    own, between = call["q"][0].numel(), call["out"].numel()
    buffer = call["q"].new_zeros(3, own + between)
    out = buffer[0, own:].view(call["out"].shape)
    mla_decode(**{**call, "q": buffer[:, :own].view(call["q"].shape), "out": out})


@on_both
def test_an_fp8_cache_is_allowed(device):
    call = valid_call(device)
    call |= fp8(call)
    mla_decode(**call, fp8_math=True, out_dtype=torch.bfloat16)
    call["q"] = call["q"].to(torch.float8_e4m3fn)
    mla_decode(**call, q_scale=call["kv_scale"], out_dtype=torch.bfloat16)
    mla_decode(**{**call, "out": call["out"].half()})


@on_both
@pytest.mark.parametrize("name", ["q", "kv_cache", "out"])
@both_calls
def test_autograd_records_nothing_of_a_call(call, valid, name, device):
    arguments = valid(device)
    wanted = call(**{**arguments, "out": None, "lse": None})
    arguments[name] = arguments[name].clone().requires_grad_()
    out, lse = call(**arguments)
    assert out.grad_fn is None and lse.grad_fn is None and not lse.requires_grad
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@on_both
@both_calls
def test_tensors_of_inference_mode_serve_outside_of_it(call, valid, device):
    with torch.inference_mode():
        arguments = valid(device)
        wanted = [one.clone() for one in call(**arguments)]
    assert all(map(torch.equal, call(**arguments), wanted))


@pytest.mark.gpu
@both_calls
def test_tensors_of_two_devices_are_refused(call, valid):
    arguments = valid("cuda")
    if call is sparse_mla_decode:
        arguments |= sparse_refusals.table(arguments) | {"workspace": torch.zeros(10**6, device="cuda")}
    else:
        with pytest.raises(ValueError, match="^schedule: wanted one on cuda:0 like q, got one on cpu"):
            call(**{**arguments, "schedule": valid("cpu")["schedule"]})
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name != "q":
            with pytest.raises(ValueError, match=f"^{name}: wanted .*cuda"):
                call(**{**arguments, name: value.cpu()})


# ----------------------------------------------------------------------------------------- direct calls of the library


def dense_library_call(device: str, **spoiled) -> DenseCall:
    """The valid call as the compiled `decode` takes it, with some of it replaced."""
    call = valid_call(device)
    planned = call.pop("schedule")._asdict()
    del planned["page_size"]  # compared before the library is called
    planned["heads"] = planned.pop("num_heads")
    call |= planned | {"q_scale": None, "kv_scale": None, "fp8_math": False}
    call |= {"empty_lse": -math.inf, "early_loads": False}
    return DenseCall(**call)._replace(**spoiled)


def sparse_library_call(device: str, **spoiled) -> SparseCall:
    """The valid sparse call as the compiled `sparse_decode` takes it, with some of it replaced."""
    call = sparse_refusals.valid_call(device) | {
        "workspace": torch.zeros(10**6, device=device),
        "partitions": 8,
        "num_sms": 8,
    }
    call |= {"empty_lse": -math.inf, **spoiled}
    return SparseCall(*map(call.get, SparseCall._fields))


BYTES = torch.zeros(3, dtype=torch.int8)
REFUSED_ALONE = {
    name: (name, BYTES)
    for name in (
        *("q", "kv_cache", "q_scale", "kv_scale", "block_table", "seq_lens"),
        *("work_ranges", "split_offsets", "shared", "workspace", "out", "lse"),
    )
} | {
    "softmax_scale": ("softmax_scale", 0.0),
    "batch": ("schedule", 7),
    "s_q": ("schedule", 7),
    "heads": ("schedule", 7),
    "partitions": ("partitions", 0),
    "row_tile": ("row_tile", 7),
    "num_sms": ("num_sms", 0),
    "fp8_math": ("fp8_math", True),
    "empty_lse": ("empty_lse", 0.0),
}
"""By argument: the name in the library's refusal of such a value. The library refuses no `early_loads`."""


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
            library().check_decode(*dense_library_call("cpu", **{field: value}))


def test_the_library_tells_the_arguments_that_python_gives_it():
    calls = {"decode": DenseCall, "sparse_decode": SparseCall, "top_k": TopKCall}
    calls |= {"build_schedule": ScheduleCall, "build_shared_schedule": SharedScheduleCall}
    assert set(library().arguments()) == set(calls)
    for name, call in calls.items():
        given = [f"{SCHEMA_TYPES[kind]} {argument}" for argument, kind in get_type_hints(call).items()]
        assert list(library().arguments()[name]) == given


NAN = float("nan")
DENSE_SPOILED = [
    ("partitions", 9, ValueError, "work_ranges"),
    ("partitions", 0, ValueError, "partitions"),
    ("row_tile", 0, ValueError, "row_tile"),
    ("row_tile", 2**32 + 8, ValueError, "row_tile"),
    ("work_ranges", torch.zeros(8, 8), TypeError, "work_ranges"),
    ("work_ranges", torch.zeros(8, 7, dtype=torch.int32), ValueError, "work_ranges"),
    ("work_ranges", torch.zeros(65, dtype=torch.int32)[1:].view(8, 8), ValueError, "work_ranges"),
    ("split_offsets", torch.zeros(4), TypeError, "split_offsets"),
    ("split_offsets", torch.zeros(3, dtype=torch.int32), ValueError, "split_offsets"),
    ("shared", torch.zeros(9, 8, dtype=torch.int32), ValueError, "shared"),
    ("shared", torch.zeros(10, 2, dtype=torch.int32), ValueError, "shared"),
    ("workspace", torch.zeros(99), ValueError, "workspace"),
    ("q", torch.zeros(3, 32, 576), ValueError, "q"),
    ("softmax_scale", NAN, ValueError, "softmax_scale"),
    ("empty_lse", 0.0, ValueError, "empty_lse"),
]
SPARSE_SPOILED = [
    ("partitions", 0, ValueError, "partitions"),
    ("partitions", 2**28, ValueError, "indices"),  # as many partitions leave few bits for the entries
    ("softmax_scale", NAN, ValueError, "softmax_scale"),
    ("empty_lse", 0.0, ValueError, "empty_lse"),
    ("workspace", torch.zeros(99), ValueError, "workspace"),
    ("indices", torch.zeros(3, 100), TypeError, "indices"),
]


@on_both
@pytest.mark.parametrize("function", ["check_{}", "{}", "{}_launches"])
@pytest.mark.parametrize("name, make, spoiled", [
    *(("decode", dense_library_call, spoiled) for spoiled in DENSE_SPOILED),
    *(("sparse_decode", sparse_library_call, spoiled) for spoiled in SPARSE_SPOILED),
])  # fmt: skip
def test_a_direct_call_of_the_library_is_refused_as_well(name, make, spoiled, function, device):
    argument, value, error, named = spoiled
    if isinstance(value, torch.Tensor):  # with what it is a view of, so that it begins at the same offset
        base = value if value._base is None else value._base
        value = base.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
    with pytest.raises(error, match=rf"^{named}\b.*: wanted"):
        getattr(library(), function.format(name))(*make(device, **{argument: value}))


@pytest.mark.parametrize("name, value, named", [
    ("page_size", 0, "page_size"), ("s_q", 0, "s_q"), ("heads", 0, "heads"), ("num_sms", 0, "num_sms"),
    ("num_sms", 133, "work_ranges"), ("heads", 48, "shared"), ("split_cost", 0, "split_cost"),
    ("shared", torch.zeros(9, 4, dtype=torch.int32), "shared"),
    ("shared", torch.zeros(10, 3, dtype=torch.int32), "shared"),
    ("block_table", torch.zeros(3, 9, dtype=torch.int32), "block_table"),
    ("work_ranges", torch.zeros(263, 8, dtype=torch.int32), "work_ranges"),
])  # fmt: skip
def test_a_direct_build_of_shared_prefixes_is_refused_as_well(name, value, named):
    schedule = DecodeSchedule(4, 16, device="cpu", num_sms=132, shared_prefix=True)
    buffers = (schedule.work_ranges, schedule.split_offsets, schedule.shared)
    lengths, table = torch.ones(4, dtype=torch.int32), torch.zeros(4, 9, dtype=torch.int32)
    call = SharedScheduleCall(lengths, table, *buffers, 64, 1, 16, 0, 132, 132, 16, 2, 4)
    library().build_shared_schedule(*call)
    with pytest.raises((ValueError, TypeError), match=rf"^{named}\b.*: wanted"):
        library().build_shared_schedule(*call._replace(**{name: value}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["split_offsets", "workspace", "work_ranges"])
def test_a_direct_call_with_parts_of_a_schedule_elsewhere_is_refused(name):
    there = getattr(valid_call("cuda")["schedule"], name).cpu()
    with pytest.raises(ValueError, match="^(schedule|workspace): wanted .* on cuda:0.*got one on cpu"):
        library().decode(*dense_library_call("cuda", **{name: there}))


@pytest.mark.parametrize("name, make", [("decode", dense_library_call), ("sparse_decode", sparse_library_call)])
def test_the_compiled_decode_runs_on_gpus_only(name, make):
    with pytest.raises(ValueError, match="^q: wanted a tensor on a CUDA device, got one on cpu"):
        getattr(library(), name)(*make("cpu"))


# ----------------------------------------------------------------------------------------------------- memory's limits


@on_both
def test_a_sparse_output_may_lie_between_the_queries(device):
    """Slices of one buffer that share no byte."""
    call = sparse_refusals.valid_call(device)
    call |= sparse_refusals.v4(call)
    buffer = torch.zeros(3, 64, 512, dtype=torch.bfloat16, device=device)
    sparse_mla_decode(**call | {"q": buffer[:, :16], "out": buffer[:, 16:32]})
    sparse_mla_decode(**call | {"q": buffer[:, 48:], "out": buffer[:, 16:32]})


def test_pages_further_apart_than_tma_reaches_are_refused(tmp_path):
    """Two pages 2^40 bytes apart, in a file without blocks."""
    step = 2**39
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=step + 64 * 576, dtype=torch.bfloat16)
    call = valid_call("cpu")
    with pytest.raises(ValueError, match=r"^kv_cache: wanted .*2\^40 bytes apart.*549755813888"):
        mla_decode(**call | {"kv_cache": file.as_strided((2, 64, 576), (step, 576, 1))})
    mla_decode(**call | {"kv_cache": file.as_strided((2, 64, 576), (step - 8, 576, 1))})


def test_rows_that_32_bits_do_not_count_are_refused_where_they_are_gathered(tmp_path):
    """Two pages 2^32 times 16 bytes apart and more, in a file without blocks."""
    step = (2**32 + 1) * 8
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=step + 64 * 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^kv_cache: wanted pages of a multiple of 16 tokens, or strides"):
        library().check_decode(*dense_library_call("cpu", kv_cache=file.as_strided((2, 1, 576), (step, 576, 1))))
    for page_size, apart in ((16, step), (1, step - 8)):
        cache = file.as_strided((2, page_size, 576), (apart, 576, 1))
        library().check_decode(*dense_library_call("cpu", kv_cache=cache))


@on_both
def test_a_single_page_may_have_any_stride(device):
    call = valid_call(device)
    pool = call["kv_cache"].new_zeros(64 * 576)
    for stride in (0, 3, 2**50):
        mla_decode(**{**call, "kv_cache": pool.as_strided((1, 64, 576), (stride, 576, 1))})


@pytest.mark.parametrize("page", [7, -1, 2**31 - 1])
def test_a_missing_page_is_refused_on_the_cpu(page):
    call = valid_call("cpu")
    call["block_table"][2, 1] = page
    with pytest.raises(ValueError, match=f"^block_table: wanted pages from 0 to 6 .*request 2, got {page}"):
        mla_decode(**call)
    call["block_table"][2, 1], call["block_table"][1, 1] = 0, page  # behind the end of its request
    mla_decode(**call)


def test_a_length_beyond_the_block_table_is_refused_on_the_cpu():
    lens = torch.tensor([70, 129, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_lens: wanted at most 128 tokens.*got 129"):
        mla_decode(**valid_call("cpu") | {"seq_lens": lens})


# ----------------------------------------------------------------------------------------------------------- schedules


@on_both
@pytest.mark.parametrize("lengths", [(300, 0, 1, 64), (1500, 130, 2999, 0), (3000, 4000, 65, 1000)])
@pytest.mark.parametrize("heads, any_batch", [(16, False), (64, False), (64, True)])
def test_other_lengths_than_the_schedules_give_the_same_result(heads, any_batch, lengths, device):
    """As in a graph: a split ends with its request, and a split without tokens adds nothing to the others."""
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


@on_both
def test_a_call_may_bring_its_workspace(device):
    call = valid_call(device)
    schedule = DecodeSchedule(3, 16, max_s_q=2, device=device, num_sms=8, allocate_workspace=False)
    planned = schedule.build(call["seq_lens"], 2)
    assert planned.workspace is None
    wanted = [tensor.clone() for tensor in mla_decode(**call)]
    workspace = torch.full((schedule.max_workspace_floats,), torch.nan, device=device)
    got = mla_decode(**{**call, "schedule": planned}, workspace=workspace)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


SCHEDULES = [
    *(({name: value}, ValueError) for name, value in (("max_batch", 0), ("num_heads", 0), ("max_s_q", -1))),
    *(({name: value}, TypeError) for name, value in (("num_heads", 16.0), ("max_batch", None), ("max_s_q", "2"))),
    ({"num_sms": 0}, ValueError),
    *(({"device": device}, ValueError) for device in ("meta", "gpu", None, "cuda:99")),
    ({"workspace": [0.0]}, TypeError),
    ({"workspace": torch.empty(5)}, ValueError),
    ({"workspace": torch.empty(10**6, dtype=torch.float64)}, TypeError),
]


@pytest.mark.parametrize("argument, error", SCHEDULES)
def test_an_impossible_schedule_is_refused(argument, error):
    with pytest.raises(error, match=f"^{next(iter(argument))}: wanted .+, got "):
        DecodeSchedule(**{"max_batch": 4, "num_heads": 16, "device": "cpu", **argument})


@pytest.mark.parametrize("argument, error", [
    ({"num_heads": 0}, ValueError),
    ({"num_heads": 16.0}, TypeError),
    ({"max_s_q": None}, TypeError),
    ({"num_sms": -1}, ValueError),
    ({"max_batch": 0, "batch_invariant": True}, ValueError),
])  # fmt: skip
def test_an_impossible_workspace_is_refused(argument, error):
    with pytest.raises(error, match=f"^{next(iter(argument))}: wanted .+, got "):
        DecodeSchedule.workspace_floats(**{"num_heads": 16, "max_s_q": 1, "num_sms": 8, **argument})


def test_a_schedule_on_the_cpu_by_number_takes_lengths_of_the_cpu():
    schedule = DecodeSchedule(1, 16, device="cpu:0")
    assert schedule.build(torch.ones(1, dtype=torch.int32)).work_ranges.device == torch.device("cpu")


def test_a_schedule_for_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="^device: wanted the CPU or a CUDA device that torch sees, got cuda"):
        DecodeSchedule(4, 16)


LENGTHS = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize("seq_lens, s_q, error, named", [
    (LENGTHS.long(), 1, TypeError, "seq_lens"),
    (torch.ones(5, dtype=torch.int32), 1, ValueError, "seq_lens"),
    (LENGTHS.view(2, 2), 1, ValueError, "seq_lens"),
    (torch.ones(8, dtype=torch.int32)[::2], 1, ValueError, "seq_lens"),
    (LENGTHS.to("meta"), 1, ValueError, "seq_lens"),
    ([1, 2], 1, TypeError, "seq_lens"),
    (LENGTHS, 3, ValueError, "s_q"),
    (LENGTHS, 0, ValueError, "s_q"),
    (LENGTHS, 1.0, TypeError, "s_q"),
])  # fmt: skip
def test_a_batch_that_does_not_fit_the_schedule_is_refused(seq_lens, s_q, error, named):
    with pytest.raises(error, match=f"^{named}: wanted .+, got "):
        DecodeSchedule(4, 16, max_s_q=2, device="cpu").build(seq_lens, s_q)


# --------------------------------------------------------------------------------------------- what the kernels support

UNSUPPORTED = [
    ("dtype", torch.float32, "float32"),
    ("head_dim", 192, "192"),
    ("v_head_dim", 128, "128"),
    ("page_size", 0, "0"),
    ("num_heads", 0, "0"),
    ("s_q", 0, "0"),
    *(("kv_cache_dtype", name, name) for name in ("float16", "fp8_e5m2", "fp8_ds_mla", "nvfp4_ds_mla")),
    ("kv_cache_dtype", torch.float8_e5m2, "float8_e5m2"),
    ("compute_capability", (8, 0), "8.0"),
    ("compute_capability", (10, 0), "10.0"),
]
SPARSE_UNSUPPORTED = [
    ("dtype", torch.float16, "float16"),
    ("dtype", torch.float8_e4m3fn, "float8_e4m3fn"),
    *((name, value, f"{value}") for name, value in (("head_dim", 192), ("v_head_dim", 128))),
    *((name, 0, "0") for name in ("page_size", "top_k", "num_heads")),
    *(("kv_cache_dtype", dtype, "float8_e4m3fn") for dtype in ("fp8", torch.float8_e4m3fn)),
    ("kv_cache_dtype", "nvfp4_ds_mla", "nvfp4_ds_mla"),
    ("compute_capability", (10, 0), "10.0"),
]


@pytest.mark.parametrize("why, name, value, got", [
    *((why_unsupported, *row) for row in UNSUPPORTED),
    *((why_unsupported_sparse, *row) for row in SPARSE_UNSUPPORTED),
])  # fmt: skip
def test_unsupported_problems_have_a_reason(why, name, value, got):
    reason = why(**{"dtype": torch.bfloat16, name: value})
    assert reason.startswith(f"{name.replace('compute_c', 'compute c')} {got} is not supported")


@pytest.mark.parametrize("page_size", [1, 16, 96])
def test_small_pages_of_a_float16_cache_are_unsupported(page_size):
    reason = why_unsupported(dtype=torch.float16, page_size=page_size)
    assert reason.startswith(f"page_size {page_size} is not supported with a float16 cache")
    assert why_unsupported(dtype=torch.float16, kv_cache_dtype="fp8", page_size=page_size) is None


@pytest.mark.parametrize("why", [why_unsupported, why_unsupported_sparse])
def test_types_have_names_and_other_arguments_of_a_wrong_type_are_refused_by_name(why):
    assert why(dtype="bfloat16") is why(dtype="torch.bfloat16", kv_cache_dtype="torch.bfloat16") is None
    assert why(dtype="float32").startswith("dtype float32 is not supported")
    assert why(dtype="bf17").startswith("dtype bf17 is not supported")
    wrong = {"dtype": 16, "kv_cache_dtype": 8, "num_heads": "16", "page_size": 64.5}
    wrong = [*wrong.items(), *(("compute_capability", value) for value in ("9.0", 90, (9,), (9, "0")))]
    for name, value in wrong:
        with pytest.raises(TypeError, match=f"^{name}: wanted "):
            why(**{"dtype": torch.bfloat16, name: value})
    assert why(dtype="bfloat16", num_heads=2**40).startswith("num_heads 1099511627776 is not supported: wanted 1 to ")


def test_a_bfloat16_cache_beside_fp8_queries_is_unsupported():
    reason = why_unsupported(dtype=torch.float8_e4m3fn, kv_cache_dtype="bfloat16")
    assert reason.startswith("kv_cache_dtype bfloat16 is not supported")


@pytest.mark.parametrize("problem", [
    {},
    {"dtype": torch.float16, "kv_cache_dtype": "float16"},
    {"page_size": 1},
    {"kv_cache_dtype": "auto", "page_size": 128, "compute_capability": (9, 0), "num_heads": 128, "s_q": 4},
    {"kv_cache_dtype": torch.bfloat16, "num_heads": 1},
    *({"dtype": getattr(torch, dtype), "kv_cache_dtype": cache, "page_size": 16}
      for dtype in ("bfloat16", "float16", "float8_e4m3fn")
      for cache in ("fp8", "fp8_e4m3", torch.float8_e4m3fn, "auto")
      if (dtype, cache) != ("float16", "auto")),
])  # fmt: skip
def test_supported_problems_have_none(problem):
    assert why_unsupported(**{"dtype": torch.bfloat16, **problem}) is None


@pytest.mark.parametrize("cache", [None, "auto", "bfloat16", torch.bfloat16, "fp8_ds_mla"])
def test_supported_sparse_problems_have_none(cache):
    problem = {"num_heads": 3, "page_size": 1, "top_k": 100, "compute_capability": (9, 0)}
    for head_dim in (576, 512):
        assert why_unsupported_sparse(dtype=torch.bfloat16, kv_cache_dtype=cache, head_dim=head_dim, **problem) is None
