"""Simulated device and staging: the interfaces of the real ones, costs instead of work.

A simulated token encodes the content of the slot it came from and its position, so that a token of
the wrong version is seen by whoever knows the content. No threads: work takes virtual time in a
task of its own, so a run is a function of its seed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from ...errors import DeviceError, RotaError, StagingError
from ..staging import StageOutcome
from ..worker import Done, RowLike

BASE = "base"
VOCAB = 50_000


def token_of(content: str, position: int) -> int:
    """The token the simulated model makes at ``position`` (0-based) under ``content``."""
    return zlib.crc32(f"{content}:{position}".encode()) % VOCAB


class SimImage(msgspec.Struct, frozen=True):
    """A slot image is its content's name."""

    content: str
    nbytes: int


class SimStaged(msgspec.Struct, frozen=True):
    image: SimImage
    report: None
    digest: str


class SimSource(msgspec.Struct, frozen=True):
    """A source: its content, how long staging takes, and the error it ends in, if any."""

    content: str
    seconds: float = 0.01
    error: RotaError | None = None
    nbytes: int = 1000


class SimFaults(msgspec.Struct):
    """What goes wrong: called before each job with its kind; an error returned is raised."""

    before: Callable[[str], RotaError | None] = lambda kind: None


class SimOutput(msgspec.Struct, frozen=True):
    seq: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: RotaError | None = None


class SimExecutor:
    """The runner's interface. Refuses what the real one must refuse: a step that reads an empty
    slot, a sequence that was never opened, a block shared by two rows."""

    def __init__(self, slots: int, faults: SimFaults | None = None) -> None:
        self.contents: list[str | None] = [None] * slots
        self.open: set[int] = set()
        self.faults = faults or SimFaults()
        self.steps = 0
        self.closed = False

    def _maybe_fail(self, kind: str) -> None:
        error = self.faults.before(kind)
        if error is not None:
            raise error

    def open_sequence(self, seq: int, prompt: Sequence[int], sampling: Any) -> None:
        if seq in self.open:
            raise DeviceError("opened twice", code="sim-open", subject=f"seq {seq}")
        self.open.add(seq)

    def close_sequence(self, seq: int) -> None:
        self.open.remove(seq)

    def step(self, rows: Sequence[RowLike]) -> list[SimOutput]:
        self._maybe_fail("step")
        self.steps += 1
        used: set[int] = set()
        outputs = []
        for row in rows:
            if row.seq not in self.open:
                raise DeviceError("never opened", code="sim-open", subject=f"seq {row.seq}")
            content = BASE if row.slot < 0 else self.contents[row.slot]
            if content is None:
                raise DeviceError("reads an empty slot", code="sim-slot", subject=f"{row.slot}")
            if used.intersection(row.blocks):
                raise DeviceError("a block has two holders", code="sim-block")
            used.update(row.blocks)
            position = row.start + len(row.tokens)
            token = token_of(content, position) if row.sample else -1
            outputs.append(SimOutput(row.seq, token))
        return outputs

    def commit(self, slot: int, image: SimImage) -> None:
        self.contents[slot] = None
        self._maybe_fail("commit")
        self.contents[slot] = image.content

    def retire(self, slot: int) -> None:
        self._maybe_fail("retire")
        self.contents[slot] = None

    def close(self) -> None:
        self.closed = True


class SimThread:
    """The device thread's interface; jobs run in order in :meth:`run`, each taking ``cost(job)``
    seconds of the loop's (virtual) time."""

    def __init__(self, cost: Callable[[Callable[[], Any]], float]) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Done]] = deque()
        self._cost = cost
        self._wake = anyio.Event()
        self._stopped = False

    def start(self) -> None:
        pass

    def put(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.append((job, done))
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        return not self._jobs

    async def run(self) -> None:
        while True:
            while self._jobs:
                job, done = self._jobs.popleft()
                await anyio.sleep(self._cost(job))
                try:
                    result = job()
                except Exception as error:  # as the real thread: handed on
                    done(None, error)
                else:
                    done(result, None)
            if self._stopped:
                return
            self._wake = anyio.Event()
            await self._wake.wait()


class SimStager:
    """The stager's interface over :class:`SimSource`."""

    def __init__(self) -> None:
        self.images: dict[int, SimStaged] = {}
        self._cancelled: set[int] = set()

    async def run(self, stage: int, source: SimSource) -> StageOutcome:
        await anyio.sleep(source.seconds)
        if stage in self._cancelled:
            raise StagingError("cancelled", code="stage-cancelled")
        if source.error is not None:
            raise source.error
        image = SimImage(source.content, source.nbytes)
        return StageOutcome(SimStaged(image, None, source.content), -1, None)

    def cancel(self, stage: int) -> None:
        self._cancelled.add(stage)

    def cancel_all(self) -> None:
        pass

    def keep(self, image: int, outcome: StageOutcome, source: SimSource) -> None:
        self.images[image] = outcome.staged

    def drop(self, image: int) -> None:
        del self.images[image]

    def drop_all(self) -> None:
        self.images.clear()
