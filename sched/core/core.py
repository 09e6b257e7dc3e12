"""The one door: ``Core.handle(event, now) -> effects``.

Pure and synchronous: no await, clock, I/O or torch in here, so nothing can interleave. The same
events at the same times give the same effects.
"""

from __future__ import annotations

from collections import Counter

from ...errors import InternalError
from . import adapters, commands, placement, planning, requests, resize, spill
from .config import CoreConfig
from .effects import Closed, Effect
from .events import (
    Cancel,
    CancelCommand,
    Close,
    CommitDone,
    CommitFailed,
    Event,
    Failure,
    Plan,
    RelayoutDone,
    RelayoutFailed,
    RestoreDone,
    RestoreFailed,
    SpillDone,
    SpillFailed,
    StageDone,
    StageFailed,
    StepDone,
    StepFailed,
    Stop,
    Submit,
    Tick,
)
from .memory import KvMemory
from .registry import Registry
from .slots import SlotTable
from .snapshot import Stats, snapshot
from .state import State
from .story import Log
from .tables import SeqState, SlotState

#: Device work that failed; if the device died of it, everything ends.
_DEVICE_WORK_FAILED = (CommitFailed, RelayoutFailed, SpillFailed, RestoreFailed)


class Core:
    """All serving state and every decision about it.

    ``handle`` returns the effects to carry out, in order. ``next_wake`` says when a ``Tick`` is due
    even if nothing else happens. ``check`` verifies every conservation law (tests, idle time).
    """

    def __init__(self, config: CoreConfig) -> None:
        log = Log(config.log_size)
        self._state = State(
            config=config,
            log=log,
            slots=SlotTable(config.max_loras, log, config.arena_bytes),
            names=Registry(config.image_cache_bytes, config.max_remembered_generations),
            memory=KvMemory(config, log),
        )
        self._started = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time ``now`` (seconds, any origin). A clock that steps back is held.

        Raises InternalError for a broken invariant: a bug, with the story of what broke.
        """
        state = self._state
        if not self._started:
            self._started, state.now = True, now
        state.now = state.log.now = max(state.now, now)
        requests.expire(state)
        self._dispatch(event)
        resize.settle(state)
        placement.place_all(state)
        while adapters.start_waiting(state):
            placement.place_all(state)
        commands.settle_unloads(state)
        resize.refilled(state)
        self._maybe_closed()
        out, state.out = state.out, []
        return out

    def _dispatch(self, event: Event) -> None:
        state = self._state
        match event:
            case Plan():
                planning.plan(state)
            case StepDone():
                planning.step_done(state, event)
            case Submit():
                requests.submit(state, event)
            case Cancel():
                requests.cancel(state, event)
            case Stop():
                requests.stop(state, event)
            case StepFailed():
                planning.step_failed(state, event)
            case StageDone():
                adapters.stage_done(state, event)
            case StageFailed():
                adapters.stage_failed(state, event)
            case CommitDone():
                adapters.commit_done(state, event)
            case CommitFailed():
                adapters.commit_failed(state, event)
            case RelayoutDone():
                resize.built(state, event)
            case RelayoutFailed():
                resize.not_built(state, event)
            case SpillDone():
                spill.spill_done(state, event)
            case SpillFailed():
                spill.spill_failed(state, event)
            case RestoreDone():
                spill.restore_done(state, event)
            case RestoreFailed():
                spill.restore_failed(state, event)
            case CancelCommand():
                commands.cancel_command(state, event)
            case Tick():
                pass
            case Close():
                self._close()
            case _:
                commands.handle(state, event)
        if isinstance(event, _DEVICE_WORK_FAILED) and event.fatal:
            planning.device_dead(state, event.failure)

    def _close(self) -> None:
        state = self._state
        if state.closing:
            return
        state.closing = True
        closing = Failure("closed", "engine-closed", "the engine is closing")
        resize.give_up(state, closing)
        adapters.fail_all(state, closing)
        for seq in list(state.seqs.values()):
            state.end(seq, "error", closing)
        state.memory.prefix.disable()

    def _maybe_closed(self) -> None:
        state = self._state
        if not state.closing or state.closed:
            return
        if not (state.steps or state.seqs or state.stages or state.commits or state.resize):
            state.closed = True
            state.out.append(Closed())

    def next_wake(self) -> float | None:
        """Absolute time of the next ``Tick``, or ``None``."""
        state = self._state
        times = [state.next_deadline(), None if state.held else state.place_at]
        if state.resize is not None and not state.resize.rebuilding and state.held:
            times.append(state.resize.deadline)
        times += [u.deadline for u in state.unloading]
        return min((t for t in times if t is not None), default=None)

    def idle(self) -> bool:
        """Nothing runs, waits, stages or commits."""
        state = self._state
        busy = state.steps or state.stages or state.commits or state.resize
        return not (busy or state.seqs or state.jobs)

    def stats(self) -> Stats:
        """A frozen snapshot."""
        return snapshot(self._state)

    @property
    def steps_in_flight(self) -> int:
        """Steps handed to the device and not answered yet."""
        return len(self._state.steps)

    @property
    def pool_shape(self) -> tuple[int, int]:
        """Slots, and the highest rank they hold."""
        return self._state.config.max_loras, self._state.config.max_rank

    def source_of(self, name: str) -> int | None:
        """The source a known name comes from, or ``None``."""
        entry = self._state.names.names.get(name)
        return None if entry is None else entry.source

    def story(self, subject: str) -> list[str]:
        """What happened to ``"seq 3"``, ``"slot 1"`` or ``"adapter sql"``, oldest first."""
        return self._state.log.story(subject)

    def check(self) -> None:
        """Every conservation law; raises InternalError with what is broken."""
        state = self._state
        flying = [row for step in state.steps for row in step.rows]
        state.memory.check(state.seqs.values(), flying)
        leases: dict[int, set[int]] = {}
        for seq in state.seqs.values():
            if seq.leased and seq.slot >= 0:
                leases.setdefault(seq.slot, set()).add(seq.id)
        state.slots.check(leases)
        waiting = state.lanes.check()
        waits = (SeqState.WAITING, SeqState.SPILLED)
        if waiting != sum(s.state in waits for s in state.seqs.values()):
            raise InternalError("lanes and waiting sequences disagree", subject="lanes")
        rows = Counter(row.seq for row in flying)
        for seq in state.seqs.values():
            # A copy counts as well; what is being copied is in no step.
            copied = seq.state in (SeqState.SPILLING, SeqState.RESTORING, SeqState.CLOSING)
            if seq.in_flight != rows[seq.id] and not (copied and not rows[seq.id]):
                raise state.log.broken(f"seq {seq.id}", "its steps in flight and their rows differ")
        if rows.keys() - state.seqs.keys():
            raise InternalError("a step reads a sequence that is gone", subject="step")
        followers = [f for s in state.seqs.values() for f in s.followers]
        if len(state.running) + waiting + len(followers) != len(state.seqs):
            raise InternalError("a sequence is neither running nor waiting", subject="seqs")
        if len(followers) != state.following or any(
            f.state is not SeqState.FOLLOWING for f in followers
        ):
            raise InternalError("followers and leaders disagree", subject="seqs")
        jobs = {j.id for e in state.names.names.values() for j in e.jobs}
        if jobs - set(state.jobs):
            raise InternalError("a name waits for a job that is gone", subject="jobs")
        state.names.check(list(state.jobs.values()))
        for slot in state.slots.slots:
            if slot.version is None or slot.state is SlotState.DRAINING:
                continue
            entry = state.names.names.get(slot.version.name)
            if entry is None or entry.current is not slot.version:
                raise state.log.broken(f"slot {slot.index}", "an old version may be leased")
        for command, job in state.commands.items():
            if job >= 0 and command not in state.jobs[job].commands:
                raise InternalError("a command waits for no job", subject=f"command {command}")
