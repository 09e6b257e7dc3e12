"""Expert factors: every layout gives the same pairs, and refusals name what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from rota.errors import RejectError
from rota.gpu.lora.dims import LoraModule
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.source import BytesSource, DirectorySource
from rota.gpu.lora.stage import StagedAdapter, stage
from rota.gpu.model.config import load_config

Tensors = dict[str, torch.Tensor]
E, R, H, I = 8, 2, 48, 16  # noqa: E741  # the names the formula has


@pytest.fixture(scope="module")
def root(data_dir: Path) -> Path:
    return data_dir / "oracle" / "qwen35_moe"


@pytest.fixture(scope="module")
def layout(root: Path) -> SlotLayout:
    dims = load_config(root / "base").to_lora_dims(expert_adapters=True)
    return SlotLayout(dims, 8, Elem.F32)


def read(root: Path, case: str) -> tuple[Tensors, dict[str, Any]]:
    folder = root / "adapters" / case
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def staged(tensors: Tensors, config: dict[str, Any], layout: SlotLayout) -> StagedAdapter:
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return stage(BytesSource(save(made), json.dumps(config).encode()), layout)


def test_fused_factors_become_a_pair_an_expert(root: Path, layout: SlotLayout) -> None:
    tensors, _ = read(root, "experts")
    found = stage(DirectorySource(root / "adapters" / "experts"), layout)
    assert found.report.by_module == {
        "expert_gate_proj": 4 * E,
        "expert_up_proj": 4 * E,
        "expert_down_proj": 4 * E,
    }
    at = "base_model.model.model.layers.2.mlp.experts."
    a = tensors[at + "base_layer.lora_A.weight"].reshape(E, R, H)
    b = tensors[at + "base_layer.lora_B.weight"].reshape(2 * I, R, E)
    for module, rows in (
        (LoraModule.EXPERT_GATE_PROJ, slice(0, I)),
        (LoraModule.EXPERT_UP_PROJ, slice(I, 2 * I)),
    ):
        for expert in range(E):
            pair = layout.pair_index[2, module] + expert
            left, right = layout.pair_views(found.image.buffer, pair, found.image.annex)
            assert np.array_equal(left[:R], a[expert].numpy()) and not left[R:].any()
            assert np.array_equal(right[:, :R], b[rows, :, expert].numpy())
            assert found.image.present[pair] and found.image.scales[pair] == 2.0


def swap(tensors: Tensors) -> Tensors:
    """As PEFT before 0.19.1 wrote it: in and out of both parameters exchanged."""
    made = dict(tensors)
    for key in tensors:
        if key.endswith("lora_A.weight"):
            other = key.replace("lora_A", "lora_B")
            a = tensors[key].reshape(E, R, -1)
            b = tensors[other].reshape(-1, R, E)
            made[key] = b.permute(2, 1, 0).reshape(E * R, -1)
            made[other] = a.permute(2, 1, 0).reshape(-1, R * E)
    return made


def one_by_one(tensors: Tensors) -> Tensors:
    """Each expert's modules under their own keys, as other trainers write them."""
    made: Tensors = {}
    for key, a in tensors.items():
        if not key.endswith("lora_A.weight"):
            continue
        at = key.split("base_layer")[0].split("lora_A")[0]
        b = tensors[key.replace("lora_A", "lora_B")].reshape(-1, R, E)
        rows = {"down": slice(0, H)}
        if "base_layer" in key:
            rows = {"gate": slice(0, I), "up": slice(I, 2 * I)}
        for expert in range(E):
            for name, part in rows.items():
                where = f"{at}{expert}.{name}_proj.lora_"
                made[where + "A.weight"] = a.reshape(E, R, -1)[expert].clone()
                made[where + "B.weight"] = b[part, :, expert].clone()
    return made


def stacked(tensors: Tensors) -> Tensors:
    """3-D tensors under the parameter's own name, as Megatron-Bridge writes them."""
    made: Tensors = {}
    for key, value in tensors.items():
        name = "gate_up_proj" if "base_layer" in key else "down_proj"
        at = key.split("base_layer")[0].split("lora_")[0]
        if "lora_A" in key:
            made[f"{at}{name}.lora_A.weight"] = value.reshape(E, R, -1)
        else:
            made[f"{at}{name}.lora_B.weight"] = value.reshape(-1, R, E).permute(2, 0, 1)
    return made


def switch_mlp(tensors: Tensors) -> Tensors:
    """Each module of all experts in a 3-D tensor, under mlx-lm's name for the block."""
    made: Tensors = {}
    for key, value in stacked(tensors).items():
        key = key.replace("mlp.experts", "mlp.switch_mlp")
        if "gate_up" not in key:
            made[key] = value
            continue
        for name, rows in (("gate", slice(0, I)), ("up", slice(I, 2 * I))):
            part = value if "lora_A" in key else value[:, rows]
            made[key.replace("gate_up", name)] = part.clone()
    return made


@pytest.mark.parametrize("change", [swap, one_by_one, stacked, switch_mlp])
def test_other_layouts_give_the_same_image(
    root: Path, layout: SlotLayout, change: Callable[[Tensors], Tensors]
) -> None:
    tensors, config = read(root, "experts")
    expected = staged(tensors, config, layout)
    if change is not swap:
        names = ["gate_proj", "up_proj", "down_proj"]
        config |= {"target_parameters": None, "target_modules": names}
    found = staged(change(tensors), config, layout)
    assert np.array_equal(found.image.buffer, expected.image.buffer)
    assert np.array_equal(found.image.scales, expected.image.scales)


def refusal(tensors: Tensors, config: dict[str, Any], layout: SlotLayout) -> RejectError:
    with pytest.raises(RejectError) as caught:
        staged(tensors, config, layout)
    return caught.value


def test_without_room_the_bytes_it_needs_are_named(root: Path) -> None:
    plain = SlotLayout(load_config(root / "base").to_lora_dims(), 8, Elem.F32)
    wide = SlotLayout(load_config(root / "base").to_lora_dims(expert_adapters=True), 8, Elem.F32)
    found = refusal(*read(root, "experts"), plain)
    assert found.code == "expert-lora-no-room"
    assert found.expected is not None
    assert wide.slot_bytes == plain.slot_bytes and wide.max_annex_bytes > 0
    assert f"takes up to {wide.max_annex_bytes} bytes of the arena" in found.expected
    # The router and everything else of the same model need no such room.
    assert stage(DirectorySource(root / "adapters" / "router"), plain).report.pairs == 4


def test_a_factor_common_to_all_experts(root: Path, layout: SlotLayout) -> None:
    tensors, config = read(root, "experts")
    key = "base_model.model.model.layers.1.mlp.experts.down_proj.lora_A.weight"
    made = stacked(tensors)
    shared = made | {key: made[key][3:4].clone()}
    every = made | {key: made[key][3:4].expand(E, R, I).clone()}
    found, expected = staged(shared, config, layout), staged(every, config, layout)
    assert np.array_equal(found.image.buffer, expected.image.buffer)
    error = refusal(made | {key: made[key][:2].clone()}, config, layout)
    assert (error.code, error.subject) == ("shape-mismatch", key)
    error = refusal({k: v for k, v in made.items() if k != key}, config, layout)
    assert (error.code, error.subject) == ("unpaired-tensor", key.replace("lora_A", "lora_B"))
    error = refusal(made, config | {"target_parameters": ["mlp.experts.down_proj"]}, layout)
    assert error.code == "untargeted-tensor"


def test_mlx_writes_the_same_under_its_own_names(root: Path, layout: SlotLayout) -> None:
    tensors, config = read(root, "experts")
    expected = staged(tensors, config, layout)
    made = {
        key.removeprefix("base_model.model.")
        .replace("lora_A.weight", "lora_a")
        .replace("lora_B.weight", "lora_b"): value
        for key, value in switch_mlp(tensors).items()
    }
    keys = [f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
    scale = {"rank": R, "scale": config["lora_alpha"] / R, "keys": keys}
    found = staged(made, {"fine_tune_type": "lora", "lora_parameters": scale}, layout)
    assert np.array_equal(found.image.buffer, expected.image.buffer)
    assert np.array_equal(found.image.scales, expected.image.scales)


def test_dora_of_experts_is_refused_by_name(root: Path, layout: SlotLayout) -> None:
    tensors, config = read(root, "experts")
    key = "base_model.model.model.layers.1.mlp.experts.lora_magnitude_vector"
    found = refusal(tensors | {key: torch.ones(H)}, config | {"use_dora": True}, layout)
    assert (found.code, found.subject) == ("unsupported-module", key)


def test_experts_may_have_less_rank_than_the_rest(root: Path) -> None:
    tensors, config = read(root, "experts_router_attn")
    dims = load_config(root / "base").to_lora_dims(expert_adapters=True)
    full, low = SlotLayout(dims, 64, Elem.F32), SlotLayout(dims, 64, Elem.F32, expert_rank=2)
    saved = 4 * 3 * E * (H + I) * (64 - 8) * 4
    assert full.max_annex_bytes - low.max_annex_bytes == saved
    wide, narrow = staged(tensors, config, full), staged(tensors, config, low)
    for pair, there in enumerate(wide.image.present):
        if there:
            views = zip(
                full.pair_views(wide.image.buffer, pair, wide.image.annex),
                low.pair_views(narrow.image.buffer, pair, narrow.image.annex),
                strict=True,
            )
            (a, other_a), (b, other_b) = views
            assert np.array_equal(a[:8], other_a[:8]) and np.array_equal(b[:, :8], other_b[:, :8])
    found = refusal(tensors, config, SlotLayout(dims, 64, Elem.F32, expert_rank=1))
    assert (found.code, found.found) == ("expert-lora-no-room", "max_expert_rank 1")
    assert "max_expert_rank of at least 2, which takes up to 0 bytes more" in str(found.expected)


def test_refusals_of_expert_factors(root: Path, layout: SlotLayout) -> None:
    tensors, config = read(root, "experts")
    key = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"
    found = refusal({k: v for k, v in tensors.items() if k != key}, config, layout)
    assert (found.code, found.subject) == ("unpaired-tensor", key.replace("lora_A", "lora_B"))
    found = refusal(tensors | {key: torch.ones(E * R, I + 1)}, config, layout)
    assert (found.code, found.subject) == ("shape-mismatch", key)
    found = refusal(tensors, config | {"target_parameters": ["mlp.gate.weight"]}, layout)
    assert (found.code, found.found) == ("target_parameters", "mlp.gate.weight")
    wrong = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    found = refusal(tensors, config | {"target_parameters": wrong}, layout)
    assert (found.code, found.subject) == ("unmatched-target", "mlp.gate.weight")
    found = refusal(tensors, config | {"r": 3}, layout)
    assert found.code == "shape-mismatch"


@pytest.mark.parametrize(
    ("version", "swapped"), [("0.21.2", False), ("0.19.1", False), ("0.19.0", True)]
)
def test_shapes_that_fit_both_layouts_are_told_by_the_version(
    root: Path, layout: SlotLayout, version: str, swapped: bool
) -> None:
    dims = dataclasses.replace(layout.dims, hidden=2 * I)
    square = SlotLayout(dims, 8, Elem.F32)
    _, config = read(root, "experts_down_only")
    config |= {"target_parameters": ["mlp.experts.gate_up_proj"], "peft_version": version}
    at = "base_model.model.model.layers.1.mlp.experts.lora_"
    tensors = {
        at + "A.weight": torch.randn(E * R, 2 * I, generator=torch.Generator().manual_seed(1)),
        at + "B.weight": torch.randn(2 * I, R * E, generator=torch.Generator().manual_seed(2)),
    }
    found = staged(tensors, config, square)
    a = tensors[at + "A.weight"].reshape(E, R, -1)
    b = tensors[at + "B.weight"].reshape(-1, R, E)
    for expert in (0, E - 1):
        delta = b[:, :, expert] @ a[expert]
        delta = delta.T if swapped else delta
        pair = square.pair_index[1, LoraModule.EXPERT_GATE_PROJ] + expert
        left, right = square.pair_views(found.image.buffer, pair, found.image.annex)
        np.testing.assert_allclose(right @ left, delta[:I].numpy(), rtol=1e-5, atol=1e-5)
    error = refusal(tensors, config | {"peft_version": None}, square)
    assert (error.code, error.expected) == ("target_parameters", "peft_version in the config")
