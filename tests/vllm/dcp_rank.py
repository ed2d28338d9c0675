"""One of two ranks that share each context, on the CPU: `main` saves its results in the file OUTPUT.

Groups, layer, builder, collectives and merging are vLLM's; Triton's interpreter runs the merging kernel. Where a rank
has several consecutive tokens, prefixes are shared; that configuration needs the largest workspace and is the last.
"""

import importlib.metadata
import os
from contextlib import nullcontext

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.ops import dcp
from vllm.v1.worker import workspace
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from etap_backend.vllm.metadata import claim_workspace
from support.cases import stacked_from
from support.vllm_layer import (
    CACHES,
    DCP_CONFIGURATIONS,
    DCP_STEPS,
    HEADS,
    MAX_REQUESTS,
    SPECULATIVE,
    Problem,
    build_layer,
    decode,
    make_builder,
)

RANKS, H200_SMS = 2, 132

COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


def prepare() -> None:
    """Stand in for what needs a GPU, and give a kernel an attribute that Triton's interpreter lacks."""
    real = importlib.metadata.version  # a newer version, of which one rank warns
    importlib.metadata.version = lambda name: "0.99.0" if name == "vllm" else real(name)
    load_general_plugins()
    torch.accelerator.empty_cache = lambda: None
    platform = type(current_platform)
    platform.device_count = classmethod(lambda cls: RANKS)
    platform.num_compute_units = classmethod(lambda cls, device_id=0: H200_SMS)
    platform.get_device_communicator_cls = classmethod(lambda cls: COMMUNICATOR)
    platform.use_custom_op_collectives = classmethod(lambda cls: False)  # those are for CUDA tensors
    workspace.init_workspace_manager(torch.device("cpu"), 1)
    kernel = dcp.CorrectAttnCPOutKernel.kernel
    kernel.constexprs = [name for name in kernel.arg_names if name.isupper()]


def share_of(problem: Problem, rank: int, interleave: int) -> tuple[Problem, list[int]]:
    """The step with the tokens that vLLM's interleaved cache gives to one rank, and their number per request."""
    local = [rows[torch.arange(len(rows)) // interleave % RANKS == rank] for rows in problem.stored]
    share = Problem([max(1, len(rows)) for rows in local], problem.query_lens, block=problem.block)
    share.q = problem.q[:, rank * HEADS : (rank + 1) * HEADS]
    share.store(local, len(share.cache))
    return share, [len(rows) for rows in local]


def configuration(model: str, cache_dtype: str, interleave: int, block: int, **changes):
    """vLLM's configuration of two ranks; keywords change the model's."""
    heads = {"num_attention_heads": RANKS * HEADS, "num_key_value_heads": RANKS * HEADS}
    return EngineArgs(
        model=model,
        attention_backend="ETAP",
        kv_cache_dtype=cache_dtype,
        block_size=block,
        max_model_len=2048,
        max_num_seqs=MAX_REQUESTS,
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides=heads | changes,
        tensor_parallel_size=RANKS,
        decode_context_parallel_size=RANKS,
        cp_kv_cache_interleave_size=interleave,
        speculative_config=SPECULATIVE["speculative_config"],
    ).create_engine_config()


def run(config, rank: int, scale: float | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output of this rank's layer in each step, and its weight."""
    layer = build_layer(config, HEADS)
    layer._k_scale.fill_(scale or 1.0)
    layer.impl.reserve_workspace()
    workspace.lock_workspace()  # the builder may not need more
    builder = make_builder(layer, config)
    check_attention_cp_compatibility(config)
    schedule = builder.schedules[0]
    assert schedule.num_heads == RANKS * HEADS
    assert (builder.reorder_batch_threshold, schedule.max_s_q) == (4, 1), "drafts are decoded, each token by itself"
    try:
        claim_workspace(schedule.max_workspace_floats + 1)
    except AssertionError:
        pass  # locked at what the builder needs
    else:
        raise RuntimeError("the layer claimed more than its builder needs")
    workspace.unlock_workspace()
    assert not builder.supports_draft_decode_metadata_update
    interleave = config.parallel_config.cp_kv_cache_interleave_size
    weight = layer.kv_b_proj.weight.detach().clone()
    return {name: (run_step(layer, builder, step, rank, interleave, scale), weight) for name, step in DCP_STEPS.items()}


def run_step(layer, builder, step, rank: int, interleave: int, scale: float | None) -> torch.Tensor:
    """Output of a step with metadata from a CUDA graph's capture with other lengths."""
    problem = Problem(*step, heads=RANKS * HEADS, kv_scale=scale, block=builder.page_size)
    share, lengths = share_of(problem, rank, interleave)
    common = share.common_metadata()
    common.dcp_local_seq_lens = torch.tensor(lengths, dtype=torch.int32)
    common.seq_lens.fill_(4)
    captured = builder.build_for_cudagraph_capture(common)
    common.seq_lens.copy_(torch.tensor(problem.lengths))
    planned = builder.build(0, common)
    assert (planned.num_decodes, planned.num_decode_tokens) == (len(problem.lengths), problem.tokens)
    (call,) = planned.decode.calls
    assert call.schedule.batch == problem.tokens
    if interleave > 1 and max(problem.lengths) > 1024:
        assert call.schedule.shared[-1, 0] > 0, "tokens of a request share its context"
    return decode(layer, share, captured)


def main(rank: int, port: str, model: str, output: str) -> None:
    prepare()
    results = {}
    for cache_dtype, interleave, block in DCP_CONFIGURATIONS:
        config = configuration(model, cache_dtype, interleave, block)
        os.environ["ETAP_SHARED_PREFIX"] = "1" if interleave > 1 else "0"
        with set_current_vllm_config(config), stacked_from(0) if interleave > 1 else nullcontext():
            if not results:
                init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                initialize_model_parallel(RANKS, decode_context_model_parallel_size=RANKS, backend="gloo")
            for step, result in run(config, rank, CACHES[cache_dtype]).items():
                results[cache_dtype, interleave, block, step] = result
    torch.save(results, output)
