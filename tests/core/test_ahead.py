"""A step planned ahead: when it is, what is in it, and every way its rows can be for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.errors import InternalError
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.core.effects import fed

World = Callable[..., Any]


def steps(w: Any) -> list[fx.RunStep]:
    """Steps handed to the device and not yet run, oldest first."""
    return [e for e in w.device if isinstance(e, fx.RunStep)]


def shape(step: fx.RunStep) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(row.seq, row.start, row.tokens) for row in step.rows]


def plan(w: Any) -> list[fx.RunStep]:
    """Other device work done, then one turn of the planner."""
    while w.device and not isinstance(w.device[0], fx.RunStep):
        w.run_device()
    w.send(ev.Plan())
    return steps(w)


def decoding(w: Any) -> list[fx.RunStep]:
    """All who wait have been prefilled in one step: what is in flight behind it."""
    assert len(plan(w)) == 1, "nothing behind a step that prefills"
    w.run_device()
    return plan(w)


def test_decode_rows_go_ahead_fed_by_their_own_rows(world: World, token_of: Any) -> None:
    w = world(step_depth=2)
    w.load("a", 1)
    w.submit(1, "a", n=4, prompt=5)
    w.submit(2, n=4, prompt=3)
    first, second = decoding(w)
    assert [(row.seq, row.start, len(row.tokens)) for row in first.rows] == [(1, 5, 1), (2, 3, 1)]
    assert shape(second) == [(1, 6, (fed(0),)), (2, 4, (fed(1),))]
    assert all(row.sample for row in second.rows)
    assert plan(w) == [first, second], "never more than two"
    w.run_device()
    assert plan(w)[0] is second and shape(steps(w)[1]) == [(1, 7, (fed(0),)), (2, 5, (fed(1),))]
    w.settle()
    ident = w.tokens[1][0][0]
    assert w.output(1) == [token_of(ident, 5 + i) for i in range(4)]
    assert w.output(2) == [token_of(0, 3 + i) for i in range(4)]
    stats = w.core.stats()
    assert (stats.steps, stats.steps_ahead, stats.wasted_rows) == (4, 2, 0)


def test_depth_one_waits_for_every_step(world: World) -> None:
    w = world()
    w.submit(1, n=4)
    assert len(plan(w)) == 1
    w.settle()
    assert w.core.stats().steps_ahead == 0 and len(w.output(1)) == 4


def test_what_is_known_to_end_is_not_run_again(world: World) -> None:
    w = world(step_depth=2, max_context=8)
    w.submit(1, n=2)
    w.submit(2, n=3)
    w.submit(3, n=9, prompt=5)  # the context ends it after three
    first, second = decoding(w)
    assert [row.seq for row in first.rows] == [1, 2, 3]
    assert [row.seq for row in second.rows] == [2, 3]
    w.run_device()
    assert plan(w) == [second]
    w.settle()
    assert [len(w.output(seq)) for seq in (1, 2, 3)] == [2, 3, 3]
    assert w.core.stats().wasted_rows == 0


@pytest.mark.parametrize("leave", ["stop id", "stop string", "cancel", "deadline", "row", "close"])
def test_an_end_nobody_foresaw_holds_on_until_its_last_row_is_over(
    world: World, token_of: Any, leave: str
) -> None:
    w = world(step_depth=2)
    ident = w.load("a", 1).adapter_id
    stop = (token_of(ident, 6),) if leave == "stop id" else ()
    deadline = 1.0 if leave == "deadline" else None
    w.submit(1, "a", n=9, stop_ids=stop, deadline=deadline)
    first, second = decoding(w)
    held = w.core.stats().blocks_free
    if leave == "row":
        w.device.popleft()
        failure = ev.Failure("request", "bad-logits", "injected")
        w.send(ev.StepDone(first.step, (ev.RowDone(1, -1, failure),)))
    elif leave != "stop id":
        event = {"stop string": ev.Stop(1), "cancel": ev.Cancel(1), "close": ev.Close()}
        w.now = 2.0
        w.send(event.get(leave, ev.Tick()))
    if leave != "row":
        w.run_device()
    assert 1 in w.ended, "its caller hears at once"
    assert w.core._state.seqs[1].state.value == "CLOSING" and steps(w) == [second]
    stats = w.core.stats()
    assert stats.blocks_free == held and stats.slots[0].leases == 1
    assert plan(w) == [second]
    w.run_device()
    stats = w.core.stats()
    assert 1 not in w.core._state.seqs and stats.slots[0].leases == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert w.output(1) == [token_of(ident, 5 + i) for i in range(1 + (leave == "stop id"))]
    assert stats.wasted_rows >= 1
    w.settle()
    assert not w.open


def test_a_failed_step_takes_the_one_behind_it_along(world: World) -> None:
    w = world(step_depth=2, max_step_tokens=64)
    w.submit(1, n=30, prompt=40)
    w.submit(2, n=30, prompt=20)
    first, second = decoding(w)
    w.run_device()
    third = plan(w)[1]
    w.run_device(fail="injected")
    assert {e.failure.code for e in w.ended.values() if e.failure} == {"injected"}
    assert {s.state.value for s in w.core._state.seqs.values()} == {"CLOSING"}
    failure = ev.Failure("device", "row-not-fed", "injected")
    w.device.popleft()
    w.send(ev.StepDone(third.step, tuple(ev.RowDone(r.seq, -1, failure) for r in third.rows)))
    stats = w.core.stats()
    assert (stats.blocks_cached, stats.blocks_free) == (0, stats.blocks_total)
    assert first.step < second.step < third.step and w.core.idle()


def test_a_device_that_dies_with_two_steps_in_flight(world: World) -> None:
    w = world(step_depth=2)
    w.submit(1, n=30)
    decoding(w)
    w.run_device(fail="device-dead", fatal=True)
    assert w.ended[1].failure.code == "device-dead" and plan(w)
    w.run_device(fail="device-dead", fatal=True)
    assert not plan(w) and w.core.idle()


def test_results_out_of_order_are_a_bug(world: World) -> None:
    w = world(step_depth=2)
    w.submit(1, n=9)
    _, second = decoding(w)
    with pytest.raises(InternalError):
        w.core.handle(ev.StepDone(second.step, (ev.RowDone(1, 5),)), 0.0)


# what keeps a step from being planned ahead -------------------------------------------------------
def running(w: Any, n: int = 60) -> None:
    """Sequence 1 decodes, one step of it in flight, none ahead yet."""
    w.submit(1, n=n)
    decoding(w)
    w.run_device()
    assert len(steps(w)) == 1


def test_not_before_one_who_waits(world: World) -> None:
    w = world(step_depth=2)
    running(w)
    w.submit(2, n=9)
    assert len(plan(w)) == 1
    w.run_device()
    (first,) = plan(w)
    assert [row.seq for row in first.rows] == [1, 2]
    w.run_device()
    first, second = plan(w)
    assert [row.seq for row in first.rows] == [1, 2] == [row.seq for row in second.rows]


def test_unless_there_is_no_place_for_them(world: World, token_of: Any) -> None:
    w = world(step_depth=2, max_running=2)
    w.submit(1, n=3)
    w.submit(2, n=30, stop_ids=(token_of(0, 9),))
    w.submit(3, n=2)
    w.submit(4, n=2)
    assert [len(s.rows) for s in decoding(w)] == [2, 2]
    w.run_device()
    assert len(plan(w)) == 1, "sequence 1 ends in the step that runs now"
    w.run_device()
    first = plan(w)[0]
    assert [row.seq for row in first.rows] == [2, 3]
    w.settle()
    assert [len(w.output(seq)) for seq in (1, 2, 3, 4)] == [3, 5, 2, 2]


def test_a_place_that_comes_free_unforeseen_is_waited_for_once(world: World, token_of: Any) -> None:
    w = world(step_depth=2, max_running=1)
    w.submit(1, n=30, stop_ids=(token_of(0, 7),))
    w.submit(2, n=2)
    decoding(w)
    w.run_device()
    assert len(plan(w)) == 2
    w.run_device()
    assert 1 in w.ended and len(plan(w)) == 1, "no third row for nothing"
    w.run_device()
    assert [row.seq for row in plan(w)[0].rows] == [2]


def test_not_while_a_prompt_is_unfinished(world: World) -> None:
    w = world(step_depth=2, max_step_tokens=8, mixed_step_tokens=8)
    w.submit(1, n=9, prompt=20)
    for _ in range(3):
        assert len(plan(w)) == 1
        w.run_device()
    _, second = plan(w)
    assert shape(second) == [(1, 21, (fed(0),))]


def test_not_while_samples_wait_for_their_prompt(world: World) -> None:
    w = world(step_depth=2)
    w.submit(1, n=9, prompt=20, siblings=(2, 3))
    assert len(decoding(w)) == 1, "their first step prefills"
    w.run_device()
    first, second = plan(w)
    assert len(first.rows) == len(second.rows) == 3


def test_not_before_a_commit(world: World) -> None:
    w = world(step_depth=2)
    running(w)
    w.command(ev.Load, "b", 2)
    assert len(plan(w)) == 2, "staging needs no barrier"
    w.run_device()
    w.run_stage()
    assert isinstance(w.device[-1], fx.Commit)
    assert len(plan(w)) == 1
    w.run_device()
    assert isinstance(w.device[0], fx.Commit), "no step more is between"
    w.send(ev.Plan())
    assert len(steps(w)) == 1 and w.device[0] is not steps(w)[0]
    w.run_device()
    assert len(plan(w)) == 2


def test_not_while_an_adapter_waits_for_a_slot(world: World) -> None:
    w = world(step_depth=2, max_loras=1, drain_after_s=0.0)
    w.load("a", 1)
    w.submit(1, "a", n=30)
    decoding(w)
    w.command(ev.Load, "b", 2)
    w.run_stage()
    w.run_device()
    assert len(plan(w)) == 1
    w.settle()
    assert len(w.output(1)) == 30 and w.core.stats().slots[0].name == "b"


def test_not_before_a_resize(world: World) -> None:
    w = world(step_depth=2)
    w.load("a", 1)
    running(w, n=6)
    w.command(ev.Resize, 2, 64, 9.0)
    assert len(plan(w)) == 1
    w.settle()
    assert len(w.core.stats().slots) == 2 and len(w.output(1)) == 6


def test_not_when_somebody_would_have_to_give_way(world: World) -> None:
    w = world(step_depth=2, num_blocks=4, watermark_blocks=0, prefix_cache=False)
    w.submit(1, n=30, prompt=14)
    w.submit(2, n=30, prompt=30)
    ahead = 0
    while not w.core.stats().preempted:
        before = w.core.stats().steps_ahead
        plan(w)
        ahead += w.core.stats().steps_ahead - before
        assert not (w.core.stats().preempted and len(steps(w)) == 2 and len(steps(w)[0].rows) == 2)
        w.run_device()
    assert ahead > 0
    w.settle()
    assert len(w.output(1)) == len(w.output(2)) == 30
