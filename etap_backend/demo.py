"""`etap demo`: one ragged batch through schedule, kernel and combine, compared with float64."""

import argparse
import statistics
import sys
from dataclasses import dataclass

import torch

from etap_backend import doctor
from etap_backend.dense import mla_decode
from etap_backend.limits import HEAD_DIM
from etap_backend.reference import mla_decode_reference, relative_rmse
from etap_backend.schedule import DecodeSchedule

ON_THE_CPU = (
    "The CPU follows the same schedule in plain torch: this shows that the installation is complete and its results "
    "are right, and says nothing about speed."
)


@dataclass(frozen=True)
class Batch:
    """A ragged batch in a paged cache; unused rows hold NaN and unused table entries wild page numbers."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @staticmethod
    def random(lengths: list[int], heads: int, device: str, seed: int, page_size: int = 64) -> "Batch":
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages), generator=generator).to(torch.int32)
        table = torch.full((len(lengths), max(pages)), torch.iinfo(torch.int32).max, dtype=torch.int32)
        cache = torch.full((sum(pages), page_size, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
        for request, used in enumerate(order.split(pages)):
            table[request, : len(used)] = used
            tokens = torch.randn(lengths[request], HEAD_DIM, generator=generator).bfloat16()
            for page, rows in zip(used.tolist(), tokens.split(page_size), strict=True):
                cache[page, : len(rows)] = rows
        q = torch.randn(len(lengths), 1, heads, HEAD_DIM, generator=generator).bfloat16()
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        return Batch(q.to(device), cache.to(device), table.to(device), seq_lens.to(device))


def _microseconds(call) -> float:
    """Median time of one call between two events on the GPU, after five calls to warm up."""
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def _choose_device(wanted: str) -> tuple[str, str]:
    """The device, and a description of what runs there. Raises ValueError when the wanted one is unusable."""
    reason = "the CPU was asked for"
    if wanted != "cpu":
        finding = doctor.check_gpu()
        if finding.verdict is doctor.Verdict.OK:
            return "cuda", f"the compiled sm_90a kernels on {torch.cuda.get_device_name()}"
        if wanted == "cuda":
            raise ValueError(f"--device cuda: {finding.found}; {finding.remedy}")
        reason = finding.found
    return "cpu", f"the reference executor in plain torch on the CPU, no GPU kernel ({reason})"


def run(options: argparse.Namespace) -> int:
    """Run the demo and print what it found.

    Args:
        options: device ("auto", "cuda" or "cpu"), heads (query heads) and seed.

    Gives 0 when the result is right, 1 when it is wrong or the compiled library is missing, 2 without the wanted GPU.
    """
    heads, seed = options.heads, options.seed
    try:
        where, sentence = _choose_device(options.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    library = doctor.check_library()
    if library.verdict is not doctor.Verdict.OK:
        print(f"No demo without the compiled library, which also plans for the CPU. {library.found}", file=sys.stderr)
        return 1
    longest, requests = (8192, 16) if where == "cuda" else (1024, 6)
    lengths = torch.randint(1, longest, (requests,), generator=torch.Generator().manual_seed(seed)).tolist()
    scale = HEAD_DIM**-0.5
    batch = Batch.random(lengths, heads, where, seed)
    schedule = DecodeSchedule(requests, heads, device=where).build(batch.seq_lens)
    inputs = (batch.q, batch.kv_cache, batch.block_table, batch.seq_lens)
    out, lse = mla_decode(*inputs, schedule, softmax_scale=scale)
    true_out, true_lse = mla_decode_reference(*inputs, scale)
    plain_out, _ = mla_decode_reference(*inputs, scale, dtype=torch.bfloat16)
    error, plain_error = relative_rmse(out, true_out), relative_rmse(plain_out, true_out)
    splits = schedule.split_offsets.diff().clamp(min=1).tolist()

    print(f"Ran {sentence}.")
    print(f"{requests} requests of {min(lengths)} to {max(lengths)} tokens, {heads} heads, bfloat16")
    print(f"schedule     {sum(splits)} splits for {schedule.partitions} partitions, {max(splits)} at most per request")
    if where == "cuda":
        us = _microseconds(lambda: mla_decode(*inputs, schedule, softmax_scale=scale, out=out, lse=lse))
        print(f"time         {us:,.0f} us per call")
    print(f"error        {error:.2e} relative RMSE against float64; plain bfloat16 torch has {plain_error:.2e}")
    print(f"log-sum-exp  {(lse.double() - true_lse).abs().max().item():.1e} at most")
    if not error <= 2 * plain_error:
        print("The error is more than twice that of plain bfloat16 torch: this result is wrong.", file=sys.stderr)
        return 1
    if where == "cpu":
        print(ON_THE_CPU)
    return 0
