"""What tests of both accelerator families share: a prompt, an adapter's slot, how near is equal."""

from __future__ import annotations

from typing import Any

import torch

PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 50, 6, 5, 38, 7, 34, 85, 23, 4, 30, 20, 22, 62, 49]
FP32 = 1e-4


def placed(bench: Any, case: str, slot: int = 1) -> int:
    """The slot that an oracle case's adapter was committed to, -1 for the base model."""
    if case == "base":
        return -1
    bench.commit(slot, bench.image(case))
    return slot


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) < FP32 * float(expected.abs().max())
