"""Adapters that went wrong elsewhere, by what their owners saw: loaded, and yet not at work.

Each case must end in one of two ways: every tensor is in the image, or a refusal names the fault.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rota.gpu.lora.dims import LoraModule
from rota.gpu.lora.layout import Elem

PLAIN = "base_model.model.model."
WRAPPED = "base_model.model.model.language_model."


def same_image(one: Any, two: Any) -> None:
    assert one.image.buffer.tobytes() == two.image.buffer.tobytes()
    assert one.image.present == two.image.present
    np.testing.assert_array_equal(one.image.scales, two.image.scales)


def renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    assert all(old in key for key in tensors)
    return {key.replace(old, new): entry for key, entry in tensors.items()}


# "It loads, and the answers are the base model's to the byte."


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layers.", "blocks."),
        ("self_attn", "attention"),
        ("q_proj", "query"),
        (PLAIN, "base_model.model.transformer."),
        (PLAIN, "base_model.model.model.vision_tower."),
    ],
)
def test_names_that_match_no_module(kit: Any, old: str, new: str) -> None:
    strange = renamed(kit.pair(), old, new)
    for tensors in (strange, kit.pair(1) | strange):  # also when other names do match
        error = kit.refusal(tensors, kit.config(target_modules=None))
        assert error.subject in strange, error


def test_two_spellings_of_the_prefix_in_one_file(kit: Any) -> None:
    plain = kit.pair(0) | kit.pair(1)
    mixed = kit.pair(0) | renamed(kit.pair(1), PLAIN, WRAPPED)
    same_image(kit.stage(plain), kit.stage(mixed))
    assert kit.stage(mixed).report.pairs == 2


def test_targets_another_model_has(kit: Any) -> None:
    error = kit.refusal(kit.pair(), kit.config(target_modules=["c_attn", "c_proj"]))
    assert error.subject in ("c_attn", "c_proj")


@pytest.mark.parametrize("alpha", [..., None, 0, 0.0, "16", float("nan")])
def test_an_alpha_that_would_switch_it_off(kit: Any, alpha: Any) -> None:
    assert kit.refusal(kit.pair(), kit.config(lora_alpha=alpha)).code == "lora_alpha"


def test_an_alpha_that_is_no_whole_number(kit: Any) -> None:
    assert kit.stage(kit.pair(), kit.config(lora_alpha=16.5)).image.scales[0] == np.float32(8.25)


# "The keys have an adapter's name or a part of one in them."


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".lora_", ".lora_lora_"),
        (".lora_", ".lora.lora_"),
        (".lora_", "."),
        ("q_proj.", "q_proj.q_proj."),
    ],
)
def test_segments_doubled_or_lost(kit: Any, old: str, new: str) -> None:
    strange = renamed(kit.pair(), old, new)
    assert kit.refusal(strange).subject in strange


def test_an_adapter_called_lora(kit: Any) -> None:
    named = {key.removesuffix("weight") + "lora.weight": entry for key, entry in kit.pair().items()}
    same_image(kit.stage(kit.pair()), kit.stage(named))


# "The strength is wrong: ranks and alphas differ by module."


def test_ranks_by_module_from_names_and_expressions(kit: Any) -> None:
    tensors = kit.pair(0, rank=2) | kit.pair(1, rank=5)
    for pattern in ("layers.1.*q_proj", r"model\.layers\.1\.self_attn\.q_proj", r".*\.1\..*"):
        image = kit.stage(tensors, kit.config(rank_pattern={pattern: 5})).image
        found = [float(s) for s, there in zip(image.scales, image.present, strict=True) if there]
        assert found == [2.0, float(np.float32(4 / 5))], pattern
    assert kit.refusal(tensors, kit.config()).code == "rank-mismatch"


# "Targets given as an expression become a list of letters."


@pytest.mark.parametrize("targets", ["all-linear", r".*(q|v)_proj$", None, ["q_proj", "v_proj"]])
def test_every_form_of_targets_gives_the_same_image(kit: Any, targets: Any) -> None:
    tensors = kit.pair(0) | kit.pair(1, "v_proj")
    plain = kit.stage(tensors, kit.config(target_modules=["q_proj", "v_proj"]))
    same_image(plain, kit.stage(tensors, kit.config(target_modules=targets)))


def test_targets_that_are_letters_or_none(kit: Any) -> None:
    letters = kit.refusal(kit.pair(), kit.config(target_modules=list(".*q_proj")))
    assert letters.code in ("unknown_module", "unmatched-target")
    assert kit.refusal(kit.pair(), kit.config(target_modules=[])).code == "target_modules"


@pytest.mark.parametrize("target", ["mlp.gate_proj", "layers.0.mlp.gate_proj"])
def test_targets_with_their_parents_name(kit: Any, target: str) -> None:
    tensors = kit.pair(0, "gate_proj")
    plain = kit.stage(tensors, kit.config(target_modules=["gate_proj"]))
    same_image(plain, kit.stage(tensors, kit.config(target_modules=[target])))
    wrong = kit.config(target_modules=["feed_forward.gate_proj"])
    assert kit.refusal(tensors, wrong).code == "untargeted-tensor"


# "Trained on a model whose projections are fused."


@pytest.mark.parametrize(
    ("leaf", "parent", "names"),
    [
        ("qkv_proj", "self_attn", ["q_proj", "k_proj", "v_proj"]),
        ("gate_up_proj", "mlp", ["gate_proj", "up_proj"]),
    ],
)
def test_fused_projections_are_the_split_ones(
    kit: Any, leaf: str, parent: str, names: list[str]
) -> None:
    layout = kit.layout(dims=dataclasses.replace(kit.dims, q_out=10))
    a, stem = kit.tensor((2, 8)), f"{PLAIN}layers.0.{parent}."
    heights = [layout.dims.shape(LoraModule[name.upper()])[0] for name in names]
    parts = [kit.tensor((height, 2), seed=n) for n, height in enumerate(heights)]
    split = {}
    for name, part in zip(names, parts, strict=True):
        split |= {f"{stem}{name}.lora_A.weight": a, f"{stem}{name}.lora_B.weight": part}
    whole = ("F32", (sum(heights), 2), b"".join(part[2] for part in parts))
    fused = {f"{stem}{leaf}.lora_A.weight": a, f"{stem}{leaf}.lora_B.weight": whole}
    one = kit.stage(split, kit.config(target_modules=names), layout)
    two = kit.stage(fused, kit.config(target_modules=[leaf]), layout)
    same_image(one, two)
    assert two.report.pairs == len(names)
    # Both spellings of one place, a row too few, and a dead A.
    both = kit.refusal(split | fused, kit.config(target_modules=None), layout)
    assert both.code == "duplicate-tensor"
    short = fused | {f"{stem}{leaf}.lora_B.weight": kit.tensor((sum(heights) - 1, 2))}
    assert kit.refusal(short, kit.config(target_modules=[leaf]), layout).code == "shape-mismatch"
    dead = fused | {f"{stem}{leaf}.lora_A.weight": kit.entry(np.zeros((2, 8)))}
    assert kit.refusal(dead, kit.config(target_modules=[leaf]), layout).code == "no-effect"


# "Garbage from a file whose numbers are wider than expected."


@pytest.mark.parametrize("elem", Elem)
def test_number_formats_mixed_in_one_file(kit: Any, elem: Elem) -> None:
    layout, config = kit.layout(elem=elem), kit.config(target_modules=["q_proj", "up_proj"])

    def tensors(*dtypes: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for place, (layer, leaf) in enumerate([(0, "q_proj"), (1, "q_proj"), (0, "up_proj")]):
            made |= kit.pair(layer, leaf, dtype=dtypes[place])
        return made

    plain = kit.stage(tensors("F32", "F32", "F32"), config, layout)
    same_image(plain, kit.stage(tensors("BF16", "F16", "F32"), config, layout))
    halves = tensors("F32", "F32", "F32") | {
        key: entry for key, entry in tensors("F16", "F16", "F16").items() if ".lora_B." in key
    }
    same_image(plain, kit.stage(halves, config, layout))
