"""Slots and leases. Owns every slot's state and the extents of the annex arena: what a slot's
adapter has there is taken when the slot is chosen and given back when the slot loses it. Leases are
sets of sequence ids, never counters."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from .arena import Arena, Extent
from .registry import Version
from .story import Log
from .tables import SLOT_TABLE, SlotEvent, SlotState


@dataclass(slots=True)
class Slot:
    index: int
    state: SlotState = SlotState.EMPTY
    version: Version | None = None
    leases: set[int] = field(default_factory=set)
    last_used: int = 0
    pinned: bool = False
    #: When it was committed, and whether the planner has had a turn since: what was brought in for
    #: a waiting sequence must not be thrown out before the sequence could take its lease.
    since: float = 0.0
    offered: bool = False
    #: Job this slot is being drained for, or -1 (superseded and unloaded slots drain for nobody).
    drained_for: int = -1
    #: Bytes that its adapter, or the one being written, has in the arena.
    annex: int = 0


class SlotTable:
    """All slots, and the only code that changes one."""

    def __init__(self, count: int, log: Log, arena_bytes: int = 0) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.arena = Arena(arena_bytes, log)
        self._log = log
        self._tick = 0
        #: Something a waiting job could care about changed; cleared by who gives slots out.
        self.changed = True
        self._unoffered = False

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    def __len__(self) -> int:
        return len(self.slots)

    def _move(self, slot: Slot, event: SlotEvent) -> None:
        target = SLOT_TABLE.get((slot.state, event))
        subject = f"slot {slot.index}"
        if target is None:
            raise self._log.broken(subject, f"{event.value} in state {slot.state.value}")
        if target is not slot.state:
            self._log.add(subject, f"{slot.state.value} -{event.value}-> {target.value}")
            self.changed = True
        slot.state = target

    def _touch(self, slot: Slot) -> None:
        self._tick += 1
        slot.last_used = self._tick

    def choose(self, slot: Slot, extent: Extent | None = None) -> Version | None:
        """Reserve an EMPTY or READY slot, and ``extent`` of the arena, for a commit; returns the
        version it loses."""
        self._move(slot, SlotEvent.CHOOSE)
        evicted, slot.version, slot.pinned = slot.version, None, False
        if evicted is not None:
            evicted.slot = -1
        self._give_back(slot)
        if extent is not None:
            self.arena.take(slot.index, extent)
            slot.annex = extent.nbytes
        return evicted

    def _give_back(self, slot: Slot) -> None:
        # What is written there next comes behind every step that could read it, on the device.
        slot.annex = 0
        if self.arena.give_back(slot.index):
            self.changed = True

    def unclaim(self, job: int) -> None:
        """``job`` needs what it has claimed of the arena no more."""
        if self.arena.unclaim(job):
            self.changed = True

    def committed(self, slot: Slot, version: Version, pin: bool) -> None:
        self._move(slot, SlotEvent.COMMITTED)
        slot.since, slot.offered = self._log.now, False
        self._unoffered = True
        slot.version, slot.pinned = version, pin
        version.slot = slot.index
        self._touch(slot)

    def commit_failed(self, slot: Slot) -> None:
        self._move(slot, SlotEvent.COMMIT_FAILED)
        self._give_back(slot)

    def lease(self, slot: Slot, seq: int) -> None:
        if seq in slot.leases:
            raise self._log.broken(f"slot {slot.index}", f"seq {seq} leases twice")
        self._move(slot, SlotEvent.LEASE)
        slot.leases.add(seq)
        self._touch(slot)

    def release(self, slot: Slot, seq: int) -> bool:
        """Give one lease back; true if the slot became EMPTY (its cells must be cleared)."""
        if seq not in slot.leases:
            raise self._log.broken(f"slot {slot.index}", f"seq {seq} releases a lease it has not")
        slot.leases.remove(seq)
        self._touch(slot)
        self._move(slot, SlotEvent.RELEASE if slot.leases else SlotEvent.RELEASE_LAST)
        if slot.state is SlotState.EMPTY:
            self._forget(slot)
            return True
        return False

    def drain(self, slot: Slot, job: int) -> None:
        self._move(slot, SlotEvent.DRAIN)
        slot.drained_for = job

    def undrain(self, slot: Slot) -> None:
        self._move(slot, SlotEvent.UNDRAIN)
        slot.drained_for = -1

    def retire(self, slot: Slot) -> None:
        self._move(slot, SlotEvent.RETIRE)
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        if slot.version is not None:
            slot.version.slot = -1
        slot.version, slot.pinned, slot.drained_for = None, False, -1
        self._give_back(slot)

    def pin(self, slot: Slot, pinned: bool) -> None:
        slot.pinned = pinned
        self.changed = True

    def offer(self) -> None:
        """The planner has had a turn."""
        if not self._unoffered:
            return
        self._unoffered = False
        self.changed = True
        for slot in self.slots:
            slot.offered = True

    def any_idle(self) -> bool:
        """Whether some slot is free, or holds a version nobody leases."""
        return any(s.state in (SlotState.EMPTY, SlotState.READY) for s in self.slots)

    def drained_for(self) -> set[int]:
        """Jobs for which a slot drains (and -1 if one drains for nobody)."""
        return {s.drained_for for s in self.slots if s.state is SlotState.DRAINING}

    def victim(self, own: int, reserved: Set[int], keep: Callable[[Slot], bool]) -> Slot | None:
        """The slot to overwrite: EMPTY first (lowest index), then slot ``own`` (the version being
        replaced) if idle, then the least recently used idle slot that is neither pinned nor to be
        kept."""
        best: Slot | None = None
        for slot in self.slots:
            if slot.index in reserved:
                continue
            if slot.state is SlotState.EMPTY:
                return slot
            if slot.state is SlotState.READY:
                if slot.index == own:
                    best = slot
                elif not (slot.pinned or keep(slot)) and (
                    best is None or (best.index != own and slot.last_used < best.last_used)
                ):
                    best = slot
        return best

    def drain_victim(self, own: int = -1, reserved: Set[int] = frozenset()) -> Slot | None:
        """The busy slot to drain when nothing is idle: ``own`` first, then the least recently
        used unpinned one that is not draining yet."""
        busy = [s for s in self.slots if s.state is SlotState.IN_USE and s.index not in reserved]
        for slot in busy:
            if slot.index == own:
                return slot
        free = [s for s in busy if not s.pinned]
        return min(free, key=lambda s: s.last_used, default=None)

    def can_ever_place(self, own: int = -1) -> bool:
        """Whether some slot may become a victim without anybody unpinning. What drains will be
        empty, pinned or not."""
        return any(
            not s.pinned or s.index == own or s.state is SlotState.DRAINING for s in self.slots
        )

    def check(self, leases: dict[int, set[int]]) -> None:
        """``leases``: slot index -> sequence ids that say they hold a lease on it."""
        for slot in self.slots:
            if slot.leases != leases.get(slot.index, set()):
                raise self._log.broken(f"slot {slot.index}", "leases and holders disagree")
            busy = slot.state in (SlotState.IN_USE, SlotState.DRAINING)
            if bool(slot.leases) != busy:
                raise self._log.broken(f"slot {slot.index}", "state and leases disagree")
            holds = busy or slot.state is SlotState.READY
            if holds != (slot.version is not None):
                raise self._log.broken(f"slot {slot.index}", "state and version disagree")
            if slot.version is not None and slot.version.slot != slot.index:
                raise self._log.broken(f"slot {slot.index}", "version does not point back")
            if slot.annex and slot.state is SlotState.EMPTY:
                raise self._log.broken(f"slot {slot.index}", "EMPTY, but has an annex")
        self.arena.check({s.index: s.annex for s in self.slots if s.annex})
