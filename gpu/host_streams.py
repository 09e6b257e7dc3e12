"""Streams and events of a checked host device: work that waits until something needs it.

What it owns: for each stream a queue of work and two counts, ``queued`` and ``done``; an event is a
place in one stream, passed when ``done`` reaches it. `drain` runs a stream up to a place, and with
it exactly the parts of other streams it waits for: the laziest order CUDA could show, so that a
missing synchronisation or a missing event is seen by every test instead of by luck.

Invariants: a stream runs in call order; a wait names a place queued before the wait itself, so
places never wait in a circle; after a failure the stream's remaining work is dropped and counts as
done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from .host_capture import Capture, Node
from .host_memory import Heap

QUERIES_BEFORE_DONE: Final = 2
"""Queries that find pending work unfinished before it is run: shows code that never waits."""

PENDING_LIMIT: Final = 4096
"""Pieces of work one stream may hold."""


@dataclass(slots=True, eq=False)
class Lane:
    """One stream."""

    label: str
    queue: deque[Node | Wait] = field(default_factory=deque)
    queued: int = 0
    done: int = 0
    queries: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """A place another stream must have passed."""

    lane: Lane
    place: int


@dataclass(slots=True, eq=False)
class EventState:
    """One event: its place, or the capture it was last recorded in."""

    label: str
    lane: Lane | None = None
    place: int = 0
    capture: Capture | None = None
    queries: int = 0

    @property
    def passed(self) -> bool:
        """True if the place has been passed, or was never set."""
        return self.lane is None or self.lane.done >= self.place


def enqueue(lane: Lane, item: Node | Wait, heap: Heap) -> None:
    """Queue one piece of work; a full queue runs its oldest first, as a driver's does."""
    if len(lane.queue) >= PENDING_LIMIT:
        drain(lane, lane.done + 1, heap)
    if not lane.queue:
        lane.queries = 0
    lane.queue.append(item)
    lane.queued += 1


def drain(lane: Lane, place: int, heap: Heap) -> None:
    """Run ``lane`` until ``place`` items are done, and first what it waits for elsewhere.

    Raises:
        DeviceError: what the work raised; the rest of the failing stream is dropped.
    """
    stack = [(lane, place)]  # not recursion: two streams may wait for each other thousands of times
    while stack:
        current, upto = stack[-1]
        if current.done >= upto:
            stack.pop()
            continue
        item = current.queue[0]
        if isinstance(item, Wait):
            if item.lane.done < item.place:
                stack.append((item.lane, item.place))
                continue
        else:
            try:
                item.check(heap, running=True)
                item.run()
            except BaseException:
                current.queue.clear()
                current.done = current.queued
                raise
        current.queue.popleft()
        current.done += 1
