"""Arguments of servers and load generators in the engines' own parsers; skipped where an engine is not installed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.common import configs
from bench.models import dummy, filled_caches, seeded
from bench.servers import scenario as scenarios
from bench.servers import serve
from bench.servers.engines import ENGINES, Variant
from bench.servers.scenario import cases_of, read_scenario

SCENARIOS = list(configs.read_toml_table(scenarios.SCENARIOS))


def arguments(engine: str, name: str, folder: Path):
    """Variants of a scenario with their servers' arguments, and those of the load generator at the first point."""
    of, scenario = ENGINES[engine], read_scenario(name)
    cases = cases_of(scenario.points, [])
    model, config, _ = serve.prepared(scenario.model_copy(update={"gpus": 1, "layers": 4}), folder)
    serving, flags = scenario.serving(str(dummy.write(Path(model), config)), cases), scenario.of(engine).flags
    variants = [Variant.parse(backend) for backend in scenario.of(engine).backends]
    servers = [(one, of.server("python", serving, one, 8000, flags)) for one in variants]
    return serving, servers, of.load(serving, cases[0].load, 8000, folder / "r.json")


@pytest.mark.parametrize("name", SCENARIOS)
def test_vllm_makes_a_configuration_of_every_scenario(name, tmp_path):
    pytest.importorskip("vllm.benchmarks")
    from vllm.benchmarks.serve import add_cli_args
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:  # vLLM 0.32
        from vllm.entrypoints.launchers import cli_args
    from etap_backend.vllm.registration import register

    for each in (register, seeded.register_vllm, filled_caches.register):
        each()
    serving, servers, load = arguments("vllm", name, tmp_path)
    for variant, command in servers:
        parsed = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(command[4:])
        cli_args.validate_parsed_serve_args(parsed)
        parsed.model = parsed.model_tag or parsed.model
        made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        assert made.attention_config.backend.name == variant.backend
        assert made.scheduler_config.max_num_seqs == serving.max_requests
        assert made.compilation_config.cudagraph_mode.has_full_cudagraphs()
        assert (made.speculative_config is not None) == (serving.draft_tokens > 0)
        assert not made.compilation_config.pass_config.fuse_allreduce_rms, "it would use NVLink multicast"
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    assert parser.parse_args(load[2:]).ignore_eos


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "v4" not in name])
def test_sglang_takes_the_flags_of_every_scenario(name, tmp_path):
    pytest.importorskip("sglang.srt")
    from sglang.srt.server_args import ServerArgs

    from etap_backend.sglang import register

    register()
    serving, servers, _ = arguments("sglang", name, tmp_path)
    for variant, command in servers:
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        parsed = parser.parse_args(command[3:])
        assert (parsed.attention_backend, parsed.page_size, parsed.load_format) == (variant.backend, 64, "dummy")
        assert parsed.max_running_requests == serving.max_requests and parsed.enable_metrics
