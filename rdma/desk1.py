"""A version-1 client's exchange, answered from the store.

What it owns: one lease and the queue pairs of one connection. Invariant: `close` destroys the queue
pairs before it gives the lease back.
"""

from __future__ import annotations

from typing import Final, Protocol

from ..errors import RequestError, RotaError
from ..gpu.lora.safefile import FILE_NAME, parse_shards
from . import messages as m
from .desk import QueuePairs
from .manifest1 import Manifest1, Tensor1
from .store import Generation, Store
from .wire1 import (
    Asked,
    ClientRails,
    Event,
    QueuePair1,
    RailsWanted,
    ServerRail1,
    Wire1Server,
)

MTU_1024: Final = 3
"""Version 1 does not say the path's MTU; this one suits every fabric."""
DEPTH: Final = 16


def manifest_of(generation: Generation, files: Store) -> Manifest1:
    """The version-1 manifest of a generation."""
    tensors, shards = [], generation.raw.shards
    for index, shard in enumerate(shards):
        start = 8 + int.from_bytes(shard[:8].tobytes(), "little")
        for tensor in parse_shards((shard,), files.limits.files):
            tensors.append(
                Tensor1(
                    tensor.key,
                    tensor.dtype,
                    tensor.shape,
                    start + tensor.begin,
                    tensor.end - tensor.begin,
                    index,
                )
            )
    names = [FILE_NAME] if len(shards) == 1 else [f"shard-{i:05}" for i in range(len(shards))]
    return Manifest1(
        generation.adapter, tuple(names), tuple(s.nbytes for s in shards), tuple(tensors)
    )


class PreparedRails(Protocol):
    """A verbs device that can make queue pairs before it knows the other ends."""

    def prepare(self, count: int) -> tuple[list[m.Rail], PreparedPairs]:
        """``count`` queue pairs, not connected yet."""
        ...


class PreparedPairs(QueuePairs, Protocol):
    """Queue pairs that wait for their other ends."""

    def connect(self, rails: list[m.Rail]) -> None:
        """Connect each, in order."""
        ...


class Desk1:
    """Answers one version-1 connection."""

    def __init__(self, store: Store, verbs: PreparedRails) -> None:
        self._store, self._verbs = store, verbs
        self._generation: Generation | None = None
        self._pairs: PreparedPairs | None = None
        self.connected = False

    def handle(self, proto: Wire1Server, event: Event) -> None:
        """Answer one event. Raises RotaError, upon which the connection ends (there is no way to
        say why in version 1)."""
        if isinstance(event, Asked):
            # Clients of this kind may ask by path; the last part is the id.
            self._generation = self._store.open(event.model_id.rstrip("/").rpartition("/")[2])
            proto.send_manifest(manifest_of(self._generation, self._store))
        elif isinstance(event, RailsWanted):
            assert self._generation is not None
            regions = []
            for shard in self._generation.shards:
                if not shard.rkeys:
                    raise RequestError("a shard is not registered", code="no-verbs")
                regions.append((shard.address, shard.rkeys[0]))
            rails, self._pairs = self._verbs.prepare(event.count)
            proto.send_rails(
                [ServerRail1(QueuePair1(r.qpn, r.psn, r.gid), tuple(regions)) for r in rails]
            )
        elif isinstance(event, ClientRails):
            assert self._pairs is not None
            try:
                self._pairs.connect(
                    [
                        m.Rail(p.qpn & 0xFFFFFF, p.psn & 0xFFFFFF, p.gid, MTU_1024, DEPTH, 0)
                        for p in event.pairs
                    ]
                )
            except RotaError:
                proto.send_status(False)
                return
            self.connected = True
            proto.send_status(True)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._pairs is not None:
            self._pairs.close()
            self._pairs = None
        if self._generation is not None:
            self._store.release(self._generation)
            self._generation = None
