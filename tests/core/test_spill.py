"""Preemption by spill: when it is chosen, what is copied, and every way it can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import effects as fx
from rota.sched.core import events as ev

World = Callable[..., Any]
TIGHT: dict[str, Any] = {
    "num_blocks": 9,
    "watermark_blocks": 0,
    "max_step_tokens": 256,
    "spill_blocks": 8,
    "spill_fixed_cost": 0.0,
    "prefix_cache": False,
}


def two(w: Any, adapter: str | None = None) -> None:
    """Sequences 1 and 2, which do not fit side by side to their ends."""
    w.submit(1, adapter, n=60, prompt=40)
    w.send(ev.Submit(2, tuple(range(500, 540)), adapter, False, 60))


def until(w: Any, kind: type) -> Any:
    """Run up to the next effect of ``kind`` that waits for the device, and return it."""
    for _ in range(300):
        while w.device and not isinstance(w.device[0], kind):
            w.run_device()
        if w.device:
            return w.device[0]
        w.send(ev.Plan())
    raise AssertionError(f"no {kind.__name__}")


def state(w: Any, seq: int) -> str:
    return w.core._state.seqs[seq].state.value  # type: ignore[no-any-return]  # the fixture is Any


def test_a_spilled_sequence_goes_on_where_it_was(world: World) -> None:
    w = world(**TIGHT)
    old = w.load("a", 1).adapter_id
    two(w, "a")
    spill = until(w, fx.Spill)
    assert spill.seq == 2 and state(w, 2) == "SPILLING"
    computed = w.core._state.seqs[2].host_tokens
    assert len(spill.blocks) == -(-computed // 16) and w.core.stats().spill_blocks_used > 0
    assert w.core.stats().slots[0].leases == 2, "the lease is kept"
    w.run_device()
    assert state(w, 2) == "SPILLED"
    restore = until(w, fx.Restore)
    assert [i for i, _ in restore.places] == list(range(len(spill.blocks)))
    assert state(w, 2) == "RESTORING"
    w.send(ev.Plan())
    assert not any(isinstance(e, fx.RunStep) and e.rows[0].seq == 2 for e in w.device)
    w.run_device()
    w.send(ev.Plan())
    (step,) = (e for e in w.device if isinstance(e, fx.RunStep))
    row = next(r for r in step.rows if r.seq == 2)
    assert (row.start, len(row.tokens), row.sample) == (computed, 1, True)
    w.settle()
    assert len(w.output(2)) == 60 and {ident for ident, _ in w.tokens[2]} == {old}
    stats = w.core.stats()
    assert stats.spilled == stats.preempted == 1 and stats.spill_blocks_used == 0


@pytest.mark.parametrize(
    ("config", "spilled"),
    [
        ({}, 1),
        ({"spill_blocks": 0}, 0),
        ({"spill_blocks": 2}, 0),
        ({"spill_fixed_cost": 200.0}, 0),
        ({"spill_block_cost": 17.0}, 0),
    ],
)
def test_the_cheaper_way_that_has_room_is_taken(
    world: World, config: dict[str, Any], spilled: int
) -> None:
    w = world(**{**TIGHT, **config})
    two(w)
    w.settle()
    assert w.core.stats().preempted >= 1 and w.core.stats().spilled == spilled
    assert len(w.output(1)) == len(w.output(2)) == 60


def test_what_the_prefix_cache_still_has_is_not_copied_back(world: World) -> None:
    w = world(**{**TIGHT, "prefix_cache": True, "num_blocks": 11})
    two(w)
    spill = until(w, fx.Spill)
    restore = until(w, fx.Restore)
    kept = len(spill.blocks) - len(restore.places)
    assert kept > 0 and restore.places[0][0] == kept
    w.settle()
    assert len(w.output(2)) == 60


@pytest.mark.parametrize("kind", [fx.Spill, fx.Restore])
def test_a_copy_that_fails_costs_a_recompute_and_no_answer(world: World, kind: type) -> None:
    w = world(**TIGHT)
    two(w)
    until(w, kind)
    w.run_device(fail="copy-failed")
    assert state(w, 2) == "WAITING" and w.core.stats().spill_blocks_used == 0
    w.settle()
    assert len(w.output(2)) == 60 and w.ended[2].reason == "length"


@pytest.mark.parametrize("kind", [fx.Spill, fx.Restore])
def test_a_device_that_dies_in_a_copy_ends_everything_by_name(world: World, kind: type) -> None:
    w = world(**TIGHT)
    two(w)
    until(w, kind)
    w.run_device(fail="device-dead", fatal=True)
    w.settle()
    assert {e.failure.code for e in w.ended.values() if e.failure} == {"device-dead"}
    assert w.core.idle() and w.core.stats().spill_blocks_used == 0


@pytest.mark.parametrize("when", ["SPILLING", "SPILLED", "RESTORING"])
def test_cancelled_at_any_state_it_gives_all_back_once(world: World, when: str) -> None:
    w = world(**TIGHT)
    w.load("a", 1)
    two(w, "a")
    until(w, fx.Restore if when == "RESTORING" else fx.Spill)
    if when == "SPILLED":
        w.run_device()
    assert state(w, 2) == when
    w.send(ev.Cancel(2))
    assert w.ended[2].reason == "cancelled"
    if when != "SPILLED":
        assert state(w, 2) == "CLOSING", "the copy is in flight"
        assert w.core.stats().slots[0].leases >= 1
    w.settle()
    stats = w.core.stats()
    assert stats.spill_blocks_used == 0 and not any(s.leases for s in stats.slots)
    assert not w.host and not w.open


@pytest.mark.parametrize("kind", [fx.Spill, fx.Restore])
def test_closing_waits_for_the_copy(world: World, kind: type) -> None:
    w = world(**TIGHT)
    two(w)
    until(w, kind)
    w.send(ev.Close())
    assert not w.closed
    w.settle()
    assert w.closed and not w.open and not w.host


def test_the_slot_of_a_spilled_sequence_is_nobodys_victim(world: World) -> None:
    w = world(**{**TIGHT, "max_loras": 1, "drain_after_s": 0.0})
    w.load("a", 1)
    two(w, "a")
    until(w, fx.Spill)
    w.run_device()
    w.command(ev.Register, "b", 2)
    w.submit(3, "b", n=2)
    w.settle()
    assert len({ident for ident, _ in w.tokens[2]}) == 1 and len(w.output(2)) == 60
    assert len(w.output(3)) == 2


def test_a_prefill_that_an_earlier_row_preempted_is_not_planned(world: World) -> None:
    w = world(**{**TIGHT, "num_blocks": 12, "max_step_tokens": 81})
    two(w)
    assert len(until(w, fx.Spill).blocks) == 6
    w.run_device()
    assert w.core._state.seqs[2].host_tokens == 96, "its next token needs another block"
    w.send(ev.Submit(3, tuple(range(900, 995)), None, False, 4))
    until(w, fx.Restore)
    assert state(w, 3) == "PREFILL", "took the last block behind the one that comes back"
    while w.device:
        w.run_device()
    w.send(ev.Plan())
    (step,) = (e for e in w.device if isinstance(e, fx.RunStep))
    assert [r.seq for r in step.rows] == [2] and state(w, 3) in ("WAITING", "SPILLING")
    w.settle()
    assert len(w.output(2)) == 60 and len(w.output(3)) == 4
