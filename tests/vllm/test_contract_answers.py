"""Checkpoints of `tests/qualify/train_model.py`: logits as from transformers, every weight finds its place in vLLM."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from bench.serving.engines import ENGINES
from etap_backend.vllm.backend import ETAPBackend
from etap_backend.vllm.sparse import ETAPSparseBackend
from bench.qualify import train_model

SHAPE = train_model.Shape(hidden=128, layers=2, query_latent=64, feed_forward=192, expert_width=64, vocabulary=600)
TEXTS = {path.name: path.read_text() for path in sorted(Path(train_model.__file__).parent.glob("*.py"))}
TEXTS |= {f"{name}{copy}": text[:4000] for name, text in TEXTS.items() for copy in range(20)}


@pytest.fixture(scope="module", params=[0, 32], ids=["dense", "sparse"])
def trained(request, tmp_path_factory):
    """A miniature, trained for a few steps, with weights so large that attention and rotation show in the logits."""
    shape = replace(SHAPE, index_top_k=request.param)
    folder = tmp_path_factory.mktemp("trained")
    plan = train_model.Plan(0, steps=3, lengths=(128, 256, 512), tokens=(512, 1024, 2048))
    model = train_model.make_model(folder, shape, plan, "cpu", texts=TEXTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                gain = 2.0 if "q_b_proj" in name or "kv_a_proj" in name else 1.0
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    train_model.save(model.bfloat16().float(), AutoTokenizer.from_pretrained(folder).backend_tokenizer, folder)
    return folder, model


def test_transformers_gives_the_logits_of_the_model_in_training(trained):
    folder, model = trained
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(reference).__name__ == f"DeepseekV3{'2' if model.shape.index_top_k else ''}ForCausalLM"
    tokens = torch.randint(SHAPE.vocabulary, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model.lm_head(model.hidden(tokens)), reference(tokens).logits
        # Another order of the tokens must matter, or nothing here sees positions.
        turned = model.lm_head(model.hidden(tokens.flip(1)))[:, -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.std() > 0.5 and (turned - ours[:, 0]).abs().max() > 0.5


def test_attention_is_sparse_where_there_are_indexers(trained):
    _, model = trained
    tokens = torch.randint(SHAPE.vocabulary, (1, 300), generator=torch.Generator().manual_seed(1))
    try:
        with torch.no_grad():
            sparse = model.hidden(tokens)
            for layer in model.model.layers:
                layer.self_attn.sparse = False
            dense = model.hidden(tokens)
    finally:
        for layer in model.model.layers:
            layer.self_attn.sparse = True
    top_k = model.shape.index_top_k
    first, later = (sparse - dense).abs().amax(-1)[0].split([32, 268])
    assert first.max() < 1e-4 and (later.min() > 1e-3 if top_k else later.max() == 0)


def test_tokenizer_and_prompts_belong_together(trained):
    folder, _ = trained
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def main(argv):\n\treturn argv[0] * 17  # café\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompts = json.loads((folder / "prompts.json").read_text())
    assert {kind: len(entries) for kind, entries in prompts.items()} == {
        "recite": 256,
        "recall": 256,
        "continuation": 64,
    }
    assert all(token < SHAPE.vocabulary for entry in prompts["recall"] for token in entry["prompt"])
    assert tokenizer.decode(prompts["recall"][0]["prompt"]).startswith(train_model.PASSAGE)


@pytest.fixture
def vllm_config(trained, one_rank, fresh_workspaces, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")  # there is no device to have one
    load_general_plugins()
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    arguments = {"max_num_seqs": 8, "attention_backend": "ETAP", "speculative_config": speculative}
    config = EngineArgs(model=str(trained[0]), **arguments).create_engine_config()
    with set_current_vllm_config(config):
        yield config


@pytest.mark.parametrize(
    "drafts, attention", [(False, "model.layers.1.self_attn"), (True, "model.layers.2.mtp_block.self_attn")]
)
def test_every_weight_of_vllms_model_is_in_the_checkpoint(
    request, trained, vllm_config, drafts, attention, monkeypatch
):
    config = vllm_config
    # Sparse models make their buffer of lists on the platform's device.
    monkeypatch.setattr(type(current_platform), "device_type", "cpu")
    if drafts:
        draft = vllm_config.speculative_config.draft_model_config
        config = vllm_config.with_hf_config(draft.hf_config, draft.hf_config.architectures)
    (architecture,) = config.model_config.hf_config.architectures
    model_class = ModelRegistry.models[architecture].load_model_cls()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(vllm_config=config, prefix="")
    finally:
        torch.set_default_dtype(torch.float32)
    loaded = model.load_weights(load_file(trained[0] / "model.safetensors").items())
    assert {name for name, _ in model.named_parameters()} <= set(loaded)
    layer = model.get_submodule(attention)
    backend = ETAPSparseBackend if "sparse" in request.node.name else ETAPBackend
    mla = next(module for module in layer.modules() if isinstance(module, MLAAttention))
    assert mla.attn_backend is backend
    assert mla.scale == pytest.approx((train_model.NOPE + train_model.ROPE) ** -0.5)
    assert layer.rotary_emb.is_neox_style is False


def test_requests_force_tokens_as_this_version_s_model_runner_takes_it():
    second = find_spec("vllm.v1.worker.gpu.sample.logits_processor") is not None
    body = ENGINES["vllm"].body([1], 2, forced=[7, 7])
    assert body.get("allowed_token_ids") == ([7] if second else None)
    assert ("vllm_xargs" in body) == (not second)


def test_forced_tokens_leave_one_token_possible_at_each_step(engine_config):
    """Loaded by name as `vllm serve --logits-processors` does, and told of two requests; one of them forces nothing."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, build_logitsprocs

    config = engine_config(attention_backend="ETAP")
    processors = build_logitsprocs(
        config, torch.device("cpu"), False, False, ["bench.checks.forced_tokens:ForcedTokens"]
    )
    outputs = [[], []]
    forced = SamplingParams(extra_args={"forced_tokens": [7, 3]})
    added = [(0, forced, [1], outputs[0]), (1, SamplingParams(), [1], outputs[1])]
    for processor in processors.all:
        processor.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    for wanted in (7, 3):
        logits = torch.zeros(2, 10)
        for processor in processors.non_argmax_invariant:
            logits = processor.apply(logits)
        assert logits[0].isfinite().nonzero().tolist() == [[wanted]] and not logits[1].any()
        outputs[0].append(wanted)
