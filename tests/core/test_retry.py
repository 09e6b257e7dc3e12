"""When to come back, and that a cold adapter's promotion waits for no planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import effects as fx
from rota.sched.core import events as ev

World = Callable[..., Any]


def step(w: Any, seconds: float) -> None:
    """Plan, and finish the step ``seconds`` later."""
    w.send(ev.Plan())
    w.now += seconds
    while w.run_device():
        pass


def refused(w: Any, seq: int) -> Any:
    w.submit(seq)
    return w.ended[seq].failure


def test_a_full_queue_says_the_shortest_lease_left_before_anything_ended(world: World) -> None:
    w = world(max_waiting=1, max_running=2)
    w.submit(1, n=40)
    step(w, 0.5)
    w.submit(2, n=12)
    step(w, 0.5)
    w.submit(3)
    failure = refused(w, 4)
    # Eleven tokens of the second are left, at half a second a step.
    assert (failure.code, failure.retry_after_s) == ("QUEUE_FULL", pytest.approx(5.5))


def test_a_full_queue_says_the_mean_time_between_ends(world: World) -> None:
    w = world(max_waiting=1, max_running=1)
    for seq in range(1, 5):
        w.submit(seq, n=1)
        step(w, 2.0)
    assert w.now == 8.0 and len(w.ended) == 4
    w.submit(10, n=50)
    step(w, 0.25)
    w.submit(11)
    assert refused(w, 12).retry_after_s == pytest.approx((8.25 - 2.0) / 4)
    w.now += 4.0
    assert refused(w, 13).retry_after_s == pytest.approx((12.25 - 2.0) / 4), "a stall shows"


def test_hints_have_bounds_and_a_first_guess(world: World) -> None:
    w = world(max_waiting=1, max_running=1)
    w.submit(1)
    assert refused(w, 2).retry_after_s == 1.0
    step(w, 1e-6)
    w.submit(3)
    assert refused(w, 4).retry_after_s == 0.05
    w.settle()
    w.now += 1e6
    w.submit(5)
    w.submit(6)
    assert w.ended[6].failure.retry_after_s == 60.0


def test_a_pinned_pool_says_when_its_first_slot_is_idle(world: World) -> None:
    w = world(max_loras=2)
    for source, name in enumerate("ab"):
        w.load(name, source, pin=True)
    w.submit(1, "a", n=30)
    w.submit(2, "b", n=10)
    w.submit(3, "b", n=6)
    for _ in range(20):
        step(w, 0.5)
        if len(w.output(1)) == 4:
            break
    command = w.command(ev.Load, "c", 9)
    w.run_stage()
    failure = w.replies[command].failure
    # Slot 1 is idle first: six tokens of sequence 2 are left.
    assert failure.code == "POOL_FULL"
    assert failure.retry_after_s == pytest.approx(6 * w.core._state.progress.step_s)
    w.settle()


def test_commands_say_the_mean_time_between_answers(world: World) -> None:
    w = world(max_commands=1)
    for source in range(4):
        command = w.command(ev.Load, f"n{source}", source)
        w.now += 3.0
        w.settle()
        assert w.replies[command].outcome in ("done", "failed")
    w.command(ev.Load, "x", 8)
    failure = w.replies[w.command(ev.Load, "y", 9)].failure
    assert (failure.code, failure.retry_after_s) == ("QUEUE_FULL", pytest.approx(9.0 / 4))


def test_a_failed_adapter_says_what_is_left_of_its_back_off(world: World) -> None:
    w = world(failure_backoff_s=4.0)
    w.command(ev.Register, "bad", 1)
    w.submit(1, "bad")
    w.run_stage(fail="shape-mismatch")
    assert w.ended[1].failure.code == "shape-mismatch"
    w.now += 1.5
    w.submit(2, "bad")
    failure = w.ended[2].failure
    assert (failure.code, failure.retry_after_s) == ("shape-mismatch", pytest.approx(2.5))
    w.now += 2.5
    w.submit(3, "bad")
    assert 3 not in w.ended and w.run_stage()
    w.settle()
    assert w.ended[3].reason == "length"


def test_a_miss_stages_when_the_request_arrives_though_the_batch_is_full(world: World) -> None:
    w = world(max_running=1)
    w.submit(1, n=50)
    step(w, 0.1)
    w.command(ev.Register, "cold", 1)
    w.submit(2, "cold", n=1)
    assert [job.name for job in w.staging.values()] == ["cold"]
    w.submit(3, "cold", n=1)
    assert len(w.staging) == 1
    w.run_stage()
    assert any(isinstance(job, fx.Commit) for job in w.device)
    w.settle()
    assert {w.ended[s].reason for s in (1, 2, 3)} == {"length"}
    assert w.core.stats().stages == 1


def test_a_miss_of_the_default_stages_when_the_request_arrives(world: World) -> None:
    w = world(max_running=1)
    w.submit(1, n=5)
    step(w, 0.1)
    w.command(ev.Register, "cold", 1)
    w.command(ev.Rotate, "cold")
    w.submit(2, default=True, n=1)
    assert [job.name for job in w.staging.values()] == ["cold"]
    w.settle()


def test_a_preempted_sequence_is_not_held_up_by_its_lanes_miss(world: World) -> None:
    """The name's next version is cold; what was preempted still runs on the one it leased."""
    w = world(max_loras=1, num_blocks=6, watermark_blocks=0, drain_after_s=0.0)
    w.load("a", 1)
    w.submit(1, "a", n=40, prompt=30)
    w.submit(2, "a", n=40, prompt=30)
    for _ in range(12):
        step(w, 0.1)
    w.command(ev.Register, "b", 2)
    w.submit(3, "b", n=1)
    w.submit(4, "a", n=1)
    w.settle()
    assert {w.ended[s].reason for s in (1, 2, 3, 4)} == {"length"}
