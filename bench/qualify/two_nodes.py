"""Serves a small model on two "nodes" of one machine, one GPU each, and checks that ETAP runs in the workers of both.

    PYTHONPATH=tests python -m bench.qualify.two_nodes --engine vllm --log-folder nodes [-- flags for both servers]

Needs two Hopper GPUs and the engine, with etap-backend, installed beside it. The nodes are two process groups that know
of each other only what two machines would: an address, a port, their number. That tests what the plugin has to do with
several nodes: it is loaded in processes that no process of the first node started. Where others use the GPUs too, a
flag has to say how much of their memory the nodes may take.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.e2e.model import prepare_model
from bench.e2e.scenario import read_scenario
from bench.serving import client
from bench.serving.client import Failed
from bench.serving.engines import ENGINES, Engine, Serving
from bench.serving.lifecycle import Process, free_port, until_healthy

NODES = 2
NEW_TOKENS = 16
PROMPT = list(range(1000, 1200))  # four pages of the KV cache
CHANGES = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 64}


def flags_of_node(engine: Engine, node: int, address: str, port: int) -> list[str]:
    """What makes a server one node of two."""
    common = ["--nnodes", str(NODES), "--node-rank", str(node)]
    if engine.name == "sglang":
        return [*common, "--dist-init-addr", f"{address}:{port}"]
    return [*common, "--master-addr", address, "--master-port", str(port), *(["--headless"] if node else [])]


def commands(
    engine: Engine, model: str, address: str, ports: tuple[int, int, int], backend: str, flags: list[str]
) -> list[list[str]]:
    """A command for each node, with these flags. They answer on the first and the second port (of vLLM's second node
    nothing does, SGLang's says that it is alive) and meet at the third."""
    serving = Serving(model, dummy=True, tp=NODES, max_context=1024, batches=(1, 4))
    return [
        engine.server(
            sys.executable, serving, backend, ports[node], flags + flags_of_node(engine, node, address, ports[-1])
        )
        for node in range(NODES)
    ]


def main(
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for both servers, after --.")] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose servers.")] = "vllm",
    log_folder: Annotated[Path, typer.Option(help="For the nodes' logs and the model.")] = Path("nodes"),
    address: Annotated[str, typer.Option(help="Of the first node, as the second reaches it.")] = "127.0.0.1",
    scenario: Annotated[
        str, typer.Option(help="Whose flags and environment variables the nodes get.")
    ] = "decode-plain",
    seconds: Annotated[float, typer.Option(help="Until the first node must be ready.")] = 300,
) -> None:
    """Exit with 0 when both nodes' workers ran ETAP and the model answered."""
    served = ENGINES[engine]
    try:
        wanted = read_scenario(scenario)
        if (specific := getattr(wanted, engine)) is None:
            raise ValueError(f"--scenario: wanted one with a table [{engine}], got {scenario}")
        prepared = prepare_model("deepseek-r1", CHANGES, 8, NODES, log_folder / "model")
        prepared.write()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    ports = free_port(), free_port(), free_port()
    environment, nodes = {**wanted.environment, **specific.environment}, []
    try:
        flags = [*specific.flags, *(serve_flags or [])]
        of_nodes = commands(served, prepared.model, address, ports, served.ours, flags)
        for number, command in enumerate(of_nodes):
            log = log_folder / f"{served.name}-node-{number}.log"
            log.unlink(missing_ok=True)
            nodes.append(Process(command, log, {**environment, "CUDA_VISIBLE_DEVICES": str(number)}))
        url = f"http://{address}:{ports[0]}"
        until_healthy(nodes, url, seconds)
        reply = client.post(url + served.path, served.body(PROMPT, NEW_TOKENS, logprobs=2), 120)
        made = served.tokens_in(reply)
        silent = [
            node.log.stem for node in nodes if not served.in_use(served.ours, node.log.read_text(errors="replace"))
        ]
    except Failed as failure:
        sys.exit(str(failure))
    finally:
        for node in nodes:
            node.end()
    if made != NEW_TOKENS or silent:
        sys.exit(f"wanted {NEW_TOKENS} tokens and {served.ours} in both logs, got {made} tokens and none in {silent}")
    print(f"{served.name}: {NODES} nodes, {served.ours} in the workers of both, {made} tokens")


if __name__ == "__main__":
    typer.run(main)
