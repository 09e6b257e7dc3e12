"""What a peer says of an image, over a connection that nothing authenticates: one wrong bit of it,
anywhere, is refused or changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import RotaError
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma import landing
from rota.rdma.address import parse_address
from rota.rdma.client import Peer
from rota.rdma.desk import Desk
from rota.rdma.hashes import offered
from rota.rdma.link import SocketStream

from .exchange import refusal

NAMES = offered(sure=False)


class Recorded:
    """A stream: what the peer says goes into ``heard`` too."""

    def __init__(self, inner: SocketStream, heard: bytearray) -> None:
        self.inner, self.heard = inner, heard
        self.send, self.close = inner.send, inner.close

    def receive(self, view: memoryview, deadline: float, **more: Any) -> int:
        count = self.inner.receive(view, deadline, **more)
        self.heard += view[:count]
        return count


class Replayed:
    """A stream on which a peer says what one said before, whatever it is asked."""

    def __init__(self, said: bytes) -> None:
        self.said = memoryview(said)

    def send(self, data: bytes, deadline: float, *, later: bool = False) -> None:
        pass

    def receive(self, view: memoryview, deadline: float, **more: Any) -> int:
        count = min(len(view), len(self.said))
        view[:count], self.said = self.said[:count], self.said[count:]
        return count

    def close(self) -> None:
        pass


def facts(image: SlotImage) -> tuple[Any, ...]:
    names = ("digest", "fingerprint", "present", "ranks", "embed_rows", "head_rows", "affine")
    return (image.scales.tobytes(), *(getattr(image, name) for name in names))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("blake3", "sha256")])
def test_one_wrong_bit(
    kit: Any, serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(landing, "offered", lambda sure: [name])
    running = serve({"one": folder}, secret=None)
    disk = stage(DirectorySource(folder), kit.small).image

    def landed(connect: Callable[..., Any]) -> SlotImage:
        return stage(
            Peer(running.address, "one", packed="always", connect=connect), kit.small
        ).image

    heard = bytearray()

    def record(deadline: float, cancelled: Any) -> Recorded:
        heard.clear()
        return Recorded(SocketStream(parse_address(running.address), 5.0), heard)

    for _ in range(2):  # packed when it is asked for; then it comes along
        landed(record)
    said = bytes(heard)
    assert facts(landed(lambda deadline, cancelled: Replayed(said))) == facts(disk)
    refused, rng = 0, np.random.default_rng(0)
    for place in range(len(said) - disk.nbytes):
        wrong = bytearray(said)
        wrong[place] ^= 1 << int(rng.integers(8))
        try:
            image = landed(lambda deadline, cancelled, said=bytes(wrong): Replayed(said))
        except RotaError:
            refused += 1
        else:
            assert facts(image) == facts(disk), place
            np.testing.assert_array_equal(image.buffer, disk.buffer)
    assert refused > 500


def test_another_adapter_than_was_asked_for(
    kit: Any, serve: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question, too, can arrive wrong."""
    other = kit.write(tmp_path / "two", kit.small, seed=1)
    running = serve({"one": folder, "two": other}, secret=None)
    answer = Desk._open
    monkeypatch.setattr(Desk, "_open", lambda self, adapter, waits: answer(self, "two", waits))
    for packed in ("always", "never"):
        source = Peer(running.address, "one", packed=packed)
        error = refusal(lambda source=source: stage(source, kit.small))
        assert (error.code, error.expected, error.found) == ("wire-unexpected", "one", "two")
