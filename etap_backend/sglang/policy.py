"""What SGLang's configuration fixes for all calls of a rank, and whether the kernels can run them."""

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
        num_heads: query heads per call; decode context parallelism gathers the heads of its ranks.
        ranks: ranks of decode context parallelism.
        verified: query tokens per request in a verification of drafts; 1 without drafts.
        max_requests: most requests per step; SGLang pads steps so that the ranks divide each half.
        deterministic: whether a request's result must not depend on the other requests.
        shared_prefix: whether pages that requests begin with are read once for several requests; dense attention only.
    """

    num_heads: int
    ranks: int
    verified: int
    max_requests: int
    deterministic: bool
    shared_prefix: bool

    @classmethod
    def of(cls, model_runner) -> "Policy":
        """The policy of a runner's model."""
        parallel = get_parallel()
        multiple = 2 * parallel.attn_tp_size
        return cls(
            num_heads=model_runner.model_config.num_attention_heads // parallel.attn_tp_size * parallel.attn_dcp_size,
            ranks=parallel.attn_dcp_size,
            verified=get_spec().speculative_num_draft_tokens or 1,
            max_requests=-(-model_runner.req_to_token_pool.size // multiple) * multiple,
            deterministic=is_deterministic(),
            shared_prefix=engine_contract.shares_prefixes(),
        )

    def check(self, model_runner, why_unsupported, **asked) -> None:
        """Raise ValueError where the kernels cannot run the runner's model.

        Args:
            model_runner: SGLang's.
            why_unsupported: the function of `limits` for dense or for sparse attention.
            asked: its other arguments: widths, and the cache's type.
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
        """Scratch memory of sparse calls on num_sms CTAs, float32; calls that run one after another may share it."""
        return torch.empty(sparse_workspace_floats(self.num_heads, num_sms), dtype=torch.float32, device=device)


def backends_of_steps(backend: type, steps: int, model_runner, **options) -> list:
    """One backend of sparse attention per step of a draft model; they share a workspace."""
    made: list = []
    for step in range(steps):
        workspace = made[0].workspace if made else None
        made.append(backend(model_runner, speculative_step_id=step, workspace=workspace, **options))
    return made
