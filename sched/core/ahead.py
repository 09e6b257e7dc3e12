"""One step ahead: while a step runs, the next one is planned and queued behind it.

Only decode rows go ahead, behind a step of decode rows, each fed what its row there will sample;
the device has that token before it begins. Invariants: at most ``step_depth`` steps are in flight;
a step ahead holds no sequence that is known to end in the step before; nobody loses by it: whatever
could be admitted, prefilled, preempted or written into a slot at the end of the running step keeps
the next one from being planned early. A sequence that ends unforeseen (stop, cancel, deadline,
failure) has one row for nothing, whose sample is dropped; its blocks and lease are given back after
that row's step.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from .effects import Row, RunStep, fed
from .memory import KvMemory
from .sequences import Sequence
from .state import State, Step
from .tables import SeqState


def plan(state: State) -> None:
    """Plan the step after the one in flight, if nothing speaks against it."""
    if len(state.steps) != 1 or _barrier_near(state):
        return
    step = state.steps[0]
    going = _going_on(state, step)
    if not going or _somebody_could_start(state, len(going)):
        return
    memory = state.memory
    full = [seq for _, seq in going if len(seq.tokens) >= len(seq.blocks) * memory.size]
    if len(full) > memory.available:
        return  # who is preempted is decided when nothing is in flight
    for seq in full:
        memory.grow(seq, len(seq.tokens) + 1)
    state.counters.ahead += 1
    before = step.rows
    dispatch(state, [_fed_row(memory, before[index], index, seq) for index, seq in going])


def dispatch(state: State, rows: Rows[Row]) -> None:
    """Hand a planned step to the device."""
    step = Step(state.new_id(), tuple(rows), state.now)
    for row in rows:
        state.seqs[row.seq].in_flight += 1
    state.steps.append(step)
    state.counters.steps += 1
    state.out.append(RunStep(step.id, step.rows))


def _barrier_near(state: State) -> bool:
    """Whether a commit or a re-layout waits for the steps in flight, or a job for a slot that the
    end of one may free: none of them waits for a step more."""
    return bool(state.commits or state.placing or state.resize)


def _going_on(state: State, step: Step) -> list[tuple[int, Sequence]]:
    """The rows whose sequence decodes in the step after ``step``, as far as is known; none at all
    if that step has more to do, or ``step`` itself did: requests often come close together, and the
    next one is not to wait for two steps."""
    if len(state.running) != len(step.rows):
        return []  # one is between copies, or was left out of the step
    going = []
    for index, row in enumerate(step.rows):
        seq = state.seqs[row.seq]
        if seq.state is SeqState.CLOSING:
            continue
        if seq.state is not SeqState.DECODE:
            return []
        if len(seq.tokens) + 1 < seq.max_len:
            going.append((index, seq))
    return going


def _somebody_could_start(state: State, going: int) -> bool:
    """Whether a waiting sequence may find a place when the running step is over."""
    return state.lanes.ready and going < state.config.max_running


def _fed_row(memory: KvMemory, before: Row, index: int, seq: Sequence) -> Row:
    """What follows ``before``, row ``index`` of the step in flight."""
    # The table only grows while a sequence runs.
    blocks = before.blocks if len(seq.blocks) == len(before.blocks) else tuple(seq.blocks)
    start = before.start + 1
    load, save = memory.copies(seq, start + 1) if memory.recurrent else (-1, -1)
    tokens = (fed(index),)
    return Row(seq.id, seq.slot, seq.adapter_id, start, tokens, blocks, True, load, save)
