"""What a step plans for all its layers: its decode calls, in buffers that CUDA graphs may keep."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_dcp_group
from vllm.logger import init_logger
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

from etap_backend import BuiltSchedule, DecodeSchedule, engine_contract
from etap_backend.short_prompts import MAX_RUNS, SHORT_PROMPT_TOKENS, Run, short_prompt_tokens
from etap_backend.vllm import versions
from etap_backend.vllm.runs import TokenRequests, cut_into_runs, longest_decode, padded_query_lens

# vLLM gives its handler and level to loggers below "vllm" only.
_logger = init_logger(f"vllm.{__name__}")

FP8_MATH_OPTION = "etap_fp8_math"
"""`--additional-config '{"etap_fp8_math": true}'`: an FP8 cache is multiplied as it is, by queries rounded to e4m3;
otherwise as float16, exactly. vLLM's configuration is the same for all ranks, an environment need not be.
"""


def longest_prompt(vllm_config: VllmConfig, num_heads: int) -> int:
    """Most new tokens of a prompt that go through the decode kernel: 1 where that must not be."""
    parallel = vllm_config.parallel_config
    # A prompt may hit blocks of the prefix cache that another one of its step is writing. vLLM keeps such two out of
    # different micro-batches, but not what it takes for a decode.
    reads_what_is_written = parallel.use_ubatching
    if is_token_by_token(vllm_config) or reads_what_is_written or versions.pads_tokens_of_no_request(vllm_config):
        return 1
    return short_prompt_tokens(num_heads)


def is_token_by_token(vllm_config: VllmConfig) -> bool:
    """Whether each query token is planned as a request of its own.

    With decode context parallelism because a rank has some of a request's last tokens only, and the kernel's causal
    mask wants all. With batch invariance because the way that a token goes must not depend on those beside it.
    """
    return vllm_config.parallel_config.decode_context_parallel_size > 1 or envs.VLLM_BATCH_INVARIANT


def graphs_change_batch(vllm_config: VllmConfig) -> bool:
    """Whether a CUDA graph may be replayed with a plan for another number of requests than at its capture.

    Micro-batches cut a request with drafts in two, which graphs do not expect; and where the number of drafts changes,
    the draft model's graph may be one for more requests than the target's step had.
    """
    drafts = vllm_config.speculative_config
    micro_batches = vllm_config.parallel_config.use_ubatching
    return drafts is not None and (micro_batches or drafts.uses_dynamic_speculative_decoding())


def wants_fp8_math(config: VllmConfig) -> bool:
    """What the option says; raises ValueError unless it is true, false or absent, and for other options of ETAP's."""
    options = config.additional_config
    if not isinstance(options, dict):  # another plugin's own class
        return False
    if unknown := [name for name in options if name.lower().startswith("etap") and name != FP8_MATH_OPTION]:
        raise ValueError(f"additional_config: wanted {FP8_MATH_OPTION} at most, got {', '.join(unknown)}")
    value = options.get(FP8_MATH_OPTION, False)
    if not isinstance(value, bool):
        raise ValueError(f"additional_config: {FP8_MATH_OPTION}: wanted true or false, got {value!r}")
    return value


class Limits(NamedTuple):
    """What one call may be asked for.

    Attributes:
        verified: most query tokens of a request that is decoded: 1, and its drafts.
        longest: most of any request that is sent to `forward_mqa`.
        max_s_q: most of any request as a call has it.
        max_batch: most requests as a call has them.
    """

    verified: int
    longest: int
    max_s_q: int
    max_batch: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, num_heads: int) -> "Limits":
        """Those of a configuration with so many heads in a call; there need not be a builder yet."""
        verified = versions.max_decode_query_len(vllm_config)
        longest = max(verified, longest_prompt(vllm_config, num_heads))
        max_s_q = 1 if is_token_by_token(vllm_config) else longest
        return cls(verified, longest, max_s_q, vllm_config.scheduler_config.max_num_seqs * verified)

    def workspace_floats(self, num_heads: int, num_sms: int) -> int:
        """Floats of scratch memory that the largest call needs."""
        return DecodeSchedule.workspace_floats(
            num_heads, self.max_s_q, num_sms, max_batch=self.max_batch, batch_invariant=envs.VLLM_BATCH_INVARIANT
        )


def claim_workspace(floats: int) -> Tensor:
    """Scratch memory for the partial results, float32 [floats].

    It comes from vLLM's workspace manager, which shares it with the other layers' scratch and gives each micro-batch
    its own. Hold it no longer than one call: the manager may replace it until vLLM has captured its CUDA graphs.
    """
    (workspace,) = current_workspace_manager().get_simultaneous(((floats,), torch.float32))
    return workspace


class DecodeRun(NamedTuple):
    """What one call decodes: query tokens of a step, and block table, lengths and schedule of their requests.

    early_loads: as of `mla_decode`. vLLM writes a layer's rows of the cache before it brings the queries into the
    latent space, so that all but the queries are older than the kernel before the call.
    """

    tokens: slice
    block_table: Tensor
    seq_lens: Tensor
    schedule: BuiltSchedule
    early_loads: bool


@dataclass
class ETAPDecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step: its calls, and how many query tokens they decode; those behind are no request's."""

    runs: list[DecodeRun]
    num_tokens: int


@dataclass
class ETAPMetadata(MLACommonMetadata[ETAPDecodeMetadata]):
    """A step's metadata: vLLM's own, with ETAP's decode part."""


class ETAPMetadataBuilder(MLACommonMetadataBuilder[ETAPMetadata]):
    """Plans each step, once for all layers and outside the CUDA graph that reads the plan.

    vLLM makes a builder for each micro-batch, so the schedules' buffers belong here. A step's calls need one each: all
    are planned before the first layer.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # An instance may have less.
    reorder_batch_threshold: int = SHORT_PROMPT_TOKENS

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, ETAPMetadata, supports_dcp_with_varlen=True)
        # Decode context parallelism gathers the query heads of its ranks before forward_mqa.
        num_heads = self.num_heads * self.dcp_world_size
        self.limits = limits = Limits.of(vllm_config, num_heads)
        self.reorder_batch_threshold = limits.longest
        _logger.info_once(f"{versions.NAME} decodes: steps of up to {limits.longest} tokens a request")
        rows = num_heads * min(limits.verified, limits.max_s_q)
        if slow := engine_contract.small_pages_text(self.page_size, rows):
            _logger.warning_once(f"{versions.NAME}: {slow}")
        self._token_by_token = is_token_by_token(vllm_config) and limits.verified > 1
        self.schedules = [
            DecodeSchedule(
                limits.max_batch,
                num_heads,
                max_s_q=limits.max_s_q,
                device=device,
                num_sms=num_compute_units(device.index),
                allocate_workspace=False,  # each call claims vLLM's
                batch_invariant=envs.VLLM_BATCH_INVARIANT,
                fp8_cache=kv_cache_spec.dtype.itemsize == 1,
                fp8_math=wants_fp8_math(vllm_config),
                any_batch=graphs_change_batch(vllm_config),
            )
            for _ in range(MAX_RUNS)
        ]
        claim_workspace(self.schedules[0].max_workspace_floats)  # vLLM locks its size before the first step
        self._token_requests = None
        if limits.verified > 1:
            max_pages = self.model_config.max_model_len // self.page_size + 1
            group = get_dcp_group() if self.dcp_world_size > 1 else None  # which need not be there for one rank
            share = (group.world_size, group.rank_in_group, self.dcp_local_block_size) if group else (1, 0, 1)
            self._token_requests = TokenRequests(limits.max_batch, max_pages, device, *share)
        # vLLM advances the lengths of draft steps on the device, but not those of a rank's share of the context, nor
        # those of single tokens.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1 and not self._token_by_token

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ETAPMetadata:
        """vLLM's, with as many requests as decodes as MAX_RUNS calls can take."""
        limits = self.limits
        if common_attn_metadata.max_query_len > limits.verified:
            query_lens = common_attn_metadata.query_start_loc_cpu.diff().tolist()
            self.reorder_batch_threshold = longest_decode(query_lens, limits.longest, limits.verified)
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.reorder_batch_threshold = limits.longest

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
        query_lens = padded_query_lens(query_start_loc_cpu.diff().tolist(), num_decode_tokens)
        num_tokens = sum(query_lens)
        if self._token_by_token:
            cut = [Run(slice(0, len(query_lens)), slice(0, num_tokens), 0)]
        else:
            cut = cut_into_runs(query_lens, self.limits.verified)
        total_lens = seq_lens_device if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device
        runs = []
        for (requests, tokens, s_q), schedule in zip(cut, self.schedules[: len(cut)], strict=True):
            table, seq_lens = block_table_tensor[requests], seq_lens_device[requests]
            if not s_q:
                starts = query_start_loc_device[: requests.stop + 1]
                table, seq_lens = self._token_requests.fill(table, total_lens[requests], starts, tokens.stop)
            early_loads = 0 < s_q <= self.limits.verified
            runs.append(DecodeRun(tokens, table, seq_lens, schedule.build(seq_lens, s_q or 1), early_loads))
        return ETAPDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            runs=runs,
            num_tokens=num_tokens,
        )

    def update_draft_decode_metadata(self, metadata: ETAPMetadata) -> None:
        """Plan the next draft step from the lengths that vLLM advanced on the device; vLLM may capture this."""
        for run, schedule in zip(metadata.decode.runs, self.schedules, strict=False):
            schedule.build(run.seq_lens, run.schedule.s_q)
