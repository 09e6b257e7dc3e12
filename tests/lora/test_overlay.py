"""The token overlay: which rows are replaced, tied and untied, and what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rota.errors import InternalError
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage

DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD_DELTA = "base_model.model.lm_head.token_adapter.trainable_tokens_delta"
EMBED = "base_model.model.model.embed_tokens.weight"
HEAD = "base_model.model.lm_head.weight"


class Base:
    """Base matrices ``[16, 8]`` that BF16 holds exactly."""

    def __init__(self, kit: Any, tied: bool = False) -> None:
        self._embed = values(kit.tensor((16, 8), seed=7))
        self._head = self._embed if tied else values(kit.tensor((16, 8), seed=8))

    def embed(self) -> np.ndarray:
        return self._embed

    def head(self) -> np.ndarray:
        return self._head


def values(entry: Any) -> np.ndarray:
    return np.frombuffer(entry[2], np.float32).reshape(entry[1])


def overlay_of(layout: SlotLayout, image: Any) -> dict[str, np.ndarray]:
    """The four arrays of the overlay; rows as float32."""
    found = {}
    for name, start in dataclasses.asdict(image.annex.overlay).items():
        rows = image.embed_rows if name.startswith("embed") else image.head_rows
        if name.endswith("ids"):
            found[name] = image.buffer[start:][: 4 * rows].view(np.int32)
        else:
            count = rows * layout.dims.hidden
            raw = image.buffer[start:][: count * layout.elem.size].view(layout.elem.numpy)
            wide = raw if layout.elem is Elem.F32 else (raw.astype(np.uint32) << 16)
            found[name] = wide.view(np.float32).reshape(-1, layout.dims.hidden)
    return found


def layout_of(kit: Any, rows: int = 6, tied: bool = False, elem: Elem = Elem.BF16) -> SlotLayout:
    dims = dataclasses.replace(kit.dims, tied=tied)
    return SlotLayout(dims, 8, elem, overlay_rows=rows)


@pytest.mark.parametrize("elem", Elem)
@pytest.mark.parametrize("tied", [False, True])
def test_rows_replace_in_the_order_of_the_config(kit: Any, tied: bool, elem: Elem) -> None:
    layout, delta = layout_of(kit, tied=tied, elem=elem), kit.tensor((3, 8))
    config = kit.config(trainable_token_indices=[9, 2, 15])
    image = kit.stage(kit.pair() | {DELTA: delta}, config, layout).image
    found = overlay_of(layout, image)
    assert found["embed_ids"].tolist() == [2, 9, 15]
    np.testing.assert_array_equal(found["embed_rows"][:3], values(delta)[[1, 0, 2]])
    assert (image.embed_rows, image.head_rows) == (3, 3 if tied else 0)
    if tied:
        assert found["head_ids"].tolist() == found["embed_ids"].tolist()
        np.testing.assert_array_equal(found["head_rows"], found["embed_rows"])
    else:
        assert not len(found["head_ids"]) and not len(found["head_rows"])


def test_no_annex_without_an_overlay(kit: Any) -> None:
    image = kit.stage(kit.pair(), layout=layout_of(kit)).image
    assert image.annex is None and image.annex_bytes == 0
    assert (image.embed_rows, image.head_rows) == (0, 0)


def test_rows_without_any_pair(kit: Any) -> None:
    config = kit.config(target_modules=None, trainable_token_indices={"embed_tokens": [1]})
    staged = kit.stage({DELTA: kit.tensor((1, 8))}, config, layout_of(kit))
    assert (staged.report.pairs, staged.report.embed_rows) == (0, 1)


def test_separate_rows_for_an_untied_head(kit: Any) -> None:
    layout = layout_of(kit)
    config = kit.config(trainable_token_indices={"embed_tokens": [1], "lm_head": [3, 2]})
    embed, head = kit.tensor((1, 8)), kit.tensor((2, 8))
    image = kit.stage(kit.pair() | {DELTA: embed, HEAD_DELTA: head}, config, layout).image
    found = overlay_of(layout, image)
    assert found["embed_ids"][:1].tolist() == [1] and found["head_ids"][:2].tolist() == [2, 3]
    np.testing.assert_array_equal(found["head_rows"][:2], values(head)[::-1])
    tied = layout_of(kit, tied=True)
    error = kit.refusal(kit.pair() | {DELTA: embed, HEAD_DELTA: head}, config, tied)
    assert error.code == "overlay-conflict"


@pytest.mark.parametrize("base_dtype", ["F32", "BF16"])
def test_whole_matrices_keep_only_rows_that_differ(kit: Any, base_dtype: str) -> None:
    layout, base = layout_of(kit), Base(kit)
    embed, head = base.embed().copy(), base.head().copy()
    embed[[3, 11]] += 1
    head[0, 5] = 9
    config = kit.config(modules_to_save=["lm_head", "embed_tokens"])
    tensors = kit.pair() | {EMBED: kit.entry(embed), HEAD: kit.entry(head)}
    if base_dtype == "BF16":
        for name in ("_embed", "_head"):
            raw = np.frombuffer(kit.entry(getattr(base, name), "BF16")[2], np.uint16)
            setattr(base, name, raw.reshape(16, 8))
    image = kit.stage(tensors, config, layout, base_rows=base).image
    found = overlay_of(layout, image)
    assert found["embed_ids"].tolist() == [3, 11]
    assert found["head_ids"].tolist() == [0]
    np.testing.assert_array_equal(found["embed_rows"][:2], embed[[3, 11]])
    np.testing.assert_array_equal(found["head_rows"][0], head[0])


def test_a_tied_head_keeps_the_base_unless_tying_is_ensured(kit: Any) -> None:
    layout, base = layout_of(kit, tied=True), Base(kit, tied=True)
    embed = base.embed().copy()
    embed[4] = 1
    tensors = kit.pair() | {EMBED: kit.entry(embed)}
    config = kit.config(modules_to_save=["embed_tokens"])
    image = kit.stage(tensors, config, layout, base_rows=base).image
    assert (image.embed_rows, image.head_rows) == (1, 0)
    ensured = {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]}
    image = kit.stage(tensors, kit.config(**ensured), layout, base_rows=base).image
    assert (image.embed_rows, image.head_rows) == (1, 1)
    both = tensors | {HEAD: kit.entry(embed)}
    image = kit.stage(both, kit.config(**ensured), layout, base_rows=base).image
    assert (image.embed_rows, image.head_rows) == (1, 1)


def test_unchanged_matrices_are_no_overlay(kit: Any) -> None:
    base = Base(kit)
    config = kit.config(modules_to_save=["embed_tokens"], target_modules=None)
    error = kit.refusal({EMBED: kit.entry(base.embed())}, config, layout_of(kit), base_rows=base)
    assert error.code == "no-effect"


@pytest.mark.parametrize("shape", [(2, 8), (4, 8), (3, 7), (3,), (3, 8, 1)])
def test_row_shapes(kit: Any, shape: tuple[int, ...]) -> None:
    config = kit.config(trainable_token_indices=[1, 2, 3])
    error = kit.refusal(kit.pair() | {DELTA: kit.tensor(shape)}, config, layout_of(kit))
    assert (error.code, error.subject) == ("overlay-shape", DELTA)


@pytest.mark.parametrize(
    ("shape", "code"),
    [((15, 8), "overlay-shape"), ((17, 8), "vocab-exceeds-base"), ((17, 9), "overlay-shape")],
)
def test_matrix_shapes(kit: Any, shape: tuple[int, ...], code: str) -> None:
    config = kit.config(modules_to_save=["embed_tokens"])
    tensors = kit.pair() | {EMBED: kit.tensor(shape)}
    assert kit.refusal(tensors, config, layout_of(kit), base_rows=Base(kit)).code == code


def test_token_outside_the_vocabulary(kit: Any) -> None:
    config = kit.config(trainable_token_indices=[1, 16])
    error = kit.refusal(kit.pair() | {DELTA: kit.tensor((2, 8))}, config, layout_of(kit))
    assert (error.code, error.expected, error.found) == (
        "trainable-index-out-of-range",
        "0..15",
        "16",
    )


def test_config_and_tensors_must_agree(kit: Any) -> None:
    layout, base = layout_of(kit), Base(kit)
    matrix, row = kit.tensor((16, 8)), kit.tensor((1, 8))
    for extra, fields, code in (
        ({DELTA: row}, {}, "untargeted-tensor"),
        ({EMBED: matrix}, {}, "untargeted-tensor"),
        ({HEAD: matrix}, {"modules_to_save": ["embed_tokens"]}, "overlay-delta-missing"),
        ({}, {"modules_to_save": ["lm_head"]}, "overlay-delta-missing"),
        ({}, {"trainable_token_indices": [1]}, "overlay-delta-missing"),
        (
            {EMBED: matrix, DELTA: row},
            {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [1]},
            "overlay-conflict",
        ),
    ):
        error = kit.refusal(kit.pair() | extra, kit.config(**fields), layout, base_rows=base)
        assert error.code == code, fields


def test_no_base_beside_it(kit: Any) -> None:
    config = kit.config(modules_to_save=["lm_head"])
    error = kit.refusal(kit.pair() | {HEAD: kit.tensor((16, 8))}, config, layout_of(kit))
    assert (error.code, error.subject) == ("overlay-no-base", HEAD)


@pytest.mark.parametrize("rows", [0, 2])
def test_more_rows_than_a_slot_holds(kit: Any, rows: int) -> None:
    config = kit.config(trainable_token_indices=[1, 2, 3])
    small, enough = layout_of(kit, rows), layout_of(kit, 3)
    error = kit.refusal(kit.pair() | {DELTA: kit.tensor((3, 8))}, config, small)
    need = enough.overlay_bytes(3)
    assert need <= enough.max_annex_bytes < need + 256
    assert (error.code, error.expected, error.found) == (
        "overlay-exceeds-pool",
        f"at most {rows} rows; 3 take {need} bytes of the arena",
        "3",
    )


def test_a_base_of_another_shape_is_a_bug_of_the_caller(kit: Any) -> None:
    base = Base(kit)
    base._embed = base._embed[:5]
    config = kit.config(modules_to_save=["embed_tokens"])
    with pytest.raises(InternalError):
        kit.stage(kit.pair() | {EMBED: kit.tensor((16, 8))}, config, layout_of(kit), base_rows=base)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_overlay_values_must_be_finite(kit: Any, value: float) -> None:
    config = kit.config(trainable_token_indices=[1])
    row = np.ones((1, 8), np.float32)
    row[0, 7] = value
    error = kit.refusal(kit.pair() | {DELTA: kit.entry(row)}, config, layout_of(kit))
    assert (error.code, error.subject) == ("non-finite", DELTA)


def test_tied_oracle_rows(kit: Any) -> None:
    root = kit.root / "tests/data/oracle/qwen3"
    layout = SlotLayout(kit.model_dims(root / "base"), 8, Elem.F32, overlay_rows=4)
    image = stage(DirectorySource(root / "adapters/tokens_tied"), layout).image
    found = overlay_of(layout, image)
    assert found["embed_ids"].tolist() == found["head_ids"].tolist() == [3, 17, 42]
    from safetensors.numpy import load_file

    delta = load_file(root / "adapters/tokens_tied/adapter_model.safetensors")[DELTA]
    np.testing.assert_array_equal(found["embed_rows"][:3], delta)
    np.testing.assert_array_equal(found["head_rows"][:3], delta)
