"""KV blocks: who holds which. Owns the free list; a block has one holder or is free."""

from __future__ import annotations

from .story import Log


class BlockPool:
    """``total`` blocks numbered 0..total-1, handed out last-freed first (warm memory first)."""

    def __init__(self, total: int, log: Log) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held: set[int] = set()
        self._log = log

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """One block; the caller has checked :attr:`free`."""
        if not self._free:
            raise self._log.broken("blocks", "take from an empty block pool")
        block = self._free.pop()
        self._held.add(block)
        return block

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block not in self._held:
                raise self._log.broken("blocks", f"block {block} given back twice")
            self._held.remove(block)
            self._free.append(block)
        blocks.clear()

    def check(self, held: list[int]) -> None:
        """Conservation: the holders' blocks are exactly the held ones, each once."""
        if len(held) != len(set(held)) or set(held) != self._held:
            raise self._log.broken("blocks", "held blocks and holders disagree")
        if len(self._held) + len(self._free) != self.total:
            raise self._log.broken("blocks", "blocks lost")
