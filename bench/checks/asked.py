"""What servers are asked for in checks: a backend with its cache, math and GPUs, who drafts, and a small KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bench.common.results import read_json
from bench.serving.engines import ENGINES, FORCED_TOKENS, Engine, Serving, takes_processors
from etap_backend.limits import SPARSE_FP8

PACKAGES = ("etap-backend", "torch", "apache-tvm-ffi", "triton", "flashinfer-python", "sglang-kernel")
ETAP = "ETAP"
MEMORY_SHARE = 0.5
MANY = 256  # requests in flight
DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Variant:
    """An attention backend, its KV cache, its graphs and its GPUs: `ETAP`, `ETAP+fp8`, `ETAP+fp8+math` with FP8 math,
    `ETAP+eager` without CUDA graphs, `ETAP@tp2`, `ETAP@dcp2`."""

    backend: str
    cache: str = "auto"
    fp8_math: bool = False
    tp: int = 1
    dcp: int = 1
    eager: bool = False

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Raises ValueError when behind an @ there is no layout, or behind a + more than one type of cache."""
        first, at, layout = name.partition("@")
        backend, *words = first.split("+")
        caches = [word for word in words if word not in ("math", "eager")]
        if len(caches) > 1:
            raise ValueError(f"--backends: wanted BACKEND[+CACHE][+math][+eager][@LAYOUT], got {name!r}")
        tp, dcp = parse_layout(layout) if at else (1, 1)
        return cls(backend, *(caches or ["auto"]), "math" in words, tp, dcp, "eager" in words)

    @property
    def is_etap(self) -> bool:
        return self.backend.upper() == ETAP

    @property
    def own_cache(self) -> bool:
        """Whether the cache has the model's own type."""
        return self.cache == "auto"

    @property
    def one_gpu(self) -> bool:
        return self.tp == 1

    def asked_of(self, engine: Engine) -> tuple[str, list[str]]:
        """Name and flags by which a server is asked for it."""
        name, flags = engine.fp8_math if self.fp8_math else (self.backend, [])
        return name, ["--kv-cache-dtype", self.cache, *flags, *([engine.eager] if self.eager else [])]

    def proof(self, sparse: bool = False) -> str:
        """What the log says besides when ETAP has this cache and math, in a model of dense or of sparse attention."""
        if not self.is_etap:
            return ""
        if sparse:
            return f"sparse attention, KV cache {'bfloat16' if self.own_cache else SPARSE_FP8}"
        return "" if self.own_cache else f"KV cache FP8 (e4m3), math {'FP8 (e4m3)' if self.fp8_math else 'float16'}"


def configuration(model: Path) -> dict:
    """The model's, of a multimodal one the text's. Raises ValueError where the folder has none."""
    config = read_json(model / "config.json")
    return config.get("text_config") or config


def is_sparse(config: dict) -> bool:
    """Whether the model's attention is sparse."""
    return "index_topk" in config


def is_v4(config: dict) -> bool:
    """Whether the model's layers attend as DeepSeek-V4's."""
    return "compress_ratios" in config


def checked(what: str, engine: str, v4: bool) -> str:
    """What a results file is of, as a page shows it."""
    return f"{what}, {engine}, DeepSeek-V4" if v4 else f"{what}, {engine}"


def parse_layout(text: str) -> tuple[int, int]:
    """Ranks of tensor and of decode context parallelism, from tp2, dcp2 or the like. Raises ValueError otherwise."""
    if not (found := re.fullmatch(r"(tp|dcp)([1-9]\d*)", text)):
        raise ValueError(f"--layouts: wanted some of tp2, dcp2 and the like, got {text!r}")
    ranks = int(found[2])
    return ranks, ranks if found[1] == "dcp" else 1


def on_gpus(backends: list[str], layouts: list[str]) -> list[str]:
    """These, and ETAP in each layout besides."""
    etap = [name for name in backends if Variant.parse(name).is_etap]
    return [*backends, *(f"{name}@{layout}" for layout in layouts for name in etap)]


@dataclass(frozen=True)
class Asked:
    """What an engine is asked for here.

    Attributes:
        backends, sparse, v4: attention backends for models of dense and of sparse attention and for DeepSeek-V4, the
            reference first.
        modes: who proposes tokens.
        forces: whether it can be made to answer given tokens.
        roomy: modes with room for all requests, in which none is preempted.
    """

    engine: Engine
    backends: tuple[str, ...]
    sparse: tuple[str, ...]
    v4: tuple[str, ...]
    modes: tuple[str, ...]
    forces: bool
    roomy: tuple[str, ...] = ()

    def serving(
        self, model: Path | str, mode: str, variant: Variant, requests: int = MANY, context: int | None = None
    ) -> Serving:
        drafts = {"draft_tokens": DRAFT_TOKENS, "drafter": mode} if mode != "plain" else {}
        return Serving(str(model), tp=variant.tp, dcp=variant.dcp, max_requests=requests, max_context=context, **drafts)

    def forcing(self, mode: str) -> list[str]:
        """What makes a server answer given tokens, where it can and takes more than the requests for it."""
        return ["--logits-processors", FORCED_TOKENS] if self.forces and mode == "plain" and takes_processors() else []

    def flags(self, mode: str, cache_tokens: int, variant: Variant) -> list[str]:
        """Besides those of every server: a small cache, and in plain mode what forces answers."""
        room = (8 * cache_tokens if mode in self.roomy else cache_tokens) // variant.dcp
        flags = [*self.engine.small_cache(room), self.engine.memory_share, str(MEMORY_SHARE)]
        return [*flags, *self.forcing(mode)]


ASKED = {
    "vllm": Asked(
        ENGINES["vllm"],
        ("FLASHMLA", ETAP, "TRITON_MLA"),
        ("FLASH_ATTN_MLA_SPARSE", ETAP, "FLASHMLA_SPARSE"),
        ("FLASHMLA_SPARSE", ETAP),
        ("plain", "mtp", "ngram"),
        forces=True,
    ),
    # SGLang 0.5.17 loses a log-probability of a drafting request that it retracts.
    "sglang": Asked(
        ENGINES["sglang"],
        ("flashmla", "etap", "triton"),
        ("dsa", "etap"),
        ("dsv4", "etap"),
        ("plain", "mtp"),
        forces=False,
        roomy=("mtp",),
    ),
}
