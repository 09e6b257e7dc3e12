"""Events and effects as text, one line each, readable as a story."""

from __future__ import annotations

from typing import Any

from ..core import effects as fx
from ..core import events as ev


def _fields(value: Any) -> str:
    words = []
    for name in value.__struct_fields__:
        item = getattr(value, name)
        if item is None or item == () or item == "" or (name == "annex" and not item):
            continue
        if isinstance(item, ev.Failure):
            words.append(f"{item.kind}:{item.code}")
        elif name == "adapter_id":
            words.append(f"id={item:016x}" if item else "id=base")
        elif name == "prompt":
            words.append(f"prompt={len(item)}")
        elif isinstance(item, float):
            words.append(f"{name}={item:.3f}")
        else:
            words.append(f"{name}={item}")
    return " ".join(words)


def _row(row: fx.Row) -> str:
    where = "base" if row.slot < 0 else f"slot{row.slot}"
    end = row.start + len(row.tokens)
    fed = f"<{fx.fed(row.tokens[0])}" if row.tokens[0] < 0 else ""
    fed += f"<#{row.load}" if row.load >= 0 else ""
    fed += f">#{row.save}" if row.save >= 0 else ""
    return f"s{row.seq}@{where}[{row.start}:{end}]{fed}{'*' if row.sample else ''}"


def event_text(event: ev.Event) -> str:
    """One line; of a step's results only how many rows sampled or failed."""
    if isinstance(event, ev.StepDone):
        rows = " ".join(
            f"s{r.seq}:{r.failure.code}" if r.failure else f"s{r.seq}:{r.token}"
            for r in event.rows
            if r.failure or r.token >= 0
        )
        return f"StepDone {event.step} {rows}".rstrip()
    return f"{type(event).__name__} {_fields(event)}".rstrip()


def effect_text(effect: fx.Effect) -> str:
    """One line; ``*`` marks a row that samples, ``<i`` one fed by row ``i`` of the step before,
    ``<#n`` and ``>#n`` one that loads and saves snapshot ``n``."""
    if isinstance(effect, fx.RunStep):
        return f"RunStep {effect.step} " + " ".join(_row(row) for row in effect.rows)
    return f"{type(effect).__name__} {_fields(effect)}".rstrip()


class Story:
    """A shell observer that keeps the story: ``> event`` and the ``< effects`` it caused. Events
    of the clock and the planner that caused nothing are left out."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        quiet = isinstance(event, (ev.Plan, ev.Tick))
        if quiet and not effects:
            return
        self.lines.append(f"{now:9.4f} > {event_text(event)}")
        self.lines += [f"          < {effect_text(effect)}" for effect in effects]

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"
