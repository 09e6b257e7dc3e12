"""KV blocks of preempted sequences, in host memory.

What it owns: the host copies, at most ``limit`` blocks of them in all. Invariants: a copy is whole
or is not there; bringing a sequence back gives its memory up, whether that succeeds or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import InternalError
from .kv import KvCache


class SpillStore:
    """Host copies of blocks of ``kv``, by sequence.

    Args:
        kv: the KV memory that is copied from and to.
        limit: blocks held at once; 0 is none.
    """

    def __init__(self, kv: KvCache, limit: int) -> None:
        self._kv = kv
        self._limit = limit
        self._held: dict[int, list[torch.Tensor]] = {}
        self.blocks = 0

    def spill(self, seq: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks``, in order, for ``seq``: per layer, keys and values
        ``[len(blocks), kv_heads, 16, head_dim]``.

        Raises:
            InternalError: sequence-spilled, spill-full, bad-block (nothing was copied).
        """
        if seq in self._held:
            raise _refusal("sequence-spilled", "the sequence is in host memory already", seq)
        if self.blocks + len(blocks) > self._limit:
            raise _refusal("spill-full", "no room in host memory", seq, self._limit, self.blocks)
        index = self._index(seq, blocks)
        self._held[seq] = [memory[index] for memory in (*self._kv.keys, *self._kv.values)]
        self.blocks += len(blocks)

    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy the ``i``-th spilled block into ``block``, for each ``(i, block)``; forget the rest.

        Raises:
            InternalError: sequence-not-spilled, bad-block.
        """
        held = self._held.get(seq)
        if held is None:
            raise _refusal("sequence-not-spilled", "the sequence is not in host memory", seq)
        count = len(held[0])
        self.drop(seq)
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
            self.blocks -= len(held[0])

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
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
