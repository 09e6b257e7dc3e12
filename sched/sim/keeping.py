"""The laws of snapshots of recurrent states, judged from steps and their results alone.

What a state has seen, the simulated device knows; here is who may name which snapshot when.
"""

from __future__ import annotations

from ..core import CoreConfig
from ..core import effects as fx
from ..core import events as ev
from .copies import Need


class Keeping:
    """Which snapshots rows that did not fail have written; ``need(truth, law, what)`` reports."""

    def __init__(self, config: CoreConfig, need: Need) -> None:
        self._total = config.snapshots if config.recurrent else 0
        self._need = need
        #: Version and tokens of each snapshot that can be loaded; steps in flight.
        self._kept: dict[int, tuple[int, int]] = {}
        self._flying: dict[int, fx.RunStep] = {}

    def step(self, step: fx.RunStep) -> None:
        others = [row for flying in self._flying.values() for row in flying.rows]
        for index, row in enumerate(step.rows):
            who = f"seq {row.seq}"
            if row.load >= 0:
                right = self._kept.get(row.load) == (row.adapter_id, row.start)
                self._need(right, "snapshot", f"{who} loads {self._kept.get(row.load)}")
            if row.save < 0:
                continue
            self._need(row.save < self._total, "limit", f"{who} saves snapshot {row.save}")
            named = others + [r for i, r in enumerate(step.rows) if i != index]
            free = all(row.save not in (r.load, r.save) for r in named)
            free = free and row.save != row.load
            self._need(free, "quiescence", f"{who} saves a snapshot that is in use")
        for row in step.rows:
            self._kept.pop(row.save, None)
        self._flying[step.step] = step

    def event(self, event: ev.Event) -> None:
        match event:
            case ev.StepDone(step, results):
                for row, result in zip(self._flying.pop(step).rows, results, strict=True):
                    if row.save >= 0 and result.failure is None:
                        self._kept[row.save] = (row.adapter_id, row.start + len(row.tokens))
            case ev.StepFailed(step):
                del self._flying[step]
            case _:
                pass
