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

from bench.common import configs, results
from bench.kernels import rows
from bench.kernels.grids import SparseWorkload
from bench.kernels.rows import Measured, SparseDocument
from bench.e2e import results_file as e2e_file
from etap_backend.plan.alternatives import what_fits
from etap_backend.plan.inputs import Deployment, read_gpu, read_model
from etap_backend.plan.memory import memory_of, weights_of
from etap_backend.plan.sparse import call_size, fitted_calls, make_sparse_plan, shipped_calls, sparse_attention

K = 1024
RESULTS = Path(__file__).parents[2] / "results"
GPUS = configs.shipped("hardware")
MODELS = [name for name in configs.shipped("models", ".json") if (model := read_model(name)).sparse and not model.v4]
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
        size = (shape.heads, shape.tokens, 576, workload.row_bytes, 1)
        least = sparse_attention(kernel, rates, None, *size).roofline_us
        us = (fixed + factor * least) * (off if kernel == "etap" else 1)
        found[kernel] = Measured(us=us, iqr_us=0.1, replays=21)
    return rows.row_of(shape, calls=4, rotated_bytes=0, floor_us=None, results=found)


def a_document(gpu: str = "NVIDIA H200", rates=H200, heads=(8, 16), tokens=(1, 8, 128), **changes) -> SparseDocument:
    """As a file of `etap bench sparse`, with rows that are made up."""
    shapes = product(heads, tokens, ("same", "fp8"))
    like = results.read(RESULTS / "sparse.json", SparseDocument)
    about = {"gpu": gpu, "gpu_memory_mib": int(rates.memory_bytes.value / 2**20)}
    about["options"] = like.options.model_copy(update={"num_sms": None} | changes.pop("options", {}))
    rows = [timed(SparseWorkload((2048,) * n, h, kv_dtype=kv, context=2 << 20), rates) for h, n, kv in shapes]
    return like.model_copy(update=about | {"rows": rows} | changes)


@pytest.fixture
def of(tmp_path):
    """The paths of files with these documents."""

    def written(*documents: SparseDocument) -> list[Path]:
        paths = [tmp_path / f"{number}.json" for number in range(len(documents))]
        for document, path in zip(documents, paths, strict=True):
            results.write(document, path)
        return paths

    return written


ON_H200 = a_document()
ON_PROXY = a_document("H20 proxy (H200 throttled)", H20, options={"num_sms": 78, "h20_proxy": True})


# What the caches take


@pytest.mark.parametrize(
    "model, cache, bytes_a_token, indexer",
    [
        (V32, "bfloat16", 61 * (1152 + 132), 61 * 132),
        (V32, "fp8", 61 * (656 + 132), 61 * 132),
        (GLM5, "bfloat16", 78 * (1152 + 132), 78 * 132),
        (GLM5, "fp8", 78 * (656 + 132), 78 * 132),
        (FLASH, "bfloat16", 11 * (1024 + 33), 11 * 33),
        (FLASH, "fp8", 11 * (656 + 33), 11 * 33),
    ],
)
def test_a_token_takes_a_row_and_an_indexers_key_in_each_layer(model, cache, bytes_a_token, indexer):
    """FP8 rows have four scales and rope in bfloat16, or as many bytes without rope, as in vLLM; a key is 128 bytes and
    a scale, of GLM-5.3-Flash for 4 tokens."""
    memory = memory_of(model, H20_141, on(cache=cache))
    assert (memory.cache_per_token, memory.indexer_per_token) == (bytes_a_token, indexer)


def test_stages_and_the_layer_that_predicts_have_their_indexers():
    halves, predicting = memory_of(V32, H200, on(gpus=16, pp=2)), memory_of(V32, H200, on(s_q=2))
    assert halves.cache_per_token == 31 * 1284 and predicting.cache_per_token == 62 * 1284
    assert memory_of(FLASH, H200, on(gpus=16, pp=2)).cache_per_token == 6 * 1057, "layers 24 to 45 have 6 of 11"


def test_every_rank_has_the_whole_indexer():
    """DeepSeek-V3.2: 1536 x 64 x 128 weights of queries in FP8, 7168 x (128 + 64) in two bytes, in all 61 layers."""
    parts = {part.name: part for part in weights_of(V32, on())}
    queries, keys = parts["indexer, queries"], parts["indexer, keys and gates"]
    assert (
        queries.bytes_per_gpu == pytest.approx(61 * 1536 * 8192, rel=1e-3) and keys.bytes_per_gpu == 61 * 7168 * 192 * 2
    )


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
    assert memory_of(model, H200, on()).cache_per_token == 78 * 1152 + indexers * 132


# What is not planned


def test_an_fp8_cache_is_offered_and_a_row_without_rope_is_read_as_far_as_it_goes():
    for model in (FLASH, V32):
        assert {found.cache for found in what_fits(model, H200, on())} == {"bfloat16", "fp8"}
    made = make_sparse_plan(FLASH, H200, on(cache="fp8"))
    tokens, entries = call_size(FLASH, on(cache="fp8"))
    assert made.etap.roofline_us == pytest.approx(tokens * entries * 528 / H200.sustained_bandwidth.value * 1e6)
    assert made.etap.call.status == "derived" and "of rows with rope" in made.etap.call.source


def test_a_sparse_model_with_another_latent_is_refused(tmp_path):
    whole = json.loads((configs.FOLDER / "models" / "glm-5-fp8.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | {"kv_lora_rank": 256}))
    with pytest.raises(ValueError, match="model: wanted one that ETAP runs: head_dim 320 is not supported: wanted 576"):
        make_sparse_plan(read_model(str(tmp_path)), H200, on())


# What is known without a reading


def test_a_call_reads_the_rows_of_each_tokens_list():
    """16 tokens x 2048 x 1152 bytes, or 656 in FP8, in products of 16 heads and 16 bits; 8 heads are 8 rows. An H20's
    tensor cores bound 16 heads, an H200's memory does."""
    entries = 16 * 2048
    plain, fp8 = (make_sparse_plan(V32, H200, on(cache=cache)).etap for cache in ("bfloat16", "fp8"))
    assert plain.roofline_us == pytest.approx(entries * 1152 / H200.sustained_bandwidth.value * 1e6)
    assert fp8.roofline_us == pytest.approx(entries * 656 / H200.sustained_bandwidth.value * 1e6)
    assert (plain.rows, plain.bound) == (16, "memory")
    on_h20 = make_sparse_plan(V32, H20_141, on()).etap
    assert on_h20.roofline_us == pytest.approx(2 * 16 * entries * 1088 / H20_141.sustained_bf16_flops.value * 1e6)
    assert on_h20.bound == "tensor cores" and make_sparse_plan(GLM5, H20_141, on()).etap.rows == 8


def test_drafts_have_lists_of_their_own_and_ranks_of_a_context_share_them():
    assert [call_size(V32, on(**more)) for more in ({}, {"s_q": 2}, {"dcp": 4}, {"context": 100})] == [
        (16, 2048), (32, 2048), (16, 512), (16, 100),
    ]  # fmt: skip
    assert call_size(FLASH, on())[1] == 2051, "the pool that is not full comes on top"
    plain, drafts, spread = (make_sparse_plan(V32, H200, on(**more)).etap for more in ({}, {"s_q": 2}, {"dcp": 4}))
    assert drafts.roofline_us == pytest.approx(2 * plain.roofline_us) and spread.rows == 64


def test_the_indexer_takes_at_least_its_products_or_its_keys():
    """16 x 64K keys of 132 bytes, each times 64 heads of 128 in FP8; four tokens of GLM-5.3-Flash have one key."""
    keys, indexer = 16 * 64 * K, make_sparse_plan(V32, H20_141, on(context=64 * K)).indexer
    flops = H20_141.sustained_flops(fp8=True)
    assert indexer.roofline_us == pytest.approx(2 * keys * 64 * 128 / flops * 1e6)
    assert indexer.step_ms == pytest.approx(61 * indexer.roofline_us / 1e3)
    pooled = make_sparse_plan(FLASH, H200, on(context=64 * K)).indexer
    assert pooled.layers == 11
    assert pooled.roofline_us == pytest.approx(keys / 4 * 132 / H200.sustained_bandwidth.value * 1e6)


UNTIMED = H200.model_copy(update={"sparse": ()})


def test_without_a_reading_no_time_is_told():
    made = make_sparse_plan(V32, UNTIMED, on())
    assert made.etap.call is None and made.peers == () and made.gain is None
    assert {found.gain for found in what_fits(V32, UNTIMED, on()) if "H200" in found.layout} == {None}


# What readings make of it


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [8, 16])
def test_the_line_of_each_kernel_is_found(heads, fp8, of):
    calls = fitted_calls(H200, of(ON_H200), heads, fp8)
    assert list(calls) == ["etap", "FlashMLA"] + ([] if fp8 else ["FA3"])
    for kernel, call in calls.items():
        assert (call.fixed_us, call.factor) == pytest.approx(LINES[kernel], rel=1e-6)
        assert call.status == "measured" and call.source == f"3 rows of {kernel} in 0.json, within 0%"


def test_how_far_a_reading_lies_from_the_line_is_told(of):
    crooked = a_document(heads=(16,), tokens=(1, 16, 64, 128))
    last = crooked.rows[-2]
    slow = timed(SparseWorkload((2048,) * 128, 16, context=2 << 20), H200, off=1.5)
    assert slow.label == last.label
    (call, *_) = fitted_calls(
        H200, of(crooked.model_copy(update={"rows": [*crooked.rows[:-2], slow]})), 16, False
    ).values()
    assert 5 <= int(re.search(r"within (\d+)%", call.source)[1]) <= 33


@pytest.mark.parametrize("us", [(10.0, 9.0, 8.0), (0.01, 30.0, 400.0)])
def test_a_line_never_starts_below_nothing_nor_beats_the_roofline(us, of):
    made = a_document(heads=(16,))
    plain = [row for row in made.rows if not row.fp8]
    bent = [
        row.model_copy(update={"results": {"etap": Measured(us=time, iqr_us=0, replays=1)}})
        for row, time in zip(plain, us, strict=True)
    ]
    call = fitted_calls(H200, of(made.model_copy(update={"rows": bent})), 16, False)["etap"]
    assert call.fixed_us >= 0 and call.factor >= 1


@pytest.mark.parametrize(
    "gpu, document, words",
    [
        (H20, ON_H200, "kernels: wanted files of an H20-96G, got .*0.json of an NVIDIA H200"),
        (H200, ON_PROXY, "kernels: wanted files of an H200, got .*0.json of an H20 proxy"),
        (H200, a_document(options={"num_sms": 78}), "kernels: wanted files of installed kernels on a whole GPU, got"),
    ],
)
def test_readings_of_another_gpu_or_of_a_part_of_one_are_refused(gpu, document, words, of):
    with pytest.raises(ValueError, match=words):
        fitted_calls(gpu, of(document), 16, False)


@pytest.mark.parametrize("document", [a_document(tokens=(1, 8), heads=(16,)), a_document(tokens=(1024, 2048, 4096))])
def test_two_rows_and_a_prefill_make_no_line(document, of):
    assert fitted_calls(H200, of(document), 16, False) == {}


def test_the_proxy_stands_for_an_h20_and_any_file_for_a_gpu_of_ones_own(of):
    mine = H200.model_copy(update={"name": "mine"})
    for gpu, document in ((H20, ON_PROXY), (H20_141, ON_PROXY), (mine, ON_H200)):
        rates = gpu if gpu is mine else H20
        call = fitted_calls(rates, of(document), 16, False)["etap"]
        assert (call.fixed_us, call.factor) == pytest.approx(LINES["etap"], rel=1e-6)


def test_heads_that_were_not_timed_take_the_rows_of_all(of):
    assert fitted_calls(H200, of(ON_H200), 32, False)["etap"].source.startswith("6 rows of etap")


def test_rows_without_rope_take_the_line_of_those_with_it(of):
    call = make_sparse_plan(FLASH, H200, on(), of(ON_H200)).etap.call
    assert call.status == "derived" and call.source.endswith("of rows with rope")
    assert (call.fixed_us, call.factor) == pytest.approx(LINES["etap"], rel=1e-6)


def test_a_step_is_a_lower_bound_and_a_gain_an_upper_one(of):
    made = make_sparse_plan(V32, H200, on(), of(ON_H200))
    fixed, factor = LINES["etap"]
    us = fixed + factor * made.etap.roofline_us
    assert made.etap.call_us == pytest.approx(us)
    assert made.step_with(made.etap) == pytest.approx(made.rest_ms + made.indexer.step_ms + 61 * us / 1e3)
    flashmla, fa3 = made.peers
    assert made.gain == made.gain_over(fa3) and made.gain_over(flashmla).lower > made.gain.upper > 0
    assert made.gain.call == pytest.approx(fa3.call_us / us)
    assert all(found.gain for found in what_fits(V32, H200, on(), kernels=of(ON_H200)) if "H200" in found.layout)


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
    before = make_sparse_plan(model, H200, where)
    for bigger in (
        replace(where, context=where.context + more_context),
        replace(where, batch=where.batch + more_batch),
    ):
        after = make_sparse_plan(model, H200, bigger)
        assert after.memory.tokens_wanted >= before.memory.tokens_wanted
        assert after.etap.roofline_us >= before.etap.roofline_us and after.indexer.step_ms >= before.indexer.step_ms
        assert after.step_with(after.etap) >= before.step_with(before.etap) * (1 - 1e-9)


@settings(deadline=None)
@given(st.sampled_from([V32, GLM5]), deployments)
def test_what_is_said_to_fit_fits(model, where):
    asked = what_fits(model, H200, where)[0]
    if asked.most_requests:
        assert memory_of(model, H200, replace(where, batch=asked.most_requests)).fits
    assert not memory_of(model, H200, replace(where, batch=asked.most_requests + where.dp)).fits


# What ships


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_lines_of_sparse_calls_without_a_results_folder(name, monkeypatch, tmp_path):
    """`etap plan deepseek-v3.2` of an installed wheel, which has no results."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    gpu = read_gpu(name)
    for fp8 in (False, True):
        calls = shipped_calls(gpu, 16, fp8)
        assert "etap" in calls and "FlashMLA" in shipped_calls(gpu, 16, True)
        assert all(call.status == "derived" for call in calls.values()) == (name != "h200")
    assert " tokens/s than with " in words_of("deepseek-v3.2", "--gpu", name, "--kv-dtype", "fp8")


def test_heads_without_a_line_take_that_of_more_heads():
    call = shipped_calls(H200, 32, False)["etap"]
    assert call.status == "derived" and call.source.endswith("; as of 64 heads")
    assert shipped_calls(H100, 16, False)["etap"].source.endswith("; as on an H200")


SHIPPED = [
    (name, file) for name in GPUS for file in sorted({file for call in read_gpu(name).sparse for file in call.results})
]


@pytest.mark.parametrize("name, file", SHIPPED)
def test_what_ships_is_fitted_to_the_results(name, file):
    """Within the 15% that the planner claims: where it fails after a new reading, the lines are to be fitted anew."""
    gpu = read_gpu(name)
    for call in gpu.sparse:
        if file in call.results:
            fitted = fitted_calls(gpu, [RESULTS / f"{file}.json"], call.heads, call.fp8, call.v4)[call.kernel]
            for roofline in (10, 100, 1000):
                assert call.microseconds(roofline) == pytest.approx(fitted.microseconds(roofline), rel=0.15)


# The command


@pytest.mark.parametrize("content", [{"kind": "bench"}, [], {}])
def test_a_given_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a.json: "):
        fitted_calls(H200, [tmp_path / "a.json"], 16, False)


def test_the_screen_says_what_was_not_measured(tmp_path):
    mine = tmp_path / "mine.toml"
    whole = (configs.FOLDER / "hardware" / "h200.toml").read_text()
    mine.write_text(whole.split("sparse = [")[0].replace('name = "H200"', 'name = "mine"'))
    arguments = ("deepseek-v3.2", "--gpu", str(mine), "--context", "64K")
    text = words_of(*arguments)
    assert "78,324 B (8,052 of them the indexer's)" in text
    assert "ETAP not timed memory >=8.3 16 >=0.50 indexer not timed memory >=30.3 64 >=1.85" in text
    assert "Nobody timed such a call on mine (--kernels): no step and no gain. >= is a roofline." in text
    made = json.loads(etap_plan(*arguments, "--json"))
    assert made["step"]["gain"] is None and made["step"]["gain_over"] == {} and made["indexer"]["call"] is None
    assert made["attention"]["ETAP"]["call"] is None and made["attention"]["ETAP"]["roofline_us"] > 0


def test_the_screen_says_what_was_measured(of):
    (file,) = of(ON_H200)
    arguments = ("deepseek-v3.2", "--gpu", "H200", "--kv-dtype", "fp8", "--kernels", str(file))
    text = words_of(*arguments)
    assert re.search(r"ETAP measured memory [\d.]+ 16 [\d.]+ >=[\d.]+ FlashMLA measured tensor [\d.]+ 64", text)
    assert "Choosing the 16 lists of 2,048 rows comes on top." in text and "1.63x the" in text and "no step" not in text
    assert "3 rows of etap in 0.json, within 0%" in words_of(*arguments, "--sources")
    made = json.loads(etap_plan(*arguments, "--json"))
    assert (
        made["attention"].keys() == {"ETAP", "FlashMLA"} and made["attention"]["ETAP"]["call"]["status"] == "measured"
    )
    assert made["step"]["gain_over"]["FlashMLA"] == made["what_fits"][0]["gain"]


@pytest.mark.parametrize("layout", [(), ("--count", "16", "--pp", "2"), ("--dcp", "8"), ("--context", "64K")])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "model, cache", [*product(MODELS, ["bfloat16"]), ("deepseek-v3.2", "fp8"), ("glm-5-fp8", "fp8")]
)
def test_the_answer_fits_one_screen(model, cache, gpu, layout):
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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("e2e-decode-glm-5-mtp*.json")), ids=lambda path: path.stem)
def test_steps_of_a_server_with_drafts_and_an_fp8_cache(path, tmp_path):
    """GLM-5, 40 layers on an H200 as one of eight ranks; nothing was fitted to it. What drafting takes beside the
    model's own step is more than 15% of a single request's, and is not in the plan."""
    document = e2e_file.read(path)
    (tmp_path / "config.json").write_text(json.dumps(document.model_shape))
    model = read_model(str(tmp_path / "config.json"))
    for backends in document.by_shape().values():
        shape = backends["ETAP"]
        ours, theirs = (backends[name].itl_ms.median for name in ("ETAP", "FLASHMLA_SPARSE"))
        load = {"s_q": 1 + document.draft_tokens, "cache": "fp8", "gpus": 1, "tp": 1}
        made = make_sparse_plan(model, H200, on(shape.concurrency, shape.input, **load))
        gain = made.gain_over(made.peers[0])
        assert gain.lower - 0.035 <= theirs / ours - 1 <= gain.upper
        if shape.concurrency > 1 and shape.input == 4 * K:
            assert made.step_with(made.etap) == pytest.approx(ours, rel=0.15)
            assert made.step_with(made.peers[0]) == pytest.approx(theirs, rel=0.15)
