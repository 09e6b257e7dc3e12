"""Histograms of commits, barriers and phases, by a clock of the test's own."""

from __future__ import annotations

from functools import partial

import pytest

from rota.sched.core.spread import EDGES_S, PHASES
from rota.sched.timings import Timings


def test_a_commit_is_split_into_its_barrier_and_its_work() -> None:
    now = [10.0]
    timings = Timings(lambda: now[0])

    def work() -> str:
        now[0] += 0.004
        return "done"

    job = timings.commit(partial(work))
    now[0] += 0.020
    assert job() == "done"
    times = timings.snapshot()
    assert times.barrier.total_s == pytest.approx(0.020)
    assert times.commit.total_s == pytest.approx(0.004)
    assert times.barrier.counts[EDGES_S.index(0.025)] == sum(times.barrier.counts) == 1
    assert times.commit.counts[EDGES_S.index(0.005)] == sum(times.commit.counts) == 1


def test_a_commit_that_fails_is_counted_and_phases_of_no_name_are_not() -> None:
    timings = Timings(lambda: 0.0)

    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        timings.commit(partial(fails))()
    timings.staged({"read": 1e9, "pack": 0.5, "of no name": 1.0})
    times = timings.snapshot()
    assert sum(times.commit.counts) == 1
    counted = {name: sum(s.counts) for name, s in zip(PHASES, times.phases, strict=True)}
    assert counted == dict.fromkeys(PHASES, 0) | {"read": 1, "pack": 1}
    assert times.phases[PHASES.index("read")].counts[-1] == 1, "above all edges"
