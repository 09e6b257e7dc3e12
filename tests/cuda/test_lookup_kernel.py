"""An embedding's delta: exact answers over ranks, batches and widths, on both devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.kernels.bgmv import LoraSlice
from rota.gpu.kernels.lookup import LookupGroup
from rota.gpu.kernels.lookup_device import DeviceLookupGroup, lookup_spec

VOCAB = 61
N_SLOTS = 3


class Lookup:
    """One problem. Values are small integers, so that every sum is exact whatever its order."""

    def __init__(self, bf16, *, rank, width, slots, wide=False, absent=(), seed=0):
        to_bf16, from_bf16 = bf16
        rng = np.random.default_rng(seed)
        self.bits = (lambda v: np.asarray(v, np.float32)) if wide else to_bf16
        self.values = (lambda v: v) if wide else from_bf16
        self.dtype = torch.float32 if wide else torch.bfloat16
        self.rank, self.width, self.n = -(-rank // 8) * 8, width, len(slots)
        self.slots, self.absent = np.asarray(slots, np.int32), absent
        self.tokens = rng.integers(0, VOCAB, self.n)
        self.stride = width + 5
        self.out = self.bits(rng.integers(-99, 100, (self.n, self.stride)))
        self.a = np.zeros((N_SLOTS, self.rank, VOCAB), self.out.dtype)
        self.b = np.zeros((N_SLOTS, width, self.rank), self.out.dtype)
        self.a[:, :rank] = self.bits(rng.integers(-3, 4, (N_SLOTS, rank, VOCAB)))
        self.b[:, :, :rank] = self.bits(rng.integers(-2, 3, (N_SLOTS, width, rank)))
        self.scales = np.array([0.7, 2.0, 3.1], np.float32)

    def expected(self):
        out = self.out.copy()
        for row, slot in enumerate(self.slots):
            if slot >= 0 and slot not in self.absent:
                a = self.values(self.a[slot][:, self.tokens[row]])
                b = self.values(self.b[slot]).astype(np.float64)
                delta = self.values(self.bits(b @ a.astype(np.float64)))
                before = self.values(out[row, 3 : 3 + self.width])
                out[row, 3 : 3 + self.width] = self.bits(before + self.scales[slot] * delta)
        return out

    def load(self, rig, planes=None):
        """Copy everything to the device and make the group there."""
        cells = [np.zeros(N_SLOTS, np.uint64) for _ in range(2)]
        for slot in set(range(N_SLOTS)) - set(self.absent):
            cells[0][slot] = rig.up(self.a[slot], f"A {slot}")
            cells[1][slot] = rig.up(self.b[slot], f"B {slot}")
        tables = [rig.up(part, "cells") for part in cells]
        part = LoraSlice(*tables, rig.up(self.scales, "scales"), self.width, 3)
        self.rig, self.at = rig, rig.up(self.out, "out")
        self.args = (
            rig.up(self.tokens, "tokens"),
            self.at,
            self.stride,
            rig.up(self.slots, "row slots"),
        )
        size = dict(vocab=VOCAB, rank=self.rank, max_loras=N_SLOTS, dtype=self.dtype)
        nbytes = 4 * self.n * self.rank if planes is None else planes
        scratch = rig.up(np.full(max(nbytes, 1), 0xFF, np.uint8), "planes")
        self.group = DeviceLookupGroup(
            rig.device, part, planes=scratch, planes_nbytes=nbytes, **size
        )
        self.reference = LookupGroup(part, **size)
        return self

    def solve(self, rig):
        self.load(rig)
        self.group.apply(*self.args, self.n, rig.stream)
        return self.rig.down(self.at, self.out.shape, self.out.dtype)


@pytest.fixture(params=["driver", "host"])
def either(request):
    """A rig on the CUDA device, and one on the host device."""
    return request.getfixturevalue("rig" if request.param == "driver" else "host_rig")


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
@pytest.mark.parametrize("rank", range(1, 65))
def test_every_rank_is_exact(either, bf16, rank, wide):
    p = Lookup(bf16, rank=rank, width=37, slots=[2, -1, 0, 2, 2], wide=wide)
    assert np.array_equal(p.solve(either), p.expected())


@pytest.mark.parametrize("rank", [96, 128])
def test_large_ranks_are_exact(either, bf16, rank):
    p = Lookup(bf16, rank=rank, width=150, slots=[1, 0, -1])
    assert np.array_equal(p.solve(either), p.expected())


@pytest.mark.parametrize("first", range(1, 131, 26))
def test_every_batch_is_exact(either, bf16, first):
    for n in range(first, first + 26):
        slots = np.random.default_rng(n).integers(-1, N_SLOTS, n)
        p = Lookup(bf16, rank=(8, 16, 24)[n % 3], width=19, slots=slots, seed=n)
        assert np.array_equal(p.solve(either), p.expected()), n


@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize("width", [1, 31, 127, 128, 129, 700])
def test_outputs_of_every_width_around_the_tiles(either, bf16, rank, width):
    p = Lookup(bf16, rank=rank, width=width, slots=[0, 2])
    assert np.array_equal(p.solve(either), p.expected())


def test_base_rows_and_absent_pairs_keep_every_bit(either, bf16):
    p = Lookup(bf16, rank=8, width=40, slots=[-1, 1, 0, -1, 1], absent=(1,))
    p.out[:] = 0x7FC1  # a NaN with a payload: any arithmetic on it would change the bits
    p.tokens[[0, 1, 3]] = [-5, 1 << 40, VOCAB]  # of rows without the pair, never looked at
    found = p.solve(either)
    assert np.array_equal(found[[0, 1, 3, 4]], p.out[[0, 1, 3, 4]])


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
def test_the_hosts_group_gives_the_same(host_rig, bf16, wide):
    p = Lookup(bf16, rank=5, width=33, slots=[2, -1, 0, 2, 1, 0, 0], absent=(1,), wide=wide)
    p.tokens[[0, 3]] = 7  # one token twice, of one adapter
    p.load(host_rig).reference.apply(*p.args, p.n)
    assert np.array_equal(host_rig.down(p.at, p.out.shape, p.out.dtype), p.expected())


def test_no_rows_launch_nothing(rig, bf16):
    p = Lookup(bf16, rank=8, width=40, slots=[0]).load(rig)
    p.group.apply(*p.args, 0, rig.stream)
    assert np.array_equal(rig.down(p.at, p.out.shape, p.out.dtype), p.out)


@pytest.mark.parametrize("what", ["slot", "token", "negative token"])
def test_a_slot_or_a_token_outside_the_tables_kills_the_device_by_name(fake_rig, bf16, what):
    p = Lookup(bf16, rank=8, width=8, slots=[0, N_SLOTS if what == "slot" else 1])
    if what != "slot":
        p.tokens[1] = VOCAB if what == "token" else -1
    with pytest.raises(DeviceError) as caught:
        p.solve(fake_rig)
    assert caught.value.code == "device-dead"


@pytest.mark.parametrize("launch", [1, 2])
def test_a_launch_that_fails_is_raised(host_rig, bf16, launch):
    from rota.gpu.decorators import Fault, FaultyDevice

    host_rig.device = FaultyDevice(host_rig.device, [Fault("launch", launch)])
    p = Lookup(bf16, rank=8, width=8, slots=[0]).load(host_rig)
    with pytest.raises(DeviceError) as caught:
        p.group.apply(*p.args, 1, host_rig.stream)
    assert caught.value.code == "injected"


def test_what_it_cannot_serve_is_refused(host_rig, bf16):
    p = Lookup(bf16, rank=8, width=8, slots=[0] * 4).load(host_rig, planes=3 * 4 * 8)
    for rows in (4, 65536, -1):
        with pytest.raises(DeviceError) as caught:
            p.group.apply(*p.args, rows, host_rig.stream)
        assert caught.value.code == "bad-argument"
    for rank, dtype in ((136, torch.bfloat16), (12, torch.bfloat16), (8, torch.float16)):
        with pytest.raises(DeviceError) as caught:
            DeviceLookupGroup(
                host_rig.device,
                LoraSlice(0, 0, 0, 8, 0),
                vocab=VOCAB,
                rank=rank,
                max_loras=1,
                planes=0,
                planes_nbytes=0,
                dtype=dtype,
            )
        assert caught.value.code == "bad-argument"
    assert lookup_spec(8, torch.float32) is lookup_spec(8, torch.float32)
