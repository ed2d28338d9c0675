"""How `etap bench` times calls, in numbers and in words. Reading it imports no kernel.

docs/measuring.md tells it to readers; below a page's table stands only what a file's method has besides.
"""

from __future__ import annotations

from etap_backend.lab.bench.rows import PAGE_SIZE

ROTATED_BYTES = 400e6  # an H200's L2 holds 60 MB
MOST_COPIES = 512
KV_SCALE = 0.0125  # of FP8 caches: their largest number stands for 5.6 standard deviations
H20_SMS = 78

CLOCK = (
    "CUDA graph replays, time of a graph / its calls, median and interquartile range of the replays, "
    "kernels taking turns; "
)
DENSE = (
    f"{CLOCK}calls rotate over copies of the cache of {ROTATED_BYTES / 1e6:.0f} MB together "
    f"(at most {MOST_COPIES} copies); inputs N(0, 1), page {PAGE_SIZE} where a row names no other, "
    "shuffled block table; scheduling metadata built before"
)
DENSE_FP8 = (
    f"; FP8 caches are e4m3 with the scale {KV_SCALE}, errors are against float64 on what they stand for; FlashMLA is "
    "given queries in e4m3, rounded before, all others bf16 ones"
)
SPARSE = (
    f"{CLOCK}each token has a list of physical rows, drawn evenly from the whole cache, none twice; calls rotate over "
    f"lists without a row in common, of {ROTATED_BYTES / 1e6:.0f} MB of rows together (at most {MOST_COPIES} calls), "
    f"unless one call names every row of the cache; inputs N(0, 1), page {PAGE_SIZE}; scheduling metadata built before"
)
SPARSE_FP8 = (
    "; FP8 rows have 656 bytes, a scale is the largest magnitude of its 128 columns / 448, errors are against float64 "
    "on what they stand for"
)
DROP_INS = (
    "; calls are made as users of each library make them, of its drop-in (compat.*) in the same words with the same "
    "queries; host times are of calls one behind another, with the plan of a step before each where that is said"
)
PROXY = f"; a waiting kernel holds the SMs beyond {H20_SMS}, so that every call runs on the same ones"
# Files from before rows could name a page size say it so.
BEFORE_PAGE_SIZES = f"; inputs N(0, 1), page {PAGE_SIZE}, shuffled block table"
USUAL = f"{DENSE}{DENSE_FP8}; {SPARSE}{SPARSE_FP8}{DROP_INS}{PROXY}{BEFORE_PAGE_SIZES}"


def method_of(*, fp8: bool, sparse: bool, drop_ins: bool = False, h20_proxy: bool, traffic: float = 0.0) -> str:
    of_call, of_fp8 = (SPARSE, SPARSE_FP8) if sparse else (DENSE, DENSE_FP8)
    of_traffic = f"; they read {traffic} TB/s from memory meanwhile" if traffic else ""
    return (
        of_call + (of_fp8 if fp8 else "") + (DROP_INS if drop_ins else "") + (PROXY if h20_proxy else "") + of_traffic
    )
