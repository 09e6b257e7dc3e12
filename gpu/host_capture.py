"""Work items of the host device, and the capture that records them as a graph.

What it owns: the nodes (one immutable object for each memset, copy or launch, with its arguments
copied) and `Capture`, the state of the one capture that may be active. A node knows how to check
itself against the heap and how to run; when it runs (now, at synchronisation, at replay) is the
host device's business.

Invariants: nodes never change after construction; a capture's node list is in call order, which
respects every event edge, so running it from front to back is a correct execution of the graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..errors import DeviceError
from .device import CaptureMode, Event, KernelSpec, Stream
from .host_memory import Block, Heap

MAX_NODES: Final = 1 << 17
"""Nodes one capture may record."""


class Node(Protocol):
    """One piece of device work."""

    def check(self, heap: Heap, *, running: bool) -> None:
        """Raise `DeviceError` if an address it names is not good now.

        ``running``: it is about to run.
        """
        ...

    def touches(self, heap: Heap) -> list[Block]:
        """The live blocks its addresses lie in."""
        ...

    def run(self) -> None:
        """Do it."""
        ...


def _blocks(heap: Heap, addresses: Iterable[int]) -> list[Block]:
    found = (heap.covers(addr) for addr in addresses)
    return [block for block in found if block is not None]


@dataclass(frozen=True, slots=True)
class MemsetNode:
    """Fill ``nbytes`` at ``addr``."""

    addr: int
    byte: int
    nbytes: int

    def check(self, heap: Heap, *, running: bool) -> None:
        """The range must be live device memory."""
        heap.find(self.addr, self.nbytes, "device")

    def touches(self, heap: Heap) -> list[Block]:
        """The block filled."""
        return _blocks(heap, (self.addr,))

    def run(self) -> None:
        """Fill the range."""
        ctypes.memset(self.addr, self.byte, self.nbytes)


@dataclass(frozen=True, slots=True)
class CopyNode:
    """Copy ``nbytes``; a side that is host memory is checked only if the device pinned it.

    ``payload`` holds the bytes of a pageable source, taken at the call.
    """

    dst: int
    src: int
    nbytes: int
    dst_device: bool
    src_device: bool
    payload: bytes | None = None

    def check(self, heap: Heap, *, running: bool) -> None:
        """Device sides must be live device memory; pinned sides live pinned memory."""
        if self.dst_device:
            heap.find(self.dst, self.nbytes, "device")
        elif heap.covers(self.dst) is not None:
            heap.find(self.dst, self.nbytes, "pinned")
        if self.src_device:
            heap.find(self.src, self.nbytes, "device")
        elif self.payload is None and heap.covers(self.src) is not None:
            heap.find(self.src, self.nbytes, "pinned")

    def touches(self, heap: Heap) -> list[Block]:
        """Both ends, where the device owns them."""
        return _blocks(heap, (self.dst, self.src))

    def run(self) -> None:
        """Copy the bytes (the interpreter lock is not held meanwhile)."""
        ctypes.memmove(
            self.dst, self.payload if self.payload is not None else self.src, self.nbytes
        )


@dataclass(frozen=True, slots=True)
class LaunchNode:
    """Call a host kernel."""

    spec: KernelSpec
    args: tuple[int | float, ...]
    allow_foreign: bool

    def check(self, heap: Heap, *, running: bool) -> None:
        """Every address argument must be live, every footprint range inside one allocation.

        The footprint may read tables that earlier work on the stream fills, so it is asked only
        when running.
        """
        try:
            for letter, value in zip(self.spec.params, self.args, strict=True):
                if letter == "p" and value:
                    self._find(heap, int(value), 0)
            if running and self.spec.footprint is not None:
                for addr, nbytes, _access in self.spec.footprint(self.args):
                    self._find(heap, addr, nbytes)
        except DeviceError as error:
            error.add_note(f"in the arguments of kernel {self.spec.name}")
            raise
        except Exception as error:  # a kernel is a program: named, never passed on
            raise DeviceError(
                f"the footprint raised {type(error).__name__}: {error}",
                code="launch-failed",
                subject=self.spec.name,
            ) from error

    def touches(self, heap: Heap) -> list[Block]:
        """The blocks of its address arguments."""
        pairs = zip(self.spec.params, self.args, strict=True)
        return _blocks(heap, (int(value) for letter, value in pairs if letter == "p"))

    def _find(self, heap: Heap, addr: int, nbytes: int) -> None:
        if self.allow_foreign and heap.covers(addr) is None:
            return
        heap.find(addr, nbytes)

    def run(self) -> None:
        """Call it; whatever it raises becomes ``launch-failed``."""
        assert self.spec.host is not None
        try:
            self.spec.host(*self.args)
        except DeviceError:
            raise
        except Exception as error:  # a kernel is a program: named, never passed on
            raise DeviceError(
                f"the kernel raised {type(error).__name__}: {error}",
                code="launch-failed",
                subject=self.spec.name,
            ) from error


@dataclass(slots=True)
class Capture:
    """The active capture.

    Each member stream carries a clock: for every member, how much of its captured work is known to
    be done before the next operation. Waiting for an event merges clocks; `unjoined` compares them
    at the end.
    """

    origin: Stream
    mode: CaptureMode
    thread: int = field(default_factory=threading.get_ident)
    nodes: list[Node] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    clocks: dict[Stream, dict[Stream, int]] = field(default_factory=dict)
    events: dict[Event, dict[Stream, int]] = field(default_factory=dict)
    broken: str | None = None

    def __post_init__(self) -> None:
        self.clocks[self.origin] = {self.origin: 0}

    def bans(self, thread: int) -> bool:
        """True if this thread may not make unsafe calls (allocation, synchronisation) now."""
        return self.mode == "global" or thread == self.thread

    def add(self, stream: Stream, node: Node, heap: Heap) -> None:
        """Record one node on a member stream. Code: capture-too-large."""
        if len(self.nodes) >= MAX_NODES:
            self.broken = self.broken or "too many nodes"
            raise DeviceError(
                "too many nodes in one capture", code="capture-too-large", expected=MAX_NODES
            )
        self.clocks[stream][stream] += 1
        self.nodes.append(node)
        for block in node.touches(heap):
            self.blocks[block.serial] = block

    def record(self, event: Event, stream: Stream) -> None:
        """Place an event inside the capture."""
        self.events[event] = dict(self.clocks[stream])

    def join(self, event: Event, stream: Stream) -> None:
        """Order ``stream`` after the event; a stream from outside becomes a member."""
        clock = self.clocks.setdefault(stream, {stream: 0})
        for member, done in self.events[event].items():
            clock[member] = max(clock.get(member, 0), done)

    def unjoined(self) -> Stream | None:
        """A member whose last work, or whose joining, the origin does not wait for."""
        known = self.clocks[self.origin]
        for member, clock in self.clocks.items():
            if known.get(member, -1) < clock[member]:
                return member
        return None


@dataclass(slots=True)
class HostGraph:
    """Captured nodes and the blocks they lie in; also an instantiated graph.

    ``valid_at`` is the heap's count of frees when the blocks were last found alive: while it has
    not moved, a replay need not look again.
    """

    label: str
    nodes: tuple[Node, ...]
    blocks: tuple[Block, ...]
    valid_at: int = -1

    def work(self) -> list[tuple[object, ...]]:
        """What each node does, whatever it does it to."""
        return [
            (LaunchNode, node.spec)
            if isinstance(node, LaunchNode)
            else (CopyNode, node.dst_device, node.src_device)
            if isinstance(node, CopyNode)
            else (type(node),)
            for node in self.nodes
        ]

    def check(self, heap: Heap, *, running: bool) -> None:
        """Every block the graph was captured with must still be that block."""
        if self.valid_at == heap.frees:
            return
        frees = heap.frees
        for block in self.blocks:
            if not block.live:
                raise DeviceError(
                    f"{self.label} touches freed memory",
                    code="use-after-free",
                    subject=block.label,
                )
        self.valid_at = frees


@dataclass(frozen=True, slots=True)
class ReplayNode:
    """One replay of a graph, as a piece of stream work."""

    graph: HostGraph
    heap: Heap
    checked: bool

    def check(self, heap: Heap, *, running: bool) -> None:
        """The blocks must be alive; each node is judged again just before it runs."""
        self.graph.check(heap, running=running)

    def touches(self, heap: Heap) -> list[Block]:
        """The blocks of the graph."""
        return list(self.graph.blocks)

    def run(self) -> None:
        """Run the nodes in capture order."""
        for node in self.graph.nodes:
            if self.checked:
                node.check(self.heap, running=True)
            node.run()
