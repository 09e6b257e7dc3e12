"""Cutting a failing scenario down: fewer actions and faults, the same broken law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from .scenario import Scenario
from .world import Outcome

T = TypeVar("T")
#: Runs one scenario; :func:`.world.run_scenario`, or one that breaks the core on purpose.
Run = Callable[[Scenario], Outcome]


def minimise(scenario: Scenario, law: str, run: Run, limit: int = 300) -> Scenario:
    """The smallest scenario found in ``limit`` runs that still breaks ``law`` (delta debugging:
    drop halves, then quarters, ... then single items; Zeller and Hildebrandt 2002)."""
    runs = 0

    def fails(candidate: Scenario) -> bool:
        nonlocal runs
        runs += 1
        found = run(candidate).violation
        return found is not None and found.law == law

    def cut(items: Sequence[T], make: Callable[[tuple[T, ...]], Scenario]) -> tuple[T, ...]:
        kept = tuple(items)
        size = max(1, len(kept) // 2)
        while kept and runs < limit:
            start, shrunk = 0, False
            while start < len(kept) and runs < limit:
                fewer = kept[:start] + kept[start + size :]
                if fails(make(fewer)):
                    kept, shrunk = fewer, True
                else:
                    start += size
            if size == 1 and not shrunk:
                break
            size = max(1, size // 2)
        return kept

    faults = cut(scenario.faults, lambda f: msgspec.structs.replace(scenario, faults=f))
    scenario = msgspec.structs.replace(scenario, faults=faults)
    actions = cut(scenario.actions, lambda a: msgspec.structs.replace(scenario, actions=a))
    return msgspec.structs.replace(scenario, actions=actions)
