"""KV blocks of preempted sequences, and their recurrent states, in host memory.

What it owns: the host copies, at most ``limit`` blocks of them in all. Invariants: a copy is whole
or is not there; bringing a sequence back gives its memory up, whether that succeeds or not; a
sequence in host memory, and one that failed to go there or to come back, has no state in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import InternalError
from ..kernels.rope import BLOCK_TOKENS
from .kv import KvCache
from .states import StateArena, StateCopy


class SpillStore:
    """Host copies of blocks of ``kv``, by sequence.

    Args:
        kv: the KV memory that is copied from and to.
        limit: blocks held at once; 0 is none.
        states: recurrent states that go along; each counts as ``state_blocks`` blocks.
    """

    def __init__(
        self, kv: KvCache, limit: int, states: StateArena | None = None, state_blocks: int = 0
    ) -> None:
        self._kv = kv
        self._limit = limit
        self._states = states
        self._state_blocks = state_blocks
        self._held: dict[int, list[torch.Tensor]] = {}
        self._held_states: dict[int, StateCopy] = {}
        self.blocks = 0

    def spill(self, seq: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks``, in order, for ``seq``: per layer, keys and values
        ``[len(blocks), kv_heads, 16, head_dim]``.

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
        index = self._index(seq, blocks)
        held = [memory[index] for memory in (*self._kv.keys, *self._kv.values)]
        if self._states is not None:
            self._held_states[seq] = self._states.copy_of(seq, len(blocks) * BLOCK_TOKENS)
        self._held[seq] = held
        self.blocks += cost

    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy the ``i``-th spilled block into ``block``, for each ``(i, block)``; forget the rest.

        Raises:
            InternalError: sequence-not-spilled, bad-block, no-state-place.
        """
        held = self._held.get(seq)
        if held is None:
            raise _refusal("sequence-not-spilled", "the sequence is not in host memory", seq)
        count = len(held[0])
        state = self._held_states.get(seq)
        self.drop(seq)
        self._bring_back(seq, held, count, places)
        if self._states is not None and state is not None:
            self._states.put(seq, state)

    def _bring_back(
        self, seq: int, held: list[torch.Tensor], count: int, places: Sequence[tuple[int, int]]
    ) -> None:
        if not places:
            return
        sources = [source for source, _ in places]
        if not 0 <= min(sources) <= max(sources) < count:
            raise _refusal("bad-block", "a block that was not spilled", seq, count, sources)
        targets = self._index(seq, [block for _, block in places])
        from_host = torch.tensor(sources)
        for memory, copy in zip((*self._kv.keys, *self._kv.values), held, strict=True):
            memory[targets] = copy[from_host]

    def drop(self, seq: int) -> None:
        """Forget what is held of ``seq``. Idempotent."""
        held = self._held.pop(seq, None)
        if held is not None:
            self._held_states.pop(seq, None)
            self.blocks -= len(held[0]) + self._state_blocks

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._held_states.clear()
        self.blocks = 0

    def _index(self, seq: int, blocks: Sequence[int]) -> torch.Tensor:
        total = self._kv.num_blocks
        if not blocks or not 0 <= min(blocks) <= max(blocks) < total:
            raise _refusal("bad-block", "a block outside the KV memory", seq, total, blocks)
        return torch.tensor(blocks)


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
