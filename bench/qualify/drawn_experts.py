"""SGLang plugin for measuring steps with made-up weights and no prompts computed.

    PYTHONPATH=tests python -m bench.qualify.drawn_experts etap e2e decode-full --engine sglang --gpus 4 --rank-of 8

runs a command whose servers of SGLang know it; the scenario's SGLANG_PLUGINS names it. Made-up weights send all tokens
to much the same few experts, so each token's are drawn. Prompts count as transferred from a server that is not there; a
cache that no prompt has written is all zeros, so it starts with random numbers. And logits are gathered by NCCL, for
SGLang's own gathering multicasts over NVLink.
"""

import sys

import torch

SPREAD = 4.0  # of the drawn logits, wide beside the made-up bias of 1e-3 at most
GATHERER = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.MultimemAllGatherer._build"


def draw_logits(*args, **kwargs) -> None:
    """Before select_experts: other logits of the router, in place. SGLang's own kernels choose by them."""
    logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
    logits.uniform_(-SPREAD, SPREAD)  # by the default generator: a CUDA graph draws anew in each replay


def fill_cache(result, pool, *args, **kwargs) -> None:
    """After the buffers of an MLA pool have been made, those of 16 bits."""
    for layer, buffer in enumerate(pool.kv_buffer):
        if buffer.dtype in (torch.bfloat16, torch.float16):
            buffer.normal_(generator=torch.Generator(buffer.device).manual_seed(layer))


def take_for_transferred(queue, req, *args, **kwargs) -> None:
    """Before a request waits for its cache: where nobody sent it, it comes from the sender that sends nothing."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    if req.bootstrap_host is None:
        req.bootstrap_host, req.bootstrap_room = FAKE_BOOTSTRAP_HOST, 0


def no_gatherer(self, x) -> None:
    """For MultimemAllGatherer._build, which says so where there is no multicast."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.moe.topk.select_experts", draw_logits, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers", fill_cache, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue.add", take_for_transferred, HookType.BEFORE
    )
    HookRegistry.register(GATHERER, no_gatherer, HookType.REPLACE)


if __name__ == "__main__":
    from bench.qualify import seeded_weights

    sys.exit(seeded_weights.run(sys.argv[1:], "sglang.srt.plugins", "qualify.drawn_experts"))
