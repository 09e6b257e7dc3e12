"""The float32 LoRA kernels: exact on small integers, close to float64 on random values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.kernels.lora_device import lora_specs


@pytest.mark.parametrize("rank", [8, 16, 24, 40, 64, 128])
@pytest.mark.parametrize("k_in", [8, 72, 520, 4104])
def test_ranks_and_lengths_are_exact(rig, problem, rank, k_in):
    p = problem(n=4, k_in=k_in, rank=rank, widths=(37, 20), slots=[2, -1, 0, 2], wide=True)
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("padded", range(8, 65, 8))
def test_every_rank_is_exact(rig, problem, padded):
    for real in range(padded - 7, padded + 1):
        p = problem(
            n=4, k_in=40, rank=padded, real_rank=real, widths=(37,), slots=[1, 1, -1, 0], wide=True
        )
        assert np.array_equal(p.solve(rig), p.expected()), real


@pytest.mark.parametrize("first", range(1, 131, 13))
def test_every_batch_is_exact(rig, problem, first):
    for n in range(first, first + 13):
        slots = np.random.default_rng(n).integers(-1, 3, n)
        p = problem(n=n, k_in=24, rank=8, widths=(20, 9), slots=slots, wide=True)
        assert np.array_equal(p.solve(rig), p.expected()), n


@pytest.mark.parametrize("slots", [[1, 1, 1, 1, 1], [0, 2, 2, 2, -1, 2, 2], [2, 0, 0, 0, 0, 1, 1]])
def test_runs_of_one_slot_are_exact(rig, problem, slots):
    p = problem(n=len(slots), k_in=520, rank=24, widths=(150, 70), slots=slots, wide=True)
    assert np.array_equal(p.solve(rig), p.expected())


@pytest.mark.parametrize("width", [1, 127, 129, 512, 700])
def test_widths_around_the_tiles_and_three_slices(rig, problem, width):
    p = problem(n=2, k_in=16, rank=8, widths=(width, 1, width), slots=[0, 2], wide=True)
    assert np.array_equal(p.solve(rig), p.expected())


def test_many_rows_and_absent_pairs(rig, problem):
    slots = np.random.default_rng(1).integers(-1, 3, 70)
    p = problem(n=70, k_in=40, rank=16, widths=(24, 9), slots=slots, wide=True)
    p.absent = {(0, 0), (1, 2)}
    assert np.array_equal(p.solve(rig), p.expected())


def test_the_host_form_is_exact_too(host_rig, problem):
    p = problem(n=6, k_in=1032, rank=16, widths=(40, 9, 30), slots=[0, 1, -1, 2, 2, 0], wide=True)
    p.absent = {(1, 0)}
    assert np.array_equal(p.solve(host_rig), p.expected())


def test_random_values_keep_float32(rig, problem):
    p = problem(n=5, k_in=1032, rank=32, widths=(100, 60), slots=[0, 1, 2, -1, 1], wide=True)
    rng = np.random.default_rng(5)
    p.x = rng.standard_normal(p.x.shape, np.float32)
    p.a = rng.standard_normal(p.a.shape, np.float32)
    p.b = [rng.standard_normal(b.shape, np.float32) for b in p.b]
    got = p.solve(rig)
    want = p.out.astype(np.float64)
    for row, slot in enumerate(p.slots):
        for j, width in enumerate(p.widths if slot >= 0 else ()):
            delta = p.b[j][slot].astype(float) @ (p.a[j, slot].astype(float) @ p.x[row, :1032])
            want[row, p.columns[j] :][:width] += p.scales[j, slot] * delta
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


def test_other_element_types_are_refused():
    with pytest.raises(DeviceError) as caught:
        lora_specs(8, 512, torch.float16)
    assert (caught.value.code, caught.value.subject) == ("bad-argument", "dtype")
