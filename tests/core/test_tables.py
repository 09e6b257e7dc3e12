"""The tables themselves: every state can be left or is final, absent pairs are errors."""

from __future__ import annotations

import pytest

from rota.errors import InternalError
from rota.sched.core.events import Submit
from rota.sched.core.jobs import JOB_TABLE, JobState
from rota.sched.core.sequences import Sequence
from rota.sched.core.slots import SlotTable
from rota.sched.core.story import Log
from rota.sched.core.tables import SEQ_TABLE, SLOT_TABLE, SeqEvent, SeqState, SlotState


def test_every_state_is_reached_and_left() -> None:
    for table, states, first, final in (
        (SLOT_TABLE, SlotState, {SlotState.EMPTY}, set()),
        (SEQ_TABLE, SeqState, {SeqState.WAITING}, {SeqState.ENDED}),
        (JOB_TABLE, JobState, {JobState.QUEUED}, {JobState.DONE, JobState.FAILED}),
    ):
        left = {state for state, _ in table}
        reached = set(table.values())
        assert set(states) - left == final
        assert set(states) - reached <= first


def test_an_absent_pair_is_an_error_with_the_story() -> None:
    log = Log(16)
    seq = Sequence.of(Submit(7, (1, 2), None, False, 4), 7, None, 16)
    seq.move(SeqEvent.ADMIT, log)
    with pytest.raises(InternalError) as caught:
        seq.move(SeqEvent.ADMIT, log)
    assert caught.value.subject == "seq 7" and "WAITING -admit-> PREFILL" in str(caught.value)


@pytest.mark.parametrize("act", ["release", "lease_empty", "retire_empty", "undrain_empty"])
def test_wrong_slot_acts_are_errors(act: str) -> None:
    slots = SlotTable(1, Log(16))
    slot = slots[0]
    with pytest.raises(InternalError):
        match act:
            case "release":
                slots.release(slot, 1)
            case "lease_empty":
                slots.lease(slot, 1)
            case "retire_empty":
                slots.retire(slot)
            case _:
                slots.undrain(slot)


def test_the_log_is_bounded() -> None:
    log = Log(8)
    for index in range(100):
        log.add("seq 1", str(index))
    assert len(log.story("seq 1")) == 8
