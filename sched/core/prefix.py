"""The prefix cache: KV blocks of tokens computed before, to be read again instead of recomputed.

A radix tree over full blocks, one root per ``adapter_id`` (0 = base), so a replaced version is
never hit. Owns its nodes and, through each, one block of the pool. Sequences lease nodes; a node's
leases are a *set of sequence ids*. Invariants: who leases a node leases every node above it; so a
node nobody leases has nobody below it either, its block counts as free, and in the order in which
nodes lost their last lease the one at the front is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from .blocks import BlockPool
from .story import Log

Key = tuple[int, ...]


class Node:
    """One block: the tokens in it (``key``) behind those of the nodes above it. A root holds no
    block, and its key is the ``adapter_id``. ``snapshot``: of the recurrent state behind its
    tokens, or -1 (see `recurrent`)."""

    __slots__ = ("block", "children", "key", "leases", "parent", "snapshot")

    def __init__(self, key: Key, block: int, parent: Node | None) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.leases: set[int] = set()
        self.snapshot = -1


class PrefixCache:
    """``size`` tokens a block. ``enabled`` false: nothing is found and nothing is kept.
    ``forget`` is called with every node that goes."""

    def __init__(
        self,
        blocks: BlockPool,
        size: int,
        log: Log,
        enabled: bool,
        forget: Callable[[Node], None] = lambda node: None,
    ) -> None:
        self.enabled = enabled
        self._blocks = blocks
        self._size = size
        self._log = log
        self._forget = forget
        self._roots: dict[int, Node] = {}
        #: Nodes nobody leases, in the order they lost their last lease.
        self._idle: OrderedDict[Node, None] = OrderedDict()
        #: Changes whenever a node comes or goes: until then, what was found stays what is found.
        self.version = 0

    @property
    def idle(self) -> int:
        """Blocks that :meth:`evict` can give back."""
        return len(self._idle)

    def match(self, ident: int, tokens: Sequence[int]) -> list[Node]:
        """The longest known chain of full blocks ``tokens`` begin with, short of the last token:
        that one is always computed, so that there are logits to sample from."""
        node = self._roots.get(ident)
        found: list[Node] = []
        if node is None:
            return found
        size = self._size
        for start in range(0, len(tokens) - size, size):
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            found.append(node)
        return found

    def lease(self, nodes: Sequence[Node], seq: int) -> None:
        for node in nodes:
            if seq in node.leases:
                raise self._broken(node, f"seq {seq} leases a node twice")
            if not node.leases:
                del self._idle[node]
            node.leases.add(seq)

    def extend(self, ident: int, chain: list[Node], key: Key, block: int, seq: int) -> None:
        """``seq``, which leases ``chain``, has computed ``key`` behind it into ``block``: lease the
        node that says so. It is another's block if another sequence was first; then ``block`` stays
        the sequence's own."""
        if len(key) != self._size:
            raise self._log.broken("prefix cache", f"{len(key)} tokens are no full block")
        if chain:
            parent = chain[-1]
        else:
            root = self._roots.get(ident)
            parent = root if root is not None else Node((ident,), -1, None)
            self._roots[ident] = parent
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, block, parent)
            self.version += 1
        elif not node.leases:
            del self._idle[node]
        node.leases.add(seq)
        chain.append(node)

    def release(self, nodes: list[Node], seq: int) -> None:
        """Give leases back, the deepest first, so that a leaf goes idle before its parent."""
        for node in reversed(nodes):
            if seq not in node.leases:
                raise self._broken(node, f"seq {seq} releases a node it does not lease")
            node.leases.remove(seq)
            if not node.leases:
                self._idle[node] = None
                if not self.enabled:
                    self._remove(node)
        nodes.clear()

    def evict(self, count: int) -> int:
        """Give back up to ``count`` blocks, least recently used first; returns how many."""
        done = 0
        while done < count and self._idle:
            self._remove(next(iter(self._idle)))
            done += 1
        return done

    def drop(self, ident: int) -> None:
        """The version is over: nobody leases it and nobody ever will."""
        root = self._roots.get(ident)
        if root is None:
            return
        nodes = list(_below(root))
        for node in reversed(nodes):  # leaves first
            self._remove(node)

    def drop_idle(self) -> None:
        """Forget all that nobody leases (its memory may not be what it was)."""
        self.evict(len(self._idle))

    def disable(self) -> None:
        """Nothing is kept from now on; what is leased goes with its last lease."""
        self.enabled = False
        self.drop_idle()

    def _remove(self, node: Node) -> None:
        if node.leases or node.children:
            raise self._broken(node, "a node in use is freed")
        parent = node.parent
        assert parent is not None
        del self._idle[node], parent.children[node.key]
        self.version += 1
        node.parent = None
        self._forget(node)
        self._blocks.give_back([node.block])
        if parent.parent is None and not parent.children:
            del self._roots[parent.key[0]]

    def _broken(self, node: Node, what: str) -> Exception:
        return self._log.broken("prefix cache", f"{what} (block {node.block}: {node.leases})")

    def check(self, leases: dict[Node, set[int]]) -> list[int]:
        """Leases equal lessees, idle nodes are those without; returns the blocks of all nodes."""
        nodes = [n for root in self._roots.values() for n in _below(root)]
        for node in nodes:
            if node.leases != leases.get(node, set()):
                raise self._broken(node, "leases and holders disagree")
            if (node in self._idle) == bool(node.leases):
                raise self._broken(node, "idle and leases disagree")
            above = node.parent
            assert above is not None and above.children.get(node.key) is node
            if above.parent is not None and not node.leases <= above.leases:
                raise self._broken(above, "a lease below, none here")
        if len(leases.keys() | self._idle.keys()) != len(nodes):
            raise self._log.broken("prefix cache", "a node is held and not in the tree")
        return [n.block for n in nodes]


def _below(root: Node) -> Iterator[Node]:
    """Every node under ``root``, parents before children."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
