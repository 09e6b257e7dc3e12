"""The shared state behind the core's one door, and the small acts every part needs.

Owned by :class:`~.core.Core`; the parts (``requests``, ``adapters``, ``planning``) act on it and on
nothing else. Effects are appended to :attr:`State.out` in the order they must be carried out.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import samples
from .config import CoreConfig
from .effects import CloseSequence, DropImage, DropSource, Effect, Ended, Reply, Retire, Row
from .events import Failure
from .identity import BASE_ID
from .jobs import Job
from .lanes import Lanes
from .memory import KvMemory
from .progress import Progress
from .registry import Registry, Version
from .sequences import Sequence
from .slots import SlotTable
from .story import Log
from .tables import SeqEvent, SeqState

if TYPE_CHECKING:
    from .resize import Resizing


@dataclass(slots=True)
class Step:
    """A step in flight: its rows in order, and when it was planned."""

    id: int
    rows: tuple[Row, ...]
    planned: float


@dataclass(slots=True)
class Unloading:
    """An unload that waits for its name's slots to empty."""

    command: int
    name: str
    deadline: float
    cancel_late: bool
    slots: set[int]


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    steps: int = 0
    ahead: int = 0
    wasted_rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    base_queried: int = 0
    base_hit: int = 0
    submitted: int = 0
    ended: int = 0
    preempted: int = 0
    spilled: int = 0
    commits: int = 0
    evicted: int = 0
    drained: int = 0
    overwritten: int = 0
    swapped: int = 0
    slot_wait_s: float = 0.0
    stages: int = 0
    stage_failures: int = 0


@dataclass(slots=True)
class State:
    config: CoreConfig
    log: Log
    slots: SlotTable
    names: Registry
    memory: KvMemory
    lanes: Lanes = field(default_factory=Lanes)
    seqs: dict[int, Sequence] = field(default_factory=dict)
    running: dict[int, Sequence] = field(default_factory=dict)
    following: int = 0
    #: Commands not yet answered -> the job that answers them (-1: an unload).
    commands: dict[int, int] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    placing: dict[int, Job] = field(default_factory=dict)
    stages: dict[int, Job] = field(default_factory=dict)
    commits: dict[int, Job] = field(default_factory=dict)
    #: First jobs of their names that wait because enough are in hand: of commands, of misses.
    backlog: dict[int, Job] = field(default_factory=dict)
    misses: dict[int, Job] = field(default_factory=dict)
    #: Whether a job began to wait for a slot since slots were last given out, and when time alone
    #: changes what would be given out.
    unsettled: bool = False
    place_at: float | None = None
    unloading: list[Unloading] = field(default_factory=list)
    default: str | None = None
    #: Steps in flight, in the order the device runs them: at most ``step_depth``.
    steps: deque[Step] = field(default_factory=deque)
    #: A step has failed while another was in flight behind it.
    suspect: bool = False
    resize: Resizing | None = None
    closing: bool = False
    closed: bool = False
    dead: Failure | None = None
    now: float = 0.0
    out: list[Effect] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    progress: Progress = field(default_factory=Progress)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _ids: int = 0

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    @property
    def held(self) -> bool:
        """Whether a resize lets nothing new be admitted, staged or committed."""
        return self.resize is not None and self.resize.holds

    def jobs_in_hand(self) -> int:
        """Jobs that stage, hold an image, or write a slot."""
        return len(self.stages) + len(self.placing) + len(self.commits)

    # sequences --------------------------------------------------------------------------------
    def watch_deadline(self, seq: Sequence) -> None:
        if seq.deadline is None:
            return
        heapq.heappush(self._deadlines, (seq.deadline, seq.id))
        if len(self._deadlines) > 2 * len(self.seqs) + 64:
            # Mostly ended sequences whose time is far: forget them.
            self._deadlines = [d for d in self._deadlines if d[1] in self.seqs]
            heapq.heapify(self._deadlines)

    def next_deadline(self) -> float | None:
        """Earliest deadline of a sequence that has not ended."""
        while self._deadlines:
            when, ident = self._deadlines[0]
            seq = self.seqs.get(ident)
            if seq is not None and seq.state is not SeqState.CLOSING:
                return when
            heapq.heappop(self._deadlines)
        return None

    def due(self) -> Sequence:
        """The sequence :meth:`next_deadline` speaks of, taken off the watch."""
        return self.seqs[heapq.heappop(self._deadlines)[1]]

    def end(self, seq: Sequence, reason: str, failure: Failure | None = None) -> None:
        """The one terminal path: the caller hears now; blocks and lease are given back now, or
        when the last step that reads them is over."""
        if seq.state in (SeqState.CLOSING, SeqState.ENDED):
            return
        self.out.append(Ended(seq.id, reason, seq.adapter_id, failure))
        self.counters.ended += 1
        self.log.add(f"seq {seq.id}", f"ended: {reason}{f' {failure.code}' if failure else ''}")
        if seq.state in (SeqState.WAITING, SeqState.SPILLED):
            self.lanes.remove(seq)
        elif seq.state is SeqState.FOLLOWING:
            samples.leave(self, seq)
        if seq.in_flight:
            seq.move(SeqEvent.END_IN_FLIGHT, self.log)
        else:
            seq.move(SeqEvent.END, self.log)
            self._leave(seq)
        if failure is not None:
            # What ended the computation of the prompt ends all who need it.
            for other in list(seq.followers):
                self.end(other, reason, failure)
        elif seq.followers:
            samples.leader_ended(self, seq)

    def settle(self, seq: Sequence) -> None:
        """The last step, or the copy, a closing sequence was in is over."""
        seq.move(SeqEvent.SETTLED, self.log)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self.memory.give_back(seq)
        self.memory.forget_host(seq)
        self.give_lease_back(seq)
        self.running.pop(seq.id, None)
        del self.seqs[seq.id]
        if seq.admitted:
            self.progress.ended.append(self.now)
            self.out.append(CloseSequence(seq.id))

    def count_prefix(self, seq: Sequence) -> None:
        """``seq`` is admitted for the first time, behind what was cached of its prompt."""
        counters = self.counters
        counters.prefix_queried += seq.prompt_len
        counters.prefix_hit += seq.computed
        if seq.adapter is None:
            counters.base_queried += seq.prompt_len
            counters.base_hit += seq.computed
        elif (entry := self.names.names.get(seq.adapter)) is not None:
            # A follower may be admitted after its name was unloaded: it has its lease.
            entry.queried += seq.prompt_len
            entry.hit += seq.computed

    # leases -----------------------------------------------------------------------------------
    def give_lease_back(self, seq: Sequence) -> None:
        if not seq.leased:
            return
        seq.leased = False
        index, seq.slot = seq.slot, -1
        if index < 0:
            return
        slot = self.slots[index]
        version, pinned, job = slot.version, slot.pinned, self.jobs.get(slot.drained_for)
        if self.slots.release(slot, seq.id):
            if pinned and job is not None and version is not None and job.name == version.name:
                # Emptied for its own next version: the pin is the name's, and goes on.
                job.pin = True
            self.slot_emptied(index)
            if version is not None:
                self.version_left(version)

    def slot_emptied(self, index: int) -> None:
        self.out.append(Retire(index))
        for unload in self.unloading:
            unload.slots.discard(index)

    def version_left(self, version: Version) -> None:
        """``version`` has lost its slot or its name: if both, nothing of it stays cached."""
        entry = self.names.names.get(version.name)
        if version.slot < 0 and (entry is None or entry.current is not version):
            self.memory.prefix.drop(version.adapter_id)

    def lease(self, seq: Sequence, version: Version | None) -> None:
        """Give ``seq`` its lease on ``version`` (``None``: base), and its followers theirs."""
        for one in (seq, *seq.followers):
            one.leased, one.slot, one.adapter_id = True, -1, BASE_ID
            if version is not None:
                self.slots.lease(self.slots[version.slot], one.id)
                one.slot, one.adapter_id = version.slot, version.adapter_id

    # replies and host memory ------------------------------------------------------------------
    def reply(self, commands: list[int], reply: Reply) -> None:
        for command in commands:
            if self.commands.pop(command, None) is not None:
                self.progress.answered.append(self.now)
                self.out.append(_for(reply, command))
        commands.clear()

    def refuse(self, command: int, failure: Failure) -> None:
        self.out.append(Reply(command, "refused", failure=failure))

    def drop_sources(self, sources: list[int]) -> None:
        self.out.extend(DropSource(s) for s in sources)

    def trim_images(self) -> None:
        self.out.extend(DropImage(i) for i in self.names.trim())


def _for(reply: Reply, command: int) -> Reply:
    return Reply(
        command,
        reply.outcome,
        reply.name,
        reply.slot,
        reply.generation,
        reply.adapter_id,
        reply.evicted,
        reply.image,
        reply.failure,
    )
