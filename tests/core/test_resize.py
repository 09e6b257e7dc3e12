"""Resizing the pool: a made global barrier, named refusals that change nothing, residents back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rota.sched.config import EngineConfig
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.core.resize import MAX_RANK, MAX_SLOTS, RESIZE_TABLE, ResizeState

World = Callable[..., Any]


def resize(w: Any, slots: int, rank: int = 64, patience: float = 100.0) -> int:
    return int(w.command(ev.Resize, slots, rank, w.now + patience))


def step(w: Any) -> None:
    w.send(ev.Plan())
    w.now += 0.1
    while w.device and not isinstance(w.device[0], fx.Relayout):
        w.run_device()


def shape(w: Any) -> list[tuple[str, str | None, bool]]:
    return [(s.state, s.name, s.pinned) for s in w.core.stats().slots]


def test_it_waits_for_what_runs_and_nothing_new_starts(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    w.submit(1, "a", n=4)
    step(w)
    command = resize(w, 3)
    w.submit(2, "a", n=2)
    w.submit(3, n=2)
    for _ in range(3):
        assert not any(isinstance(job, fx.Relayout) for job in w.device)
        step(w)
    assert w.ended[1].reason == "length" and w.output(2) == w.output(3) == []
    assert isinstance(w.device[0], fx.Relayout) and command not in w.replies
    w.settle()
    assert w.replies[command].outcome == "resized"
    assert w.ended[2].reason == w.ended[3].reason == "length"
    assert shape(w)[0][:2] == ("READY", "a") and len(shape(w)) == 3


def test_the_version_stays_the_same_and_comes_back_from_its_host_image(world: World) -> None:
    w = world(max_loras=2)
    before = w.load("a", 1).adapter_id
    stages = w.core.stats().stages
    resize(w, 5)
    w.settle()
    assert w.core.stats().slots[0].adapter_id == before
    assert w.core.stats().stages == stages, "same rank: one copy"


def test_another_rank_stages_residents_again_and_drops_old_images(world: World) -> None:
    w = world(max_loras=2)
    before = w.load("a", 1).adapter_id
    old = set(w.images)
    command = resize(w, 2, 16)
    w.settle()
    assert w.replies[command].outcome == "resized" and not old & set(w.images)
    assert w.core.stats().slots[0].adapter_id == before
    assert w.core.pool_shape == (2, 16)


def test_pinned_come_back_first_and_pinned(world: World) -> None:
    w = world(max_loras=3)
    w.load("a", 1, pin=True)
    for source, name in ((2, "b"), (3, "c")):
        w.load(name, source)
    w.submit(1, "b", n=1)
    w.settle()
    resize(w, 2)
    w.settle()
    assert sorted(shape(w)) == [("READY", "a", True), ("READY", "b", False)]
    w.submit(2, "c", n=1)
    w.settle()
    assert w.ended[2].reason == "length"


def test_what_runs_too_long_refuses_it_by_name_and_all_goes_on(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    w.submit(1, "a", n=30)
    step(w)
    command = resize(w, 3, patience=0.5)
    w.submit(2, n=1)
    w.command(ev.Register, "b", 2)
    w.submit(3, "b", n=1)
    assert not w.staging
    assert w.core.next_wake() == pytest.approx(w.now + 0.5)
    w.now += 0.6
    w.send(ev.Tick())
    failure = w.replies[command].failure
    assert (failure.code, failure.kind) == ("resize-timeout", "capacity")
    assert w.staging, "what waited goes on"
    w.settle()
    assert {w.ended[s].reason for s in (1, 2, 3)} == {"length"} and len(shape(w)) == 2


def test_a_preempted_sequence_finishes_before_the_barrier(world: World) -> None:
    w = world(max_loras=1, num_blocks=6, watermark_blocks=0)
    w.load("a", 1)
    w.submit(1, "a", n=40, prompt=30)
    w.submit(2, "a", n=40, prompt=30)
    while w.core.stats().preempted == 0:
        step(w)
    command = resize(w, 2)
    w.submit(3, "a", n=1)
    w.settle()
    assert w.replies[command].outcome == "resized"
    assert {w.ended[s].reason for s in (1, 2, 3)} == {"length"}


@pytest.mark.parametrize(
    ("slots", "rank", "code"),
    [
        (0, 64, "bad-resize"),
        (5000, 64, "bad-resize"),
        (1, 1025, "bad-resize"),
        (1, 0, "bad-resize"),
        (1, 64, "pinned-do-not-fit"),
        (3, 4, "resident-rank-too-large"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_touched(
    world: World, slots: int, rank: int, code: str
) -> None:
    w = world(max_loras=3)
    w.load("a", 1, pin=True)
    w.load("b", 2, pin=True)
    before = shape(w)
    assert w.replies[resize(w, slots, rank)].failure.code == code
    assert w.core.idle() and shape(w) == before


def test_lora_off_and_one_at_a_time(world: World) -> None:
    w = world(max_loras=0)
    assert w.replies[resize(w, 3)].failure.code == "lora-off"
    w = world(max_loras=1)
    first, second = resize(w, 2), resize(w, 3)
    assert w.replies[second].failure.code == "resize-in-progress"
    w.settle()
    assert w.replies[first].outcome == "resized"


def test_a_device_that_refuses_keeps_the_old_pool(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1, pin=True)
    before, stages = shape(w), w.core.stats().stages
    command = resize(w, 4, 16)
    assert w.run_device(fail="pool-too-large")
    assert w.replies[command].failure.code == "pool-too-large"
    assert shape(w) == before and w.core.pool_shape == (2, 64)
    w.submit(1, "a", n=2)
    w.settle()
    assert w.ended[1].reason == "length" and w.core.stats().stages == stages


def test_unload_and_pin_wait_out_the_exchange(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    command = resize(w, 3)
    for make, more in ((ev.Unload, (w.now + 1,)), (ev.Pin, (True,))):
        failure = w.replies[w.command(make, "a", *more)].failure
        assert failure.code == "resizing" and failure.retry_after_s > 0
    w.settle()
    assert w.replies[command].outcome == "resized"


def test_a_swap_into_a_slot_that_is_gone_is_named(world: World) -> None:
    w = world(max_loras=3)
    w.load("a", 1)
    command = resize(w, 2)
    swap = w.command(ev.Swap, "a", 5, 2)
    w.settle()
    assert w.replies[command].outcome == "resized"
    assert w.replies[swap].failure.code == "bad-slot"


def test_a_replacement_that_never_ends_does_not_keep_the_resident_away(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    command = resize(w, 3)
    replace = w.command(ev.Replace, "a", 2)
    while w.run_device():
        pass
    assert w.replies[command].outcome == "resized" and len(w.staging) == 1
    w.submit(1, "a", n=1)
    step(w)
    assert w.ended[1].reason == "length" and replace not in w.replies
    w.settle()
    assert w.replies[replace].outcome == "done"


@pytest.mark.parametrize("when", ["draining", "rebuilding", "refilling"])
@pytest.mark.parametrize("how", ["close", "dead", "cancel"])
def test_its_end_at_any_phase(world: World, when: str, how: str) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    if when == "draining":
        w.submit(1, "a", n=20)
        step(w)
        w.send(ev.Plan())
    command = resize(w, 3, 16)
    if when == "refilling":
        w.run_device()
    assert w.core._state.resize.state is ResizeState[when.upper()]
    if how == "cancel":
        w.send(ev.CancelCommand(command))
        w.settle()
        assert len(shape(w)) == 3 and command not in w.replies
        return
    if how == "close":
        w.send(ev.Close())
        assert w.replies[command].failure.code == "engine-closed"
        while w.run_stage(fail="stage-cancelled") or w.run_device():
            pass
        assert w.closed
        return
    if when == "refilling":
        w.run_stage()
    w.run_device(fail="device-dead", fatal=True)
    assert w.replies[command].failure.code == "device-dead"
    assert w.core.idle() or w.staging or w.device


def test_every_state_but_the_last_two_has_a_way_out() -> None:
    left = {state for state, _ in RESIZE_TABLE}
    assert set(ResizeState) - left == {ResizeState.DONE, ResizeState.REFUSED}


def test_a_pool_is_resized_within_what_an_engine_starts_with() -> None:
    most = {"max_loras": MAX_SLOTS, "max_lora_rank": MAX_RANK}
    msgspec.convert(most, EngineConfig)
    for name in most:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(most | {name: most[name] + 1}, EngineConfig)


def test_what_the_old_pool_could_not_hold_is_tried_again_in_the_new_one(world: World) -> None:
    w = world(max_loras=1)
    w.load("a", 1)
    w.command(ev.Register, "b", 2)
    w.submit(1, "b", n=2)
    w.send(ev.Plan())
    assert w.run_stage(fail="rank-too-large")
    w.submit(2, "b", n=2)
    assert w.ended[1].failure.code == w.ended[2].failure.code == "rank-too-large"
    resize(w, 2, 128)
    w.settle()
    w.submit(3, "b", n=2)
    w.settle()
    assert w.now < 1.0, "a failure is remembered longer than all this took"
    assert w.ended[3].reason == "length"


def test_a_pinned_one_that_does_not_come_back_is_no_success(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1, pin=True)
    w.load("b", 2)
    command = resize(w, 2, 16)
    w.run_device()
    stages = {job.name: stage for stage, job in w.staging.items()}
    w.run_stage(stages["a"], fail="adapter-unreadable")
    assert command not in w.replies
    w.settle()
    failure = w.replies[command].failure
    assert (failure.code, failure.kind) == ("pinned-not-back", "reject")
    assert (failure.subject, failure.found) == ("a", "adapter-unreadable")
    assert [s.name for s in w.core.stats().slots if s.name] == ["b"]
    # Who was not pinned may be lost.
    command = resize(w, 2, 32)
    w.run_device()
    w.run_stage(fail="adapter-unreadable")
    w.settle()
    assert w.replies[command].outcome == "resized"


def annexes(w: Any, **sizes: int) -> None:
    w.annex |= {f"digest-{name[1:]}": size for name, size in sizes.items()}


def test_the_new_arena_keeps_a_place_for_each_that_was_pinned(world: World) -> None:
    w = world(max_loras=3, arena_bytes=100)
    annexes(w, s1=5, s2=5, s3=45)
    for name, source, pin in (("a", 1, False), ("b", 2, True), ("c", 3, True)):
        w.load(name, source, pin=pin)
    command = resize(w, 3, 128)
    assert [(r.name, r.pinned) for r in w.device[0].residents] == [
        ("c", True),
        ("b", True),
        ("a", False),
    ]
    annexes(w, s1=10, s2=10, s3=90)
    w.run_device()
    stages = {job.name: stage for stage, job in w.staging.items()}
    # The one that is not pinned is there first, and is in nobody's way.
    for name in ("a", "b", "c"):
        w.run_stage(stages[name])
        while w.run_device():
            pass
    w.settle()
    assert w.replies[command].outcome == "resized"
    assert sorted(s.name for s in w.core.stats().slots if s.pinned) == ["b", "c"]
    assert w.core.stats().arena.used == 100


def test_what_is_kept_goes_with_its_job(world: World) -> None:
    w = world(max_loras=2, arena_bytes=100)
    annexes(w, s1=60, s2=80, s7=30, s8=80)
    w.load("a", 1, pin=True)
    command = resize(w, 2, 16)
    w.run_device()
    w.content[1] = "digest-7"  # its directory has changed since
    load = w.command(ev.Load, "b", 2)
    w.run_stage(list(w.staging)[1])
    refused = w.replies[load].failure
    assert (refused.code, refused.found) == ("POOL_FULL", "pinned bytes of a: 60"), "on its way"
    assert refused.retry_after_s > 0
    w.settle()
    assert w.replies[command].outcome == "resized"
    assert w.core.stats().arena.used == 30, "of another size by now"
    command = resize(w, 2, 32)
    w.run_device()
    w.run_stage(fail="adapter-unreadable")
    assert w.replies[command].failure.code == "pinned-not-back"
    w.load("b", 8)
    assert w.core.stats().arena.used == 80


def test_an_annex_is_of_the_layout_its_image_was_made_for(world: World) -> None:
    w = world(max_loras=1, arena_bytes=100)
    annexes(w, s1=80, s2=100)
    w.load("a", 1)
    annexes(w, s1=20)
    resize(w, 1, 8)
    w.settle()
    assert w.core.stats().arena.used == 20
    stages = w.core.stats().stages
    w.load("b", 2)
    w.submit(1, "a", n=1)  # again, from its host image
    w.settle()
    assert w.core.stats().arena.used == 20 and w.core.stats().stages == stages + 1
