"""A results file of `etap bench`, as tests of what is made of one want it, and its rows on the CPU."""

import pytest

from bench.kernels import measure, providers, tensors
from bench.kernels.grids import Workload
from bench.kernels.rows import Document, Options


def document_of(grid: str, kind: type[Document] = Document, **differing: object) -> Document:
    """A complete one of this grid, of one H200, with these fields besides or in place of the usual ones."""
    usual = {
        "gpu": "NVIDIA H200",
        "multiprocessors": 132,
        "options": Options(kernels=["etap"], replays=21, validated=True, num_sms=None, time_limit=None),
        "versions": {"vllm": "0.26.0"},
        "commit": "abc1234",
        "command": f"etap bench {grid}",
        "date": "2026-01-01T00:00:00+00:00",
        "complete": True,
    }
    return kind(**(usual | {"grid": grid} | differing))


def put_on_cpu(monkeypatch: pytest.MonkeyPatch, rotated_bytes: float) -> None:
    """Have rows run on the CPU, with as many bytes of copies."""
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "ROTATED_BYTES", rotated_bytes)


def bench_of(workload: Workload, of: providers.Kernels) -> measure.Bench:
    pool = tensors.pool_of((workload,))
    return measure.Bench(workload, pool.inputs(workload, 8), pool, of, measure.Options())
