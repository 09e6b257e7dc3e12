"""Whether there are tiles, what is said where there are none, and how a product of tiles adds."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba")

from rota.gpu.kernels import bf16, lanes_tiles
from rota.gpu.kernels.bf16 import (
    has_tiles,
    kernel,
    tile_config,
    tile_release,
    tile_step1,
    tile_step4,
    tile_step22,
    tile_store1,
    tile_store4,
    tile_zero1,
    tile_zero4,
    why_no_tiles,
)
from rota.gpu.kernels.host import HostKernels
from rota.gpu.kernels.linear import PackedLinear
from rota.gpu.kernels.linear_tiles import TileLinear

needs_tiles = pytest.mark.skipif(not has_tiles(), reason=f"needs tiles: {why_no_tiles()}")


@kernel
def products(tag, config, x, w, out, which, steps):  # type: ignore[no-untyped-def]  # numba types it
    """`which` step, `steps` times over tiles of 1024 bytes."""
    tile_config(config)
    tile_zero4()
    for i in range(0, 1024 * steps, 1024):
        if which == 1:
            tile_step1(x + i, 64, w + i)
        elif which == 4:
            tile_step4(x + i, 64, w + i, 1024 * steps)
        else:
            tile_step22(x + i, x + 1024 * steps + i, w + i, w + 1024 * steps + i)
    if which == 1:
        tile_store1(out)
        tile_zero1()
        tile_store1(out + 1024)
    else:
        tile_store4(out)
    tile_release()


def sizes() -> torch.Tensor:
    config = torch.zeros(64, dtype=torch.uint8)
    config[0], config[16:32:2], config[48:56] = 1, 64, 16
    return config


def summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [steps, 16, 32] times w [steps, 16, 16, 2], added as the instruction is said to add."""
    total = torch.zeros(16, 16)
    for step in range(len(x)):
        halves = torch.zeros(2, 16, 16)
        for pair in range(16):
            for odd in range(2):
                left = x[step, :, 2 * pair + odd].float()
                halves[odd] += left[:, None] * w[step, pair, :, odd].float()
        total += halves[0] + halves[1]
    return total


@needs_tiles
@pytest.mark.parametrize("which", [1, 4, 22])
def test_the_order_of_additions(which: int) -> None:
    steps = 7
    generator = torch.Generator().manual_seed(which)
    x = torch.randn((2, steps, 16, 32), generator=generator).bfloat16()
    w = torch.randn((4, steps, 16, 16, 2), generator=generator).bfloat16()
    out = torch.full((4, 16, 16), 5.0)
    config = sizes()
    addresses = [tensor.data_ptr() for tensor in (config, x, w, out)]
    products(0, *addresses, which, steps)
    if which == 1:
        assert torch.equal(out[0], summed(x[0], w[0]))
        assert not out[1].any() and bool((out[2:] == 5.0).all())
    for j in range(4 if which != 1 else 0):
        rows, weights = (x[0], w[j]) if which == 4 else (x[j // 2], w[j % 2])
        assert torch.equal(out[j], summed(rows, weights)), j


@needs_tiles
def test_denormals_count_as_zero() -> None:
    x = torch.full((1, 1, 16, 32), 2.0**-130).bfloat16()
    w = torch.full((1, 1, 16, 16, 2), 2.0**100).bfloat16()
    out = torch.ones((2, 16, 16))
    config = sizes()
    products(0, *[tensor.data_ptr() for tensor in (config, x, w, out)], 1, 1)
    assert not out.any()


THREAD_BEFORE = """
import threading
asked, done = threading.Event(), threading.Event()
found = []
def work():
    asked.wait()
    found.append(linear(x))
    done.set()
thread = threading.Thread(target=work)
thread.start()
import torch
torch.set_num_threads(1)
from rota.gpu.kernels.host import HostKernels
weight, x = torch.ones(16, 32).bfloat16(), torch.ones(3, 32).bfloat16()
linear = HostKernels(torch.bfloat16).linear(weight)
assert type(linear).__name__ == "TileLinear"
asked.set()
thread.join()
assert (found[0] == 32).all()
"""


@needs_tiles
def test_the_permission_holds_for_threads_that_ran_before() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", THREAD_BEFORE], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    lanes_tiles._asked.cache_clear()
    yield
    lanes_tiles._asked.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_another_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        lanes_tiles.llvmlite.binding,
        "get_host_cpu_features",
        lambda: {"amx-tile": True, "avx512f": True, "avx512bw": True, "avx512bf16": False},
    )
    assert why_no_tiles() == "the processor has no amx-bf16, avx512bf16"
    assert not has_tiles()


@pytest.mark.usefixtures("_asked_anew")
def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert why_no_tiles() == "tiles need Linux on x86-64"


@needs_tiles
@pytest.mark.usefixtures("_asked_anew")
def test_the_system_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    # A state that does not exist is refused as one that is not allowed.
    monkeypatch.setattr(lanes_tiles, "_TILE_DATA", 60)
    reason = why_no_tiles()
    assert reason is not None and reason.startswith("the system does not permit tiles: ")
    assert ctypes.get_errno() != 0


def test_without_tiles_the_library_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bf16, "why_no_tiles", lambda: "not today")
    with caplog.at_level(logging.INFO, logger="rota.gpu.kernels"):
        kernels = HostKernels(torch.bfloat16)
    assert not kernels.uses_tiles
    assert "linears are the library's: not today" in caplog.text
    weight, x = torch.ones(32, 64).bfloat16(), torch.ones(5, 64).bfloat16()
    linear = kernels.linear(weight)
    assert isinstance(linear, PackedLinear)
    assert bool((linear(x) == 64).all())


@needs_tiles
def test_with_more_threads_the_library_serves(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with caplog.at_level(logging.INFO, logger="rota.gpu.kernels"):
            kernels = HostKernels(torch.bfloat16)
        assert not kernels.uses_tiles and "torch has 2 threads" in caplog.text
    finally:
        torch.set_num_threads(before)
    assert HostKernels(torch.bfloat16).uses_tiles


def test_only_bf16_with_numba_and_on_request() -> None:
    assert not HostKernels(torch.float32).uses_tiles
    assert not HostKernels(torch.bfloat16, use_numba=False).uses_tiles
    assert not HostKernels(torch.bfloat16, use_tiles=False).uses_tiles


@needs_tiles
def test_experts_are_on_tiles_too() -> None:
    each = [torch.full((16, 32), float(i)).bfloat16() for i in range(3)]
    experts = HostKernels(torch.bfloat16).experts(iter(each), 3)
    x = torch.ones(2, 32).bfloat16()
    for i, expert in enumerate(experts):
        assert isinstance(expert, TileLinear)
        assert bool((expert(x) == 32 * i).all())
