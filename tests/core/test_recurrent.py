"""Models with recurrent state: snapshots behind cached prefixes, states that spill, who frees what.

The world's device keeps each state as the version and tokens it has seen, and refuses a row that
does not begin with exactly the state of the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import effects as fx
from rota.sched.core import events as ev

World = Callable[..., Any]

MODEL: dict[str, Any] = {"recurrent": True, "snapshots": 4, "snapshot_tokens": 64}


def ask(w: Any, seq: int, prompt: int = 40, n: int = 2, first: int = 0, **more: Any) -> None:
    """A prompt of ``prompt`` tokens that count from ``first``."""
    adapter = more.pop("adapter", None)
    w.send(ev.Submit(seq, tuple(range(first, first + prompt)), adapter, False, n, **more))


def chunks(rows: tuple[fx.Row, ...]) -> list[tuple[int, int, int, int, int]]:
    return [(r.seq, r.start, len(r.tokens), r.load, r.save) for r in rows]


def kept(w: Any) -> int:
    return int(w.core.stats().snapshots_kept)


def test_chunks_end_at_boundaries_and_leave_a_snapshot_there(world: World) -> None:
    w = world(**MODEL)
    ask(w, 1, prompt=100, n=40)
    # 64 tokens, then the last full block short of the prompt's last token, then the rest.
    assert chunks(w.step()) == [(1, 0, 64, -1, 0)]
    assert chunks(w.step()) == [(1, 64, 32, -1, 1)]
    assert chunks(w.step()) == [(1, 96, 4, -1, -1)]
    saves = [row.save for _ in range(39) for row in w.step()]
    # Decoding passes position 128, too.
    assert [s for s in saves if s >= 0] == [2] and kept(w) == 3


def test_an_equal_prompt_begins_behind_the_deepest_snapshot(world: World) -> None:
    w = world(**MODEL)
    ask(w, 1)
    w.settle()
    ask(w, 2)
    assert chunks(w.step()) == [(2, 32, 8, 0, -1)]
    ask(w, 3, prompt=41)
    assert chunks(w.step())[-1] == (3, 32, 9, 0, -1)
    # Two of its blocks are cached, and the state is known behind neither the first nor the third.
    ask(w, 4, prompt=25)
    assert chunks(w.step())[-1] == (4, 0, 16, -1, 1)
    w.settle()
    assert w.core.stats().prefix.hit == 64


def test_samples_begin_behind_the_prompt_the_first_one_computed(world: World) -> None:
    w = world(**MODEL)
    w.load("a", 1)
    ask(w, 1, adapter="a", n=4, siblings=(2, 3))
    assert [c[:3] for c in chunks(w.step())] == [(1, 0, 32)]
    assert [c[:3] for c in chunks(w.step())] == [(1, 32, 8)]
    rows = w.step()
    assert chunks(rows) == [(1, 40, 1, -1, -1), (2, 32, 8, 0, -1), (3, 32, 8, 0, -1)]
    w.settle()
    assert w.output(1) == w.output(2) == w.output(3) and len(w.output(1)) == 4


def test_without_snapshots_no_prefix_is_shared(world: World) -> None:
    w = world(**MODEL | {"snapshots": 0})
    for seq in (1, 2):
        ask(w, seq)
        assert chunks(w.step()) == [(seq, 0, 40, -1, -1)]
        w.settle()
    assert w.core.stats().blocks_cached == 0


def test_the_least_recently_used_snapshot_makes_room(world: World) -> None:
    w = world(**MODEL | {"snapshots": 2})
    for seq, first in ((1, 0), (2, 100), (3, 0), (4, 200)):
        ask(w, seq, first=first)
        w.settle()
    hits = []
    for seq, first in ((5, 0), (6, 200), (7, 100)):
        ask(w, seq, first=first)
        hits.append(w.step()[0].start)
        w.settle()
    assert hits == [32, 32, 0]


def test_a_snapshot_that_will_be_loaded_is_not_written_over(world: World) -> None:
    w = world(**MODEL | {"snapshots": 1, "max_step_tokens": 48})
    ask(w, 1)
    w.settle()
    # The one that begins behind the only snapshot and one that would save, in the same step.
    ask(w, 2)
    ask(w, 3, first=500)
    assert chunks(w.step()) == [(2, 32, 8, 0, -1), (3, 0, 32, -1, -1)]
    w.settle()
    # Nobody loads it now: the next prompt's takes its place.
    ask(w, 4, first=700)
    assert w.step()[0].save == 0
    w.settle()
    ask(w, 5)
    assert w.step()[0].start == 0


def test_a_snapshot_waits_for_a_sequence_that_cannot_run_yet(world: World) -> None:
    w = world(**MODEL | {"snapshots": 1, "num_blocks": 8, "watermark_blocks": 0, "max_running": 4})
    ask(w, 1, prompt=20, n=1)
    w.settle()
    ask(w, 2, prompt=20, n=100)
    ask(w, 3, prompt=20, n=100, first=300)
    ask(w, 4, prompt=20, n=100, first=600)
    w.settle()
    assert w.core.stats().preempted > 0
    assert all(len(w.output(seq)) == 100 for seq in (2, 3, 4))


def test_a_preempted_sequence_begins_again_behind_a_snapshot(world: World) -> None:
    w = world(**MODEL | {"num_blocks": 9, "watermark_blocks": 0, "max_running": 2})
    starts: list[tuple[int, int]] = []
    for seq in (1, 2):
        ask(w, seq, prompt=40, n=60, first=seq * 100)
    for _ in range(400):
        starts += [(r.seq, r.start) for r in w.step() if r.load >= 0]
    assert w.core.stats().preempted > 0 and starts
    assert all(len(w.output(seq)) == 60 for seq in (1, 2))


def spilling(world: World, **more: Any) -> Any:
    """Two sequences of which one is copied out when their six blocks are full."""
    tight = {"num_blocks": 6, "watermark_blocks": 0, "spill_blocks": 12, "spill_fixed_cost": 0.0}
    w = world(**MODEL | tight | {"state_blocks": 3} | more)
    for seq in (1, 2):
        ask(w, seq, prompt=40, n=30, first=seq * 100)
    return w


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_state_spills_and_comes_back_with_its_blocks(world: World, prefix_cache: bool) -> None:
    w = spilling(world, prefix_cache=prefix_cache)
    for _ in range(30):
        w.step()
        if w.core.stats().spilled:
            break
    # Three blocks of KV, and the state, which counts as three more.
    assert w.core.stats().spill_blocks_used == 6 and list(w.host_states) == [2]
    w.settle()
    stats = w.core.stats()
    assert stats.spilled == stats.preempted and stats.spill_blocks_used == 0
    assert all(len(w.output(seq)) == 30 for seq in (1, 2)) and not w.states


def test_a_state_that_finds_no_room_is_computed_again(world: World) -> None:
    w = spilling(world, spill_blocks=5)
    w.settle()
    stats = w.core.stats()
    assert stats.preempted > 0 and stats.spilled == 0
    assert all(len(w.output(seq)) == 30 for seq in (1, 2))


@pytest.mark.parametrize("nth", [1, 2])
def test_a_copy_that_fails_is_computed_again(world: World, nth: int) -> None:
    w = spilling(world)
    seen = 0
    for _ in range(2000):
        w.send(ev.Plan())
        if w.device and isinstance(w.device[0], (fx.Spill, fx.Restore)):
            seen += 1
            w.run_device(fail="injected" if seen == nth else None)
        elif not w.run_device():
            break
    assert seen >= nth and all(len(w.output(seq)) == 30 for seq in (1, 2))
    assert w.core.stats().spill_blocks_used == 0 and not w.states


def test_a_spilled_state_meets_deeper_cached_blocks(world: World) -> None:
    """Another sequence computes the same prompt further while this one is out: it comes back where
    its own state is."""
    w = spilling(world, num_blocks=7, max_step_tokens=16, mixed_step_tokens=17, max_running=3)
    ask(w, 3, prompt=90, n=3, first=100, priority=0)
    ask(w, 4, prompt=90, n=3, first=100, priority=0)
    w.settle()
    assert all(len(w.output(seq)) == 3 for seq in (3, 4))
    assert all(len(w.output(seq)) == 30 for seq in (1, 2)) and w.core.stats().spilled > 0


def test_what_a_cancelled_or_failed_row_saves_is_free_again(world: World) -> None:
    w = world(**MODEL)
    ask(w, 1)
    w.send(ev.Plan())
    w.send(ev.Cancel(1))
    w.run_device()
    assert kept(w) == 0
    ask(w, 2)
    w.send(ev.Plan())
    while not isinstance(w.device[0], fx.RunStep):
        w.run_device()
    w.run_device(fail="injected")
    assert kept(w) == 0 and w.ended[2].failure.code == "injected"
    w.settle()
    ask(w, 3)
    assert w.step()[0].start == 0 and kept(w) == 1


def test_a_version_that_goes_takes_its_snapshots_along(world: World) -> None:
    w = world(**MODEL)
    w.load("a", 1)
    ask(w, 1, adapter="a")
    w.settle()
    assert kept(w) == 1
    w.command(ev.Replace, "a", 2)
    w.settle()
    assert kept(w) == 0
    ask(w, 2, adapter="a")
    assert w.step()[0].start == 0
    w.settle()


def test_closing_leaves_no_snapshot(world: World) -> None:
    w = world(**MODEL)
    ask(w, 1)
    ask(w, 2, first=50)
    w.step()
    w.send(ev.Plan())
    w.send(ev.Close())
    w.settle()
    assert w.closed and kept(w) == 0
