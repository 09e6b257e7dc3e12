"""Waiting lanes: who waits, in which order. One lane per (priority, adapter); lanes of one priority
take turns, so that a busy adapter cannot starve a quiet one, nor base.

Owns the order of waiting sequences. A lane whose adapter is not resident is parked, so that the
planner's cost does not grow with what cannot run yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .sequences import Sequence

Key = tuple[int, str | None]


class Lane:
    __slots__ = ("front", "items", "key")

    def __init__(self, key: Key) -> None:
        self.key = key
        #: Preempted sequences: they hold leases, so they go first; last preempted goes first.
        self.front: dict[int, Sequence] = {}
        self.items: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Sequences waiting in this lane; an empty lane is dropped at once."""
        return len(self.front) + len(self.items)

    def head(self) -> Sequence:
        if self.front:
            return self.front[next(reversed(self.front))]
        return self.items[next(iter(self.items))]


class Lanes:
    """``ready``: per priority, lanes in turn order. ``parked``: adapter name -> its lanes."""

    def __init__(self) -> None:
        self._lanes: dict[Key, Lane] = {}
        self._ready: dict[int, OrderedDict[Key, Lane]] = {}
        self._parked: dict[str, dict[Key, Lane]] = {}
        self._wanted: dict[str, int] = {}
        self.waiting = 0
        #: An adapter is wanted no more: its slot may be given to another.
        self.changed = False

    @property
    def ready(self) -> bool:
        """Whether a lane with somebody in it is not parked."""
        return bool(self._ready)

    def wants(self, name: str) -> bool:
        """Whether a sequence without a lease waits for this adapter."""
        return name in self._wanted

    def add(self, seq: Sequence, *, front: bool = False) -> None:
        key = (seq.priority, seq.adapter)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
            if seq.adapter in self._parked and not front:
                self._parked[seq.adapter][key] = lane
            else:
                self._ready_level(key[0])[key] = lane
        elif front and not self._is_ready(lane):
            self._move_to_ready(lane)
        (lane.front if front else lane.items)[seq.id] = seq
        self.waiting += 1
        if not front and seq.adapter is not None:
            self._wanted[seq.adapter] = self._wanted.get(seq.adapter, 0) + 1

    def remove(self, seq: Sequence) -> None:
        lane = self._lanes[(seq.priority, seq.adapter)]
        if lane.front.pop(seq.id, None) is None:
            del lane.items[seq.id]
            if seq.adapter is not None:
                self._wanted[seq.adapter] -= 1
                if not self._wanted[seq.adapter]:
                    del self._wanted[seq.adapter]
                    self.changed = True
        self.waiting -= 1
        if not lane:
            self._drop(lane)

    def heads(self) -> Iterator[tuple[Lane, Sequence]]:
        """Lane heads in the order they should be tried: highest priority (lowest number) first,
        lanes of one priority in turn, each once. Before asking for the next, the caller parks the
        lane, empties it, or says that it took its turn."""
        for priority in sorted(self._ready):
            for _ in range(len(self._ready.get(priority, ()))):
                level = self._ready.get(priority)
                if level is None:
                    break
                lane = next(iter(level.values()))
                yield lane, lane.head()

    def leased(self) -> list[tuple[Lane, Sequence]]:
        """Heads of the lanes whose first sequence holds a lease, in the same order."""
        levels = [self._ready[priority] for priority in sorted(self._ready)]
        return [(lane, lane.head()) for level in levels for lane in level.values() if lane.front]

    def took_turn(self, lane: Lane) -> None:
        """The lane had a sequence admitted: it goes behind the others of its priority."""
        level = self._ready.get(lane.key[0])
        if level is not None and lane.key in level:
            level.move_to_end(lane.key)

    def park(self, lane: Lane) -> None:
        """The lane's adapter is not resident: do not offer it until :meth:`unpark`."""
        name = lane.key[1]
        assert name is not None, "base is never parked"
        level = self._ready[lane.key[0]]
        del level[lane.key]
        if not level:
            del self._ready[lane.key[0]]
        self._parked.setdefault(name, {})[lane.key] = lane

    def unpark(self, name: str) -> None:
        for lane in self._parked.pop(name, {}).values():
            self._ready_level(lane.key[0])[lane.key] = lane

    def of_adapter(self, name: str) -> list[Sequence]:
        """Every waiting sequence of one adapter."""
        return [
            s
            for key, lane in self._lanes.items()
            if key[1] == name
            for s in (*lane.front.values(), *lane.items.values())
        ]

    def parked_names(self) -> list[str]:
        return list(self._parked)

    def check(self) -> int:
        """Counts agree and every lane is in exactly one place; returns the number waiting."""
        ready = {k for level in self._ready.values() for k in level}
        parked = {k for lanes in self._parked.values() for k in lanes}
        assert not ready & parked and ready | parked == set(self._lanes)
        assert all(len(lane) for lane in self._lanes.values())
        total = sum(len(lane) for lane in self._lanes.values())
        assert total == self.waiting
        return total

    def _ready_level(self, priority: int) -> OrderedDict[Key, Lane]:
        return self._ready.setdefault(priority, OrderedDict())

    def _is_ready(self, lane: Lane) -> bool:
        return lane.key in self._ready.get(lane.key[0], ())

    def _move_to_ready(self, lane: Lane) -> None:
        name = lane.key[1]
        assert name is not None
        lanes = self._parked[name]
        del lanes[lane.key]
        if not lanes:
            del self._parked[name]
        self._ready_level(lane.key[0])[lane.key] = lane

    def _drop(self, lane: Lane) -> None:
        del self._lanes[lane.key]
        priority, name = lane.key
        level = self._ready.get(priority)
        if level is not None and lane.key in level:
            del level[lane.key]
            if not level:
                del self._ready[priority]
            return
        assert name is not None
        lanes = self._parked[name]
        del lanes[lane.key]
        if not lanes:
            del self._parked[name]
