"""Attention's share of a decode step: traces as torch's profiler writes them, made here, and the requests for one."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from pathlib import Path

import pytest

from bench.e2e import profiling
from bench.serving import lifecycle
from bench.serving.client import Failed


def a_kernel(name: str, microseconds: float, begin: float, stream: int = 7, gpu: int = 0) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": microseconds, "pid": gpu, "tid": stream}


def a_mark(name: str, begin: float, number: int, stream: int = 7, gpu: int = 0) -> dict:
    """Of a step on the GPU's side, as torch's profiler writes one for each stream that the step has kernels on."""
    args = {"External id": number}
    place = {"ts": begin, "dur": 100.0, "pid": gpu, "tid": stream}
    return {"ph": "X", "cat": "gpu_user_annotation", "name": name, "args": args} | place


@pytest.mark.parametrize(
    "name",
    [
        "void etap::decode_kernel<etap::Traits<cutlass::bfloat16_t, 16> >(etap::DecodeParams, ...)",
        "etap::(anonymous namespace)::schedule_kernel(etap::ScheduleParams)",
        "void flash::flash_fwd_splitkv_mla_kernel<...>",
        "void smxx::flash_fwd_mla_combine_kernel<...>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<...>",
    ],
)
def test_attentions_share_is_that_of_its_kernels(name, tmp_path):
    """A trace as torch's profiler writes one, made here."""
    events = [
        *(a_kernel(name, 30.0, 0.0), a_kernel(name, 30.0, 30.0), a_kernel("fused_moe_kernel", 120.0, 100.0)),
        a_kernel("concat_and_cache_mla_kernel", 10.0, 240.0),
        a_kernel("void concat_mla_absorb_q_kernel<...>", 10.0, 250.0),
        {"ph": "X", "cat": "cpu_op", "name": "aten::etap::mla_decode", "ts": 0.0, "dur": 900.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    folder = tmp_path / "traces" / "1"
    folder.mkdir(parents=True)
    (folder / "broken.json.gz").write_bytes(b"\x1f\x8b half")
    with gzip.open(folder / "rank0.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = profiling.read(tmp_path / "traces", 1)
    assert found.attention_share == pytest.approx(60 / 200)
    assert found.kernels[1] == {"name": name, "ms": 0.06, "calls": 2, "attention": True}
    assert "30.0%" in profiling.line(found)


def test_time_that_kernels_spend_beside_each_other_is_counted_once():
    """The merging kernel starts early and waits (programmatic dependent launch), the shared expert has a stream of its
    own, and another GPU's kernels are beside nothing of this one."""
    events = [
        a_kernel("etap::combine_kernel", 62.0, 12.0),
        a_kernel("etap::decode_kernel", 60.0, 10.0),
        a_kernel("gemm", 20.0, 70.0),
        a_kernel("shared_expert", 8.0, 75.0, stream=330),
        a_kernel("etap::decode_kernel", 10.0, 10.0, gpu=1),
        a_kernel("copy", 100.0, 0.0) | {"cat": "gpu_memcpy"},
    ]
    found = profiling.share_of(events)
    assert (found.attention_ms, found.kernels_ms, found.steps) == (0.074, 0.09, None)
    assert found.attention_share == pytest.approx(74 / 90)
    times = {kernel["name"]: kernel["ms"] for kernel in found.kernels}
    assert times == {"etap::decode_kernel": 0.07, "etap::combine_kernel": 0.004, "gemm": 0.016, "shared_expert": 0.0}
    # What waits for attention without being it, or is hidden by it, is not attention's.
    early = [a_kernel("gemm", 50.0, 5.0), a_kernel("etap::decode_kernel", 30.0, 0.0)]
    assert profiling.share_of(early).attention_share == pytest.approx(30 / 55)


@pytest.mark.parametrize(
    "prompts, mixed, decode",
    [
        ("execute_context_7(448)_generation_0(0)", "execute_context_5(320)_generation_11(11)",
         "execute_context_0(0)_generation_16(16)"),
        ("execute_452_context_7(sq448sk9sqsq1sqsk1)_generation_0(sq0sk0sqsq0sqsk0)",
         "execute_9_context_10(sq8sk9sqsq1sqsk1)_generation_1(sq1sk9sqsq1sqsk9)",
         "execute_16_context_0(sq0sk0sqsq0sqsk0)_generation_16(sq16sk9sqsq16sqsk9)"),
        ("step[EXTEND bs=7 toks=448]", "step[MIXED bs=16]", "step[DECODE bs=16]"),
    ],
)  # fmt: skip
def test_a_profile_is_of_decode_steps_only(prompts, mixed, decode):
    """Two decode steps, with a side stream and sampling behind the mark's end; the engines' own marks."""
    events = [
        a_kernel("etap::decode_kernel", 500.0, -600.0),  # of a step that began before the profiler
        *(a_mark(prompts, 0.0, 1), a_kernel("prefill", 80.0, 0.0), a_kernel("sampling", 5.0, 190.0)),
        *(a_mark(mixed, 200.0, 2), a_kernel("etap::decode_kernel", 80.0, 200.0)),
        # In the file a kernel may come before the mark that begins with it.
        *(a_kernel("etap::decode_kernel", 10.0, 400.0), a_mark(decode, 400.0, 3), a_mark(decode, 410.0, 3, 330)),
        *(a_kernel("shared_expert", 10.0, 410.0, 330), a_kernel("sampling", 5.0, 590.0)),
        *(a_mark("nccl:all_reduce", 600.0, 4), a_kernel("gemm", 5.0, 601.0)),
        *(a_mark(decode, 700.0, 5), a_kernel("etap::decode_kernel", 20.0, 700.0)),
        *(a_mark(mixed, 800.0, 6, gpu=1), a_kernel("gemm", 30.0, 810.0)),
    ]
    found = profiling.share_of(events)
    assert (found.steps, found.attention_ms, found.kernels_ms) == (2, 0.03, 0.08)
    names = {kernel["name"] for kernel in found.kernels}
    assert names == {"etap::decode_kernel", "shared_expert", "sampling", "gemm"}
    assert "37.5% of 0.04 ms of kernels a step, 2 steps profiled" in profiling.line(found)


@pytest.mark.parametrize(
    "engine, asked", [("vllm", ["/start_profile", "/stop_profile"]), ("sglang", ["/start_profile"])]
)
def test_a_server_is_asked_for_a_profile_while_the_load_runs(engine, asked, tmp_path, monkeypatch):
    """Over real HTTP; what answers is made here and writes a trace where it was told to."""
    (stale := tmp_path / "old.json.gz").write_bytes(b"")
    paths, timers = [], []

    class Timer:
        """One whose time has come when the test says so, and at the end of the block at the latest."""

        def __init__(self, interval, function):
            self.interval, self._function, self._ran = interval, function, False
            timers.append(self)

        def function(self):
            self._ran = True
            self._function()

        def start(self):
            pass

        def cancel(self):
            pass

        def join(self):
            if not self._ran:
                self.function()

    monkeypatch.setattr(profiling.threading, "Timer", Timer)

    class Profiled(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            if self.path == asked[-1]:
                folder = Path(json.loads(body)["output_dir"]) / "1" if body else tmp_path
                folder.mkdir(exist_ok=True)
                with gzip.open(folder / "trace.json.gz", "wt") as file:
                    kernels = [a_kernel("etap::decode_kernel", 1.0, 0.0), a_kernel("other", 3.0, 5.0)]
                    json.dump({"traceEvents": kernels}, file)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Profiled) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with profiling.started_later(engine, f"http://127.0.0.1:{server.server_port}", tmp_path, 12.5):
            assert not paths and not stale.exists()
            (timer,) = timers
            assert timer.interval == 12.5
            timer.function()
            assert paths == ["/start_profile"]
        assert profiling.read(tmp_path, 600).attention_share == 0.25 and paths == asked
        server.shutdown()
    with (
        pytest.raises(Failed),
        profiling.started_later(engine, f"http://127.0.0.1:{lifecycle.free_port()}", tmp_path, 0),
    ):
        pass


def test_a_trace_without_attention_or_none_at_all_is_said(tmp_path):
    found = profiling.share_of([a_kernel("fused_moe_kernel", 5.0, 0.0)])
    assert found.attention_share is None and "no attention kernel" in profiling.line(found)
    prompts = [a_mark("execute_context_1(5)_generation_0(0)", 0.0, 1), a_kernel("etap::decode_kernel", 5.0, 1.0)]
    assert "no decode step" in profiling.line(profiling.share_of(prompts))
    with pytest.raises(ValueError, match="no trace in"):
        profiling.read(tmp_path, 0)
