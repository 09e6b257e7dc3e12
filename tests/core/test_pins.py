"""A pin is the name's: it goes where the name's versions go, until somebody takes it back."""

from __future__ import annotations

from typing import Any

import pytest

from rota.sched.core import events as ev


@pytest.mark.parametrize("unpinned_meanwhile", [False, True])
@pytest.mark.parametrize("kind", [ev.Replace, ev.Swap])
@pytest.mark.parametrize("spare", [0, 1])
def test_a_pin_outlives_the_next_version_of_its_name(
    world: Any, kind: Any, spare: int, unpinned_meanwhile: bool
) -> None:
    """Also where that version must wait for its own name's slot to drain."""
    w = world(max_loras=1 + spare, drain_after_s=0.0)
    w.load("a", 1, pin=True)
    w.submit(1, "a", n=10)
    for _ in range(4):
        w.send(ev.Plan())
        w.run_device()
    extra = (0,) if kind is ev.Swap else ()
    command = w.command(kind, "a", 2, *extra)
    w.run_stage()
    drains = kind is ev.Swap or not spare
    assert (w.core.stats().slots[0].state == "DRAINING") is drains
    if unpinned_meanwhile:
        w.command(ev.Pin, "a", False)
    w.settle()
    assert w.replies[command].generation == 2
    (slot,) = (s for s in w.core.stats().slots if s.name == "a")
    assert slot.pinned is not unpinned_meanwhile
    w.core.check()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pin_given_while_the_next_version_is_written_is_its_too(world: Any, pinned: bool) -> None:
    w = world(max_loras=2)
    w.load("a", 1, pin=not pinned)
    w.submit(1, "a", n=10)
    for _ in range(4):
        w.send(ev.Plan())
        w.run_device()
    w.command(ev.Replace, "a", 2)
    w.run_stage()
    w.command(ev.Pin, "a", pinned)
    w.settle()
    (slot,) = (s for s in w.core.stats().slots if s.name == "a")
    assert (slot.generation, slot.pinned) == (2, pinned)
