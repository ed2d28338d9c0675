"""KV connectors with ETAP's caches, as far as they run without packages of their own."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.utils import allocate_kv_cache

from support.vllm_layer import BLOCK, CPU, NAME, get_kv_cache_config_from_groups

load_general_plugins()
pytestmark = pytest.mark.usefixtures("one_rank", "fresh_workspaces")

BLOCKS = 7
SPARSE = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 128, "index_n_heads": 32, "index_head_dim": 128}
BACKENDS = {"ETAP": ({}, {}), "FLASHMLA_SPARSE": ({"hf_overrides": SPARSE}, {"use_sparse": True})}
"""Arguments of the engine and of the layer, by the backend's name in vLLM."""
ROW_BYTES = {("ETAP", "auto"): 1152, ("ETAP", "fp8"): 576, ("FLASHMLA_SPARSE", "auto"): 1152,
             ("FLASHMLA_SPARSE", "fp8"): 656}  # fmt: skip


class Engine:
    """Stands in for Mooncake's, which is not part of vLLM; remembers the memory that is registered."""

    def initialize(self, *_):
        return 0

    def get_rpc_port(self):
        return 1

    def batch_register_memory(self, addresses, lengths):
        self.memory = [range(begin, begin + length) for begin, length in zip(addresses, lengths, strict=True)]
        return 0

    def __getattr__(self, name):
        return lambda *_: 0


def configuration(layer, config):
    """vLLM's configuration of one layer's KV cache, and a function that allocates the cache."""
    backend = layer.get_attn_backend()
    spec = backend.customize_spec(layer.get_kv_cache_spec(config))
    layout = resolve_kv_cache_layout(config, [[one.name for one in get_supported_kv_cache_layouts([backend])]], [spec])
    memory = BLOCKS * spec.page_size_bytes
    found = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec([NAME], spec)], memory)
    return found, lambda: allocate_kv_cache(found, CPU, layout, [BLOCK])[NAME]


@pytest.fixture
def registered(make_layer, monkeypatch):
    """The Mooncake workers of two servers of one layer, and their caches."""
    monkeypatch.setattr(mooncake_connector, "TransferEngine", Engine)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(type(current_platform), "set_device", classmethod(lambda cls, device: None))
    workers = []

    def make(backend, cache):
        engine, of_layer = BACKENDS[backend]
        buffer = torch.zeros(64, 128, dtype=torch.int32)
        if of_layer:
            of_layer = of_layer | {
                "topk_indices_buffer": buffer,
                "indexer": SimpleNamespace(topk_indices_buffer=buffer),
            }
        transfer = KVTransferConfig(kv_connector="MooncakeConnector", kv_role="kv_consumer")
        layer, config = make_layer(
            layer_arguments=of_layer, kv_cache_dtype=cache, kv_transfer_config=transfer, **engine
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        assert [one.get_name() for one in get_current_attn_backends(config)] == [backend]
        for connector in mooncake_connector.MooncakeConnector, LMCacheConnectorV1:
            assert connector.get_required_kvcache_layout(config) is None
        kv_cache_config, allocate = configuration(layer, config)
        caches = [allocate(), allocate()]
        for number, one in enumerate(caches):
            worker = mooncake_connector.MooncakeConnectorWorker(config, str(number), kv_cache_config)
            workers.append(worker)
            worker.register_kv_caches({NAME: one})
        return workers, caches

    yield make
    for worker in workers:
        worker.receiver_loop.call_soon_threadsafe(worker.receiver_loop.stop)


@pytest.mark.parametrize("backend, cache", ROW_BYTES)
def test_mooncake_moves_whole_blocks_of_etaps_caches(registered, backend, cache):
    """From the address that the sender computes for a block to the one that the receiver computes."""
    (sender, receiver), (source, target) = registered(backend, cache)
    assert sender.block_size == BLOCK and sender.use_mla
    source.view(torch.uint8).random_()
    places = torch.randperm(BLOCKS).tolist()
    for worker in sender, receiver:
        assert worker.kv_block_len_per_layer == [BLOCK * ROW_BYTES[backend, cache]]
        (begin,), (apart,) = worker.kv_caches_base_addr, worker.block_len_per_layer
        (memory,) = worker.engine.memory
        assert begin in memory and begin + apart * BLOCKS - 1 in memory
    for block, place in enumerate(places):
        begin, end = (
            worker.kv_caches_base_addr[0] + number * worker.block_len_per_layer[0]
            for worker, number in ((sender, block), (receiver, place))
        )
        ctypes.memmove(end, begin, sender.kv_block_len_per_layer[0])
    assert torch.equal(target.view(torch.uint8)[places], source.view(torch.uint8))
