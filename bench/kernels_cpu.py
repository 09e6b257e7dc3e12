"""The host's LoRA kernels over the grid of shapes, ranks and batches, beside torch GEMMs per slot.

    python bench/kernels_cpu.py [--budget-s 150] [--write]

One thread. A cell is one layer's delta (shrink and expand) in bf16, layers with weights of their
own taken in turn; before each sample other memory is walked, so that weights come from beyond the
second-level cache (the third is often shared, and larger than any cell). Microseconds are the
median of several samples; bytes are those of the adapters in use, and their rate is given as a
share of what a plain copy moves. Cells that did not fit the budget are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grid import SHAPES, Cell, cells, padded, slots_of, weight_bytes
from machine import describe

from rota.gpu.kernels.bgmv import LoraGroup, LoraSlice
from rota.gpu.kernels.host import HostKernels

ROOT = Path(__file__).resolve().parent.parent
DTYPE = torch.bfloat16
WALK_BYTES = 64 << 20
COPY_BYTES = 256 << 20
MOST_BYTES = 1 << 30
"""Weights of a cell's layers together; larger cells take fewer layers, at least one."""
LAYERS = 4
SAMPLES = 7


class Layer:
    """Adapters of one layer, as tables for the kernels and as matrices for torch."""

    def __init__(self, cell: Cell, k_in: int, widths: tuple[int, ...], n_slots: int) -> None:
        rank = padded(cell.rank)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.keep: list[torch.Tensor] = []
        slices, column = [], 0
        scales = torch.ones(n_slots)
        for width in widths:
            a = torch.full((n_slots, rank, k_in), 0.01, dtype=DTYPE)
            b = torch.full((n_slots, width, rank), 0.01, dtype=DTYPE)
            cells_of = torch.tensor([[m[s].data_ptr() for s in range(n_slots)] for m in (a, b)])
            slices.append(
                LoraSlice(
                    cells_of[0].data_ptr(),
                    cells_of[1].data_ptr(),
                    scales.data_ptr(),
                    width,
                    column,
                )
            )
            column += width
            self.pairs.append((a, b))
            self.keep += [cells_of, scales]
        self.slices = tuple(slices)

    def group(self, kernels: HostKernels, k_in: int, rank: int, n_slots: int) -> LoraGroup:
        """The kernels' form."""
        return kernels.lora_group(self.slices, k_in=k_in, rank=rank, max_loras=n_slots)


def per_slot(
    layer: Layer, x: torch.Tensor, out: torch.Tensor, groups: list[tuple[int, torch.Tensor]]
) -> None:
    """The same delta as one GEMM pair a slot and slice."""
    for slot, rows in groups:
        mine, column = x.index_select(0, rows), 0
        for a, b in layer.pairs:
            delta = (mine @ a[slot].t()) @ b[slot].t()
            out[:, column : column + delta.shape[1]].index_add_(0, rows, delta)
            column += delta.shape[1]


def median_us(calls: list[Callable[[], None]], walk: torch.Tensor) -> float:
    """Median microseconds of the calls, taken in turn, each after a walk through other memory."""
    for call in calls:
        call()
    times = []
    for sample in range(max(SAMPLES, len(calls))):
        walk.add_(1)
        begin = time.perf_counter()
        calls[sample % len(calls)]()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def run_cell(kernels: HostKernels, cell: Cell, walk: torch.Tensor) -> tuple[float, float]:
    """(microseconds of the kernels, of torch per slot) for one layer."""
    k_in, widths = SHAPES[cell.shape]
    rank, slots = padded(cell.rank), slots_of(cell.mix, cell.batch)
    n_slots = int(slots.max()) + 1
    each = 2 * n_slots * rank * (len(widths) * k_in + sum(widths))
    count = max(1, min(LAYERS, MOST_BYTES // each))
    layers = [Layer(cell, k_in, widths, n_slots) for _ in range(count)]
    x = torch.full((cell.batch, k_in), 0.5, dtype=DTYPE)
    out = torch.zeros(cell.batch, sum(widths), dtype=DTYPE)
    row_slots = torch.from_numpy(slots)
    where = [
        (int(slot), torch.from_numpy(np.flatnonzero(slots == slot)))
        for slot in np.unique(slots[slots >= 0])
    ]
    at = (x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0))
    rows = (row_slots.data_ptr(), cell.batch)
    groups = [layer.group(kernels, k_in, rank, n_slots) for layer in layers]
    ours = median_us([partial(group.apply, *at, *rows) for group in groups], walk)
    theirs = median_us([partial(per_slot, layer, x, out, where) for layer in layers], walk)
    return ours, theirs


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a plain copy on one thread; median of several."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    rates = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        rates.append(2 * COPY_BYTES / (time.perf_counter() - begin))
    return statistics.median(rates)


def main() -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=150.0, help="seconds for the grid")
    parser.add_argument("--write", action="store_true", help="keep the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    kernels = HostKernels(DTYPE)
    walk = torch.zeros(WALK_BYTES, dtype=torch.uint8)
    bandwidth = copy_bytes_per_s()
    results: list[dict[str, Any]] = []
    skipped = 0
    with torch.inference_mode():
        for cell in cells():
            if results and time.monotonic() - started > options.budget_s:
                skipped += 1
                continue
            ours, theirs = run_cell(kernels, cell, walk)
            moved, _ = weight_bytes(cell, *SHAPES[cell.shape])
            row = {
                **{name: getattr(cell, name) for name in ("shape", "rank", "batch", "mix")},
                "us": round(ours, 1),
                "torch_per_slot_us": round(theirs, 1),
                "weight_bytes": moved,
                "share_of_copy": round(moved / ours * 1e6 / bandwidth, 3),
            }
            results.append(row)
            print(
                f"{cell.shape:>14} r{cell.rank:<3} n{cell.batch:<4} {cell.mix:<10} "
                f"{ours:10.1f} us {theirs:10.1f} us of torch, {theirs / ours:6.2f}x",
                flush=True,
            )
    print(f"{skipped} cells did not fit the {options.budget_s:.0f} s budget")
    if options.write:
        record = {
            "what": "LoRA shrink + expand of one layer on one thread, bf16",
            **describe(ROOT),
            "torch": torch.__version__,
            "numba": kernels.uses_numba,
            "copy_bytes_per_s": round(bandwidth),
            "seconds": round(time.monotonic() - started, 1),
            "cells_skipped_for_time": skipped,
            "results": results,
        }
        path = ROOT / "bench/results/kernels-cpu.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
