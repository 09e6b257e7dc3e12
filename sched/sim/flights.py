"""The laws of steps in flight: how many, in which order, and what a step planned ahead may name.

Judged from effects and events alone. The device runs steps in order; while one runs, one more may
be queued behind it (``step_depth`` 2).
"""

from __future__ import annotations

from collections import deque

from ..core import CoreConfig
from ..core import effects as fx
from .copies import Need


class Flights:
    """The steps in flight, oldest first; ``need(truth, law, what)`` reports."""

    def __init__(self, config: CoreConfig, need: Need) -> None:
        self._depth = config.step_depth
        self._size = config.block_size
        self._need = need
        self.steps: deque[fx.RunStep] = deque()

    def seqs(self) -> set[int]:
        """Sequences that a step in flight has a row of."""
        return {row.seq for step in self.steps for row in step.rows}

    def over(self, step: int) -> None:
        """The device has answered for ``step``."""
        first = self.steps.popleft() if self.steps else None
        self._need(first is not None and first.step == step, "one step", f"step {step}")

    def planned(self, step: fx.RunStep) -> None:
        """A step is handed to the device."""
        room = len(self.steps) < self._depth
        self._need(room, "one step", f"step {step.step} while {len(self.steps)} are in flight")
        before = self.steps[-1] if self.steps else None
        for row in step.rows:
            self._fed(row, before)
        for other in self.steps:
            self._apart(step, other)
        self.steps.append(step)

    def _fed(self, row: fx.Row, before: fx.RunStep | None) -> None:
        """A row behind a step in flight is fed what its own row there samples; no other row is
        fed anything but tokens."""
        fed, who = any(token < 0 for token in row.tokens), f"seq {row.seq}"
        if before is None:
            self._need(not fed, "feed", f"{who} is fed by no step")
            return
        self._need(fed and len(row.tokens) == 1, "feed", f"{who}: {row.tokens} in a step ahead")
        index = fx.fed(row.tokens[0])
        source = before.rows[index] if 0 <= index < len(before.rows) else None
        right = source is not None and source.seq == row.seq and source.sample
        self._need(right, "feed", f"{who} is fed by row {index} of step {before.step}")
        goes_on = source is not None and row.start == source.start + len(source.tokens)
        self._need(goes_on, "feed", f"{who} goes on at {row.start}")

    def _apart(self, step: fx.RunStep, other: fx.RunStep) -> None:
        """What ``step`` writes, no other sequence's row of a step in flight names."""
        holder = {block: row.seq for row in other.rows for block in row.blocks}
        for row in step.rows:
            for block in row.blocks[row.start // self._size :]:
                held = holder.get(block, row.seq)
                self._need(held == row.seq, "released early", f"block {block}: {held}, {row.seq}")
