"""What the LoRA kernels are compared with on a GPU: torch GEMMs per slot, and Triton kernels.

Each function times one layer of one cell of the grid, the L2 cache flushed before every sample, and
returns the median in microseconds, or ``None`` where it cannot run. Both are launched from Python
one by one, as an engine without graphs does; the events do not count the time before the first
launch, but they do count gaps between launches.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from grid import Cell, padded, slots_of

FLUSH_BYTES = 256 << 20
SAMPLES = 8
TRITON_RANKS = (16, 32, 64)
"""Padded ranks that are the powers of two `triton_lora` takes."""


def _median_us(step: Callable[[], None]) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for sample in range(SAMPLES):
        flush.fill_(sample)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[2:])


def torch_per_slot_us(cell: Cell, k_in: int, widths: tuple[int, ...]) -> float | None:
    """One torch GEMM pair for each slot and slice."""
    if not torch.cuda.is_available():
        return None
    rank, slots = padded(cell.rank), slots_of(cell.mix, cell.batch)
    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, out = torch.ones(cell.batch, k_in, **on), torch.zeros(cell.batch, sum(widths), **on)
    groups = []
    for slot in np.unique(slots[slots >= 0]):
        index = torch.tensor(np.flatnonzero(slots == slot), device="cuda")
        pairs = [(torch.ones(k_in, rank, **on), torch.ones(rank, w, **on)) for w in widths]
        groups.append((index, pairs))

    def step() -> None:
        for index, pairs in groups:
            rows, column = x[index], 0
            for a, b in pairs:
                delta = (rows @ a) @ b
                out[:, column : column + delta.shape[1]].index_add_(0, index, delta)
                column += delta.shape[1]

    return _median_us(step)


def triton_us(cell: Cell, k_in: int, widths: tuple[int, ...]) -> float | None:
    """The kernels of `triton_lora`, a pair of launches for each slice."""
    rank, slots = padded(cell.rank), slots_of(cell.mix, cell.batch)
    absent = importlib.util.find_spec("triton") is None
    if absent or rank not in TRITON_RANKS or not torch.cuda.is_available():
        return None
    from triton_lora import TritonSlice

    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    n_slots = int(slots.max()) + 1
    x, out = torch.ones(cell.batch, k_in, **on), torch.zeros(cell.batch, sum(widths), **on)
    scales, where = torch.ones(n_slots, device="cuda"), torch.from_numpy(slots).to("cuda")
    slices, column = [], 0
    for width in widths:
        a = torch.ones(n_slots, rank, k_in, **on)
        b = torch.ones(n_slots, width, rank, **on)
        slices.append(TritonSlice(a, b, scales, column, cell.batch))
        column += width

    def step() -> None:
        for part in slices:
            part.apply(x, out, where)

    return _median_us(step)
