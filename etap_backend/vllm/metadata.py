"""Plans the decode calls of a step once for all layers, in buffers at addresses that CUDA graphs can keep."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from etap_backend import DecodeSchedule, engine_contract
from etap_backend.decode_call import DecodeCall
from etap_backend.short_prompts import MAX_RUNS, SHORT_PROMPT_TOKENS, Run
from etap_backend.vllm import versions
from etap_backend.vllm.log import logger
from etap_backend.vllm.policy import Policy
from etap_backend.vllm.step_cuts import TokenRequests, cut, longest_decode


def claim_workspace(floats: int) -> Tensor:
    """Scratch memory for partials, float32 [floats].

    It is vLLM's workspace manager's, which shares it between layers and gives each micro-batch its own. Hold it for one
    call only: the manager may replace it until vLLM has captured its CUDA graphs.
    """
    (workspace,) = current_workspace_manager().get_simultaneous(((floats,), torch.float32))
    return workspace


@dataclass
class ETAPDecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step.

    Attributes:
        calls: its calls.
        num_tokens: query tokens that they decode; the rows behind belong to no request.
        refill: writes the table and lengths of the call that decodes token by token again, if there is one.
    """

    calls: list[DecodeCall]
    num_tokens: int
    refill: Callable[[], object] | None


@dataclass
class ETAPMetadata(MLACommonMetadata[ETAPDecodeMetadata]):
    """A step's metadata: vLLM's own, with ETAP's decode part."""


class ETAPMetadataBuilder(MLACommonMetadataBuilder[ETAPMetadata]):
    """Plans each step, once for all layers and outside the CUDA graph that reads the plan.

    vLLM makes one builder per micro-batch, so the builder owns the schedules, one per call of a step.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    # Upper bound; an instance may have less.
    reorder_batch_threshold: int = SHORT_PROMPT_TOKENS

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, ETAPMetadata, supports_dcp_with_varlen=True)
        # Decode context parallelism gathers the query heads of its ranks before forward_mqa.
        num_heads = self.num_heads * self.dcp_world_size
        self.policy = policy = Policy.of(vllm_config, num_heads)
        self.reorder_batch_threshold = policy.longest
        logger.info_once(f"{versions.NAME} decodes: steps of up to {policy.longest} tokens per request")
        rows = num_heads * min(policy.verified, policy.max_s_q)
        if slow := engine_contract.small_pages_text(self.page_size, rows):
            logger.warning_once(f"{versions.NAME}: {slow}")
        self._token_by_token = policy.token_by_token and policy.verified > 1
        self._causal = True  # in the step that is being built
        self._early_loads = versions.writes_rows_first(vllm_config, layer_names)
        self.schedules = [
            DecodeSchedule(
                policy.max_batch,
                num_heads,
                max_s_q=policy.max_s_q,
                device=device,
                num_sms=num_compute_units(device.index),
                allocate_workspace=False,  # each call claims it from vLLM
                batch_invariant=policy.batch_invariant,
                fp8_cache=kv_cache_spec.dtype.itemsize == 1,
                fp8_math=policy.fp8_math,
                any_batch=policy.graphs_change_batch,
                shared_prefix=policy.shared_prefix,
            )
            for _ in range(MAX_RUNS)
        ]
        claim_workspace(self.schedules[0].max_workspace_floats)  # vLLM locks its size before the first step
        self._token_requests: TokenRequests | None = None
        if policy.verified > 1:
            max_pages = self.model_config.max_model_len // self.page_size + 1
            group = get_dcp_group() if self.dcp_world_size > 1 else None  # one rank may have no group
            share = (group.world_size, group.rank_in_group, self.dcp_local_block_size) if group else (1, 0, 1)
            self._token_requests = TokenRequests(policy.max_batch, max_pages, device, share)
        # vLLM advances the lengths of draft steps on the device, but not the lengths on one rank of a shared context.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ETAPMetadata:
        """vLLM's metadata, with as many leading requests taken as decodes as MAX_RUNS calls can decode.

        vLLM's method reads the limit from the builder's `reorder_batch_threshold` only, which changes for this step.
        """
        policy = self.policy
        self._causal = common_attn_metadata.causal
        if common_attn_metadata.max_query_len > policy.verified:
            starts = common_attn_metadata.query_start_loc_cpu.numpy()
            runs = cut(starts, int(starts[-1]), policy.verified)
            self.reorder_batch_threshold = longest_decode(runs, policy.longest)
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.reorder_batch_threshold = policy.longest

    @engine_contract.override
    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> ETAPDecodeMetadata:
        runs = cut(query_start_loc_cpu.numpy(), num_decode_tokens, self.policy.verified)
        num_tokens = runs[-1].tokens.stop if runs else 0
        token_by_token = self._token_by_token or not self._causal
        if token_by_token and any(run.s_q != 1 for run in runs):
            runs = [Run(slice(0, runs[-1].requests.stop), slice(0, num_tokens), 0)]
        total_lens = seq_lens_device if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device
        calls, refill = [], None
        for (requests, tokens, s_q), schedule in zip(runs, self.schedules[: len(runs)], strict=True):
            table, seq_lens = block_table_tensor[requests], seq_lens_device[requests]
            if not s_q and self._token_requests is not None:  # at most the first run
                starts = query_start_loc_device[: requests.stop + 1]
                refill = functools.partial(
                    self._token_requests.fill, table, total_lens[requests], starts, tokens.stop, self._causal
                )
                table, seq_lens = refill()
            early_loads = self._early_loads and 0 < s_q <= self.policy.verified
            planned = schedule.build(seq_lens, s_q or 1, block_table=table, page_size=self.page_size)
            calls.append(DecodeCall(tokens, table, seq_lens, planned, early_loads))
        return ETAPDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            calls=calls,
            num_tokens=num_tokens,
            refill=refill,
        )

    def update_draft_decode_metadata(self, metadata: ETAPMetadata) -> None:
        """Plan the next draft step from the lengths that vLLM advanced on the device; vLLM may capture this."""
        if metadata.decode.refill:
            metadata.decode.refill()
        for call, schedule in zip(metadata.decode.calls, self.schedules, strict=False):
            schedule.build(call.seq_lens, call.schedule.s_q, block_table=call.block_table, page_size=self.page_size)
