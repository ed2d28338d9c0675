"""Runs FlashAttention-3's own test of its KV cache on ETAP, in the sizes of MLA.

    python -m etap_backend.lab.checks.fa3_mla CHECKOUT [--output FILE] [--dtype fp16] [--part 1/4] [--beside MODULE]

CHECKOUT is FlashAttention's repository, of which `hopper/test_flash_attn.py` and the two files beside it that it
imports are used. Its `test_flash_attn_kvcache` runs with its data, reference and limits, for all its lengths, page
sizes, ragged queries, batch indices and masks, each with three numbers of splits and with metadata made beforehand. Its
list of head sizes leaves MLA's out; 64 stands in its place, and 512 for values. What ETAP does not serve is left out:
several KV heads, padding on the left, windows, rotary and keys to append. A wrong case does not end the run.

With `--beside vllm.vllm_flash_attn` that module's FlashAttention-3 runs on the same tensors, and both are held against
float64: the relative RMSE of ours may be 1.05 times as large, over all cases of a kind.

The exit status is 0 when all cases ran and none was wrong. Needs pytest, einops and a Hopper GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from etap_backend._library import library_path
from etap_backend.compat import flash_attn_interface as fa3
from etap_backend.lab.checks.their_tests import KEPT_FAILURES, KEPT_TEXT, begin, part_of
from etap_backend.lab.results import write
from etap_backend.limits import LATENT_DIM, ROPE_DIM
from etap_backend.reference import relative_rmse

PROGRAM = "python -m etap_backend.lab.checks.fa3_mla"
SCRIPT = Path("hopper/test_flash_attn.py")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOT_SERVED = ("APPENDKV", "BACKWARD", "FP8", "LOCAL")
"""What their script leaves out of its lists when told to by a variable of the environment."""
ALLOWED_RATIO = 1.05

console = Console(width=160)


class Beside:
    """Our call as theirs, counted; and beside it another one on the same tensors, if there is one.

    Attributes:
        calls: how many there were.
        squares: by kind the squares of both calls' relative RMSE.
    """

    def __init__(self, other: types.ModuleType | None):
        """`other` has vLLM's `flash_attn_varlen_func`."""
        self._other = other
        self.calls = 0
        self.squares: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, q, k_cache, v_cache, *rest, **named):
        self.calls += 1
        results = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, *rest, **named)
        if self._other and named["num_splits"] == 0 and named["scheduler_metadata"] is None:
            call = varlen_call(q, k_cache, v_cache, named)
            truth = truth_of(call)
            if truth.any():
                theirs = self._other.flash_attn_varlen_func(**call)
                errors = (relative_rmse(out, truth) ** 2 for out in (results[0].flatten(0, -3), theirs))
                kind = "causal" if named["causal"] else "not causal"
                kind += ", ragged" if named["cu_seqlens_q"] is not None else ""
                self.squares.setdefault(kind, []).append(tuple(errors))
        return results

    def summary(self) -> dict[str, dict]:
        """By kind the relative RMSE of both over all its calls."""
        found = {}
        for kind, squares in sorted(self.squares.items()):
            ours, theirs = (math.sqrt(sum(one) / len(squares)) for one in zip(*squares, strict=True))
            found[kind] = {"calls": len(squares), "ours": ours, "theirs": theirs, "ratio": ours / theirs}
        return found


def varlen_call(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, named: dict) -> dict:
    """A call of the test in vLLM's form: equal lengths are ragged ones, a cache without pages has one a request."""
    starts, table, rows = (named[name] for name in ("cu_seqlens_q", "page_table", "cache_batch_idx"))
    longest, qv = named["max_seqlen_q"], named["qv"]
    if starts is None:
        batch, longest = q.shape[:2]
        starts = torch.arange(0, (batch + 1) * longest, longest, dtype=torch.int32, device=q.device)
        q, qv = q.flatten(0, 1), qv.flatten(0, 1)
    if table is None:
        table = torch.arange(len(k_cache), dtype=torch.int32, device=q.device)[:, None]
    return {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "q_v": qv,
        "max_seqlen_q": longest,
        "cu_seqlens_q": starts,
        "max_seqlen_k": table.shape[1] * k_cache.shape[1],
        "seqused_k": named["cache_seqlens"],
        "block_table": table if rows is None else table[rows].contiguous(),
        "softmax_scale": (ROPE_DIM + LATENT_DIM) ** -0.5,
        "causal": named["causal"],
        "fa_version": 3,
    }


def truth_of(call: dict) -> torch.Tensor:
    """float64 [total_q, h, 512] of a call in vLLM's form."""
    queries = torch.cat([call["q_v"], call["q"]], dim=-1).double()
    starts, lengths = call["cu_seqlens_q"].tolist(), call["seqused_k"].tolist()
    outs = []
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        pages = call["block_table"][i].long()
        keys = torch.cat([call[name][pages].flatten(0, 2)[: lengths[i]] for name in ("v", "k")], dim=-1).double()
        scores = torch.einsum("qhd,kd->hqk", queries[first:last], keys) * call["softmax_scale"]
        if call["causal"]:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(len(keys) - last + first)
            scores.masked_fill_(~seen, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0)
        outs.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :LATENT_DIM]))
    return torch.cat(outs)


def load(checkout: Path, call: Callable) -> Any:
    """Their script as a module, with `call` as FlashAttention's, and values of 512 columns only."""
    os.environ |= {f"FLASH_ATTENTION_DISABLE_{what}": "TRUE" for what in NOT_SERVED}
    module = types.ModuleType(fa3.NAME)
    module.flash_attn_with_kvcache, module.get_scheduler_metadata = call, fa3.get_scheduler_metadata
    for name in "flash_attn_func", "flash_attn_varlen_func", "flash_attn_combine":  # of tests that do not run
        setattr(module, name, None)
    sys.path.insert(0, str(checkout / SCRIPT.parent))
    sys.modules[fa3.NAME] = module
    tests = importlib.import_module(SCRIPT.stem)
    tests.itertools = types.SimpleNamespace(product=product_with_our_values)
    # ETAP hands prompts over where it finds a FlashAttention-3; it would take its stand-in for one.
    sys.modules.update(dict.fromkeys(fa3.WITH_KVCACHE.modules))
    return tests


def product_with_our_values(*lists: list) -> list[tuple]:
    """Their `itertools.product`; of the widths of values, which are first in one, MLA's alone."""
    return [one for one in itertools.product(*lists) if LATENT_DIM not in lists[0] or one[0] == LATENT_DIM]


def cases_of(test: Callable, dtype: torch.dtype) -> Iterator[dict]:
    """Arguments of the test as its own lists have them, with MLA's size and what is served."""
    ours = {"d": [ROPE_DIM], "mha_type": ["mqa"], "has_leftpad": [False], "dtype": [dtype]}
    lists = []
    for mark in test.pytestmark:
        names, values = mark.args
        together = names.split(",")
        values = ours.get(names, values)
        lists.append([dict(zip(together, value if len(together) > 1 else [value], strict=True)) for value in values])
    for parts in itertools.product(*lists):
        case = {name: value for part in parts for name, value in part.items()}
        if case["page_size"] is None or case["seqlen_k"] % case["page_size"] == 0:  # as the test itself skips
            yield case


def run(test: Callable, cases: list[dict], call: Beside) -> dict:
    """What came of the cases: by page size and mask how many are right, and the first failures."""
    counts: dict[str, dict[str, int]] = {}
    failures: list[dict[str, str]] = []
    for case in cases:
        kind = f"pages of {case['page_size']}" if case["page_size"] else "no pages"
        kind += ", causal" if case["causal"] else ", not causal"
        count = counts.setdefault(kind, {"wanted": 0, "passed": 0})
        count["wanted"] += 1
        printed, before = io.StringIO(), call.calls
        try:
            with contextlib.redirect_stdout(printed):
                test(**case)
            if call.calls == before:
                raise RuntimeError("the test made no call")
        except (Exception, importlib.import_module("_pytest.outcomes").Skipped) as error:
            said = {"error": f"{type(error).__name__}: {error}", "printed": printed.getvalue()[-KEPT_TEXT:]}
            failures.append({"case": repr(case), **said})
        else:
            count["passed"] += 1
    complete = bool(cases) and not failures
    found = {"cases": counts, "calls": call.calls, "complete": complete}
    return found | {"failed": len(failures), "failures": failures[:KEPT_FAILURES]}


def main(
    checkout: Annotated[Path, typer.Argument(help="FlashAttention's repository.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("fa3-mla.json"),
    dtype: Annotated[Literal["bf16", "fp16"], typer.Option(help="Type of queries and cache.")] = "bf16",
    part: Annotated[str, typer.Option(help="Such as 2/4: the second of every four cases.")] = "1/1",
    beside: Annotated[str | None, typer.Option(help="Module with FlashAttention-3, to compare errors with.")] = None,
) -> None:
    """Run FlashAttention-3's own test of its KV cache on ETAP; exit with 1 unless all ran and none is wrong."""
    part_of([], part)
    what = "FlashAttention-3's test of its KV cache on ETAP, 64 + 512 columns, one KV head"
    document = begin(PROGRAM, what, checkout, SCRIPT, output, library_path(), whose="FlashAttention")
    document |= {"dtype": dtype, "part": part}
    call = Beside(importlib.import_module(beside) if beside else None)
    test = load(checkout, call).test_flash_attn_kvcache
    document |= run(test, part_of(list(cases_of(test, DTYPES[dtype])), part), call)
    passed = document["complete"]
    if beside:
        document |= {"beside": beside, "relative_rmse": call.summary()}
        passed = passed and all(each["ratio"] <= ALLOWED_RATIO for each in document["relative_rmse"].values())
    write(document, output)
    console.print(document["cases"], document.get("relative_rmse", ""), *document["failures"][:3])
    raise typer.Exit(not passed)


if __name__ == "__main__":
    typer.run(main)
