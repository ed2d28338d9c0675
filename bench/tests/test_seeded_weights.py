"""Seeded weights: what they depend on, and that a command's environment has the plugin."""

import sys

import pytest
import torch

from bench.qualify import drawn_experts, filled_caches, seeded_sglang, seeded_weights


def test_seeded_weights_depend_on_the_name_and_keep_the_variance():
    weight, again, other = (torch.empty(256, 1024, dtype=torch.bfloat16) for _ in range(3))
    seeded_weights.fill("model.layers.0.self_attn.kv_b_proj.weight", weight)
    seeded_weights.fill("model.layers.0.self_attn.kv_b_proj.weight", again)
    seeded_weights.fill("model.layers.1.self_attn.kv_b_proj.weight", other)
    assert torch.equal(weight, again) and not torch.equal(weight, other)
    assert weight.float().std().item() == pytest.approx(1 / 32, rel=0.02)
    seeded_weights.fill("model.layers.0.mlp.experts.w2_weight", weight)
    assert weight.float().std().item() == pytest.approx(0.25 / 32, rel=0.02)
    seeded_weights.fill("model.embed_tokens.weight", weight)
    assert weight.float().std().item() == pytest.approx(1, rel=0.02)


def test_seeded_weights_of_one_dimension():
    vector = torch.full((8,), torch.nan)
    seeded_weights.fill("model.layers.0.self_attn.kv_a_layernorm.weight", vector)
    assert vector.eq(1).all()
    seeded_weights.fill("model.layers.3.mlp.gate.e_score_correction_bias", vector)
    assert vector.eq(0).all()
    seeded_weights.fill("model.layers.0.self_attn.k_scale", vector.fill_(torch.nan))
    assert vector.eq(1).all()
    seeded_weights.fill("model.layers.3.attn.attn_sink", vector.fill_(torch.nan))
    assert vector.eq(0).all()
    seeded_weights.fill("model.layers.3.hc_attn_base", vector)
    assert vector.isfinite().all() and vector.std() > 0


def test_weights_of_what_is_not_loaded_stay_as_they_are():
    seeded_weights.fill("image_start", torch.empty(8, device="meta"))


def test_seeded_weights_in_blocks_have_their_variance_from_the_scales():
    weight, scale = torch.empty(256, 1024, dtype=torch.float8_e4m3fn), torch.empty(2, 8)
    for name, gain in (("attn.wq_b", 1.25), ("attn.wkv", 1.0)):
        seeded_weights.fill(f"model.layers.0.{name}.weight", weight)
        seeded_weights.fill(f"model.layers.0.{name}.weight_scale_inv", scale)
        whole = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert whole.std().item() == pytest.approx(gain / 32, rel=0.02)
    table = torch.ones(4, 4, dtype=torch.int32)
    seeded_weights.fill("model.layers.0.ffn.gate.tid2eid", table)
    assert table.eq(0).all()


@pytest.mark.parametrize(
    "plugin",
    [
        (),
        ("vllm.general_plugins", "qualify.filled_caches"),
        ("sglang.srt.plugins", "qualify.drawn_experts"),
        ("sglang.srt.plugins", "qualify.seeded_sglang"),
    ],
    ids=["seeded weights", "filled caches", "drawn experts", "seeded SGLang"],
)
def test_a_command_finds_the_plugin(plugin, capfd):
    group, module = plugin or ("vllm.general_plugins", "qualify.seeded_weights")
    chosen = f"of(group='{group}', name='{module.rpartition('.')[2]}')"
    program = f"from importlib.metadata import entry_points as of; print([e.load() for e in {chosen}])"
    assert seeded_weights.run([sys.executable, "-c", program], *plugin) == 0
    assert "function register" in capfd.readouterr().out


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


def test_sglang_gets_the_same_weights_and_layers_that_pad_their_heads():
    layer, drawn = torch.nn.Linear(8, 8), torch.empty(8, 8)
    layer.attn_sink, layer.attn_tp_size = torch.nn.Parameter(torch.ones(8)), 1
    layer.k_scale = torch.nn.Parameter(torch.tensor(-1.0))
    seeded_sglang.initialize(torch.nn.ModuleDict({"wq_b": layer}))
    seeded_weights.fill("wq_b.weight", drawn)
    assert torch.equal(layer.weight, drawn) and not layer.attn_sink.any()
    assert layer.k_scale == -1 and layer.attn_tp_size == 2
