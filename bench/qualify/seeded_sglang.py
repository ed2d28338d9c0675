"""SGLang plugin: `--load-format dummy` draws the weights of `qualify.seeded_weights`, with which attention decides.

    PYTHONPATH=tests python -m bench.qualify.seeded_sglang etap check answers MODEL --engine sglang -- --load-format dummy

runs a command whose servers of SGLang know it. SGLang's own dummy weights are of +-0.001: its logits are all but equal
whatever attention computes.

A DeepSeek-V4 with fewer heads than FlashMLA knows, 64 and 128, then runs on one GPU as on a rank of several, for which
SGLang pads them: `qualify.v4_server.write_model` writes such a model.
"""

import os
import sys

import torch
from torch import nn

from bench.qualify import seeded_weights

INITIALIZER = "sglang.srt.model_loader.loader.initialize_dummy_weights"


@torch.no_grad()
def initialize(model: nn.Module, *args, **kwargs) -> None:
    """For initialize_dummy_weights: the same weights whatever attends. Buffers, and scales of a cache, stay as made."""
    for name, parameter in model.named_parameters():
        if parameter.dim():
            seeded_weights.fill(name, parameter)
    for layer in model.modules():
        if hasattr(layer, "attn_sink"):  # V4's attention; what it sums over ranks was decided when it was made
            layer.attn_tp_size = max(layer.attn_tp_size, 2)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(INITIALIZER, initialize, HookType.REPLACE)


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_DSV4_FP4_EXPERTS", "0")  # SGLang's guess where no checkpoint tells; here they are FP8
    sys.exit(seeded_weights.run(sys.argv[1:], "sglang.srt.plugins", "qualify.seeded_sglang"))
