"""Steps of DeepSeek-V4's attention layers in a real vLLM, of MODEL v4 or v41.

vLLM makes the configuration, selects the class, and runs layers, metadata builders, lists and the gathering of prompts'
rows, its kernels in Triton's interpreter. The writers of the caches need a GPU or hours: the layout is written here and
compared with vLLM's own Triton writer; an indexer's lists are written here too. `main` writes each step's outputs and
float64 references into FOLDER/steps.
"""

import importlib
import json
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import replace, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.triton_utils import triton
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker import workspace

from etap_backend import sparse_workspace_floats

HEADS, WIDTH, NOPE, GROUP, WINDOW, TOP_K = 8, 512, 448, 64, 128, 128
RATIOS = {"v4": [0, 4, 128], "v41": [0, 1, 2]}
BLOCK = {"v4": 256, "v41": 64}  # tokens, of the second cache
BLOCKS = 64
BEHIND_TOKENS = 2  # rows of queries that the metadata does not tell of
CPU = torch.device("cpu")

# Of each request its tokens, the step's among them, and the step's; 0 tokens: a row that pads the step.
STEPS = {
    "decodes": [(70, 1), (700, 1), (129, 1), (1, 1), (0, 1)],
    "a prompt": [(20, 20)],
    "decodes and prompts": [(300, 1), (3, 1), (150, 8), (12, 12)],
}

MODEL = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": 1,
    "head_dim": WIDTH, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 1,
    "sliding_window": WINDOW, "compress_ratios": RATIOS["v4"], "index_topk": TOP_K, "index_n_heads": 64,
    "index_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "max_position_embeddings": 65536, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "vocab_size": 512, "hc_mult": 4, "hc_sinkhorn_iters": 2, "hc_eps": 1e-6,
    "num_hash_layers": 1, "hidden_act": "silu", "scoring_func": "sqrtsoftplus", "expert_dtype": "fp8",
    "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip


def write_model(folder: Path, model: str) -> None:
    """The model's configuration, the only file that vLLM reads."""
    config = MODEL
    if model == "v41":
        text = MODEL | {
            "compress_ratios": RATIOS[model], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2],
            "candidate_source_layer_id": -1,
        }  # fmt: skip
        del text["architectures"]
        of_all = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
        config = of_all | {"torch_dtype": "bfloat16", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))


def load_model(model: str):
    """The module of a model's layers, once vLLM's registry has loaded the model as for serving."""
    architecture = {"v4": "DeepseekV4ForCausalLM", "v41": "DeepseekV41ForCausalLM"}[model]
    ModelRegistry.models[architecture].load_model_cls()
    return importlib.import_module(f"vllm.models.deepseek_{model}.nvidia.model")


def configuration(folder: Path, model: str, **arguments):
    """vLLM's configuration of the model; keywords are EngineArgs'."""
    write_model(folder, model)
    defaults = {
        "attention_backend": "ETAP", "kv_cache_dtype": "fp8", "block_size": BLOCK[model], "max_model_len": 2048,
        "max_num_seqs": 8, "skip_tokenizer_init": True, "load_format": "dummy",
    }  # fmt: skip
    return EngineArgs(model=str(folder), **(defaults | arguments)).create_engine_config()


class NoCompressor(torch.nn.Module):
    """Stands in for vLLM's compressor, which needs CUDA when it is constructed, and is not run here."""

    def __init__(self, **_):
        super().__init__()


def prepare() -> None:
    """Stand in for what needs a GPU, and give kernels attributes that Triton's interpreter lacks."""
    load_general_plugins()
    torch.accelerator.empty_cache = lambda: None
    type(current_platform).device_type = "cpu"
    workspace.init_workspace_manager(CPU, 1)
    interpreted = triton.runtime.interpreter.InterpretedFunction
    interpreted.constexprs = property(lambda kernel: [name for name in kernel.arg_names if name.isupper()])


class NewTensors(TorchDispatchMode):
    """Records the elements of each tensor that `new_empty` makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.sizes += [made.numel()] if function is torch.ops.aten.new_empty.default else []
        return made


class Cache:
    """One layer's cache, its pages between other layers' as in vLLM: far apart, full of NaN."""

    def __init__(self, pages: torch.Tensor, first_byte: int, rows: int, ratio: int, random: torch.Generator):
        self.rows, self.ratio = rows, ratio
        strides = (pages.stride(0), WIDTH + 72, 1)
        self.tensor = pages.as_strided((len(pages), rows, WIDTH + 72), strides, first_byte)
        self.order = torch.randperm(len(pages), generator=random)

    def table(self, lengths: list[int]) -> torch.Tensor:
        """Block table of requests with so many tokens; unused entries are no pages, those of padding vLLM's page 0."""
        needed = [-(-(tokens // self.ratio) // self.rows) for tokens in lengths]
        table = torch.full((len(lengths), max(*needed, 1) + 1), 2**30, dtype=torch.int32)
        table[torch.tensor(lengths) == 0] = 0
        pages = iter(self.order.tolist())
        for request, count in enumerate(needed):
            table[request, :count] = torch.tensor([next(pages) for _ in range(count)])
        return table

    def write(self, table: torch.Tensor, request: int, count: int, random: torch.Generator) -> torch.Tensor:
        """Store random keys of a request, with scales of 2^-5 to 2^-3, and return them in float64."""
        element = torch.randint(0, 0x70, (count, NOPE), generator=random, dtype=torch.uint8)  # up to 30 in size
        element += 0x80 * torch.randint(0, 2, (count, NOPE), generator=random, dtype=torch.uint8)
        scale = torch.randint(122, 125, (count, 8), generator=random, dtype=torch.uint8)
        rope = torch.randn(count, WIDTH - NOPE, generator=random).bfloat16()
        place = torch.arange(count)
        page, place = table[request, place // self.rows].long()[:, None], place[:, None] % self.rows
        whole = self.tensor.as_strided((len(self.tensor), self.rows * 584), (self.tensor.stride(0), 1))
        whole[page, place * 576 + torch.arange(576)] = torch.cat([element, rope.view(torch.uint8)], dim=1)
        whole[page, self.rows * 576 + place * 8 + torch.arange(8)] = scale
        factor = 2 ** (scale[:, :7].double() - 127).repeat_interleave(GROUP, dim=1)
        return torch.cat([element.view(torch.float8_e4m3fn).double() * factor, rope.double()], dim=1)


def check_layout(write_rows) -> None:
    """Check that vLLM's own writer uses the layout of `Cache.write`, up to the rounding of Triton's interpreter."""
    cache = Cache(torch.zeros(2, 40000, dtype=torch.uint8), 0, 64, 1, torch.Generator())
    key = torch.linspace(-2, 2, WIDTH).bfloat16()
    write_rows(key[None], cache.tensor, torch.tensor([67]), 64)
    page = cache.tensor.as_strided((64 * 584,), (1,), 40000)
    factor = 2 ** (page[64 * 576 + 3 * 8 :][:7].double() - 127).repeat_interleave(GROUP)
    stored = page[3 * 576 :][:NOPE].view(torch.float8_e4m3fn).double() * factor
    assert torch.isclose(stored, key[:NOPE].double(), rtol=0.07, atol=0.01).double().mean() > 0.95
    assert torch.equal(page[3 * 576 + NOPE : 4 * 576].view(torch.bfloat16), key[NOPE:])


def wanted(q, window, compressed, sinks) -> torch.Tensor:
    """One token's attention: softmax over its keys and one sink per head, in float64 [heads, 512]."""
    keys = torch.cat([window, compressed])
    scores = q.double() @ keys.T * WIDTH**-0.5
    weights = torch.cat([scores, sinks.double()[:, None]], dim=1).softmax(dim=1)[:, :-1]
    return weights @ keys


class Steps:
    """One layer, its caches and its builders."""

    def __init__(self, config, layer, seed: int):
        self.config, self.layer, self.random = config, layer, torch.Generator().manual_seed(seed)
        self.ratio = layer.compress_ratio if layer.compressor is not None else 0
        specs = {"window": (layer.swa_cache_layer, layer.swa_cache_layer.get_kv_cache_spec(config), 1)}
        if self.ratio:
            specs["compressed"] = (layer, layer.get_kv_cache_spec(config), self.ratio)
        page_bytes = [spec.page_size_bytes for _, spec, _ in specs.values()]
        pages = torch.full((BLOCKS, sum(page_bytes) + 2**20), 0xFF, dtype=torch.uint8)
        self.caches, self.builders = {}, {}
        for number, (name, (owner, spec, ratio)) in enumerate(specs.items()):
            cache = Cache(pages, sum(page_bytes[:number]), spec.block_size // ratio, ratio, self.random)
            owner.kv_cache, self.caches[name] = cache.tensor, cache
            builder = owner.get_attn_backend().get_builder_cls()
            self.builders[name] = owner.prefix, builder(spec, [owner.prefix], config, CPU)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).bfloat16()

    def common(self, requests, table: torch.Tensor) -> CommonAttentionMetadata:
        """vLLM's description of a step, for the cache with this block table."""
        lengths, query_lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in zip(*requests, strict=True))
        starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()
        positions = [length - count + torch.arange(count) for length, count in requests]
        padding = [torch.full((count,), 0 if length else -1) for length, count in requests]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.clone(),
            num_reqs=len(requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.cat(padding),
            positions=torch.cat(positions).clamp(min=0),
        )

    def choose(self, requests, tables: dict, keys: dict) -> list[torch.Tensor]:
        """Write each token's list, as an indexer would; gives the compressed entries that each token attends to."""
        chosen, buffer = [], self.layer.topk_indices_buffer
        for request, (length, count) in enumerate(requests):
            for position in range(length - count, length):
                entries = torch.arange(max(0, (position + 1) // self.ratio) if self.ratio else 0)
                if self.ratio and self.ratio != 128:
                    entries = entries[torch.randperm(len(entries), generator=self.random)][:TOP_K]
                    row = buffer[len(chosen)]
                    row.fill_(-1 if length else 0)[: len(entries)] = entries  # a row that pads keeps an old list
                chosen.append(keys["compressed"][request][entries] if self.ratio else torch.zeros(0, WIDTH))
        return chosen

    def run(self, requests) -> dict[str, torch.Tensor]:
        """Outputs of a step, the float64 reference, and the rows behind the step's tokens."""
        lengths = [length for length, _ in requests]
        tables, keys, metadata = {}, {}, {}
        for name, cache in self.caches.items():
            tables[name] = cache.table(lengths)
            keys[name] = [
                cache.write(tables[name], request, length // cache.ratio, self.random)
                for request, length in enumerate(lengths)
            ]
            prefix, builder = self.builders[name]
            metadata[prefix] = builder.build(0, self.common(requests, tables[name]))
        chosen = self.choose(requests, tables, keys)
        q = self.normal(len(chosen) + BEHIND_TOKENS, HEADS, WIDTH)
        output = torch.full_like(q, 7.0)
        positions = torch.zeros(len(q), dtype=torch.int64)
        with set_forward_context(metadata, self.config):
            self.layer.forward_mqa(q, q[:, 0], positions, output)
        exact, token = torch.zeros(len(chosen), HEADS, WIDTH, dtype=torch.float64), 0
        for request, (length, count) in enumerate(requests):
            for position in range(length - count, length):
                if length:
                    seen = keys["window"][request][max(0, position + 1 - WINDOW) : position + 1]
                    exact[token] = wanted(q[token], seen, chosen[token].double(), self.layer.attn_sink)
                token += 1
        return {"out": output[: len(chosen)], "exact": exact, "behind": output[len(chosen) :]}

    def measured(self) -> dict:
        """Output of a step without metadata, in which vLLM measures memory, and whether a prompt's workspace counts."""
        output = torch.full((4, HEADS, WIDTH), 7.0, dtype=torch.bfloat16)
        with set_forward_context(None, self.config), NewTensors() as new:
            self.layer.forward_mqa(torch.zeros_like(output), output[:, 0], torch.zeros(4, dtype=torch.int64), output)
        return {"out": output, "prompts": sparse_workspace_floats(HEADS, num_compute_units()) in new.sizes}


def main(model: str, folder: str) -> None:
    prepare()
    config = configuration(Path(folder), model)
    package = f"vllm.models.deepseek_{model}"
    importlib.import_module(f"{package}.attention").DeepseekCompressor = NoCompressor
    select = load_model(model)._select_dsv4_attn_cls
    operators = importlib.import_module(f"{package}.common.ops.cache_utils")
    for kernel in (one for one in vars(operators).values() if hasattr(one, "NUM_WORKERS")):
        kernel.NUM_WORKERS = 4  # of hundreds, which the interpreter runs one after the other
    check_layout(operators.quantize_and_insert_k_cache)
    lists = torch.full((config.scheduler_config.max_num_batched_tokens, TOP_K), 2**30, dtype=torch.int32)
    results = {}
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        initialize_model_parallel(backend="gloo")
        layers = []
        for number in range(len(RATIOS[model])):
            torch.set_default_dtype(torch.bfloat16)
            layer = select(config)(config, prefix=f"model.layers.{number}.attn", topk_indices_buffer=lists)
            torch.set_default_dtype(torch.float32)
            assert layer.attn_sink.shape == (HEADS,) and layer.attn_sink.isneginf().all()
            layers.append(layer)
        for number, layer in enumerate(layers):
            steps = Steps(config, layer, number)
            results[RATIOS[model][number], "measured"] = steps.measured()
            layer.attn_sink.data.copy_(2 * torch.randn(HEADS, generator=steps.random))
            for name, requests in STEPS.items():
                results[RATIOS[model][number], name] = steps.run(requests)
        # A draft's configuration as vLLM's first model runner makes it.
        draft = replace(config, attention_config=replace(config.attention_config, backend=None))
        results["draft"] = select(draft) is type(layers[0])
    torch.save(results, Path(folder) / "steps")
