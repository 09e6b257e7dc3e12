"""mlx-lm adapters: the same image as the same factors in PEFT's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.gpu.lora.layout import Elem
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage


def mlx_config(**fields: Any) -> bytes:
    parameters = {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    parameters |= fields.pop("lora_parameters", {})
    made = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    return json.dumps(made | fields).encode()


def transposed(kit: Any, tensors: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    made = {}
    for key, (dtype, shape, raw) in tensors.items():
        size = np.float32 if dtype == "F32" else np.uint16
        values = np.frombuffer(raw, size).reshape(shape).T
        name = prefix + key.removeprefix("base_model.model.")
        name = name.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")
        made[name] = (dtype, values.shape, np.ascontiguousarray(values).tobytes())
    return made


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("elem", Elem)
def test_the_same_image(kit: Any, tmp_path: Path, dtype: str, elem: Elem) -> None:
    layout, tensors = kit.layout(elem=elem), kit.pair(dtype=dtype) | kit.pair(1, dtype=dtype)
    plain = kit.stage(tensors, layout=layout)
    (tmp_path / "adapters.safetensors").write_bytes(kit.file(transposed(kit, tensors)))
    (tmp_path / "adapter_config.json").write_bytes(mlx_config())
    found = stage(DirectorySource(tmp_path), layout)
    assert found.image.buffer.tobytes() == plain.image.buffer.tobytes()
    assert found.image.scales.tolist() == plain.image.scales.tolist()
    assert any("mlx-lm" in note for note in found.report.notes)
    wrapped = transposed(kit, tensors, "language_model.")
    assert kit.stage(wrapped, mlx_config(), layout).image.present == plain.image.present


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type"),
        ({"lora_parameters": {"rank": 2.0}}, "rank"),
        ({"lora_parameters": {"scale": None}}, "scale"),
    ],
)
def test_refused_configs(kit: Any, fields: dict[str, Any], subject: str) -> None:
    error = kit.refusal(transposed(kit, kit.pair()), mlx_config(**fields))
    assert (error.code, error.subject) == ("mlx-adapter", subject)
    assert kit.refusal({}, b'{"lora_parameters": [8]}').code == "mlx-adapter"


def test_nothing_is_left_over(kit: Any) -> None:
    tensors = transposed(kit, kit.pair())
    for key in ("model.embed_tokens.lora_a", "lm_head.lora_b", "model.layers.0.mlp.x.lora_a"):
        assert kit.refusal(tensors | {key: kit.tensor((8, 2))}, mlx_config()).code != "no-effect"
    head = tensors.copy()
    first = next(iter(head))
    head[first] = kit.tensor((2, 8))  # not transposed
    assert kit.refusal(head, mlx_config()).code == "shape-mismatch"
    none = kit.refusal(tensors, mlx_config(lora_parameters={"scale": 0}))
    assert none.code == "lora_alpha"
