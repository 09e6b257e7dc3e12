"""Kernels of both element types, numba and reference; adapter tables; how near is near enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from rota.gpu.kernels.bgmv import LoraGroup, LoraSlice
from rota.gpu.kernels.host import HostKernels


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"], scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def fast(dtype: torch.dtype) -> HostKernels:
    kernels = HostKernels(dtype)
    assert kernels.uses_numba
    return kernels


@pytest.fixture(scope="session")
def plain(dtype: torch.dtype) -> HostKernels:
    return HostKernels(dtype, use_numba=False)


def _assert_close(
    found: torch.Tensor, wanted: torch.Tensor, *, ulps: int = 2, near_zero: float = 1 / 256
) -> None:
    """bf16: within `ulps`, below `near_zero` of the largest those of that; fp32: 1e-5 of it."""
    a, b = found.double(), wanted.double()
    scale = float(b.abs().max())
    if found.dtype == torch.bfloat16:
        limit = ulps * torch.maximum(b.abs(), torch.tensor(scale * near_zero)) * 2.0**-7
    else:
        limit = torch.full_like(b, max(scale, 1e-6) * 1e-5)
    worst = float(((a - b).abs() - limit).max())
    assert not torch.isnan(a).any()
    assert worst <= 0, f"off by {float((a - b).abs().max())} at scale {scale}"


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    return _assert_close


@dataclass
class Tables:
    """Keeps alive everything the addresses in `slices` point to."""

    slices: tuple[LoraSlice, ...]
    k_in: int
    rank: int
    max_loras: int
    columns: int
    keep: list[torch.Tensor]

    def group(self, kernels: HostKernels) -> LoraGroup:
        return kernels.lora_group(
            self.slices, k_in=self.k_in, rank=self.rank, max_loras=self.max_loras
        )


def make_tables(
    dtype: torch.dtype,
    k_in: int,
    rank: int,
    outs: tuple[int, ...],
    max_loras: int,
    *,
    missing: frozenset[tuple[int, int]] = frozenset(),
    seed: int = 0,
) -> Tables:
    """One pair per slice and slot; pairs in `missing` (slice, slot) have cells 0.

    Each matrix is followed by NaN, so that a read past its end spoils the result.
    """
    generator = torch.Generator().manual_seed(seed)
    keep, slices, column = [], [], 3
    for j, n_out in enumerate(outs):
        cells = torch.zeros((2, max_loras), dtype=torch.int64)
        scales = torch.rand(max_loras, generator=generator) + 0.5
        for slot in range(max_loras):
            if (j, slot) in missing:
                continue
            for which, count in enumerate((rank * k_in, n_out * rank)):
                memory = torch.full((count + 64,), float("nan"), dtype=dtype)
                memory[:count] = torch.randn(count, generator=generator) * 0.3
                cells[which, slot] = memory.data_ptr()
                keep.append(memory)
        keep += [cells, scales]
        a_table, b_table = cells[0].data_ptr(), cells[1].data_ptr()
        slices.append(LoraSlice(a_table, b_table, scales.data_ptr(), n_out, column))
        column += n_out + 5
    return Tables(tuple(slices), k_in, rank, max_loras, column, keep)


@pytest.fixture(scope="session")
def tables() -> Callable[..., Tables]:
    return make_tables
