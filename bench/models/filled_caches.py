"""vLLM plugin `filled_caches`: DecodeBenchConnector fills the caches of all layers, so that no prompt is computed.

The connector takes all layers for one group of blocks and cannot fill bytes. Here each group's blocks are filled in its
own layers: floating-point caches with normal numbers, caches of bytes with bytes below 64, which are finite in every
view (e4m3 up to 1.9, bfloat16 and float32 up to 0.75, scales of 2^-127 to 2^-64). Start-up compiles the router's small
products for DeepSeek-V4-Flash only.
"""

import torch

BELOW = 64
BLOCKS_AT_A_TIME = 64
ROUTER_SHAPES, ROUTER_TOKENS = ((4096, 256),), (1, 2, 16)


def fill(worker, kv_cache: torch.Tensor, block_ids, *values) -> None:
    """Fill these blocks of one layer's cache; a method of the connector's worker."""
    rows = torch.tensor(sorted({i for i in block_ids if 0 < i < kv_cache.shape[0]}), dtype=torch.long)
    for some in rows.to(kv_cache.device).split(BLOCKS_AT_A_TIME):
        shape = (len(some), *kv_cache.shape[1:])
        if kv_cache.dtype == torch.uint8:
            kv_cache[some] = torch.randint(0, BELOW, shape, dtype=torch.uint8, device=kv_cache.device)
        else:
            kv_cache[some] = torch.randn(shape, device=kv_cache.device).to(kv_cache.dtype)


def register() -> None:
    """May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as bench
    from vllm.model_executor.warmup import kernel_warmup

    connector, worker = bench.DecodeBenchConnector, bench.DecodeBenchConnectorWorker
    if worker._fill_block_tensor is fill:
        return
    begin = connector.__init__

    def __init__(self, vllm_config, role, kv_cache_config):
        begin(self, vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler.block_size = 1  # or the lists of some groups lose blocks
        else:
            groups = kv_cache_config.kv_cache_groups
            self.connector_worker.layers_of_groups = {i: list(one.layer_names) for i, one in enumerate(groups)}

    def register_kv_caches(self, kv_caches):
        self.kv_caches, self.group_to_layers = kv_caches, self.layers_of_groups

    connector.__init__ = __init__
    worker.register_kv_caches, worker._fill_block_tensor = register_kv_caches, fill
    kernel_warmup._LL_BF16_WARMUP_MODEL_SHAPES, kernel_warmup._LL_BF16_WARMUP_M_RANGE = ROUTER_SHAPES, ROUTER_TOKENS
