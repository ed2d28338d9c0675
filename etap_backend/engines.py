"""What `etap e2e` knows of the two engines: how each is started and loaded, and what its answers mean."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

SERVED_NAME = "e2e"
SEED = 0


@dataclass(frozen=True)
class Serving:
    """What a server is started for, in no engine's words.

    Attributes:
        model: folder or name of the model.
        dummy: its weights are made up by the engine.
        tp, pp, dp: tensor, pipeline and data parallelism.
        max_context: longest request in tokens, output included.
        batches: numbers of concurrent requests, for which CUDA graphs are captured.
        draft_tokens: tokens that multi-token prediction drafts a step, 0 without.
        acceptance: draft tokens that are taken as accepted a step, plus one; None to let the weights decide.
        fp8_cache: the KV cache is in e4m3; else in the model's type.
    """

    model: str
    dummy: bool
    tp: int
    pp: int
    dp: int
    max_context: int
    batches: tuple[int, ...]
    draft_tokens: int = 0
    acceptance: float | None = None
    fp8_cache: bool = False


@dataclass(frozen=True)
class Load:
    """One run of the load generator: `prompts` random prompts of `input` tokens, `concurrency` at a time.

    The same seed, input and prompts give the same prompts.
    """

    input: int
    output: int
    concurrency: int
    prompts: int
    seed: int = SEED


class Engine:
    """One serving engine."""

    name: str
    package: str
    ours: str
    load_module: str
    kv_tokens: str
    full_graphs: str | None = None
    """What the log has where decode runs in full CUDA graphs; None where an engine does not say."""
    cached: tuple[str, str]

    def server(self, python: str, serving: Serving, backend: str, port: int, flags: list[str]) -> list[str]:
        raise NotImplementedError

    def environment(self, serving: Serving) -> dict[str, str]:
        """Variables that this engine needs for what it is started for."""
        return {}

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        raise NotImplementedError

    def in_use(self, backend: str, log: str) -> bool:
        """Whether the server's log says that this attention backend runs."""
        raise NotImplementedError

    def cache_tokens(self, log: str) -> int | None:
        """Tokens that the KV cache holds, as the server's log has it."""
        found = re.search(self.kv_tokens, log)
        return int(found[1].replace(",", "")) if found else None

    def in_full_graphs(self, log: str) -> bool | None:
        return None if self.full_graphs is None else re.search(self.full_graphs, log) is not None

    def cached_and_asked(self, metrics: str) -> tuple[float, float] | None:
        """Prompt tokens found in the prefix cache so far and all prompt tokens, from the text of /metrics."""
        sums = []
        for name in self.cached:
            samples = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
            if not samples:
                return None
            sums.append(sum(map(float, samples)))
        return sums[0], sums[1]


class Vllm(Engine):
    name = package = "vllm"
    ours = "ETAP"
    load_module = "vllm.entrypoints.cli.main"
    kv_tokens = r"GPU KV cache size: ([\d,]+) tokens"
    full_graphs = r"Capturing CUDA graphs \((decode, )?FULL\)"
    cached = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")

    def server(self, python: str, serving: Serving, backend: str, port: int, flags: list[str]) -> list[str]:
        # A step verifies all drafted tokens, so graphs are captured for as many rows; none between: starts are short.
        sizes = sorted({batch * (1 + serving.draft_tokens) for batch in serving.batches})
        command = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", serving.model, "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--attention-backend", backend, "--seed", str(SEED)),
            *("--tensor-parallel-size", str(serving.tp), "--pipeline-parallel-size", str(serving.pp)),
            *("--data-parallel-size", str(serving.dp), "--max-model-len", str(serving.max_context)),
            *("--max-num-seqs", str(max(serving.batches)), "--cudagraph-capture-sizes", *map(str, sizes)),
            *("--load-format", "dummy" if serving.dummy else "auto", "--disable-uvicorn-access-log"),
        ]
        if serving.draft_tokens:
            drafts = {"method": "mtp", "num_speculative_tokens": serving.draft_tokens}
            if serving.acceptance is not None:
                drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": serving.acceptance}
            command += ["--speculative-config", json.dumps(drafts)]
        if serving.fp8_cache:
            command += ["--kv-cache-dtype", "fp8"]
        return [*command, *flags]

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        return [
            *("bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", SERVED_NAME, "--tokenizer", serving.model, "--dataset-name", "random"),
            *("--random-input-len", str(load.input), "--random-output-len", str(load.output), "--seed", str(load.seed)),
            *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency), "--ignore-eos"),
            *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--temperature", "0"),
            *("--save-result", "--save-detailed", "--result-dir", str(result.parent)),
            *("--result-filename", result.name),
        ]

    def in_use(self, backend: str, log: str) -> bool:
        return f"Using AttentionBackendEnum.{backend.upper()} backend" in log


class Sglang(Engine):
    name = package = "sglang"
    ours = "etap"
    load_module = "sglang.benchmark.serving"
    kv_tokens = r"max_total_num_tokens=(\d+)"
    cached = ("sglang:cached_tokens_total", "sglang:prompt_tokens_total")

    def server(self, python: str, serving: Serving, backend: str, port: int, flags: list[str]) -> list[str]:
        command = [
            *(python, "-m", "sglang.launch_server", "--model-path", serving.model, "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--attention-backend", backend, "--page-size", "64"),
            *("--tp-size", str(serving.tp), "--pp-size", str(serving.pp), "--dp-size", str(serving.dp)),
            *("--context-length", str(serving.max_context), "--max-running-requests", str(max(serving.batches))),
            *("--cuda-graph-bs-decode", *map(str, sorted(set(serving.batches)))),
            *("--load-format", "dummy" if serving.dummy else "auto", "--skip-server-warmup", "--enable-metrics"),
            *("--random-seed", str(SEED)),
        ]
        if serving.draft_tokens:
            command += [
                *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(serving.draft_tokens)),
                *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(serving.draft_tokens + 1)),
            ]
        if serving.fp8_cache:
            command += ["--kv-cache-dtype", "fp8_e4m3"]
        return [*command, *flags]

    def environment(self, serving: Serving) -> dict[str, str]:
        if serving.draft_tokens and serving.acceptance is not None:
            return {"SGLANG_SIMULATE_ACC_LEN": str(serving.acceptance)}
        return {}

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        return [
            *("--backend", "sglang", "--host", "127.0.0.1", "--port", str(port), "--model", SERVED_NAME),
            *("--tokenizer", serving.model, "--dataset-name", "random-ids", "--tokenize-prompt"),
            *("--random-input-len", str(load.input), "--random-output-len", str(load.output)),
            *("--random-range-ratio", "1", "--seed", str(load.seed), "--num-prompts", str(load.prompts)),
            *("--max-concurrency", str(load.concurrency), "--warmup-requests", "0", "--disable-tqdm"),
            *("--ready-check-timeout-sec", "0", "--output-file", str(result)),
        ]

    def in_use(self, backend: str, log: str) -> bool:
        # 0.5.17 logs its arguments as a record, 0.5.23 as a dictionary.
        return re.search(rf"\battention_backend(=|': )'{re.escape(backend)}'", log) is not None


ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Vllm(), Sglang())}


def read_result(path: Path, prompts: int) -> dict:
    """What one run of a load generator measured, in milliseconds and tokens a second.

    Raises ValueError when it is incomplete: a run in which requests failed is no measurement.
    """
    raw = json.loads(path.read_text().splitlines()[-1])  # SGLang appends lines, vLLM writes one
    if raw["completed"] != prompts:
        raise ValueError(f"wanted {prompts} requests answered, got {raw['completed']}")
    keys = (
        "mean_ttft_ms",
        "median_ttft_ms",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "median_tpot_ms",
        "p99_tpot_ms",
        "median_itl_ms",
    )
    reading = {key: raw[key] for key in (*keys, "duration", "output_throughput", "total_input_tokens") if key in raw}
    reading["total_output_tokens"] = raw["total_output_tokens"]
    if "itls" in raw:  # vLLM's, one for each chunk of a stream after the first
        chunks = sum(len(of_request) + 1 for of_request in raw["itls"])
        reading["tokens_per_chunk"] = raw["total_output_tokens"] / chunks
    acceptance = raw.get("spec_decode_acceptance_length") or raw.get("accept_length")
    return reading | ({"acceptance_length": acceptance} if acceptance else {})
