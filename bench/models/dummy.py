"""Model folders without weights: a configuration of configs/models, changed, and a tokenizer for load generators."""

from __future__ import annotations

import json
from pathlib import Path

from bench.common import configs

BYTES = 256
SPECIAL = ("<bos>", "<eos>", "<pad>")
FIRST_RARE = 0x20000  # code points for the ids beyond the bytes


def shipped(name: str) -> dict:
    """A configuration of configs/models. Raises ValueError for another name."""
    return json.loads(configs.find("models", name, ".json").read_text())


def changed(name: str, changes: dict, rank_of: int | None = None, tp: int = 1) -> dict:
    """A shipped configuration with changes; `rank_of` gives each of `tp` GPUs the work of one of so many ranks.

    Raises ValueError for unknown keys, and for models with images, which need more than a tokenizer.
    """
    whole = shipped(name)
    if "text_config" in whole:
        raise ValueError(f"model: wanted a text model for dummy weights, got {name}")
    if unknown := set(changes) - set(whole):
        raise ValueError(f"changes: wanted keys of {name}'s config.json, got {', '.join(sorted(unknown))}")
    config = whole | changes
    if not config.get("quantization_config", True):  # engines take its presence for a wish
        del config["quantization_config"]
    return of_one_rank(config, rank_of, tp) if rank_of else config


def of_one_rank(config: dict, ranks: int, tp: int) -> dict:
    """The configuration in which `tp` GPUs do the work of `tp` of `ranks` tensor-parallel ranks.

    Raises ValueError when heads or widths do not divide.
    """
    keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
    for key in (key for key in keys if key in config):
        if not isinstance(config[key], int) or config[key] * tp % ranks:
            raise ValueError(f"rank_of: wanted a divisor of {key} {config[key]} x {tp}, got {ranks}")
    return config | {key: config[key] * tp // ranks for key in keys if key in config}


def tokenizer(vocabulary: int):
    """A tokenizer that encodes any text as bytes, and decodes other ids to text that encodes to the same ids again, so
    that prompts of load generators have the wanted length."""
    from tokenizers import Tokenizer, decoders, models

    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(BYTES))]
    words += [chr(FIRST_RARE + index) for index in range(vocabulary - len(words))]
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(list(SPECIAL))
    return made


def write(folder: Path, config: dict) -> Path:
    """Write configuration and tokenizer into the folder."""
    (bos, eos, pad), text = range(len(SPECIAL)), config.get("text_config", config)
    ends = {"bos_token_id": bos, "eos_token_id": eos}
    files = {
        # With the version transformers does not warn of an old tokenizer.
        "config.json": config | ends | {"pad_token_id": pad, "transformers_version": "5.17.0"},
        "generation_config.json": ends | {"do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": word for name, word in zip(("bos", "eos", "pad"), SPECIAL, strict=True)},
            # Load generators leave these ids out: bytes that are no text would come back as other, longer text.
            "additional_special_tokens": [f"<0x{byte:02X}>" for byte in range(BYTES)],
            "model_max_length": text["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer(text["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder
