"""What a step plans for all its layers: the decode schedule, in buffers that CUDA graphs may keep."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
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

from etap_backend import BuiltSchedule, DecodeSchedule
from etap_backend.vllm import compat

# vLLM gives its handler and level to loggers below "vllm" only.
_logger = init_logger(f"vllm.{__name__}")

SHORT_PROMPT_TOKENS = 128
SHORT_PROMPT_ROWS = 2048
"""Query rows (tokens * heads) of one request that were timed against vLLM's prefill, and won: those of 128 tokens with
16 heads. Each 64 of them read the context again, and more would leave fewer CTAs to divide a lone request's context.
"""


def short_prompt_tokens(vllm_config: VllmConfig, num_heads: int) -> int:
    """Most new tokens of a prompt that go through the decode kernel: 1 where that must not be."""
    parallel = vllm_config.parallel_config
    # The way that a prompt goes depends on its company, and with the way its bits.
    depends_on_company = envs.VLLM_BATCH_INVARIANT
    # A prompt may hit blocks of the prefix cache that another one of its step is writing. vLLM keeps such two out of
    # different micro-batches, but not what it takes for a decode.
    reads_what_is_written = parallel.use_ubatching
    if depends_on_company or reads_what_is_written or compat.pads_tokens_of_no_request(vllm_config):
        return 1
    return max(1, min(SHORT_PROMPT_TOKENS, SHORT_PROMPT_ROWS // num_heads))


def max_query_len(vllm_config: VllmConfig, num_heads: int) -> int:
    """Most query tokens for each request that vLLM sends to `forward_mqa`, before there is a builder to ask."""
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return 1
    return max(compat.max_decode_query_len(vllm_config), short_prompt_tokens(vllm_config, num_heads))


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


def decoded_requests(query_start_loc_cpu: Tensor, num_decode_tokens: int) -> tuple[int, int]:
    """How many requests a step decodes, those that pad it among them, and with how many query tokens each.

    Args:
        query_start_loc_cpu: [requests + 1], where each request's query tokens begin; those that pad a step have none.
        num_decode_tokens: rows of the queries, those of requests that pad the step among them.

    Raises:
        ValueError: requests have other numbers of query tokens than the first.
    """
    query_lens = query_start_loc_cpu.diff().tolist()
    queried = len(query_lens) - query_lens.count(0)
    # A step of padding alone has as many tokens for each request as there is room for.
    s_q = query_lens[0] or max(1, num_decode_tokens // len(query_lens))
    requests, left_over = divmod(num_decode_tokens, s_q)
    uniform = query_lens == [s_q] * queried + [0] * (len(query_lens) - queried)
    if left_over or not uniform or not queried <= requests <= len(query_lens):
        raise ValueError(
            f"query_start_loc_cpu: wanted as many query tokens for each request, {num_decode_tokens} in all, "
            f"got {query_lens}"
        )
    return requests, s_q


@dataclass
class ETAPDecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step; every request has schedule.s_q query tokens."""

    schedule: BuiltSchedule


@dataclass
class ETAPMetadata(MLACommonMetadata[ETAPDecodeMetadata]):
    """A step's metadata: vLLM's own, with ETAP's decode part."""


class ETAPMetadataBuilder(MLACommonMetadataBuilder[ETAPMetadata]):
    """Plans each step, once for all layers and outside the CUDA graph that reads the plan.

    vLLM makes a builder for each micro-batch, so the schedule's buffers belong here.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    # An instance may have less. With decode context parallelism vLLM makes it 1 by itself.
    reorder_batch_threshold: int = SHORT_PROMPT_TOKENS

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, ETAPMetadata)
        # Again, as vLLM did: now the number of heads is known. It raises this to the tokens that it verifies.
        self._init_reorder_batch_threshold(
            short_prompt_tokens(vllm_config, self.num_heads), supports_spec_as_decode=True
        )
        max_s_q = self.reorder_batch_threshold
        _logger.info_once(f"{compat.NAME} decodes: steps of up to {max_s_q} tokens a request")
        # Decode context parallelism gathers the query heads of its ranks before forward_mqa.
        num_heads = self.num_heads * self.dcp_world_size
        self.schedule = DecodeSchedule(
            vllm_config.scheduler_config.max_num_seqs,
            num_heads,
            max_s_q=max_s_q,
            device=device,
            num_sms=num_compute_units(device.index),
            allocate_workspace=False,  # each call claims vLLM's
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        claim_workspace(self.schedule.max_workspace_floats)  # vLLM locks its size before the first step
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
        requests, s_q = decoded_requests(query_start_loc_cpu, num_decode_tokens)
        seq_lens = seq_lens_device[:requests]
        return ETAPDecodeMetadata(
            block_table=block_table_tensor[:requests],
            seq_lens=seq_lens,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            schedule=self.schedule.build(seq_lens, s_q),
        )

    def update_draft_decode_metadata(self, metadata: ETAPMetadata) -> None:
        """Plan the next draft step from the lengths that vLLM advanced on the device; vLLM may capture this."""
        decode = metadata.decode
        decode.schedule = self.schedule.build(decode.seq_lens, decode.schedule.s_q)
