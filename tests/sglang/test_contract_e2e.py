"""What `etap e2e` tells SGLang: every shipped scenario's flags in SGLang's own parser and resolution, and SGLang's own
load generator as it is driven."""

import argparse
import http.server
import json
import pkgutil
import sys
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from bench.common import configs
from bench.checks import asked as asks
from bench.checks.agreement import MixedRequests
from bench.e2e.model import prepare_model, serving_of
from bench.e2e.results_file import DRAWING_PLUGIN
from bench.e2e.scenario import cases_of, read_scenario
from bench.serving.client import Failed
from bench.serving.engines import ENGINES, Load, read_result
from bench.serving.lifecycle import Generator
from bench.qualify import drawn_experts, two_nodes

SGLANG = ENGINES["sglang"]
SCENARIOS = configs.shipped("e2e")
GENERATOR_SECONDS = 1800  # of a generator that hangs


@pytest.fixture(scope="session")
def dummy_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dummy")


def serving(name, folder, **changes_of_the_scenario):
    scenario = read_scenario(name).model_copy(update={"gpus": 1} | changes_of_the_scenario)
    changes = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    prepared = prepare_model(scenario.model, changes, 8, scenario.tensor_parallel, folder)
    prepared.write()
    return scenario, serving_of(scenario, prepared, cases_of(scenario.points))


def parse(arguments):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", SCENARIOS)
def test_sglang_takes_every_scenarios_flags(name, dummy_folder):
    scenario, wanted = serving(name, dummy_folder)
    for backend in scenario.sglang.backends:
        command = SGLANG.server("python", wanted, backend, 8000, scenario.sglang.flags)
        assert command[:3] == ["python", "-m", "sglang.launch_server"]
        parsed = parse(command[3:])
        assert (parsed.attention_backend, parsed.page_size, parsed.load_format) == (backend, 64, "dummy")
        assert parsed.kv_cache_dtype == ("fp8_e4m3" if scenario.kv_dtype == "fp8" else "auto")
        assert parsed.cuda_graph_bs_decode == list(wanted.batches)
        assert parsed.max_running_requests == max(wanted.batches)
        assert parsed.context_length == wanted.max_context
        assert (parsed.speculative_algorithm is not None) == (scenario.draft_tokens > 0)
        assert parsed.disable_radix_cache is False and parsed.enable_metrics


def test_the_plugin_that_draws_experts_replaces_what_sglang_has(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    names: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda name, *_: names.append(name))
    drawn_experts.register()
    assert len(names) == 4 and all(callable(pkgutil.resolve_name(name)) for name in names)
    assert drawn_experts.__name__.endswith(DRAWING_PLUGIN)
    assert DRAWING_PLUGIN in read_scenario("decode-full").sglang.environment["SGLANG_PLUGINS"]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.endswith("-plain") or name == "decode-full-mtp"])
def test_two_gpus_need_no_all_reduce_that_is_built_at_start_up(name, dummy_folder, monkeypatch):
    """With two ranks SGLang would compile an all-reduce of its own, and take FlashInfer's, which is compiled too."""
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    scenario, wanted = serving(name, dummy_folder, gpus=2)
    command = SGLANG.server("python", wanted, "etap", 8000, scenario.sglang.flags)[3:]
    monkeypatch.setattr(sys, "argv", ["launch_server", *command])
    arguments = prepare_server_args(command)
    if hasattr(arguments, "resolve_once"):
        from sglang.srt.arg_groups.overrides import resolved_view

        arguments.resolve_once()
        arguments = resolved_view(arguments)
    assert arguments.tp_size == 2 and arguments.disable_custom_all_reduce
    assert arguments.flashinfer_allreduce_fusion_backend is None


@pytest.mark.parametrize("name", ["decode-short", "decode-full"])
@pytest.mark.parametrize("backend", ["etap", "flashmla", "flashinfer"])
def test_sglang_takes_decode_context_parallelism(name, backend, dummy_folder):
    scenario, wanted = serving(name, dummy_folder, gpus=2, decode_context_parallel=2)
    parsed = parse(SGLANG.server("python", wanted, backend, 8000, scenario.sglang.flags)[3:])
    assert (parsed.tp_size, parsed.dcp_size, parsed.attention_backend) == (2, 2, backend)


@pytest.mark.parametrize("name", ["etap@tp2", "etap@dcp2", "etap+fp8_e4m3@tp2"])
def test_sglang_takes_the_flags_of_the_answers_on_two_gpus(name, dummy_folder):
    """The check's flags come behind those of the scenario, and the last of two counts."""
    scenario, _ = serving("decode-plain", dummy_folder, gpus=2)
    asked, variant = asks.ASKED["sglang"], asks.Variant.parse(name)
    backend, own = variant.asked_of(SGLANG)
    flags = [*scenario.sglang.flags, *asked.flags("plain", 6400, variant), *own]
    parsed = parse(SGLANG.server("python", asked.serving(dummy_folder, "plain", variant), backend, 8000, flags)[3:])
    assert (parsed.tp_size, parsed.dcp_size, parsed.kv_cache_dtype) == (2, variant.dcp, variant.cache)
    assert parsed.max_total_tokens * variant.dcp == 6400 and parsed.mem_fraction_static == asks.MEMORY_SHARE
    assert parsed.disable_custom_all_reduce and parsed.enforce_disable_flashinfer_allreduce_fusion


@pytest.mark.parametrize("name", ["etap", "etap+eager", "flashmla+fp8_e4m3"])
@pytest.mark.parametrize("mode", ["plain", "mtp"])
def test_sglang_takes_the_flags_of_mixed_requests(name, mode, dummy_folder):
    questions, asked, variant = MixedRequests(dummy_folder, 96), asks.ASKED["sglang"], asks.Variant.parse(name)
    backend, own = variant.asked_of(SGLANG)
    flags = [*questions.flags(asked, variant, mode), *own]
    parsed = parse(SGLANG.server("python", questions.serving(asked, variant, mode), backend, 8000, flags)[3:])
    assert (parsed.attention_backend, parsed.kv_cache_dtype) == (variant.backend, variant.cache)
    assert parsed.disable_cuda_graph == variant.eager and parsed.max_running_requests == 96
    assert (parsed.chunked_prefill_size, parsed.decode_log_interval, parsed.skip_tokenizer_init) == (2048, 1, True)
    assert (parsed.speculative_num_draft_tokens == 4) == (mode == "mtp")


def test_sglang_refuses_a_flag_or_a_backend_that_it_has_not(dummy_folder):
    _, wanted = serving("decode", dummy_folder)
    for backend, flags in (("nosuch", []), ("fa3", ["--no-such-flag"])):
        with pytest.raises(SystemExit):
            parse(SGLANG.server("python", wanted, backend, 8000, flags)[3:])


def test_sglang_takes_the_flags_of_each_of_two_nodes(dummy_folder):
    prepared = prepare_model("deepseek-r1", two_nodes.CHANGES, 8, 2, dummy_folder)
    prepared.write()
    flags = read_scenario("decode-plain").sglang.flags
    of_nodes = two_nodes.commands(SGLANG, prepared.model, "127.0.0.1", (8000, 8001, 8002), "etap", flags)
    for node, command in enumerate(of_nodes):
        parsed = parse(command[3:])
        assert parsed.disable_custom_all_reduce
        assert (parsed.nnodes, parsed.node_rank, parsed.tp_size) == (2, node, 2)
        assert (parsed.dist_init_addr, parsed.attention_backend) == ("127.0.0.1:8002", "etap")
        assert parsed.port == 8000 + node


def test_the_log_says_which_backend_runs(dummy_folder):
    from sglang.srt.server_args import ServerArgs

    _, wanted = serving("decode", dummy_folder)
    parsed = parse(SGLANG.server("python", wanted, "fa3", 8000, [])[3:])
    server_args = ServerArgs.from_cli_args(parsed)
    logged = f"{server_args=}"
    assert SGLANG.in_use("fa3", logged) and not SGLANG.in_use("flashmla", logged)


class Generate(http.server.BaseHTTPRequestHandler):
    """As much of /generate as the load generator looks at: the text so far with every token."""

    protocol_version = "HTTP/1.0"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked["sampling_params"]["max_new_tokens"]
        self.server.prompts.append(asked["input_ids"])
        self.send_response(200)
        self.end_headers()
        chunks = [{"text": "x" * made, "meta_info": {"completion_tokens": made}} for made in range(1, tokens + 1)]
        for chunk in [*map(json.dumps, chunks), "[DONE]"]:
            self.wfile.write(f"data: {chunk}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.005)

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def test_sglangs_load_generator_runs_again_and_again_in_one_process(dummy_folder, tmp_path):
    """The engine's generator as `etap e2e` runs it; only the server's end of the wire is made here."""
    _, wanted = serving("decode", dummy_folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Generate)
    server.prompts, port = [], server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    load = Load(input=200, output=8, concurrency=2, prompts=4)
    with Generator(sys.executable, SGLANG.load_module, tmp_path / "load.log", {}) as generator:
        prefix = 0 if version("sglang") == "0.5.17" else 128  # whose generator of common ones knows no token ids
        loads = replace(load, output=2), load, replace(load, seed=1), replace(load, prefix=prefix)
        for number, wished in enumerate(loads):
            result = tmp_path / f"{number}.json"
            generator.run(SGLANG.load(wanted, wished, port, result), GENERATOR_SECONDS)
            reading = read_result(result, 4)
            assert reading["total_output_tokens"] == 4 * wished.output
            assert reading["median_tpot_ms"] > 0 and reading["output_throughput"] > 0
        first, again, others, common = (sorted(server.prompts[4 * number :][:4]) for number in range(4))
        assert first == again != others and all(len(prompt) == 200 for prompt in first)
        assert len({tuple(prompt[:64]) for prompt in first}) == 4, "requests must not share pages of the cache"
        assert {len(prompt) for prompt in common} == {200}
        assert len({tuple(prompt[:128]) for prompt in common}) == (1 if prefix else 4)
        assert len({tuple(prompt) for prompt in common}) == 4, "what follows the prefix is each prompt's own"
        with pytest.raises(Failed, match="exit code 2"):
            generator.run(["--no-such-flag"], GENERATOR_SECONDS)
    server.shutdown()


def test_the_metrics_have_these_names():
    from sglang.srt.observability import metrics_collector

    source = Path(metrics_collector.__file__).read_text()
    assert all(f'"{name}"' in source for name in SGLANG.cached)
