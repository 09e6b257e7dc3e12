"""What the tests of planted faults share: a core that was broken on purpose must not go unseen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rota.sched.core.core import Core
from rota.sched.core.state import State
from rota.sched.sim.scenario import Scenario, scenario_of
from rota.sched.sim.world import run_scenario

SEEDS = 120


def must_be_caught(
    name: str,
    patch: pytest.MonkeyPatch,
    seeds: Sequence[int] = range(SEEDS),
    make: Callable[[int], Scenario] = scenario_of,
) -> None:
    """Run seeds on the broken core until a law is broken; its own check is off, so that the
    simulator's independent laws are what is tested."""
    patch.setattr(Core, "check", lambda self: None)
    for seed in seeds:
        if run_scenario(make(seed)).violation is not None:
            return
    pytest.fail(f"{name} went unseen through {len(seeds)} seeds")


def leases_taken_away_are_not_missed(patch: pytest.MonkeyPatch) -> None:
    """A sequence whose lease a planted fault took gives none back, so that the core itself does not
    stumble over it."""
    real = State.give_lease_back

    def give_lease_back(self: State, seq: Any) -> None:
        if seq.leased and seq.slot >= 0 and seq.id not in self.slots[seq.slot].leases:
            seq.leased, seq.slot = False, -1
            return
        real(self, seq)

    patch.setattr(State, "give_lease_back", give_lease_back)
