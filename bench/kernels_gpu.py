"""The LoRA kernels on a GPU: checked first, then timed over the grid of shapes, ranks and batches.

    python bench/kernels_gpu.py                  # compile, check, time, write results (< 8 minutes)
    python bench/kernels_gpu.py --check          # the checks alone, as a sanitizer runs them
    python bench/kernels_gpu.py --test-driver    # the same code on a tiny grid without a GPU

A cell is shrink + expand as a decode step runs them: under a graph, one pair of launches after the
other for several layers with weights of their own, the L2 cache flushed before each sample. It
reports median microseconds for one layer, the bytes that must move, and their rate as a share of
the copy bandwidth measured at the start. Cells that did not fit the time budget are counted.
Times of the test driver mean nothing and are never written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from grid import MIXES, SHAPES, Cell, cells, padded, slots_of, weight_bytes
from machine import describe

from rota.errors import DeviceError
from rota.gpu.cuda import CudaDevice
from rota.gpu.device import Exec
from rota.gpu.kernels.bgmv import LoraSlice
from rota.gpu.kernels.lora_device import DeviceLoraGroup, planes_bytes, splits_of

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 8
FLUSH_BYTES = 256 << 20
SAMPLES = 15
COPY_BYTES = 1 << 30
MEMORY_BOUND_US = 10.0
"""Cells whose bytes take at least this long at copy speed: two launches in a graph take 4-6 us."""
TARGET_SHARE = 0.8


def chosen(small: bool) -> Iterator[Cell]:
    """The grid, or of the test driver a tiny one."""
    if small:
        yield from (Cell("tiny", 12, 2, mix) for mix in MIXES)
    else:
        yield from cells()


def floor_bytes(cell: Cell, k_in: int, widths: tuple[int, ...]) -> int:
    """Bytes one layer must move: weights once a distinct slot, rows once each way."""
    weights, rows = weight_bytes(cell, k_in, widths)
    planes = 2 * 4 * splits_of(k_in) * padded(cell.rank) * len(widths)
    return weights + rows * (2 * k_in + planes + 4 * sum(widths))


class Bench:
    """One device, its stream and events, and memory that every cell reuses."""

    def __init__(self, device: CudaDevice, small: bool) -> None:
        self.device, self.small = device, small
        self.stream = device.create_stream(label="bench")
        self.start = device.create_event(label="start")
        self.end = device.create_event(label="end")
        self.flush_bytes = 4096 if small else FLUSH_BYTES
        self.flush = device.alloc(self.flush_bytes, label="flush")

    def upload(self, array: np.ndarray[Any, Any], label: str) -> int:
        """Copy an array to fresh device memory."""
        address = self.device.alloc(array.nbytes, label=label)
        self.device.copy_h2d(address, array.ctypes.data, array.nbytes, self.stream)
        return address

    def elapsed_us(self) -> float:
        """Microseconds between the two events, once passed."""
        self.device.synchronize_event(self.end)
        return 1e3 * self.device.elapsed_ms(self.start, self.end)

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by the driver's own copy; median of several."""
        nbytes = 1 << 16 if self.small else COPY_BYTES
        a = self.device.alloc(nbytes, label="copy source")
        b = self.device.alloc(nbytes, label="copy target")
        rates = []
        try:
            self.device.memset(a, 0, nbytes, self.stream)
            for _ in range(9):
                self.device.record_event(self.start, self.stream)
                self.device.copy_d2d(b, a, nbytes, self.stream)
                self.device.record_event(self.end, self.stream)
                rates.append(2 * nbytes / self.elapsed_us() * 1e6)
        finally:
            self.device.synchronize(self.stream)
            self.device.free(a)
            self.device.free(b)
        return statistics.median(rates)

    def time_graph(self, graph_exec: Exec, layers: int) -> float:
        """Median microseconds of one layer."""
        times = []
        for sample in range(3 if self.small else SAMPLES + 3):
            self.device.memset(self.flush, sample & 255, self.flush_bytes, self.stream)
            self.device.record_event(self.start, self.stream)
            self.device.replay(graph_exec, self.stream)
            self.device.record_event(self.end, self.stream)
            if sample >= 2:  # the first replays warm clocks and code caches
                times.append(self.elapsed_us() / layers)
        return statistics.median(times)


def run_cell(bench: Bench, cell: Cell, shapes: dict[str, tuple[int, tuple[int, ...]]]) -> float:
    """Median microseconds of one layer of a cell."""
    device, stream = bench.device, bench.stream
    k_in, widths = shapes[cell.shape]
    rank, n, s = padded(cell.rank), cell.batch, len(widths)
    layers = 2 if bench.small else LAYERS
    slots = slots_of(cell.mix, n)
    n_slots = int(slots.max()) + 1
    slot_bytes = 2 * rank * (s * k_in + sum(widths))
    taken: list[int] = []

    def alloc(nbytes: int, label: str) -> int:
        taken.append(device.alloc(nbytes, label=label))
        return taken[-1]

    def upload(array: np.ndarray[Any, Any], label: str) -> int:
        taken.append(bench.upload(array, label))
        return taken[-1]

    try:
        pool = alloc(layers * n_slots * slot_bytes, "weights")
        device.memset(pool, 0x3C, layers * n_slots * slot_bytes, stream)
        x = alloc(2 * n * k_in, "x")
        device.memset(x, 0x3C, 2 * n * k_in, stream)
        out = alloc(2 * n * sum(widths), "out")
        device.memset(out, 0, 2 * n * sum(widths), stream)
        rows = upload(slots, "rows")
        nbytes = planes_bytes(n, s, rank, k_in)
        planes = alloc(nbytes, "planes")
        scales = upload(np.ones(n_slots, np.float32), "scales")
        groups = []
        for layer in range(layers):
            slices, column, offset = [], 0, 0
            base = pool + layer * n_slots * slot_bytes
            starts = np.arange(n_slots, dtype=np.uint64) * np.uint64(slot_bytes) + np.uint64(base)
            for width in widths:
                a = upload(starts + np.uint64(offset), "a table")
                offset += 2 * rank * k_in
                b = upload(starts + np.uint64(offset), "b table")
                offset += 2 * rank * width
                slices.append(LoraSlice(a, b, scales, width, column))
                column += width
            groups.append(
                DeviceLoraGroup(
                    device,
                    tuple(slices),
                    k_in=k_in,
                    rank=rank,
                    max_loras=n_slots,
                    planes=planes,
                    planes_nbytes=nbytes,
                )
            )
        device.begin_capture(stream)
        try:
            for group in groups:
                group.apply(x, k_in, out, sum(widths), rows, n, stream)
            graph = device.end_capture(stream)
        except BaseException:
            device.abort_capture_if_active(stream)
            raise
        graph_exec = device.instantiate(graph)
        device.destroy_graph(graph)
        try:
            device.upload(graph_exec, stream)
            return bench.time_graph(graph_exec, layers)
        finally:
            device.synchronize(stream)
            device.destroy_exec(graph_exec)
    finally:
        device.synchronize(stream)
        for address in taken:
            device.free(address)


def to_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round to bf16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Widen bf16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check(bench: Bench, k_in: int, width: int, rank: int, n: int) -> None:
    """One launch pair on small integers, where every bit of the answer is known."""
    device, rng = bench.device, np.random.default_rng(rank)
    a = rng.integers(-1, 2, (2, rank, k_in)).astype(np.float32)
    b = rng.integers(-1, 2, (2, width, rank)).astype(np.float32)
    x = rng.integers(-3, 4, (n, k_in)).astype(np.float32)
    out = rng.integers(-99, 100, (n, width)).astype(np.float32)
    slots, scales = (np.arange(n) % 3 - 1).astype(np.int32), np.array([0.7, 2.0], np.float32)
    want = to_bf16(out)
    for row, slot in enumerate(slots):
        if slot >= 0:
            xa = from_bf16(to_bf16(a[slot].astype(float) @ x[row]))
            delta = from_bf16(to_bf16(b[slot].astype(float) @ xa))
            want[row] = to_bf16(from_bf16(want[row]) + scales[slot] * delta)
    addresses = [
        bench.upload(array, "check")
        for array in (to_bf16(a), to_bf16(b), to_bf16(x), to_bf16(out), slots, scales)
    ]
    a_addr, b_addr, x_addr, out_addr, rows, scale_addr = addresses
    a_table = np.array([a_addr, a_addr + 2 * rank * k_in], np.uint64)
    b_table = np.array([b_addr, b_addr + 2 * rank * width], np.uint64)
    addresses += [bench.upload(a_table, "a"), bench.upload(b_table, "b")]
    nbytes = planes_bytes(n, 1, rank, k_in)
    planes = device.alloc(nbytes, label="planes")
    try:
        group = DeviceLoraGroup(
            device,
            (LoraSlice(addresses[6], addresses[7], scale_addr, width, 0),),
            k_in=k_in,
            rank=rank,
            max_loras=2,
            planes=planes,
            planes_nbytes=nbytes,
        )
        group.apply(x_addr, k_in, out_addr, width, rows, n, bench.stream)
        got = np.empty_like(want)
        device.copy_d2h(got.ctypes.data, out_addr, got.nbytes, bench.stream)
    finally:
        device.synchronize(bench.stream)
        for address in (*addresses, planes):
            device.free(address)
    if not np.array_equal(got, want):
        wrong = int((got != want).sum())
        raise SystemExit(f"WRONG at rank {rank}, k {k_in}: {wrong} of {want.size} values differ")


def memory_bound(results: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """The cells that no launch latency hides: how many there are, and how many reach the target."""
    bound = [r for r in results if r["bytes"] / bandwidth * 1e6 >= MEMORY_BOUND_US]
    shares = [r["share_of_copy"] or 0.0 for r in bound]
    return {
        "from_us": MEMORY_BOUND_US,
        "cells": len(bound),
        "target_share": TARGET_SHARE,
        "reached": sum(share >= TARGET_SHARE for share in shares),
        "worst_share": min(shares, default=None),
    }


def compared(cell: Cell, k_in: int, widths: tuple[int, ...]) -> dict[str, Any]:
    """Microseconds of what others do for this cell, or why there are none."""
    import gpu_compare

    found: dict[str, Any] = {}
    for name in ("torch_per_slot", "triton"):
        try:
            found[f"{name}_us"] = getattr(gpu_compare, f"{name}_us")(cell, k_in, widths)
        except Exception as error:  # a comparison that fails must not cost the grid
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"
    return found


def main() -> int:
    """Run; the exit status is 1 when there is no GPU or the kernels are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=400.0, help="seconds for the grid")
    parser.add_argument("--test-driver", action="store_true", help="no GPU: a tiny grid, no times")
    parser.add_argument("--check", action="store_true", help="the checks alone (for a sanitizer)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/kernels-gpu.json")
    options = parser.parse_args()
    small = options.test_driver
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if small:
            from rota.gpu.fakecuda.load import load

            load(Path(folder))
        try:
            device = CudaDevice(test_driver=small, timing=True, cache_dir=Path(folder) / "kernels")
        except DeviceError as error:
            print(error, file=sys.stderr)
            return 1
        bench = Bench(device, small)
        shapes = {"tiny": (264, (24, 16))} if small else SHAPES
        for rank in (8, 24) if small else (8, 16, 24, 32, 64, 128):
            lengths = (
                (72,) if small else (64, 576, 4104) if options.check else (64, 576, 4096, 14336)
            )
            for k_in in lengths:
                check(bench, k_in, 40 if small else 1000, rank, 5)
        print(f"checked on {device.model}; {time.monotonic() - started:.1f} s")
        bandwidth = 0.0 if options.check else bench.copy_bandwidth()
        results, skipped = [], 0
        for cell in () if options.check else chosen(small):
            if time.monotonic() - started > options.budget_s:
                skipped += 1
                continue
            k_in, widths = shapes[cell.shape]
            us = run_cell(bench, cell, shapes)
            moved = floor_bytes(cell, k_in, widths)
            row: dict[str, Any] = {
                **{name: getattr(cell, name) for name in ("shape", "rank", "batch", "mix")},
                "us": round(us, 2),
                "bytes": moved,
                "share_of_copy": round(moved / us * 1e6 / bandwidth, 3) if us else None,
            }
            if not small and cell.rank in (16, 64) and cell.mix in ("distinct", "identical"):
                row |= compared(cell, k_in, widths)
            results.append(row)
            if small:
                print(f"ran {cell}")
                continue
            print(
                f"{cell.shape:>14} r{cell.rank:<3} n{cell.batch:<4} {cell.mix:<10} "
                f"{us:9.2f} us {100 * (row['share_of_copy'] or 0):6.1f} % of copy"
            )
        for event in (bench.start, bench.end):
            device.destroy_event(event)
        device.synchronize(bench.stream)
        device.free(bench.flush)
        device.destroy_stream(bench.stream)
        left = device.live_labels()
        device.close()
        if left:
            print(f"left behind: {left}", file=sys.stderr)
            return 1
    record = {
        "what": "LoRA shrink + expand of one layer under a graph, L2 flushed",
        **describe(ROOT),
        "device": device.model,
        "compute_capability": ".".join(map(str, device.capability)),
        "nvrtc": device.compiler.version,
        "copy_bytes_per_s": round(bandwidth),
        "seconds": round(time.monotonic() - started, 1),
        "cells_skipped_for_time": skipped,
        "memory_bound": memory_bound(results, bandwidth),
        "results": results,
    }
    if not options.check:
        print(f"memory-bound cells: {record['memory_bound']}")
    if skipped:
        print(f"{skipped} cells did not fit the {options.budget_s:.0f} s budget")
    if not small and not options.check:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
