"""The timing of top-k: its cases, how selections are judged, and what its results file begins with."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import top_k
from bench.qualify import plan_agreement
from bench.report import text_of


def test_a_case_is_rows_and_a_length():
    assert top_k.case_of("16x32768", 163840, 2048) == top_k.Case(16, 32768, 163840, 2048)
    assert top_k.case_of("16x8192x512", 163840, 2048) == top_k.Case(16, 8192, 163840, 512)
    for text in "16", "0x4096", "16x1024", "16x200000", "16 x 4096", "16x8192x0", "16x8192x9000", "1x8192x512x2":
        with pytest.raises(ValueError, match="^case: wanted"):
            top_k.case_of(text, 163840, 2048)


def test_etaps_order_counts_and_a_peers_does_not():
    case = top_k.Case(1, 4, 6, 3)
    wanted = top_k.expected(torch.tensor([[1.0, 3.0, 1.0, 2.0, 9.0, 9.0]]), case)
    assert wanted.tolist() == [[0, 1, 3]], "of equal logits the lowest position; nothing behind the length"
    turned = torch.tensor([[1, 3, 0]], dtype=torch.int32)
    assert top_k.judge("FlashInfer", turned, wanted) == {"wrong_entries": 0}
    assert top_k.judge("ETAP", turned, wanted) == {"wrong_entries": 3}
    assert top_k.judge("FlashInfer", torch.tensor([[1, 3, 2]]), wanted) == {"wrong_entries": 1}


def test_its_file_says_what_made_it_and_stands_beside_those_of_kernels(tmp_path):
    document = top_k.document_of("random")
    assert {"gpu", "commit", "command", "versions"} <= set(document) and document["complete"] is False
    top_k.results.write(document, path := tmp_path / "top-k.json")
    assert "top-k" in text_of([path], page=True)
    with pytest.raises(ValueError, match="RESULTS: wanted"):  # it has no call of the plan
        plan_agreement.timed_calls(tmp_path)


def test_etaps_time_is_told_as_a_part_of_the_faster_of_vllms():
    results = {"ETAP": {"us": 5.0}, "vLLM cooperative": {"us": 20.0}, "vLLM persistent": {"us": 10.0}}
    row = {"rows": 1, "length": 4096, "width": 4096, "k": 512, "results": results}
    assert "5.00 us   0.50 of vLLM's" in top_k.text_of(row)
    assert "of vLLM's" not in top_k.text_of(row | {"results": {"ETAP": {"us": 5.0}, "FlashInfer": {"failed": "x"}}})
