"""Threads that reckon digests give way to the loop."""

from __future__ import annotations

import os
import threading

from rota.rdma.background import NICER, digest_pool


def test_hashing_gives_way() -> None:
    """On a thread of its own nice value; the process keeps its own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with digest_pool(1, "rota-digest") as pool:
        there = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert there.result() == min(before + NICER, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
