"""Snapshots of recurrent states: where a sequence of such a model may begin behind a cached prefix.

A snapshot is a copy of a sequence's state behind a full block, kept with that block's node of the
prefix cache; the device has a fixed number of them. A row that ends at a boundary saves one, a row
that begins behind a cached prefix loads one, both as part of its step. Boundaries of a sequence are
the last block its prompt fills short of its last token (where an equal prompt begins), and every
``snapshot_tokens`` tokens. Invariants: a snapshot is free, named by a row in flight that writes it,
or a node's; one that a sequence will load is not given to another until that row is over.
"""

from __future__ import annotations

from collections import OrderedDict

from .config import CoreConfig
from .prefix import Node
from .story import Log


class Snapshots:
    """``config.snapshots`` of them, numbered from 0; none at all in a model without states."""

    def __init__(self, config: CoreConfig, log: Log) -> None:
        self.total = config.snapshots if config.recurrent else 0
        self._size = config.block_size
        self._every = -(-config.snapshot_tokens // config.block_size) * config.block_size
        self._log = log
        self._free = list(range(self.total - 1, -1, -1))
        self._writing: set[int] = set()
        #: Nodes with a snapshot, least recently used first, and who will load it.
        self._kept: OrderedDict[Node, set[int]] = OrderedDict()
        #: Changes whenever a node gets or loses a snapshot.
        self.version = 0

    @property
    def kept(self) -> int:
        """Snapshots that can be loaded."""
        return len(self._kept)

    def _prompt_end(self, prompt: int) -> int:
        return (prompt - 1) // self._size * self._size

    def cut(self, prompt: int, start: int, end: int) -> int:
        """Where a chunk from ``start`` that could go to ``end`` ends: at the first boundary."""
        if not self.total:
            return end
        after = (start // self._every + 1) * self._every
        last = self._prompt_end(prompt)
        return min(end, after, last if last > start else end)

    def take(self, prompt: int, end: int) -> int:
        """A snapshot for a row to write that ends at ``end``; -1 if that is no boundary, or all
        are about to be read or written."""
        if not self.total or (end % self._every and end != self._prompt_end(prompt)):
            return -1
        if not self._free:
            victim = next((node for node, loads in self._kept.items() if not loads), None)
            if victim is None:
                return -1
            self.forget(victim)
        snapshot = self._free.pop()
        self._writing.add(snapshot)
        return snapshot

    def give_back(self, snapshot: int) -> None:
        """The row that was to write it came to nothing."""
        if snapshot >= 0:
            self._written(snapshot)
            self._free.append(snapshot)

    def keep(self, node: Node, snapshot: int) -> None:
        """It was written, and is the state behind ``node``."""
        if node.snapshot >= 0:  # another sequence was first
            self.give_back(snapshot)
            self._kept.move_to_end(node)
            return
        self._written(snapshot)
        node.snapshot = snapshot
        self._kept[node] = set()
        self.version += 1

    def _written(self, snapshot: int) -> None:
        if snapshot not in self._writing:
            raise self._log.broken("snapshots", f"snapshot {snapshot} is not being written")
        self._writing.remove(snapshot)

    def hold(self, node: Node, seq: int) -> None:
        """``seq`` begins behind ``node``: its first row will load the snapshot."""
        self._kept[node].add(seq)
        self._kept.move_to_end(node)

    def release(self, node: Node, seq: int) -> None:
        """That row is over, or will not be."""
        self._kept[node].remove(seq)

    def forget(self, node: Node) -> None:
        """``node`` loses its snapshot, if it has one."""
        if node.snapshot < 0:
            return
        if self._kept[node]:
            raise self._log.broken("snapshots", f"snapshot {node.snapshot} is freed under a reader")
        del self._kept[node]
        self._free.append(node.snapshot)
        node.snapshot = -1
        self.version += 1

    def check(self, writing: list[int], loads: dict[Node, set[int]]) -> None:
        """Conservation: each snapshot has one place, and exactly those who will load one hold it.

        ``writing``: named by rows in flight; ``loads``: sequences that begin behind each node."""
        kept = [node.snapshot for node in self._kept]
        if sorted((*self._free, *writing, *kept)) != list(range(self.total)):
            raise self._log.broken("snapshots", "a snapshot is lost, or has two holders")
        if set(writing) != self._writing:
            raise self._log.broken("snapshots", "snapshots and the rows in flight disagree")
        if {node: seqs for node, seqs in self._kept.items() if seqs} != loads:
            raise self._log.broken("snapshots", "holds and sequences disagree")
