"""The grid of LoRA shapes that every kernel is timed over, on a GPU and on a CPU alike.

Input and output widths of the models that Punica, vLLM and SGLang time (1024 to 14336, both ways),
ranks 8 to 64 with some that are no multiple of 8, batches 1 to 128, and five ways to spread rows
over adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "1024 o": (1024, (1024,)),
    "4096 o": (4096, (4096,)),
    "4096 qkv": (4096, (4096, 1024, 1024)),
    "4096 gate_up": (4096, (14336, 14336)),
    "14336 down": (14336, (4096,)),
    "8192 o": (8192, (8192,)),
    "2048 o": (2048, (2048,)),
    "11008 down": (11008, (4096,)),
}
RANKS = (16, 64, 8, 32, 24, 12)
BATCHES = (1, 16, 64, 4, 128, 32)
MIXES = ("distinct", "identical", "uniform", "skewed", "half-base")
MAX_SLOTS = 128


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    shape: str
    rank: int
    batch: int
    mix: str


def cells() -> Iterator[Cell]:
    """The grid, the most telling cells first, so that a short budget still covers every axis."""
    seen = set()
    for depth in range(1, max(len(SHAPES), len(RANKS), len(BATCHES), len(MIXES)) + 1):
        for shape in list(SHAPES)[:depth]:
            for rank in RANKS[:depth]:
                for batch in BATCHES[:depth]:
                    for mix in MIXES[:depth]:
                        cell = Cell(shape, rank, batch, mix)
                        if cell not in seen:
                            seen.add(cell)
                            yield cell


def slots_of(mix: str, n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The slot of each row."""
    rng = np.random.default_rng(n)
    if mix == "identical":
        slots = np.zeros(n)
    elif mix == "distinct":
        slots = np.arange(n) % MAX_SLOTS
    elif mix == "uniform":
        slots = rng.integers(0, min(n, 32), n)
    elif mix == "skewed":
        slots = np.minimum(rng.zipf(1.5, n) - 1, MAX_SLOTS - 1)
    else:
        slots = np.arange(n) % MAX_SLOTS
        slots[1::2] = -1
    return slots.astype(np.int32)


def padded(rank: int) -> int:
    """Rank of the pool."""
    return -(-rank // 8) * 8


def weight_bytes(cell: Cell, k_in: int, widths: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of A and B of the adapters in use, in bf16, each once; rows with an adapter."""
    slots = slots_of(cell.mix, cell.batch)
    used = len(np.unique(slots[slots >= 0]))
    pair = 2 * padded(cell.rank) * (len(widths) * k_in + sum(widths))
    return used * pair, int((slots >= 0).sum())
