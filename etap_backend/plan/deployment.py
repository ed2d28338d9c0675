"""Where and how a model is served."""

from __future__ import annotations

from dataclasses import dataclass

from etap_backend.plan.files import CACHE_BYTES, MOST
from etap_backend.plan.model import Model

CACHE_NAMES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "auto": "bfloat16", "fp8": "fp8", "fp8_e4m3": "fp8"}
"""The engines' names of caches."""


def cache_named(name: str, model: Model) -> str:
    """The planner's name of a cache type; "auto" is the model's. Raises ValueError for one that ETAP cannot read."""
    if name not in CACHE_NAMES:
        raise ValueError(f"cache: wanted one of {', '.join(CACHE_NAMES)}, got {name}")
    return "fp8" if model.v4 and name == "auto" else CACHE_NAMES[name]


@dataclass(frozen=True)
class Deployment:
    """GPUs and their layout, the cache, and the load."""

    gpus: int = 8  # tp x dp x pp
    tp: int = 8
    dp: int = 1  # attention runs on each replica; experts are spread over tp x dp
    pp: int = 1
    dcp: int = 1  # decode context parallelism: the tp ranks that share a request's tokens
    cache: str = "bfloat16"  # or "fp8"
    context: int = 16384  # tokens of every request in the cache
    batch: int = 16  # requests that decode at the same time on all GPUs
    s_q: int = 1  # query tokens per request and step; more than 1 with multi-token prediction
    utilization: float = 0.92  # share of the GPU's memory that the engine may take

    @property
    def local_batch(self) -> int:
        """Requests of one attention replica."""
        return -(-self.batch // self.dp)

    def check(self, model: Model) -> None:
        """Raise ValueError, naming the argument, unless the model can be served so."""
        for name in ("gpus", "tp", "dp", "pp", "dcp", "context", "batch", "s_q"):
            if not 1 <= (value := getattr(self, name)) <= MOST:
                raise ValueError(f"{name}: wanted at least 1 and at most {MOST}, got {value}")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization: wanted more than 0 and at most 1, got {self.utilization}")
        if self.cache not in CACHE_BYTES:
            raise ValueError(f"cache: wanted one of {', '.join(CACHE_BYTES)}, got {self.cache}")
        if self.tp * self.dp * self.pp != self.gpus:
            raise ValueError(f"gpus: wanted tp x dp x pp = {self.tp * self.dp * self.pp}, got {self.gpus}")
        self._check_layout(model)

    def _check_layout(self, model: Model) -> None:
        linear = model.linear_attn_config.num_heads if model.linear_attn_config else 0
        heads = {"heads": model.num_attention_heads, "heads of linear attention": linear}
        for what, whole in (heads | {"groups of heads": model.o_groups if model.v4 else 0}).items():
            if whole % self.tp:
                raise ValueError(f"tp: wanted a divisor of {whole} {what}, got {self.tp}")
        if self.tp % self.dcp:
            raise ValueError(f"dcp: wanted a divisor of tp = {self.tp}, got {self.dcp}")
        for name, only in (("dcp", 1), ("cache", "fp8")) if model.v4 else ():
            if (got := getattr(self, name)) != only:
                raise ValueError(f"{name}: wanted {only}, all that the engines have for {model.model_type}, got {got}")
        if not model.divides_into(self.pp):
            apart = " in stages that do not read each other's entries" if model.shares_caches else ""
            raise ValueError(f"pp: wanted at most {model.num_hidden_layers} layers{apart}, got {self.pp}")
