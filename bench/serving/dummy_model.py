"""A model folder without weights, for the engines' `--load-format dummy`: configuration and a tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path

BYTES = 256
SPECIAL = ("<bos>", "<eos>", "<pad>")
FIRST_RARE = 0x20000  # code points that stand for every id beyond the bytes


def of_one_rank(config: dict, ranks: int, tp: int) -> dict:
    """The configuration in which each of `tp` GPUs does what it would do as one of `ranks` tensor-parallel ranks.

    Raises ValueError when heads or widths do not divide.
    """
    changed = dict(config)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        if not isinstance(config[key], int):
            raise ValueError(f"rank_of: wanted a whole number as {key}, got {config[key]!r}")
        if config[key] * tp % ranks:
            raise ValueError(f"rank_of: wanted a divisor of {key} {config[key]} x {tp}, got {ranks}")
        changed[key] = config[key] * tp // ranks
    return changed


def tokenizer(vocabulary: int):
    """Any text encodes, as bytes; and ids beyond the bytes decode to a text that encodes to the same ids again, so that
    a load generator gets prompts of the length that it asks for. Raises ValueError where the package is missing."""
    try:
        from tokenizers import Tokenizer, decoders, models
    except ImportError as error:
        raise ValueError("dummy weights: wanted the package tokenizers, which comes with the engines") from error

    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(BYTES))]
    words += [chr(FIRST_RARE + index) for index in range(vocabulary - len(words))]
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(list(SPECIAL))
    return made


def write(folder: Path, config: dict) -> Path:
    """Write config.json, generation_config.json and the tokenizer's files into `folder`."""
    bos, eos, pad = range(len(SPECIAL))
    ends = {"bos_token_id": bos, "eos_token_id": eos}
    files = {
        # The version keeps transformers from warning of an old tokenizer's fault.
        "config.json": config | ends | {"pad_token_id": pad, "transformers_version": "5.17.0"},
        "generation_config.json": ends | {"do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": word for name, word in zip(("bos", "eos", "pad"), SPECIAL, strict=True)},
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }
    made = tokenizer(config["vocab_size"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    made.save(str(folder / "tokenizer.json"))
    return folder
