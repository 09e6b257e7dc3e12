"""A pool that serves from the images themselves: what it copies, what it keeps and for how long."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.pool import LoraPool
from rota.gpu.lora.source import BytesSource
from rota.gpu.lora.stage import stage


class Counting(FaultyDevice):
    """A checked host device that counts, and fails where a test says."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(HostDevice(checked=True), list(faults))


class Bench:
    def __init__(self, kit: Any, device: Any) -> None:
        self.kit, self.device, self.layout = kit, device, kit.layout()
        self.pool = LoraPool(device, self.layout, 2, max_rows=4, adopt=True)
        self.stream = device.create_stream(label="test")

    def image(self, leaf: str, **more: Any) -> SlotImage:
        return self.kit.stage(  # type: ignore[no-any-return]  # the fixture is Any
            self.kit.pair(0, leaf), self.kit.config(target_modules=[leaf]), self.layout, **more
        ).image

    def commit(self, slot: int, image: SlotImage) -> None:
        self.pool.commit(slot, image, self.stream)

    def weights(self, slot: int, pair: int) -> bytes:
        a, b = self.pool.view(slot, pair)
        return a.view(torch.int16).numpy().tobytes() + b.view(torch.int16).numpy().tobytes()


@pytest.fixture
def bench(kit: Any) -> Iterator[Bench]:
    made = Bench(kit, Counting())
    yield made
    made.device.destroy_stream(made.stream)
    made.pool.close()
    assert made.device.live_labels() == ()


def expected(bench: Bench, image: SlotImage, pair: int) -> bytes:
    a, b = bench.layout.pair_views(image.buffer, pair, image.annex)
    return bytes(a.tobytes() + b.tobytes())


def test_a_commit_copies_no_weights(bench: Bench) -> None:
    image = bench.image("q_proj")
    before = bench.device.calls("copy_h2d")
    bench.commit(1, image)
    assert bench.device.calls("copy_h2d") == before + 1  # the tables
    assert bench.pool.slot_address(1) == image.address and image.address % 4096 == 0
    assert bench.weights(1, 0) == expected(bench, image, 0)


def test_what_is_lent_is_copied_and_may_change_afterwards(bench: Bench) -> None:
    memory = bytearray(bench.layout.slot_bytes)
    image = bench.image("q_proj", buffer=memory)
    kept = expected(bench, image, 0)
    bench.commit(0, bench.image("v_proj"))
    bench.commit(0, image)
    assert image.lent and bench.pool.slot_address(0) != image.address
    memory[:] = b"\xff" * len(memory)
    assert bench.weights(0, 0) == kept
    bench.commit(0, bench.image("k_proj"))
    assert bench.pool.present(0, 1) and not bench.pool.present(0, 0)


def test_an_annex_is_served_in_place_unless_it_is_lent(kit: Any) -> None:
    device, layout = Counting(), kit.layout(overlay_rows=4)
    pool = LoraPool(device, layout, 2, max_rows=4, adopt=True, arena_bytes=256)
    stream = device.create_stream(label="test")
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors = kit.pair() | {key: kit.tensor((2, 8))}
    config = kit.config(trainable_token_indices=[3, 5])
    image = kit.stage(tensors, config, layout).image
    memory = bytearray(image.nbytes + 100)
    lent = kit.stage(tensors, config, layout, buffer=memory).image
    assert lent.buffer.tobytes() == image.buffer.tobytes() == bytes(memory[: image.nbytes])
    pool.commit(0, image, stream)
    pool.commit(1, lent, stream, 0)
    device.synchronize(stream)
    memory[:] = b"\xff" * len(memory)
    starts = [pool.overlay_addresses(slot) for slot in range(2)]
    assert starts[0] is not None and starts[0][0] == image.address + layout.slot_bytes
    assert starts[1] is not None and starts[1][0] == pool.arena_address
    own, copied = pool.overlay_view(0), pool.overlay_view(1)
    assert own is not None and copied is not None
    assert own[0].tolist() == copied[0].tolist() == [3, 5] and torch.equal(own[1], copied[1])
    with pytest.raises(DeviceError) as caught:
        pool.commit(0, lent, stream)
    assert caught.value.code == "bad-extent"
    device.destroy_stream(stream)
    pool.close()
    assert device.live_labels() == ()


@pytest.mark.parametrize("how", ["retire", "commit", "lent", "close"])
def test_an_image_is_kept_as_long_as_it_is_served_from_and_no_longer(
    bench: Bench, how: str
) -> None:
    image = bench.image("q_proj")
    gone = weakref.ref(image.buffer)
    bench.commit(0, image)
    bench.commit(1, image)
    del image
    gc.collect()
    assert gone() is not None
    bench.pool.retire(1, bench.stream)
    assert gone() is not None
    if how == "retire":
        bench.pool.retire(0, bench.stream)
    elif how == "commit":
        bench.commit(0, bench.image("v_proj"))
    elif how == "lent":
        bench.commit(0, bench.image("v_proj", buffer=bytearray(bench.layout.slot_bytes)))
    else:
        bench.pool.close()
    gc.collect()
    assert gone() is None


def test_views_follow_the_image(bench: Bench) -> None:
    first, second = bench.image("q_proj"), bench.image("q_proj")
    bench.commit(0, first)
    old = bench.pool.view(0, 0)[0]
    assert bench.pool.view(0, 0)[0] is old
    bench.commit(1, first)
    bench.commit(0, second)
    assert bench.pool.view(0, 0)[0].data_ptr() == second.address
    assert bench.pool.view(1, 0)[0].data_ptr() == first.address


def test_a_commit_that_fails_keeps_the_image_rows_may_still_read(kit: Any) -> None:
    probe = Bench(kit, Counting())
    probe.commit(0, probe.image("q_proj"))
    done = probe.device.calls("copy_h2d")
    bench = Bench(kit, Counting(Fault("copy_h2d", done + 1)))
    image = bench.image("q_proj")
    gone = weakref.ref(image.buffer)
    bench.commit(0, image)
    del image
    with pytest.raises(DeviceError):
        bench.commit(0, bench.image("v_proj"))
    gc.collect()
    assert gone() is not None  # the tables on the device still name it
    bench.commit(0, bench.image("k_proj"))
    gc.collect()
    assert gone() is None
    for made in (probe, bench):
        made.device.destroy_stream(made.stream)
        made.pool.close()


def test_an_image_of_another_layout_changes_nothing(bench: Bench, kit: Any) -> None:
    image = bench.image("q_proj")
    bench.commit(0, image)
    other = dataclasses.replace(image, fingerprint="other")
    with pytest.raises(DeviceError) as refused:
        bench.commit(0, other)
    assert refused.value.code == "layout-mismatch"
    assert bench.pool.slot_address(0) == image.address and bench.pool.present(0, 0)


def test_what_is_not_addressed_by_the_cpu_is_always_copied(kit: Any) -> None:
    class Remote(HostDevice):
        host_addressable = False

    device = Remote(checked=True)
    pool = LoraPool(device, kit.layout(), 1, max_rows=4, adopt=True)
    stream = device.create_stream(label="test")
    source = BytesSource(kit.file(kit.pair()), kit.config())
    image = stage(source, kit.layout()).image
    pool.commit(0, image, stream)
    assert pool.slot_address(0) == pool.address != image.address
    device.destroy_stream(stream)
    pool.close()
    device.close()
