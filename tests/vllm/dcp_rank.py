"""One of two ranks that share each context, on the CPU: `python dcp_rank.py RANK PORT MODEL OUTPUT` saves its results.

Groups, layer, builder, collectives and merging are vLLM's; Triton's interpreter runs the merging kernel.
"""

import importlib.metadata
import sys

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention import ops
from vllm.v1.worker import workspace
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from etap_backend.lab.checks.vllm_layer import (
    HEADS,
    KV_SCALE,
    LENGTHS,
    MAX_REQUESTS,
    SPECULATIVE,
    Problem,
    build_layer,
    decode,
    make_builder,
)
from etap_backend.vllm.metadata import claim_workspace

RANKS = 2
CACHES = {"auto": None, "fp8": KV_SCALE}
"""Types of the KV cache, with their scales."""

COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


def prepare() -> None:
    """What a machine without a GPU cannot answer, and an attribute that Triton's interpreter lacks."""
    real = importlib.metadata.version  # a newer version, for the warning that one rank gives
    importlib.metadata.version = lambda name: "0.99.0" if name == "vllm" else real(name)
    load_general_plugins()
    torch.accelerator.empty_cache = lambda: None
    platform = type(current_platform)
    platform.device_count = classmethod(lambda cls: RANKS)
    platform.get_device_communicator_cls = classmethod(lambda cls: COMMUNICATOR)
    platform.use_custom_op_collectives = classmethod(lambda cls: False)  # those are for CUDA tensors
    workspace.init_workspace_manager(torch.device("cpu"), 1)
    if hasattr(ops, "dcp"):  # since vLLM 0.31
        kernel = ops.dcp.CorrectAttnCPOutKernel.kernel
        kernel.constexprs = [name for name in kernel.arg_names if name.isupper()]


def share_of(problem: Problem, rank: int) -> tuple[Problem, list[int]]:
    """The same step with the tokens that vLLM's interleaved cache gives to one rank, and their numbers."""
    local = [rows[rank::RANKS] for rows in problem.stored]
    share = Problem([max(1, len(rows)) for rows in local], 1)
    share.q = problem.q[:, rank * HEADS : (rank + 1) * HEADS]
    share.store(local, len(share.cache))
    return share, [len(rows) for rows in local]


def configuration(model: str, cache_dtype: str):
    heads = {"num_attention_heads": RANKS * HEADS, "num_key_value_heads": RANKS * HEADS}
    return EngineArgs(
        model=model,
        attention_backend="ETAP",
        kv_cache_dtype=cache_dtype,
        max_model_len=2048,
        max_num_seqs=MAX_REQUESTS,
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides=heads,
        tensor_parallel_size=RANKS,
        decode_context_parallel_size=RANKS,
        speculative_config=SPECULATIVE["speculative_config"],
    ).create_engine_config()


def run(config, rank: int, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and weight of this rank's layer."""
    layer = build_layer(config, HEADS)
    layer._k_scale.fill_(scale or 1.0)
    layer.impl.reserve_workspace()
    workspace.lock_workspace()  # the builder may not need more
    builder = make_builder(layer, config)
    check_attention_cp_compatibility(config)
    assert builder.schedule.num_heads == RANKS * HEADS
    # Drafts and short prompts go through vLLM's prefill: it says so for a backend that does not claim varying query
    # lengths with DCP.
    assert builder.reorder_batch_threshold == builder.schedule.max_s_q == 1
    try:
        claim_workspace(builder.schedule.max_workspace_floats + 1)
    except AssertionError:
        pass  # locked at what the builder needs
    else:
        raise RuntimeError("the layer claimed more than its builder needs")
    assert not builder.supports_draft_decode_metadata_update
    problem = Problem(LENGTHS, 1, heads=RANKS * HEADS, kv_scale=scale)
    share, lengths = share_of(problem, rank)
    common = share.common_metadata()
    common.seq_lens.copy_(torch.tensor(problem.lengths))
    common.dcp_local_seq_lens = torch.tensor(lengths, dtype=torch.int32)
    step = builder.build(0, common)
    assert step.decode.seq_lens.tolist() == lengths
    return decode(layer, share, step), layer.kv_b_proj.weight.detach().clone()


def main(rank: int, port: str, model: str, output: str) -> None:
    prepare()
    results = {}
    for cache_dtype, scale in CACHES.items():
        config = configuration(model, cache_dtype)
        with set_current_vllm_config(config):
            if not results:
                init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                initialize_model_parallel(RANKS, decode_context_model_parallel_size=RANKS, backend="gloo")
            results[cache_dtype] = run(config, rank, scale)
    torch.save(results, output)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
