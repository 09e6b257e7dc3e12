"""The adapter pool on a CUDA device: commits and retirements between replays of one graph."""

from __future__ import annotations

import numpy as np
import pytest

from rota.gpu.graphs import GraphCache, GraphKey
from rota.gpu.kernels.bgmv import LoraSlice
from rota.gpu.kernels.lora_device import DeviceLoraGroup, planes_bytes
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.pool import LoraPool

ROWS, SLOTS = 4, 3
DIMS = ModelDims(2, 16, 24, 8, 16, 32, 16)


@pytest.fixture
def layout():
    return SlotLayout(DIMS, 8, Elem.BF16)


def image(layout, seed, bf16, absent=()):
    """An adapter of small integers; pairs in ``absent`` are not in it."""
    rng = np.random.default_rng(seed)
    values = bf16(rng.integers(-1, 2, layout.slot_bytes // 2))
    present = tuple(at not in absent for at in range(len(layout.pairs)))
    scales = np.where(present, np.float32(1 + seed % 3 / 2), 0).astype(np.float32)
    return SlotImage(
        values.view(np.uint8), present, scales, (8,) * len(present), str(seed), layout.fingerprint()
    )


class Served:
    """q, k and v of layer 1 through a pool, under one graph."""

    def __init__(self, rig, layout, bf16):
        self.rig, self.layout = rig, layout
        self.pool = LoraPool(rig.device, layout, SLOTS, max_rows=8)
        rng = np.random.default_rng(0)
        self.x = bf16(rng.integers(-3, 4, (ROWS, 16)))
        self.width = 24 + 8 + 8
        self.x_addr = rig.up(self.x, "x")
        self.out_addr = rig.up(np.zeros((ROWS, self.width), np.uint16), "out")
        self.pairs = [p for p, pair in enumerate(layout.pairs) if pair.layer == 1][:3]
        slices, column = [], 0
        for p in self.pairs:
            slices.append(LoraSlice(*self.pool.pair_tables(p), layout.pairs[p].n_out, column))
            column += layout.pairs[p].n_out
        nbytes = planes_bytes(ROWS, 3, layout.stride, 16)
        planes = rig.device.alloc(nbytes, label="planes")
        rig.held.append(planes)
        self.group = DeviceLoraGroup(
            rig.device,
            tuple(slices),
            k_in=16,
            rank=layout.stride,
            max_loras=SLOTS,
            planes=planes,
            planes_nbytes=nbytes,
        )
        self.cache = GraphCache(rig.device)

    def step(self, slots):
        """One routed step; out starts at zero."""
        self.pool.set_row_slots(slots, self.rig.stream)

        def record():
            d, s = self.rig.device, self.rig.stream
            d.memset(self.out_addr, 0, 2 * ROWS * self.width, s)
            self.group.apply(
                self.x_addr, 16, self.out_addr, self.width, self.pool.row_slots_address, ROWS, s
            )

        self.cache.run(GraphKey("decode", ROWS, "routed"), self.rig.stream, record)
        return self.rig.down(self.out_addr, (ROWS, self.width), np.uint16)

    def close(self):
        assert self.cache.captures == 1
        assert self.cache.drain() == 0
        self.rig.device.synchronize(self.rig.stream)
        self.pool.close()


def story(rig, layout, to_bits):
    """Everything a slot goes through; the outputs on the way."""
    served = Served(rig, layout, to_bits)
    stream, pool = rig.stream, served.pool
    seen = [served.step([0, 1, 2, -1])]  # empty slots change nothing
    pool.commit(0, image(layout, 1, to_bits), stream)
    pool.commit(2, image(layout, 2, to_bits, absent=served.pairs[1:2]), stream)
    seen.append(served.step([0, 1, 2, -1]))
    pool.commit(1, image(layout, 3, to_bits), stream)
    seen.append(served.step([2, 1, 1, 0]))
    pool.commit(0, image(layout, 4, to_bits), stream)  # a swap
    seen.append(served.step([2, 1, 1, 0]))
    pool.retire(1, stream)
    seen.append(served.step([2, 1, 1, 0]))
    seen.append(served.step([-1, -1]))
    served.close()
    return seen


def test_commits_swaps_and_retirements_under_a_graph_equal_the_host(rig, host_rig, layout, bf16):
    to_bits, from_bits = bf16
    got, want = story(rig, layout, to_bits), story(host_rig, layout, to_bits)
    for step, (here, there) in enumerate(zip(got, want, strict=True)):
        assert np.array_equal(here, there), step
    assert not got[0].any() and not got[5].any()
    assert got[1][0].any() and not got[1][1].any() and not got[1][3].any()
    assert got[1][2, :24].any() and not got[1][2, 24:32].any()  # no k pair in that adapter
    assert not np.array_equal(got[2][3], got[3][3])  # the swap is seen
    assert np.array_equal(got[2][:3], got[3][:3])  # and only where it was
    assert not got[4][1:3].any() and np.array_equal(got[4][0], got[3][0])
    # One row against float64, with the rounding points in their places.
    pair = next(pair for pair in layout.pairs if pair.layer == 1)
    adapter = image(layout, 1, to_bits)
    raw = adapter.buffer.view(np.uint16)
    a = from_bits(raw[pair.a_off // 2 :][: 8 * 16].reshape(8, 16)).astype(float)
    b = from_bits(raw[pair.b_off // 2 :][: 24 * 8].reshape(24, 8)).astype(float)
    x = from_bits(to_bits(np.random.default_rng(0).integers(-3, 4, (ROWS, 16))))[0].astype(float)
    delta = from_bits(to_bits(b @ from_bits(to_bits(a @ x))))
    assert np.array_equal(got[1][0, :24], to_bits(np.float32(1.5) * delta))


def test_a_closed_pool_under_a_live_graph_is_refused_at_replay(rig, layout, bf16):
    from rota.errors import DeviceError

    served = Served(rig, layout, bf16[0])
    served.step([0, 0, 0, 0])
    rig.device.synchronize(rig.stream)
    served.pool.close()
    with pytest.raises(DeviceError) as caught:
        served.cache.run(GraphKey("decode", ROWS, "routed"), rig.stream, lambda: None)
    assert caught.value.code == "use-after-free"
    assert caught.value.subject in ("lora tables", "lora row slots")
    assert len(served.cache) == 0
