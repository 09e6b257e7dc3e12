"""Tensor keys: accepted spellings, every refusal, and none skipped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import ModelError, RejectError
from rota.gpu.lora.dims import TOKEN_MODULES, LoraModule, ModelDims
from rota.gpu.lora.fused import grouped_rows
from rota.gpu.lora.keys import (
    ExpertsKey,
    FusedKey,
    OverlayKey,
    PairKey,
    PartKey,
    canonical_keys,
    classify,
)

Q = "layers.1.self_attn.q_proj"
ACCEPTED = [
    f"base_model.model.model.{Q}.lora_A.weight",
    f"base_model.model.{Q}.lora_A.weight",
    f"base_model.model.model.model.{Q}.lora_A.weight",
    f"base_model.model.model.language_model.{Q}.lora_A.weight",
    f"base_model.model.language_model.model.{Q}.lora_A.weight",
    f"base_model.model.language_model.{Q}.lora_A.weight",
    f"model.{Q}.lora_A.weight",
    f"{Q}.lora_A.weight",
    f"model.language_model.{Q}.lora_A.weight",
    f"_orig_mod.base_model.model.model.{Q}.lora_A.weight",
    f"base_model.model._orig_mod.model.{Q}.lora_A.weight",
    "base_model.model.model.layers.1._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.1.self_attn._orig_mod.q_proj.lora_A.weight",
]


@pytest.mark.parametrize("key", ACCEPTED)
def test_accepted_spellings(kit: Any, key: str) -> None:
    found = classify(key, kit.dims)
    assert isinstance(found, PairKey)
    assert (found.layer, found.module, found.half) == (1, LoraModule.Q_PROJ, "A")
    assert found.module_name.endswith(Q) and "base_model" not in found.module_name
    other = classify(key.replace("lora_A", "lora_B"), kit.dims)
    assert isinstance(other, PairKey) and other.half == "B"


@pytest.mark.parametrize("name", ["default", "lora", "my_adapter"])
def test_adapter_name_infix(kit: Any, name: str) -> None:
    found = classify(f"base_model.model.model.{Q}.lora_B.{name}.weight", kit.dims)
    assert isinstance(found, PairKey)
    assert (found.half, found.adapter_name) == ("B", name)


@pytest.mark.parametrize(
    ("ending", "half", "name"),
    [
        ("lora_magnitude_vector", "magnitude", None),
        ("lora_magnitude_vector.default", "magnitude", "default"),
        ("lora_magnitude_vector.weight", "magnitude", None),
        ("lora_magnitude_vector.default.weight", "magnitude", "default"),
        ("lora_B.bias", "lora_bias", None),
        ("lora_B.default.bias", "lora_bias", "default"),
        ("base_layer.bias", "bias", None),
        ("bias", "bias", None),
    ],
)
def test_vectors_of_a_pair(kit: Any, ending: str, half: str, name: str | None) -> None:
    found = classify(f"base_model.model.model.{Q}.{ending}", kit.dims)
    assert isinstance(found, PairKey)
    assert (found.module, found.half, found.adapter_name) == (LoraModule.Q_PROJ, half, name)
    assert found.module_name == f"model.{Q}"


@pytest.mark.parametrize(
    ("key", "module", "half", "name"),
    [
        ("model.embed_tokens.lora_embedding_A", "EMBED_TOKENS", "A", None),
        ("model.embed_tokens.lora_embedding_B.default", "EMBED_TOKENS", "B", "default"),
        ("model.language_model.embed_tokens.lora_embedding_A", "EMBED_TOKENS", "A", None),
        ("model.embed_tokens.lora_A.weight", "EMBED_TOKENS", "A", None),
        ("model.embed_tokens.lora_magnitude_vector", "EMBED_TOKENS", "magnitude", None),
        ("lm_head.lora_A.weight", "LM_HEAD", "A", None),
        ("language_model.lm_head.lora_B.weight", "LM_HEAD", "B", None),
        ("lm_head.lora_B.bias", "LM_HEAD", "lora_bias", None),
    ],
)
def test_factors_of_token_matrices(
    kit: Any, key: str, module: str, half: str, name: str | None
) -> None:
    found = classify("base_model.model." + key, kit.dims)
    assert isinstance(found, PairKey)
    assert (found.module.name, found.half, found.adapter_name) == (module, half, name)
    assert found.layer == kit.dims.num_layers


def test_fused_modules_stand_for_their_parts_unless_q_is_gated(kit: Any) -> None:
    key = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"
    plain = dataclasses.replace(kit.dims, q_out=10)
    found = classify(key, plain)
    assert isinstance(found, FusedKey)
    assert [part.leaf for part in found.modules] == ["q_proj", "k_proj", "v_proj"]
    with pytest.raises(RejectError) as caught:
        classify(key, kit.dims)  # q_out 12, o takes 10: query and gate are interleaved
    assert caught.value.code == "unsupported-module"


REFUSED = [
    ("encoder.weight", "not-peft-key"),
    ("", "not-peft-key"),
    ("model.layers.0.self_attn.q_proj.weight", "not-peft-key"),
    ("base_model.model.lm_head.lora_embedding_A", "embedding-lora"),
    (f"base_model.model.model.{Q}.lora_embedding_B", "embedding-lora"),
    ("base_model.model.visual.embed_tokens.lora_embedding_B", "embedding-lora"),
    ("base_model.model", "unrecognized-tensor"),
    ("base_model.model.weight", "unrecognized-tensor"),
    ("base_model.model.lora_A.weight", "unrecognized-tensor"),
    ("_orig_mod", "not-peft-key"),
    (f"base_model.model.model.{Q}.lora_C.weight", "unrecognized-tensor"),
    (f"base_model.model.model.{Q}.weight", "unrecognized-tensor"),
    (f"base_model.model.model.{Q}.lora_A.a.b.weight", "unrecognized-tensor"),
    (f"base_model.model.model.{Q}.lora_A", "unrecognized-tensor"),
    (f"base_model.model.model.{Q}.base_layer.weight", "unrecognized-tensor"),
    ("base_model.model.model.embed_tokens.token_adapter.base_layer.weight", "unrecognized-tensor"),
    (f"model.{Q}.lora_a", "unrecognized-tensor"),
    ("base_model.model.lm_head.bias", "unrecognized-tensor"),
    ("base_model.model.model.lm_head.bias", "non-layer-module"),
    ("base_model.model.visual.lm_head.lora_A.weight", "non-layer-module"),
    ("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", "non-layer-module"),
    (f"base_model.model.model.visual.{Q}.lora_A.weight", "foreign-layer"),
    (f"base_model.model.vision_tower.{Q}.lora_A.weight", "foreign-layer"),
    (f"base_model.model.mtp.{Q}.lora_A.weight", "foreign-layer"),
    (f"base_model.model.model.model.model.model.model.{Q}.lora_A.weight", "foreign-layer"),
    ("base_model.model.model.layers.lora_A.weight", "malformed-key"),
    ("base_model.model.model.layers.1.lora_A.weight", "malformed-key"),
    ("base_model.model.model.layers.x.self_attn.q_proj.lora_A.weight", "malformed-layer-index"),
    ("base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight", "malformed-layer-index"),
    ("base_model.model.model.layers.01.self_attn.q_proj.lora_A.weight", "malformed-layer-index"),
    (
        "base_model.model.model.layers.\u0661.self_attn.q_proj.lora_A.weight",
        "malformed-layer-index",
    ),
    ("base_model.model.model.layers.1000000.mlp.up_proj.lora_A.weight", "malformed-layer-index"),
    ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", "layer-out-of-range"),
    (
        "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight",
        "expert-lora-on-dense-model",
    ),
    (
        "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_A.weight",
        "expert-lora-on-dense-model",
    ),
    ("base_model.model.model.layers.0.linear_attn.out_proj.lora_A.weight", "gdn-target"),
    ("base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_A.weight", "gdn-target"),
    ("base_model.model.model.layers.0.mlp.gate.lora_A.weight", "unsupported-module"),
    ("base_model.model.model.layers.0.mlp.qkv_proj.lora_A.weight", "unsupported-module"),
    (
        "base_model.model.model.layers.0.self_attn.query_key_value.lora_B.weight",
        "unsupported-module",
    ),
    ("base_model.model.model.layers.0.input_layernorm.bias", "unsupported-module"),
    (f"base_model.model.model.{Q}.lora_A.bias", "unrecognized-tensor"),
    ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "unsupported-module"),
    ("base_model.model.model.layers.0.self_attn.x.q_proj.lora_A.weight", "unsupported-module"),
    ("base_model.model.model.layers.0.q_proj.lora_A.weight", "unsupported-module"),
    ("base_model.model.model.layers.0.input_layernorm.weight", "unrecognized-tensor"),
]


@pytest.mark.parametrize(("key", "code"), REFUSED)
def test_refused_keys(kit: Any, key: str, code: str) -> None:
    with pytest.raises(RejectError) as caught:
        classify(key, kit.dims)
    assert (caught.value.code, caught.value.subject) == (code, key)


def test_a_place_the_predicate_denies(kit: Any) -> None:
    class Hybrid(ModelDims):
        def applies_to_layer(self, layer: int, module: LoraModule) -> bool:
            return layer == 0 and super().applies_to_layer(layer, module)

    hybrid = Hybrid(**dataclasses.asdict(kit.dims))
    assert isinstance(classify(ACCEPTED[0].replace("layers.1", "layers.0"), hybrid), PairKey)
    with pytest.raises(RejectError) as caught:
        classify(ACCEPTED[0], hybrid)
    assert caught.value.code == "non-full-attention-layer"
    assert len(dict(canonical_keys(hybrid))) == 2 * 7 * 2


@pytest.mark.parametrize(
    ("key", "leaf", "kind"),
    [
        ("base_model.model.lm_head.weight", "lm_head", "full"),
        ("base_model.model.lm_head.base_layer.weight", "lm_head", "base"),
        ("base_model.model.model.embed_tokens.base_layer.weight", "embed_tokens", "base"),
        ("base_model.model.model.embed_tokens.weight", "embed_tokens", "full"),
        ("model.embed_tokens.weight", "embed_tokens", "full"),
        ("base_model.model.lm_head.modules_to_save.weight", "lm_head", "full"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head", "full"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            "embed_tokens",
            "rows",
        ),
        (
            "base_model.model.model.language_model.embed_tokens.token_adapter"
            ".trainable_tokens_delta.default",
            "embed_tokens",
            "rows",
        ),
    ],
)
def test_overlay_keys(kit: Any, key: str, leaf: str, kind: str) -> None:
    found = classify(key, kit.dims)
    assert isinstance(found, OverlayKey)
    assert (found.leaf, found.kind) == (leaf, kind)


def test_known_keys_agree_with_parsing(kit: Any) -> None:
    known = dict(canonical_keys(kit.dims))
    assert len(known) == 2 * 2 * 7 * 2
    for key, place in known.items():
        assert classify(key, kit.dims) == place


words = st.sampled_from(
    "base_model model layers 0 1 9 self_attn mlp q_proj up_proj lora_A lora_B weight bias "
    "default language_model qkv_proj gate_up_proj lora_magnitude_vector base_layer "
    "lm_head embed_tokens experts token_adapter _orig_mod".split()
) | st.text(max_size=4)


@settings(max_examples=1000, deadline=None)
@given(key=st.lists(words, max_size=9).map(".".join))
def test_every_key_gets_exactly_one_answer(key: str) -> None:
    dims = ModelDims(2, 8, 12, 4, 10, 6, 16)
    try:
        found = classify(key, dims)
    except RejectError as refusal:
        assert refusal.subject == key[:300]
        return
    assert not isinstance(found, (ExpertsKey, PartKey))  # not of a dense model
    if isinstance(found, PairKey) and found.module in TOKEN_MODULES:
        assert found.layer == dims.num_layers
    elif isinstance(found, PairKey):
        assert dims.applies_to_layer(found.layer, found.module)
    elif isinstance(found, FusedKey):
        assert all(dims.applies_to_layer(found.layer, part) for part in found.modules)
    else:
        assert found.leaf in ("embed_tokens", "lm_head")


# layers 0, 1: gated delta net; 2: attention.
DENSE = ModelDims(3, 8, 24, 4, 12, 6, 16, False, (0, 1), 20, 12, 3)
MOE = ModelDims(3, 8, 24, 4, 12, 0, 16, False, (0, 1), 20, 12, 3, 4, 5, 7)


@pytest.mark.parametrize(
    ("dims", "path", "module"),
    [
        (DENSE, "0.linear_attn.out_proj", LoraModule.OUT_PROJ),
        (DENSE, "1.linear_attn.in_proj_qkv", LoraModule.IN_PROJ_QKV),
        (DENSE, "1.linear_attn.in_proj_b", LoraModule.IN_PROJ_B),
        (DENSE, "0.mlp.up_proj", LoraModule.UP_PROJ),
        (DENSE, "2.self_attn.q_proj", LoraModule.Q_PROJ),
        (MOE, "0.mlp.gate", LoraModule.ROUTER),
        (MOE, "2.mlp.shared_expert.gate_proj", LoraModule.SHARED_GATE_PROJ),
        (MOE, "2.mlp.shared_expert_gate", LoraModule.SHARED_EXPERT_GATE),
    ],
)
def test_hybrid_places(dims: ModelDims, path: str, module: LoraModule) -> None:
    key = f"base_model.model.model.layers.{path}.lora_A.weight"
    found = classify(key, dims)
    assert isinstance(found, PairKey)
    assert (found.module, found.layer, found.half) == (module, int(path[0]), "A")
    assert module.path == path[2:]
    known = dict(canonical_keys(dims))
    assert known[key] == found
    assert all(classify(one, dims) == place for one, place in known.items())


def test_fused_inputs_of_a_delta_net_where_the_checkpoint_has_them_so() -> None:
    grouped = dataclasses.replace(MOE, gdn_groups=1)
    for leaf, parts in (
        ("in_proj_qkvz", (LoraModule.IN_PROJ_QKV, LoraModule.IN_PROJ_Z)),
        ("in_proj_ba", (LoraModule.IN_PROJ_B, LoraModule.IN_PROJ_A)),
    ):
        key = f"base_model.model.model.layers.1.linear_attn.{leaf}.lora_B.weight"
        found = classify(key, grouped)
        assert isinstance(found, FusedKey) and found.modules == parts
        with pytest.raises(RejectError) as caught:
            classify(key, MOE)
        assert caught.value.code == "gdn-target"
        with pytest.raises(RejectError) as caught:
            classify(key.replace("layers.1", "layers.2"), grouped)
        assert caught.value.code == "gdn-in-on-attention-layer"


def test_fused_rows_are_grouped_by_key_head() -> None:
    # Two key heads of width 2, four value heads of width 3: q 4, k 4, v 12, z 12, b 4, a 4 rows.
    dims = ModelDims(1, 8, 24, 4, 12, 6, 16, False, (0,), 20, 12, 4, gdn_groups=2)
    rows = {module: found.tolist() for module, found in grouped_rows(dims).items()}
    assert rows[LoraModule.IN_PROJ_B] == [0, 1, 4, 5]
    assert rows[LoraModule.IN_PROJ_A] == [2, 3, 6, 7]
    assert rows[LoraModule.IN_PROJ_Z] == [*range(10, 16), *range(26, 32)]
    qkv = [0, 1, 16, 17, 2, 3, 18, 19, *range(4, 10), *range(20, 26)]
    assert rows[LoraModule.IN_PROJ_QKV] == qkv
    with pytest.raises(ModelError) as caught:
        dataclasses.replace(dims, gdn_groups=3)
    assert caught.value.subject == "gdn_groups"


@pytest.mark.parametrize(
    ("dims", "path", "code"),
    [
        (DENSE, "2.linear_attn.out_proj", "gdn-out-on-attention-layer"),
        (DENSE, "2.linear_attn.in_proj_z", "gdn-in-on-attention-layer"),
        (DENSE, "0.linear_attn.in_proj_qkvz", "gdn-target"),
        (DENSE, "0.linear_attn.conv1d", "gdn-target"),
        (DENSE, "0.self_attn.q_proj", "non-full-attention-layer"),
        (DENSE, "0.mlp.gate", "unsupported-module"),
        (DENSE, "0.mlp.shared_expert.up_proj", "unsupported-module"),
        (MOE, "2.mlp.up_proj", "unsupported-module"),
        (MOE, "0.mlp.shared_expert.router", "unsupported-module"),
    ],
)
def test_hybrid_refusals(dims: ModelDims, path: str, code: str) -> None:
    with pytest.raises(RejectError) as caught:
        classify(f"base_model.model.model.layers.{path}.lora_A.weight", dims)
    assert caught.value.code == code


EXPERTS = dataclasses.replace(MOE, expert_adapters=True)
AT = "base_model.model.model.layers.1.mlp.experts"


def test_expert_places() -> None:
    one = classify(f"{AT}.3.up_proj.lora_B.weight", EXPERTS)
    assert isinstance(one, PairKey)
    assert (one.module, one.expert, one.half) == (LoraModule.EXPERT_UP_PROJ, 3, "B")
    for path, inner in (("", False), (".base_layer", True)):
        every = classify(f"{AT}{path}.lora_A.weight", EXPERTS)
        assert isinstance(every, ExpertsKey)
        assert (every.layer, every.inner, every.half) == (1, inner, "A")
        assert every.module_name == "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("dims", "path", "code"),
    [
        (DENSE, ".0.up_proj", "expert-lora-on-dense-model"),
        (MOE, ".0.up_proj", "expert-lora-no-room"),
        (MOE, "", "expert-lora-no-room"),
        (EXPERTS, ".4.up_proj", "expert-out-of-range"),
        (EXPERTS, ".x.up_proj", "malformed-expert-index"),
        (EXPERTS, ".-1.up_proj", "malformed-expert-index"),
        (EXPERTS, ".0.router", "unsupported-module"),
        (EXPERTS, ".gate_up_proj.x", "unsupported-module"),
    ],
)
def test_expert_refusals(dims: ModelDims, path: str, code: str) -> None:
    with pytest.raises(RejectError) as caught:
        classify(f"{AT}{path}.lora_A.weight", dims)
    assert caught.value.code == code
