"""Every call that `mla_decode` must refuse, in one table: CPU and GPU must say the same words, naming the argument."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from etap_backend import DecodeSchedule, mla_decode

BATCH, S_Q, HEADS, PAGES, PAGE_SIZE = 3, 2, 16, 7, 64


def valid_call(device: str) -> dict:
    """Arguments of a call that is fine; each refusal spoils one of them."""
    options = {"dtype": torch.bfloat16, "device": device}
    seq_lens = torch.tensor([70, 1, 128], dtype=torch.int32, device=device)
    return {
        "q": torch.zeros(BATCH, S_Q, HEADS, 576, **options),
        "kv_cache": torch.zeros(PAGES, PAGE_SIZE, 576, **options),
        "block_table": torch.zeros(BATCH, 2, dtype=torch.int32, device=device),
        "seq_lens": seq_lens,
        "schedule": DecodeSchedule(BATCH, HEADS, max_s_q=S_Q, device=device, num_sms=8).build(seq_lens, S_Q),
        "softmax_scale": 576**-0.5,
        "q_rope": None,
        "rope_cache": None,
        "out": torch.zeros(BATCH, S_Q, HEADS, 512, **options),
        "lse": torch.zeros(BATCH, S_Q, HEADS, dtype=torch.float32, device=device),
    }


@dataclass(frozen=True)
class Refusal:
    """A spoiled call: `spoil` returns the arguments to replace, `words` must all stand in the error's text."""

    name: str
    error: type[Exception]
    words: tuple[str, ...]
    spoil: Callable[[dict], dict]

    def __str__(self) -> str:
        return self.name

    def call(self, device: str) -> None:
        arguments = valid_call(device)
        mla_decode(**{**arguments, **self.spoil(arguments)})


def strided(tensor: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """The same shape, with steps of `step` elements in `dim` (1: the step of a contiguous tensor)."""
    shape = list(tensor.shape)
    shape[dim] *= step
    return tensor.new_zeros(shape)[(slice(None),) * (dim % tensor.dim()) + (slice(None, None, step),)]


def wide(tensor: torch.Tensor, more: int, first: int = 0) -> torch.Tensor:
    """The same shape as a window of rows that are `more` elements longer."""
    width = tensor.shape[-1]
    return tensor.new_zeros(*tensor.shape[:-1], width + more)[..., first : first + width]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, one element behind an aligned address."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)


def inside(other: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What is like `like`, in the memory of `other`."""
    return other.flatten().view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)


def _workspace(call: dict, floats: int = 10**6, **options) -> torch.Tensor:
    return torch.zeros(floats, **{"device": call["q"].device, **options})


def _split(call: dict) -> dict:
    q = call["q"]
    return {"q": q[..., :512], "q_rope": q[..., 512:]}


def _apart(call: dict) -> dict:
    cache = call["kv_cache"]
    return {"kv_cache": cache[..., :512], "rope_cache": cache[..., 512:]}


def _fp8(call: dict, **more) -> dict:
    """The valid call with an FP8 cache, and more of it spoiled."""
    return {"kv_cache": call["kv_cache"].to(torch.float8_e4m3fn), **more}


def _fp8_query(call: dict, **more) -> dict:
    return _fp8(call, **{"q": call["q"].to(torch.float8_e4m3fn), **more})


def _one(call: dict, shape=(), dtype=torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=call["q"].device)


def _other_schedule(call: dict, batch=BATCH, heads=HEADS, s_q=S_Q) -> dict:
    device = call["q"].device
    lens = torch.ones(batch, dtype=torch.int32, device=device)
    return {"schedule": DecodeSchedule(8, heads, max_s_q=4, device=device, num_sms=8).build(lens, s_q)}


# What both calls refuse of their `empty_lse`: the fields of a Refusal.
EMPTY_LSE = (
    ("empty_lse_zero", ValueError, ("empty_lse:", "-inf or inf", "got 0"), lambda c: {"empty_lse": 0.0}),
    ("empty_lse_nan", ValueError, ("empty_lse:", "-inf or inf", "got nan"), lambda c: {"empty_lse": float("nan")}),
    ("empty_lse_text", TypeError, ("empty_lse:", "a number", "got str"), lambda c: {"empty_lse": "inf"}),
    ("empty_lse_none", TypeError, ("empty_lse:", "a number", "got None"), lambda c: {"empty_lse": None}),
)
REFUSALS = (
    Refusal("q_layout", TypeError, ("q:", "a strided tensor", "sparse_coo"), lambda c: {"q": c["q"].to_sparse()}),
    Refusal(
        "cache_layout",
        TypeError,
        ("kv_cache:", "a strided tensor", "sparse_coo"),
        lambda c: {"kv_cache": c["kv_cache"].to_sparse()},
    ),
    Refusal("q_dtype", TypeError, ("q:", "bfloat16 or float16", "float32"), lambda c: {"q": c["q"].float()}),
    Refusal("q_dims", ValueError, ("q:", "[3, 32, 576]"), lambda c: {"q": c["q"].flatten(1, 2)}),
    Refusal("q_width", ValueError, ("q:", "576", "[3, 2, 16, 512]"), lambda c: {"q": c["q"][..., :512]}),
    Refusal("q_width_beside_rope", ValueError, ("q:", "512", "[3, 2, 16, 576]"), lambda c: {**_split(c), "q": c["q"]}),
    Refusal("q_last_stride", ValueError, ("q:", "stride 1", "2]"), lambda c: {"q": strided(c["q"], -1, 2)}),
    Refusal("q_row_step", ValueError, ("q:", "16 bytes", "580"), lambda c: {"q": wide(c["q"], 4)}),
    Refusal("q_first_row", ValueError, ("q:", "16 bytes", "address"), lambda c: {"q": wide(c["q"], 8, first=4)}),
    Refusal(
        "rope_dtype",
        TypeError,
        ("q_rope:", "bfloat16", "float16"),
        lambda c: {**_split(c), "q_rope": _split(c)["q_rope"].half()},
    ),
    Refusal(
        "rope_shape",
        ValueError,
        ("q_rope:", "[3, 2, 16, 64]", "[3, 2, 16, 32]"),
        lambda c: {**_split(c), "q_rope": _split(c)["q_rope"][..., :32]},
    ),
    Refusal(
        "rope_row_step",
        ValueError,
        ("q_rope:", "16 bytes", "68"),
        lambda c: {**_split(c), "q_rope": wide(_split(c)["q_rope"], 4)},
    ),
    Refusal(
        "cache_dtype", TypeError, ("kv_cache:", "bfloat16", "float16"), lambda c: {"kv_cache": c["kv_cache"].half()}
    ),
    Refusal(
        "cache_width",
        ValueError,
        ("kv_cache:", "576", "[7, 64, 512]"),
        lambda c: {"kv_cache": c["kv_cache"][..., :512]},
    ),
    Refusal(
        "cache_heads",
        ValueError,
        ("kv_cache:", "1, 576", "[7, 64, 2, 576]"),
        lambda c: {"kv_cache": c["kv_cache"].new_zeros(PAGES, PAGE_SIZE, 2, 576)},
    ),
    Refusal(
        "page_size_zero",
        ValueError,
        ("kv_cache:", "at least one token", "[7, 0, 576]"),
        lambda c: {"kv_cache": c["kv_cache"][:, :0]},
    ),
    Refusal(
        "cache_width_beside_rope",
        ValueError,
        ("kv_cache:", "512", "[7, 64, 576]"),
        lambda c: {**_apart(c), "kv_cache": c["kv_cache"]},
    ),
    Refusal(
        "rope_cache_dtype",
        TypeError,
        ("rope_cache:", "bfloat16 like kv_cache", "float16"),
        lambda c: {**_apart(c), "rope_cache": _apart(c)["rope_cache"].half()},
    ),
    Refusal(
        "rope_cache_width",
        ValueError,
        ("rope_cache:", "[7, 64, 64]", "[7, 64, 32]"),
        lambda c: {**_apart(c), "rope_cache": _apart(c)["rope_cache"][..., :32]},
    ),
    Refusal(
        "rope_cache_of_other_pages",
        ValueError,
        ("rope_cache:", "[7, 64, 64]", "[7, 32, 64]"),
        lambda c: {**_apart(c), "rope_cache": _apart(c)["rope_cache"][:, :32]},
    ),
    Refusal(
        "rope_cache_row_step",
        ValueError,
        ("rope_cache:", "16 bytes", "68"),
        lambda c: {**_apart(c), "rope_cache": wide(_apart(c)["rope_cache"], 4)},
    ),
    Refusal(
        "rope_cache_rows_in_one_place",
        ValueError,
        ("rope_cache:", "above 0", "0, 1]"),
        lambda c: {**_apart(c), "rope_cache": _apart(c)["rope_cache"][:, :1].expand(-1, PAGE_SIZE, -1)},
    ),
    Refusal(
        "rope_cache_on_meta",
        ValueError,
        ("rope_cache:", "got one on meta"),
        lambda c: {**_apart(c), "rope_cache": _apart(c)["rope_cache"].to("meta")},
    ),
    Refusal(
        "cache_row_step", ValueError, ("kv_cache:", "16 bytes", "580"), lambda c: {"kv_cache": wide(c["kv_cache"], 4)}
    ),
    Refusal(
        "cache_last_stride",
        ValueError,
        ("kv_cache:", "stride 1", "2]"),
        lambda c: {"kv_cache": strided(c["kv_cache"], -1, 2)},
    ),
    Refusal(
        "table_dtype", TypeError, ("block_table:", "int32", "int64"), lambda c: {"block_table": c["block_table"].long()}
    ),
    Refusal(
        "table_batch",
        ValueError,
        ("block_table:", "[3, max_pages]", "[2, 2]"),
        lambda c: {"block_table": c["block_table"][:2]},
    ),
    Refusal(
        "table_stride",
        ValueError,
        ("block_table:", "stride 1", "2]"),
        lambda c: {"block_table": strided(c["block_table"], 1, 2)},
    ),
    Refusal("lens_dtype", TypeError, ("seq_lens:", "int32", "int64"), lambda c: {"seq_lens": c["seq_lens"].long()}),
    Refusal("lens_batch", ValueError, ("seq_lens:", "[3]", "[2]"), lambda c: {"seq_lens": c["seq_lens"][:2]}),
    Refusal(
        "lens_stride",
        ValueError,
        ("seq_lens:", "contiguous", "[2]"),
        lambda c: {"seq_lens": strided(c["seq_lens"], 0, 2)},
    ),
    Refusal("out_dtype", TypeError, ("out:", "bfloat16", "float32"), lambda c: {"out": c["out"].float()}),
    Refusal(
        "out_shape", ValueError, ("out:", "[3, 2, 16, 512]", "[3, 2, 16, 256]"), lambda c: {"out": c["out"][..., :256]}
    ),
    Refusal("out_strides", ValueError, ("out:", "contiguous", "520"), lambda c: {"out": wide(c["out"], 8)}),
    Refusal("lse_dtype", TypeError, ("lse:", "float32", "float64"), lambda c: {"lse": c["lse"].double()}),
    Refusal("lse_shape", ValueError, ("lse:", "[3, 2, 16]", "[3, 16, 2]"), lambda c: {"lse": c["lse"].view(3, 16, 2)}),
    Refusal("lse_strides", ValueError, ("lse:", "contiguous", "17"), lambda c: {"lse": wide(c["lse"], 1)}),
    Refusal("scale_zero", ValueError, ("softmax_scale:", "positive", "got 0"), lambda c: {"softmax_scale": 0.0}),
    Refusal("scale_nan", ValueError, ("softmax_scale:", "finite", "nan"), lambda c: {"softmax_scale": float("nan")}),
    Refusal(
        "schedule_unbuilt",
        TypeError,
        ("schedule:", "DecodeSchedule.build()", "got DecodeSchedule"),
        lambda c: {"schedule": DecodeSchedule(8, HEADS, device=c["q"].device, num_sms=8)},
    ),
    Refusal("schedule_batch", ValueError, ("schedule:", "batch 3", "batch 2"), lambda c: _other_schedule(c, batch=2)),
    Refusal("schedule_heads", ValueError, ("schedule:", "16 heads", "8 heads"), lambda c: _other_schedule(c, heads=8)),
    Refusal("schedule_s_q", ValueError, ("schedule:", "s_q 2", "s_q 1"), lambda c: _other_schedule(c, s_q=1)),
    Refusal(
        "fp8_query_without_fp8_cache",
        TypeError,
        ("q:", "bfloat16 or float16", "float8_e4m3fn with an FP8 cache", "got float8_e4m3fn"),
        lambda c: {"q": c["q"].to(torch.float8_e4m3fn)},
    ),
    Refusal(
        "query_of_bytes",
        TypeError,
        ("q:", "float8_e4m3fn", "got uint8"),
        lambda c: _fp8(c, q=_fp8_query(c)["q"].view(torch.uint8)),
    ),
    Refusal(
        "rope_unlike_fp8_query",
        TypeError,
        ("q_rope:", "float8_e4m3fn", "bfloat16"),
        lambda c: _fp8(c, q=_fp8_query(c)["q"][..., :512], q_rope=c["q"][..., 512:]),
    ),
    Refusal(
        "fp8_rope_beside_other_query",
        TypeError,
        ("q_rope:", "bfloat16", "got float8_e4m3fn"),
        lambda c: _fp8(c, q=c["q"][..., :512], q_rope=_fp8_query(c)["q"][..., 512:]),
    ),
    Refusal(
        "cache_of_bytes",
        TypeError,
        ("kv_cache:", "bfloat16", "float8_e4m3fn", "got uint8"),
        lambda c: {"kv_cache": _fp8(c)["kv_cache"].view(torch.uint8)},
    ),
    Refusal(
        "cache_in_e5m2",
        TypeError,
        ("kv_cache:", "float8_e4m3fn", "got float8_e5m2"),
        lambda c: {"kv_cache": c["kv_cache"].to(torch.float8_e5m2)},
    ),
    Refusal(
        "cache_of_powers_of_two",
        TypeError,
        ("kv_cache:", "float8_e4m3fn", "got float8_e8m0fnu"),
        lambda c: {"kv_cache": c["kv_cache"].to(torch.float8_e8m0fnu)},
    ),
    Refusal(
        "fp8_cache_width",
        ValueError,
        ("kv_cache:", "576", "[7, 64, 512]"),
        lambda c: {"kv_cache": _fp8(c)["kv_cache"][..., :512]},
    ),
    Refusal(
        "fp8_cache_row_step",
        ValueError,
        ("kv_cache:", "16 bytes", "584"),
        lambda c: {"kv_cache": wide(_fp8(c)["kv_cache"], 8)},
    ),
    Refusal(
        "fp8_query_row_step",
        ValueError,
        ("q:", "16 bytes", "584"),
        lambda c: _fp8_query(c, q=wide(_fp8_query(c)["q"], 8)),
    ),
    Refusal(
        "fp8_rope_first_row",
        ValueError,
        ("q_rope:", "16 bytes", "address"),
        lambda c: _fp8(c, q=_fp8_query(c)["q"][..., :512], q_rope=wide(_fp8_query(c)["q"][..., 512:], 16, first=8)),
    ),
    Refusal(
        "kv_scale_of_another_cache",
        ValueError,
        ("kv_scale:", "None", "kv_cache of bfloat16"),
        lambda c: {"kv_scale": _one(c)},
    ),
    Refusal(
        "q_scale_of_another_query",
        ValueError,
        ("q_scale:", "None", "q of bfloat16"),
        lambda c: _fp8(c, q_scale=_one(c)),
    ),
    Refusal(
        "kv_scale_dtype",
        TypeError,
        ("kv_scale:", "float32", "float64"),
        lambda c: _fp8(c, kv_scale=_one(c, dtype=torch.float64)),
    ),
    Refusal(
        "kv_scale_shape",
        ValueError,
        ("kv_scale:", "one element", "[3]"),
        lambda c: _fp8(c, kv_scale=_one(c, [3])),
    ),
    Refusal(
        "kv_scale_dims",
        ValueError,
        ("kv_scale:", "[] or [1]", "[1, 1]"),
        lambda c: _fp8(c, kv_scale=_one(c, [1, 1])),
    ),
    Refusal(
        "kv_scale_device",
        ValueError,
        ("kv_scale:", "a tensor on", "got one on meta"),
        lambda c: _fp8(c, kv_scale=_one(c).to("meta")),
    ),
    Refusal(
        "q_scale_dtype",
        TypeError,
        ("q_scale:", "float32", "bfloat16"),
        lambda c: _fp8_query(c, q_scale=_one(c, dtype=torch.bfloat16)),
    ),
    Refusal(
        "q_scale_shape",
        ValueError,
        ("q_scale:", "one element", "[16]"),
        lambda c: _fp8_query(c, q_scale=_one(c, [16])),
    ),
    Refusal(
        "q_scale_device",
        ValueError,
        ("q_scale:", "a tensor on", "got one on meta"),
        lambda c: _fp8_query(c, q_scale=_one(c).to("meta")),
    ),
    Refusal(
        "fp8_math_without_fp8_cache",
        ValueError,
        ("fp8_math:", "False", "kv_cache of bfloat16", "True"),
        lambda c: {"fp8_math": True},
    ),
    Refusal(
        "out_dtype_unlike_query",
        ValueError,
        ("out_dtype:", "None or bfloat16", "float16"),
        lambda c: {"out": None, "out_dtype": torch.float16},
    ),
    Refusal(
        "out_dtype_text",
        TypeError,
        ("out_dtype:", "torch.dtype", "got str"),
        lambda c: {"out": None, "out_dtype": "bfloat16"},
    ),
    Refusal(
        "out_dtype_unlike_query_beside_fp8_cache",
        ValueError,
        ("out_dtype:", "None or bfloat16", "float16"),
        lambda c: _fp8(c, out=None, out_dtype=torch.float16),
    ),
    Refusal(
        "out_dtype_of_fp8_query",
        ValueError,
        ("out_dtype:", "bfloat16 or float16", "float32"),
        lambda c: _fp8_query(c, out=None, out_dtype=torch.float32),
    ),
    Refusal(
        "out_dtype_unlike_out",
        ValueError,
        ("out_dtype:", "bfloat16 like out", "got float16"),
        lambda c: _fp8_query(c, out_dtype=torch.float16),
    ),
    Refusal(
        "fp8_out",
        TypeError,
        ("out:", "bfloat16 or float16", "float8_e4m3fn"),
        lambda c: _fp8_query(c, out=c["out"].to(torch.float8_e4m3fn)),
    ),
    Refusal(
        "out_unlike_query_beside_fp8_cache",
        TypeError,
        ("out:", "bfloat16", "float16"),
        lambda c: _fp8(c, out=c["out"].half()),
    ),
    # What is no tensor, or has no memory.
    *(
        Refusal(
            f"{name}_on_meta",
            ValueError,
            (f"{name}:", "CUDA device or the CPU", "got one on meta"),
            lambda c, name=name: {name: c[name].to("meta")},
        )
        for name in ("q", "kv_cache", "block_table", "seq_lens", "out", "lse")
    ),
    *(
        Refusal(f"{name}_none", TypeError, (f"{name}:", "wanted", "got None"), lambda c, name=name: {name: None})
        for name in ("q", "kv_cache", "block_table", "seq_lens", "schedule", "softmax_scale", "fp8_math", "early_loads")
    ),
    Refusal("q_list_without_out", TypeError, ("q:", "a tensor", "got list"), lambda c: {"q": [0.0], "out": None}),
    Refusal("table_list", TypeError, ("block_table:", "a tensor", "got list"), lambda c: {"block_table": [[0]]}),
    Refusal("kv_scale_number", TypeError, ("kv_scale:", "a tensor", "got float"), lambda c: _fp8(c, kv_scale=1.0)),
    Refusal("scale_text", TypeError, ("softmax_scale:", "a number", "got str"), lambda c: {"softmax_scale": "1"}),
    *(Refusal(*case) for case in EMPTY_LSE),
    Refusal("scale_infinite", ValueError, ("softmax_scale:", "finite"), lambda c: {"softmax_scale": float("inf")}),
    Refusal("scale_of_float64", ValueError, ("softmax_scale:", "float32", "1e+39"), lambda c: {"softmax_scale": 1e39}),
    Refusal(
        "schedule_unlike",
        TypeError,
        ("schedule:", "DecodeSchedule.build()", "got tuple"),
        lambda c: {"schedule": (1, 2)},
    ),
    # What kernels write or read 16 bytes at a time, and what TMA can reach.
    Refusal("out_address", ValueError, ("out:", "16 bytes", "address"), lambda c: {"out": shifted(c["out"])}),
    Refusal(
        "workspace_address",
        ValueError,
        ("workspace:", "16 bytes", "address"),
        lambda c: {"workspace": _workspace(c)[1:]},
    ),
    Refusal(
        "workspace_dtype",
        TypeError,
        ("workspace:", "float32", "float64"),
        lambda c: {"workspace": _workspace(c, dtype=torch.float64)},
    ),
    Refusal("workspace_size", ValueError, ("workspace:", "[>=", "[99]"), lambda c: {"workspace": _workspace(c, 99)}),
    Refusal(
        "workspace_strides",
        ValueError,
        ("workspace:", "contiguous", "strides [2]"),
        lambda c: {"workspace": _workspace(c)[::2]},
    ),
    Refusal("workspace_dims", ValueError, ("workspace:", "[1, 1000000]"), lambda c: {"workspace": _workspace(c)[None]}),
    Refusal(
        "workspace_on_meta", ValueError, ("workspace:", "meta"), lambda c: {"workspace": _workspace(c, device="meta")}
    ),
    Refusal(
        "workspace_of_neither",
        TypeError,
        ("workspace:", "a tensor", "got None"),
        lambda c: {"schedule": c["schedule"]._replace(workspace=None)},
    ),
    Refusal(
        "no_pages", ValueError, ("kv_cache:", "one page", "[0, 64, 576]"), lambda c: {"kv_cache": c["kv_cache"][:0]}
    ),
    # What is written while others are read.
    Refusal("out_in_q", ValueError, ("out:", "its own", "q's"), lambda c: {"out": inside(c["q"], c["out"])}),
    Refusal("lse_in_q", ValueError, ("lse:", "its own", "q's"), lambda c: {"lse": inside(c["q"], c["lse"])}),
    Refusal(
        "out_in_cache",
        ValueError,
        ("out:", "its own", "kv_cache's"),
        lambda c: {"out": inside(c["kv_cache"], c["out"])},
    ),
    Refusal("lse_in_out", ValueError, ("lse:", "its own", "out's"), lambda c: {"lse": inside(c["out"], c["lse"])}),
    Refusal(
        "lse_in_block_table",
        ValueError,
        ("lse:", "its own", "block_table's"),
        lambda c: {"block_table": (table := c["block_table"].repeat(1, 32)), "lse": inside(table, c["lse"])},
    ),
    Refusal(
        "lse_in_split_offsets",
        ValueError,
        ("lse:", "its own", "split_offsets's"),
        lambda c: {
            "schedule": (schedule := c["schedule"]._replace(split_offsets=c["block_table"].flatten().repeat(16))),
            "lse": inside(schedule.split_offsets, c["lse"]),
        },
    ),
    Refusal(
        "lse_in_workspace",
        ValueError,
        ("workspace:", "its own", "lse's"),
        lambda c: {"workspace": (workspace := _workspace(c)), "lse": inside(workspace, c["lse"])},
    ),
    Refusal(
        "cache_pages_in_one_place",
        ValueError,
        ("kv_cache:", "above 0", "[0, 576, 1]"),
        lambda c: {"kv_cache": c["kv_cache"][:1].expand(PAGES, -1, -1)},
    ),
    Refusal(
        "cache_rows_in_one_place",
        ValueError,
        ("kv_cache:", "above 0", "0, 1]"),
        lambda c: {"kv_cache": c["kv_cache"][:, :1].expand(-1, PAGE_SIZE, -1)},
    ),
)
