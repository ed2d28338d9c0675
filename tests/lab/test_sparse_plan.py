"""`etap plan` for models with sparse attention: what their caches take, what a call and the indexer take at least, and
what files of `etap bench sparse` make of it. Their readings are made up here; no result of a GPU is needed."""

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

from etap_backend.lab import configs, results
from etap_backend.lab.bench import rows
from etap_backend.lab.bench.grids import SparseWorkload
from etap_backend.lab.bench.rows import Measured, Options, SparseDocument
from etap_backend.lab.plan.fits import what_fits
from etap_backend.lab.plan.inputs import Deployment, read_gpu, read_model
from etap_backend.lab.plan.memory import memory_of, weights_of
from etap_backend.lab.plan.sparse import benchmarks, call_roofline, fitted_calls, make_sparse_plan
from etap_backend.lab.plan.step import make_plan

K = 1024
GPUS = configs.shipped("hardware")
MODELS = [name for name in configs.shipped("models", ".json") if read_model(name).sparse]
V32, GLM5, FLASH = (read_model(name) for name in ("deepseek-v3.2", "glm-5-fp8", "glm-5.3-flash"))
H20, H20_141, H100, H200 = (read_gpu(name) for name in ("H20-96G", "H20-141G", "H100", "H200"))
LINES = {"etap": (6.0, 1.2), "FlashMLA": (20.0, 2.0), "FA3": (12.0, 1.5)}  # microseconds, and times the roofline


def on(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, **other)


def timed(workload: SparseWorkload, rates, off: float = 1.0) -> rows.SparseRow:
    """A row whose kernels take what LINES say of it, and ours `off` times that."""
    shape, found = workload.shape, {}
    for kernel, (fixed, factor) in LINES.items():
        if kernel == "FA3" and workload.fp8:
            continue
        least = call_roofline(kernel, rates, shape.heads, shape.tokens, 576, workload.row_bytes)
        us = (fixed + factor * least.us) * (off if kernel == "etap" else 1)
        found[kernel] = Measured(us=us, iqr_us=0.1, replays=21)
    return rows.row_of(shape, calls=4, rotated_bytes=0, floor_us=None, results=found)


def a_document(gpu: str = "NVIDIA H200", rates=H200, heads=(8, 16), tokens=(1, 8, 128), **changes) -> SparseDocument:
    shapes = product(heads, tokens, ("same", "fp8"))
    options = {"num_sms": None} | changes.pop("options", {})
    return SparseDocument(
        grid="sparse",
        title="Sparse MLA decode",
        gpu=gpu,
        gpu_memory_mib=int(rates.memory_bytes.value / 2**20),
        multiprocessors=132,
        options=Options(kernels=["etap"], replays=21, validated=True, time_limit=None, **options),
        command="etap bench sparse",
        date="2026-01-01T00:00:00+00:00",
        method="graphs",
        floor=None,
        rows=[timed(SparseWorkload((2048,) * n, h, kv_dtype=kv, context=2 << 20), rates) for h, n, kv in shapes],
    ).model_copy(update=changes)


ON_H200 = {"sparse.json": a_document()}
ON_PROXY = {"proxy.json": a_document("H20 proxy (H200 throttled)", H20, options={"num_sms": 78, "h20_proxy": True})}


# What the caches take


@pytest.mark.parametrize(
    "model, cache, bytes_a_token, indexer",
    [
        (V32, "bfloat16", 61 * (1152 + 132), 61 * 132),
        (V32, "fp8", 61 * (656 + 132), 61 * 132),
        (GLM5, "bfloat16", 78 * (1152 + 132), 78 * 132),
        (GLM5, "fp8", 78 * (656 + 132), 78 * 132),
        (FLASH, "bfloat16", 11 * (1024 + 33), 11 * 33),
    ],
)
def test_a_token_takes_a_row_and_an_indexers_key_in_each_layer(model, cache, bytes_a_token, indexer):
    """FP8 rows have four scales and rope in bfloat16; a key is 128 bytes and a scale, of GLM-5.3-Flash for 4 tokens."""
    memory = memory_of(model, H20_141, on(cache=cache))
    assert (memory.cache_a_token, memory.indexer_a_token) == (bytes_a_token, indexer)


def test_stages_and_the_layer_that_predicts_have_their_indexers():
    halves, predicting = memory_of(V32, H200, on(gpus=16, pp=2)), memory_of(V32, H200, on(s_q=2))
    assert halves.cache_a_token == 31 * 1284 and predicting.cache_a_token == 62 * 1284
    assert memory_of(FLASH, H200, on(gpus=16, pp=2)).cache_a_token == 6 * 1057, "layers 24 to 45 have 6 of 11"


def test_every_rank_has_the_whole_indexer():
    """DeepSeek-V3.2: 1536 x 64 x 128 weights of queries in FP8, 7168 x (128 + 64) in two bytes, in all 61 layers."""
    parts = {part.name: part for part in weights_of(V32, on())}
    queries, keys = parts["indexer, queries"], parts["indexer, keys and gates"]
    assert queries.bytes_a_gpu == pytest.approx(61 * 1536 * 8192, rel=1e-3) and keys.bytes_a_gpu == 61 * 7168 * 192 * 2


@pytest.mark.parametrize(
    "changes, indexers",
    [
        ({}, 78),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),
        ({"index_topk_pattern": "FS" * 39}, 39),
    ],
)
def test_layers_without_an_indexer_keep_no_keys(tmp_path, changes, indexers):
    """GLM-5.2 has one in 21 of its 78 layers, by the same numbers."""
    whole = json.loads((configs.FOLDER / "models" / "glm-5-fp8.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | changes))
    model = read_model(str(tmp_path))
    assert len(model.indexer_layers) == indexers
    assert memory_of(model, H200, on()).cache_a_token == 78 * 1152 + indexers * 132


@pytest.mark.parametrize(
    "model, gpu, utilization, bf16, fp8",
    [
        (V32, H20, 0.95, 53120, 86592),
        (V32, H20_141, 0.92, 579136, 943744),
        (GLM5, H20, 0.95, 0, 0),
        (GLM5, H20_141, 0.92, 360640, 587648),
        (FLASH, H20_141, 0.92, 7809920, None),
    ],
)
def test_what_fits_is_what_the_page_says(model, gpu, utilization, bf16, fp8):
    said = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    for cache, tokens in (("bfloat16", bf16), ("fp8", fp8)):
        if tokens is not None:
            assert memory_of(model, gpu, on(utilization=utilization, cache=cache)).tokens == tokens
            assert f"| {tokens:,} |" in said or not tokens


def test_the_bounds_that_the_page_names():
    made = make_sparse_plan(V32, H20_141, on(context=64 * K), {})
    assert (round(made.indexer.least_ms, 1), round(made.layers * made.roofline.us / 1e3, 1)) == (4.0, 0.5)


# What is not planned


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v41"])
def test_deepseek_v4_is_refused_by_name(tmp_path, kind):
    """Its config.json has none of the keys of latent attention; what is said is that, and not which are missing."""
    fields = {"model_type": kind, "num_key_value_heads": 1, "head_dim": 512, "index_topk": 512, "compress_ratios": [4]}
    for name, content in {"flat": fields, "nested": {"text_config": fields}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"model_type: {kind} has compressed caches in formats of its own"):
            read_model(str(tmp_path / f"{name}.json"))


def test_an_fp8_cache_without_rope_is_refused_and_not_offered():
    with pytest.raises(
        ValueError, match="model: wanted one that ETAP runs: cache fp8 is not supported .* without rope"
    ):
        make_sparse_plan(FLASH, H200, on(cache="fp8"), {})
    assert {found.cache for found in what_fits(FLASH, H200, on())} == {"bfloat16"}
    assert {found.cache for found in what_fits(V32, H200, on())} == {"bfloat16", "fp8"}


def test_a_sparse_model_with_another_latent_is_refused(tmp_path):
    whole = json.loads((configs.FOLDER / "models" / "glm-5-fp8.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | {"kv_lora_rank": 256}))
    with pytest.raises(ValueError, match="model: wanted one that ETAP runs: head_dim 320 is not supported: wanted 576"):
        make_sparse_plan(read_model(str(tmp_path)), H200, on(), {})


# What is known without a reading


def test_a_call_reads_the_rows_of_each_tokens_list():
    """16 tokens x 2048 x 1152 bytes, or 656 in FP8, in products of 16 heads and 16 bits; 8 heads are 8 rows. An H20's
    tensor cores bound 16 heads, an H200's memory does."""
    entries = 16 * 2048
    plain, fp8 = (make_sparse_plan(V32, H200, on(cache=cache), {}).roofline for cache in ("bfloat16", "fp8"))
    assert plain.us == pytest.approx(entries * 1152 / H200.sustained_bandwidth.value * 1e6)
    assert fp8.us == pytest.approx(entries * 656 / H200.sustained_bandwidth.value * 1e6)
    assert (plain.rows, plain.bound) == (16, "memory")
    on_h20 = make_sparse_plan(V32, H20_141, on(), {}).roofline
    assert on_h20.us == pytest.approx(2 * 16 * entries * 1088 / H20_141.sustained_bf16_flops.value * 1e6)
    assert on_h20.bound == "tensor cores" and make_sparse_plan(GLM5, H20_141, on(), {}).roofline.rows == 8


def test_drafts_have_lists_of_their_own_and_ranks_of_a_context_share_them():
    plain, drafts, spread = (make_sparse_plan(V32, H200, on(**more), {}) for more in ({}, {"s_q": 2}, {"dcp": 4}))
    assert (plain.tokens, drafts.tokens, spread.entries) == (16, 32, 512)
    assert drafts.roofline.us == pytest.approx(2 * plain.roofline.us) and spread.roofline.rows == 64
    assert make_sparse_plan(V32, H200, on(context=100), {}).entries == 100
    assert make_sparse_plan(FLASH, H200, on(), {}).entries == 2051, "the pool that is not full comes on top"


def test_the_indexer_takes_at_least_its_products_or_its_keys():
    """16 x 64K keys of 132 bytes, each times 64 heads of 128 in FP8; four tokens of GLM-5.3-Flash have one key."""
    keys, indexer = 16 * 64 * K, make_sparse_plan(V32, H20_141, on(context=64 * K), {}).indexer
    flops = H20_141.sustained_flops(fp8=True)
    assert indexer.roofline.us == pytest.approx(2 * keys * 64 * 128 / flops * 1e6)
    assert indexer.least_ms == pytest.approx(61 * indexer.roofline.us / 1e3)
    pooled = make_sparse_plan(FLASH, H200, on(context=64 * K), {}).indexer
    assert pooled.layers == 11
    assert pooled.roofline.us == pytest.approx(keys / 4 * 132 / H200.sustained_bandwidth.value * 1e6)


def test_without_a_reading_no_time_is_told():
    made = make_sparse_plan(V32, H200, on(), {})
    assert made.kernels == () and made.ours is None and made.gain is None
    assert {found.gain for found in what_fits(V32, H200, on())} == {None}


# What readings make of it


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [8, 16])
def test_the_line_of_each_kernel_is_found(heads, fp8):
    calls = fitted_calls(H200, ON_H200, heads, fp8)
    assert list(calls) == ["etap", "FlashMLA"] + ([] if fp8 else ["FA3"])
    for kernel, call in calls.items():
        assert (call.fixed_us, call.factor) == pytest.approx(LINES[kernel], rel=1e-6)
        assert call.status == "measured" and call.source == f"3 rows of {kernel} in sparse.json, within 0%"


def test_how_far_a_reading_lies_from_the_line_is_told():
    crooked = a_document(heads=(16,), tokens=(1, 16, 64, 128))
    last = crooked.rows[-2]
    slow = timed(SparseWorkload((2048,) * 128, 16, context=2 << 20), H200, off=1.5)
    assert slow.label == last.label
    call = fitted_calls(H200, {"a.json": crooked.model_copy(update={"rows": [*crooked.rows[:-2], slow]})}, 16, False)[
        "etap"
    ]
    farthest = int(re.search(r"within (\d+)%", call.source)[1])
    assert 5 <= farthest <= 33


@pytest.mark.parametrize("us", [(10.0, 9.0, 8.0), (0.01, 30.0, 400.0)])
def test_a_line_never_starts_below_nothing_nor_beats_the_roofline(us):
    made = a_document(heads=(16,))
    plain = [row for row in made.rows if not row.fp8]
    bent = [
        row.model_copy(update={"results": {"etap": Measured(us=time, iqr_us=0, replays=1)}})
        for row, time in zip(plain, us, strict=True)
    ]
    call = fitted_calls(H200, {"a.json": made.model_copy(update={"rows": bent})}, 16, False)["etap"]
    assert call.fixed_us >= 0 and call.factor >= 1


@pytest.mark.parametrize(
    "gpu, documents, status, how",
    [
        (H200, ON_H200, "measured", ""),
        (H100, ON_H200, "derived", "as on an H200"),
        (H20, ON_PROXY, "derived", "throttled to an H20's rates, not an H20"),
        (H20_141, ON_PROXY, "derived", "throttled to an H20's rates, not an H20"),
        (H20, {"h20.json": a_document("NVIDIA H20", H20)} | ON_PROXY, "measured", ""),
        (H20_141, {"h20.json": a_document("NVIDIA H20", H20)} | ON_PROXY, "derived", "as on an H20-96G"),
        (H100, {"h100.json": a_document("NVIDIA H100 80GB HBM3", H100)} | ON_H200, "measured", ""),
    ],
)
def test_whose_readings_stand_for_a_gpu(gpu, documents, status, how):
    calls = fitted_calls(gpu, documents, 16, False)
    assert calls["etap"].status == status and how in calls["etap"].source
    assert (calls["etap"].fixed_us, calls["etap"].factor) == pytest.approx(LINES["etap"], rel=1e-6)


@pytest.mark.parametrize(
    "gpu, documents",
    [
        (H20, ON_H200),
        (H200, ON_PROXY),
        (H200, {}),
        (H200, {"two.json": a_document(tokens=(1, 8), heads=(16,))}),
        (H200, {"prefill.json": a_document(tokens=(1024, 2048, 4096))}),
        (H200, {"part.json": a_document(options={"num_sms": 78})}),
        (H200, {"builds.json": a_document(libraries={"before": None})}),
        (read_gpu("h200").model_copy(update={"name": "mine"}), ON_H200),
    ],
    ids=["another chip", "proxy", "none", "two rows", "prefill", "part of a GPU", "builds", "unknown GPU"],
)
def test_what_tells_nothing_of_a_gpu(gpu, documents):
    assert fitted_calls(gpu, documents, 16, False) == {}


def test_heads_that_were_not_timed_take_the_rows_of_all():
    call = fitted_calls(H200, ON_H200, 32, False)["etap"]
    assert call.source.startswith("6 rows of etap")


def test_rows_without_rope_take_the_line_of_those_with_it():
    call = make_sparse_plan(FLASH, H200, on(), ON_H200).ours.call
    assert call.status == "derived" and call.source.endswith("of rows with rope")
    assert (call.fixed_us, call.factor) == pytest.approx(LINES["etap"], rel=1e-6)


def test_a_step_is_a_lower_bound_and_a_gain_an_upper_one():
    made = make_sparse_plan(V32, H200, on(), ON_H200)
    fixed, factor = LINES["etap"]
    us = fixed + factor * made.roofline.us
    assert made.ours.attention.call_us == pytest.approx(us)
    assert made.least_step_ms(made.ours) == pytest.approx(made.rest_ms + made.indexer.least_ms + 61 * us / 1e3)
    flashmla, fa3 = made.peers
    assert made.gain == made.gain_over(fa3) and made.gain_over(flashmla).tokens > made.gain.tokens > 0
    assert made.gain.call == pytest.approx(fa3.attention.call_us / us)
    assert all(found.gain for found in what_fits(V32, H200, on(), benchmarks=ON_H200) if "H200" in found.layout)


deployments = st.builds(
    Deployment,
    tp=st.sampled_from([2, 4, 8]),
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    cache=st.sampled_from(["bfloat16", "fp8"]),
    context=st.integers(1, 131072),
    batch=st.integers(1, 512),
    s_q=st.integers(1, 4),
).map(lambda where: replace(where, gpus=where.tp * where.dp * where.pp))


@settings(deadline=None)
@given(st.sampled_from([V32, GLM5]), deployments, st.integers(1, 4096), st.integers(1, 64))
def test_more_work_never_takes_less(model, where, more_context, more_batch):
    before = make_sparse_plan(model, H200, where, ON_H200)
    for bigger in (
        replace(where, context=where.context + more_context),
        replace(where, batch=where.batch + more_batch),
    ):
        after = make_sparse_plan(model, H200, bigger, ON_H200)
        assert after.memory.tokens_wanted >= before.memory.tokens_wanted
        assert after.roofline.us >= before.roofline.us and after.indexer.least_ms >= before.indexer.least_ms
        assert after.least_step_ms(after.ours) >= before.least_step_ms(before.ours) * (1 - 1e-9)


@settings(deadline=None)
@given(st.sampled_from([V32, GLM5]), deployments)
def test_what_is_said_to_fit_fits(model, where):
    asked = what_fits(model, H200, where)[0]
    if asked.most_requests:
        assert memory_of(model, H200, replace(where, batch=asked.most_requests)).fits
    assert not memory_of(model, H200, replace(where, batch=asked.most_requests + where.dp)).fits


def test_a_dense_plan_of_a_sparse_result_is_not_made():
    """`etap estimate` takes attention out of a served step by the dense kernels' times."""
    from etap_backend.lab.e2e import rows as served
    from etap_backend.lab.plan.served import servers_of

    document = served.read(Path(__file__).parents[2] / "results/e2e-decode-full-vllm.json")
    shape = json.loads((configs.FOLDER / "models" / "deepseek-v3.2.json").read_text())
    with pytest.raises(ValueError, match="model: wanted a result of dense attention, got index_topk 2048"):
        servers_of(document.model_copy(update={"model_shape": shape}), "h20-96g")
    assert make_plan(read_model("deepseek-r1"), H200, on()).etap.call_us


# Files and the command


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """In place of results/."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def test_files_of_the_sparse_call_are_found_in_results(folder):
    assert benchmarks() == {}
    results.write(ON_H200["sparse.json"], folder / "sparse.json")
    results.write({"kind": "bench"}, folder / "sparse-checks.json")
    assert benchmarks() == ON_H200


@pytest.mark.parametrize("content", [{"kind": "bench"}, [], {}])
def test_a_given_file_of_another_kind_is_refused(tmp_path, content):
    results.write(content, tmp_path / "a.json")
    with pytest.raises(ValueError, match="a.json: wanted a file of `etap bench` on the sparse call, got kind"):
        benchmarks([tmp_path / "a.json"])


def test_the_screen_says_what_was_not_measured(folder):
    text = words_of("deepseek-v3.2", "--gpu", "H200", "--context", "64K")
    assert "78,324 B (8,052 of them the indexer's)" in text
    assert "ETAP not measured memory >=8.3 16 >=0.50 indexer not measured memory >=30.3 64 >=1.85" in text
    assert "No `etap bench sparse` of an H200 (--kernels): no step. >= is a roofline." in text
    assert "tokens/s" not in text and "%" not in text.split("On one H200")[1]
    made = json.loads(etap_plan("deepseek-v3.2", "--gpu", "H200", "--json"))
    assert made["attention"]["measured"] == made["step"]["least_ms"] == made["step"]["most_gain_over"] == {}
    assert made["attention"]["least"]["us"] > 0 and made["indexer"]["least_ms"] > 0
    assert {found["gain"] for found in made["what_fits"]} == {None}


def test_the_screen_says_what_was_measured(folder):
    results.write(ON_H200["sparse.json"], folder / "sparse.json")
    arguments = ("deepseek-v3.2", "--gpu", "H200", "--kv-dtype", "fp8")
    text = words_of(*arguments)
    assert re.search(r"ETAP measured memory [\d.]+ 16 [\d.]+ >=[\d.]+ FlashMLA measured tensor [\d.]+ 64", text)
    assert re.search(r"With ETAP at most \d+ tokens/s a GPU. Gains are at most, over the fastest below.", text)
    assert "1.63x the" in text and "no step" not in text
    assert "3 rows of etap in sparse.json, within 0%" in words_of(*arguments, "--sources")
    made = json.loads(etap_plan(*arguments, "--json"))
    assert set(made["attention"]["measured"]) == set(made["step"]["least_ms"]) == {"etap", "FlashMLA"}
    assert made["attention"]["measured"]["etap"]["fit"]["status"] == "measured"
    assert made["step"]["most_gain_over"]["FlashMLA"] == pytest.approx(made["what_fits"][0]["gain"]["tokens"])


def test_readings_can_be_given(folder):
    results.write(ON_PROXY["proxy.json"], folder / "mine")
    assert "not measured tensor" in words_of("glm-5-fp8", "--gpu", "H20-141G", "--context", "64K")
    text = words_of("glm-5-fp8", "--gpu", "H20-141G", "--kernels", str(folder / "mine"), "--sources")
    assert "ETAP derived" in text and "an H200 throttled to an H20's rates, not an H20" in text


@pytest.mark.parametrize("layout", [(), ("--count", "16", "--pp", "2"), ("--dcp", "8"), ("--context", "64K")])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "model, cache", [*product(MODELS, ["bfloat16"]), ("deepseek-v3.2", "fp8"), ("glm-5-fp8", "fp8")]
)
def test_the_answer_fits_one_screen(model, cache, gpu, layout, folder):
    for measured in (False, True):
        if measured:
            for document in (ON_H200 | ON_PROXY).values():
                results.write(document, folder / f"sparse-{document.gpu[:4].strip()}.json")
        lines = etap_plan(model, "--gpu", gpu, "--cache", cache, *layout, columns=80).splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--attention-share", "0.3"], "--attention-share: wanted none for sparse attention, got 0.3"),
        (["--kernels", "no-such-file.json"], "no-such-file.json"),
        (["--tp", "3", "--count", "3"], "tp: wanted a divisor of 128 heads, got 3"),
    ],
)
def test_the_command_refuses_what_it_cannot_plan(arguments, words):
    result = run("deepseek-v3.2", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert words in " ".join(result.stderr.split())
