"""Simulated KV memory: every block knows the fingerprint of what was computed into it.

Catches reads of blocks that hold another sequence's tokens, another adapter version's, or tokens of
a run before a preemption. Blocks shared on purpose (equal tokens, equal version) are no fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import DeviceError
from .states import fold, fresh


class SimKV:
    """Owns the fingerprint of each block and the tokens each sequence must be fed."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._blocks: dict[int, int | None] = {}
        self._tokens: dict[int, list[int]] = {}
        #: Fingerprint of (version, first p tokens), for p = 0, 1, ... per sequence.
        self._prints: dict[int, list[int]] = {}

    def open(self, seq: int, prompt: Sequence[int]) -> None:
        self._tokens[seq] = list(prompt)

    def close(self, seq: int) -> None:
        del self._tokens[seq]
        self._prints.pop(seq, None)

    def feed(
        self, seq: int, content: str, start: int, tokens: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Read positions ``0..start-1``, write ``start..``. Raises DeviceError if a block does not
        hold what the sequence needs, or the tokens are not the sequence's own."""
        known = self._tokens[seq]
        end = start + len(tokens)
        if list(tokens) != known[start:end] or not tokens:
            raise DeviceError("not the sequence's tokens", code="sim-tokens", subject=f"seq {seq}")
        prints = self._prints.setdefault(seq, [fresh(content)])
        if prints[0] != fresh(content):
            raise DeviceError("the version changed", code="sim-version", subject=f"seq {seq}")
        for token in known[len(prints) - 1 : end]:
            prints.append(fold(prints[-1], token))
        size = self._size
        if len(blocks) * size < end:
            raise DeviceError("too few blocks", code="sim-blocks", subject=f"seq {seq}")
        for index in range(-(-start // size)):
            if self._blocks.get(blocks[index]) != prints[min((index + 1) * size, start)]:
                raise DeviceError(
                    f"block {blocks[index]} does not hold its tokens",
                    code="sim-stale",
                    subject=f"seq {seq}",
                )
        for index in range(start // size, -(-end // size)):
            self._blocks[blocks[index]] = prints[min((index + 1) * size, end)]

    def print_of(self, seq: int, position: int) -> int:
        """Fingerprint of the first ``position`` tokens of ``seq``, which has been fed beyond."""
        return self._prints[seq][position]

    def contents(self, blocks: Sequence[int]) -> list[int | None]:
        """What each block holds."""
        return [self._blocks.get(block) for block in blocks]

    def put(self, contents: Mapping[int, int | None]) -> None:
        """Copied into the blocks as it was elsewhere."""
        self._blocks.update(contents)

    def sampled(self, seq: int, token: int) -> None:
        self._tokens[seq].append(token)
