"""The end of a promotion or of a peer: cuts, silence, cancelling and stopping."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rota.errors import StagingError
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma import messages as m
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times

from .exchange import connected, refusal, same


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("limit", [0, 30, 100, 2000, 1_000_000, 4_000_000])
def test_cut_in_the_middle(
    kit: Any, serve: Any, proxy: Any, tmp_path: Path, limit: int, packed: Any
) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder})
    fields: dict[str, Any] = {"secret": kit.secret, "packed": packed}
    broken = proxy(running.address, "cut", limit)
    error = refusal(lambda: stage(Peer(broken.address, "big", **fields), kit.large))
    assert (type(error), error.code) == (StagingError, "peer-lost")
    staged = stage(Peer(running.address, "big", **fields), kit.large)
    same(staged, stage(DirectorySource(folder), kit.large))


@pytest.mark.parametrize("limit", [0, 100, 2000, 1_000_000])
def test_half_open(kit: Any, serve: Any, proxy: Any, tmp_path: Path, limit: int) -> None:
    """Silence ends at the client's own deadline, whatever TCP thinks."""
    running = serve({"big": kit.write(tmp_path / "big", kit.large, 100)})
    silent = proxy(running.address, "half-open", limit)
    times = Times(handshake=0.3, reply=0.3, stall=0.3)
    source = Peer(silent.address, "big", secret=kit.secret, packed="never", times=times)
    assert refusal(lambda: stage(source, kit.large)).code == "peer-timeout"
    source = Peer(silent.address, "big", secret=kit.secret, deadline_s=0.3)
    assert refusal(lambda: stage(source, kit.large)).code == "peer-timeout"


def test_cancelled_while_nothing_comes(kit: Any, serve: Any, proxy: Any, folder: Path) -> None:
    running = serve({"one": folder})
    silent = proxy(running.address, "half-open", 0)
    flag = threading.Event()
    threading.Timer(0.1, flag.set).start()
    source = Peer(silent.address, "one", secret=kit.secret)
    error = refusal(lambda: stage(source, kit.small, cancelled=flag.is_set))
    assert error.code == "stage-cancelled"


def test_stopping(kit: Any, serve: Any, tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder})
    idle = connected(running, kit)
    idle.call(m.Open("big"))
    running.stop()
    error = refusal(lambda: idle.call(m.ListIds()))
    assert (type(error), error.code) == (StagingError, "peer-lost")
    idle.close()
    assert refusal(lambda: connected(running, kit)).code in ("peer-unreachable", "peer-lost")


def test_stopping_lets_a_transfer_end(kit: Any, serve: Any, tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder})
    stopped = threading.Event()

    def stop(done: int, total: int) -> None:
        if not stopped.is_set():
            stopped.set()
            running.portal.call(running.peer.stop)

    source = Peer(running.address, "big", secret=kit.secret, packed="always", progress=stop)
    same(stage(source, kit.large), stage(DirectorySource(folder), kit.large))
    assert stopped.is_set()
