"""config.json: what is read, and a named refusal for the rest."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rota.errors import ModelError
from rota.gpu.model.config import RopeScaling, load_config, parse_config
from rota.gpu.model.hybrid_config import MoeShape
from rota.gpu.model.rope import inverse_frequencies, rope_tables

PLAIN = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def refused(code, **fields):
    with pytest.raises(ModelError) as caught:
        parse_config({k: v for k, v in (PLAIN | fields).items() if v is not ...})
    assert caught.value.code == code
    return caught.value


def test_defaults_of_absent_fields():
    config = parse_config(PLAIN)
    assert config.head_dim == 8 and config.rms_eps == 1e-6 and config.rope_theta == 10000.0
    assert config.rope_scaling is None and not config.tied and config.eos_ids == ()
    assert (config.q_out, config.kv_out, config.qkv_out) == (48, 16, 80)
    assert parse_config(PLAIN | {"model_type": "qwen3"}).head_dim == 128
    assert (
        parse_config({k: v for k, v in PLAIN.items() if k != "num_key_value_heads"}).kv_heads == 6
    )


def test_families_differ_in_bias_and_norms():
    found = {f: parse_config(PLAIN | {"model_type": f}) for f in ("llama", "qwen2", "qwen3")}
    assert {f: (c.qkv_bias, c.qk_norm) for f, c in found.items()} == {
        "llama": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
    }


def test_both_spellings_of_rope_mean_the_same():
    new = parse_config(PLAIN | {"rope_parameters": LLAMA3})
    scaling = {k: v for k, v in LLAMA3.items() if k not in ("rope_theta", "rope_type")}
    old = parse_config(
        PLAIN | {"rope_theta": 500000.0, "rope_scaling": scaling | {"type": "llama3"}}
    )
    assert new == old
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_llama3_frequencies_against_their_definition():
    config = parse_config(PLAIN | {"rope_parameters": LLAMA3})
    found = inverse_frequencies(config).tolist()
    kinds = set()
    for i, value in enumerate(found):
        plain = 500000.0 ** (-2 * i / 8)
        waves = 64 * plain / (2 * math.pi)  # periods in the original context
        if waves > 4.0:
            kind, expected = "kept", plain
        elif waves < 1.0:
            kind, expected = "slowed", plain / 8
        else:
            share = (waves - 1.0) / (4.0 - 1.0)
            kind, expected = "blended", plain * (share + (1 - share) / 8)
        kinds.add(kind)
        assert value == pytest.approx(expected, rel=1e-5)
    assert "kept" in kinds and "slowed" in kinds


def test_blended_frequencies():
    config = parse_config(PLAIN | {"head_dim": 64, "rope_parameters": LLAMA3})
    plain = parse_config(PLAIN | {"head_dim": 64, "rope_theta": 500000.0})
    ratio = inverse_frequencies(config) / inverse_frequencies(plain)
    assert bool(((ratio > 0.13) & (ratio < 0.99)).any())
    assert bool((ratio[1:] <= ratio[:-1] + 1e-6).all())


def test_rope_tables_are_cosines_and_sines_of_the_position():
    config = parse_config(PLAIN)
    cos, sin = rope_tables(config, 5)
    assert cos.shape == sin.shape == (5, 4) and cos.dtype == torch.float32
    assert cos[3, 1].item() == pytest.approx(math.cos(3 * 10000.0 ** (-2 / 8)), rel=1e-6)
    assert sin[4, 0].item() == pytest.approx(math.sin(4.0), rel=1e-6)


def test_end_ids_are_the_union_of_both_files():
    config = parse_config(PLAIN | {"eos_token_id": 2}, {"eos_token_id": [7, 2, 5]})
    assert config.eos_ids == (2, 5, 7)


def test_lora_dims():
    dims = parse_config(PLAIN | {"tie_word_embeddings": True}).to_lora_dims()
    assert (dims.q_out, dims.kv_out, dims.attn_in, dims.vocab, dims.tied) == (48, 16, 48, 128, True)


@pytest.mark.parametrize("found", ["gpt2", "mistral", "qwen3_vl", None, 3, ["llama"]])
def test_other_families_are_refused(found):
    assert refused("unvalidated-family", model_type=found).subject == "model_type"


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("unsupported-activation", {"hidden_act": "gelu"}),
        ("unsupported-bias", {"attention_bias": True}),
        ("unsupported-bias", {"mlp_bias": True}),
        ("unsupported-quantization", {"quantization_config": {"bits": 4}}),
        ("unsupported-attention", {"use_sliding_window": True}),
        ("unsupported-attention", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("unsupported-rope", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("unsupported-rope", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("unsupported-rope", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("bad-config-field", {"rope_parameters": LLAMA3 | {"factor": None}}),
        ("bad-config-field", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}),
        ("bad-config-field", {"rope_parameters": "llama3"}),
        ("bad-config-field", {"rope_theta": 0}),
        ("bad-config-field", {"rope_theta": 10**400}),
        ("bad-config-field", {"hidden_size": ...}),
        ("bad-config-field", {"hidden_size": "48"}),
        ("bad-config-field", {"hidden_size": True}),
        ("bad-config-field", {"num_hidden_layers": 0}),
        ("bad-config-field", {"num_hidden_layers": 100_000}),
        ("bad-config-field", {"num_key_value_heads": 4}),
        ("bad-config-field", {"head_dim": 7}),
        ("bad-config-field", {"vocab_size": -1}),
        ("bad-config-field", {"rms_norm_eps": 0}),
        ("bad-config-field", {"tie_word_embeddings": "yes"}),
        ("bad-config-field", {"eos_token_id": "2"}),
        ("bad-config-field", {"eos_token_id": 128}),
        ("bad-config-field", {"eos_token_id": [1, -1]}),
        ("bad-config-field", {"dtype": "int8"}),
    ],
)
def test_what_is_not_served_is_refused_by_name(code, fields):
    assert refused(code, **fields).subject is not None


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "config.json"
    for content in (None, b"", b"[1]", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            load_config(tmp_path)
        assert (caught.value.code, caught.value.subject) == ("unreadable-config", "config.json")
    path.write_text(json.dumps(PLAIN))
    assert load_config(tmp_path).vocab == 128
    (tmp_path / "generation_config.json").write_text("no")
    with pytest.raises(ModelError) as caught:
        load_config(tmp_path)
    assert caught.value.subject == "generation_config.json"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_tiny_checkpoints_are_read(data_dir, family):
    config = load_config(data_dir / "oracle" / family / "base")
    assert (config.family, config.vocab, config.eos_ids) == (family, 128, (2,))
    assert (config.rope_scaling is not None) == (family == "llama")


HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 8,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MROPE = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}


def test_hybrid_defaults():
    config = parse_config(HYBRID)
    assert config.recurrent and config.gated and config.qk_norm and config.moe is None
    assert sorted(config.linear_layers) == [0, 1, 2, 4, 5, 6] and config.kv_layers == (3, 7)
    assert (config.rotary_dim, config.q_out, config.attn_out) == (8, 256, 128)
    assert config.gdn is not None and config.gdn.conv == 4
    assert (config.gdn.channels, config.gdn.value_width, config.gdn.projected) == (160, 96, 264)
    every = parse_config(HYBRID | {"full_attention_interval": 2})
    assert every.kv_layers == (1, 3, 5, 7)
    kinds = ["full_attention"] * 7 + ["linear_attention"]
    assert parse_config(HYBRID | {"layer_types": kinds}).linear_layers == {7}
    assert not parse_config(HYBRID | {"layer_types": ["full_attention"] * 8}).recurrent
    old = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    assert (parse_config(HYBRID | old).rope_theta, parse_config(HYBRID | old).rotary_dim) == (
        5000.0,
        16,
    )
    assert not parse_config(PLAIN).recurrent and parse_config(PLAIN).rotary_dim == 8


def test_experts_replace_the_dense_block():
    config = parse_config({k: v for k, v in HYBRID.items() if k[:5] != "inter"} | EXPERTS)
    assert config.family == "qwen3_5_moe" and config.intermediate == 0
    assert config.moe == MoeShape(experts=8, top_k=2, inner=16, shared=24)
    dims = config.to_lora_dims()
    assert (dims.experts, dims.expert_inner, dims.shared_inner) == (8, 16, 24)
    assert dims.linear_layers == (0, 1, 2, 4, 5, 6) and dims.attn_in == 128


def test_a_multimodal_config_is_read_from_inside():
    outer = {
        "model_type": "qwen3_5",
        "text_config": HYBRID | {"tie_word_embeddings": False},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vision_config": {"depth": 1},
    }
    config = parse_config(outer)
    assert config.tied and config.dtype == "bfloat16" and config.family == "qwen3_5"
    assert not parse_config({k: v for k, v in outer.items() if k != "tie_word_embeddings"}).tied


def test_releases_of_the_expert_family_have_their_own_names():
    inner = HYBRID | EXPERTS
    assert parse_config(inner).release == "qwen3_5_moe"
    assert parse_config(inner | {"rope_parameters": MROPE}).release == "qwen3_6_moe"
    assert parse_config(HYBRID | {"rope_parameters": MROPE}).release == "qwen3_5"
    holo = {
        "model_type": "qwen3_5_moe",
        "text_config": inner | {"rope_parameters": MROPE},
        "vision_config": {"depth": 1},
        "image_token_id": 248056,
    }
    assert parse_config(holo).release == "holo3_1_moe"
    with_mtp = holo | {"text_config": holo["text_config"] | {"mtp_num_hidden_layers": 1}}
    assert parse_config(with_mtp).release == "qwen3_6_moe"
    assert {parse_config(c).family for c in (holo, with_mtp)} == {"qwen3_5_moe"}


def test_qwen3_next_is_the_expert_family_with_fused_inputs():
    config = parse_config(HYBRID | EXPERTS | {"model_type": "qwen3_next"})
    assert (config.family, config.release) == ("qwen3_5_moe", "qwen3_next")
    assert config.to_lora_dims().gdn_groups == 2
    assert parse_config(HYBRID | EXPERTS).to_lora_dims().gdn_groups == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_topk_prob", False), ("decoder_sparse_step", 2), ("mlp_only_layers", [0])],
)
def test_what_a_qwen3_next_could_be_and_is_not_served_as(field, value):
    with pytest.raises(ModelError) as caught:
        parse_config(HYBRID | EXPERTS | {"model_type": "qwen3_next", field: value})
    assert (caught.value.code, caught.value.subject) == ("bad-config-field", field)


@pytest.mark.parametrize(
    ("code", "subject", "fields"),
    [
        ("unsupported-attention", "attn_output_gate", {"attn_output_gate": False}),
        ("unsupported-attention", "layer_types", {"layer_types": ["linear_attention"] * 8}),
        ("unsupported-rope", "rope_type", {"rope_parameters": {"rope_type": "yarn"}}),
        ("unsupported-bias", "attention_bias", {"attention_bias": True}),
        ("unsupported-quantization", "quantization_config", {"quantization_config": {"bits": 4}}),
        ("bad-config-field", "layer_types", {"layer_types": ["full_attention"] * 7}),
        ("bad-config-field", "layer_types", {"layer_types": ["sliding_attention"] * 8}),
        ("bad-config-field", "full_attention_interval", {"full_attention_interval": 0}),
        ("bad-config-field", "linear_num_value_heads", {"linear_num_value_heads": 3}),
        ("bad-config-field", "linear_key_head_dim", {"linear_key_head_dim": None}),
        ("bad-config-field", "linear_conv_kernel_dim", {"linear_conv_kernel_dim": 1}),
        ("bad-config-field", "partial_rotary_factor", {"partial_rotary_factor": 0.1}),
        ("bad-config-field", "num_experts", {"num_experts": 8}),
        ("bad-config-field", "num_experts_per_tok", EXPERTS | {"num_experts_per_tok": 9}),
        ("bad-config-field", "moe_intermediate_size", EXPERTS | {"moe_intermediate_size": 0}),
        ("bad-config-field", "text_config", {"text_config": [1]}),
    ],
)
def test_a_hybrid_config_at_fault_is_named(code, subject, fields):
    with pytest.raises(ModelError) as caught:
        parse_config(HYBRID | fields)
    assert (caught.value.code, caught.value.subject) == (code, subject)
