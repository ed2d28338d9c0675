"""`etap bench` on DeepSeek-V4's call, without its clock: the grid, pages, lists, and what each kernel is given. On a
GPU also a short run of the whole."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import typer
from bench.tests.bench_documents import bench_of, document_of, put_on_cpu
from typer.testing import CliRunner

from bench.common import configs
from bench.kernels import peers, providers, report, rows, tensors
from bench.kernels.command import bench
from bench.kernels.grids import V4Workload, read_grid, read_grids
from bench.kernels.rows import LARGEST_RMSE, Measured
from etap_backend.reference import relative_rmse, sparse_mla_decode_reference, stored_rows, what_rows_stand_for


def small(tokens: int = 3, heads: int = 8, extra: int = 64) -> V4Workload:
    return V4Workload((128 + extra,) * tokens, heads, kv_dtype="fp8", context=1024)


@pytest.fixture
def on_cpu(monkeypatch):
    put_on_cpu(monkeypatch, 5e5)


def test_the_grid_has_both_models_ranks_and_all_kinds_of_layers():
    made = read_grid(configs.find("bench", "v4"))
    shapes = {(len(row.lengths), row.heads, row.window, row.extra) for row in made.workloads}
    wanted = {(t, h, 128, k) for t in (1, 4, 16, 64, 128, 256) for h in (8, 16) for k in (0, 512, 1024)}
    assert shapes == wanted and made.sparse and {row.kind for row in made.workloads} == {"v4"}
    row = next(row for row in made.workloads if row.extra == 512 and len(row.lengths) == 16 and row.heads == 8)
    assert row.kv_bytes == 16 * 640 * 584 and row.flops == 2 * 8 * 16 * 640 * (512 + 512)
    assert row.label == "16 x 128 + 512, 8 heads, V4 rows" and row.shape.batch_text == "16 x 128 + 512"
    assert V4Workload((128,), 8, kv_dtype="fp8", context=64).shape.batch_text == "1 x 128"


@pytest.mark.parametrize(
    "text, words",
    [
        ("tokens = [1]\nheads = [8]\nextra = [0]", "v4.0.context: Field required"),
        (
            "tokens = [1]\nheads = [8]\nextra = [-1]\ncontext = 64",
            "v4.0.extra.0: Input should be greater than or equal",
        ),
        ("tokens = [1]\nheads = [8]\nextra = [0]\ncontext = 65", "v4.0.context: Input should be a multiple of 64"),
        ("tokens = [1]\nheads = [8]\nextra = [0]\ncontext = 64\n[[rows]]\nshapes = [[1, 64]]", "wanted .*rows"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, text, words):
    path = tmp_path / "grid.toml"
    path.write_text(f"[[v4]]\n{text}")
    with pytest.raises(ValueError, match=f"grid.toml: .*{words}"):
        read_grid(path)


def test_its_rows_are_of_one_type_and_of_one_run():
    with pytest.raises(
        ValueError, match="grids: wanted all of the dense call or all of the sparse one, got sparse, v4"
    ):
        read_grids(["sparse", "v4"])
    with pytest.raises(ValueError, match="--kv-dtype: wanted fp8 or none"):
        read_grids(["v4"], "same")


def test_pages_stand_for_what_they_were_made_of():
    made_of = torch.randn(3, 64, 512, dtype=torch.bfloat16)
    packed = tensors.v4_pages(made_of)
    assert packed.shape == (3, 64, 584) and packed.dtype == torch.uint8
    page, place = torch.arange(3 * 64).div(64, rounding_mode="floor"), torch.arange(3 * 64) % 64
    back = what_rows_stand_for(stored_rows(packed, page, place), torch.float64).view(3, 64, 512)
    assert torch.equal(back[..., 448:], made_of[..., 448:].double()), "rope is not rounded"
    groups, error = (x[..., :448].unflatten(-1, (7, 64)).abs() for x in (made_of.double(), back - made_of.double()))
    largest = groups.amax(dim=-1, keepdim=True)
    assert (error <= groups / 16 + largest / 224 / 1024).all() and error.max() > 0
    scale_bytes = packed.view(3, -1)[:, 64 * 576 :].view(3, 64, 8)
    assert not scale_bytes[..., 7].any() and (scale_bytes[..., :7] > 0).all()


def test_calls_walk_over_compressed_rows_that_no_other_call_reads(on_cpu):
    workload = small()
    pool = tensors.pool_of((workload,))
    copies = pool.copies(workload, torch.uint8)
    assert len(copies) == tensors.copies_of(workload) > 1
    extra = torch.cat([lists for *_, lists in copies])
    assert extra.shape[1] == 64 and extra.unique().numel() == extra.numel() and extra.max() < 1024
    for cache, window, extra_cache, _ in copies:
        assert cache.shape == extra_cache.shape == (16, 64, 584) and window.dtype == torch.int32
        assert (window.diff(dim=1) == 1).all() and window.shape == (3, 128) and 0 <= window.min() < window.max() < 1024
    without = small(extra=0)
    assert all(copy[2:] == (None, None) for copy in pool.copies(without, torch.uint8))


@pytest.mark.parametrize("extra", [0, 64])
def test_our_kernel_is_right(extra, on_cpu):
    row = bench_of(small(extra=extra), providers.ours(providers.installed()))
    assert list(row.kernels.of(row.workload)) == ["etap"]
    call, copies = row.prepared("etap")
    first, other = (row.pool.truth(row.inputs, copy) for copy in copies[:2])
    assert relative_rmse(call(*copies[0]), first) <= LARGEST_RMSE["bfloat16"]
    assert relative_rmse(call(*copies[0]), other) > 0.1, "the lists of another call go unseen"


@pytest.mark.parametrize("heads, extra, takes_out", [(8, 64, True), (16, 0, True), (16, 64, False)])
def test_flashmla_is_called_as_vllm_calls_it(heads, extra, takes_out, on_cpu, monkeypatch):
    """Its interface's words and shapes; the kernel behind it is what it is documented to compute."""

    def decode(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, **rest):
        assert q.shape == (3, 1, 64, 512) and k_cache.shape == (16, 64, 1, 584) and head_dim_v == 512
        assert block_table is cache_seqlens is None and tile_scheduler_metadata == "plan" and rest["is_fp8_kvcache"]
        assert rest["indices"].shape == (3, 1, 128) and rest["topk_length"].tolist() == [128] * 3
        assert rest["attn_sink"].shape == (64,) and (rest["attn_sink"][heads:] == -torch.inf).all()
        lists = rest["extra_indices_in_kvcache"]
        assert (lists is None) == (rest["extra_k_cache"] is None) == (rest["extra_topk_length"] is None) == (extra == 0)
        more = {} if lists is None else {"extra_kv_cache": rest["extra_k_cache"], "extra_indices": lists[:, 0]}
        sinks, scale = rest["attn_sink"], rest["softmax_scale"]
        made, lse = sparse_mla_decode_reference(q[:, 0], k_cache, rest["indices"][:, 0], scale, sinks=sinks, **more)
        out = rest.get("out", torch.empty(3, 1, 64, 512, dtype=torch.bfloat16))
        return out.copy_(made.unsqueeze(1)), lse

    def with_out(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, *, out, **rest):
        return decode(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, out=out, **rest)

    def without_out(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, **rest):
        assert "out" not in rest
        return decode(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, **rest)

    theirs = ModuleType("flashmla")
    theirs.flash_mla_with_kvcache = with_out if takes_out else without_out
    theirs.get_mla_metadata = lambda: ("plan", None)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: theirs)
    row = bench_of(small(heads=heads, extra=extra), providers.installed().chosen(["FlashMLA"]))
    call, copies = row.prepared("FlashMLA")
    assert relative_rmse(call(*copies[0]), row.pool.truth(row.inputs, copies[0])) < 3e-3


def test_its_table_has_both_times_of_each_kernel():
    row = small(16).shape
    times = {"etap": 9.0, "FlashMLA": 30.0}
    found = {
        name: Measured(us=us, iqr_us=0.1, replays=21, behind={"us": us + 2, "iqr_us": 0.1, "replays": 21})
        for name, us in times.items()
    }
    made = document_of(
        "v4", rows.SparseDocument, title="V4", rows=[rows.row_of(row, calls=4, rotated_bytes=0, results=found)]
    )
    made = made.model_copy(update={"options": made.options.model_copy(update={"behind": True})})
    header, _, line, *_, caption = report.markdown(made).splitlines()
    assert header.startswith(
        "| tokens x keys | heads | cache | floor | **etap** | TFLOP/s | FlashMLA | FlashMLA / etap |"
    )
    assert line.startswith("| 16 x 128 + 64 | 8 | FP8 | - | **9.0 / 11.0** |") and line.endswith(
        "| 30.0 / 32.0 | 3.33 / 2.91 |"
    )
    assert caption.startswith("Microseconds per call, back to back / behind another kernel. ")


@pytest.mark.gpu
def test_a_short_run_writes_right_results(tmp_path):
    path, output = tmp_path / "grid.toml", tmp_path / "results.json"
    path.write_text("[[v4]]\nheads = [8, 16]\nextra = [0, 512]\ntokens = [1, 64]\ncontext = 65536")
    app = typer.Typer(add_completion=False)
    app.command()(bench)
    words = [str(path), "--only", "etap", "--behind", "--replays", "3", "--output", str(output)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    made = rows.read(output)
    assert made.complete and len(made.rows) == 8
    for row in made.rows:
        timing = row.timing("etap")
        assert 0 < timing.relative_rmse < LARGEST_RMSE["bfloat16"] and timing.behind.us > timing.us > 0
