"""SGLang plugin `drawn_experts`, for steps of the whole depth with dummy weights and no prompts to compute.

Dummy weights send all tokens to much the same experts, so each token's experts are drawn. Prompts count as transferred
from another server; the cache, which no prompt has written, starts with random numbers. NCCL gathers logits, because
SGLang's own gathering multicasts over NVLink.
"""

import torch

SPREAD = 4.0  # of the drawn logits; the dummy bias is at most 1e-3
GATHERER = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.MultimemAllGatherer._build"
EXPERTS = "sglang.srt.layers.moe.topk.select_experts"
BUFFERS = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers"
QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue.add"


def draw_logits(*args, **kwargs) -> None:
    """Before select_experts: replace the router's logits, in place."""
    logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
    logits.uniform_(-SPREAD, SPREAD)  # with the default generator a CUDA graph draws anew in each replay


def fill_cache(result, pool, *args, **kwargs) -> None:
    """After an MLA pool has made its buffers: fill those of 16 bits."""
    for layer, buffer in enumerate(pool.kv_buffer):
        if buffer.dtype in (torch.bfloat16, torch.float16):
            buffer.normal_(generator=torch.Generator(buffer.device).manual_seed(layer))


def take_for_transferred(queue, req, *args, **kwargs) -> None:
    """Before a request waits for its cache: it comes from the sender that sends nothing."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    if req.bootstrap_host is None:
        req.bootstrap_host, req.bootstrap_room = FAKE_BOOTSTRAP_HOST, 0


def no_gatherer(self, x) -> None:
    """None is what MultimemAllGatherer._build returns without multicast."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(EXPERTS, draw_logits, HookType.BEFORE)
    HookRegistry.register(BUFFERS, fill_cache, HookType.AFTER)
    HookRegistry.register(QUEUE, take_for_transferred, HookType.BEFORE)
    HookRegistry.register(GATHERER, no_gatherer, HookType.REPLACE)
