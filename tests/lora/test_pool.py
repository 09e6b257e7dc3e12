"""The pool on a checked host device: bytes, tables, order, and what a commit leaves behind."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.device import Stream
from rota.gpu.host import HostDevice
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.pool import LoraPool


@pytest.fixture
def device() -> Iterator[HostDevice]:
    made = HostDevice(checked=True)
    yield made
    assert made.live_labels() == ()  # every test gives back what it took
    made.close()


class Bench:
    """A pool, a stream, and reading of device memory through the device."""

    def __init__(
        self, device: HostDevice, layout: SlotLayout, max_loras: int = 3, arena: int = 0
    ) -> None:
        self.device, self.layout = device, layout
        self.pool = LoraPool(device, layout, max_loras, max_rows=6, arena_bytes=arena)
        self.stream: Stream = device.create_stream(label="test")

    def read(self, address: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self.device.copy_d2h(int(out.ctypes.data), address, nbytes, self.stream)
        self.device.synchronize(self.stream)
        return out

    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = (len(self.layout.pairs), self.pool.max_loras)
        cells = shape[0] * shape[1]
        return (
            self.read(self.pool.tables.a_table, 8 * cells).view(np.uint64).reshape(shape),
            self.read(self.pool.tables.b_table, 8 * cells).view(np.uint64).reshape(shape),
            self.read(self.pool.tables.scale_table, 4 * cells).view(np.float32).reshape(shape),
        )

    def slot(self, slot: int) -> np.ndarray:
        return self.read(self.pool.slot_address(slot), self.layout.slot_bytes)

    def close(self) -> None:
        self.device.destroy_stream(self.stream)
        self.pool.close()


@pytest.fixture
def bench(kit: Any, device: HostDevice) -> Iterator[Bench]:
    made = Bench(device, kit.layout(12))
    yield made
    made.close()


def image_of(kit: Any, layout: SlotLayout, *places: tuple[int, str]) -> Any:
    tensors: dict[str, Any] = {}
    for layer, leaf in places:
        tensors |= kit.pair(layer, leaf)
    leaves = sorted({leaf for _, leaf in places})
    return kit.stage(tensors, kit.config(target_modules=leaves), layout).image


def test_a_new_pool_is_zero_and_names_no_adapter(bench: Bench) -> None:
    assert not any(table.any() for table in bench.tables())
    for slot in range(3):
        assert not bench.slot(slot).any()
    rows = bench.read(bench.pool.row_slots_address, 24).view(np.int32)
    assert rows.tolist() == [-1] * 6


def test_commit_writes_slot_and_cells(kit: Any, bench: Bench) -> None:
    image = image_of(kit, bench.layout, (0, "q_proj"), (1, "down_proj"))
    bench.pool.commit(1, image, bench.stream)
    assert bench.slot(1).tobytes() == image.buffer.tobytes()
    assert not bench.slot(0).any() and not bench.slot(2).any()
    a, b, scale = bench.tables()
    base = bench.pool.slot_address(1)
    for index, pair in enumerate(bench.layout.pairs):
        present = image.present[index]
        assert a[index].tolist() == [0, base + pair.a_off if present else 0, 0]
        assert b[index].tolist() == [0, base + pair.b_off if present else 0, 0]
        assert scale[index].tolist() == [0, 2.0 if present else 0, 0]
        assert bench.pool.present(1, index) == present
        assert bench.pool.scale(1, index) == (2.0 if present else 0.0)
    assert [index for index in range(14) if image.present[index]] == [0, 13]


def test_an_adapter_with_fewer_modules_leaves_no_cell_of_the_old_one(
    kit: Any, bench: Bench
) -> None:
    leaves = [(layer, leaf) for layer in (0, 1) for leaf in ("q_proj", "k_proj", "up_proj")]
    bench.pool.commit(2, image_of(kit, bench.layout, *leaves), bench.stream)
    small = image_of(kit, bench.layout, (1, "k_proj"))
    bench.pool.commit(2, small, bench.stream)
    for table in bench.tables():
        assert np.flatnonzero(table[:, 2]).tolist() == [8]
    assert bench.slot(2).tobytes() == small.buffer.tobytes()


def test_commit_touches_no_other_slot(kit: Any, bench: Bench) -> None:
    first = image_of(kit, bench.layout, (0, "q_proj"), (0, "v_proj"))
    bench.pool.commit(0, first, bench.stream)
    before = [table[:, 0].copy() for table in bench.tables()]
    bench.pool.commit(1, image_of(kit, bench.layout, (0, "v_proj")), bench.stream)
    bench.pool.retire(1, bench.stream)
    for old, table in zip(before, bench.tables(), strict=True):
        np.testing.assert_array_equal(table[:, 0], old)
        assert not table[:, 1].any()
    assert bench.slot(0).tobytes() == first.buffer.tobytes()


def test_retire_clears_cells_and_may_be_repeated(kit: Any, bench: Bench) -> None:
    bench.pool.commit(0, image_of(kit, bench.layout, (0, "q_proj")), bench.stream)
    for _ in range(2):
        bench.pool.retire(0, bench.stream)
        assert not any(table.any() for table in bench.tables())
    assert not bench.pool.present(0, 0)


def test_commands_run_in_stream_order(kit: Any, bench: Bench) -> None:
    """The copies wait in the stream: each carries the tables as they were at its call."""
    image = image_of(kit, bench.layout, (0, "q_proj"))
    snapshot = bench.device.alloc(8, label="snapshot")
    bench.pool.commit(0, image, bench.stream)
    bench.device.copy_d2d(snapshot, bench.pool.tables.a_table, 8, bench.stream)
    bench.pool.retire(0, bench.stream)
    found = bench.read(snapshot, 8).view(np.uint64)
    assert int(found[0]) == bench.pool.slot_address(0)
    assert not bench.tables()[0].any()
    bench.device.free(snapshot)


def test_row_slots(bench: Bench) -> None:
    bench.pool.set_row_slots([2, -1, 0], bench.stream)
    address = bench.pool.row_slots_address
    assert bench.read(address, 24).view(np.int32).tolist() == [2, -1, 0, -1, -1, -1]
    bench.pool.set_row_slots([], bench.stream)
    assert bench.read(address, 24).view(np.int32).tolist() == [-1] * 6
    for slots, code in (([3], "bad-slot"), ([-2], "bad-slot"), ([0] * 7, "too-many-rows")):
        with pytest.raises(DeviceError) as caught:
            bench.pool.set_row_slots(slots, bench.stream)
        assert caught.value.code == code
    assert bench.read(address, 24).view(np.int32).tolist() == [-1] * 6


def test_pair_tables_are_rows_of_the_tables(bench: Bench) -> None:
    a, b, scale = bench.pool.pair_tables(5)
    assert a - bench.pool.tables.a_table == b - bench.pool.tables.b_table == 5 * 3 * 8
    assert scale - bench.pool.tables.scale_table == 5 * 3 * 4


@pytest.mark.parametrize("elem", Elem)
def test_views_are_the_pools_own_memory(kit: Any, device: HostDevice, elem: Elem) -> None:
    bench = Bench(device, kit.layout(12, elem))
    image = image_of(kit, bench.layout, (1, "k_proj"))
    bench.pool.commit(1, image, bench.stream)
    device.synchronize(bench.stream)
    pair = 8
    a, b = bench.pool.view(1, pair)
    dtype = torch.bfloat16 if elem is Elem.BF16 else torch.float32
    assert (a.shape, b.shape, a.dtype) == ((16, 8), (4, 16), dtype)
    place = bench.layout.pairs[pair]
    assert a.data_ptr() == bench.pool.slot_address(1) + place.a_off
    assert b.data_ptr() == bench.pool.slot_address(1) + place.b_off
    key = kit.key(1, "k_proj", "A")
    expected = np.frombuffer(kit.pair(1, "k_proj")[key][2], np.float32).reshape(2, 8)
    np.testing.assert_array_equal(a[:2].float().numpy(), expected)
    assert not a[2:].any() and not b[:, 2:].any()
    assert bench.pool.view(1, pair)[0] is a
    bench.close()


def test_overlay_tables_and_views(kit: Any, device: HostDevice) -> None:
    bench = Bench(device, kit.layout(overlay_rows=4), arena=1024)
    delta = kit.tensor((2, 8))
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    config = kit.config(trainable_token_indices=[3, 5])
    image = kit.stage(kit.pair() | {key: delta}, config, bench.layout).image
    bench.pool.commit(2, image, bench.stream, 256)
    counts = bench.read(bench.pool.tables.embed_count_table, 12).view(np.int32)
    assert counts.tolist() == [0, 0, 2]
    assert not bench.read(bench.pool.tables.head_count_table, 12).any()
    views = bench.pool.overlay_view(2)
    assert views is not None
    embed_ids, embed_rows, head_ids, head_rows = views
    assert embed_ids.tolist() == [3, 5] and head_ids.tolist() == []
    assert (embed_rows.shape, head_rows.shape) == ((2, 8), (0, 8))
    expected = np.frombuffer(delta[2], np.float32).reshape(2, 8)
    np.testing.assert_array_equal(embed_rows.float().numpy(), expected)
    bench.pool.retire(2, bench.stream)
    assert not bench.read(bench.pool.tables.embed_count_table, 12).any()
    assert bench.pool.overlay_counts(2) == (0, 0)
    bench.close()


DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def overlaid(kit: Any, layout: SlotLayout, *ids: int, **more: Any) -> Any:
    """An image whose annex is an overlay."""
    tensors = kit.pair() | {DELTA: kit.tensor((len(ids), 8), seed=sum(ids))}
    return kit.stage(tensors, kit.config(trainable_token_indices=[*ids]), layout, **more).image


def test_annexes_lie_in_the_arena_where_they_are_told(kit: Any, device: HostDevice) -> None:
    layout = kit.layout(overlay_rows=40, dims=dataclasses.replace(kit.dims, vocab=60))
    bench = Bench(device, layout, arena=2048)
    pool = bench.pool
    one, two = overlaid(kit, layout, 3, 5), overlaid(kit, layout, *range(30))
    assert (one.annex_bytes, two.annex_bytes) == (256, 768)
    assert one.nbytes == layout.slot_bytes + 256
    pool.commit(0, one, bench.stream, 512)
    pool.commit(1, two, bench.stream, 1024)
    for slot, image, at in ((0, one, 512), (1, two, 1024)):
        addresses = pool.overlay_addresses(slot)
        assert addresses is not None and addresses[0] == pool.arena_address + at
        found = bench.read(pool.arena_address + at, image.annex_bytes)
        assert found.tobytes() == image.buffer[layout.slot_bytes :].tobytes()
        assert bench.slot(slot).tobytes() == image.buffer[: layout.slot_bytes].tobytes()
        views = pool.overlay_view(slot)
        assert views is not None and len(views[0]) == image.embed_rows
    # Moved on to another place, the old one is given to another slot.
    pool.commit(0, one, bench.stream, 0)
    pool.commit(2, one, bench.stream, 512)
    device.synchronize(bench.stream)
    first, third = pool.overlay_view(0), pool.overlay_view(2)
    assert first is not None and third is not None and torch.equal(first[1], third[1])
    pool.retire(1, bench.stream)
    assert pool.overlay_view(1) is None
    pool.commit(1, image_of(kit, layout, (0, "q_proj")), bench.stream)
    assert pool.overlay_view(1) is None and pool.nbytes == 3 * layout.slot_bytes + 2048
    bench.close()


@pytest.mark.parametrize("extent", [None, -256, 100, 128, 256, 512, 768, 1024])
def test_an_annex_without_a_place_of_its_own_is_refused(
    kit: Any, device: HostDevice, extent: int | None
) -> None:
    layout = kit.layout(overlay_rows=40, dims=dataclasses.replace(kit.dims, vocab=60))
    bench = Bench(device, layout, arena=1024)
    bench.pool.commit(0, overlaid(kit, layout, 3, 5), bench.stream, 512)
    before = bench.read(bench.pool.arena_address, 1024).tobytes(), bench.slot(1).tobytes()
    with pytest.raises(DeviceError) as caught:
        bench.pool.commit(1, overlaid(kit, layout, *range(15)), bench.stream, extent)
    assert caught.value.code == "bad-extent"
    after = bench.read(bench.pool.arena_address, 1024).tobytes(), bench.slot(1).tobytes()
    assert before == after
    bench.pool.commit(1, overlaid(kit, layout, *range(15)), bench.stream, 0)
    bench.close()


def test_no_overlay_view_without_a_region(bench: Bench) -> None:
    assert bench.pool.overlay_view(0) is None


@pytest.mark.parametrize("slot", [-1, 3])
def test_bad_slot(kit: Any, bench: Bench, slot: int) -> None:
    image = image_of(kit, bench.layout, (0, "q_proj"))
    for call in (
        lambda: bench.pool.commit(slot, image, bench.stream),
        lambda: bench.pool.retire(slot, bench.stream),
        lambda: bench.pool.view(slot, 0),
        lambda: bench.pool.present(slot, 0),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == "bad-slot"


def test_an_image_of_another_layout_changes_nothing(kit: Any, bench: Bench) -> None:
    image = image_of(kit, kit.layout(16), (0, "q_proj"))
    assert image.nbytes == bench.layout.slot_bytes  # same bytes, another max rank
    with pytest.raises(DeviceError) as caught:
        bench.pool.commit(0, image, bench.stream)
    assert caught.value.code == "layout-mismatch"
    assert not any(table.any() for table in bench.tables()) and not bench.slot(0).any()


def test_preflight_wants_twice_the_pool(kit: Any) -> None:
    layout = kit.layout()
    need = 2 * 2 * layout.slot_bytes
    for limit, fits in ((need - 1, False), (need + 65536, True)):
        device = HostDevice(memory_limit=limit)
        if fits:
            LoraPool(device, layout, 2, max_rows=4).close()
        else:
            with pytest.raises(DeviceError) as caught:
                LoraPool(device, layout, 2, max_rows=4)
            assert (caught.value.code, caught.value.found) == ("pool-too-large", str(need))
        device.close()


@pytest.mark.parametrize(
    ("max_loras", "max_rows"), [(0, 4), (4097, 4), (True, 4), (2, 0), (2, 65537)]
)
def test_bad_parameters(kit: Any, device: HostDevice, max_loras: int, max_rows: int) -> None:
    with pytest.raises(DeviceError) as caught:
        LoraPool(device, kit.layout(), max_loras, max_rows=max_rows)
    assert caught.value.code == "bad-argument"


def test_close_gives_back_once(kit: Any, device: HostDevice) -> None:
    pool = LoraPool(device, kit.layout(), 2, max_rows=4)
    pool.close()
    pool.close()
    with pytest.raises(DeviceError) as caught:
        pool.slot_address(0)
    assert caught.value.code == "pool-closed"


@pytest.mark.parametrize("fail_at", range(3))
def test_a_failed_start_gives_everything_back(kit: Any, device: HostDevice, fail_at: int) -> None:
    class Stingy:
        """The device, refusing its n-th allocation."""

        def __init__(self) -> None:
            self.allocations = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(device, name)

        def alloc(self, nbytes: int, *, label: str) -> int:
            self.allocations += 1
            if self.allocations > fail_at:
                raise DeviceError("no more", code="out-of-memory", subject=label)
            return device.alloc(nbytes, label=label)

    with pytest.raises(DeviceError) as caught:
        LoraPool(Stingy(), kit.layout(), 2, max_rows=4)
    assert caught.value.code == "out-of-memory"


def test_views_need_host_memory(kit: Any, device: HostDevice) -> None:
    class Remote:
        host_addressable = False

        def __getattr__(self, name: str) -> Any:
            return getattr(device, name)

    pool = LoraPool(Remote(), kit.layout(), 1, max_rows=4)
    with pytest.raises(DeviceError) as caught:
        pool.view(0, 0)
    assert caught.value.code == "not-host-addressable"
    pool.close()


def test_addresses_never_move(kit: Any, bench: Bench) -> None:
    pool = bench.pool
    before = (
        pool.address,
        pool.tables.a_table,
        pool.tables.b_table,
        pool.tables.scale_table,
        pool.row_slots_address,
    )
    for _ in range(3):
        pool.commit(0, image_of(kit, bench.layout, (0, "q_proj")), bench.stream)
        pool.retire(0, bench.stream)
    after = (
        pool.address,
        pool.tables.a_table,
        pool.tables.b_table,
        pool.tables.scale_table,
        pool.row_slots_address,
    )
    assert before == after
    assert ctypes.sizeof(ctypes.c_void_p) == 8  # table cells are u64 addresses
