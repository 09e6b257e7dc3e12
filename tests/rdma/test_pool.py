"""Connections kept between promotions: reuse, hang-ups, errors, limits, and what is given back."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rota.errors import RequestError, RotaError, StagingError
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma import hashes, landing
from rota.rdma import messages as m
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times
from rota.rdma.hosts import VerbsClient, VerbsPeer
from rota.rdma.peer import PeerLimits
from rota.rdma.pool import PeerPool

from .exchange import connected, refusal
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


def test_a_kept_connection_has_one_thread_that_checks(
    kit: Any, serve: Any, tmp_path: Path, pool: PeerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second promotion on, until it is closed; what is small needs none."""
    fast = {name: dataclasses.replace(one, slow=False) for name, one in hashes.KNOWN.items()}
    monkeypatch.setattr(landing, "KNOWN", fast)  # whichever there is

    def checking() -> int:
        return sum("rota-verify" in t.name for t in threading.enumerate())

    folder = kit.write(tmp_path / "large", kit.large)
    running = serve({"one": folder})
    source = Peer(running.address, "one", secret=kit.secret, packed="always", pool=pool)
    whole = stage(DirectorySource(folder), kit.large).image.buffer.tobytes()
    assert len(whole) > 2 * MIB
    for small, wanted in ((1 << 30, [0, 0]), (0, [1, 1])):
        monkeypatch.setattr(landing, "_SMALL_BYTES", small)
        for count in wanted:
            assert stage(source, kit.large).image.buffer.tobytes() == whole
            assert checking() == count
    assert running.peer.counters()["connections"] == 1
    with pytest.raises(RequestError):
        stage(Peer(running.address, "two", secret=kit.secret, pool=pool), kit.large)
    assert (len(pool), checking()) == (0, 0)
    for count in (0, 1):  # a new connection has none yet
        stage(source, kit.large)
        assert checking() == count
    pool.close()
    assert checking() == 0


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


def idle(running: Any, count: int = 1) -> list[Any]:
    """The connections that wait for a question with nothing open, once there are so many."""

    async def wait() -> list[Any]:
        with anyio.fail_after(30):
            while True:
                found = [o for o in running.peer._serving if o.idle_since is not None]
                if len(found) >= count:
                    return found
                await anyio.lowlevel.checkpoint()

    found: list[Any] = running.portal.call(wait)
    return found


def test_kept_connections_make_room_for_a_new_client(
    kit: Any, serve: Any, folder: Path, pool: PeerPool, disk: bytes
) -> None:
    """And come back: a peer that is full of idle engines turns nobody away."""
    running = serve({"one": folder}, limits=PeerLimits(connections=1, dismiss_after_s=0.0))
    source = Peer(running.address, "one", secret=kit.secret, pool=pool)
    other = PeerPool()
    for turn in range(3):
        for one in (source, dataclasses.replace(source, pool=other)):
            assert stage(one, kit.small).image.buffer.tobytes() == disk
            idle(running)
            assert running.peer.counters()["connections_now"] == 1
        assert running.peer.counters()["connections"] == 2 * turn + 2
    other.close()
    assert running.peer.counters()["refused"] == 0


def test_who_is_idle_longest_makes_room_and_nobody_who_has_something_open(
    kit: Any, serve: Any, folder: Path
) -> None:
    running = serve({"one": folder}, limits=PeerLimits(connections=3, dismiss_after_s=0.0))
    first, busy, last = links = [connected(running, kit) for _ in range(3)]
    busy.call(m.Open("one"))
    for count, link in enumerate((first, last), 1):
        link.call(m.ListIds())
        idle(running, count)
    links.append(connected(running, kit))
    assert refusal(lambda: first.call(m.ListIds())).code == "peer-lost"
    links.append(connected(running, kit))
    assert refusal(lambda: last.call(m.ListIds())).code == "peer-lost"
    # Two who have asked nothing yet, and one who has an adapter open.
    assert refusal(lambda: connected(running, kit)).code == "peer-busy"
    assert isinstance(busy.call(m.Open("one")), m.Manifest)
    for link in links:
        link.close()


def test_nobody_is_dismissed_at_once(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, limits=PeerLimits(connections=1, dismiss_after_s=3600.0))
    link = connected(running, kit)
    link.call(m.ListIds())
    idle(running)
    assert refusal(lambda: connected(running, kit)).code == "peer-busy"
    assert link.call(m.ListIds()) == m.Ids(["one"])
    link.close()


def test_what_is_asked_in_the_moment_of_dismissal_is_asked_again(
    kit: Any, serve: Any, folder: Path, pool: PeerPool, disk: bytes, monkeypatch: Any
) -> None:
    """The question was on its way: nobody answers it and then hangs up half way through."""
    running = serve({"one": folder})
    source = Peer(running.address, "one", secret=kit.secret, pool=pool)
    stage(source, kit.small)
    (one,) = idle(running)
    monkeypatch.setattr(one, "leave", lambda: None)  # word of it has not come yet
    assert one.dismiss(0.0) and not one.dismiss(0.0)
    before = running.peer.counters()["requests"]
    assert stage(source, kit.small).image.buffer.tobytes() == disk
    assert running.peer.counters()["connections"] == 2
    assert running.peer.counters()["requests"] == before + 1  # Fetch, heard once
    assert len(pool) == 1


def test_rails_of_the_dismissed_are_gone_before_another_is_served(
    kit: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle on its connection is also who reads one-sidedly: it has the adapter open."""
    fabric = Fabric()
    folder = kit.write(tmp_path / "big", kit.large, 100)
    limits = PeerLimits(connections=1, dismiss_after_s=0.0)
    running = serve({"big": folder}, verbs=VerbsPeer([FakeDevice(fabric)]), limits=limits)
    client, pool = VerbsClient([FakeDevice(fabric)], 32 * MIB), PeerPool()
    seen: list[str] = []

    def midway(there: int, total: int) -> None:
        if not seen:
            seen.append(refusal(lambda: connected(running, kit)).code)

    source = Peer(
        running.address, "big", secret=kit.secret, packed="always", transport=client, pool=pool,
        progress=midway,
    )  # fmt: skip
    want = stage(DirectorySource(folder), kit.large).image.buffer.tobytes()
    assert stage(source, kit.large).image.buffer.tobytes() == want
    assert seen == ["peer-busy"] and fabric.open == 2
    (one,) = idle(running)
    begun, order, close, start = (
        threading.Event(),
        list[str](),
        one._desk.close,
        running.peer._serve,
    )

    def closed() -> None:
        begun.wait(0.1)  # long enough for a client that does not wait for this to be served
        close()
        order.append("closed")

    def started(sock: Any) -> None:
        order.append("served")
        begun.set()
        start(sock)

    monkeypatch.setattr(one._desk, "close", closed)
    monkeypatch.setattr(running.peer, "_serve", started)
    link = connected(running, kit)
    assert order == ["closed", "served"] and fabric.open == 1  # the engine's own end
    link.close()
    settled(running, connections_now=0)
    assert stage(source, kit.large).image.buffer.tobytes() == want
    pool.close()


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
