"""Peer and engine on hosts of their own (network namespaces): delay, loss, reordering, silence.

Control and bytes by TCP. What the network does to packets, TCP repairs or the client's deadline
ends; the image is the one on disk, or there is none.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rota.errors import StagingError
from rota.gpu.lora.stage import StagedAdapter, stage
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times

from .conftest import LARGE, SECRET, PeerProcess

NEAR, FAR = "10.78.0.1", "10.78.0.2"
QUICK = Times(stall=1.0)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def netem(*words: str) -> None:
    """The same trouble in both directions; none without words."""
    for host in ((), ("ip", "netns", "exec", "far")):
        link = "nb" if host else "na"
        kind = ["root", "netem", *words] if words else ["root", "noqueue"]
        subprocess.run([*host, "tc", "qdisc", "replace", "dev", link, *kind], check=True)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[None]:
    ip("netns", "add", "far")
    ip("link", "add", "na", "type", "veth", "peer", "name", "nb", "netns", "far")
    ip("addr", "add", f"{NEAR}/24", "dev", "na")
    ip("-n", "far", "addr", "add", f"{FAR}/24", "dev", "nb")
    ip("link", "set", "na", "up")
    ip("-n", "far", "link", "set", "nb", "up")
    ip("-n", "far", "link", "set", "lo", "up")
    yield
    ip("netns", "del", "far")


def far_peer(folders: dict[str, Path], secret: Path) -> PeerProcess:
    served = {"large": folders["large"], "small": folders["large-f32"]}
    where = ("--host", FAR, "--no-rdma")
    return PeerProcess(served, secret, *where, prefix=("ip", "netns", "exec", "far"))


@pytest.fixture(scope="module")
def far(two_hosts: None, folders: dict[str, Path], secret: Path) -> Iterator[PeerProcess]:
    made = far_peer(folders, secret)
    yield made
    netem()
    ip("link", "set", "na", "up")
    made.stop()


def lands(far: PeerProcess, disk: StagedAdapter, adapter: str = "small", **more: Any) -> None:
    fields: dict[str, Any] = {"secret": SECRET, "packed": "never"} | more
    landed = stage(Peer(far.address, adapter, **fields), LARGE)
    assert landed.image.buffer.tobytes() == disk.image.buffer.tobytes()
    assert landed.digest == disk.digest


@pytest.mark.parametrize(
    "trouble",
    ["", "delay 20ms 5ms", "loss 2%", "delay 5ms reorder 25% 50%", "duplicate 5%", "corrupt 1%"],
)
def test_what_tcp_repairs(
    far: PeerProcess, on_disk: Callable[[str], StagedAdapter], trouble: str
) -> None:
    netem(*trouble.split())
    try:
        lands(far, on_disk("large-f32"))
    finally:
        netem()


def refused(far: PeerProcess, meddle: Callable[[], None]) -> StagingError:
    """The error of a promotion in the middle of which something happens once."""
    done: list[int] = []

    def once(count: int, total: int) -> None:
        if not done:
            meddle()
        done.append(count)

    source = Peer(far.address, "large", secret=SECRET, packed="never", times=QUICK, progress=once)
    with pytest.raises(StagingError) as caught:
        stage(source, LARGE)
    assert done
    return caught.value


def test_cut_and_mended(far: PeerProcess, on_disk: Callable[[str], StagedAdapter]) -> None:
    try:
        error = refused(far, lambda: ip("link", "set", "na", "down"))
        assert error.code == "peer-timeout"
    finally:
        ip("link", "set", "na", "up")
    lands(far, on_disk("large"), "large")


def test_host_gone_without_a_word(
    far: PeerProcess,
    folders: dict[str, Path],
    secret: Path,
    on_disk: Callable[[str], StagedAdapter],
) -> None:
    """Half-open: the other host loses its network and then its process; no FIN ever comes."""
    doomed = far_peer(folders, secret)

    def vanish() -> None:
        ip("-n", "far", "link", "set", "nb", "down")
        doomed.kill()

    try:
        assert refused(doomed, vanish).code == "peer-timeout"
    finally:
        ip("-n", "far", "link", "set", "nb", "up")
    lands(far, on_disk("large-f32"))
