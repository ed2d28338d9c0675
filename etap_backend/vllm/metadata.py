"""What a step plans for all its layers: the decode schedule, in buffers that CUDA graphs may keep."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from etap_backend import DecodeSchedule


def workspace_floats(vllm_config: VllmConfig, num_heads: int, max_s_q: int, num_sms: int) -> int:
    """Floats of scratch memory that the largest step needs."""
    return DecodeSchedule.workspace_floats(
        num_heads,
        max_s_q,
        num_sms,
        max_batch=vllm_config.scheduler_config.max_num_seqs,
        batch_invariant=envs.VLLM_BATCH_INVARIANT,
    )


def claim_workspace(floats: int) -> Tensor:
    """Scratch memory for the partial results, float32 [floats].

    It comes from vLLM's workspace manager, which shares it with the other layers' scratch and gives each micro-batch
    its own. Hold it no longer than one call: the manager may replace it until vLLM has captured its CUDA graphs.
    """
    (workspace,) = current_workspace_manager().get_simultaneous(((floats,), torch.float32))
    return workspace


@dataclass
class ETAPDecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step; every request has schedule.s_q query tokens."""

    schedule: DecodeSchedule


@dataclass
class ETAPMetadata(MLACommonMetadata[ETAPDecodeMetadata]):
    """A step's metadata: vLLM's own, with ETAP's decode part."""


class ETAPMetadataBuilder(MLACommonMetadataBuilder[ETAPMetadata]):
    """Plans each step, once for all layers and outside the CUDA graph that reads the plan.

    vLLM makes a builder for each micro-batch, so the schedule's buffers belong here.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    # vLLM raises it to the tokens that speculative decoding verifies; more than that would bring in short prefills.
    reorder_batch_threshold: int = 1

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, ETAPMetadata)
        # Decode context parallelism gathers the query heads of its ranks before forward_mqa.
        num_heads = self.num_heads * self.dcp_world_size
        num_sms = num_compute_units(device.index)
        max_s_q = self.reorder_batch_threshold
        self.schedule = DecodeSchedule(
            vllm_config.scheduler_config.max_num_seqs,
            num_heads,
            max_s_q=max_s_q,
            device=device,
            num_sms=num_sms,
            workspace=claim_workspace(workspace_floats(vllm_config, num_heads, max_s_q, num_sms)),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        # vLLM advances the lengths of draft steps on the device, but not those of a rank's share of the context.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    # vLLM calls it with keywords, max_query_len among them since 0.31.
    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        max_query_len: int | None = None,
    ) -> ETAPDecodeMetadata:
        requests = seq_lens_device.shape[0]
        s_q, left_over = divmod(num_decode_tokens, requests)
        if left_over:
            raise ValueError(
                f"num_decode_tokens: wanted the same number of query tokens for each of {requests} requests, "
                f"got {num_decode_tokens} in all"
            )
        return ETAPDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            schedule=self.schedule.build(seq_lens_device, s_q),
        )

    def update_draft_decode_metadata(self, metadata: ETAPMetadata) -> None:
        """Plan the next draft step from the lengths that vLLM advanced on the device; vLLM may capture this."""
        metadata.decode.schedule.build(metadata.decode.seq_lens, metadata.decode.schedule.s_q)
