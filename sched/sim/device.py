"""Simulated device and staging: the interfaces of the real ones, costs instead of work.

A simulated token encodes the content of the slot it came from and its position, so that a token of
the wrong version is seen by whoever knows the content. No threads: work takes virtual time in a
task of its own, so a run is a function of its seed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import anyio
import msgspec

from ...errors import DeviceError, InternalError, RejectError, RotaError, StagingError
from ...gpu.lora.annex import Resident, check_residents
from ...gpu.model.rows import RowLike
from ..staging import StageOutcome
from ..worker import Done, Relaid
from .kv import SimKV
from .states import SimStates

BASE = "base"
VOCAB = 50_000
RANK = 64


@lru_cache(maxsize=4096)
def _seed_of(content: str) -> int:
    return zlib.crc32(content.encode())


def token_of(content: str, position: int) -> int:
    """The token the simulated model makes at ``position`` (0-based) under ``content``."""
    return (_seed_of(content) * 31 + position * 2_654_435_761) % VOCAB


class SimImage(msgspec.Struct, frozen=True):
    """A slot image is its content's name. ``layout``: highest rank of the pool it was made for;
    ``annex``: what it needs in the arena of one for ranks up to ``RANK``."""

    content: str
    nbytes: int
    ranks: tuple[int, ...] = (8,)
    layout: int = RANK
    annex: int = 0

    @property
    def annex_bytes(self) -> int:
        """What it needs in the arena."""
        return self.annex_at(self.layout)

    def annex_at(self, layout: int) -> int:
        """What it would need in a pool for ranks up to ``layout``: strides are the pool's."""
        return -(-self.annex * layout // RANK)


class SimStaged(msgspec.Struct, frozen=True):
    image: SimImage
    report: None
    digest: str


class SimSource(msgspec.Struct, frozen=True):
    """A source: its content, how long staging takes (seconds), and the error it ends in, if any.

    ``path``: sources of one path are one place whose content may change. ``deaf``: staging does not
    hear that it was cancelled, like a thread in a blocking read.
    """

    content: str
    seconds: float = 0.01
    error: RotaError | None = None
    nbytes: int = 1000
    path: str | None = None
    deaf: bool = False
    rank: int = 8
    annex: int = 0


class SimFaults(msgspec.Struct):
    """What goes wrong: called before each job with its kind (``step``, ``row``, ``commit``,
    ``retire``, ``relayout``, ``spill``, ``restore``); an error returned is raised (``row``: the
    first row's own error)."""

    before: Callable[[str], RotaError | None] = lambda kind: None


class SimOutput(msgspec.Struct, frozen=True):
    seq: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: RotaError | None = None


class SimExecutor:
    """The runner's interface. Refuses what the real one must refuse: a step that reads an empty
    slot, a sequence that was never opened, a block written by one row that another has in its
    table, an annex written over a resident one or past the arena's end; with ``kv``, also a block
    that does not hold what is read from it; with ``states`` too, a row that does not begin with
    exactly the state of the tokens before it."""

    def __init__(
        self,
        slots: int,
        faults: SimFaults | None = None,
        kv: SimKV | None = None,
        block_size: int = 16,
        states: SimStates | None = None,
        max_rank: int = RANK,
        arena_bytes: int = 0,
    ) -> None:
        self.contents: list[str | None] = [None] * slots
        self.images: list[SimImage | None] = [None] * slots
        self.arena_bytes = arena_bytes
        #: First byte and end of each slot's annex.
        self.annexes: dict[int, tuple[int, int]] = {}
        self.max_rank = max_rank
        self.open: set[int] = set()
        #: Per sequence, what each of its blocks in host memory holds.
        self.spilled: dict[int, list[Any]] = {}
        self.faults = faults or SimFaults()
        self.kv = kv
        self.block_size = block_size
        self.states = states
        #: What each row of the step before sampled: its sequence and token.
        self.sampled: list[tuple[int, int]] = []
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
        if self.kv is not None:
            self.kv.open(seq, prompt)

    def close_sequence(self, seq: int) -> None:
        self.open.remove(seq)
        self.spilled.pop(seq, None)
        if self.states is not None:
            self.states.close(seq)
        if self.kv is not None:
            self.kv.close(seq)

    def drop_state(self, seq: int) -> None:
        if self.states is not None:
            self.states.drop(seq)
        if seq not in self.open:
            raise DeviceError("never opened", code="sim-open", subject=f"seq {seq}")

    def _spoil(self, rows: Sequence[RowLike]) -> None:
        """A step has failed: what it was to write is undefined."""
        if self.kv is not None:
            written = [b for row in rows for b in row.blocks[row.start // self.block_size :]]
            self.kv.put(dict.fromkeys(written))

    def _fed(self, row: RowLike, before: list[tuple[int, int]]) -> list[int]:
        """The row's tokens; empty if it is fed what a row of the step before did not sample."""
        tokens = list(row.tokens)
        if not any(token < 0 for token in tokens):
            return tokens
        index = ~tokens[0]
        if len(tokens) != 1 or (index < len(before) and before[index][0] != row.seq):
            raise DeviceError("fed another's token", code="sim-feed", subject=f"seq {row.seq}")
        token = before[index][1] if index < len(before) else -1
        return [token] if token >= 0 else []

    def _run(self, row: RowLike, content: str, tokens: list[int]) -> None:
        if self.kv is None:
            return
        self.kv.feed(row.seq, content, row.start, tokens, row.blocks)
        if self.states is not None:
            expected = self.kv.print_of(row.seq, row.start)
            self.states.advance(row, tokens, content, expected)

    def step(self, rows: Sequence[RowLike]) -> list[SimOutput]:
        before, self.sampled = self.sampled, []
        try:
            self._maybe_fail("step")
        except DeviceError:
            self._spoil(rows)
            raise
        bad = self.faults.before("row")
        self.steps += 1
        _check_tables(rows, self.block_size)
        outputs: list[SimOutput] = []
        for row in rows:
            if row.seq not in self.open:
                raise DeviceError("never opened", code="sim-open", subject=f"seq {row.seq}")
            content = BASE if row.slot < 0 else self.contents[row.slot]
            if content is None:
                raise DeviceError("reads an empty slot", code="sim-slot", subject=f"{row.slot}")
            position = row.start + len(row.tokens)
            error = bad if not outputs else None
            tokens = self._fed(row, before)
            if row.tokens and not tokens:
                error = InternalError("not fed", code="row-not-fed", subject=f"seq {row.seq}")
            else:
                self._run(row, content, tokens)
            token = token_of(content, position) if row.sample and error is None else -1
            if self.kv is not None and token >= 0:
                self.kv.sampled(row.seq, token)
            outputs.append(SimOutput(row.seq, token, error=error))
        if self.states is not None:
            for row in rows:
                self.states.save(row)
        self.sampled = [(output.seq, output.token) for output in outputs]
        return outputs

    def spill(self, seq: int, blocks: Sequence[int]) -> None:
        error = self.faults.before("spill")
        if self.states is not None:
            self.states.spill(seq, fails=error is not None)
        if error is not None:
            raise error
        if seq not in self.open or seq in self.spilled:
            raise DeviceError("spilled wrongly", code="sim-spill", subject=f"seq {seq}")
        self.spilled[seq] = list(blocks) if self.kv is None else self.kv.contents(blocks)

    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None:
        held = self.spilled.pop(seq, None)
        error = self.faults.before("restore")
        if self.states is not None:
            self.states.restore(seq, fails=error is not None)
        if error is not None:
            raise error
        if held is None or any(index >= len(held) for index, _ in places):
            raise DeviceError("restored wrongly", code="sim-spill", subject=f"seq {seq}")
        if self.kv is not None:
            self.kv.put({block: held[index] for index, block in places})

    def commit(self, slot: int, image: SimImage, extent: int | None = None) -> None:
        if image.layout != self.max_rank:
            raise DeviceError("packed for another layout", code="sim-layout", subject=f"{slot}")
        self.contents[slot] = None
        self.annexes.pop(slot, None)
        if (extent is None) != (image.annex_bytes == 0):
            raise DeviceError("an annex and no place", code="sim-arena", subject=f"{slot}")
        if extent is not None:
            end = extent + image.annex_bytes
            over = [s for s, (a, b) in self.annexes.items() if a < end and extent < b]
            if over or not 0 <= extent < end <= self.arena_bytes:
                raise DeviceError("writes over others", code="sim-arena", subject=f"{slot}: {over}")
            self.annexes[slot] = extent, end
        self._maybe_fail("commit")
        self.contents[slot], self.images[slot] = image.content, image

    def relayout(self, max_loras: int, max_rank: int, residents: Sequence[Resident]) -> Relaid:
        images = [self.images[r.slot] for r in residents]
        needs = tuple(0 if image is None else image.annex_at(max_rank) for image in images)
        check_residents(residents, needs, self.arena_bytes)
        self._maybe_fail("relayout")
        self.contents = [None for _ in range(max_loras)]
        self.images = [None for _ in range(max_loras)]
        self.annexes.clear()
        self.max_rank = max_rank
        return self.arena_bytes, needs

    def retire(self, slot: int) -> None:
        self.annexes.pop(slot, None)
        self._maybe_fail("retire")
        self.contents[slot] = None

    def close(self) -> None:
        self.closed = True


def _check_tables(rows: Sequence[RowLike], size: int) -> None:
    """Only the blocks before a row's first position may be in another row's table."""
    own: set[int] = set()
    total = 0
    for row in rows:
        mine = row.blocks[row.start // size :]
        own.update(mine)
        total += len(mine)
    if len(own) != total or any(not own.isdisjoint(r.blocks[: r.start // size]) for r in rows):
        raise DeviceError("a block that is written has two holders", code="sim-block")


class SimThread:
    """The device thread's interface; jobs run in order in :meth:`run`, each taking ``cost(job)``
    seconds of the loop's (virtual) time."""

    def __init__(self, cost: Callable[[Callable[[], Any]], float]) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Done]] = deque()
        self._cost = cost
        self._wake = anyio.Event()
        self._stopped = False
        self._at_work = False

    def start(self) -> None:
        pass

    def put(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.append((job, done))
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        return not self._jobs and not self._at_work

    async def run(self) -> None:
        """Until :meth:`stop`. Shielded: a thread is not cancelled with the tasks around it."""
        with anyio.CancelScope(shield=True):
            await self._run()

    async def _run(self) -> None:
        while True:
            while self._jobs:
                job, done = self._jobs.popleft()
                self._at_work = True
                await anyio.sleep(self._cost(job))  # what the job takes, in virtual time
                self._at_work = False
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
    """The stager's interface over :class:`SimSource`. A source staged before, whose image is still
    held, is answered from that image, as an unchanged directory is. ``layout``: highest rank of
    the pool that images are made for."""

    def __init__(self, layout: Callable[[], int] = lambda: RANK) -> None:
        self._layout = layout
        self.images: dict[int, SimStaged] = {}
        self._flags: dict[int, anyio.Event] = {}
        self._abandoned: dict[int, anyio.Event] = {}
        self._known: dict[Hashable, int] = {}

    async def run(self, stage: int, source: SimSource) -> StageOutcome:
        flag = self._flags[stage] = anyio.Event()
        gone = self._abandoned[stage] = anyio.Event()
        try:
            with anyio.move_on_after(source.seconds):
                await (gone if source.deaf else flag).wait()
        finally:
            del self._flags[stage], self._abandoned[stage]
        if flag.is_set():
            raise StagingError("cancelled", code="stage-cancelled")
        if source.error is not None:
            raise source.error
        signature = None if source.path is None else ((source.path, source.nbytes, 0, 0, 0),)
        cached = self._known.get(source, -1)
        if cached in self.images:
            return StageOutcome(self.images[cached], cached, signature, source)
        layout = self._layout()
        if source.rank > layout:
            raise RejectError("rank", code="rank-exceeds-pool", expected=layout, found=source.rank)
        ranks = (source.rank,)
        image = SimImage(source.content, source.nbytes, ranks, layout, source.annex)
        return StageOutcome(SimStaged(image, None, source.content), -1, signature, source)

    def cancel(self, stage: int) -> None:
        flag = self._flags.get(stage)
        if flag is not None:
            flag.set()

    def cancel_all(self) -> None:
        for flag in self._flags.values():
            flag.set()

    def abandon_all(self) -> None:
        self.cancel_all()
        for gone in self._abandoned.values():
            gone.set()

    def keep(self, image: int, outcome: StageOutcome) -> None:
        self.images[image] = outcome.staged
        self._known[outcome.place] = image

    def drop(self, image: int) -> None:
        del self.images[image]
        self._known = {s: i for s, i in self._known.items() if i != image}

    def drop_all(self) -> None:
        self.images.clear()
        self._known.clear()
