"""Writes a small DeepSeek-V4 or V4.1 without weights: V4-Flash's shapes as one of 8 ranks has them, 8 layers.

    python -m bench.models.v4 FOLDER [--layers 8] [--drafts 1] [--v41]
    python -m bench answers FOLDER --engine vllm --seeded -- --kv-cache-dtype fp8 --block-size 256
    python -m bench soak FOLDER --engine sglang --seeded

V4's layers are two with only a window, three CSA, three HCA; its experts are fewer and narrower. V4.1's (vLLM 0.33,
without drafts) are two with only a window, three that read pairs and three that read tokens; the first of
each kind keeps the entries; its servers need --kv-cache-dtype fp8 --block-size 64
--language-model-only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.models import dummy

LAYERS = 8
CONTEXT = 4096 + 1024
RANK = {"num_attention_heads": 8, "o_groups": 1}
SMALLER = {"n_routed_experts": 64, "moe_intermediate_size": 256, "expert_dtype": "fp8", "vocab_size": 16384}
SMALLER |= {"max_position_embeddings": CONTEXT}


def v4_config(layers: int = LAYERS, drafts: int = 0) -> dict:
    config, mtp = dummy.shipped("deepseek-v4-flash"), int(drafts > 0)
    config |= RANK | SMALLER | {"num_hidden_layers": layers, "num_hash_layers": 0, "num_nextn_predict_layers": mtp}
    return config | {"compress_ratios": config["compress_ratios"][:layers] + [0] * mtp}


def v41_config(layers: int = LAYERS) -> dict:
    config, pairs = dummy.shipped("deepseek-v4.1-flash"), (layers - 2) // 2
    sources = [2, 2 + pairs]
    text = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [0, 0] + [2] * pairs + [1] * (layers - 2 - pairs),
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources,
        "candidate_source_layer_id": sources[-1],
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    quantization = {"quantization_config": dummy.shipped("deepseek-v4-flash")["quantization_config"]}
    return config | quantization | {"text_config": config["text_config"] | RANK | SMALLER | text}


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    layers: Annotated[int, typer.Option(min=4, max=43, help="The model's first layers.")] = LAYERS,
    drafts: Annotated[int, typer.Option(min=0, help="With a layer for so many drafts.")] = 0,
    v41: Annotated[bool, typer.Option("--v41", help="DeepSeek-V4.1's layers.")] = False,
) -> None:
    """Write a model folder for answers and soak."""
    dummy.write(folder, v41_config(layers) if v41 else v4_config(layers, drafts))


if __name__ == "__main__":
    typer.run(main)
