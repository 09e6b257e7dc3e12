"""Streams, events and captures of the fake driver: the laziest order a real one could show.

What it owns: for each stream a queue and two counts; an event is a place in one stream. `drain`
runs a stream up to a place and, of other streams, exactly what that needs.

Invariants: a stream runs in call order; waits name places queued before them, so they never form a
circle; after a failure nothing more runs (the context is lost).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from .overlap import Trail

QUERIES_BEFORE_DONE: Final = 2
"""Queries that find pending work unfinished before it is run: shows code that never waits."""
PENDING_LIMIT: Final = 4096
"""Pieces of work one stream may hold; more runs the oldest, as a full driver queue blocks."""


@dataclass(frozen=True)
class Work:
    """One piece of device work; ``kind`` and ``what`` name it for graphs and errors."""

    kind: str
    what: object
    run: Callable[[], None]


@dataclass(eq=False)
class Stream:
    """One stream."""

    handle: int
    queue: deque[Work | Wait] = field(default_factory=deque)
    queued: int = 0
    done: int = 0
    queries: int = 0
    capture: Capture | None = None
    trail: Trail = field(default_factory=Trail)

    def push(self, item: Work | Wait) -> None:
        """Queue one piece."""
        if len(self.queue) >= PENDING_LIMIT:
            drain(self, self.done + 1)
        self.queue.append(item)
        self.queued += 1


@dataclass(frozen=True)
class Wait:
    """A place another stream must have passed."""

    stream: Stream
    place: int


@dataclass(eq=False)
class Event:
    """A place in a stream, or in a capture."""

    handle: int
    stream: Stream | None = None
    place: int = 0
    queries: int = 0
    capture: Capture | None = None
    clock: dict[int, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if the place was passed or never set."""
        return self.stream is None or self.stream.done >= self.place


@dataclass(eq=False)
class Capture:
    """One capture: its nodes in call order, and for each member stream what it knows of others."""

    origin: Stream
    mode: int
    nodes: list[Work] = field(default_factory=list)
    members: dict[int, Stream] = field(default_factory=dict)
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    trails: dict[int, Trail] = field(default_factory=dict)
    invalid: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def join(self, stream: Stream) -> dict[int, int]:
        """Make a stream a member; its clock."""
        stream.capture = self
        self.members[stream.handle] = stream
        self.trails.setdefault(stream.handle, Trail())
        return self.clocks.setdefault(stream.handle, {stream.handle: 0})

    def add(self, stream: Stream, node: Work) -> None:
        """Record a node on a member stream."""
        self.clocks[stream.handle][stream.handle] += 1
        self.nodes.append(node)

    def unjoined(self) -> bool:
        """True if a member's last work is not behind the origin's end."""
        known = self.clocks[self.origin.handle]
        return any(known.get(m, -1) < clock[m] for m, clock in self.clocks.items())

    def finish(self) -> None:
        """Set the member streams free."""
        for stream in self.members.values():
            stream.capture = None


@dataclass(frozen=True)
class Recorded:
    """What a capture recorded: its nodes in call order, and the trail of each member stream."""

    nodes: tuple[Work, ...]
    trails: tuple[Trail, ...]


def drain(stream: Stream, place: int) -> None:
    """Run a stream until ``place`` pieces are done; raises what the work raises."""
    stack = [(stream, place)]
    while stack:
        current, upto = stack[-1]
        if current.done >= upto:
            stack.pop()
            continue
        item = current.queue[0]
        if isinstance(item, Wait):
            if item.stream.done < item.place:
                stack.append((item.stream, item.place))
                continue
        else:
            item.run()
        current.queue.popleft()
        current.done += 1
