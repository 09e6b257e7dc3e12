"""Re-layout: another number of slots or another highest rank, at a global barrier.

The barrier is made, not waited for: nothing new is admitted or staged, what holds a lease finishes.
Then the device exchanges the pool, and what was resident is brought back: from its host image where
the rank stays, else staged again from its source. Owns ``State.resize``; ``RESIZE_TABLE`` is its
life. Invariants: until the device says that the new pool stands, slots, images and versions are as
they were, so every refusal leaves the engine serving as before; requests and jobs that arrive
meanwhile wait, and are served after.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from . import adapters
from .effects import DropImage, Relayout, Reply, Resident
from .events import Failure, RelayoutDone, RelayoutFailed, Resize
from .jobs import Job, JobEvent
from .registry import Version
from .slots import SlotTable
from .state import State
from .tables import SlotState

MAX_SLOTS = 4096
MAX_RANK = 1024
"""As much as `sched.config.EngineConfig` takes at the start."""


class ResizeState(enum.Enum):
    DRAINING = "DRAINING"  #: no new leases, stages or commits; waits until nothing is in flight
    REBUILDING = "REBUILDING"  #: the device exchanges the pool
    REFILLING = "REFILLING"  #: serves again; adapters that were resident come back
    GIVEN_UP = "GIVEN_UP"  #: answered (closing, dead device) while the device is still at it
    DONE = "DONE"
    REFUSED = "REFUSED"


class ResizeEvent(enum.Enum):
    QUIET = "quiet"
    BUILT = "built"
    REFILLED = "refilled"
    REFUSE = "refuse"  #: the deadline came, the device refused, or what is resident does not fit
    GIVE_UP = "give_up"


RESIZE_TABLE: dict[tuple[ResizeState, ResizeEvent], ResizeState] = {
    (ResizeState.DRAINING, ResizeEvent.QUIET): ResizeState.REBUILDING,
    (ResizeState.DRAINING, ResizeEvent.REFUSE): ResizeState.REFUSED,
    (ResizeState.DRAINING, ResizeEvent.GIVE_UP): ResizeState.REFUSED,
    (ResizeState.REBUILDING, ResizeEvent.BUILT): ResizeState.REFILLING,
    (ResizeState.REBUILDING, ResizeEvent.REFUSE): ResizeState.REFUSED,
    (ResizeState.REBUILDING, ResizeEvent.GIVE_UP): ResizeState.GIVEN_UP,
    (ResizeState.GIVEN_UP, ResizeEvent.BUILT): ResizeState.REFUSED,
    (ResizeState.GIVEN_UP, ResizeEvent.REFUSE): ResizeState.REFUSED,
    (ResizeState.REFILLING, ResizeEvent.REFILLED): ResizeState.DONE,
    (ResizeState.REFILLING, ResizeEvent.GIVE_UP): ResizeState.REFUSED,
}


@dataclass(slots=True, eq=False)
class Resizing:
    command: int
    max_loras: int
    max_rank: int
    deadline: float
    state: ResizeState = ResizeState.DRAINING
    refill: list[Job] = field(default_factory=list)  #: what brings the residents back

    @property
    def holds(self) -> bool:
        """Whether nothing new may be admitted, staged or committed."""
        return self.state is not ResizeState.REFILLING

    @property
    def rebuilding(self) -> bool:
        return self.state in (ResizeState.REBUILDING, ResizeState.GIVEN_UP)


def _move(state: State, resizing: Resizing, event: ResizeEvent) -> None:
    target = RESIZE_TABLE.get((resizing.state, event))
    if target is None:
        raise state.log.broken("pool", f"{event.value} in state {resizing.state.value}")
    state.log.add("pool", f"{resizing.state.value} -{event.value}-> {target.value}")
    resizing.state = target
    if target in (ResizeState.DONE, ResizeState.REFUSED):
        state.resize = None
        # Whatever waited for the barrier to pass is looked at again.
        state.unsettled = True


def refusal(state: State, event: Resize) -> Failure | None:
    """Why ``event`` cannot even be tried, before anything is touched."""
    if state.config.max_loras == 0:
        return Failure("command", "lora-off", "this engine was started with max_loras=0")
    if state.resize is not None:
        return Failure("command", "resize-in-progress", "the pool is being resized already")
    for what, value, most in (
        ("max_loras", event.max_loras, MAX_SLOTS),
        ("max_lora_rank", event.max_rank, MAX_RANK),
    ):
        if not 1 <= value <= most:
            return Failure("command", "bad-resize", "out of range", what, f"1..{most}", str(value))
    return _misfit(state, event.max_loras, event.max_rank)


def _misfit(state: State, max_loras: int, max_rank: int) -> Failure | None:
    """What is resident and would have no place in the new pool."""
    pinned = sum(slot.pinned for slot in state.slots.slots)
    if pinned > max_loras:
        return Failure(
            "command",
            "pinned-do-not-fit",
            "more adapters are pinned than there would be slots",
            expected=f"at most {max_loras} pinned",
            found=str(pinned),
        )
    for version in _residents(state):
        if version.rank > max_rank:
            return Failure(
                "command",
                "resident-rank-too-large",
                "a resident adapter would not fit; unload it first",
                version.name,
                f"rank at most {max_rank}",
                str(version.rank),
            )
    return None


def _residents(state: State) -> list[Version]:
    """What new sequences could lease, pinned first, then the last used first."""
    slots = [s for s in state.slots.slots if s.state in (SlotState.READY, SlotState.IN_USE)]
    slots.sort(key=lambda s: (not s.pinned, -s.last_used))
    return [s.version for s in slots if s.version is not None]


def begin(state: State, event: Resize) -> None:
    """Stop giving leases. The caller has asked :func:`refusal`."""
    state.resize = Resizing(event.command, event.max_loras, event.max_rank, event.deadline)
    state.commands[event.command] = -1
    what = f"{event.max_loras} slots of rank {event.max_rank}"
    state.log.add("pool", f"resize to {what}: DRAINING")


def settle(state: State) -> None:
    """Go on if the barrier is reached, or give it up if its time is over."""
    resizing = state.resize
    if resizing is None or resizing.state is not ResizeState.DRAINING:
        return
    busy = state.steps or state.stages or state.commits or state.running
    if not busy and not any(s.leased for s in state.seqs.values()):
        failure = _misfit(state, resizing.max_loras, resizing.max_rank)
        if failure is not None:  # pinned or loaded since it was asked for
            _refuse(state, resizing, failure)
            return
        _exchange(state, resizing)
    elif state.now >= resizing.deadline:
        leased = sum(s.leased for s in state.seqs.values())
        _refuse(
            state,
            resizing,
            Failure(
                "capacity",
                "resize-timeout",
                "what runs did not finish in time; the pool is as it was",
                expected="nothing in flight",
                found=f"{leased} requests run, {len(state.stages)} adapters are staged",
            ),
        )


def _exchange(state: State, resizing: Resizing) -> None:
    _move(state, resizing, ResizeEvent.QUIET)
    slots = state.slots
    residents = tuple(Resident(v.slot, v.name, slots[v.slot].pinned) for v in _residents(state))
    state.out.append(Relayout(resizing.max_loras, resizing.max_rank, residents))


def _refuse(state: State, resizing: Resizing, failure: Failure) -> None:
    state.reply([resizing.command], Reply(-1, "refused", failure=failure))
    _move(state, resizing, ResizeEvent.REFUSE)


def built(state: State, event: RelayoutDone) -> None:
    """The new pool stands, empty."""
    resizing = state.resize
    if resizing is None:
        raise state.log.broken("pool", "rebuilt unasked")
    given_up = resizing.state is ResizeState.GIVEN_UP
    _move(state, resizing, ResizeEvent.BUILT)
    residents = _residents(state)
    pinned = {s.version for s in state.slots.slots if s.pinned}
    for slot in state.slots.slots:
        if slot.version is not None:
            slot.version.slot = -1
    new_layout = resizing.max_rank != state.config.max_rank
    state.config = msgspec.structs.replace(
        state.config,
        max_loras=resizing.max_loras,
        max_rank=resizing.max_rank,
        arena_bytes=event.arena_bytes,
    )
    state.slots = SlotTable(resizing.max_loras, state.log, event.arena_bytes)
    state.unsettled = True
    if new_layout:
        _forget_images(state)
    for entry in state.names.names.values():
        entry.failed = None  # the new pool may hold what the old one could not
    if given_up:
        return
    needs = dict(zip(residents, event.annexes, strict=True))
    kept = {}
    for version in residents[: resizing.max_loras]:
        job = adapters.bring_back(state, state.names.names[version.name], version in pinned)
        resizing.refill.append(job)
        if job.pin and needs[version]:
            kept[job.id] = needs[version]
    # Or who is staged sooner could lie so that no place is left side by side.
    state.slots.arena.keep(kept)
    refilled(state)


def _forget_images(state: State) -> None:
    """No image fits the new layout: jobs that hold one stage again."""
    for job in list(state.placing.values()):
        del state.placing[job.id]
        state.names.image_released(job.image)
        job.image = -1
        adapters.move(state, job, JobEvent.RESTAGE)
        state.backlog[job.id] = job
    state.out.extend(DropImage(image) for image in state.names.forget_images())


def refilled(state: State) -> None:
    """Answer when all that was resident is back, or has failed to come back by name; a resize that
    lost somebody pinned has not succeeded."""
    resizing = state.resize
    if resizing is None or resizing.state is not ResizeState.REFILLING:
        return
    if any(job.id in state.jobs for job in resizing.refill):
        return
    lost = next((job for job in resizing.refill if job.pin and job.failure is not None), None)
    reply = Reply(-1, "resized") if lost is None else Reply(-1, "failed", failure=_not_back(lost))
    state.reply([resizing.command], reply)
    _move(state, resizing, ResizeEvent.REFILLED)


def _not_back(job: Job) -> Failure:
    cause = job.failure
    assert cause is not None
    return Failure(
        cause.kind,
        "pinned-not-back",
        f"the pool is another, but a pinned adapter did not come back: {cause.message}"[:500],
        job.name,
        "every pinned adapter in a slot",
        cause.code,
        cause.retry_after_s,
    )


def not_built(state: State, event: RelayoutFailed) -> None:
    """The device refused or failed; it keeps the old pool."""
    resizing = state.resize
    if resizing is None:
        raise state.log.broken("pool", "refused unasked")
    _refuse(state, resizing, event.failure)


def give_up(state: State, failure: Failure) -> None:
    """The engine closes or its device is dead: answer now; what the device does ends by itself."""
    resizing = state.resize
    if resizing is None or resizing.state is ResizeState.GIVEN_UP:
        return
    state.reply([resizing.command], Reply(-1, "failed", failure=failure))
    _move(state, resizing, ResizeEvent.GIVE_UP)
