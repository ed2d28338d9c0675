"""`etap plan` for DeepSeek-V4: bytes worked out by hand from the engines' layouts, its checkpoints' sizes, what vLLM
said of its memory, and what a call's readings make of a step."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_screens import etap_plan, run, words_of

from bench.common import configs, results
from bench.kernels.rows import SparseDocument
from bench.e2e import results_file as e2e_file
from etap_backend.plan.alternatives import what_fits
from etap_backend.plan.inputs import CSA, HCA, Deployment, read_gpu, read_model
from etap_backend.plan.memory import RESERVE_BYTES, memory_of, parameters_of, v4_caches, weights_of
from etap_backend.plan.sparse import (
    call_size,
    fitted_calls,
    make_sparse_plan,
    shipped_calls,
    sparse_attention,
    v4_lists,
)
from etap_backend.plan.v4_caches import V4Caches, V41Caches, page_bytes

K = 1024
RESULTS = Path(__file__).parents[2] / "results"
GPUS = configs.shipped("hardware")
FLASH, PRO = (read_model(f"deepseek-v4-{name}") for name in ("flash", "pro"))
V41 = read_model("deepseek-v4.1-flash")
H20, H20_141, H100, H200 = (read_gpu(name) for name in ("H20-96G", "H20-141G", "H100", "H200"))
CACHES = {"flash": V4Caches(43, 128, csa=21, hca=20), "pro": V4Caches(61, 128, csa=30, hca=31)}


def on(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, cache="fp8", **other)


# What the caches take


@pytest.mark.parametrize(
    "rows, row, padded", [(64, 584, 37_440), (2, 584, 1_728), (64, 132, 8_640), (256, 584, 149_760), (8, 4096, 32_832)]
)
def test_a_page_is_padded_to_rows_of_576_bytes(rows, row, padded):
    """A window's or CSA's page, HCA's, an indexer's, SGLang's window, and one of partial sums."""
    assert page_bytes(rows, row) == padded


@pytest.mark.parametrize(
    "model, csa, hca, block",
    [(FLASH, 21, 20, 21 * (37_440 + 8_640) + 20 * 1_728), (PRO, 30, 31, 30 * (37_440 + 8_640) + 31 * 1_728)],
)
def test_a_block_of_vllm_has_256_tokens_of_all_layers(model, csa, hca, block):
    caches, memory = v4_caches(model, on()), memory_of(model, H200, on())
    assert (caches.layers, caches.csa, caches.hca) == (model.num_hidden_layers, csa, hca)
    assert caches.block_bytes == block == memory.cache_per_token * 256
    assert memory.indexer_per_token * 256 == csa * 8_640 and memory.page_tokens == 256


@pytest.mark.parametrize("name", CACHES)
def test_a_request_needs_blocks_for_its_window_and_its_sums(name):
    """vLLM splits the window's layers into two groups, and has one for each kind of sums. Two steps of a token are in
    flight: 2 x (3 + 1) blocks of 64 tokens, 3 + 1 of 4, 17 + 1 of 8."""
    caches = CACHES[name]
    assert caches.blocks(2) == 2 * 4 + 4 + 18 and caches.blocks(8) == 2 * 4 + 5 + 18
    model = {"flash": FLASH, "pro": PRO}[name]
    assert memory_of(model, H200, on()).state == 16 * 30 * caches.block_bytes


def test_prompts_in_flight_hold_windows_and_sums_of_all_their_tokens():
    """Two batches of 8,192 tokens: 2 x (258 + 1), 4,098 + 1 and 2,064 + 1 blocks."""
    assert CACHES["flash"].blocks_of_prompts == 518 + 4_099 + 2_065
    beside = memory_of(FLASH, H200, on()).reserve - RESERVE_BYTES.value - 1.4e9
    assert beside == pytest.approx(6_682 * 1_002_240)


def test_what_vllm_wants_for_one_request():
    """vLLM issue 44376, V4-Flash at 30,000 tokens, 16,384 in flight: 6.66 GiB, in blocks that were 5% larger."""
    blocks = -(-30_000 // 256) + CACHES["flash"].blocks(16_384)
    assert blocks == 6_800 and blocks * CACHES["flash"].block_bytes == pytest.approx(6.66 * 2**30, rel=0.05)


def test_tokens_that_vllm_logged():
    """vLLM issue 51041, V4-Flash, 0.26.0: 150K tokens in 7.7 GiB, counted in requests of 121,344 tokens, with 8,192
    batched tokens."""
    caches = CACHES["flash"]
    requests = 7.7 * 2**30 / caches.block_bytes / (121_344 / 256 + caches.blocks_of_prompts)
    assert requests * 121_344 == pytest.approx(150e3, rel=0.15)


@pytest.mark.parametrize(
    "name, token, request_",
    [
        ("flash", 0.1 * (43 * 585 + 21 * 320) + 21 * (585 / 4 + 33) + 20 * 6.75, 20 * 524_288),
        ("pro", 0.1 * (61 * 585 + 30 * 320) + 30 * (585 / 4 + 33) + 31 * 6.75, 31 * 524_288),
    ],
)
def test_what_sglang_keeps(name, token, request_):
    """Of a token a tenth of a window's row (585 bytes with the padding) and of 8 x 10,240 bytes of sums a page, and
    its part of entries and keys; of a request 128 tokens' sums of 4,096 bytes in each HCA layer."""
    assert CACHES[name].sglang_token_bytes == pytest.approx(token)
    assert CACHES[name].sglang_request_bytes == request_


def test_a_draft_brings_a_window_and_a_stage_has_its_own_layers():
    assert v4_caches(FLASH, on(s_q=2)).layers == 44 and v4_caches(FLASH, on(s_q=2)).csa == 21
    half = v4_caches(PRO, on(gpus=16, pp=2))
    assert (half.layers, half.csa, half.hca) == (31, 15, 16)
    assert memory_of(PRO, H200, on(gpus=16, pp=2)).cache_per_token * 256 == 15 * 46_080 + 16 * 1_728


def test_deepseek_v41s_layers_share_four_caches_of_entries():
    """Three of pairs, one of tokens, with keys each: 3 x (19,008 + 4,608) + 37,440 + 8,640. Six windows of 19,008 fill
    such a block, so 40 make seven groups; a request has 5 + 1 blocks of 32 tokens in each, and a ring of sums."""
    caches, memory = v4_caches(V41, on()), memory_of(V41, H200, on())
    assert caches == V41Caches(40, 128, half=3, whole=1) and caches.block_bytes == 116_928
    assert memory.cache_per_token == 116_928 / 64 and memory.page_tokens == 64
    assert memory.indexer_per_token * 64 == 3 * 4_608 + 8_640
    assert caches.blocks(2) == 7 * 6 + 1 and caches.blocks_of_prompts == 7 * 517 + 1
    assert memory.state == 16 * 43 * 116_928


def test_what_sglang_keeps_of_deepseek_v41():
    """Entries of 585 bytes, and keys in FP4. Of a request 40 layers' rows of 128 + 128 + 2 x 256 tokens and of 4 x
    (128 + 256), and two tokens' sums in each layer that makes pairs of them."""
    caches = v4_caches(V41, on())
    assert caches.sglang_token_bytes == 3 / 2 * (585 + 68) + 585 + 68
    assert caches.sglang_request_bytes == 40 * 585 * (768 + 1_536) + 3 * 2 * 4_096


def test_a_stage_of_deepseek_v41_has_the_entries_that_its_layers_read():
    assert v4_caches(V41, on(gpus=16, pp=2)) == V41Caches(20, 128, half=3, whole=1)
    assert v4_caches(V41, on(s_q=6)).layers == 43
    with pytest.raises(ValueError, match="pp: wanted at most 40 layers in stages that read no other's entries"):
        make_sparse_plan(V41, H200, on(gpus=32, pp=4))


# What the weights take


@pytest.mark.parametrize("model, billions", [(FLASH, 290.9), (PRO, 1598.84)])
def test_parameters_with_the_layer_that_predicts(model, billions):
    """V4-Pro's shapes summed up: 1598.84 G. V4-Flash's: 284.3 G, and a layer."""
    parts = weights_of(model, on(gpus=1, tp=1, s_q=2))
    assert sum(part.parameters for part in parts) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("model, gibibytes", [(FLASH, 148.65), (PRO, 805.32)])
def test_the_checkpoint_has_as_many_bytes(model, gibibytes):
    """All tensors of the published files, the predicting layer's included: FP4 experts with a byte of scale for 32, FP8
    blocks, compressors in bfloat16, hyper-connections in float32."""
    parts = weights_of(model, on(gpus=1, tp=1, s_q=2))
    assert sum(part.bytes_per_gpu for part in parts) / 2**30 == pytest.approx(gibibytes, rel=1e-3)


def test_deepseek_v41s_checkpoint_has_as_many_bytes():
    """510,286,023,000 in all, of which the vision tower has 0.90 GiB; of the three layers that predict 128 experts each
    and, left out, 0.2 GB of heads. 202.8 GB of tables are in host memory."""
    parts = weights_of(V41, on(gpus=1, tp=1, s_q=2))
    whole = sum(part.bytes_per_gpu for part in parts)
    assert whole == pytest.approx(510_286_023_000 - 0.9 * 2**30, rel=1e-3)
    tables = [part for part in parts if part.in_host_memory]
    assert [part.bytes_per_gpu for part in tables] == [(384_006_168 + 384_016_682) * 264]
    assert memory_of(V41, H200, on(gpus=1, tp=1, s_q=2)).weights == pytest.approx(whole - tables[0].bytes_per_gpu)
    drafts = {part.name: part.parameters for part in parts}["experts"]
    assert drafts == (40 * 384 + 3 * 128) * 3 * 5120 * 2304


def test_an_indexer_of_deepseek_v41_has_keys_of_entries():
    parts = {part.name: part for part in weights_of(V41, on())}
    assert parts["indexer, queries"].parameters == 8 * 1280 * 32 * 128
    assert parts["indexer, keys and gates"].parameters == 8 * 5120 * 32 + 4 * 512 * 128
    assert parts["compressors"].parameters == (3 * 2 + 1) * 512 * 5120
    assert parts["Engram, projections"].parameters == 2 * 24 * 256 * 5 * 5120


def test_what_ranks_share_and_what_each_has_whole():
    parts = {part.name: part for part in weights_of(FLASH, on())}
    assert parts["experts"].bytes_per_gpu == 43 * 256 * 3 * 4096 * 2048 / 8 * (1 / 2 + 1 / 32)
    assert parts["attention, heads"].parameters == 43 * (1024 * 32768 + 1024 * (32768 + 8 * 4096))
    assert parts["attention, heads"].shards == 8 and parts["attention, latent projections"].shards == 1
    assert parts["compressors"].bytes_per_gpu == 2 * 4096 * (21 * 2 * 1024 + 20 * 2 * 512)
    assert parts["hyper-connections"].bytes_per_gpu == 43 * 2 * 24 * 16384 * 4
    assert parts["indexer, keys and gates"].bytes_per_gpu == 21 * 2 * 4096 * (512 + 64)
    assert "attention, absorbed copy" not in parts and "dense layers" not in parts


def test_experts_in_fp8_take_twice_as_much(tmp_path):
    model = changed(tmp_path, expert_dtype="fp8")
    fp4, fp8 = (next(p for p in weights_of(m, on()) if p.experts).bytes_per_gpu for m in (FLASH, model))
    assert fp8 / fp4 == pytest.approx(1 / (17 / 32), rel=1e-3)


# What fits


@pytest.mark.parametrize(
    "model, gpu, gpus, fits",
    [
        (FLASH, H20, 8, True),
        (FLASH, H20_141, 8, True),
        (FLASH, H200, 4, True),
        (V41, H20, 8, True),
        (V41, H20, 4, True),
        (PRO, H20, 8, False),
        (PRO, H20_141, 8, True),
        (PRO, H200, 8, True),
        (PRO, H200, 4, False),
    ],
)
def test_what_fits_where(model, gpu, gpus, fits):
    assert memory_of(model, gpu, on(gpus=gpus, tp=gpus)).fits == fits


@settings(deadline=None)
@given(st.sampled_from([FLASH, PRO, V41]), st.integers(1, 2**20), st.integers(1, 512), st.sampled_from([1, 2]))
def test_what_is_said_to_fit_fits(model, context, batch, s_q):
    where = on(batch, context, s_q=s_q)
    asked, *others = what_fits(model, H200, where)
    assert {found.cache for found in (asked, *others)} == {"fp8"}
    assert not any("dcp" in found.layout for found in others)
    if asked.most_requests:
        assert memory_of(model, H200, replace(where, batch=asked.most_requests)).fits
    assert not memory_of(model, H200, replace(where, batch=asked.most_requests + 1)).fits
    if asked.most_context:
        assert memory_of(model, H200, replace(where, context=asked.most_context)).fits
    assert not memory_of(model, H200, replace(where, context=asked.most_context + 256)).fits


# What a step takes


@pytest.mark.parametrize(
    "model, context, lists",
    [
        (FLASH, 64 * K, {"window": (2, 128), "CSA": (21, 640), "HCA": (20, 640)}),
        (PRO, K * K, {"window": (0, 128), "CSA": (30, 1152), "HCA": (31, 8320)}),
        (FLASH, 100, {"window": (2, 100), "CSA": (21, 125), "HCA": (20, 100)}),
        (V41, 64 * K, {"window": (2, 128), "pairs": (18, 640), "tokens": (20, 640)}),
        (V41, 400, {"window": (2, 128), "pairs": (18, 328), "tokens": (20, 528)}),
    ],
)
def test_rows_that_a_query_token_attends_to(model, context, lists):
    assert v4_lists(model, on(context=context)) == lists


@pytest.mark.parametrize("kernel", ["etap", "FlashMLA"])
def test_a_step_is_the_sum_of_each_kind_of_layers_calls(kernel):
    made = make_sparse_plan(FLASH, H200, on(64))
    attention = made.etap if kernel == "etap" else made.peers[0]
    assert attention.rows == (8 if kernel == "etap" else 64)
    calls = [
        (layers, sparse_attention(kernel, H200, attention.call, 8, 64 * rows, 512, 584, 1).call_us)
        for layers, rows in v4_lists(FLASH, on(64)).values()
    ]
    assert attention.step_ms == pytest.approx(sum(layers * us for layers, us in calls) / 1e3)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("e2e-decode-v4-vllm.json")), ids=lambda path: path.stem)
def test_steps_of_a_server_at_full_depth(path, tmp_path):
    """V4-Flash on 4 x H200, plain steps; its experts were in FP8. What FlashMLA takes in vLLM was fitted to them."""
    document = e2e_file.read(path)
    (tmp_path / "config.json").write_text(json.dumps(document.model_shape))
    model = read_model(str(tmp_path / "config.json"))
    for rows in document.by_shape().values():
        steps = {name: row.itl_ms.median for name, row in rows.items()}
        ours, theirs = steps["ETAP"], steps["FLASHMLA_SPARSE"]
        shape = rows["ETAP"]
        made = make_sparse_plan(model, H200, on(shape.concurrency, shape.input, gpus=4, tp=4))
        assert [peer.kernel for peer in made.peers] == ["FlashMLA", "FlashMLA in vLLM"]
        assert made.step_with(made.etap) == pytest.approx(ours, rel=0.15)
        assert made.step_with(made.peers[-1]) == pytest.approx(theirs, rel=0.15)
        assert made.gain_over(made.peers[-1]).upper == pytest.approx(theirs / ours - 1, abs=0.02)


def test_the_indexer_scores_a_key_of_four_tokens_in_csa_layers():
    indexer = make_sparse_plan(PRO, H20_141, on(context=64 * K)).indexer
    flops = 2 * 16 * 16 * K * 64 * 128
    assert indexer.layers == 30 and indexer.rows == 64
    assert indexer.roofline_us == pytest.approx(flops / H20_141.sustained_flops(fp8=True) * 1e6)


def test_eight_layers_of_deepseek_v41_score_pairs_or_tokens():
    indexer = make_sparse_plan(V41, H200, on(context=64 * K)).indexer
    assert indexer.layers == 8 and indexer.rows == 32 and indexer.bound == "memory"
    keys = 16 * (3 * 32 * K + 5 * 64 * K)
    assert indexer.step_ms == pytest.approx(keys * 132 / H200.sustained_bandwidth.value * 1e3)


# As the GPUs' files say. FlashMLA's times step at 64 tokens.
@pytest.mark.parametrize("gpu, file, ours, theirs", [(H200, "v4", 0.12, 0.30), (H20, "v4-h20-proxy", 0.24, 0.31)])
@pytest.mark.parametrize("model, heads", [(FLASH, 8), (PRO, 16)])
def test_a_call_takes_what_was_measured_behind_another_kernel(model, heads, gpu, file, ours, theirs):
    document = results.read(RESULTS / f"{file}.json", SparseDocument)
    calls = shipped_calls(gpu, heads, True, True)
    for row, (kernel, within) in product(document.rows, (("etap", ours), ("FlashMLA", theirs))):
        if row.heads == heads:
            call = sparse_attention(kernel, gpu, calls[kernel], heads, row.tokens, 512, 584, 1)
            assert call.call_us == pytest.approx(row.behind(kernel), rel=within), (row.label, kernel)


def test_padding_costs_more_on_an_h20():
    for model in (FLASH, PRO):
        on_h200, on_h20 = (make_sparse_plan(model, gpu, on(128)).gain for gpu in (H200, H20_141))
        assert 1 < on_h200.call < 2 < on_h20.call and 0 < on_h200.lower <= on_h200.upper < 0.1


def test_readings_of_other_rows_are_none_of_this_call():
    other, own = ([RESULTS / f"{name}.json"] for name in ("sparse", "v4"))
    assert fitted_calls(H200, other, 8, True, True) == {} == fitted_calls(H200, own, 8, True, False)
    assert fitted_calls(H200, own, 8, True, True)["etap"].source == "18 rows of etap in v4.json, within 11%"


def test_where_nobody_timed_the_call_no_gain_is_told():
    """For more heads than were timed, fewer being no measure of them."""
    few = ("--count", "2", "--tp", "2", "--batch", "1")
    for gpu in (H20_141, H200):
        made = make_sparse_plan(FLASH, gpu, on(gpus=2, tp=2, batch=1))
        assert made.etap.call is None and made.peers == () and made.gain is None
        said = f"Nobody timed such a call on {gpu.name} (--kernels): no step and no gain."
        assert said in words_of("deepseek-v4-flash", "--gpu", gpu.name, *few)
    assert make_sparse_plan(FLASH, H100, on()).etap.call.status == "derived"


@pytest.mark.parametrize(
    "gpu, model, least, most",
    [
        (H200, FLASH, 2, 8),
        (H200, PRO, 1, 4),
        (H200, V41, 2, 6),
        (H20_141, FLASH, 3, 23),
        (H20_141, PRO, 2, 10),
        (H20_141, V41, 3, 20),
    ],
)
def test_what_docs_say_of_the_gain(gpu, model, least, most):
    sizes = product((1, 4, 16, 64, 128), (4 * K, 64 * K, K * K))
    made = [make_sparse_plan(model, gpu, on(*size)) for size in sizes]
    gains = [one.gain for one in made if one.memory.fits]
    assert round(100 * min(gain.lower for gain in gains)) == least
    assert round(100 * max(gain.upper for gain in gains)) == most


def test_fp4_is_multiplied_in_16_bits_and_small_tiles():
    """Two rows of an expert in a tile of 8, on an H20 bound by reading them."""
    made, widened = make_sparse_plan(PRO, H20_141, on()), make_sparse_plan(PRO, H20_141, on(512))
    assert made.rest_ms < 20 < widened.rest_ms


# What is refused


def changed(tmp_path: Path, **changes):
    whole = json.loads((configs.FOLDER / "models" / "deepseek-v4-flash.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value != "gone"}))
    return read_model(str(tmp_path))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"compress_ratios": [0, 0, 4]}, "compress_ratios: wanted one for each of num_hidden_layers = 43, got 3"),
        ({"compress_ratios": "gone"}, "compress_ratios: wanted one for each of num_hidden_layers = 43, got 0"),
        ({"compress_ratios": [0, 2] * 22}, "compress_ratios: wanted 0, 4, 128 of deepseek_v4, got [2]"),
        ({"sliding_window": "gone"}, "sliding_window: wanted a number beside model_type deepseek_v4, got None"),
        ({"o_groups": "8"}, "o_groups: wanted a number beside model_type deepseek_v4, got '8'"),
        ({"expert_dtype": "int4"}, "expert_dtype: Input should be 'fp4' or 'fp8', got 'int4'"),
        ({"index_n_heads": None}, "wanted index_n_heads, index_head_dim and q_lora_rank beside index_topk"),
        ({"model_type": "deepseek_v42"}, "model_type: wanted deepseek_v4 or deepseek_v41_text, which are planned, got"),
    ],
)
def test_a_model_that_is_described_wrongly_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ValueError, match=f"config.json: .*{re.escape(words)}"):
        changed(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"compress_ratios": [0, 4] * 20}, "compress_ratios: wanted 0, 1, 2 of deepseek_v41_text, got [4]"),
        ({"kv_source_layer_ids": [8, 20]}, "kv_source_layer_ids: wanted the first layer with entries among them, got"),
        ({"index_source_layer_ids": []}, "index_source_layer_ids: wanted the first layer with entries among them, got"),
    ],
)
def test_a_layer_of_deepseek_v41_without_entries_is_refused(tmp_path, changes, words):
    whole = json.loads((configs.FOLDER / "models" / "deepseek-v4.1-flash.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": whole["text_config"] | changes}))
    with pytest.raises(ValueError, match=f"config.json: .*{re.escape(words)}"):
        read_model(str(tmp_path))


def test_without_entries_nothing_is_chosen(tmp_path):
    made = make_sparse_plan(changed(tmp_path, compress_ratios=[0] * 43), H200, on())
    assert made.indexer.step_ms == 0 and made.memory.fits


def test_a_row_of_another_width_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model: wanted one that ETAP runs: head_dim 256 is not supported"):
        make_sparse_plan(changed(tmp_path, head_dim=256), H200, on())


def test_layers_of_drafts_behind_the_model_count_for_none(tmp_path):
    ratios = [*FLASH.compress_ratios[:43], 0, 0, 0]
    model = changed(tmp_path, compress_ratios=ratios)
    assert len(model.layers_of(CSA)) == 21 and len(model.layers_of(HCA)) == 20 and len(model.layers_of(0)) == 2
    assert parameters_of(model) == parameters_of(FLASH)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--dcp", "2"], "--dcp: wanted 1, which is all that the engines have for deepseek_v4, got 2"),
        (["--kv-dtype", "bfloat16"], "--kv-dtype: wanted fp8, which is all that the engines have for deepseek_v4"),
        (["--tp", "16", "--count", "16"], "--tp: wanted a divisor of 8 groups of heads, got 16"),
    ],
)
def test_a_deployment_that_the_engines_have_not_is_refused(arguments, words):
    result = run("deepseek-v4-flash", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and words in " ".join(result.stderr.split())


# The command


def test_the_screen_says_what_the_caches_hold():
    text = words_of("deepseek-ai/DeepSeek-V4-Flash", "--gpu", "H200", "--context", "64K")
    assert text == words_of("deepseek-v4-flash", "--gpu", "H200", "--context", "64K", "--kv-dtype", "fp8").replace(
        "deepseek-v4-flash (", "deepseek-ai/DeepSeek-V4-Flash ("
    )
    assert "tokens of 3,915 B (708.75 of them the indexer's)" in text and "requests' windows 0.5 GB" in text
    assert "256 tokens are a block of 1,002,240 B, a request 30 more" in text
    assert "7,086.75 B a token, 10,485,760 a request" in text
    assert "Lists have 128 (2 window), 640 (21 CSA), 640 (20 HCA) rows, calls their mean" in text
    assert re.search(r"ETAP measured memory [\d.]+ 8 .* FlashMLA measured tensor [\d.]+ 64", text)
    shared = words_of("deepseek-v4.1-flash", "--gpu", "H200", "--context", "64K")
    assert "Engram's tables, 202.8 GB: in vLLM of host memory, in SGLang of the GPUs'." in shared
    assert "Lists have 128 (2 window), 640 (18 pairs), 640 (20 tokens) rows" in shared
    assert "18 rows behind another kernel" in words_of("deepseek-v4-flash", "--gpu", "H200", "--sources")


def test_json_has_what_the_screen_has():
    made = json.loads(etap_plan("deepseek-v4-pro", "--gpu", "H200", "--json"))
    assert made["caches"] == {
        "layers": 61, "csa": 30, "hca": 31, "window": 128,
        "block_bytes": 1_435_968, "blocks_of_a_request": 30, "blocks_of_prompts": 6_682,
        "sglang_token_bytes": 10_115.25, "sglang_request_bytes": 16_252_928,
        "pages": {
            "window": 37_440, "csa": 37_440, "hca": 1_728, "index_keys": 8_640, "csa_sums": 41_472, "hca_sums": 32_832,
        },
    }  # fmt: skip
    assert made["deployment"]["cache"] == "fp8" and made["bf16_tokens"] is None
    assert made["step"]["gain_over"]["FlashMLA"] == made["what_fits"][0]["gain"]
    assert json.loads(etap_plan("deepseek-v3.2", "--json"))["caches"] is None
    tokens, entries = call_size(PRO, on())
    assert tokens == 16 and entries == pytest.approx((30 * 1152 + 31 * 256) / 61)


@pytest.mark.parametrize("layout", [(), ("--count", "16", "--pp", "2"), ("--context", "1M"), ("--batch", "512")])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash"])
def test_the_answer_fits_one_screen(model, gpu, layout):
    lines = etap_plan(model, "--gpu", gpu, *layout, columns=80).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
