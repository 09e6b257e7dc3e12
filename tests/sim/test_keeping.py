"""The laws of snapshots, fed with single steps: what nobody has written, nobody may load."""

from __future__ import annotations

import pytest

from rota.sched.core import CoreConfig
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.sim.keeping import Keeping

CONFIG = CoreConfig(max_loras=1, num_blocks=16, max_context=64, recurrent=True, snapshots=2)
FAILURE = ev.Failure("request", "bad-logits", "injected")


def row(seq: int, start: int, *, load: int = -1, save: int = -1, ident: int = 0) -> fx.Row:
    tokens = tuple(range(16))
    return fx.Row(seq, -1, ident, start, tokens, (0, 1), False, load, save)


@pytest.mark.parametrize(
    ("result", "ident", "broken"),
    [
        (ev.StepDone(1, (ev.RowDone(1, -1),)), 0, []),
        (ev.StepDone(1, (ev.RowDone(1, -1),)), 7, ["snapshot"]),
        (ev.StepDone(1, (ev.RowDone(1, -1, FAILURE),)), 0, ["snapshot"]),
        (ev.StepFailed(1, FAILURE, False), 0, ["snapshot"]),
        (None, 0, ["snapshot"]),
    ],
    ids=["written", "of another version", "its row failed", "its step failed", "in flight"],
)
def test_only_what_was_written_may_be_loaded(
    result: ev.Event | None, ident: int, broken: list[str]
) -> None:
    told: list[str] = []

    def need(truth: bool, law: str, what: str) -> None:
        if not truth:
            told.append(law)

    laws = Keeping(CONFIG, need)
    laws.step(fx.RunStep(1, (row(1, 0, save=0),)))
    if result is not None:
        laws.event(result)
    assert told == []
    laws.step(fx.RunStep(2, (row(2, 16, load=0, ident=ident),)))
    assert told == broken
