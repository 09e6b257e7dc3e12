"""What goes wrong on the way is an error by name, in bounded time, and the next promotion works."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rota.errors import StagingError
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StagedAdapter, stage
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times
from rota.rdma.hosts import VerbsClient
from rota.rdma.landing import opened
from rota.rdma.rails import ClientRails

from .conftest import LARGE, PeerProcess, write_adapter

MEND = "/run/rxevm/mend"


class Meddling:
    """A transport whose rails do something else before each read."""

    def __init__(self, transport: VerbsClient, meddle: Callable[..., tuple[int, int]]) -> None:
        self._transport, self._meddle = transport, meddle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def open(self, count: int) -> ClientRails:
        rails, meddle = self._transport.open(count), self._meddle
        read = rails.read

        def other(target: Any, address: int, rkeys: list[int], *more: Any, **named: Any) -> None:
            [rkey] = rkeys
            address, rkey = meddle(address, rkey)
            read(target, address, [rkey], *more, **named)

        rails.read = other  # type: ignore[method-assign]  # put in its place by the test
        return rails


def refused(source: Peer, **more: Any) -> StagingError:
    with pytest.raises(StagingError) as caught:
        stage(source, LARGE, **more)
    return caught.value


@pytest.fixture
def expected(on_disk: Callable[[str], StagedAdapter]) -> bytes:
    return on_disk("large").image.buffer.tobytes()


def lands(source: Peer, expected: bytes) -> None:
    assert stage(source, LARGE).image.buffer.tobytes() == expected


@pytest.mark.parametrize("rails", [1, 4])
def test_wrong_rkey(
    source: Callable[..., Peer], transport: VerbsClient, expected: bytes, rails: int
) -> None:
    other = Meddling(transport, lambda address, rkey: (address, rkey ^ 0x5A00))
    error = refused(source("large", transport=other, rails=rails))
    assert error.code == "rdma-read-failed" and "status 10" in str(error.found)
    lands(source("large"), expected)


def test_past_the_end(source: Callable[..., Peer], transport: VerbsClient, expected: bytes) -> None:
    other = Meddling(transport, lambda address, rkey: (address + LARGE.slot_bytes, rkey))
    error = refused(source("large", transport=other))
    assert error.code == "rdma-read-failed" and "status 10" in str(error.found)
    lands(source("large"), expected)


def test_bytes_with_another_digest(
    folders: dict[str, Path], source: Callable[..., Peer], transport: VerbsClient, expected: bytes
) -> None:
    """A read of the wrong place that verbs allow: memory of another image of the same size."""
    regions: list[tuple[int, int]] = []

    def note(address: int, rkey: int) -> tuple[int, int]:
        regions.append((address, rkey))
        return address, rkey

    stage(source("large-f32", transport=Meddling(transport, note)), LARGE)
    [there] = regions
    # Held open, so that the memory stays registered.
    holding = source("large-f32")
    errors: list[StagingError] = []

    def misled(session: Any) -> None:
        opened(session, holding.adapter, FileLimits())
        errors.append(refused(source("large", transport=Meddling(transport, lambda *_: there))))

    holding._over(None, misled)
    assert errors[0].code == "digest-mismatch"
    lands(source("large"), expected)


def test_peer_killed_in_the_middle(
    folders: dict[str, Path],
    secret: Path,
    source: Callable[..., Peer],
    narrow: VerbsClient,
    expected: bytes,
) -> None:
    doomed = PeerProcess({"large": folders["large"]}, secret)

    def kill(done: int, total: int) -> None:
        if doomed.process.poll() is None:
            doomed.kill()

    error = refused(source("large", address=doomed.address, transport=narrow, progress=kill))
    # Its memory goes (10), or its queue pair does first and nothing answers any more (12).
    assert error.code == "rdma-read-failed"
    assert str(error.found).startswith(("status 10", "status 12")), error.found
    lands(source("large"), expected)


def test_cable_cut_and_mended(
    source: Callable[..., Peer], narrow: VerbsClient, expected: bytes
) -> None:
    cut: list[int] = []

    def cut_once(done: int, total: int) -> None:
        if not cut:
            cut.append(done)
            subprocess.run(["ip", "link", "set", "vb", "down"], check=True)

    try:
        error = refused(source("large", transport=narrow, progress=cut_once))
        assert cut and error.code in ("rdma-read-failed", "peer-timeout")
    finally:
        subprocess.run([MEND], check=True)
    lands(source("large"), expected)


def test_cable_cut_for_longer_than_the_stall_time(
    source: Callable[..., Peer], narrow: VerbsClient, expected: bytes
) -> None:
    """Own deadlines, whatever the device's retries do."""

    def cut(done: int, total: int) -> None:
        subprocess.run(["ip", "link", "set", "vb", "down"], check=True)

    try:
        times = Times(stall=0.1)
        error = refused(source("large", transport=narrow, progress=cut, times=times))
        assert error.code == "peer-timeout"
    finally:
        subprocess.run([MEND], check=True)
    lands(source("large"), expected)


def test_peer_stopped_takes_no_part(
    peer: PeerProcess, source: Callable[..., Peer], narrow: VerbsClient, expected: bytes
) -> None:
    stopped: list[int] = []

    def pause(done: int, total: int) -> None:
        if not stopped:
            peer.pause()
        stopped.append(done)

    try:
        lands(source("large", transport=narrow, progress=pause), expected)
    finally:
        peer.go_on()
    assert stopped[-1] == LARGE.slot_bytes


def test_cancelled_in_the_middle(
    source: Callable[..., Peer], narrow: VerbsClient, expected: bytes
) -> None:
    seen: list[int] = []
    made = source("large", transport=narrow, progress=lambda done, _: seen.append(done))
    error = refused(made, cancelled=lambda: bool(seen))
    assert error.code == "stage-cancelled" and 0 < seen[-1] < LARGE.slot_bytes
    # The memory is free again at once, and nothing writes it late.
    block = narrow.allocate(LARGE.slot_bytes)
    block[:] = 0xA5
    lands(source("large", transport=narrow), expected)
    assert (block == 0xA5).all()


def test_files_changed_between_manifest_and_read(
    folders: dict[str, Path], source: Callable[..., Peer], transport: VerbsClient, tmp_path: Path
) -> None:
    """The generation of the manifest is what lands; the next promotion sees the new one."""
    folder = folders["changing"]
    old = stage(DirectorySource(folder), LARGE)
    newer = write_adapter(tmp_path / "newer", LARGE, 48, 77, "BF16")

    def change(address: int, rkey: int) -> tuple[int, int]:
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(newer / name, folder / name)
        return address, rkey

    landed = stage(source("changing", transport=Meddling(transport, change)), LARGE)
    assert landed.digest == old.digest
    assert landed.image.buffer.tobytes() == old.image.buffer.tobytes()
    new = stage(DirectorySource(folder), LARGE)
    assert new.digest != old.digest
    again = stage(source("changing"), LARGE)
    assert again.digest == new.digest
    assert again.image.buffer.tobytes() == new.image.buffer.tobytes()


def test_wrong_secret(source: Callable[..., Peer], expected: bytes) -> None:
    from rota.errors import WireError

    with pytest.raises(WireError) as caught:
        stage(source("large", secret=b"another secret, as long"), LARGE)
    assert caught.value.code == "wire-auth-failed"
    lands(source("large"), expected)
