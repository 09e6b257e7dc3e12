"""The store: generations, leases, the budget, packing once."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import CapacityError, DeviceError, InternalError, RejectError, RotaError
from rota.gpu.lora.directory import read_directory
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma.layouts import layout_of, layout_spec
from rota.rdma.region import Arena, Region
from rota.rdma.store import Store, StoreLimits

HOUR = 3600 * 10**9


def code(call: Any, *args: Any) -> str:
    with pytest.raises(RotaError) as caught:
        call(*args)
    return caught.value.code


class FakeRegistrar:
    """Counts; ``refuse`` says no, as a device without memory does."""

    def __init__(self) -> None:
        self.now: set[Region] = set()
        self.made = 0
        self.refuse = False

    def register(self, region: Region) -> None:
        if self.refuse:
            raise DeviceError("cannot allocate", code="verbs-failed")
        self.made += 1
        self.now.add(region)
        region.rkeys = (self.made,)

    def unregister(self, region: Region) -> None:
        self.now.remove(region)
        region.rkeys = ()


def later(folder: Path) -> Any:
    """A clock by which the files are an hour old."""
    newest = max(path.stat().st_ctime_ns for path in folder.iterdir())
    return lambda: newest + HOUR


def test_only_what_was_given(folder: Path) -> None:
    store = Store({"one": folder})
    for name in ("two", "", "../one", str(folder), "one/../one"):
        assert code(store.open, name) == "unknown-adapter"
    assert store.ids() == ["one"]


def test_unchanged_files_are_read_once(folder: Path) -> None:
    store = Store({"one": folder}, clock_ns=later(folder))
    first, second = store.open("one"), store.open("one")
    assert first is second and first.leases == 2
    assert store.counters()["loads"] == 1 and store.counters()["opens"] == 2
    assert first.digest == DirectorySource(folder).read(store.limits.files).digest()
    store.release(first)
    store.release(second)
    store.close()


@pytest.mark.parametrize("contended", [False, True])
def test_who_is_gone_before_it_waits_leaves_nothing_held(folder: Path, contended: bool) -> None:
    store = Store({"one": folder}, clock_ns=later(folder))
    place = store._places["one"]

    def gone() -> None:
        raise BrokenPipeError("the client is gone")

    if contended:
        place.lock.acquire()
    with pytest.raises(BrokenPipeError):
        store.open("one", gone)
    assert place.lock.locked() == contended
    if contended:
        place.lock.release()
    counters = store.counters()
    assert counters["leases"] == counters["opens"] == counters["region_bytes"] == 0
    store.release(store.open("one", lambda: None))
    store.release(store.open("one", gone))  # nothing to wait for: nobody is told
    store.close()


def test_young_files_are_read_again_but_are_no_new_generation(folder: Path) -> None:
    store = Store({"one": folder}, clock_ns=lambda: folder.stat().st_mtime_ns)
    first, second = store.open("one"), store.open("one")
    assert first is second and first.number == 1


def test_changed_files_are_a_new_generation(kit: Any, folder: Path) -> None:
    store = Store({"one": folder})
    old = store.open("one")
    bytes_before = old.shards[0].array.tobytes()
    kit.write(folder, kit.small, seed=5)
    new = store.open("one")
    assert (old.number, new.number) == (1, 2) and old.digest != new.digest
    assert old.shards[0].array.tobytes() == bytes_before
    assert store.counters()["generations"] == 2
    store.release(old)
    assert old.shards[0].closed and store.counters()["generations"] == 1
    store.release(new)
    assert not new.shards[0].closed  # current: kept for the next one
    store.close()
    assert new.shards[0].closed and store.counters()["region_bytes"] == 0


def test_the_same_content_touched_is_no_new_generation(folder: Path) -> None:
    store = Store({"one": folder})
    first = store.open("one")
    os.utime(folder / "adapter_config.json")
    assert store.open("one") is first


def test_refusals_are_the_disks_own(kit: Any, folder: Path) -> None:
    store = Store({"one": folder})
    held = store.open("one")
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x02junk")
    assert code(store.open, "one") == "pickle-adapter"
    (folder / "adapter_model.safetensors").write_bytes(bytes(64))
    assert code(store.open, "one") == "bad-safetensors"
    (folder / "adapter_config.json").write_text("{")
    assert code(store.open, "one") == "bad-config"
    (folder / "adapter_config.json").unlink()
    assert code(store.open, "one") == "missing-config"
    assert held.shards[0].array.nbytes > 0  # the old one is served until it is let go
    assert store.counters()["generations"] == 1
    store.release(held)


def test_an_image_is_packed_once(kit: Any, folder: Path) -> None:
    store = Store({"one": folder})
    generation = store.open("one")
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(store.pack(generation, kit.small)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(packed) for packed in found}) == 1
    assert store.counters()["packs"] == 1 and store.counters()["pack_hits"] == 3
    disk = stage(DirectorySource(folder), kit.small)
    assert found[0].region.array.tobytes() == disk.image.buffer.tobytes()
    with pytest.raises(RejectError) as caught:
        store.pack(generation, kit.large)
    with pytest.raises(RejectError) as expected:
        stage(DirectorySource(folder), kit.large)
    assert str(caught.value) == str(expected.value)
    assert store.counters()["images"] == 1


def test_the_budget_holds_and_forgets_the_oldest(kit: Any, tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    folders = {n: kit.write(tmp_path / n, kit.small, seed=i) for i, n in enumerate(names)}
    size = (folders["a"] / "adapter_model.safetensors").stat().st_size
    registrar = FakeRegistrar()
    store = Store(folders, StoreLimits(budget=2 * size + size // 2), registrar)
    a, b = store.open("a"), store.open("b")
    with pytest.raises(CapacityError) as caught:
        store.open("c")
    assert caught.value.code == "peer-memory-full" and caught.value.retry_after_s
    assert code(store.pack, a, kit.small) == "peer-memory-full"
    store.release(a)
    store.release(b)
    store.release(store.open("a"))  # b is now the oldest
    store.open("c")
    assert b.shards[0].closed and not a.shards[0].closed
    assert store.counters()["evictions"] == 1
    assert store.counters()["region_bytes"] <= store.limits.budget
    assert len(registrar.now) == store.counters()["generations"] == 2


def test_a_new_version_takes_the_room_of_an_idle_old_one(kit: Any, folder: Path) -> None:
    size = (folder / "adapter_model.safetensors").stat().st_size
    store = Store({"one": folder}, StoreLimits(budget=size + size // 2))
    old = store.open("one")
    kit.write(folder, kit.small, seed=5)
    assert code(store.open, "one") == "peer-memory-full"  # the old one is in use
    assert not old.shards[0].closed
    store.release(old)
    new = store.open("one")
    assert new.digest != old.digest and old.shards[0].closed
    assert store.counters()["reloads"] == 1 and store.counters()["region_bytes"] == size
    store.release(new)
    store.close()


def test_files_written_while_read_with_their_time_set_are_read_again(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (kit.write(tmp_path / n, kit.small, seed=i) for i, n in enumerate("ab"))
    store = Store({"one": one})
    real, reads = read_directory, 0

    def read(path: Path, limits: Any) -> Any:
        nonlocal reads
        made, reads = real(path, limits), reads + 1
        file = one / "adapter_model.safetensors"
        was = file.stat()
        if reads == 1:
            file.write_bytes((two / file.name).read_bytes())
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
            while file.stat().st_ctime_ns == was.st_ctime_ns:
                os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        return made

    monkeypatch.setattr("rota.rdma.store.read_directory", read)
    generation = store.open("one")
    assert reads == 2
    assert generation.digest == DirectorySource(two).read(store.limits.files).digest()
    store.release(generation)
    store.close()


def test_what_the_device_refuses_is_served_by_tcp(kit: Any, folder: Path) -> None:
    registrar = FakeRegistrar()
    registrar.refuse = True
    store = Store({"one": folder}, registrar=registrar)
    generation = store.open("one")
    assert generation.shards[0].rkeys == ()
    assert store.pack(generation, kit.small).region.rkeys == ()
    assert store.counters()["unregistered"] == 2
    store.release(generation)
    store.close()


def test_registrations_over_many_promotions(kit: Any, folder: Path) -> None:
    registrar = FakeRegistrar()
    store = Store({"one": folder}, registrar=registrar, clock_ns=later(folder))
    for _ in range(100):
        generation = store.open("one")
        store.pack(generation, kit.small)
        store.release(generation)
    assert registrar.made == 2  # the shard and its image
    store.close()
    assert registrar.now == set()


def test_files_that_never_hold_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store({"one": folder})
    ticks = iter(range(100))
    monkeypatch.setattr("rota.rdma.store.rows_of", lambda path: next(ticks))
    assert code(store.open, "one") == "adapter-changing"


def test_memory_is_not_freed_while_it_is_used() -> None:
    region = Region(100)
    region.hold()
    assert code(region.close) == "memory-in-use"
    region.let_go()
    assert code(region.let_go) == "memory-not-held"
    region.close()
    region.close()
    with pytest.raises(InternalError):
        region.array  # noqa: B018  # reading it is what is refused
    assert code(region.hold) == "memory-closed"


def test_arena_blocks_come_back() -> None:
    arena = Arena(10 * 4096)
    blocks = [arena.allocate(4096) for _ in range(10)]
    for number, block in enumerate(blocks):
        block[:] = number
        assert arena.contains(block)
    assert code(arena.allocate, 1) == "arena-full"
    assert [int(block[0]) for block in blocks] == list(range(10))
    view = blocks[3][10:20]
    del block, blocks[2:5]
    assert arena.largest == 4096  # the view keeps the one in the middle
    del view
    assert arena.largest == 3 * 4096
    again = arena.allocate(2 * 4096 + 1)
    assert code(arena.close) == "memory-in-use"
    del again, blocks
    assert arena.largest == 10 * 4096
    assert not arena.contains(np.zeros(4, np.uint8))
    arena.close()


def test_layouts_travel(kit: Any) -> None:
    low = dataclasses.replace(kit.small, expert_rank=2, embedding_rank=3)
    assert low.fingerprint() != kit.small.fingerprint()
    for layout in (kit.small, kit.large, low):
        spec = layout_spec(layout)
        assert layout_of(spec, layout.fingerprint(), 1 << 30) == layout
    spec = layout_spec(kit.small)
    assert code(layout_of, spec, "0" * 64, 1 << 30) == "fingerprint-mismatch"
    assert code(layout_of, spec, kit.small.fingerprint(), 100) == "bad-layout"


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 0}, {"num_layers": 1 << 24}, {"hidden": "wide"}, {"colour": 1}, {"vocab": [1]}],
)
def test_layouts_of_strangers(kit: Any, change: dict[str, Any]) -> None:
    import msgspec

    spec = layout_spec(kit.small)
    wrong = msgspec.structs.replace(spec, dims=spec.dims | change)
    assert code(layout_of, wrong, kit.small.fingerprint(), 1 << 30) == "bad-layout"
