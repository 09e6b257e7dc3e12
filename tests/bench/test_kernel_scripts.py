"""The kernel benchmarks: their grid, and that each runs without the machine it is for."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def run(*command: str, **environment: str) -> str:
    """Run a script; what it printed."""
    path = os.pathsep.join(p for p in (str(BENCH), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-P", *command],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("grid")


def test_the_grid_has_every_axis_early_and_no_cell_twice(grid: Any) -> None:
    all_cells = list(grid.cells())
    assert len(set(all_cells)) == len(all_cells)
    assert len(all_cells) == len(grid.SHAPES) * len(grid.RANKS) * len(grid.BATCHES) * len(
        grid.MIXES
    )
    first = all_cells[:500]
    assert {cell.mix for cell in first} >= set(grid.MIXES[:4])
    assert {cell.batch for cell in first} >= set(grid.BATCHES[:4])
    widths = {grid.SHAPES[name][0] for name in grid.SHAPES}
    assert min(widths) == 1024 and max(widths) == 14336
    assert {1, 128} <= set(grid.BATCHES) and {8, 12, 64} <= set(grid.RANKS)


@pytest.mark.parametrize(
    ("mix", "used", "rows"),
    [("distinct", 64, 64), ("identical", 1, 64), ("half-base", 32, 32)],
)
def test_the_bytes_of_a_cell_are_those_of_its_adapters(
    grid: Any, mix: str, used: int, rows: int
) -> None:
    cell = grid.Cell("4096 qkv", 12, 64, mix)
    pair = 2 * 16 * (3 * 4096 + 4096 + 1024 + 1024)
    assert grid.weight_bytes(cell, *grid.SHAPES[cell.shape]) == (used * pair, rows)


def test_the_grid_runs_on_the_host_kernels() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    out = run(str(BENCH / "kernels_cpu.py"), "--budget-s", "0")
    assert "us of torch" in out and "did not fit the 0 s budget" in out


def test_linears_are_timed_both_ways() -> None:
    out = run(str(BENCH / "linears_cpu.py"), "--layers", "1")
    assert out.count("ms of the library") == 6


def test_memory_bound_cells_are_counted_by_the_time_a_copy_takes(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    module = importlib.import_module("kernels_gpu")
    rows = [
        {"bytes": 4_000_000, "share_of_copy": 0.1},  # 1 us: latency
        {"bytes": 80_000_000, "share_of_copy": 0.85},
        {"bytes": 80_000_000, "share_of_copy": 0.7},
    ]
    found = module.memory_bound(rows, 4e12)
    assert (found["cells"], found["reached"], found["worst_share"]) == (2, 1, 0.7)
    assert json.dumps(found)


EXACT = """
import torch
from triton_lora import TritonSlice
r = lambda *s: torch.randint(-1, 2, s).to(torch.bfloat16)
torch.manual_seed(0)
a, b = r(3, 16, 1032), r(3, 200, 16)
x = torch.randint(-3, 4, (5, 1032)).to(torch.bfloat16)
out = torch.randint(-99, 100, (5, 208)).to(torch.bfloat16)
scales, slots = torch.tensor([0.7, 2.0, 1.25]), torch.tensor([0, 2, -1, 1, 2], dtype=torch.int32)
want = out.double()
for i, s in enumerate(slots.tolist()):
    if s >= 0:
        want[i, 8:] += scales[s] * (b[s].double() @ (a[s].double() @ x[i].double()))
before = out.clone()
TritonSlice(a, b, scales, 8, 5).apply(x, out, slots)
assert torch.equal(out[2], before[2]) and torch.equal(out[:, :8], before[:, :8])
error = (out.double() - want).abs() / want.abs().clamp(min=50)
print(float(error.max()))
"""


def test_the_triton_kernels_compute_the_delta() -> None:
    """In Triton's interpreter, which cuts to bf16 where a GPU rounds: within two last places."""
    pytest.importorskip("triton", reason="triton is not installed")
    assert float(run("-c", EXACT, TRITON_INTERPRET="1")) < 2 / 128
