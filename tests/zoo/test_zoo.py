"""Every adapter of the zoo: refused under its code, or served as PEFT answers, alone and mixed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rota.errors import RejectError
from rota.gpu.lora.keys import PairKey, classify
from rota.gpu.lora.layout import SlotLayout
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.config import load_config

ZOO = Path(__file__).resolve().parent
DTYPES = ["float32", "bfloat16"]
FAMILIES = ["llama", "qwen2", "qwen3_next", "qwen3_next_v4", "qwen35"]
FP32_RELATIVE = 1e-4
BF16_RMS = 0.05
NEAR_TIE = 0.02
HYBRID_RMS = 3.0
"""Of the error PEFT's own bfloat16 has, where states drift and a router may choose another
expert."""


def entries() -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for manifest in sorted(ZOO.glob("*/zoo.json")):
        listed = json.loads(manifest.read_text())["adapters"]
        found += [(manifest.parent.name, name, facts) for name, facts in sorted(listed.items())]
    return found


ALL = entries()
ACCEPTED = [(family, name) for family, name, facts in ALL if "refused" not in facts]
REFUSED = [(family, name, facts["refused"]) for family, name, facts in ALL if "refused" in facts]


def oracle_of(family: str, name: str) -> str:
    facts = next(f for fam, n, f in ALL if (fam, n) == (family, name))
    return facts.get("same_as", name)


class NoBiases:
    """Stands for a base: the refusals of the zoo need none of its values but these."""

    def bias(self, layer: int, module: Any) -> Any:
        return np.zeros(1, np.float32)


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def check(one: Any, found: torch.Tensor, name: str, dtype: str) -> None:
    """Against PEFT's answer; in bfloat16 a hybrid errs as PEFT's own bfloat16 does."""
    expected = one.answer(name)
    if dtype == "float32":
        bound = FP32_RELATIVE * float(expected.abs().max())
        assert float((found - expected).abs().max()) < bound
        return
    if one.hybrid:
        exact = one.answer(name, "f32")
        assert rms(found, exact) < max(BF16_RMS, HYBRID_RMS * rms(expected, exact))
        return
    assert rms(found, expected) < BF16_RMS
    # The token PEFT would choose, or one it holds for as good as equal.
    chosen = expected.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
    assert bool((chosen >= expected.amax(-1) - NEAR_TIE * expected.abs().max()).all())


def test_every_folder_is_listed() -> None:
    listed = {(family, name) for family, name, _ in ALL}
    there = {(path.parent.name, path.name) for path in ZOO.glob("*/*") if path.is_dir()}
    assert there == listed and len(ACCEPTED) >= 40 and len(REFUSED) >= 30


def test_the_page_of_served_adapters_names_animals_that_are_here() -> None:
    page = (ZOO.parents[1] / "docs" / "adapters.md").read_text()
    rows = re.findall(r"^\| .* \| (`.*`) \|$", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z0-9_/]+)`", row)}
    served = {name if family == "llama" else f"{family}/{name}" for family, name in ACCEPTED}
    oracle = ZOO.parent / "data" / "oracle"
    served |= {f"{p.parts[-3]}/{p.name}" for p in oracle.glob("*/adapters/*")}
    assert len(named) >= 25 and named - served == set()


@pytest.mark.parametrize(("family", "name", "code"), REFUSED)
def test_refused_by_name(data_dir: Path, family: str, name: str, code: str) -> None:
    base = "llama" if family == "hostile" else family
    dims = load_config(data_dir / "oracle" / base / "base").to_lora_dims()
    layout = SlotLayout(dims, 16, overlay_rows=128, affine=True, embedding_rank=16)
    with pytest.raises(RejectError) as caught:
        stage(DirectorySource(ZOO / family / name), layout, base_rows=NoBiases())
    assert caught.value.code == code


def test_what_fused_experts_have_no_place_for_peft_does_not_make_either(data_dir: Path) -> None:
    said = json.loads((ZOO / "qwen3_next" / "zoo.json").read_text())["peft_refuses"]
    dims = load_config(data_dir / "oracle" / "qwen3_next" / "base").to_lora_dims(
        expert_adapters=True
    )
    stem = "base_model.model.model.layers.0.mlp.experts."
    for field, half in (
        ("use_dora", "lora_magnitude_vector"),
        ("lora_bias", "lora_B.bias"),
    ):
        words = f"lora.ParamWrapper does not work with {field}=True."
        assert words in said.values()
        for path in ("", "base_layer.", "gate_up_proj.", "down_proj."):
            with pytest.raises(RejectError) as caught:
                classify(stem + path + half, dims)
            assert caught.value.code == "unsupported-module"
        key = classify(f"{stem}3.up_proj.{half}", dims)
        assert isinstance(key, PairKey) and key.expert == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "name"), ACCEPTED)
def test_alone_it_answers_as_peft_does(
    keeper: Callable[..., Any], family: str, name: str, dtype: str
) -> None:
    one = keeper(family, dtype)
    staged = one.stage(name)
    one.runner.commit(3, staged.image)
    expected = one.answer(oracle_of(family, name))
    assert float((expected - one.answer("base")).abs().max()) > 0.1
    found = one.logits([3])[0]
    check(one, found, oracle_of(family, name), dtype)
    one.runner.retire(3)
    # A buffer that held something else, which the pool copies: the same image, the same answer.
    lent = one.stage(name, bytearray(b"\xa5" * staged.image.nbytes)).image
    assert lent.lent and lent.buffer.tobytes() == staged.image.buffer.tobytes()
    one.runner.commit(3, lent, 0)
    assert torch.equal(one.logits([3])[0], found)
    one.runner.retire(3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_at_once_each_answers_as_alone(
    keeper: Callable[..., Any], family: str, dtype: str
) -> None:
    """One batch of every adapter of the family and a base row, in every step."""
    one = keeper(family, dtype)
    names = [name for fam, name in ACCEPTED if fam == family]
    base_alone = one.logits([-1])[0]
    alone = []
    for slot, name in enumerate(names):
        one.commit(slot, name)
        alone.append(one.logits([slot])[0])
    order = [*range(len(names)), -1]
    together = one.logits(order)
    for row, name in enumerate(names):
        assert torch.equal(together[row], alone[row]), name
        check(one, together[row], oracle_of(family, name), dtype)
    assert torch.equal(together[-1], base_alone)
    check(one, base_alone, "base", dtype)
    for slot in range(len(names)):
        one.runner.retire(slot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_accelerators_runner_answers_as_peft_does_too(
    keeper: Callable[..., Any], family: str, dtype: str
) -> None:
    """Every adapter alone, then all of them and a base row in one batch; a BLAS may round a row in
    a batch otherwise than alone."""
    one = keeper(family, dtype, "torch")
    names = [name for fam, name in ACCEPTED if fam == family]
    base_alone = one.logits([-1])[0]
    for slot, name in enumerate(names):
        one.commit(slot, name)
        check(one, one.logits([slot])[0], oracle_of(family, name), dtype)
    together = one.logits([*range(len(names)), -1])
    for row, name in enumerate(names):
        check(one, together[row], oracle_of(family, name), dtype)
    check(one, together[-1], "base", dtype)
    for slot in range(len(names)):
        one.runner.retire(slot)
    assert torch.equal(one.logits([-1])[0], base_alone)
