"""Rails: reading a peer's memory through one or more queue pairs, and being read.

What it owns: which READs are in flight. Invariants: chunks of at most 1 MiB, at most the agreed
depth a rail; a read returns once every byte is there, or raises with every posted READ over and the
queue pairs destroyed, so that the target may be reused at once; every wait has a deadline and can
be cancelled; nothing blocks while it holds the GIL.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import RotaError, StagingError
from . import messages as m
from .region import Region

log = logging.getLogger("rota.rdma.rails")
SLICE_S: Final = 0.05
DRAIN_S: Final = 2.0
FLUSHED: Final = 5
STATUS: Final = {
    1: "local length error",
    4: "local protection error",
    5: "flushed",
    8: "memory window bind error",
    10: "remote access error",
    11: "remote operation error",
    12: "transport retries exceeded: the peer or the path to it is gone",
    13: "receiver not ready retries exceeded",
}
"""Completion statuses of libibverbs by number, as far as READs meet them."""


class Pair(Protocol):
    """A queue pair, as `verbs.QueuePair` is one."""

    descriptor: int
    depth: int

    @property
    def rail(self) -> m.Rail: ...
    def connect(self, other: m.Rail) -> None: ...
    def post_read(
        self, number: int, local: int, lkey: int, remote: int, rkey: int, n: int
    ) -> None: ...
    def poll(self) -> list[tuple[int, int]]: ...
    def arm(self) -> None: ...
    def take_event(self) -> None: ...
    def fail(self) -> None: ...
    def close(self) -> None: ...


class PairDevice(Protocol):
    """A verbs device, as `verbs.Device` is one."""

    name: str

    def register(self, region: Region) -> int: ...
    def register_local(self, region: Region) -> int: ...
    def unregister(self, region: Region) -> None: ...
    def pair(self, *, channel: bool) -> Pair: ...
    def close(self) -> None: ...


class Pairs:
    """Queue pairs that live and end together: one on each of ``devices[i]`` for i in ``places``."""

    def __init__(
        self, devices: Sequence[PairDevice], places: Sequence[int], *, channel: bool
    ) -> None:
        self.pairs: list[Pair] = []
        self._places = list(places)
        try:
            for place in places:
                self.pairs.append(devices[place].pair(channel=channel))
        except BaseException:
            self.close()
            raise

    @property
    def rails(self) -> list[m.Rail]:
        """This end, for the other."""
        return [
            msgspec.structs.replace(pair.rail, device=place)
            for pair, place in zip(self.pairs, self._places, strict=True)
        ]

    def connect(self, rails: list[m.Rail]) -> None:
        """Connect each to the other end's, in order.

        Raises:
            StagingError: bad-rails, for another number of them.
            DeviceError: verbs-failed.
        """
        if len(rails) != len(self.pairs):
            raise StagingError(
                "another number of rails than asked for",
                code="bad-rails",
                expected=len(self.pairs),
                found=len(rails),
            )
        for pair, rail in zip(self.pairs, rails, strict=True):
            pair.connect(rail)

    def close(self) -> None:
        """Destroy them: the device touches no memory for them any more. Idempotent."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            pair.close()


class ClientRails(Pairs):
    """The reading end. ``lkeys`` are of the arena that targets come from, by device; rail i is on
    device i modulo their number."""

    def __init__(
        self,
        devices: Sequence[PairDevice],
        count: int,
        lkeys: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        places = [i % len(devices) for i in range(count)]
        super().__init__(devices, places, channel=True)
        self._lkeys, self._clock = [lkeys[place] for place in places], clock
        self._far: list[int] = []

    def connect(self, rails: list[m.Rail]) -> None:
        """See `Pairs.connect`; remembers which of the peer's devices each is on."""
        super().connect(rails)
        self._far = [rail.device for rail in rails]

    def read(
        self,
        target: npt.NDArray[np.uint8],
        address: int,
        rkeys: Sequence[int],
        deadline: float,
        cancelled: Callable[[], bool] | None,
        landed: Callable[[int], None],
        *,
        stall: float = 10.0,
    ) -> None:
        """Fill ``target`` (uint8 ``[n]``, of the arena) from the peer's ``address``, whose keys on
        the peer's devices are ``rkeys``.

        ``landed`` is told how many bytes from the front are there. It is over by ``deadline`` (by
        the clock), and after ``stall`` seconds without a completion.

        Raises:
            StagingError: rdma-read-failed (with the status), rdma-broken after an earlier failure,
                bad-rails (a rail on a device without a key), peer-timeout, stage-cancelled; and
                whatever ``landed`` raises. The queue pairs are gone then.
        """
        if not self.pairs:
            raise StagingError("the rails are gone after an error", code="rdma-broken")
        if max(self._far) >= len(rkeys):
            self.close()
            raise StagingError(
                "a rail of the peer is on a device without a key",
                code="bad-rails",
                expected=f"device 0..{len(rkeys) - 1}",
                found=max(self._far),
            )
        keys = [rkeys[far] for far in self._far]
        flight = _Flight(self.pairs, target, self._lkeys, address, keys)
        try:
            told, moving_until = 0, self._clock() + stall
            while True:
                moved = flight.collect()
                flight.post()
                if flight.front > told:
                    told = flight.front
                    landed(told)
                if told == target.nbytes and not flight.posted:
                    return
                if cancelled is not None and cancelled():
                    raise StagingError("staging was cancelled", code="stage-cancelled")
                now = self._clock()
                if moved:
                    moving_until = now + stall
                    continue
                left = min(deadline, moving_until) - now
                if left <= 0:
                    raise StagingError("the peer took too long", code="peer-timeout")
                flight.wait(min(left, SLICE_S))
        except BaseException:
            flight.abandon(self._clock)
            self.close()
            raise


class _Flight:
    """The READs of one target."""

    def __init__(
        self,
        pairs: list[Pair],
        target: npt.NDArray[np.uint8],
        lkeys: list[int],
        address: int,
        rkeys: list[int],
    ) -> None:
        self._pairs, self._lkeys, self._rkeys = pairs, lkeys, rkeys
        self._target = target  # keeps the memory while READs may write it
        self._local, self._remote, self._size = int(target.ctypes.data), address, target.nbytes
        self._chunks = -(-target.nbytes // m.CHUNK_BYTES)
        self._next = self._front_chunk = 0
        self._done: set[int] = set()
        self._counts = [0] * len(pairs)

    @property
    def posted(self) -> int:
        """READs in flight."""
        return sum(self._counts)

    @property
    def front(self) -> int:
        """Bytes that are there from the front without a hole."""
        return min(self._front_chunk * m.CHUNK_BYTES, self._size)

    def post(self) -> None:
        """Fill every rail up to its depth; chunk i goes by rail i modulo their number."""
        while self._next < self._chunks:
            rail = self._next % len(self._pairs)
            if self._counts[rail] >= self._pairs[rail].depth:
                return
            start = self._next * m.CHUNK_BYTES
            self._pairs[rail].post_read(
                self._next,
                self._local + start,
                self._lkeys[rail],
                self._remote + start,
                self._rkeys[rail],
                min(m.CHUNK_BYTES, self._size - start),
            )
            self._counts[rail] += 1
            self._next += 1

    def collect(self) -> bool:
        """Take completions; whether there were any. Raises StagingError rdma-read-failed."""
        moved, failures = False, []
        for rail, pair in enumerate(self._pairs):
            for number, status in pair.poll():
                self._counts[rail] -= 1
                moved = True
                if status:
                    failures.append((status == FLUSHED, number, status))
                else:
                    self._done.add(number)
        if failures:
            # What was flushed says only that something else had failed before.
            _, number, status = min(failures)
            raise StagingError(
                "a read of the peer's memory failed",
                code="rdma-read-failed",
                subject=f"chunk {number}",
                expected="status 0",
                found=f"status {status}: {STATUS.get(status, 'see ibv_wc_status')}",
            )
        while self._front_chunk in self._done:
            self._done.discard(self._front_chunk)
            self._front_chunk += 1
        return moved

    def wait(self, seconds: float) -> None:
        """Until something may have completed, at most ``seconds``."""
        poll = select.poll()
        for rail, pair in enumerate(self._pairs):
            if self._counts[rail]:
                pair.arm()
                poll.register(pair.descriptor, select.POLLIN)
        # What completed before arming raises no event.
        if self.collect():
            return
        ready = {fd for fd, _ in poll.poll(seconds * 1000 + 1)}
        for pair in self._pairs:
            if pair.descriptor in ready:
                pair.take_event()

    def abandon(self, clock: Callable[[], float]) -> None:
        """End what is in flight: to ERR, then drain, so that nothing writes the target later."""
        until = clock() + DRAIN_S
        for rail, pair in enumerate(self._pairs):
            try:
                pair.fail()
                while self._counts[rail] > 0 and clock() < until:
                    done = pair.poll()
                    self._counts[rail] -= len(done)
                    if not done:
                        pair.arm()
                        if done := pair.poll():
                            self._counts[rail] -= len(done)
                            continue
                        poll = select.poll()
                        poll.register(pair.descriptor, select.POLLIN)
                        if poll.poll(SLICE_S * 1000):
                            pair.take_event()
            except RotaError as error:
                log.warning("a queue pair did not drain: %s", error)
