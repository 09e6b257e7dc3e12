"""Finding an extent of the arena for a waiting job's annex, and emptying what is in its way.

A hole that fits is best, then the place whose versions, all idle, were used longest ago. A job that
has waited ``drain_after_s`` and finds neither *claims* the place that costs least: whoever is idle
there goes at once, who is busy is drained, and no other job is placed there meanwhile. There is one
claim at a time, so the wait for it is bounded like the wait for a slot, job by job. Owns nothing;
decides with the arena of the slot table.
"""

from __future__ import annotations

from collections.abc import Callable

from . import adapters, retry
from .arena import FREE, Extent, Weight
from .events import Failure
from .jobs import Job
from .slots import Slot
from .state import State
from .tables import SlotState

#: Weights, dearer to dearer: what goes anyway, what is idle, what has to be waited for.
_GOING, _IDLE, _BUSY = 1, 2, 3


def refusal(state: State, job: Job, own: int) -> Failure | None:
    """Why ``job``, which has an annex, can never be placed as things are: that is larger than the
    arena, or pinned versions, in place or on their way back, leave none for it. ``own``: the slot
    of the version it replaces, or -1."""
    arena = state.slots.arena
    if job.annex > arena.total:
        return Failure(
            "reject",
            "annex-exceeds-arena",
            "the adapter's experts, token matrices and overlay need more bytes than the arena has",
            job.name,
            f"an adapter_arena_bytes of at least {job.annex}",
            f"{arena.total} bytes",
        )
    mine = (own, job.target)

    def movable(index: int) -> Weight | None:
        return None if _stays(state.slots[index], mine) else FREE

    if arena.window(job.annex, movable, job.id, ever=True) is not None:
        return None
    pinned = [s for s in state.slots.slots if s.annex and _stays(s, mine)]
    held = [f"{s.version.name}: {s.annex}" for s in pinned if s.version is not None]
    coming = {j: e.nbytes for j, e in arena.kept.items() if j != job.id}
    held += [f"{state.jobs[j].name}: {nbytes}" for j, nbytes in coming.items()]
    return Failure(
        "capacity",
        "POOL_FULL",
        "pinned adapters leave no place in the arena",
        job.name,
        f"{job.annex} bytes side by side of {arena.total}",
        f"pinned bytes of {', '.join(held)}"[:500],
        retry.pool_full(state),
    )


def _stays(slot: Slot, mine: tuple[int, int]) -> bool:
    """Whether a slot's version is nobody's victim. What drains will be gone, pinned or not."""
    busy = slot.state in (SlotState.READY, SlotState.IN_USE)
    return slot.pinned and busy and slot.index not in mine


def extent_for(
    state: State, job: Job, own: int, kept: Callable[[Slot], bool], due: bool
) -> Extent | None:
    """Where the annex of ``job`` may be written once the idle versions there are evicted, or
    ``None`` while it must wait; one that is ``due`` claims a place and has it emptied.

    ``kept``: of an idle slot, whether it is not yet a victim for the job.
    """
    slots, arena = state.slots, state.slots.arena
    mine = (own, job.target)

    def idle(index: int) -> Weight | None:
        slot = slots[index]
        if slot.state is not SlotState.READY or _stays(slot, mine):
            return None
        if index in mine:
            return _GOING, 0
        return None if kept(slot) else (_IDLE, slot.last_used)

    def busy(index: int) -> Weight | None:
        slot = slots[index]
        if slot.state is SlotState.STAGING or _stays(slot, mine):
            return None
        if slot.state is SlotState.DRAINING:
            return _GOING, 1
        cheap = idle(index)
        if cheap is not None:
            return cheap
        return (_IDLE, 0) if index in mine else (_BUSY, slot.last_used)

    kept_for = arena.kept.get(job.id)
    if kept_for is not None:
        if kept_for.nbytes == job.annex:
            return kept_for
        slots.unclaim(job.id)  # it is another content by now
    claim = arena.claim
    if claim is not None and claim.job == job.id:
        inside = arena.inside(claim.extent)
        if not any(_stays(slots[i], mine) for i in inside):
            return _emptied(state, job, claim.extent, idle)
        # Somebody was pinned since: another place must do.
        slots.unclaim(job.id)
        adapters.undrain(state, job)
    found = arena.window(job.annex, idle, job.id)
    if found is not None or not due or arena.claim is not None:
        return found
    found = arena.window(job.annex, busy, job.id)
    if found is None:  # a commit is under way wherever it could be; its end comes soon
        return None
    arena.keep_for(job.id, found)
    return _emptied(state, job, found, idle)


def _emptied(
    state: State, job: Job, window: Extent, idle: Callable[[int], Weight | None]
) -> Extent | None:
    """Have ``window`` emptied for ``job``; the window once nobody is left there."""
    slots = state.slots
    for index in slots.arena.inside(window):
        slot = slots[index]
        if slot.state is SlotState.IN_USE:
            state.counters.drained += 1
            slots.drain(slot, job.id)
        elif idle(index) is not None:
            evict(state, slot, job)
    if not slots.arena.inside(window):
        return window
    if job.target >= 0 and idle(job.target) is not None:
        # Or the slot would be leased anew before the window is empty, and drained after it.
        evict(state, slots[job.target], job)
    return None


def evict(state: State, slot: Slot, job: Job) -> None:
    """Empty an idle slot so that ``job`` has its part of the arena."""
    version, pinned = slot.version, slot.pinned
    assert version is not None
    state.counters.evicted += 1
    if version.name == job.name:
        # Emptied for its own next version: the pin is the name's, and goes on.
        job.pin = job.pin or pinned
        state.counters.overwritten += 1
    elif job.evicted is None:
        job.evicted = version.name
    state.slots.retire(slot)
    state.slot_emptied(slot.index)
    state.version_left(version)
