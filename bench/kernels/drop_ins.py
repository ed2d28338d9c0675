"""The drop-ins of `etap_backend.compat` as `etap bench` times them: the calls of `peers`, answered by ETAP.

Each is given what the library is given whose calls it answers, in the same words.
"""

from __future__ import annotations

from unittest import mock

from torch import Tensor

from etap_backend import sparse
from etap_backend.compat import flash_attn_interface
from etap_backend.compat import flash_mla as compat
from etap_backend.compat.flashinfer import BatchMLAPagedAttentionWrapper
from bench.kernels import peers
from bench.kernels.kernels import Inputs, Planned, SparseInputs
from etap_backend.schedule import DecodeSchedule


def flash_mla(inputs: Inputs) -> Planned:
    return peers.flashmla(inputs, module=compat.__name__, new_metadata=_metadata)


def flash_mla_fp8(inputs: Inputs) -> Planned:
    _refuse_fewer_sms(inputs)
    decode, new_metadata = compat.flash_mla_with_kvcache, compat.get_mla_decoding_metadata
    return peers.flashmla_fp8(inputs, decode=decode, new_metadata=new_metadata)


def flash_mla_sparse(inputs: SparseInputs) -> Planned:
    """FlashMLA's call has no argument for fewer multiprocessors, so they are made up where ETAP asks for them."""
    made = peers.flashmla_sparse_fp8(inputs, module=compat.__name__)
    if inputs.num_sms is None:
        return made

    def call(_: None, *copy: Tensor) -> Tensor:
        with mock.patch.object(sparse, "device_sms", lambda device: inputs.num_sms):
            return made(*copy)

    return Planned(call, made.plan)


def flashinfer(inputs: Inputs) -> Planned:
    _refuse_fewer_sms(inputs)
    return peers.flashinfer(inputs, wrapper_type=BatchMLAPagedAttentionWrapper)


def fa3(inputs: Inputs) -> Planned:
    _refuse_fewer_sms(inputs)
    return peers.fa3(inputs, module=flash_attn_interface.__name__)


def _metadata(inputs: Inputs) -> compat.FlashMLASchedMeta:
    """What `get_mla_metadata` gives; for a GPU that is to have fewer multiprocessors, with the plan made before."""
    metadata, _ = compat.get_mla_metadata()
    if inputs.num_sms is not None:
        batch, s_q, heads, _ = inputs.q.shape
        buffers = DecodeSchedule(batch, s_q * heads, device=inputs.q.device, num_sms=inputs.num_sms)
        built = buffers.build(inputs.seq_lens)
        metadata.tile_scheduler_metadata = built.work_ranges[: built.partitions]
        metadata.num_splits = built.split_offsets
        metadata.workspace, metadata.row_tile = built.workspace, built.row_tile
    return metadata


def _refuse_fewer_sms(inputs: Inputs) -> None:
    if inputs.num_sms is not None:
        raise NotImplementedError("plans for all multiprocessors of the GPU")
