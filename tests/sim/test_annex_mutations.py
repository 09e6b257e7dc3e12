"""Broken arenas: cores that place annexes or give their bytes back wrongly, each caught by the
seeds that have annexes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import annex, placement
from rota.sched.core.arena import Arena, Extent
from rota.sched.core.slots import SlotTable
from rota.sched.core.state import State
from rota.sched.core.tables import SlotState
from rota.sched.sim.scenario import scenario_of

from .broken import leases_taken_away_are_not_missed, must_be_caught

Patch = pytest.MonkeyPatch
SEEDS = [seed for seed in range(300) if scenario_of(seed).config.arena_bytes]


def bytes_given_back_twice(patch: Patch) -> None:
    """The second time somebody else's go along."""
    real = Arena.give_back

    def give_back(self: Arena, slot: int) -> bool:
        had = real(self, slot)
        if had and self._extents:
            del self._extents[next(iter(self._extents))]
        return had

    patch.setattr(Arena, "give_back", give_back)


def bytes_never_given_back(patch: Patch) -> None:
    """Under another owner's name, or the slot could not be filled again."""
    real = Arena.give_back

    def give_back(self: Arena, slot: int) -> bool:
        extent = self.of(slot)
        had = real(self, slot)
        if extent is not None:
            self._extents[1000 + len(self._extents)] = extent
        return had

    inside = Arena.inside
    patch.setattr(Arena, "give_back", give_back)
    patch.setattr(Arena, "inside", lambda self, w: [s for s in inside(self, w) if s < 1000])
    window = Arena.window

    def ignoring(self: Arena, nbytes: int, weight: Any, *more: Any, **ever: Any) -> Any:
        own = lambda s: None if s >= 1000 else weight(s)  # noqa: E731  # shorter than its use
        return window(self, nbytes, own, *more, **ever)

    patch.setattr(Arena, "window", ignoring)


def bytes_of_a_failed_commit_stay(patch: Patch) -> None:
    def commit_failed(self: SlotTable, slot: Any) -> None:
        slot.state = SlotState.EMPTY

    patch.setattr(SlotTable, "commit_failed", commit_failed)


def extents_that_overlap(patch: Patch) -> None:
    def window(self: Arena, nbytes: int, weight: Any, job: int = -1, **_: Any) -> Extent | None:
        return Extent(0, nbytes) if nbytes <= self.total else None

    def take(self: Arena, slot: int, extent: Extent) -> None:
        self._extents[slot] = extent

    patch.setattr(Arena, "window", window)
    patch.setattr(Arena, "take", take)
    patch.setattr(Arena, "inside", lambda self, window: [])


def extents_past_the_end(patch: Patch) -> None:
    def take(self: Arena, slot: int, extent: Extent) -> None:
        self._extents[slot] = extent

    real = Arena.window

    def window(self: Arena, nbytes: int, weight: Any, *more: Any, **ever: Any) -> Extent | None:
        self.total += 5
        try:
            return real(self, nbytes, weight, *more, **ever)
        finally:
            self.total -= 5

    patch.setattr(Arena, "take", take)
    patch.setattr(Arena, "window", window)


def a_leased_one_is_evicted(patch: Patch) -> None:
    def emptied(state: State, job: Any, window: Extent, idle: Any) -> Extent | None:
        for index in state.slots.arena.inside(window):
            slot = state.slots[index]
            if slot.state is SlotState.IN_USE:
                slot.state = SlotState.READY
                slot.leases.clear()
            if slot.state is SlotState.READY:
                annex.evict(state, slot, job)
        return None if state.slots.arena.inside(window) else window

    leases_taken_away_are_not_missed(patch)
    patch.setattr(annex, "_emptied", emptied)


def an_evicted_one_is_not_retired(patch: Patch) -> None:
    def evict(state: State, slot: Any, job: Any) -> None:
        version = slot.version
        state.slots.retire(slot)
        state.version_left(version)

    patch.setattr(annex, "evict", evict)


def nobody_is_drained_for_the_arena(patch: Patch) -> None:
    patch.setattr(annex, "_emptied", lambda state, job, window, idle: None)


def claims_outlive_their_job(patch: Patch) -> None:
    patch.setattr(SlotTable, "unclaim", lambda self, job: None)


def too_large_ones_wait_for_ever(patch: Patch) -> None:
    patch.setattr(annex, "refusal", lambda state, job, own: None)


def annex_forgotten_in_the_commit(patch: Patch) -> None:
    real = placement.Commit
    patch.setattr(placement, "Commit", lambda *fields: real(*fields[:5]))


MUTATIONS: list[Callable[[Patch], None]] = [
    bytes_given_back_twice,
    bytes_never_given_back,
    bytes_of_a_failed_commit_stay,
    extents_that_overlap,
    extents_past_the_end,
    a_leased_one_is_evicted,
    an_evicted_one_is_not_retired,
    nobody_is_drained_for_the_arena,
    claims_outlive_their_job,
    too_large_ones_wait_for_ever,
    annex_forgotten_in_the_commit,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_broken_arena_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    must_be_caught(mutate.__name__, monkeypatch, SEEDS)
