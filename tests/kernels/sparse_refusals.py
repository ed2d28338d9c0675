"""Every call that `sparse_mla_decode` must refuse, in one table: CPU and GPU must say the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from refusals import EMPTY_LSE, inside, shifted, strided, wide

from etap_backend import sparse_mla_decode

EXTRA = ("extra_kv_cache", "extra_indices", "extra_block_table", "extra_valid_counts")
TOKENS, HEADS, TOP_K, PAGES, PAGE_SIZE, REQUESTS = 3, 16, 100, 7, 16, 2


def valid_call(device: str) -> dict:
    """Arguments of a call that is fine; each refusal spoils one of them."""
    options = {"dtype": torch.bfloat16, "device": device}
    return {
        "q": torch.zeros(TOKENS, HEADS, 576, **options),
        "kv_cache": torch.zeros(PAGES, PAGE_SIZE, 576, **options),
        "indices": torch.zeros(TOKENS, TOP_K, dtype=torch.int32, device=device),
        "softmax_scale": 576**-0.5,
        "q_rope": None,
        "block_table": None,
        "request_ids": None,
        "valid_counts": torch.full((TOKENS,), TOP_K, dtype=torch.int32, device=device),
        **dict.fromkeys(EXTRA),
        "sinks": torch.zeros(HEADS, device=device),
        "num_sms": 8,
        "out": torch.zeros(TOKENS, HEADS, 512, **options),
        "lse": torch.zeros(TOKENS, HEADS, device=device),
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
        sparse_mla_decode(**{**arguments, **self.spoil(arguments)})


def split(call: dict) -> dict:
    q = call["q"]
    return {"q": q[..., :512], "q_rope": q[..., 512:]}


def fp8(call: dict, width: int = 656, dtype=torch.uint8) -> dict:
    """The valid call's cache as one of bytes."""
    return {"kv_cache": torch.zeros(PAGES, PAGE_SIZE, width, dtype=dtype, device=call["q"].device)}


def extra(call: dict, **more) -> dict:
    """A second cache of the valid call with its list, and more of it spoiled."""
    device = call["q"].device
    lists = {"extra_indices": torch.zeros(TOKENS, 30, dtype=torch.int32, device=device)}
    counts = torch.full((TOKENS,), 30, dtype=torch.int32, device=device)
    return {"extra_kv_cache": call["kv_cache"][:, :2].clone(), **lists, "extra_valid_counts": counts, **more}


def extra_table(call: dict, **more) -> dict:
    """Positions instead of the second cache's rows."""
    positions = table(call)
    named = {"extra_block_table": positions["block_table"], "request_ids": positions["request_ids"]}
    return extra(call, **named | more)


def v4(call: dict, page_size: int = PAGE_SIZE, **more) -> dict:
    """The valid call with V4's pages, which are padded to a multiple of 576 bytes."""
    device = call["q"].device
    pages = torch.zeros(PAGES, -(-page_size * 584 // 576) * 576, dtype=torch.uint8, device=device)
    cache = pages.as_strided((PAGES, page_size, 584), (pages.stride(0), 584, 1))
    return {"q": call["q"][..., :512].contiguous(), "kv_cache": cache, **more}


def sliced(call: dict) -> torch.Tensor:
    """The valid call's output as the first heads of a wider buffer."""
    return call["out"].new_zeros(TOKENS, 4 * HEADS, 512)[:, :HEADS]


def table(call: dict, **more) -> dict:
    """Positions instead of rows, and more of it spoiled."""
    ints = {"dtype": torch.int32, "device": call["q"].device}
    return {"block_table": torch.zeros(REQUESTS, 4, **ints), "request_ids": torch.zeros(TOKENS, **ints), **more}


def workspace(call: dict, floats: int = 10**7, **options) -> torch.Tensor:
    return torch.zeros(floats, **{"device": call["q"].device, **options})


def spoiled(name: str, error: type[Exception], change: Callable[[torch.Tensor], torch.Tensor], *words: str, of=dict):
    """A refusal of one tensor of the call that `of` makes of the valid one."""

    def spoil(call: dict) -> dict:
        changed = of(call)
        return {**changed, words[0].rstrip(":"): change({**call, **changed}[words[0].rstrip(":")])}

    return Refusal(name, error, words, spoil)


REFUSALS = (
    spoiled("q_dtype", TypeError, lambda x: x.float(), "q:", "bfloat16", "float32"),
    spoiled("q_half", TypeError, lambda x: x.half(), "q:", "bfloat16", "float16"),
    spoiled("q_dims", ValueError, lambda x: x[None], "q:", "[tokens, heads, 576]", "[1, 3, 16, 576]"),
    spoiled("q_flat", ValueError, lambda x: x[0, 0], "q:", "[576]"),
    spoiled("q_width", ValueError, lambda x: x[..., :512], "q:", "576", "[3, 16, 512]"),
    Refusal("q_width_beside_rope", ValueError, ("q:", "512", "[3, 16, 576]"), lambda c: {**split(c), "q": c["q"]}),
    spoiled("q_last_stride", ValueError, lambda x: strided(x, -1, 2), "q:", "stride 1", "2]"),
    spoiled("q_row_step", ValueError, lambda x: wide(x, 4), "q:", "16 bytes", "580"),
    spoiled("q_first_row", ValueError, lambda x: wide(x, 8, first=4), "q:", "16 bytes", "address"),
    spoiled("rope_dtype", TypeError, lambda x: x.half(), "q_rope:", "bfloat16", "float16", of=split),
    spoiled("rope_width", ValueError, lambda x: x[..., :32], "q_rope:", "[3, 16, 64]", "[3, 16, 32]", of=split),
    spoiled("rope_tokens", ValueError, lambda x: x[:2], "q_rope:", "[3, 16, 64]", "[2, 16, 64]", of=split),
    spoiled("rope_row_step", ValueError, lambda x: wide(x, 4), "q_rope:", "16 bytes", "68", of=split),
    spoiled("cache_dtype", TypeError, lambda x: x.half(), "kv_cache:", "bfloat16", "float16"),
    spoiled("cache_e5m2", TypeError, lambda x: x.to(torch.float8_e5m2), "kv_cache:", "float8_e4m3fn", "float8_e5m2"),
    spoiled("cache_width", ValueError, lambda x: x[..., :320], "kv_cache:", "576 or 512", "[7, 16, 320]"),
    Refusal(
        "q_wider_than_rows",
        ValueError,
        ("q:", "[tokens, heads, 512]", "[3, 16, 576]"),
        lambda c: {"kv_cache": c["kv_cache"][..., :512]},
    ),
    Refusal("q_rope_beside_rows_without", ValueError, ("q_rope:", "None"), lambda c: {**split(c), **fp8(c, 528)}),
    spoiled("cache_dims", ValueError, lambda x: x[0], "kv_cache:", "page_size", "[16, 576]"),
    spoiled("cache_heads", ValueError, lambda x: x[:, :, None].repeat(1, 1, 2, 1), "kv_cache:", "[7, 16, 2, 576]"),
    spoiled("cache_row_step", ValueError, lambda x: wide(x, 4), "kv_cache:", "16 bytes", "580"),
    spoiled("cache_last_stride", ValueError, lambda x: strided(x, -1, 2), "kv_cache:", "stride 1", "2]"),
    Refusal(
        "cache_without_pages",
        ValueError,
        ("kv_cache's pages:", "at least 1", "got 0"),
        lambda c: {"kv_cache": c["kv_cache"][:0]},
    ),
    Refusal(
        "cache_of_empty_pages",
        ValueError,
        ("kv_cache's page_size:", "at least 1", "got 0"),
        lambda c: {"kv_cache": c["kv_cache"][:, :0]},
    ),
    Refusal("fp8_dense_rows", ValueError, ("kv_cache:", "656", "[7, 16, 576]"), lambda c: fp8(c, 576)),
    Refusal(
        "fp8_other_rows", ValueError, ("kv_cache:", "656", "[7, 16, 592]"), lambda c: fp8(c, 592, torch.float8_e4m3fn)
    ),
    spoiled("fp8_row_step", ValueError, lambda x: wide(x, 8), "kv_cache:", "16 bytes", "664", of=fp8),
    spoiled("fp8_first_row", ValueError, lambda x: wide(x, 16, first=8), "kv_cache:", "16 bytes", "address", of=fp8),
    spoiled("indices_dtype", TypeError, lambda x: x.long(), "indices:", "int32", "int64"),
    spoiled("indices_tokens", ValueError, lambda x: x[:2], "indices:", "[3, top_k]", "[2, 100]"),
    spoiled("indices_dims", ValueError, lambda x: x[None], "indices:", "[3, top_k]", "[1, 3, 100]"),
    spoiled("indices_stride", ValueError, lambda x: strided(x, 1, 2), "indices:", "stride 1", "2]"),
    spoiled("table_dtype", TypeError, lambda x: x.long(), "block_table:", "int32", "int64", of=table),
    spoiled("table_dims", ValueError, lambda x: x[0], "block_table:", "[requests, max_pages]", "[4]", of=table),
    spoiled("table_stride", ValueError, lambda x: strided(x, 1, 2), "block_table:", "stride 1", "2]", of=table),
    spoiled("requests_dtype", TypeError, lambda x: x.long(), "request_ids:", "int32", "int64", of=table),
    spoiled("requests_tokens", ValueError, lambda x: x[:2], "request_ids:", "[3]", "[2]", of=table),
    spoiled("requests_stride", ValueError, lambda x: strided(x, 0, 2), "request_ids:", "stride 1", "[2]", of=table),
    Refusal("table_alone", ValueError, ("request_ids:", "block_table", "None"), lambda c: table(c, request_ids=None)),
    Refusal(
        "requests_alone", ValueError, ("block_table:", "request_ids", "None"), lambda c: table(c, block_table=None)
    ),
    # V4's pages.
    spoiled("v4_row_step", ValueError, lambda x: wide(x, 56), "kv_cache:", "584 elements apart", "640", of=v4),
    spoiled("v4_last_stride", ValueError, lambda x: strided(x, -1, 2), "kv_cache:", "stride 1", "2]", of=v4),
    spoiled(
        "v4_page_step",
        ValueError,
        lambda x: x.as_strided(x.shape, (9352, 584, 1)),
        "kv_cache:",
        "16 bytes",
        "[9352",
        of=v4,
    ),
    spoiled("v4_first_page", ValueError, shifted, "kv_cache:", "16 bytes", "address", of=v4),
    spoiled("v4_heads", ValueError, lambda x: x[:, :, None].repeat(1, 1, 2, 1), "kv_cache:", "16, 2, 584]", of=v4),
    Refusal("v4_wide_queries", ValueError, ("q:", "heads, 512]", "[3, 16, 576]"), lambda c: v4(c, q=c["q"])),
    Refusal(
        "v4_q_rope", ValueError, ("q_rope:", "None"), lambda c: v4(c, q_rope=c["q"][..., 512:], q=c["q"][..., :512])
    ),
    # The second cache and its list.
    spoiled("extra_dtype", TypeError, lambda x: x.half(), "extra_kv_cache:", "bfloat16", "float16", of=extra),
    spoiled("extra_dims", ValueError, lambda x: x[0], "extra_kv_cache:", "page_size", "[2, 576]", of=extra),
    spoiled("extra_row_step", ValueError, lambda x: wide(x, 4), "extra_kv_cache:", "16 bytes", "580", of=extra),
    spoiled(
        "extra_width", ValueError, lambda x: x[..., :512], "extra_kv_cache:", "kv_cache's, 576 of", "512 of", of=extra
    ),
    Refusal(
        "extra_type",
        ValueError,
        ("extra_kv_cache:", "576 of bfloat16", "656 of uint8"),
        lambda c: extra(c, extra_kv_cache=fp8(c)["kv_cache"]),
    ),
    Refusal(
        "extra_of_other_format",
        ValueError,
        ("extra_kv_cache:", "584 of uint8", "528 of uint8"),
        lambda c: extra(c, **v4(c), extra_kv_cache=fp8(c, 528)["kv_cache"]),
    ),
    Refusal(
        "extra_without_pages",
        ValueError,
        ("extra_kv_cache's pages:", "at least 1", "got 0"),
        lambda c: extra(c, extra_kv_cache=c["kv_cache"][:0]),
    ),
    Refusal(
        "extra_without_list",
        ValueError,
        ("extra_indices:", "beside extra_kv_cache", "None"),
        lambda c: extra(c, extra_indices=None),
    ),
    *(
        Refusal(
            f"{name}_alone",
            ValueError,
            ("extra_kv_cache:", f"beside {name}", "None"),
            lambda c, name=name: {name: extra_table(c)[name]},
        )
        for name in ("extra_indices", "extra_block_table", "extra_valid_counts")
    ),
    spoiled("extra_indices_dtype", TypeError, lambda x: x.long(), "extra_indices:", "int32", "int64", of=extra),
    spoiled("extra_indices_tokens", ValueError, lambda x: x[:2], "extra_indices:", "[3, top_k]", "[2, 30]", of=extra),
    spoiled("extra_indices_stride", ValueError, lambda x: strided(x, 1, 2), "extra_indices:", "stride 1", of=extra),
    spoiled("extra_counts_dtype", TypeError, lambda x: x.long(), "extra_valid_counts:", "int32", "int64", of=extra),
    spoiled("extra_counts_tokens", ValueError, lambda x: x[:2], "extra_valid_counts:", "[3]", "[2]", of=extra),
    spoiled("extra_table_dtype", TypeError, lambda x: x.long(), "extra_block_table:", "int32", of=extra_table),
    spoiled("extra_table_dims", ValueError, lambda x: x[0], "extra_block_table:", "[requests, max", of=extra_table),
    Refusal(
        "extra_table_without_requests",
        ValueError,
        ("request_ids:", "block_table", "None"),
        lambda c: extra_table(c, request_ids=None),
    ),
    spoiled("counts_dtype", TypeError, lambda x: x.long(), "valid_counts:", "int32", "int64"),
    spoiled("counts_tokens", ValueError, lambda x: x[:2], "valid_counts:", "[3]", "[2]"),
    spoiled("counts_stride", ValueError, lambda x: strided(x, 0, 2), "valid_counts:", "stride 1", "[2]"),
    spoiled("sinks_dtype", TypeError, lambda x: x.bfloat16(), "sinks:", "float32", "bfloat16"),
    spoiled("sinks_heads", ValueError, lambda x: x[:8], "sinks:", "[>=16]", "[8]"),
    spoiled("sinks_stride", ValueError, lambda x: strided(x, 0, 2), "sinks:", "stride 1", "[2]"),
    spoiled("out_dtype", TypeError, lambda x: x.float(), "out:", "bfloat16", "float32"),
    spoiled("out_shape", ValueError, lambda x: x[..., :256], "out:", "[3, 16, 512]", "[3, 16, 256]"),
    spoiled("out_row_step", ValueError, lambda x: wide(x, 4), "out:", "16 bytes", "516"),
    spoiled("out_last_stride", ValueError, lambda x: strided(x, -1, 2), "out:", "stride 1", "2]"),
    spoiled("out_shared", ValueError, lambda x: x[:1].expand(TOKENS, -1, -1), "out:", "not overlap", "[0, 512, 1]"),
    spoiled("out_heads_shared", ValueError, lambda x: x[:, :1].expand(-1, HEADS, -1), "out:", "not overlap", "0, 1]"),
    spoiled("out_laced", ValueError, lambda x: x.as_strided(x.shape, (1024, 512, 1)), "out:", "not overlap", "[1024"),
    spoiled("out_address", ValueError, shifted, "out:", "16 bytes", "address"),
    spoiled("lse_dtype", TypeError, lambda x: x.double(), "lse:", "float32", "float64"),
    spoiled("lse_shape", ValueError, lambda x: x.view(HEADS, TOKENS), "lse:", "[3, 16]", "[16, 3]"),
    spoiled("lse_strides", ValueError, lambda x: wide(x, 1), "lse:", "contiguous", "17"),
    *(
        Refusal(
            f"scale_{value}",
            ValueError,
            ("softmax_scale:", "positive finite", f"got {value:g}"),
            lambda c, value=value: {"softmax_scale": value},
        )
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e39)
    ),
    Refusal("scale_text", TypeError, ("softmax_scale:", "a number", "got str"), lambda c: {"softmax_scale": "1"}),
    *(Refusal(*case) for case in EMPTY_LSE),
    Refusal("sms_zero", ValueError, ("num_sms:", "at least 1", "got 0"), lambda c: {"num_sms": 0}),
    Refusal("sms_float", TypeError, ("num_sms:", "an int", "got 8.0"), lambda c: {"num_sms": 8.0}),
    Refusal("workspace_size", ValueError, ("workspace:", "[>=", "[99]"), lambda c: {"workspace": workspace(c, 99)}),
    Refusal(
        "workspace_dtype",
        TypeError,
        ("workspace:", "float32", "float64"),
        lambda c: {"workspace": workspace(c, dtype=torch.float64)},
    ),
    Refusal(
        "workspace_strides",
        ValueError,
        ("workspace:", "contiguous", "strides [2]"),
        lambda c: {"workspace": workspace(c)[::2]},
    ),
    Refusal("workspace_dims", ValueError, ("workspace:", "[1, 10000000]"), lambda c: {"workspace": workspace(c)[None]}),
    Refusal(
        "workspace_address",
        ValueError,
        ("workspace:", "16 bytes", "address"),
        lambda c: {"workspace": workspace(c)[1:]},
    ),
    Refusal(
        "workspace_on_meta", ValueError, ("workspace:", "meta"), lambda c: {"workspace": workspace(c, device="meta")}
    ),
    # What is written while others are read.
    *(
        Refusal(
            f"{name}_in_{other}",
            ValueError,
            (f"{name}:", "its own", f"{other}'s"),
            lambda c, name=name, other=other: {name: inside(c[other], c[name])},
        )
        for name, other in (("out", "kv_cache"), ("lse", "q"), ("lse", "out"), ("lse", "indices"))
    ),
    Refusal(
        "out_is_q", ValueError, ("out:", "its own", "q's"), lambda c: v4(c) | dict.fromkeys(("q", "out"), sliced(c))
    ),
    Refusal(
        "lse_in_extra_kv_cache",
        ValueError,
        ("lse:", "its own", "extra_kv_cache's"),
        lambda c: (lambda second: second | {"lse": inside(second["extra_kv_cache"], c["lse"])})(extra(c)),
    ),
    Refusal(
        "sinks_in_lse",
        ValueError,
        ("lse:", "its own", "sinks's"),
        lambda c: {"sinks": c["lse"][0]},
    ),
    # What is no tensor, or has no memory.
    *(
        spoiled(f"{name}_on_meta", ValueError, lambda x: x.to("meta"), f"{name}:", "the CPU", "meta", of=of)
        for name, of in (
            *((name, dict) for name in ("q", "kv_cache", "indices", "valid_counts", "sinks", "out", "lse")),
            *((name, table) for name in ("block_table", "request_ids")),
            ("q_rope", split),
            *((name, extra_table) for name in EXTRA),
        )
    ),
    *(
        Refusal(f"{name}_none", TypeError, (f"{name}:", "wanted", "got None"), lambda c, name=name: {name: None})
        for name in ("q", "kv_cache", "indices", "softmax_scale")
    ),
    *(
        Refusal(f"{name}_list", TypeError, (f"{name}:", "a tensor", "got list"), lambda c, name=name: {name: [0]})
        for name in (
            "kv_cache",
            "indices",
            "block_table",
            "request_ids",
            "valid_counts",
            "sinks",
            "workspace",
            "lse",
            *EXTRA,
        )
    ),
    Refusal("q_list_without_out", TypeError, ("q:", "a tensor", "got list"), lambda c: {"q": [0.0], "out": None}),
    Refusal(
        "q_dims_without_out",
        ValueError,
        ("q:", "[tokens, heads, 576 or 512]", "[48, 576]"),
        lambda c: {"q": c["q"].flatten(0, 1), "out": None},
    ),
)
