"""Huge pages under weights: which pages are meant, and that nothing but their size changes."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
import torch

from rota.gpu.host_memory import HUGE_PAGE as PAGE
from rota.gpu.kernels.host import HostKernels
from rota.gpu.kernels.hugepages import NEAR, extents, settle


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([], []),
        ([(PAGE, PAGE)], [(PAGE, 2 * PAGE)]),
        ([(PAGE + 1, PAGE)], []),
        ([(PAGE - 1, PAGE + 2)], [(PAGE, 2 * PAGE)]),
        # Neighbours in any order make one; a page that only both fill counts.
        ([(PAGE + NEAR, PAGE), (PAGE, NEAR)], [(PAGE, 2 * PAGE)]),
        ([(PAGE, NEAR // 2), (PAGE + NEAR, PAGE)], [(PAGE, 2 * PAGE)]),
        # Too far apart: nothing between them is ours to move.
        ([(PAGE, 100), (PAGE + 101 + NEAR, PAGE)], []),
        ([(8 * PAGE, PAGE), (PAGE, PAGE)], [(PAGE, 2 * PAGE), (8 * PAGE, 9 * PAGE)]),
        # One inside the other.
        ([(PAGE, 3 * PAGE), (2 * PAGE, 10)], [(PAGE, 4 * PAGE)]),
    ],
)
def test_whole_pages_of_blocks_that_lie_together(
    blocks: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    assert extents(blocks) == found


def test_bytes_stay_and_nothing_but_our_pages_is_asked_for() -> None:
    pages = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(pages, np.uint8)
    held[:] = np.arange(held.size, dtype=np.uint32).view(np.uint8)[: held.size]
    before = held.copy()
    moved = settle([(int(held.ctypes.data), held.nbytes)])
    np.testing.assert_array_equal(held, before)
    assert 0 <= moved <= 4  # none where the system has no huge pages


def test_a_start_waits_for_it_no_longer_than_the_limit() -> None:
    pages = mmap.mmap(-1, 6 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(pages, np.uint8)
    block = (int(held.ctypes.data), held.nbytes)
    ticks = iter(range(100))
    assert settle([block], limit_s=3.0, clock=lambda: next(ticks)) <= 2
    assert next(ticks) == (4 if sys.platform == "linux" else 0)  # one to begin with, then three
    assert settle([block], limit_s=0.0, clock=lambda: 0.0) == 0


def test_memory_that_is_gone_is_no_error() -> None:
    pages = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(pages, np.uint8)
    address = int(held.ctypes.data)
    del held
    pages.close()
    assert settle([(address, 4 * PAGE)]) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_compute_the_same_on_them(dtype: torch.dtype) -> None:
    kernels = HostKernels(dtype)
    torch.manual_seed(3)
    weights = [torch.randn(1024, 1536).to(dtype) for _ in range(3)]
    linears = [kernels.linear(weight) for weight in weights]
    for linear, weight in zip(linears, weights, strict=True):
        address, nbytes = linear.place
        assert address and nbytes >= weight.nbytes
    x = torch.randn(5, 1536).to(dtype)
    before = [linear(x) for linear in linears]
    kernels.settle()
    for linear, was in zip(linears, before, strict=True):
        assert torch.equal(linear(x), was)
