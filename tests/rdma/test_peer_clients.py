"""A peer's clients over real sockets: refusals, limits, and who is hostile, slow or many."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from rota.errors import CapacityError, RejectError, RequestError, WireError
from rota.gpu.lora.layout import SlotLayout
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StageLimits, stage
from rota.rdma import messages as m
from rota.rdma.address import parse_address, parse_peer_url
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times
from rota.rdma.hosts import VerbsPeer
from rota.rdma.peer import PeerLimits
from rota.rdma.wire1 import GotManifest, QueuePair1, Ready, ServerRails, Wire1Client

from .exchange import connected, refusal, same
from .fabric import Fabric, FakeDevice


@pytest.mark.parametrize("packed", ["always", "never"])
def test_anybody_with_the_secret_may_read_the_counters(
    kit: Any, serve: Any, folder: Path, packed: Any
) -> None:
    running = serve({"one": folder})
    one = Peer(running.address, "one", secret=kit.secret, packed=packed)
    before = one.counters()
    assert before["opens"] == before["packs"] == before["errors"] == 0
    landed = stage(one, kit.small).image
    with pytest.raises(RequestError):
        stage(dataclasses.replace(one, adapter="nothing"), kit.small)
    after = one.counters()
    assert after["packs"] == (packed == "always") and after["opens"] >= 1
    assert after["region_bytes"] >= landed.nbytes > 0 and after["connections_now"] >= 1
    assert after["bytes_sent"] - before["bytes_sent"] >= landed.nbytes
    assert refusal(dataclasses.replace(one, secret=b"guess").counters).code == "wire-auth-failed"


def test_refusals_over_the_wire(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder})

    def one(**more: Any) -> Any:
        fields = {"address": running.address, "adapter": "one", "secret": kit.secret} | more
        return lambda: stage(Peer(**fields), kit.small)

    error = refusal(one(adapter="two"))
    assert (type(error), error.code, error.subject) == (RequestError, "unknown-adapter", "two")
    assert refusal(one(secret=b"guess")).code == "wire-auth-failed"
    assert refusal(one(secret=None)).code == "wire-auth-required"
    small = StageLimits(FileLimits(file_bytes=1000))
    error = refusal(
        lambda: stage(Peer(running.address, "one", secret=kit.secret), kit.small, small)
    )
    assert (type(error), error.code) == (RejectError, "file-too-large")
    narrow = SlotLayout(kit.small.dims, 2)
    for packed in ("always", "never"):
        # A parameter of the test.
        source = Peer(running.address, "one", secret=kit.secret, packed=packed)
        assert refusal(lambda s=source: stage(s, narrow)).code == "rank-exceeds-pool"
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    assert refusal(one(address=address)).code == "peer-unreachable"
    for address in ("host", "host:", ":1", "host:70000", "host:1x"):
        assert refusal(lambda a=address: Peer(a, "one")).code == "bad-address"
    assert parse_peer_url("peer://[::1]:5/a%2Fb") == ("[::1]:5", "a/b")
    assert parse_address("[::1]:5") == ("::1", 5)
    for adapter in ("", "x" * 256):
        assert refusal(lambda a=adapter: Peer("h:1", a)).code == "bad-adapter-id"
    assert refusal(lambda: Peer("h:1", "a", rails=9)).code == "bad-rails"
    assert "secret of" not in repr(Peer("h:1", "a", secret=kit.secret))


def test_a_secret_is_kept_by_both(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, secret=None)
    stage(Peer(running.address, "one"), kit.small)
    error = refusal(lambda: stage(Peer(running.address, "one", secret=kit.secret), kit.small))
    assert (type(error), error.code) == (WireError, "wire-auth-missing")


def test_limits_of_a_client(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, limits=PeerLimits(max_open=2))
    link = connected(running, kit)
    first = link.call(m.Open("one"))
    assert isinstance(first, m.Manifest)
    link.call(m.Open("one"))
    error = refusal(lambda: link.call(m.Open("one")))
    assert (type(error), error.code) == (CapacityError, "too-many-open")
    link.call(m.Release(first.digest))
    link.call(m.Open("one"))
    assert refusal(lambda: link.call(m.Release("0" * 64))).code == "not-open"

    def read(**more: Any) -> Any:
        fields = {"shard": 0, "fingerprint": "", "offset": 0, "nbytes": 4} | more
        ask = m.Read(first.digest, **fields)
        return lambda: link.call(ask, memoryview(bytearray(ask.nbytes)))

    assert refusal(read(offset=first.shards[0] - 3)).code == "read-out-of-range"
    assert refusal(read(offset=1 << 48)).code == "read-out-of-range"
    assert refusal(read(shard=1)).code == "not-open"
    assert refusal(read(shard=-1, fingerprint="0" * 64)).code == "not-open"
    rail = m.Rail(1, 1, bytes(16), 3, 1, 0)
    assert refusal(lambda: link.call(m.Connect([rail]))).code == "no-verbs"
    read()()  # refusals cost nothing
    status = link.call(m.Status())
    assert isinstance(status, m.Counters)
    assert status.values["leases"] == 2 and status.values["connections_now"] == 1
    ids = link.call(m.ListIds())
    assert ids == m.Ids(["one"])
    link.close()


def test_connections_are_limited(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, limits=PeerLimits(connections=1))
    link = connected(running, kit)
    error = refusal(lambda: stage(Peer(running.address, "one", secret=kit.secret), kit.small))
    assert (type(error), error.code) == (CapacityError, "peer-busy") and error.retry_after_s
    link.close()


def test_a_client_costs_one_thread_at_most(kit: Any, serve: Any, folder: Path) -> None:
    """Idle ones wait for the next client; a few stay when many have gone."""
    running = serve({"one": folder})

    def threads() -> int:
        return sum(t.name == "rota-peer" for t in threading.enumerate())

    def settled(most: int) -> None:
        until = time.monotonic() + 30
        while running.peer.counters()["connections_now"] or threads() > most:
            assert time.monotonic() < until
            threading.Event().wait(0.01)

    source = Peer(running.address, "one", secret=kit.secret)
    for _ in range(8):
        stage(source, kit.small)
    settled(4)
    links = [connected(running, kit) for _ in range(12)]
    assert 12 < threads() <= 16
    for link in links:
        link.close()
    settled(4)
    running.stop()
    assert threads() == 0


def test_a_version_1_client_is_served_too(kit: Any, serve: Any, folder: Path) -> None:
    """The whole exchange over a real socket, up to the status, and everything given back."""
    fabric = Fabric()
    verbs = VerbsPeer([FakeDevice(fabric)])
    running = serve({"one": folder}, secret=None, verbs=verbs, version1=True)
    device, proto, events = FakeDevice(fabric), Wire1Client("one"), list[Any]()
    with socket.create_connection(parse_address(running.address)) as client:
        client.settimeout(30)
        while not events or not isinstance(events[-1], Ready):
            client.sendall(proto.data_to_send())
            proto.receive_data(client.recv(1 << 16))
            for event in proto.events():
                events.append(event)
                if isinstance(event, GotManifest):
                    proto.choose_rails(2)
                elif isinstance(event, ServerRails):
                    proto.send_rails([QueuePair1(1, 2, device.gid)] * 2)
        assert running.peer.store.counters()["leases"] == 1 and fabric.open == 2
    manifest = events[0].manifest
    assert sum(manifest.shard_lens) == (folder / "adapter_model.safetensors").stat().st_size
    stage(Peer(running.address, "one"), kit.small)  # and version 2 beside it
    until = time.monotonic() + 30
    while running.peer.counters()["connections_now"]:
        assert time.monotonic() < until
        threading.Event().wait(0.01)
    assert running.peer.store.counters()["leases"] == 0 and fabric.open == 0


def test_the_loop_waits_for_no_lock_of_the_store(kit: Any, serve: Any, folder: Path) -> None:
    """Whatever a client asks while a thread holds it: here, giving a lease back."""
    running = serve({"one": folder})
    link = connected(running, kit)
    manifest = link.call(m.Open("one"))
    assert isinstance(manifest, m.Manifest)
    with running.peer.store._lock:
        for message in (m.Release(manifest.digest), m.Fetch("one", "0" * 64, ["sha256"], 0, 0)):
            link._proto.request(message, link._clock())
        link._flush()
        for _ in range(3):
            running.portal.start_task_soon(anyio.lowlevel.checkpoint).result(30)
        other = connected(running, kit)  # nor does the next client
        other.close()
    assert isinstance(link.call(m.Open("one")), m.Manifest)
    link.close()


def test_many_at_once(kit: Any, serve: Any, tmp_path: Path) -> None:
    folders = {f"a{i}": kit.write(tmp_path / f"a{i}", kit.small, seed=i) for i in range(4)}
    running = serve(folders)
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(3):
                staged = stage(Peer(running.address, name, secret=kit.secret), kit.small)
                same(staged, stage(DirectorySource(folders[name]), kit.small))
        except BaseException as error:  # a thread: the test sees it in the list
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in folders for _ in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert running.peer.store.counters()["packs"] <= 4


@pytest.mark.parametrize(
    "junk",
    [b"", b"r", b"GET / HTTP/1.1\r\n\r\n", b"rota\x02", b"rota" + b"\xff" * 60, b"\x05\0\0\0model"],
)
def test_strangers_cost_only_themselves(kit: Any, serve: Any, folder: Path, junk: bytes) -> None:
    times = Times(handshake=0.2)
    running = serve({"one": folder}, limits=PeerLimits(times=times))
    with socket.create_connection(parse_address(running.address)) as stranger:
        stranger.sendall(junk)
        while stranger.recv(4096):  # told why, or not; hung up in any case
            pass
    stage(Peer(running.address, "one", secret=kit.secret), kit.small)


def test_a_client_that_does_not_read(kit: Any, serve: Any, tmp_path: Path) -> None:
    """The payload of a stalled client does not keep its lease for ever."""
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder}, limits=PeerLimits(times=Times(stall=0.2)))
    link = connected(running, kit)
    manifest = link.call(m.Open("big"))
    assert isinstance(manifest, m.Manifest)
    for _ in range(4):
        nbytes = manifest.shards[0]
        ask = m.Read(manifest.digest, 0, "", 0, nbytes)
        link._proto.request(ask, link._clock(), memoryview(bytearray(nbytes)))
    link._flush()
    stage(Peer(running.address, "big", secret=kit.secret), kit.large)  # others are served
    until = link._clock() + 20
    counters, store = running.peer.counters, running.peer.store
    while counters()["connections_now"] or store.counters()["leases"]:
        assert link._clock() < until, "the stalled client, or its lease, is still there"
        threading.Event().wait(0.01)
    assert running.peer.counters()["errors"] == 1
    assert running.peer.store.counters()["leases"] == 0
    link.close()
