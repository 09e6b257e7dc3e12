"""Threads that reckon digests, and those of a peer, give way to the loop."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from rota.gpu.host_threads import LONG_S
from rota.rdma.background import NICER, digest_pool
from rota.rdma.client import Peer

from ..slices import slice_s, usual_s


def test_hashing_gives_way() -> None:
    """On a thread of its own nice value; the process keeps its own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with digest_pool(1, "rota-digest") as pool:
        there = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert there.result() == min(before + NICER, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_who_waits_for_a_core_gets_it_from_them(serve: Any, folder: Path) -> None:
    """They ask for long slices; one that wakes asks for shorter ones."""
    assert usual_s() < LONG_S
    with digest_pool(1, "rota-digest") as pool:
        assert pool.submit(slice_s).result() == LONG_S
    running = serve({"one": folder}, secret=None)
    Peer(running.address, "one").counters()  # a thread has served a client, so it has begun
    threads = [t.native_id for t in threading.enumerate() if t.name == "rota-peer"]
    assert LONG_S in [slice_s(ident or 0) for ident in threads]
