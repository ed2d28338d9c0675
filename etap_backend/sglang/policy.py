"""What SGLang's configuration says of the calls of all backends in a process, and whether the kernels can run them."""

from dataclasses import dataclass

import torch
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor

from etap_backend import engine_contract, sparse_workspace_floats
from etap_backend.sglang.prompts import is_deterministic
from etap_backend.sglang.versions import refuse


@dataclass(frozen=True)
class Policy:
    """How a model is decoded on this rank.

    Attributes:
        num_heads: query heads of a call; decode context parallelism gathers those of its ranks.
        ranks: of decode context parallelism.
        verified: query tokens of a request whose drafts are verified; 1 without drafts.
        max_requests: most requests of a step, which SGLang pads so that the ranks divide each half of it.
        deterministic: whether a result must not depend on the requests beside it.
    """

    num_heads: int
    ranks: int
    verified: int
    max_requests: int
    deterministic: bool

    @classmethod
    def of(cls, model_runner) -> "Policy":
        """That of a runner's model."""
        parallel = get_parallel()
        multiple = 2 * parallel.attn_tp_size
        return cls(
            num_heads=model_runner.model_config.num_attention_heads // parallel.attn_tp_size * parallel.attn_dcp_size,
            ranks=parallel.attn_dcp_size,
            verified=get_spec().speculative_num_draft_tokens or 1,
            max_requests=-(-model_runner.req_to_token_pool.size // multiple) * multiple,
            deterministic=is_deterministic(),
        )

    def check(self, model_runner, why_unsupported, **asked) -> None:
        """Raise ValueError where the kernels cannot run the runner's model.

        Args:
            model_runner: SGLang's.
            why_unsupported: that of `limits` for dense or for sparse attention.
            asked: what it takes besides: widths, and the cache's type.
        """
        on_gpu = torch.device(model_runner.device).type == "cuda"
        reason = why_unsupported(
            dtype=model_runner.dtype,
            num_heads=self.num_heads,
            page_size=model_runner.page_size,
            compute_capability=torch.cuda.get_device_capability() if on_gpu else None,
            **asked,
        )
        refuse(reason or engine_contract.why_no_library())

    def sparse_workspace(self, num_sms: int, device) -> Tensor:
        """Scratch memory of sparse calls on so many CTAs, float32; those that run one after another may share it."""
        return torch.empty(sparse_workspace_floats(self.num_heads, num_sms), dtype=torch.float32, device=device)


def backends_of_steps(backend: type, steps: int, model_runner, **options) -> list:
    """Backends of sparse attention for a draft model's steps, which run one after another and share a workspace."""
    made: list = []
    for step in range(steps):
        workspace = made[0].workspace if made else None
        made.append(backend(model_runner, speculative_step_id=step, workspace=workspace, **options))
    return made
