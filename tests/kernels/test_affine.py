"""Factor and offset per output: against the reference, other rows untouched to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rota.errors import InternalError
from rota.gpu.kernels.affine import AffineGroup, AffineSlice
from rota.gpu.kernels.host import HostKernels

MAX_LORAS = 4


def group(
    kernels: HostKernels, outs: tuple[int, ...], missing: Any = ()
) -> tuple[AffineGroup, Any]:
    """Vectors for every slice and slot but ``missing``; NaN stands behind each vector."""
    generator = torch.Generator().manual_seed(3)
    slices, keep, column = [], [], 2
    for j, n_out in enumerate(outs):
        cells = torch.zeros(MAX_LORAS, dtype=torch.int64)
        for slot in range(MAX_LORAS):
            memory = torch.full((2 * n_out + 40,), float("nan"))
            memory[:n_out] = torch.rand(n_out, generator=generator) + 0.5
            memory[n_out + 20 : 2 * n_out + 20] = torch.randn(n_out, generator=generator)
            keep.append(memory)
            if (j, slot) not in missing:
                cells[slot] = memory.data_ptr()
        keep.append(cells)
        slices.append(AffineSlice(cells.data_ptr(), 4 * (n_out + 20), n_out, column))
        column += n_out + 3
    return kernels.affine_group(tuple(slices), max_loras=MAX_LORAS), keep


def apply(made: AffineGroup, out: torch.Tensor, slots: list[int]) -> torch.Tensor:
    result, cells = out.clone(), torch.tensor(slots, dtype=torch.int32)
    made.apply(result.data_ptr(), result.stride(0), cells.data_ptr(), len(slots))
    return result


@pytest.mark.parametrize("outs", [(16,), (5,), (48, 33), (64, 16, 16), (1, 100)])
def test_agrees_with_the_reference_and_touches_nothing_else(
    fast: HostKernels, plain: HostKernels, assert_close: Any, outs: tuple[int, ...]
) -> None:
    missing = {(0, 1)}
    (one, keep), (two, more) = group(fast, outs, missing), group(plain, outs, missing)
    width = sum(outs) + 3 * len(outs) + 9
    out = torch.randn((8, width), generator=torch.Generator().manual_seed(1)).to(fast.dtype)
    slots = [-1, 0, 1, 2, -1, 3, 3, 0]
    found, wanted = apply(one, out, slots), apply(two, out, slots)
    assert_close(found, wanted, ulps=1)
    for row in (0, 4):
        assert torch.equal(found[row], out[row])
    assert torch.equal(found[2, : 2 + outs[0]], out[2, : 2 + outs[0]])  # no vectors there
    column = 2
    for n_out in outs:
        for between in (slice(column + n_out, column + n_out + 3), slice(0, 2)):
            assert torch.equal(found[:, between], out[:, between])
        column += n_out + 3
    alone = torch.cat([apply(one, out[row : row + 1], [slots[row]]) for row in range(8)])
    assert torch.equal(found, alone)  # whatever else is in the batch
    del keep, more


@pytest.mark.parametrize("slot", [-2, MAX_LORAS])
@pytest.mark.parametrize("numba", [True, False])
def test_a_slot_outside_the_tables(
    fast: HostKernels, plain: HostKernels, slot: int, numba: bool
) -> None:
    made, _ = group(fast if numba else plain, (8,))
    with pytest.raises(InternalError) as caught:
        apply(made, torch.zeros((2, 20), dtype=fast.dtype), [-1, slot])
    assert (caught.value.code, caught.value.subject) == ("slot-out-of-range", "row 1")


def test_too_many_slices(fast: HostKernels) -> None:
    with pytest.raises(InternalError) as caught:
        group(fast, (8, 8, 8, 8))
    assert caught.value.code == "lora-group-slices"
