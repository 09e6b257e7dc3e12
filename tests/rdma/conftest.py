"""Adapters made here, a peer on a thread of its own, and a link without sockets."""

from __future__ import annotations

import json
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest

from rota.errors import StagingError
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import SlotLayout
from rota.rdma.desk import Desk
from rota.rdma.frames2 import Received, Times
from rota.rdma.peer import PeerLimits, WeightPeer
from rota.rdma.store import Store
from rota.rdma.wire2 import Wire2Server

from .proxy import Proxy

SECRET = b"a secret of the tests"
DIMS = ModelDims(2, 64, 96, 32, 80, 128, 64)


class Kit:
    """Builders."""

    secret = SECRET
    root = Path(__file__).resolve().parents[2]
    small = SlotLayout(DIMS, 8)
    large = SlotLayout(ModelDims(2, 256, 512, 256, 512, 2048, 64), 128)
    """About 5 MB a slot."""

    def write(
        self, folder: Path, layout: SlotLayout, rank: int = 4, seed: int = 0, **config: Any
    ) -> Path:
        """A float32 adapter with every pair of ``layout``."""
        rng = np.random.default_rng(seed)
        header: dict[str, Any] = {}
        blobs: list[bytes] = []
        place = 0
        for pair in layout.pairs:
            for half, shape in (("A", (rank, pair.k_in)), ("B", (pair.n_out, rank))):
                raw = rng.standard_normal(shape, np.float32).tobytes()
                key = (
                    f"base_model.model.model.layers.{pair.layer}.{pair.module.parent}"
                    f".{pair.module.leaf}.lora_{half}.weight"
                )
                offsets = [place, place + len(raw)]
                header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
                blobs.append(raw)
                place += len(raw)
        text = json.dumps(header).encode()
        fields = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "use_rslora": False,
            "target_modules": [module.leaf for module in layout.dims.modules],
        } | config
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "adapter_model.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + b"".join(blobs)
        )
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return folder


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def folder(kit: Kit, tmp_path: Path) -> Path:
    return kit.write(tmp_path / "one", kit.small)


@pytest.fixture(scope="session")
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    """An event loop on another thread."""
    with anyio.from_thread.start_blocking_portal() as made:
        yield made


class Running:
    """A peer that serves, and its address."""

    def __init__(self, portal: Any, peer: WeightPeer) -> None:
        self.portal, self.peer = portal, peer
        host, port = peer.listen()
        self.address = f"{host}:{port}"
        self._future = portal.start_task_soon(peer.serve)

    def stop(self) -> None:
        self.portal.call(self.peer.stop)
        self._future.result(30)


@pytest.fixture
def serve(portal: Any) -> Iterator[Callable[..., Running]]:
    """Start peers; each is stopped, and must have given everything back."""
    running: list[Running] = []

    def start(directories: dict[str, Path], **more: Any) -> Running:
        more.setdefault("secret", SECRET)
        more.setdefault("limits", PeerLimits(times=Times(stall=5.0)))

        def make() -> WeightPeer:
            return WeightPeer(directories, **more)

        running.append(Running(portal, portal.call(make)))
        return running[-1]

    yield start
    for one in running:
        one.stop()
        left = one.peer.store.counters()
        assert {k: left[k] for k in ("leases", "generations", "region_bytes")} == {
            "leases": 0,
            "generations": 0,
            "region_bytes": 0,
        }
        assert one.peer.counters()["connections_now"] == 0


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def make(*args: Any, **more: Any) -> Proxy:
        made.append(Proxy(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


class SimulatedLink:
    """The real store, desk and protocol of a peer behind a link without sockets or threads.

    Bytes arrive in pieces of random sizes; ``faults`` maps a count of bytes from the peer to what
    happens there: ``"cut"``, ``"hang"``, ``"flip"`` (one bit), ``"drop"`` (one byte), ``"repeat"``.
    Time moves only here.
    """

    def __init__(self, store: Store, seed: int, faults: dict[int, str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = dict(faults or {})
        self.desk = Desk(store)
        self.server = Wire2Server(self.rng.randbytes(32), SECRET, Times(), 0.0)
        self.pipe = bytearray()
        self.sent = 0
        self.hung = self.cut = self.closed = False
        self.before_answer: Callable[[Any], None] = lambda message: None

    def clock(self) -> float:
        return self.now

    def connect(self, deadline: float, cancelled: Callable[[], bool] | None) -> SimulatedLink:
        self.cancelled = cancelled
        return self

    def send(self, data: bytes, deadline: float, *, later: bool = False) -> None:
        self._alive()
        while data:
            size = self.rng.randint(1, 400)
            part, data = data[:size], data[size:]
            self.server.receive_data(part)
            for event in self.server.events(self.now):
                assert isinstance(event, Received)
                self.before_answer(event.message)
                answer = self.desk.handle(event.message)
                size = 0 if answer.payload is None else len(answer.payload)
                self.server.reply(event.request, answer.message, self.now, size)
                self._carry(self.server.data_to_send())
                if answer.payload is not None:
                    self._carry(bytes(answer.payload))
                    self.server.payload_sent(size, self.now)
            self._carry(self.server.data_to_send())

    def receive(
        self,
        view: memoryview,
        deadline: float,
        *,
        fill: bool = False,
        spare: Callable[[], bool] | None = None,
    ) -> int:
        self._alive()
        if spare is not None and self.rng.random() < 0.5:
            spare()
        self.now += self.rng.random() / 1000
        if not self.pipe:
            if self.cut:
                return 0
            assert self.hung or self.faults is not None
            self.now = max(self.now, deadline)
            raise StagingError("the peer took too long", code="peer-timeout")
        count = min(len(view), len(self.pipe), self.rng.randint(1, 1 << 16))
        view[:count] = self.pipe[:count]
        del self.pipe[:count]
        return count

    def close(self) -> None:
        self.closed = True
        self.desk.close()

    def _alive(self) -> None:
        if self.cancelled is not None and self.cancelled():
            raise StagingError("staging was cancelled", code="stage-cancelled")

    def _carry(self, data: bytes) -> None:
        for at in sorted(self.faults):
            if self.sent <= at < self.sent + len(data) and not (self.hung or self.cut):
                place, what = at - self.sent, self.faults[at]
                head, byte, tail = data[:place], data[place], data[place + 1 :]
                if what == "flip":
                    data = head + bytes([byte ^ 1 << self.rng.randrange(8)]) + tail
                elif what == "drop":
                    data = head + tail
                elif what == "repeat":
                    data = head + bytes([byte, byte]) + tail
                else:
                    self.pipe += head
                    self.hung, self.cut = what == "hang", what == "cut"
        self.sent += len(data)
        if not (self.hung or self.cut):
            self.pipe += data


@pytest.fixture
def simulated() -> type[SimulatedLink]:
    return SimulatedLink


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """No test leaves a thread of its own behind."""
    before = {t for t in threading.enumerate() if "verify" in t.name}
    yield
    assert {t for t in threading.enumerate() if "verify" in t.name} == before
