"""vLLM's bench programs as etap offline calls them, with an engine that only counts."""

import time
from types import SimpleNamespace

import pytest
import typer

from etap_backend.lab.e2e.model import prepare_model
from etap_backend.lab.e2e.offline import LONG, SHORT, THROUGHPUT_OUTPUT, Asked, points_of, rows_of, step_ms
from etap_backend.lab.e2e.offline import POINTS as SHIPPED

SECONDS_A_TOKEN = 1e-3
POINTS, THROUGHPUT, ITERATIONS = [(3, 16), (2, 16), (1, 300)], [(2, 40)], 2


class CountingEngine:
    """In place of vllm.LLM: a step takes as long as the last one."""

    llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=10_000))

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling_params, **_):
        of_each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        (tokens,) = {parameters.max_tokens for parameters in of_each}
        self.calls.append(([prompt.get("prompt_token_ids") or prompt["prompt"] for prompt in prompts], tokens))
        time.sleep(SECONDS_A_TOKEN * tokens)
        return []


@pytest.fixture
def engine(monkeypatch):
    import vllm

    counting, asked = CountingEngine(), []
    monkeypatch.setattr(vllm.LLM, "from_engine_args", lambda arguments: asked.append(arguments) or counting)
    return counting, asked


def test_points_are_read_as_the_other_commands_read_them():
    assert points_of("16x2K,1x65536", "--points") == [(16, 2048), (1, 65536)] and points_of("", "--points") == []
    assert {length for _, length in points_of(SHIPPED, "--points")} == {2048, 16384, 65536}
    for wrong in ("16", "x2K", "16x", "ax2K", "0x2K"):
        with pytest.raises(typer.BadParameter, match="wanted") as refused:
            points_of(wrong, "--throughput")
        assert refused.value.param_hint == "--throughput"


def test_a_step_is_the_difference_of_the_fastest_readings_over_the_tokens_between_them():
    assert step_ms({"short_s": [0.25, 9.0], "long_s": [7.0, 0.25 + 0.002 * (LONG - SHORT)]}) == pytest.approx(2.0)


def test_both_programs_run_on_one_engine(engine, tmp_path):
    counting, engines = engine
    prepared = prepare_model(
        "deepseek-r1", {"num_hidden_layers": 2, "first_k_dense_replace": 1}, 8, 1, tmp_path / "model"
    )
    prepared.write()
    asked = Asked(prepared.model, POINTS, THROUGHPUT, ITERATIONS, ["--gpu-memory-utilization", "0.5"])
    started, *rows = rows_of("ETAP", asked, tmp_path)
    assert started["backend"] == "ETAP" and len(engines) == 1
    config = engines[0].create_engine_config()
    assert config.attention_config.backend.name == "ETAP" and config.cache_config.enable_prefix_caching
    assert config.compilation_config.cudagraph_capture_sizes == [1, 2, 3]
    assert config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    assert config.model_config.max_model_len >= 300 + LONG

    assert [(row["program"], row["requests"], row["input"]) for row in rows] == [
        *(("latency", *point) for point in POINTS),
        *(("throughput", *point) for point in THROUGHPUT),
    ]
    for row in rows[: len(POINTS)]:
        assert len(row["short_s"]) == len(row["long_s"]) == ITERATIONS
        assert min(row["short_s"]) > 0 and min(row["long_s"]) > 0
    assert len(rows[-1]["tokens_per_second"]) == ITERATIONS and all(rows[-1]["tokens_per_second"])

    # A point: one iteration that fills the prefix cache, the readings, and the long ones, all with the same prompts.
    calls = iter(counting.calls)
    for requests, length in POINTS:
        of_point = [next(calls) for _ in range(1 + 2 * ITERATIONS)]
        assert [tokens for _, tokens in of_point] == [SHORT] * (1 + ITERATIONS) + [LONG] * ITERATIONS
        prompts = of_point[0][0]
        assert [len(prompt) for prompt in prompts] == [length] * requests
        assert all(others == prompts for others, _ in of_point)
    # Fewer requests of a length are some of the more before, which the cache has; those of bench throughput are new.
    assert counting.calls[5][0] == counting.calls[0][0][:2]
    of_throughput = list(calls)
    assert {tokens for _, tokens in of_throughput} == {THROUGHPUT_OUTPUT}
    assert len({str(prompts) for prompts, _ in of_throughput}) == len(of_throughput) == 1 + ITERATIONS
