"""What one job's failure or wait may do to others: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rota.sched.core import effects as fx
from rota.sched.core import events as ev

World = Callable[..., Any]


def _commit_in_flight(w: Any) -> None:
    while not any(isinstance(e, fx.Commit) for e in w.device):
        w.run_stage()
        w.send(ev.Plan())


def test_an_unload_is_answered_when_the_commit_it_waits_for_fails(world: World) -> None:
    w = world()
    w.command(ev.Load, "a", 1)
    _commit_in_flight(w)
    unload = w.command(ev.Unload, "a", w.now + 100.0)
    w.run_device(fail="boom")
    w.send(ev.Tick())
    assert w.replies[unload].outcome == "unloaded"


def test_a_bad_replacement_does_not_end_requests_for_the_good_version(world: World) -> None:
    w = world(max_loras=1)
    w.load("a", 1)
    w.load("b", 2)  # evicts a, which stays known
    w.submit(1, "b", n=30)
    w.send(ev.Plan())
    replace = w.command(ev.Replace, "a", 3)
    w.submit(2, "a", n=2)
    w.send(ev.Plan())
    w.run_stage(fail="shape-mismatch")
    w.settle()
    assert w.replies[replace].outcome == "failed"
    assert (w.ended[2].reason, w.ended[2].failure) == ("length", None)
    assert w.core.stats().adapters[0].generation == 1


def test_the_default_never_dangles_when_its_first_load_fails(world: World) -> None:
    w = world()
    w.command(ev.Load, "a", 1)
    w.command(ev.Rotate, "a")
    w.run_stage(fail="shape-mismatch")
    assert w.core.stats().default_adapter == "a"
    w.submit(1, default=True)
    w.settle()
    assert w.ended[1].failure.code == "shape-mismatch", "named by its cause, not unknown"
    w.now += 10.0
    w.submit(2, default=True, n=2)
    w.settle()
    assert w.ended[2].reason == "length", "and tried again after the back-off"


def test_a_pinned_slot_that_is_being_unloaded_is_waited_for(world: World) -> None:
    w = world(max_loras=1)
    w.load("a", 1, pin=True)
    w.submit(1, "a", n=5)
    w.send(ev.Plan())
    w.command(ev.Unload, "a", w.now + 100.0)
    load = w.command(ev.Load, "b", 2)
    w.settle()
    assert w.replies[load].outcome == "done"


def test_deadlines_of_ended_requests_are_forgotten(world: World) -> None:
    w = world(max_waiting=5)
    w.submit(3000, n=1, deadline=1e8)
    for seq in range(2000):
        w.submit(seq, n=1, deadline=1e9)
        w.send(ev.Cancel(seq))
    assert len(w.core._state._deadlines) < 200


def test_a_drain_taken_by_an_earlier_job_is_made_good(world: World) -> None:
    """b waits first and drains the long one; c drains the short one, which empties first and goes
    to b. The long slot then drains for c: it must not serve anybody in between."""
    w = world(max_loras=2, drain_after_s=0.5, max_running=8)
    w.load("long", 1)
    w.load("short", 2)
    w.submit(1, "long", n=40)
    w.submit(2, "short", n=12)
    w.send(ev.Plan())
    w.run_device()
    w.command(ev.Load, "b", 3)
    w.run_stage()
    w.now = 0.6
    w.send(ev.Tick())
    w.now = 0.7
    w.command(ev.Load, "c", 4)
    w.run_stage()
    w.now = 1.3
    w.send(ev.Tick())
    assert [s.state for s in w.core.stats().slots] == ["DRAINING"] * 2
    while not any(s.name == "b" for s in w.core.stats().slots):
        w.send(ev.Plan())
        w.run_device()
    assert w.core.stats().slots[0].state == "DRAINING", "now for c, without a gap"
    assert w.core.stats().drained == 2


def test_a_dropped_commit_never_lends_its_identity_to_the_next_version(world: World) -> None:
    w = world()
    w.load("a", 1)
    w.command(ev.Replace, "a", 2)
    _commit_in_flight(w)
    orphan = next(e.adapter_id for e in w.device if isinstance(e, fx.Commit))
    w.command(ev.Unload, "a", w.now + 1.0)
    w.settle()
    reply = w.load("a", 3)
    assert reply.adapter_id != orphan


def test_a_name_whose_only_jobs_failed_is_forgotten(world: World) -> None:
    w = world()
    w.command(ev.Load, "a", 1)
    w.command(ev.Replace, "a", 2)
    w.run_stage(fail="shape-mismatch")
    w.run_stage(fail="shape-mismatch")
    w.settle()
    assert w.core.stats().adapters == ()
    assert w.load("a", 3).outcome == "done"


def test_cold_adapters_in_numbers_hold_few_images_and_are_all_served(world: World) -> None:
    """Each staged adapter that waits for a slot holds an image: only so many are in hand."""
    w = world(max_loras=2, image_cache_bytes=0, spare_jobs=3, drain_after_s=0.0, num_blocks=256)
    for index in range(60):
        w.command(ev.Register, f"a{index}", index)
        w.submit(index, f"a{index}", n=3)
    most = 0
    w.send(ev.Plan())
    for _ in range(10_000):
        most = max(most, len(w.staging) + len(w.images))
        if not (w.run_stage() or w.run_device()):
            w.send(ev.Plan())
            if w.core.idle():
                break
    assert most <= 2 * 2 + 3
    assert all(w.ended[i].reason == "length" for i in range(60))


def test_a_command_is_taken_up_before_misses_that_wait(world: World) -> None:
    w = world(max_loras=1, spare_jobs=0)
    for index in range(10):
        w.command(ev.Register, f"a{index}", index)
        w.submit(index, f"a{index}", n=2)
    w.send(ev.Plan())
    w.command(ev.Prefetch, "urgent", 99)
    started = []
    take = w._take
    w._take = lambda e: (started.append(e.name) if isinstance(e, fx.StartStage) else None, take(e))
    w.settle()
    assert len(started) == 9 and started[0] == "urgent", "two were in hand already"


def test_unloading_a_name_that_waits_behind_others_leaves_nothing(world: World) -> None:
    w = world(max_loras=1, spare_jobs=0)
    for index in range(6):
        w.command(ev.Register, f"a{index}", index)
        w.submit(index, f"a{index}", n=2)
    w.send(ev.Plan())
    w.command(ev.Unload, "a5", w.now + 1.0)
    assert w.ended[5].failure.code == "adapter-unloaded"
    w.settle()
    assert all(w.ended[i].reason == "length" for i in range(5))
    assert w.core.stats().jobs == 0
