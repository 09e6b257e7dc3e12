"""Linears on matrix tiles: right to the last bit, whatever the rows' company, and within bounds."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading

import pytest
import torch

from rota.gpu.kernels import linear_tiles_kernel
from rota.gpu.kernels.bf16 import has_tiles, why_no_tiles
from rota.gpu.kernels.host import HostKernels
from rota.gpu.kernels.linear import PackedLinear, cancelling_probe
from rota.gpu.kernels.linear_tiles import BLOCK_BYTES, TileLinear, TilePacker
from rota.gpu.kernels.linear_tiles_kernel import scratch_bytes, tile_linear_kernel
from rota.gpu.kernels.memory import Scratch

pytestmark = pytest.mark.skipif(not has_tiles(), reason=f"needs tiles: {why_no_tiles()}")

SHAPES = [(16, 32), (48, 96), (80, 64), (1008, 576), (960, 576), (576, 1536), (64, 9216)]
ROWS = [*range(1, 41), 64, 100, 256, 257, 300]
PAGE = mmap.PAGESIZE


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def on_tiles(weight: torch.Tensor, bias: torch.Tensor | None = None) -> TileLinear:
    made = HostKernels(torch.bfloat16).linear(weight, bias)
    assert isinstance(made, TileLinear)
    return made


def by_library(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    made = HostKernels(torch.bfloat16, use_tiles=False).linear(weight, bias)
    assert isinstance(made, PackedLinear)
    return made


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n_out", "k_in"), SHAPES)
def test_right_and_the_same_in_any_company(n_out: int, k_in: int, biased: bool) -> None:
    weight, bias = normal(n_out, k_in, seed=1), normal(n_out, seed=2) if biased else None
    linear, x = on_tiles(weight, bias), normal(303, k_in, seed=3)
    y = linear(x)
    wide = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    # Half a step of bf16, and what k_in additions in fp32 can be off.
    sums = x.double().abs() @ weight.double().abs().T
    assert bool(((y.double() - wide).abs() <= 2.0**-8 * 1.01 * wide.abs() + 1e-6 * sums).all())
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), y[:rows]), rows
        assert torch.equal(linear(x[303 - rows :]), y[303 - rows :]), rows
    assert linear(x[:0]).shape == (0, n_out)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n_out", "k_in"), SHAPES)
def test_bit_by_bit_what_the_library_computes(n_out: int, k_in: int, biased: bool) -> None:
    """On a processor with tiles oneDNN takes them too, and adds 32 products at a time as well."""
    weight, bias, x = cancelling_probe(n_out, k_in, 300, torch.bfloat16, biased)
    for weights, added, rows in (
        (weight, bias, x),
        (normal(n_out, k_in, seed=4), normal(n_out, seed=5) if biased else None, normal(300, k_in)),
    ):
        ours, theirs = on_tiles(weights, added), by_library(weights, added)
        assert theirs.plan.packed
        for count in (1, 8, 16, 17, 33, 64, 300):
            assert torch.equal(ours(rows[:count]), theirs(rows[:count])), count


@pytest.mark.parametrize("biased", [False, True])
def test_values_that_are_no_ordinary_numbers(biased: bool) -> None:
    weight, bias = normal(64, 64, seed=1), normal(64, seed=2) if biased else None
    x = normal(40, 64, seed=3)
    odd = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0**-130, -(2.0**-133), 3e38]
    for i, value in enumerate(odd):
        x[2 * i, 5 + i] = value
        x[2 * i + 1] = value
        weight[3 * i, 7] = value
        weight[3 * i + 1] = value * 2.0**-100
    library = HostKernels(torch.bfloat16, use_tiles=False)
    library.linear(normal(64, 64), bias)  # finds the shape's plan; with NaN none would pass
    linear, packed = on_tiles(weight, bias), library.linear(weight, bias)
    assert isinstance(packed, PackedLinear) and packed.plan.packed
    for rows in (1, 16, 40):
        ours, theirs = linear(x[:rows]), packed(x[:rows])
        # Of a NaN the sign means nothing; of a zero it does.
        assert torch.equal(ours.isnan(), theirs.isnan())
        known = ~ours.isnan()
        assert torch.equal(ours[known].view(torch.int16), theirs[known].view(torch.int16))
    assert bool(ours.isnan().any()) and bool(ours.isinf().any())


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40])
def test_rows_apart_and_nothing_written_beside_them(rows: int) -> None:
    """Through the kernel's door: x between NaN, the result between columns and rows of others."""
    weight, x = normal(80, 96, seed=1), normal(rows, 96, seed=2)
    linear = on_tiles(weight)
    wide = torch.full((rows + 1, 129), float("nan"), dtype=torch.bfloat16)
    wide[:rows, 3:99] = x
    assert torch.equal(linear(wide[:rows, 3:99]), linear(x))
    out = torch.full((rows + 17, 101), 7.0, dtype=torch.bfloat16)
    scratch = torch.full((scratch_bytes(96, rows),), 0xFF, dtype=torch.uint8)
    at = wide.data_ptr() + 6, wide.stride(0), out.data_ptr() + 4, out.stride(0), rows
    tile_linear_kernel(0, linear.place[0], scratch.data_ptr(), *at)
    assert torch.equal(out[:rows, 2:82], linear(x))
    out[:rows, 2:82] = 7.0
    assert bool((out == 7.0).all())


def guarded(data: torch.Tensor) -> tuple[mmap.mmap, int]:
    """Memory that ends where `data` ends, before a page nobody may touch, and data's address."""
    size = -(-data.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(PAGE), 0) == 0
    address = start + size - data.nbytes
    ctypes.memmove(address, data.data_ptr(), data.nbytes)
    return memory, address


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as Linux has it")
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_nothing_is_read_or_written_behind_the_end(rows: int) -> None:
    weight, bias, x = normal(112, 96, seed=1), normal(112, seed=2), normal(rows, 96, seed=3)
    linear = on_tiles(weight, bias)
    start, nbytes = linear.place
    held = (ctypes.c_char * nbytes).from_address(start)
    packed = torch.frombuffer(held, dtype=torch.uint8)
    scratch = torch.zeros(scratch_bytes(96, rows), dtype=torch.uint8)
    out = torch.zeros(rows, 112, dtype=torch.bfloat16)
    ends = [guarded(part) for part in (packed, scratch, x, out)]
    addresses = [address for _, address in ends]
    tile_linear_kernel(0, *addresses[:3], 96, addresses[3], 112, rows)
    ctypes.memmove(out.data_ptr(), addresses[3], out.nbytes)
    assert torch.equal(out, linear(x))


def test_the_library_before_between_and_after() -> None:
    weight, x = normal(192, 320, seed=1), normal(40, 320, seed=2)
    ours, theirs = on_tiles(weight), by_library(weight)
    wanted = theirs(x)
    for rows in (1, 40, 16, 3, 40):
        assert torch.equal(ours(x[:rows]), wanted[:rows])
        assert torch.equal(theirs(x[:rows]), wanted[:rows])
        assert torch.equal(torch.nn.functional.linear(x, weight), wanted)


def test_two_threads_at_once_each_with_kernels_of_its_own() -> None:
    weight, x = normal(192, 320, seed=1), normal(64, 320, seed=2)
    wanted = by_library(weight)(x)
    together = threading.Barrier(3)
    wrong: list[int] = []

    def work(linear: TileLinear | PackedLinear, rows: int) -> None:
        together.wait()
        for _ in range(300):
            if not torch.equal(linear(x[:rows]), wanted[:rows]):
                wrong.append(rows)

    each = ((on_tiles(weight), 8), (on_tiles(weight), 64), (by_library(weight), 33))
    threads = [threading.Thread(target=work, args=one) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_lie_one_after_the_other() -> None:
    packer = TilePacker(Scratch())
    weights = [normal(48, 96, seed=i) for i in range(4)]
    linears = [packer.pack(weight, weight[:, 0]) for weight in weights]
    for one, after in itertools.pairwise(linears):
        gap = after.place[0] - sum(one.place)
        assert 0 <= gap < 64 and one.place[0] % 64 == 0
    x = normal(5, 96, seed=9)
    for linear, weight in zip(linears, weights, strict=True):
        assert torch.equal(linear(x), by_library(weight, weight[:, 0])(x))


def test_a_weight_larger_than_half_a_block_has_its_own() -> None:
    packer = TilePacker(Scratch())
    small = packer.pack(normal(16, 32))
    large = packer.pack(torch.zeros((BLOCK_BYTES // 4 // 1024, 1024), dtype=torch.bfloat16) + 1)
    after = packer.pack(normal(16, 32))
    assert after.place[0] - sum(small.place) < 64
    assert large.place[0] % (2 << 20) == 0
    assert bool((large(torch.ones((2, 1024), dtype=torch.bfloat16)) == 1024).all())


def test_a_full_block_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from rota.gpu.kernels import linear_tiles

    monkeypatch.setattr(linear_tiles, "BLOCK_BYTES", 10_000)
    packer = TilePacker(Scratch())
    weights = [normal(16, 64, seed=i) for i in range(12)]
    linears = [packer.pack(weight) for weight in weights]
    x = normal(3, 64, seed=20)
    for linear, weight in zip(linears, weights, strict=True):
        assert torch.equal(linear(x), by_library(weight)(x))


@pytest.mark.parametrize(("n_out", "k_in"), [(12, 32), (16, 20), (1, 32), (24, 48)])
def test_other_shapes_are_the_librarys(n_out: int, k_in: int) -> None:
    linear = HostKernels(torch.bfloat16).linear(normal(n_out, k_in))
    assert isinstance(linear, PackedLinear)


def test_a_chunk_of_x_is_bounded() -> None:
    for k_in in (32, 576, 4096, 18944):
        rows = linear_tiles_kernel.chunk_rows(k_in)
        assert rows % 32 == 0 and 64 <= rows <= 256
        assert scratch_bytes(k_in, 100_000) == scratch_bytes(k_in, rows)
        assert rows == 64 or 2 * k_in * rows <= linear_tiles_kernel.CHUNK_BYTES
