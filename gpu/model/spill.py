"""KV blocks of preempted sequences, and their recurrent states, in host memory.

What it owns: the host copies, at most ``limit`` blocks of them in all. Invariants: a copy is whole
or is not there; bringing a sequence back gives its memory up, whether that succeeds or not; a
sequence in host memory, and one that failed to go there or to come back, has no state in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from ...errors import InternalError
from ..kernels.rope import BLOCK_TOKENS
from .kv import KvCache
from .states import StateArena, StateCopy

HeldT = TypeVar("HeldT")


class BlockCopies(Protocol[HeldT]):
    """Copies KV blocks to host memory and back; every number was checked."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV memory."""
        ...

    def take(self, blocks: Sequence[int]) -> HeldT:
        """A copy of these blocks, in order. All or nothing."""
        ...

    def put(self, held: HeldT, places: Sequence[tuple[int, int]]) -> None:
        """Copy the ``i``-th block of a copy into ``block``, for each ``(i, block)``."""
        ...

    def drop(self, held: HeldT) -> None:
        """Give a copy's memory up."""
        ...


class HostCopies:
    """Blocks of the host's KV memory: keys, then values, ``[n, kv_heads, 16, head_dim]``."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self.num_blocks = kv.num_blocks

    def take(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """See `BlockCopies.take`."""
        index = torch.tensor(blocks)
        return [memory[index] for memory in (*self._kv.keys, *self._kv.values)]

    def put(self, held: list[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        """See `BlockCopies.put`."""
        sources, targets = torch.tensor(places).unbind(1)
        for memory, copy in zip((*self._kv.keys, *self._kv.values), held, strict=True):
            memory[targets] = copy[sources]

    def drop(self, held: list[torch.Tensor]) -> None:
        """Nothing: the tensors own their memory."""


class SpillStore(Generic[HeldT]):
    """Host copies of blocks, by sequence.

    Args:
        copies: of the KV memory.
        limit: blocks held at once; 0 is none.
        states: recurrent states that go along; each counts as ``state_blocks`` blocks.
    """

    def __init__(
        self,
        copies: BlockCopies[HeldT],
        limit: int,
        states: StateArena | None = None,
        state_blocks: int = 0,
    ) -> None:
        self._copies = copies
        self._limit = limit
        self._states = states
        self._state_blocks = state_blocks
        self._held: dict[int, tuple[int, HeldT]] = {}
        self._held_states: dict[int, StateCopy] = {}
        self.blocks = 0

    def spill(self, seq: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks``, in order, for ``seq``.

        Raises:
            InternalError: sequence-spilled, spill-full, bad-block, state-position (nothing was
                copied).
        """
        try:
            self._spill(seq, blocks)
        finally:
            if self._states is not None:
                self._states.drop(seq)

    def _spill(self, seq: int, blocks: Sequence[int]) -> None:
        if seq in self._held:
            raise _refusal("sequence-spilled", "the sequence is in host memory already", seq)
        cost = len(blocks) + self._state_blocks
        if self.blocks + cost > self._limit:
            raise _refusal("spill-full", "no room in host memory", seq, self._limit, self.blocks)
        self._check(seq, blocks)
        state = None
        if self._states is not None:
            state = self._states.copy_of(seq, len(blocks) * BLOCK_TOKENS)
        self._held[seq] = len(blocks), self._copies.take(blocks)
        if state is not None:
            self._held_states[seq] = state
        self.blocks += cost

    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy the ``i``-th spilled block into ``block``, for each ``(i, block)``; forget the rest.

        Raises:
            InternalError: sequence-not-spilled, bad-block, no-state-place.
        """
        held = self._held.get(seq)
        if held is None:
            raise _refusal("sequence-not-spilled", "the sequence is not in host memory", seq)
        state = self._held_states.get(seq)
        try:
            self._bring_back(seq, *held, places)
        finally:
            self.drop(seq)
        if self._states is not None and state is not None:
            self._states.put(seq, state)

    def _bring_back(
        self, seq: int, count: int, held: HeldT, places: Sequence[tuple[int, int]]
    ) -> None:
        if not places:
            return
        sources = [source for source, _ in places]
        if not 0 <= min(sources) <= max(sources) < count:
            raise _refusal("bad-block", "a block that was not spilled", seq, count, sources)
        self._check(seq, [block for _, block in places])
        self._copies.put(held, places)

    def drop(self, seq: int) -> None:
        """Forget what is held of ``seq``. Idempotent."""
        held = self._held.pop(seq, None)
        if held is not None:
            self._held_states.pop(seq, None)
            self.blocks -= held[0] + self._state_blocks
            self._copies.drop(held[1])

    def clear(self) -> None:
        """Forget everything."""
        for seq in list(self._held):
            self.drop(seq)

    def _check(self, seq: int, blocks: Sequence[int]) -> None:
        total = self._copies.num_blocks
        if not blocks or not 0 <= min(blocks) <= max(blocks) < total:
            raise _refusal("bad-block", "a block outside the KV memory", seq, total, blocks)


def _refusal(
    code: str, message: str, seq: int, expected: object = None, found: object = None
) -> InternalError:
    return InternalError(
        message,
        code=code,
        subject=f"sequence {seq}",
        expected=expected,
        found=None if found is None else str(found)[:200],
    )
