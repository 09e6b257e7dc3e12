"""The audit: every refusal by its smallest adapter, and the order of the checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rota.errors import RejectError
from rota.gpu.lora.layout import Elem


def code_of(kit: Any, tensors: Any, layout: Any = None, **fields: Any) -> str:
    error = kit.refusal(tensors, kit.config(**fields), layout)
    assert isinstance(error, RejectError)
    return error.code


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("embed_tokens", "embedding"),
        ("lm_head", "embedding"),
        ("in_proj_qkv", "gdn"),
        ("linear_attn.conv1d", "gdn"),
        ("out_proj", "unsupported-target"),
        ("mlp.gate", "unsupported-target"),
        ("c_attn", "unknown_module"),
    ],
)
def test_targets_no_dense_model_has(kit: Any, target: str, code: str) -> None:
    assert code_of(kit, kit.pair(), target_modules=["q_proj", target]) == code


def test_rank_exceeds_pool(kit: Any) -> None:
    error = kit.refusal(kit.pair(rank=9), kit.config(r=9))
    assert (error.code, error.expected, error.found) == ("rank-exceeds-pool", "at most 8", "9")
    assert code_of(kit, kit.pair(), rank_pattern={"k_proj": 9}) == "rank-exceeds-pool"
    # A stride of 16 does not make the pool's rank 16.
    assert code_of(kit, kit.pair(rank=13), kit.layout(12), r=13) == "rank-exceeds-pool"
    assert kit.stage(kit.pair(rank=12), kit.config(r=12), kit.layout(12)).report.pairs == 1


def test_one_bad_key_refuses_all_with_a_bounded_list(kit: Any) -> None:
    tensors = kit.pair()
    bad = [
        f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight" for n in range(2, 14)
    ]
    tensors |= {key: kit.tensor((2, 8)) for key in bad}
    error = kit.refusal(tensors)
    assert (error.code, error.subject) == ("layer-out-of-range", bad[0])
    assert "12 tensors refused" in error.message
    assert error.found.count("[layer-out-of-range]") == 8 and error.found.endswith("and 4 more")


def test_duplicate_tensor(kit: Any) -> None:
    tensors = kit.pair()
    other = kit.key(0, "q_proj", "A", "base_model.model.model.language_model.")
    assert code_of(kit, tensors | {other: kit.tensor((2, 8))}) == "duplicate-tensor"
    tokens = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    both = {key: kit.tensor((1, 8)) for key in (tokens, "base_model.model." + tokens)}
    assert code_of(kit, tensors | both, trainable_token_indices=[1]) == "duplicate-tensor"


def test_mixed_adapter_names(kit: Any) -> None:
    a, b = kit.pair().items()
    named = {
        a[0].replace(".weight", ".one.weight"): a[1],
        b[0].replace(".weight", ".two.weight"): b[1],
    }
    assert code_of(kit, named) == "mixed-adapter-names"


def test_empty_adapter(kit: Any) -> None:
    assert code_of(kit, {}) == "empty-adapter"
    assert code_of(kit, {}, target_modules=None) == "empty-adapter"


def test_unpaired_tensor(kit: Any) -> None:
    a, b = kit.pair().items()
    for half in (a, b):
        error = kit.refusal(dict([half]))
        assert (error.code, error.subject) == ("unpaired-tensor", half[0])
    elsewhere = {a[0]: a[1], b[0].replace("model.model.model.", "model.model.model.model."): b[1]}
    assert code_of(kit, elsewhere) == "unpaired-tensor"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 7), (12, 2)),
        ((2, 8), (11, 2)),
        ((8, 2), (2, 12)),
        ((2, 8, 1), (12, 2)),
        ((16,), (12, 2)),
        ((0,), (12, 2)),
        ((0, 8), (12, 0)),
        ((2, 8), (0,)),
        ((), (12, 2)),
    ],
)
def test_shape_mismatch(kit: Any, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    key_a, key_b = kit.pair()
    assert code_of(kit, {key_a: kit.tensor(a), key_b: kit.tensor(b)}) == "shape-mismatch"


@pytest.mark.parametrize(
    ("a", "b", "r"), [(2, 2, 4), (2, 4, 2), (4, 2, 2), (4, 4, 2), (1, 1, 2), (3, 3, 2)]
)
def test_rank_mismatch(kit: Any, a: int, b: int, r: int) -> None:
    key_a, key_b = kit.pair()
    tensors = {key_a: kit.tensor((a, 8)), key_b: kit.tensor((12, b))}
    assert code_of(kit, tensors, r=r) == "rank-mismatch"


def test_rank_after_patterns_must_match_the_tensors(kit: Any) -> None:
    tensors = kit.pair(0, rank=2) | kit.pair(1, rank=3)
    assert code_of(kit, tensors) == "rank-mismatch"
    config = kit.config(rank_pattern={r"layers\.1\..*": 3}, alpha_pattern={"layers.0.*": 1})
    image = kit.stage(tensors, config).image
    assert [image.ranks[0], image.ranks[7]] == [2, 3]
    assert image.scales[0] == np.float32(1 / 2) and image.scales[7] == np.float32(4 / 3)


def test_unmatched_target(kit: Any) -> None:
    error = kit.refusal(kit.pair(), kit.config(target_modules=["q_proj", "k_proj"]))
    assert (error.code, error.subject) == ("unmatched-target", "k_proj")
    tokens = {"model.embed_tokens.token_adapter.trainable_tokens_delta": kit.tensor((1, 8))}
    for form in (["q_proj"], "all-linear", ".*q_proj"):
        fields = {"target_modules": form, "trainable_token_indices": [1]}
        assert code_of(kit, tokens, **fields) == "unmatched-target"


def test_excluded_targets_may_match_nothing(kit: Any) -> None:
    for excluded in (["k_proj"], [r"layers.0.self_attn.k_proj", "layers.1.self_attn.k_proj"], "x"):
        config = kit.config(target_modules=["q_proj", "k_proj"], exclude_modules=excluded)
        report = kit.stage(kit.pair(), config).report
        assert any("k_proj" in note for note in report.notes)


def test_untargeted_tensor(kit: Any) -> None:
    tensors = kit.pair() | kit.pair(1, "up_proj")
    assert code_of(kit, tensors) == "untargeted-tensor"
    assert code_of(kit, kit.pair(1), layers_to_transform=[0]) == "untargeted-tensor"
    assert code_of(kit, kit.pair(1), layers_to_transform=0) == "untargeted-tensor"
    assert code_of(kit, kit.pair(), exclude_modules=["self_attn.q_proj"]) == "untargeted-tensor"
    assert code_of(kit, kit.pair(), target_modules=["mlp.q_proj"]) == "untargeted-tensor"


@pytest.mark.parametrize(
    "targets",
    [
        ["self_attn.q_proj"],
        ["model.layers.0.self_attn.q_proj"],
        ["layers.0.self_attn.q_proj"],
        "all-linear",
        ".*q_proj",
        None,
    ],
)
def test_target_forms_that_match(kit: Any, targets: Any) -> None:
    assert kit.stage(kit.pair(), kit.config(target_modules=targets)).report.pairs == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("place", [0, 7, 23])
def test_non_finite(kit: Any, value: float, dtype: str, place: int) -> None:
    tensors = kit.pair(dtype=dtype) | kit.pair(1, dtype=dtype)
    key = kit.key(1, "q_proj", "B")
    values = np.ones((12, 2), np.float32)
    values.reshape(-1)[place] = value
    error = kit.refusal(tensors | {key: kit.entry(values, dtype)})
    assert (error.code, error.subject) == ("non-finite", key)


def test_float32_that_bf16_cannot_hold(kit: Any) -> None:
    key = kit.key(0, "q_proj", "A")
    largest = np.array(0x7F7F7FFF, np.uint32).view(np.float32)  # rounds down to the largest BF16
    over = np.array(0xFF7F8000, np.uint32).view(np.float32)
    values = np.ones((2, 8), np.float32)
    values[1, 1] = largest
    assert kit.stage(kit.pair() | {key: kit.entry(values)}).report.pairs == 1
    values[1, 1] = over
    tensors = kit.pair() | {key: kit.entry(values)}
    error = kit.refusal(tensors)
    assert (error.code, error.subject, error.found) == ("non-finite", key, "overflow")
    assert kit.stage(tensors, layout=kit.layout(elem=Elem.F32)).report.pairs == 1


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("half", ["A", "B"])
def test_no_effect(kit: Any, half: str, zero: float) -> None:
    shape = (2, 8) if half == "A" else (12, 2)
    dead = {kit.key(0, "q_proj", half): kit.entry(np.full(shape, zero))}
    assert code_of(kit, kit.pair() | dead) == "no-effect"
    # One live pair is enough.
    assert kit.stage(kit.pair() | dead | kit.pair(1)).report.pairs == 2


def test_bias_and_dora_tensors_under_an_innocent_config(kit: Any) -> None:
    for tail, code in (
        ("lora_magnitude_vector", "use_dora"),
        ("lora_B.bias", "lora_bias"),
        ("base_layer.bias", "bias"),
    ):
        key = "base_model.model.model.layers.0.self_attn.q_proj." + tail
        assert code_of(kit, kit.pair() | {key: kit.tensor((12,))}) == code


def test_order_keys_before_shapes_before_values(kit: Any) -> None:
    a, b = kit.pair()
    nan = kit.entry(np.full((12, 2), np.nan))
    odd = {"base_model.model.odd": kit.tensor((1,))}
    assert code_of(kit, {a: kit.tensor((2, 7)), b: nan} | odd) == "unrecognized-tensor"
    assert code_of(kit, {a: kit.tensor((2, 7)), b: nan}) == "shape-mismatch"
    assert code_of(kit, {a: kit.tensor((2, 8)), b: nan}) == "non-finite"
