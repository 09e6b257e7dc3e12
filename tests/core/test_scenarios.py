"""Scenarios, each a short story told in events. The world checks every law on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import adapter_id
from rota.sched.core import effects as fx
from rota.sched.core import events as ev

World = Callable[..., Any]
Token = Callable[[int, int], int]


def run_steps(world: Any, count: int) -> None:
    for _ in range(count):
        world.send(ev.Plan())
        while world.run_device():
            pass


def test_base_request_runs_to_length(world: World, token_of: Token) -> None:
    w = world()
    w.submit(1, n=3, prompt=5)
    w.settle()
    assert w.output(1) == [token_of(0, 5), token_of(0, 6), token_of(0, 7)]
    assert (w.ended[1].reason, w.ended[1].failure) == ("length", None)


def test_stop_id_ends_as_stop_but_not_before_min_tokens(world: World, token_of: Token) -> None:
    w = world()
    w.submit(1, n=9, prompt=5, stop_ids=(token_of(0, 6),))
    w.submit(2, n=9, prompt=5, stop_ids=(token_of(0, 6),), min_tokens=4)
    w.settle()
    assert (len(w.output(1)), w.ended[1].reason) == (2, "stop")
    assert (len(w.output(2)), w.ended[2].reason) == (9, "length")


def test_context_end_is_length(world: World) -> None:
    w = world(max_context=8)
    w.submit(1, n=100, prompt=5)
    w.settle()
    assert (len(w.output(1)), w.ended[1].reason) == (3, "length")


def test_prefill_is_chunked_and_samples_once(world: World) -> None:
    w = world(max_step_tokens=4)
    w.submit(1, n=1, prompt=10)
    rows = []
    for _ in range(3):
        w.send(ev.Plan())
        rows.append(w.device[0].rows[0])
        w.run_device()
    assert [(r.start, len(r.tokens), r.sample) for r in rows] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
    ]


def test_decode_rows_come_first_and_bound_the_mixed_step(world: World) -> None:
    w = world(max_step_tokens=64, mixed_step_tokens=8)
    w.submit(1, n=50, prompt=4)
    run_steps(w, 2)
    w.submit(2, n=5, prompt=40)
    w.send(ev.Plan())
    step = w.device[0]
    assert step.rows[0].seq == 1 and len(step.rows[0].tokens) == 1
    assert sum(len(r.tokens) for r in step.rows) == 8


@pytest.mark.parametrize(
    ("kwargs", "code"),
    [
        ({"prompt": 0}, "empty-prompt"),
        ({"n": 0}, "bad-max-tokens"),
        ({"prompt": 256}, "prompt-too-long"),
        ({"adapter": "nobody"}, "unknown-adapter"),
    ],
)
def test_bad_requests_are_refused_by_name(world: World, kwargs: dict[str, Any], code: str) -> None:
    w = world()
    w.submit(1, **kwargs)
    assert w.ended[1].failure.code == code and w.ended[1].reason == "error"
    assert w.core.idle()


def test_a_request_that_never_fits_kv_is_refused(world: World) -> None:
    w = world(num_blocks=2)
    w.submit(1, n=30, prompt=8)
    assert w.ended[1].failure.code == "kv-too-small"


def test_load_serves_and_reports(world: World, token_of: Token) -> None:
    w = world()
    reply = w.load("a", 1, pin=True)
    assert (reply.outcome, reply.slot, reply.generation) == ("done", 0, 1)
    assert reply.adapter_id == adapter_id("a", 1)
    w.submit(1, "a", n=2, prompt=3)
    w.settle()
    assert w.output(1) == [token_of(reply.adapter_id, 3), token_of(reply.adapter_id, 4)]
    slot = w.core.stats().slots[0]
    assert (slot.state, slot.name, slot.pinned) == ("READY", "a", True)


def test_replace_moves_new_requests_and_lets_old_ones_finish(world: World) -> None:
    w = world()
    old = w.load("a", 1).adapter_id
    w.submit(1, "a", n=20)
    run_steps(w, 3)
    command = w.command(ev.Replace, "a", 2)
    w.run_stage()
    run_steps(w, 1)
    new = w.replies[command].adapter_id
    assert w.replies[command].outcome == "done" and new != old
    w.submit(2, "a", n=3)
    run_steps(w, 1)
    states = [s.state for s in w.core.stats().slots]
    assert states[:2] == ["DRAINING", "IN_USE"]
    w.settle()
    assert {i for i, _ in w.tokens[1]} == {old} and {i for i, _ in w.tokens[2]} == {new}
    assert [s.state for s in w.core.stats().slots][:2] == ["EMPTY", "READY"]


def test_replace_with_one_slot_waits_for_its_own_sequences_only(world: World) -> None:
    w = world(max_loras=1, drain_after_s=1.0)
    w.load("a", 1)
    w.submit(1, "a", n=10)
    run_steps(w, 2)
    command = w.command(ev.Replace, "a", 2)
    w.run_stage()
    run_steps(w, 2)
    assert command not in w.replies
    w.now += 1.0
    w.send(ev.Tick())
    assert w.core.stats().slots[0].state == "DRAINING"
    w.submit(2, "a", n=2)  # waits for the new version: the old one gives no more leases
    w.settle()
    assert w.replies[command].generation == 2
    assert {i for i, _ in w.tokens[2]} == {adapter_id("a", 2)}


def test_replace_by_equal_content_keeps_the_version(world: World) -> None:
    w = world()
    w.content = {1: "same", 2: "same"}
    w.load("a", 1)
    command = w.command(ev.Replace, "a", 2)
    w.settle()
    assert (w.replies[command].outcome, w.replies[command].generation) == ("unchanged", 1)


def test_replaces_of_one_name_keep_their_order(world: World) -> None:
    w = world()
    w.load("a", 1)
    commands = [w.command(ev.Replace, "a", source) for source in (2, 3, 4)]
    assert len(w.staging) == 1, "one name's jobs run one after the other"
    w.settle()
    assert [w.replies[c].generation for c in commands] == [2, 3, 4]


def test_a_name_that_comes_back_never_reuses_an_identity(world: World) -> None:
    w = world()
    first = w.load("a", 1).adapter_id
    w.command(ev.Unload, "a", 99.0)
    w.settle()
    second = w.load("a", 2).adapter_id
    assert second != first


def test_generations_survive_forgetting_names(world: World) -> None:
    w = world(max_remembered_generations=2)
    seen = set()
    for round_ in range(3):
        for name in "abcd":
            reply = w.load(name, 100 * round_ + ord(name))
            assert (name, reply.generation) not in seen
            seen.add((name, reply.generation))
            w.command(ev.Unload, name, 1e9)
            w.settle()


def test_failed_stage_leaves_everything_as_it_was(world: World) -> None:
    w = world()
    w.load("a", 1)
    before = (w.core.stats().slots, w.core.stats().adapters)
    command = w.command(ev.Replace, "a", 2)
    w.run_stage(fail="shape-mismatch")
    assert w.replies[command].failure.code == "shape-mismatch"
    assert (w.core.stats().slots, w.core.stats().adapters) == before
    assert not any(isinstance(e, (fx.Commit, fx.Retire)) for e in w.device)


def test_failed_commit_empties_the_slot_and_is_named(world: World) -> None:
    w = world()
    command = w.command(ev.Load, "a", 1)
    w.run_stage()
    w.run_device(fail="copy-failed")
    assert w.replies[command].failure.code == "copy-failed"
    assert w.core.stats().slots[0].state == "EMPTY"
    w.submit(1, "a")
    assert w.ended[1].failure.code == "unknown-adapter"


def test_an_idle_adapter_is_evicted_least_recently_used_first(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    w.load("b", 2)
    w.submit(1, "a", n=1)
    w.settle()
    assert w.load("c", 3).evicted == "b"
    levels = {a.name: a.level for a in w.core.stats().adapters}
    assert levels == {"a": "device", "b": "host", "c": "device"}


def test_a_cold_adapter_comes_back_from_its_host_image(world: World) -> None:
    w = world(max_loras=1)
    w.load("a", 1)
    w.load("b", 2)
    stages = w.core.stats().stages
    w.submit(1, "a", n=2)
    w.settle()
    assert w.ended[1].reason == "length" and w.core.stats().stages == stages


def test_changed_content_behind_a_cold_name_is_a_new_version(world: World) -> None:
    w = world(max_loras=1, image_cache_bytes=0)
    w.load("a", 1)
    w.load("b", 2)
    w.content[1] = "changed on disk"
    w.submit(1, "a", n=1)
    w.settle()
    assert w.tokens[1][0][0] == adapter_id("a", 2)


def test_pinned_slots_are_no_victims(world: World) -> None:
    w = world(max_loras=1)
    w.load("a", 1, pin=True)
    assert w.load("b", 2).failure.code == "POOL_FULL"
    w.command(ev.Pin, "a", False)
    assert w.load("b", 3).outcome == "done"


def test_two_promotes_cannot_take_one_slot(world: World) -> None:
    w = world(max_loras=2)
    for name, source in (("a", 1), ("b", 2), ("c", 3)):
        w.command(ev.Promote, name, source)
    while w.run_stage():
        pass
    slots = [e.slot for e in w.device if isinstance(e, fx.Commit)]
    assert sorted(slots) == [0, 1]
    w.settle()


def test_swap_waits_for_the_named_slot_only(world: World) -> None:
    w = world(max_loras=3)
    w.load("a", 1)
    w.load("b", 2)
    w.submit(1, "a", n=10)
    w.submit(2, "b", n=100)
    run_steps(w, 2)
    command = w.command(ev.Swap, "c", 3, 0)
    w.run_stage()
    assert w.core.stats().slots[0].state == "DRAINING"
    run_steps(w, 12)
    reply = w.replies[command]
    assert (reply.outcome, reply.slot) == ("done", 0) and 2 not in w.ended
    w.settle()


def test_rotate_changes_later_requests_only(world: World) -> None:
    w = world()
    ident = w.load("a", 1).adapter_id
    w.submit(1, default=True, n=10)
    run_steps(w, 2)
    w.command(ev.Rotate, "a")
    w.submit(2, default=True, n=2)
    w.settle()
    assert {i for i, _ in w.tokens[1]} == {0} and {i for i, _ in w.tokens[2]} == {ident}


@pytest.mark.parametrize("cancel_late", [False, True])
def test_unload_is_bounded_by_its_deadline(world: World, cancel_late: bool) -> None:
    w = world()
    w.load("a", 1)
    w.submit(1, "a", n=100)
    run_steps(w, 2)
    command = w.command(ev.Unload, "a", 5.0, cancel_late)
    w.submit(2, "a")
    assert w.ended[2].failure.code == "unknown-adapter", "new requests are refused at once"
    w.now = 5.0
    w.send(ev.Tick())
    assert w.replies[command].outcome == ("cancelled" if cancel_late else "still-draining")
    w.settle()
    expected = "adapter-unloaded" if cancel_late else None
    failure = w.ended[1].failure
    assert (failure.code if failure else None) == expected
    assert w.core.stats().slots[0].state == "EMPTY"


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode", "in flight", "done"])
def test_a_cancel_gives_everything_back_once(world: World, stage: str) -> None:
    w = world(max_step_tokens=4)
    w.load("a", 1)
    w.submit(1, "a", n=3, prompt=10)
    if stage == "prefill":
        run_steps(w, 1)
    elif stage == "decode":
        run_steps(w, 3)
    elif stage == "in flight":
        run_steps(w, 1)
        w.send(ev.Plan())
    elif stage == "done":
        w.settle()
    w.send(ev.Cancel(1))
    if stage == "in flight":
        assert w.core.stats().closing == 1, "its blocks are read by the step in flight"
    w.send(ev.Cancel(1))
    w.settle()
    assert w.ended[1].reason == ("length" if stage == "done" else "cancelled")
    stats = w.core.stats()
    assert (
        stats.slots[0].state == "READY"
        and stats.blocks_free + stats.blocks_cached == stats.blocks_total
    )


def test_preemption_keeps_the_version_and_the_output(world: World, token_of: Token) -> None:
    w = world(num_blocks=5, watermark_blocks=0, max_loras=2)
    ident = w.load("a", 1).adapter_id
    w.submit(1, None, n=40, prompt=16)
    w.submit(2, "a", n=40, prompt=16)
    w.settle()
    assert w.core.stats().preempted > 0
    assert w.output(1) == [token_of(0, 16 + i) for i in range(40)]
    assert w.output(2) == [token_of(ident, 16 + i) for i in range(40)]


def test_a_recurrent_model_starts_preempted_sequences_again_from_nothing(
    world: World, token_of: Token
) -> None:
    w = world(num_blocks=9, watermark_blocks=0, max_loras=2, max_running=3, recurrent=True)
    ident = w.load("a", 1).adapter_id
    for seq in range(1, 7):
        w.submit(seq, "a" if seq % 2 else None, n=40, prompt=20)
    w.settle()
    stats = w.core.stats()
    assert stats.preempted > 0 and stats.blocks_cached == 0
    for seq in range(1, 7):
        assert w.output(seq) == [token_of(ident if seq % 2 else 0, 20 + i) for i in range(40)]
    assert not w.states


def test_lanes_take_turns_so_a_busy_adapter_starves_nobody(world: World) -> None:
    w = world(max_running=1)
    w.load("a", 1)
    for seq in range(1, 11):
        w.submit(seq, "a", n=1)
    w.submit(11, None, n=1)
    w.settle()
    order = list(w.ended)
    assert order.index(11) <= 1


def test_failed_miss_is_named_and_backs_off(world: World) -> None:
    w = world(failure_backoff_s=1.0)
    w.command(ev.Register, "a", 1)
    w.submit(1, "a")
    w.send(ev.Plan())
    w.run_stage(fail="rank-exceeds-pool")
    assert w.ended[1].failure.code == "rank-exceeds-pool"
    w.submit(2, "a")
    assert w.ended[2].failure.code == "rank-exceeds-pool" and not w.staging
    w.now += 1.0
    w.submit(3, "a", n=1)
    w.settle()
    assert w.ended[3].reason == "length"


def test_one_bad_adapter_does_not_block_the_good_one(world: World) -> None:
    w = world(max_loras=1)
    w.command(ev.Register, "bad", 1)
    w.command(ev.Register, "good", 2)
    w.submit(1, "bad")
    w.submit(2, "good", n=2)
    w.send(ev.Plan())
    bad = next(i for i, s in w.staging.items() if s.name == "bad")
    w.run_stage(bad, fail="shape-mismatch")
    w.settle()
    assert w.ended[2].reason == "length" and w.ended[1].failure.code == "shape-mismatch"


def test_swapped_in_adapters_are_not_thrown_out_before_they_serve(world: World) -> None:
    w = world(max_loras=1, drain_after_s=0.0)
    w.command(ev.Register, "a", 1)
    w.command(ev.Register, "b", 2)
    for seq in range(1, 9):
        w.submit(seq, "ab"[seq % 2], n=3)
    w.settle(limit=500)
    assert len(w.ended) == 8 and w.core.stats().commits <= 8


def test_limits_are_named(world: World) -> None:
    w = world(max_waiting=1, max_running=1, max_names=1, max_commands=2)
    w.submit(1, n=5)
    w.submit(2, n=5)
    assert w.ended[2].failure.code == "QUEUE_FULL" and w.ended[2].failure.retry_after_s > 0
    w.command(ev.Load, "a", 1)
    assert w.replies[w.command(ev.Load, "b", 2)].failure.code == "QUEUE_FULL"
    w.command(ev.Replace, "a", 3)
    assert w.replies[w.command(ev.Replace, "a", 4)].failure.code == "QUEUE_FULL"
    w.settle()


def test_time_never_goes_back(world: World) -> None:
    w = world()
    w.now = 10.0
    w.submit(1, n=100, deadline=11.0)
    run_steps(w, 1)
    w.now = 3.0
    w.send(ev.Tick())
    assert 1 not in w.ended
    w.now = 11.0
    w.send(ev.Tick())
    assert w.ended[1].reason == "deadline"


def test_stories_tell_what_happened(world: World) -> None:
    w = world()
    w.load("a", 1)
    w.submit(1, "a", n=2)
    w.settle()
    assert any("ended: length" in line for line in w.core.story("seq 1"))
    assert any("READY -lease-> IN_USE" in line for line in w.core.story("slot 0"))
    assert any("committed -> DONE" in line for line in w.core.story("adapter a"))
