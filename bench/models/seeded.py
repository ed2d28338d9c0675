"""Random weights with which attention decides what a model answers, equal for every attention backend.

The plugin `seeded` (see plugins.py) gives vLLM the load format `seeded`, and replaces SGLang's dummy weights. The
engines' own dummy weights are within +-0.001, so that logits are all but equal whatever attention computes. Here each
matrix keeps the variance of its input, and a few gains see to it that

- scores spread, so that softmax picks few of thousands of tokens, as in trained models (q_b_proj);
- attention's share of the residual stream stays large although it averages over the context (o_proj);
- an expert exchanged for another changes little (w2): rounding sometimes decides which experts are the best;
- log-probabilities spread, so that greedy decoding seldom meets a tie (lm_head).

A weight depends on its name and shape. FP8 weights in blocks get their variance from the scales; integers are zeros.
SGLang runs a DeepSeek-V4 with fewer than 64 heads on one GPU as on one of several ranks, padding its heads.
"""

import math
import re
import zlib

import torch
from torch import nn

LOAD_FORMAT = "seeded"
GAINS = {
    **{"q_b_proj.weight": 1.25, "wq_b.weight": 1.25, "q_proj.weight": 1.25, "o_proj.weight": 4.0, "wo_b.weight": 4.0},
    **{"w2_weight": 0.25, "lm_head.weight": 3.0},
}
SCALE = re.compile(r"_scale(_inv)?$")  # of a weight in blocks of BLOCK columns
BLOCK = 128
FP8_DEVIATION = 16.0  # of e4m3 weights, whose range is 448
HYPER_CONNECTION = 0.5  # deviation of DeepSeek-V4's vectors that mix residual streams
# What models of vLLM compute from their weights after loading.
FINISHING = ("finalize_mega_moe_weights", "finalize_mhc_broadcast_weights")
INITIALIZER = "sglang.srt.model_loader.loader.initialize_dummy_weights"


def fill(name: str, parameter: torch.Tensor) -> None:
    """Set a parameter: matrices [..., outputs, inputs] to random values, biases and sinks to 0, other vectors to 1."""
    if parameter.is_meta:  # a part of the model that is not loaded
        return
    if not parameter.is_floating_point():
        parameter.zero_()
        return
    generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
    inputs = 1 if "embed" in name else parameter.shape[-1]
    gain = next((gain for suffix, gain in GAINS.items() if SCALE.sub("", name).endswith(suffix)), 1.0)
    if parameter.dim() < 2:
        if "hc_" in name:
            parameter.normal_(0.0, HYPER_CONNECTION, generator=generator)
        else:
            parameter.fill_(float(not name.endswith(("bias", "sink"))))
    elif SCALE.search(name):
        parameter.fill_(gain / FP8_DEVIATION / math.sqrt(inputs * BLOCK))
    elif parameter.element_size() == 1:
        for rows in parameter.flatten(0, -2).split(2**16):  # parts: float32 takes four times the memory
            drawn = torch.empty(rows.shape, device=rows.device).normal_(0.0, FP8_DEVIATION, generator=generator)
            rows.copy_(drawn.to(rows.dtype))
    else:
        parameter.normal_(0.0, gain / math.sqrt(inputs), generator=generator)


def register_vllm() -> None:
    """vLLM plugin: add the load format. May be called any number of times."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class SeededLoader(model_loader.BaseModelLoader):
        def download_model(self, model_config) -> None:
            """Nothing to download."""

        @torch.no_grad()
        def load_weights(self, model: nn.Module, model_config) -> None:
            for name, parameter in model.named_parameters():
                fill(name, parameter)
            for finish in FINISHING:
                getattr(getattr(model, "model", None), finish, lambda: None)()

    model_loader.register_model_loader(LOAD_FORMAT)(SeededLoader)


@torch.no_grad()
def initialize(model: nn.Module, *args, **kwargs) -> None:
    """SGLang's initialize_dummy_weights. Buffers and the scales of a cache stay as made."""
    for name, parameter in model.named_parameters():
        if parameter.dim():
            fill(name, parameter)
    for layer in model.modules():
        if hasattr(layer, "attn_sink"):  # DeepSeek-V4's attention, which pads heads on several ranks only
            layer.attn_tp_size = max(layer.attn_tp_size, 2)


def register_sglang() -> None:
    """SGLang plugin: replace the dummy weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(INITIALIZER, initialize, HookType.REPLACE)
