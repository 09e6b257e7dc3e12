"""One-sided reads over queue pairs of the tests' own: order, depth, errors, deadlines, draining."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import InternalError, RequestError, RotaError, StagingError
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.config import load_config
from rota.rdma import messages as m
from rota.rdma.client import Peer
from rota.rdma.hosts import VerbsClient, VerbsPeer
from rota.rdma.region import Region

from .exchange import refusal
from .fabric import Fabric, FakeDevice

MIB = 1 << 20


class Bench:
    """A client with an arena, a source region of 5.5 MiB, and a clock that only waiting moves."""

    def __init__(self, seed: int = 0, rails: int = 1) -> None:
        self.fabric = Fabric(seed)
        self.device = FakeDevice(self.fabric)
        self.now = 0.0
        self.client = VerbsClient([self.device], 16 * MIB, self.clock)
        self.source = Region(5 * MIB + MIB // 2)
        rng = np.random.default_rng(seed)
        self.source.array[:] = rng.integers(0, 256, self.source.nbytes, np.uint8)
        self.rkey = self.device.register(self.source)
        self.target = self.client.allocate(self.source.nbytes)
        self.rails = self.client.open(rails)
        self.rails.connect(self.rails.rails)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def read(self, **more: Any) -> list[int]:
        seen: list[int] = []
        fields: dict[str, Any] = {
            "address": self.source.address,
            "rkeys": [self.rkey],
            "deadline": self.now + 60,
            "cancelled": None,
            "landed": seen.append,
        } | more
        self.rails.read(self.target, **fields)
        return seen

    def over(self) -> None:
        """After a failure nothing may write the target any more, and nothing is open."""
        assert self.fabric.open == 0 and self.rails.pairs == []
        with pytest.raises(StagingError) as caught:
            self.read()
        assert caught.value.code == "rdma-broken"
        again = self.client.open(1)  # the next promotion's rails work
        again.connect(again.rails)
        self.fabric.stuck, self.fabric.status = False, {}
        landed: Callable[[int], None] = lambda count: None  # noqa: E731  # shorter than its use
        again.read(self.target, self.source.address, [self.rkey], self.now + 60, None, landed)
        assert self.target.tobytes() == self.source.array.tobytes()
        again.close()


@pytest.mark.parametrize("rails", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_byte_in_order(rails: int, seed: int) -> None:
    bench = Bench(seed, rails)
    seen = bench.read()
    assert bench.target.tobytes() == bench.source.array.tobytes()
    assert seen == sorted(seen) and seen[-1] == bench.source.nbytes
    assert bench.fabric.posted == 6 and bench.fabric.most <= 4
    bench.rails.close()
    assert bench.fabric.open == 0


@pytest.mark.parametrize("status", [4, 10, 12])
@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("rails", [1, 3])
def test_an_error_completion(status: int, number: int, rails: int) -> None:
    bench = Bench(1, rails)
    bench.fabric.status = {number: status}
    with pytest.raises(StagingError) as caught:
        bench.read()
    assert caught.value.code == "rdma-read-failed"
    assert f"status {status}" in str(caught.value.found)
    bench.over()


def test_wrong_keys_and_places() -> None:
    for change in ({"rkeys": [5]}, {"address": 4096}):
        bench = Bench()
        with pytest.raises(StagingError) as caught:
            bench.read(**change)
        assert "status 10" in str(caught.value.found)
        bench.over()


def test_own_deadline() -> None:
    bench = Bench()
    bench.fabric.stuck = True
    with pytest.raises(StagingError) as caught:
        bench.read(deadline=bench.now + 0.05)
    assert caught.value.code == "peer-timeout"
    bench.over()


def test_own_stall_time() -> None:
    bench = Bench()
    bench.fabric.stuck = True
    with pytest.raises(StagingError) as caught:
        bench.read(stall=0.05)
    assert caught.value.code == "peer-timeout" and bench.now < 10
    bench.over()


@pytest.mark.parametrize("asked", range(4))
def test_cancelled(asked: int) -> None:
    bench, count = Bench(2), 0

    def cancelled() -> bool:
        nonlocal count
        count += 1
        return count > asked

    with pytest.raises(StagingError) as caught:
        bench.read(cancelled=cancelled)
    assert caught.value.code == "stage-cancelled"
    writes = len(bench.fabric.writes)
    assert bench.fabric.open == 0 and len(bench.fabric.writes) == writes
    bench.over()


def test_a_failing_verifier_ends_the_flight() -> None:
    bench = Bench()

    def wrong(count: int) -> None:
        raise StagingError("no", code="digest-mismatch")

    with pytest.raises(StagingError) as caught:
        bench.read(landed=wrong)
    assert caught.value.code == "digest-mismatch"
    bench.over()


def test_the_arena_outlives_its_images() -> None:
    """Freeing memory while a read may be posted into it is refused."""
    bench = Bench()
    with pytest.raises(InternalError) as caught:
        bench.client.close()
    assert caught.value.code == "memory-in-use" and not bench.device.closed
    bench.rails.close()
    bench.target = np.empty(0, np.uint8)
    bench.client.close()
    assert bench.device.closed


# -- the whole way: peer and client over TCP control, memory read by the fabric


@pytest.fixture(params=["authentic", "open"])
def verbs(request: Any, serve: Any, kit: Any, tmp_path: Path) -> Any:
    """With a secret and without one: images are checked by another hash."""
    folder = kit.write(tmp_path / "big", kit.large, 100)
    fabric = Fabric()
    secret = kit.secret if request.param == "authentic" else None
    running = serve({"big": folder}, verbs=VerbsPeer([FakeDevice(fabric)]), secret=secret)
    client = VerbsClient([FakeDevice(fabric)], 32 * MIB)

    def land(**more: Any) -> Any:
        fields: dict[str, Any] = {"secret": secret, "transport": client} | more
        return stage(Peer(running.address, "big", **fields), kit.large)

    # A bag of what the tests use.
    land.fabric, land.client, land.peer = fabric, client, running.peer  # type: ignore[attr-defined]
    # A bag of what the tests use.
    land.disk = stage(DirectorySource(folder), kit.large).image  # type: ignore[attr-defined]
    return land


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("rails", [1, 4])
def test_promotion_by_reads(verbs: Any, packed: Any, rails: int) -> None:
    before = verbs.peer.counters()["bytes_sent"]
    staged = verbs(packed=packed, rails=rails)
    assert staged.image.buffer.tobytes() == verbs.disk.buffer.tobytes()
    assert verbs.fabric.posted > 4
    assert verbs.peer.counters()["bytes_sent"] - before < 100_000


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("place", [(0, 0), (1, -1), (2, 4096), (4, 0), (4, -1)])
def test_a_bit_that_a_read_brought_wrong(verbs: Any, packed: Any, place: tuple[int, int]) -> None:
    """First and last bytes of chunks; the last chunk is a part of one."""
    verbs.fabric.flipped = place
    assert refusal(lambda: verbs(packed=packed)).code == "digest-mismatch"
    verbs.fabric.flipped = None
    assert verbs(packed=packed).image.buffer.tobytes() == verbs.disk.buffer.tobytes()


@pytest.mark.parametrize("packed", ["always", "never"])
def test_annexes_come_by_reads_too(serve: Any, kit: Any, packed: Any) -> None:
    root = kit.root / "tests/data/oracle/qwen35_moe"
    names = ("experts", "experts_down_only", "router")
    fabric = Fabric()
    folders = {name: root / "adapters" / name for name in names}
    running = serve(folders, verbs=VerbsPeer([FakeDevice(fabric)]))
    client = VerbsClient([FakeDevice(fabric)], 32 * MIB)
    dims = load_config(root / "base").to_lora_dims(expert_adapters=True)
    layout = SlotLayout(dims, 8, Elem.F32, affine=True)
    sizes = set()
    for name in names:
        read = fabric.posted
        with_verbs = {"secret": kit.secret, "transport": client, "packed": packed}
        found = stage(Peer(running.address, name, **with_verbs), layout).image
        disk = stage(DirectorySource(folders[name]), layout).image
        assert found.buffer.tobytes() == disk.buffer.tobytes() and fabric.posted > read
        assert (found.present, found.digest) == (disk.present, disk.digest)
        sizes.add(found.annex_bytes)
    assert len(sizes) == 3 and 0 in sizes


def test_a_hundred_promotions_one_registration(verbs: Any) -> None:
    verbs(packed="always")
    registered = verbs.fabric.registrations  # the arena, the shard, its image
    for _ in range(100):
        verbs(packed="always")
    assert verbs.fabric.registrations == registered == 3


@pytest.mark.parametrize("what", ["refuse_remote", "refuse_pair"])
def test_refused_verbs_become_tcp(verbs: Any, what: str, caplog: Any) -> None:
    setattr(verbs.fabric, what, True)
    staged = verbs(packed="always")
    assert staged.image.buffer.tobytes() == verbs.disk.buffer.tobytes()
    assert verbs.fabric.posted == 0


def test_a_full_arena_becomes_tcp(verbs: Any, caplog: Any) -> None:
    kept = [verbs.client.allocate(31 * MIB)]
    staged = verbs(packed="always")
    assert staged.image.buffer.tobytes() == verbs.disk.buffer.tobytes()
    assert verbs.fabric.posted == 0 and "arena-full" in caplog.text
    del kept[:]


@pytest.mark.parametrize("status", [10, 12])
def test_a_failed_read_fails_the_promotion_by_name(verbs: Any, status: int) -> None:
    verbs.fabric.status = {2: status}
    free = verbs.client._arena.largest
    with pytest.raises(RotaError) as caught:
        verbs(packed="always")
    assert caught.value.code == "rdma-read-failed"
    assert verbs.client._arena.largest == free  # although the error is still held
    verbs.fabric.status = {}
    assert verbs(packed="always").image.buffer.tobytes() == verbs.disk.buffer.tobytes()


def test_an_image_keeps_its_memory(verbs: Any) -> None:
    """Two images at once lie apart; their memory comes back when they go."""
    free = verbs.client._arena.largest
    first, second = verbs(packed="always"), verbs(packed="always")
    assert first.image.address != second.image.address
    assert verbs.client.contains(first.image.buffer)
    del first, second
    assert verbs.client._arena.largest == free


def test_what_lies_in_the_arena_is_lent_and_memory_of_its_own_is_not(verbs: Any) -> None:
    """A pool may serve from an image for as long as it likes only where nobody wants it back."""
    assert verbs(packed="always").image.lent
    assert not verbs(packed="never").image.lent
    kept = [verbs.client.allocate(31 * MIB)]
    assert not verbs(packed="always").image.lent  # by TCP
    del kept[:]


# -- several devices on each side


class Cluster:
    """A peer and a client with some devices each on one fabric."""

    def __init__(self, serve: Any, kit: Any, tmp_path: Path, far: int, near: int) -> None:
        folder = kit.write(tmp_path / "big", kit.large, 100)
        self.fabric = Fabric()
        self.far = [FakeDevice(self.fabric) for _ in range(far)]
        self.near = [FakeDevice(self.fabric) for _ in range(near)]
        self.running = serve({"big": folder}, verbs=VerbsPeer(self.far))
        self.client = VerbsClient(self.near, 32 * MIB)
        self.layout, self.secret = kit.large, kit.secret
        self.disk = stage(DirectorySource(folder), kit.large).image.buffer.tobytes()

    def land(self, **more: Any) -> bytes:
        fields: dict[str, Any] = {"secret": self.secret, "transport": self.client} | more
        return stage(
            Peer(self.running.address, "big", **fields), self.layout
        ).image.buffer.tobytes()


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize(
    ("far", "near", "rails"), [(2, 2, 1), (2, 2, 3), (1, 2, 2), (3, 2, 5), (2, 3, 8), (8, 8, 8)]
)
def test_rails_over_several_devices(
    serve: Any, kit: Any, tmp_path: Path, far: int, near: int, rails: int, packed: Any
) -> None:
    """Every device of ours reads (as far as there are chunks), each from its own counterpart."""
    cluster = Cluster(serve, kit, tmp_path, far, near)
    assert cluster.land(rails=rails, packed=packed) == cluster.disk
    posted = [device.posted for device in cluster.near]
    chunks = sum(posted)
    assert chunks > 4 and sum(count > 0 for count in posted) == min(near, chunks)
    assert max(posted) - min(posted) <= max(1, chunks // 2)


def test_memory_is_registered_with_all_devices_or_none(
    serve: Any, kit: Any, tmp_path: Path
) -> None:
    cluster = Cluster(serve, kit, tmp_path, 2, 2)
    cluster.far[1].refuse = True
    assert cluster.land(packed="always") == cluster.disk  # by TCP
    assert cluster.fabric.posted == 0 and not cluster.fabric.keys
    assert cluster.running.peer.store.counters()["unregistered"] > 0


def test_a_rail_on_a_device_without_a_key() -> None:
    """A peer that says so is refused before anything is read."""
    bench = Bench(0, 2)
    far = [m.Rail(7, 9, bytes(16), 3, 4, device) for device in (0, 1)]
    bench.rails.connect(far)
    with pytest.raises(StagingError) as caught:
        bench.read()
    assert caught.value.code == "bad-rails"
    assert bench.fabric.posted == 0 and bench.fabric.open == 0


def test_how_many_devices() -> None:
    fabric = Fabric()
    for count in (0, 9):
        devices = [FakeDevice(fabric) for _ in range(count)]
        for make in (VerbsPeer, partial(VerbsClient, arena_bytes=MIB)):
            with pytest.raises(RequestError) as caught:
                make(devices)
            assert caught.value.code == "bad-verbs-devices"
