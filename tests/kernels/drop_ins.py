"""Problems for the tests of other libraries' calls, with a float64 reference and FlashMLA's limits.

Cache rows of no request are NaN, unused block-table entries name no page, queries and cache lie in wider buffers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from etap_backend.schedule import sms_of

both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FP8 = torch.float8_e4m3fn
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 q, fp8": (torch.bfloat16, FP8),
    "fp8": (FP8, FP8),
}
"""Types of queries and cache."""
KV_SCALE, Q_SCALE = 0.0137, 0.021
SOFTMAX_SCALE = 576**-0.5
WILD = 2147480000  # in unused entries of block tables


@dataclass
class Drawn:
    """Requests with queries and cache, and their values in float64."""

    q: torch.Tensor  # [tokens, heads, 576], the query tokens of all requests
    rows: torch.Tensor  # [pages, page_size, kv_heads, 576]
    table: torch.Tensor
    lengths: torch.Tensor
    counts: list[int]  # query tokens of each request
    true_q: torch.Tensor
    keys: list[torch.Tensor]  # [context, kv_heads, 576] of each request

    @property
    def starts(self) -> torch.Tensor:
        """int32 [b + 1], where each request's query tokens begin."""
        return torch.tensor([0, *self.counts], device=self.q.device).cumsum(0).int()

    def truth(self, causal: bool, scale: float = SOFTMAX_SCALE) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out [tokens, heads, 512] and lse [tokens, heads], natural, -inf where a query sees nothing.

        Query token t of n sees the keys up to context - n + t, or all.
        """
        outs, lses = [], []
        for q, keys in zip(self.true_q.split(self.counts), self.keys, strict=True):
            of_heads = keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
            scores = torch.einsum("qhd,khd->qhk", q, of_heads) * scale
            if causal:
                seen = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - len(q))
                scores.masked_fill_(~seen[:, None], -torch.inf)
            outs.append(torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(0), of_heads[..., :512]))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses)


def draw(
    lengths, counts=1, heads=16, *, kv_heads=1, kind="bf16", page_size=64, pages=None, rope_scale=KV_SCALE,
    device="cpu", seed=0,
) -> Drawn:  # fmt: skip
    """Requests of these context lengths with `counts` query tokens, one number for all or one each."""
    torch.manual_seed(seed)
    batch, (dtype, kv_dtype) = len(lengths), KINDS[kind]
    counts = [counts] * batch if isinstance(counts, int) else list(counts)
    most = pages or -(-max(*lengths, 1) // page_size) + 1
    q = (torch.randn(sum(counts) + 1, heads + 1, 576 + 128) / 10).clamp(-1, 1)
    rows = (torch.randn(batch * most + 1, page_size, kv_heads, 576 + 128) / 10).clamp(-1, 1)
    scales = torch.tensor([KV_SCALE] * 512 + [rope_scale] * 64 + [1] * 128) if kv_dtype == FP8 else torch.ones(704)
    q_scale = Q_SCALE if dtype == FP8 else 1
    q, rows = (q / q_scale).to(dtype)[:-1, :heads, :576], (rows / scales).to(kv_dtype)[:-1, ..., :576]
    table = torch.randperm(batch * most, dtype=torch.int32).view(batch, most)
    keys, unused = [], torch.ones(rows.shape[:2], dtype=torch.bool)
    for i, length in enumerate(lengths):
        used = torch.arange(length)
        place = table[i, used // page_size].long(), used % page_size
        keys.append((rows[place].double() * scales[:576].double()).to(device))
        unused[place] = False
        table[i, -(-length // page_size) :] = WILD
    if kv_dtype == FP8:
        rows.view(torch.uint8)[unused] = 0x7F  # NaN
    else:
        rows[unused] = torch.nan
    true_q = (q.double() * q_scale).to(device)
    moved = (one.to(device) for one in (q, rows, table, torch.tensor(lengths, dtype=torch.int32)))
    return Drawn(*moved, counts, true_q, keys)


def check(out: torch.Tensor, lse: torch.Tensor, truth: tuple[torch.Tensor, torch.Tensor], dtype=torch.bfloat16) -> None:
    """FlashMLA's limits for its dense kernel; results as of `Drawn.truth`."""
    true_out, true_lse = truth
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype) and lse.dtype == torch.float32
    assert out.shape == true_out.shape and lse.shape == true_lse.shape
    out, lse = out.double(), lse.double()
    assert torch.equal(lse.isneginf(), true_lse.isneginf()) and not lse.isposinf().any()
    assert out[true_lse.isneginf()].eq(0).all()
    for got, true, most, share in (out, true_out, 8e-4, 2.01 / 128), (lse, true_lse, 1e-6, 8.01 / 65536):
        got, true = (one.masked_fill(one.isneginf(), 0) for one in (got, true))
        error = (got - true).abs()
        wrong = ~((error < most) | (error < share * (true.abs() + 1e-6)))  # NaN is wrong, too
        assert not wrong.any(), (error[wrong].max(), true[wrong][:3])
    assert (out - true_out).square().sum() <= 5e-6 * (out.square() + true_out.square()).sum()  # 1 - cosine


def refused(kind: type[Exception], name: str):
    """Expects a refusal of this type that begins with the argument's name."""
    return pytest.raises(kind, match=f"^{re.escape(name)}(:|[' .])")


def check_traced(call) -> None:
    """torch.compile makes one graph of the call, for its sizes and for any, with the same bits."""
    wanted = call()
    for dynamic in None, True:
        torch.compiler.reset()
        got = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)()
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@contextlib.contextmanager
def traced_gpu() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A GPU for `check_traces`, which need not be there; yields what moves a call's arguments to it.

    Where there is none, its answers are given below the functions that torch.compile must not meet.
    """
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        if not torch.cuda.is_available():
            properties = SimpleNamespace(multi_processor_count=132)
            patch.setattr(torch.cuda, "_cached_device_count", 1)
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            patch.setattr(torch.cuda, "_get_device_properties", lambda index: properties, raising=False)
        yield lambda call: {name: _on_gpu(value) for name, value in call.items()}
    sms_of.cache_clear()


def _on_gpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


def check_traces(call) -> None:
    """torch.compile makes one graph of the call on a `traced_gpu`, for its sizes and for any."""
    for dynamic in None, True:
        torch.compiler.reset()
        torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)()
