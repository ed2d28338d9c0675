"""Where short prompts over a cached context are faster: in ETAP's decode kernel or in vLLM's prefill.

    python -m etap_backend.lab.checks.vllm_threshold --output threshold.json

Needs a Hopper GPU and vLLM with etap-backend beside it. One layer of DeepSeek's attention is run both ways: vLLM's own
layer with a metadata builder that lets prompts of that many tokens into forward_mqa, and with one that does not.
Prefill gathers the context and projects it up before it attends; decode reads the latent cache once for every 64 rows
(new tokens x heads). Both outputs must agree. Times are of the layer's attention, projections of the latent included,
without the making of the metadata.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker import workspace

from etap_backend import _library
from etap_backend.lab import configs
from etap_backend.lab.checks.vllm_layer import BLOCK, FP8, HEADS, LATENT, NAME, NOPE, ROPE, VALUE, build_layer
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, read_json, write
from etap_backend.vllm import metadata

MODEL = "deepseek-r1"  # of which one attention layer runs, without quantization
PROGRAM = "python -m etap_backend.lab.checks.vllm_threshold"
PACKAGES = ("etap-backend", "vllm", "torch", "apache-tvm-ffi")
console = Console(width=120)


def builder_of(longest: int, spec, config: VllmConfig, device: torch.device) -> metadata.ETAPMetadataBuilder:
    """ETAP's, with prompts of up to `longest` tokens in forward_mqa, however many heads there are."""
    metadata.short_prompt_tokens = lambda *_: longest
    return metadata.ETAPMetadataBuilder(spec, [NAME], config, device)


def make_config(longest: int, requests: int, heads: int, kv_cache_dtype: str) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        shipped = read_json(configs.find("models", MODEL, ".json"))
        plain = {key: value for key, value in shipped.items() if key != "quantization_config"}
        write(plain, Path(folder) / "config.json")
        overrides = {"max_position_embeddings": longest, "num_attention_heads": heads, "num_key_value_heads": heads}
        return EngineArgs(
            model=folder,
            attention_backend="ETAP",
            max_model_len=longest,
            max_num_seqs=requests,
            skip_tokenizer_init=True,
            load_format="dummy",
            kv_cache_dtype=kv_cache_dtype,
            hf_overrides=overrides,
        ).create_engine_config()


def step_of(requests: int, context: int, tokens: int, device: torch.device) -> tuple[CommonAttentionMetadata, int]:
    """Requests with so much cached context and so many new tokens; and the blocks that they use."""
    length = context + tokens
    blocks = -(-length // BLOCK)
    table = 1 + torch.randperm(requests * blocks, device=device).int().view(requests, blocks)
    lengths = torch.full((requests,), length, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32) * tokens
    known = {"_seq_lens_cpu": lengths, "_num_computed_tokens_cpu": lengths - tokens}
    fields = {name: value for name, value in known.items() if name in CommonAttentionMetadata.__dataclass_fields__}
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=requests,
        num_actual_tokens=requests * tokens,
        max_query_len=tokens,
        max_seq_len=length,
        block_table_tensor=table,
        slot_mapping=torch.zeros(requests * tokens, dtype=torch.int64, device=device),
        **fields,
    )
    return common, requests * blocks


def microseconds(call, repeats: int) -> float:
    """Median time of a call on the GPU."""
    times = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[3:])


def compare(layer, builders: dict, requests: int, context: int, tokens: int, repeats: int, device) -> dict:
    """Both ways for one shape."""
    common, blocks = step_of(requests, context, tokens, device)
    cache = torch.randn(1 + blocks, BLOCK, LATENT + ROPE, dtype=torch.bfloat16, device=device)
    count, heads = requests * tokens, layer.num_heads
    q = torch.randn(count, heads, NOPE + ROPE, dtype=torch.bfloat16, device=device)
    if layer.kv_cache_dtype.startswith("fp8"):
        cache = cache.to(FP8)
    # The new tokens' rows, as the cache has them.
    position = torch.arange(context, context + tokens, device=device)
    tables = common.block_table_tensor.long()
    rows = torch.cat([cache[table[position // BLOCK], position % BLOCK] for table in tables]).bfloat16()
    if cache.dtype == FP8:
        cache = cache.view(torch.uint8)
    latent, rope = rows[:, :LATENT].contiguous(), rows[:, None, LATENT:].contiguous()
    found, outputs = {"requests": requests, "context": context, "tokens": tokens}, {}
    for way, builder in builders.items():
        step = builder.build(0, common)
        wanted = count if way == "decode" else 0
        if step.num_decode_tokens != wanted:
            raise RuntimeError(f"{way}: wanted {wanted} tokens in forward_mqa, got {step.num_decode_tokens}")
        output = torch.empty(count, heads * VALUE, dtype=torch.bfloat16, device=device)
        arguments = (q, latent, rope, cache, step)
        found[f"{way}_us"] = microseconds(lambda a=arguments, o=output: layer.forward_impl(*a, output=o), repeats)
        outputs[way] = output.float()
    difference = (outputs["decode"] - outputs["prefill"]).norm() / outputs["prefill"].norm()
    if not difference < 0.02:
        raise RuntimeError(f"{found}: decode and prefill differ by {difference:.4f} of their norm")
    return found | {"difference": difference.item()}


def main(
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("threshold.json"),
    contexts: Annotated[str, typer.Option(help="Cached tokens.")] = "0,1024,4096,16384,65536",
    tokens: Annotated[str, typer.Option(help="New tokens.")] = "2,4,8,16,32,64,128",
    requests: Annotated[str, typer.Option(help="Requests in the step.")] = "1,8",
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = HEADS,
    kv_cache_dtype: Annotated[str, typer.Option(help="Type of the KV cache, such as fp8.")] = "auto",
    repeats: Annotated[int, typer.Option(min=3, help="Timed calls of each.")] = 30,
) -> None:
    """Time both ways for every shape."""
    try:
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    load_general_plugins()
    device = torch.device("cuda:0")
    torch.set_default_device(device)
    shapes = [
        (r, c, t)
        for r in map(int, requests.split(","))
        for c in map(int, contexts.split(","))
        for t in map(int, tokens.split(","))
    ]
    with torch.device("cpu"):
        config = make_config(max(c + t for _, c, t in shapes), max(r for r, *_ in shapes), heads, kv_cache_dtype)
    results = []
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29871", 0, backend="nccl")
        initialize_model_parallel(backend="nccl")
        workspace.init_workspace_manager(device, 1)
        layer = build_layer(config, heads)
        spec = layer.get_kv_cache_spec(config)
        with torch.device("cpu"):
            ways = {"prefill": 1, "decode": max(t for *_, t in shapes)}
            builders = {way: builder_of(longest, spec, config, device) for way, longest in ways.items()}
            for shape in shapes:
                results.append(compare(layer, builders, *shape, repeats, device))
    table = Table("requests", "context", "new tokens", "decode us", "prefill us", "prefill / decode")
    for row in results:
        ratio = row["prefill_us"] / row["decode_us"]
        table.add_row(
            *(str(row[key]) for key in ("requests", "context", "tokens")),
            *(f"{row[key]:.1f}" for key in ("decode_us", "prefill_us")),
            f"{ratio:.2f}",
        )
    console.print(table)
    about = provenance(PROGRAM, packages=PACKAGES, library=_library.library_path())
    document = {"what": f"short prompts as decodes or prefills, one layer of {heads} heads"} | about.model_dump()
    write(document | {"heads": heads, "kv_cache_dtype": kv_cache_dtype, "results": results}, output)


if __name__ == "__main__":
    typer.run(main)
