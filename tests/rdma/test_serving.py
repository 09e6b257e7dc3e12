"""How an answer goes out: in pieces, however little of each the system takes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from rota.rdma.desk import Desk
from rota.rdma.frames2 import Times
from rota.rdma.serving import Serving
from rota.rdma.store import Store

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
