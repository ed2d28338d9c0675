"""One of two ranks that share each context of a sparse model: `main` saves its results in the file OUTPUT.

STEPS is a file that test_contract_sparse.py saved. Groups, layer, builder, the choice of a rank's part of each list,
collectives and merging are vLLM's; Triton's interpreter runs its kernels.
"""

from types import SimpleNamespace

import torch
from dcp_rank import RANKS, configuration, prepare
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from support.vllm_layer import BLOCK, HEADS, Problem, build_layer, decode, make_builder


def interpret() -> None:
    """Give vLLM's kernel an attribute that Triton's interpreter lacks."""
    kernel = sparse_utils.ConvertReqIndexToGlobalIndexKernel.kernel
    kernel.constexprs = [name for name in kernel.arg_names if name.isupper()]


def share_of(step: dict, rank: int, interleave: int) -> Problem:
    """The step with the heads of one rank and its part of vLLM's interleaved cache, NaN elsewhere."""
    share, rows = Problem(step["lengths"], step["query_lens"]), step["rows"]
    share.q = step["q"][:, rank * HEADS : (rank + 1) * HEADS]
    empty = 0xFF if rows[0].dtype == torch.uint8 else torch.nan
    share.cache = torch.full((len(share.cache), BLOCK, rows[0].shape[1]), empty, dtype=rows[0].dtype)
    for request, of_request in enumerate(rows):
        local = of_request[torch.arange(len(of_request)) // interleave % RANKS == rank]
        for index, part in enumerate(local.split(BLOCK)):
            share.cache[share.block_table[request, index], : len(part)] = part
    return share


def layer_of(config, asked: dict):
    """A sparse layer, its builder, and the buffer of its lists."""
    lists = asked["buffer"].clone()
    indexer = SimpleNamespace(topk_indices_buffer=lists)
    layer = build_layer(config, HEADS, use_sparse=True, indexer=indexer, topk_indices_buffer=lists)
    builder = make_builder(layer, config)
    check_attention_cp_compatibility(config)
    return layer, builder, lists


def main(rank: int, port: str, model: str, output: str, steps: str) -> None:
    prepare()
    interpret()
    asked, results = torch.load(steps), {}
    for case, step in asked["steps"].items():
        cache, interleave, _ = case
        config = configuration(model, cache, interleave, BLOCK, **asked["model"])
        with set_current_vllm_config(config):
            if not results:
                init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                initialize_model_parallel(RANKS, decode_context_model_parallel_size=RANKS, backend="gloo")
            layer, builder, lists = layer_of(config, asked)
            share = share_of(step, rank, interleave)
            lists[: share.tokens] = step["lists"]
            out = decode(layer, share, builder.build(0, share.common_metadata()))
            results[case] = out, layer.kv_b_proj.weight.detach().clone()
    torch.save(results, output)
