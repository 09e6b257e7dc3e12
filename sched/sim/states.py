"""Simulated recurrent states: each is a fingerprint of the version and the tokens it has seen.

A state is made from the state before it, never from what it should be; what it should be comes from
the sequence's tokens. So a state of other tokens, of another version, or one that has seen too few
or too many of them, is found at the first row that reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ...errors import DeviceError
from ...gpu.model.rows import RowLike

#: A fingerprint, and how many tokens it is of.
Seen = tuple[int, int]


def fold(state: int, token: int) -> int:
    """The fingerprint after one more token."""
    return hash((state, token))


def fresh(content: str) -> int:
    """The fingerprint of ``content`` before any token."""
    return zlib.crc32(content.encode())


class SimStates:
    """``places`` states of sequences, ``snapshots`` copies of them; ``spilled``: those in host
    memory. Raises DeviceError ``sim-state`` for whatever the real ones must refuse."""

    def __init__(self, places: int, snapshots: int) -> None:
        self.places = places
        self.held: dict[int, Seen] = {}
        self.spilled: dict[int, Seen] = {}
        self._snapshots: list[Seen | None] = [None] * snapshots

    def advance(self, row: RowLike, tokens: Sequence[int], content: str, expected: int) -> None:
        """``row`` feeds ``tokens`` on ``content``; ``expected``: fingerprint of its sequence's
        tokens before ``row.start``."""
        seq = row.seq
        if row.load >= 0 or row.start == 0:
            if seq in self.held:
                raise self._broken("starts again, and never gave its state up", seq)
            state = self._snapshots[row.load] if row.load >= 0 else (fresh(content), 0)
        else:
            state = self.held.get(seq)
        if state is None or state[1] != row.start:
            raise self._broken(f"begins at {row.start}, its state is {state}", seq)
        if state[0] != expected:
            raise self._broken("its state has seen other tokens, or another version", seq)
        seen = state[0]
        for token in tokens:
            seen = fold(seen, token)
        self.held[seq] = (seen, row.start + len(row.tokens))
        if len(self.held) > self.places:
            raise self._broken("one state too many", seq)

    def save(self, row: RowLike) -> None:
        """After every row of the step has run."""
        if row.save >= 0 and row.seq in self.held:
            self._snapshots[row.save] = self.held[row.seq]

    def spill(self, seq: int, fails: bool) -> None:
        """Out to host memory; gone from the device, also where the copy ``fails``."""
        state = self.held.pop(seq, None)
        if state is None:
            raise self._broken("spilled without a state", seq)
        if not fails:
            self.spilled[seq] = state

    def restore(self, seq: int, fails: bool) -> None:
        state = self.spilled.pop(seq)
        if not fails:
            self.held[seq] = state

    def drop(self, seq: int) -> None:
        self.held.pop(seq, None)

    def close(self, seq: int) -> None:
        self.held.pop(seq, None)
        self.spilled.pop(seq, None)

    def _broken(self, what: str, seq: int) -> DeviceError:
        return DeviceError(what, code="sim-state", subject=f"seq {seq}")
