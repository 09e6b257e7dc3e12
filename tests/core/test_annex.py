"""Annexes in the arena: who goes for whom, who waits, and who is refused before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import effects as fx
from rota.sched.core import events as ev

World = Callable[..., Any]


def step(w: Any, times: int = 1) -> None:
    for _ in range(times):
        w.send(ev.Plan())
        w.now += 0.1
        while w.device:
            w.run_device()


def source_of(w: Any, name: str, nbytes: int) -> int:
    """A new one of ``name``'s adapter, whose annex has ``nbytes``."""
    source = len(w.content) + 1
    w.content[source] = f"{name}-{source}"
    w.annex[w.content[source]] = nbytes
    return source


def load(w: Any, name: str, nbytes: int, **kw: Any) -> Any:
    return w.load(name, source_of(w, name, nbytes), **kw)


def ask_for(w: Any, kind: Any, name: str, nbytes: int, *args: Any) -> int:
    """The same by a command nobody waits for; its image is ready."""
    command = int(w.command(kind, name, source_of(w, name, nbytes), *args))
    while w.run_stage():
        pass
    return command


def held(w: Any) -> dict[str, int]:
    """Bytes in the arena, by name."""
    return {s.name: s.annex for s in w.core.stats().slots if s.name is not None}


def states(w: Any) -> dict[str | None, str]:
    """What slots are in, by name."""
    return {s.name: s.state for s in w.core.stats().slots}


def test_an_annex_has_exactly_its_bytes_and_gives_them_back(world: World) -> None:
    w = world(max_loras=3, arena_bytes=100)
    load(w, "a", 30)
    load(w, "b", 50)
    load(w, "plain", 0)
    arena = w.core.stats().arena
    assert (arena.total, arena.used, arena.free, arena.largest_hole) == (100, 80, 20, 20)
    assert held(w) == {"a": 30, "b": 50, "plain": 0}
    w.command(ev.Unload, "a", w.now + 1)
    w.settle()
    arena = w.core.stats().arena
    assert (arena.used, arena.free, arena.largest_hole) == (50, 50, 30)
    reply = load(w, "c", 31)
    assert reply.failure is None and reply.evicted == "b" and held(w) == {"c": 31, "plain": 0}


def test_the_least_recently_used_go_until_one_hole_is_large_enough(world: World) -> None:
    w = world(max_loras=5, arena_bytes=100)
    for name in "abcd":
        load(w, name, 25)
    w.submit(1, "a", n=1)
    w.settle()
    reply = load(w, "big", 45)
    # b and c lie side by side; d, used later than both, stays, and so does a.
    assert reply.evicted in "bc" and held(w) == {"a": 25, "d": 25, "big": 45}
    assert w.core.stats().evicted == 2
    # Evicted from the arena is not forgotten: the host's image brings it back.
    w.submit(2, "b", n=2)
    w.settle()
    assert w.ended[2].reason == "length" and held(w)["b"] == 25


def test_one_too_large_is_refused_by_name_and_nobody_goes_for_it(world: World) -> None:
    w = world(max_loras=2, arena_bytes=100)
    load(w, "a", 60)
    before = w.core.stats()
    reply = load(w, "huge", 101)
    failure = reply.failure
    assert (failure.kind, failure.code, failure.subject) == (
        "reject",
        "annex-exceeds-arena",
        "huge",
    )
    assert "101" in failure.expected and failure.found == "100 bytes"
    after = w.core.stats()
    assert (after.slots, after.evicted) == (before.slots, 0) and held(w) == {"a": 60}
    # A replacement of that size leaves the old version serving.
    command = ask_for(w, ev.Replace, "a", 200)
    w.settle()
    assert w.replies[command].failure.code == "annex-exceeds-arena" and held(w) == {"a": 60}


def test_without_an_arena_only_who_needs_none_is_served(world: World) -> None:
    w = world(max_loras=1)
    assert load(w, "plain", 0).failure is None
    assert load(w, "other", 1).failure.code == "annex-exceeds-arena"


def test_pinned_ones_in_the_way_are_named(world: World) -> None:
    w = world(max_loras=4, arena_bytes=100)
    load(w, "a", 40, pin=True)
    load(w, "b", 30)
    reply = load(w, "c", 70)
    failure = reply.failure
    assert (failure.kind, failure.code) == ("capacity", "POOL_FULL")
    assert failure.found == "pinned bytes of a: 40" and failure.retry_after_s > 0
    assert held(w) == {"a": 40, "b": 30}
    assert load(w, "c", 60).failure is None and held(w) == {"a": 40, "c": 60}


def test_one_without_an_annex_never_waits_for_the_arena(world: World) -> None:
    w = world(max_loras=3, arena_bytes=100, drain_after_s=0.5)
    load(w, "a", 100)
    w.submit(1, "a", n=40)
    step(w)
    waiting = ask_for(w, ev.Load, "b", 50)
    step(w, 8)
    assert waiting not in w.replies  # a drains for it
    assert load_now(w, "plain") and waiting not in w.replies
    w.settle()
    assert w.replies[waiting].failure is None and held(w) == {"plain": 0, "b": 50}


def load_now(w: Any, name: str) -> bool:
    command = ask_for(w, ev.Load, name, 0)
    while w.device:
        w.run_device()
    return command in w.replies


def test_busy_ones_in_the_way_are_drained_together_after_their_time(world: World) -> None:
    w = world(max_loras=4, arena_bytes=90, drain_after_s=0.5, num_blocks=256)
    for name in "abc":
        load(w, name, 30)
    for name in "abc":
        w.submit(ord(name), name, n=30)
        step(w)
    command = ask_for(w, ev.Load, "big", 55)
    assert w.core.stats().drained == 0
    step(w, 6)
    # The two used longest ago lie side by side.
    assert states(w) == {"a": "DRAINING", "b": "DRAINING", "c": "IN_USE", None: "EMPTY"}
    w.submit(1, "a", n=1)
    step(w, 40)
    assert w.replies[command].failure is None
    assert w.ended[ord("a")].reason == w.ended[ord("b")].reason == "length"
    w.settle()
    assert w.ended[1].reason == "length", "an adapter that had to go comes back"


def test_smaller_ones_do_not_starve_a_larger_one(world: World) -> None:
    w = world(max_loras=4, arena_bytes=100, drain_after_s=0.5, num_blocks=256)
    load(w, "a", 50)
    load(w, "b", 50)
    w.submit(1, "a", n=12)
    w.submit(2, "b", n=40)
    step(w)
    big = ask_for(w, ev.Load, "big", 100)
    step(w, 6)
    small = ask_for(w, ev.Load, "small", 10)
    step(w, 12)
    # a has ended and its bytes are free, but they are kept for the one that waited longer.
    assert 1 in w.ended and 2 not in w.ended and not {big, small} & w.replies.keys()
    assert w.core.stats().arena.free == 50
    w.settle()
    assert w.replies[big].failure is None and w.replies[small].failure is None


def test_a_new_version_lies_beside_the_old_one_while_that_drains(world: World) -> None:
    w = world(max_loras=2, arena_bytes=100)
    load(w, "a", 50)
    w.submit(1, "a", n=20)
    step(w)
    command = ask_for(w, ev.Replace, "a", 40)
    step(w)
    assert w.replies[command].failure is None and held(w) == {"a": 40}
    assert w.core.stats().arena.used == 90
    w.submit(2, "a", n=2)
    w.settle()
    assert w.core.stats().arena.used == 40 and w.ended[1].reason == w.ended[2].reason == "length"
    assert {i for i, _ in w.tokens[1]} != {i for i, _ in w.tokens[2]}


@pytest.mark.parametrize("pinned", [False, True])
def test_a_new_version_too_large_to_lie_beside_waits_for_its_own(
    world: World, pinned: bool
) -> None:
    w = world(max_loras=3, arena_bytes=100, drain_after_s=0.5, num_blocks=256)
    load(w, "a", 60, pin=pinned)
    load(w, "other", 40)
    w.submit(1, "a", n=20)
    w.submit(2, "other", n=40)
    step(w)
    command = ask_for(w, ev.Replace, "a", 60)
    step(w, 7)
    w.submit(3, "a", n=2)
    now = states(w)
    assert now["a"] == "DRAINING" and now["other"] == "IN_USE" and command not in w.replies
    w.settle()
    assert w.replies[command].failure is None and w.ended[3].reason == "length"
    assert {i for i, _ in w.tokens[1]} != {i for i, _ in w.tokens[3]}
    assert held(w) == {"a": 60, "other": 40}
    assert [s.pinned for s in w.core.stats().slots if s.name == "a"] == [pinned]


def test_one_pinned_while_it_is_waited_for_is_let_be(world: World) -> None:
    w = world(max_loras=3, arena_bytes=100, drain_after_s=0.5, num_blocks=256)
    load(w, "a", 50)
    load(w, "b", 50)
    for seq, name in ((1, "a"), (2, "b")):
        w.submit(seq, name, n=30)
        step(w)
    command = ask_for(w, ev.Load, "c", 40)
    step(w, 6)
    assert states(w)["a"] == "DRAINING"
    w.command(ev.Pin, "a", True)
    assert states(w) == {"a": "IN_USE", "b": "DRAINING", None: "EMPTY"}
    w.settle()
    assert w.replies[command].failure is None and held(w) == {"a": 50, "c": 40}


def test_who_gives_up_lets_what_it_drained_serve_again(world: World) -> None:
    w = world(max_loras=3, arena_bytes=100, drain_after_s=0.5, num_blocks=256)
    load(w, "a", 100)
    w.submit(1, "a", n=30)
    step(w)
    ask_for(w, ev.Load, "b", 40)
    step(w, 6)
    assert w.core.stats().slots[0].state == "DRAINING"
    w.command(ev.Unload, "b", w.now + 1)
    assert w.core.stats().slots[0].state == "IN_USE"
    # And the arena is anybody's again.
    command = ask_for(w, ev.Load, "c", 10)
    w.settle()
    assert w.replies[command].failure is None


def test_a_failed_commit_gives_its_bytes_back(world: World) -> None:
    w = world(max_loras=2, arena_bytes=100)
    command = ask_for(w, ev.Load, "a", 80)
    commit = next(job for job in w.device if isinstance(job, fx.Commit))
    assert commit.extent == 0 and w.core.stats().arena.used == 80
    w.run_device(fail="injected")
    w.settle()
    assert w.replies[command].failure.code == "injected" and w.core.stats().arena.used == 0


def test_a_swap_waits_for_its_slot_and_the_arena(world: World) -> None:
    w = world(max_loras=2, arena_bytes=100, drain_after_s=0.5, num_blocks=256)
    load(w, "a", 60)
    load(w, "b", 40)
    w.submit(1, "a", n=10)
    w.submit(2, "b", n=20)
    step(w)
    command = ask_for(w, ev.Swap, "c", 100, 0)
    step(w, 12)
    assert command not in w.replies and 1 in w.ended
    w.settle()
    reply = w.replies[command]
    assert reply.failure is None and reply.slot == 0 and held(w) == {"c": 100}


def test_a_swap_into_the_only_slot_does_not_wait_for_one_that_waits_for_it(world: World) -> None:
    w = world(max_loras=1, arena_bytes=100, drain_after_s=0.5, num_blocks=256)
    load(w, "a", 60)
    w.submit(1, "a", n=12)
    step(w)
    big = ask_for(w, ev.Load, "big", 100)
    step(w, 6)
    assert w.core.stats().slots[0].state == "DRAINING"
    swap = ask_for(w, ev.Swap, "c", 60, 0)
    w.settle()
    assert w.replies[big].failure is None and w.replies[swap].failure is None
    assert w.ended[1].reason == "length" and held(w) == {"c": 60}


@pytest.mark.parametrize("busy", [False, True])
def test_a_swap_has_its_slot_and_the_arena_emptied_at_once(world: World, busy: bool) -> None:
    """Not one after the other; and an idle target is not leased anew while others drain."""
    w = world(max_loras=3, arena_bytes=300, drain_after_s=0.0, num_blocks=256)
    load(w, "a", 180)
    load(w, "b", 120)
    w.submit(1, "a", n=12)
    if busy:
        w.submit(2, "b", n=12)
    step(w)
    command = ask_for(w, ev.Swap, "c", 180, 1)
    step(w, 5)
    assert w.core.stats().slots[0].state == "DRAINING" and command not in w.replies
    w.submit(3, "b", n=40)
    while 1 not in w.ended:
        step(w)
    step(w)
    assert w.replies[command].failure is None and w.replies[command].slot == 1
    w.settle()
    assert w.ended[3].reason == "length"


def test_a_resize_makes_the_arena_anew(world: World) -> None:
    w = world(max_loras=2, arena_bytes=100)
    load(w, "a", 60)
    load(w, "b", 40)
    command = w.command(ev.Resize, 3, 64, w.now + 10)
    w.settle()
    assert w.replies[command].outcome == "resized"
    assert held(w) == {"a": 60, "b": 40} and w.core.stats().arena.used == 100
