"""The arena: extents against a byte map, the choice of windows against brute force, and claims."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import InternalError
from rota.sched.core.arena import Arena, Extent, Weight
from rota.sched.core.story import Log

TOTAL = 40
WEIGHTS = st.none() | st.tuples(st.integers(1, 3), st.integers(0, 3))


def arena_of(total: int = TOTAL) -> Arena:
    return Arena(total, Log(100))


def free_nothing(slot: int) -> Weight | None:
    return None


@settings(max_examples=200, deadline=None)
@given(
    acts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.booleans()), max_size=40),
)
def test_bytes_are_given_out_once_and_all_come_back(acts: list[tuple[int, int, bool]]) -> None:
    arena, owner = arena_of(), [-1] * TOTAL
    for slot, nbytes, back in acts:
        if back or arena.of(slot) is not None:
            had = slot in owner
            assert arena.give_back(slot) == had and arena.of(slot) is None
            owner = [-1 if o == slot else o for o in owner]
        else:
            holes = "".join("x" if o >= 0 else "." for o in owner)
            found = arena.window(nbytes, free_nothing)
            assert (found is not None) == ("." * nbytes in holes)
            if found is not None:
                assert holes[found.offset : found.end] == "." * nbytes
                # The smallest hole that is large enough, from its begin.
                fitting = [len(h) for h in holes.split("x") if len(h) >= nbytes]
                begin = holes.rfind("x", 0, found.offset) + 1
                end = holes.find("x", found.end)
                assert (len(holes) if end < 0 else end) - begin == min(fitting)
                assert begin == found.offset
                arena.take(slot, found)
                owner[found.offset : found.end] = [slot] * nbytes
        assert arena.used == sum(o >= 0 for o in owner)
        assert arena.largest_hole == max(map(len, _holes(owner)), default=0)
        arena.check({s: owner.count(s) for s in set(owner) if s >= 0})
    for slot in range(6):
        arena.give_back(slot)
    assert arena.used == 0 and arena.largest_hole == TOTAL


def _holes(owner: list[int]) -> list[str]:
    return "".join("." if o < 0 else "x" for o in owner).split("x")


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), WEIGHTS), max_size=5),
    nbytes=st.integers(1, TOTAL + 2),
    claim=st.none() | st.tuples(st.integers(0, 30), st.integers(1, 10), st.booleans()),
)
def test_a_window_costs_no_more_than_any_other(
    sizes: list[tuple[int, int, Weight | None]],
    nbytes: int,
    claim: tuple[int, int, bool] | None,
) -> None:
    arena, place = arena_of(), 0
    weights: dict[int, Weight | None] = {}
    for slot, (gap, size, weight) in enumerate(sizes):
        place += gap
        if place + size > TOTAL:
            break
        arena.take(slot, Extent(place, size))
        weights[slot] = weight
        place += size
    job = 1
    kept: range = range(0)
    if claim is not None:
        begin, size, own = claim
        arena.keep_for(job if own else 2, Extent(begin, size))
        kept = range(0) if own else range(begin, begin + size)

    def cost(offset: int) -> Weight | None:
        window = Extent(offset, nbytes)
        if any(offset <= byte < window.end for byte in kept):
            return None
        found = [weights[slot] for slot in arena.inside(window)]
        if any(w is None for w in found):
            return None
        return max((w for w in found if w is not None), default=(0, 0))

    costs = {o: c for o in range(TOTAL - nbytes + 1) if (c := cost(o)) is not None}
    chosen = arena.window(nbytes, weights.__getitem__, job)
    assert (chosen is None) == (not costs)
    if chosen is not None:
        assert chosen.nbytes == nbytes and costs[chosen.offset] == min(costs.values())


def test_what_is_taken_or_outside_is_refused_with_its_story() -> None:
    arena = arena_of()
    arena.take(0, Extent(0, 10))
    for slot, extent in ((1, Extent(5, 10)), (0, Extent(20, 5)), (1, Extent(35, 10))):
        with pytest.raises(InternalError):
            arena.take(slot, extent)
    with pytest.raises(InternalError):
        arena.check({0: 9})
    with pytest.raises(InternalError):
        arena.check({})
    arena.check({0: 10})


def test_one_claim_at_a_time_and_only_for_its_job() -> None:
    arena = arena_of()
    arena.keep_for(7, Extent(0, 30))
    assert arena.window(20, free_nothing, 8) is None
    assert arena.window(20, free_nothing, 7) == Extent(0, 20)
    assert arena.window(10, free_nothing, 8) == Extent(30, 10)
    with pytest.raises(InternalError):
        arena.keep_for(8, Extent(30, 10))
    assert not arena.unclaim(8) and arena.unclaim(7) and not arena.unclaim(7)
    assert arena.window(20, free_nothing, 8) == Extent(0, 20)


def test_what_is_kept_is_its_jobs_alone_until_it_is_let_go() -> None:
    arena = Arena(100, Log(10))
    arena.keep({7: 30, 8: 20})
    assert arena.window(60, free_nothing, 9) is None
    assert arena.window(60, free_nothing, 9, ever=True) is None
    assert arena.window(50, free_nothing, 9) == Extent(50, 50)
    assert arena.window(30, free_nothing, 7) == Extent(0, 30)
    assert arena.unclaim(8) and not arena.unclaim(8)
    assert arena.window(60, free_nothing, 9) == Extent(30, 60)
    with pytest.raises(InternalError):
        Arena(40, Log(10)).keep({1: 30, 2: 20})
    arena.take(0, Extent(90, 10))
    with pytest.raises(InternalError):
        arena.keep({9: 10})
