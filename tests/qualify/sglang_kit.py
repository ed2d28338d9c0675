"""SGLang's own tests of sparse attention, with ETAP as the backend.

    PYTHONPATH=tests python -m qualify.sglang_kit --output kit.json

Needs a Hopper GPU with nvcc, and SGLang with etap-backend beside it; no model and no checkout. The cases, layers,
references and limits are those of `sglang.test.kits.attention_unittest` in the installed package, which SGLang's own
test of this attention is made of; here they run with --attention-backend etap, with 4 query heads as there and with 16:

- plain: prompts, and decode with every layout of lists and pages that the kit has;
- fp8: the same with an FP8 cache;
- graph: decode in a CUDA graph that was captured for other requests, both caches;
- speculative: verification of drafts, the extension of a draft model's cache, both caches, and SGLang's runner of
  EAGLE's drafts in a CUDA graph.

A case is a failure if the kit says so, if it skips it, or if no call of it came to ETAP's kernel.
"""

import dataclasses
import os
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit
from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import (
    run_dsa_sparse_cuda_graph_decode_case,
)
from sglang.test.kits.attention_unittest.runner_modes.speculative_draft_runner import (
    run_dsa_eagle_draft_cuda_graph_runner_case,
)

from etap_backend import _library
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, write
from etap_backend.sglang import sparse
from support.sglang_layer import ONE_RANK

PROGRAM = "PYTHONPATH=tests python -m qualify.sglang_kit"
PACKAGES = ("etap-backend", "sglang", "torch", "apache-tvm-ffi")
BACKEND = "etap"
HEADS = (4, 16)
WIDE_TOP_K = 2048
OURS = {"dsa_prefill_backend": BACKEND, "dsa_decode_backend": BACKEND}
OTHER_LISTS = ({"index_pattern": "strided"}, {"index_pattern": "head_tail"}, {"loc_layout": "interleaved_pages"})

console = Console(width=120)
Run = Callable[[unittest.TestCase], None]


def case(mode: ForwardMode, heads: int, prefixes: tuple[int, ...], new: tuple[int, ...] = ()) -> kit.DSAAttentionCase:
    """One that SGLang's test adds to those of the kit."""
    name = f"{mode.name.lower()} after {prefixes}"
    shape = {"num_heads": heads, "num_kv_heads": 1, "page_size": kit.DSA_PAGE_SIZE}
    return kit.DSAAttentionCase(
        name=name, backend=BACKEND, forward_mode=mode, prefix_lens=prefixes, extend_lens=new, **shape
    )


def eager_cases(heads: int, fp8: bool) -> Iterator[tuple[str, Run]]:
    """Prompts and decode."""
    run = partial(kit.run_dsa_sparse_attention_case, **OURS, fp8_kv_cache=fp8)
    for given in kit.make_dsa_sparse_cases(BACKEND):
        yield given.name, lambda test, given=given: run(test, dataclasses.replace(given, num_heads=heads))
    for options in OTHER_LISTS:
        (what,) = options.values()
        long = case(ForwardMode.DECODE, heads, (2048,))
        yield f"{long.name}, {what}", lambda test, long=long, options=options: run(test, long, **options)
    for wide in (case(ForwardMode.DECODE, heads, (4096,)), case(ForwardMode.EXTEND, heads, (4096,), (1,))):
        yield f"{wide.name}, top-k {WIDE_TOP_K}", lambda test, wide=wide: run(test, wide, index_topk=WIDE_TOP_K)


def graph_cases(heads: int, fp8: bool) -> Iterator[tuple[str, Run]]:
    run = partial(run_dsa_sparse_cuda_graph_decode_case, dsa_decode_backend=BACKEND, fp8_kv_cache=fp8)
    for prefixes in ((127, 128), (128,), (64, 128, 192)):
        one = case(ForwardMode.DECODE, heads, prefixes)
        yield one.name, lambda test, one=one: run(test, one)


def speculative_cases(heads: int, fp8: bool) -> Iterator[tuple[str, Run]]:
    run = partial(kit.run_dsa_sparse_attention_case, **OURS, fp8_kv_cache=fp8)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        for prefixes, new in (((128,), (3,)), ((64, 128, 300), (3, 3, 3))):
            one = case(mode, heads, prefixes, new)
            yield one.name, lambda test, one=one: run(test, one)
    if not fp8:  # the kit's runner of drafts knows no other cache
        one = case(ForwardMode.DECODE, heads, (128, 192))
        yield "EAGLE's drafts in a graph", lambda test: run_dsa_eagle_draft_cuda_graph_runner_case(test, one)


GROUPS = {"eager": eager_cases, "graph": graph_cases, "speculative": speculative_cases}


def all_cases(groups: list[str]) -> Iterator[tuple[dict, Run]]:
    for group in groups:
        for fp8 in (False, True):
            for heads in HEADS:
                for name, run in GROUPS[group](heads, fp8):
                    cache = "fp8_e4m3" if fp8 else "bfloat16"
                    yield {"group": group, "cache": cache, "heads": heads, "case": name}, run


class Counted:
    """Counts what comes to our kernel."""

    def __init__(self) -> None:
        self.calls, self.kernel = 0, sparse.sparse_mla_decode
        sparse.sparse_mla_decode = self

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.kernel(*args, **kwargs)


def outcome(run: Run, counted: Counted) -> dict:
    """What became of a case, in a word and where it failed in a line."""
    before = counted.calls
    try:
        run(unittest.TestCase())
    except unittest.SkipTest as reason:
        return {"outcome": "skipped", "why": str(reason)}
    except Exception as error:
        return {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
    calls = counted.calls - before
    return {"outcome": "passed" if calls else "not ours", "calls": calls}


def main(
    output: Annotated[Path, typer.Option(help="the JSON file to write")],
    groups: Annotated[str, typer.Option(help=f"of {', '.join(GROUPS)}")] = ",".join(GROUPS),
) -> None:
    """Run the kit's cases; exit with 1 where one failed, was skipped or did not run ETAP's kernel."""
    wanted = groups.split(",")
    if wrong := set(wanted) - set(GROUPS):
        raise typer.BadParameter(f"--groups: wanted some of {', '.join(GROUPS)}, got {', '.join(sorted(wrong))}")
    try:
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # Top-k's plan is the indexer's, which the kit leaves out.
    os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"
    load_plugins()
    counted, rows = Counted(), []
    with torch.inference_mode(), get_parallel().override(**ONE_RANK):
        for about, run in all_cases(wanted):
            rows.append(about | outcome(run, counted))
            console.print(" ".join(str(value) for value in rows[-1].values()), markup=False, highlight=False)
    passed = sum(row["outcome"] == "passed" for row in rows)
    about = provenance(PROGRAM, packages=PACKAGES, library=_library.library_path())
    totals = {"cases": len(rows), "passed": passed}
    write(
        {"what": "SGLang's own kit of sparse attention with ETAP"} | about.model_dump() | totals | {"results": rows},
        output,
    )
    console.print(f"{passed} of {len(rows)} cases passed with ETAP's kernel")
    raise typer.Exit(passed < len(rows))


if __name__ == "__main__":
    typer.run(main)
