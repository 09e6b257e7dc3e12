"""Promotions over a simulated link: the real client, store and protocol, with faults by seed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rota.errors import RotaError, StagingError
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma import messages as m
from rota.rdma.client import Peer
from rota.rdma.store import Store, StoreLimits


def source(link: Any, kit: Any, **more: Any) -> Peer:
    return Peer("sim:1", "one", secret=kit.secret, connect=link.connect, clock=link.clock, **more)


@pytest.fixture
def store(folder: Path) -> Any:
    made = Store({"one": folder}, StoreLimits(budget=64 << 20))
    yield made
    assert made.counters()["leases"] == 0
    made.close()
    assert made.counters()["region_bytes"] == 0


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("seed", range(5))
def test_without_faults(
    kit: Any, simulated: Any, store: Store, folder: Path, seed: int, packed: Any
) -> None:
    link = simulated(store, seed)
    staged = stage(source(link, kit, packed=packed), kit.small)
    disk = stage(DirectorySource(folder), kit.small)
    assert staged.image.buffer.tobytes() == disk.image.buffer.tobytes()
    assert staged.digest == disk.digest and link.closed


def nothing_held(digest: str) -> None:
    """With this the image is asked for by a `Read`; without it it comes along with the answer."""


def carried(kit: Any, simulated: Any, store: Store, packed: Any, **more: Any) -> int:
    """Bytes the peer sends in a whole promotion (once it has packed)."""
    for _ in range(2):
        link = simulated(store, 0)
        stage(source(link, kit, packed=packed), kit.small, **more)
    return int(link.sent)


@pytest.mark.parametrize("held", [None, nothing_held])
@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("fault", ["cut", "hang", "flip", "drop", "repeat"])
def test_one_fault_anywhere(
    kit: Any, simulated: Any, store: Store, folder: Path, fault: str, packed: Any, held: Any
) -> None:
    """Either an error by name, or (never with a fault in bytes that matter) the right image."""
    total = carried(kit, simulated, store, packed, held=held)
    disk = stage(DirectorySource(folder), kit.small).image.buffer.tobytes()
    places = random.Random(f"{fault} {packed}").sample(range(total), 60)
    failed = 0
    for seed, place in enumerate([*places, 0, total - 1]):
        link = simulated(store, seed, {place: fault})
        try:
            staged = stage(source(link, kit, packed=packed), kit.small, held=held)
        except RotaError as error:
            failed += 1
            assert error.code.startswith(("wire-", "peer-", "digest-")), error
        else:
            assert staged.image.buffer.tobytes() == disk
        assert link.closed
        assert store.counters()["leases"] == 0
    assert failed >= 60


@pytest.mark.parametrize("held", [None, nothing_held])
def test_every_byte_of_the_payload_matters(
    kit: Any, simulated: Any, store: Store, held: Any
) -> None:
    total = carried(kit, simulated, store, "always", held=held)
    for back in (1, 1000, kit.small.slot_bytes):
        link = simulated(store, back, {total - back: "flip"})
        with pytest.raises(StagingError) as caught:
            stage(source(link, kit, packed="always"), kit.small, held=held)
        assert caught.value.code == "digest-mismatch"


@pytest.mark.parametrize("at", [m.Fetch, m.Pack, m.Read])
def test_files_change_during_a_promotion(
    kit: Any, simulated: Any, store: Store, folder: Path, tmp_path: Path, at: type
) -> None:
    """What the manifest said is what lands."""
    old = stage(DirectorySource(folder), kit.small)
    newer = kit.write(tmp_path / "newer", kit.small, seed=9)
    link = simulated(store, 1)

    def change(message: Any) -> None:
        if isinstance(message, at):
            for path in newer.iterdir():
                shutil.copy(path, folder / path.name)

    link.before_answer = change
    landed = stage(source(link, kit, packed="always"), kit.small)
    new = stage(DirectorySource(folder), kit.small)
    expected = new if at is m.Fetch else old
    assert landed.digest == expected.digest != (old if at is m.Fetch else new).digest
    assert landed.image.buffer.tobytes() == expected.image.buffer.tobytes()
    again = stage(source(simulated(store, 2), kit, packed="always"), kit.small)
    assert again.digest == new.digest
    assert store.counters()["generations"] == 1  # the old one went with its last lease


@pytest.mark.parametrize("asked", [0, 1, 3, 6])
def test_cancelled_anywhere(kit: Any, simulated: Any, store: Store, asked: int) -> None:
    link, count = simulated(store, 3), 0

    def cancelled() -> bool:
        nonlocal count
        count += 1
        return count > asked

    with pytest.raises(StagingError) as caught:
        stage(source(link, kit), kit.small, cancelled=cancelled)
    assert caught.value.code == "stage-cancelled" and link.closed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nbytes", 16),
        ("fingerprint", "0" * 64),
        ("digest", "0" * 64),
        ("chunks", b""),
        ("ranks", b"\x01"),
        ("ranks", None),
        ("scales", None),
        ("embed_rows", 1),
    ],
)
def test_an_image_that_does_not_fit_is_refused(
    kit: Any, simulated: Any, store: Store, field: str, value: Any
) -> None:
    """A peer that packs wrongly, or lies."""
    import msgspec

    from rota.errors import WireError

    link = simulated(store, 4)
    handle = link.desk.handle

    def lie(message: Any) -> Any:
        answer = handle(message)
        if isinstance(answer.message, m.Packed):
            wrong = value
            if wrong is None:
                wrong = b"\xff" * len(getattr(answer.message, field))
            return msgspec.structs.replace(answer.message, **{field: wrong}), answer
        return answer.message, answer

    class Answer:
        def __init__(self, message: Any) -> None:
            self.message, answer = lie(message)
            self.payload = answer.payload

    link.desk.handle = Answer
    with pytest.raises(WireError) as caught:
        stage(source(link, kit, packed="always"), kit.small)
    assert caught.value.code == "packed-mismatch"


@pytest.mark.parametrize(
    ("mode", "code", "lands"),
    [
        ("auto", "fingerprint-mismatch", True),
        ("auto", "bad-layout", True),
        ("auto", "peer-memory-full", True),
        ("always", "peer-memory-full", True),
        ("always", "bad-layout", False),
        ("auto", "peer-internal", False),
    ],
)
def test_a_peer_that_cannot_pack_sends_the_files(
    kit: Any, simulated: Any, store: Store, folder: Path, mode: str, code: str, lands: bool
) -> None:
    """A peer of another version lays slots out differently: the engine packs for itself."""
    from rota.errors import WireError
    from rota.rdma.desk import Answer, refusal

    link = simulated(store, 6)
    handle = link.desk.handle

    def other(message: Any) -> Any:
        if isinstance(message, m.Pack):
            return Answer(refusal(WireError("no", code=code)))
        return handle(message)

    link.desk.handle = other
    made = source(link, kit, packed=mode)
    if lands:
        disk = stage(DirectorySource(folder), kit.small)
        assert stage(made, kit.small).image.buffer.tobytes() == disk.image.buffer.tobytes()
    else:
        with pytest.raises(RotaError) as caught:
            stage(made, kit.small)
        assert caught.value.code == code
