"""ETAP as a backend of the installed FlashInfer's wrapper, on the CPU: its class and arguments, and no kernel of it."""

import inspect

import pytest
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

import etap_backend
from etap_backend.compat import flashinfer

OURS = flashinfer.BatchMLAPagedAttentionWrapper


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "__init__", BatchMLAPagedAttentionWrapper.__init__)


def int32(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def problem() -> tuple[dict, dict, dict]:
    """Of a request with 200 tokens and one with 7: page lists, the rest of a plan, and a run."""
    torch.manual_seed(3)
    lists = {"qo_indptr": int32(0, 1, 2), "kv_indptr": int32(0, 13, 14), "kv_indices": torch.randperm(20)[:14].int()}
    q, cache = torch.randn(2, 16, 576).bfloat16(), torch.randn(20, 16, 576).bfloat16()
    plan = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 16, "causal": True}
    plan |= {"sm_scale": 192**-0.5, "q_data_type": q.dtype, "kv_data_type": q.dtype}
    run = {"q_nope": q[..., :512], "q_pe": q[..., 512:], "ckv_cache": cache[..., :512], "kpe_cache": cache[..., 512:]}
    return lists | {"kv_len_arr": int32(200, 7)}, plan, run


def results(wrapper, lists: dict | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    given, plan, run = problem()
    wrapper.plan(**(lists or given), **plan)
    return wrapper.run(**run, return_lse=True)


def wanted() -> tuple[torch.Tensor, torch.Tensor]:
    """By `mla_decode`."""
    given, _, run = problem()
    table = torch.zeros(2, 13, dtype=torch.int32)
    table[0], table[1, 0] = given["kv_indices"][:13], given["kv_indices"][13]
    q, cache = torch.cat((run["q_nope"], run["q_pe"]), -1), torch.cat((run["ckv_cache"], run["kpe_cache"]), -1)
    plan = etap_backend.DecodeSchedule(2, 16, device="cpu").build(given["kv_len_arr"])
    out, lse = etap_backend.mla_decode(q[:, None], cache, table, given["kv_len_arr"], plan, softmax_scale=192**-0.5)
    return out[:, 0], lse[:, 0] / torch.tensor(2.0).log()


def workspace() -> torch.Tensor:
    return torch.empty(64 << 20, dtype=torch.int8)


@pytest.mark.parametrize("backends, backend", [(("etap",), "etap"), (("fa3", "auto"), "fa3"), (("fa3", "auto"), None)])
def test_flashinfers_wrapper_answers_with_etap(backends, backend):
    assert flashinfer.install(backends=backends) is BatchMLAPagedAttentionWrapper
    wrapper = BatchMLAPagedAttentionWrapper(workspace(), **({} if backend is None else {"backend": backend}))
    assert isinstance(wrapper, BatchMLAPagedAttentionWrapper)
    for ours, truth in zip(results(wrapper), wanted(), strict=True):
        torch.testing.assert_close(ours, truth)


def test_a_class_made_of_flashinfers_has_the_backend_too():
    class Made(BatchMLAPagedAttentionWrapper):
        pass

    flashinfer.install()
    assert torch.equal(results(Made(workspace(), backend="etap"))[0], wanted()[0])


def test_other_backends_stay_flashinfers(monkeypatch):
    made = []
    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "__init__", signed_as(BatchMLAPagedAttentionWrapper, made))
    for backends in ("etap",), ("fa3",), ("etap",):
        flashinfer.install(backends=backends)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(), backend="fa3")
    assert made == ["fa3"] and "plan" not in vars(wrapper)
    BatchMLAPagedAttentionWrapper(workspace(), backend="etap")
    assert made == ["fa3"]


def signed_as(of: type, made: list):
    """An initializer with the arguments of FlashInfer's, which wants a GPU."""

    def init(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
             kv_len_arr=None, backend="auto"):  # fmt: skip
        made.append(backend)

    assert list(inspect.signature(init).parameters) == list(inspect.signature(of.__init__).parameters)
    return init


def test_another_wrapper_is_refused(monkeypatch):
    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "__init__", lambda self, workspace: None)
    with pytest.raises(ImportError, match=r"^flashinfer: wanted a wrapper that takes .*, got \(self, workspace\)"):
        flashinfer.install()


@pytest.mark.parametrize("name", ["plan", "run"])
def test_ours_takes_their_arguments_in_their_order(name):
    """All of theirs, by position where theirs may be; with the same defaults, where one version does not differ."""
    theirs, ours = (inspect.signature(getattr(one, name)).parameters for one in (BatchMLAPagedAttentionWrapper, OURS))
    by_position = [each.name for each in theirs.values() if each.kind is not each.KEYWORD_ONLY]
    assert list(ours)[: len(by_position)] == by_position
    assert set(theirs) <= set(ours)
    for each in theirs.values():
        if each.default is not each.empty:
            assert ours[each.name].default == each.default, each


def test_their_metadata_are_taken():
    mla = pytest.importorskip("flashinfer.mla")
    if not hasattr(mla, "MLAPlanMetadata"):
        pytest.skip("FlashInfer before 0.7 has no MLAPlanMetadata")
    given, *_ = problem()
    wrapper = OURS(workspace())
    assert torch.equal(results(wrapper, {"metadata": mla.MLAPlanMetadata.csr(*given.values())})[0], wanted()[0])
