"""Calls that `sparse_mla_decode` must refuse on every device."""

from __future__ import annotations

import torch
from refusals import SAME, SCALES, WORKSPACES, shifted, spoiled, strided, then, to, wide, within

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


def split(call: dict) -> dict:
    return {"q": call["q"][..., :512], "q_rope": call["q"][..., 512:]}


def fp8(call: dict, width: int = 656, dtype=torch.uint8) -> dict:
    """A cache of bytes."""
    return {"kv_cache": torch.zeros(PAGES, PAGE_SIZE, width, dtype=dtype, device=call["q"].device)}


def extra(call: dict) -> dict:
    """A second cache with its list."""
    ints = {"dtype": torch.int32, "device": call["q"].device}
    lists = {"extra_indices": torch.zeros(TOKENS, 30, **ints), "extra_valid_counts": torch.full((TOKENS,), 30, **ints)}
    return {"extra_kv_cache": call["kv_cache"][:, :2].clone(), **lists}


def table(call: dict) -> dict:
    """Positions instead of rows."""
    ints = {"dtype": torch.int32, "device": call["q"].device}
    return {"block_table": torch.zeros(REQUESTS, 4, **ints), "request_ids": torch.zeros(TOKENS, **ints)}


def extra_table(call: dict) -> dict:
    """Positions instead of the second cache's rows."""
    positions = table(call)
    named = {"extra_block_table": positions["block_table"], "request_ids": positions["request_ids"]}
    return extra(call) | named


def v4(call: dict) -> dict:
    """V4's pages, which are padded to a multiple of 576 bytes."""
    device = call["q"].device
    pages = torch.zeros(PAGES, -(-PAGE_SIZE * 584 // 576) * 576, dtype=torch.uint8, device=device)
    cache = pages.as_strided((PAGES, PAGE_SIZE, 584), (pages.stride(0), 584, 1))
    return {"q": call["q"][..., :512].contiguous(), "kv_cache": cache}


def _sliced(call: dict) -> dict:
    """The output as the first heads of a wider buffer, which are the queries, too."""
    buffer = call["out"].new_zeros(TOKENS, 4 * HEADS, 512)[:, :HEADS]
    return {"q": buffer, "out": buffer}


def _without(*names: str):
    return lambda call: dict.fromkeys(names)


def _only(name: str):
    """One of the second cache's arguments without that."""
    return lambda call: {name: extra_table(call)[name]}


REFUSALS = spoiled(sparse_mla_decode, valid_call, [
    ("q", "dtype", TypeError, to(torch.float32)),
    ("q", "half", TypeError, to(torch.float16)),
    ("q", "dims", ValueError, lambda x: x[None]),
    ("q", "dims without out", ValueError, lambda x: x.flatten(0, 1), _without("out")),
    ("q", "flat", ValueError, lambda x: x[0, 0]),
    ("q", "width", ValueError, lambda x: x[..., :512]),
    ("q", "width beside rope", ValueError, lambda x: x.new_zeros(TOKENS, HEADS, 576), split),
    ("q", "wider than rows", ValueError, SAME, lambda c: {"kv_cache": c["kv_cache"][..., :512]}),
    ("q", "wider than v4's rows", ValueError, lambda x: x.new_zeros(TOKENS, HEADS, 576), v4),
    ("q", "last stride", ValueError, strided(-1, 2)),
    ("q", "row step", ValueError, wide(4)),
    ("q", "first row", ValueError, wide(8, first=4)),
    ("q", "list without out", TypeError, [0.0], _without("out")),
    ("q_rope", "dtype", TypeError, to(torch.float16), split),
    ("q_rope", "width", ValueError, lambda x: x[..., :32], split),
    ("q_rope", "tokens", ValueError, lambda x: x[:2], split),
    ("q_rope", "row step", ValueError, wide(4), split),
    ("q_rope", "beside rows without", ValueError, SAME, then(split, lambda c: fp8(c, 528))),
    ("q_rope", "beside v4", ValueError, SAME, lambda c: v4(c) | split(c)),
    ("kv_cache", "dtype", TypeError, to(torch.float16)),
    ("kv_cache", "e5m2", TypeError, to(torch.float8_e5m2)),
    ("kv_cache", "width", ValueError, lambda x: x[..., :320]),
    ("kv_cache", "dims", ValueError, lambda x: x[0]),
    ("kv_cache", "heads", ValueError, lambda x: x[:, :, None].repeat(1, 1, 2, 1)),
    ("kv_cache", "row step", ValueError, wide(4)),
    ("kv_cache", "last stride", ValueError, strided(-1, 2)),
    ("kv_cache", "no pages", ValueError, lambda x: x[:0]),
    ("kv_cache", "empty pages", ValueError, lambda x: x[:, :0]),
    ("kv_cache", "dense fp8 rows", ValueError, SAME, lambda c: fp8(c, 576)),
    ("kv_cache", "other fp8 rows", ValueError, SAME, lambda c: fp8(c, 592, torch.float8_e4m3fn)),
    ("kv_cache", "fp8 row step", ValueError, wide(8), fp8),
    ("kv_cache", "fp8 first row", ValueError, wide(16, first=8), fp8),
    ("kv_cache", "v4 row step", ValueError, wide(56), v4),
    ("kv_cache", "v4 last stride", ValueError, strided(-1, 2), v4),
    ("kv_cache", "v4 page step", ValueError, lambda x: x.as_strided(x.shape, (9352, 584, 1)), v4),
    ("kv_cache", "v4 first page", ValueError, shifted, v4),
    ("kv_cache", "v4 heads", ValueError, lambda x: x[:, :, None].repeat(1, 1, 2, 1), v4),
    ("indices", "dtype", TypeError, to(torch.int64)),
    ("indices", "tokens", ValueError, lambda x: x[:2]),
    ("indices", "dims", ValueError, lambda x: x[None]),
    ("indices", "stride", ValueError, strided(1, 2)),
    ("block_table", "dtype", TypeError, to(torch.int64), table),
    ("block_table", "dims", ValueError, lambda x: x[0], table),
    ("block_table", "stride", ValueError, strided(1, 2), table),
    ("block_table", "missing", ValueError, None, table),
    ("request_ids", "dtype", TypeError, to(torch.int64), table),
    ("request_ids", "tokens", ValueError, lambda x: x[:2], table),
    ("request_ids", "stride", ValueError, strided(0, 2), table),
    ("request_ids", "missing", ValueError, None, table),
    ("request_ids", "missing beside extra", ValueError, None, extra_table),
    ("valid_counts", "dtype", TypeError, to(torch.int64)),
    ("valid_counts", "tokens", ValueError, lambda x: x[:2]),
    ("valid_counts", "stride", ValueError, strided(0, 2)),
    ("sinks", "dtype", TypeError, to(torch.bfloat16)),
    ("sinks", "heads", ValueError, lambda x: x[:8]),
    ("sinks", "stride", ValueError, strided(0, 2)),
    # The second cache and its list.
    ("extra_kv_cache", "dtype", TypeError, to(torch.float16), extra),
    ("extra_kv_cache", "dims", ValueError, lambda x: x[0], extra),
    ("extra_kv_cache", "row step", ValueError, wide(4), extra),
    ("extra_kv_cache", "width", ValueError, lambda x: x[..., :512], extra),
    ("extra_kv_cache", "type", ValueError, SAME, lambda c: extra(c) | {"extra_kv_cache": fp8(c)["kv_cache"]}),
    ("extra_kv_cache", "format", ValueError, SAME,
     lambda c: extra(c) | v4(c) | {"extra_kv_cache": fp8(c, 528)["kv_cache"]}),
    ("extra_kv_cache", "no pages", ValueError, lambda x: x[:0], extra),
    *(("extra_kv_cache", f"missing beside {name}", ValueError, None, _only(name)) for name in EXTRA[1:]),
    ("extra_indices", "missing", ValueError, None, extra),
    ("extra_indices", "dtype", TypeError, to(torch.int64), extra),
    ("extra_indices", "tokens", ValueError, lambda x: x[:2], extra),
    ("extra_indices", "stride", ValueError, strided(1, 2), extra),
    ("extra_valid_counts", "dtype", TypeError, to(torch.int64), extra),
    ("extra_valid_counts", "tokens", ValueError, lambda x: x[:2], extra),
    ("extra_block_table", "dtype", TypeError, to(torch.int64), extra_table),
    ("extra_block_table", "dims", ValueError, lambda x: x[0], extra_table),
    ("out", "dtype", TypeError, to(torch.float32)),
    ("out", "shape", ValueError, lambda x: x[..., :256]),
    ("out", "row step", ValueError, wide(4)),
    ("out", "last stride", ValueError, strided(-1, 2)),
    ("out", "tokens in one place", ValueError, lambda x: x[:1].expand(TOKENS, -1, -1)),
    ("out", "heads in one place", ValueError, lambda x: x[:, :1].expand(-1, HEADS, -1)),
    ("out", "laced", ValueError, lambda x: x.as_strided(x.shape, (1024, 512, 1))),
    ("out", "address", ValueError, shifted),
    ("lse", "dtype", TypeError, to(torch.float64)),
    ("lse", "shape", ValueError, lambda x: x.view(HEADS, TOKENS)),
    ("lse", "strides", ValueError, wide(1)),
    ("num_sms", "zero", ValueError, 0),
    ("num_sms", "float", TypeError, 8.0),
    # What is written while others are read.
    ("out", "in kv_cache", ValueError, SAME, within("kv_cache", "out")),
    *(("lse", f"in {name}", ValueError, SAME, within(name, "lse")) for name in ("q", "out", "indices")),
    ("lse", "in extra_kv_cache", ValueError, SAME, then(extra, within("extra_kv_cache", "lse"))),
    ("lse", "with sinks in it", ValueError, SAME, lambda c: {"sinks": c["lse"][0]}),
    ("out", "is q", ValueError, SAME, then(v4, _sliced)),
    # What is no tensor, or has no memory.
    *((name, "on meta", ValueError, to("meta")) for name in ("q", "kv_cache", "indices", "valid_counts", "sinks")),
    *((name, "on meta", ValueError, to("meta")) for name in ("out", "lse")),
    *((name, "on meta", ValueError, to("meta"), table) for name in ("block_table", "request_ids")),
    ("q_rope", "on meta", ValueError, to("meta"), split),
    *((name, "on meta", ValueError, to("meta"), extra_table) for name in EXTRA),
    *((name, "None", TypeError, None) for name in ("q", "kv_cache", "indices")),
    *((name, "list", TypeError, [0]) for name in ("kv_cache", "indices", "block_table", "request_ids", "valid_counts")),
    *((name, "list", TypeError, [0]) for name in ("sinks", "workspace", "lse", *EXTRA)),
    *SCALES,
    *WORKSPACES,
])  # fmt: skip
