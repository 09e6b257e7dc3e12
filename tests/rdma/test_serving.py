"""How an answer goes out: in pieces, however little of each the system takes, a welcome first."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.rdma import messages as m
from rota.rdma.desk import Desk
from rota.rdma.frames2 import PayloadDone, Received, Times
from rota.rdma.serving import Serving
from rota.rdma.store import PackedImage, Store
from rota.rdma.wire2 import Wire2Client, Wire2Server

MIB = 1 << 20


class Watched(socket.socket):
    """Takes at most ``most`` bytes at a time, and notes what it was given."""

    most = 1 << 30
    given: list[int]

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        views = [memoryview(one) for one in buffers]
        self.given.append(sum(map(len, views)))
        return self.send(b"".join(views)[: self.most])


@pytest.mark.parametrize("most", [1 << 30, MIB - 1, 3, 2])
@pytest.mark.parametrize("nbytes", [None, 0, 1, 10, 3 * MIB + 5])
def test_the_system_is_given_a_little_at_a_time(most: int, nbytes: int | None) -> None:
    if most < 10 and (nbytes or 0) > MIB:
        nbytes = 50
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        watched = Watched(fileno=listener.accept()[0].detach())
    watched.most, watched.given = most, []
    got = bytearray()

    def drain() -> None:
        while data := theirs.recv(MIB):
            got.extend(data)

    payload = None if nbytes is None else np.arange(nbytes, dtype=np.uint8)
    reader = threading.Thread(target=drain)
    with watched, theirs:
        one = Serving(
            watched, Desk(Store({})), None, Times(), threading.Semaphore(), lambda name, more: None
        )
        reader.start()
        one._send(b"words", None if payload is None else payload.data)
        watched.shutdown(socket.SHUT_WR)
        reader.join(30)
    assert bytes(got) == b"words" + (b"" if payload is None else payload.tobytes())
    assert max(watched.given) <= MIB + len(b"words")


class Held:
    """A lock or a disk that makes whoever wants it wait, until it is opened."""

    def __init__(self) -> None:
        self.wanted, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.wanted.set()
        assert self.open.wait(30)


@pytest.mark.parametrize("secret", [b"one", None])
@pytest.mark.parametrize("what", ["disk", "permit", "someone else reads", "digests"])
def test_a_client_is_welcomed_before_it_has_to_wait(
    folder: Path, kit: Any, monkeypatch: pytest.MonkeyPatch, what: str, secret: bytes | None
) -> None:
    """Its handshake has a time of its own, shorter than a disk's: it asks along with it, and an
    adapter that is slow to read must not look like a peer that is not there."""
    later = time.time_ns() + 10**12  # so that files are not too young to be known
    store, held = Store({"one": folder}, clock_ns=lambda: later), Held()
    asked, answered = m.Open("one"), m.Manifest
    permits = threading.Semaphore(0 if what == "permit" else 1)
    if what == "disk":
        read = store._read

        def slowly(path: Path) -> Any:
            held.wait()
            return read(path)

        monkeypatch.setattr(store, "_read", slowly)
    if what == "someone else reads":
        store._places["one"].lock.acquire()
    if what == "digests":  # of an image that was packed before, by a hash nobody asked for yet
        asked = m.Fetch("one", kit.small.fingerprint(), ["sha256", "sha256-told"], 0, 1 << 20)
        answered = m.Fetched
        generation = store.open("one")
        chunks = store.pack(generation, kit.small).chunks
        store.release(generation)

        def slowly_hashed(image: PackedImage, name: str) -> bytes:
            held.wait()
            return chunks(name)

        monkeypatch.setattr(PackedImage, "chunks", slowly_hashed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=30)
        theirs, _ = listener.accept()
    desk = Desk(store, sure=secret is not None)
    one = Serving(theirs, desk, secret, Times(), permits, lambda name, more: None)
    thread = threading.Thread(target=one.run)
    thread.start()
    client, said = Wire2Client(bytes(32), secret, "test", Times(), 0.0), []
    sink = None if what != "digests" else memoryview(bytearray(1 << 20))
    client.request(asked, 0.0, sink)
    with ours, theirs:
        while not any(type(event.message) is m.Welcome for event in said):
            ours.sendall(client.data_to_send())
            client.receive_data(ours.recv(1 << 16))
            said += [event for event in client.events(0.0) if isinstance(event, Received)]
        assert [type(event.message) for event in said] == [m.Welcome]
        held.open.set()
        if what == "permit":
            permits.release()
        if what == "someone else reads":
            store._places["one"].lock.release()
        while len(said) < 2:
            client.receive_data(ours.recv(1 << 16))
            said += [event for event in client.events(0.0) if isinstance(event, Received)]
        assert type(said[1].message) is answered
        while client.landing() is not None:
            client.receive_data(ours.recv(1 << 16))
            assert all(isinstance(event, PayloadDone) for event in client.events(0.0))
        ours.shutdown(socket.SHUT_WR)
        thread.join(30)
        assert not thread.is_alive()
    desk.close()
    store.close()


@pytest.mark.parametrize("what", ["disk", "someone else reads"])
def test_who_reads_nothing_keeps_no_lock_from_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its welcome, which is said while locks are held, is said as far as there is room for it; the
    rest, in order, once they are not."""
    store = Store({"one": folder})
    lock, permits = store._places["one"].lock, threading.Semaphore(1)
    if what == "someone else reads":
        lock.acquire()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=30)
        theirs, _ = listener.accept()
    # As much as both ends take, and no more for as long as nothing is read.
    theirs.settimeout(0.3)
    before = 0
    with contextlib.suppress(TimeoutError):
        while True:
            before += theirs.send(bytes(MIB))
    theirs.settimeout(None)
    with contextlib.suppress(BlockingIOError):  # what waits, waits for more room than a byte takes
        while True:
            before += theirs.send(bytes(MIB), socket.MSG_DONTWAIT)
    said, waits, read = Serving._say_now, threading.Event(), threading.Event()

    def now(one: Serving, proto: Wire2Server) -> None:
        said(one, proto)
        waits.set()

    refresh = store._refresh

    def refreshed(*rest: Any) -> None:
        refresh(*rest)
        read.set()

    monkeypatch.setattr(Serving, "_say_now", now)
    monkeypatch.setattr(store, "_refresh", refreshed)
    desk = Desk(store)
    one = Serving(theirs, desk, None, Times(stall=60), permits, lambda name, more: None)
    thread = threading.Thread(target=one.run)
    client = Wire2Client(bytes(32), None, "test", Times(), 0.0)
    client.request(m.Open("one"), 0.0)
    ours.sendall(client.data_to_send())
    with ours, theirs:
        thread.start()
        assert waits.wait(30)
        if what == "someone else reads":
            lock.release()
        assert read.wait(30)
        assert permits.acquire(timeout=30)  # nothing is said yet, and all is free
        store.release(store.open("one"))
        while before:
            before -= len(ours.recv(min(MIB, before)))
        got: list[Any] = []
        while len(got) < 2:
            client.receive_data(ours.recv(1 << 16))
            got += client.events(0.0)
        assert [type(event.message) for event in got] == [m.Welcome, m.Manifest]
        ours.shutdown(socket.SHUT_WR)
        thread.join(30)
        assert not thread.is_alive()
    desk.close()
    assert store.counters()["leases"] == 0
    store.close()
