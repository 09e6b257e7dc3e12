"""KV memory as sequences see it: blocks of their own, and blocks shared by the prefix cache.

Owns the block pool, the prefix cache, the snapshots of recurrent states and the count of host
memory. A block a sequence shares is a
node it leases; any other block in its table is its own. Invariant: own blocks, nodes and free
blocks are all there is, each in one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ...errors import InternalError
from .blocks import BlockPool
from .config import CoreConfig
from .effects import Row
from .prefix import Node, PrefixCache
from .recurrent import Snapshots
from .sequences import Sequence
from .story import Log


class KvMemory:
    """Blocks of ``size`` tokens. ``host_total``, ``host_used``: blocks of preempted sequences that
    host memory may hold, and does; a recurrent state counts as ``state_blocks`` of them."""

    def __init__(self, config: CoreConfig, log: Log) -> None:
        self.size = size = config.block_size
        self.recurrent = config.recurrent
        self.blocks = BlockPool(config.num_blocks, log)
        self.snapshots = Snapshots(config, log)
        shares = config.shares_prefixes
        self.prefix = PrefixCache(self.blocks, size, log, shares, self.snapshots.forget)
        self.host_total = config.spill_blocks
        self.host_used = 0
        self._state_blocks = config.state_blocks if config.recurrent else 0

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
        asked = (self.prefix.version, self.snapshots.version, ident, len(seq.tokens))
        if seq.sought != asked:
            seq.sought = asked
            found = self.prefix.match(ident, seq.tokens)
            seq.found = found[: self._usable(seq, found)] if self.recurrent else found
        return seq.found

    def _usable(self, seq: Sequence, found: list[Node]) -> int:
        """How many of ``found`` a sequence with a state may begin behind."""
        if seq.host_tokens:  # its state is what it was behind these tokens, and comes back as such
            return seq.host_tokens // self.size
        return self.resumable(found)

    def resumable(self, nodes: Seq[Node]) -> int:
        """How many of ``nodes`` there are up to the deepest that has a snapshot."""
        return max((i for i, node in enumerate(nodes, 1) if node.snapshot >= 0), default=0)

    def admit(self, seq: Sequence, found: list[Node]) -> None:
        """``seq`` begins (again) behind the prefix ``found`` for it."""
        self.prefix.lease(found, seq.id)
        seq.nodes = list(found)
        seq.found, seq.sought = [], None
        seq.blocks = [node.block for node in found]
        seq.computed = len(found) * self.size
        if self.recurrent and found and not seq.host_tokens:
            seq.resume = found[-1]
            self.snapshots.hold(found[-1], seq.id)

    def begun(self, seq: Sequence) -> None:
        """The row that loads the state ``seq`` begins with is over, or will not be."""
        if seq.resume is not None:
            self.snapshots.release(seq.resume, seq.id)
            seq.resume = None

    def copies(self, seq: Sequence, end: int) -> tuple[int, int]:
        """The snapshots that the row of ``seq`` up to ``end`` loads and saves (-1: none)."""
        load = seq.resume.snapshot if seq.resume is not None else -1
        save = self.snapshots.take(seq.prompt_len, end) if self.prefix.enabled else -1
        return load, save

    def keep(self, seq: Sequence, row: Row) -> None:
        """``row`` of ``seq`` is over, and with it ``row.save`` written."""
        if row.save < 0:
            return
        if not self.prefix.enabled:
            self.snapshots.give_back(row.save)
            return
        self.publish(seq)
        end = row.start + len(row.tokens)
        self.snapshots.keep(seq.nodes[end // self.size - 1], row.save)

    @property
    def host_free(self) -> int:
        return self.host_total - self.host_used

    def hold_host(self, seq: Sequence) -> int:
        """Room in host memory for what ``seq`` has computed; returns its KV blocks."""
        seq.host_tokens = seq.computed
        self.host_used += self.host_cost(seq.computed)
        return self.need(seq.computed)

    def host_cost(self, tokens: int) -> int:
        """Host blocks for a sequence of ``tokens`` tokens, its state included."""
        return self.need(tokens) + self._state_blocks if tokens else 0

    def forget_host(self, seq: Sequence) -> None:
        """Nothing of ``seq`` is in host memory any more."""
        self.host_used -= self.host_cost(seq.host_tokens)
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
        self.begun(seq)
        self.blocks.give_back(own_blocks(seq))
        self.prefix.release(seq.nodes, seq.id)
        seq.blocks = []
        seq.computed = 0

    def check(self, seqs: Iterable[Sequence], rows: Iterable[Row]) -> None:
        """Conservation: own blocks and nodes are exactly the held blocks, each once; snapshots
        likewise. ``rows``: those in flight."""
        leases: dict[Node, set[int]] = {}
        loads: dict[Node, set[int]] = {}
        held: list[int] = []
        host = 0
        for seq in seqs:
            host += self.host_cost(seq.host_tokens)
            if seq.resume is not None:
                loads.setdefault(seq.resume, set()).add(seq.id)
            for node in seq.nodes:
                leases.setdefault(node, set()).add(seq.id)
            held += own_blocks(seq)
        self.blocks.check(held + self.prefix.check(leases))
        self.snapshots.check([row.save for row in rows if row.save >= 0], loads)
        if host != self.host_used or host > self.host_total:
            raise InternalError("host blocks and holders disagree", subject="host memory")


def own_blocks(seq: Sequence) -> list[int]:
    """The blocks of ``seq`` that are no node's."""
    shared = len(seq.nodes)
    if not shared:
        return list(seq.blocks)
    pairs = zip(seq.nodes, seq.blocks, strict=False)
    return [block for node, block in pairs if node.block != block] + seq.blocks[shared:]
