"""`etap plan` for models with sparse attention: caches, lists, indexers, weights, and readings of calls and steps."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etap_backend import cli
from etap_backend.config_list import FOLDER
from etap_backend.plan.alternatives import make_plan, what_fits
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.files import shipped
from etap_backend.plan.gpu import read_gpu
from etap_backend.plan.memory import RESERVE_BYTES, memory_of, parameters_of, pool_of, weights_of
from etap_backend.plan.model import read_model
from etap_backend.plan.sparse import call_size, v4_lists
from etap_backend.plan.step import attention

K = 1024
V32, GLM5, GLM_FLASH = (read_model(name) for name in ("deepseek-v3.2", "glm-5-fp8", "glm-5.3-flash"))
V4, PRO, V41 = (read_model(f"deepseek-{name}") for name in ("v4-flash", "v4-pro", "v4.1-flash"))
H20, H20_141, H100, H200 = (read_gpu(name) for name in ("H20-96G", "H20-141G", "H100", "H200"))


def on(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, **other)


def on_v4(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, cache="fp8", **other)


def changed(tmp_path, name: str, **changes):
    whole = json.loads((FOLDER / "models" / f"{name}.json").read_text())
    if "text_config" in whole:
        whole["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(whole | changes))
    return read_model(str(tmp_path))


# Caches


@pytest.mark.parametrize(
    "model, cache, layers, row, key",
    [
        (V32, "bfloat16", 61, 1152, 132),
        (V32, "fp8", 61, 656, 132),
        (GLM5, "fp8", 78, 656, 132),
        (GLM_FLASH, "bfloat16", 11, 1024, 33),
        (GLM_FLASH, "fp8", 11, 656, 33),
    ],
)
def test_a_token_takes_a_row_and_an_indexers_key_in_each_layer(model, cache, layers, row, key):
    memory = memory_of(model, H20_141, on(cache=cache))
    assert (memory.cache_per_token, memory.indexer_per_token) == (layers * (row + key), layers * key)


def test_stages_and_the_layer_that_predicts_have_their_indexers():
    halves, predicting = memory_of(V32, H200, on(gpus=16, pp=2)), memory_of(V32, H200, on(s_q=2))
    assert halves.cache_per_token == 31 * 1284 and predicting.cache_per_token == 62 * 1284
    assert memory_of(GLM_FLASH, H200, on(gpus=16, pp=2)).cache_per_token == 6 * 1057, "layers 24 to 45 have 6 of 11"


@pytest.mark.parametrize(
    "changes, indexers",
    [({}, 78), ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21), ({"index_topk_pattern": "FS" * 39}, 39)],
)
def test_layers_without_an_indexer_keep_no_keys(tmp_path, changes, indexers):
    """GLM-5.2 has an indexer in 21 of its 78 layers, by the same numbers."""
    model = changed(tmp_path, "glm-5-fp8", **changes)
    assert len(model.indexer_layers) == indexers
    assert memory_of(model, H200, on()).cache_per_token == 78 * 1152 + indexers * 132


@pytest.mark.parametrize("model, csa, hca", [(V4, 21, 20), (PRO, 30, 31)])
def test_a_block_of_vllm_has_256_tokens_of_all_of_deepseek_v4s_layers(model, csa, hca):
    """Pages of 64 rows of 584 bytes, 64 keys of 132 and 2 rows, padded to 576 bytes; vLLM 0.33's counts of blocks."""
    pool, memory = pool_of(model, on_v4()), memory_of(model, H200, on_v4())
    assert pool.block_bytes == csa * (37_440 + 8_640) + hca * 1_728 == memory.cache_per_token * 256
    assert memory.indexer_per_token * 256 == csa * 8_640 and memory.page_tokens == 256
    assert memory.state == 16 * 30 * pool.block_bytes
    assert memory.reserve - RESERVE_BYTES - 1.4e9 == pytest.approx(6_682 * pool.block_bytes)


def test_tokens_that_vllm_logged():
    """vLLM issue 51041, V4-Flash, 0.26.0: 150K tokens in 7.7 GiB, counted in requests of 121,344 tokens."""
    pool = pool_of(V4, on_v4())
    requests = 7.7 * 2**30 / pool.block_bytes / (121_344 / 256 + pool.blocks_of_prompts)
    assert requests * 121_344 == pytest.approx(150e3, rel=0.15)


def test_deepseek_v41s_layers_share_four_caches_of_entries():
    """Three of pairs, one of tokens, with keys each; a stage has the entries that its layers read."""
    pool, memory = pool_of(V41, on_v4()), memory_of(V41, H200, on_v4())
    assert pool.block_bytes == 3 * (19_008 + 4_608) + 37_440 + 8_640 == memory.cache_per_token * 64
    assert memory.indexer_per_token * 64 == 3 * 4_608 + 8_640 and memory.state == 16 * 43 * pool.block_bytes
    assert pool_of(V41, on_v4(gpus=16, pp=2)).block_bytes == pool.block_bytes
    with pytest.raises(ValueError, match="^pp: wanted at most 40 layers in stages"):
        make_plan(V41, H200, on_v4(gpus=32, pp=4))


@pytest.mark.parametrize(
    "model, gpu, gpus, fits",
    [(V4, H20, 8, True), (V4, H200, 4, True), (V41, H20, 4, True), (PRO, H20, 8, False), (PRO, H20_141, 8, True)],
)
def test_what_fits_where(model, gpu, gpus, fits):
    assert memory_of(model, gpu, on_v4(gpus=gpus, tp=gpus)).fits == fits


# Weights


@pytest.mark.parametrize(
    "model, billions, terabytes", [(V32, 685, None), (GLM5, 754, 0.750), (GLM_FLASH, 320, 0.3286), (PRO, 1598.84, None)]
)
def test_parameters_with_the_layer_that_predicts(model, billions, terabytes):
    """As Hugging Face counts; GLM-5.1's FP8 checkpoint of the same shapes has 750 GB, GLM-5.3-Flash's 306 GiB."""
    where = on_v4(gpus=1, tp=1, s_q=2) if model.v4 else on(gpus=1, tp=1, s_q=2)
    parts = [part for part in weights_of(model, where) if part.name != "attention, absorbed copy"]
    assert sum(part.parameters for part in parts) / 1e9 == pytest.approx(billions, rel=0.01)
    if terabytes:
        assert sum(part.bytes_per_gpu for part in parts) / 1e12 == pytest.approx(terabytes, rel=0.01)


@pytest.mark.parametrize(
    "model, whole",
    [(V4, 148.65 * 2**30), (PRO, 805.32 * 2**30), (V41, 510_286_023_000 - 0.9 * 2**30)],
)
def test_deepseek_v4s_checkpoints_have_as_many_bytes(model, whole):
    """All published tensors with the predicting layers': FP4 experts, FP8 blocks, bfloat16 compressors, float32 mixes.

    V4.1 is counted without its vision tower; its 202.8 GB of tables are in host memory.
    """
    parts = weights_of(model, on_v4(gpus=1, tp=1, s_q=2))
    assert sum(part.bytes_per_gpu for part in parts) == pytest.approx(whole, rel=1e-3)
    tables = sum(part.bytes_per_gpu for part in parts if part.in_host_memory)
    assert tables == ((384_006_168 + 384_016_682) * 264 if model is V41 else 0)
    assert memory_of(model, H200, on_v4(gpus=1, tp=1, s_q=2)).weights == pytest.approx(whole - tables, rel=1e-3)


def test_what_ranks_share_and_what_each_has_whole():
    parts = {part.name: part for part in weights_of(V4, on_v4())}
    assert parts["experts"].bytes_per_gpu == 43 * 256 * 3 * 4096 * 2048 / 8 * (1 / 2 + 1 / 32)
    assert parts["attention, heads"].parameters == 43 * (1024 * 32768 + 1024 * (32768 + 8 * 4096))
    assert parts["attention, heads"].shards == 8 and parts["attention, latent projections"].shards == 1
    assert parts["compressors"].bytes_per_gpu == 2 * 4096 * (21 * 2 * 1024 + 20 * 2 * 512)
    assert parts["hyper-connections"].bytes_per_gpu == 43 * 2 * 24 * 16384 * 4
    v32 = {part.name: part for part in weights_of(V32, on())}
    assert v32["indexer, queries"].bytes_per_gpu == pytest.approx(61 * 1536 * 8192, rel=1e-3)
    assert v32["indexer, keys and gates"].bytes_per_gpu == 61 * 7168 * 192 * 2
    v41 = {part.name: part for part in weights_of(V41, on_v4())}
    assert v41["indexer, keys and gates"].parameters == 8 * 5120 * 32 + 4 * 512 * 128
    assert v41["compressors"].parameters == (3 * 2 + 1) * 512 * 5120


# Lists, calls and indexers


def test_drafts_have_their_own_lists_and_ranks_of_a_context_share_them():
    sizes = [call_size(V32, on(**more)) for more in ({}, {"s_q": 2}, {"dcp": 4}, {"context": 100})]
    assert sizes == [(16, 2048), (32, 2048), (16, 512), (16, 100)]
    assert call_size(GLM_FLASH, on())[1] == 2051, "the pool that is not full comes on top"


@pytest.mark.parametrize(
    "model, context, lists",
    [
        (V4, 64 * K, {"window": (2, 128), "CSA": (21, 640), "HCA": (20, 640)}),
        (PRO, K * K, {"window": (0, 128), "CSA": (30, 1152), "HCA": (31, 8320)}),
        (V4, 100, {"window": (2, 100), "CSA": (21, 125), "HCA": (20, 100)}),
        (V41, 400, {"window": (2, 128), "pairs": (18, 328), "tokens": (20, 528)}),
    ],
)
def test_rows_that_a_query_token_of_deepseek_v4_attends_to(model, context, lists):
    assert v4_lists(model, on_v4(context=context)) == lists
    entries = sum(layers * rows for layers, rows in lists.values()) / model.num_hidden_layers
    assert call_size(model, on_v4(context=context)) == (16, pytest.approx(entries))


@pytest.mark.parametrize("cache, row_bytes", [("bfloat16", 1152), ("fp8", 656)])
def test_a_call_reads_the_rows_of_each_tokens_list(cache, row_bytes):
    made = make_plan(V32, H200, on(cache=cache)).etap
    assert made.roofline_us == pytest.approx(16 * 2048 * row_bytes / H200.sustained_bandwidth.value * 1e6)
    assert (made.rows, made.bound) == (16, "memory")


def test_rows_without_rope_take_the_line_of_rows_with_rope():
    made = make_plan(GLM_FLASH, H200, on(cache="fp8")).etap
    tokens, entries = call_size(GLM_FLASH, on())
    assert made.roofline_us == pytest.approx(tokens * entries * 528 / H200.sustained_bandwidth.value * 1e6)
    assert made.call.status == "derived" and "of rows with rope" in made.call.source


def test_the_indexer_takes_at_least_its_products_or_its_keys():
    keys, flops = 16 * 64 * K, H20_141.sustained_flops(fp8=True)
    assert make_plan(V32, H20_141, on(context=64 * K)).indexer.roofline_us == pytest.approx(
        2 * keys * 64 * 128 / flops * 1e6
    )
    pooled = make_plan(GLM_FLASH, H200, on(context=64 * K)).indexer
    assert pooled.layers == 11
    assert pooled.roofline_us == pytest.approx(keys / 4 * 132 / H200.sustained_bandwidth.value * 1e6)
    assert make_plan(PRO, H20_141, on_v4(context=64 * K)).indexer.layers == 30
    mixed = make_plan(V41, H200, on_v4(context=64 * K)).indexer
    assert mixed.layers == 8
    read = 16 * 64 * K * (3 / 2 + 5) * 132
    assert mixed.layers * mixed.roofline_us == pytest.approx(read / H200.sustained_bandwidth.value * 1e6)


def test_choosing_tokens_takes_what_was_measured():
    """results/0.2.0/top-k.json: DeepGEMM's logits, ETAP's selection and vLLM's, 16 x 32K; DeepSeek-V4 has 8K keys."""
    made = make_plan(V32, H200, on(context=32 * K))
    assert [made.indexer.call_us, *(one.call_us for one in made.selections)] == pytest.approx(
        [22.0, 8.3, 12.5], rel=0.15
    )
    made = make_plan(V4, H200, on_v4(context=32 * K))
    assert [made.indexer.call_us, *(one.call_us for one in made.selections)] == pytest.approx([8.8, 6.9, 6.6], rel=0.15)
    assert made.step_with(made.etap) == pytest.approx(
        made.rest_ms + made.indexer.step_ms + made.selections[0].step_ms + made.etap.step_ms
    )


@pytest.mark.parametrize(
    "model, on", [(V32, on(dcp=2)), (GLM_FLASH, on()), (V41, on_v4())], ids=["dcp", "pools", "v4.1"]
)
def test_where_the_engine_selects_its_time_is_in_both_steps(model, on):
    own, other = make_plan(model, H200, on).selections
    assert own == other and "vLLM" in own.kernel


CALLS = [  # lists, heads, query tokens, entries of each; microseconds of ETAP and of FlashMLA
    (H200, "sparse_fp8", 16, 16, 2048, 17.2, 35.2),
    (H200, "sparse_fp8", 16, 128, 2048, 57.9, 124.1),
    (H20_141, "sparse_fp8", 16, 32, 2048, 37.5, 127.7),
    (H20_141, "sparse_fp8", 16, 128, 2048, 116.8, 392.8),
    (H20_141, "sparse_fp8", 64, 128, 2048, 373.2, 380.5),
    (H200, "v4", 8, 16, 640, 14.2, 19.8),
    (H200, "v4", 8, 256, 640, 46.3, 90.8),
    (H20_141, "v4", 8, 64, 640, 24.6, 66.8),
    (H20_141, "v4", 8, 256, 640, 74.3, 231.8),
]


@pytest.mark.parametrize("gpu, kind, heads, tokens, entries, etap, flashmla", CALLS)
def test_calls_are_as_measured(gpu, kind, heads, tokens, entries, etap, flashmla):
    """Files of results/; DeepSeek-V4's calls behind another kernel."""
    row = {"row": 512, "row_bytes": 584} if kind == "v4" else {"row_bytes": 656}
    within = 0.15 if tokens * entries >= 64 * K else 0.3
    for kernel, us in ("etap", etap), ("FlashMLA", flashmla):
        call = gpu.calls_of(kind, heads)[kernel]
        made = attention(gpu, kernel, kind, heads, tokens, entries, call=call, **row)
        assert made.call_us == pytest.approx(us, rel=within), kernel


def test_heads_and_gpus_that_were_not_timed_say_so():
    more = H200.calls_of("sparse", 32)["etap"]
    assert more.status == "derived" and more.source.endswith("; as of 64 heads")
    assert H100.calls_of("sparse", 16)["etap"].source.endswith("; as on an H200")
    assert H200.calls_of("sparse", 256) == {}, "more heads than any that were timed"
    for gpu, kind in product(map(read_gpu, shipped("hardware")), ("bfloat16", "fp8", "sparse", "sparse_fp8", "v4")):
        calls = gpu.calls_of(kind, 16)
        assert "etap" in calls and len(calls) > 1, "a peer to compare with"
        assert all(call.status == "derived" for call in calls.values()) == (gpu.name != "H200")


def test_without_a_timed_call_no_gain_is_told():
    untimed = make_plan(V32, replace(H200, calls=()), on())
    too_many_heads = make_plan(V4, H200, on_v4(gpus=2, tp=2, batch=1))
    for made in untimed, too_many_heads:
        assert made.etap.call is None and made.peers == () and made.gain is None


# Steps


@pytest.mark.parametrize("batch, etap_ms, flashmla_ms", [(16, 16.90, 18.09), (64, 22.04, 24.74)])
def test_steps_of_glm_5_with_drafts(batch, etap_ms, flashmla_ms):
    """GLM-5, 40 layers on an H200 as one of eight ranks, vLLM, 4K tokens. Nothing was fitted to it."""
    rank = {"num_hidden_layers": 40, "num_attention_heads": 8, "intermediate_size": 1536, "moe_intermediate_size": 256}
    where = on(batch, 4 * K, s_q=2, cache="fp8", gpus=1, tp=1)
    made = make_plan(replace(GLM5, **rank), H200, where)
    assert made.step_with(made.etap) == pytest.approx(etap_ms, rel=0.15)
    flashmla = next(peer for peer in made.peers if peer.kernel == "FlashMLA")
    assert made.step_with(flashmla) == pytest.approx(flashmla_ms, rel=0.15)


@pytest.mark.parametrize(
    "batch, context, etap_ms, flashmla_ms",
    [(1, 4 * K, 6.35, 6.71), (16, 4 * K, 11.93, 12.42), (128, 4 * K, 24.39, 25.29), (16, 64 * K, 12.27, 12.98)],
)
def test_steps_of_deepseek_v4(batch, context, etap_ms, flashmla_ms):
    """V4-Flash with FP8 experts on 4 x H200, vLLM; FlashMLA's time in vLLM was fitted to these."""
    made = make_plan(replace(V4, expert_dtype="fp8"), H200, on_v4(batch, context, gpus=4, tp=4))
    in_vllm = made.peers[-1]
    assert in_vllm.kernel == "FlashMLA in vLLM"
    assert made.step_with(made.etap) == pytest.approx(etap_ms, rel=0.15)
    assert made.step_with(in_vllm) == pytest.approx(flashmla_ms, rel=0.15)
    assert made.gain_over(in_vllm).upper == pytest.approx(flashmla_ms / etap_ms - 1, abs=0.02)


deployments = st.builds(
    Deployment,
    tp=st.sampled_from([4, 8]),
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    cache=st.just("fp8"),
    context=st.integers(1, 131072),
    batch=st.integers(1, 512),
    s_q=st.integers(1, 4),
).map(lambda where: replace(where, gpus=where.tp * where.dp * where.pp))


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([V32, GLM5, V4, PRO, V41]), deployments)
def test_more_work_never_takes_less_and_what_is_said_to_fit_fits(model, where):
    before, asked = make_plan(model, H200, where), what_fits(model, H200, where)[0]
    for bigger in replace(where, context=where.context + 1000), replace(where, batch=where.batch + 16):
        after = make_plan(model, H200, bigger)
        assert after.memory.tokens_wanted >= before.memory.tokens_wanted
        assert after.etap.roofline_us >= before.etap.roofline_us
        assert after.step_with(after.etap) >= before.step_with(before.etap) * (1 - 1e-9)
    if asked.most_requests:
        assert memory_of(model, H200, replace(where, batch=asked.most_requests)).fits
    assert not memory_of(model, H200, replace(where, batch=asked.most_requests + where.dp)).fits


# Refusals and the command


@pytest.mark.parametrize(
    "model, changes, key",
    [
        ("deepseek-v4-flash", {"compress_ratios": [0, 0, 4]}, "compress_ratios"),
        ("deepseek-v4-flash", {"compress_ratios": [0, 2] * 22}, "compress_ratios"),
        ("deepseek-v4-flash", {"sliding_window": None}, "sliding_window"),
        ("deepseek-v4-flash", {"o_groups": "8"}, "o_groups"),
        ("deepseek-v4-flash", {"expert_dtype": "int4"}, "expert_dtype"),
        ("deepseek-v4-flash", {"index_n_heads": None}, "index_topk"),
        ("deepseek-v4-flash", {"model_type": "deepseek_v42"}, "model_type"),
        ("deepseek-v4.1-flash", {"kv_source_layer_ids": [8, 20]}, "kv_source_layer_ids"),
        ("deepseek-v4.1-flash", {"index_source_layer_ids": []}, "index_source_layer_ids"),
    ],
)
def test_a_wrong_config_is_refused_by_key(tmp_path, model, changes, key):
    with pytest.raises(ValueError, match=f"^model: .*config.json: {key}: wanted "):
        changed(tmp_path, model, **changes)


def test_layers_of_drafts_behind_the_model_count_for_none(tmp_path):
    model = changed(tmp_path, "deepseek-v4-flash", compress_ratios=[*V4.compress_ratios[:43], 0, 0, 0])
    assert parameters_of(model) == parameters_of(V4) and len(model.layers_of(0)) == 2


@pytest.mark.parametrize(
    "words, flag",
    [
        (["deepseek-v3.2", "--attention-share", "0.3"], "--attention-share"),
        (["deepseek-v4-flash", "--dcp", "2"], "--dcp"),
        (["deepseek-v4-flash", "--kv-dtype", "bfloat16"], "--kv-dtype"),
        (["deepseek-v4-flash", "--tp", "16", "--count", "16"], "--tp"),
    ],
)
def test_the_command_refuses_in_one_line_with_the_flag(capsys, words, flag):
    assert cli.main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith(f"etap plan: {flag}: wanted ")


def test_the_screen_says_what_a_block_holds_and_what_was_not_timed(capsys):
    assert cli.main(["plan", "deepseek-v4-flash", "--gpu", "H200", "--context", "64K"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens of 3,915 B (708.75 of them the indexer's)" in text and "requests' windows 0.5 GB" in text
    assert "256 tokens are a block of 1,002,240 B, a request 30 more" in text
    assert "Lists have 128 (2 window), 640 (21 CSA), 640 (20 HCA) rows, calls their mean" in text
    assert "indexer measured memory" in text and "top-k, vLLM" in text and ">=" not in text
    assert cli.main(["plan", "deepseek-v4-flash", "--count", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["step"]["gain"] is None and made["attention"]["ETAP"]["call"] is None
