"""Factors and offsets per output: values against an independent reading, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rota.errors import RotaError
from rota.gpu.host import HostDevice
from rota.gpu.lora.dims import LoraModule
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.pool import LoraPool

STEM = "base_model.model.model.layers.0.self_attn.q_proj."
MAGNITUDE = STEM + "lora_magnitude_vector"
BIAS_B = STEM + "lora_B.bias"
BIAS = STEM + "base_layer.bias"


class Base:
    """A base model: every weight from a seed, biases on q_proj alone if asked."""

    def __init__(self, kit: Any, biased: bool = False, zero_row: bool = False) -> None:
        self.kit, self.biased, self.zero_row = kit, biased, zero_row

    def weight(self, module: LoraModule) -> np.ndarray:
        made = values(self.kit.tensor(self.kit.dims.shape(module), seed=5)).copy()
        if self.zero_row:
            made[3] = 0
        return made

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> np.ndarray:
        return self.weight(module)[start:stop]

    def bias(self, layer: int, module: LoraModule) -> np.ndarray | None:
        if not self.biased or module is not LoraModule.Q_PROJ:
            return None
        return values(self.kit.tensor((12,), seed=6))

    def embed(self) -> np.ndarray:
        raise AssertionError("no token matrix is needed")

    head = embed


def values(entry: Any) -> np.ndarray:
    return np.frombuffer(entry[2], np.float32).reshape(entry[1])


def layout_of(kit: Any, elem: Elem = Elem.F32, **more: Any) -> SlotLayout:
    return kit.layout(elem=elem, affine=True, **more)


def vectors(layout: SlotLayout, image: Any, pair: int = 0) -> tuple[np.ndarray, np.ndarray]:
    assert image.affine[pair]
    return layout.affine_views(image.buffer, pair)


def norms(kit: Any, tensors: Any, base: Base, scale: float) -> np.ndarray:
    a, b = (values(tensors[kit.key(0, "q_proj", half)]).astype(np.float64) for half in "AB")
    merged = base.weight(LoraModule.Q_PROJ).astype(np.float64) + scale * (b @ a)
    return np.sqrt((merged**2).sum(1))


@pytest.mark.parametrize("elem", Elem)
@pytest.mark.parametrize("biased", [False, True])
def test_dora_is_magnitude_over_the_norm_of_the_merged_row(
    kit: Any, elem: Elem, biased: bool
) -> None:
    layout, base = layout_of(kit, elem), Base(kit, biased)
    tensors = kit.pair() | {MAGNITUDE: kit.tensor((12,), seed=9)}
    staged = kit.stage(tensors, kit.config(use_dora=True), layout, base_rows=base)
    mul, add = vectors(layout, staged.image)
    expected = values(tensors[MAGNITUDE]) / norms(kit, tensors, base, 2.0)
    np.testing.assert_allclose(mul, expected, rtol=1e-6)
    old = base.bias(0, LoraModule.Q_PROJ)
    wanted = np.zeros(12) if old is None else old - expected * old
    np.testing.assert_allclose(add, wanted, atol=1e-6)
    assert staged.report.vectors == {"dora": 1}
    assert sum(staged.image.affine) == 1


def test_the_norm_is_taken_in_pieces(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, base = layout_of(kit), Base(kit)
    tensors = kit.pair() | {MAGNITUDE: kit.tensor((12,), seed=9)}
    config = kit.config(use_dora=True)
    whole = kit.stage(tensors, config, layout, base_rows=base).image
    monkeypatch.setattr("rota.gpu.lora.affine._VALUES_AT_ONCE", 40)  # five rows of eight
    cut = kit.stage(tensors, config, layout, base_rows=base).image
    np.testing.assert_allclose(vectors(layout, whole)[0], vectors(layout, cut)[0], rtol=1e-6)


def test_lora_bias_is_scaled_like_the_delta(kit: Any) -> None:
    layout = layout_of(kit)
    tensors = kit.pair() | {BIAS_B: kit.tensor((12,), seed=9)}
    staged = kit.stage(tensors, kit.config(lora_bias=True), layout)
    mul, add = vectors(layout, staged.image)
    np.testing.assert_array_equal(mul, 1)
    np.testing.assert_array_equal(add, 2 * values(tensors[BIAS_B]))
    assert staged.report.vectors == {"lora_bias": 1}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_a_trained_bias_takes_the_place_of_the_base_s(kit: Any, bias: str) -> None:
    layout, base = layout_of(kit), Base(kit, biased=True)
    tensors = kit.pair() | kit.pair(1) | {BIAS: kit.tensor((12,), seed=9)}
    second = BIAS.replace("layers.0", "layers.1").replace(".base_layer", "")
    tensors[second] = kit.entry(base.bias(1, LoraModule.Q_PROJ))
    staged = kit.stage(tensors, kit.config(bias=bias), layout, base_rows=base)
    mul, add = vectors(layout, staged.image)
    np.testing.assert_array_equal(mul, 1)
    np.testing.assert_array_equal(add, values(tensors[BIAS]) - base.bias(0, LoraModule.Q_PROJ))
    assert not vectors(layout, staged.image, 7)[1].any()  # kept as it was
    assert staged.report.vectors == {"bias": 2}


def test_a_bias_of_a_module_without_factors(kit: Any) -> None:
    """bias="all" trains every bias, also where there is no pair."""
    layout, base = layout_of(kit), Base(kit, biased=True)
    tensors = kit.pair(0, "up_proj")
    for layer in (0, 1):
        tensors[BIAS.replace("layers.0", f"layers.{layer}")] = kit.tensor((12,), seed=layer)
    config = kit.config(bias="all", target_modules=["up_proj"])
    image = kit.stage(tensors, config, layout, base_rows=base).image
    assert image.affine[0] and not image.present[0] and image.ranks[0] == 0
    only = kit.config(bias="lora_only", target_modules=["up_proj"])
    error = kit.refusal(tensors, only, layout, base_rows=base)
    assert (error.code, error.found) == ("bias", "lora_only")


def test_biases_of_a_base_that_has_none(kit: Any) -> None:
    """A config that says "all" is exact as it is where there is nothing to train."""
    for bias in ("all", "lora_only"):
        config = kit.config(bias=bias)
        staged = kit.stage(kit.pair(), config, layout_of(kit), base_rows=Base(kit))
        assert staged.report.vectors == {} and not any(staged.image.affine)
        extra = kit.pair() | {BIAS: kit.tensor((12,))}
        error = kit.refusal(extra, config, layout_of(kit), base_rows=Base(kit))
        assert (error.code, error.subject) == ("bias", BIAS)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_lost_on_saving(kit: Any, bias: str) -> None:
    base = Base(kit, biased=True)
    error = kit.refusal(kit.pair(), kit.config(bias=bias), layout_of(kit), base_rows=base)
    assert (error.code, error.expected) == ("bias", "a trained bias")


@pytest.mark.parametrize(
    ("key", "field", "on"),
    [(MAGNITUDE, "use_dora", True), (BIAS_B, "lora_bias", True), (BIAS, "bias", "all")],
)
def test_config_and_file_must_agree(kit: Any, key: str, field: str, on: Any) -> None:
    layout, base = layout_of(kit), Base(kit, biased=True)
    vector = {key: kit.tensor((12,), seed=9)}
    assert kit.refusal(kit.pair() | vector, kit.config(), layout, base_rows=base).code == field
    missing = kit.refusal(kit.pair(), kit.config(**{field: on}), layout, base_rows=base)
    assert missing.code == field
    lonely = vector | kit.pair(1)
    if field != "bias":
        error = kit.refusal(lonely, kit.config(**{field: on}), layout, base_rows=base)
        assert (error.code, error.subject) == (field, key)


@pytest.mark.parametrize("key", [MAGNITUDE, BIAS_B, BIAS])
@pytest.mark.parametrize("shape", [(11,), (12, 1), ()])
def test_vector_shapes(kit: Any, key: str, shape: tuple[int, ...]) -> None:
    field = {MAGNITUDE: "use_dora", BIAS_B: "lora_bias", BIAS: "bias"}[key]
    config = kit.config(**{field: "all" if field == "bias" else True})
    tensors = kit.pair() | {key: kit.tensor(shape)}
    error = kit.refusal(tensors, config, layout_of(kit), base_rows=Base(kit, biased=True))
    assert (error.code, error.subject) == ("shape-mismatch", key)


def test_without_the_base_or_without_room(kit: Any) -> None:
    dora = kit.pair() | {MAGNITUDE: kit.tensor((12,), seed=9)}
    config = kit.config(use_dora=True)
    assert kit.refusal(dora, config, layout_of(kit)).code == "affine-no-base"
    error = kit.refusal(dora, config, kit.layout(), base_rows=Base(kit))
    assert (error.code, error.subject) == ("affine-no-room", "dora")
    need = kit.layout(affine=True).slot_bytes - kit.layout().slot_bytes
    assert f"which takes {need} bytes more in each slot" in str(error.expected)
    trained = kit.refusal(kit.pair(), kit.config(bias="all"), layout_of(kit))
    assert trained.code == "affine-no-base"


def test_a_row_that_cannot_be_scaled(kit: Any) -> None:
    b = values(kit.tensor((12, 2), seed=1)).copy()
    b[3] = 0
    tensors = kit.pair() | {MAGNITUDE: kit.tensor((12,), seed=9)}
    tensors[kit.key(0, "q_proj", "B")] = kit.entry(b)
    base = Base(kit, zero_row=True)
    error = kit.refusal(tensors, kit.config(use_dora=True), layout_of(kit), base_rows=base)
    assert (error.code, error.subject, error.found) == ("non-finite", MAGNITUDE, "3")


def test_a_merged_row_that_is_too_large_is_refused(kit: Any) -> None:
    """Its norm is infinite, and what is divided by that is 0, which looks right."""
    a, b = values(kit.tensor((2, 8))).copy(), values(kit.tensor((12, 2), seed=1)).copy()
    a[:], b[3] = 1e15, 1e25
    tensors = kit.pair() | {MAGNITUDE: kit.tensor((12,), seed=9)}
    tensors |= {kit.key(0, "q_proj", "A"): kit.entry(a), kit.key(0, "q_proj", "B"): kit.entry(b)}
    error = kit.refusal(tensors, kit.config(use_dora=True), layout_of(kit), base_rows=Base(kit))
    assert (error.code, error.subject, error.found) == ("non-finite", MAGNITUDE, "3")


def test_a_bias_that_is_too_large_once_scaled_is_refused(kit: Any) -> None:
    large = np.zeros(12, np.float32)
    large[5] = 3e38
    tensors = kit.pair() | {BIAS_B: kit.entry(large)}
    error = kit.refusal(tensors, kit.config(lora_bias=True), layout_of(kit), base_rows=Base(kit))
    assert (error.code, error.subject, error.found) == ("non-finite", BIAS_B, "5")


def test_an_untrained_dora_changes_nothing(kit: Any) -> None:
    base, config = Base(kit), kit.config(use_dora=True)
    dead = kit.pair() | {kit.key(0, "q_proj", "B"): kit.entry(np.zeros((12, 2)))}
    start = norms(kit, dead, base, 2.0).astype(np.float32)
    dead[MAGNITUDE] = kit.entry(start * np.float32(1.001))
    assert kit.refusal(dead, config, layout_of(kit), base_rows=base).code == "no-effect"
    dead[MAGNITUDE] = kit.entry(start * np.float32(1.1))
    assert kit.stage(dead, config, layout_of(kit), base_rows=base).report.pairs == 1


def test_a_fused_magnitude_is_split_by_rows(kit: Any) -> None:
    layout = layout_of(kit, dims=dataclasses.replace(kit.dims, q_out=10))
    stem = "base_model.model.model.layers.0.mlp.gate_up_proj."
    tensors = {
        stem + "lora_A.weight": kit.tensor((2, 8)),
        stem + "lora_B.weight": kit.tensor((12, 2), seed=1),
        stem + "lora_B.bias": kit.tensor((12,), seed=2),
    }
    config = kit.config(lora_bias=True, target_modules=["gate_up_proj"])
    image = kit.stage(tensors, config, layout).image
    gate, up = (layout.pair_index[0, m] for m in (LoraModule.GATE_PROJ, LoraModule.UP_PROJ))
    found = np.concatenate([vectors(layout, image, pair)[1] for pair in (gate, up)])
    np.testing.assert_array_equal(found, 2 * values(tensors[stem + "lora_B.bias"]))


def test_layers_pattern_names_the_list(kit: Any) -> None:
    for pattern in ("layers", ["h", "layers"], "model.layers", None, [], ""):
        config = kit.config(layers_to_transform=[0], layers_pattern=pattern)
        assert kit.stage(kit.pair(), config).report.pairs == 1
    for pattern in ("h", ["blocks"], "els.layers", "layers.0"):
        config = kit.config(layers_to_transform=[0], layers_pattern=pattern)
        error: RotaError = kit.refusal(kit.pair(), config)
        assert error.code in ("layers_pattern", "untargeted-tensor"), pattern


def test_the_pools_cells_point_at_the_vectors_and_go_with_the_adapter(kit: Any) -> None:
    layout = layout_of(kit)
    tensors = kit.pair(1) | {BIAS_B.replace("layers.0", "layers.1"): kit.tensor((12,), seed=9)}
    image = kit.stage(tensors, kit.config(lora_bias=True), layout).image
    device = HostDevice(checked=True)
    pool, stream = LoraPool(device, layout, 2), device.create_stream(label="test")

    def cells() -> list[list[int]]:
        out = np.empty((len(layout.pairs), 2), np.uint64)
        start = pool.affine_table(0)
        device.copy_d2h(int(out.ctypes.data), start, out.nbytes, stream)
        device.synchronize(stream)
        return out.tolist()

    def expected(slot: int) -> list[list[int]]:
        made = [[0, 0] for _ in layout.pairs]
        made[7][slot] = pool.slot_address(slot) + layout.affine_offsets[7]
        return made

    empty = [[0, 0] for _ in layout.pairs]
    assert cells() == empty
    pool.commit(1, image, stream)
    assert cells() == expected(1)
    assert pool.affine_table(7) == pool.affine_table(0) + 8 * 7 * 2
    pool.commit(1, kit.stage(kit.pair(1), layout=layout).image, stream)  # one without vectors
    assert cells() == empty
    pool.commit(0, image, stream)
    pool.retire(0, stream)
    assert cells() == empty
    device.destroy_stream(stream)
    pool.close()
    device.close()
