"""Joins two vLLM servers, a GPU each: one prefills with vLLM's own backend, the other decodes with ETAP.

    PYTHONPATH=tests python -m bench.qualify.two_servers --output two-servers.json [-- flags for all servers]

Needs two Hopper GPUs, vLLM 0.26 with etap-backend beside it, 1.1 GB in /dev/shm, and no network. What joins them is
part of vLLM, its OffloadingConnector over files: the server that prefills writes whole blocks of its KV cache, named by
a hash of all tokens up to their end, and the one that decodes finds them there. Its metrics must say that every whole
block of a prompt came that way, and that none was computed again. What the pair answers is judged as `etap check
answers` judges: beside one server with ETAP and one with the other backend, which work alone, by that backend's noise
with itself. Weights are seeded. Two servers share a GPU. The files want a folder that takes O_DIRECT.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from etap_backend import _library
from bench.checks.agreement import CONTEXT, Agreement, MixedRequests, agreement, moved, objections
from bench.checks.asked import ASKED, PACKAGES, configuration, is_sparse
from bench.e2e.model import prepare_model
from bench.e2e.scenario import read_scenario
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, write
from bench.serving.client import Deadline, Failed
from bench.serving.engines import ENGINES, PAGE_TOKENS, Answer, Serving
from bench.serving.lifecycle import Process, free_port, tail, until_healthy
from bench.serving.servers import Served
from bench.qualify import seeded_weights
from bench.qualify.two_nodes import CHANGES

VLLM, ASK = ENGINES["vllm"], ASKED["vllm"]
SERVERS = {"theirs": 0, "alone": 1, "prefill": 0, "decode": 1}  # and the GPU of each
JOINED = ("prefill", "decode")
STAGES = {"together": "together", "again": "together", "few": "together", "turns": "turns"}  # each beside which
REQUESTS = 32
CPU_BYTES = 1 << 29  # of a joined server, for blocks on their way
OUTPUT = Path("two-servers.json")
FLAGS = ["--load-format", seeded_weights.LOAD_FORMAT, "--block-size", str(PAGE_TOKENS)]
FLAGS += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2 << 30)]
ENVIRONMENT = {"PYTHONHASHSEED": "0", "NCCL_NVLS_ENABLE": "0"}  # equal hashes of equal blocks; no NVLink multicast
FILE_SECONDS = 30  # from a prefilled prompt's answer until its blocks are files
SHOWN_LINES = 12  # of each log, where a run fails
REUSED = "vllm:prompt_tokens_cached_total"  # prompt tokens that were not computed
CAME = "vllm:external_prefix_cache_hits_total"  # prompt tokens of blocks that the connector brought


def connector(blocks: Path) -> list[str]:
    """Flags of a server that writes blocks of prompts to this folder, and reads those that are there."""
    tiers = [{"type": "fs", "root_dir": str(blocks)}]
    more = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": CPU_BYTES, "secondary_tiers": tiers}
    more |= {"offload_prompt_only": True}
    joined = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}
    return ["--kv-transfer-config", json.dumps(joined)]


def block_names(bodies: Iterable[dict]) -> set[int]:
    """A number for every whole block of these requests' prompts: equal where salt and all tokens up to its end are."""
    return {
        hash((body["cache_salt"], *body["prompt"][:end]))
        for body in bodies
        for end in range(PAGE_TOKENS, len(body["prompt"]) + 1, PAGE_TOKENS)
    }


@dataclass(frozen=True)
class Pair(Served):
    """The server that decodes. What it is asked for, the other has prefilled before."""

    prefill: Served
    blocks: Path
    names: set[int] = field(default_factory=set)
    """Of all blocks so far."""

    def ask(self, bodies: list[dict], concurrency: int, seconds: float) -> list[dict]:
        """Replies. Raises Failed where the server that decodes computed a whole block of a prompt."""
        end = Deadline(time.monotonic() + seconds)
        self.prefill.ask([body | {"max_tokens": 1} for body in bodies], concurrency, seconds)
        self.names.update(block_names(bodies))
        self._wait_for_files(end.left(FILE_SECONDS, "files"))
        before = self.metrics().get(REUSED, 0.0)
        replies = super().ask(bodies, concurrency, end.left(seconds, "answers"))
        reused = self.metrics().get(REUSED, 0.0) - before
        # A prompt's last token is computed in any case, and counts as reused or not.
        wanted = sum((len(body["prompt"]) - 1) // PAGE_TOKENS * PAGE_TOKENS for body in bodies)
        if reused < wanted:
            raise Failed(f"wanted {wanted} tokens of prompts from the other server, reused {reused:.0f}")
        return replies

    def _wait_for_files(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (there := sum(1 for _ in self.blocks.rglob("*.bin"))) < len(self.names):
            if time.monotonic() > end:
                raise Failed(f"{self.blocks}: wanted {len(self.names)} blocks after {seconds:.0f} s, got {there}")
            time.sleep(0.05)

    def came(self) -> int:
        """Tokens that the connector brought. Raises Failed where it brought fewer than were asked for."""
        came, wanted = self.metrics().get(CAME, 0.0), len(self.names) * PAGE_TOKENS
        if not wanted or came < wanted:
            raise Failed(f"connector: wanted {wanted} tokens of prompts through it, got {came:.0f}")
        return int(came)


def command(
    role: str, model: str, backend: str, port: int, blocks: Path, before: Iterable[str] = (), after: Iterable[str] = ()
) -> list[str]:
    """What starts a server, with flags before and after its own; the last of two counts."""
    serving = Serving(model, dummy=True, max_context=CONTEXT, batches=(1, 8, REQUESTS))
    own = [*FLAGS, *ASK.forcing("plain"), *(connector(blocks) if role in JOINED else [])]
    return VLLM.server(sys.executable, serving, backend, port, [*before, *own, *after])


def start(role: str, port: int, words: list[str], log: Path, environment: dict[str, str]) -> Served:
    """A server that comes up."""
    log.unlink(missing_ok=True)
    process = Process(words, log, environment | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(SERVERS[role])})
    return Served(VLLM, f"http://127.0.0.1:{port}", log, process, {"command": shlex.join(words)})


def ask_all(servers: dict[str, Served], blocks: Path, deadline: Deadline) -> tuple[dict[str, dict], int]:
    """By who answered, the answers of every stage; and how many tokens' rows came through the connector."""
    processes = [server.process for server in servers.values()]
    for server in servers.values():
        until_healthy(processes, server.url, deadline.left(600, "servers"))
    pair = Pair(**vars(servers["decode"]), prefill=servers["prefill"], blocks=blocks)
    questions = MixedRequests("", REQUESTS)

    def ask(server: Served) -> dict[str, list[Answer]]:
        stages = questions.ask(server, ASK, "plain", None, deadline)
        return {stage: kinds["requests"] for stage, kinds in stages.items()}

    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(ask, servers.get(name, pair)) for name in ("theirs", "alone", "pair")}
        return {name: answers.result() for name, answers in asked.items()}, pair.came()


def judge(answers: dict[str, dict[str, list[Answer]]]) -> tuple[dict[str, Agreement], list[str]]:
    """How the pair's answers of each stage agree with those of each server alone, and what speaks against them."""
    theirs, found, failures = answers["theirs"], {}, []
    noise, control = agreement(theirs["few"], theirs["together"]), moved(theirs["control"], theirs["before control"])
    for other in ("alone", "theirs"):
        for stage, beside in STAGES.items():
            case = f"the pair beside {other}, {stage}"
            found[case] = agreement(answers["pair"][stage], answers[other][beside])
            failures += [f"{case}: {reason}" for reason in objections(found[case], noise, control)]
    return found | {"noise": noise, "control": control}, failures


def silent(servers: dict[str, Served], backends: dict[str, str]) -> list[str]:
    """What is to be said of servers whose log does not name the backend that they were asked for."""
    unnamed = [role for role, server in servers.items() if not VLLM.in_use(backends[role], server.text())]
    return [f"{role}.log does not say that {backends[role]} is in use" for role in unnamed]


def outcome(found: dict[str, Agreement], came: int) -> str:
    """What a table says of the run."""
    requests = {case: len(one.differences) for case, one in found.items() if case.startswith("the pair")}
    equal = [f"{case} {count - len(found[case].parted)} of {count}" for case, count in requests.items()]
    return f"{came} tokens' rows came through the connector; equal answers: {', '.join(equal)}"


def main(
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for all servers, after --.")] = None,
    model: Annotated[str, typer.Option(help="Of configs/models, with dense or sparse MLA.")] = "deepseek-r1",
    output: Annotated[Path, typer.Option(help="JSON file; beside it a folder for logs and the model.")] = OUTPUT,
    blocks: Annotated[Path | None, typer.Option(help="For a folder kv-blocks; default: that of the logs.")] = None,
    scenario: Annotated[
        str, typer.Option(help="Whose flags and environment variables the servers get.")
    ] = "decode-plain",
    limit: Annotated[float, typer.Option(help="Seconds for everything.")] = 300,
) -> None:
    """Exit with 0 when all whole blocks came through the connector and the pair answers as one server does."""
    log_folder = output.with_suffix("")
    deadline, blocks = Deadline(time.monotonic() + limit), (blocks or log_folder).resolve() / "kv-blocks"
    try:
        must_be_writable(output)
        if (wanted := read_scenario(scenario)).vllm is None:
            raise ValueError(f"--scenario: wanted one with a table [vllm], got {scenario}")
        prepared = prepare_model(model, CHANGES, 8, 1, log_folder / "model")
        prepared.write()
        theirs = "FLASHMLA_SPARSE" if is_sparse(configuration(log_folder / "model")) else "FLASHMLA"
        shutil.rmtree(blocks, ignore_errors=True)
        blocks.mkdir(parents=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    environment = {**wanted.environment, **wanted.vllm.environment}
    about = provenance("python -m bench.qualify.two_servers", packages=("vllm", *PACKAGES), library=_library.library_path())
    servers, backends = {}, {role: theirs if gpu == 0 else VLLM.ours for role, gpu in SERVERS.items()}
    try:
        for role, backend in backends.items():
            port = free_port()
            words = command(role, prepared.model, backend, port, blocks, wanted.vllm.flags, serve_flags or [])
            servers[role] = start(role, port, words, log_folder / f"{role}.log", environment)
        answers, came = ask_all(servers, blocks, deadline)
        found, failures = judge(answers)
        failures += silent(servers, backends)
    except Failed as failure:
        tails = [f"{role}.log:\n{tail(server.log, SHOWN_LINES)}" for role, server in servers.items()]
        sys.exit("\n\n".join([str(failure), *tails]))
    finally:
        for server in servers.values():
            server.process.end()
        shutil.rmtree(blocks, ignore_errors=True)
    document = {
        "what": f"vLLM prefills with {theirs} and decodes with {VLLM.ours} on another GPU",
        **about.model_dump(),
    }
    document |= {"outcome": outcome(found, came), "failures": failures}
    write(document | {"agreement": {case: one.summary() for case, one in found.items()}}, output)
    print(document["outcome"])
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    if not entry_points(group="vllm.general_plugins", name="seeded_weights"):
        sys.exit(seeded_weights.run([sys.executable, "-m", __spec__.name, *sys.argv[1:]]))
    typer.run(main)
