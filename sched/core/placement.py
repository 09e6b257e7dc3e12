"""Placing: which slot and which part of the arena a staged adapter gets, when a busy slot is
drained for it, and the commit.

Slots go to jobs in the order they began to wait. A victim is reserved when it is chosen.
"""

from __future__ import annotations

from . import adapters, annex, retry
from .arena import Extent
from .effects import Commit
from .events import Failure
from .identity import adapter_id
from .jobs import Job, JobEvent, JobKind
from .registry import Name
from .slots import Slot
from .state import State
from .tables import SlotState


def place_all(state: State) -> None:
    """Give slots to the jobs that wait for one, in the order they began to wait. Does nothing
    unless a job, a slot, a lane or the time has changed what it would decide."""
    if state.held:
        return
    slots, lanes = state.slots, state.lanes
    due = state.place_at is not None and state.now >= state.place_at
    if not (state.unsettled or slots.changed or lanes.changed or due):
        return
    state.unsettled = slots.changed = lanes.changed = False
    idle, ever, drained = slots.any_idle(), slots.can_ever_place(), slots.drained_for()
    for job in list(state.placing.values()):
        entry = state.names.names[job.name]
        current = entry.current
        if (
            current is not None
            and adapters.serves(state, current)
            and not adapters.is_fresh(entry, job)
        ):
            # The slot it drained from serves again: the wait is over without a commit.
            adapters.relink(state, current, job)
            adapters.finish(state, entry, job, JobEvent.FINISH, "resident")
            continue
        if job.target >= len(slots):
            adapters.fail(state, job, _no_such_slot(state, job))
            continue
        if job.target < 0 and not (ever or slots.can_ever_place(_own(entry, job))):
            adapters.fail(state, job, _pool_full(state))
            continue
        never = annex.refusal(state, job, _own(entry, job)) if job.annex else None
        if never is not None:
            adapters.fail(state, job, never)
            continue
        waits = job.annex == 0 and job.id in drained
        if job.target < 0 and not idle and (waits or not _due(state, job)):
            continue
        slot, extent = _slot_for(state, entry, job, drained)
        if slot is not None:
            _commit(state, entry, job, slot, extent)
        if slots.changed:
            idle, ever, drained = slots.any_idle(), slots.can_ever_place(), slots.drained_for()
    state.place_at = _next_drain(state)


def _due(state: State, job: Job) -> bool:
    return state.now >= job.since + state.config.drain_after_s


Place = tuple[Slot | None, Extent | None]
_NOWHERE: Place = (None, None)


def _slot_for(state: State, entry: Name, job: Job, drained: set[int]) -> Place:
    """A slot that may be overwritten for ``job``, and where its annex goes, if it has one; no slot
    while the job must wait."""
    slots = state.slots
    current = entry.current
    if current is not None and current.slot >= 0 and not adapters.is_fresh(entry, job):
        # The version still drains from another slot; two slots never hold one version.
        return _NOWHERE
    ready = True
    if job.target >= 0:
        slot = slots[job.target]
        if slot.state is SlotState.IN_USE:
            _drain(state, slot, job)
        ready = slot.state in (SlotState.EMPTY, SlotState.READY)
        if not ready and job.annex == 0:
            return _NOWHERE
    own = _own(entry, job)
    extent = None
    if job.annex:
        due = _due(state, job)
        extent = annex.extent_for(state, job, own, lambda slot: _kept(state, job, slot), due)
        if extent is None or not ready:  # the arena is emptied while the slot drains
            return _NOWHERE
    if job.target >= 0:
        return slots[job.target], extent
    claim = slots.arena.claim
    reserved = {j.target for j in state.placing.values() if j.target >= 0}
    if claim is not None and claim.job == job.id:
        # A swap into the slot may itself wait for what is claimed: the claim goes first.
        reserved = set()
    if extent is not None and (own := _own(entry, job)) < 0:
        # Who is in the way of the annex goes in any case; so take such a one's slot.
        idle = [slots[i] for i in slots.arena.inside(extent) if i not in reserved]
        own = min(idle, key=lambda slot: slot.last_used).index if idle else -1
    victim = slots.victim(own, reserved, lambda slot: _kept(state, job, slot))
    if victim is not None:
        return victim, extent
    if job.id not in slots.drained_for() and _due(state, job):
        busy = slots.drain_victim(_own(entry, job), reserved)
        if busy is not None:
            _drain(state, busy, job)
    return _NOWHERE


def _kept(state: State, job: Job, slot: Slot) -> bool:
    """Whether an idle slot is not yet a victim for ``job``: the planner has had no turn since it
    was filled, or sequences wait for it and the job has not waited out its time."""
    if not slot.offered:
        return True
    if slot.version is None or not state.lanes.wants(slot.version.name):
        return False
    return state.now < max(job.since, slot.since) + state.config.drain_after_s


def _drain(state: State, slot: Slot, job: Job) -> None:
    state.counters.drained += 1
    state.slots.drain(slot, job.id)


def _commit(state: State, entry: Name, job: Job, slot: Slot, extent: Extent | None) -> None:
    job.fresh = adapters.is_fresh(entry, job)
    current = entry.current
    if current is not None and current.slot >= 0:
        job.pin = job.pin or state.slots[current.slot].pinned
    for index in () if extent is None else state.slots.arena.inside(extent):
        if index != slot.index:
            annex.evict(state, state.slots[index], job)
    evicted = state.slots.choose(slot, extent)
    if evicted is not None:
        state.counters.evicted += 1
        state.counters.overwritten += evicted.name == job.name
        state.counters.swapped += evicted.name != job.name and job.kind is JobKind.SWAP
        job.evicted = evicted.name if evicted.name != job.name else job.evicted
    # Reserved now: if the name goes away meanwhile, its next version must not share an identity
    # with what is being written.
    job.generation = entry.reserve() if job.fresh or current is None else current.generation
    job.slot = slot.index
    job.commit = state.new_id()
    del state.placing[job.id]
    state.commits[job.commit] = job
    adapters.move(state, job, JobEvent.CHOSEN)
    state.counters.commits += 1
    state.counters.slot_wait_s += state.now - job.since
    ident = adapter_id(job.name, job.generation)
    at = None if extent is None else extent.offset
    state.out.append(Commit(job.commit, slot.index, job.image, job.name, ident, at))
    state.slots.unclaim(job.id)
    _hand_on_drain(state, job)


def _hand_on_drain(state: State, job: Job) -> None:
    """``job`` took other slots than some drained for it: these drains go to the next jobs that have
    waited long enough and have none, so that a slot taken from one costs it no second wait."""
    draining = [s for s in state.slots.slots if s.state is SlotState.DRAINING]
    drained = {s.drained_for for s in draining}
    left = [s for s in draining if s.drained_for == job.id]
    for other in state.placing.values() if left else ():
        due = other.since + state.config.drain_after_s <= state.now
        if other.target < 0 and due and other.id not in drained:
            left.pop(0).drained_for = other.id
            if not left:
                return


def _own(entry: Name, job: Job) -> int:
    """The slot of the version this job replaces, or -1."""
    if job.kind is JobKind.REPLACE and entry.current is not None:
        return entry.current.slot
    return -1


def _no_such_slot(state: State, job: Job) -> Failure:
    return Failure(
        "command",
        "bad-slot",
        "the pool was resized meanwhile: no such slot",
        job.name,
        f"0..{len(state.slots) - 1}",
        str(job.target),
    )


def _pool_full(state: State) -> Failure:
    return Failure(
        "capacity",
        "POOL_FULL",
        "every slot is pinned",
        expected="a slot that may be a victim",
        found=f"{len(state.slots)} pinned",
        retry_after_s=retry.pool_full(state),
    )


def _next_drain(state: State) -> float | None:
    """When the next waiting job may drain a victim (past that, only an event can help it)."""
    after = state.config.drain_after_s
    times = [j.since + after for j in state.placing.values()]
    if times:
        times += [s.since + after for s in state.slots.slots if s.state is SlotState.READY]
    return min((t for t in times if t > state.now), default=None)
