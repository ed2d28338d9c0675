"""sparse_top_k against float64 keys: the kernel on a Hopper GPU, torch on the CPU. Every entry and its place count."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from etap_backend import sparse_top_k
from support.covering import both_devices, on_devices
from support.top_k_cases import INF, LAWS, NAN, TopKCase, expected, on_pages

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 8191, 32769)
SMS = (1, 8, 33, 132)


def on(device: str, tensor: Tensor) -> Tensor:
    """A copy of a tensor on the device, with its strides and all that lies between its rows."""
    begin = tensor.storage_offset()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return memory.as_strided(tensor.shape, tensor.stride(), begin)


def ints(device: str, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def select(case: TopKCase, device: str, **given) -> Tensor:
    """The result of a call whose output lies between guards, on the CPU."""
    guarded = torch.full((len(case.lengths), case.k + 2), -77, dtype=torch.int32, device=device)
    out = guarded[:, 1:-1]
    lengths = ints(device, case.lengths)
    assert sparse_top_k(on(device, case.logits()), lengths, case.k, out=out, **given) is out
    assert (guarded[:, [0, -1]] == -77).all(), "something was written beside the output"
    return out.cpu()


def verify(case: TopKCase, device: str, **given) -> None:
    found, wanted = select(case, device, **given), expected(case.logits(), case.lengths, case.k)
    wrong = (found != wanted).any(dim=1).nonzero()[:, 0].tolist()
    assert not wrong, f"rows {wrong} of {case!r}"


@on_devices({"behind": (INF, NAN), "k": (1, 7, 512, 1024, 2048), "sms": SMS}, cpu={"sms": (132,)})
def test_lengths(device, sms, k, behind):
    verify(TopKCase(LENGTHS, k, behind=behind, seed=1), device, num_sms=sms)


@on_devices({"law": tuple(LAWS), "length": (600, 2049, 40000, 140000), "rows": (1, 3, 20, 70)}, cpu={"rows": (1,)})
def test_laws(device, rows, length, law):
    lengths = [max(1, length - 37 * row) for row in range(rows)]
    verify(TopKCase(lengths, 512, law, seed=2), device)
    if device == "cuda":
        verify(TopKCase(lengths, 2048, law, seed=3), device)


@both_devices
def test_a_million_logits(device):
    verify(TopKCase([1_000_001, 5, 1_048_576], 2048, "plateau", seed=4), device)


@on_devices({"stride": (0, 5001, 5002, 5004), "offset": (0, 1, 2, 4), "width": (5000, 4999)})
def test_strides_and_alignment(device, width, offset, stride):
    verify(TopKCase([width, 4097, 100], 512, width=width, stride=stride, offset=offset, seed=5), device)


@both_devices
def test_one_row_may_have_any_stride(device):
    case = TopKCase([3000], 512, seed=6)
    logits = on(device, case.logits()).as_strided((1, 3000), (1, 1))
    found = sparse_top_k(logits, ints(device, [3000]), 512)
    assert torch.equal(found.cpu(), expected(case.logits(), [3000], 512))


@both_devices
def test_lengths_beyond_the_width_end_there(device):
    case = TopKCase([900, 900, 900], 512, seed=7)
    found = sparse_top_k(on(device, case.logits()), ints(device, [5000, -3, 1 << 30]), 512)
    assert torch.equal(found.cpu(), expected(case.logits(), [900, 0, 900], 512))


@on_devices({"tokens": (1, 2, 3, 4, 8)})
def test_a_request_s_query_tokens_have_one_length(device, tokens):
    requests = [5000, 2, 513, 0, 4099]
    rows = [max(length - tokens + 1 + token, 0) for length in requests for token in range(tokens)]
    case = TopKCase(rows, 512, seed=8)
    found = sparse_top_k(on(device, case.logits()), ints(device, requests), 512)
    assert torch.equal(found.cpu(), expected(case.logits(), rows, 512))


@on_devices({"page_size": (1, 64, 100), "tokens": (1, 2), "length": (300, 5000)})
def test_cache_rows_by_a_block_table(device, length, tokens, page_size):
    lengths = [length - 11 * row for row in range(4)]
    case = TopKCase(lengths, 512, seed=9)
    pages = -(-length // page_size)
    tables = torch.randperm(4 * pages).int().view(4, pages)[: 4 // tokens]
    used = [-(-max(lengths[r * tokens : (r + 1) * tokens]) // page_size) for r in range(len(tables))]
    wild = torch.full((len(tables), pages + 3), 1 << 30, dtype=torch.int32)
    for row, count in enumerate(used):
        wild[row, :count] = tables[row, :count]
    found = select(case, device, block_table=wild.to(device), page_size=page_size)
    assert torch.equal(found, on_pages(expected(case.logits(), lengths, 512), tables, page_size, tokens))


@both_devices
def test_positions_past_the_block_table_are_no_rows(device):
    case = TopKCase([2000], 512, seed=10)
    tables = torch.arange(10, dtype=torch.int32).view(1, 10)
    found = select(case, device, block_table=tables.to(device), page_size=64)
    assert torch.equal(found, on_pages(expected(case.logits(), [2000], 512), tables, 64))
    assert (found == -1).any()


@both_devices
def test_nothing_to_do(device):
    empty = torch.empty(0, 100, device=device)
    assert sparse_top_k(empty, ints(device, []), 512).shape == (0, 512)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch():
    case = TopKCase([40000] * 64, 2048, "few_values", seed=11)
    logits, lengths = case.logits().cuda(), ints("cuda", case.lengths)
    whole = sparse_top_k(logits, lengths, 2048)
    for rows in (1, 2, 9, 17, 40):
        for sms in (1, 78, 132):
            assert torch.equal(sparse_top_k(logits[:rows], lengths[:rows], 2048, num_sms=sms), whole[:rows])


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths_and_logits():
    logits = torch.empty(20, 1 << 17, device="cuda")
    source = torch.empty_like(logits)
    lengths, out = ints("cuda", [1] * 20), torch.empty(20, 2048, dtype=torch.int32, device="cuda")
    sparse_top_k(logits, lengths, 2048, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.neg(source, out=logits)
        sparse_top_k(logits, lengths, 2048, out=out, early_lengths=True)
    for seed, longest in enumerate((100, 2048, 2049, 16384, 40000, 1 << 17, 3000, 0)):
        rows = [max(0, longest - 64 * row) for row in range(20)]
        case = TopKCase(rows, 2048, "plateau", width=1 << 17, behind=-INF, seed=seed)
        source.copy_(case.logits())
        lengths.copy_(ints("cpu", rows))
        graph.replay()
        assert torch.equal(out.cpu(), expected(-case.logits(), rows, 2048)), longest


def call(device: str) -> dict:
    return {
        "logits": torch.zeros(4, 1000, device=device),
        "lengths": ints(device, [1000] * 4),
        "k": 512,
        "block_table": torch.zeros(4, 20, dtype=torch.int32, device=device),
        "page_size": 64,
        "out": torch.zeros(4, 512, dtype=torch.int32, device=device),
    }


REFUSALS = {
    "logits of another type": (TypeError, "logits", {"logits": torch.zeros(4, 1000).half()}),
    "logits of one dimension": (ValueError, "logits", {"logits": torch.zeros(1000)}),
    "logits not contiguous in a row": (ValueError, "logits", {"logits": torch.zeros(4, 2000)[:, ::2]}),
    "logits no tensor": (TypeError, "logits", {"logits": [1.0]}),
    "lengths of another type": (TypeError, "lengths", {"lengths": torch.zeros(4).long()}),
    "lengths of no requests": (ValueError, "lengths", {"lengths": torch.zeros(3).int()}),
    "lengths with gaps": (ValueError, "lengths", {"lengths": torch.zeros(8).int()[::2]}),
    "no k": (ValueError, "k", {"k": 0, "out": None}),
    "a k that is no int": (TypeError, "k", {"k": 1.5, "out": None}),
    "out of another k": (ValueError, "out", {"k": 511}),
    "out of another type": (TypeError, "out", {"out": torch.zeros(4, 512).long()}),
    "out whose rows overlap": (ValueError, "out", {"out": torch.zeros(1000).int().as_strided((4, 512), (100, 1))}),
    "a table of another type": (TypeError, "block_table", {"block_table": torch.zeros(4, 20).long()}),
    "a table of no requests": (ValueError, "block_table", {"block_table": torch.zeros(3, 20).int()}),
    "no page": (ValueError, "page_size", {"page_size": 0}),
    "no multiprocessor": (ValueError, "num_sms", {"num_sms": 0}),
}


@both_devices
@pytest.mark.parametrize("error, argument, spoiled", REFUSALS.values(), ids=REFUSALS)
def test_refusals(device, error, argument, spoiled):
    moved = {name: on(device, value) if isinstance(value, Tensor) else value for name, value in spoiled.items()}
    sparse_top_k(**call(device))
    with pytest.raises(error, match=rf"^{argument}: wanted"):
        sparse_top_k(**call(device) | moved)


@both_devices
def test_an_output_in_the_logits_memory_is_refused(device):
    logits = torch.zeros(4, 1024, device=device)
    with pytest.raises(ValueError, match="^out: wanted memory of its own"):
        sparse_top_k(logits, ints(device, [1024] * 4), 1024, out=logits.view(torch.int32))


@pytest.mark.gpu
def test_the_first_launch_of_a_process_may_want_the_least_shared_memory():
    """Rows that many CTAs share have short lists; the kernel is granted shared memory once."""
    script = """if True:
        import torch
        from etap_backend import sparse_top_k
        for rows in (1, 16, 64, 200):
            lengths = torch.full((rows,), 40000, dtype=torch.int32, device="cuda")
            found = sparse_top_k(torch.randn(rows, 40000, device="cuda"), lengths, 2048)
            assert (found >= 0).all()"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
