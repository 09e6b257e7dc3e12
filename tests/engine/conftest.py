"""Engines on the tiny oracle checkpoints, and on the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Oracle:
    """One family's checkpoint, adapters and the answers of transformers + PEFT."""

    family: str
    root: Path
    ref: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.root / "base"

    def adapter(self, case: str) -> Path:
        return self.root / "adapters" / case

    def prompt(self, case: str) -> list[int]:
        return list(self.ref["cases"][case]["ids"])

    def greedy(self, case: str, dtype: str = "f32") -> list[int]:
        return list(self.ref["cases"][case][f"greedy_{dtype}"])


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_oracle(family: str) -> Oracle:
    root = ROOT / "tests" / "data" / "oracle" / family
    return Oracle(family, root, json.loads((root / "ref.json").read_text()))


@pytest.fixture(scope="session")
def llama() -> Oracle:
    return load_oracle("llama")


@pytest.fixture(params=["llama", "qwen2", "qwen3"], scope="session")
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return load_oracle(request.param)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def examples() -> Path:
    return ROOT / "examples" / "adapters"


@pytest.fixture(scope="session")
def smol_dir() -> Path:
    path = ROOT / ".cache" / "SmolLM2-135M-Instruct"
    if not (path / "model.safetensors").is_file():
        pytest.fail("the demo model is not there: run `make model`")
    return path
