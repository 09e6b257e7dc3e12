"""A recorded trace through today's core: the same decisions, or the first difference, named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ...errors import InternalError
from ..core import Core, CoreConfig
from ..core import effects as fx
from ..core import events as ev
from .record import digest_of, read_trace
from .story import effect_text, event_text


class Difference(msgspec.Struct, frozen=True):
    """Where today's core decided otherwise. ``recorded``: effects of then, if they were kept."""

    line: int
    now: float
    event: ev.Event
    effects: tuple[fx.Effect, ...]
    recorded: tuple[fx.Effect, ...] | None
    broken: str | None = None

    def text(self) -> str:
        """For people: the event, and the first effect that differs (or all of today's)."""
        lines = [f"line {self.line}, {self.now:.6f} s: {event_text(self.event)}"]
        if self.broken is not None:
            lines.append(f"  today: {self.broken}")
        elif self.recorded is None:
            lines += [f"  today: {effect_text(e)}" for e in self.effects] or ["  today: nothing"]
            lines.append("  recorded: another digest (record with effects to see them)")
        else:
            pairs = zip(self.effects, self.recorded, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            at = min(len(self.effects), len(self.recorded)) if same is None else same
            for who, effects in (("today", self.effects), ("recorded", self.recorded)):
                one = effect_text(effects[at]) if at < len(effects) else "nothing"
                lines.append(f"  {who}, effect {at}: {one}")
        return "\n".join(lines)


class Replayed(msgspec.Struct, frozen=True):
    """``events`` that gave the same effects; ``difference`` if one did not."""

    events: int
    difference: Difference | None


def replay(
    path: str | Path,
    core: Callable[[CoreConfig], Core] = Core,
    watch: Callable[[ev.Event, list[fx.Effect], float], None] | None = None,
) -> Replayed:
    """Feed the trace's events at their recorded times; stop at the first difference.

    Raises RequestError ``bad-trace`` for a file that is no trace.
    """
    header, lines = read_trace(path)
    today = core(header.config)
    count = 0
    for number, line in lines:
        event = line.event
        assert event is not None
        try:
            effects = today.handle(event, line.now)
        except InternalError as error:
            broken = Difference(number, line.now, event, (), line.effects, str(error))
            return Replayed(count, broken)
        if watch is not None:
            watch(event, effects, line.now)
        if digest_of(effects) != line.digest:
            found = Difference(number, line.now, event, tuple(effects), line.effects)
            return Replayed(count, found)
        count += 1
    return Replayed(count, None)
