"""Connections kept between promotions: reuse, hang-ups, errors, limits, and what is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rota.errors import RequestError, RotaError, StagingError
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times
from rota.rdma.hosts import VerbsClient, VerbsPeer
from rota.rdma.pool import PeerPool

from .fabric import MIB, Fabric, FakeDevice
from .proxy import Proxy


@pytest.fixture
def pool() -> Iterator[PeerPool]:
    made = PeerPool()
    yield made
    made.close()


@pytest.fixture
def disk(kit: Any, folder: Path) -> bytes:
    return stage(DirectorySource(folder), kit.small).image.buffer.tobytes()


def settled(running: Any, **wanted: int) -> None:
    """Turn the peer's loop until its counters say so."""

    async def wait() -> None:
        with anyio.fail_after(30):
            while True:
                now = running.peer.store.counters() | running.peer.counters()
                if all(now[name] == value for name, value in wanted.items()):
                    return
                await anyio.lowlevel.checkpoint()

    running.portal.call(wait)


def lose_patience(running: Any) -> None:
    """The peer's idle clients have been idle for too long, all at once."""
    for one in list(running.peer._serving):
        one.leave()
    settled(running, connections_now=0)


@pytest.mark.parametrize("packed", ["always", "auto", "never"])
def test_one_connection_serves_many_promotions(
    kit: Any, serve: Any, folder: Path, pool: PeerPool, disk: bytes, packed: Any
) -> None:
    running = serve({"one": folder})
    source = Peer(running.address, "one", secret=kit.secret, packed=packed, pool=pool)
    for _ in range(4):
        assert stage(source, kit.small).image.buffer.tobytes() == disk
        assert len(pool) == 1
        settled(running, leases=0)  # nothing stays open on the peer while it is kept
    assert running.peer.counters()["connections"] == 1
    assert source.read(kit_limits()).digest() == stage(source, kit.small).digest


def kit_limits() -> Any:
    from rota.gpu.lora.safefile import FileLimits

    return FileLimits()


def test_two_promotions_at_once_have_two_connections(
    kit: Any, serve: Any, folder: Path, pool: PeerPool
) -> None:
    running = serve({"one": folder})
    inner = Peer(running.address, "one", secret=kit.secret, pool=pool)
    seen: list[int] = []

    def midway(there: int, total: int) -> None:
        if not seen:
            seen.append(there)
            stage(inner, kit.small)

    outer = Peer(running.address, "one", secret=kit.secret, pool=pool, progress=midway)
    stage(outer, kit.small)
    assert seen and len(pool) == 2 and running.peer.counters()["connections"] == 2


def test_other_secrets_have_other_connections(
    kit: Any, serve: Any, folder: Path, pool: PeerPool
) -> None:
    """One who guesses must not be served over the connection of one who knows."""
    running = serve({"one": folder})
    stage(Peer(running.address, "one", secret=kit.secret, pool=pool), kit.small)
    with pytest.raises(RotaError) as caught:
        stage(Peer(running.address, "one", secret=b"a guess of the tests", pool=pool), kit.small)
    assert caught.value.code == "wire-auth-failed" and len(pool) == 1


def test_a_refusal_leaves_the_pool_without_that_connection(
    kit: Any, serve: Any, folder: Path, pool: PeerPool, disk: bytes
) -> None:
    running = serve({"one": folder})
    source = Peer(running.address, "one", secret=kit.secret, pool=pool)
    stage(source, kit.small)
    with pytest.raises(RequestError):
        stage(Peer(running.address, "two", secret=kit.secret, pool=pool), kit.small)
    assert len(pool) == 0
    settled(running, connections_now=0)
    assert stage(source, kit.small).image.buffer.tobytes() == disk


def test_a_peer_that_hung_up_meanwhile_costs_nothing(
    kit: Any, serve: Any, folder: Path, pool: PeerPool, disk: bytes
) -> None:
    running = serve({"one": folder})
    source = Peer(running.address, "one", secret=kit.secret, pool=pool)
    stage(source, kit.small)
    lose_patience(running)
    assert len(pool) == 1
    assert stage(source, kit.small).image.buffer.tobytes() == disk
    assert running.peer.counters()["connections"] == 2


def test_a_hang_up_in_the_very_moment_is_tried_once_more(
    kit: Any, serve: Any, folder: Path, pool: PeerPool, disk: bytes
) -> None:
    """The end comes after the kept connection was looked at, before it answers."""
    running = serve({"one": folder})
    proxy = Proxy(running.address)
    try:
        source = Peer(proxy.address, "one", secret=kit.secret, pool=pool)
        stage(source, kit.small)
        settled(running, leases=0)
        proxy.cut_at_next_byte()
        assert stage(source, kit.small).image.buffer.tobytes() == disk
        assert proxy.connections == 2
    finally:
        pool.close()
        proxy.close()


def test_a_cut_in_the_middle_is_an_error(
    kit: Any, serve: Any, folder: Path, pool: PeerPool
) -> None:
    """Once the peer has answered, nothing is tried again behind the caller's back."""
    running = serve({"one": folder})
    proxy = Proxy(running.address)
    try:
        source = Peer(proxy.address, "one", secret=kit.secret, pool=pool)
        stage(source, kit.small)
        settled(running, leases=0)
        proxy.cut_after(4000)
        with pytest.raises(StagingError) as caught:
            stage(source, kit.small)
        assert caught.value.code == "peer-lost" and len(pool) == 0
        assert proxy.connections == 1
    finally:
        pool.close()
        proxy.close()


def test_limits(kit: Any, serve: Any, folder: Path) -> None:
    now = [0.0]
    pool = PeerPool(keep=2, idle_s=10, clock=lambda: now[0])
    running = serve({"one": folder, "two": folder, "three": folder})

    def promote(**more: Any) -> None:
        stage(Peer(running.address, "one", secret=kit.secret, pool=pool, **more), kit.small)

    for deadline in (1.0, 2.0, 3.0):  # other time-outs: other connections
        promote(times=Times(stall=deadline))
        now[0] += 1
    assert len(pool) == 2
    settled(running, connections_now=2)
    now[0] += 8.5  # the older of the two is over its time
    promote(times=Times(stall=3.0))
    assert len(pool) == 1 and running.peer.counters()["connections"] == 3
    pool.close()
    settled(running, connections_now=0)
    promote()
    assert len(pool) == 0  # closed: works, and keeps nothing
    for wrong in ({"keep": -1}, {"idle_s": 0.0}):
        with pytest.raises(RequestError) as caught:
            PeerPool(**wrong)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.code == "bad-pool"


def test_rails_are_kept_with_their_connection(kit: Any, serve: Any, tmp_path: Path) -> None:
    fabric, pool = Fabric(), PeerPool()
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder}, verbs=VerbsPeer([FakeDevice(fabric)]))
    client = VerbsClient([FakeDevice(fabric)], 32 * MIB)
    source = Peer(
        running.address, "big", secret=kit.secret, packed="always", transport=client, rails=2,
        pool=pool,
    )  # fmt: skip
    want = stage(DirectorySource(folder), kit.large).image.buffer.tobytes()
    for _ in range(3):
        assert stage(source, kit.large).image.buffer.tobytes() == want
    assert fabric.open == 4 and running.peer.counters()["connections"] == 1
    fabric.status = {2: 10}
    with pytest.raises(StagingError):  # queue pairs that saw an error are not used again
        stage(source, kit.large)
    assert len(pool) == 0
    settled(running, connections_now=0)
    fabric.status = {}
    assert stage(source, kit.large).image.buffer.tobytes() == want
    pool.close()
    settled(running, connections_now=0)
    assert fabric.open == 0


def test_refused_verbs_are_asked_for_anew(kit: Any, serve: Any, tmp_path: Path) -> None:
    fabric, pool = Fabric(), PeerPool()
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder}, verbs=VerbsPeer([FakeDevice(fabric)]))
    client = VerbsClient([FakeDevice(fabric)], 32 * MIB)
    source = Peer(running.address, "big", secret=kit.secret, transport=client, pool=pool)
    fabric.refuse_pair = True
    stage(source, kit.large)
    assert len(pool) == 0 and fabric.posted == 0
    fabric.refuse_pair = False
    stage(source, kit.large)
    assert len(pool) == 1 and fabric.posted > 0
    pool.close()


def test_a_new_generation_is_seen_over_a_kept_connection(
    kit: Any, serve: Callable[..., Any], folder: Path, pool: PeerPool
) -> None:
    running = serve({"one": folder})
    source = Peer(running.address, "one", secret=kit.secret, packed="always", pool=pool)
    old = stage(source, kit.small)
    kit.write(folder, kit.small, seed=5)
    new = stage(source, kit.small)
    disk = stage(DirectorySource(folder), kit.small)
    assert new.digest == disk.digest != old.digest
    assert new.image.buffer.tobytes() == disk.image.buffer.tobytes()
    assert running.peer.counters()["connections"] == 1
    settled(running, generations=1)
