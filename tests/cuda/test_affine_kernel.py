"""The affine kernel on real NVRTC output: the bits of the host form, and nobody else's columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.kernels.affine import AffineSlice
from rota.gpu.kernels.affine_device import DeviceAffineGroup, affine_spec

N_SLOTS = 3


def run(rig, widths, slots, dtype, seed=0):
    """out of one launch, bits as uint16 or uint32 ``[rows, stride]``, and what it was before."""
    rng = np.random.default_rng(seed)
    slices, column = [], 2
    for j, width in enumerate(widths):
        step = 4 * (width + 5)
        cells = np.zeros(N_SLOTS, np.uint64)
        for slot in range(N_SLOTS):
            vectors = np.full(2 * (width + 5), np.nan, np.float32)
            vectors[:width] = rng.uniform(0.5, 2, width)
            vectors[width + 5 : 2 * width + 5] = rng.normal(size=width)
            if (j, slot) != (0, 1):
                cells[slot] = rig.up(vectors, "vectors")
        slices.append(AffineSlice(rig.up(cells, "cells"), step, width, column))
        column += width + 3
    values = rng.normal(size=(len(slots), column)).astype(np.float32)
    bits = values.view(np.uint32)
    before = bits if dtype == torch.float32 else (bits >> 16).astype(np.uint16)
    out = rig.up(before, "out")
    rows = rig.up(np.asarray(slots, np.int32), "rows")
    group = DeviceAffineGroup(rig.device, tuple(slices), max_loras=N_SLOTS, dtype=dtype)
    group.apply(out, column, rows, len(slots), rig.stream)
    return rig.down(out, before.shape, before.dtype), before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("widths", [(1,), (256,), (257, 31), (40, 300, 8)])
def test_the_bits_of_the_host_form(rig, host_rig, widths, dtype):
    slots = [0, -1, 1, 2, 2]
    found, before = run(rig, widths, slots, dtype)
    wanted, _ = run(host_rig, widths, slots, dtype)
    assert np.array_equal(found, wanted)
    assert np.array_equal(found[1], before[1])  # base
    assert np.array_equal(found[2, : 2 + widths[0]], before[2, : 2 + widths[0]])  # no vectors
    assert not np.array_equal(found[0], before[0])
    column = 2
    for width in widths:
        assert np.array_equal(
            found[:, column + width : column + width + 3],
            before[:, column + width : column + width + 3],
        )
        column += width + 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("first", range(1, 131, 26))
def test_every_batch_gives_the_bits_of_the_host_form(rig, host_rig, first, dtype):
    for n in range(first, first + 26):
        slots = np.random.default_rng(n).integers(-1, N_SLOTS, n)
        found, _ = run(rig, (19, 3), slots, dtype, seed=n)
        wanted, _ = run(host_rig, (19, 3), slots, dtype, seed=n)
        assert np.array_equal(found, wanted), n


def test_no_rows_launch_nothing(rig):
    spec = affine_spec(torch.bfloat16)
    assert spec is affine_spec(torch.bfloat16)
    slices = (AffineSlice(0, 0, 8, 0),)
    group = DeviceAffineGroup(rig.device, slices, max_loras=1, dtype=torch.bfloat16)
    group.apply(0, 8, 0, 0, rig.stream)


def test_a_slot_outside_the_tables_kills_the_device_by_name(fake_rig):
    with pytest.raises(DeviceError):
        run(fake_rig, (8,), [0, N_SLOTS], torch.bfloat16)
        fake_rig.device.synchronize(fake_rig.stream)


def test_what_it_cannot_serve_is_refused(rig):
    part = AffineSlice(0, 0, 8, 0)
    for slices in ((), (part,) * 4):
        with pytest.raises(DeviceError) as caught:
            DeviceAffineGroup(rig.device, slices, max_loras=1, dtype=torch.float32)
        assert caught.value.code == "bad-argument"
    with pytest.raises(DeviceError) as caught:
        affine_spec(torch.float16)
    assert caught.value.code == "bad-argument"
    group = DeviceAffineGroup(rig.device, (part,), max_loras=1, dtype=torch.float32)
    with pytest.raises(DeviceError) as caught:
        group.apply(0, 8, 0, 65536, rig.stream)
    assert caught.value.code == "bad-argument"
