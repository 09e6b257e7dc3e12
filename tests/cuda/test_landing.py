"""Images brought to the device ahead of their commit: the right bytes, from any thread, or not."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.lora import landing
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.landing import Landing, Part, landing_for
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.pool import LoraPool

LAYOUT = SlotLayout(ModelDims(2, 16, 24, 8, 16, 32, 16), 8, Elem.BF16)
NBYTES = LAYOUT.slot_bytes


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks an image, the last one shorter."""
    monkeypatch.setattr(landing, "CHUNK_BYTES", 1000)
    assert NBYTES > 4000 and NBYTES % 1000


def image(seed, digest=None):
    bits = np.random.default_rng(seed).integers(0, 256, NBYTES).astype(np.uint8)
    count = len(LAYOUT.pairs)
    return SlotImage(
        bits, (True,) * count, np.ones(count, np.float32), (8,) * count,
        digest or str(seed), LAYOUT.fingerprint(),
    )  # fmt: skip


@pytest.fixture(params=["host", "cuda"])
def any_rig(request):
    """A rig on the host, then on CUDA."""
    return request.getfixturevalue("host_rig" if request.param == "host" else "rig")


@pytest.fixture
def pool(any_rig):
    made = LoraPool(any_rig.device, LAYOUT, 2, max_rows=4, ahead=True)
    yield made
    any_rig.device.synchronize(any_rig.stream)
    made.close()
    made.close()


def content(rig, pool, slot):
    return rig.down(pool.slot_address(slot), NBYTES, np.uint8)


def test_the_commit_of_a_landed_image_copies_no_weights_from_the_host(rig):
    pool = LoraPool(rig.device, LAYOUT, 2, max_rows=4, ahead=True)
    one = image(1)
    assert pool.land(one)
    before = dict(rig.driver.calls) if rig.driver else {}
    pool.commit(1, one, rig.stream)
    if rig.driver:
        made = {name: rig.driver.calls[name] - before.get(name, 0) for name in rig.driver.calls}
        assert (made["cuMemcpyDtoDAsync"], made["cuMemcpyHtoDAsync"]) == (1, 1)  # weights; tables
    assert np.array_equal(content(rig, pool, 1), one.buffer)
    pool.commit(0, one, rig.stream)  # it was taken: from the host now
    assert np.array_equal(content(rig, pool, 0), one.buffer)
    rig.device.synchronize(rig.stream)
    pool.close()


def test_only_that_very_image_is_taken(any_rig, pool):
    first, second = image(1, "same"), image(2, "same")
    assert pool.land(first)
    pool.commit(0, second, any_rig.stream)
    assert np.array_equal(content(any_rig, pool, 0), second.buffer)
    pool.commit(1, first, any_rig.stream)
    assert np.array_equal(content(any_rig, pool, 1), first.buffer)


def test_the_next_image_lands_behind_the_copy_of_the_one_before(any_rig, pool):
    """Nobody has waited for the first commit's copy when the second upload is queued."""
    first, second, third = image(1), image(2), image(3)
    assert pool.land(first)
    pool.commit(0, first, any_rig.stream)
    assert pool.land(second) and pool.land(third)  # over one whose commit does not come
    pool.commit(1, third, any_rig.stream)
    assert np.array_equal(content(any_rig, pool, 0), first.buffer)
    assert np.array_equal(content(any_rig, pool, 1), third.buffer)


def test_an_image_of_another_layout_is_not_landed(any_rig, pool):
    other = SlotLayout(LAYOUT.dims, 16, Elem.BF16)
    count = len(other.pairs)
    wrong = SlotImage(
        np.zeros(other.slot_bytes, np.uint8), (True,) * count, np.ones(count, np.float32),
        (8,) * count, "other", other.fingerprint(),
    )  # fmt: skip
    assert not pool.land(wrong)


def test_an_annex_lands_along_and_goes_to_the_arena(any_rig):
    """One upload, two places."""
    layout = SlotLayout(LAYOUT.dims, 8, Elem.BF16, overlay_rows=16)
    annex = layout.annex_for([False] * len(layout.pairs), (), 3, 9)
    assert annex is not None and annex.nbytes < layout.max_annex_bytes
    pool = LoraPool(any_rig.device, layout, 2, max_rows=4, ahead=True, arena_bytes=8192)
    count = len(layout.pairs)
    bytes_ = np.random.default_rng(1).integers(0, 256, layout.slot_bytes + annex.nbytes, np.uint8)
    one = SlotImage(
        bytes_, (False,) * count, np.zeros(count, np.float32), (0,) * count, "one",
        layout.fingerprint(), 3, 9, annex=annex,
    )  # fmt: skip
    for slot, extent, landed in ((0, 256, True), (1, 4096, False)):
        assert not landed or pool.land(one)
        pool.commit(slot, one, any_rig.stream, extent)
        here = any_rig.down(pool.arena_address + extent, annex.nbytes, np.uint8)
        slot_part = any_rig.down(pool.slot_address(slot), layout.slot_bytes, np.uint8)
        assert np.array_equal(np.concatenate([slot_part, here]), bytes_)
    any_rig.device.synchronize(any_rig.stream)
    pool.close()


def test_a_worker_lands_while_the_device_thread_captures(rig):
    pool = LoraPool(rig.device, LAYOUT, 2, max_rows=4, ahead=True)
    one, said = image(1), []
    a = rig.up(np.zeros(8, np.uint8))
    rig.device.begin_capture(rig.stream)
    rig.device.memset(a, 1, 8, rig.stream)
    worker = threading.Thread(target=lambda: said.append(pool.land(one)))
    worker.start()
    worker.join()
    graph = rig.device.end_capture(rig.stream)
    rig.device.destroy_graph(graph)
    assert said == [True]
    pool.commit(0, one, rig.stream)
    assert np.array_equal(content(rig, pool, 0), one.buffer)
    rig.device.synchronize(rig.stream)
    pool.close()


class Slow(FaultyDevice):
    """A host whose second copy of an upload waits until it is let go."""

    def __init__(self):
        super().__init__(HostDevice(), ())
        self.reached, self.go = threading.Event(), threading.Event()
        self.copies = 0

    def copy_h2d(self, *args):
        self.copies += 1
        if self.copies == 2:
            self.reached.set()
            assert self.go.wait(30)
        super().copy_h2d(*args)


def test_while_one_lands_others_do_without_and_close_ends_it():
    device = Slow()
    stream = device.create_stream(label="s")
    target = device.alloc(NBYTES, label="slot")
    place, one, said = Landing(device, NBYTES), image(1), []
    worker = threading.Thread(target=lambda: said.append(place.upload(one)))
    worker.start()
    assert device.reached.wait(30)
    assert not place.upload(image(2))
    assert not place.copy_to([Part(target, 0, NBYTES)], one, stream)
    closer = threading.Thread(target=place.close)
    closer.start()
    while not place._closing:
        pass
    device.go.set()
    worker.join()
    closer.join()
    assert said == [False] and device.copies < NBYTES // 1000
    assert device.live_labels() == ("slot", "s")
    assert not place.upload(one)
    device.free(target)
    device.destroy_stream(stream)
    device.close()


@pytest.mark.parametrize(
    ("op", "nth"),
    [("wait_event", 1), ("copy_h2d", 1), ("copy_h2d", 3), ("record_event", 2),
     ("synchronize_event", 1), ("synchronize", 1)],
)  # fmt: skip
def test_an_upload_that_fails_is_not_taken_and_the_next_one_is(op, nth):
    inner = HostDevice()
    device = FaultyDevice(inner, [Fault(op, nth)])
    stream, target = inner.create_stream(label="s"), inner.alloc(NBYTES, label="slot")
    place, one = Landing(device, NBYTES), image(1)
    assert not place.upload(one) and device.fired
    assert not place.copy_to([Part(target, 0, NBYTES)], one, stream)
    assert place.upload(one) and place.copy_to([Part(target, 0, NBYTES)], one, stream)
    inner.synchronize(stream)
    place.close()
    assert inner.live_labels() == ("slot", "s")
    inner.free(target)
    inner.destroy_stream(stream)


def test_a_copy_that_fails_leaves_the_place_unused_for_good():
    """Nobody knows whether it runs: nothing may be written over what it reads."""
    inner = HostDevice()
    device = FaultyDevice(inner, [Fault("record_event", NBYTES // 1000 + 2)])
    stream, target = inner.create_stream(label="s"), inner.alloc(NBYTES, label="slot")
    place, one = Landing(device, NBYTES), image(1)
    assert place.upload(one)
    with pytest.raises(DeviceError):
        place.copy_to([Part(target, 0, NBYTES)], one, stream)
    assert not place.upload(one)
    inner.synchronize(stream)
    place.close()
    assert inner.live_labels() == ("slot", "s")
    inner.free(target)
    inner.destroy_stream(stream)


def test_without_room_commits_copy_from_the_host():
    device = HostDevice(memory_limit=NBYTES)
    assert landing_for(device, NBYTES) is None
    assert device.live_labels() == ()
    device.close()
    with pytest.raises(DeviceError) as caught:
        landing_for(device, NBYTES)
    assert caught.value.code == "device-closed"
