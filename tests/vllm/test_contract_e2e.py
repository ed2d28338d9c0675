"""What `etap e2e` tells vLLM: every shipped scenario's flags in vLLM's own parsers and configuration, and the prompts
that vLLM's load generator makes of the dummy model's tokenizer."""

import http.server
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.common import configs
from bench.checks import asked as asks
from bench.checks.agreement import MixedRequests
from bench.e2e.model import prepare_model, serving_of
from bench.e2e.scenario import cases_of, read_scenario
from bench.serving.client import Failed
from bench.serving.engines import ENGINES, FORCED_TOKENS, Load, read_result, takes_processors
from bench.serving.lifecycle import Generator
from bench.qualify import filled_caches, seeded_weights, two_nodes, two_servers

VLLM = ENGINES["vllm"]
SCENARIOS = configs.shipped("e2e")
GENERATOR_SECONDS = 1800  # of a generator that hangs


@pytest.mark.skipif(not takes_processors(), reason="the plugin is vLLM 0.26's")
def test_the_plugin_that_fills_caches_replaces_what_vllm_has(monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as bench
    from vllm.model_executor.warmup import kernel_warmup

    connector, worker = bench.DecodeBenchConnector, bench.DecodeBenchConnectorWorker
    replaced = [(connector, "__init__"), (worker, "register_kv_caches"), (worker, "_fill_block_tensor")]
    replaced += [(kernel_warmup, f"_LL_BF16_WARMUP_{what}") for what in ("MODEL_SHAPES", "M_RANGE")]
    before = [getattr(*one) for one in replaced]
    for (owner, name), value in zip(replaced, before, strict=True):
        monkeypatch.setattr(owner, name, value)  # and puts it back
    filled_caches.register()
    assert all(getattr(*one) != value for one, value in zip(replaced, before, strict=True))


@pytest.fixture(scope="session")
def dummy_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dummy")


def serving(name, folder, **changes_of_the_scenario):
    scenario = read_scenario(name).model_copy(update={"gpus": 1} | changes_of_the_scenario)
    changes = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    prepared = prepare_model(scenario.model, changes, 8, scenario.tensor_parallel, folder)
    prepared.write()
    return scenario, serving_of(scenario, prepared, cases_of(scenario.points))


def serve_arguments(arguments):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.openai import cli_args
    except ImportError:  # moved between 0.26 and 0.33
        from vllm.entrypoints.common import cli_args
    parsed = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    cli_args.validate_parsed_serve_args(parsed)
    return parsed


@pytest.mark.parametrize("name", SCENARIOS)
def test_vllm_makes_a_configuration_of_every_scenario(name, dummy_folder):
    from vllm.engine.arg_utils import AsyncEngineArgs

    scenario, wanted = serving(name, dummy_folder)
    for backend in scenario.vllm.backends:
        command = VLLM.server("python", wanted, backend, 8000, scenario.vllm.flags)
        assert command[:4] == ["python", "-m", "vllm.entrypoints.cli.main", "serve"]
        parsed = serve_arguments(command[4:])
        parsed.model = parsed.model_tag or parsed.model
        made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        assert made.attention_config.backend.name == backend
        assert made.cache_config.enable_prefix_caching
        assert made.cache_config.cache_dtype == ("fp8" if scenario.kv_dtype == "fp8" else "auto")
        assert made.compilation_config.cudagraph_mode.has_full_cudagraphs()
        rows = {batch * (1 + scenario.draft_tokens) for batch in wanted.batches}
        assert rows <= set(made.compilation_config.cudagraph_capture_sizes)
        assert made.scheduler_config.max_num_seqs == max(wanted.batches)
        assert made.model_config.max_model_len == wanted.max_context
        assert made.model_config.hf_config.num_attention_heads == 16
        assert made.load_config.load_format == "dummy"
        assert (made.speculative_config is not None) == (scenario.draft_tokens > 0)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", ["decode-short", "decode-full", "decode-full-fp8", "decode-full-mtp"])
def test_vllm_makes_a_configuration_of_two_gpus(name, shares, dummy_folder, monkeypatch):
    """Tensor parallelism of two, and decode context parallelism of as many, each GPU as one of eight ranks."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    monkeypatch.setattr(type(current_platform), "device_count", classmethod(lambda cls: 2))
    scenario, wanted = serving(name, dummy_folder, gpus=2, decode_context_parallel=shares)
    for backend in scenario.vllm.backends:
        parsed = serve_arguments(VLLM.server("python", wanted, backend, 8000, scenario.vllm.flags)[4:])
        parsed.model = parsed.model_tag or parsed.model
        made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        parallel = made.parallel_config
        assert (parallel.tensor_parallel_size, parallel.decode_context_parallel_size) == (2, shares)
        assert made.model_config.get_num_attention_heads(parallel) == 16
        assert not made.compilation_config.pass_config.fuse_allreduce_rms, "it would use NVLink multicast"
        selector._cached_get_attn_backend.cache_clear()
        with set_current_vllm_config(made):
            layer = {"head_size": 576, "dtype": made.model_config.dtype, "use_mla": True, "num_heads": 16}
            chosen = selector.get_attn_backend(kv_cache_dtype=made.cache_config.cache_dtype, **layer)
        assert chosen.get_name() == backend


@pytest.mark.parametrize("name", ["ETAP@tp2", "ETAP@dcp2", "ETAP+fp8@tp2"])
@pytest.mark.parametrize("mode", ["plain", "mtp"])
def test_vllm_makes_a_configuration_of_the_answers_on_two_gpus(name, mode, dummy_folder, monkeypatch):
    """The check's flags come behind those of the scenario, and the last of two counts."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_count", classmethod(lambda cls: 2))
    scenario, _ = serving("decode-plain", dummy_folder, gpus=2)
    asked, variant = asks.ASKED["vllm"], asks.Variant.parse(name)
    backend, own = variant.asked_of(VLLM)
    flags = [*scenario.vllm.flags, *asked.flags(mode, 6400, variant), *own, "--max-model-len", "4096"]
    command = VLLM.server("python", asked.serving(dummy_folder, mode, variant), backend, 8000, flags)
    parsed = serve_arguments(command[4:])
    parsed.model = parsed.model_tag or parsed.model
    made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    parallel, cache = made.parallel_config, made.cache_config
    assert (parallel.tensor_parallel_size, parallel.decode_context_parallel_size) == (2, variant.dcp)
    assert (cache.gpu_memory_utilization, cache.cache_dtype) == (asks.MEMORY_SHARE, variant.cache)
    assert cache.num_gpu_blocks_override * 64 * variant.dcp == 6400
    assert not made.compilation_config.pass_config.fuse_allreduce_rms
    assert (made.speculative_config is not None) == (mode == "mtp")


@pytest.mark.parametrize("name", ["ETAP", "ETAP+eager", "FLASHMLA+fp8"])
def test_vllm_makes_a_configuration_of_mixed_requests(name, dummy_folder):
    from vllm.engine.arg_utils import AsyncEngineArgs

    questions, asked, variant = MixedRequests(dummy_folder, 96), asks.ASKED["vllm"], asks.Variant.parse(name)
    backend, own = variant.asked_of(VLLM)
    flags = [*questions.flags(asked, variant, "plain"), *own]
    parsed = serve_arguments(
        VLLM.server("python", questions.serving(asked, variant, "plain"), backend, 8000, flags)[4:]
    )
    parsed.model = parsed.model_tag or parsed.model
    made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    assert made.model_config.logits_processors == ([FORCED_TOKENS] if takes_processors() else None)
    assert (made.model_config.enforce_eager, made.cache_config.cache_dtype) == (variant.eager, variant.cache)
    assert (made.scheduler_config.max_num_seqs, made.model_config.max_model_len) == (96, 5120)


def test_vllm_refuses_a_flag_that_it_has_not(dummy_folder):
    _, wanted = serving("decode", dummy_folder)
    command = VLLM.server("python", wanted, "ETAP", 8000, ["--no-such-flag"])
    with pytest.raises(SystemExit):
        serve_arguments(command[4:])


def test_vllm_makes_a_configuration_of_each_of_two_nodes(dummy_folder):
    from vllm.engine.arg_utils import AsyncEngineArgs

    prepared = prepare_model("deepseek-r1", two_nodes.CHANGES, 8, 2, dummy_folder)
    prepared.write()
    flags = read_scenario("decode-plain").vllm.flags
    of_nodes = two_nodes.commands(VLLM, prepared.model, "127.0.0.1", (8000, 8001, 8002), "ETAP", flags)
    for node, command in enumerate(of_nodes):
        parsed = serve_arguments(command[4:])
        parsed.model = parsed.model_tag or parsed.model
        made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(headless=parsed.headless)
        parallel = made.parallel_config
        assert (parallel.nnodes, parallel.node_rank, parallel.tensor_parallel_size) == (2, node, 2)
        assert parallel.distributed_executor_backend == "mp" and parallel.local_world_size == 1
        assert made.attention_config.backend.name == "ETAP" and parsed.headless == (node > 0)


def load_arguments(wanted, load, folder):
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = VLLM.load(wanted, load, 8000, folder / "r.json")
    assert command[:2] == ["bench", "serve"]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser.parse_args(command[2:])


def test_the_prompts_are_the_same_again_and_as_long_as_asked(dummy_folder, tmp_path):
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import get_samples

    _, wanted = serving("decode", dummy_folder)
    tokenizer = AutoTokenizer.from_pretrained(wanted.model)
    load = Load(input=2048, output=128, concurrency=4, prompts=4)

    def prompts(load):
        arguments = load_arguments(wanted, load, tmp_path)
        arguments.backend = "vllm"
        return [sample.prompt for sample in get_samples(arguments, tokenizer)]

    first = prompts(load)
    assert prompts(replace(load, output=2)) == first, "the warm-up fills the cache with these prompts"
    assert prompts(replace(load, seed=1)) != first
    lengths = [len(tokenizer.encode(prompt)) for prompt in first]
    assert all(abs(length - 2048) <= 8 for length in lengths), lengths
    assert len({prompt[:64] for prompt in first}) == len(first), "requests must not share pages of the cache"
    common = [tokenizer.encode(prompt) for prompt in prompts(replace(load, prefix=1024))]
    assert all(abs(len(prompt) - 2048) <= 8 for prompt in common)
    assert len({tuple(prompt[:1000]) for prompt in common}) == 1 and len({tuple(prompt) for prompt in common}) == 4


def test_the_load_generator_writes_what_is_read(dummy_folder, tmp_path):
    """The keys that are read from its file are those that its source writes."""
    import inspect

    from vllm.benchmarks import serve

    _, wanted = serving("decode", dummy_folder)
    arguments = load_arguments(wanted, Load(64, 8, 2, 2), tmp_path)
    assert Path(arguments.result_dir) / arguments.result_filename == tmp_path / "r.json"
    assert (arguments.num_prompts, arguments.max_concurrency, arguments.ignore_eos) == (2, 2, True)
    assert serve.compute_result_filename(arguments, "e2e", None, "") == str(tmp_path / "r.json")
    source = inspect.getsource(serve)
    for key in ("completed", "duration", "output_throughput", "total_input_tokens", "total_output_tokens"):
        assert f'"{key}"' in source
    for key in ('f"mean_{metric_attribute_name}_ms"', 'f"median_{metric_attribute_name}_ms"'):
        assert key in source


class Completions(http.server.BaseHTTPRequestHandler):
    """As much of /v1/completions as a load generator looks at: one chunk a token, then what was used."""

    protocol_version = "HTTP/1.0"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.send_error(404)
        self.server.prompts.append(asked["prompt"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = [{"choices": [{"index": 0, "text": "x"}]} for _ in range(asked["max_tokens"])]
        chunks.append({"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": asked["max_tokens"]}})
        for chunk in [*map(json.dumps, chunks), "[DONE]"]:
            self.wfile.write(f"data: {chunk}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.005)

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_vllms_load_generator_runs_again_and_again_in_one_process(dummy_folder, tmp_path):
    """The engine's generator as `etap e2e` runs it; only the server's end of the wire is made here."""
    _, wanted = serving("decode", dummy_folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    server.prompts, port = [], server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    load = Load(input=64, output=8, concurrency=2, prompts=4)
    with Generator(sys.executable, VLLM.load_module, tmp_path / "load.log", {}) as generator:
        for number, wished in enumerate((replace(load, output=2), load, replace(load, seed=1))):
            result = tmp_path / f"{number}.json"
            generator.run(VLLM.load(wanted, wished, port, result), GENERATOR_SECONDS)
            reading = read_result(result, 4)
            assert reading["total_output_tokens"] == 4 * wished.output
            assert reading["median_tpot_ms"] > 0 and reading["output_throughput"] > 0
        assert sorted(server.prompts[:4]) == sorted(server.prompts[4:8]) != sorted(server.prompts[8:])
        with pytest.raises(Failed, match="exit code 2"):
            generator.run(["bench", "serve", "--no-such-flag"], GENERATOR_SECONDS)
    server.shutdown()


def test_the_metrics_have_these_names():
    from vllm.v1.metrics import loggers

    source = Path(loggers.__file__).read_text()
    for name in VLLM.cached:
        assert f'"{name.removesuffix("_total")}"' in source, "prometheus_client adds _total to a counter's name"


def test_the_dummy_model_is_one_rank_of_the_whole(dummy_folder):
    _, wanted = serving("decode", dummy_folder)
    config = json.loads((Path(wanted.model) / "config.json").read_text())
    assert (config["num_attention_heads"], config["moe_intermediate_size"], config["n_routed_experts"]) == (
        16,
        256,
        256,
    )


@pytest.mark.skipif(not takes_processors(), reason="the connector's configuration is vLLM 0.26's")
def test_vllm_makes_a_configuration_of_each_of_two_joined_servers(dummy_folder):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import AsyncEngineArgs

    prepared = prepare_model("deepseek-r1", two_servers.CHANGES, 8, 1, dummy_folder)
    prepared.write()
    seeded_weights.register()
    for role, gpu in two_servers.SERVERS.items():
        backend = ("FLASHMLA", "ETAP")[gpu]
        flags = read_scenario("decode-plain").vllm.flags
        parsed = serve_arguments(
            two_servers.command(role, prepared.model, backend, 8000, dummy_folder / "kv-blocks", flags)[4:]
        )
        parsed.model = parsed.model_tag or parsed.model
        made = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        assert made.attention_config.backend.name == backend and made.cache_config.block_size == 64
        assert made.load_config.load_format == "seeded" and made.cache_config.kv_cache_memory_bytes == 2 << 30
        assert (made.kv_transfer_config is not None) == (role in two_servers.JOINED)
        if made.kv_transfer_config:
            connector = KVConnectorFactory.get_connector_class(made.kv_transfer_config)
            assert connector.__name__ == "OffloadingConnector"
            assert not made.scheduler_config.disable_hybrid_kv_cache_manager
