"""Factors of in_proj_q, k and v under keys of their own: one pair, or a refusal by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rota.gpu.lora.dims import LoraModule, ModelDims
from rota.gpu.lora.layout import Elem, SlotLayout

# One layer: q and k of 4 rows each, v of 12.
DIMS = ModelDims(1, 8, 24, 4, 12, 6, 16, False, (0,), 20, 12, 3)
HEIGHTS = {"q": 4, "k": 4, "v": 12}
TARGETS = [f"in_proj_{part}" for part in HEIGHTS]


def at(part: str, half: str) -> str:
    return f"base_model.model.model.layers.0.linear_attn.in_proj_{part}.lora_{half}.weight"


def factors(kit: Any, parts: str = "qkv", rank: int = 2, dtype: str = "F32") -> dict[str, Any]:
    made = {}
    for seed, part in enumerate(parts):
        made[at(part, "A")] = kit.tensor((rank, 8), dtype, seed)
        made[at(part, "B")] = kit.tensor((HEIGHTS[part], rank), dtype, 10 + seed)
    return made


def values(entry: Any) -> np.ndarray:
    return np.frombuffer(entry[2], np.float32).reshape(entry[1])


def layout(max_rank: int = 8) -> SlotLayout:
    return SlotLayout(DIMS, max_rank, Elem.F32)


@pytest.mark.parametrize("parts", ["qkv", "v", "qv"])
def test_the_pair_adds_to_each_part_what_its_own_factors_add(kit: Any, parts: str) -> None:
    tensors = factors(kit, parts)
    targets = [f"in_proj_{part}" for part in parts]
    staged = kit.stage(tensors, kit.config(target_modules=targets), layout())
    index = layout().pair_index[0, LoraModule.IN_PROJ_QKV]
    a, b = layout().pair_views(staged.image.buffer, index)
    expected = np.zeros((20, 8), np.float32)
    row = 0
    for part, height in HEIGHTS.items():
        if part in parts:
            factor_a, factor_b = values(tensors[at(part, "A")]), values(tensors[at(part, "B")])
            expected[row : row + height] = factor_b @ factor_a
        row += height
    assert np.array_equal(b @ a, expected)
    assert staged.image.ranks[index] == 2 * len(parts)
    assert staged.image.scales[index] == 2.0 and staged.report.pairs == 1


@pytest.mark.parametrize("patterns", [{}, {"rank_pattern": {"in_proj_v": 2}}])
def test_ranks_and_scales_are_those_of_the_parts(kit: Any, patterns: dict[str, Any]) -> None:
    config = kit.config(target_modules=TARGETS, **patterns)
    staged = kit.stage(factors(kit), config, layout())
    assert max(staged.image.ranks) == 6


def test_refusals_of_split_inputs(kit: Any) -> None:
    tensors = factors(kit)

    def refusal(found: dict[str, Any], slot: SlotLayout | None = None, **fields: Any) -> Any:
        fields = {"target_modules": TARGETS} | fields
        return kit.refusal(found, kit.config(**fields), slot or layout())

    found = refusal({k: v for k, v in tensors.items() if k != at("k", "B")})
    assert (found.code, found.subject) == ("unpaired-tensor", at("k", "A"))
    found = refusal(tensors | {at("v", "B"): kit.tensor((11, 2))})
    assert (found.code, found.subject) == ("shape-mismatch", at("v", "B"))
    found = refusal(tensors, layout(5))
    assert (found.code, found.found) == ("gdn-fused-rank-exceeds-pool", "6")
    found = refusal(tensors, alpha_pattern={"in_proj_v": 8})
    assert (found.code, found.found) == ("lora_alpha", "2 4")
    found = refusal(tensors | {at("q", "A"): kit.tensor((2, 8), "F16")})
    assert found.code == "unsupported-dtype"
    found = refusal(tensors, target_modules=["in_proj_q", "in_proj_k"])
    assert found.code == "untargeted-tensor"
    found = refusal(factors(kit, "qk"))
    assert (found.code, found.subject) == ("unmatched-target", "in_proj_v")
    whole = at("qkv", "A"), at("qkv", "B")
    both = tensors | {whole[0]: kit.tensor((2, 8)), whole[1]: kit.tensor((20, 2))}
    found = refusal(both, target_modules=[*TARGETS, "in_proj_qkv"])
    assert found.code == "duplicate-tensor"
    magnitude = at("q", "A").replace("lora_A.weight", "lora_magnitude_vector")
    found = refusal(tensors | {magnitude: kit.tensor((4,))})
    assert (found.code, found.subject) == ("unsupported-module", magnitude)
    dense = dataclasses.replace(DIMS, linear_layers=(), gdn_channels=0, gdn_value=0, gdn_heads=0)
    assert refusal(tensors, SlotLayout(dense, 8)).code == "gdn"
    found = refusal(tensors, SlotLayout(dense, 8), target_modules=".*")
    assert found.code == "gdn-target"
