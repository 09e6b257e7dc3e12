"""The laws of the arena: annexes never overlap, lie within it, and are given back exactly once.

Its own books, kept from what goes in and out of the core: an annex is there from its commit until
that fails, its slot is retired or written anew, or the pool is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core import effects as fx
from ..core import events as ev
from ..core.snapshot import Stats


class Annexes:
    """``total``: bytes of the arena."""

    def __init__(self, total: int, need: Callable[[bool, str, str], None]) -> None:
        self._total, self._need = total, need
        self._sizes: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        #: First byte and end, by slot.
        self._held: dict[int, tuple[int, int]] = {}
        #: When which name was given a slot and an extent.
        self.given: set[tuple[float, str]] = set()

    def event(self, event: ev.Event) -> None:
        match event:
            case ev.StageDone():
                self._sizes[event.image] = event.annex
            case ev.CommitFailed(commit):
                self._held.pop(self._slot_of.pop(commit), None)
            case ev.RelayoutDone(total):
                self._held.clear()
                self._total = total
            case _:
                pass

    def effect(self, effect: fx.Effect, now: float) -> None:
        match effect:
            case fx.Retire(slot):
                self._held.pop(slot, None)
            case fx.Commit():
                self._commit(effect, now)
            case _:
                pass

    def _commit(self, effect: fx.Commit, now: float) -> None:
        slot, size = effect.slot, self._sizes.get(effect.image, 0)
        self._slot_of[effect.commit] = slot
        self._held.pop(slot, None)
        who = f"slot {slot} of {effect.name}"
        self._need((effect.extent is None) == (size == 0), "arena", f"{who}: {size} bytes, where?")
        if effect.extent is None:
            return
        begin, end = effect.extent, effect.extent + size
        inside = 0 <= begin and end <= self._total
        self._need(inside, "arena", f"{who} at {begin}..{end} of {self._total}")
        for other, (first, last) in self._held.items():
            apart = end <= first or last <= begin
            self._need(
                apart, "arena", f"{who} at {begin}..{end} over slot {other}'s {first}..{last}"
            )
        self._held[slot] = begin, end
        self.given.add((round(now, 6), effect.name))

    def at_rest(self, stats: Stats) -> None:
        """What the core counts as given out is what is there."""
        used = sum(end - begin for begin, end in self._held.values())
        what = f"{stats.arena} and {self._held}"
        self._need((stats.arena.total, stats.arena.used) == (self._total, used), "arena", what)
        for slot in stats.slots:
            begin, end = self._held.get(slot.index, (0, 0))
            self._need(slot.annex == end - begin, "arena", f"slot {slot.index}: {what}")
