"""Models without checkpoints: what seeded weights are, plugins that commands find, and shapes."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest
import torch

from bench.models import drawn_experts, dummy, filled_caches, seeded, v4
from bench.models.plugins import PLUGINS, SGLANG, VLLM, plugins
from bench.servers.engines import configuration, is_sparse, is_v4

LAYER = "model.layers.0."


def filled(name: str, *shape: int, dtype=torch.float32) -> torch.Tensor:
    parameter = torch.full(shape, 7.0).to(dtype)
    seeded.fill(LAYER + name, parameter)
    return parameter


def test_seeded_weights_depend_on_the_name_and_keep_the_variance():
    weight = filled("self_attn.kv_b_proj.weight", 256, 1024, dtype=torch.bfloat16)
    assert torch.equal(weight, filled("self_attn.kv_b_proj.weight", 256, 1024, dtype=torch.bfloat16))
    assert not torch.equal(weight, filled("self_attn.other.weight", 256, 1024, dtype=torch.bfloat16))
    for name, deviation in (("kv_b_proj.weight", 1 / 32), ("experts.w2_weight", 1 / 128), ("embed_tokens.weight", 1)):
        assert filled(name, 256, 1024).std().item() == pytest.approx(deviation, rel=0.02)
    for name, value in (("kv_a_layernorm.weight", 1), ("gate.e_score_correction_bias", 0), ("attn.attn_sink", 0)):
        assert filled(name, 8).eq(value).all()
    assert filled("hc_attn_base", 8).std() > 0 and filled("gate.tid2eid", 4, 4, dtype=torch.int32).eq(0).all()
    seeded.fill("image_start", torch.empty(8, device="meta"))  # not loaded


@pytest.mark.parametrize("name, gain", [("attn.wq_b", 1.25), ("attn.wkv", 1.0)])
def test_seeded_weights_in_blocks_have_their_variance_from_the_scales(name, gain):
    weight, scale = (
        filled(f"{name}.weight", 256, 1024, dtype=torch.float8_e4m3fn),
        filled(f"{name}.weight_scale_inv", 2, 8),
    )
    whole = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert whole.std().item() == pytest.approx(gain / 32, rel=0.02)


def test_sglang_gets_the_same_weights_and_layers_that_pad_their_heads():
    layer, drawn = torch.nn.Linear(8, 8), torch.empty(8, 8)
    layer.attn_sink, layer.attn_tp_size = torch.nn.Parameter(torch.ones(8)), 1
    layer.k_scale = torch.nn.Parameter(torch.tensor(-1.0))
    seeded.initialize(torch.nn.ModuleDict({"wq_b": layer}))
    seeded.fill("wq_b.weight", drawn)
    assert torch.equal(layer.weight, drawn) and not layer.attn_sink.any()
    assert layer.k_scale == -1 and layer.attn_tp_size == 2


def test_a_command_finds_its_plugins_and_no_others():
    code = (
        f"import importlib.metadata as m; print(*[e.value for g in {[VLLM, SGLANG]} for e in m.entry_points(group=g)])"
    )
    command = [sys.executable, "-m", "bench.models.plugins", "seeded,filled_caches", "--", sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert {value for value in found if value.startswith("bench.")} == {
        function for name in ("seeded", "filled_caches") for function in PLUGINS[name].values()
    }
    assert all(callable(pkgutil.resolve_name(value)) for of in PLUGINS.values() for value in of.values())
    with pytest.raises(ValueError, match="plugins: wanted some of"), plugins(["other"]):
        pass


def test_blocks_that_a_request_has_are_filled_with_finite_numbers():
    stored, states = torch.full((5, 3, 4), 255, dtype=torch.uint8), torch.full((5, 8), torch.nan)
    for cache in (stored, states):
        filled_caches.fill(None, cache, [0, 2, 4, 7])
    assert stored[[2, 4]].max() < 64 and stored[[0, 1, 3]].eq(255).all()
    assert states[[2, 4]].isfinite().all() and states[[0, 1, 3]].isnan().all()


def test_drawn_logits_choose_other_experts_for_every_token():
    logits = torch.zeros(64, 256)
    drawn_experts.draw_logits(None, logits)
    assert len(logits.topk(8).indices.unique()) > 200
    drawn_experts.draw_logits(router_logits=logits.zero_())
    assert logits.std() > 1


def test_a_rank_has_the_widths_of_one_of_eight_and_no_empty_quantization():
    whole = dummy.shipped("deepseek-r1")
    for tp in (1, 2, 4):
        config = dummy.changed("DeepSeek-R1", {"num_hidden_layers": 8, "quantization_config": None}, 8, tp)
        assert config["num_attention_heads"] / tp == 16 and config["moe_intermediate_size"] / tp == 256
        assert config["num_hidden_layers"] == 8 and "quantization_config" not in config
    with pytest.raises(ValueError, match="rank_of: wanted a divisor of num_attention_heads 128 x 1, got 7"):
        dummy.of_one_rank(whole, 7, 1)


def test_the_dummy_tokenizer_gives_back_the_ids_that_it_was_given():
    made, ids = dummy.tokenizer(2000), list(range(259, 2000))
    assert made.encode(made.decode(ids)).ids == ids and made.get_vocab_size() == 2000
    assert made.decode(made.encode("any text, até 中").ids) == "any text, até 中"


@pytest.mark.parametrize(
    "layers, drafts, v41", [(8, 0, False), (24, 0, False), (8, 3, False), (8, 0, True), (23, 0, True)]
)
def test_a_v4_model_has_every_kind_of_layer_and_a_tokenizer(tmp_path, layers, drafts, v41):
    v4.main(tmp_path, layers, drafts, v41)
    config, mtp = configuration(tmp_path), int(drafts > 0)
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (layers, mtp)
    ratios = config["compress_ratios"]
    assert (
        ratios[:2] == [0, 0] and set(ratios[2:layers]) == ({1, 2} if v41 else {4, 128}) and len(ratios) == layers + mtp
    )
    assert config["num_attention_heads"] == 8 and is_v4(config) and is_sparse(config) and config["vocab_size"] > 4000
    assert v41 == (config.get("kv_source_layer_ids") == [2, ratios.index(1) if 1 in ratios else 0])
    assert (tmp_path / "tokenizer.json").exists()
