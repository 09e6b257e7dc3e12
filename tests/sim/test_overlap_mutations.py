"""Cores that overlap steps wrongly, one mistake each: the simulator's laws catch every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rota.sched.core import ahead, planning
from rota.sched.core.effects import Row, fed
from rota.sched.core.state import State
from rota.sched.core.tables import SeqState
from rota.sched.sim.crowd import crowd_of

from .broken import must_be_caught

Patch = pytest.MonkeyPatch


def blocks_released_before_the_step_ahead_is_over(patch: Patch) -> None:
    real = State.end

    def end(self: State, seq: Any, reason: str, failure: Any = None) -> None:
        real(self, seq, reason, failure)
        if seq.state is SeqState.CLOSING and self.steps:
            self.memory.give_back(seq)

    patch.setattr(State, "end", end)


def lease_released_before_the_step_ahead_is_over(patch: Patch) -> None:
    real = State.end

    def end(self: State, seq: Any, reason: str, failure: Any = None) -> None:
        real(self, seq, reason, failure)
        if seq.state is SeqState.CLOSING and len(self.steps) == 1 and seq.nodes == []:
            self.give_lease_back(seq)

    patch.setattr(State, "end", end)


def settled_by_the_first_of_two_steps(patch: Patch) -> None:
    def wasted(state: State, seq: Any) -> None:
        if seq.id in state.seqs:
            state.settle(seq)

    patch.setattr(planning, "_wasted", wasted)


def fed_by_the_row_beside_it(patch: Patch) -> None:
    real = ahead._fed_row

    def fed_row(memory: Any, before: Row, index: int, seq: Any) -> Row:
        row = real(memory, before, index, seq)
        return msgspec.structs.replace(row, tokens=(fed(index ^ 1),))

    patch.setattr(ahead, "_fed_row", fed_row)


def goes_on_behind_an_unfinished_prompt(patch: Patch) -> None:
    def going_on(state: State, step: Any) -> Any:
        rows = [(index, state.seqs[row.seq]) for index, row in enumerate(step.rows)]
        alive = [(index, seq) for index, seq in rows if seq.state is not SeqState.CLOSING]
        return [(index, seq) for index, seq in alive if len(seq.tokens) + 1 < seq.max_len]

    patch.setattr(ahead, "_going_on", going_on)


def known_ends_run_again(patch: Patch) -> None:
    real = ahead._going_on

    def going_on(state: State, step: Any) -> Any:
        for row in step.rows:
            state.seqs[row.seq].max_len += 1
        try:
            return real(state, step)
        finally:
            for row in step.rows:
                state.seqs[row.seq].max_len -= 1

    patch.setattr(ahead, "_going_on", going_on)


def rows_for_nothing_are_published(patch: Patch) -> None:
    real = planning._wasted

    def wasted(state: State, seq: Any) -> None:
        seq.computed += 1
        real(state, seq)

    patch.setattr(planning, "_wasted", wasted)


def commits_wait_for_one_step_more(patch: Patch) -> None:
    patch.setattr(ahead, "_barrier_near", lambda state: False)


def as_many_steps_as_one_likes(patch: Patch) -> None:
    real = ahead.plan

    def plan(state: State) -> None:
        real(state)
        if len(state.steps) == 2:
            first = state.steps.popleft()
            real(state)
            state.steps.appendleft(first)

    patch.setattr(ahead, "plan", plan)


MUTATIONS: list[Callable[[Patch], None]] = [
    blocks_released_before_the_step_ahead_is_over,
    lease_released_before_the_step_ahead_is_over,
    settled_by_the_first_of_two_steps,
    fed_by_the_row_beside_it,
    goes_on_behind_an_unfinished_prompt,
    known_ends_run_again,
    rows_for_nothing_are_published,
    commits_wait_for_one_step_more,
    as_many_steps_as_one_likes,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_core_that_overlaps_wrongly_is_caught(
    mutate: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    must_be_caught(mutate.__name__, monkeypatch, make=crowd_of)
