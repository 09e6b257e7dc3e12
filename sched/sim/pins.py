"""The law of pins: who was pinned before a resize that succeeded is in a slot, pinned, after it.

Its own books: who is pinned when the pool is exchanged, from a snapshot, and which commands may
rightly change that before the resize is answered.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core import effects as fx
from ..core import events as ev
from ..core.snapshot import Stats
from .copies import Need

_Changing = ev.Unload | ev.Replace | ev.Swap | ev.Pin | ev.Load
_FOR_WANT_OF_ROOM = ("annex-exceeds-arena", "POOL_FULL")


class Pins:
    """``need(truth, law, what)`` reports."""

    def __init__(self, need: Need) -> None:
        self._need = need
        self._resizes: set[int] = set()
        #: Commands that may change what is pinned, or who is in its slot, not answered yet.
        self._open: dict[int, _Changing] = {}
        #: Who was pinned when the pool was exchanged last, and such commands since.
        self._pinned: set[str] = set()
        self._since: list[_Changing] = []
        self.checked = 0

    def see(self, event: ev.Event, effects: list[fx.Effect], stats: Callable[[], Stats]) -> None:
        match event:
            case ev.Resize(command):
                self._resizes.add(command)
            case ev.Unload() | ev.Replace() | ev.Swap() | ev.Pin() | ev.Load():
                self._open[event.command] = event
                self._since.append(event)
            case _:
                pass
        for effect in effects:
            match effect:
                case fx.Relayout():
                    self._pinned = {s.name for s in stats().slots if s.pinned and s.name}
                    self._since = list(self._open.values())
                case fx.Reply(command) if command in self._resizes:
                    self._answered(effect, stats())
                case fx.Reply(command):
                    self._open.pop(command, None)
                case _:
                    pass

    def _answered(self, reply: fx.Reply, stats: Stats) -> None:
        if any(isinstance(event, ev.Swap) for event in self._since):
            return  # a swap may take anybody's slot
        if reply.outcome == "resized":
            self.checked += len(self._pinned)
            changed = {event.name for event in self._since}
            kept = {s.name for s in stats.slots if s.pinned}
            lost = self._pinned - changed - kept
            self._need(not lost, "pins", f"{lost} lost by a resize that succeeded")
        elif reply.failure is not None and reply.failure.code == "pinned-not-back":
            more = any(isinstance(e, ev.Pin) or getattr(e, "pin", False) for e in self._since)
            room = reply.failure.found not in _FOR_WANT_OF_ROOM
            self._need(room or more, "pins", f"no room for {reply.failure.subject}")
