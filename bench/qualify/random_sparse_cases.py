"""Random cases of the sparse call, for `random_cases --sparse`.

They have up to 4096 tokens, 1 to 128 heads, one list or two of up to 8192 entries with every kind of hole, rows and
positions, valid counts, sinks, bfloat16 rows, V3.2's and V4's FP8 rows with every kind of scales, with rope and
without, pages of any size, sliced outputs and any number of CTAs. Every row that no list names is poison. A case runs
three times with equal bits. On a GPU it is also recorded in a CUDA graph, which is replayed with queries, rows and
lists of another case of the same shapes, and again with its own.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from support import sparse_cases as options
from support.cases import LAWS
from support.sparse_cases import RecordedCall, SparseCase, SparseProblem, SparseRunner, build
from support.sparse_compare import problems_with, truth

MAX_HEADS = 128
MAX_APART = 4096  # pages of V4's, a MiB from each other, so that a GPU has room for several copies
MAX_ROWS = 2**16  # tokens * heads, so that a GPU has room for the float64 results of several processes
USUAL_LISTS = (1, 63, 64, 65, 100, 128, 512, 1024, 2048, 2176)


def random_sizes(draw: random.Random, device: str) -> dict[str, int]:
    """Tokens and the length of their lists: mostly few tokens, sometimes a prompt's, sometimes very long lists."""
    if device == "cpu":
        return {"tokens": draw.randint(0, 4), "top_k": draw.choice([1, 63, 64, 65, 100, draw.randint(1, 300)])}
    if (shape := draw.random()) < 0.02:
        return {"tokens": draw.randint(1000, 4096), "top_k": draw.randint(1, 300)}
    if shape < 0.1:
        return {"tokens": draw.randint(130, 300), "top_k": draw.choice(USUAL_LISTS)}
    if shape < 0.15:
        return {"tokens": draw.randint(1, 8), "top_k": draw.randint(2048, 8192)}
    top_k = draw.choice([*USUAL_LISTS, *[draw.randint(1, 2048)] * 5])
    return {"tokens": draw.choice([1, 2, draw.randint(0, 16), draw.randint(0, 132)]), "top_k": top_k}


def random_case(seed: int, index: int, device: str) -> SparseCase:
    draw = random.Random(f"sparse {seed} {index}")
    sizes = random_sizes(draw, device)
    heads = draw.choice([8, 16, 32, 64, 128, *[draw.randint(1, MAX_HEADS)] * 5])
    extra = draw.choice([None, draw.choice([0, 2, 64, 128, 512, draw.randint(1, min(1024, 8 * sizes["top_k"]))])])
    case = SparseCase(
        **sizes,
        heads=min(heads, MAX_ROWS // max(1, sizes["tokens"])),
        cache=draw.choice(["bf16", *options.CACHES]),
        page_size=draw.choice([64, 64, 1, 2, 256, draw.randint(1, 300)]),
        law=draw.choice(["normal", *LAWS]),
        scales=draw.choice(["fitted", *options.SCALE_LAWS]),
        holes=draw.choice(options.HOLES),
        counts=draw.choice(options.COUNTS),
        sinks=draw.choice(options.SINKS),
        repeats=draw.random() < 0.15,
        requests=draw.choice([0, 0, 1, draw.randint(2, 9)]),
        q_layout=draw.choice(options.Q_LAYOUTS),
        cache_layout=draw.choice(options.CACHE_LAYOUTS),
        pool_pages=draw.choice([0, 0, draw.randint(1, 1000 if device == "cuda" else 20)]),
        num_sms=draw.choice([None, None, None, 132, 78, draw.randint(1, 132)]),
        seed=1_000_000 * seed + index,
        rope=draw.random() < 0.75,
        extra=extra,
        extra_page_size=draw.choice([64, 2, 1, draw.randint(1, 300)]),
        extra_requests=draw.choice([0, 0, 1, draw.randint(2, 9)]),
        out_layout=draw.choice(options.OUT_LAYOUTS),
    )
    pages = max(one.pages for one in case.of_each_list())
    apart = case.v4 and case.cache_layout == "rows apart" and pages > MAX_APART
    return replace(case, cache_layout="dense") if apart else case


def run_case(case: SparseCase, device: str) -> list[str]:
    """The call's faults on this case."""
    problem = build(case, device)
    runner = SparseRunner(problem)
    first = [result.clone() for result in runner.run()]
    found = problems_with(*first, truth(problem)) + runner.differences(first, (torch.inf, torch.nan))
    if device == "cuda" and case.tokens:
        found += replayed(problem, first)
    return found


def replayed(problem: SparseProblem, first: list[torch.Tensor]) -> list[str]:
    """Faults of the recorded call when it is replayed with another problem, and with its own again."""
    other = build(replace(problem.case, seed=problem.case.seed + 500_000), "cuda")
    recorded = RecordedCall(problem)
    found = [f"replayed with other lists: {line}" for line in problems_with(*recorded.replay(other), truth(other))]
    for name, result, before in zip(("out", "lse"), recorded.replay(problem), first, strict=True):
        if not torch.equal(result.view(torch.uint8), before.view(torch.uint8)):
            found.append(f"{name}: the replayed graph and the call differ in bits")
    return found
