"""`etap plan --shared-prefix`: calls whose requests all begin with the same pages, predicted from others."""

from __future__ import annotations

from etap_backend.limits import TILE_TOKENS
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Gpu
from etap_backend.plan.model import Model
from etap_backend.plan.step import ETAP, FP8_MATH, Plan, Shared, attention, query_rows
from etap_backend.schedule import stack_shape

FROM_L2 = {("bfloat16", ETAP): (0.43, 0.63), ("fp8", ETAP): (0.90, 1.10), ("fp8", FP8_MATH): (0.61, 0.69)}
"""Without the flag: a call's time where L2 finds common pages, over that with pages apart. Read on an H200 at commit
f26c4cd, 16 heads, requests of equal to ragged lengths."""
LEAST_TILES = 8  # in common, of a stack: see csrc/schedule/shared_prefixes.cu
MERGE_US = 5.0  # a launch, and the partials of some 64 requests


def predict(model: Model, gpu: Gpu, on: Deployment, plan: Plan, tokens: int) -> Shared:
    """Two calls of today's kernels and a merge. Raises ValueError, naming shared_prefix, where there is none."""
    if model.sparse or plan.best.call is None or tokens >= on.context:
        wanted = f"a dense model, a GPU on which ETAP was timed and fewer tokens than the context's {on.context}"
        raise ValueError(f"shared_prefix: wanted {wanted}, got {tokens}")
    kernel, rows, sms = FP8_MATH if plan.best is plan.fp8_math else ETAP, query_rows(model, on), int(gpu.sms.value)
    stack, common, apart = stack_shape(rows, sms), -(-tokens // on.dcp), plan.best.call_us
    from_l2 = tuple(factor * apart for factor in FROM_L2[on.cache, kernel]) if gpu.name == "H200" else ()
    tiles = common // TILE_TOKENS
    if not stack.exists(on.local_batch) or tiles < LEAST_TILES or tiles * on.local_batch < stack.least_tiles:
        return Shared(tokens, apart, from_l2, None)

    def part(rows: int, requests: int, tokens: int) -> float:
        call = gpu.calls_of(on.cache, rows).get(kernel)
        return attention(gpu, kernel, on.cache, rows, requests, tokens, call=call).call_us

    once = part(stack.row_tile, -(-on.local_batch // stack.places), common)
    once += part(rows, on.local_batch, -(-(on.context - tokens) // on.dcp))
    return Shared(tokens, apart, from_l2, once + MERGE_US)
