"""Samples of one prompt: computed once, leased together, ended each for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import events as ev

World = Callable[..., Any]


def ask(w: Any, adapter: str | None = None, prompt: int = 40, n: int = 4, **more: Any) -> None:
    """Sequences 1, 2 and 3: samples of one prompt."""
    w.send(ev.Submit(1, tuple(range(prompt)), adapter, False, n, siblings=(2, 3), **more))


def test_one_computes_the_prompt_and_the_others_begin_behind_it(world: World) -> None:
    w = world()
    ask(w)
    assert w.core.stats().waiting == 3
    first, second = w.step(), w.step()
    assert [(r.seq, r.start, len(r.tokens)) for r in first] == [(1, 0, 40)]
    assert [(r.seq, r.start, len(r.tokens)) for r in second] == [(1, 40, 1), (2, 32, 8), (3, 32, 8)]
    assert len({r.blocks[:2] for r in second}) == 1 and len({r.blocks[2] for r in second}) == 3
    w.settle()
    assert w.output(1) == w.output(2) == w.output(3) and len(w.output(1)) == 4
    assert {e.reason for e in w.ended.values()} == {"length"} and len(w.ended) == 3


def test_all_samples_run_on_the_version_the_first_leased(world: World) -> None:
    w = world(max_step_tokens=16)
    old = w.load("a", 1).adapter_id
    ask(w, "a")
    w.step()
    command = w.command(ev.Replace, "a", 2)
    w.run_stage()
    w.step()
    assert w.replies[command].adapter_id != old
    w.settle()
    assert {ident for seq in (1, 2, 3) for ident, _ in w.tokens[seq]} == {old}
    assert [s.state for s in w.core.stats().slots].count("EMPTY") == 2


@pytest.mark.parametrize("when", ["waiting", "prefill", "in flight"])
def test_when_the_first_is_cancelled_the_next_leads(world: World, when: str) -> None:
    w = world(max_step_tokens=16)
    w.load("a", 1)
    ask(w, "a")
    if when != "waiting":
        w.step()
    if when == "in flight":
        w.send(ev.Plan())
    w.send(ev.Cancel(1))
    w.settle()
    assert w.ended[1].reason == "cancelled"
    assert w.output(2) == w.output(3) and len(w.output(2)) == 4
    assert not any(s.leases for s in w.core.stats().slots)


def test_a_follower_can_be_cancelled_alone_and_all_expire_together(world: World) -> None:
    w = world(max_step_tokens=16)
    ask(w, n=100, deadline=1.0)
    w.step()
    w.send(ev.Cancel(3))
    assert w.core.stats().waiting == 1 and w.ended[3].reason == "cancelled"
    for _ in range(5):
        w.step()
    w.now = 1.0
    w.send(ev.Tick())
    w.settle()
    assert w.ended[1].reason == w.ended[2].reason == "deadline"


def test_what_stops_the_prompt_stops_all(world: World) -> None:
    w = world()
    ask(w)
    w.send(ev.Plan())
    w.run_device(fail="device-error")
    w.settle()
    assert {e.failure.code for e in w.ended.values()} == {"device-error"} and len(w.ended) == 3


def test_unloading_and_closing_end_followers_once(world: World) -> None:
    w = world(max_loras=1)
    w.load("b", 9, pin=True)
    w.command(ev.Register, "a", 1)
    ask(w, "a")
    w.command(ev.Unload, "a", w.now)
    assert {e.failure.code for e in w.ended.values()} == {"adapter-unloaded"}
    w.send(ev.Submit(4, tuple(range(40)), None, False, 4, siblings=(5, 6)))
    w.step()
    w.send(ev.Close())
    w.settle()
    assert w.closed and len(w.ended) == 6


def test_followers_whose_name_is_unloaded_meanwhile_finish(world: World) -> None:
    w = world(max_step_tokens=16)
    w.load("a", 1)
    ask(w, "a")
    w.step()
    command = w.command(ev.Unload, "a", w.now + 100)
    w.settle()
    assert w.replies[command].outcome == "unloaded"
    assert {e.reason for e in w.ended.values()} == {"length"} and len(w.output(3)) == 4


def test_all_are_refused_alike_and_count_as_waiting(world: World) -> None:
    w = world(max_waiting=4)
    ask(w)
    w.send(ev.Submit(4, (1,), None, False, 4, siblings=(5,)))
    assert w.ended[4].failure.code == w.ended[5].failure.code == "QUEUE_FULL"
    w.submit(6)
    assert 6 not in w.ended


def test_without_a_prefix_cache_each_computes_the_prompt(world: World) -> None:
    w = world(prefix_cache=False)
    ask(w)
    w.step()
    assert [(r.seq, r.start) for r in w.step()] == [(1, 40), (2, 0), (3, 0)]
    w.settle()
    assert w.output(1) == w.output(2) == w.output(3)


def test_an_unload_after_many_samples_ends_by_its_deadline(world: World) -> None:
    """Three requests of sixteen samples, some cancelled on the way: uses are sets of sequences, so
    the unload is answered as soon as the last has ended, and not later."""
    w = world(max_running=64, num_blocks=256)
    w.load("a", 1)
    for first in (100, 200, 300):
        siblings = tuple(range(first + 1, first + 16))
        w.send(ev.Submit(first, tuple(range(40)), "a", False, 6, siblings=siblings))
    w.step()
    w.step()
    for seq in (100, 105, 210, 315):
        w.send(ev.Cancel(seq))
    command = w.command(ev.Unload, "a", w.now + 5.0)
    while command not in w.replies:
        assert w.core.stats().slots[0].leases > 0
        w.step()
    assert w.replies[command].outcome == "unloaded"
    assert len(w.ended) == 48 and w.core.stats().slots[0].state == "EMPTY"
