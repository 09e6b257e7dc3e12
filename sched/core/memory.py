"""KV memory as sequences see it: blocks of their own, and blocks shared by the prefix cache.

Owns the block pool, the prefix cache and the count of host memory. A block a sequence shares is a
node it leases; any other block in its table is its own. Invariant: own blocks, nodes and free
blocks are all there is, each in one place.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import InternalError
from .blocks import BlockPool
from .prefix import Node, PrefixCache
from .sequences import Sequence
from .story import Log


class KvMemory:
    """``total`` blocks of ``size`` tokens; ``cached`` false: no block outlives its sequence.
    ``host``: blocks of preempted sequences that host memory may hold."""

    def __init__(self, total: int, size: int, cached: bool, host: int, log: Log) -> None:
        self.blocks = BlockPool(total, log)
        self.prefix = PrefixCache(self.blocks, size, log, cached)
        self.size = size
        self.host_total = host
        self.host_used = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now, if need be by forgetting cached ones."""
        return self.blocks.free + self.prefix.idle

    def need(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.size)

    def find(self, seq: Sequence, ident: int) -> list[Node]:
        """The cached prefix of ``seq`` under ``ident``; looked for again only when the cache or the
        sequence has changed (a long prompt may wait through many steps)."""
        asked = (self.prefix.version, ident, len(seq.tokens))
        if seq.sought != asked:
            seq.sought = asked
            seq.found = self.prefix.match(ident, seq.tokens)
        return seq.found

    def admit(self, seq: Sequence, found: list[Node]) -> None:
        """``seq`` begins (again) behind the prefix ``found`` for it."""
        self.prefix.lease(found, seq.id)
        seq.nodes = list(found)
        seq.found, seq.sought = [], None
        seq.blocks = [node.block for node in found]
        seq.computed = len(found) * self.size

    @property
    def host_free(self) -> int:
        return self.host_total - self.host_used

    def hold_host(self, seq: Sequence) -> int:
        """Room in host memory for what ``seq`` has computed; returns the blocks."""
        count = self.need(seq.computed)
        seq.host_tokens = seq.computed
        self.host_used += count
        return count

    def forget_host(self, seq: Sequence) -> None:
        """Nothing of ``seq`` is in host memory any more."""
        self.host_used -= self.need(seq.host_tokens)
        seq.host_tokens = 0

    def missing(self, seq: Sequence, tokens: int) -> int:
        """Blocks ``seq`` lacks to hold ``tokens`` tokens, beyond those that can be had."""
        return self.need(tokens) - len(seq.blocks) - self.available

    def grow(self, seq: Sequence, tokens: int) -> None:
        """Blocks for ``tokens`` tokens; the caller has checked :meth:`missing`."""
        count = self.need(tokens) - len(seq.blocks)
        if count > self.blocks.free:
            self.prefix.evict(count - self.blocks.free)
        for _ in range(count):
            seq.blocks.append(self.blocks.take())

    def publish(self, seq: Sequence) -> None:
        """What ``seq`` has computed, as far as blocks are full, may be read by others."""
        if not self.prefix.enabled:
            return
        size, nodes = self.size, seq.nodes
        for index in range(len(nodes), seq.computed // size):
            key = tuple(seq.tokens[index * size : (index + 1) * size])
            self.prefix.extend(seq.adapter_id, nodes, key, seq.blocks[index], seq.id)

    def give_back(self, seq: Sequence) -> None:
        """``seq`` leaves; what it has computed stays until the memory is wanted."""
        self.publish(seq)
        self.blocks.give_back(own_blocks(seq))
        self.prefix.release(seq.nodes, seq.id)
        seq.blocks = []
        seq.computed = 0

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Conservation: own blocks and nodes are exactly the held blocks, each once."""
        leases: dict[Node, set[int]] = {}
        held: list[int] = []
        host = 0
        for seq in seqs:
            host += self.need(seq.host_tokens)
            for node in seq.nodes:
                leases.setdefault(node, set()).add(seq.id)
            held += own_blocks(seq)
        self.blocks.check(held + self.prefix.check(leases))
        if host != self.host_used or host > self.host_total:
            raise InternalError("host blocks and holders disagree", subject="host memory")


def own_blocks(seq: Sequence) -> list[int]:
    """The blocks of ``seq`` that are no node's."""
    shared = len(seq.nodes)
    if not shared:
        return list(seq.blocks)
    pairs = zip(seq.nodes, seq.blocks, strict=False)
    return [block for node, block in pairs if node.block != block] + seq.blocks[shared:]
