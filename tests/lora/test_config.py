"""adapter_config.json: every refusal by its smallest input, and what each accepted form means."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from rota.errors import RejectError
from rota.gpu.lora.config import parse_config
from rota.gpu.lora.patterns import match_name

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type"),
    ({"peft_type": 3}, "peft_type"),
    ({"peft_type": ..., "fine_tune_type": "lora", "lora_parameters": {}}, "mlx-adapter"),
    ({"use_dora": "no"}, "use_dora"),
    ({"lora_bias": 1}, "lora_bias"),
    ({"lora_bias": True, "use_dora": True}, "lora_bias"),
    ({"use_qalora": True}, "use_qalora"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"bias": "some"}, "bias"),
    ({"bias": ["all"]}, "bias"),
    ({"layers_pattern": 3}, "layers_pattern"),
    ({"layers_pattern": ["layers", "h.*"]}, "layers_pattern"),
    ({"bias": 0}, "bias"),
    ({"rank_pattern": []}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern"),
    ({"rank_pattern": {"": 4}}, "rank_pattern"),
    ({"rank_pattern": {"q" * 257: 4}}, "rank_pattern"),
    ({"rank_pattern": {f"m{n}": 4 for n in range(8193)}}, "rank_pattern"),
    ({"rank_pattern": {"(q+)+": 4}}, "unsafe-pattern"),
    ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern"),
    ({"alpha_pattern": {"q_proj": "16"}}, "alpha_pattern"),
    ({"alpha_pattern": {"[": 1}}, "alpha_pattern"),
    ({"modules_to_save": ["input_layernorm"]}, "modules_to_save"),
    ({"modules_to_save": "lm_head"}, "modules_to_save"),
    ({"modules_to_save": [7]}, "modules_to_save"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"kasa_config": {"x": 1}}, "kasa_config"),
    ({"use_bdlora": {"x": 1}}, "use_bdlora"),
    ({"velora_config": {"x": 1}}, "velora_config"),
    ({"monteclora_config": {"x": 1}}, "monteclora_config"),
    ({"arrow_config": {"x": 1}}, "arrow_config"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ({"target_parameters": [3]}, "target_parameters"),
    ({"init_lora_weights": "pissa"}, "pissa"),
    ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
    ({"init_lora_weights": "OLoRA"}, "olora"),
    ({"init_lora_weights": "corda"}, "corda"),
    ({"init_lora_weights": "loftq"}, "loftq"),
    ({"init_lora_weights": "lora_ga"}, "lora_ga"),
    ({"init_lora_weights": "something new"}, "init_lora_weights"),
    ({"init_lora_weights": 1}, "init_lora_weights"),
    ({"use_rslora": "true"}, "use_rslora"),
    ({"use_rslora": 1}, "use_rslora"),
    ({"layers_to_transform": -1}, "layers_to_transform"),
    ({"layers_to_transform": [0, "1"]}, "layers_to_transform"),
    ({"layers_to_transform": [True]}, "layers_to_transform"),
    ({"layers_to_transform": "0"}, "layers_to_transform"),
    ({"r": ...}, "r"),
    ({"r": 0}, "r"),
    ({"r": 8.0}, "r"),
    ({"r": "8"}, "r"),
    ({"r": True}, "r"),
    ({"lora_alpha": ...}, "lora_alpha"),
    ({"lora_alpha": None}, "lora_alpha"),
    ({"lora_alpha": 0}, "lora_alpha"),
    ({"lora_alpha": -1}, "lora_alpha"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"lora_alpha": True}, "lora_alpha"),
    ({"lora_alpha": math.nan}, "lora_alpha"),
    ({"lora_alpha": math.inf}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"trainable_token_indices": 3}, "trainable_token_indices"),
    ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
    ({"trainable_token_indices": [2**32]}, "trainable_token_indices"),
    ({"trainable_token_indices": [1.0]}, "trainable_token_indices"),
    ({"trainable_token_indices": {"embed_tokens": 3}}, "trainable_token_indices"),
    ({"trainable_token_indices": {"wte": [3]}}, "trainable_token_indices"),
    ({"target_modules": []}, "target_modules"),
    ({"target_modules": [3]}, "target_modules"),
    ({"target_modules": [""]}, "target_modules"),
    ({"target_modules": ""}, "target_modules"),
    ({"target_modules": {"q_proj": 1}}, "target_modules"),
    ({"exclude_modules": 3}, "exclude_modules"),
    ({"ensure_weight_tying": "yes"}, "ensure_weight_tying"),
]


@pytest.mark.parametrize(("fields", "code"), REFUSED, ids=lambda v: str(v)[:50])
def test_refused_by_name(kit: Any, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(RejectError) as caught:
        kit.parsed(**fields)
    assert caught.value.code == code
    assert str(caught.value).startswith(f"REJECT[{code}] ")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "bad-config"),
        (b"{", "bad-config"),
        (b'{"r": 2', "bad-config"),
        (b"[]", "bad-config"),
        (b"null", "bad-config"),
        (b'{"r": 2} x', "bad-config"),
        (b'\xff\xfe{"r": 2}', "bad-config"),
        (b'{"r": "\xe9"}', "bad-config"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad-config"),
        (b'{"r": ' + b"9" * 5000 + b"}", "bad-config"),
        (b'{"r": 2, "r": 2}', "duplicate-json-key"),
        (b'{"a": {"b": 1, "b": 1}}', "duplicate-json-key"),
        (b'{"r": 2, "\\u0072": 2}', "duplicate-json-key"),
        (b"{}", "r"),
        (b" " * (1 << 20) + b"{}", "config-too-large"),
    ],
    ids=lambda v: repr(v[:30]) if isinstance(v, bytes) else str(v),
)
def test_hostile_bytes(raw: bytes, code: str) -> None:
    with pytest.raises(RejectError) as caught:
        parse_config(raw)
    assert caught.value.code == code


def test_plain_config(kit: Any) -> None:
    config = kit.parsed(lora_alpha=16.5, r=4)
    assert config.rank("x.q_proj") == 4
    assert config.scale("x.q_proj") == 16.5 / 4
    assert config.target_modules == ("q_proj",)
    assert config.notes == () and config.ignored == ()


def test_absent_rslora_is_false_with_a_note(kit: Any) -> None:
    config = kit.parsed(use_rslora=...)
    assert config.scale("q_proj") == 2.0
    assert any("use_rslora" in note for note in config.notes)


def test_absent_peft_type_is_noted(kit: Any) -> None:
    assert any("peft_type" in note for note in kit.parsed(peft_type=...).notes)
    assert kit.parsed(peft_type="lora").notes == ()


def test_unknown_fields_are_reported(kit: Any) -> None:
    config = kit.parsed(brand_new_option=1, lora_dropout=0.1, task_type="CAUSAL_LM")
    assert [name for name, _ in config.ignored] == ["brand_new_option"]


def test_rslora_divides_by_the_root_in_float64(kit: Any) -> None:
    config = kit.parsed(r=3, lora_alpha=7, use_rslora=True)
    assert config.scale("q_proj") == np.float32(7 / math.sqrt(3))


def test_scale_that_float32_cannot_hold(kit: Any) -> None:
    for alpha in (1e-60, 1e300):
        config = kit.parsed(lora_alpha=alpha)
        with pytest.raises(RejectError) as caught:
            config.scale("q_proj")
        assert caught.value.code == "lora_alpha"


def test_first_matching_pattern_wins_and_scale_uses_its_rank(kit: Any) -> None:
    config = kit.parsed(
        r=4,
        lora_alpha=16,
        rank_pattern={r"layers\.[01]\.mlp\.down_proj": 3, "self_attn.q_proj": 2, ".*q_proj": 9},
        alpha_pattern={r"layers\.[01]\.mlp\.down_proj": 5, "q_proj": 12},
    )
    name = "model.layers.{}.{}".format
    assert config.rank(name(0, "mlp.down_proj")) == 3
    assert config.rank(name(2, "mlp.down_proj")) == 4
    assert config.rank(name(0, "self_attn.q_proj")) == 2
    assert config.rank("other.q_proj") == 9
    assert config.rank(name(0, "self_attn.q_projection")) == 4
    assert config.scale(name(1, "mlp.down_proj")) == np.float32(5 / 3)
    assert config.scale(name(1, "self_attn.q_proj")) == 6.0


def test_rslora_with_patterns_uses_the_pattern_rank(kit: Any) -> None:
    config = kit.parsed(r=4, lora_alpha=6, use_rslora=True, rank_pattern={"q_proj": 9})
    assert config.scale("model.layers.0.self_attn.q_proj") == 2.0


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+",
        "(a|a)*",
        "(?=a)b",
        "(?P<n>a)",
        r"(a)\1",
        "(a){40}",
        "(?:a*)*",
        ".*" * 4 + "q",
        ".?" * 30 + "X",
        "(.|.)" * 30,
        "(a?)" * 30,
        ".{0,30}.{0,30}.{0,30}q",
        "a{1000}",
    ],
)
def test_patterns_that_could_run_long_are_refused(kit: Any, pattern: str) -> None:
    with pytest.raises(RejectError) as caught:
        kit.parsed(rank_pattern={pattern: 4})
    assert caught.value.code == "unsafe-pattern"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (r".*\.layers\.(0|3)\..*(q_proj|down_proj)", "model.layers.3.mlp.down_proj", True),
        (r"layers\.\d+\.mlp\..*", "model.layers.11.mlp.up_proj", True),
        (r"model\.layers\.(1[0-9]|2\d)\.self_attn\.(q|k|v|o)_proj", "model.layers.7.q_proj", False),
        (r"(?:self_attn|mlp)\.[a-z_]+?", "model.layers.1.mlp.up_proj", True),
        (r"layers\.[^]]\.q{1}_proj", "model.layers.1.q_proj", True),
        (r"^model\.layers\.0\.self_attn\.q_proj$", "model.layers.0.self_attn.q_proj", True),
        (r"layers.3.*q_proj", "model.layers.3.self_attn.q_proj", True),
        (r"a{b", "x.a{b", True),
    ],
)
def test_ordinary_patterns_work(kit: Any, pattern: str, name: str, matches: bool) -> None:
    assert kit.parsed(rank_pattern={pattern: 7}).rank(name) == (7 if matches else 2)


def test_many_plain_patterns_are_fine_but_many_costly_ones_are_not(kit: Any) -> None:
    plain = {f"model.layers.{n}.self_attn.q_proj": n + 1 for n in range(500)}
    assert kit.parsed(rank_pattern=plain).rank("model.layers.499.self_attn.q_proj") == 500
    costly = {f"a{n}.*b.*c": 4 for n in range(40)}
    with pytest.raises(RejectError) as caught:
        kit.parsed(rank_pattern=costly)
    assert caught.value.code == "unsafe-pattern"


def test_the_costliest_accepted_pattern_ends(kit: Any) -> None:
    config = kit.parsed(rank_pattern={"[a-z._0-9]*[a-z._0-9]*(a|b|c|d)(a|b|c|d)X": 4})
    name = "model." * 4 + "layers.999999.self_attn.q_proj"
    assert config.rank(name) == 2  # exponential matching would never end


def test_layers_to_transform_forms(kit: Any) -> None:
    assert kit.parsed(layers_to_transform=3).layers_to_transform == {3}
    assert kit.parsed(layers_to_transform=[1, 3]).layers_to_transform == {1, 3}
    assert kit.parsed(layers_to_transform=[]).layers_to_transform is None
    assert kit.parsed().layers_to_transform is None


def test_target_forms(kit: Any) -> None:
    assert kit.parsed(target_modules="all-linear").target_regex == "all-linear"
    assert kit.parsed(target_modules=r".*\.q_proj").target_regex == r".*\.q_proj"
    assert kit.parsed(target_modules=None).target_modules is None
    assert kit.parsed(target_modules=[], modules_to_save=["lm_head"]).target_modules == ()
    # A catastrophic regex is stored, never run.
    assert kit.parsed(target_modules="(a+)+$").target_regex == "(a+)+$"


def test_token_indices_forms(kit: Any) -> None:
    assert dict(kit.parsed(trainable_token_indices=[9, 3, 9]).token_indices) == {
        "embed_tokens": (9, 3)
    }
    both = {
        "model.embed_tokens": [1],
        "lm_head": [2],
    }
    assert dict(kit.parsed(trainable_token_indices=both).token_indices) == {
        "embed_tokens": (1,),
        "lm_head": (2,),
    }
    assert dict(kit.parsed(trainable_token_indices={"embed_tokens": None}).token_indices) == {}
    twice = {"model.embed_tokens": [1], "embed_tokens": [2]}
    with pytest.raises(RejectError):
        kit.parsed(trainable_token_indices=twice)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_inits_that_leave_the_base_alone(kit: Any, init: object) -> None:
    assert kit.parsed(init_lora_weights=init).r == 2


def test_name_matching_is_by_dotted_suffix() -> None:
    assert match_name("model.layers.0.self_attn.q_proj", ("k_proj", "q_proj")) == "q_proj"
    assert match_name("model.layers.0.self_attn.q_proj", ("self_attn.q_proj",)) is not None
    assert match_name("model.layers.0.self_attn.q_proj", ("proj",)) is None
    assert match_name("q_proj", ("q_proj",)) == "q_proj"


def test_every_config_in_the_corpus_parses_or_is_refused_by_a_field(kit: Any) -> None:
    paths = sorted(kit.root.glob("tests/data/**/adapter_config.json"))
    assert len(paths) > 40
    for path in paths:
        fields = json.loads(path.read_bytes())
        try:
            config = parse_config(path.read_bytes())
        except RejectError as refusal:
            assert refusal.code in fields, path
        else:
            assert config.r == fields["r"] and config.ignored == ()
