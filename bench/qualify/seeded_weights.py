"""vLLM load format `seeded`: random weights with which attention decides what the model answers.

    PYTHONPATH=tests python -m bench.qualify.seeded_weights etap check answers MODEL -- --load-format seeded

runs a command whose servers of vLLM know it, for a MODEL that is a configuration and a tokenizer.

vLLM's own `--load-format dummy` draws every weight, the normalizations' too, from +-0.001: its logits are all but equal
whatever attention computes. Here each matrix keeps the variance of what it multiplies, and a few gains see to it that

- scores spread, so that softmax picks few tokens out of thousands (q_b_proj), as trained models do;
- attention's share of the residual stream stays large although it averages over the context (o_proj);
- a routed expert exchanged for another changes little (experts' w2): which experts are the best eight is decided by a
  hair now and then, and would turn rounding into differences as large as those of a wrong context;
- log-probabilities spread, so that greedy decoding seldom meets a tie (lm_head).

A weight depends on its name and shape only, so every attention backend gets the same model on as many ranks: a shard
is drawn by itself. FP8 weights in blocks get their variance from the scales; integers are zeros.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from torch import nn

LOAD_FORMAT = "seeded"
GAINS = {
    **{"q_b_proj.weight": 1.25, "wq_b.weight": 1.25, "q_proj.weight": 1.25, "o_proj.weight": 4.0, "wo_b.weight": 4.0},
    **{"w2_weight": 0.25, "lm_head.weight": 3.0},
}
SCALE = re.compile(r"_scale(_inv)?$")  # of a weight in blocks of BLOCK columns
BLOCK = 128
FP8_DEVIATION = 16.0  # of weights in e4m3, which reach 448
HYPER_CONNECTION = 0.5  # deviation of DeepSeek-V4's vectors that mix residual streams
# What a model of vLLM works out from its weights when it has loaded them.
FINISHING = ("finalize_mega_moe_weights", "finalize_mhc_broadcast_weights")


def fill(name: str, parameter: torch.Tensor) -> None:
    """Set one parameter: matrices [..., outputs, inputs] to random values, biases and sinks to 0, others to 1."""
    if parameter.is_meta:  # of a part of the model that is not loaded
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
        for rows in parameter.flatten(0, -2).split(2**16):  # one at a time: float32 takes four times as much
            drawn = torch.empty(rows.shape, device=rows.device).normal_(0.0, FP8_DEVIATION, generator=generator)
            rows.copy_(drawn.to(rows.dtype))
    else:
        parameter.normal_(0.0, gain / math.sqrt(inputs), generator=generator)


def register() -> None:
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


def run(command: list[str], group: str = "vllm.general_plugins", module: str = "qualify.seeded_weights") -> int:
    """Run a command in whose environment an engine finds a module's `register`, as a plugin that exists meanwhile."""
    name = module.rpartition(".")[2]
    with tempfile.TemporaryDirectory() as folder:
        distribution = Path(folder) / f"{name}-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (distribution / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:register\n")
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        found = [folder, str(Path(__file__).parents[1]), *filter(None, inherited)]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(found)}).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
