"""Writes a draft model that proposes blocks of tokens, DSpark's or DFLASH's, without weights: a configuration.

    PYTHONPATH=tests python -m bench.qualify.block_draft TARGET DRAFT [--algorithm dflash]

TARGET is a model's folder. The draft is two dense layers of Qwen3 that read the target's layers 0 and 2. `etap check
answers TARGET -- FLAGS` compares servers that draft with it, by vLLM's `--speculative-config '{"method": "dspark",
"model": DRAFT, "attention_backend": "FLASH_ATTN", "kv_cache_dtype": "auto", ...}'` or SGLang's
`--speculative-algorithm DSPARK --speculative-draft-model-path DRAFT --speculative-draft-attention-backend fa3`.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.checks.asked import configuration

BLOCK = 3  # tokens
READ = (0, 2)  # layers of the target
ARCHITECTURES = {"dspark": "Qwen3DSparkModel", "dflash": "DFlashDraftModel"}
DSPARK = {"markov_rank": 64, "markov_head_type": "vanilla", "sample_from_anchor": True}


def draft_of(target: dict, algorithm: str) -> dict:
    """The draft's configuration for a target's."""
    shape = {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 4096,
        "max_position_embeddings": target["max_position_embeddings"],
    }
    return shape | {
        "architectures": [ARCHITECTURES[algorithm]],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": READ},
        **(DSPARK if algorithm == "dspark" else {}),
    }


def main(
    target: Annotated[Path, typer.Argument(help="The target's folder.", exists=True, file_okay=False)],
    draft: Annotated[Path, typer.Argument(help="The draft's folder, to write.")],
    algorithm: Annotated[Literal["dspark", "dflash"], typer.Option(help="Who proposes.")] = "dspark",
) -> None:
    """Write a draft of blocks for a target."""
    draft.mkdir(parents=True, exist_ok=True)
    (draft / "config.json").write_text(json.dumps(draft_of(configuration(target), algorithm), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
